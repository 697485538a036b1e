"""bench/lab.py: the runs of a question are comparable, and the figures are right."""

import json
import math
import shutil
import statistics
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import warm
from conftest import REPO, TINY, call, metrics

from bench import lab, lab_results
from bench.lab_results import Result

QUESTION = """
question = "Does a higher rate help?"
baseline = "low"
variants = {"high": {"lr": 1e-2}, "low": {"lr": 1e-3}}
lengths = (0.5, 1)
"""


def ask(folder: Path, data: Path, question: str, *options: str, seeds: str = "1 2") -> Path:
    """Answer a question with tiny runs in folder/out; return this folder."""
    path = folder / "question.py"
    path.write_text(question)
    places = [f"--data_dir={data}", f"--out_dir={folder / 'out'}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab, "Popen", warm.Popen)
        call(lab.main, *TINY, str(path), *places, "--seeds", *seeds.split(), *options)
    return folder / "out"


def trained(out: Path) -> dict[str, int]:
    """Return when each run has written its last line."""
    return {path.parent.name: path.stat().st_mtime_ns for path in out.glob("*/metrics.jsonl")}


@pytest.fixture(scope="module")
def answered(tiny_data, tmp_path_factory) -> Path:
    """A folder with the question, its runs in out/, and what lab.py has written about them."""
    folder = tmp_path_factory.mktemp("lab")
    files = [f"--{kind}={folder / 'r'}.{kind}" for kind in ("json", "png")]
    ask(folder, tiny_data, QUESTION, *files)
    return folder


def rows_of(answered: Path) -> list[tuple[dict, list[Path]]]:
    """Return each row of the report, with the folders of its runs, one for each seed."""
    facts = json.loads((answered / "r.json").read_text())
    folders = {row["variant"]: [] for row in facts["rows"]}
    for run in facts["runs"]:
        folders[run["variant"]].append(Path(run["folder"]))
    return [(row, folders[row["variant"]]) for row in facts["rows"]]


def settings(run: Path) -> dict:
    return json.loads((run / "metrics.jsonl").open().readline())["settings"]


@pytest.mark.slow
def test_only_what_is_changed_or_unfinished_is_trained(answered, tiny_data, tmp_path):
    out = shutil.copytree(answered / "out", tmp_path / "out")
    times = trained(out)
    killed = next(out.glob("*/ckpt/step_00000008"))  # the process that wrote this, before it
    shutil.rmtree(killed)
    records = killed.parents[1] / "metrics.jsonl"
    records.write_text(records.read_text().partition('{"step": 8')[0])
    ask(tmp_path, tiny_data, QUESTION.replace("high", "higher"))  # only the name of a variant
    went_on = trained(out).items() - times.items()
    assert [run for run, _ in went_on] == [records.parent.name]
    assert metrics(records.parent, "loss").keys() == set(range(1, 9))
    times = trained(out)
    ask(tmp_path, tiny_data, QUESTION.replace("1e-2", "2e-2"))
    added = trained(out).items() - times.items()
    assert [settings(out / run)["lr"] for run, _ in added] == [2e-2, 2e-2]
    assert len(trained(out)) == len(times) + 2


@pytest.mark.slow
def test_the_figures_are_those_of_the_runs(answered):
    finals = []
    for (row, runs), length in zip(rows_of(answered), (8, 8, 4), strict=True):
        for run in runs:  # all of val.bin decides, after the whole decay of the rate
            assert settings(run)["eval_tokens"] == 0 and max(metrics(run, "val_loss")) == length
            assert metrics(run, "lr")[length] == pytest.approx(0.1 * settings(run)["lr"])
        finals.append([metrics(run, "val_loss")[length] for run in runs])
        assert row["losses"] == dict(zip("12", finals[-1], strict=True))
        assert row["tokens"] == 256 * length
    (low, low_runs), (high, high_runs), (half, _) = rows_of(answered)
    assert [row["variant"] for row in (low, high, half)] == ["low", "high", "low, 0.5 x as long"]
    # Variants of a seed begin with the same weights, and read the same windows.
    starts = [[metrics(run, "loss")[1] for run in runs] for runs in (low_runs, high_runs)]
    assert starts[0] == starts[1] and len({*starts[0]}) == 2
    differences = [b - a for a, b in zip(*finals[:2], strict=True)]
    assert high["difference"] == pytest.approx(statistics.fmean(differences))
    assert high["difference_error"] == pytest.approx(statistics.stdev(differences) / math.sqrt(2))
    assert (answered / "r.png").read_bytes().startswith(b"\x89PNG")


def test_a_mixture_is_judged_by_the_mean_of_its_data_sets(tmp_path):
    """The loss in the records of train.py has the weights of the sets."""
    first = dict(step=0, steps=8, step_samples=4, settings=dict(block_size=32), data={"one": "1"})
    last = {"step": 8, "step_ms": 5.0, "val_loss": 1.0, "val_loss/one": 2.0, "val_loss/two": 4.0}
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(last)}\n")
    read = partial(lab_results.read_run, tmp_path, ["one", "two"], "val_loss")
    assert read({"one": "2"}) is None  # of other data
    result = read({"one": "1"})
    assert (result.loss, result.by_set) == (3.0, {"one": 2.0, "two": 4.0})
    assert (result.tokens.tolist(), result.seconds) == ([8 * 4 * 32], 8 * 0.005)


LIMIT = 3 / math.sqrt(3)  # three standard errors of differences d - 1, d and d + 1


@pytest.mark.parametrize("differences, verdict", [
    ([0.99 * LIMIT + x for x in (-1, 0, 1)], "no difference seen"),
    ([1.01 * LIMIT + x for x in (-1, 0, 1)], "worse"),
    ([-3, -4, -3.5], "better"),
    ([-3.0, -3.1], "too few seeds"),
])  # fmt: skip
def test_a_verdict_needs_three_standard_errors(differences, verdict):
    assert lab_results.verdict(differences) == verdict


def run_with(loss: float, tokens: float, seconds: float) -> Result:
    return Result(np.array([tokens]), np.array([loss]), {"tiny": loss}, 1000, seconds)


@pytest.mark.parametrize("loss, sign, times", [
    (4.5, "", math.sqrt(0.5)),  # half of the way from 50 to 100 tokens, in the logarithm
    (4.0, "", 1.0),
    (3.2, "", 2.0),
    (2.0, ">", 4.0),
    (5.1, "<", 0.5),
])  # fmt: skip
def test_what_the_baseline_needs(loss, sign, times):
    of_length = {0.5: 5.0, 1: 4.0, 4: 2.4}
    runs = {f"{x:g}": {1: run_with(y, 100 * x, 3 * x)} for x, y in of_length.items()}
    runs["variant"] = {1: run_with(loss, 100, 6.0)}  # twice as slow
    row = lab_results.compare(runs, ["1", "0.5", "4"])[-1]
    assert row.needs_sign == sign
    assert (row.needs_tokens, row.needs_seconds) == pytest.approx((times, times / 2))


@pytest.mark.parametrize("path", sorted(REPO.glob("bench/questions/*.py")), ids=lambda p: p.stem)
def test_every_shipped_question_is_valid(path):
    cfg = lab.read_question([str(path)])
    variants = lab.variants_of(cfg, cfg.baseline or next(iter(cfg.variants)))
    assert {name for name, _ in variants} >= cfg.variants.keys()
    assert len({repr(settings) for _, settings in variants}) == len(variants)


def test_options_win_over_question_and_question_over_config(tmp_path):
    (tmp_path / "base.py").write_text("n_layer = 3\nn_head = 3\nlr = 0.3\n")
    text = f"config = '{tmp_path / 'base.py'}'\nn_head = 2\nlr = 0.2\nmax_steps = 4\n"
    (tmp_path / "q.py").write_text(f"{text}question = '?'\nvariants = {{'a': {{}}}}\n")
    question = lab.read_question([str(tmp_path / "q.py"), "--lr=0.1", "--dataset=x"])
    [(_, cfg)] = lab.variants_of(question, "a")
    assert (cfg.n_layer, cfg.n_head, cfg.lr) == (3, 2, 0.1)

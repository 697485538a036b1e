"""bench/lab.py: the runs of a question are comparable and never lost, and the figures are right."""

import json
import math
import os
import shutil
import signal
import statistics
from pathlib import Path

import numpy as np
import pytest
import warm
from conftest import REPO, TINY, call, make_records, metrics, write_jsonl

import model
import prepare
from bench import lab, lab_results
from bench.lab_results import Result
from configurator import parse
from training.settings import TrainConfig, model_config

KINDS = ("markdown", "json", "png")  # of files that lab.py writes
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
    ask(folder, tiny_data, QUESTION, *[f"--{kind}={folder / 'r'}.{kind}" for kind in KINDS])
    return folder


def facts(answered: Path) -> dict:
    return json.loads((answered / "r.json").read_text())


def runs_of(answered: Path, variant: str) -> dict[int, Path]:
    """Return seed -> folder."""
    runs = facts(answered)["runs"]
    return {run["seed"]: Path(run["folder"]) for run in runs if run["variant"] == variant}


def settings(run: Path) -> dict:
    return json.loads((run / "metrics.jsonl").open().readline())["settings"]


# -- runs --


@pytest.mark.slow
def test_every_variant_is_trained_with_every_seed_and_judged_on_all_of_val(answered):
    for variant, lr, steps in (
        ("low", 1e-3, 8),
        ("high", 1e-2, 8),
        ("low, 0.5 x as long", 1e-3, 4),
    ):
        runs = runs_of(answered, variant)
        assert list(runs) == [1, 2]
        for seed, run in runs.items():
            expected = {"lr": lr, "seed": seed, "eval_tokens": 0}
            assert settings(run).items() >= expected.items()
            assert max(metrics(run, "val_loss")) == steps
            assert metrics(run, "lr")[steps] == pytest.approx(0.1 * lr)  # the decay is completed


@pytest.mark.slow
def test_variants_of_a_seed_read_the_same_windows(tiny_data, tmp_path):
    """At a rate of nearly 0 the weights stay as drawn, and so a loss shows the windows alone."""
    still = {"a": {"lr": 1e-30}, "b": {"lr": 1e-30, "beta1": 0.5}}
    question = f'question = "?"\nvariants = {still}'
    out = ask(tmp_path, tiny_data, question)
    losses: dict[int, list] = {}
    for run in trained(out):
        losses.setdefault(settings(out / run)["seed"], []).append(metrics(out / run, "loss"))
    assert losses[1][0] == losses[1][1] and losses[2][0] == losses[2][1]
    assert not set(losses[1][0].values()) & set(losses[2][0].values())


@pytest.mark.slow
def test_a_finished_run_is_never_run_again_and_a_changed_one_never_reused(
    answered, tiny_data, tmp_path
):
    shutil.copytree(answered / "out", tmp_path / "out")
    before = trained(tmp_path / "out")
    ask(tmp_path, tiny_data, QUESTION)
    assert trained(tmp_path / "out") == before
    renamed = QUESTION.replace("high", "higher")  # only the name of a variant
    ask(tmp_path, tiny_data, renamed)
    assert trained(tmp_path / "out") == before
    ask(tmp_path, tiny_data, QUESTION.replace("1e-2", "2e-2"))
    after = trained(tmp_path / "out")
    new = after.keys() - before.keys()
    assert len(new) == 2 and {settings(tmp_path / "out" / run)["lr"] for run in new} == {2e-2}
    assert {run: after[run] for run in before} == before


def test_other_data_under_the_same_name_make_another_run(tiny_data, tmp_path):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_records(50, seed=1))
    options = ["--name=tiny", f"--data_dir={tmp_path}", "--val_fraction=0.1"]
    call(prepare.main, "--input", corpus, *options, f"--tokenizer={tiny_data / 'tiny'}")

    (tmp_path / "q.py").write_text(QUESTION)

    def folders(data: Path) -> set[Path]:
        cfg = lab.read_question([*TINY, str(tmp_path / "q.py"), f"--data_dir={data}"])
        return {run.folder for run in lab.plan(cfg, "low")}

    assert len(folders(tiny_data)) == 9 and not folders(tiny_data) & folders(tmp_path)


@pytest.mark.slow
def test_an_interrupted_question_goes_on_where_it_was(tiny_data, tmp_path, monkeypatch, capsys):
    """Ctrl-C is pressed when the second run has its first checkpoint."""
    out = tmp_path / "out"
    sent = []

    class Interrupted(warm.Popen):
        def poll(self):
            if len(list(out.glob("*/ckpt/step_00000020/manifest.json"))) == 2 and not sent:
                sent.append(signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
            return super().poll()

    question = QUESTION.replace("lengths", "_")
    longer = ["--max_steps=100", "--eval_every=100", "--save_every=20", "--keep=100"]
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as exit_info:
        patch.setattr(warm, "Popen", Interrupted)
        ask(tmp_path, tiny_data, question, *longer, seeds="1")
    printed = capsys.readouterr().out
    assert exit_info.value.code == 130 and "2/2 | high, seed 1 | stopped by a signal" in printed
    assert "1 of 2 runs are finished" in printed and "| low " in printed  # the table so far
    before = trained(out)

    ask(tmp_path, tiny_data, question, *longer, seeds="1")
    printed = capsys.readouterr().out
    assert "2 runs, 1 of them to train" in printed and "2 of 2 runs are finished" in printed
    [interrupted] = [run for run in before if before[run] != trained(out)[run]]
    assert settings(out / interrupted)["lr"] == 1e-2
    assert "resumed from" in (out / f"{interrupted}.log").read_text()


@pytest.mark.slow
def test_a_run_that_fails_does_not_stop_the_others(tiny_data, tmp_path, capsys):
    question = QUESTION.replace('"lr": 1e-2', '"n_head": 3').replace("lengths", "_")
    question = question.replace('baseline = "low"', "")  # the variant that fails comes first
    with pytest.raises(SystemExit) as exit_info:
        ask(tmp_path, tiny_data, question, seeds="1")
    printed = capsys.readouterr().out
    assert exit_info.value.code == 1
    assert "high, seed 1 | failed with exit code 2: error: n_embd=32 is not a multiple" in printed
    assert "low, seed 1 | loss" in printed and "no run to compare is finished" in printed


@pytest.mark.slow
def test_a_mixture_is_judged_by_each_of_its_data_sets(tiny_data, tmp_path, capsys):
    """The loss that train.py records is weighted by the shares, which differ between variants."""
    shutil.copytree(tiny_data / "tiny", tmp_path / "one")
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_records(50, seed=1))
    options = ["--name=other", f"--data_dir={tmp_path}", "--val_fraction=0.1"]
    call(prepare.main, "--input", corpus, *options, f"--tokenizer={tiny_data / 'tiny'}")
    mixtures = {"much": {"dataset": "one:3,other:1"}, "little": {"dataset": "one:1,other:3"}}
    question = f'question = "?"\nvariants = {mixtures}'
    ask(tmp_path, tmp_path, question, f"--json={tmp_path / 'r.json'}", seeds="1")
    [much, little] = facts(tmp_path)["rows"]
    for row in (much, little):
        run = runs_of(tmp_path, row["variant"])[1]
        of_sets = {name: metrics(run, f"val_loss/{name}")[8] for name in ("one", "other")}
        assert row["by_set"] == pytest.approx(of_sets)
        assert row["loss"] == pytest.approx(statistics.fmean(of_sets.values()))
        assert row["loss"] != pytest.approx(metrics(run, "val_loss")[8], abs=1e-6)
    heads = [text.strip() for text in capsys.readouterr().out.split("|")]
    assert "one" in heads and "other" in heads


# -- figures --


@pytest.mark.slow
def test_every_figure_of_the_report_is_that_of_the_runs(answered):
    low, high, half = facts(answered)["rows"]
    assert [row["variant"] for row in (low, high, half)] == ["low", "high", "low, 0.5 x as long"]
    final = {}
    for row in (low, high, half):
        runs = runs_of(answered, row["variant"])
        final[row["variant"]] = [
            metrics(run, "val_loss")[row["tokens"] // 256] for run in runs.values()
        ]
        assert list(row["losses"].values()) == final[row["variant"]]
        of_runs = [list(metrics(run, "step_ms").values()) for run in runs.values()]
        times = [statistics.median(of_run[1:]) for of_run in of_runs]  # the first step warms up
        assert row["step_ms"] == min(times)  # of two runs, the one that was disturbed less
        assert row["seconds"] == pytest.approx(row["tokens"] / 256 * min(times) / 1e3)
    differences = [b - a for a, b in zip(final["low"], final["high"], strict=True)]
    assert high["difference"] == pytest.approx(statistics.fmean(differences))
    assert high["difference_error"] == pytest.approx(statistics.stdev(differences) / math.sqrt(2))
    assert high["verdict"] == "too few seeds" and low["verdict"] == "baseline"
    assert (low["needs_tokens"], half["needs_tokens"]) == (1, 1)
    assert (answered / "r.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_report_trains_nothing_and_prints_the_same_table(answered, tiny_data, tmp_path, capsys):
    shutil.copytree(answered / "out", tmp_path / "out")
    before = trained(tmp_path / "out")
    ask(tmp_path, tiny_data, QUESTION, "--report")
    assert trained(tmp_path / "out") == before
    table = (answered / "r.markdown").read_text().split("\n\n")[-1]
    assert table in capsys.readouterr().out
    ask(tmp_path, tiny_data, QUESTION, "--report", seeds="3")
    assert "no run to compare is finished" in capsys.readouterr().out
    assert trained(tmp_path / "out") == before


def test_a_difference_within_three_standard_errors_gets_no_verdict():
    """The differences are d - 1, d and d + 1: their standard error is 1 / sqrt(3)."""
    limit = 3 / math.sqrt(3)
    for d, verdict in ((0.99 * limit, "no difference seen"), (1.01 * limit, "worse")):
        assert lab_results.verdict([d - 1, d, d + 1]) == verdict
    assert lab_results.verdict([-3, -4, -3.5]) == "better"
    assert lab_results.verdict([0, 0, 0]) == "no difference seen"


def test_two_seeds_are_too_few_for_a_verdict():
    assert lab_results.verdict([-3.0, -3.1]) == "too few seeds"


def run_with(*losses: float, tokens: int = 100, seconds: float = 1.0) -> Result:
    at = np.linspace(tokens / len(losses), tokens, len(losses))
    return Result(at, np.array(losses), {"tiny": losses[-1]}, 1000, seconds)


def test_what_a_seed_does_to_all_variants_alike_cancels():
    runs = {"a": {}, "b": {}}
    for seed, luck in enumerate((0.0, 5.0, -7.0)):
        runs["a"][seed] = run_with(luck + 2.0)
        runs["b"][seed] = run_with(luck + 1.5 + 0.01 * seed)
    a, b = lab_results.compare(runs, ["a"])
    assert b.loss_error > 3 and b.difference_error == pytest.approx(0.01 / math.sqrt(3))
    assert b.difference == pytest.approx(-0.49) and b.verdict == "better"


def test_only_the_seeds_of_both_are_compared():
    runs = {
        "a": {1: run_with(2.0)},
        "b": {1: run_with(1.5), 2: run_with(9.0)},
        "c": {2: run_with(1)},
    }
    rows = lab_results.compare(runs, ["a"])
    assert [row.variant for row in rows] == ["a", "b"]
    assert rows[1].losses == {1: 1.5} and rows[1].loss_error is None


@pytest.mark.parametrize(
    "loss, sign, times",
    [
        (5.0, "", 0.5),
        (4.5, "", math.sqrt(0.5)),  # half of the way from 50 to 100 tokens, in the logarithm
        (4.0, "", 1.0),
        (3.2, "", 2.0),
        (2.4, "", 4.0),
        (2.0, ">", 4.0),
        (5.1, "<", 0.5),
    ],
)
def test_the_baseline_needs_what_its_own_runs_of_several_lengths_say(loss, sign, times):
    of_length = {0.5: 5.0, 1: 4.0, 4: 2.4}
    runs = {f"{x:g}": {1: run_with(y, tokens=100 * x, seconds=3 * x)} for x, y in of_length.items()}
    runs["variant"] = {1: run_with(loss, tokens=100, seconds=6.0)}  # twice as slow
    row = lab_results.compare(runs, ["1", "0.5", "4"])[-1]
    assert row.needs_sign == sign
    assert row.needs_tokens == pytest.approx(times)
    assert row.needs_seconds == pytest.approx(times / 2)


# -- questions --


@pytest.mark.parametrize("path", sorted(REPO.glob("bench/questions/*.py")), ids=lambda p: p.stem)
def test_every_shipped_question_is_valid(path):
    cfg = lab.read_question([str(path)])
    variants = lab.variants_of(cfg, cfg.baseline or next(iter(cfg.variants)))
    assert {name for name, _, _ in variants} >= cfg.variants.keys()
    assert len({repr(settings) for _, _, settings in variants}) == len(variants)


def test_the_question_about_inits_has_all_of_them():
    cfg = lab.read_question([str(REPO / "bench" / "questions" / "inits.py")])
    assert cfg.variants.keys() == model.INIT.keys()


def test_options_win_over_the_question_and_the_question_over_its_config(tmp_path):
    (tmp_path / "base.py").write_text("n_layer = 3\nn_head = 3\nlr = 0.3\n")
    text = f"config = '{tmp_path / 'base.py'}'\nn_head = 2\nlr = 0.2\nmax_steps = 4\n"
    (tmp_path / "q.py").write_text(f"{text}question = '?'\nvariants = {{'a': {{}}}}\n")
    question = lab.read_question([str(tmp_path / "q.py"), "--lr=0.1", "--dataset=x"])
    [(_, _, cfg)] = lab.variants_of(question, "a")
    assert (cfg.n_layer, cfg.n_head, cfg.lr) == (3, 2, 0.1)


@pytest.mark.parametrize(
    "variants, message",
    [
        ("{'a': {'learning_rate': 1}}", "variant 'a': unknown setting 'learning_rate'"),
        ("{'a': {'n_layers': 1}}", "'n_layer'"),
        ("{'a': {'lr': 'high'}}", "variant 'a': lr='high'"),
        ("{'a': {}, 'b': {'lr': -1}}", "variant 'b': lr"),
        ("{'a': {'seed': 1}}", "variant 'a': seed"),
        ("{'a': 1}", "variants"),
        ("['a', 'b']", "variants="),
        ("{}", "variants"),
        ("{'a': {'dataset': 'x'}, 'b': {'dataset': 'y,z'}}", "no data set"),
    ],
)
def test_a_mistake_in_the_variants_is_one_line(tmp_path, refuses, variants, message):
    (tmp_path / "q.py").write_text(f"question = '?'\nvariants = {variants}\n")
    assert message in refuses(lab.main, str(tmp_path / "q.py"), "--max_steps=1", "--dataset=x")


def test_a_longer_baseline_has_the_whole_schedule_stretched():
    cfg = TrainConfig(max_steps=100, max_tokens=10_000, max_epochs=1.0)
    longer = lab.stretched(cfg, 2.5)
    assert longer.max_steps == 250
    assert (longer.max_tokens, longer.max_epochs) == (25_000, 2.5)


def test_the_questions_start_from_the_model_of_the_shipped_config():
    laptop = parse(TrainConfig, [str(REPO / "bench" / "laptop.py")])
    shipped = parse(TrainConfig, [str(REPO / "config" / "shakespeare_char.py")])
    assert model_config(laptop, 67) == model_config(shipped, 67)
    assert laptop.dataset == shipped.dataset

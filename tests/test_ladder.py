"""bench/ladder.py and plan.py --loss: what a run will come to, foretold by small ones."""

import json
import math
import re
import shutil
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import warm
from conftest import TINY, call

import plan
from bench import lab, ladder
from configurator import parse
from hardware.disk import sealed
from text.windows import DataSet
from training.law import FORM, REPEATS, law

# E, A, a, B, b, c, R: with c = b^FORM, and the two extremes of c = b and c = 1
TRUE = torch.tensor([1.8, 2e5, 0.35, 5e5, 0.37, 0.37**FORM, 5]).double()
KAPLAN = torch.tensor([1.8, 2e6, 0.35, 5e6, 0.37, 0.37, 5]).double()
HOFFMANN = torch.tensor([1.8, 60, 0.35, 400, 0.37, 1, 5]).double()
SMALL = [*TINY, "--n_layer=3", "--max_steps=64", "--fewest_steps=6", "--draws=5", "--seed=1"]


def foretold(
    most_tokens: float, U: int, draws: int = 2, val_bytes: int = 43, true: torch.Tensor = TRUE
) -> ladder.Ladder:
    """Return the ladder of rungs whose losses follow the law `true`, but for 0.2 % of scatter."""
    torch.manual_seed(0)
    trained = []
    for N in (3e5, 6e5, 9e5, 1.5e6, 2.5e6):
        for k in range(7):
            D = most_tokens / 2 ** (k / 2)
            loss = float(law(true, N, D, U)) * (1 + 0.002 * float(torch.randn(())))
            trained.append(ladder.Rung(None, int(N), int(D), 6 * N * D, loss))
    cfg = ladder.LadderConfig(max_steps=1, draws=draws)
    # 1.8 nats a token are 0.6 bits a byte, if a token has 4.3 of them.
    counts = {"tokens": 10, "bytes": val_bytes, "sha256": ""}
    data = DataSet("x", Path("x"), {"splits": {"val": counts, "train": counts}}, Fraction(1))
    return ladder.fitted(trained, U, cfg, data)


@pytest.mark.parametrize(("true", "off"), [(TRUE, 0.005), (KAPLAN, 0.015), (HOFFMANN, 0.015)])
def test_a_law_is_foretold_within_a_percent_or_two_at_16_times_the_compute(true, off):
    fit = foretold(most_tokens=1e6, U=100_000_000, draws=20, true=true)
    loss, low, high = fit.interval(1e7, 4e6)
    assert loss == pytest.approx(float(law(true, 1e7, 4e6, 100_000_000)), rel=off)
    assert low < float(law(true, 1e7, 4e6, 100_000_000)) < high


def test_the_interval_knows_of_other_forms_of_the_law():
    forms = [math.log(c) / math.log(b) for *_, b, c, _ in foretold(1e6, 10**8, draws=10).laws]
    assert forms[0] == pytest.approx(FORM)
    assert 0.6 <= min(forms) < 0.7 and 0.9 < max(forms) <= 1


def test_many_precise_rungs_outweigh_the_prior_of_E():
    E = [foretold(1e6, 10**8, val_bytes=n).laws[0][0] for n in (30, 36, 43)]
    assert E == pytest.approx([1.8, 1.8, 1.8], rel=0.1)


def test_the_worth_of_repeated_tokens_is_fitted_too():
    assert foretold(most_tokens=1e6, U=100_000).laws[0][6] == pytest.approx(5, rel=0.2)
    assert foretold(most_tokens=1e6, U=10**9).laws[0][6] == pytest.approx(REPEATS)
    # The best of the grid lies at its edge for several rounds.
    true = torch.tensor([0.8, 38.3, 0.24, 2248, 0.416, 1, 15.4]).double()
    sizes, lengths = (1e6, 2e6, 4e6, 8e6), (4e7, 8e7, 16e7, 32e7)
    N, D = torch.cartesian_prod(torch.tensor(sizes), torch.tensor(lengths)).double().T
    law_again = ladder.fit(N, D, law(true, N, D, 6e7), 6e7, true[0], form=0)
    assert law_again.tolist() == pytest.approx(true.tolist(), rel=1e-3)


def test_the_interval_holds_nine_of_ten_laws_and_the_errors_of_larger_runs():
    laws = TRUE.repeat(1001, 1)
    laws[:, 0] = torch.linspace(1.8, 3.8, 1001)  # E
    fit = replace(foretold(most_tokens=1e6, U=10**9), laws=laws.tolist())
    loss, low, high = fit.interval(1e12, 1e12)
    assert (low - loss, high - loss) == pytest.approx((0.1, 1.9), abs=0.03)
    loss, low, high = replace(fit, laws=fit.laws[:1] * 2).interval(1e12, 1e12)
    assert (low / loss - 1, high / loss - 1) == pytest.approx((-0.0235, 0.0235), abs=0.001)


def test_the_best_size_is_that_of_the_formula():
    fit = foretold(most_tokens=1e6, U=10**15)
    _, A, a, B, b, c, _ = fit.laws[0]
    N, D = fit.best_size(1e18)
    best = (a * A / (b * B)) ** (c / (a + b)) * (1e18 / 6) ** (b / (a + b))
    assert N == pytest.approx(best, rel=0.02)


@pytest.fixture(scope="module")
def climbed(tiny_data, tmp_path_factory) -> Path:
    """A folder with a data set and the ladder that was trained on it."""
    folder = tmp_path_factory.mktemp("ladder")
    shutil.copytree(tiny_data / "tiny", folder / "tiny")
    climb(folder)
    return folder


def climb(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab, "Popen", warm.Popen)
        call(ladder.main, *SMALL, f"--data_dir={folder}", f"--out_dir={folder / 'out'}")


def test_rungs_are_trained_once_and_none_costs_more_than_an_eighth(climbed, capsys):
    rungs = json.loads((climbed / "tiny.ladder.json").read_text())["rungs"]
    written = {path: path.stat().st_mtime_ns for path in climbed.glob("out/*/metrics.jsonl")}
    assert len(written) == len(rungs) >= 8
    largest = plan.planned_run(parse(plan.PlanConfig, options_of(climbed)))
    tokens = largest.plan.steps * largest.plan.step_tokens
    whole = largest.model.flops_per_token(32) * tokens
    assert max(rung["flops"] for rung in rungs) <= whole / 8
    per_parameter = tokens / largest.model.num_params()["matmul"]
    assert min(rung["D"] / rung["N"] for rung in rungs) >= per_parameter / 2
    assert (climbed / "tiny.ladder.png").exists()
    assert not list(climbed.glob("tiny/*ladder*"))  # prepare.py would not make the set again
    climb(climbed)
    assert {path: path.stat().st_mtime_ns for path in written} == written


def options_of(folder: Path, *options: str) -> list[str]:
    return [*TINY, "--n_layer=3", "--max_steps=64", f"--data_dir={folder}", *options]


def test_plan_foretells_the_loss_and_names_settings_that_differ(climbed, prints):
    text = prints(plan.main, *options_of(climbed, "--loss"))
    assert "val loss" in text and "bits per byte" in text and "warning: they" not in text
    others = options_of(climbed, "--loss", "--lr=1e-4", "--optimizer=muon", "--d_ff=9")
    assert "with other settings: lr, d_ff, optimizer" in prints(plan.main, *others)


def test_plan_warns_of_runs_that_no_rung_is_like(climbed, prints):
    warnings = {2: "more tokens per parameter", 10**4: "no test went", 10**5: "its tokens again"}
    for steps, warning in warnings.items():
        assert warning in prints(plan.main, *options_of(climbed, "--loss", f"--max_steps={steps}"))


def test_plan_warns_of_a_best_size_that_reads_again(climbed, tmp_path, prints):
    shutil.copytree(climbed / "tiny", tmp_path / "tiny")
    content = json.loads((climbed / "tiny.ladder.json").read_text())
    del content["sha256"]
    size_is_worth_nothing = [[2, 1e-9, 0.5, 1e3, 0.5, 0.5**FORM, 15.4]] * 2
    longest = max(rung["D"] for rung in content["rungs"])  # as long as the run
    content |= dict(different_tokens=longest, laws=size_is_worth_nothing, residuals=[0.01, -0.09])
    (tmp_path / "tiny.ladder.json").write_text(json.dumps(sealed(content)))
    assert re.search("(?s)by 9%.*size would", prints(plan.main, *options_of(tmp_path, "--loss")))


def test_a_rung_that_fails_or_diverges_is_left_out(climbed, tmp_path):
    folder = shutil.copytree(climbed, tmp_path / "copy")
    before = json.loads((folder / "tiny.ladder.json").read_text())["rungs"]
    diverged, failed, *_ = sorted(folder.glob("out/*/metrics.jsonl"))
    diverged.write_text(re.sub(r'"val_loss": [^,]*', '"val_loss": NaN', diverged.read_text()))
    shutil.rmtree(failed.parent)
    failed.parent.write_text("a user's")
    with pytest.raises(SystemExit) as ended:
        climb(folder)
    assert ended.value.code == 1
    after = json.loads((folder / "tiny.ladder.json").read_text())["rungs"]
    assert len(after) == len(before) - 2
    assert failed.parent.read_text() == "a user's"


def test_a_loss_is_not_foretold_without_the_ladder_of_these_data(climbed, tmp_path, refuses):
    shutil.copytree(climbed / "tiny", tmp_path / "tiny")
    path = tmp_path / "tiny.ladder.json"
    assert "bench.ladder" in refuses(plan.main, *options_of(tmp_path, "--loss"))
    path.write_text("{}")
    assert "in the way" in refuses(ladder.main, *SMALL, f"--data_dir={tmp_path}")
    assert path.read_text() == "{}"
    assert "damaged" in refuses(plan.main, *options_of(tmp_path, "--loss"))
    content = json.loads((climbed / path.name).read_text())
    other = {key: content[key] for key in content if key != "sha256"} | {"data": {"val": "0"}}
    earlier = content | {"laws": [[2, 1, 0.5, 1, 0.5, 0.5, 15.4]] * 2}
    del earlier["sha256"]
    path.write_text(json.dumps(sealed(earlier)))
    assert "earlier version" in refuses(plan.main, *options_of(tmp_path, "--loss"))
    path.write_text(json.dumps(sealed(other)))
    assert "prepared again" in refuses(plan.main, *options_of(tmp_path, "--loss"))
    assert "one data set" in refuses(plan.main, *options_of(tmp_path, "--loss", "--init_from=x"))


def test_too_few_rungs_are_refused_before_any_is_trained(tiny_data, tmp_path, refuses):
    options = [*SMALL, "--max_steps=12", f"--data_dir={tiny_data}", f"--out_dir={tmp_path}"]
    assert "--fewest_steps" in refuses(ladder.main, *options)
    assert not list(tmp_path.iterdir())


def test_a_model_with_few_heads_for_keys_gets_narrower_too():
    cfg = ladder.LadderConfig(n_layer=8, n_head=8, n_kv_head=2, n_embd=512, d_ff=1000)
    assert ladder.shape_at(cfg, 0.5) == dict(n_layer=4, n_head=4, n_kv_head=1, n_embd=256, d_ff=500)

"""bench/sweep.py on a CPU: what it measures, what it does if a cell fails, and what it writes."""

import json
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, call, facts_of

import configurator
from bench import sweep
from bench.measure import Training, begin
from model import GPT
from training.settings import model_config

SMALL = [*TINY, "--vocab_size=400", "--warmup=1", "--steps=3"]
ONE_EACH = ["--block_sizes", "1", "48", "--batch_sizes", "2", "0", "--accums", "1", "3"]
GPT2 = ["--preset=gpt2", "--n_kv_head=4"]  # it has learned positions


def test_every_cell_has_figures_that_agree_with_each_other(tmp_path, capsys):
    facts = facts_of(sweep.main, tmp_path, *SMALL, *ONE_EACH, *GPT2)
    cells = facts["cells"]
    shapes = [(c["axis"], c["T"], c["B"], c["accum"]) for c in cells]
    # Where the axis is another one, block_size is 32 and batch_size is 4.
    assert shapes[:3] == [("T", 1, 1, 1), ("T", 48, 1, 1), ("B", 32, 2, 1)]
    assert shapes[3:] == [("B", 32, "largest", 1), ("accum", 32, 4, 1), ("accum", 32, 4, 3)]
    assert "left out" in cells[3]["note"]  # it is only looked for on a GPU
    for c in cells[:3] + cells[4:]:
        cfg = configurator.parse(sweep.SweepConfig, [*SMALL, *GPT2, f"--block_size={c['T']}"])
        flops = GPT(model_config(cfg, 400)).flops_per_token(c["T"])
        step = statistics.median(c["seconds"])
        assert c["note"] == "" and len(c["seconds"]) == 3 and min(c["seconds"]) > 0
        assert c["tokens_per_s"] == pytest.approx(c["T"] * c["B"] * c["accum"] / step)
        assert (c["it_per_s"], c["step_ms"]) == pytest.approx((1 / step, 1e3 * step))
        assert c["tflops"] == pytest.approx(c["tokens_per_s"] * flops / 1e12)
        assert c["mfu"] == pytest.approx(c["tflops"])  # TINY gives a peak of 1 TFLOPS
        assert c["memory_gb"] is None or 0.05 < c["memory_gb"] < 5
    printed = capsys.readouterr().out
    assert facts["any step"].endswith("ms, the fastest of 3 steps of one token")
    assert facts["any step"] in printed.splitlines()[-1]
    headings = [line for line in printed.splitlines() if line.startswith("#")]
    assert headings == [f"# {facts['machine']}", "## T", "## B", "## accum"]


@pytest.mark.parametrize("axis", ["optimizer", "documents"])
def test_values_of_a_setting_take_turns_and_are_compared_with_the_first(axis, tiny_data, tmp_path):
    options = [f"--vary={axis}", "--rounds=2", f"--data_dir={tiny_data}"]
    facts = facts_of(sweep.main, tmp_path, *SMALL, *options)
    cells = facts["cells"]
    values = dict(optimizer="adamw muon adafactor", documents="stream mask pack pad")
    assert [c["note"].split(":")[0] for c in cells] == values[axis].split()
    for c in cells:
        assert len(c["seconds"]) == 4 and min(c["seconds"]) > 0
        assert (c["T"], c["B"], c["accum"]) == (32, 4, 2)  # 256 tokens a step
        assert c["tokens_per_s"] == pytest.approx(256 / statistics.median(c["seconds"]))
        ratio = c["step_ms"] / cells[0]["step_ms"] - 1
        assert f"{ratio:+.1%}" in c["note"]
    assert ("of the pairs" in cells[1]["note"]) == (axis == "documents")
    assert "any step" not in facts


def test_a_cell_that_fails_says_so_and_the_sweep_goes_on(tmp_path, monkeypatch):
    """The first has no memory, the second another error. Only that makes the exit code 1.

    The ids of so many sequences fit into no address space. The allocator notices this at once.
    """
    step = Training.step

    def broken(training):
        if training.cfg.batch_size == 1:
            raise RuntimeError("a kernel is broken")
        return step(training)

    monkeypatch.setattr(Training, "step", broken)
    out = tmp_path / "sweep.json"
    with pytest.raises(SystemExit) as exit_info:
        options = ["--vary=B", "--batch_sizes", "10_000_000_000_000", "1", "2", f"--json={out}"]
        call(sweep.main, *SMALL, *options)
    cells = json.loads(out.read_text())["cells"]
    assert exit_info.value.code == 1 and "tokens_per_s" not in cells[0]
    assert [c["note"].split(":")[0] for c in cells] == ["OOM", "failed", ""]


def test_a_loss_that_is_not_finite_is_a_failure():
    cfg = configurator.parse(sweep.SweepConfig, [*SMALL, "--lr=1e30"])
    cell = sweep.measure(cfg, 1, begin(cfg), None)
    assert cell["note"].startswith("failed: ArithmeticError: loss ")


@pytest.mark.slow
@pytest.mark.skipif(not sweep.reset_peak(torch.device("cpu")), reason="no peak to reset here")
def test_the_peak_of_a_small_cell_behind_a_large_one_is_small():
    cfg = configurator.parse(sweep.SweepConfig, SMALL)
    machine = begin(cfg)
    cells = [sweep.measure(replace(cfg, batch_size=B), 1, machine, 1.0) for B in (1, 1, 512, 1)]
    # In the first, there may still be memory that earlier tests have left in this process.
    _, small, large, again = (cell["memory_gb"] for cell in cells)
    assert large > small + 0.05 and again == pytest.approx(small, abs=0.05)


@pytest.mark.parametrize("limit", [1, 7, 500])
def test_the_largest_batch_is_the_predicted_one_or_what_fits_of_it(monkeypatch, limit):
    """`measure` pretends to be a GPU that holds `limit` sequences."""

    def measure(cfg, *others):
        return {"B": cfg.batch_size, "note": "OOM" if cfg.batch_size > limit else ""}

    monkeypatch.setattr(sweep, "measure", measure)
    monkeypatch.setattr(sweep, "capacity", lambda device: 8e9)
    cfg = configurator.parse(sweep.SweepConfig, SMALL)
    gpu = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float16)
    cell = sweep.largest(cfg, gpu, 1.0)
    assert cell["note"] == "" and limit * 6 // 8 <= cell["B"] <= limit

"""bench/sweep.py on a CPU."""

import statistics
from typing import get_args

import pytest
from conftest import TINY, facts_of

import configurator
from bench import sweep
from model import GPT
from text.windows import Documents
from training.settings import OPTIMIZERS, model_config

SMALL = [*TINY, "--vocab_size=400", "--warmup=1", "--steps=3"]
ONE_EACH = ["--block_sizes", "1", "48", "--batch_sizes", "2", "0", "--accums", "1", "3"]


def test_the_figures_of_a_cell_agree(tmp_path):
    facts = facts_of(sweep.main, tmp_path, *SMALL, *ONE_EACH)
    cells = facts["cells"]
    shapes = [(c["axis"], c["T"], c["B"], c["accum"]) for c in cells]
    # Where the axis is another one, block_size is 32 and batch_size is 4. B = 0 needs a GPU.
    assert shapes[:3] == [("T", 1, 1, 1), ("T", 48, 1, 1), ("B", 32, 2, 1)]
    assert shapes[3:] == [("accum", 32, 4, 1), ("accum", 32, 4, 3)]
    for c in cells:
        cfg = configurator.parse(sweep.SweepConfig, [*SMALL, f"--block_size={c['T']}"])
        flops = GPT(model_config(cfg, 400)).flops_per_token(c["T"])
        step = statistics.median(c["seconds"])
        assert c["note"] == "" and len(c["seconds"]) == 3 and min(c["seconds"]) > 0
        assert c["tokens_per_s"] == pytest.approx(c["T"] * c["B"] * c["accum"] / step)
        assert (c["it_per_s"], c["step_ms"]) == pytest.approx((1 / step, 1e3 * step))
        assert c["tflops"] == pytest.approx(c["tokens_per_s"] * flops / 1e12)
        assert c["mfu"] == pytest.approx(c["tflops"])  # TINY gives a peak of 1 TFLOPS


@pytest.mark.parametrize("axis", ["optimizer", "documents"])
def test_values_of_a_setting_take_turns(axis, tiny_data, tmp_path):
    options = [f"--vary={axis}", "--rounds=2", f"--data_dir={tiny_data}"]
    facts = facts_of(sweep.main, tmp_path, *SMALL, *options)
    cells = facts["cells"]
    values = {"optimizer": OPTIMIZERS, "documents": get_args(Documents)}
    assert [c["note"].split(":")[0] for c in cells] == [*values[axis]]
    for c in cells:
        assert len(c["seconds"]) == 4 and min(c["seconds"]) > 0
        assert (c["T"], c["B"], c["accum"]) == (32, 4, 2)  # 256 tokens a step
        assert c["tokens_per_s"] == pytest.approx(256 / statistics.median(c["seconds"]))
        ratio = c["step_ms"] / cells[0]["step_ms"] - 1
        assert f"{ratio:+.1%}" in c["note"]

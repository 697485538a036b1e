import math
import shutil

import pytest
from conftest import facts_of

from bench import roof

SMALL = ["--n_layer=2", "--n_head=4", "--n_embd=64", "--block_size=32", "--batch_size=2"]
SMALL += ["--vocab_size=300", "--seconds=0.001"]
SMALL += ["--device=cpu", "--dtype=float32", "--peak_tflops=1"]
COMPILES = shutil.which("g++") is not None
LAYERS = ["qkv", "proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def test_squares_are_measured(tmp_path):
    options = ["--squares", "64", "128", "--seconds=0.001", "--device=cpu"]
    rows = facts_of(roof.main, tmp_path, *options)["squares"]
    assert [row["n"] for row in rows] == ["64", "128"] and all(row["TFLOPS"] > 0 for row in rows)


@pytest.mark.slow
def test_a_micro_step_is_the_sum_of_its_parts(tmp_path):
    figures = facts_of(roof.main, tmp_path, *SMALL, f"--compile={COMPILES}", "--preset=llama")
    assert [r["layer"] for r in figures["gemms"]] == LAYERS
    rates = [r[k] for r in figures["gemms"] for k in roof.PRODUCTS]
    assert 0 < min(rates) <= figures["gemm_tflops"] <= max(rates)  # their mean, weighted by time

    *rows, chosen = figures["attention"]
    assert [r["backend"] for r in rows] == [*roof.BACKENDS] and chosen["backend"] == "the model"
    for r in rows:
        on_a_gpu = r["backend"] in ("cudnn", "efficient")
        assert math.isnan(r["forward"] + r["both"]) == on_a_gpu
    assert [r["backend"] for r in rows if r["default"] == "*"] == [chosen["default"]] == ["flash"]
    work = 2 * 2 * 4 * 32**2 * 16  # FLOPs of 2 sequences, 4 heads of size 16
    assert chosen["ms forward"] * chosen["forward"] == pytest.approx(work * 1e-9)

    rows = {r["operation"]: r for r in figures["memory"]}
    losses = ["cross-entropy, eager", "cross-entropy, compiled"][: 1 + COMPILES]
    assert [*rows] == [*losses, "copy", "AdamW"] and min(r["ms"] for r in rows.values()) > 0
    *parts, everything = figures["micro_step"]
    assert len(parts) == 4 and everything["ms"] == pytest.approx(sum(p["ms"] for p in parts))
    assert 0 < figures["model_tflops"] and "--preset=llama" in figures["command"]

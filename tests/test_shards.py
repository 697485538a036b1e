"""shard and recompute: the same training, and the same files, with less memory on each rank."""

import subprocess

import pytest
from conftest import NEEDS_BF16, ended, metrics, python, resumes, same, stop_at_4, train_on

DROPOUT = ["--dropout=0.1"]


def output_on(n: int, *argv: str) -> str:
    """Run a script in n processes; return what they print."""
    done = ended(python(n, *argv), subprocess.run)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_each_shard_and_recompute_trains_as_ddp_does():
    output = output_on(3, "-m", "tests.shards_as_ddp", "4", "qwen3", "3")
    assert output.count("norm ") == 2 * 7 and output.count("on all: True") == 2


@pytest.mark.slow
@NEEDS_BF16
def test_the_peak_of_a_rank_is_the_predicted_one():
    output = output_on(2, "-m", "tests.peak_of_shards", "adamw", "all", "blocks", "1")
    assert output.count("predicted ") == 1


@pytest.mark.slow
def test_a_resumed_run_of_the_same_ranks_is_bit_identical(tiny_data, tmp_path):
    options = ["--shard=all", "--recompute=blocks", *DROPOUT]
    resumes(tiny_data, tmp_path, *options, trains=lambda *args: train_on(2, *args))


@pytest.mark.slow
@pytest.mark.parametrize("n, shard", [(1, "all"), (3, "optimizer")])
def test_other_ranks_and_another_shard_go_on_within_rounding(n, shard, tiny_data, tmp_path):
    """Without dropout, whose masks depend on the rank. 3 ranks do not divide a step of 8 windows,
    so all runs here have 6: one rank reads six, and three ranks two each."""
    sizes = ["--batch_size=1", "--batch_tokens=192", "--optimizer=muon"]
    whole = train_on(2, tiny_data, tmp_path / "whole", "--shard=all", *sizes)
    stop_at_4(whole, tmp_path)
    run = train_on(n, tiny_data, tmp_path, *sizes, f"--shard={shard}", "--init_from=resume")
    for key in ("loss", "grad_norm", "val_loss"):
        assert metrics(run, key) == pytest.approx(metrics(whole, key), rel=1e-4), key


def test_recompute_changes_nothing_with_dropout(trains, tmp_path):
    plain = trains(*DROPOUT).rename(tmp_path / "plain")
    assert same(trains("--recompute=blocks", *DROPOUT), plain)


@pytest.mark.parametrize("shard", ["optimizer", "gradients", "all"])
def test_batch_size_auto_trains_a_sharded_model_as_ddp_does(tiny_data, tmp_path, shard):
    """The trial of batch_size=auto must leave nothing behind: losses and norms are DDP's."""
    auto = ["--batch_size=auto", "--compile=false"]
    losses = []
    for name in ("none", shard):
        run = train_on(2, tiny_data, tmp_path / name, *auto, f"--shard={name}")
        losses.append([metrics(run, key) for key in ("loss", "grad_norm", "val_loss")])
    for ddp, sharded in zip(*losses, strict=True):
        assert sharded == pytest.approx(ddp, rel=1e-4)

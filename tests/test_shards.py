"""shard and recompute: the same training, and the same files, with less memory on each rank."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import warm
from conftest import REPO, metrics, torchrun, train_tiny
from safetensors.torch import load_file

import train
from training.runs import newest_checkpoint

DROPOUT = ["--dropout=0.1"]


def train_on(n: int, data: Path, out: Path, *options: str) -> Path:
    return torchrun(n, data, out, *options, run=warm.run)


def end(run: Path, step: int = 8) -> tuple[dict, dict]:
    """Return the weights and the optimizer's state of a checkpoint."""
    folder = run / "ckpt" / f"step_{step:08d}"
    state = torch.load(folder / "train_state.pt", weights_only=True)["optimizer"]["state"]
    moments = {(i, k): v for i, s in state.items() for k, v in s.items()}
    return load_file(folder / "model.safetensors"), moments


def same(run: Path, other: Path) -> bool:
    pairs = list(zip(end(run), end(other), strict=True))
    return all(a.keys() == b.keys() for a, b in pairs) and all(
        torch.equal(a[k], b[k]) for a, b in pairs for k in a
    )


def stop_half_way(run: Path, out: Path) -> None:
    """Copy a run as if it had been killed after its first checkpoint."""
    shutil.copytree(run, out / "run")
    shutil.rmtree(out / "run" / "ckpt" / "step_00000008")


def script_on(n: int, *argv: str) -> str:
    """Run a script in n processes; return what they print."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}"]
    command = [sys.executable, *launch, *argv]
    done = warm.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_each_shard_and_recompute_trains_as_ddp_does():
    script = REPO / "tests" / "shards_as_ddp.py"
    assert script_on(3, str(script), "4", "qwen3", "3").count("norm ") == 2 * 7


@pytest.mark.slow
def test_the_peak_of_a_rank_is_the_predicted_one_within_5_percent():
    some = ["--optimizers=adamw", "--accums=1", "--shards", "gradients", "all"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m"]
    command = [sys.executable, *launch, "bench.shards", *some, "--recomputes=blocks"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("predicted ") == 2


OVERFLOW = f"""
import math, sys
sys.path.insert(0, {str(REPO)!r})
import torch
from itertools import repeat
from hardware.machine import start
from model import GPT
from training.optimizer import make_optimizer
from training.parallel import wrap
from training.settings import TrainConfig, model_config
from training.shards import part
from training.step import Batch, take_step

machine = start("cpu", "float32")
for optimizer in ("adamw", "muon"):
    cfg = TrainConfig(max_steps=1, n_layer=1, n_head=2, n_embd=16, shard="all", optimizer=optimizer)
    model = GPT(model_config(cfg, 100))
    model.init_weights()
    forward = wrap(cfg, model, machine, None, 1, "")
    made = make_optimizer(cfg, machine, model)
    scaler = torch.amp.GradScaler("cpu")
    batches = repeat(Batch(*[torch.zeros(1, 8, dtype=torch.long)] * 2))

    def skipped():
        before = [part(p).detach().clone() for p in model.parameters()]
        take_step(forward, made, scaler, batches, 1, machine, 1.0)
        return all(torch.equal(a, part(p)) for a, p in zip(before, model.parameters()))

    unscale = scaler.unscale_
    def overflow(optimizer):
        if machine.rank == 1:
            part(model.wte.weight.grad)[0, 0] = math.inf
        unscale(optimizer)

    scaler.unscale_ = overflow
    first = skipped()
    scaler.unscale_ = unscale
    print("skipped", first, "then", skipped())
machine.gather(None)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_an_overflow_in_the_part_of_one_rank_skips_the_step_on_all(tmp_path):
    """With the GradScaler of fp16."""
    script = tmp_path / "overflow.py"
    script.write_text(OVERFLOW)
    assert script_on(2, str(script)).count("skipped True then False") == 4


@pytest.fixture(scope="module")
def sharded(tiny_data, tmp_path_factory) -> Path:
    """An uninterrupted run of two ranks that shard everything."""
    out = tmp_path_factory.mktemp("sharded")
    return train_on(2, tiny_data, out, "--shard=all", "--recompute=blocks", *DROPOUT)


@pytest.mark.slow
def test_a_resumed_run_of_the_same_ranks_is_bit_identical(sharded, tiny_data, tmp_path):
    stop_half_way(sharded, tmp_path)
    options = ["--shard=all", "--recompute=blocks", "--init_from=resume", *DROPOUT]
    run = train_on(2, tiny_data, tmp_path, *options)
    assert same(run, sharded)
    for key in ("loss", "grad_norm", "val_loss"):
        assert metrics(run, key) == metrics(sharded, key)


@pytest.mark.slow
def test_what_gradients_and_all_compute_is_the_same_to_the_bit(sharded, tiny_data, tmp_path):
    assert same(train_on(2, tiny_data, tmp_path, "--shard=gradients", *DROPOUT), sharded)


@pytest.mark.slow
@pytest.mark.parametrize("n, shard", [(1, "all"), (3, "optimizer")])
def test_another_number_of_ranks_and_another_shard_go_on_within_rounding(
    n, shard, tiny_data, tmp_path
):
    """Without dropout, whose masks depend on the rank. 3 ranks do not divide a step of 8 windows,
    so all runs here have 6: one rank reads six, and three ranks two each."""
    sizes = ["--batch_size=1", "--batch_tokens=192", "--optimizer=muon"]
    whole = train_on(2, tiny_data, tmp_path / "whole", "--shard=all", *sizes)
    stop_half_way(whole, tmp_path)
    more = [f"--shard={shard}", "--init_from=resume"]
    if n == 1:
        run = train_tiny(tiny_data, tmp_path, *sizes, *more)
    else:
        run = train_on(n, tiny_data, tmp_path, *sizes, *more)
    for key in ("loss", "grad_norm", "val_loss"):
        assert metrics(run, key) == pytest.approx(metrics(whole, key), rel=1e-4), key


def test_recompute_changes_nothing_not_even_what_dropout_draws(tiny_data, tmp_path):
    runs = [
        train_tiny(tiny_data, tmp_path / how, f"--recompute={how}", *DROPOUT)
        for how in ("none", "blocks")
    ]
    assert same(*runs)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on the CPU needs g++")
def test_blocks_that_are_compiled_and_computed_twice_train_as_eager_ones(
    tiny_data, tmp_path, capsys
):
    options = ["--recompute=blocks", "--max_steps=4"]
    eager = train_tiny(tiny_data, tmp_path / "eager", *options)
    compiled = train_tiny(tiny_data, tmp_path / "compiled", *options, "--compile")
    assert "compiled in" in capsys.readouterr().out
    for key in ("loss", "grad_norm", "val_loss"):
        assert metrics(compiled, key) == pytest.approx(metrics(eager, key), rel=1e-4)


def test_what_cannot_be_sharded_is_refused_in_one_line(tiny_data, tmp_path, refuses):
    options = [f"--data_dir={tiny_data}", f"--out_dir={tmp_path}", "--dataset=tiny", "--shard=all"]
    options.append("--max_steps=1")
    error = refuses(train.main, *options, "--optimizer=adafactor")
    assert "shard=all goes with adamw or muon" in error
    assert "average" in refuses(train.main, *options, "--average=0.5")
    assert newest_checkpoint(tmp_path / "run" / "ckpt") is None

"""Measure a model's training step along five axes: speed, MFU and memory.

    # the first three axes
    python -m bench.sweep config/train_100m.py
    # one axis; batch size 0 stands for the largest that is predicted to fit into a GPU
    python -m bench.sweep config/train_100m.py --vary=B --batch_sizes 8 16 32 0
    # also write the figures to a file
    python -m bench.sweep config/train_100m.py --json=sweep.json
    # what an optimizer costs, and what it costs to keep documents apart
    python -m bench.sweep config/minimind_26m.py --vary=optimizer --batch_tokens=8192
    python -m bench.sweep config/minimind_26m.py --vary=documents --dataset=NAME

    T          sequences of 1 ... 8192 tokens, with B = 1 and accum = 1
    B          1 ... 16 sequences and as many as fit, with the settings' block_size and accum = 1
    accum      1 ... 16 micro-steps, with the settings' block_size and batch_size
    optimizer  each of them, with the settings' block_size, batch_size and batch_tokens
    documents  each of them, with the same, and with the windows and vocabulary of a data set

The tables show why a GPU is not busy. Every setting of train.py is accepted too. A cell is the
median time of a step like train.py's, on one device, with a new model. The token ids are random and
already on the device, so that loading data costs nothing here (except for documents). The row of
T = 1 is the time of a step of one token: a step of any size costs at least that. OOM: the cell does
not fit into memory.

Along the last two axes the cells share one model and take turns, so that a disturbance affects all
of them. A note gives the difference to the first cell in percent.
"""

import gc
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import get_args, get_type_hints

import torch

from bench.measure import (
    StepConfig,
    Training,
    batches_of,
    facts_of,
    in_turns,
    new_optimizer,
    new_training,
    table,
    text,
    write_json,
)
from configurator import changes, option, parse, run
from hardware.limits import memory_capacity, out_of_memory
from hardware.machine import Machine, start
from hardware.peak import peak_tflops
from hardware.terminal import ProgressBar
from model import GPT
from text.dataset import open_datasets, train_loader
from training.batch_size import wants_compile
from training.memory import Workload, largest_batch
from training.plan import Plan, make_plan
from training.settings import TrainConfig, model_config, with_data

AXES = ("T", "B", "accum", "optimizer", "documents")
SETTINGS = ("optimizer", "documents")  # measured by turns


@dataclass(frozen=True)
class SweepConfig(StepConfig):
    vary: tuple[str, ...] = option(AXES[:3], "in this order", choices=AXES, group="What to vary")
    block_sizes: tuple[int, ...] = option(
        (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192), "T", minimum=1
    )
    batch_sizes: tuple[int, ...] = option((1, 8, 12, 16, 0), "B; 0: the most that fits", minimum=0)
    accums: tuple[int, ...] = option((1, 8, 16), "micro-steps in a step", minimum=1)
    vocab_size: int = option(50257, "GPT-2's; a small model's head takes much time", minimum=1)
    warmup: int = option(3, "untimed steps; the first one compiles", minimum=1, group="Of a cell")
    steps: int = option(10, "timed steps", minimum=1)
    seconds: float = option(20.0, "a slow cell ends after this time, with fewer steps", above=0)
    rounds: int = option(8, "optimizer, documents: turns of two timed steps each", minimum=1)
    json: str = option("", "also write the figures to this file, after every cell", group="Output")


# --------------------------------------------------------------------------------------------------
# Cells


def cells_along(
    axis: str, cfg: SweepConfig, machine: Machine, peak: float | None
) -> Iterator[dict]:
    """Yield the cells of an axis. peak: TFLOPS of the device, for MFU, or None if unknown."""
    if axis in SETTINGS:
        yield from interleaved_cells(axis, cfg, machine, peak)
        return
    on_cuda = machine.device.type == "cuda"  # elsewhere, running out of memory kills the process
    batches = [B or largest(cfg, machine) for B in cfg.batch_sizes if B or on_cuda]
    shapes = {  # T, B, accum
        "T": [(T, 1, 1) for T in cfg.block_sizes],
        "B": [(cfg.block_size, B, 1) for B in batches],
        "accum": [(cfg.block_size, cfg.batch_size, accum) for accum in cfg.accums],
    }
    for T, B, accum in ProgressBar(axis, shapes[axis]):
        yield measure(replace(cfg, block_size=T, batch_size=B), accum, machine, peak)


def largest(cfg: SweepConfig, machine: Machine) -> int:
    """Return the largest batch that is predicted to fit, with one micro-step."""
    with torch.device("meta"):
        model = GPT(model_config(cfg, cfg.vocab_size))
    compiled = wants_compile(cfg, machine.device.type, 0)
    one = Plan(1, 1, step_tokens=cfg.block_size, epoch_tokens=0, steps=1, compiled=compiled)
    workload = Workload.of(cfg, one, machine)
    return max(1, largest_batch(model, workload, memory_capacity(machine.device)))


def measure(cfg: SweepConfig, accum: int, machine: Machine, peak: float | None) -> dict:
    """Measure the cell of the settings' block_size and batch_size.

    Return T, B, accum, a note, and the figures. There are no figures if the note is "OOM".
    """
    cell = {"T": cfg.block_size, "B": cfg.batch_size, "accum": accum, "note": ""}
    is_cuda = machine.device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        cell |= train_steps(cfg, accum, machine, peak)
        cell["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9 if is_cuda else None
    except (RuntimeError, MemoryError) as e:
        if not out_of_memory(e):
            raise
        cell["note"] = "OOM"
    # The model was local to train_steps, and is gone with the exception. What is left of it hangs
    # in reference cycles, caches and compiled code.
    if wants_compile(cfg, machine.device.type, 0):
        torch.compiler.reset()  # dynamo compiles a function at most 8 times: reset its count
    gc.collect()
    if is_cuda:
        torch.cuda.empty_cache()
    return cell


def train_steps(cfg: SweepConfig, accum: int, machine: Machine, peak: float | None) -> dict:
    """Train a new model, and return the figures of a step."""
    training = replace(new_training(cfg, model_config(cfg, cfg.vocab_size), machine), accum=accum)
    training.timed(cfg.warmup, cfg.seconds)  # compiles, allocates the optimizer's state
    return figures_of(training.timed(cfg.steps, cfg.seconds), training, peak)


def figures_of(seconds: list[float], training: Training, peak: float | None) -> dict:
    """Return the figures of a step that took the median of `seconds`."""
    cfg = training.cfg
    median = statistics.median(seconds)
    tokens_per_s = cfg.batch_size * cfg.block_size * training.accum / median
    tflops = tokens_per_s * training.model.flops_per_token(cfg.block_size) / 1e12
    rates = dict(it_per_s=1 / median, tokens_per_s=tokens_per_s, step_ms=1e3 * median)
    return rates | dict(tflops=tflops, mfu=tflops / peak if peak else None, seconds=seconds)


def interleaved_cells(
    axis: str, cfg: SweepConfig, machine: Machine, peak: float | None
) -> Iterator[dict]:
    """Yield a cell for each value of the setting `axis`. The cells share one model."""
    plan = make_plan(cfg, 1, 1)
    cfg, accum = replace(cfg, batch_size=plan.batch_size), plan.accum
    shared = replace(new_training(cfg, model_config(cfg, cfg.vocab_size), machine), accum=accum)
    trainings: dict[str, Training] = {}
    for value in get_args(get_type_hints(TrainConfig)[axis]):
        if axis == "documents":
            sets = open_datasets(cfg.dataset, cfg.data_dir)
            loader = train_loader(sets, cfg.block_size, cfg.seed, value)
            batches = batches_of(loader, cfg.batch_size, machine)
            trainings[value] = replace(shared, batches=batches)
        else:
            optimizer = new_optimizer(replace(cfg, optimizer=value), machine, shared.model)
            trainings[value] = replace(shared, optimizer=optimizer)

    # The first step of a turn is not timed.
    seconds = in_turns(trainings, cfg.rounds, lambda value: trainings[value].timed(3)[1:])
    base = statistics.median(next(iter(seconds.values())))
    for value, times in seconds.items():
        note = f"{value}: {statistics.median(times) / base - 1:+.1%}"
        cell = {"T": cfg.block_size, "B": cfg.batch_size, "accum": accum, "note": note}
        yield cell | figures_of(times, shared, peak)


# --------------------------------------------------------------------------------------------------

# The columns of the tables: keys of a cell.
SHOWN = ("T", "B", "accum", "it_per_s", "tokens_per_s", "tflops", "mfu", "memory_gb", "step_ms")


def main() -> None:
    cfg = parse(SweepConfig, doc=__doc__)
    if "documents" in cfg.vary:
        cfg = with_data(cfg)
        data = open_datasets(cfg.dataset, cfg.data_dir)[0]
        cfg = replace(cfg, vocab_size=data.meta["vocab_size"])
    with torch.device("meta"):  # only the shapes of the weights are needed
        model = GPT(model_config(cfg, cfg.vocab_size))
    machine = start(cfg.device, cfg.dtype)
    peak, peak_source = peak_tflops(machine.device, machine.dtype, cfg.peak_tflops)
    shape = f"at T = {cfg.block_size}, a vocabulary of {cfg.vocab_size:,}"
    facts = facts_of(machine.device) | {
        "model": f"{model.num_params()['total']:,} parameters {shape}",
        "precision": f"{str(machine.dtype).removeprefix('torch.')}: {machine.why}",
        "compile": str(wants_compile(cfg, machine.device.type, 0)).lower(),
        "peak": peak_source,
    }
    cells: list[dict] = []
    for key, value in facts.items():
        print(f"{key}: {value}")
    for axis in cfg.vary:
        rows: list[dict] = []
        for cell in cells_along(axis, cfg, machine, peak):
            cells.append({"axis": axis} | cell)
            rows.append({key: cell.get(key) or math.nan for key in SHOWN} | {"note": cell["note"]})
            ProgressBar.write(", ".join(f"{key} {text(x)}" for key, x in rows[-1].items()))
            write_json(cfg.json, facts | {"settings": changes(cfg), "cells": cells})
        table(axis, rows)


if __name__ == "__main__":
    run(main)

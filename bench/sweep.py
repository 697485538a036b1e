"""Measure a model's training step along five axes: speed, MFU, memory and power.

    # the first three axes
    python -m bench.sweep config/train_100m.py
    # one axis; batch size 0 stands for the largest, which batch_size=auto takes
    python -m bench.sweep config/train_100m.py --vary=B --batch_sizes 8 16 32 0
    python -m bench.sweep config/train_100m.py --json=sweep.json --markdown=sweep.md
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
already on the device, so that loading data costs nothing here (except for documents). The last line
is the time of a step of one token: a step of any size costs at least that. Power needs the package
nvidia-ml-py.

Along the last two axes the cells share one model and take turns, so that whatever disturbs one of
them disturbs all. A note gives the difference to the first cell in percent; for documents also the
share of the T x T pairs of tokens that are in one document.
"""

import ctypes
import gc
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import get_args, get_type_hints

import torch
from training.step import read_ahead

from bench.measure import (
    Training,
    facts_of,
    new_optimizer,
    new_training,
    no_folder,
    not_positive,
    step_problems,
    take_turns,
    write_json,
)
from configurator import changes, option, parse, run
from hardware import kernels
from hardware.disk import write_whole
from hardware.machine import Clock, Machine, capacity, out_of_memory, start
from hardware.peak import peak_tflops
from hardware.terminal import ProgressBar
from model import GPT
from text.dataset import open_datasets, train_loader
from training.banner import share_within
from training.memory import Step, largest_batch
from training.parallel import wants_compile
from training.plan import make_plan
from training.resume import with_data
from training.settings import TrainConfig, model_config

SHAPES = ("T", "B", "accum")
SETTINGS = ("optimizer", "documents")  # measured by turns


@dataclass(frozen=True)
class SweepConfig(TrainConfig):
    vary: str = option(
        "T,B,accum",
        "axes, in the order of their measurement; also optimizer, documents",
        group="What to vary",
    )
    block_sizes: tuple[int, ...] = option((1, 8, 32, 128, 512, 1024, 2048, 4096, 8192), "T")
    batch_sizes: tuple[int, ...] = option((1, 8, 12, 16, 0), "B; 0: batch_size=auto's (CUDA only)")
    accums: tuple[int, ...] = option((1, 8, 16), "micro-steps in a step")
    vocab_size: int = option(50257, "GPT-2's; the head takes much of a small model's time")
    warmup: int = option(
        3, "steps before the clock starts; the first one compiles", group="Measurement of a cell"
    )
    steps: int = option(
        10, "timed steps; more where power is measured, until 2 seconds have passed"
    )
    seconds: float = option(20.0, "a slow cell ends after this time, with fewer steps")
    rounds: int = option(
        8, "optimizer, documents: turns of a cell, each an untimed and two timed steps"
    )
    json: str = option("", "also write the figures to this file, after every cell", group="Output")
    markdown: str = option("", "also write all that is printed to this file")

    def problems(self) -> list[str]:
        axes = (*SHAPES, *SETTINGS)
        unknown = [axis for axis in self.vary.split(",") if axis not in axes]
        problems = step_problems(self) + no_folder(self, "json", "markdown")
        problems += [f"vary: {axis!r} is none of {', '.join(axes)}" for axis in unknown]
        counts = "block_sizes accums vocab_size warmup steps seconds rounds"
        problems += not_positive(self, *counts.split())
        if any(B < 0 for B in self.batch_sizes):
            problems.append("batch_sizes must not be negative")
        return problems


# --------------------------------------------------------------------------------------------------
# Memory and power, as the machine reports them


def reset_peak(device: torch.device) -> Callable[[], int] | None:
    """Reset the peak of the memory; return a function that reads the new peak in bytes.

    Return None where this machine cannot do that.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return lambda: torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    try:
        # Give back what the previous cell has freed: hardware/device.py has glibc keep it.
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # man 5 proc: sets VmHWM to VmRSS
    except (OSError, AttributeError):  # macOS, another C library, a sandbox's /proc
        return None
    return lambda: 1024 * int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1])


# NVML refreshes its figures only a few times a second. The timed part has to last longer than that.
POWER_SECONDS = 2.0


@cache
def power_meter(device: torch.device) -> Callable[[], tuple[float, int]] | None:
    """Return a function that reads energy and utilisation of a GPU, or None without NVML.

    It returns the joules since the driver was loaded, and in which share of the last moments a
    kernel was running, in percent.
    """
    if device.type != "cuda":
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        # NVML numbers all GPUs of the computer, torch those of CUDA_VISIBLE_DEVICES. So the UUID
        # has to identify the GPU.
        uuid = torch.cuda.get_device_properties(device).uuid
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())

        def read() -> tuple[float, int]:
            joules = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3
            return joules, pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu

        read()
        return read
    except Exception:
        # The package or the driver is missing, the device is a slice of a GPU (MIG), or the GPU has
        # no counter of energy (before Volta).
        return None


# --------------------------------------------------------------------------------------------------
# Cells


def cells_along(
    axis: str, cfg: SweepConfig, machine: Machine, peak: float | None
) -> Iterator[dict]:
    """Yield the cells of an axis. peak: TFLOPS of the device, for MFU, or None if unknown."""
    if axis in SETTINGS:
        yield from by_turns(axis, cfg, machine, peak)
        return
    shapes = {  # T, B, accum
        "T": [(T, 1, 1) for T in cfg.block_sizes],
        "B": [(cfg.block_size, B, 1) for B in cfg.batch_sizes],
        "accum": [(cfg.block_size, cfg.batch_size, accum) for accum in cfg.accums],
    }
    for T, B, accum in ProgressBar(axis, shapes[axis]):
        if B:
            yield measure(replace(cfg, block_size=T, batch_size=B), accum, machine, peak)
        else:
            yield largest(cfg, machine, peak)


def measure(cfg: SweepConfig, accum: int, machine: Machine, peak: float | None) -> dict:
    """Measure the cell of the settings' block_size and batch_size.

    Return T, B, accum, a note, and the figures. There are no figures if the note is "OOM" or
    "failed: ...".
    """
    model_config(cfg, cfg.vocab_size)  # raises UserError for impossible settings, before the `try`
    cell = {"T": cfg.block_size, "B": cfg.batch_size, "accum": accum, "note": ""}
    peak_bytes = reset_peak(machine.device)
    try:
        cell |= train_steps(cfg, accum, machine, peak)
        cell["memory_gb"] = peak_bytes() / 1e9 if peak_bytes else None
    except Exception as e:  # of any kind: the other cells are still wanted
        failure = f"failed: {type(e).__name__}: {' '.join(str(e).split())[:200]}"
        cell["note"] = "OOM" if out_of_memory(e) else failure
    # The model was local to train_steps, and is gone with the exception. What is left of it hangs
    # in reference cycles, caches and compiled code.
    if wants_compile(cfg, machine.device.type, 0):
        torch.compiler.reset()  # and dynamo, which compiles a function 8 times at most, counts anew
    gc.collect()
    if machine.device.type == "cuda":
        torch.cuda.empty_cache()
    return cell


def train_steps(cfg: SweepConfig, accum: int, machine: Machine, peak: float | None) -> dict:
    """Train a new model, and return the figures of a step."""
    training = replace(new_training(cfg, model_config(cfg, cfg.vocab_size), machine), accum=accum)
    timed(training, cfg.warmup, at_most=cfg.seconds)  # compiles, allocates the optimizer's state
    meter = power_meter(machine.device)
    meter_at_start = meter() if meter else None
    start_time = time.perf_counter()
    at_least = POWER_SECONDS if meter else 0.0
    seconds = timed(training, cfg.steps, at_least, cfg.seconds)
    wall = time.perf_counter() - start_time
    meter_at_end = meter() if meter else None

    figures = figures_of(seconds, training, peak)
    if meter:
        joules = meter_at_end[0] - meter_at_start[0]
        tokens = cfg.batch_size * cfg.block_size * accum * len(seconds)
        figures |= {"power_w": joules / wall, "utilisation": meter_at_end[1]}
        figures["wh_per_mtok"] = joules / 3600 / (tokens / 1e6)
    return figures


def timed(
    training: Training, steps: int, at_least: float = 0.0, at_most: float = math.inf
) -> list[float]:
    """Time so many steps, or more of them until they last `at_least` seconds.

    They are fewer if they last `at_most` seconds before, but at least one. Return the seconds of
    each. Raises ArithmeticError if the loss or the gradient is not finite.
    """
    seconds: list[float] = []
    machine = training.machine
    while True:
        start_time = time.perf_counter()
        loss, grad_norm = training.step()()
        machine.synchronize()  # the loss arrives before the optimizer has finished
        seconds.append(time.perf_counter() - start_time)
        # The optimizer skips a step whose gradient is not finite: its time would mislead. In
        # fp16 such steps are normal at first, until GradScaler has lowered its scale.
        skipped = not math.isfinite(grad_norm) and machine.dtype != torch.float16
        if skipped or not math.isfinite(loss):
            raise ArithmeticError(f"loss {loss}, norm of the gradient {grad_norm}")
        total = sum(seconds)
        enough = len(seconds) >= steps and total >= at_least
        if enough or total >= at_most:
            return seconds


def figures_of(seconds: list[float], training: Training, peak: float | None) -> dict:
    """Return the figures of a step that took the median of `seconds`."""
    cfg = training.cfg
    median = statistics.median(seconds)
    tokens_per_s = cfg.batch_size * cfg.block_size * training.accum / median
    tflops = tokens_per_s * training.model.flops_per_token(cfg.block_size) / 1e12
    rates = dict(it_per_s=1 / median, tokens_per_s=tokens_per_s, step_ms=1e3 * median)
    return rates | dict(tflops=tflops, mfu=tflops / peak if peak else None, seconds=seconds)


def by_turns(axis: str, cfg: SweepConfig, machine: Machine, peak: float | None) -> Iterator[dict]:
    """Yield a cell for each value of the setting `axis`. The cells share one model."""
    plan = make_plan(replace(cfg, max_steps=1), 1, 1)
    cfg, accum = replace(cfg, batch_size=plan.batch_size), plan.accum
    shared = replace(new_training(cfg, model_config(cfg, cfg.vocab_size), machine), accum=accum)
    trainings: dict[str, Training] = {}
    notes: dict[str, str] = {}
    for value in get_args(get_type_hints(TrainConfig)[axis]):
        if axis == "documents":
            sets = open_datasets(cfg.dataset, cfg.data_dir)
            loader = train_loader(sets, cfg.block_size, cfg.seed, value)
            batches = read_ahead(loader, 0, cfg.batch_size, machine, Clock(machine, 0))
            trainings[value] = replace(shared, batches=batches)
            notes[value] = f", {share_within(loader):.0%} of the pairs"
        else:
            optimizer = new_optimizer(replace(cfg, optimizer=value), machine, shared.model)
            trainings[value] = replace(shared, optimizer=optimizer)
            notes[value] = ""

    def turn(value: str) -> list[float]:
        timed(trainings[value], 1)
        return timed(trainings[value], 2)

    turns = take_turns({value: partial(turn, value) for value in trainings}, cfg.rounds)
    seconds = {value: sum(of_turns, []) for value, of_turns in turns.items()}
    medians = {value: statistics.median(of_value) for value, of_value in seconds.items()}
    base = next(iter(medians.values()))
    for value, median in medians.items():
        note = f"{value}: {median / base - 1:+.1%}{notes[value]}"
        cell = {"T": cfg.block_size, "B": cfg.batch_size, "accum": accum, "note": note}
        yield cell | figures_of(seconds[value], shared, peak)


def largest(cfg: SweepConfig, machine: Machine, peak: float | None) -> dict:
    """Measure the batch that batch_size=auto takes: the largest predicted to fit, or a smaller."""
    if machine.device.type != "cuda":
        note = "left out: where memory is not the GPU's own, running out may kill the process"
        return {"T": cfg.block_size, "B": "largest", "accum": 1, "note": note}
    with torch.device("meta"):
        model = GPT(model_config(cfg, cfg.vocab_size))
    compiled = wants_compile(cfg, "cuda", 0)
    step = Step(1, cfg.block_size, 1, machine.dtype, compiled, "cuda").of(cfg)
    B = max(1, largest_batch(model, step, capacity(machine.device)))
    cell = measure(replace(cfg, batch_size=B), 1, machine, peak)
    while cell["note"] == "OOM" and B > 1:
        B = B * 7 // 8
        cell = measure(replace(cfg, batch_size=B), 1, machine, peak)
    return cell


def floor(cell: dict) -> str:
    """Return, as text, the least time of any step: that of the cell of one token.

    Even for one token, the weights and the optimizer's state are read and written, and the host
    launches about as many kernels as for many tokens.
    """
    if cell["note"]:
        return f"not measured: {cell['note']}"
    seconds = cell["seconds"]
    return f"{1e3 * min(seconds):,.1f} ms, the fastest of {len(seconds)} steps of one token"


# --------------------------------------------------------------------------------------------------
# The tables, in Markdown: printed line by line, and written as a whole after every cell

COLUMNS = {  # key in a cell: heading, format
    "T": ("T", "d"),
    "B": ("B", "d"),
    "accum": ("accum", "d"),
    "it_per_s": ("it/s", ",.2f"),
    "tokens_per_s": ("tok/s", ",.0f"),
    "tflops": ("TFLOPS", ".3f"),
    "mfu": ("MFU", ".1%"),
    "memory_gb": ("peak GB", ".2f"),
    "step_ms": ("ms", ",.1f"),
}
POWER = {
    "power_w": ("W", ",.0f"),
    "utilisation": ("util %", "d"),
    "wh_per_mtok": ("Wh/Mtok", ",.3f"),
}


def texts(cell: dict, columns: dict) -> list[str]:
    """Return a cell's figures as text, "n/a" for one that it does not have, and its note."""
    row = []
    for key, (_, form) in columns.items():
        value = cell.get(key)
        number = isinstance(value, int | float)
        row.append(format(value, form) if number else value or "n/a")
    return [*row, cell["note"]]


def table_row(row: list[str]) -> str:
    """Return a row of a table in Markdown, whose columns stand in line in a terminal too."""
    *figures, last = row
    return f"| {' | '.join(f'{text:>7}' for text in figures)} | {last.replace('|', '/')} |"


def describe(cfg: SweepConfig, model: GPT, machine: Machine, peak_source: str) -> dict[str, str]:
    """Return what the tables are about: the machine, the command, the model, and so on."""
    device = machine.device
    shape = f"at T = {cfg.block_size}, a vocabulary of {cfg.vocab_size:,}"
    return facts_of(device) | {
        "model": f"{model.num_params()['total']:,} parameters {shape}",
        "precision": f"{str(machine.dtype).removeprefix('torch.')}: {machine.why}",
        "compile": str(wants_compile(cfg, device.type, 0)).lower(),
        "peak": peak_source,
        "peak memory": "allocated" if device.type == "cuda" else "resident, with Python and torch",
    }


def main() -> None:
    cfg = parse(SweepConfig, doc=__doc__)
    axes = cfg.vary.split(",")
    if "documents" in axes:
        cfg = with_data(cfg)
        data = open_datasets(cfg.dataset, cfg.data_dir)[0]
        cfg = replace(cfg, vocab_size=data.meta["vocab_size"])
    with torch.device("meta"):  # only the shapes of the weights are needed
        model = GPT(model_config(cfg, cfg.vocab_size))
    kernels.install()
    machine = start(cfg.device, cfg.dtype)
    peak, peak_source = peak_tflops(machine.device, machine.dtype, cfg.peak_tflops)
    facts = describe(cfg, model, machine, peak_source)
    columns = COLUMNS | (POWER if power_meter(machine.device) else {})
    headings = [heading for heading, _ in columns.values()]
    cells: list[dict] = []
    lines: list[str] = []  # of all that was printed

    def show(*added: str) -> None:
        """Print lines. Write the files anew, so that they are there if the sweep is ended."""
        machine.say("\n".join(added))
        lines.extend(added)
        write_json(cfg.json, facts | {"settings": changes(cfg), "cells": cells})
        if cfg.markdown:
            write_whole(Path(cfg.markdown), "\n".join([*lines, ""]).encode())

    show(f"# {facts['machine']}", "", *(f"* {k}: {v}" for k, v in facts.items() if k != "machine"))
    for axis in axes:
        rule = table_row([*["--:"] * len(columns), ":--"])
        show("", f"## {axis}", "", table_row([*headings, "note"]), rule)
        for cell in cells_along(axis, cfg, machine, peak):
            cells.append({"axis": axis} | cell)
            show(table_row(texts(cell, columns)))

    if any(axis in SHAPES for axis in axes):
        smallest = measure(replace(cfg, block_size=1, batch_size=1), 1, machine, peak)
        facts["any step"] = floor(smallest)
        show("", f"any step, at least: {facts['any step']}")
    if any("failed: " in c["note"] for c in cells):
        sys.exit(1)


if __name__ == "__main__":
    run(main)

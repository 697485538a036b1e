"""Measure a model's training step along five axes: speed, MFU, memory and power.

    # the first three axes
    python -m bench.sweep config/train_100m.py
    # one axis; batch size 0 stands for the largest, which batch_size=auto takes
    python -m bench.sweep config/train_100m.py --vary=B --batch_sizes 8 16 32 0
    # what is printed is Markdown
    python -m bench.sweep config/train_100m.py --json=sweep.json >sweep.md
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
import re
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args, get_type_hints

import torch

from bench.measure import (
    Training,
    batches_of,
    begin,
    facts_of,
    new_optimizer,
    new_training,
    no_folder,
    not_positive,
    step_problems,
    turns,
    write_json,
)
from configurator import changes, option, parse, run
from hardware.machine import Machine, memory_capacity, out_of_memory
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

    def problems(self) -> list[str]:
        axes = (*SHAPES, *SETTINGS)
        unknown = [axis for axis in self.vary.split(",") if axis not in axes]
        problems = step_problems(self) + no_folder(self, "json")
        problems += [f"vary: {axis!r} is none of {', '.join(axes)}" for axis in unknown]
        problems += not_positive(self, "block_sizes", "accums", "vocab_size", "warmup", "steps")
        problems += not_positive(self, "seconds", "rounds")
        if any(B < 0 for B in self.batch_sizes):
            problems.append("batch_sizes must not be negative")
        return problems


# --------------------------------------------------------------------------------------------------
# Memory and power, as the machine reports them


def reset_peak(device: torch.device) -> bool:
    """Begin a new measurement of peak_gb(). Return whether this machine can do that."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        # Give back what the previous cell has freed: hardware/device.py has glibc keep it.
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # man 5 proc: sets VmHWM to VmRSS
        return True
    except (OSError, AttributeError):  # macOS, another C library, a sandbox's /proc
        return False


def peak_gb(device: torch.device) -> float:
    """Return the peak of the memory since reset_peak(), in GB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1e9


# NVML refreshes its figures only a few times a second. The timed part has to last longer than that.
POWER_SECONDS = 2.0


def power_meter(device: torch.device) -> tuple[float, int] | None:
    """Return the joules that a GPU has used since its driver was loaded, and how busy it is.

    That is the share of the last moments in which a kernel was running, in percent. None: this
    machine does not tell.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        # NVML numbers all GPUs of the computer, torch those of CUDA_VISIBLE_DEVICES. So the UUID
        # has to identify the GPU.
        uuid = torch.cuda.get_device_properties(device).uuid
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        joules = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3
        return joules, pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu
    except Exception:
        # The device is no GPU of NVIDIA or a slice of one (MIG), the package or the driver is
        # missing, or the GPU has no counter of energy (before Volta).
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
    has_peak = reset_peak(machine.device)
    try:
        cell |= train_steps(cfg, accum, machine, peak)
        cell["memory_gb"] = peak_gb(machine.device) if has_peak else None
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
    training.timed(cfg.warmup, at_most=cfg.seconds)  # compiles, allocates the optimizer's state
    before = power_meter(machine.device)
    start_time = time.perf_counter()
    seconds = training.timed(cfg.steps, POWER_SECONDS if before else 0.0, cfg.seconds)
    wall = time.perf_counter() - start_time
    figures = figures_of(seconds, training, peak)
    if before:
        joules, utilisation = power_meter(machine.device)
        joules -= before[0]
        tokens = cfg.batch_size * cfg.block_size * accum * len(seconds)
        figures |= {"power_w": joules / wall, "utilisation": utilisation}
        figures["wh_per_mtok"] = joules / 3600 / (tokens / 1e6)
    return figures


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
            batches = batches_of(loader, cfg.batch_size, machine)
            trainings[value] = replace(shared, batches=batches)
            notes[value] = f", {share_within(loader):.0%} of the pairs"
        else:
            optimizer = new_optimizer(replace(cfg, optimizer=value), machine, shared.model)
            trainings[value] = replace(shared, optimizer=optimizer)
            notes[value] = ""

    seconds: dict[str, list[float]] = {value: [] for value in trainings}
    for value in turns(trainings, cfg.rounds):
        trainings[value].timed(1)
        seconds[value] += trainings[value].timed(2)
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
    B = max(1, largest_batch(model, step, memory_capacity(machine.device)))
    cell = measure(replace(cfg, batch_size=B), 1, machine, peak)
    while cell["note"] == "OOM" and B > 1:
        B = B * 7 // 8
        cell = measure(replace(cfg, batch_size=B), 1, machine, peak)
    return cell


# --------------------------------------------------------------------------------------------------
# The tables, in Markdown

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
    "power_w": ("W", ",.0f"),
    "utilisation": ("util %", "d"),
    "wh_per_mtok": ("Wh/Mtok", ",.3f"),
}


def cell_texts(cell: dict) -> list[str]:
    """Return a cell's figures as text, "n/a" for one that it does not have."""
    texts = []
    for key, (_, form) in COLUMNS.items():
        value = cell.get(key)
        number = isinstance(value, int | float)
        texts.append(format(value, form) if number else value or "n/a")
    return texts


def print_row(texts: list[str], note: str) -> None:
    """Print a row of a table in Markdown, whose columns stand in line in a terminal too."""
    row = f"| {' | '.join(f'{text:>7}' for text in texts)} | {note.replace('|', '/')} |"
    ProgressBar.write(row)
    sys.stdout.flush()


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
    machine = begin(cfg)
    peak, peak_source = peak_tflops(machine.device, machine.dtype, cfg.peak_tflops)
    facts = describe(cfg, model, machine, peak_source)
    cells: list[dict] = []
    print(f"# {facts['machine']}\n")
    for key, value in facts.items():
        print(f"* {key}: {value}")
    for axis in axes:
        print(f"\n## {axis}\n")
        print_row([heading for heading, _ in COLUMNS.values()], "note")
        print_row(["--:"] * len(COLUMNS), ":--")
        for cell in cells_along(axis, cfg, machine, peak):
            cells.append({"axis": axis} | cell)
            print_row(cell_texts(cell), cell["note"])
            write_json(cfg.json, facts | {"settings": changes(cfg), "cells": cells})

    if any(axis in SHAPES for axis in axes):
        # Even for one token, the weights and the optimizer's state are read and written, and the
        # host launches about as many kernels as for many tokens.
        cell = measure(replace(cfg, block_size=1, batch_size=1), 1, machine, peak)
        least = f"not measured: {cell['note']}"
        if not cell["note"]:
            seconds = cell["seconds"]
            least = (
                f"{1e3 * min(seconds):,.1f} ms, the fastest of {len(seconds)} steps of one token"
            )
        print(f"\nany step, at least: {least}")
        facts |= {"any step": least, "settings": changes(cfg), "cells": cells}
        write_json(cfg.json, facts)
    if any("failed: " in cell["note"] for cell in cells):
        sys.exit(1)


if __name__ == "__main__":
    run(main)

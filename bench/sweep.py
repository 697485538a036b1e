"""Measure a model's training step along three axes: speed, MFU, memory and power.

    # all three axes
    python bench/sweep.py config/train_100m.py
    # one axis; batch size 0 stands for the largest that fits
    python bench/sweep.py config/train_100m.py --vary=B --batch_sizes 8 16 32 0
    python bench/sweep.py config/train_100m.py --json=sweep.json --markdown=sweep.md

    T      sequences of 1 ... 8192 tokens, with B = 1 and accum = 1
    B      1 ... 16 sequences and as many as fit, with the block_size of the settings and accum = 1
    accum  1 ... 16 micro-steps, with the block_size and the batch_size of the settings

The tables show why a GPU is not busy. Every setting of train.py is accepted too. A cell is the
median time of a step like train.py's, on one device, with a new model. The token ids are random and
already on the device, so that loading data costs nothing here. The last line is the time of a step
of one token: a step of any size costs at least that. Power needs the package nvidia-ml-py.
"""

import ctypes
import gc
import json
import math
import os
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import repeat
from pathlib import Path

import torch

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # so that `python bench/sweep.py` finds the modules below
from configurator import UserError, changes, parse, run  # noqa: E402
from hardware.machine import Machine, out_of_memory, start  # noqa: E402
from hardware.peak import device_name, peak_tflops  # noqa: E402
from hardware.terminal import ProgressBar  # noqa: E402
from model import GPT  # noqa: E402
from training.optimizer import make_optimizer  # noqa: E402
from training.settings import TrainConfig, model_config, wants_compile  # noqa: E402
from training.step import Batch, take_step  # noqa: E402

AXES = ("T", "B", "accum")


@dataclass(frozen=True)
class SweepConfig(TrainConfig):
    # ---- What to vary ----
    vary: str = "T,B,accum"  # the axes, in the order in which they are measured
    block_sizes: tuple[int, ...] = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192)  # T
    batch_sizes: tuple[int, ...] = (1, 8, 12, 16, 0)  # B; 0: the largest, to 1/16 (CUDA only)
    accums: tuple[int, ...] = (1, 8, 16)  # micro-steps in a step
    vocab_size: int = 50257  # GPT-2's; the head takes much of the time of a small model
    # ---- Measurement of a cell ----
    warmup: int = 3  # steps before the clock starts; the first one compiles
    steps: int = 10  # timed steps; more where power is measured, until 2 seconds have passed
    seconds: float = 20.0  # a slow cell ends after this time, with fewer steps
    # ---- Output ----
    json: str = ""  # also write the figures to this file, after every cell
    markdown: str = ""  # also write the tables to this file

    def problems(self) -> list[str]:
        if self.batch_size == "auto":
            return ["batch_size=auto is for train.py and plan.py: give a number here"]
        wrong = TrainConfig.problems(replace(self, max_steps=1))  # a sweep needs no max_steps
        known = ", ".join(AXES)
        wrong += [f"vary: {a!r} is none of {known}" for a in self.vary.split(",") if a not in AXES]
        for name in ("block_sizes", "accums"):
            if not all(n > 0 for n in getattr(self, name)):
                wrong.append(f"{name} must be positive")
        for name in ("vocab_size", "warmup", "steps", "seconds"):
            if not getattr(self, name) > 0:
                wrong.append(f"{name} must be positive")
        if any(B < 0 for B in self.batch_sizes):
            wrong.append("batch_sizes must not be negative")
        return wrong


# --------------------------------------------------------------------------------------------------
# Memory and power, as the machine reports them


def resident(key: str) -> int:
    """Return this process's resident memory in bytes.

    key: VmRSS for now, VmHWM for the peak since it was last reset.
    """
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{key}:\s+(\d+)", status)[1])


def reset_peak(device: torch.device) -> Callable[[], int] | None:
    """Reset the peak of the memory; return a function that reads the new peak in bytes.

    Return None where this machine cannot do that.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return lambda: torch.cuda.max_memory_allocated(device)
    try:
        # Give back what the previous cell has freed: hardware/machine.py has glibc keep it.
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # man 5 proc: sets VmHWM to VmRSS
        was_reset = resident("VmHWM") < 1.05 * resident("VmRSS")
    except (OSError, AttributeError, TypeError):  # macOS, another C library, a sandbox's /proc
        return None
    if device.type != "cpu" or not was_reset:
        return None
    return lambda: resident("VmHWM")


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
# One cell


def measure(
    cfg: SweepConfig, T: int, B: int, accum: int, machine: Machine, peak: float | None
) -> dict:
    """Measure one cell of the table; peak: TFLOPS of the device, for MFU, or None if unknown.

    Return T, B, accum, a note, and the figures. There are no figures if the note is "OOM" or
    "failed: ...".
    """
    cfg = replace(cfg, block_size=T)  # learned positions need a row for each of the T
    model_config(cfg, cfg.vocab_size)  # raises UserError for impossible settings, before the `try`
    cell = {"T": T, "B": B, "accum": accum, "note": ""}
    peak_bytes = reset_peak(machine.device)
    try:
        cell |= train_steps(cfg, B, accum, machine)
        cell["mfu"] = cell["tflops"] / peak if peak else None
        cell["memory_gb"] = peak_bytes() / 1e9 if peak_bytes else None
    except Exception as e:  # of any kind: the other cells are still wanted
        if out_of_memory(e):
            cell["note"] = "OOM"
        else:
            cell["note"] = f"failed: {type(e).__name__}: {' '.join(str(e).split())[:200]}"
    # The model was local to train_steps, and is gone with the exception. What is left of it hangs
    # in reference cycles, caches and compiled code.
    if wants_compile(cfg, machine.device.type, 0):
        torch.compiler.reset()  # and dynamo, which compiles a function 8 times at most, counts anew
    gc.collect()
    if machine.device.type == "cuda":
        torch.cuda.empty_cache()
    return cell


def new_training(cfg: SweepConfig, B: int, accum: int, machine: Machine) -> tuple[GPT, Callable]:
    """Return a new model, and a function that trains it for a step as take_step() does.

    All steps train on the same batch (B, T) of random token ids.
    """
    device = machine.device
    torch.manual_seed(cfg.seed)
    with device:  # draw the weights on the device: a CPU takes seconds for 100M of them
        model = GPT(model_config(cfg, cfg.vocab_size))
        model.init_weights(cfg.init)
    model.to(device)  # moves the constants that numpy made
    optimizer = make_optimizer(cfg, machine, model)
    scaler = torch.amp.GradScaler(device.type, enabled=machine.dtype == torch.float16)
    compiled = wants_compile(cfg, device.type, 0)
    fast = torch.compile(model, dynamic=False) if compiled else model
    rows = torch.randint(cfg.vocab_size, (B, cfg.block_size + 1), device=device)
    batches = repeat(Batch(rows[:, :-1], rows[:, 1:]))  # views of rows, as to_batch() makes them

    def step() -> Callable[[], tuple[float, bool, float]]:
        return take_step(fast, model, optimizer, scaler, batches, accum, machine, cfg.grad_clip)

    return model, step


def train_steps(cfg: SweepConfig, B: int, accum: int, machine: Machine) -> dict:
    """Train a new model on batches (B, T), and return the figures of a step.

    Raises ArithmeticError if the loss or the gradient is not finite.
    """
    T = cfg.block_size
    model, step = new_training(cfg, B, accum, machine)
    launching: list[float] = []  # for each step, the seconds until the host has launched all of it

    def timed(n: int, at_least: float = 0.0) -> list[float]:
        """Return the seconds of each of n steps, or of more until they last `at_least` seconds.

        The steps are fewer if cfg.seconds pass before, but at least one.
        """
        seconds: list[float] = []
        launching.clear()
        while True:
            begun = time.perf_counter()
            result = step()
            launching.append(time.perf_counter() - begun)
            loss, _, grad_norm = result()
            machine.synchronize()  # the loss arrives before the optimizer has finished
            seconds.append(time.perf_counter() - begun)
            # The optimizer skips a step whose gradient is not finite: its time would mislead. In
            # fp16 such steps are normal at first, until GradScaler has lowered its scale.
            skipped = not math.isfinite(grad_norm) and machine.dtype != torch.float16
            if skipped or not math.isfinite(loss):
                raise ArithmeticError(f"loss {loss}, norm of the gradient {grad_norm}")
            total = sum(seconds)
            enough = len(seconds) >= n and total >= at_least
            if enough or total >= cfg.seconds:
                return seconds

    first = timed(1)[0]  # compiles, and allocates the optimizer's state
    if cfg.warmup > 1:
        timed(cfg.warmup - 1)
    meter = power_meter(machine.device)
    before = meter() if meter else None
    begun = time.perf_counter()
    seconds = timed(cfg.steps, POWER_SECONDS if meter else 0.0)
    wall = time.perf_counter() - begun
    after = meter() if meter else None

    median = statistics.median(seconds)
    tokens = B * T * accum
    figures = {"it_per_s": 1 / median, "tokens_per_s": tokens / median, "step_ms": 1e3 * median}
    figures["tflops"] = figures["tokens_per_s"] * model.flops_per_token(T) / 1e12
    if meter:
        joules = after[0] - before[0]
        figures |= {"power_w": joules / wall, "utilisation": after[1]}
        figures["wh_per_mtok"] = joules / 3600 / (tokens * len(seconds) / 1e6)
    figures["launching_ms"] = 1e3 * min(launching)
    return figures | {"first_step_s": first, "seconds": seconds}


def largest(cfg: SweepConfig, tried: list[dict], machine: Machine, peak: float | None) -> dict:
    """Find the largest batch that fits, to 1/16 of it, and measure its cell.

    The search starts from the cells that were tried already. It doubles the batch size until one
    fails, and then bisects.
    """
    if machine.device.type != "cuda":
        why = "left out: where memory is not the GPU's own, running out of it may kill the process"
        return {"T": cfg.block_size, "B": "largest", "accum": 1, "note": why}
    # Two steps are enough: in the second one the optimizer's state is there too, as at the peak.
    brief = replace(cfg, warmup=1, steps=1, seconds=0.0)
    fits = max((c["B"] for c in tried if not c["note"]), default=0)
    failed = [(c["B"], c["note"]) for c in tried if c["B"] > fits]
    fails, why = min(failed, default=(0, ""))  # 0: no failing size is known yet
    while not fails or fails - fits > max(1, fits // 16):
        B = (fits + fails) // 2 if fails else max(1, 2 * fits)
        note = measure(brief, cfg.block_size, B, 1, machine, peak)["note"]
        if note:
            fails = B
            why = note
        else:
            fits = B
    cell = measure(cfg, cfg.block_size, max(1, fits), 1, machine, peak)
    return cell | {"note": cell["note"] or f"largest: B={fails} gives {why}"}


def floor(cell: dict, device: torch.device) -> str:
    """Return, as text, the least time of any step: that of the cell of one token.

    Even for one token, the weights and the optimizer's state are read and written, and the host
    launches about as many kernels as for many tokens.

    On a GPU the text also says when the last launch returned. If that is near the end of the step,
    the GPU waits for the host. For larger cells this figure would mislead: a host that is about a
    thousand launches ahead has to wait for the GPU inside of a launch.
    """
    if cell["note"]:
        return f"not measured: {cell['note']}"
    seconds = cell["seconds"]
    ms = f"{1e3 * min(seconds):,.1f} ms, the fastest of {len(seconds)} steps of one token"
    if device.type == "cpu":
        return ms
    return f"{ms}; the host launches for {cell['launching_ms']:,.1f} ms of them"


# --------------------------------------------------------------------------------------------------
# The table: printed line by line, and written as a whole after every cell

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
    """Return a cell's figures as text, and its note.

    A figure that is missing is "-"; one that this machine cannot give is "n/a".
    """
    row = []
    for key, (_, form) in columns.items():
        value = cell.get(key, "-")
        if value is None:
            value = "n/a"
        row.append(value if isinstance(value, str) else format(value, form))
    return [*row, cell["note"]]


def aligned(row: list[str]) -> str:
    figures = "".join(f" {text:>9}" for text in row[:-1])
    return f"{figures}  {row[-1]}".rstrip()


def as_markdown(facts: dict, cells: list[dict], columns: dict) -> str:
    """Return the facts as a list, and the cells as one table for each axis."""
    listed = [f"* {k}: {v}" for k, v in facts.items() if k != "machine"]
    lines = [f"# {facts['machine']}", "", *listed]
    headings = [heading for heading, _ in columns.values()] + ["note"]
    for axis in dict.fromkeys(c["axis"] for c in cells):
        rows = [headings, ["--:"] * len(columns) + [":--"]]
        for cell in cells:
            if cell["axis"] == axis:
                rows.append([text.replace("|", r"\|") for text in texts(cell, columns)])
        lines += ["", f"## {axis}", "", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


def write(path: str, text: str) -> None:
    """Write a new file and then rename it, so that a kill leaves the earlier file whole."""
    if path:
        aside = Path(path + ".tmp")
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)


def facts_of(cfg: SweepConfig, model: GPT, machine: Machine, peak_source: str) -> dict[str, str]:
    """Return what the tables are about: the machine, the command, the model, and so on."""
    device = machine.device
    parameters = model.num_params()["total"]
    memory = "allocated on the GPU" if device.type == "cuda" else "none for each cell here"
    if device.type == "cpu" and reset_peak(device):
        base = f"{resident('VmRSS') / 1e9:.2f} GB of it are Python and torch"
        memory = f"resident, reset for each cell; {base}"
    shape = f"at T = {cfg.block_size}, a vocabulary of {cfg.vocab_size:,}"
    return {
        "machine": device_name(device),
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "command": shlex.join(["python", *sys.argv]),
        "model": f"{parameters:,} parameters {shape}",
        "precision": f"{str(machine.dtype).removeprefix('torch.')}: {machine.why}",
        "compile": str(wants_compile(cfg, device.type, 0)).lower(),
        "peak": peak_source,
        "peak memory": memory,
    }


def main() -> None:
    cfg = parse(SweepConfig, doc=__doc__)
    if "RANK" in os.environ:
        raise UserError("one device is measured: start it without torchrun")
    with torch.device("meta"):  # only the shapes of the weights are needed
        model = GPT(model_config(cfg, cfg.vocab_size))
    machine = start(cfg.device, cfg.dtype)
    peak, peak_source = peak_tflops(machine.device, machine.dtype, cfg.peak_tflops)
    facts = facts_of(cfg, model, machine, peak_source)
    columns = COLUMNS | (POWER if power_meter(machine.device) else {})
    headings = [heading for heading, _ in columns.values()]
    cells: list[dict] = []

    def save() -> None:
        found = facts | {"settings": changes(cfg), "cells": cells}
        write(cfg.json, json.dumps(found, indent=1) + "\n")
        write(cfg.markdown, as_markdown(facts, cells, columns))

    save()  # reports a path that cannot be written now, and not after the first cell
    machine.say("\n".join(f"{k:>11}: {v}" for k, v in facts.items()))
    shapes = {  # T, B, accum
        "T": [(T, 1, 1) for T in cfg.block_sizes],
        "B": [(cfg.block_size, B, 1) for B in cfg.batch_sizes],
        "accum": [(cfg.block_size, cfg.batch_size, accum) for accum in cfg.accums],
    }
    plan = [(axis, shape) for axis in cfg.vary.split(",") for shape in shapes[axis]]
    for axis, (T, B, accum) in ProgressBar("cells", plan):
        tried = [c for c in cells if c["axis"] == axis]
        if not tried:
            machine.say("\n" + aligned([*headings, f"by {axis}"]))
        if B:
            cell = measure(cfg, T, B, accum, machine, peak)
        else:
            cell = largest(cfg, tried, machine, peak)
        cells.append({"axis": axis} | cell)
        machine.say(aligned(texts(cell, columns)))
        save()

    smallest = next((c for c in cells if c["T"] == c["B"] == c["accum"] == 1), None)
    smallest = smallest or measure(cfg, 1, 1, 1, machine, peak)
    facts["any step"] = floor(smallest, machine.device)
    machine.say(f"\nany step, at least: {facts['any step']}")
    save()
    if any("failed: " in c["note"] for c in cells):
        sys.exit(1)


if __name__ == "__main__":
    run(main)

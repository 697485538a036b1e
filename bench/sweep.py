"""Why is the GPU not busy? Speed, MFU, memory and power of a model's training step along three axes, one at a time.

    python bench/sweep.py config/train_100m.py                                     # all three
    python bench/sweep.py config/train_100m.py --vary=B --batch_sizes 8 16 32 0    # one; 0: as many as fit
    python bench/sweep.py config/train_100m.py --json=sweep.json --markdown=sweep.md

    T      sequences of 1 ... 8192 tokens, at B = 1, accum = 1
    B      1 ... 16 sequences and as many as fit, at the settings' block_size, accum = 1
    accum  1 ... 16 micro-steps, at the settings' block_size and batch_size

Any setting of train.py can be given, as to train.py. A cell is the median time of a step like
train.py's, on one device, with a new model. The token ids are random and lie on the device: what
loading data costs is not in it. The last line is the time of a step of one token: what a step costs
whatever its size. Power needs the package nvidia-ml-py.
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
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `python bench/sweep.py` finds ours
from configurator import UserError, changes, parse, run  # noqa: E402
from hardware.machine import (  # noqa: E402
    Machine,
    out_of_memory,  # noqa: E402
    start,
)
from hardware.peak import device_name, peak_tflops  # noqa: E402
from model import GPT  # noqa: E402
from training.settings import TrainConfig, model_config, wants_compile  # noqa: E402
from training.step import take_step  # noqa: E402

AXES = ("T", "B", "accum")


@dataclass(frozen=True)
class SweepConfig(TrainConfig):
    # ---- What to vary ----
    vary: str = "T,B,accum"  # these axes, in this order
    block_sizes: tuple[int, ...] = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192)  # T
    batch_sizes: tuple[int, ...] = (1, 8, 12, 16, 0)  # B; 0: the largest that fits, to 1/16 of it (CUDA only)
    accums: tuple[int, ...] = (1, 8, 16)  # micro-steps of a step
    vocab_size: int = 50257  # GPT-2's; with a small model it weighs much
    # ---- Measurement of a cell ----
    warmup: int = 3  # steps before the clock starts; the first one compiles
    steps: int = 10  # steps timed; more where power is measured: it takes 2 seconds
    seconds: float = 20.0  # a slow cell ends after so many, with fewer steps
    # ---- Output ----
    json: str = ""  # write the figures here too, after every cell
    markdown: str = ""  # and the tables here

    def problems(self) -> list[str]:
        if self.batch_size == "auto":
            return ["batch_size=auto is for train.py and bench/plan.py: give a number here"]
        wrong = TrainConfig.problems(replace(self, max_steps=1))  # no run, so no end of it is needed
        wrong += [f"vary: {a!r} is none of {', '.join(AXES)}" for a in self.vary.split(",") if a not in AXES]
        lists, numbers = "block_sizes accums", "vocab_size warmup steps seconds"
        wrong += [f"{k} must be positive" for k in lists.split() if not all(n > 0 for n in getattr(self, k))]
        wrong += [f"{k} must be positive" for k in numbers.split() if not getattr(self, k) > 0]
        return wrong + ["batch_sizes must not be negative"] * any(B < 0 for B in self.batch_sizes)


# ---------------------------------------------------------------------------------------------------------------------
# Memory and power: what the machine tells of itself


def resident(key: str) -> int:
    """Bytes of this process in memory: now (VmRSS), or at most (VmHWM) since the peak was last reset."""
    return 1024 * int(re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def reset_peak(device: torch.device) -> Callable[[], int] | None:
    """Forget the peak of the memory; returns what reads the new one, in bytes, or None where there is no such figure."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return lambda: torch.cuda.max_memory_allocated(device)
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what the cell before has freed: train.py has glibc keep it
        Path("/proc/self/clear_refs").write_text("5")  # man 5 proc: VmHWM becomes VmRSS
        forgotten = resident("VmHWM") < 1.05 * resident("VmRSS")
    except (OSError, AttributeError, TypeError):  # macOS, another C library, a sandbox's /proc
        return None
    return (lambda: resident("VmHWM")) if forgotten and device.type == "cpu" else None


POWER_SECONDS = 2.0  # NVML refreshes its figures only a few times a second: the timed part lasts longer than that


@cache
def power_meter(device: torch.device) -> Callable[[], tuple[float, int]] | None:
    """What reads (joules since the driver was loaded, % of the last moments in which a kernel ran), or None without NVML."""
    if device.type != "cuda":
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        # By UUID: NVML counts all GPUs of the computer, torch those of CUDA_VISIBLE_DEVICES.
        uuid = torch.cuda.get_device_properties(device).uuid
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())

        def read() -> tuple[float, int]:
            return pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3, pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu

        read()
        return read
    except Exception:  # no such package, no NVIDIA driver, a slice of a GPU (MIG), no counter of energy (before Volta)
        return None


# ---------------------------------------------------------------------------------------------------------------------
# One cell


def measure(cfg: SweepConfig, T: int, B: int, accum: int, machine: Machine, peak: float | None) -> dict:
    """One cell of the table: T, B, accum, note, and the figures, unless the note says "OOM" or "failed: ...".

    peak: TFLOPS of the device, for MFU; None if unknown.
    """
    cfg = replace(cfg, block_size=T)  # learned positions need a row for each of the T
    model_config(cfg, cfg.vocab_size)  # a model that cannot be is the caller's mistake, not the cell's
    cell, peak_bytes = {"T": T, "B": B, "accum": accum, "note": ""}, reset_peak(machine.device)
    try:
        cell |= train_steps(cfg, B, accum, machine)
        cell["mfu"] = cell["tflops"] / peak if peak else None
        cell["memory_gb"] = peak_bytes() / 1e9 if peak_bytes else None
    except Exception as e:  # whatever it is, the other cells are still wanted
        cell["note"] = "OOM" if out_of_memory(e) else f"failed: {type(e).__name__}: {' '.join(str(e).split())[:200]}"
    # The model was local to train_steps and went with the exception; what is left hangs in cycles, caches and compiled code.
    if wants_compile(cfg, machine.device.type, 0):
        torch.compiler.reset()  # and dynamo, which compiles a function eight times at most, counts anew
    gc.collect()
    if machine.device.type == "cuda":
        torch.cuda.empty_cache()
    return cell


def train_steps(cfg: SweepConfig, B: int, accum: int, machine: Machine) -> dict:
    """Train a new model on one random batch (B, T), again and again; the figures of a step."""
    device, T = machine.device, cfg.block_size
    torch.manual_seed(cfg.seed)
    with device:  # drawn there: a CPU takes seconds for 100M weights
        model = GPT(model_config(cfg, cfg.vocab_size))
        model.init_weights(cfg.init)
    model.to(device)  # the constants that numpy made
    groups, betas = model.param_groups(cfg.weight_decay), (cfg.beta1, cfg.beta2)
    optimizer = torch.optim.AdamW(groups, lr=cfg.lr, betas=betas, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=machine.dtype == torch.float16)
    fast = torch.compile(model, dynamic=False) if wants_compile(cfg, device.type, 0) else model
    rows = torch.randint(cfg.vocab_size, (B, T + 1), device=device)
    batches = repeat((rows[:, :-1], rows[:, 1:]))  # (B, T) each, views as to_device gives them
    launching: list[float] = []  # seconds of each step until the host has launched all of it

    def timed(n: int, at_least: float = 0.0) -> list[float]:
        """The seconds of each of n steps or more, until they are at_least seconds; of fewer, but one, if cfg.seconds pass."""
        seconds: list[float] = []
        launching.clear()
        while not seconds or (sum(seconds) < cfg.seconds and (len(seconds) < n or sum(seconds) < at_least)):
            begun = time.perf_counter()
            result = take_step(fast, model, optimizer, scaler, batches, accum, machine, cfg.grad_clip)
            launching.append(time.perf_counter() - begun)
            loss, _, grad_norm = result()
            machine.synchronize()  # the loss is there before the optimizer is done
            seconds.append(time.perf_counter() - begun)
            skipped = not math.isfinite(grad_norm) and not scaler.is_enabled()  # fp16's scaler is still falling
            if skipped or not math.isfinite(loss):  # what is timed would not be training
                raise ArithmeticError(f"loss {loss}, norm of the gradient {grad_norm}")
        return seconds

    first = timed(1)[0]  # it compiles, and allocates the optimizer's state
    if cfg.warmup > 1:
        timed(cfg.warmup - 1)
    meter = power_meter(device)
    before, begun = meter() if meter else None, time.perf_counter()
    seconds = timed(cfg.steps, POWER_SECONDS if meter else 0.0)
    wall, after = time.perf_counter() - begun, meter() if meter else None

    median, tokens = statistics.median(seconds), B * T * accum
    figures = {"it_per_s": 1 / median, "tokens_per_s": tokens / median, "step_ms": 1e3 * median}
    figures["tflops"] = figures["tokens_per_s"] * model.flops_per_token(T) / 1e12
    if meter:
        joules = after[0] - before[0]
        figures |= {"power_w": joules / wall, "utilisation": after[1]}
        figures["wh_per_mtok"] = joules / 3600 / (tokens * len(seconds) / 1e6)
    figures["launching_ms"] = 1e3 * min(launching)
    return figures | {"first_step_s": first, "seconds": seconds}


def largest(cfg: SweepConfig, tried: list[dict], machine: Machine, peak: float | None) -> dict:
    """The cell of the largest batch that fits, by doubling and then bisecting from what was tried already."""
    if machine.device.type != "cuda":
        why = "left out: where memory is not the GPU's own, running out of it may kill the process"
        return {"T": cfg.block_size, "B": "largest", "accum": 1, "note": why}
    brief = replace(cfg, warmup=1, steps=1, seconds=0.0)  # the second step has the optimizer's state too: the peak
    fits = max((c["B"] for c in tried if not c["note"]), default=0)
    fails, why = min(((c["B"], c["note"]) for c in tried if c["B"] > fits), default=(0, ""))  # 0: none that fails yet
    while not fails or fails - fits > max(1, fits // 16):
        B = (fits + fails) // 2 if fails else max(1, 2 * fits)
        note = measure(brief, cfg.block_size, B, 1, machine, peak)["note"]
        fits, fails, why = (fits, B, note) if note else (B, fails, why)
    cell = measure(cfg, cfg.block_size, max(1, fits), 1, machine, peak)
    return cell | {"note": cell["note"] or f"largest: B={fails} gives {why}"}


def floor(cell: dict, device: torch.device) -> str:
    """What a step costs whatever its size, by the cell of one token: weights and optimizer are read
    and written, and the host launches about as many kernels as for many tokens.

    On a GPU the launches can be told apart, by when the last of them has returned: if that is near
    the end of the step, the GPU waits for the host. In larger cells it would mislead, since a host
    that is about a thousand launches ahead of the GPU waits in them too.
    """
    if cell["note"]:
        return f"not measured: {cell['note']}"
    seconds = cell["seconds"]
    ms = f"{1e3 * min(seconds):,.1f} ms, the fastest of {len(seconds)} steps of one token"
    if device.type == "cpu":
        return ms
    return f"{ms}; the host launches for {cell['launching_ms']:,.1f} ms of them"


# ---------------------------------------------------------------------------------------------------------------------
# The table: printed line by line, and written whole after every cell

COLUMNS = {  # key of a cell: heading, format
    "T": ("T", "d"), "B": ("B", "d"), "accum": ("accum", "d"), "it_per_s": ("it/s", ",.2f"), "tokens_per_s": ("tok/s", ",.0f"),
    "tflops": ("TFLOPS", ".3f"), "mfu": ("MFU", ".1%"), "memory_gb": ("peak GB", ".2f"), "step_ms": ("ms", ",.1f"),
}  # fmt: skip
POWER = {"power_w": ("W", ",.0f"), "utilisation": ("util %", "d"), "wh_per_mtok": ("Wh/Mtok", ",.3f")}


def texts(cell: dict, columns: dict) -> list[str]:
    """A cell's figures; "-" where it has none, "n/a" where there can be none."""
    values = [(cell.get(key, "-"), form) for key, (_, form) in columns.items()]
    return ["n/a" if v is None else v if isinstance(v, str) else format(v, form) for v, form in values] + [cell["note"]]


def aligned(row: list[str]) -> str:
    return ("".join(f" {text:>9}" for text in row[:-1]) + "  " + row[-1]).rstrip()


def as_markdown(facts: dict, cells: list[dict], columns: dict) -> str:
    lines = [f"# {facts['machine']}", "", *(f"* {k}: {v}" for k, v in facts.items() if k != "machine")]
    for axis in dict.fromkeys(c["axis"] for c in cells):
        rows = [[heading for heading, _ in columns.values()] + ["note"], ["--:"] * len(columns) + [":--"]]
        rows += [[text.replace("|", r"\|") for text in texts(c, columns)] for c in cells if c["axis"] == axis]
        lines += ["", f"## {axis}", "", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


def write(path: str, text: str) -> None:
    """Aside first: a kill leaves the file of the cell before."""
    if path:
        aside = Path(path + ".tmp")
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)


def main() -> None:
    cfg = parse(SweepConfig, doc=__doc__)
    if "RANK" in os.environ:
        raise UserError("one device is measured: start it without torchrun")
    with torch.device("meta"):  # shapes alone
        model = GPT(model_config(cfg, cfg.vocab_size))
    machine = start(cfg.device, cfg.dtype)
    peak, peak_source = peak_tflops(machine.device, machine.dtype, cfg.peak_tflops)
    memory = "allocated on the GPU" if machine.device.type == "cuda" else "none for each cell here"
    if machine.device.type == "cpu" and reset_peak(machine.device):
        memory = f"resident, reset for each cell; {resident('VmRSS') / 1e9:.2f} GB of it are Python and torch"
    facts = {
        "machine": device_name(machine.device),
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "command": shlex.join(["python", *sys.argv]),
        "model": f"{model.num_params()['total']:,} parameters at T = {cfg.block_size}, a vocabulary of {cfg.vocab_size:,}",
        "precision": f"{str(machine.dtype).removeprefix('torch.')}: {machine.why}",
        "compile": str(wants_compile(cfg, machine.device.type, 0)).lower(),
        "peak": peak_source,
        "peak memory": memory,
    }
    columns, cells = COLUMNS | (POWER if power_meter(machine.device) else {}), []

    def save() -> None:
        write(cfg.json, json.dumps(facts | {"settings": changes(cfg), "cells": cells}, indent=1) + "\n")
        write(cfg.markdown, as_markdown(facts, cells, columns))

    save()  # a path that cannot be written is known now, not after the first cell
    machine.say("\n".join(f"{k:>11}: {v}" for k, v in facts.items()))
    shapes = {  # T, B, accum
        "T": [(T, 1, 1) for T in cfg.block_sizes],
        "B": [(cfg.block_size, B, 1) for B in cfg.batch_sizes],
        "accum": [(cfg.block_size, cfg.batch_size, accum) for accum in cfg.accums],
    }
    plan = [(axis, shape) for axis in cfg.vary.split(",") for shape in shapes[axis]]
    for axis, (T, B, accum) in tqdm(plan, "cells", disable=None):  # disable=None: only on a terminal
        tried = [c for c in cells if c["axis"] == axis]
        if not tried:
            machine.say("\n" + aligned([heading for heading, _ in columns.values()] + [f"by {axis}"]))
        cell = measure(cfg, T, B, accum, machine, peak) if B else largest(cfg, tried, machine, peak)
        cells.append({"axis": axis} | cell)
        machine.say(aligned(texts(cell, columns)))
        save()
    shape = (1, 1, 1)  # T, B, accum
    smallest = next((c for c in cells if (c["T"], c["B"], c["accum"]) == shape), None)
    smallest = smallest or measure(cfg, *shape, machine, peak)
    facts["any step"] = floor(smallest, machine.device)
    machine.say(f"\nany step, at least: {facts['any step']}")
    save()
    if any("failed: " in c["note"] for c in cells):
        sys.exit(1)


if __name__ == "__main__":
    run(main)

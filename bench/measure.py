"""Shared code of the measurements in this folder: settings, clocks, a training step, figure files.

Only this file knows how train.py takes a step.
"""

import math
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Timer

from configurator import UserError, changes
from hardware.disk import atomic_write, json_bytes
from hardware.kernels import pick_kernels
from hardware.machine import Clock, HostCopy, Machine
from hardware.peak import device_name
from hardware.terminal import ProgressBar
from model import GPT, GPTConfig
from text.windows import Loader
from train import take_step
from training.batch_size import wants_compile
from training.batches import Batch, read_ahead
from training.optimizer import make_optimizer
from training.parallel import wrap
from training.settings import TrainConfig

REPO = Path(__file__).resolve().parents[1]


# --------------------------------------------------------------------------------------------------
# Settings


@dataclass(frozen=True)
class StepConfig(TrainConfig):
    """The settings of a few training steps: batch_size is a number, and no length is needed."""

    batch_size: int = 16
    max_steps: int = 1


def train_options(cfg: TrainConfig, **overrides: Any) -> list[str]:
    """Return the options of train.py for these settings, without those that a benchmark adds."""
    names = {field.name for field in fields(TrainConfig)}
    settings = {k: v for k, v in changes(cfg).items() if k in names} | overrides
    return [f"--{name}={value}" for name, value in settings.items()]


# --------------------------------------------------------------------------------------------------
# Clocks


def in_turns(
    names: Iterable[str], rounds: int, measure: Callable[[str], list[float]]
) -> dict[str, list[float]]:
    """Measure all names one after the other, `rounds` times, and return the seconds of each.

    Whatever else the machine does in the meantime disturbs all of them alike.
    """
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in ProgressBar("rounds", range(rounds)):
        for name, measured in seconds.items():
            measured += measure(name)
    return seconds


def median_s(statement: str, names: dict[str, Any], seconds: float) -> float:
    """Return the median time of a statement of Python in seconds. names: those that it uses.

    The median is over ten blocks of calls, or over as many as `seconds` allow. Each block ends with
    a wait for the GPU. Timer.blocked_autorange is not used: it makes a block 10,000 times as long
    as such a wait, which is seconds.
    """
    timer = Timer(statement, globals=names, num_threads=torch.get_num_threads())
    timer.timeit(1)  # compiles, plans, allocates
    number = max(1, int(seconds / 10 / timer.timeit(2).mean))
    blocks: list[float] = []
    while number * sum(blocks) < seconds:
        blocks.append(timer.timeit(number).mean)
    return statistics.median(blocks)


# --------------------------------------------------------------------------------------------------
# A training step


@dataclass
class Training:
    """A model, and all that a step of its training takes on one device."""

    cfg: TrainConfig
    machine: Machine
    model: GPT
    forward: Callable  # the model, or the compiled model
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    batches: Iterator[Batch]
    accum: int = 1

    def step(self) -> HostCopy | None:
        """Start a step as train.py does, and return what take_step() returns."""
        state = (self.forward, self.optimizer, self.scaler, self.batches)
        return take_step(*state, self.accum, self.machine, self.cfg.grad_clip)

    def timed(self, steps: int, at_most: float = math.inf) -> list[float]:
        """Take so many steps, or fewer that last `at_most` seconds, and return the seconds of each.

        Raises UserError if the loss or the gradient is not finite.
        """
        seconds: list[float] = []
        while len(seconds) < steps and sum(seconds) < at_most:
            start_time = time.perf_counter()
            loss, grad_norm, _ = self.step().wait()
            self.machine.synchronize()  # the loss arrives before the optimizer has finished
            seconds.append(time.perf_counter() - start_time)
            # The optimizer skips a step whose gradient is not finite: its time would mislead. In
            # fp16 such steps are normal at first, until GradScaler has lowered its scale.
            skipped = not math.isfinite(grad_norm) and self.machine.dtype != torch.float16
            if skipped or not math.isfinite(loss):
                raise UserError(f"loss {loss}, norm of the gradient {grad_norm}: lower lr")
        return seconds


def batches_of(loader: Loader, B: int, machine: Machine) -> Iterator[Batch]:
    """Yield the batches of B windows that train.py would read, from the first on."""
    return read_ahead(loader, 0, B, machine, Clock(machine, 0))


def new_training(cfg: TrainConfig, c: GPTConfig, machine: Machine) -> Training:
    """Return the training of a new model. All steps have the same random tokens, (B, T)."""
    device = machine.device
    with device:  # draw the weights on the device: a CPU takes seconds for 100M of them
        torch.manual_seed(cfg.seed)
        model = GPT(c, cfg.init)
    model.to(device)  # moves the constants that numpy made
    batch = Batch(*torch.randint(c.vocab_size, (2, cfg.batch_size, cfg.block_size), device=device))
    compiled = wants_compile(cfg, device.type, 0)
    model.use(pick_kernels(device, compiled))
    forward = wrap(cfg, model, machine, compiled)
    scaler = torch.amp.GradScaler(device.type, enabled=machine.dtype == torch.float16)
    optimizer = new_optimizer(cfg, machine, model)
    return Training(cfg, machine, model, forward, optimizer, scaler, repeat(batch))


def new_optimizer(cfg: TrainConfig, machine: Machine, model: GPT) -> torch.optim.Optimizer:
    """Return the optimizer of the settings. Its learning rate stays at cfg.lr."""
    optimizer = make_optimizer(cfg, machine, model)
    for group in optimizer.param_groups:
        group["lr"] = cfg.lr * group["scale"]
    return optimizer


# --------------------------------------------------------------------------------------------------
# Tables and files of figures


def padded(rows: list[list[str]]) -> list[list[str]]:
    """Return rows whose columns are equally wide: the first stands to the left, others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [text.rjust(width) for text, width in zip(row, widths, strict=True)]
        lines.append([row[0].ljust(widths[0]), *cells[1:]])
    return lines


def text(value: float | int | str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if value < 1000 else f"{value:,.0f}"


def table(title: str, rows: list[dict]) -> list[dict]:
    """Print the rows below their keys, and return them."""
    print(f"\n{title}")
    for line in padded([list(rows[0]), *([text(v) for v in row.values()] for row in rows)]):
        print(f"  {'  '.join(line)}".rstrip(), flush=True)
    return rows


def facts_of(device: torch.device) -> dict[str, str]:
    """Return where and how a measurement was made."""
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    if device.type == "cuda":
        versions += f", CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    return {"machine": device_name(device), "versions": versions, "command": command()}


def command() -> str:
    """Return the command that started this program."""
    return shlex.join(["python", "-m", f"bench.{Path(sys.argv[0]).stem}", *sys.argv[1:]])


def write_json(path: str, figures: dict) -> None:
    """Write the figures to a file, if there is a path. A kill leaves an earlier file intact."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        atomic_write(Path(path), json_bytes(figures))

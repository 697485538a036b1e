"""What the measurements of this folder share: checks, turns, a training step, files of figures."""

import platform
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from configurator import changes
from hardware.disk import json_bytes, write_whole
from hardware.machine import Machine
from hardware.peak import device_name
from hardware.terminal import ProgressBar
from model import GPT, GPTConfig
from training.optimizer import make_optimizer
from training.parallel import wants_compile, wrap
from training.settings import TrainConfig
from training.step import Batch, take_step

REPO = Path(__file__).resolve().parents[1]


# --------------------------------------------------------------------------------------------------
# Settings. A check returns one message for each setting that is out of its range.


def step_problems(cfg: TrainConfig) -> list[str]:
    """Check the settings of a few training steps. How long the run is does not matter."""
    if cfg.batch_size == "auto":
        return ["batch_size=auto is for train.py and plan.py: give a number here"]
    return TrainConfig.problems(replace(cfg, max_steps=1))


def not_positive(cfg: Any, *names: str) -> list[str]:
    """Check that settings, which may be tuples of numbers, are positive."""
    values = {name: getattr(cfg, name) for name in names}
    lists = {name: v if isinstance(v, tuple) else (v,) for name, v in values.items()}
    return [f"{name} must be positive" for name, v in lists.items() if min(v, default=1) <= 0]


def no_folder(cfg: Any, *names: str) -> list[str]:
    """Check that the files which the settings name have a folder to be written to."""
    paths = {name: Path(getattr(cfg, name)) for name in names}
    missing = {name: path for name, path in paths.items() if not path.parent.is_dir()}
    return [f"{name}={path}: no such folder" for name, path in missing.items()]


def train_options(cfg: TrainConfig, **overrides: Any) -> list[str]:
    """Return the options of train.py for these settings, without those that a benchmark adds."""
    names = {field.name for field in fields(TrainConfig)}
    settings = {k: v for k, v in changes(cfg).items() if k in names} | overrides
    return [f"--{name}={value}" for name, value in settings.items()]


# --------------------------------------------------------------------------------------------------
# Turns


def take_turns(contestants: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list]:
    """Call all contestants one after the other, `rounds` times; return the results of each.

    Whatever else the machine does in the meantime disturbs all of them alike.
    """
    results: dict[str, list] = {name: [] for name in contestants}
    for _ in ProgressBar("rounds", range(rounds)):
        for name, contestant in contestants.items():
            results[name].append(contestant())
    return results


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

    def step(self) -> Callable[[], list[float]]:
        """Start a step as train.py does. Call the result for its loss and norm."""
        state = (self.forward, self.optimizer, self.scaler, self.batches)
        return take_step(*state, self.accum, self.machine, self.cfg.grad_clip)


def new_training(cfg: TrainConfig, c: GPTConfig, machine: Machine) -> Training:
    """Return the training of a new model. All steps have the same random tokens, (B, T)."""
    device = machine.device
    with device:  # draw the weights on the device: a CPU takes seconds for 100M of them
        model = GPT(c)
        torch.manual_seed(cfg.seed)
        model.init_weights(cfg.init)
    model.to(device)  # moves the constants that numpy made
    batch = Batch(*torch.randint(c.vocab_size, (2, cfg.batch_size, cfg.block_size), device=device))
    forward = wrap(cfg, model, machine, wants_compile(cfg, device.type, 0))
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
    """Write the figures to a file, if there is a path. A kill leaves an earlier file whole."""
    if path:
        write_whole(Path(path), json_bytes(figures))

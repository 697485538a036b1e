"""What the training loop works with. training/start.py makes it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hardware.machine import Machine
from model import GPT
from text.windows import DataSet, Loader, Windows
from training.checkpoint import Saver
from training.plan import Plan, Progress
from training.report import Report
from training.settings import TrainConfig


@dataclass(frozen=True)
class Data:
    """The data of a run."""

    loader: Loader  # windows of every train.bin, mixed
    val_windows: list[Windows]  # one for each val.bin; loss_on=answers: a conversation in each
    val_documents: list[Windows]  # the same tokens, packed: each document begins in its window
    train_windows: list[Windows]  # one for each train.bin, to evaluate on
    sets: list[DataSet]
    tokenizer: Any  # of text/tokenizer.py: token_bytes(), special_id(), eos_id
    sample_prompt: list[int]  # ids of the text that the model continues in the log
    check: Callable[[], None]  # raises UserError if a file has been changed in place


@dataclass(frozen=True)
class Job:
    """What the training loop works with."""

    cfg: TrainConfig
    folder: Path  # out/RUN, where its files are
    machine: Machine
    plan: Plan
    data: Data
    model: GPT
    forward: Callable  # the model as it runs: compiled, in DDP or Shards, or as it is
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    progress: Progress
    report: Report
    saver: Saver
    peak: float | None  # TFLOPS of all devices together; None if unknown

"""Batches: from windows of tokens to tensors on the device."""

import itertools
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from hardware.machine import Clock, Machine
from text.windows import Loader, Rows
from training.plan import Plan


class Batch(NamedTuple):
    """The arguments of the model in training: the first parameters of GPT.forward()."""

    x: torch.Tensor  # inputs (B, T): the first T tokens of each window
    y: torch.Tensor  # targets (B, T): the last T; -1: none
    weights: torch.Tensor | None = None  # (B, T): loss weight of each target
    eos_id: int | None = None  # a token sees only its own document, which an eos starts


def to_host(rows: Rows, device: torch.device) -> Batch:
    """Return a batch in host memory; for CUDA in pinned memory, which is copied asynchronously."""

    def tensor(array: np.ndarray) -> torch.Tensor:
        x = torch.from_numpy(array)
        return x.pin_memory() if device.type == "cuda" else x

    # Copies with a stride of T, for which the model is compiled; views would have T + 1.
    x, y = tensor(rows.ids[:, :-1].copy()), tensor(rows.ids[:, 1:].copy())
    return Batch(x, y, None if rows.weights is None else tensor(rows.weights), rows.eos_id)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Start to copy a batch of to_host() to the device."""
    x, y = batch.x.to(device, non_blocking=True), batch.y.to(device, non_blocking=True)
    if batch.weights is None:  # then there is no padding
        return Batch(x, y, None, batch.eos_id)
    weights = batch.weights.to(device, non_blocking=True)
    # As an input, padding is token 0. As a target, it is ignored.
    return Batch(x.clamp(min=0), y.masked_fill(weights == 0, -1), weights, batch.eos_id)


def to_batch(rows: Rows, device: torch.device) -> Batch:
    """Return a batch on the device."""
    return to_device(to_host(rows, device), device)


def first_batch(loader: Loader, plan: Plan, machine: Machine) -> Batch:
    """Return a batch of the run's first windows, to try out the memory and to compile."""
    return to_batch(loader.rows(loader.starts(0, plan.batch_size)), machine.device)


def read_ahead(
    loader: Loader, first: int, B: int, machine: Machine, clock: Clock
) -> Generator[Batch]:
    """Yield this rank's batches of B windows on its device, from window `first` of the run on.

    The ranks take turns: row r of micro-step m on a rank is window
    first + (m * world + rank) * B + r. So 4 ranks without accumulation and 2 ranks with two
    micro-steps read the same windows in a step.

    A thread reads batches into host memory, and the copy of the next batch to the device starts
    before the model trains on this one. The clock counts the seconds that training waits for data.
    """
    firsts = itertools.count(first + machine.rank * B, machine.world * B)

    def read() -> Batch:
        if machine.device.type == "cuda":
            torch.cuda.set_device(machine.device)  # each thread has its own current device
        return to_host(loader.rows(loader.starts(next(firsts), B)), machine.device)

    with ThreadPoolExecutor(1) as thread:
        batch = to_device(thread.submit(read).result(), machine.device)
        reading = thread.submit(read)
        while True:
            start = time.perf_counter()
            following = to_device(reading.result(), machine.device)
            reading = thread.submit(read)
            clock.data_s += time.perf_counter() - start
            yield batch
            batch = following

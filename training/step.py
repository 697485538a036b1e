"""One optimizer step, as train.py, bench/ and the tests make it, and the batches that it reads.

part() is what this rank holds of a tensor that is sharded over the ranks, and whole() all of it. Of
a tensor that is not, both are the tensor itself.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from hardware.machine import Clock, Machine, part, whole
from text.windows import Loader, Rows


class Batch(NamedTuple):
    """What the model is called with in training: the first parameters of GPT.forward()."""

    x: torch.Tensor  # inputs (B, T): the first T tokens of each window
    y: torch.Tensor  # targets (B, T): the last T; -1: none
    weights: torch.Tensor | None = None  # (B, T): how much the loss of each target counts
    eos_id: int | None = None  # a token sees only its own document, which an eos begins


def to_batch(rows: Rows, device: torch.device) -> Batch:
    """Copy windows to the device, without a wait."""

    def to_device(array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if device.type == "cuda":
            return tensor.pin_memory().to(device, non_blocking=True)
        return tensor.to(device)

    # Copies, and not two views: torch.compile compiles for strides. Now all batches have the same.
    x, y = to_device(rows.ids[:, :-1].copy()), to_device(rows.ids[:, 1:].copy())
    if rows.weights is None:
        return Batch(x, y, None, rows.eos_id)
    weights = to_device(rows.weights)
    # Padding is a token like any other where it is read, and counts nothing where it is predicted.
    return Batch(x.clamp(min=0), y.masked_fill(weights == 0, -1), weights, rows.eos_id)


def read_ahead(
    loader: Loader, first: int, B: int, machine: Machine, clock: Clock, signals: Sequence[int] = ()
) -> Iterator[Batch | None]:
    """Yield this rank's batches of B windows on its device, from window `first` of the run on.

    The ranks take turns: row r of micro-step m on a rank is window
    first + (m * world + rank) * B + r. So 4 ranks without accumulation and 2 ranks with two
    micro-steps read the same windows in a step.

    A thread reads the next batch while the model trains on the current one. Where the training has
    to wait for it all the same, the clock counts the seconds.
    signals: those that have arrived, of stop_signals(). When there is one, a process that trains
    alone gets None: it gives up the step between two micro-steps. On a laptop, a step may take
    hours.
    """
    firsts = itertools.count(first + machine.rank * B, machine.world * B)

    def read() -> Rows:
        return loader.rows(loader.starts(next(firsts), B))

    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(read)
        while not (signals and machine.world == 1):
            start = time.perf_counter()
            rows = reading.result()
            reading = thread.submit(read)
            batch = to_batch(rows, machine.device)
            clock.data_s += time.perf_counter() - start
            yield batch
        # A signal. The caller saves the weights now, and only then ends this generator, which waits
        # until the thread has read its batch.
        yield None


def autocast(machine: Machine) -> torch.autocast:
    """Return the context in which matrix products run in the machine's dtype.

    Without the cache: a forward pass casts each weight once, and the cache would hold all casts to
    its end.
    """
    enabled = machine.dtype != torch.float32
    return torch.autocast(machine.device.type, machine.dtype, enabled, cache_enabled=False)


def all_sum(x: torch.Tensor) -> torch.Tensor:
    """Replace x by its sum over all ranks, in place, and return it."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def take_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    batches: Iterator[Batch | None],
    accum: int,
    machine: Machine,
    grad_clip: float = 0.0,
) -> Callable[[], list[float]] | None:
    """Update the weights once, with the gradients of `accum` batches on each rank.

    Return a function that waits for the device, but not for the update of the weights, and returns
    the loss, the mean of all ranks, and the norm of the gradient before clipping. Return None, and
    leave the weights unchanged, if a batch is None or there are no more.

    On a GPU with AdamW or Muon the host runs ahead: it starts the forward and backward passes, the
    sum over the ranks and the update one after the other, without waiting. Only then does the
    caller wait, for the loss alone, while the device still updates the weights.

    model: a GPT as it runs: as it is, or compiled, or wrapped in DDP or Shards. scaler: keeps the
    small gradients of fp16 (see below); else it does nothing. grad_clip: the largest norm of the
    gradient; 0: no clipping. A step whose loss or gradient is not finite leaves the weights
    unchanged.
    """
    # 1. Forward and backward: the gradients of all micro-steps add up.
    no_sync = getattr(model, "no_sync", nullcontext)  # DDP and Shards have it, compiled or not
    mean_loss = torch.zeros((), device=machine.device)  # of this rank
    mean_weight = torch.zeros((), device=machine.device)  # of this rank's targets, if they have any
    for micro in range(accum):
        batch = next(batches, None)
        if batch is None:
            optimizer.zero_grad(set_to_none=True)
            return None
        # DDP averages the gradients over the ranks, in the last micro-step only. It decides in the
        # forward pass whether the backward pass will do so: both must run inside no_sync().
        with nullcontext() if micro == accum - 1 else no_sync():
            with autocast(machine):
                loss = model(*batch) / accum  # batches have equal sizes: a mean of means is right
            scaler.scale(loss).backward()
        mean_loss += loss.detach()
        if batch.weights is not None:
            mean_weight += batch.weights.mean() / accum

    # 2. Clip the gradient, and start to send the loss and the norm to the host.
    scaler.unscale_(optimizer)
    parameters = list(model.parameters())
    if batch.weights is not None:
        # The loss is sum(w l) / sum(w) over all ranks. So far its gradient is that of sum(w l) / n,
        # with n positions on all ranks: DDP has averaged over these. Multiply by n / sum(w), which
        # is one over the mean of mean_weight. If nothing counts in this step, the gradient is 0.
        factor = machine.world / all_sum(mean_weight).clamp(min=1e-12)
        mean_loss *= factor
        torch._foreach_mul_([part(p.grad) for p in parameters], factor)
    grad_norm = whole(torch.nn.utils.get_total_norm([p.grad for p in parameters]))
    torch.nn.utils.clip_grads_with_norm_(parameters, grad_clip or math.inf, grad_norm)
    # The norm needs no sum: each rank has that of the whole gradient.
    numbers = torch.stack([all_sum(mean_loss) / machine.world, grad_norm])
    result = machine.fetch(numbers)

    # 3. Update the weights, unless the loss or the gradient is not finite.
    if scaler.is_enabled():
        # fp16 cannot hold numbers below 6e-8. So the loss, and with it each gradient, was
        # multiplied by a large scale; unscale_() above has divided the gradients by it again.
        scaler.step(optimizer)  # skips the step if the gradient is not finite
        scaler.update()  # after such a step, lowers the scale; after many good ones, raises it
    elif optimizer.defaults.get("fused"):
        # A fused optimizer of torch looks for this flag, by which GradScaler tells it to skip the
        # step. The device reads it, so the host does not have to wait for the loss.
        optimizer.found_inf = 1.0 - numbers.isfinite().all().float()
        optimizer.step()
    elif all(map(math.isfinite, result())):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return result

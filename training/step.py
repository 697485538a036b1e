"""One optimizer step, as train.py, bench/ and the tests make it, and the batches that it reads."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import torch

from hardware.machine import Machine, all_sum
from model import GPT
from text.windows import Loader

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs and targets, both (B, T)


def read_ahead(loader: Loader, sample: int, B: int, machine: Machine) -> Iterator[np.ndarray]:
    """This rank's batches of windows (B, T + 1), from `sample` of the run on.

    A thread reads one batch while another is trained on.
    """
    firsts = itertools.count(sample + machine.rank * B, machine.world * B)  # the ranks take turns

    def read() -> np.ndarray:
        return loader.rows(loader.starts(next(firsts), B))

    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(read)
        while True:
            rows = reading.result()
            reading = thread.submit(read)
            yield rows


def agree(loss: torch.Tensor, told_to_stop: bool, grad_norm: torch.Tensor, machine: Machine):
    """What all ranks must know of a step, as one tensor (3,) and by one sum over the ranks.

    That is the mean of their losses, the share of them that were told to stop, and the norm of the
    gradient, which is the same on all of them already.
    """
    told = torch.full_like(loss, float(told_to_stop))
    means = all_sum(torch.stack([loss, told])) / machine.world
    return torch.cat([means, grad_norm[None]])


def take_step(
    forward: Callable,
    model: GPT,
    optimizer: torch.optim.AdamW,
    scaler: torch.amp.GradScaler,
    batches: Iterator[Batch],
    accum: int,
    machine: Machine,
    grad_clip: float = 0.0,
    signals: Sequence[int] = (),
) -> Callable[[], tuple[float, bool, float]]:
    """One update of the weights, by the gradients of `accum` batches on each rank.

    forward: the model as it is run, (x, y) -> loss: compiled, wrapped in DDP, or the model itself.
    grad_clip: the largest norm of the gradient; 0: no clipping. A step whose loss or gradient is not
    finite changes nothing. signals: those that this rank has caught; one may come during the step.

    Returns a function that waits for the device and gives the mean loss of all ranks, whether one of
    them was told to stop, and the norm of the gradient before it was clipped.
    """
    no_sync = getattr(forward, "no_sync", nullcontext)  # only DDP has it
    loss_sum = torch.zeros((), device=machine.device)
    for micro in range(accum):
        x, y = next(batches)
        # DDP adds up the ranks' gradients in the last micro-step; it decides so in the forward pass.
        with nullcontext() if micro == accum - 1 else no_sync():
            with machine.autocast():
                loss = forward(x, y) / accum  # a mean of means over equal sizes is the mean
            scaler.scale(loss).backward()
        loss_sum += loss.detach()
    scaler.unscale_(optimizer)
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)
    facts = agree(loss_sum, len(signals) > 0, grad_norm, machine)
    facts_on_host = machine.fetch(facts)
    if scaler.is_enabled():
        scaler.step(optimizer)  # skips a step whose gradient is not finite
        scaler.update()  # and then scales less
    elif optimizer.defaults["fused"]:
        # As the scaler tells the optimizer: the device skips the step, and the host need not wait.
        optimizer.found_inf = 1.0 - facts.isfinite().all().float()
        optimizer.step()
    elif all(map(math.isfinite, facts.tolist())):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    def wait() -> tuple[float, bool, float]:
        mean_loss, stopping, norm = facts_on_host()
        return mean_loss, stopping > 0, norm

    return wait

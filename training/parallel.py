"""How the model runs: its batch size, whether it is compiled, and on how many processes."""

import gc
import inspect
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from configurator import UserError
from hardware.machine import Machine, capacity, least, memory_advice, out_of_memory, to_device
from model import GPT
from text.windows import Loader
from training.memory import Step, always_held, auto_batch
from training.plan import even_batch
from training.settings import TrainConfig


def fit_batch(
    cfg: TrainConfig, model: GPT, loader: Loader, machine: Machine, compiled: bool, most: int | None
) -> int:
    """Return the batch_size for batch_size=auto, the same on all ranks.

    Start from what training/memory.py predicts to fit, try it out, and go down while it runs out of
    memory. most: the batch_size that a resumed run had; it keeps this one if it fits.
    Raises UserError if not even one sequence fits.
    """
    kind = machine.device.type
    step = Step(1, cfg.block_size, 2, machine.dtype, compiled, kind, machine.world)
    step = replace(step, optimizer=cfg.optimizer, average=cfg.average > 0)
    predicted = auto_batch(model, step, capacity(machine.device))
    limit = min(predicted, most or predicted)
    always = always_held(model, step)
    held = sum(always.values()) - always["weights"]
    while True:
        limit = least(limit, machine)
        B = limit if limit == most else even_batch(limit, cfg, machine.world)
        rows = loader.rows(loader.starts(0, B))
        fits_here = has_room(model, rows, machine, compiled, held)
        model.zero_grad(set_to_none=True)
        gc.collect()
        if machine.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()  # the log shows the run's peak, not a trial's
        fits = bool(least(fits_here, machine))
        if compiled and not (fits and machine.world == 1):
            # Forget the compiled code if the run cannot use it. On several ranks, torch.compile
            # would reuse it inside DDP, although it is not split at DDP's buckets.
            torch.compiler.reset()
        if fits:
            machine.say(f"batch_size=auto: {B}, tried out (at most {predicted} predicted)")
            return B
        if B == 1:
            half = f"--block_size={cfg.block_size // 2}"
            raise UserError(f"out of memory at batch_size=1: try {half}, or a smaller model")
        limit = B * 7 // 8


def has_room(model: GPT, rows: np.ndarray, machine: Machine, compiled: bool, held: float) -> bool:
    """Return whether this rank has the memory to train on batches of these windows (B, T + 1).

    Run two micro-steps; the second adds its gradients to those of the first. A tensor of `held`
    bytes takes the place of the optimizer's state, of the average of the weights, if there is one,
    and of DDP's buckets on several ranks.
    """
    try:
        _placeholder = torch.empty(int(held), dtype=torch.uint8, device=machine.device)
        x, y = to_device(rows, machine.device)
        forward = None
        if compiled:
            forward, _ = try_compile(model, x, y, machine)
        if forward is None:
            forward = model
        for _ in range(2):
            with machine.autocast():
                loss = forward(x, y)
            loss.backward()
        machine.synchronize()
        return True
    except (RuntimeError, MemoryError) as e:
        if not out_of_memory(e):
            raise
        return False


def try_compile(
    model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, machine: Machine
) -> tuple[Callable | None, str]:
    """Compile the model and try it out on one batch, without waiting for other ranks.

    Return the compiled model and "", or None and the reason why this failed.
    """
    # DDP must not sum the gradients here: a rank on which this fails would never join the sum.
    no_sync = getattr(model, "no_sync", nullcontext)
    try:
        compiled = torch.compile(model, dynamic=False)
        with no_sync(), machine.autocast():
            compiled(x, y).backward()
        machine.synchronize()
        return compiled, ""
    except Exception as e:  # no C++ compiler, an old GPU: eager mode may work all the same
        if out_of_memory(e):
            raise
        first_line = str(e).splitlines()[0] if str(e) else ""
        return None, f"{type(e).__name__}: {first_line}"
    finally:
        model.zero_grad(set_to_none=True)


def compile_together(
    model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, machine: Machine, advice: str
) -> Callable:
    """Return the compiled model if all ranks can compile it, else the model as it is.

    The ranks must agree: a rank without the compiled model would sum its gradients in different
    pieces, and the other ranks would wait for theirs for ever.
    advice: what the error message recommends if memory runs out.
    """
    started = time.perf_counter()

    def work() -> tuple[Callable | None, str]:
        with memory_advice(advice):
            return try_compile(model, x, y, machine)

    compiled, failed = machine.together(work)
    reasons = machine.gather(failed)
    if not any(reasons):
        machine.say(f"compiled in {time.perf_counter() - started:.1f} s")
        return compiled
    rank = next(rank for rank, reason in enumerate(reasons) if reason)
    where = f" on rank {rank}" if machine.world > 1 else ""
    slower = "going on without it, slower"
    machine.say(f"warning: torch.compile failed{where}; {slower} ({reasons[rank]})")
    torch.compiler.reset()
    return model


def wrap(model: GPT, machine: Machine, example: Loader | None, B: int, advice: str) -> Callable:
    """Return the model as it runs: in DDP under torchrun, and compiled if asked for.

    example: a loader, which gives a batch to try the compiled model with; None: do not compile.
    advice: what the error message recommends if memory runs out. DDP comes first and the compiler
    second, so that communication overlaps the backward pass.
    """
    parallel = model
    if dist.is_initialized():
        # The only buffer, the rope table, is constant: the ranks need not send it in each step.
        # torch 2.13 has the option forward_sync_buffers for this, earlier ones broadcast_buffers.
        options = inspect.signature(DistributedDataParallel.__init__).parameters
        new = "forward_sync_buffers" in options
        sync_buffers = "forward_sync_buffers" if new else "broadcast_buffers"
        parallel = DistributedDataParallel(
            model,
            device_ids=[machine.local_rank] if machine.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            **{sync_buffers: False},
        )
    if example is None:
        return parallel
    x, y = to_device(example.rows(example.starts(0, B)), machine.device)
    return compile_together(parallel, x, y, machine, advice)

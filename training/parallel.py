"""How the model is run: how much of the batch at once, compiled or not, on one process or several."""

import gc
import inspect
import time
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from configurator import UserError
from hardware.machine import Machine, capacity, least, memory_advice, out_of_memory, to_device
from model import GPT
from text.windows import Loader
from training.memory import Step, auto_batch
from training.plan import even_batch
from training.settings import TrainConfig


def fit_batch(cfg: TrainConfig, model: GPT, loader: Loader, machine: Machine, compiled: bool, most: int | None) -> int:
    """batch_size=auto: what training/memory.py predicts to fit, tried out; less where that runs out of memory.

    most: what a resumed run had, which it keeps if it can.
    """
    step = Step(1, cfg.block_size, 2, machine.dtype, compiled, machine.device.type, machine.world)
    predicted = auto_batch(model, step, capacity(machine.device))
    most = min(predicted, most or predicted)
    while True:
        B = even_batch(least(most, machine), cfg, machine.world)
        fits = has_room(model, loader.rows(loader.starts(0, B)), machine, compiled)
        model.zero_grad(set_to_none=True)
        gc.collect()
        if machine.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()  # what is logged is the run's peak, not a trial's
        fits = bool(least(fits, machine))
        if compiled and not (fits and machine.world == 1):
            torch.compiler.reset()  # what was compiled without DDP would be taken with it, and not be split at its buckets
        if fits:
            machine.say(f"batch_size=auto: {B}, tried out (at most {predicted} here)")
            return B
        if B == 1:
            half = f"--block_size={cfg.block_size // 2}"
            raise UserError(f"out of memory at batch_size=1: try {half}, or a smaller model")
        most = B * 7 // 8


def has_room(model: GPT, rows: np.ndarray, machine: Machine, compiled: bool) -> bool:
    """Try two micro-steps, the second onto the gradients of the first, beside tensors in place of the optimizer's moments and
    of DDP's buckets.
    """
    try:
        copies = 2 + 2 * (machine.world > 1)
        _beside = [torch.empty_like(p) for p in model.parameters() for _ in range(copies)]
        x, y = to_device(rows, machine.device)
        fast = (try_compile(model, x, y, machine)[0] if compiled else None) or model
        for _ in range(2):
            with machine.autocast():
                loss = fast(x, y)
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
    """(the compiled model, tried out on one batch, or None; why it failed). It waits for no other rank."""
    try:
        fast = torch.compile(model, dynamic=False)
        # Without DDP's sums of gradients: a rank on which this fails would never come to them.
        with getattr(model, "no_sync", nullcontext)(), machine.autocast():
            fast(x, y).backward()
        machine.synchronize()
        return fast, ""
    except Exception as e:  # a missing C++ compiler, an old GPU: anything that eager mode does without
        if out_of_memory(e):
            raise
        return None, f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
    finally:
        model.zero_grad(set_to_none=True)


def compile_together(
    model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, machine: Machine, advice: str
) -> Callable:
    """torch.compile on every rank, or on none: one that went on without it would sum its gradients in other pieces,
    for which the others would wait for ever. advice: what to do when memory does not suffice.
    """
    started = time.perf_counter()

    def work() -> tuple[Callable | None, str]:
        with memory_advice(advice):
            return try_compile(model, x, y, machine)

    fast, failed = machine.together(work)
    reasons = machine.gather(failed)
    if not any(reasons):
        machine.say(f"compiled in {time.perf_counter() - started:.1f} s")
        return fast
    rank = next(rank for rank, reason in enumerate(reasons) if reason)
    where = f" on rank {rank}" if machine.world > 1 else ""
    machine.say(f"warning: torch.compile failed{where}; going on without it, slower ({reasons[rank]})")
    torch.compiler.reset()
    return model


def wrap(model: GPT, machine: Machine, example: Loader | None, B: int, advice: str) -> Callable:
    """The model as it is run: in DDP on several processes, and compiled if there is a loader to try it with.

    DDP comes first and the compiler second, so that communication overlaps the backward pass.
    """
    parallel = model
    if dist.is_initialized():
        # rope is a constant: no rank needs to send it at every step (the option's name is new in 2.13)
        names = inspect.signature(DistributedDataParallel.__init__).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
        on = [machine.local_rank] if machine.device.type == "cuda" else None
        options = dict(device_ids=on, gradient_as_bucket_view=True)
        parallel = DistributedDataParallel(model, **options, **{buffers: False})
    if example is None:
        return parallel
    x, y = to_device(example.rows(example.starts(0, B)), machine.device)
    return compile_together(parallel, x, y, machine, advice)

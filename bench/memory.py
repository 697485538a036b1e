"""The memory that a training step takes, measured: what training/memory.py predicts."""

import gc
from itertools import accumulate, repeat

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from hardware import kernels
from hardware.machine import Machine
from model import GPT, GPTConfig
from training.average import Average
from training.memory import Step
from training.optimizer import make_optimizer
from training.parallel import compile_blocks, compiles_by_blocks, shares, wrap
from training.settings import TrainConfig
from training.shards import part
from training.step import Batch, take_step


def measured_peak(c: GPTConfig, step: Step, machine: Machine | None = None) -> int:
    """Run a training step like train.py's on this machine; return its peak memory in bytes.

    The figure is torch's own. On CUDA the allocator gives it; on a CPU it is the running sum of all
    allocations and releases that torch's profiler sees.
    machine: of this rank, if several processes run the step together.
    """
    device = torch.device(step.device)
    held = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    kernels.install()
    model = GPT(c)
    model.init_weights()
    machine = machine or Machine(0, 0, 1, device, step.dtype, "")
    recompute = "blocks" if step.recompute else "none"
    cfg = TrainConfig(optimizer=step.optimizer, shard=step.shard, recompute=recompute)
    for block in model.blocks:
        block.recompute = step.recompute
    if not shares(cfg, machine):
        model.to(device)
    by_blocks = compiles_by_blocks(cfg, machine)
    if step.compiled and by_blocks:
        compile_blocks(model, torch.zeros(step.B, step.T), machine)
    forward = wrap(cfg, model, machine, None, step.B, "")
    if step.compiled and not by_blocks:
        forward = torch.compile(forward, dynamic=False)
    optimizer = make_optimizer(cfg, machine, model)
    average = Average(model, 1) if step.average else None
    scales = device.type == "cuda" and step.dtype == torch.float16
    scaler = torch.amp.GradScaler(device.type, enabled=scales)
    rows = torch.randint(0, c.vocab_size, (step.B, step.T + 1), device=device)
    eos_id = 0 if step.documents else None
    batches = repeat(Batch(rows[:, :-1], rows[:, 1:], None, eos_id))

    def one_step() -> None:
        take_step(forward, optimizer, scaler, batches, step.accum, machine, grad_clip=1.0)
        if average:
            average.follow()

    one_step()  # compiles, and allocates the optimizer's state
    gc.collect()  # as train.py does: a trial of torch.compile leaves garbage
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        one_step()
        return torch.cuda.max_memory_allocated() - held
    peaks = []
    # Threads of gloo free FSDP's buffers a little later than the main thread might: how many they
    # hold is a matter of luck, so the least of several steps counts.
    for _ in range(6 if step.zero else 1):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            one_step()
        events = profiled.profiler.kineto_results.events()
        changes_of_memory = [e for e in events if e.name() == "[memory]"]
        in_order = sorted(changes_of_memory, key=lambda e: e.start_ns())
        peaks.append(max(accumulate(e.nbytes() for e in in_order)))
    state = [part(t) for of_weight in optimizer.state.values() for t in of_weight.values()]
    means = average.weights.values() if average else []
    always = [*map(part, model.parameters()), *model.buffers(), *state, *means, rows]
    # DDP's buckets are as large as the weights. They were allocated in the step before.
    ddp = isinstance(forward, DistributedDataParallel)
    buckets = 4 * model.num_params()["total"] if ddp else 0
    return sum(t.untyped_storage().nbytes() for t in always) + buckets + min(peaks)

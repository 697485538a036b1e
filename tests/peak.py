"""The memory that a training step takes, measured: what training/memory.py predicts."""

import gc
from dataclasses import replace
from itertools import accumulate, repeat

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from bench.measure import new_training
from hardware.machine import Machine
from hardware.sharded import local_shard
from model import GPTConfig
from training.memory import Workload
from training.settings import TrainConfig


def measured_peak(c: GPTConfig, workload: Workload, machine: Machine | None = None) -> int:
    """Run a training step like train.py's on this machine; return its peak memory in bytes.

    The figure is torch's own. On CUDA the allocator gives it; on a CPU it is the running sum of all
    allocations and releases that torch's profiler sees.
    machine: of this rank, if several processes run the step together.
    """
    device = torch.device(workload.device)
    held = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    machine = machine or Machine(0, 0, 1, device, workload.dtype, "")
    cfg = TrainConfig(optimizer=workload.optimizer, shard=workload.shard, compile=workload.compiled)
    recompute = "blocks" if workload.recompute else "none"
    cfg = replace(cfg, recompute=recompute, batch_size=workload.B, block_size=workload.T)
    training = new_training(cfg, c, machine)
    batch = next(training.batches)._replace(eos_id=0 if workload.documents else None)
    training = replace(training, batches=repeat(batch), accum=workload.accum)
    model = training.model
    training.step()  # compiles, and allocates the optimizer's state
    gc.collect()  # as train.py does: torch.compile leaves garbage
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        training.step()
        return torch.cuda.max_memory_allocated() - held
    peaks = []
    # Threads of gloo free FSDP's buffers a little later than the main thread might: how many they
    # hold is a matter of luck, so the least of several steps counts.
    for _ in range(6 if workload.zero else 1):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            training.step()
        events = profiled.profiler.kineto_results.events()
        changes_of_memory = [e for e in events if e.name() == "[memory]"]
        in_order = sorted(changes_of_memory, key=lambda e: e.start_ns())
        peaks.append(max(accumulate(e.nbytes() for e in in_order)))
    state = [local_shard(t) for s in training.optimizer.state.values() for t in s.values()]
    always = [*map(local_shard, model.parameters()), *model.buffers(), *state, batch.x]
    # DDP's buckets are as large as the weights. They were allocated in the step before.
    ddp = isinstance(training.forward, DistributedDataParallel)
    buckets = 4 * model.num_params()["total"] if ddp else 0
    return sum(t.untyped_storage().nbytes() for t in always) + buckets + min(peaks)

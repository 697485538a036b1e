"""Train a small model under each setting of `shard` and `recompute`, and compare it with DDP.

    torchrun --standalone --nproc_per_node=3 -m tests.shards_as_ddp 20 qwen3 3

The arguments: steps, preset, accumulation. The weights and batches are the same, in fp32. Printed
is the largest relative difference of the losses and of the gradient's norms, over all steps. The
exit code is 1 if one of them is above 1e-5, or if a step is taken although a gradient is infinite
in the part of one rank.
"""

import math
import sys
from dataclasses import replace
from itertools import product

import torch

from bench.measure import Training, new_training
from hardware.machine import Machine, start
from hardware.sharded import local_shard
from training.batches import Batch
from training.settings import TrainConfig, model_config

# 60 rows of q, k and v each, and 60 columns: 3 ranks hold uneven parts of them.
SHAPE = dict(n_layer=3, n_head=5, n_embd=60, d_ff=170, block_size=32, batch_size=2)
VOCABULARY = 300


def training(cfg: TrainConfig, machine: Machine, accum: int) -> Training:
    draw = torch.Generator().manual_seed(machine.rank)

    def batches():
        while True:
            shape = (cfg.batch_size, cfg.block_size + 1)
            rows = torch.randint(VOCABULARY, shape, generator=draw)
            yield Batch(rows[:, :-1], rows[:, 1:])

    new = new_training(cfg, model_config(cfg, VOCABULARY), machine)
    return replace(new, batches=batches(), accum=accum)


def losses_and_norms(cfg: TrainConfig, machine: Machine, accum: int, steps: int) -> torch.Tensor:
    """Train, and return the losses and the norms, (steps, 2)."""
    new = training(cfg, machine, accum)
    return torch.tensor([new.step().wait()[:2] for _ in range(steps)], dtype=torch.float64)


def skips_an_overflow(cfg: TrainConfig, machine: Machine) -> bool:
    """Return whether a gradient that overflows on rank 1 skips the step here, and only that one."""
    scaler = torch.amp.GradScaler("cpu")  # of fp16
    unscale = scaler.unscale_
    new = replace(training(cfg, machine, 1), scaler=scaler)
    model = new.model

    def overflow(optimizer: torch.optim.Optimizer) -> None:
        if machine.rank == 1:
            local_shard(model.wte.weight.grad)[0, 0] = math.inf
        unscale(optimizer)

    def moves() -> bool:
        weights = [local_shard(p).detach().clone() for p in model.parameters()]
        new.step()
        return not all(map(torch.equal, weights, map(local_shard, model.parameters())))

    scaler.unscale_ = overflow
    moved = moves()
    scaler.unscale_ = unscale
    return not moved and moves()


def main() -> None:
    steps, preset, accum = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    machine = start("cpu", "float32")
    failed = False
    for optimizer in ("adamw", "muon"):
        ddp = TrainConfig(max_steps=1, preset=preset, optimizer=optimizer, **SHAPE)
        expected = losses_and_norms(ddp, machine, accum, steps)
        shards = ("none", "optimizer", "gradients", "all")
        for shard, recompute in list(product(shards, ("none", "blocks")))[1:]:
            cfg = replace(ddp, shard=shard, recompute=recompute)
            figures = losses_and_norms(cfg, machine, accum, steps)
            loss, norm = (figures / expected - 1).abs().amax(dim=0).tolist()
            failed |= max(loss, norm) > 1e-5
            machine.print0(f"{optimizer} {shard} {recompute}: loss {loss:.1e}, norm {norm:.1e}")
        skipped = all(machine.gather(skips_an_overflow(replace(ddp, shard="all"), machine)))
        failed |= not skipped
        machine.print0(f"{optimizer}: an overflow on one rank skips the step on all: {skipped}")
    machine.gather(None)
    torch.distributed.destroy_process_group()
    sys.exit(failed)


if __name__ == "__main__":
    main()

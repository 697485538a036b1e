"""Bytes that torch's allocator counted in a training step on a simulated A100.

tests/test_memory.py compares the predictions with them; test_simgpu.py measures them again. One
process stands for six: torch has a fake process group, whose sums leave the numbers alone.
"""

import sys
from pathlib import Path

import torch
from torch._inductor.async_compile import AsyncCompile

import training.parallel
from configurator import parse
from hardware.machine import Machine
from model import GPT, GPTConfig
from tests.peak import measured_peak
from training.memory import Workload
from training.settings import TrainConfig, model_config

REPO = Path(__file__).resolve().parents[2]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHARDED = dict(world=6, shard="all", recompute=True)
ALLOCATED = [  # config, vocabulary, B, dtype, what differs from an eager Step of 2 micro-steps
    ("docs_large", 4096, 16, BF16, {}, 375_534_080),
    ("docs_large", 4096, 16, FP32, dict(compiled=True), 396_705_792),
    ("gpt2_124m", 50_257, 16, BF16, dict(recompute=True), 4_342_460_928),
    ("gpt2_124m", 50_257, 16, FP16, dict(documents=True), 17_366_742_528),
    ("train_1b", 32_000, 8, BF16, dict(world=6), 53_670_870_016),
    ("train_1b", 32_000, 8, BF16, dict(world=6, compiled=True), 53_283_516_928),
    ("train_1b", 32_000, 8, BF16, SHARDED, 7_072_435_712),
    (
        "minimind_26m", 6400, 32, FP16, dict(world=6, shard="optimizer", compiled=True),
        2_912_234_496,
    ),
    ("train_100m", 16_384, 8, BF16, SHARDED | dict(compiled=True, documents=True), 837_536_256),
    ("train_100m", 16_384, 8, BF16, dict(world=6, shard="gradients"), 4_784_190_464),
    ("chat", 16_384, 4, FP32, SHARDED, 540_865_536),
]  # fmt: skip


def case(config: str, V: int, B: int, dtype: torch.dtype, more: dict) -> tuple[GPTConfig, Workload]:
    cfg = parse(TrainConfig, [str(REPO / "config" / f"{config}.py")])
    usual = dict(accum=2, compiled=False, optimizer=cfg.optimizer)
    return model_config(cfg, V), Workload(B, cfg.block_size, dtype=dtype, **usual | more)


class AloneInDDP(torch.nn.parallel.DistributedDataParallel):
    """DDP in a fake process group, which returns no sums: the buckets are left as they are."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)

        def left_alone(state, bucket) -> torch.futures.Future[torch.Tensor]:
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        self.register_comm_hook(None, left_alone)


class Kernel:
    """Stands for a compiled kernel: what Inductor allocates does not depend on it."""

    def run(self, *args, **options) -> None:
        pass


def main() -> None:
    """Print the bytes of the case whose number is given. Run this in the simulation."""
    AsyncCompile.triton = lambda self, *source, **options: Kernel()
    for scheme in ("normal_", "uniform_", "kaiming_uniform_", "ones_", "zeros_", "constant_"):
        setattr(torch.nn.init, scheme, lambda x, *args, **options: x)  # weights need no room here
    GPT.init_weights = lambda *args: None
    training.parallel.DistributedDataParallel = AloneInDDP
    c, workload = case(*ALLOCATED[int(sys.argv[1])][:-1])
    machine = None
    if workload.world > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        fake = dict(store=FakeStore(), rank=0, world_size=workload.world)
        torch.distributed.init_process_group("fake", **fake)
        machine = Machine(0, 0, workload.world, torch.device("cuda"), workload.dtype, "")
    print("peak:", measured_peak(c, workload, machine))


if __name__ == "__main__":
    main()

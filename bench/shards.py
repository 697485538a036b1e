"""Compare the peak memory of a step under `shard` and `recompute` with what is predicted for it.

    torchrun --standalone --nproc_per_node=3 -m bench.shards
    torchrun --standalone --nproc_per_node=2 -m bench.shards --optimizers adamw --shards all

A small model trains in bf16 on CPUs. The peak is that of the rank that has the most; the prediction
is training/memory.py's. The exit code is 1 if they differ by more than 5 %. That all of these
settings train alike is tested in tests/test_shards.py.
"""

import sys
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist

from bench.measure import not_positive
from bench.memory import measured_peak
from configurator import parse, run
from hardware.machine import start
from model import GPT, PRESETS, GPTConfig
from training.memory import Step, step_memory
from training.settings import TrainConfig


@dataclass(frozen=True)
class ShardsConfig:
    optimizers: tuple[str, ...] = ("adamw", "muon")  # values of train.py's optimizer
    accums: tuple[int, ...] = (1, 3)  # micro-steps in a step
    shards: tuple[str, ...] = ("none", "optimizer", "gradients", "all")  # of train.py's shard
    recomputes: tuple[str, ...] = ("none", "blocks")  # values of train.py's recompute

    def problems(self) -> list[str]:
        return not_positive(self, "accums")


def main() -> None:
    cfg = parse(ShardsConfig, doc=__doc__)
    machine = start("cpu", "bfloat16")
    c = GPTConfig(**PRESETS["qwen3"], n_layer=4, n_head=4, n_embd=256, vocab_size=2000)
    with torch.device("meta"):
        model = GPT(c)
    too_far = 0
    for optimizer, accum, shard, recompute in product(
        cfg.optimizers, cfg.accums, cfg.shards, cfg.recomputes
    ):
        options = [f"--optimizer={optimizer}", f"--shard={shard}", f"--recompute={recompute}"]
        settings = parse(TrainConfig, [*options, "--max_steps=1"])
        step = Step(4, 256, accum, machine.dtype, False, "cpu", machine.world).of(settings)
        measured = max(machine.gather(measured_peak(c, step, machine)))
        moment, parts = step_memory(model, step)
        difference = sum(parts.values()) / measured - 1
        too_far += abs(difference) > 0.05
        line = f"{machine.world} ranks, accumulation {accum}, {' '.join(options)}"
        line += f": {measured / 1e6:.1f} MB, predicted {difference:+.1%} {moment}"
        machine.say(line)
    machine.say(f"{too_far} too far apart")
    machine.gather(None)  # a rank that ends first would end the others
    if machine.world > 1:
        dist.destroy_process_group()
    sys.exit(too_far > 0)


if __name__ == "__main__":
    run(main)

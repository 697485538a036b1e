"""Compare the peak memory of a step under a `shard` and `recompute` with what is predicted for it.

    torchrun --standalone --nproc_per_node=3 -m tests.peak_of_shards adamw all blocks 3

The arguments: values of train.py's optimizer, shard and recompute, and micro-steps in a step. A
small model trains in bf16 on CPUs. The peak is that of the rank that has the most; the prediction
is training/memory.py's. The exit code is 1 if they differ by more than 5 %.
"""

import sys

import torch

from hardware.machine import start
from model import GPT, PRESETS, GPTConfig
from tests.peak import measured_peak
from training.memory import Workload, step_memory
from training.plan import Plan
from training.settings import TrainConfig

optimizer, shard, recompute, accum = sys.argv[1:]
machine = start("cpu", "bfloat16")
c = GPTConfig(**PRESETS["qwen3"], n_layer=4, n_head=4, n_embd=256, vocab_size=2000)
settings = TrainConfig(
    optimizer=optimizer, shard=shard, recompute=recompute, block_size=256, batch_size=4
)
workload = Workload.of(
    settings, Plan(4, int(accum), step_tokens=0, epoch_tokens=0, steps=1), machine
)
measured = max(machine.gather(measured_peak(c, workload, machine)))
with torch.device("meta"):
    moment, parts = step_memory(GPT(c), workload)
difference = sum(parts.values()) / measured - 1
machine.print0(f"{measured / 1e6:.1f} MB, predicted {difference:+.1%} {moment}")
machine.gather(None)  # a rank that ends first would end the others
torch.distributed.destroy_process_group()
sys.exit(abs(difference) > 0.05)

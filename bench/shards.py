"""Compare each setting of `shard` and `recompute` with plain DDP, in 20 steps of a small model.

    torchrun --standalone --nproc_per_node=3 bench/shards.py                 # on CPUs, in fp32
    torchrun --standalone --nproc_per_node=2 bench/shards.py --presets qwen3 --optimizers muon

    torchrun --standalone --nproc_per_node=2 bench/shards.py --memory        # peaks, in bf16

Every run has the same weights and batches. Printed is the largest relative difference of the losses
and of the gradient's norms, over all steps. The exit code is 1 if one of them is above 1e-5.

--memory compares the peak of a step, on the rank that has the most, with what training/memory.py
predicts. The exit code is 1 if they differ by more than 5 %.
"""

import argparse
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # so that `bench/shards.py` finds the modules below
from hardware.machine import Machine, start  # noqa: E402
from model import GPT, PRESETS, GPTConfig  # noqa: E402
from training.measure import measured_peak  # noqa: E402
from training.memory import Step, step_memory  # noqa: E402
from training.optimizer import make_optimizer  # noqa: E402
from training.parallel import wrap  # noqa: E402
from training.settings import TrainConfig, model_config  # noqa: E402
from training.step import Batch, take_step  # noqa: E402

# 100 rows of q, k and v each, and 60 columns: 3 ranks hold uneven parts of them.
SHAPE = dict(n_layer=3, n_head=5, head_dim=20, n_embd=60, d_ff=170, block_size=32)
VOCABULARY = 300
BOUND = 1e-5
WAYS = {
    "DDP": {},
    "recompute": dict(recompute="blocks"),
    "optimizer": dict(shard="optimizer"),
    "gradients": dict(shard="gradients"),
    "all": dict(shard="all"),
    "all, recompute": dict(shard="all", recompute="blocks"),
}


def run(cfg: TrainConfig, machine: Machine, accum: int, steps: int) -> list[list[float]]:
    """Train and return the losses and the norms, as two lists."""
    model = GPT(model_config(cfg, VOCABULARY))
    torch.manual_seed(cfg.seed)
    model.init_weights(cfg.init)
    for block in model.blocks:
        block.recompute = cfg.recompute == "blocks"
    forward = wrap(cfg, model, machine, None, cfg.batch_size, "")
    optimizer = make_optimizer(cfg, machine, model)
    scaler = torch.amp.GradScaler(machine.device.type, enabled=False)
    draw = torch.Generator().manual_seed(machine.rank)

    def batches():
        while True:
            shape = (cfg.batch_size, cfg.block_size + 1)
            rows = torch.randint(VOCABULARY, shape, generator=draw).to(machine.device)
            yield Batch(rows[:, :-1], rows[:, 1:])

    found = []
    rows = batches()
    for step in range(steps):
        torch.manual_seed(1000 * step + machine.rank)
        loss, _, norm = take_step(
            forward, model, optimizer, scaler, rows, accum, machine, cfg.grad_clip
        )()
        found.append((loss, norm))
    return [list(figures) for figures in zip(*found, strict=True)]


def compare_peaks(args: argparse.Namespace, machine: Machine) -> int:
    """Print the measured and the predicted peak of each way. Return how many differ too much."""
    c = GPTConfig(**PRESETS["qwen3"], n_layer=4, n_head=4, n_embd=256, vocab_size=2000)
    with torch.device("meta"):
        model = GPT(c)
    bad = 0
    for optimizer, accum, way in product(args.optimizers, args.accum, args.ways):
        cfg = TrainConfig(max_steps=1, optimizer=optimizer, **WAYS[way])
        step = Step(4, 256, accum, machine.dtype, False, "cpu", machine.world).of(cfg)
        measured = max(machine.gather(measured_peak(c, step, machine)))
        when, parts = step_memory(model, step)
        apart = sum(parts.values()) / measured - 1
        bad += abs(apart) > 0.05
        what = f"{optimizer} {machine.world} ranks, accumulation {accum}, {way}"
        machine.say(f"{what}: {measured / 1e6:.1f} MB, predicted {apart:+.1%} {when}")
    return bad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", default=["gpt2", "qwen3"])
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "muon"])
    parser.add_argument("--accum", nargs="+", type=int, default=[1, 3])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--memory", action="store_true")
    args = parser.parse_args()
    if args.memory:
        machine = start("cpu", "bfloat16")
        bad = compare_peaks(args, machine)
    else:
        machine = start("cpu", "float32")
        bad = compare_losses(args, machine)
    machine.say(f"{bad} too far apart")
    machine.gather(None)
    dist.destroy_process_group()
    sys.exit(bad > 0)


def compare_losses(args: argparse.Namespace, machine: Machine) -> int:
    """Print how far each way is from DDP. Return how many are too far."""
    bad = 0
    for preset, optimizer, accum in product(args.presets, args.optimizers, args.accum):
        base = dict(preset=preset, optimizer=optimizer, batch_size=2, max_steps=1)
        cfg = TrainConfig(**base, **SHAPE, dropout=args.dropout)
        want = run(cfg, machine, accum, args.steps)
        for way in args.ways:
            found = run(replace(cfg, **WAYS[way]), machine, accum, args.steps)
            apart = [
                max(abs(a / b - 1) for a, b in zip(*pair, strict=True))
                for pair in zip(found, want, strict=True)
            ]
            bad += max(apart) > BOUND
            what = f"{preset} {optimizer} {machine.world} ranks, accumulation {accum}, {way}"
            machine.say(f"{what}: loss {apart[0]:.1e}, norm {apart[1]:.1e}")
    return bad


if __name__ == "__main__":
    main()

"""What does an optimizer cost? Time a step with AdamW, Muon and Adafactor, by turns.

    python bench/optimizers.py config/minimind_26m.py --vocab_size=6400 --batch_tokens=8192

Every setting of train.py is accepted too. The optimizers share one model and one batch of random
tokens, (B, T), in one process. Given are medians, and each as a ratio to AdamW's.
"""

import statistics
import sys
import time
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path

import torch

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # so that `python bench/optimizers.py` finds the modules below
from configurator import parse, run  # noqa: E402
from hardware.machine import start  # noqa: E402
from hardware.peak import device_name  # noqa: E402
from hardware.terminal import ProgressBar  # noqa: E402
from model import GPT  # noqa: E402
from training.optimizer import make_optimizer  # noqa: E402
from training.plan import make_plan  # noqa: E402
from training.settings import TrainConfig, model_config, wants_compile  # noqa: E402
from training.step import Batch, take_step  # noqa: E402

NAMES = ("adamw", "muon", "adafactor")


@dataclass(frozen=True)
class CostConfig(TrainConfig):
    vocab_size: int = 8000  # number of tokens
    rounds: int = 8  # turns of each optimizer
    steps: int = 2  # timed steps in a turn; one more before them warms up

    def problems(self) -> list[str]:
        wrong = TrainConfig.problems(replace(self, max_steps=1))
        if min(self.vocab_size, self.rounds, self.steps) < 1:
            wrong.append("vocab_size, rounds and steps must be positive")
        return wrong


def main() -> None:
    cfg = parse(CostConfig, doc=__doc__)
    machine = start(cfg.device, cfg.dtype)
    plan = make_plan(replace(cfg, max_steps=1), 1, 1)
    model = GPT(model_config(cfg, cfg.vocab_size))
    model.init_weights(cfg.init)
    model.to(machine.device)
    compiled = wants_compile(cfg, machine.device.type, 0)
    forward = torch.compile(model, dynamic=False) if compiled else model
    scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.dtype == torch.float16)
    rows = torch.randint(cfg.vocab_size, (plan.batch_size, cfg.block_size + 1))
    batches = repeat(Batch(rows[:, :-1].to(machine.device), rows[:, 1:].to(machine.device)))
    optimizers = {n: make_optimizer(replace(cfg, optimizer=n), machine, model) for n in NAMES}

    def step(name: str) -> float:
        machine.synchronize()
        begun = time.perf_counter()
        optimizer = optimizers[name]
        take_step(forward, optimizer, scaler, batches, plan.accum, machine, cfg.grad_clip)
        machine.synchronize()
        return time.perf_counter() - begun

    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in ProgressBar("rounds", range(cfg.rounds)):
        for name in NAMES:
            step(name)
            seconds[name] += [step(name) for _ in range(cfg.steps)]
    size = f"{model.num_params()['total'] / 1e6:.1f}M parameters"
    print(
        f"{device_name(machine.device)}, {machine.dtype}, {size}, {plan.step_tokens} tokens a step"
    )
    adamw = statistics.median(seconds["adamw"])
    for name, found in seconds.items():
        middle = statistics.median(found)
        spread = f"{min(found) * 1e3:.1f} to {max(found) * 1e3:.1f}"
        print(f"{name:10} {middle * 1e3:9.1f} ms ({spread})   {middle / adamw - 1:+7.1%}")


if __name__ == "__main__":
    run(main)

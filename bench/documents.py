"""What do document masks cost? Time a step with and without them, by turns.

    python bench/documents.py config/minimind_26m.py --dataset=NAME --batch_tokens=8192
    python bench/documents.py config/demo.py --dataset=NAME --block_sizes 256 512 --compile=true

Every setting of train.py is accepted too. `stream`, `mask` and `pack` share one model in one
process, and read different windows in each step. Given are medians for each of `block_sizes`, each
as a ratio to stream's, and the share of the T x T pairs of tokens that are in one document.
"""

import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # so that `python bench/documents.py` finds the modules below
from configurator import parse, run  # noqa: E402
from hardware.machine import Machine, start  # noqa: E402
from hardware.peak import device_name  # noqa: E402
from hardware.terminal import ProgressBar  # noqa: E402
from model import GPT  # noqa: E402
from text.dataset import open_datasets  # noqa: E402
from text.windows import Loader, share_within, train_loader  # noqa: E402
from training.optimizer import make_optimizer  # noqa: E402
from training.plan import make_plan  # noqa: E402
from training.settings import TrainConfig, model_config, wants_compile, with_data  # noqa: E402
from training.step import Batch, read_ahead, take_step, to_batch  # noqa: E402

KINDS = ("stream", "mask", "pack")


@dataclass(frozen=True)
class CostConfig(TrainConfig):
    block_sizes: tuple[int, ...] = (256, 512, 1024)  # T
    rounds: int = 8  # turns of each kind
    steps: int = 2  # timed steps in a turn; one more before them warms up

    def problems(self) -> list[str]:
        wrong = TrainConfig.problems(replace(self, max_steps=1))
        if min(*self.block_sizes, self.rounds, self.steps) < 1:
            wrong.append("block_sizes, rounds and steps must be positive")
        return wrong


def main() -> None:
    cfg = with_data(parse(CostConfig, doc=__doc__))
    machine = start(cfg.device, cfg.dtype)
    for T in cfg.block_sizes:
        B = max(1, cfg.batch_size * cfg.block_size // T)
        compare(replace(cfg, block_size=T, batch_size=B), machine)


def compare(cfg: CostConfig, machine: Machine) -> None:
    """Time the three kinds at one block_size, and print a line for each."""
    T = cfg.block_size
    sets = open_datasets(cfg.dataset, cfg.data_dir)
    plan = make_plan(replace(cfg, max_steps=1), 1, 1)
    model = GPT(model_config(cfg, sets[0].meta["vocab_size"]))
    model.init_weights(cfg.init)
    model.to(machine.device)
    compiled = wants_compile(cfg, machine.device.type, 0)
    forward = torch.compile(model, dynamic=False) if compiled else model
    scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.dtype == torch.float16)
    optimizer = make_optimizer(cfg, machine, model)
    loaders = {kind: train_loader(sets, T, cfg.seed, kind) for kind in KINDS}

    def batches_of(loader: Loader) -> Iterator[Batch]:
        for rows in read_ahead(loader, 0, plan.batch_size, machine):
            yield to_batch(rows, machine.device)

    batches = {kind: batches_of(loader) for kind, loader in loaders.items()}

    def step(kind: str) -> float:
        machine.synchronize()
        begun = time.perf_counter()
        state = (optimizer, scaler, batches[kind])
        take_step(forward, *state, plan.accum, machine, cfg.grad_clip)
        machine.synchronize()
        return time.perf_counter() - begun

    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in ProgressBar(f"T = {T}", range(cfg.rounds)):
        for kind in KINDS:
            step(kind)
            seconds[kind] += [step(kind) for _ in range(cfg.steps)]
    size = f"{model.num_params()['total'] / 1e6:.1f}M parameters"
    mode = "compiled" if compiled else "eager"
    what = f"{device_name(machine.device)}, {machine.dtype}, {mode}, {size}"
    print(f"T = {T}, {plan.step_tokens} tokens a step, {what}")
    stream = statistics.median(seconds["stream"])
    for kind, found in seconds.items():
        middle = statistics.median(found)
        share = share_within(loaders[kind])
        print(
            f"  {kind:7} {middle * 1e3:9.1f} ms {middle / stream - 1:+7.1%}   {share:.0%} of pairs"
        )


if __name__ == "__main__":
    run(main)

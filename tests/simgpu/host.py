"""Measure the host's part of a training step: on simulated GPUs, kernels take no time.

    SIMGPU=FOLDER .venv/bin/python tests/simgpu/host.py --nanogpt=../nanoGPT     # 20 minutes

For each config: the milliseconds of a micro-step, in eager mode and compiled, and of the steps of
AdamW and Muon; beside it nanoGPT's micro-step, in a model of the same layers, heads and width. All
are measured by turns in one process. What a driver takes for a launch, 2 to 3 us, is not in these
figures: here it returns at once.
"""

import argparse
import gc
import importlib.util
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from types import ModuleType

import torch

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))  # so that `python tests/simgpu/host.py` finds the modules below
from hardware import kernels  # noqa: E402
from hardware.machine import Machine  # noqa: E402
from model import GPT  # noqa: E402
from tests.simgpu.memory import shipped  # noqa: E402
from tests.simgpu.simulation import SIMGPU, simulated  # noqa: E402
from training.memory import Step  # noqa: E402
from training.optimizer import make_optimizer  # noqa: E402
from training.settings import TrainConfig  # noqa: E402
from training.step import Batch, take_step  # noqa: E402

CONFIGS = ["demo", "minimind_26m", "train_100m", "gpt2_124m", "train_1b"]
MANY = 5  # micro-steps of a long step; a short one has one
WARM_UP = 2  # turns that are not counted
TURNS = 40
CUDA = torch.device("cuda")
TakesSteps = Callable[[int], None]  # called with the number of micro-steps


def ours(model: GPT, compiled: bool, optimizer: str, step: Step) -> TakesSteps:
    kernels.install()
    machine = Machine(0, 0, 1, CUDA, torch.bfloat16, "")
    forward = torch.compile(model, dynamic=False) if compiled else model
    made = make_optimizer(TrainConfig(max_steps=1, optimizer=optimizer), machine, model)
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    rows = torch.zeros(step.B, step.T + 1, dtype=torch.long, device=CUDA)
    batches = repeat(Batch(rows[:, :-1], rows[:, 1:]))
    return lambda accum: take_step(forward, made, scaler, batches, accum, machine, 1.0)()


def nanogpt(nanogpt_model: ModuleType, model: GPT, compiled: bool, step: Step) -> TakesSteps:
    """Return a step like the one in nanoGPT's train.py, with its model."""
    c = model.config
    shape = dict(n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd, block_size=step.T)
    config = nanogpt_model.GPTConfig(vocab_size=c.padded_vocab_size, bias=c.bias, **shape)
    peer = nanogpt_model.GPT(config).to(CUDA)
    optimizer = peer.configure_optimizers(0.1, 6e-4, (0.9, 0.95), "cuda")
    forward = torch.compile(peer) if compiled else peer
    X = torch.zeros(step.B, step.T, dtype=torch.long, device=CUDA)

    def take(accum: int) -> None:
        for _ in range(accum):
            with torch.amp.autocast("cuda", torch.bfloat16):
                loss = forward(X, X)[1] / accum
            loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return take


def measure(config: str, nanogpt_folder: str) -> None:
    """Print a line of JSON for one config: name -> ms of a micro-step, of the rest of a step."""
    for scheme in ("normal_", "uniform_", "kaiming_uniform_", "ones_", "zeros_"):
        setattr(torch.nn.init, scheme, lambda x, *args, **options: x)  # weights need no room here
    torch.set_float32_matmul_precision("high")
    spec = importlib.util.spec_from_file_location("nanogpt", f"{nanogpt_folder}/model.py")
    nanogpt_model = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(nanogpt_model)
    case = next(c for c in shipped([config], compiled=True) if c.step.dtype == torch.bfloat16)
    step = replace(case.step, B=1)  # three models share the GPU
    model = GPT(case.model).to(CUDA)
    contestants = {}
    for mode in ("eager", "compiled"):
        compiled = mode == "compiled"
        contestants[f"{mode} AdamW"] = ours(model, compiled, "adamw", step)
        contestants[f"{mode} Muon"] = ours(model, compiled, "muon", step)
        contestants[f"{mode} nanoGPT"] = nanogpt(nanogpt_model, model, compiled, step)
    seconds = defaultdict(list)
    for turn in range(WARM_UP + TURNS):
        if turn == WARM_UP:
            gc.collect()
            gc.freeze()
            seconds.clear()
        for name, take in contestants.items():
            for accum in (1, MANY):
                start = time.perf_counter()
                take(accum)
                seconds[name, accum].append(time.perf_counter() - start)
    # Other programs only make a step longer: the bound of the fastest eighth counts.
    ms = {key: 1e3 * statistics.quantiles(times, n=8)[0] for key, times in seconds.items()}
    micro = {name: (ms[name, MANY] - ms[name, 1]) / (MANY - 1) for name in contestants}
    figures = {name: [micro[name], ms[name, 1] - micro[name]] for name in contestants}
    print("host:", json.dumps(figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nanogpt", required=True, help="folder of a checkout of nanoGPT")
    parser.add_argument("--configs", nargs="+", default=CONFIGS)
    parser.add_argument("--measure", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        return measure(args.measure, args.nanogpt)
    if not SIMGPU:
        parser.error("SIMGPU names no folder of simulated GPUs")
    print("config          mode      micro-step  nanoGPT's  ratio  AdamW   Muon", flush=True)
    for config in args.configs:
        argv = [__file__, f"--measure={config}", f"--nanogpt={args.nanogpt}"]
        ended = simulated("a100", 1, argv, REPO)
        lines = [line[6:] for line in ended.stdout.splitlines() if line.startswith("host: ")]
        if not lines:
            sys.exit(ended.stdout)
        figures = json.loads(lines[0])
        for mode in ("eager", "compiled"):
            micro, adamw = figures[f"{mode} AdamW"]
            peer = figures[f"{mode} nanoGPT"][0]
            muon = figures[f"{mode} Muon"][1]
            row = f"{config:<15} {mode:<9} {micro:>7.2f} ms {peer:>7.2f} ms {micro / peer:>6.2f}"
            print(f"{row} {adamw:>6.1f} {muon:>6.1f}", flush=True)


if __name__ == "__main__":
    main()

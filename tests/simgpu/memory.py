"""Compare the predicted peak of a step with what torch's allocator counts on a simulated GPU.

    SIMGPU=FOLDER .venv/bin/python tests/simgpu/memory.py --eager             # 6 minutes
    SIMGPU=FOLDER .venv/bin/python tests/simgpu/memory.py --compiled          # an hour

Each shipped config runs in each dtype, with documents and without, with recompute and without, by
itself, and as one of six processes with each --shard. The exit code is 1 if a prediction is more
than 5 % too low or 10 % too high.

One process stands for six: torch has a fake process group, whose sums leave the numbers alone.
"""

import argparse
import gc
import itertools
import math
import pickle
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch._inductor.config
import torch.distributed as dist
from torch._inductor.async_compile import AsyncCompile
from torch.nn.parallel import DistributedDataParallel

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))  # so that `python tests/simgpu/memory.py` finds the modules below
import training.parallel  # noqa: E402
from configurator import parse  # noqa: E402
from hardware.machine import Machine  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402
from tests.peak import measured_peak  # noqa: E402
from tests.simgpu.simulation import SIMGPU, simulated  # noqa: E402
from training.memory import Step, step_memory  # noqa: E402
from training.settings import TrainConfig, model_config  # noqa: E402

VOCABULARY = dict(docs_large=4096, docs=4096, demo=65, minimind_26m=6400)
VOCABULARY |= dict(gpt2_124m=50_257, train_1b=32_000)
GPU = 75e9  # bytes: a case that is predicted to need more gets a smaller batch


@dataclass(frozen=True)
class Case:
    name: str  # of the config
    model: GPTConfig
    step: Step

    @property
    def key(self) -> str:
        s = self.step
        words = [self.name, str(s.dtype).removeprefix("torch."), f"B{s.B}"]
        words += ["compiled" if s.compiled else "eager", "mask" if s.documents else "stream"]
        words += ["recompute"] if s.recompute else []
        words += [f"{s.world} x {s.shard}"]
        return " ".join(words)

    def total(self) -> float:
        with torch.device("meta"):
            return sum(step_memory(GPT(self.model), self.step)[1].values())

    def that_fits(self) -> "Case":
        case = self
        while case.total() > GPU and case.step.B > 1:
            case = replace(case, step=replace(case.step, B=case.step.B // 2))
        return case


# --------------------------------------------------------------------------------------------------
# The cases

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
RANKS = [(1, "none"), *itertools.product([6], ["none", "optimizer", "gradients", "all"])]


def shipped(configs: list[str], compiled: bool) -> Iterator[Case]:
    for config in configs:
        cfg = parse(TrainConfig, [str(REPO / "config" / f"{config}.py")])
        model = model_config(cfg, VOCABULARY.get(config, 16_384))
        modes = itertools.product(DTYPES, ("stream", "mask"), ("none", "blocks"), RANKS)
        for dtype, documents, recompute, (world, shard) in modes:
            step = Step(cfg.batch_size, cfg.block_size, 2, dtype, compiled, "cuda", world)
            new = replace(cfg, shard=shard, recompute=recompute, documents=documents)
            step = step.with_cfg(new)
            yield Case(config, model, step).that_fits()


# --------------------------------------------------------------------------------------------------
# In the simulation


class AloneInDDP(DistributedDataParallel):
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


def measure() -> None:
    """Read cases from standard input. Print a line for each: the measured bytes, or an error."""
    AsyncCompile.triton = lambda self, *source, **options: Kernel()
    torch._inductor.config.compile_threads = 1  # there is nothing to compile
    for scheme in ("normal_", "uniform_", "kaiming_uniform_", "ones_", "zeros_", "constant_"):
        setattr(torch.nn.init, scheme, lambda x, *args, **options: x)  # weights need no room here
    GPT.init_weights = lambda *args: None
    training.parallel.DistributedDataParallel = AloneInDDP
    for case in pickle.loads(bytes.fromhex(sys.stdin.read())):
        machine = None
        if case.step.world > 1:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            if not dist.is_initialized():
                options = dict(store=FakeStore(), rank=0, world_size=case.step.world)
                dist.init_process_group("fake", **options)
            machine = Machine(0, 0, case.step.world, torch.device("cuda"), case.step.dtype, "")
        torch._C._cuda_clearCublasWorkspaces()
        try:
            peak = measured_peak(case.model, case.step, machine)
        except Exception as e:
            peak = f"{type(e).__name__}: {e}".splitlines()[0]
        print("peak:", peak, flush=True)
        gc.collect()
        torch.compiler.reset()
        torch.cuda.empty_cache()


def peaks(cases: list[Case]) -> list[str]:
    """Measure some cases, all with the same number of processes, in one process."""
    argv = ["-c", "from tests.simgpu.memory import Case, measure; measure()"]
    ended = simulated("a100", 1, argv, REPO, input=pickle.dumps(cases).hex())
    peaks = [line[6:] for line in ended.stdout.splitlines() if line.startswith("peak: ")]
    missing = f"exit code {ended.returncode}: {ended.stdout[-500:]}"
    return peaks + [missing] * (len(cases) - len(peaks))


# --------------------------------------------------------------------------------------------------


def report(case: Case, peak: str) -> bool:
    """Print the error of a prediction, or what went wrong. Return whether it is within bounds."""
    error = case.total() / int(peak) - 1 if peak.isdigit() else math.nan
    print(f"{error:+6.1%}  {case.key}: {peak}")
    return -0.05 < error < 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = sorted(path.stem for path in (REPO / "config").glob("*.py"))
    parser.add_argument("--configs", nargs="+", default=names, choices=names)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--only", default="", help="words that must be in the name of a case")
    args = parser.parse_args()
    if not SIMGPU:
        parser.error("SIMGPU names no folder of simulated GPUs")
    modes = [False] * args.eager + [True] * args.compiled
    cases = [case for compiled in modes for case in shipped(args.configs, compiled)]
    cases = [case for case in cases if all(word in case.key.split() for word in args.only.split())]

    groups = defaultdict(list)  # one process is for one number of processes, and one compilation
    for case in cases:
        s = case.step
        groups[s.world, s.compiled and (case.name, s.dtype, s.documents)].append(case)
    tasks = [group[i : i + 10] for group in groups.values() for i in range(0, len(group), 10)]
    with ThreadPoolExecutor(2) as threads:
        measured = itertools.chain.from_iterable(threads.map(peaks, tasks))
        ordered = itertools.chain.from_iterable(tasks)
        good = [report(case, peak) for case, peak in zip(ordered, measured, strict=True)]
    print(f"{sum(good)} of {len(cases)} predictions are 5 % too low at most, and 10 % too high")
    sys.exit(sum(good) < len(cases))


if __name__ == "__main__":
    main()

"""Compare the predicted peak of a step with what torch's allocator counts on a simulated GPU.

    SIMGPU=FOLDER .venv/bin/python tests/simgpu/memory.py --eager             # 6 minutes
    SIMGPU=FOLDER .venv/bin/python tests/simgpu/memory.py --compiled          # an hour
    SIMGPU=FOLDER .venv/bin/python tests/simgpu/memory.py --random 60

Each shipped config runs in each dtype, with documents and without, with recompute and without, by
itself, and as one of six processes with each --shard. --json keeps the figures; a second call goes
on where the first one ended. The exit code is 1 if a prediction is more than 5 % off.

One process stands for six: torch has a fake process group, whose sums leave the numbers alone.
"""

import argparse
import gc
import itertools
import json
import random
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
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
from hardware.terminal import ProgressBar  # noqa: E402
from model import GPT, PRESETS, GPTConfig  # noqa: E402
from tests.simgpu.simulation import SIMGPU, simulated  # noqa: E402
from training.measure import measured_peak  # noqa: E402
from training.memory import Step, step_memory  # noqa: E402
from training.settings import TrainConfig, model_config  # noqa: E402

VOCABULARY = dict(demo=4096, shakespeare_char=65, minimind_26m=6400)
VOCABULARY |= dict(gpt2_124m=50_257, train_1b=32_000)
GPU = 75e9  # bytes: a case that is predicted to need more gets a smaller batch
TOLERANCE = 0.05


@dataclass(frozen=True)
class Case:
    name: str  # of the config, or "random 7"
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

    def predicted(self) -> tuple[str, dict[str, float]]:
        with torch.device("meta"):
            return step_memory(GPT(self.model), self.step)

    def total(self) -> float:
        return sum(self.predicted()[1].values())

    def that_fits(self) -> "Case":
        case = self
        while case.total() > GPU and case.step.B > 1:
            case = replace(case, step=replace(case.step, B=case.step.B // 2))
        return case

    def json(self) -> str:
        step = asdict(self.step) | {"dtype": str(self.step.dtype).removeprefix("torch.")}
        return json.dumps([self.name, asdict(self.model), step])

    @classmethod
    def of_json(cls, line: str) -> "Case":
        name, model, step = json.loads(line)
        step["dtype"] = getattr(torch, step["dtype"])
        return cls(name, GPTConfig(**model), Step(**step))


# --------------------------------------------------------------------------------------------------
# The cases

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
RANKS = [(1, "none"), *itertools.product([6], ["none", "optimizer", "gradients", "all"])]


def shipped(configs: list[str], compiled: bool) -> list[Case]:
    cases = []
    both = (False, True)
    for config in configs:
        cfg = parse(TrainConfig, [str(REPO / "config" / f"{config}.py")])
        model = model_config(cfg, VOCABULARY.get(config, 16_384))
        for dtype, mask, recompute, ranks in itertools.product(DTYPES, both, both, RANKS):
            world, shard = ranks
            step = Step(cfg.batch_size, cfg.block_size, 2, dtype, compiled, "cuda", world)
            of = replace(cfg, shard=shard, recompute="blocks" if recompute else "none")
            step = step.of(replace(of, documents="mask" if mask else "stream"))
            cases.append(Case(config, model, step).that_fits())
    return cases


def drawn(number: int, seed: int) -> Case:
    """Return a shape that a user could train, drawn at random, with a peak of 0.3 GB and more."""
    rng = random.Random(f"{seed} {number}")
    while True:
        preset = rng.choice([*PRESETS])
        head_dim = rng.choice([32, 64, 128])
        n_kv_head = rng.choice([1, 2, 4, 8])
        n_head = n_kv_head * (1 if preset == "gpt2" else rng.choice([1, 1, 2, 4]))
        T = rng.choice([128, 512, 1000, 1024, 2048, 4096])
        shape = PRESETS[preset] | dict(
            block_size=T,
            vocab_size=rng.choice([4096, 6400, 16_384, 32_000, 50_257, 151_936]),
            n_layer=rng.choice([2, 4, 8, 12, 24]),
            n_head=n_head,
            n_kv_head=n_kv_head,
            head_dim=head_dim,
            n_embd=n_head * head_dim,
            tie_embeddings=rng.random() < 0.5,
            dropout=rng.choice([0, 0, 0, 0.1]),
        )
        c = GPTConfig(**shape)
        world, shard = rng.choice([(1, "none")] * 3 + RANKS[1:])
        step = Step(
            rng.choice([1, 2, 4, 8, 16, 32]),
            T,
            rng.choice([1, 2, 3]),
            rng.choice(DTYPES),
            rng.random() < 0.3,
            "cuda",
            world,
            shard,
            optimizer=rng.choice(["adamw", "muon"] + ["adafactor"] * (shard == "none")),
            average=rng.random() < 0.2 and shard == "none",
            documents=rng.random() < 0.3,
            recompute=rng.random() < 0.3,
        )
        case = Case(f"random {number}", c, step)
        if c.n_embd >= 256 and 0.3e9 < case.total() < GPU:
            return case


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
    for line in sys.stdin:
        case = Case.of_json(line)
        machine = None
        if case.step.world > 1:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            if not dist.is_initialized():
                options = dict(store=FakeStore(), rank=0, world_size=case.step.world)
                dist.init_process_group("fake", **options)
            machine = Machine(0, 0, case.step.world, torch.device("cuda"), case.step.dtype, "")
        torch._C._cuda_clearCublasWorkspaces()
        try:
            print("peak:", json.dumps([case.key, measured_peak(case.model, case.step, machine)]))
        except Exception as e:
            print("peak:", json.dumps([case.key, f"{type(e).__name__}: {e}"[:500]]))
        sys.stdout.flush()
        gc.collect()
        torch.compiler.reset()
        torch.cuda.empty_cache()


def peaks(cases: list[Case], gpu: str) -> dict[str, int | str]:
    """Measure some cases, all with the same number of processes, in one process."""
    lines = "".join(f"{case.json()}\n" for case in cases)
    argv = [__file__, "--measure"]
    ended = simulated(gpu, 1, argv, REPO, input=lines, stderr=subprocess.STDOUT)
    marked = [line[6:] for line in ended.stdout.splitlines() if line.startswith("peak: ")]
    found = dict(map(json.loads, marked))
    for case in cases:
        found.setdefault(case.key, f"exit code {ended.returncode}: {ended.stdout[-500:]}")
    return found


# --------------------------------------------------------------------------------------------------


def report(cases: list[Case], found: dict[str, int | str]) -> int:
    """Print the cases that are off, and a line for each config. Return how many are off."""
    off = 0
    errors = defaultdict(list)
    for case in cases:
        if not isinstance(peak := found[case.key], int):
            off += 1
            print(f"{case.key}: {peak}")
            continue
        when, parts = case.predicted()
        error = sum(parts.values()) / peak - 1
        errors[case.name.split()[0]].append(error)
        if abs(error) > TOLERANCE:
            off += 1
            both = f"{peak / 1e9:.3f} GB, predicted {sum(parts.values()) / 1e9:.3f}"
            print(f"{case.key}: {both}, {error:+.1%} {when}")
    for name, some in errors.items():
        within = sum(abs(error) <= 0.02 for error in some)
        extremes = f"{min(some):+.1%} to {max(some):+.1%}"
        print(f"{name}: {len(some)} cases, {extremes}, {within} of them within 2 %")
    return off


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = sorted(path.stem for path in (REPO / "config").glob("*.py"))
    parser.add_argument("--configs", nargs="+", default=names, choices=names)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--random", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gpu", default="a100")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="words that must be in the name of a case")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        return measure()
    if not SIMGPU:
        parser.error("SIMGPU names no folder of simulated GPUs")
    cases = shipped(args.configs, compiled=False) if args.eager else []
    cases += shipped(args.configs, compiled=True) if args.compiled else []
    cases += [drawn(number, args.seed) for number in range(args.random)]
    cases = [case for case in cases if all(word in case.key.split() for word in args.only.split())]
    found = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}

    groups = defaultdict(list)  # one process is for one number of processes, and one compilation
    for case in cases:
        if case.key not in found:
            s = case.step
            whole = s.compiled and case.name
            groups[s.world, whole, whole and (s.dtype, s.documents)].append(case)
    todo = [group[i : i + 10] for group in groups.values() for i in range(0, len(group), 10)]
    bar = ProgressBar("case", total=sum(map(len, todo)))
    with ThreadPoolExecutor(2) as threads:
        for group, peak in zip(todo, threads.map(lambda g: peaks(g, args.gpu), todo), strict=True):
            found |= peak
            if args.json:
                whole = {key: peak for key, peak in found.items() if isinstance(peak, int)}
                args.json.write_text(json.dumps(whole, indent=1) + "\n")
            bar.update(len(group))
    bar.close()
    sys.exit(report(cases, found) > 0)


if __name__ == "__main__":
    main()

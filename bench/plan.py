"""Know before you run: the memory, time and energy of a training, from its settings alone.

    python bench/plan.py config/train_1b.py --gpu=a100-80g --nproc=6              # on six A100; --tokens=20e9 for another length
    python bench/plan.py config/train_100m.py --gpu=v100-16g --nproc=6 --png=memory.png
    python bench/plan.py config/demo.py --trial                                   # 20 steps on this machine, then the time of all

Any setting of train.py can be given, as to train.py. Formulas give the answer: those of training/memory.py, of model.py (flops_per_token)
and below. Only --trial and --check run something, on this machine.
"""

import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate, repeat
from pathlib import Path
from typing import Literal

import torch
from torch.profiler import ProfilerActivity, profile

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # so that `python bench/plan.py` finds ours
from configurator import UserError, changes, parse, run  # noqa: E402
from hardware.gpus import ECC_IN_MEMORY, Card, find_gpu  # noqa: E402
from hardware.machine import Machine, pick_dtype, ram  # noqa: E402
from hardware.peak import DTYPES, device_name, peak_tflops  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402
from text.dataset import DataSet, open_datasets  # noqa: E402
from text.windows import open_windows  # noqa: E402
from training.memory import Step, activations, auto_batch, beside, largest_batch, needed, step_memory  # noqa: E402
from training.plan import even_batch, make_plan  # noqa: E402
from training.plots import read_metrics  # noqa: E402
from training.settings import TrainConfig, model_config, wants_compile  # noqa: E402
from training.step import take_step  # noqa: E402


@dataclass(frozen=True)
class PlanConfig(TrainConfig):
    # ---- Where ----
    gpu: str = ""  # v100-16g, a100-80g, 4090, h100, ...; default: this machine's device
    nproc: int = 1  # how many of them
    # ---- How much ----
    tokens: float = 0.0  # of training, in place of max_steps, max_epochs and max_tokens
    vocab_size: int = 0  # 0: of `dataset` where it is prepared, else 50257
    # ---- What if ----
    zero: Literal[0, 1, 2, 3] = 0  # ZeRO stage; train.py has DDP, which is 0
    optimizer: Literal["adamw", "muon", "adafactor"] = "adamw"  # train.py has AdamW
    checkpointing: bool = False  # activation checkpointing of whole blocks; train.py has none
    # ---- Check ----
    trial: bool = False  # train 20 steps on this machine, for the time of all
    check: bool = False  # make a step on this machine, for its peak of memory
    # ---- Output ----
    json: str = ""  # write the figures here too
    png: str = ""  # and a picture of memory by part against batch size

    def problems(self) -> list[str]:
        wrong = TrainConfig.problems(replace(self, max_steps=1) if self.tokens else self)
        wrong += [f"{k} must not be negative" for k in ("tokens", "vocab_size") if getattr(self, k) < 0]
        wrong += [
            f"{k} runs on this machine: leave gpu out" for k in ("trial", "check") if getattr(self, k) and self.gpu
        ]
        return wrong + ["nproc must be positive"] * (self.nproc < 1)


@dataclass(frozen=True)
class Device:
    """Where it shall run. The peak is of the training dtype."""

    name: str
    kind: str  # cuda or cpu
    dtype: torch.dtype
    tflops: float | None
    bandwidth: float | None  # GB/s
    bytes: float
    watts: int | None
    source: str


def planned_device(cfg: PlanConfig) -> Device:
    """The card that was named, or what this machine has."""
    if cfg.gpu:
        try:
            card: Card = find_gpu(cfg.gpu)
        except ValueError as e:
            raise UserError(f"gpu: {e}") from None
        dtype = cfg.dtype if cfg.dtype != "auto" else "bfloat16" if "bf16" in card.tflops else "float16"
        kind = {"bfloat16": "bf16", "float16": "fp16", "float32": "tf32" if "tf32" in card.tflops else "fp32"}[dtype]
        if kind not in card.tflops:
            raise UserError(f"dtype={dtype}: {card.name} has no {kind}; leave dtype out")
        peak, size = cfg.peak_tflops or card.tflops[kind], f"{card.name} {card.memory_gb} GB"
        source = "peak as given by peak_tflops" if cfg.peak_tflops else card.source
        usable = card.memory_gb * 1e9 * (0.97 if card.name in ECC_IN_MEMORY else 1.0)
        return Device(size, "cuda", DTYPES[kind], peak, card.bandwidth, usable, card.watts, source)
    kind = "cuda" if cfg.device in ("auto", "cuda") and torch.cuda.is_available() else "cpu"
    device = torch.device(kind)
    dtype, name = pick_dtype(cfg.dtype, device)[0], device_name(device)
    peak, source = peak_tflops(device, dtype, cfg.peak_tflops)
    if kind == "cpu":
        return Device(name, kind, dtype, peak, None, ram(), None, source)
    try:
        card = find_gpu(name)
    except ValueError:
        card = None
    size = torch.cuda.get_device_properties(device).total_memory
    return Device(name, kind, dtype, peak, card and card.bandwidth, size, card and card.watts, source)


# ---------------------------------------------------------------------------------------------------------------------
# Time


def six_nd(parameters: float, tokens: float) -> float:
    """FLOPs of a training: two a parameter and token forward, four backward (Kaplan et al., arXiv 2001.08361)."""
    return 6 * parameters * tokens


def compute(model: GPT, T: int, tokens: float) -> dict[str, float]:
    """FLOPs of a training. exact: 6 N + 12 L d T a token, as train.py counts for MFU. 6ND: the rule
    of thumb, with all parameters. recomputed: with activation checkpointing the forward pass of the
    blocks runs twice, 8 for 6, and that of the head once; MFU stays on 6.
    """
    c, a_token = model.config, model.flops_per_token(T)
    blocks = a_token - 6 * c.vocab_size * c.n_embd
    return {
        "exact": a_token * tokens,
        "6ND": six_nd(model.num_params()["total"], tokens),
        "recomputed": (a_token + blocks / 3) * tokens,
    }


def hours(flops: float, tflops: float, mfu: float, nproc: int = 1) -> float:
    """tflops: the peak of one device."""
    return flops / (tflops * 1e12 * mfu * nproc) / 3600


def trial(cfg: PlanConfig, steps: int, compiled: bool) -> dict[str, float]:
    """foretell() of the whole run, from 20 steps of it on this machine; others_cpu: the share of
    the CPU that other programs took meanwhile.

    What later saves add is left out: they are written beside the training.
    """
    own = {f.name for f in fields(cfg)} - {f.name for f in fields(TrainConfig)}
    with tempfile.TemporaryDirectory() as folder:
        plan = dict(
            max_steps=20, max_epochs=0.0, max_tokens=0, log_every=1, eval_every=10, save_every=20, progress="line"
        )
        plan |= dict(out_dir=folder, run_name="trial", init_from="scratch", compile=compiled, wandb=False)
        settings = {k: v for k, v in changes(cfg).items() if k not in own} | plan
        torchrun = f"-m torch.distributed.run --standalone --nproc_per_node={cfg.nproc}".split()
        script = [*(torchrun if cfg.nproc > 1 else []), str(REPO / "train.py")]
        command = [sys.executable, *script, *(f"--{k}={v}" for k, v in settings.items())]
        print(f"trial: {shlex.join(command[1:])}", flush=True)
        others = others_cpu_seconds()
        begun = time.perf_counter()
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        wall = time.perf_counter() - begun
        others = others_cpu_seconds() - others
        if done.returncode:
            print(done.stdout[-3000:], file=sys.stderr)
            raise UserError(f"the trial ended with exit code {done.returncode}, see above")
        records = read_metrics(Path(folder) / "trial" / "metrics.jsonl")
    seconds = [r["step_ms"] / 1e3 for r in records if "step_ms" in r]
    evaluations = [r["eval_s"] for r in records if "eval_s" in r]
    found = foretell(seconds, evaluations, wall, steps, math.ceil(steps / cfg.eval_every))
    return found | {"others_cpu": max(0.0, others / wall / os.cpu_count())}  # two clocks: it may round below 0


def others_cpu_seconds() -> float:
    """CPU seconds of all programs of this computer but this one and those that it ran, since some
    moment in the past; 0 where the system does not say (man 5 proc: /proc/stat).
    """
    try:
        ticks = Path("/proc/stat").read_text().split("\n")[0].split()[1:8]
        user, nice, system, _idle, _iowait, irq, softirq = map(int, ticks)
    except (OSError, ValueError):
        return 0.0
    busy = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    return busy - sum(os.times()[:4])  # of this process and of its children


SPREAD = ("fastest", "first_quartile", "third_quartile", "slowest")


def foretell(
    seconds: list[float],
    evaluations: list[float],
    wall: float,
    steps: int,
    times: int,
) -> dict[str, float]:
    """The seconds of a run of `steps` steps and `times` evaluations, from those of a trial.

    seconds: of each of its steps, of which the first three warm up. It evaluates behind the tenth
    and at its end, which took `evaluations`. `wall` is all of it, start and end included.

    all: if every step takes the median of the trial's steps; all_fastest, all_slowest: if every
    step takes what its fastest took, or its slowest.
    """
    steady = seconds[3:10] + seconds[11:]
    first, step, third = statistics.quantiles(steady, n=4)
    # The step behind an evaluation is slower, since that has used the memory otherwise.
    evaluation = statistics.median(evaluations) + max(0.0, seconds[10] - step)
    # Import, compile, what the first three steps take longer, a save, the plot.
    rest = wall - sum(evaluations) - sum(seconds[3:]) - 3 * step

    def run_of(step: float) -> float:
        return rest + steps * step + times * evaluation

    fastest, slowest = min(steady), max(steady)
    found = dict(zip(SPREAD, (fastest, first, third, slowest), strict=True))
    found |= dict(step=step, start_and_end=rest, evaluation=evaluation, evaluations=times)
    return found | dict(all=run_of(step), all_fastest=run_of(fastest), all_slowest=run_of(slowest))


UNEVEN = 0.25  # of the median, between the quartiles: torch.utils.benchmark calls more than that
# "significant environmental influence"
BUSY = 0.1  # of the CPU, for other programs


def doubts(found: dict[str, float], kind: str) -> list[str]:
    """Why a trial's median step is not to be believed; [] where it is. kind: of device.

    What other programs take counts on a CPU, which the training wants for itself: a machine that is
    busy all the time makes all steps slow alike, and no spread shows that.
    """
    reasons = []
    apart = (found["third_quartile"] - found["first_quartile"]) / found["step"]
    if apart > UNEVEN:
        reasons.append(f"the quartiles of its steps are {apart:.0%} of the median apart")
    if kind == "cpu" and found["others_cpu"] > BUSY:
        reasons.append(f"other programs took {found['others_cpu']:.0%} of the CPU")
    return reasons


# ---------------------------------------------------------------------------------------------------------------------
# Roofline (Williams, Waterman and Patterson, 2009): the least time of each part of a micro-step, and what bounds it

PRODUCTS = ("linear layers", "lm_head", "attention")  # the parts that a device's peak is meant for
LAUNCH = 10e-6  # seconds that the host needs for a kernel: assumed, see launches()


def roofline(model: GPT, step: Step) -> dict[str, tuple[float, float]]:
    """part -> (FLOPs, bytes) of a micro-step, forward and backward. Each part stands by itself, and
    each of its operations reads and writes its tensors once: the least that can be, unless it is
    fused with another part's. Left out are casts of weights to 16 bits, and sums over micro-steps.
    """
    c, s, N = model.config, step.s, step.B * step.T
    P = sum(p.numel() for p in model.parameters())

    def products(layers: list[torch.nn.Linear]) -> tuple[float, float]:
        """Each is three products of (M, K), (K, N) and (M, N): forward, input's gradient, weight's gradient."""
        flops = sum(6 * N * w.in_features * w.out_features for w in layers)
        moved = sum(w.in_features * w.out_features + N * (w.in_features + w.out_features) for w in layers)
        return flops, 3 * s * moved

    width = c.n_head * c.head_dim
    kept = sum(v for k, v in activations(c, replace(step, compiled=True, device="cuda")).items() if k != "T x T matrix")
    return {
        "linear layers": products([m for m in model.blocks.modules() if isinstance(m, torch.nn.Linear)]),
        "lm_head": products([model.lm_head]),
        # the causal half of T x T, and 7/6 for what the backward pass computes again; q, k, v, out forward and eight backward
        "attention": (7 * c.n_layer * width * step.T * N, 12 * c.n_layer * width * s * N),
        # norms, rotation, activation, additions: what is kept was written once, and is read about twice
        "elementwise": (10 * kept * step.B / s, 3 * kept * step.B),
        "loss": (10 * N * c.padded_vocab_size, 3 * s * N * c.padded_vocab_size),  # read twice, its gradient written
        "optimizer": (15 * P / step.accum, 28 * P / step.accum),  # weight, gradient, two moments read; three written
    }


def launches(model: GPT, step: Step) -> int:
    """Kernels of a micro-step on CUDA, forward and backward. The optimizer's few are left out.

    Eager: one for each operation of model.py that is not a view. tests/test_plan.py compares that
    with what torch dispatches on a CPU, where CUDA's fused RMSNorm and its LayerNorm in fp32 are
    stood in for. Compiled: products, attention, and nine fused kernels a layer, which is what
    Inductor made of gpt2 in bf16 on a CPU (12 of llama). On CUDA it also casts each weight by a
    kernel of its own.

    LAUNCH: torch alone took 5 to 8 us an operation, measured on one CPU with tensors of a few
    numbers. A launch adds about 3, and Inductor's kernels take 7 to 9 each, both as published (pull
    request 1017 of meta-pytorch/tritonbench). An older host may take several times that:
    bench/sweep.py measures what a step costs at least.
    """
    c = model.config
    linears = 5 if c.mlp == "swiglu" else 4
    added = len(list(model.parameters())) if step.accum > 1 else 0  # gradients, to those of before
    if step.compiled:  # products, attention, the fused rest of a layer; the head; the ends
        return c.n_layer * (3 * linears + 2 + 9) + 3 + 4 + added
    bf16 = step.dtype == torch.bfloat16
    fp16 = step.dtype == torch.float16
    cast = 2 * (bf16 or fp16)  # a tensor to 16 bits, and its gradient back
    layer = linears * (3 + cast + c.bias * (1 + cast))  # products; a bias is added in one of them
    in_and_out = bf16 and c.norm == "layernorm"  # both cast; RMSNorm casts its weight
    layer += 2 * (2 + cast * (2 if in_and_out else bf16))  # norms
    layer += 3 + 4 * (c.n_kv_head < c.n_head)  # attention; qkv's gradient; heads that are repeated
    layer += (20 + 4 * cast) * (c.pos == "rope") + 2 * (2 + cast) * c.qk_norm  # of queries and keys
    layer += (6 if c.mlp == "swiglu" else 2) + 4  # activation, residual additions
    layer += fp16 * (cast * (linears - 2) + 2)  # the residual stream is in fp32
    layer += 4 * (c.dropout > 0)
    return c.n_layer * layer + 30 + added  # embedding, last norm, head, loss


# ---------------------------------------------------------------------------------------------------------------------
# Reporting

HOST_PROCESS = 1.5e9  # bytes of host memory of a process with CUDA and its libraries: assumed, not measured


def host_memory(parameters: int, nproc: int) -> float:
    """Bytes of host memory of the computer when most is held: while all its processes resume.

    Each reads AdamW's moments (8 bytes a parameter) and then the weights: from the file, into the
    names and shapes of model.py, and into the model (4 each): 20.0 measured on a CPU, with models of
    101M to 202M parameters. A save takes 12 to 18 in rank 0 alone (measured too), a fresh start 4.
    """
    return nproc * (HOST_PROCESS + 20 * parameters)


def duration(hours: float) -> str:
    if hours < 1:
        return f"{hours * 60:.1f} minutes" if hours > 1 / 12 else f"{hours * 3600:.1f} s"
    return f"{hours:,.1f} hours" if hours < 48 else f"{hours / 24:,.1f} days"


def section(title: str, rows: dict[str, str]) -> None:
    print(f"\n{title}")
    width = max(map(len, rows))
    for key, value in rows.items():
        print(f"  {key:<{width}}  {value}")


def print_roofline(model: GPT, step: Step, device: Device, flops: int) -> dict[str, dict]:
    """Print the table; returns its figures. flops: of a token, by MFU's convention."""
    ridge = device.tflops * 1e12 / (device.bandwidth * 1e9)
    what = f"A micro-step of {step.B * step.T:,} tokens, at least"
    print(f"\n{what} (a part with less than {ridge:.0f} FLOPs a byte waits for memory)")
    print(f"  {'part':<14} {'GFLOP':>12} {'GB':>10} {'FLOP/byte':>10} {'ms':>9}  bound by")
    found: dict[str, dict] = {}
    work = 0.0  # seconds
    for name, (done, moved) in roofline(model, step).items():
        compute, memory = done / (1e12 * device.tflops), moved / (1e9 * device.bandwidth)
        seconds, bound = max((compute, "compute"), (memory, "memory"))
        found[name] = {"flops": done, "bytes": moved, "seconds": seconds, "bound": bound}
        row = f"{done / 1e9:>12,.1f} {moved / 1e9:>10,.3f} {done / moved:>10,.1f}"
        print(f"  {name:<14} {row} {1e3 * seconds:>9,.3f}  {bound}")
        work += seconds
    kernels = launches(model, step)
    host = kernels * LAUNCH
    how = "compiled" if step.compiled else "eager"
    found["launches"] = {"kernels": kernels, "seconds": host}
    each = f"{kernels:,} kernels, {how}, {1e6 * LAUNCH:.0f} us each (assumed)"
    print(f"  {'launches':<14} {each:>45} {1e3 * host:>9,.3f}  the host")

    # The host launches while the device works.
    least, bound = max((work, "the device's work"), (host, "launches"))
    computed = sum(found[name]["flops"] for name in PRODUCTS) / least / 1e12
    by_mfu = flops * step.B * step.T / least / 1e12
    found["all"] = {"seconds": least, "bound": bound, "tflops": computed, "mfu_tflops": by_mfu}
    products = f"{computed:,.4g} TFLOPS = {computed / device.tflops:.1%} of peak"
    print(f"  all: {1e3 * least:,.2f} ms, bound by {bound}: {products} in what is computed;")
    mfu = f"{by_mfu:,.4g} TFLOPS = MFU {by_mfu / device.tflops:.1%}"
    print(f"       {mfu} and not more, where attention's masked half counts too")
    return found


def plot(model: GPT, step: Step, capacity: float, png: str) -> None:
    """Memory by part against batch size, up to what does not fit any more."""
    import matplotlib

    matplotlib.use("Agg")  # no screen needed
    import matplotlib.pyplot as plt

    most = max(1, largest_batch(model, step, capacity))
    sizes = sorted({max(1, round(most * i / 40)) for i in range(1, 49)})
    stacks: dict[str, list[float]] = {}
    for i, B in enumerate(sizes):
        parts = step_memory(model, replace(step, B=B))[1]
        parts |= beside(sum(parts.values()), step)
        for k, v in parts.items():
            stacks.setdefault(k, [0.0] * len(sizes))[i] = v / 1e9
    fig, ax = plt.subplots(figsize=(8, 5))
    ax.stackplot(sizes, *stacks.values(), labels=stacks)
    ax.axhline(capacity / 1e9, color="black", ls="--", lw=1, label=f"{capacity / 1e9:.0f} GB")
    ax.set(xlabel=f"batch_size, sequences of {step.T} tokens", ylabel="GB", title=f"largest: {most}")
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles[::-1], labels[::-1], fontsize=7, loc="upper left")
    fig.savefig(png, dpi=120, bbox_inches="tight")
    plt.close(fig)


def prepared(cfg: PlanConfig) -> list[DataSet]:
    """The data sets; [] if none is there and the plan does without. UserError for a damaged one."""
    try:
        return open_datasets(cfg.dataset, cfg.data_dir)
    except UserError:
        names = [part.partition(":")[0].strip() for part in cfg.dataset.split(",")]
        there = any((Path(cfg.data_dir) / name / "meta.json").exists() for name in names)
        by_epochs = cfg.max_epochs and not (cfg.tokens or cfg.max_tokens or cfg.max_steps)
        if there or by_epochs or cfg.trial:
            raise
        return []


def measured_peak(c: GPTConfig, step: Step) -> int:
    """Bytes that a step like train.py's really holds at most, on this machine's CUDA device or CPU, by torch's own account.

    On a CPU, that is the sum of all allocations and releases that its profiler sees.
    """
    device = torch.device(step.device)
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    model = GPT(c)
    model.init_weights()
    model.to(device)
    fast = torch.compile(model, dynamic=False) if step.compiled else model
    optimizer = torch.optim.AdamW(model.param_groups(0.1), lr=1e-3, fused=True)
    machine = Machine(0, 0, 1, device, step.dtype, "")
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda" and step.dtype == torch.float16)
    rows = torch.randint(0, c.vocab_size, (step.B, step.T + 1), device=device)
    batches = repeat((rows[:, :-1], rows[:, 1:]))

    def one() -> None:
        take_step(fast, model, optimizer, scaler, batches, step.accum, machine, grad_clip=1.0)()

    one()  # the moments are allocated now, and what compiles has compiled
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        one()
        return torch.cuda.max_memory_allocated() - before
    moments = [t for state in optimizer.state.values() for t in state.values()]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        one()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    always = [*model.parameters(), *model.buffers(), *moments, rows]
    return sum(t.nbytes for t in always) + max(held)


def main() -> None:
    cfg = parse(PlanConfig, doc=__doc__)
    if "RANK" in os.environ:
        raise UserError("one process plans for all: start it without torchrun, and say --nproc")
    sets = prepared(cfg)
    vocab_size = cfg.vocab_size or (sets[0].meta["vocab_size"] if sets else 50257)
    with torch.device("meta"):  # shapes alone
        model = GPT(model_config(cfg, vocab_size))
    device, T, c = planned_device(cfg), cfg.block_size, model.config
    if cfg.tokens:
        cfg = replace(cfg, max_tokens=int(cfg.tokens), max_steps=0, max_epochs=0.0)
    epoch = sum(open_windows(d, "train", T).n_windows for d in sets) * T if sets else 0

    # memory
    flops = model.flops_per_token(T)
    draft = make_plan(replace(cfg, batch_size=1), cfg.nproc, epoch)
    compiled = wants_compile(cfg, device.kind, flops * draft.steps * draft.step_tokens)
    what_if = dict(zero=cfg.zero, optimizer=cfg.optimizer, checkpointing=cfg.checkpointing)
    step = Step(1, T, 2, device.dtype, compiled, device.kind, cfg.nproc, **what_if)
    most = largest_batch(model, step, device.bytes)
    if cfg.batch_size == "auto":
        cfg = replace(cfg, batch_size=even_batch(auto_batch(model, step, device.bytes), cfg, cfg.nproc))
    plan = make_plan(cfg, cfg.nproc, epoch)
    step = replace(step, B=plan.batch_size, accum=plan.accum)
    when, parts = step_memory(model, step)
    total, more = sum(parts.values()), beside(sum(parts.values()), step)
    need = total + sum(more.values())

    # time
    tokens = plan.steps * plan.step_tokens
    work = compute(model, T, tokens)
    n = model.num_params()
    facts = {
        "device": asdict(device) | {"dtype": str(device.dtype).removeprefix("torch.")},
        "model": asdict(c) | n,
        "memory": parts | more,
        "peak_bytes": total,
        "needed_bytes": need,
        "peak_when": when,
        "largest_batch": most,
        "plan": asdict(plan) | {"tokens": tokens, "nproc": cfg.nproc, "compiled": compiled},
        "flops": work,
    }

    many = f"{cfg.nproc} x " if cfg.nproc > 1 else ""
    print(f"{cfg.run_name} on {many}{device.name}: {str(device.dtype).removeprefix('torch.')}, {device.source}")
    heads = f"{c.n_head} heads of {c.head_dim} ({c.n_kv_head} for keys and values)"
    rows = {"shape": f"{c.n_layer} layers x {c.n_embd}, {heads}, d_ff {c.d_ff}, T = {T}, vocabulary {vocab_size:,}"}
    if not sets and not cfg.vocab_size:
        rows["shape"] += f" (assumed: no data set {cfg.data_dir}/{cfg.dataset})"
    rows["parameters"] = f"{n['total']:,}: {n['embedding']:,} in look-ups, {n['matmul']:,} in matrix products"
    section("Model", rows)

    how = "compiled" if compiled else "eager"
    rows = {k: f"{v / 1e9:>8.3f} GB" for k, v in (parts | more).items()}
    rows["all"] = f"{need / 1e9:>8.3f} GB of {device.bytes / 1e9:.1f}: " + (
        "fits" if need <= device.bytes else "DOES NOT FIT"
    )
    if device.kind == "cuda":
        rows["predicted peak"] = f"{total / 1e9:>8.3f} GB by torch.cuda.max_memory_allocated"
        facts["host_bytes"] = host = host_memory(n["total"], cfg.nproc)
        each = "1.5 GB (assumed) and 20 bytes a parameter in each process (a fresh start: 4)"
        rows["host"] = f"{host / 1e9:>8.3f} GB of host memory to resume: {each}"
    section(f"Memory of each device at batch_size {plan.batch_size}, {how}; the most is held {when}", rows)
    if cfg.check:  # one process, AdamW, all of it kept: what measured_peak can run
        plain = Step(step.B, T, min(2, step.accum), step.dtype, compiled, step.device)
        facts["measured_peak"], predicted = measured_peak(c, plain), sum(step_memory(model, plain)[1].values())
        both = f"{facts['measured_peak'] / 1e9:.3f} GB measured, {predicted / 1e9:.3f} predicted"
        print(f"  a step of one process, now: {both}, {predicted / facts['measured_peak'] - 1:+.1%}")
    others = {
        "as it is": {},
        "ZeRO-1": {"zero": 1},
        "ZeRO-2": {"zero": 2},
        "ZeRO-3": {"zero": 3},
        "activation checkpointing": {"checkpointing": True},
        "Muon": {"optimizer": "muon"},
        "Adafactor": {"optimizer": "adafactor"},
    }
    rows = {}
    facts["what_if"] = {}
    for name, change in others.items():
        if "zero" in change and cfg.nproc == 1:
            continue  # nobody to share with
        other = replace(step, **change)
        largest = largest_batch(model, other, device.bytes)
        facts["what_if"][name] = {"bytes": needed(model, other), "largest_batch": largest}
        rows[name] = f"{needed(model, other) / 1e9:>8.2f} GB, largest batch_size {largest:,}"
    section(f"The largest batch_size, of sequences of {T} (train.py has the first alone)", rows)

    steps_of = f"{plan.batch_size} x {T} x {plan.accum} accumulation x {cfg.nproc} = {plan.step_tokens:,} tokens a step"
    rows = {"batch": steps_of, "length": f"{plan.steps:,} steps = {tokens:,} tokens"}
    if epoch:
        rows["length"] += f" = {tokens / epoch:.2f} epochs"
    rows["tokens per parameter"] = f"{tokens / n['total']:.3g} (Chinchilla's optimum: about 20)"
    rows["FLOPs"] = f"{work['exact']:.3g} (6 N + 12 L d T a token); {work['6ND']:.3g} by 6 N D"
    if cfg.checkpointing:
        rows["FLOPs"] += f"; {work['recomputed']:.3g} with the blocks' forward pass computed twice"
    facts["hours"] = {}
    done = work["recomputed"] if cfg.checkpointing else work["exact"]
    for mfu in (0.3, 0.4, 0.55) if device.tflops and not cfg.trial else ():
        time_at = hours(done, device.tflops, mfu, cfg.nproc)
        rows[f"at {mfu:.0%} of peak"] = duration(time_at)
        facts["hours"][str(mfu)] = time_at
        if device.watts:
            rows[f"at {mfu:.0%} of peak"] += (
                f", {time_at * device.watts * cfg.nproc / 1e3:,.1f} kWh at {device.watts} W each"
            )
    section("Time", rows)
    if cfg.trial:
        facts["trial"] = measured = trial(cfg, plan.steps, compiled)
        ms = {k: f"{1e3 * measured[k]:,.1f}" for k in ("step", *SPREAD)}
        rate = plan.step_tokens / measured["step"]
        mfu = f", MFU {rate * flops / 1e12 / device.tflops / cfg.nproc:.1%}" if device.tflops else ""
        rows = {"a step": f"{ms['step']} ms (median), {rate:,.0f} tok/s{mfu}"}
        least, first, third, most = (ms[k] for k in SPREAD)
        rows["spread"] = f"{least} to {most} ms; the middle half {first} to {third}"
        rows["an evaluation"] = f"{measured['evaluation']:.2f} s, {measured['evaluations']} times"
        rows["start and end"] = f"{measured['start_and_end']:.1f} s"
        rows["the whole run"] = duration(measured["all"] / 3600)
        if why := doubts(measured, device.kind):
            least, most = (duration(measured[k] / 3600) for k in ("all_fastest", "all_slowest"))
            rows["the whole run"] = f"{least} to {most}, if it goes on like that"
            rows["in doubt"] = f"{' and '.join(why)}: try again when nothing else runs here"
        section("Measured by 20 steps", rows)

    if device.tflops and device.bandwidth:
        facts["roofline"] = print_roofline(model, step, device, flops)
    if cfg.png:
        plot(model, step, device.bytes, cfg.png)
        print(f"\npicture: {cfg.png}")
    if cfg.json:
        Path(cfg.json).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    run(main)

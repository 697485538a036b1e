"""Plan a training run: its memory, time and energy, from its settings alone.

    # on six A100; --tokens=20e9 sets another length
    python bench/plan.py config/train_1b.py --gpu=a100-80g --nproc=6
    python bench/plan.py config/train_100m.py --gpu=v100-16g --nproc=6 --png=memory.png
    # run 20 steps on this machine, and estimate the time of the whole run from them
    python bench/plan.py config/demo.py --trial

Like train.py, it takes the data set that was prepared last, unless --dataset names one. It plans
without data if --vocab_size is given and --dataset is not, or if nothing is prepared.

Every setting of train.py is accepted too. The answers come from formulas: those in
training/memory.py, flops_per_token in model.py, and those below. Only --trial and --check run a
part of the training, and they run it on this machine.
"""

import gc
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

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # so that `python bench/plan.py` finds the modules below
from configurator import (  # noqa: E402
    UserError,
    changes,
    checked,
    columns,
    folded,
    given,
    row,
    run,
)
from hardware import kernels  # noqa: E402
from hardware.gpus import ECC_IN_MEMORY, Card, find_gpu  # noqa: E402
from hardware.machine import Machine, available, own_memory, pick_dtype  # noqa: E402
from hardware.peak import DTYPES, device_name, peak_tflops  # noqa: E402
from hardware.terminal import plural  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402
from text.dataset import DataSet, newest_dataset, open_datasets  # noqa: E402
from text.windows import open_windows  # noqa: E402
from training.average import Average  # noqa: E402
from training.huggingface import shape_in  # noqa: E402
from training.memory import (  # noqa: E402
    Step,
    activations,
    auto_batch,
    beside,
    largest_batch,
    needed,
    step_memory,
)
from training.metrics import read_metrics  # noqa: E402
from training.optimizer import SQUARES, make_optimizer  # noqa: E402
from training.parallel import compiles_by_blocks, shares, try_blocks, wrap  # noqa: E402
from training.plan import (  # noqa: E402
    Plan,
    batch_warning,
    different_tokens,
    even_batch,
    length_warnings,
    make_plan,
)
from training.resume import longer, with_context  # noqa: E402
from training.settings import ELSEWHERE, TrainConfig, model_config, wants_compile  # noqa: E402
from training.shards import part  # noqa: E402
from training.step import Batch, take_step  # noqa: E402


@dataclass(frozen=True)
class PlanConfig(TrainConfig):
    elsewhere = ELSEWHERE | {
        "nproc": "nproc_per_node devices num_gpus world_size",
        "peak_tflops, with the TFLOPS of a log line at that speed": "tok_s mfu tokens_per_second"
        " tokens_per_sec",
    }
    # ---- Where ----
    gpu: str = ""  # v100-16g, a100-80g, 4090, h100, ...; default: this machine's device
    nproc: int = 1  # number of devices, with one process for each
    # ---- How much ----
    tokens: float = 0.0  # tokens to train on, instead of max_steps, max_epochs and max_tokens
    examples: int = 0  # sequences in an epoch, for max_epochs where no data are prepared
    days: float = 0.0  # how long the run takes or took: print the utilisation that this means
    vocab_size: int = 0  # 0: that of the data set, or 50257 if none is prepared
    # ---- Memory ----
    fused_attention: bool = True  # false: with the T x T matrix, as where no fused kernel runs
    # ---- Check ----
    trial: bool = False  # train 20 steps on this machine, to estimate the time of the whole run
    check: bool = False  # run a step on this machine, to measure its peak memory
    # ---- Output ----
    json: str = ""  # also write the figures to this file
    png: str = ""  # also draw the parts of the memory, over the batch size, to this file

    def problems(self) -> list[str]:
        ends = replace(self, max_steps=1) if self.tokens else self  # `tokens` ends the run too
        wrong = TrainConfig.problems(ends)
        not_negative = ("tokens", "examples", "days", "vocab_size")
        wrong += [f"{k} must not be negative" for k in not_negative if getattr(self, k) < 0]
        if self.examples and (self.dataset or self.trial or not self.max_epochs):
            wrong.append("examples stands for data: give max_epochs, and no dataset or trial")
        if self.gpu:
            here = [k for k in ("trial", "check") if getattr(self, k)]
            wrong += [f"{k} runs on this machine: leave gpu out" for k in here]
        if self.tokens > 1e18:
            wrong.append("tokens must be at most 1e18")
        if self.png and not self.png.endswith(".png"):
            wrong.append(f"png={self.png}: its name must end in .png")
        if self.init_from == "resume":
            wrong.append("init_from=resume: a plan reads no run; give the settings of the run")
        if self.nproc < 1:
            wrong.append("nproc must be positive")
        return wrong

    @property
    def many(self) -> str:
        """Return what precedes the name of a device: "6 x ", or nothing where there is one."""
        return f"{self.nproc:,} x " if self.nproc > 1 else ""


@dataclass(frozen=True)
class Device:
    """One device that the run is planned for."""

    name: str
    kind: str  # cuda or cpu
    dtype: torch.dtype  # of autocast
    tflops: float | None  # peak in that dtype; None if unknown
    bandwidth: float | None  # GB/s of its memory
    bytes: float  # size of its memory
    watts: int | None
    source: str  # where the peak comes from


def planned_device(cfg: PlanConfig) -> Device:
    """Return the GPU that --gpu names, or the device of this machine."""
    return named_gpu(cfg) if cfg.gpu else own_device(cfg)


def named_gpu(cfg: PlanConfig) -> Device:
    """Return the GPU that --gpu names.

    Raises UserError if the table has no such GPU, or if the GPU does not compute in cfg.dtype.
    """
    try:
        card: Card = find_gpu(cfg.gpu)
    except ValueError as e:
        raise UserError(f"gpu: {e}") from None
    dtype = cfg.dtype
    if dtype == "auto":
        dtype = "bfloat16" if "bf16" in card.tflops else "float16"
    fp32 = "tf32" if "tf32" in card.tflops else "fp32"
    kind = {"bfloat16": "bf16", "float16": "fp16", "float32": fp32}[dtype]
    if kind not in card.tflops:
        raise UserError(f"dtype={dtype}: {card.name} has no {kind}; leave dtype out")
    name = f"{card.name} {card.memory_gb} GB"
    source = "peak as given by peak_tflops" if cfg.peak_tflops else card.source
    if kind == "tf32":
        source = f"matrix products computed as TF32; {source}"
    peak = cfg.peak_tflops or card.tflops[kind]
    usable = card.memory_gb * 1e9 * (0.97 if card.name in ECC_IN_MEMORY else 1.0)
    return Device(name, "cuda", DTYPES[kind], peak, card.bandwidth, usable, card.watts, source)


def own_device(cfg: PlanConfig) -> Device:
    """Return the device of this machine."""
    may_use_cuda = cfg.device in ("auto", "cuda")
    kind = "cuda" if may_use_cuda and torch.cuda.is_available() else "cpu"
    device = torch.device(kind)
    dtype = pick_dtype(cfg.dtype, device)[0]
    name = device_name(device)
    peak, source = peak_tflops(device, dtype, cfg.peak_tflops)
    if kind == "cpu":
        each = (available() + own_memory()) / cfg.nproc  # this process will have ended
        return Device(name, kind, dtype, peak, None, each, None, source)
    size = torch.cuda.get_device_properties(device).total_memory
    try:
        card = find_gpu(name)
    except ValueError:
        return Device(name, kind, dtype, peak, None, size, None, source)
    return Device(name, kind, dtype, peak, card.bandwidth, size, card.watts, source)


# --------------------------------------------------------------------------------------------------
# Time


def six_nd(parameters: float, tokens: float) -> float:
    """Return the FLOPs of a training run by the rule of thumb 6 N D.

    Each parameter takes part in two FLOPs per token in the forward pass, and in four in the
    backward pass (Kaplan et al., arXiv 2001.08361).
    """
    return 6 * parameters * tokens


def compute(model: GPT, step: Step, tokens: float) -> dict[str, float]:
    """Return the FLOPs of a training run, counted in three ways.

    exact: 6 N + 12 L d T for each token, as train.py counts for MFU.
    6ND: the rule of thumb, with all parameters.
    recomputed: with --recompute=blocks. The forward pass of the blocks then runs twice, which makes
    8 FLOPs out of 6, or a little less (computed_twice); that of the head runs once. MFU counts 6.
    """
    c = model.config
    per_token = model.flops_per_token(step.T)
    again = sum(2 * layer.weight.numel() for layer in computed_twice(model, step))
    again += 4 * c.n_layer * c.n_head * c.head_dim * step.T  # the two products of attention
    return {
        "exact": per_token * tokens,
        "6ND": six_nd(model.num_params()["total"], tokens),
        "recomputed": (per_token + again) * tokens,
    }


def computed_twice(model: GPT, step: Step) -> list[torch.nn.Linear]:
    """Return the linear layers whose output is computed twice with --recompute=blocks.

    In eager mode torch stops a second forward pass once it has all that the backward pass reads.
    That spares the last product of a block, unless dropout reads its result. A compiled block runs
    to its end.
    """
    stops = not step.compiled and not model.config.dropout
    layers = model.blocks.named_modules()
    linears = {name: layer for name, layer in layers if isinstance(layer, torch.nn.Linear)}
    return [x for name, x in linears.items() if not (stops and name.endswith("mlp.down_proj"))]


def hours(flops: float, tflops: float, mfu: float, nproc: int = 1) -> float:
    """Return the hours that `nproc` devices take. tflops: the peak of one device."""
    return flops / (tflops * 1e12 * mfu * nproc) / 3600


TRIAL_STEPS = 20


def trial(cfg: PlanConfig, steps: int, compiled: bool) -> dict[str, float]:
    """Train 20 steps on this machine; return what foretell() says of a run of `steps` steps.

    The result also has others_cpu, the share of the CPU that other programs took in that time. Only
    one save is counted, the one at the end: the others are written while the training goes on.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = trial_command(cfg, folder, compiled)
        print(f"trial: {shlex.join(command[1:])}", flush=True)
        others = others_cpu_seconds()
        begun = time.perf_counter()
        streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        done = subprocess.run(command, **streams, text=True)
        wall = time.perf_counter() - begun
        others = others_cpu_seconds() - others
        if done.returncode:
            print(done.stdout[-3000:], file=sys.stderr)
            raise UserError(f"the trial ended with exit code {done.returncode}, see above")
        records = read_metrics(Path(folder) / "trial" / "metrics.jsonl")
    seconds = [r["step_ms"] / 1e3 for r in records if "step_ms" in r]
    evaluations = [r["eval_s"] for r in records if "eval_s" in r]
    found = foretell(seconds, evaluations, wall, steps, math.ceil(steps / cfg.eval_every))
    # `others` and `wall` come from two clocks: rounding may bring their quotient below 0.
    return found | {"others_cpu": max(0.0, others / wall / os.cpu_count())}


def trial_command(cfg: PlanConfig, folder: str, compiled: bool) -> list[str]:
    """Return the command that trains 20 steps of the run, and writes to `folder`."""
    only_here = {f.name for f in fields(cfg)} - {f.name for f in fields(TrainConfig)}
    settings = {k: v for k, v in changes(cfg).items() if k not in only_here}
    settings |= dict(max_steps=TRIAL_STEPS, max_epochs=0.0, max_tokens=0, log_every=1)
    settings |= dict(eval_every=10, save_every=TRIAL_STEPS, out_dir=folder)
    origin = "scratch" if cfg.init_from == "auto" else cfg.init_from
    settings |= dict(run_name="trial", init_from=origin, compile=compiled, follow=False)
    settings |= dict(sample_every=0)
    launcher = []
    if cfg.nproc > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={cfg.nproc}"]
    options = [f"--{k}={v}" for k, v in settings.items()]
    return [sys.executable, *launcher, str(REPO / "train.py"), *options]


def others_cpu_seconds() -> float:
    """Return the CPU seconds that other programs have used since some moment in the past.

    Counted are all programs of this computer, except for this process and the ended processes that
    it had started. The result is 0 where the system does not tell (man 5 proc: /proc/stat).
    """
    try:
        ticks = Path("/proc/stat").read_text().split("\n")[0].split()[1:8]
        user, nice, system, _idle, _iowait, irq, softirq = map(int, ticks)
    except (OSError, ValueError):
        return 0.0
    busy = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    return busy - sum(os.times()[:4])  # user and system time of this process and of its children


SPREAD = ("fastest", "first_quartile", "third_quartile", "slowest")


def foretell(
    seconds: list[float], evaluations: list[float], wall: float, steps: int, times: int
) -> dict[str, float]:
    """Estimate the seconds of a run of `steps` steps and `times` evaluations from a trial.

    seconds: of each step of the trial; the first three warm up.
    evaluations: of its two evaluations, after the tenth step and at the end.
    wall: of the whole trial, with its start and its end.

    In the result, `all` is the whole run if every step takes the median of the trial's steps;
    all_fastest and all_slowest, if every step takes as long as the fastest or the slowest of them.
    """
    steady = seconds[3:10] + seconds[11:]
    first, step, third = statistics.quantiles(steady, n=4)
    # The step after an evaluation is slower, because the evaluation has used memory in another way.
    evaluation = statistics.median(evaluations) + max(0.0, seconds[10] - step)
    # What is left: import, compile, the longer time of the first three steps, a save, the plot.
    rest = wall - sum(evaluations) - sum(seconds[3:]) - 3 * step

    def run_of(step: float) -> float:
        return rest + steps * step + times * evaluation

    fastest = min(steady)
    slowest = max(steady)
    found = dict(zip(SPREAD, (fastest, first, third, slowest), strict=True))
    found |= dict(step=step, start_and_end=rest, evaluation=evaluation, evaluations=times)
    return found | dict(all=run_of(step), all_fastest=run_of(fastest), all_slowest=run_of(slowest))


# A trial is in doubt if its quartiles are farther apart than this share of the median. Above it,
# torch.utils.benchmark warns of "significant environmental influence".
UNEVEN = 0.25
BUSY = 0.1  # It is also in doubt if other programs took more than this share of the CPU.


def doubts(found: dict[str, float], kind: str) -> list[str]:
    """Return the reasons not to trust a trial's median step; [] if there are none.

    kind: of device. Other programs count on a CPU only, because the training needs all of the CPU
    itself. A machine that is busy all the time makes all steps equally slow, so that their spread
    does not show it.
    """
    reasons = []
    apart = (found["third_quartile"] - found["first_quartile"]) / found["step"]
    if apart > UNEVEN:
        reasons.append(f"the quartiles of its steps are {apart:.0%} of the median apart")
    if kind == "cpu" and found["others_cpu"] > BUSY:
        reasons.append(f"other programs took {found['others_cpu']:.0%} of the CPU")
    return reasons


# --------------------------------------------------------------------------------------------------
# Roofline (Williams, Waterman and Patterson, 2009): the least time of each part of a micro-step,
# and whether computing or memory sets that limit

PRODUCTS = ("linear layers", "lm_head", "attention")  # the parts that matrix units compute
LAUNCH = 25e-6  # seconds of the host for each kernel: measured on a Xeon, see launches()


def roofline(model: GPT, step: Step) -> dict[str, tuple[float, float]]:
    """Return the FLOPs and the bytes moved of each part of a micro-step, forward and backward.

    Each part stands by itself, and each of its operations reads and writes its tensors once. That
    is the minimum, unless an operation is fused with one of another part. Not counted are the casts
    of weights to 16 bits, and adding up the gradients of several micro-steps.
    """
    c = model.config
    s = step.s
    N = step.B * step.T
    V = c.padded_vocab_size
    width = c.n_head * c.head_dim

    def products(layers: list[torch.nn.Linear], times: int = 3) -> tuple[float, float]:
        """Three products a layer: the output, the input's gradient and the weight's gradient."""
        sizes = [(layer.in_features, layer.out_features) for layer in layers]
        flops = sum(2 * N * i * o for i, o in sizes)
        numbers = sum(i * o + N * (i + o) for i, o in sizes)
        return times * flops, times * s * numbers

    on_gpu = activations(c, replace(step, compiled=True, device="cuda", recompute=False))
    kept = sum(size for part, size in on_gpu.items() if part != "T x T matrix")
    linears = [m for m in model.blocks.modules() if isinstance(m, torch.nn.Linear)]
    of_linears = products(linears)
    again = 1.0
    if step.recompute:
        again = 4 / 3  # of three equal parts of the work in a block, the forward pass is one
        outputs = products(computed_twice(model, step), times=1)
        of_linears = tuple(map(sum, zip(of_linears, outputs, strict=True)))
    # Two products forward, and five backward, where the scores are computed again, each over the
    # causal half of T x T. Four tensors forward (q, k, v and the output), eight backward.
    of_attention, tensors = (9, 16) if step.recompute else (7, 12)
    return {
        "linear layers": of_linears,
        "lm_head": products([model.lm_head]),
        "attention": (
            of_attention * c.n_layer * width * step.T * N,
            tensors * c.n_layer * width * s * N,
        ),
        # Norms, rotation, activation, additions. What is kept for the backward pass is written
        # once, and read about twice.
        "elementwise": (again * 10 * kept * step.B / s, again * 3 * kept * step.B),
        # The logits are read twice, and their gradient is written.
        "loss": (10 * N * V, 3 * s * N * V),
        "optimizer": optimizer_work(model, step),
    }


def optimizer_work(model: GPT, step: Step) -> tuple[float, float]:
    """Return the FLOPs of the optimizer and the bytes that it moves, for each micro-step.

    AdamW reads a weight, its gradient and two moments, and writes all but the gradient: 28 bytes.
    Muon's operations move 62 bytes for each number in a matrix, and for each in the small square 26
    and 6 more for each product (in bf16, each of their tensors counted once). Adafactor is counted
    as AdamW.
    """
    flops = 0
    moved = 0
    for group in model.param_groups(0.0):
        numbers = sum(p.numel() for p in group["params"])
        if step.optimizer != "muon" or group["name"] != "matrices":
            flops += 15 * numbers
            moved += 28 * numbers
            continue
        moved += 62 * numbers
        for weight, rows in zip(group["params"], group["rows"], strict=True):
            for n in rows:
                shorter, longer = sorted((n, weight.size(1)))
                # X X^T, the squares and P X: products with two FLOPs for each of their terms
                sides = longer + len(SQUARES) * shorter + longer
                flops += 2 * shorter * shorter * sides
                moved += (26 + 6 * len(SQUARES)) * shorter * shorter
    times = step.accum * (step.world if step.zero else 1)  # each rank moves its own weights
    return flops / times, moved / times


def launches(model: GPT, step: Step) -> int:
    """Return the number of kernels of a micro-step on CUDA, forward and backward.

    The few kernels of the optimizer are not counted. Eager: each operation of model.py is a kernel,
    unless it is a view. tests/test_plan.py compares that with the operations that torch dispatches
    on a CPU, with stand-ins for CUDA's fused RMSNorm and for its LayerNorm in fp32. Compiled: the
    products, attention, and nine fused kernels a layer. Nine is what Inductor made of gpt2 in bf16
    on a CPU (12 of llama). On CUDA it also casts each weight with a kernel of its own.

    LAUNCH is the host's time for one of them, with its share of Python, autograd and allocation: 22
    to 33 us, in eager mode as compiled, on one core of an Intel Xeon in a shared machine, where a
    simulated A100 took no time (tests/simgpu/host.py). The driver's own 3 us are not in it. Another
    host may be several times as fast or as slow: bench/sweep.py measures the least time of a step.
    """
    c = model.config
    linears = 5 if c.gated else 4
    # Adding each gradient to that of the earlier micro-steps is a kernel.
    added = len(list(model.parameters())) if step.accum > 1 else 0
    if step.compiled:
        layer = 3 * linears + 2 + 9  # products, attention forward and backward, fused kernels
        head = 3
        ends = 4
        return c.n_layer * layer + head + ends + added
    bf16 = step.dtype == torch.bfloat16
    fp16 = step.dtype == torch.float16
    # Under autocast a tensor is cast to 16 bits, and its gradient is cast back.
    cast = 2 if bf16 or fp16 else 0
    layer = linears * (3 + cast)  # the products
    if c.bias:  # a product adds it; its gradient is a kernel, and so are its casts
        layer += linears * (1 + cast)
    elif c.qkv_bias:
        layer += 1 + cast
    norm = 2
    if bf16:  # LayerNorm casts its input and its output; RMSNorm casts its weight
        norm += cast * (2 if c.norm == "layernorm" else 1)
    layer += 2 * norm
    layer += 3  # attention, forward and backward, and the gradient of qkv
    if c.n_kv_head < c.n_head:  # keys and values are repeated for the query heads that share them
        layer += 4
    if c.pos == "rope":  # the rotation of queries and keys
        layer += 20 + 4 * cast
    if c.qk_norm:  # the norms of queries and keys
        layer += 2 * (2 + cast)
    layer += 6 if c.gated else 2  # the activation function
    layer += 4  # the additions to the residual stream
    if fp16:  # the residual stream stays in fp32
        layer += cast * (linears - 2 - c.gated) + 2  # gate and up read one cast
    if c.dropout > 0:
        layer += 4
    return c.n_layer * layer + 30 + added  # 30: embedding, last norm, head, loss


# --------------------------------------------------------------------------------------------------
# Memory

HOST_PROCESS = 1.5e9  # bytes of host memory of a process with CUDA's libraries: assumed


def host_memory(parameters: int, nproc: int, step: Step) -> dict[str, float]:
    """Return the host memory, in bytes, of a computer with nproc GPUs at a start and at a save.

    At a start or a resume each process has the weights (4 bytes a parameter) until its device has
    them. The optimizer's state is mapped from its file: it goes from there to the device one tensor
    at a time, through the page cache, which all processes share and the system takes back. For a
    save, rank 0 copies weights and state, and has a file of weights in memory while it is written.
    """
    processes = nproc * HOST_PROCESS
    state = {"adamw": 8, "muon": 8, "adafactor": 0}[step.optimizer]
    save = processes + (4 + state + 4 * step.average + 4) * parameters
    return {"start": processes + 4 * parameters * nproc, "save": save}


def as_deepspeed_counts(parameters: int, step: Step) -> tuple[float, str]:
    """Return the bytes of weights, gradients and AdamW's state as the paper on ZeRO counts them.

    Weights and gradients in 16 bits, and 12 bytes of fp32 a parameter: weights and two moments
    (arXiv 1910.02054, section 5). train.py has the weights and gradients in fp32 only: 4 + 4 + 8
    bytes, which is as much, but other parts of it are shared out.
    """
    shared, whole = {0: (0, 16), 1: (12, 4), 2: (14, 2), 3: (16, 0)}[step.zero]
    n = step.world
    words = [f"{whole} Phi"] if whole else []
    words += [f"{shared} Phi / {n}"] if shared else []
    return (whole + shared / n) * parameters, " + ".join(words)


def measured_peak(c: GPTConfig, step: Step, machine: Machine | None = None) -> int:
    """Run a training step like train.py's on this machine; return its peak memory in bytes.

    The figure is torch's own. On CUDA the allocator gives it; on a CPU it is the running sum of all
    allocations and releases that torch's profiler sees.
    machine: of this rank, if several processes run the step together.
    """
    device = torch.device(step.device)
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    kernels.install()
    model = GPT(c)
    model.init_weights()
    machine = machine or Machine(0, 0, 1, device, step.dtype, "")
    recompute = "blocks" if step.recompute else "none"
    cfg = TrainConfig(optimizer=step.optimizer, shard=step.shard, recompute=recompute)
    for block in model.blocks:
        block.recompute = step.recompute
    if not shares(cfg, machine):
        model.to(device)
    by_blocks = compiles_by_blocks(cfg, machine)
    if step.compiled and by_blocks:
        try_blocks(model, torch.zeros(step.B, step.T), machine)
    fast = wrap(cfg, model, machine, None, step.B, "")
    if step.compiled and not by_blocks:
        fast = torch.compile(fast, dynamic=False)
    optimizer = make_optimizer(cfg, machine, model)
    average = Average(model, 1) if step.average else None
    scales = device.type == "cuda" and step.dtype == torch.float16
    scaler = torch.amp.GradScaler(device.type, enabled=scales)
    rows = torch.randint(0, c.vocab_size, (step.B, step.T + 1), device=device)
    eos_id = 0 if step.documents else None
    batches = repeat(Batch(rows[:, :-1], rows[:, 1:], None, eos_id))

    def one() -> None:
        take_step(fast, optimizer, scaler, batches, step.accum, machine, grad_clip=1.0)
        if average:
            average.follow()

    one()  # compiles, and allocates the moments
    gc.collect()  # as train.py does: a trial of torch.compile leaves garbage
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        one()
        return torch.cuda.max_memory_allocated() - before
    moments = [part(t) for state in optimizer.state.values() for t in state.values()]
    peaks = []
    # Threads of gloo free FSDP's buffers a little later than the main thread might: how many they
    # hold is a matter of luck, so the least of several steps counts.
    for _ in range(6 if step.zero else 1):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            one()
        events = profiled.profiler.kineto_results.events()
        changes_of_memory = [e for e in events if e.name() == "[memory]"]
        in_order = sorted(changes_of_memory, key=lambda e: e.start_ns())
        peaks.append(max(accumulate(e.nbytes() for e in in_order)))
    means = average.weights.values() if average else []
    always = [*map(part, model.parameters()), *model.buffers(), *moments, *means, rows]
    # DDP's buckets are as large as the weights. They were allocated in the step before.
    ddp = model.num_params()["total"] * 4 if isinstance(fast, DistributedDataParallel) else 0
    return sum(t.untyped_storage().nbytes() for t in always) + ddp + min(peaks)


# The parts of the memory from the bottom of the picture to its top. The parts of one kind have the
# shades of one colour.
SHADES = {
    "Blues": [
        "weights",
        "optimizer",
        "average",
        "DDP's buckets",
        "whole weights",
        "FSDP's buffers",
        "16-bit weights",
        "gradients",
    ],
    "Greens": [
        "activations: block inputs",
        "activations: document mask",
        "activations: norms",
        "activations: attention",
        "activations: T x T matrix",
        "activations: MLP",
        "activations: dropout",
        "activations: embedding and head",
    ],
    "Oranges": ["logits", "temporary"],
    "Greys": ["CUDA context", "cuBLAS", "NCCL", "fragmentation", "Python and torch"],
}


def plot(model: GPT, step: Step, capacity: float, title: str, png: str) -> None:
    """Draw the parts of the memory over the batch size, to sizes somewhat beyond `capacity`."""
    import matplotlib

    matplotlib.use("Agg")  # no screen needed
    import matplotlib.pyplot as plt

    most = max(1, largest_batch(model, step, capacity))
    sizes = np.unique(np.linspace(1, max(2, 1.2 * most), 60).round().astype(int))
    memory = []
    for B in [*sizes, most]:
        parts = step_memory(model, replace(step, B=int(B)))[1]
        memory.append(parts | beside(sum(parts.values()), step))
    fig, ax = plt.subplots(figsize=(7, 5))
    below = np.zeros(len(sizes))
    for shades, kind in SHADES.items():
        names = [name for name in kind if any(name in parts for parts in memory)]
        colors = plt.get_cmap(shades)(np.linspace(0.85, 0.3, len(names)))
        for name, color in zip(names, colors, strict=True):
            *line, at_most = [parts.get(name, 0) / 1e9 for parts in memory]
            label = f"{name}: {at_most:.1f} GB"
            ax.fill_between(sizes, below, below + line, color=color, lw=0, label=label)
            below += line
    ax.axhline(capacity / 1e9, color="black", ls="--", lw=1)
    ax.axvline(most, color="black", ls=":", lw=1)
    ax.annotate(
        f"{capacity / 1e9:.3g} GB",
        (0.01, capacity / 1e9),
        (0, 3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
    )
    ax.set(xlabel=f"batch_size, sequences of {step.T:,} tokens", ylabel="GB")
    ax.set_title(title, loc="left")
    ax.set(xlim=(sizes[0], sizes[-1]), ylim=(0, None))
    # Beside the picture, and in the order of the stack.
    handles, labels = ax.get_legend_handles_labels()
    place = dict(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    heading = f"at the largest batch_size, {most:,}"
    ax.legend(handles[::-1], labels[::-1], title=heading, alignment="left", **place)
    fig.savefig(png, dpi=120, bbox_inches="tight")
    plt.close(fig)


# --------------------------------------------------------------------------------------------------
# Reporting. Each function prints a section, and returns its figures for the JSON file.


def duration(hours: float) -> str:
    """Return hours as text, in the unit that suits them: s, minutes, hours or days."""
    if hours <= 1 / 12:
        return f"{hours * 3600:.1f} s"
    if hours < 1:
        return f"{hours * 60:.1f} minutes"
    return f"{hours:,.1f} hours" if hours < 48 else f"{hours / 24:,.1f} days"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def section(title: str, rows: dict[str, str]) -> None:
    print(folded(f"\n{title}", columns()))
    width = max(map(len, rows))
    for key, value in rows.items():
        print(row(f"  {key:<{width}}  ", value))


def print_model(cfg: PlanConfig, model: GPT, sets: list[DataSet]) -> None:
    c = model.config
    n = model.num_params()
    heads = f"{c.n_head} heads of {c.head_dim} ({c.n_kv_head} for keys and values)"
    shape = f"{c.n_layer} layers x {c.n_embd}, {heads}, d_ff {c.d_ff}"
    shape += f", T = {cfg.block_size}, vocabulary {c.vocab_size:,}"
    if sets and not cfg.vocab_size:
        shape += f" ({sets[0].folder})"
    elif not cfg.vocab_size:
        shape += " (assumed: no data set is read)"
    kinds = f"{n['embedding']:,} in look-ups, {n['matmul']:,} in matrix products"
    if c.tie_embeddings:
        kinds += f" (the head's {c.vocab_size * c.n_embd:,} are both)"
    section("Model", {"shape": shape, "parameters": f"{n['total']:,}: {kinds}"})


def print_memory(
    cfg: PlanConfig, model: GPT, step: Step, device: Device, facts: dict
) -> dict[str, float]:
    """Print the parts of the memory, which main() has put into `facts`; with --check, measure."""
    found = {}
    rows = {k: f"{v / 1e9:>8.3f} GB" for k, v in facts["memory"].items()}
    need = facts["needed_bytes"]
    verdict = "fits" if need <= device.bytes else "DOES NOT FIT"
    rows["all"] = f"{need / 1e9:>8.3f} GB of {device.bytes / 1e9:.1f}: {verdict}"
    if device.kind == "cuda":
        peak = f"{facts['peak_bytes'] / 1e9:>8.3f} GB"
        rows["predicted peak"] = f"{peak} by torch.cuda.max_memory_allocated"
        P = model.num_params()["total"]
        host = host_memory(P, cfg.nproc, step)
        each = "1.5 GB (assumed) and 4 bytes a parameter in each process"
        save = f"{host['save'] / 1e9:.1f} GB to save"
        rows["host"] = f"{host['start'] / 1e9:>8.3f} GB of host memory to start: {each}; {save}"
        found["host_bytes"] = host
        theirs, words = as_deepspeed_counts(P, step)
        what = f"{words}, without activations and buffers"
        rows["as DeepSpeed counts"] = f"{theirs / 1e9:>8.3f} GB: {what}"
        found["deepspeed_bytes"] = theirs
    how = "compiled" if step.compiled else "eager"
    title = f"Memory of each device at batch_size {step.B}, {how}; the peak is {facts['peak_when']}"
    section(title, rows)
    if cfg.check:
        # What measured_peak() can run: one process. Further micro-steps add nothing.
        accum = min(2, step.accum)
        plain = replace(step, accum=accum, world=1, shard="none", fused=True)
        measured = measured_peak(model.config, plain)
        predicted = sum(step_memory(model, plain)[1].values())
        both = f"{measured / 1e9:.3f} GB measured, {predicted / 1e9:.3f} predicted"
        print(f"  one step on this machine, now: {both}, {predicted / measured - 1:+.1%}")
        found["measured_peak"] = measured
    return found


def ways(step: Step) -> dict[str, dict]:
    """Return the ways to need less memory, as flags and what they change in a step.

    They are in the order of what they cost: computing the blocks twice takes up to a third of the
    time again; what is shared out has to be sent.
    """
    shards = ("none", "optimizer", "gradients", "all") if step.world > 1 else ("none",)
    found = {}
    for shard in shards:
        for recompute in (False, True):
            flags = [f"--shard={shard}"] if shard != "none" else []
            flags += ["--recompute=blocks"] if recompute else []
            change = dict(shard=shard, recompute=recompute)
            found[" ".join(flags) or "neither shard nor recompute"] = change
    return found


def print_what_if(
    cfg: PlanConfig, model: GPT, step: Step, device: Device
) -> tuple[dict[str, dict], str]:
    """Print what other settings would need. Return that, and the flags of a plan that fits.

    The flags are empty if the plan fits as it is, or if nothing helps.
    """
    changes = ways(step)
    for name in ("adamw", "muon", "adafactor"):
        if name != step.optimizer and not (step.zero and name == "adafactor"):
            changes[f"--optimizer={name}"] = {"optimizer": name}
    rows = {}
    found = {}
    for name, change in changes.items():
        other = replace(step, **change)
        largest = largest_batch(model, other, device.bytes)
        found[name] = {"bytes": needed(model, other), "largest_batch": largest}
        here = "  <- as it is" if other == step else ""
        rows[name] = f"{found[name]['bytes'] / 1e9:>8.2f} GB, largest batch_size {largest:,}{here}"
    section(f"At batch_size {step.B}, and the largest, of sequences of {step.T}", rows)
    if needed(model, step) <= device.bytes:
        return found, ""
    flags = flags_that_fit(cfg, step, {k: found[k]["largest_batch"] for k in ways(step)})
    if flags:
        launcher = f"torchrun --nproc_per_node={cfg.nproc}" if cfg.nproc > 1 else "python"
        others = shlex.join(for_train(cfg, sys.argv[1:], flags))
        print(f"  a plan that fits: {launcher} train.py {others} {flags}")
    else:
        print("  nothing of this fits: try another GPU, more of them, or a smaller model")
    return found, flags


def for_train(cfg: PlanConfig, argv: list[str], flags: str) -> list[str]:
    """Return the arguments of this program that train.py takes too.

    Left out are those that `flags`, which flags_that_fit() has returned, replaces.
    """
    replaced = {"shard", "recompute"} | {flag[2:].partition("=")[0] for flag in flags.split()}
    of_train = {f.name for f in fields(TrainConfig)} - replaced
    kept = []
    dropped = False  # whether the option before was left out, and waits for its value
    for arg in argv:
        if arg.startswith("--"):
            name, equals, _ = arg[2:].partition("=")
            dropped = name.replace("-", "_") not in of_train
            kept += [] if dropped else [arg]
            dropped = dropped and not equals
        elif dropped and not arg.endswith(".py"):
            dropped = False
        else:
            kept.append(arg)
    return kept


def flags_that_fit(cfg: PlanConfig, step: Step, largest: dict[str, int]) -> str:
    """Return the flags of the first way that has room for the batch_size, or else of the roomiest.

    largest: the largest batch_size of each of ways(). Returns an empty string if none fits.
    """
    enough = [way for way, B in largest.items() if B >= step.B]
    way = enough[0] if enough else max(largest, key=largest.get)
    if not largest[way]:
        return ""
    flags = [flag for flag in way.split() if flag.startswith("--")]
    if not enough:
        flags.append(f"--batch_size={even_batch(largest[way], cfg, step.world)}")
    return " ".join(flags)


def print_time(
    cfg: PlanConfig,
    model: GPT,
    device: Device,
    plan: Plan,
    sets: list[DataSet],
    work: dict[str, float],
) -> dict:
    """Print batch, length and FLOPs of the run, and its hours at some shares of the peak."""
    tokens = plan.steps * plan.step_tokens
    micro_step = f"{plan.batch_size} x {cfg.block_size}"
    batch = f"{micro_step} x {plan.accum} accumulation x {cfg.nproc}"
    rows = {"batch": f"{batch} = {plan.step_tokens:,} tokens a step"}
    if warning := batch_warning(plan.step_tokens, cfg, cfg.nproc):
        rows["batch"] += f"\n{warning}"
    rows["length"] = f"{plural(plan.steps, 'step')} = {plural(tokens, 'token')}"
    if plan.epoch_tokens:
        of = f"{cfg.examples:,} examples"
        if sets:
            of = cfg.dataset or f"{sets[0].name}, the data set prepared last"
        rows["length"] += f" = {tokens / plan.epoch_tokens:.2f} epochs of {of}"
    rows["length"] += f", ended by {plan.ended_by}" if plan.ended_by else ""
    for warning in length_warnings(plan, cfg, sets):
        rows["length"] += f"\n{warning}"
    params = model.num_params()["total"]
    rows["tokens per parameter"] = f"{tokens / params:.3g} (Chinchilla's optimum: about 20)"
    different = different_tokens(tokens, sets)
    if sets and different < 0.99 * tokens:
        ratio = f"{different / params:.3g} different ones, {tokens / params:.3g} with repetitions"
        rows["tokens per parameter"] = f"{ratio} (Chinchilla's optimum: about 20 different ones)"
    rows["FLOPs"] = f"{work['exact']:.3g} (6 N + 12 L d T a token); {work['6ND']:.3g} by 6 N D"
    done = work["exact"]
    if cfg.recompute == "blocks":
        done = work["recomputed"]
        rows["FLOPs"] += f"; {done:.3g} with the blocks' forward pass computed twice"
    figures: dict = {"hours": {}}
    if device.tflops and not cfg.trial:
        of_6nd = hours(work["6ND"], device.tflops, 1.0, cfg.nproc)
        # A peak that is given may be a measured speed: a share of it would say nothing.
        for mfu in (1.0,) if cfg.peak_tflops else (0.3, 0.4, 0.55):
            time_at = hours(done, device.tflops, mfu, cfg.nproc)
            figures["hours"][str(mfu)] = time_at
            row = duration(time_at)
            if device.watts:
                kwh = time_at * device.watts * cfg.nproc / 1e3
                energy = f"{kwh:,.1f} kWh" if kwh < 1e4 else f"{kwh / 1e3:,.0f} MWh"
                row += f", {energy} ({cfg.many}{device.watts} W)"
            if mfu == 1:
                row += f"; by 6 N D {duration(of_6nd)}"
            rows[f"at {mfu:.0%} of peak"] = row
        if cfg.days:
            mfu = hours(work["exact"], device.tflops, 1.0, cfg.nproc) / (24 * cfg.days)
            by_6nd = of_6nd / (24 * cfg.days)
            days = "day" if cfg.days == 1 else "days"
            rows[f"in {cfg.days:g} {days}"] = f"MFU {mfu:.1%}; by 6 N D {by_6nd:.1%} of peak"
            figures["mfu"] = mfu
    section("Time", rows)
    return figures


def print_trial(
    cfg: PlanConfig, model: GPT, device: Device, plan: Plan, compiled: bool
) -> dict[str, float]:
    """Run a trial, and print what it foretells of the run."""
    flops = model.flops_per_token(cfg.block_size)
    if device.tflops:
        expected = hours(TRIAL_STEPS * plan.step_tokens * flops, device.tflops, 0.4, cfg.nproc)
        print(
            f"{TRIAL_STEPS} steps take about {duration(expected)} at 40% of peak, besides the start"
        )
    measured = trial(cfg, plan.steps, compiled)
    ms = {k: f"{1e3 * measured[k]:,.1f}" for k in ("step", *SPREAD)}
    rate = plan.step_tokens / measured["step"]
    rows = {"a step": f"{ms['step']} ms (median), {rate:,.0f} tok/s"}
    if device.tflops:
        rows["a step"] += f", MFU {rate * flops / 1e12 / device.tflops / cfg.nproc:.1%}"
    least, first, third, most = (ms[k] for k in SPREAD)
    rows["spread"] = f"{least} to {most} ms; the middle half {first} to {third}"
    rows["an evaluation"] = f"{measured['evaluation']:.2f} s, {measured['evaluations']} times"
    rows["start and end"] = f"{measured['start_and_end']:.1f} s"
    rows["the whole run"] = duration(measured["all"] / 3600)
    if why := doubts(measured, device.kind):
        least, most = (duration(measured[k] / 3600) for k in ("all_fastest", "all_slowest"))
        rows["the whole run"] = f"{least} to {most}, if it goes on like that"
        rows["in doubt"] = f"{' and '.join(why)}: try again when nothing else runs here"
    section(f"Measured by {TRIAL_STEPS} steps", rows)
    return measured


def print_roofline(model: GPT, step: Step, device: Device) -> dict[str, dict]:
    """Print the roofline of a micro-step; the peak and the bandwidth of `device` must be known."""
    found: dict[str, dict] = {}
    ridge = device.tflops * 1e12 / (device.bandwidth * 1e9)
    hint = f"a part with fewer than {ridge:.0f} FLOPs a byte is bound by memory"
    title = f"\nThe least time of a micro-step of {plural(step.B * step.T, 'token')} ({hint})"
    print(folded(title, columns()))
    print(f"  {'part':<14} {'GFLOP':>12} {'GB':>10} {'FLOP/byte':>10} {'ms':>9}  bound by")
    work = 0.0  # seconds that the device is busy
    for name, (done, moved) in roofline(model, step).items():
        computing = done / (1e12 * device.tflops)
        moving = moved / (1e9 * device.bandwidth)
        seconds = max(computing, moving)
        bound = "compute" if computing > moving else "memory"
        found[name] = {"flops": done, "bytes": moved, "seconds": seconds, "bound": bound}
        figures = f"{done / 1e9:>12,.1f} {moved / 1e9:>10,.3f} {done / moved:>10,.1f}"
        print(f"  {name:<14} {figures} {1e3 * seconds:>9,.3f}  {bound}")
        work += seconds
    kernels = launches(model, step)
    host = kernels * LAUNCH
    found["launches"] = {"kernels": kernels, "seconds": host}
    each = f"{kernels:,} kernels, {1e6 * LAUNCH:.0f} us each on a Xeon"
    print(f"  {'launches':<14} {each:>34} {1e3 * host:>9,.3f}  the host")

    # The host launches kernels while the device works: the longer of the two times counts.
    least = max(work, host)
    bound = "launches" if host > work else "the device's work"
    computed = sum(found[name]["flops"] for name in PRODUCTS) / least / 1e12
    by_mfu = model.flops_per_token(step.T) * step.B * step.T / least / 1e12
    found["all"] = {"seconds": least, "bound": bound, "tflops": computed, "mfu_tflops": by_mfu}
    share = f"{computed:,.4g} TFLOPS = {computed / device.tflops:.1%} of peak"
    print(row("  all: ", f"{1e3 * least:,.2f} ms, bound by {bound}: {share} are computed;"))
    mfu = f"{by_mfu:,.4g} TFLOPS = MFU {by_mfu / device.tflops:.1%}"
    print(row("       ", f"{mfu} at most, since MFU also counts the masked half of attention"))
    return found


# --------------------------------------------------------------------------------------------------


def prepared(cfg: PlanConfig) -> list[DataSet]:
    """Return the data sets, or [] if none of them is there and the plan does not need them.

    Raises UserError if a data set is damaged, or if one is missing that the plan needs.
    """
    needs_data = cfg.trial or not (cfg.tokens or cfg.examples or cfg.max_tokens or cfg.max_steps)
    if (cfg.vocab_size or cfg.examples) and not cfg.dataset and not needs_data:
        return []  # a plan for other data than what is prepared here
    try:
        return open_datasets(cfg.dataset or newest_dataset(cfg.data_dir), cfg.data_dir)
    except UserError:
        names = [part.partition(":")[0].strip() for part in cfg.dataset.split(",")]
        there = any((Path(cfg.data_dir) / name / "meta.json").exists() for name in names)
        if there or needs_data:
            raise
        return []


def shape_of(cfg: PlanConfig, vocab_size: int) -> GPTConfig:
    """Return the shape of the model: what the settings say, or that of the model to fine-tune.

    Raises UserError if it cannot be read.
    """
    if cfg.init_from in ("scratch", "auto"):
        return model_config(cfg, vocab_size)
    try:
        theirs = shape_in(cfg.init_from)
    except ValueError as e:
        raise UserError(f"init_from={cfg.init_from}: {e}") from None
    return longer(replace(theirs, dropout=cfg.dropout), cfg)


def first_step(cfg: PlanConfig, model: GPT, device: Device, epoch_tokens: int) -> Step:
    """Return a step of one sequence per micro-step, compiled if train.py would compile the run.

    It has two micro-steps, because accumulation needs more memory than one micro-step does.
    """
    T = cfg.block_size
    draft = make_plan(replace(cfg, batch_size=1), cfg.nproc, epoch_tokens)
    flops = model.flops_per_token(T) * draft.steps * draft.step_tokens
    compiled = wants_compile(cfg, device.kind, flops)
    step = Step(1, T, 2, device.dtype, compiled, device.kind, cfg.nproc, fused=cfg.fused_attention)
    return step.of(cfg)


def main() -> None:
    cfg = checked(PlanConfig, with_context(given(PlanConfig, doc=__doc__)))
    if "RANK" in os.environ:
        raise UserError("only one process is needed: start it without torchrun, and give --nproc")
    sets = prepared(cfg)
    vocab_size = cfg.vocab_size or (sets[0].meta["vocab_size"] if sets else 50257)
    with torch.device("meta"):  # only the shapes of the weights are needed
        model = GPT(shape_of(cfg, vocab_size))
    device = planned_device(cfg)
    if cfg.tokens:
        cfg = replace(cfg, max_tokens=int(cfg.tokens), max_steps=0, max_epochs=0.0)
    T = cfg.block_size
    windows = [open_windows(data, "train", T, documents=cfg.documents) for data in sets]
    epoch_tokens = (cfg.examples or sum(of_set.n_windows for of_set in windows)) * T

    step = first_step(cfg, model, device, epoch_tokens)
    largest = largest_batch(model, step, device.bytes)
    if cfg.batch_size == "auto":
        fits = auto_batch(model, step, device.bytes)
        cfg = replace(cfg, batch_size=even_batch(fits, cfg, cfg.nproc))
    plan = make_plan(cfg, cfg.nproc, epoch_tokens)
    step = replace(step, B=plan.batch_size, accum=plan.accum)
    when, parts = step_memory(model, step)
    peak = sum(parts.values())
    parts |= beside(peak, step)
    tokens = plan.steps * plan.step_tokens
    run_facts = dict(tokens=tokens, nproc=cfg.nproc, compiled=step.compiled)
    facts = {
        "device": asdict(device) | {"dtype": dtype_name(device.dtype)},
        "model": asdict(model.config) | model.num_params(),
        "memory": parts,
        "peak_bytes": peak,
        "needed_bytes": needed(model, step),
        "peak_when": when,
        "largest_batch": largest,
        "plan": asdict(plan) | run_facts,
        "flops": compute(model, step, tokens),
    }

    dtype = dtype_name(device.dtype)
    print(f"{cfg.run_name}: {cfg.many}{device.name}, {dtype}; {device.source}")
    print_model(cfg, model, sets)
    facts |= print_memory(cfg, model, step, device, facts)
    facts["what_if"], facts["fits_with"] = print_what_if(cfg, model, step, device)
    facts |= print_time(cfg, model, device, plan, sets, facts["flops"])
    if cfg.trial:
        facts["trial"] = print_trial(cfg, model, device, plan, step.compiled)
    if device.tflops and device.bandwidth:
        facts["roofline"] = print_roofline(model, step, device)
    if cfg.png:
        size = f"{model.num_params()['total'] / 1e6:,.1f}M parameters"
        title = (
            f"Memory of {cfg.run_name} ({size}, {dtype})\nper device, on {cfg.many}{device.name}"
        )
        plot(model, step, device.bytes, title, cfg.png)
        print(f"\npicture: {cfg.png}")
    if cfg.json:
        Path(cfg.json).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    run(main)

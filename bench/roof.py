"""Measure how fast this machine runs a model's own operations, one at a time, to judge an MFU by.

    # every setting of train.py is accepted too
    python bench/roof.py config/gpt2_124m.py
    python bench/roof.py config/train_1b.py --vocab_size=32000 --tokens=32768 --json=roof.json

Each figure is a median over `seconds` of repetitions (torch.utils.benchmark, after a warm-up), in
the dtype that train.py picks. OOM: the operation does not fit into memory. n/a: this machine cannot
run it.

The last table adds up the operations that a micro-step cannot do without. This sum is a roof: an
MFU that training cannot exceed, since norms, activations and the residual stream take time too. MFU
counts all of T x T in attention, but only the causal half is computed. So the roof may lie above
100 % where T is large.
"""

import json
import platform
import statistics
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.benchmark import Timer

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # so that `python bench/roof.py` finds the modules below
from configurator import changes, parse, run  # noqa: E402
from hardware.kernels import ChunkedCrossEntropy, attend, attention_kernel  # noqa: E402
from hardware.machine import Machine, start  # noqa: E402
from hardware.peak import device_name, peak_tflops  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402
from training.settings import TrainConfig, model_config  # noqa: E402

Figure = float | str  # a number, or the word that says why there is none


@dataclass(frozen=True)
class RoofConfig(TrainConfig):
    # ---- What to measure ----
    vocab_size: int = 50257  # vocabulary of the tokenizer; the model pads it
    tokens: int = 0  # tokens of a micro-step, whole sequences; 0: batch_size x block_size
    seconds: float = 0.3  # how long each operation is repeated
    # ---- Output ----
    json: str = ""  # also write the figures to this file

    def problems(self) -> list[str]:
        if self.batch_size == "auto":
            return ["batch_size=auto is for train.py and plan.py: give a number here"]
        wrong = TrainConfig.problems(replace(self, max_steps=1))  # any length of the run will do
        not_positive = [k for k in ("vocab_size", "seconds") if not getattr(self, k) > 0]
        wrong += [f"{k} must be positive" for k in not_positive]
        if self.tokens < 0 or self.tokens % max(1, self.block_size) > 0:
            wrong.append("tokens must be a multiple of block_size")
        if not Path(self.json).parent.is_dir():
            wrong.append(f"json={self.json}: no such folder")
        return wrong


# --------------------------------------------------------------------------------------------------
# One figure, and how a table of figures is printed


def median_ms(make: Callable[[], Callable[[], object]], seconds: float) -> Figure:
    """Return the median time in ms of the function that make() returns, or "OOM" or "n/a".

    The median is over ten blocks of calls, or over as many as `seconds` allow. Each block ends with
    a wait for the GPU. Timer.blocked_autorange is not used: it makes a block 10,000 times as long
    as such a wait, which is seconds.
    """
    try:
        work = make()
        work()  # compiles, plans, allocates
        timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
        number = max(1, int(seconds / 10 / timer.timeit(2).mean))
        blocks: list[float] = []
        while number * sum(blocks) < seconds:
            blocks.append(timer.timeit(number).mean)
        return 1e3 * statistics.median(blocks)
    except RuntimeError as e:
        no_memory = isinstance(e, torch.OutOfMemoryError) or "alloc" in str(e).lower()
        return "OOM" if no_memory else "n/a"


def per_ms(amount: float, ms: Figure) -> Figure:
    return amount / ms if isinstance(ms, float) else ms


def total(figures: list[Figure], times: float = 1.0) -> Figure:
    """Return the sum of the figures, multiplied by `times`; if one is a word, that word."""
    words = [x for x in figures if isinstance(x, str)]
    return words[0] if words else times * sum(figures)


def text(value: Figure | int) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if value < 1000 else f"{value:,.0f}"


def table(title: str, rows: list[dict]) -> list[dict]:
    """Print the rows below their keys, the first column to the left, and return the rows."""
    lines = [list(rows[0]), *([text(v) for v in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{title}")
    for line in lines:
        cells = [f"{x:>{width}}" for x, width in zip(line, widths, strict=True)]
        cells[0] = f"  {line[0]:<{widths[0]}}"
        print("  ".join(cells), flush=True)
    return rows


# --------------------------------------------------------------------------------------------------
# Matrix products


def gemms(c: GPTConfig) -> dict[str, tuple[int, int, int]]:
    """Return the linear layers: name -> (K inputs, N outputs, how many layers there are of it)."""
    qkv = (c.n_head + 2 * c.n_kv_head) * c.head_dim
    layers = {
        "qkv": (c.n_embd, qkv, c.n_layer),
        "proj": (c.n_head * c.head_dim, c.n_embd, c.n_layer),
    }
    if c.gated:
        layers["gate"] = (c.n_embd, c.d_ff, c.n_layer)
    layers["up"] = (c.n_embd, c.d_ff, c.n_layer)
    layers["down"] = (c.d_ff, c.n_embd, c.n_layer)
    layers["lm_head"] = (c.n_embd, c.padded_vocab_size, 1)
    return layers


def gemm_flops(c: GPTConfig) -> int:
    """Return the FLOPs of a token in linear layers, forward and backward: 6 for each weight.

    The padding of the vocabulary is included.
    """
    return sum(6 * K * N * n for K, N, n in gemms(c).values())


def product(which: str, M: int, K: int, N: int, machine: Machine) -> Callable[[], object]:
    """Return a function that computes one of a layer's three products over M tokens.

    which: "forward", "input grad" or "weight grad". The operands are laid out as autograd does.
    """
    random = partial(torch.randn, device=machine.device, dtype=machine.dtype)
    if which == "forward":
        a = random(M, K)
        b = random(N, K).T
    elif which == "input grad":
        a = random(M, N)
        b = random(N, K)
    else:
        a = random(M, N).T
        b = random(M, K)
    return partial(torch.mm, a, b, out=torch.mm(a, b))


def measure_gemms(c: GPTConfig, M: int, seconds: float, machine: Machine) -> list[dict]:
    rows = []
    for name, (K, N, n) in gemms(c).items():
        kinds = ("forward", "input grad", "weight grad")
        ms = {k: median_ms(partial(product, k, M, K, N, machine), seconds) for k in kinds}
        rates = {k: per_ms(2e-9 * M * K * N, t) for k, t in ms.items()}
        row = {"layer": name, "K": K, "N": N, "layers": n}
        rows.append(row | rates | {"ms": total([*ms.values()], n)})
    return rows


# --------------------------------------------------------------------------------------------------
# Attention

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def attention_inputs(B: int, nh: int, T: int, hs: int, machine: Machine) -> list[torch.Tensor]:
    """Return q, k, v and the gradient of the output, (B, nh, T, hs) each.

    As in the model, they lie in memory as (B, T, nh, hs).
    """
    qkv_dy = torch.randn(4, B, T, nh, hs, device=machine.device, dtype=machine.dtype)
    q, k, v, dy = qkv_dy.transpose(2, 3)
    return [*(t.detach().requires_grad_() for t in (q, k, v)), dy]


def attention(
    attends: Callable, shape: tuple, backward: bool, machine: Machine
) -> Callable[[], object]:
    """Return a function that runs attends(q, k, v) on inputs of `shape`: (B, nh, T, hs)."""
    q, k, v, dy = attention_inputs(*shape, machine)
    if backward:
        return lambda: torch.autograd.grad(attends(q, k, v), (q, k, v), dy)
    return lambda: attends(q, k, v)  # also keeps what a backward pass needs, as in training


def measure_attention(c: GPTConfig, M: int, T: int, seconds: float, machine: Machine) -> list[dict]:
    """Measure every backend at three shapes, and the model's own call at its own shape.

    The model's call is the last row; `default` names the backend that it takes.
    """
    B = M // T
    own = (c.n_head, c.head_dim)
    shapes = dict.fromkeys([(max(1, c.n_embd // 64), 64), (max(1, c.n_embd // 128), 128), own])
    fused = partial(F.scaled_dot_product_attention, is_causal=True)
    calls = []
    for heads in shapes:
        calls += [(heads, name, fused, sdpa_kernel(b)) for name, b in BACKENDS.items()]
    calls.append((own, "the model", partial(attend, dropout=0.0, within=None), nullcontext()))
    rows = []
    for (nh, hs), name, attends, limits in calls:
        shape = (B, nh, T, hs)
        with limits, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a backend that refuses gives its reasons at length
            forward = median_ms(partial(attention, attends, shape, False, machine), seconds)
            both = median_ms(partial(attention, attends, shape, True, machine), seconds)
        gflops = 2e-9 * B * nh * T * T * hs  # two products, the causal half of each
        row = {"backend": name, "head_dim": hs, "heads": nh, "default": ""}
        row |= {"forward": per_ms(gflops, forward), "both": per_ms(3 * gflops, both)}
        rows.append(row | {"ms forward": forward, "ms both": both})
    # Only now ask for the defaults: torch sets up its order of priority in the first call.
    for row in rows:
        chosen = attention_kernel(row["heads"], T, row["head_dim"], machine.device, machine.dtype)
        if row["backend"] == "the model":
            row["default"] = chosen
        elif row["backend"] == chosen:
            row["default"] = "*"
    return rows


def sdpa_facts() -> dict:
    """Return the version of cuDNN, and the order in which torch tries the backends, if known."""
    order = []
    if hasattr(torch._C, "_get_sdp_priority_order"):
        order = torch._C._get_sdp_priority_order()
    names = {int(backend): name for name, backend in BACKENDS.items()}
    priority = [names[n] for n in order if n in names]
    return {"cudnn": torch.backends.cudnn.version(), "priority": priority}


# --------------------------------------------------------------------------------------------------
# What the speed of memory limits: cross-entropy, a copy, AdamW


def cross_entropy(rows: int, V: int, compiled: bool, machine: Machine) -> Callable[[], object]:
    """Return a function that computes the loss, and the gradient of the logits, as the model does.

    The logits (rows, V) are in the training dtype.
    """

    def plain(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float(), targets, ignore_index=-1)

    def chunked(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ChunkedCrossEntropy.apply(logits, targets, None)

    logits = torch.randn(rows, V, device=machine.device, dtype=machine.dtype).requires_grad_()
    targets = torch.randint(V, (rows,), device=machine.device)
    eager = plain if machine.dtype == torch.float16 else chunked
    fast = torch.compile(plain, dynamic=False) if compiled else eager
    return lambda: torch.autograd.grad(fast(logits, targets), logits)


def copy(size: int, machine: Machine) -> Callable[[], object]:
    """Return a function that copies `size` bytes."""
    a = torch.ones(size // 4, device=machine.device)
    b = torch.ones(size // 4, device=machine.device)
    return partial(b.copy_, a)


def adamw(shapes: list[torch.Size], machine: Machine) -> Callable[[], object]:
    """Return a function that takes one step of AdamW for parameters of these shapes."""
    params = [torch.ones(s, device=machine.device).requires_grad_() for s in shapes]
    for p in params:
        p.grad = torch.ones_like(p)
    return torch.optim.AdamW(params, fused=machine.device.type in ("cuda", "cpu")).step


def measure_memory(model: GPT, M: int, cfg: RoofConfig, machine: Machine) -> list[dict]:
    V = model.config.padded_vocab_size
    N = max(1, min(M, 2**28 // V))  # rows; 2^28 logits take 5 GB in fp16, eager
    least = 3 * N * V * machine.dtype.itemsize  # bytes that the loss has to read and to write
    copied = 2**30 if machine.device.type == "cuda" else 2**27
    shapes = [p.shape for p in model.parameters()]
    n = sum(s.numel() for s in shapes)

    eager = partial(cross_entropy, N, V, False, machine)
    compiled = partial(cross_entropy, N, V, True, machine)
    jobs = [("cross-entropy, eager", N, "rows", least, eager)]
    if cfg.compile is not False:
        jobs.append(("cross-entropy, compiled", N, "rows", least, compiled))
    jobs.append(("copy", copied, "bytes", 2 * copied, partial(copy, copied, machine)))
    jobs.append(("AdamW", n, "parameters", 28 * n, partial(adamw, shapes, machine)))
    rows = []
    for name, count, unit, moved, make in jobs:
        ms = median_ms(make, cfg.seconds)
        rate = per_ms(moved / 1e6, ms)
        rows.append({"operation": name, "of": count, "": unit, "ms": ms, "GB/s": rate})
    return rows


# --------------------------------------------------------------------------------------------------
# The roof


def micro_step(
    linear: list, attended: list, memory: list, c: GPTConfig, M: int, accum: int
) -> list[dict]:
    """Return the least time of each part of a micro-step of M tokens, from the other tables.

    AdamW runs once a step: its time is divided among the `accum` micro-steps of a step.
    """
    losses = [total([r["ms"]], M / r["of"]) for r in memory if r[""] == "rows"]
    parts = {
        "linear layers": total([r["ms"] for r in linear]),
        "attention": total([attended[-1]["ms both"]], c.n_layer),
        "cross-entropy": min((x for x in losses if isinstance(x, float)), default=losses[0]),
        f"AdamW / {accum}": total([memory[-1]["ms"]], 1 / accum),
    }
    parts["all"] = total([*parts.values()])
    return [{"part": k, "ms": ms} for k, ms in parts.items()]


def flops(model: GPT, T: int) -> tuple[int, int]:
    """Return two counts of a token's FLOPs, forward and backward.

    The first is MFU's. The second is that of the products that are really computed.
    """
    c = model.config
    attention = 6 * c.n_layer * c.n_head * c.head_dim * T  # the causal half of T x T
    return model.flops_per_token(T), gemm_flops(c) + attention


def of_peak(tflops: Figure, peak: float | None) -> str:
    shown = f"{text(tflops)} TFLOPS"
    if peak and isinstance(tflops, float):
        shown += f" = {tflops / peak:.1%} of peak"
    return shown


def main() -> None:
    cfg = parse(RoofConfig, doc=__doc__)
    machine = start(cfg.device, cfg.dtype)
    T = cfg.block_size
    c = model_config(cfg, cfg.vocab_size)
    with torch.device("meta"):  # only the shapes of the weights are needed
        model = GPT(c)
    M = cfg.tokens or cfg.batch_size * T
    accum = max(1, round(cfg.batch_tokens / M))
    peak, source = peak_tflops(machine.device, machine.dtype, cfg.peak_tflops)
    name = device_name(machine.device)
    dtype = str(machine.dtype).removeprefix("torch.")
    print(f"{name}, torch {torch.__version__}, {dtype} ({machine.why})\npeak: {source}")

    title = f"TFLOPS of the linear layers over {M:,} tokens; ms: the three products of all `layers`"
    linear = table(title, measure_gemms(c, M, cfg.seconds, machine))
    gemm_tflops = per_ms(1e-9 * gemm_flops(c) * M, total([r["ms"] for r in linear]))
    print(f"  all: {of_peak(gemm_tflops, peak)}")

    title = f"TFLOPS of causal attention over {M // T:,} sequences of {T:,}; *: taken by default.\n"
    title += "Only the unmasked half of T x T is counted: forward is 2 B nh T² hs, both is\n"
    title += "3 times that. (MFU counts all of T x T, which is twice as much.)"
    attended = table(title, measure_attention(c, M, T, cfg.seconds, machine))
    sdpa = sdpa_facts()
    print(f"  cuDNN {sdpa['cudnn']}, priority {', '.join(sdpa['priority']) or 'unknown'}")

    title = "GB/s of cross-entropy, forward and backward (least bytes: logits read twice, their\n"
    title += "gradient written), of a copy (read and written) and of AdamW (28 bytes a parameter)"
    memory = table(title, measure_memory(model, M, cfg, machine))

    least = micro_step(linear, attended, memory, c, M, accum)
    parts = table(f"The least time of a micro-step of {M:,} tokens", least)
    by_mfu, computed = flops(model, T)
    mfu_tflops = per_ms(1e-9 * by_mfu * M, parts[-1]["ms"])
    computed_tflops = per_ms(1e-9 * computed * M, parts[-1]["ms"])
    masked = "which also counts the masked half of attention"
    print(f"  the roof of MFU, {masked}: {of_peak(mfu_tflops, peak)}")
    print(f"  of the products that are computed: {of_peak(computed_tflops, peak)}")
    if cfg.json:
        cuda = torch.version.cuda
        facts = {
            "machine": name,
            "python": platform.python_version(),
            "versions": {"torch": torch.__version__, "cuda": cuda, "cudnn": sdpa["cudnn"]},
            "command": " ".join(sys.argv),
            "settings": changes(cfg),
            "model": asdict(c),
            "dtype": dtype,
            "tokens": M,
            "peak_tflops": peak,
            "gemms": linear,
            "gemm_tflops": gemm_tflops,
            "attention": attended,
            "sdpa_priority": sdpa["priority"],
            "memory": memory,
            "micro_step": parts,
            "model_tflops": mfu_tflops,
            "computed_tflops": computed_tflops,
        }
        Path(cfg.json).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    run(main)

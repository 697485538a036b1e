"""The roof over a model on this machine: how fast its own shapes run here, one operation at a time, to judge an MFU by.

    python bench/roof.py config/gpt2_124m.py                                          # any setting of train.py can be given
    python bench/roof.py config/train_1b.py --vocab_size=32000 --tokens=32768 --json=roof.json

Each figure is a median over `seconds` of repetitions (torch.utils.benchmark, warmed up), in the dtype that train.py picks.
OOM: it does not fit; n/a: this machine refuses it. The last table adds up what a micro-step cannot do without: a roof of the
MFU, as norms, activations and the residual stream come on top of it. MFU counts all of T x T, of
which the causal half is computed: where T is long, its roof may lie above 100 %.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `python bench/roof.py` finds ours
from configurator import changes, parse, run  # noqa: E402
from hardware.kernels import ChunkedCrossEntropy, attend, attention_kernel  # noqa: E402
from hardware.machine import Machine, start  # noqa: E402
from hardware.peak import device_name, peak_tflops  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402
from training.settings import TrainConfig, model_config  # noqa: E402

Figure = float | str  # or the word that says why there is none


@dataclass(frozen=True)
class RoofConfig(TrainConfig):
    # ---- What to measure ----
    vocab_size: int = 50257  # of the tokenizer; the model pads it
    tokens: int = 0  # of a micro-step, whole sequences; 0: batch_size x block_size
    seconds: float = 0.3  # of repetitions for each figure
    # ---- Output ----
    json: str = ""  # write the figures here too

    def problems(self) -> list[str]:
        if self.batch_size == "auto":
            return ["batch_size=auto is for train.py and bench/plan.py: give a number here"]
        wrong = TrainConfig.problems(replace(self, max_steps=1))  # the run's length does not matter here
        wrong += [f"{k} must be positive" for k in ("vocab_size", "seconds") if not getattr(self, k) > 0]
        wrong += ["tokens must be a multiple of block_size"] * (
            self.tokens < 0 or self.tokens % max(1, self.block_size) > 0
        )
        return wrong + [f"json={self.json}: no such folder"] * (not Path(self.json).parent.is_dir())


# ---------------------------------------------------------------------------------------------------------------------
# One figure, and how a table of them is printed


def median_ms(make: Callable[[], Callable[[], object]], seconds: float) -> Figure:
    """Of the work that make() prepares: the median of ten blocks, or of as many as `seconds` allow; the GPU waits between.

    Not blocked_autorange: its blocks are 10,000 times as long as a wait for the GPU, seconds each.
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
        return "OOM" if isinstance(e, torch.OutOfMemoryError) or "alloc" in str(e).lower() else "n/a"


def per_ms(amount: float, ms: Figure) -> Figure:
    return amount / ms if isinstance(ms, float) else ms


def total(figures: list[Figure], times: float = 1.0) -> Figure:
    """`times` their sum; where one is missing, why."""
    return next((x for x in figures if isinstance(x, str)), None) or times * sum(figures)


def text(value: Figure | int) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if value < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else value


def table(title: str, rows: list[dict]) -> list[dict]:
    """Print the rows under their keys, words to the left and numbers to the right; returns them, for the file."""
    lines = [list(rows[0]), *([text(v) for v in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{title}")
    for line in lines:
        first, *others = zip(line, widths, strict=True)
        print("  ".join([f"  {first[0]:<{first[1]}}", *(f"{x:>{w}}" for x, w in others)]), flush=True)
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Matrix products


def gemms(c: GPTConfig) -> dict[str, tuple[int, int, int]]:
    """The linear layers: name -> (K inputs, N outputs, how many of them). Each is three products, forward and backward."""
    heads = (c.n_head + 2 * c.n_kv_head) * c.head_dim
    layers = {"qkv": (c.n_embd, heads, c.n_layer), "proj": (c.n_head * c.head_dim, c.n_embd, c.n_layer)}
    if c.mlp == "swiglu":
        layers["gate"] = (c.n_embd, c.d_ff, c.n_layer)
    layers |= {"up": (c.n_embd, c.d_ff, c.n_layer), "down": (c.d_ff, c.n_embd, c.n_layer)}
    return layers | {"lm_head": (c.n_embd, c.padded_vocab_size, 1)}


def gemm_flops(c: GPTConfig) -> int:
    """Of a token, forward and backward: 6 a weight, the vocabulary's padding included."""
    return sum(6 * K * N * n for K, N, n in gemms(c).values())


def product(which: str, M: int, K: int, N: int, machine: Machine) -> Callable[[], object]:
    """One of a layer's three products over M tokens, its operands laid out as autograd has them."""
    random = partial(torch.randn, device=machine.device, dtype=machine.dtype)
    if which == "forward":
        a, b = random(M, K), random(N, K).T
    elif which == "input grad":
        a, b = random(M, N), random(N, K)
    else:
        a, b = random(M, N).T, random(M, K)
    return partial(torch.mm, a, b, out=torch.mm(a, b))


def measure_gemms(c: GPTConfig, M: int, seconds: float, machine: Machine) -> list[dict]:
    rows = []
    for name, (K, N, n) in gemms(c).items():
        kinds = ("forward", "input grad", "weight grad")
        ms = {k: median_ms(partial(product, k, M, K, N, machine), seconds) for k in kinds}
        rates = {k: per_ms(2e-9 * M * K * N, t) for k, t in ms.items()}
        rows.append({"layer": name, "K": K, "N": N, "layers": n} | rates | {"ms": total([*ms.values()], n)})
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Attention

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def attention_inputs(B: int, nh: int, T: int, hs: int, machine: Machine) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output: (B, nh, T, hs) each, laid out in memory as (B, T, nh, hs), as the model's."""
    qkv_dy = torch.randn(4, B, T, nh, hs, device=machine.device, dtype=machine.dtype).transpose(2, 3)
    return [*(t.detach().requires_grad_() for t in qkv_dy[:3]), qkv_dy[3]]


def attention(attends: Callable, shape: tuple, backward: bool, machine: Machine) -> Callable[[], object]:
    q, k, v, dy = attention_inputs(*shape, machine)
    if backward:
        return lambda: torch.autograd.grad(attends(q, k, v), (q, k, v), dy)
    return lambda: attends(q, k, v)  # with what the backward pass would need, as in training


def measure_attention(c: GPTConfig, M: int, T: int, seconds: float, machine: Machine) -> list[dict]:
    """For each shape every backend; the last row is the model's own call at its own shape, with the name of its default."""
    rows, B = [], M // T
    fused = partial(F.scaled_dot_product_attention, is_causal=True)
    shapes = dict.fromkeys([(max(1, c.n_embd // 64), 64), (max(1, c.n_embd // 128), 128), (c.n_head, c.head_dim)])
    own = (c.n_head, c.head_dim)
    calls = [(heads, name, fused, sdpa_kernel(b)) for heads in shapes for name, b in BACKENDS.items()]
    calls.append((own, "the model", partial(attend, dropout=0.0), nullcontext()))
    for (nh, hs), name, attends, limits in calls:
        shape = (B, nh, T, hs)
        with limits, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a backend that refuses says why, at length
            fwd, both = (median_ms(partial(attention, attends, shape, b, machine), seconds) for b in (False, True))
        gflops = 2e-9 * B * nh * T * T * hs  # two products, the causal half of each
        row = {"backend": name, "head_dim": hs, "heads": nh, "default": "", "forward": per_ms(gflops, fwd)}
        rows.append(row | {"both": per_ms(3 * gflops, both), "ms forward": fwd, "ms both": both})
    for row in rows:  # asked afterwards: the priority order is set up by the first call
        chosen = attention_kernel(row["heads"], T, row["head_dim"], machine.device, machine.dtype)
        row["default"] = chosen if row["backend"] == "the model" else "*" if row["backend"] == chosen else ""
    return rows


def sdpa_facts() -> dict:
    order = torch._C._get_sdp_priority_order() if hasattr(torch._C, "_get_sdp_priority_order") else []
    names = {int(backend): name for name, backend in BACKENDS.items()}
    return {"cudnn": torch.backends.cudnn.version(), "priority": [names[n] for n in order if n in names]}


# ---------------------------------------------------------------------------------------------------------------------
# What memory limits: cross-entropy, a copy, AdamW


def cross_entropy(rows: int, V: int, compiled: bool, machine: Machine) -> Callable[[], object]:
    """From logits in the training dtype to the loss and back to their gradient, as in the model."""

    def plain(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float(), targets, ignore_index=-1)

    logits = torch.randn(rows, V, device=machine.device, dtype=machine.dtype).requires_grad_()
    targets = torch.randint(V, (rows,), device=machine.device)
    eager = plain if machine.dtype == torch.float16 else ChunkedCrossEntropy.apply
    fast = torch.compile(plain, dynamic=False) if compiled else eager
    return lambda: torch.autograd.grad(fast(logits, targets), logits)


def copy(size: int, machine: Machine) -> Callable[[], object]:
    a, b = (torch.ones(size // 4, device=machine.device) for _ in range(2))
    return partial(b.copy_, a)


def adamw(shapes: list[torch.Size], machine: Machine) -> Callable[[], object]:
    params = [torch.ones(s, device=machine.device).requires_grad_() for s in shapes]
    for p in params:
        p.grad = torch.ones_like(p)
    return torch.optim.AdamW(params, fused=machine.device.type in ("cuda", "cpu")).step


def measure_memory(model: GPT, M: int, cfg: RoofConfig, machine: Machine) -> list[dict]:
    V, size = model.config.padded_vocab_size, 2**30 if machine.device.type == "cuda" else 2**27
    N = max(1, min(M, 2**28 // V))  # 2^28 logits take 5 GB in fp16, eager
    shapes = [p.shape for p in model.parameters()]
    n, least = sum(s.numel() for s in shapes), 3 * N * V * machine.dtype.itemsize
    jobs = [("cross-entropy, eager", N, "rows", least, partial(cross_entropy, N, V, False, machine))]
    if cfg.compile is not False:
        jobs.append(("cross-entropy, compiled", N, "rows", least, partial(cross_entropy, N, V, True, machine)))
    jobs.append(("copy", size, "bytes", 2 * size, partial(copy, size, machine)))
    jobs.append(("AdamW", n, "parameters", 28 * n, partial(adamw, shapes, machine)))
    rows = []
    for name, count, unit, moved, make in jobs:
        ms = median_ms(make, cfg.seconds)
        rows.append({"operation": name, "of": count, "": unit, "ms": ms, "GB/s": per_ms(moved / 1e6, ms)})
    return rows


# ---------------------------------------------------------------------------------------------------------------------


def micro_step(linear: list, attended: list, memory: list, c: GPTConfig, M: int, accum: int) -> list[dict]:
    """The least time of a micro-step, part by part, from the tables; AdamW's is shared out over those of a step."""
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
    """FLOPs of a token, forward and backward: as MFU counts; of the products that are computed."""
    c = model.config
    return model.flops_per_token(T), gemm_flops(c) + 6 * c.n_layer * c.n_head * c.head_dim * T


def of_peak(tflops: Figure, peak: float | None) -> str:
    return f"{text(tflops)} TFLOPS" + (f" = {tflops / peak:.1%} of peak" if peak and isinstance(tflops, float) else "")


def main() -> None:
    cfg = parse(RoofConfig, doc=__doc__)
    machine = start(cfg.device, cfg.dtype)
    c, T = model_config(cfg, cfg.vocab_size), cfg.block_size
    with torch.device("meta"):
        model = GPT(c)
    M = cfg.tokens or cfg.batch_size * T
    accum = max(1, round(cfg.batch_tokens / M))
    peak, source = peak_tflops(machine.device, machine.dtype, cfg.peak_tflops)
    name, dtype = device_name(machine.device), str(machine.dtype).removeprefix("torch.")
    print(f"{name}, torch {torch.__version__}, {dtype} ({machine.why})\npeak: {source}")

    title = f"TFLOPS of the linear layers over {M:,} tokens; ms: all three products of all layers of the name"
    linear = table(title, measure_gemms(c, M, cfg.seconds, machine))
    gemm_tflops = per_ms(1e-9 * gemm_flops(c) * M, total([r["ms"] for r in linear]))
    print(f"  all: {of_peak(gemm_tflops, peak)}")

    title = f"TFLOPS of causal attention over {M // T:,} sequences of {T:,}: forward is 2 B nh T² hs, the half of T x T that is"
    title += "\nnot masked, and both 3 times that (MFU counts all of T x T, twice as much); *: taken by default"
    attended = table(title, measure_attention(c, M, T, cfg.seconds, machine))
    sdpa = sdpa_facts()
    print(f"  cuDNN {sdpa['cudnn']}, priority {', '.join(sdpa['priority']) or 'unknown'}")

    title = "GB/s of cross-entropy, forward and backward (least bytes: logits read twice, their gradient written), of a copy"
    title += "\n(read and written) and of the optimizer (28 bytes a parameter)"
    memory = table(title, measure_memory(model, M, cfg, machine))

    parts = table(f"a micro-step of {M:,} tokens, at least", micro_step(linear, attended, memory, c, M, accum))
    rates = [per_ms(1e-9 * a_token * M, parts[-1]["ms"]) for a_token in flops(model, T)]
    print(f"  the roof of MFU: {of_peak(rates[0], peak)}, as attention's masked half counts too")
    print(f"  of the products that are computed: {of_peak(rates[1], peak)}")
    if cfg.json:
        versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": sdpa["cudnn"]}
        facts = {"machine": name, "python": platform.python_version(), "versions": versions}
        facts |= {"command": " ".join(sys.argv), "settings": changes(cfg), "model": asdict(c), "dtype": dtype}
        facts |= {"tokens": M, "peak_tflops": peak, "gemms": linear, "gemm_tflops": gemm_tflops}
        facts |= {"attention": attended, "sdpa_priority": sdpa["priority"], "memory": memory}
        facts |= {"micro_step": parts, "model_tflops": rates[0], "computed_tflops": rates[1]}
        Path(cfg.json).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    run(main)

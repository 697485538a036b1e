"""Measure how fast this machine runs a model's own operations, one at a time, to judge an MFU by.

    # every setting of train.py is accepted too
    python -m bench.roof config/gpt2_124m.py
    python -m bench.roof config/train_1b.py --vocab_size=32000 --tokens=32768 --json=roof.json
    # only products of n x n matrices, beside the datasheet's peak
    python -m bench.roof --squares 1024 2048 4096 8192 16384

Each figure is a median over `seconds` of repetitions (torch.utils.benchmark, after a warm-up), in
the dtype that train.py picks. OOM: the operation does not fit into memory. n/a: this machine cannot
run it.

The last table adds up the operations that a micro-step cannot do without. This sum is a roof: an
MFU that training cannot exceed, since norms, activations and the residual stream take time too. MFU
counts all of T x T in attention, but only the causal half is computed. So the roof may lie above
100 % where T is large.
"""

import statistics
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.benchmark import Timer

from bench.measure import facts_of, no_folder, not_positive, padded, step_problems, write_json
from configurator import changes, parse, run
from hardware import kernels
from hardware.kernels import ChunkedCrossEntropy, attend, attention_kernel
from hardware.machine import Machine, start
from hardware.peak import DTYPES, datasheet_tflops, device_name, peak_tflops
from model import GPT, GPTConfig
from training.settings import TrainConfig, model_config

Figure = float | str  # a number, or the word that says why there is none


@dataclass(frozen=True)
class RoofConfig(TrainConfig):
    # ---- What to measure ----
    vocab_size: int = 50257  # vocabulary of the tokenizer; the model pads it
    tokens: int = 0  # tokens of a micro-step, whole sequences; 0: batch_size x block_size
    squares: tuple[int, ...] = ()  # measure only products of n x n matrices, in several dtypes
    seconds: float = 0.3  # how long each operation is repeated
    # ---- Output ----
    json: str = ""  # also write the figures to this file

    def problems(self) -> list[str]:
        problems = step_problems(self) + no_folder(self, "json")
        problems += not_positive(self, "vocab_size", "seconds", "squares")
        if self.tokens < 0 or self.tokens % max(1, self.block_size) > 0:
            problems.append("tokens must be a multiple of block_size")
        return problems


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
    """Print the rows below their keys, and return them."""
    print(f"\n{title}")
    for line in padded([list(rows[0]), *([text(v) for v in row.values()] for row in rows)]):
        print(f"  {'  '.join(line)}", flush=True)
    return rows


# --------------------------------------------------------------------------------------------------
# Matrix products


def gemms(model: GPT) -> dict[str, tuple[int, int, int]]:
    """Return the linear layers: name -> (K inputs, N outputs, how many layers there are of it)."""
    counts: Counter[tuple] = Counter()
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            name = path.rpartition(".")[2]
            counts[name, module.in_features, module.out_features] += 1
    return {name: (K, N, layers) for (name, K, N), layers in counts.items()}


def gemm_flops(model: GPT) -> int:
    """Return the FLOPs of a token in linear layers, forward and backward: 6 for each weight.

    The padding of the vocabulary is included.
    """
    return sum(6 * K * N * layers for K, N, layers in gemms(model).values())


def product(kind: str, M: int, K: int, N: int, machine: Machine) -> Callable[[], object]:
    """Return a function that computes one of a layer's three products over M tokens.

    kind: "forward", "input grad" or "weight grad". The operands are laid out as autograd does.
    """
    random = partial(torch.randn, device=machine.device, dtype=machine.dtype)
    if kind == "forward":
        a = random(M, K)
        b = random(N, K).T
    elif kind == "input grad":
        a = random(M, N)
        b = random(N, K)
    else:
        a = random(M, N).T
        b = random(M, K)
    return partial(torch.mm, a, b, out=torch.mm(a, b))


def measure_gemms(model: GPT, M: int, seconds: float, machine: Machine) -> list[dict]:
    rows = []
    for name, (K, N, layers) in gemms(model).items():
        kinds = ("forward", "input grad", "weight grad")
        ms = {k: median_ms(partial(product, k, M, K, N, machine), seconds) for k in kinds}
        rates = {k: per_ms(2e-9 * M * K * N, t) for k, t in ms.items()}
        row = {"layer": name, "K": K, "N": N, "layers": layers}
        rows.append(row | rates | {"ms": total([*ms.values()], layers)})
    return rows


def measure_squares(sizes: tuple[int, ...], seconds: float, machine: Machine) -> list[dict]:
    """Measure products of n x n matrices; the last row has the datasheet's peaks."""
    cuda = machine.device.type == "cuda"
    dtypes = ("fp32", "tf32", "bf16", "fp16") if cuda else ("fp32", "bf16")
    rows = []
    for n in sizes:
        row: dict[str, Figure] = {"n": f"{n:,}"}
        for name in dtypes:
            torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
            in_dtype = replace(machine, dtype=DTYPES[name])
            ms = median_ms(partial(product, "forward", n, n, n, in_dtype), seconds)
            row[name] = per_ms(2e-9 * n**3, ms)
        rows.append(row)
    gpu = device_name(machine.device)
    return [*rows, {"n": "datasheet"} | {d: datasheet_tflops(gpu, d) or "n/a" for d in dtypes}]


# --------------------------------------------------------------------------------------------------
# Attention

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def attention(
    attends: Callable, shape: tuple, backward: bool, machine: Machine
) -> Callable[[], object]:
    """Return a function that runs attends(q, k, v) on inputs of `shape`: (B, nh, T, hs).

    As in the model, they lie in memory as (B, T, nh, hs). dy is the gradient of the output.
    """
    B, nh, T, hs = shape
    inputs = torch.randn(4, B, T, nh, hs, device=machine.device, dtype=machine.dtype)
    *qkv, dy = inputs.transpose(2, 3)
    q, k, v = (t.detach().requires_grad_() for t in qkv)
    if backward:
        return lambda: torch.autograd.grad(attends(q, k, v), (q, k, v), dy)
    return lambda: attends(q, k, v)  # also keeps what a backward pass needs, as in training


def measure_attention(c: GPTConfig, M: int, T: int, seconds: float, machine: Machine) -> list[dict]:
    """Measure every backend at three shapes, and the model's own call at its own shape.

    The model's call is the last row; `default` names the backend that it takes.
    """
    B = M // T
    own_heads = (c.n_head, c.head_dim)
    shapes = dict.fromkeys(
        [(max(1, c.n_embd // 64), 64), (max(1, c.n_embd // 128), 128), own_heads]
    )
    fused = partial(F.scaled_dot_product_attention, is_causal=True)
    calls = []
    for heads in shapes:
        calls += [(heads, name, fused, sdpa_kernel(b)) for name, b in BACKENDS.items()]
    calls.append((own_heads, "the model", partial(attend, mask=None, dropout=0.0), nullcontext()))
    rows = []
    for (nh, hs), name, attends, limits in calls:
        shape = (B, nh, T, hs)
        with limits, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a backend that refuses gives its reasons at length
            forward = median_ms(partial(attention, attends, shape, False, machine), seconds)
            passes = median_ms(partial(attention, attends, shape, True, machine), seconds)
        gflops = 2e-9 * B * nh * T * T * hs  # two products, the causal half of each
        row = {"backend": name, "head_dim": hs, "heads": nh, "default": ""}
        row |= {"forward": per_ms(gflops, forward), "both": per_ms(3 * gflops, passes)}
        rows.append(row | {"ms forward": forward, "ms both": passes})
    # Only now ask for the defaults: torch sets up its order of priority in the first call.
    for row in rows:
        chosen = attention_kernel(row["heads"], T, row["head_dim"], machine.device, machine.dtype)
        if row["backend"] == "the model":
            row["default"] = chosen
        elif row["backend"] == chosen:
            row["default"] = "*"
    return rows


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
    loss_bytes = 3 * N * V * machine.dtype.itemsize  # bytes that the loss has to read and to write
    copied = 2**30 if machine.device.type == "cuda" else 2**27
    shapes = [p.shape for p in model.parameters()]
    n = sum(s.numel() for s in shapes)

    jobs = []
    for name in ["eager"] if cfg.compile is False else ["eager", "compiled"]:
        loss = partial(cross_entropy, N, V, name == "compiled", machine)
        jobs.append((f"cross-entropy, {name}", N, "rows", loss_bytes, loss))
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
    linear: list[dict], attended: list[dict], memory: list[dict], n_layer: int, M: int, accum: int
) -> list[dict]:
    """Return the least time of each part of a micro-step of M tokens, from the other tables.

    AdamW runs once a step: its time is divided among the `accum` micro-steps of a step.
    """
    losses = [total([r["ms"]], M / r["of"]) for r in memory if r[""] == "rows"]
    parts = {
        "linear layers": total([r["ms"] for r in linear]),
        "attention": total([attended[-1]["ms both"]], n_layer),
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
    return model.flops_per_token(T), gemm_flops(model) + attention


def of_peak(tflops: Figure, peak: float | None) -> str:
    shown = f"{text(tflops)} TFLOPS"
    if peak and isinstance(tflops, float):
        shown += f" = {tflops / peak:.1%} of peak"
    return shown


def main() -> None:
    cfg = parse(RoofConfig, doc=__doc__)
    kernels.install()
    machine = start(cfg.device, cfg.dtype)
    facts = facts_of(machine.device)
    if cfg.squares:
        print(f"{facts['machine']}, {facts['versions']}")
        squares = measure_squares(cfg.squares, cfg.seconds, machine)
        facts["squares"] = table("TFLOPS of products of n x n matrices", squares)
    else:
        facts |= {"settings": changes(cfg)} | measure_model(cfg, machine, facts)
    write_json(cfg.json, facts)


def measure_model(cfg: RoofConfig, machine: Machine, facts: dict[str, str]) -> dict:
    """Print the tables of the model's operations, and return their figures."""
    T = cfg.block_size
    c = model_config(cfg, cfg.vocab_size)
    with torch.device("meta"):  # only the shapes of the weights are needed
        model = GPT(c)
    M = cfg.tokens or cfg.batch_size * T
    accum = max(1, round(cfg.batch_tokens / M))
    peak, source = peak_tflops(machine.device, machine.dtype, cfg.peak_tflops)
    dtype = str(machine.dtype).removeprefix("torch.")
    print(f"{facts['machine']}, {facts['versions']}, {dtype} ({machine.why})\npeak: {source}")

    title = f"TFLOPS of the linear layers over {M:,} tokens; ms: the three products of all `layers`"
    linear = table(title, measure_gemms(model, M, cfg.seconds, machine))
    gemm_tflops = per_ms(1e-9 * gemm_flops(model) * M, total([r["ms"] for r in linear]))
    print(f"  all: {of_peak(gemm_tflops, peak)}")

    title = f"TFLOPS of causal attention over {M // T:,} sequences of {T:,}; *: taken by default.\n"
    title += "Only the unmasked half of T x T is counted: forward is 2 B nh T² hs, both is\n"
    title += "3 times that. (MFU counts all of T x T, which is twice as much.)"
    attended = table(title, measure_attention(c, M, T, cfg.seconds, machine))

    title = "GB/s of cross-entropy, forward and backward (least bytes: logits read twice, their\n"
    title += "gradient written), of a copy (read and written) and of AdamW (28 bytes a parameter)"
    memory = table(title, measure_memory(model, M, cfg, machine))

    least_times = micro_step(linear, attended, memory, c.n_layer, M, accum)
    parts = table(f"The least time of a micro-step of {M:,} tokens", least_times)
    by_mfu, computed = flops(model, T)
    mfu_tflops = per_ms(1e-9 * by_mfu * M, parts[-1]["ms"])
    computed_tflops = per_ms(1e-9 * computed * M, parts[-1]["ms"])
    masked = "which also counts the masked half of attention"
    print(f"  the roof of MFU, {masked}: {of_peak(mfu_tflops, peak)}")
    print(f"  of the products that are computed: {of_peak(computed_tflops, peak)}")
    return {
        "model": asdict(c),
        "dtype": dtype,
        "tokens": M,
        "peak_tflops": peak,
        "gemms": linear,
        "gemm_tflops": gemm_tflops,
        "attention": attended,
        "memory": memory,
        "micro_step": parts,
        "model_tflops": mfu_tflops,
        "computed_tflops": computed_tflops,
    }


if __name__ == "__main__":
    run(main)

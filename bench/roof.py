"""Measure how fast this machine runs a model's own operations, one at a time, to judge an MFU by.

    # every setting of train.py is accepted too
    python -m bench.roof config/gpt2_124m.py
    python -m bench.roof config/train_1b.py --vocab_size=32000 --tokens=32768 --json=roof.json
    # only products of n x n matrices, below the datasheet's peak
    python -m bench.roof --dtype=bfloat16 --squares 1024 2048 4096 8192 16384

Each figure is a median over `seconds` of repetitions (torch.utils.benchmark, after a warm-up), in
the dtype that train.py picks. nan: this machine cannot run the operation, or has too little memory.

The last table adds up the operations that a micro-step cannot do without. This sum is a roof: an
MFU that training cannot exceed, since norms, activations and the residual stream take time too. MFU
counts all of T x T in attention, but only the causal half is computed. So the roof may lie above
100 % where T is large.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.measure import StepConfig, facts_of, median_s, table, text, write_json
from configurator import changes, option, parse, run
from hardware.kernels import attention_kernel, pick_kernels
from hardware.machine import Machine, start
from hardware.peak import peak_tflops
from model import GPT, GPTConfig
from training.settings import model_config


@dataclass(frozen=True)
class RoofConfig(StepConfig):
    vocab_size: int = option(50257, "of the tokenizer", minimum=1, group="What to measure")
    tokens: int = option(0, "tokens of a micro-step; 0: batch_size x block_size", minimum=0)
    squares: tuple[int, ...] = option((), "measure only products of n x n matrices", minimum=1)
    seconds: float = option(0.3, "how long each operation is repeated", above=0)
    json: str = option("", "also write the figures to this file", group="Output")


# --------------------------------------------------------------------------------------------------
# One figure


def figure_ms(measure: Callable[..., float], *arguments) -> float:
    """Return what measure(*arguments) returns in seconds, in ms; NaN if it fails."""
    try:
        return 1e3 * measure(*arguments)
    except RuntimeError:  # this machine cannot run it, or has too little memory for it
        return math.nan


# --------------------------------------------------------------------------------------------------
# Matrix products


PRODUCTS = ("forward", "input grad", "weight grad")  # of a linear layer


def product_s(kind: str, M: int, K: int, N: int, seconds: float, machine: Machine) -> float:
    """Return the seconds of one of the PRODUCTS of a layer over M tokens.

    The operands are laid out as autograd does.
    """
    like = dict(device=machine.device, dtype=machine.dtype)
    if kind == "forward":
        a, b = torch.randn(M, K, **like), torch.randn(N, K, **like).T
    elif kind == "input grad":
        a, b = torch.randn(M, N, **like), torch.randn(N, K, **like)
    else:
        a, b = torch.randn(M, N, **like).T, torch.randn(M, K, **like)
    out = torch.empty(len(a), b.size(1), **like)
    return median_s("torch.mm(a, b, out=out)", dict(torch=torch, a=a, b=b, out=out), seconds)


def measure_gemms(model: GPT, M: int, seconds: float, machine: Machine) -> list[dict]:
    """Return a row for each kind of linear layer: K inputs, N outputs, how many `layers`."""
    linear = [(p, m) for p, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    kinds = Counter((p.rpartition(".")[2], m.in_features, m.out_features) for p, m in linear)
    rows = []
    for (name, K, N), layers in kinds.items():
        ms = {k: figure_ms(product_s, k, M, K, N, seconds, machine) for k in PRODUCTS}
        rates = {k: 2e-9 * M * K * N / t for k, t in ms.items()}
        row = {"layer": name, "K": K, "N": N, "layers": layers}
        rows.append(row | rates | {"ms": layers * sum(ms.values())})
    return rows


def measure_squares(sizes: tuple[int, ...], seconds: float, machine: Machine) -> list[dict]:
    rows = []
    for n in sizes:
        ms = figure_ms(product_s, "forward", n, n, n, seconds, machine)
        rows.append({"n": f"{n:,}", "ms": ms, "TFLOPS": 2e-9 * n**3 / ms})
    return rows


# --------------------------------------------------------------------------------------------------
# Attention


def attention_s(shape: tuple, backward: bool, seconds: float, machine: Machine) -> float:
    """Return the seconds of the model's attention on q, k and v of `shape`: (B, nh, T, hs).

    As in the model, they lie in memory as (B, T, nh, hs). dy is the gradient of the output. A
    forward pass alone also keeps what a backward pass needs, as in training.
    """
    B, nh, T, hs = shape
    inputs = torch.randn(4, B, T, nh, hs, device=machine.device, dtype=machine.dtype)
    *qkv, dy = inputs.transpose(2, 3)
    qkv = [t.detach().requires_grad_() for t in qkv]
    attend = pick_kernels(machine.device).attend
    names = dict(grad=torch.autograd.grad, attend=attend, qkv=qkv, dy=dy)
    call = "attend(*qkv, None, 0.0)"
    return median_s(f"grad({call}, qkv, dy)" if backward else call, names, seconds)


def measure_attention(c: GPTConfig, M: int, T: int, seconds: float, machine: Machine) -> list[dict]:
    """Return a row of both passes. kernel: that which torch takes."""
    shape = (M // T, c.n_head, T, c.head_dim)
    gflops = 2e-9 * math.prod(shape) * T  # two products, the causal half of each
    forward, both = (figure_ms(attention_s, shape, b, seconds, machine) for b in (False, True))
    # Only now ask for the kernel: torch sets up its order of priority in the first call.
    row = {"kernel": attention_kernel(c.n_head, T, c.head_dim, machine.device, machine.dtype)}
    row |= {"ms forward": forward, "ms both": both}
    return [row | {"forward": gflops / forward, "both": 3 * gflops / both}]


# --------------------------------------------------------------------------------------------------
# What the speed of memory limits: cross-entropy, a copy, AdamW


def cross_entropy_s(rows: int, V: int, compiled: bool, seconds: float, machine: Machine) -> float:
    """Return the seconds of the loss and the gradient of the logits, as the model computes them.

    The logits (rows, V) are in the training dtype.
    """
    logits = torch.randn(rows, V, device=machine.device, dtype=machine.dtype).requires_grad_()
    targets = torch.randint(V, (rows,), device=machine.device)
    loss = pick_kernels(machine.device).cross_entropy
    loss = torch.compile(loss, dynamic=False) if compiled else loss
    names = dict(grad=torch.autograd.grad, loss=loss, logits=logits, targets=targets)
    return median_s("grad(loss(logits * 1, targets, None, 'mean'), logits)", names, seconds)


def copy_s(size: int, seconds: float, machine: Machine) -> float:
    """Return the seconds of a copy of `size` bytes."""
    a, b = torch.ones(2, size // 4, device=machine.device)
    return median_s("b.copy_(a)", dict(a=a, b=b), seconds)


def adamw_s(shapes: list[torch.Size], seconds: float, machine: Machine) -> float:
    """Return the seconds of one step of AdamW for parameters of these shapes."""
    params = [torch.ones(s, device=machine.device).requires_grad_() for s in shapes]
    for p in params:
        p.grad = torch.ones_like(p)
    adamw = torch.optim.AdamW(params, fused=machine.device.type in ("cuda", "cpu"))
    return median_s("adamw.step()", dict(adamw=adamw), seconds)


def measure_memory(model: GPT, M: int, cfg: RoofConfig, machine: Machine) -> list[dict]:
    V = model.config.padded_vocab_size
    N = max(1, min(M, 2**28 // V))  # rows; 2^28 logits take 5 GB in fp16, eager
    loss_bytes = 3 * N * V * machine.dtype.itemsize  # bytes that the loss has to read and to write
    copied = 2**30 if machine.device.type == "cuda" else 2**27
    shapes = [p.shape for p in model.parameters()]
    n = sum(s.numel() for s in shapes)
    how = (cfg.seconds, machine)

    figures = []
    for kind in ["eager", "compiled"][: 1 if cfg.compile is False else 2]:
        loss_ms = figure_ms(cross_entropy_s, N, V, kind == "compiled", *how)
        figures.append((f"cross-entropy, {kind}", N, "rows", loss_bytes, loss_ms))
    figures.append(("copy", copied, "bytes", 2 * copied, figure_ms(copy_s, copied, *how)))
    figures.append(("AdamW", n, "parameters", 28 * n, figure_ms(adamw_s, shapes, *how)))
    rows = []
    for name, count, unit, moved, ms in figures:
        rows.append({"operation": name, "of": count, "": unit, "ms": ms, "GB/s": moved / 1e6 / ms})
    return rows


# --------------------------------------------------------------------------------------------------
# The roof


def tflops_text(tflops: float, peak: float | None) -> str:
    fraction = f" = {tflops / peak:.1%} of peak" if peak else ""
    return f"{text(tflops)} TFLOPS{fraction}"


def main() -> None:
    cfg = parse(RoofConfig, doc=__doc__)
    machine = start(cfg.device, cfg.dtype)
    facts = facts_of(machine.device)
    dtype = str(machine.dtype).removeprefix("torch.")
    peak, source = peak_tflops(machine.device, machine.dtype, cfg.peak_tflops)
    print(f"{facts['machine']}, {facts['versions']}, {dtype} ({machine.why})\npeak: {source}")
    facts |= {"settings": changes(cfg), "dtype": dtype, "peak_tflops": peak}
    if cfg.squares:
        squares = measure_squares(cfg.squares, cfg.seconds, machine)
        facts["squares"] = table("TFLOPS of products of n x n matrices", squares)
    else:
        facts |= measure_model(cfg, machine, peak)
    write_json(cfg.json, facts)


def measure_model(cfg: RoofConfig, machine: Machine, peak: float | None) -> dict:
    """Print the tables of the model's operations, and return their figures."""
    T = cfg.block_size
    c = model_config(cfg, cfg.vocab_size)
    with torch.device("meta"):  # only the shapes of the weights are needed
        model = GPT(c)
    M = max(1, (cfg.tokens or cfg.batch_size * T) // T) * T  # complete sequences
    accum = max(1, round(cfg.batch_tokens / M))

    title = f"TFLOPS of the linear layers over {M:,} tokens; ms: the three products of all `layers`"
    linear = table(title, measure_gemms(model, M, cfg.seconds, machine))
    flops = sum(6 * r["K"] * r["N"] * r["layers"] for r in linear)  # of a token, in both passes
    gemm_tflops = 1e-9 * flops * M / sum(r["ms"] for r in linear)
    print(f"  all: {tflops_text(gemm_tflops, peak)}")

    title = f"TFLOPS of causal attention over {M // T:,} sequences of {T:,}.\n"
    title += "Only the unmasked half of T x T is counted: forward is 2 B nh T² hs, both is\n"
    title += "3 times that. (MFU counts all of T x T, which is twice as much.)"
    attended = table(title, measure_attention(c, M, T, cfg.seconds, machine))

    title = "GB/s of cross-entropy, forward and backward (least bytes: logits read twice, their\n"
    title += "gradient written), of a copy (read and written) and of AdamW (28 bytes a parameter)"
    memory = table(title, measure_memory(model, M, cfg, machine))

    losses = [r["ms"] * M / r["of"] for r in memory if r[""] == "rows"]
    least = {
        "linear layers": sum(r["ms"] for r in linear),
        "attention": c.n_layer * attended[-1]["ms both"],
        "cross-entropy": min(losses, key=lambda ms: (math.isnan(ms), ms)),
        f"AdamW / {accum}": memory[-1]["ms"] / accum,  # it runs once a step
    }
    least["all"] = sum(least.values())
    title = f"The least time of a micro-step of {M:,} tokens"
    parts = table(title, [{"part": k, "ms": ms} for k, ms in least.items()])
    mfu_tflops = 1e-9 * model.flops_per_token(T) * M / parts[-1]["ms"]
    masked = "which also counts the masked half of attention"
    print(f"  the roof of MFU, {masked}: {tflops_text(mfu_tflops, peak)}")
    return {
        "tokens": M,
        "gemms": linear,
        "gemm_tflops": gemm_tflops,
        "attention": attended,
        "memory": memory,
        "micro_step": parts,
        "model_tflops": mfu_tflops,
    }


if __name__ == "__main__":
    run(main)

"""The same mathematics as model.py's, faster on one kind of machine. model.py reads without it."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x (..., K) by weight (N, K), plus bias (N,)."""
    if x.device.type == "cpu" and x.dtype == weight.dtype == torch.bfloat16 and x.numel() == x.size(-1):
        # One token is a matrix-vector product: 1.4 times as fast as the general one (bench/LOG.md).
        x, row = x.flatten(), (*x.shape[:-1], -1)
        return (torch.mv(weight, x) if bias is None else torch.addmv(bias, weight, x)).view(row)
    return F.linear(x, weight, bias)


def plain_is_faster(q: torch.Tensor) -> bool:
    """On a CPU in bf16, while T x T fits its cache: by 1.6 to 2.6 times (bench/LOG.md)."""
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and 1 < q.size(2) <= 512


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float) -> torch.Tensor:
    """Causal attention of q over k and v, (B, nh, T, hs) each."""
    B, nh, T, hs = q.shape
    if plain_is_faster(q):
        future = torch.full((T, T), -math.inf, dtype=q.dtype).triu(1)
        scores = torch.baddbmm(future, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=hs**-0.5)  # (B nh, T, T)
        return torch.bmm(F.dropout(scores.softmax(-1), dropout), v.flatten(0, 1)).view(B, nh, T, hs)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


def attend_past(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Attention of one query a head, (B, nh, 1, hs), over all of k and v (B, nkv, past, hs): the queries of the heads that share
    a key stand below each other, where T would be, so that nothing is repeated.
    """
    y = F.scaled_dot_product_attention(q.reshape(q.size(0), k.size(1), -1, q.size(3)), k, v, attn_mask=mask)
    return y.reshape(q.shape)


def attention_kernel(nh: int, T: int, hs: int, device: torch.device, dtype: torch.dtype, dropout: float = 0.0) -> str:
    """What attend() runs in training: cudnn, flash or efficient; math has the T x T matrix in memory, as plain has."""
    if device.type not in ("cpu", "cuda"):
        return f"{device.type}'s own"
    q = torch.empty(1, T, nh, hs, device=device, dtype=dtype, requires_grad=True).transpose(1, 2)
    if plain_is_faster(q):
        return "plain"
    choice = torch._fused_sdp_choice(q, q, q, dropout_p=dropout, is_causal=True)  # torch has no public name for it
    return SDPBackend(choice).name.removesuffix("_ATTENTION").lower()


def loss_chunk(device_type: str) -> int:
    """How many logits ChunkedCrossEntropy takes at a time, in fp32: a CPU cache's fill; else 256 MB."""
    return 2**19 if device_type == "cpu" else 2**26


class ChunkedCrossEntropy(torch.autograd.Function):
    """Cross-entropy of logits (N, V) with targets (N,; -1 is ignored), summed, in fp32, a few rows at a time.

    F.cross_entropy would hold three fp32 tensors of (N, V). Here the gradient by the logits, softmax - one-hot, is written
    over the logits themselves while their rows are still in the cache: nothing of that size is added.
    """

    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits, known = logits.detach(), (targets[:, None] >= 0).float()  # (N, 1): 1, or 0 where there is no target
        loss = torch.zeros((), device=logits.device)
        rows = max(1, loss_chunk(logits.device.type) // logits.size(1))
        for part, ids, counts in zip(logits.split(rows), targets.split(rows), known.split(rows), strict=True):
            log_p, ids = part.log_softmax(-1, dtype=torch.float32), ids.clamp(min=0)[:, None]  # (rows, V), (rows, 1)
            picked = log_p.gather(1, ids)
            loss -= (picked * counts).sum()
            if ctx.needs_input_grad[0]:
                part.copy_(log_p.exp_().scatter_(1, ids, picked.exp() - 1).mul_(counts))
            del log_p  # before the next chunk is made
        ctx.save_for_backward(logits)
        ctx.rows = rows
        return loss

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (by_logits,) = ctx.saved_tensors
        if by_logits.is_cpu:
            return by_logits.mul_(grad), None
        for part in by_logits.split(ctx.rows):  # a GPU would round the factor to the logits' dtype first
            part.copy_(part.float().mul_(grad))
        return by_logits, None


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, V: int, reduction: str) -> torch.Tensor:
    """In nats, of logits (N, padded V), whose last columns are padding, with targets (N,; -1 is ignored).

    The logits may be overwritten. reduction: mean or sum.
    """
    if torch.compiler.is_compiling() or logits.dtype == torch.float16:
        # Inductor makes one pass of it, without fp32 logits in memory. And fp16 has too few small numbers
        # for a gradient that is rounded before the scaler's factor comes.
        return F.cross_entropy(logits[:, :V].float(), targets, ignore_index=-1, reduction=reduction)
    logits.data[:, V:] = -math.inf  # .data: autograd need not know
    loss = ChunkedCrossEntropy.apply(logits, targets)
    return loss if reduction == "sum" else loss / (targets >= 0).sum()


def decoding_step(model: Callable, token: torch.Tensor, cache: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """step(token (B, 1)) -> logits (B, V). On CUDA it is recorded once, as a graph, and replayed.

    For a GPU is expected to work faster than Python can launch the few hundred kernels of a step one by one (not measured
    yet, bench/LOG.md). What a graph reads and writes stays where it is: the token, its position, the cache, the logits.
    """
    if token.device.type != "cuda":
        return lambda token: model(token, cache=cache)
    token, length = token.clone(), cache.length
    position = torch.tensor([length], device=token.device)

    def work() -> torch.Tensor:
        cache.fix(position)
        return model(token, cache=cache)

    # A stream of its own: with a graph, torch frees the workspace that cuBLAS has on the graph's stream.
    graph, beside = torch.cuda.CUDAGraph(), torch.cuda.Stream(token.device)
    now = torch.cuda.current_stream(token.device)
    beside.wait_stream(now)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):  # they take a mask, and need no plan
        with torch.cuda.stream(beside):
            work()  # what a first call sets up cannot be recorded
        now.wait_stream(beside)
        with torch.cuda.graph(graph, stream=beside):
            logits = work()
    cache.length, cache.position, cache.mask = length, None, None

    def step(new: torch.Tensor) -> torch.Tensor:
        token.copy_(new)
        position.fill_(cache.length)
        graph.replay()
        cache.length += 1
        return logits

    return step

"""The formulas of model.py, computed in a faster way on some machines.

model.py can be read without this file: it states each formula where it is used.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias, (..., N), for x (..., K), weight (N, K) and bias (N,)."""
    bf16_on_cpu = x.device.type == "cpu" and x.dtype == weight.dtype == torch.bfloat16
    if bf16_on_cpu and x.numel() == x.size(-1):
        # x is one token. A matrix-vector product is 1.4 times as fast as F.linear (bench/LOG.md).
        vector = x.flatten()  # (K,)
        y = torch.mv(weight, vector) if bias is None else torch.addmv(bias, weight, vector)  # (N,)
        return y.view(*x.shape[:-1], -1)
    return F.linear(x, weight, bias)


def plain_is_faster(q: Tensor) -> bool:
    """Return whether attention should use plain matrix products instead of a fused kernel.

    In bf16 on a CPU they are 1.6 to 2.6 times as fast while the T x T matrix fits into the cache
    (bench/LOG.md).
    """
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and 1 < q.size(2) <= 512


def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Return causal attention, softmax(q k^T / sqrt(hs) + mask) v. All are (B, nh, T, hs)."""
    B, nh, T, hs = q.shape
    if plain_is_faster(q):
        mask = torch.full((T, T), -math.inf, dtype=q.dtype).triu(1)  # -inf: the key comes later
        # q k^T / sqrt(hs) + mask, (B * nh, T, T)
        scores = torch.baddbmm(mask, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=hs**-0.5)
        weights = F.dropout(scores.softmax(-1), dropout)
        return torch.bmm(weights, v.flatten(0, 1)).view(B, nh, T, hs)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


def attend_past(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Return the attention of one token, (B, nh, 1, hs), over all of k and v (B, nkv, past, hs).

    The nh / nkv query heads that share a key/value head are put where the positions of the queries
    usually are. The keys and values then need not be repeated.
    """
    B, nh, _, hs = q.shape
    nkv = k.size(1)
    grouped = q.reshape(B, nkv, -1, hs)  # (B, nkv, nh / nkv, hs)
    y = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask)
    return y.reshape(q.shape)


def attention_kernel(
    nh: int, T: int, hs: int, device: torch.device, dtype: torch.dtype, dropout: float = 0.0
) -> str:
    """Return the name of the kernel that attend() uses in training.

    cudnn, flash and efficient are fused kernels. math and plain keep the T x T matrix in memory.
    """
    if device.type not in ("cpu", "cuda"):
        return f"{device.type}'s own"
    shape = (1, T, nh, hs)
    q = torch.empty(shape, device=device, dtype=dtype, requires_grad=True).transpose(1, 2)
    if plain_is_faster(q):
        return "plain"
    # PyTorch has no public function for this.
    choice = torch._fused_sdp_choice(q, q, q, dropout_p=dropout, is_causal=True)
    return SDPBackend(choice).name.removesuffix("_ATTENTION").lower()


def loss_chunk(device_type: str) -> int:
    """Return how many logits ChunkedCrossEntropy computes at a time.

    In fp32, 2^19 of them (2 MB) fit into the cache of a CPU. On other devices a chunk is 256 MB.
    """
    return 2**19 if device_type == "cpu" else 2**26


class ChunkedCrossEntropy(torch.autograd.Function):
    """The sum over rows of -ln softmax(logits)[target], computed in fp32, a few rows at a time.

    logits (N, V) are overwritten. targets (N,): -1 is ignored.

    F.cross_entropy would hold three fp32 tensors of (N, V). This function needs no memory of that
    size. The gradient of a row is softmax(logits) - one_hot(target). forward() computes it already,
    while the row is still in the cache, and writes it over the logits.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor) -> Tensor:
        logits = logits.detach()
        known = (targets[:, None] >= 0).float()  # (N, 1): 1, or 0 where there is no target
        loss = torch.zeros((), device=logits.device)
        rows = max(1, loss_chunk(logits.device.type) // logits.size(1))
        chunks = zip(logits.split(rows), targets.split(rows), known.split(rows), strict=True)
        for part, ids, counts in chunks:
            index = ids.clamp(min=0)[:, None]  # (rows, 1)
            log_p = part.log_softmax(-1, dtype=torch.float32)  # (rows, V)
            picked = log_p.gather(1, index)  # (rows, 1): ln p(target)
            loss -= (picked * counts).sum()
            if ctx.needs_input_grad[0]:
                # softmax, less 1 at the target; 0 in rows without a target
                part.copy_(log_p.exp_().scatter_(1, index, picked.exp() - 1).mul_(counts))
            del log_p  # free it before the next chunk is allocated
        ctx.save_for_backward(logits)
        ctx.rows = rows
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors  # of the loss by the logits, (N, V)
        if gradient.is_cpu:
            return gradient.mul_(grad), None
        # A GPU would round `grad` to the dtype of the logits before it multiplies.
        for part in gradient.split(ctx.rows):
            part.copy_(part.float().mul_(grad))
        return gradient, None


def cross_entropy(logits: Tensor, targets: Tensor, V: int, reduction: str) -> Tensor:
    """Return the cross-entropy in nats of logits (N, padded V) and targets (N,).

    The columns from V on are padding and are left out. Rows whose target is -1 are ignored.
    reduction: mean or sum, over the other rows. The logits may be overwritten.
    """
    if torch.compiler.is_compiling() or logits.dtype == torch.float16:
        # torch.compile turns this into one pass that stores no fp32 logits. For fp16 it is used
        # because ChunkedCrossEntropy stores the gradient before the scaler has multiplied it.
        # Numbers that small would become 0 in fp16.
        return F.cross_entropy(logits[:, :V].float(), targets, ignore_index=-1, reduction=reduction)
    logits.data[:, V:] = -math.inf  # .data: autograd must not record this change
    loss = ChunkedCrossEntropy.apply(logits, targets)
    return loss if reduction == "sum" else loss / (targets >= 0).sum()


def decoding_step(model: Callable, token: Tensor, cache: Any) -> Callable[[Tensor], Tensor]:
    """Return a function step(token (B, 1)) -> logits (B, V) that continues the text in `cache`.

    On CUDA the step is recorded once, as a CUDA graph, and replayed for each token. A GPU is
    expected to work faster than Python can launch the few hundred kernels of a step one by one
    (not measured yet, bench/LOG.md). A graph reads and writes the same memory in every replay: the
    token, its position, the cache and the logits.
    """
    if token.device.type != "cuda":
        return lambda token: model(token, cache=cache)
    length = cache.length
    graph_token = token.clone()
    graph_position = torch.tensor([length], device=token.device)

    def work() -> Tensor:
        cache.take_place_from(graph_position)
        return model(graph_token, cache=cache)

    # Each graph has a stream of its own: when torch frees a graph, it also frees the workspace that
    # cuBLAS has on the graph's stream.
    graph = torch.cuda.CUDAGraph()
    graph_stream = torch.cuda.Stream(token.device)
    usual_stream = torch.cuda.current_stream(token.device)
    graph_stream.wait_stream(usual_stream)
    # These two kernels accept a mask and, unlike cuDNN's, need no planning.
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        with torch.cuda.stream(graph_stream):
            work()  # a first call makes one-time preparations, which cannot be recorded
        usual_stream.wait_stream(graph_stream)
        with torch.cuda.graph(graph, stream=graph_stream):
            logits = work()
    # Undo what the two calls of work() changed in the cache.
    cache.length = length
    cache.position = None
    cache.mask = None

    def step(new: Tensor) -> Tensor:
        graph_token.copy_(new)
        graph_position.fill_(cache.length)
        graph.replay()
        cache.length += 1
        return logits

    return step

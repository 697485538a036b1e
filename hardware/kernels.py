"""The formulas of model.py, computed in a faster way on some machines.

model.py can be read without this file: it states each formula where it is used.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
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


def eager_cpu(x: Tensor) -> bool:
    """Return whether small operations cost much: each is a call, and a pass over the memory."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


class RMSNormOnCPU(torch.autograd.Function):
    """rms_norm() in as few operations as possible. It keeps x and one number per row.

    PyTorch (2.13) has no kernel for RMSNorm on a CPU. It composes it of operations in fp32, and
    autograd keeps what each of them needs.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.float()
        norm = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)  # (..., 1)
        scale = norm.square_().div_(x.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x32 * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        grad = grad.float()
        normed = x.float() * scale  # (..., n)
        product = grad * normed
        of_weight = product.flatten(0, -2).sum(0)  # (n,)
        mean = product.mul_(weight).mean(-1, keepdim=True)  # (..., 1)
        of_x = torch.mul(grad, weight, out=product)  # the memory of the product is free again
        of_x.addcmul_(normed, mean, value=-1).mul_(scale)
        return of_x.to(x.dtype), of_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) * weight, in the dtype of x (..., n); the mean is over n."""
    if eager_cpu(x):
        return RMSNormOnCPU.apply(x, weight, eps)
    # The fused kernel needs x and weight in one dtype. CUDA's autocast (torch 2.12 and later) would
    # turn both into fp32, so it is switched off here.
    with torch.autocast(x.device.type, enabled=False):
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


class RotationOnCPU(torch.autograd.Function):
    """rotate_pairs() in four operations. Its gradient is a rotation by the opposite angles."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return turned(grad, cos, sin, -1).to(ctx.dtype), None, None


def turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Rotate each pair (a, b) of x (..., hs) by the angles, or for sign -1 by their opposites."""
    half = x.size(-1) // 2
    a, b = x.float().split(half, dim=-1)
    cos = cos[..., :half]
    sin = sin[..., :half]
    out = x.new_empty(x.shape, dtype=torch.float32)
    new_a, new_b = out.split(half, dim=-1)
    torch.mul(a, cos, out=new_a).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=new_b).addcmul_(a, sin, value=sign)
    return out


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (..., hs) with each pair (a, b), of numbers i and i + hs/2, rotated, in fp32.

    (a, b) becomes (a cos - b sin, b cos + a sin). cos, sin: fp32 (..., hs), alike in both halves.
    """
    if eager_cpu(x):
        return RotationOnCPU.apply(x, cos, sin)
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def plain_is_faster(q: Tensor) -> bool:
    """Return whether attention should use plain matrix products instead of a fused kernel.

    In bf16 on a CPU they are 1.6 to 2.6 times as fast while the T x T matrix fits into the cache
    (bench/LOG.md).
    """
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and 1 < q.size(2) <= 512


@cache
def block_mask() -> Callable:
    """Return create_block_mask() of torch, compiled: else it holds several masks of T x T."""
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask, dynamic=False)


def document_mask(
    begins: Tensor, head_dim: int, dtype: torch.dtype, dropout: float, compiled: bool
) -> Any:
    """Return what attend() needs to keep documents apart.

    begins: where the document of each token begins, (B, T). Two tokens of a sequence are in one
    document if these numbers are equal. dtype: of queries and keys. dropout: on the attention
    weights. compiled: whether the code that calls attend() is compiled.
    """
    if begins.is_cpu:
        return pieces_of(begins)
    T = begins.size(1)
    # FlexAttention needs a GPU that Triton serves and a head_dim of at least 16. It has no dropout.
    if begins.is_cuda and compiled and not dropout and head_dim >= 16:
        if torch.cuda.get_device_capability(begins.device) >= (8, 0):

            def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
                return (begins[b, query] == begins[b, key]) & (query >= key)

            return block_mask()(seen, begins.size(0), None, T, T, begins.device)
    same = begins[:, None, :, None] == begins[:, None, None, :]
    hidden = ~same | torch.ones(T, T, dtype=torch.bool, device=begins.device).triu(1)
    # Of a mask of True and False, each layer would make such a mask of its own, and keep it.
    mask = torch.zeros(hidden.shape, dtype=dtype, device=begins.device)
    return mask.masked_fill_(hidden, -math.inf)


SHORT = 256  # tokens (bench/LOG.md)


class Pieces:
    """Where B sequences of T tokens are cut, so that attention needs no T x T mask.

    They are cut where documents begin. Short documents stay together, in pieces of SHORT tokens and
    more, because each piece costs some calls. Neighbours of one length are computed together.
    """

    def __init__(self, begins: Tensor):
        """begins: as in document_mask()."""
        T = begins.size(1)
        self.sizes: list[tuple[int, int]] = []  # (pieces that are computed together, their length)
        self.masks: list[Tensor | None] = []  # True where a query sees a key; None: all before it
        for of_row in begins.numpy():
            edges = np.flatnonzero(of_row == np.arange(T))  # where documents begin
            cut = 0
            several = False  # whether a document begins inside the piece that begins at `cut`
            for edge in [*edges[1:].tolist(), T]:
                if edge - cut < SHORT and edge < T:
                    several = True
                    continue
                if several:
                    same = torch.from_numpy(of_row[cut:edge])
                    self.add(edge - cut, (same[:, None] == same[None, :]).tril())
                else:
                    self.add(edge - cut, None)
                cut = edge
                several = False

    def add(self, length: int, mask: Tensor | None) -> None:
        if mask is None and self.masks and self.masks[-1] is None and self.sizes[-1][1] == length:
            self.sizes[-1] = (self.sizes[-1][0] + 1, length)
        else:
            self.sizes.append((1, length))
            self.masks.append(mask)


@torch.compiler.disable  # the pieces are others in each batch: code for them would be of no use
def pieces_of(begins: Tensor) -> Pieces:
    return Pieces(begins)


def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float, within: Any) -> Tensor:
    """Return causal attention, softmax(q k^T / sqrt(hs) + mask) v. All are (B, nh, T, hs).

    within: the result of document_mask() to keep documents apart, or None.
    """
    if within is None:
        if plain_is_faster(q):
            return plain_attend(q, k, v, None, dropout)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
    if isinstance(within, Pieces):
        return attend_pieces(q, k, v, dropout, within)
    if isinstance(within, Tensor):  # (B, 1, T, T): 0 where a query sees a key, else -inf
        return F.scaled_dot_product_attention(q, k, v, attn_mask=within, dropout_p=dropout)
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, k, v, block_mask=within)


def plain_attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, dropout: float) -> Tensor:
    """Return attention by plain matrix products. All are (B, nh, T, hs).

    seen: (T, T), True where a query sees a key; None: it sees all keys up to its own.
    """
    shape = q.shape
    mask = torch.full((shape[2], shape[2]), -math.inf, dtype=q.dtype)
    mask = mask.triu(1) if seen is None else mask.masked_fill_(seen, 0)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # (B * nh, T, hs)
    scores = torch.baddbmm(mask, q, k.mT, alpha=shape[3] ** -0.5)  # (B * nh, T, T)
    weights = F.dropout(scores.softmax(-1), dropout)
    return torch.bmm(weights, v).view(shape)


@torch.compiler.disable
def attend_pieces(q: Tensor, k: Tensor, v: Tensor, dropout: float, pieces: Pieces) -> Tensor:
    """Return the attention of each piece. All are (B, nh, T, hs)."""
    B, nh, T, hs = q.shape
    # One token after the other, (B T, nh, hs): so pieces are ranges of rows, and torch.split, whose
    # backward pass is one concatenation, cuts all of them.
    rows = [count * length for count, length in pieces.sizes]
    parts = [x.transpose(1, 2).reshape(B * T, nh, hs).split(rows) for x in (q, k, v)]
    done = []
    for (count, length), mask, *qkv in zip(pieces.sizes, pieces.masks, *parts, strict=True):
        # (count, nh, length, hs)
        a, b, c = (x.view(count, length, nh, hs).transpose(1, 2) for x in qkv)
        if plain_is_faster(a):
            y = plain_attend(a, b, c, mask, dropout)
        else:
            y = F.scaled_dot_product_attention(a, b, c, mask, dropout, is_causal=mask is None)
        done.append(y.transpose(1, 2).reshape(-1, nh, hs))
    return torch.cat(done).view(B, T, nh, hs).transpose(1, 2)


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

    logits (N, V) are overwritten. targets (N,): -1 is ignored. weights (N,): factors of the rows.

    F.cross_entropy would hold three fp32 tensors of (N, V). This function needs no memory of that
    size. The gradient of a row is softmax(logits) - one_hot(target). forward() computes it already,
    while the row is still in the cache, and writes it over the logits.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        logits = logits.detach()
        known = (targets[:, None] >= 0).float()  # (N, 1): 1, or 0 where there is no target
        if weights is not None:
            known = known * weights[:, None]
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
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors  # of the loss by the logits, (N, V)
        if gradient.is_cpu:
            return gradient.mul_(grad), None, None
        # A GPU would round `grad` to the dtype of the logits before it multiplies.
        for part in gradient.split(ctx.rows):
            part.copy_(part.float().mul_(grad))
        return gradient, None, None


def cross_entropy(
    logits: Tensor, targets: Tensor, weights: Tensor | None, V: int, reduction: str
) -> Tensor:
    """Return the cross-entropy in nats of logits (N, padded V) and targets (N,).

    The columns from V on are padding and are left out. Rows whose target is -1 are ignored.
    weights: factors of the rows (N,), or None. reduction: mean or sum, over the other rows; with
    weights, the mean is over all N rows. The logits may be overwritten.
    """
    if torch.compiler.is_compiling() or logits.dtype == torch.float16:
        # torch.compile turns this into one pass that stores no fp32 logits. For fp16 it is used
        # because ChunkedCrossEntropy stores the gradient before the scaler has multiplied it.
        # Numbers that small would become 0 in fp16.
        how = reduction if weights is None else "none"
        loss = F.cross_entropy(logits[:, :V].float(), targets, ignore_index=-1, reduction=how)
        if weights is None:
            return loss
        return (loss * weights).mean() if reduction == "mean" else (loss * weights).sum()
    logits.data[:, V:] = -math.inf  # .data: autograd must not record this change
    loss = ChunkedCrossEntropy.apply(logits, targets, weights)
    if reduction == "sum":
        return loss
    return loss / ((targets >= 0).sum() if weights is None else targets.numel())


def decoding_step(
    model: Callable, token: Tensor, cache: Any, record: bool
) -> Callable[[Tensor], Tensor]:
    """Return a function step(token (B, 1)) -> logits (B, V) that continues the text in `cache`.

    record: on CUDA, the step is recorded once, as a CUDA graph, and replayed for each token. A GPU
    is expected to work faster than Python can launch the few hundred kernels of a step one by one
    (not measured yet, bench/LOG.md). A graph reads and writes the same memory in every replay: the
    token, its position, the cache and the logits.
    """
    if not record or token.device.type != "cuda":
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

"""The formulas of model.py, computed in a faster way on some machines.

install() puts the functions of this file in the place of those of model.py. Each of them decides in
every call which way is fastest there. A program that forgets install() gets the same numbers, up to
rounding, only later, and its attention takes more memory.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

import model
from model import GPT

# The formulas as model.py states them: install() replaces them there, but not here.
cross_entropy_formula = model.cross_entropy
document_mask_formula = GPT.document_mask
linear_formula = model.Linear.forward
rotate_formula = model.rotate


def install() -> None:
    """Let all models of this process compute with the functions of this file."""
    GPT.document_mask = document_mask
    model.Linear.forward = linear
    model.RMSNorm.forward = rms_norm
    model.attend = attend
    model.cross_entropy = cross_entropy
    model.rotate = rotate


# torch.compile calls a function that is marked so as it is. torch.compiler.disable() would do the
# same, but it loads torch.compile at once, which takes a second.
never_compiled = torch._disable_dynamo


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Return x @ weight.T + bias, (..., N), for x (..., K), weight (N, K) and bias (N,)."""
    weight = layer.weight
    one_token = x.numel() == x.size(-1)
    if one_token and x.is_cpu and x.dtype == weight.dtype == torch.bfloat16:
        # A matrix-vector product is 1.4 times as fast as F.linear (bench/LOG.md).
        vector = x.flatten()  # (K,)
        if layer.bias is None:
            y = torch.mv(weight, vector)  # (N,)
        else:
            y = torch.addmv(layer.bias, weight, vector)
        return y.view(*x.shape[:-1], -1)
    return linear_formula(layer, x)


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


def rms_norm(layer: nn.RMSNorm, x: Tensor) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) * weight, in the dtype of x (..., n); the mean is over n."""
    if eager_cpu(x):
        return RMSNormOnCPU.apply(x, layer.weight, layer.eps)
    # The fused kernel needs x and weight in one dtype. CUDA's autocast (torch 2.12 and later) would
    # turn both into fp32, so it is switched off here.
    with torch.autocast(x.device.type, enabled=False):
        return F.rms_norm(x, layer.weight.shape, layer.weight.to(x.dtype), layer.eps)


class RotationOnCPU(torch.autograd.Function):
    """rotate() in four operations. Its gradient is a rotation by the opposite angles."""

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


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Return x (B, T, n, hs), rotated by the angles of rope (2, T, 1, hs), in fp32."""
    if eager_cpu(x):
        return RotationOnCPU.apply(x, *rope)
    return rotate_formula(x, rope)


def plain_is_faster(q: Tensor) -> bool:
    """Return whether attention should use plain matrix products instead of a fused kernel.

    In bf16 on a CPU they are 1.6 to 2.6 times as fast while the T x T matrix fits into the cache
    (bench/LOG.md).
    """
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and 1 < q.size(2) <= 512


@cache
def compiled_block_mask() -> Callable:
    """Return create_block_mask() of torch, compiled: else it would hold several masks of T x T.

    There is one: torch.compile() takes milliseconds, and torch never frees what it returns.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask, dynamic=False)


@never_compiled
def flex_mask(begins: Tensor) -> object:
    """Return the BlockMask by which FlexAttention keeps documents apart.

    It is compiled by itself. If the code that uses it also made it, torch 2.11 would lay it out in
    another way than FlexAttention reads it, where no gradient is wanted: all sequences of a batch
    but the first would read what lies behind the mask (bench/LOG.md).
    """
    B, T = begins.shape

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (begins[b, query] == begins[b, key]) & (query >= key)

    return compiled_block_mask()(seen, B, None, T, T, begins.device)


def document_mask(gpt: GPT, begins: Tensor, dtype: torch.dtype, compiled: bool = False) -> object:
    """Return what attend() needs to keep documents apart: Pieces, a BlockMask, or a mask (Tensor).

    model.py takes it from here to attend() without looking at it.
    begins: where the document of each token begins, (B, T). dtype: of the queries. compiled: the
    code that calls attend() is compiled, even if the code that calls this function is not.
    """
    if begins.is_cpu:
        return Pieces(begins)
    compiled = compiled or torch.compiler.is_compiling()
    dropout = gpt.training and gpt.config.dropout > 0
    # FlexAttention needs a GPU that Triton serves and a head_dim of at least 16. It has no dropout.
    if begins.is_cuda and compiled and not dropout and gpt.config.head_dim >= 16:
        if torch.cuda.get_device_capability(begins.device) >= (8, 0):
            return flex_mask(begins)
    return document_mask_formula(gpt, begins, dtype)


SHORT = 256  # tokens (bench/LOG.md)


@dataclass
class Piece:
    """A part of a sequence, and its next neighbours if they are alike: attention computes them
    together.
    """

    count: int  # of neighbours
    length: int  # of each, in tokens
    mask: Tensor | None  # True where a query sees a key; None: all keys up to its own


class Pieces:
    """B sequences of T tokens, cut so that attention needs no T x T mask.

    They are cut where documents begin. Short documents stay together, in pieces of SHORT tokens and
    more, because each piece costs some calls. torch.compile does not look into this object: for a
    mere list it would compile the model again for each number of pieces.
    """

    @never_compiled  # the pieces are others in each batch: code for them would be of no use
    def __init__(self, begins: Tensor):
        """begins: as in document_mask()."""
        T = begins.size(1)
        self.pieces: list[Piece] = []
        for row in begins.numpy():
            edges = np.flatnonzero(row == np.arange(T))  # where documents begin
            start = 0
            for end in [*edges[1:].tolist(), T]:
                if end - start >= SHORT or end == T:
                    self.add(torch.from_numpy(row[start:end]))
                    start = end

    def add(self, documents: Tensor) -> None:
        """Append a piece. documents: where the document of each of its tokens begins, (length,)."""
        length = len(documents)
        if documents[0] != documents[-1]:
            mask = (documents[:, None] == documents[None, :]).tril()
            self.pieces.append(Piece(1, length, mask))
        elif self.pieces and self.pieces[-1].mask is None and self.pieces[-1].length == length:
            self.pieces[-1].count += 1
        else:
            self.pieces.append(Piece(1, length, None))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: object, dropout: float) -> Tensor:
    """Return causal attention, softmax(q k^T / sqrt(hs) + mask) v, as model.py does.

    q: (B, nh, T, hs). k, v: (B, nh, past + T, hs).
    mask: what document_mask() has returned, to keep documents apart, or None.
    """
    if isinstance(mask, Pieces):
        return attend_pieces(q, k, v, mask, dropout)
    if mask is None or isinstance(mask, Tensor):
        kernel = plain_attend if plain_is_faster(q) else fused_attend
        return kernel(q, k, v, mask, dropout)
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, k, v, block_mask=mask)


def fused_attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """Return attention by torch's kernels, most of which never store the T x T matrix."""
    T, keys = q.size(2), k.size(2)
    if mask is None and T < keys:  # is_causal would let the first query see the first key alone
        mask = torch.ones(T, keys, dtype=torch.bool, device=q.device).tril(keys - T)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=mask is None)


def plain_attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, dropout: float) -> Tensor:
    """Return attention by plain matrix products. q: (B, nh, T, hs). k, v: (B, nh, past + T, hs).

    seen: (T, T), True where a query sees a key; None: it sees all keys up to its own.
    """
    shape = q.shape
    T, keys = q.size(2), k.size(2)
    mask = torch.full((T, keys), -math.inf, dtype=q.dtype)
    mask = mask.triu(1 + keys - T) if seen is None else mask.masked_fill_(seen, 0)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # (B * nh, T, hs)
    scores = torch.baddbmm(mask, q, k.mT, alpha=shape[3] ** -0.5)  # (B * nh, T, keys)
    weights = F.dropout(scores.softmax(-1), dropout)
    return torch.bmm(weights, v).view(shape)


@never_compiled
def attend_pieces(q: Tensor, k: Tensor, v: Tensor, cut: Pieces, dropout: float) -> Tensor:
    """Return the attention of each piece. All are (B, nh, T, hs)."""
    B, nh, T, hs = q.shape
    # One token after the other, (B T, nh, hs): so pieces are ranges of rows, and torch.split, whose
    # backward pass is one concatenation, cuts all of them.
    rows = [piece.count * piece.length for piece in cut.pieces]
    parts = [x.transpose(1, 2).reshape(B * T, nh, hs).split(rows) for x in (q, k, v)]
    results = []
    for piece, *qkv in zip(cut.pieces, *parts, strict=True):
        # (count, nh, length, hs)
        a, b, c = (x.view(piece.count, piece.length, nh, hs).transpose(1, 2) for x in qkv)
        y = attend(a, b, c, piece.mask, dropout)
        results.append(y.transpose(1, 2).reshape(-1, nh, hs))
    return torch.cat(results).view(B, T, nh, hs).transpose(1, 2)


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
        factors = (targets[:, None] >= 0).float()  # (N, 1): 1, or 0 where there is no target
        if weights is not None:
            factors = factors * weights[:, None]
        loss = torch.zeros((), device=logits.device)
        rows = max(1, loss_chunk(logits.device.type) // logits.size(1))
        chunks = zip(logits.split(rows), targets.split(rows), factors.split(rows), strict=True)
        for part, ids, factor in chunks:
            index = ids.clamp(min=0)[:, None]  # (rows, 1)
            log_p = part.log_softmax(-1, dtype=torch.float32)  # (rows, V)
            picked = log_p.gather(1, index)  # (rows, 1): ln p(target)
            loss -= (picked * factor).sum()
            if ctx.needs_input_grad[0]:
                # softmax, less 1 at the target; 0 in rows without a target
                part.copy_(log_p.exp_().scatter_(1, index, picked.exp() - 1).mul_(factor))
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
    """Return the cross-entropy as model.py does. The logits may be overwritten."""
    compiling = torch.compiler.is_compiling()
    if compiling and logits.is_cuda and V < logits.size(1):
        # A GPU is faster on whole rows than on their first V columns, a CPU slower (bench/LOG.md).
        padding = torch.arange(logits.size(1), device=logits.device) >= V
        logits = logits.masked_fill(padding, -math.inf)
        V = logits.size(1)
    if compiling or logits.dtype == torch.float16:
        # For fp16 the formula is used because ChunkedCrossEntropy stores the gradient before the
        # scaler has multiplied it. Numbers that small would become 0 in fp16.
        return cross_entropy_formula(logits, targets, weights, V, reduction)
    logits.data[:, V:] = -math.inf  # .data: autograd must not record this change
    loss = ChunkedCrossEntropy.apply(logits, targets, weights)
    if reduction == "sum":
        return loss
    return loss / ((targets >= 0).sum() if weights is None else targets.numel())

"""Faster versions of the formulas in class Kernels of model.py, for some devices.

    model.use(pick_kernels(device))

Each class chooses the fastest version in every call. Without this line, a program computes the same
numbers, up to rounding.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from model import GPT, Kernels

# A decorator: torch.compile calls the function without compiling it. torch.compiler.disable() does
# the same, but it loads torch.compile at once, which takes a second.
never_compiled = torch._disable_dynamo


class RMSNormOnCPU(torch.autograd.Function):
    """rms_norm() in as few operations as possible. It keeps x and one number per row.

    PyTorch (2.13) has no kernel for RMSNorm on a CPU. It uses several operations in fp32, and
    autograd keeps the inputs of each.
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
        grad_weight = product.flatten(0, -2).sum(0)  # (n,)
        mean = product.mul_(weight).mean(-1, keepdim=True)  # (..., 1)
        grad_x = torch.mul(grad, weight, out=product)  # reuses the memory of the product
        grad_x.addcmul_(normed, mean, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None


class RotationOnCPU(torch.autograd.Function):
    """rotate() in four operations. Its gradient is a rotation by the opposite angles."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return rotated(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotated(grad, cos, sin, -1).to(ctx.dtype), None, None


def rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Rotate each pair (a, b) of x (..., hs) by the angles; with sign -1, by their opposites."""
    half = x.size(-1) // 2
    a, b = x.float().split(half, dim=-1)
    cos = cos[..., :half]
    sin = sin[..., :half]
    out = x.new_empty(x.shape, dtype=torch.float32)
    new_a, new_b = out.split(half, dim=-1)
    torch.mul(a, cos, out=new_a).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=new_b).addcmul_(a, sin, value=sign)
    return out


@cache
def compiled_block_mask() -> Callable:
    """Return torch's create_block_mask(), compiled: else it would hold several masks of T x T.

    It is cached: torch.compile() takes milliseconds, and torch never frees its results.
    """
    return torch.compile(create_block_mask, dynamic=False)


@never_compiled
def flex_mask(starts: Tensor) -> BlockMask:
    """Return the BlockMask by which FlexAttention keeps documents apart.

    It is compiled separately from the code that uses it. Else, where no gradient is needed, torch
    2.11 would lay it out differently from what FlexAttention reads: all sequences of a batch but
    the first would read memory after the end of the mask (bench/LOG.md).
    """
    B, T = starts.shape

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (starts[b, query] == starts[b, key]) & (query >= key)

    return compiled_block_mask()(seen, B, None, T, T, starts.device)


SHORT = 256  # tokens (bench/LOG.md)


@dataclass
class Span:
    """One span of a sequence, or several spans of equal lengths in a row, as one batch."""

    count: int  # of spans
    length: int  # of each, in tokens
    mask: Tensor | None  # True where a query sees a key; None: all keys up to its own


class Spans:
    """B sequences of T tokens, cut so that attention needs no T x T mask.

    They are cut where documents start. Short documents share a span of SHORT tokens or more,
    because each span costs some calls. torch.compile does not look into this object. With a plain
    list, it would compile the model again for each number of spans.
    """

    @never_compiled  # the spans differ in each batch: compiled code would not be used again
    def __init__(self, starts: Tensor):
        """starts: as in document_mask()."""
        T = starts.size(1)
        self.spans: list[Span] = []
        for row in starts.numpy():
            edges = np.flatnonzero(row == np.arange(T))  # where documents start
            start = 0
            for end in [*edges[1:].tolist(), T]:
                if end - start >= SHORT or end == T:
                    self.add(torch.from_numpy(row[start:end]))
                    start = end

    def add(self, documents: Tensor) -> None:
        """Append a span. documents: where the document of each of its tokens starts, (length,)."""
        length = len(documents)
        if documents[0] != documents[-1]:
            mask = (documents[:, None] == documents[None, :]).tril()
            self.spans.append(Span(1, length, mask))
        elif self.spans and self.spans[-1].mask is None and self.spans[-1].length == length:
            self.spans[-1].count += 1
        else:
            self.spans.append(Span(1, length, None))


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
def attend_spans(
    kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, cut: Spans, dropout: float
) -> Tensor:
    """Return the attention within each span, (B, nh, T, hs). q, k and v have the same shape."""
    B, nh, T, hs = q.shape
    # As (B T, nh, hs), the spans are ranges of rows. torch.split cuts all of them, and its backward
    # pass is one concatenation.
    rows = [span.count * span.length for span in cut.spans]
    parts = [x.transpose(1, 2).reshape(B * T, nh, hs).split(rows) for x in (q, k, v)]
    results = []
    for span, *qkv in zip(cut.spans, *parts, strict=True):
        # (count, nh, length, hs)
        a, b, c = (x.view(span.count, span.length, nh, hs).transpose(1, 2) for x in qkv)
        y = kernels.attend(a, b, c, span.mask, dropout)
        results.append(y.transpose(1, 2).reshape(-1, nh, hs))
    return torch.cat(results).view(B, T, nh, hs).transpose(1, 2)


def attention_kernel(
    nh: int, T: int, hs: int, device: torch.device, dtype: torch.dtype, dropout: float = 0.0
) -> str:
    """Return the name of the kernel that computes attention in training.

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
    """Return the number of logits in a chunk of ChunkedCrossEntropy.

    In fp32, 2^19 of them (2 MB) fit into the cache of a CPU. On other devices a chunk is 256 MB.
    """
    return 2**19 if device_type == "cpu" else 2**26


def keeps_gradient(logits_bytes: float, device_type: str) -> bool:
    """Return whether ChunkedCrossEntropy keeps the gradient in memory of its own.

    That saves a second softmax, 15 to 30 % of the time of a demo's loss on a CPU. With a large
    vocabulary, a CPU's heap would grow by up to three times the logits (bench/LOG.md).
    """
    return device_type == "cpu" and logits_bytes <= 2**27


class ChunkedCrossEntropy(torch.autograd.Function):
    """The sum over rows of -ln softmax(logits)[target], computed in fp32, a few rows at a time.

    logits (N, V). targets (N,): -1 is ignored. weights (N,): factors of the rows.

    F.cross_entropy would hold three fp32 tensors of (N, V). The gradient of a row is
    softmax(logits) - one_hot(target). It must not overwrite the logits as long as another term of
    the loss may use them. If keeps_gradient() is true, forward() writes the gradient into a tensor
    of its own, while the row is still in the cache. Else it overwrites the logits after the
    backward pass of all other terms: in the hook on the logits, which autograd calls with the sum
    of their gradients. backward() then returns zeros, which take no memory.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        factors = (targets[:, None] >= 0).float()  # (N, 1): 1, or 0 where there is no target
        if weights is not None:
            factors = factors * weights[:, None]
        now = ctx.needs_input_grad[0] and keeps_gradient(logits.nbytes, logits.device.type)
        gradient = torch.empty_like(logits) if now else logits
        loss = torch.zeros((), device=logits.device)
        for part, index, factor, out in row_chunks(logits, targets, factors, gradient):
            log_p = part.log_softmax(-1, dtype=torch.float32)  # (rows, V)
            loss -= (log_p.gather(1, index) * factor).sum()
            if now:
                write_gradient(log_p, index, factor, out)
            del log_p  # free it before the next chunk is allocated
        ctx.save_for_backward(gradient, targets, factors)
        if ctx.needs_input_grad[0] and not now:
            ctx.waiting = waiting = []  # the hook must not hold the logits before backward() does
            logits.register_hook(lambda g: add_gradient_in_place(*waiting.pop(), others=g))
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        gradient, targets, factors = ctx.saved_tensors
        if not hasattr(ctx, "waiting"):
            return gradient.mul_(grad), None, None
        ctx.waiting.append((gradient, targets, factors, grad))
        return gradient.new_zeros(1, 1).expand(gradient.shape), None, None


def row_chunks(
    logits: Tensor, targets: Tensor, factors: Tensor, gradient: Tensor
) -> Iterator[tuple[Tensor, ...]]:
    """Yield chunks of rows of all four. The targets become the index of gather(), (rows, 1)."""
    rows = max(1, loss_chunk(logits.device.type) // logits.size(1))
    index = targets.clamp(min=0)[:, None]
    return zip(*(x.split(rows) for x in (logits, index, factors, gradient)), strict=True)


def write_gradient(log_p: Tensor, index: Tensor, factor: Tensor, out: Tensor) -> None:
    """Write softmax - one_hot(target) of a chunk to `out`. This overwrites log_p.

    factor: (rows, 1), by which each row is multiplied: 0 without a target.
    """
    picked = log_p.gather(1, index)  # (rows, 1): ln p(target)
    torch.mul(log_p.exp_().scatter_(1, index, picked.exp() - 1), factor, out=out)


def add_gradient_in_place(
    logits: Tensor, targets: Tensor, factors: Tensor, grad: Tensor, others: Tensor
) -> Tensor:
    """Return the gradient of the chunked loss plus `others`, in the memory of the logits."""
    logits = logits.detach()
    for part, index, factor, out in row_chunks(logits, targets, factors, logits):
        write_gradient(part.log_softmax(-1, dtype=torch.float32), index, factor, out)
        # A GPU would round `grad` to the dtype of the logits before it multiplies.
        part.mul_(grad) if part.is_cpu else part.copy_(part.float().mul_(grad))
    return logits if others.stride() == (0, 0) else logits.add_(others)  # 0: none but backward()'s


def chunked_cross_entropy(
    logits: Tensor, targets: Tensor, weights: Tensor | None, reduction: str
) -> Tensor:
    """Return the cross-entropy as Kernels.cross_entropy() does."""
    loss = ChunkedCrossEntropy.apply(logits, targets, weights)
    if reduction == "sum":
        return loss
    return loss / ((targets >= 0).sum() if weights is None else targets.numel())


# --------------------------------------------------------------------------------------------------
# The choice


def plain_is_faster(q: Tensor) -> bool:
    """Return whether attention should use plain matrix products instead of a fused kernel.

    In bf16 on a CPU they are 1.6 to 2.6 times as fast, if the T x T matrix fits into the cache
    (bench/LOG.md).
    """
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and 1 < q.size(2) <= 512


class EagerKernels(Kernels):
    """A loss that needs less memory on any device if it is not compiled.

    compiled: whether the blocks are compiled, even if the code around them is not.
    """

    def __init__(self, compiled: bool = False):
        self.compiled = compiled

    def mask_padding(self, logits: Tensor, V: int) -> Tensor:
        if torch.compiler.is_compiling() or logits.dtype == torch.float16:
            return super().mask_padding(logits, V)
        logits.data[:, V:] = -math.inf  # no copy; .data: autograd need not record it
        return logits

    def cross_entropy(
        self, logits: Tensor, targets: Tensor, weights: Tensor | None, reduction: str
    ) -> Tensor:
        # ChunkedCrossEntropy stores the gradient before the scaler multiplies it: its numbers could
        # be too small for fp16.
        if torch.compiler.is_compiling() or logits.dtype == torch.float16:
            return super().cross_entropy(logits, targets, weights, reduction)
        return chunked_cross_entropy(logits, targets, weights, reduction)


class CUDAKernels(EagerKernels):
    """FlexAttention, if documents are kept apart. It never stores a T x T mask."""

    def document_mask(self, gpt: GPT, starts: Tensor, dtype: torch.dtype) -> BlockMask | Tensor:
        compiled = self.compiled or torch.compiler.is_compiling()
        dropout = gpt.training and gpt.config.dropout > 0
        # FlexAttention needs Triton and a head_dim of at least 16. It has no dropout.
        if compiled and not dropout and gpt.config.head_dim >= 16:
            if torch.cuda.get_device_capability(starts.device) >= (8, 0):
                return flex_mask(starts)
        return super().document_mask(gpt, starts, dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float) -> Tensor:
        if isinstance(mask, BlockMask):
            return flex_attention(q, k, v, block_mask=mask)
        return super().attend(q, k, v, mask, dropout)


class CPUKernels(EagerKernels):
    """On a CPU, each small operation costs a call and a pass over the memory."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        one_token = x.numel() == x.size(-1)
        if one_token and x.dtype == weight.dtype == torch.bfloat16:
            # A matrix-vector product is 1.4 times as fast as F.linear (bench/LOG.md).
            vector = x.flatten()  # (K,)
            y = torch.mv(weight, vector) if bias is None else torch.addmv(bias, weight, vector)
            return y.view(*x.shape[:-1], -1)
        return super().linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if torch.compiler.is_compiling():
            return super().rms_norm(x, weight, eps)
        return RMSNormOnCPU.apply(x, weight, eps)

    def rotate(self, x: Tensor, rope: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return super().rotate(x, rope)
        return RotationOnCPU.apply(x, *rope)

    def document_mask(self, gpt: GPT, starts: Tensor, dtype: torch.dtype) -> Spans:
        return Spans(starts)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float) -> Tensor:
        if isinstance(mask, Spans):
            return attend_spans(self, q, k, v, mask, dropout)
        if plain_is_faster(q):
            return plain_attend(q, k, v, mask, dropout)
        return super().attend(q, k, v, mask, dropout)

    def mask_padding(self, logits: Tensor, V: int) -> Tensor:
        if torch.compiler.is_compiling():  # a CPU is faster without the columns of the padding
            return logits[:, :V]
        return super().mask_padding(logits, V)


def pick_kernels(device: torch.device, compiled: bool = False) -> Kernels:
    """Return the fastest kernels for a device. compiled: the model, or its blocks, are compiled."""
    classes = {"cpu": CPUKernels, "cuda": CUDAKernels}
    return classes.get(device.type, EagerKernels)(compiled)

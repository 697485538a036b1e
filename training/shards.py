"""Tensors that are sharded over the processes, as torch's DTensor: their parts, and the whole.

Rank r of W holds the rows r n ... (r + 1) n - 1 of a tensor of R rows, where n = ceil(R / W). The
last ranks may hold fewer rows, or none. parallel.py shards the weights; their gradients and the
optimizer's state follow them.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def is_sharded(x: Tensor) -> bool:
    """Return whether x is a DTensor. (The import of this class would take half a second.)"""
    return hasattr(x, "device_mesh")


def part(x: Tensor) -> Tensor:
    """Return what this rank holds of x; x itself if it is not sharded. No copy is made."""
    return x.to_local() if is_sharded(x) else x


def whole(x: Tensor) -> Tensor:
    """Return all of x, on every rank: all ranks must call this at the same time.

    A result that is still to be summed over the ranks, such as a norm, is summed.
    """
    return x.full_tensor() if is_sharded(x) else x


def ranks_of(x: Tensor) -> int:
    """Return over how many processes x is sharded; 1 if it is not."""
    return x.device_mesh.size() if is_sharded(x) else 1


def ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def placed_like(p: Tensor, x: Tensor) -> Tensor:
    """Return a copy of the whole tensor x, sharded as p is, on the device of p.

    x may lie in a file that is mapped into memory: a rank reads only the rows that it holds.
    """
    if x.dim() == 0:
        return x.clone()  # a counter of steps: its optimizer knows where it belongs
    if not is_sharded(p):
        return x.to(p.device, copy=True)
    from torch.distributed.tensor import DTensor

    mesh = p.device_mesh
    n = ceil_div(x.size(0), mesh.size())
    rows = x[n * mesh.get_local_rank() :][:n].to(p.device, p.dtype, copy=True)
    return DTensor.from_local(rows, mesh, p.placements, shape=p.shape, stride=p.stride())


def to_owners(parts: list[Tensor], p: Tensor, dtype: torch.dtype) -> Tensor:
    """Return some tensors of the shape of p (R, C) in one stack (m, R, C), in another dtype.

    parts: what this rank holds of each. If they are sharded over W ranks, each rank gets the next
    m = ceil(len(parts) / W) of them whole; what the last ranks lack is filled up with zeros.
    """
    R, C = p.shape
    W = ranks_of(p)
    m = ceil_div(len(parts), W)
    stack = torch.zeros(W * m, ceil_div(R, W), C, dtype=dtype, device=parts[0].device)
    torch._foreach_copy_([x[: len(rows)] for x, rows in zip(stack, parts, strict=False)], parts)
    if W > 1:
        stack = exchange(stack, p).view(W, m, -1, C).transpose(0, 1).reshape(m, -1, C)[:, :R]
    return stack


def from_owners(stack: Tensor, p: Tensor) -> Tensor:
    """The way back from to_owners(): return what this rank holds of each tensor, in one stack.

    Of a rank that holds fewer rows than others, they come first.
    """
    W = ranks_of(p)
    if W == 1:
        return stack
    m, R, C = stack.shape
    filled = F.pad(stack, (0, 0, 0, W * ceil_div(R, W) - R))
    return exchange(filled.view(m, W, -1, C).transpose(0, 1).flatten(0, 1), p)


def exchange(stack: Tensor, p: Tensor) -> Tensor:
    """Send the r-th of W equal parts of a stack to rank r; return what the ranks send, in order."""
    received = torch.empty_like(stack)
    dist.all_to_all_single(received, stack, group=p.device_mesh.get_group())
    return received

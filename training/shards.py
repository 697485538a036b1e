"""Tensors that are sharded over the processes, as torch's DTensor: their parts, and the whole.

Rank r of W holds the rows r n ... (r + 1) n - 1 of a tensor of R rows, where n = ceil(R / W). The
last ranks may hold fewer rows, or none. parallel.py shards the weights; their gradients and the
optimizer's state follow them.
"""

import math

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
    n = math.ceil(x.size(0) / mesh.size())
    rows = x[n * mesh.get_local_rank() :][:n].to(p.device, p.dtype, copy=True)
    return DTensor.from_local(rows, mesh, p.placements, shape=p.shape, stride=p.stride())

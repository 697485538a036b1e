"""Tensors that are sharded over the processes, as torch's DTensor: their parts, and the whole.

Rank r of W holds the rows r n ... (r + 1) n - 1 of a tensor of R rows, where n = ceil(R / W). The
last ranks may hold fewer rows, or none. parallel.py shards the weights; their gradients and the
optimizer's state follow them.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
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


def rows_of(rank: int, rows: int, world: int) -> tuple[int, int]:
    """Return the first row that a rank holds of a tensor of `rows` rows, and the one behind its
    last."""
    each = -(-rows // world)
    return min(rank * each, rows), min((rank + 1) * each, rows)


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
    first, end = rows_of(mesh.get_local_rank(), x.size(0), mesh.size())
    own = x[first:end].to(p.device, p.dtype, copy=True)
    return DTensor.from_local(own, mesh, p.placements, shape=p.shape, stride=p.stride())


@dataclass(frozen=True)
class Pieces:
    """Matrices that are sharded by rows, and which rank gets which of them whole.

    For Muon, which needs whole matrices. The matrices are dealt out to the ranks; each rank sends
    its rows of a matrix to the rank that owns it, computes with the matrices that it owns, and
    sends each rank the rows of the results that it holds. So a rank sends its part of all matrices
    twice, which is 2 / W of what it would receive if every rank gathered all, and no work is done
    twice.

    shape: (rows, columns) of each matrix. bounds: for each matrix, the first row of every rank and
    the end: W + 1 numbers. The matrices are in the order of their owners: rank 0 owns the first
    owned[0] ones, and so on.
    """

    shape: tuple[int, int]
    bounds: tuple[list[int], ...]
    owned: list[int]
    rank: int
    group: dist.ProcessGroup

    def sizes(self, rank: int, owner: int) -> list[int]:
        """Return how many numbers a rank holds of each matrix of an owner."""
        ends = list(accumulate(self.owned))
        numbers = range(ends[owner] - self.owned[owner], ends[owner])
        rows = [self.bounds[i][rank + 1] - self.bounds[i][rank] for i in numbers]
        return [n * self.shape[1] for n in rows]

    def exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        out = x.new_empty(sum(received))
        dist.all_to_all_single(out, x, received, sent, group=self.group)
        return out

    def to_owners(self, x: Tensor) -> Tensor:
        """Return the matrices that this rank owns, (n, rows, columns).

        x: what this rank holds of all matrices, one behind the other, as one vector.
        """
        ranks = range(len(self.owned))
        sent = [sum(self.sizes(self.rank, owner)) for owner in ranks]
        received = [sum(self.sizes(rank, self.rank)) for rank in ranks]
        x = self.exchange(x, sent, received)
        stack = x.new_empty(self.owned[self.rank], *self.shape)
        for rank, rows in zip(ranks, x.split(received), strict=True):
            pieces = rows.split(self.sizes(rank, self.rank))
            for target, piece in zip(self.rows_in(stack, rank), pieces, strict=True):
                target.copy_(piece.view_as(target))
        return stack

    def from_owners(self, stack: Tensor) -> Tensor:
        """Return what this rank holds of all matrices: the way back from to_owners()."""
        ranks = range(len(self.owned))
        rows = [x.flatten() for rank in ranks for x in self.rows_in(stack, rank)]
        sent = [sum(self.sizes(rank, self.rank)) for rank in ranks]
        received = [sum(self.sizes(self.rank, owner)) for owner in ranks]
        return self.exchange(torch.cat(rows) if rows else stack.flatten(), sent, received)

    def rows_in(self, stack: Tensor, rank: int) -> list[Tensor]:
        """Return the rows that a rank holds of each matrix that this rank owns, as views."""
        first = sum(self.owned[: self.rank])
        return [
            matrix[self.bounds[i][rank] : self.bounds[i][rank + 1]]
            for i, matrix in enumerate(stack, start=first)
        ]

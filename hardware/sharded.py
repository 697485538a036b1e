"""Tensors that are sharded over the ranks, torch's DTensor: their local shards and full values.

Rank r of W holds the rows r n ... (r + 1) n - 1 of a tensor of R rows, where n = ceil(R / W). The
last ranks may hold fewer rows, or none. training/parallel.py shards the weights; their gradients
and the optimizer's state are sharded in the same way.
"""

from typing import TypeGuard

import torch
import torch.distributed as dist


def is_sharded(x: torch.Tensor) -> "TypeGuard[dist.tensor.DTensor]":
    """Return whether x is a DTensor. (The import of this class would take half a second.)"""
    return hasattr(x, "device_mesh")


def local_shard(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of x; x itself if it is not sharded. No copy is made."""
    return x.to_local() if is_sharded(x) else x


def full_tensor(x: torch.Tensor) -> torch.Tensor:
    """Return the full value of x, on every rank. All ranks must call this.

    A partial result that is still to be summed over the ranks, such as a norm, is summed.
    """
    return x.full_tensor() if is_sharded(x) else x

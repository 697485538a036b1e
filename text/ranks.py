"""Several processes make one data set, started by torchrun: each reads its share of the input."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np

from configurator import OneRankError
from text.sources import Source


@contextmanager
def all_ranks() -> Iterator[tuple[int, int]]:
    """Connect the processes that torchrun started; yield (rank, world size), (0, 1) without it."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world == 1:
        yield 0, 1
        return
    import torch.distributed as dist

    # The timeout is long because one rank may have much more to read than another.
    dist.init_process_group("gloo", timeout=timedelta(days=7))
    try:
        yield dist.get_rank(), world
        gather(None, world)
    finally:
        dist.destroy_process_group()  # its threads must end before the interpreter does


def gather(value: Any, world: int) -> list[Any]:
    """Return the values of all ranks, on every rank. Every rank waits here for all others."""
    if world == 1:
        return [value]
    import torch.distributed as dist

    found: list[Any] = [None] * world
    try:
        dist.all_gather_object(found, value)
    except RuntimeError:  # the connection to another process is closed
        raise OneRankError("another process of this job ended: its own message says why") from None
    return found


def share_of(sources: list[Source], rank: int, world: int) -> list[Source]:
    """Return the files that a rank reads: neighbours in the list, with about 1/world of all bytes.

    The files of rank 0 come first, then those of rank 1, and so on: the parts that the ranks write
    follow one another in the order of the input.
    """
    total = sum(s.bytes for s in sources)
    middles = np.cumsum([s.bytes for s in sources]) - [s.bytes / 2 for s in sources]
    ranks = [min(world - 1, int(middle * world / max(1, total))) for middle in middles]
    return [source for source, reader in zip(sources, ranks, strict=True) if reader == rank]

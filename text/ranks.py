"""Several processes make one data set, started by torchrun: each reads its share of the input."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np

from configurator import UserError
from text.sources import Source


class Ranks(NamedTuple):
    """This process and how many there are. Its methods wait for all of them."""

    rank: int = 0
    world: int = 1

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, on every rank."""
        if self.world == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(values, value)
        except RuntimeError:  # the connection to another process is closed
            raise UserError("another process of this job ended: its message says why") from None
        return values

    def of_first(self, work: Callable[[], Any]) -> Any:
        """Let rank 0 do the work, and return its result on every rank."""
        return self.gather(work() if self.rank == 0 else None)[0]


@contextmanager
def all_ranks() -> Iterator[Ranks]:
    """Connect the processes that torchrun started. Without torchrun there is one."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world == 1:
        yield Ranks()
        return
    import torch.distributed as dist

    from hardware.machine import connect  # with torch, which one process does without

    # The timeout is long because one rank may have much more to read than another.
    connect("gloo", timedelta(days=7))
    try:
        ranks = Ranks(dist.get_rank(), world)
        yield ranks
        ranks.gather(None)
    finally:
        dist.destroy_process_group()  # its threads must end before the interpreter does


def share_of(sources: list[Source], ranks: Ranks) -> list[Source]:
    """Return the files that this rank reads: neighbours in the list, about 1/world of all bytes.

    The files of rank 0 come first, then those of rank 1, and so on: the parts that the ranks write
    follow one another in the order of the input.
    """
    sizes = np.array([s.bytes for s in sources])
    middles = np.cumsum(sizes) - sizes / 2
    # + 1: else an empty file at the end would belong to none.
    readers = (middles * ranks.world / (sizes.sum() + 1)).astype(int)
    return [sources[i] for i in np.flatnonzero(readers == ranks.rank)]

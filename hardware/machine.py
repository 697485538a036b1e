"""What a process runs on, the other ranks of its run, time, signals, and memory that runs out.

hardware/device.py makes the Machine of a process.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from configurator import OneRankError, UserError
from hardware.terminal import ProgressBar


@dataclass(frozen=True)
class Machine:
    """What this process runs on, and how it talks to the other processes of the run (the ranks)."""

    rank: int  # the number of this process, 0 ... world - 1
    local_rank: int  # its number among the processes on this computer
    world: int  # how many processes there are
    device: torch.device
    dtype: torch.dtype  # of autocast
    why: str  # the reason for this dtype
    group: Any = None  # all ranks, for messages before and after the training loop

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def say(self, text: str) -> None:
        """Print a line, on rank 0 only. A progress bar stays below it."""
        if self.is_main:
            ProgressBar.write(text)
            sys.stdout.flush()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, on every rank. Wait for the slowest, even for hours."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, self.group)
        return values

    def together(self, work: Callable[[], Any]) -> Any:
        """Run work() on every rank and return its result.

        If it fails on one rank with a UserError or OSError, all ranks raise UserError, so that no
        rank waits for the one that failed.
        """
        result = None
        problem = ""
        try:
            result = work()
        except UserError as e:
            problem = str(e)
        except OSError as e:
            problem = f"{e.filename or 'writing'}: {e.strerror}"
        problems = self.gather(problem)
        failures = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
        if failures:
            raise UserError(problems[0] if all(problems) else failures[0])
        return result

    def decide(self, work: Callable[[], Any]) -> Any:
        """Run work() on rank 0 only. Return its result, or raise its UserError, on every rank."""
        return self.gather(self.together(lambda: work() if self.is_main else None))[0]

    def any_rank(self, fact: bool) -> Callable[[], bool]:
        """Start to ask whether a fact is true of any rank. All ranks must call this.

        Return a function that waits for the answer of the other processes, but not for any device.
        """
        if self.group is None:
            return lambda: fact
        count = torch.tensor(int(fact))
        work = dist.all_reduce(count, group=self.group, async_op=True)

        def answer() -> bool:
            work.wait()
            return count.item() > 0

        return answer

    def synchronize(self) -> None:
        """Wait for all work that is queued on the device. A time is measured only after this."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def fetch(self, x: torch.Tensor) -> Callable[[], list[float]]:
        """Start to copy x to the host. Return a function that returns its numbers.

        That function waits until the copy is done, but not for work that was queued after it.
        """
        if self.device.type != "cuda":
            return x.tolist
        copy = x.to("cpu", non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def read() -> list[float]:
            copied.synchronize()
            return copy.tolist()

        return read


# --------------------------------------------------------------------------------------------------
# Tensors that are sharded over the ranks, as torch's DTensor: their parts, and the whole
#
# Rank r of W holds the rows r n ... (r + 1) n - 1 of a tensor of R rows, where n = ceil(R / W). The
# last ranks may hold fewer rows, or none. training/parallel.py shards the weights; their gradients
# and the optimizer's state follow them.


def is_sharded(x: torch.Tensor) -> bool:
    """Return whether x is a DTensor. (The import of this class would take half a second.)"""
    return hasattr(x, "device_mesh")


def part(x: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of x; x itself if it is not sharded. No copy is made."""
    return x.to_local() if is_sharded(x) else x


def whole(x: torch.Tensor) -> torch.Tensor:
    """Return all of x, on every rank: all ranks must call this at the same time.

    A result that is still to be summed over the ranks, such as a norm, is summed.
    """
    return x.full_tensor() if is_sharded(x) else x


# --------------------------------------------------------------------------------------------------
# Time


class Clock:
    """Measures the seconds since the last log line, and how many of them went by waiting for data.

    Time spent inside `paused()` (evaluation, saving) does not count.
    """

    def __init__(self, machine: Machine, step: int):
        self.machine = machine
        self.restart(step)

    def restart(self, step: int) -> None:
        """Start a new measurement after step `step`."""
        self.machine.synchronize()
        self.step = step
        self.start = time.perf_counter()
        self.data_s = 0.0  # waiting for data

    def seconds(self) -> float:
        """Return the seconds since restart(), without the pauses."""
        self.machine.synchronize()
        return time.perf_counter() - self.start

    @contextmanager
    def paused(self):
        elapsed = self.seconds()
        yield
        self.start += self.seconds() - elapsed


# --------------------------------------------------------------------------------------------------
# Signals


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Catch the signals that ask the run to stop. Yield the list to which their numbers are added.

    They are SIGTERM, SIGINT (Ctrl-C), SIGUSR1 (Slurm's warning) and SIGHUP (the terminal was
    closed). The caller finishes the step, saves the run, and exits with 128 + number. A second
    Ctrl-C exits at once. If SIGHUP is already ignored, as under nohup, it stays ignored.
    """
    caught: list[int] = []

    def catch(number: int, frame) -> None:
        again = len(caught) > 0 and number == signal.SIGINT
        caught.append(number)
        if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":  # a step may take long
            text = b"\nthe run will be saved and end"
            if "RANK" not in os.environ:  # torchrun hands on the first one only
                text += b"; Ctrl-C again ends it at once, unsaved"
            with suppress(OSError):  # in `train.py 2>&1 | tee log`, Ctrl-C has ended tee, too
                os.write(2, b"\n" if again else text + b"\n")
        if again:
            os._exit(128 + number)

    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    handlers = {number: signal.signal(number, catch) for number in numbers}
    try:
        yield caught
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


# --------------------------------------------------------------------------------------------------
# Memory that runs out


@contextmanager
def memory_advice(advice: str):
    """Turn an out-of-memory error in the block into a UserError: one line that ends in `advice`."""
    try:
        yield
    except (RuntimeError, MemoryError) as e:
        if not out_of_memory(e):
            raise
        raise OneRankError(f"out of memory {advice}") from None


def out_of_memory(e: BaseException) -> bool:
    """Return whether the error means that memory ran out.

    The allocators of CUDA and of Python have error types for this. The errors of the CPU's
    allocator, of cuBLAS, and those that a compiler has wrapped are recognised by their words.
    """
    words = "can't allocate memory|out of memory|ALLOC_FAILED|Storage size calculation overflowed"
    types = torch.OutOfMemoryError | MemoryError
    return isinstance(e, types) or re.search(words, str(e)) is not None

"""Processes, devices, memory and signals.

start() finds out what this process runs on, once, and joins the other processes of the run.
"""

import ctypes
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
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
# The start of a process


# The longest that a rank waits for the others in the training loop, where one of them may write a
# checkpoint to a slow disk.
LONGEST_WAIT = timedelta(minutes=30)


def start(asked_device: str, asked_dtype: str, sparing: bool = False) -> Machine:
    """Return the Machine of this process for the settings `device` and `dtype`.

    If torchrun has started this process, it joins the other ranks. sparing: on a CPU, give freed
    memory back.
    Raises UserError if the device or dtype cannot be used.
    """
    rank = int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    device = pick_device(asked_device, local_rank)
    if device.type == "cpu":
        tune_malloc(sparing)
    ctypes.CDLL(None).signal(signal.SIGBUS, explain_bus_error)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in fp32
    group = join_ranks(device) if "RANK" in os.environ else None
    dtype, reason = pick_dtype(asked_dtype, device)
    return Machine(rank, local_rank, world, device, dtype, reason, group)


def join_ranks(device: torch.device) -> dist.ProcessGroup:
    """Connect this process with the other ranks. Return the group for `Machine.group`."""
    store, rank, world = next(dist.rendezvous("env://"))
    # torchrun gives restarted workers the store of the attempt before, which holds addresses that
    # are no longer valid (torch 2.13). So each attempt gets a prefix of its own. This does not work
    # with several computers, because each of them counts its own restarts.
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        store = dist.PrefixStore(f"attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    ranks = dict(store=store, rank=rank, world_size=world, device_id=device_id)
    dist.init_process_group(backend, timeout=LONGEST_WAIT, **ranks)
    # Before and after the loop, one rank may read all data, or compile, while the others wait.
    return dist.new_group(backend="gloo", timeout=timedelta(days=7))


def tune_malloc(sparing: bool) -> None:
    """Make glibc keep large tensors that were freed, for the next step; sparing: give them back.

    If it returns them to the kernel, every step pays for new pages (bench/LOG.md). But where
    weights are gathered and freed in turn, gaps between what stays add up: with the setting `shard`
    a process kept three times what its tensors took.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library, as on macOS or with musl
        return
    if sparing:
        mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: larger blocks have pages of their own
    else:
        # M_MMAP_MAX: no block has pages of its own, which would be unmapped when it is freed.
        mallopt(-4, 0)
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks


def pick_device(setting: str, local_rank: int = 0) -> torch.device:
    """Return the device of the setting `device`. auto: cuda if there is one, then mps, then cpu.

    Raises UserError if the device cannot be used.
    """
    kind = setting
    if setting == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        kind = accelerator.type if accelerator else "cpu"
    try:
        device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
        # This fails on "meta", whose tensors have no numbers, and on a GPU for which this torch has
        # no kernels. (torch.zeros would not need a kernel.)
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError) as e:
        reason = str(e).splitlines()[0]
        if "no kernel image" in reason:
            built_for = " ".join(torch.cuda.get_arch_list())
            reason += f": torch was built for {built_for}; for older ones take that for CUDA 12.6"
        raise OneRankError(f"--device={setting}: not usable here ({reason})") from None
    return device


def pick_dtype(setting: str, device: torch.device) -> tuple[torch.dtype, str]:
    """Return the dtype of autocast for the setting `dtype`, and the reason.

    auto: bf16 only where the hardware multiplies it natively, not where it is emulated.
    Raises UserError for float16 on a device other than CUDA.
    """
    if setting != "auto":
        if setting == "float16" and device.type != "cuda":
            raise UserError(f"dtype=float16 needs CUDA: on {device.type} use bfloat16 or float32")
        return getattr(torch, setting), "as asked"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        capability = f"compute capability {major}.{minor}"
        if major >= 8 or torch.version.hip:
            return torch.bfloat16, f"{capability} multiplies it natively"
        return torch.float16, f"{capability} has no native bfloat16"
    if device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        native = [k for k in ("amx_bf16", "avx512_bf16", "bf16") if capabilities.get(k)]
        if native:
            return torch.bfloat16, f"this CPU has {native[0]}"
        return torch.float32, "this CPU has no native bfloat16"
    return torch.float32, f"the safe choice on {device.type}"


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
        if caught and number == signal.SIGINT:
            os.write(2, b"\n")  # the shell's prompt comes below a progress bar
            os._exit(128 + number)
        caught.append(number)

    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    handlers = {number: signal.signal(number, catch) for number in numbers}
    try:
        yield caught
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def explain_bus_error(number: int) -> None:
    """End the process with a line that says why.

    A handler of the module signal would never run: Python calls it after the instruction, which
    cannot end. This one is called in the middle of it.
    """
    causes = b"a data file or a checkpoint was cut short while it was read, its disk failed,"
    os.write(2, b"error: " + causes + b" or /dev/shm is full\n")
    os._exit(2)


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

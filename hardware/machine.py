"""Processes, devices, memory and signals: asked once, at the start; afterwards only fields are read."""

import ctypes
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from configurator import OneRankError, UserError


@dataclass(frozen=True)
class Machine:
    rank: int  # of this process, 0 ... world - 1
    local_rank: int  # on this computer
    world: int  # processes
    device: torch.device
    dtype: torch.dtype  # of autocast
    why: str  # that dtype
    group: Any = None  # of all ranks, for what they say to each other before and after the loop

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def say(self, text: str) -> None:
        """A line on the terminal, from one of all processes, above the progress bar if there is one."""
        if self.is_main:
            tqdm.write(text)
            sys.stdout.flush()

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank. It waits for the slowest, be it for hours."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, self.group)
        return found

    def together(self, work: Callable[[], Any]) -> Any:
        """work() on every rank. Where it fails on one, all of them raise its UserError, and none waits for it."""
        result, wrong = None, ""
        try:
            result = work()
        except UserError as e:
            wrong = str(e)
        except OSError as e:
            wrong = f"{e.filename or 'writing'}: {e.strerror}"
        found = self.gather(wrong)
        if any(found):
            rank = next(rank for rank, text in enumerate(found) if text)
            raise UserError(found[rank] if all(found) else f"rank {rank}: {found[rank]}")
        return result

    def decide(self, work: Callable[[], Any]) -> Any:
        """work() on rank 0 alone; its result, or its UserError, on every rank."""
        return self.gather(self.together(lambda: work() if self.is_main else None))[0]

    def check_alike(self, facts: dict[str, Any]) -> None:
        """UserError, on all ranks, if a fact is another one on one of them."""
        found = self.gather(facts)
        for rank, theirs in enumerate(found):
            for what, value in theirs.items():
                if value != found[0].get(what):
                    both = f"{what} is {value} on rank {rank}, {found[0].get(what)} on rank 0"
                    alike = "all must see the same files and get the same settings"
                    raise UserError(f"the ranks differ: {both}: {alike}")

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def synchronize(self) -> None:
        """Wait for the work that is queued on the device: a clock is read only after this."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def fetch(self, x: torch.Tensor) -> Callable[[], list[float]]:
        """Start to copy x to the host. What is returned waits for the copy alone, not for work queued behind it."""
        if self.device.type != "cuda":
            return x.tolist
        copy = x.to("cpu", non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def read() -> list[float]:
            copied.synchronize()
            return copy.tolist()

        return read


def start(asked_device: str, asked_dtype: str) -> Machine:
    """What the settings `device` and `dtype` mean here, as one of all processes that torchrun has started."""
    rank = int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    device = pick_device(asked_device, local_rank)
    if device.type == "cpu":
        keep_freed_memory()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in fp32
        if world == 1 and (n := torch.cuda.device_count()) > 1:
            all_of_them = f"torchrun --nproc_per_node={n} train.py {' '.join(sys.argv[1:])}"
            print(f"note: 1 of {n} GPUs is used; for all: {all_of_them}")
    group = None
    if "RANK" in os.environ:
        # torchrun hands restarted workers the store of the attempt before, in which stale addresses stand (torch 2.13)
        store, *_ = next(dist.rendezvous("env://"))
        if os.environ.get("GROUP_WORLD_SIZE") == "1":  # of several computers, each counts its own restarts
            store = dist.PrefixStore(f"attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        backend, on = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        # In the loop, the longest that one rank waits for another is for a checkpoint on its way to a slow disk.
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world, device_id=on, timeout=timedelta(minutes=30)
        )
        # Around it, one may have to read all data, or to compile, while the others wait.
        group = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    dtype, why = pick_dtype(asked_dtype, device)
    return Machine(rank, local_rank, world, device, dtype, why, group)


def keep_freed_memory() -> None:
    """Have glibc keep large freed tensors, where each step would pay for fresh pages from the kernel (bench/LOG.md)."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library: macOS, musl
        return
    M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
    mallopt(M_MMAP_MAX, 0)  # no block gets pages of its own, to be unmapped when it is freed
    mallopt(M_TRIM_THRESHOLD, -1)  # and the heap never shrinks


def pick_device(asked: str, local_rank: int = 0) -> torch.device:
    """auto: cuda, then mps, then cpu. UserError if it cannot be used."""
    kind = asked
    if asked == "auto":
        kind = (torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")).type
    try:
        device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
        torch.zeros(1, device=device).item()  # which a device without numbers, meta, has not
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        raise OneRankError(f"--device={asked}: not usable here ({str(e).splitlines()[0]})") from None
    return device


def pick_dtype(asked: str, device: torch.device) -> tuple[torch.dtype, str]:
    """The autocast dtype, and why. auto: bf16 only where the hardware multiplies it natively, not where it is emulated."""
    if asked != "auto":
        if asked == "float16" and device.type != "cuda":
            raise UserError(f"dtype=float16 needs a CUDA device; on {device.type} use bfloat16 or float32")
        return getattr(torch, asked), "as asked"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major >= 8 or torch.version.hip:
            return torch.bfloat16, f"compute capability {major}.{minor} multiplies it natively"
        return torch.float16, f"compute capability {major}.{minor} has no native bfloat16"
    if device.type == "cpu":
        has = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
        if native := [k for k in ("amx_bf16", "avx512_bf16", "bf16") if has.get(k)]:
            return torch.bfloat16, f"this CPU has {native[0]}"
        return torch.float32, "this CPU has no native bfloat16"
    return torch.float32, f"the safe choice on {device.type}"


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """SIGTERM, Ctrl-C, SIGUSR1 (Slurm's warning) and SIGHUP (a closed terminal) let the step end; then the run is saved
    and ends with 128 + number. A second Ctrl-C ends it at once. Under nohup SIGHUP is ignored, as it was asked for.
    Yields the list that their numbers are put into.
    """
    caught: list[int] = []

    def catch(number: int, frame) -> None:
        if caught and number == signal.SIGINT:
            os._exit(128 + number)
        caught.append(number)

    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, catch) for number in numbers}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def memory_advice(advice: str):
    """Out of memory, in one line that says what would fit."""
    try:
        yield
    except (RuntimeError, MemoryError) as e:
        if not out_of_memory(e):
            raise
        raise OneRankError(f"out of memory {advice}") from None


def all_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum of x over all ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def least(number: int, machine: Machine) -> int:
    """The smallest of the ranks' numbers."""
    x = torch.tensor(number, device=machine.device)
    if dist.is_initialized():
        dist.all_reduce(x, dist.ReduceOp.MIN)
    return int(x)


def to_device(rows: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, both (B, T), of windows (B, T + 1)."""
    both = torch.from_numpy(rows)
    both = both.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else both.to(device)
    return both[:, :-1], both[:, 1:]


# Bytes of CUDA's context with its libraries, by a published account of a 6B model; not measured by us.
CONTEXT = 1.3e9


def ram() -> float:
    """Bytes of memory that this computer has to give; in a container, what that may have."""
    everything = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    info, limit = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
    found = re.search(r"MemAvailable:\s+(\d+) kB", info.read_text()) if info.exists() else None
    allowed = limit.read_text().strip() if limit.exists() else "max"
    return min(int(found[1]) * 1024 if found else everything, everything if allowed == "max" else int(allowed))


def capacity(device: torch.device) -> float:
    """Bytes that this process can have, CUDA's context among them."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return min(total, free + torch.cuda.memory_reserved(device) + CONTEXT)
    return ram() / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def out_of_memory(e: BaseException) -> bool:
    """CUDA's allocator and Python's have types for it; the CPU's, cuBLAS's and what a compiler wraps only have words."""
    words = (
        "can't allocate memory",
        "out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "Storage size calculation overflowed",
    )
    return isinstance(e, torch.OutOfMemoryError | MemoryError) or any(w in str(e) for w in words)

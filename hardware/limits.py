"""What a device and a computer let this process use: memory and CPUs."""

import ctypes
import math
import os
import re
import resource
from contextlib import contextmanager

import torch

from configurator import UserError
from hardware.containers import available_memory, cpu_quota, read_or_empty

# Bytes that CUDA's context takes with its libraries. This is a published figure for a 6B model; it
# was not measured for this project.
CONTEXT = 1.3e9
LATER_LIBRARIES = 0.3e9  # bytes of addresses that torch takes after the start


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
        raise UserError(f"out of memory {advice}") from None


def out_of_memory(e: BaseException) -> bool:
    """Return whether the error means that memory ran out.

    The allocators of CUDA and of Python have error types for this. The errors of the CPU's
    allocator, of cuBLAS, and those that a compiler has wrapped are recognised by their words.
    """
    words = "can't allocate memory|out of memory|ALLOC_FAILED|Storage size calculation overflowed"
    types = torch.OutOfMemoryError | MemoryError
    return isinstance(e, types) or re.search(words, str(e)) is not None


# --------------------------------------------------------------------------------------------------
# The memory that a device and a computer still give to this process


def own_memory() -> float:
    """Return the bytes of memory that this process has; 0 if the system does not report them."""
    rss = re.search(r"RssAnon:\s+(\d+) kB", read_or_empty("/proc/self/status"))
    return 1024 * int(rss[1]) if rss else 0


def memory_capacity(device: torch.device) -> float:
    """Return the bytes that this process can use on the device, including CUDA's context."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return min(total, free + torch.cuda.memory_reserved(device) + CONTEXT)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # of this run, on this computer
    return min(available_memory() / processes, address_space()) + own_memory()


def address_space() -> float:
    """Return the bytes of addresses that this process may still take: `ulimit -v`, on login nodes.

    A part is left for the libraries that torch loads later.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    size = re.search(r"VmSize:\s+(\d+) kB", read_or_empty("/proc/self/status"))
    is_limited = size and limit != resource.RLIM_INFINITY
    return max(0, limit - 1024 * int(size[1]) - LATER_LIBRARIES) if is_limited else math.inf


# --------------------------------------------------------------------------------------------------
# CPUs, and the heap


def obey_cpu_quota() -> None:
    """Let torch use no more threads than the CPU quota of the containers around this process.

    The kernel would stop all of more threads for a part of each tenth of a second. A value of
    OMP_NUM_THREADS, which torchrun sets for several processes, takes precedence.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, min(torch.get_num_threads(), int(cpu_quota()))))


def tune_malloc(trim_heap: bool) -> None:
    """Make glibc keep the memory of freed tensors for the next step; trim_heap: return it instead.

    If glibc returns them to the kernel, every step pays for new pages (bench/LOG.md). But where
    weights are gathered and freed in turn, the heap fragments: with the setting `shard` a process
    kept three times the size of its tensors.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library, as on macOS or with musl
        return
    if trim_heap:
        mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: larger blocks get pages of their own
    else:
        # M_MMAP_MAX: no block has pages of its own, which would be unmapped when it is freed.
        mallopt(-4, 0)
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks

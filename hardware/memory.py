"""How much memory a device, a computer and its containers still give to this process."""

import os
import re
from pathlib import Path

import torch

# Bytes that CUDA's context takes with its libraries. This is a published figure for a 6B model; it
# was not measured for this project.
CONTEXT = 1.3e9


def available(root: str = "/") -> float:
    """Return the bytes of memory that the system and its containers still give.

    Where the system does not tell (macOS), this is all its memory. root: of the files that tell.
    """
    bounds: list[float] = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    if free := re.search(r"MemAvailable:\s+(\d+) kB", read_if_there(f"{root}/proc/meminfo")):
        bounds.append(1024 * int(free[1]))
    # The limits of all control groups (v2) around this process hold. A container sees only its own,
    # at the top.
    group = re.search("^0::/(.*)", read_if_there(f"{root}/proc/self/cgroup"), re.MULTILINE)
    folder = Path(root, "sys/fs/cgroup", group[1] if group else "")
    for around in (folder, *folder.parents):
        limit = read_if_there(around / "memory.max").strip()
        if limit.isdigit():  # else it is "max"
            # The other memory of a group holds files, and is taken back where it is needed.
            stat = read_if_there(around / "memory.stat")
            used = re.findall(r"^(?:anon|shmem|kernel) (\d+)$", stat, re.MULTILINE)
            bounds.append(int(limit) - sum(map(int, used)))
    return min(bounds)


def own_memory() -> float:
    """Return the bytes of memory that this process has; 0 where the system does not tell."""
    rss = re.search(r"RssAnon:\s+(\d+) kB", read_if_there("/proc/self/status"))
    return 1024 * int(rss[1]) if rss else 0


def read_if_there(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def capacity(device: torch.device) -> float:
    """Return the bytes that this process can have on the device, including CUDA's context."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return min(total, free + torch.cuda.memory_reserved(device) + CONTEXT)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # of this run, on this computer
    return available() / processes + own_memory()

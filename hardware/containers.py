"""The memory and the CPUs that the containers around this process let it use. Needs no torch."""

import os
import re
from collections.abc import Iterator
from pathlib import Path


def available_memory(root: str = "/") -> float:
    """Return the bytes of memory that the system and the containers around this process still give.

    macOS does not report this: there it is all memory. root: folder of the system's files.
    """
    bounds: list[float] = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    if free := re.search(r"MemAvailable:\s+(\d+) kB", read_or_empty(f"{root}/proc/meminfo")):
        bounds.append(1024 * int(free[1]))
    for group in control_groups(root, "memory"):
        limit = read_or_empty(group / "memory.max") or read_or_empty(
            group / "memory.limit_in_bytes"
        )
        if limit.strip().isdigit():  # else it is "max"
            # The rest of a group's memory is file cache, which the kernel reclaims. In version 1,
            # total_... counts the groups below, too.
            stat = read_or_empty(group / "memory.stat")
            kinds = "total_rss|total_shmem" if "total_rss" in stat else "anon|shmem|kernel"
            used = re.findall(rf"^(?:{kinds}) (\d+)$", stat, re.MULTILINE)
            bounds.append(int(limit) - sum(map(int, used)))
    return min(bounds)


def cpu_quota(root: str = "/") -> float:
    """Return the number of CPUs that the containers around this process let it use.

    root: folder of the system's files.
    """
    bounds = [float(os.cpu_count() or 1)]
    for group in control_groups(root, "cpu"):
        v1 = [read_or_empty(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        numbers = (read_or_empty(group / "cpu.max") or " ".join(v1)).split()
        if len(numbers) == 2 and all(map(str.isdigit, numbers)):  # else it is "max", or -1
            bounds.append(int(numbers[0]) / int(numbers[1]))
    return min(bounds)


def control_groups(root: str, controller: str) -> Iterator[Path]:
    """Yield the folders of the control groups around this process. The limits of all of them apply.

    A container sees only its own group, at the top. In version 2, all controllers share one tree;
    in version 1, each has its own. A controller is in one of the two versions only.
    """
    listed = read_or_empty(f"{root}/proc/self/cgroup")
    versions = {rf"^\d+:(?:.*,)?{controller}(?:,.*)?:/(.*)": f"{controller}", r"^0::/(.*)": ""}
    for pattern, tree in versions.items():
        group = re.search(pattern, listed, re.MULTILINE)
        folder = Path(root, "sys/fs/cgroup", tree, group[1] if group else "")
        yield from (folder, *folder.parents)


def read_or_empty(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""

"""The start of a process: its device and dtype, the other ranks, and the memory it can have."""

import ctypes
import os
import re
import signal
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from configurator import OneRankError, UserError
from hardware.machine import Machine

# The longest that a rank waits for the others in the training loop, where one of them may write a
# checkpoint to a slow disk.
LONGEST_WAIT = timedelta(minutes=30)
# Bytes that CUDA's context takes with its libraries. This is a published figure for a 6B model; it
# was not measured for this project.
CONTEXT = 1.3e9


def start(asked_device: str, asked_dtype: str, sparing: bool = False) -> Machine:
    """Return the Machine of this process for the settings `device` and `dtype`.

    If torchrun has started this process, it joins the other ranks. sparing: on a CPU, give freed
    memory back.
    Raises UserError if the device or dtype cannot be used.
    """
    rank = int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    # A cluster's script may set WORLD_SIZE where torchrun did not start this process.
    world = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1
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
    backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    connect(backend, LONGEST_WAIT, device_id)
    # Before and after the loop, one rank may read all data, or compile, while the others wait.
    return dist.new_group(backend="gloo", timeout=timedelta(days=7))


def connect(backend: str, timeout: timedelta, device_id: torch.device | None = None) -> None:
    """Connect this process with the others that torchrun has started."""
    store, rank, world = next(dist.rendezvous("env://"))
    # torchrun gives restarted workers the store of the attempt before, which holds addresses that
    # are no longer valid (torch 2.13). So each attempt gets a prefix of its own. This does not work
    # with several computers, because each of them counts its own restarts.
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        store = dist.PrefixStore(f"attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    ranks = dict(store=store, rank=rank, world_size=world, device_id=device_id)
    dist.init_process_group(backend, timeout=timeout, **ranks)


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
        capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.9 has none
        native = [k for k in ("amx_bf16", "avx512_bf16", "bf16") if capabilities.get(k)]
        if native:
            return torch.bfloat16, f"this CPU has {native[0]}"
        return torch.float32, "torch knows of no native bfloat16 in this CPU"
    return torch.float32, f"the safe choice on {device.type}"


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
# How much memory a device, a computer and its containers still give to this process


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

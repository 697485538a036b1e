"""A process of a run: its device and dtype, the other ranks, the time, and the signals to stop.

start() makes the Machine of a process. A UserError on any rank ends the run with one line, which
run() of configurator.py prints: no rank needs to ask the others whether they failed.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from configurator import UserError, harmless
from hardware.limits import obey_cpu_quota, tune_malloc
from hardware.terminal import ProgressBar

# The longest that a rank waits for the others in the training loop, where one of them may write a
# checkpoint to a slow disk.
LONGEST_WAIT = timedelta(minutes=30)


class Stopped(Exception):
    """A signal has asked the run to stop. All ranks raise this at the same point."""


@dataclass(frozen=True)
class Machine:
    """The device and dtype of this process, and its messages to the other ranks of the run."""

    rank: int  # the number of this process, 0 ... world - 1
    local_rank: int  # its number among the processes on this computer
    world: int  # how many processes there are
    device: torch.device
    dtype: torch.dtype  # of autocast
    why: str  # the reason for dtype
    group: Any = None  # all ranks, for messages before and after the training loop
    signals: list[int] = field(default_factory=list)  # that ask this process to stop

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def print0(self, text: str) -> None:
        """Print a line, on rank 0 only. A progress bar stays below it."""
        if self.is_main:
            ProgressBar.write(harmless(text))
            sys.stdout.flush()

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank. The values of other ranks are ignored."""
        return self.gather(value if self.is_main else None)[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, on every rank. This waits for the slowest, even hours."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(values, value, self.group)
        except RuntimeError:  # gloo's, when the connection closes
            raise UserError("another rank of this run has ended") from None
        return values

    def require_same(self, facts: dict[str, str]) -> None:
        """Raise UserError, on all ranks, unless these are the same on all of them."""
        everywhere = self.gather(facts)
        for rank, there in enumerate(everywhere):
            for name, fact in everywhere[0].items():
                if there.get(name) != fact:
                    raise UserError(f"rank {rank}: {name} is {there.get(name)}, on rank 0 {fact}")

    def stop_if_asked(self) -> None:
        """Raise Stopped, on all ranks, if a signal has arrived at any. All ranks must call this.

        The hosts communicate: nothing waits for a device.
        """
        count = torch.tensor(len(self.signals))
        if self.group:
            dist.all_reduce(count, group=self.group, async_op=True).wait(LONGEST_WAIT)
        if count.item():
            raise Stopped

    def synchronize(self) -> None:
        """Wait for all work that is queued on the device, for example before a time is taken."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


def autocast(machine: Machine) -> torch.autocast:
    """Return the context in which matrix products run in the machine's dtype.

    autocast's cache is off: a forward pass casts each weight once, and the cache would hold all
    casts until its end.
    """
    enabled = machine.dtype != torch.float32
    return torch.autocast(machine.device.type, machine.dtype, enabled, cache_enabled=False)


def all_sum(x: torch.Tensor) -> torch.Tensor:
    """Replace x by its sum over all ranks, in place, and return it."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


class HostCopy:
    """Numbers on their way from the device to the host, like a Future.

    wait() waits for this copy, but not for work that is queued after it. on_device: the original.
    """

    def __init__(self, numbers: torch.Tensor):
        self.on_device = numbers
        self.numbers = numbers.to("cpu", non_blocking=numbers.is_cuda)
        self.copied = torch.cuda.Event() if numbers.is_cuda else None
        if self.copied:
            self.copied.record()

    def wait(self) -> list[float]:
        if self.copied:
            self.copied.synchronize()
        return self.numbers.tolist()


# --------------------------------------------------------------------------------------------------
# The start of a process


def start(asked_device: str, asked_dtype: str, trim_heap: bool = False) -> Machine:
    """Return the Machine of this process for the settings `device` and `dtype`.

    If torchrun has started this process, it joins the other ranks. trim_heap: see tune_malloc().
    Raises UserError if the device or dtype cannot be used.
    """
    rank = int(os.environ.get("RANK", 0))
    # A cluster's script may set WORLD_SIZE where torchrun did not start this process.
    world = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1
    local_rank, gpu = local_rank_and_gpu(asked_device, world)
    device = pick_device(asked_device, gpu)
    if device.type == "cpu":
        tune_malloc(trim_heap)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in fp32
    group = None
    if "RANK" in os.environ:
        connect("nccl" if device.type == "cuda" else "gloo", device)
        # Before and after the loop, one rank may read all data, or compile, while the others wait.
        group = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    dtype, reason = pick_dtype(asked_dtype, device)
    return Machine(rank, local_rank, world, device, dtype, reason, group)


def local_rank_and_gpu(asked_device: str, world: int) -> tuple[int, int]:
    """Return the local rank of this process, and the index of its GPU among the visible ones.

    torchrun sets LOCAL_RANK. srun sets SLURM_LOCALID, and may show each process one GPU only.
    Raises UserError if neither is set, and all processes would use the first of several GPUs.
    """
    local_rank = os.environ.get("LOCAL_RANK")
    if local_rank or world == 1:
        return int(local_rank or 0), int(local_rank or 0)
    gpus = torch.cuda.device_count()
    local_rank = os.environ.get("SLURM_LOCALID")
    if local_rank is None and gpus > 1 and asked_device != "cpu":
        advice = "start the run with torchrun or srun, or set it to the rank on this computer"
        raise UserError(
            f"LOCAL_RANK is not set, so all ranks would use the first of {gpus} GPUs: {advice}"
        )
    return int(local_rank or 0), int(local_rank or 0) if gpus > 1 else 0


def connect(backend: str, device: torch.device) -> None:
    """Connect this process with the others that torchrun has started."""
    store, rank, world = next(dist.rendezvous("env://"))
    # torchrun gives restarted workers the store of the previous attempt, which holds addresses that
    # are no longer valid (torch 2.13). So each attempt gets a prefix of its own. This does not work
    # with several computers, because each of them counts its own restarts.
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        store = dist.PrefixStore(f"attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group(
        backend,
        timeout=LONGEST_WAIT,
        store=store,
        rank=rank,
        world_size=world,
        device_id=device if device.type == "cuda" else None,
    )


def pick_device(setting: str, local_rank: int = 0) -> torch.device:
    """Return the device of the setting `device`. auto: cuda if there is one, then mps, then cpu.

    This also limits torch's threads to the CPU quota. Raises UserError if the device cannot be
    used.
    """
    obey_cpu_quota()
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
            reason += f": torch was built for {built_for}; older GPUs need its CUDA 12.6 build"
        raise UserError(f"--device={setting}: not usable here ({reason})") from None
    return device


def pick_dtype(setting: str, device: torch.device) -> tuple[torch.dtype, str]:
    """Return the dtype of autocast for the setting `dtype`, and the reason.

    auto: bf16 only where the hardware multiplies it natively, not where it is emulated.
    Raises UserError for float16 on a device other than CUDA.
    """
    if setting != "auto":
        if setting == "float16" and device.type != "cuda":
            raise UserError(f"dtype=float16 needs CUDA: on {device.type} use bfloat16 or float32")
        return getattr(torch, setting), "as set"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        capability = f"compute capability {major}.{minor}"
        if major >= 8 or torch.version.hip:
            return torch.bfloat16, f"{capability} has native bfloat16"
        return torch.float16, f"{capability} has no native bfloat16"
    if device.type == "cpu":
        capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.9 has none
        native = [k for k in ("amx_bf16", "avx512_bf16", "bf16") if capabilities.get(k)]
        if native:
            return torch.bfloat16, f"this CPU has {native[0]}"
        return torch.float32, "torch reports no native bfloat16 in this CPU"
    return torch.float32, f"the safe choice on {device.type}"


# --------------------------------------------------------------------------------------------------
# Time


class Clock:
    """Measures the seconds since the last log line, and how many of them were spent on data.

    Time spent inside `paused()`, for evaluation and saving, does not count.
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
        """Return the seconds since restart(), without the pauses. Waits for the device."""
        self.machine.synchronize()
        return time.perf_counter() - self.start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock during the block. Waits for the device at both ends."""
        elapsed = self.seconds()
        yield
        self.start += self.seconds() - elapsed


# --------------------------------------------------------------------------------------------------
# Signals


@contextmanager
def stop_signals(caught: list[int]) -> Iterator[None]:
    """Catch the signals that ask the run to stop, and add their numbers to a list.

    They are SIGTERM, SIGINT (Ctrl-C), SIGUSR1 (Slurm's warning) and SIGHUP (the terminal was
    closed). The caller finishes the step, saves the run, and exits with 128 + number. A second
    Ctrl-C exits at once. If SIGHUP is already ignored, as under nohup, it stays ignored.
    """

    def catch(number: int, frame) -> None:
        if caught and number == signal.SIGINT:
            os._exit(128 + number)
        caught.append(number)
        if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":  # a step may take long
            text = "\nthe run will be saved and end"
            if "RANK" not in os.environ:  # torchrun forwards the first one only
                text += "; press Ctrl-C again to end it at once, unsaved"
            with suppress(OSError, RuntimeError):  # RuntimeError: the signal came within a print()
                print(text, file=sys.stderr, flush=True)

    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    handlers = {number: signal.signal(number, catch) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)

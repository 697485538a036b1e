"""The peak speed that MFU is relative to: from a GPU's datasheet, or measured on a CPU."""

import platform
import re
from pathlib import Path

import torch

from hardware.gpus import datasheet_tflops, find_gpu

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or the name of the CPU and its number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        model = re.search(r"model name\s*: (.+)", cpuinfo.read_text())
        name = model[1] if model else platform.machine()
    else:
        name = platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def measure_tflops(
    n: int, dtype: str, device: torch.device, seconds: float = 1.0, fastest: bool = False
) -> float:
    """Return the TFLOPS of C = A @ B, all n x n, repeated for about `seconds`.

    It is the median of the repetitions, or the speed of the fastest.
    """
    from torch.utils.benchmark import Timer  # takes 0.15 s to import

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        a, b = (torch.randn(n, n, device=device).to(DTYPES[dtype]) for _ in range(2))
        names = {"torch": torch, "a": a, "b": b, "c": torch.empty_like(a)}
        threads = torch.get_num_threads()
        timer = Timer("torch.mm(a, b, out=c)", globals=names, num_threads=threads)
        measured = timer.blocked_autorange(min_run_time=seconds)
        return 2 * n**3 / (min(measured.times) if fastest else measured.median) / 1e12
    finally:
        torch.set_float32_matmul_precision(before)


def read_gb_s(device: torch.device, seconds: float = 0.5) -> float:
    """Return the median GB/s at which a plain sum reads memory.

    It limits the speed of sampling, which reads all weights for each token.
    """
    from torch.utils.benchmark import Timer

    size = 2**32 if device.type == "cuda" else 2**29  # bytes
    numbers = torch.ones(size // 8, dtype=torch.int64, device=device)
    threads = torch.get_num_threads()
    timer = Timer("numbers.sum()", globals={"numbers": numbers}, num_threads=threads)
    return size / timer.blocked_autorange(min_run_time=seconds).median / 1e9


def peak_tflops(
    device: torch.device, dtype: torch.dtype, given: float = 0.0
) -> tuple[float | None, str]:
    """Return the peak TFLOPS that MFU is relative to, and a line that says where it comes from.

    The peak is `given`, unless that is 0. Otherwise it is measured on a CPU, and taken from the
    datasheet on a GPU; it is None for a GPU that the table does not have.
    """
    if given:
        return given_peak(given)
    if device.type == "cpu":
        kind = {t: k for k, t in DTYPES.items() if k != "tf32"}[dtype]
        # The fastest of some repetitions: other programs may have slowed down the others.
        peak = measure_tflops(2048, kind, device, seconds=0.5, fastest=True)
        product = f"a 2048 x 2048 {kind} product measured here and now"
        return peak, f"{peak:.2f} TFLOPS, {product} ({device_name(device)})"
    return datasheet_peak(device_name(device), dtype)


def given_peak(tflops: float) -> tuple[float, str]:
    return tflops, f"{tflops:g} TFLOPS a device, as given by peak_tflops"


def datasheet_peak(name: str, dtype: torch.dtype) -> tuple[float | None, str]:
    """Return the dense peak TFLOPS of GPU `name` in this dtype, and a line that names the source.

    For fp32 it is the peak of TF32, if the GPU has that. The peak is None if the table has none.
    """
    kind = {t: k for k, t in DTYPES.items() if k != "fp32"}[dtype]
    if kind == "tf32" and datasheet_tflops(name, kind) is None:
        kind = "fp32"
    peak = datasheet_tflops(name, kind)
    if peak is None:
        return None, f"unknown for {name} in {kind}, so MFU is n/a; give --peak_tflops"
    return peak, f"{peak:g} dense {kind} TFLOPS a device, {find_gpu(name).source}"

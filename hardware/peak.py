"""The peak that MFU is a share of: a GPU's datasheet, or what this machine's matrix units really do."""

import platform
import re
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

from hardware.gpus import datasheet_tflops

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if Path("/proc/cpuinfo").exists():
        found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
        return f"{found[1] if found else platform.machine()}, {torch.get_num_threads()} threads"
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def measure_tflops(n: int, dtype: str, device: torch.device, seconds: float = 1.0) -> float:
    """The median TFLOPS of C = A @ B, all n x n, over about `seconds` of repetitions."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        a, b = (torch.randn(n, n, device=device).to(DTYPES[dtype]) for _ in range(2))
        timer = Timer("torch.mm(a, b, out=c)", globals={"torch": torch, "a": a, "b": b, "c": torch.empty_like(a)},
                      num_threads=torch.get_num_threads())  # fmt: skip
        return 2 * n**3 / timer.blocked_autorange(min_run_time=seconds).median / 1e12
    finally:
        torch.set_float32_matmul_precision(before)


def read_gb_s(device: torch.device, seconds: float = 0.5) -> float:
    """The median GB/s at which a plain sum reads memory: the roof of sampling, which reads all weights for each token."""
    size = 2**32 if device.type == "cuda" else 2**29
    timer = Timer("numbers.sum()", globals={"numbers": torch.ones(size // 8, dtype=torch.int64, device=device)},
                  num_threads=torch.get_num_threads())  # fmt: skip
    return size / timer.blocked_autorange(min_run_time=seconds).median / 1e9


def peak_tflops(device: torch.device, dtype: torch.dtype, given: float = 0.0) -> tuple[float | None, str]:
    """The peak that MFU is a share of, and where it comes from: as given; on a CPU measured here and now; the datasheet's."""
    if given:
        return given, f"{given:g} TFLOPS a device, as given by peak_tflops"
    if device.type == "cpu":
        kind = {t: k for k, t in DTYPES.items() if k != "tf32"}[dtype]
        peak = measure_tflops(2048, kind, device, seconds=0.5)
        return peak, f"{peak:.2f} TFLOPS, a 2048 x 2048 {kind} product measured here and now ({device_name(device)})"
    return datasheet_peak(device_name(device), dtype)


def datasheet_peak(name: str, dtype: torch.dtype) -> tuple[float | None, str]:
    """The dense peak of the fastest unit that takes this dtype, and where it comes from; fp32 runs as TF32 where there is one."""
    kind = {t: k for k, t in DTYPES.items() if k != "fp32"}[dtype]
    if kind == "tf32" and datasheet_tflops(name, kind) is None:
        kind = "fp32"
    peak = datasheet_tflops(name, kind)
    if peak is None:
        return None, f"unknown for {name} in {kind}, so MFU is n/a; give --peak_tflops"
    return peak, f"{peak:g} dense {kind} TFLOPS a device, datasheet of {name}"

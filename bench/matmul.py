"""The roof: what this machine's matrix units really do, beside what the datasheet says.

    python bench/matmul.py                                  # fp32, tf32, bf16, fp16; n = 1024 ... 16384 as memory allows
    python bench/matmul.py --dtypes bf16 fp64 --sizes 4096 8192 --json roof.json

Each figure is 2 n³ FLOPs over the median time of C = A @ B for n x n matrices (torch.utils.benchmark, warmed up).
"""

import json
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `python bench/matmul.py` finds ours
from bench.gpus import datasheet_tflops  # noqa: E402
from configurator import UserError, parse, run  # noqa: E402

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


@dataclass(frozen=True)
class MatmulConfig:
    # ---- What to measure ----
    sizes: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)  # n of the n x n matrices
    dtypes: tuple[str, ...] = ("fp32", "tf32", "bf16", "fp16")  # fp64 when asked for
    device: str = "auto"  # auto: cuda if there is one, else cpu
    seconds: float = 1.0  # of repetitions for each figure
    longest: float = 20.0  # seconds that one product may take by the size before; larger ones are left out
    # ---- Output ----
    json: str = ""  # also write the figures to this file

    def problems(self) -> list[str]:
        wrong = [f"--dtypes: {d!r} is none of {', '.join(DTYPES)}" for d in self.dtypes if d not in DTYPES]
        wrong += [f"--sizes: {n} must be positive" for n in self.sizes if n < 1]
        return wrong + ["--seconds must be positive"] * (self.seconds <= 0)


def cell(n: int, dtype: str, device: torch.device, cfg: MatmulConfig, slowest: float) -> float | str:
    """TFLOPS of one size and type, or why there is none; slowest: TFLOPS of the size before, if any."""
    if dtype == "tf32" and device.type != "cuda":
        return "n/a"
    if slowest and 2 * n**3 / slowest / 1e12 > cfg.longest:
        return "too slow"
    try:
        return measure_tflops(n, dtype, device, cfg.seconds)
    except torch.OutOfMemoryError:
        return "OOM"
    except RuntimeError as e:  # the CPU's allocator, and types that a device lacks
        return "OOM" if "alloc" in str(e) else "n/a"


def main() -> None:
    cfg = parse(MatmulConfig, doc=__doc__)
    try:
        device = torch.device(cfg.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as e:
        raise UserError(f"--device={cfg.device}: not usable here ({str(e).splitlines()[0]})") from None
    name = device_name(device)
    print(f"{name}, torch {torch.__version__}; TFLOPS of n x n products, median")
    print("       n" + "".join(f"{d:>10}" for d in cfg.dtypes))
    table: dict[str, dict[int, float | str]] = {d: {} for d in cfg.dtypes}
    for n in cfg.sizes:
        print(f"{n:>8}", end="", flush=True)
        for d in cfg.dtypes:
            before = [v for v in table[d].values() if isinstance(v, float)]
            table[d][n] = cell(n, d, device, cfg, before[-1] if before else 0.0)
            print(
                f"{table[d][n]:>10.2f}" if isinstance(table[d][n], float) else f"{table[d][n]:>10}", end="", flush=True
            )
        print()
    peaks = {d: datasheet_tflops(name, d) for d in cfg.dtypes}
    print("    peak" + "".join(f"{peaks[d] or 'unknown':>10}" for d in cfg.dtypes) + "  (datasheet, dense)")
    if cfg.json:
        result = {
            "device": name,
            "torch": torch.__version__,
            "command": " ".join(sys.argv),
            "tflops": table,
            "peak": peaks,
        }
        Path(cfg.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run(main)

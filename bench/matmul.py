"""Measure how fast this machine multiplies matrices, and print the datasheet's peak beside it.

    # fp32, tf32, bf16 and fp16, with n = 1024 ... 16384 as far as memory allows
    python -m bench.matmul
    python -m bench.matmul --dtypes bf16 fp64 --sizes 4096 8192 --json roof.json

Each figure is 2 n³ FLOPs divided by the median time of C = A @ B, where all three are n x n
matrices. torch.utils.benchmark takes the time, after a warm-up.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from configurator import UserError, parse, run
from hardware.gpus import datasheet_tflops
from hardware.peak import DTYPES, device_name, measure_tflops


@dataclass(frozen=True)
class MatmulConfig:
    # ---- What to measure ----
    sizes: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)  # n of the n x n matrices
    dtypes: tuple[str, ...] = ("fp32", "tf32", "bf16", "fp16")  # fp64 is possible too
    device: str = "auto"  # auto: cuda if there is one, else cpu
    seconds: float = 1.0  # how long each product is repeated
    longest: float = 20.0  # leave out a product that is expected to take more seconds than this
    # ---- Output ----
    json: str = ""  # also write the figures to this file

    def problems(self) -> list[str]:
        known = ", ".join(DTYPES)
        wrong = [f"--dtypes: {d!r} is none of {known}" for d in self.dtypes if d not in DTYPES]
        wrong += [f"--sizes: {n} must be positive" for n in self.sizes if n < 1]
        if self.seconds <= 0:
            wrong.append("--seconds must be positive")
        return wrong


def cell(n: int, dtype: str, device: torch.device, cfg: MatmulConfig, before: float) -> float | str:
    """Return the TFLOPS of one size and type, or a word that says why there is no figure.

    before: TFLOPS of the size measured before this one; 0 if there is none. It tells how long this
    product will take.
    """
    if dtype == "tf32" and device.type != "cuda":
        return "n/a"
    if before and 2 * n**3 / before / 1e12 > cfg.longest:
        return "too slow"
    try:
        return measure_tflops(n, dtype, device, cfg.seconds)
    except torch.OutOfMemoryError:
        return "OOM"
    except RuntimeError as e:  # from the CPU's allocator, or for a type that the device lacks
        return "OOM" if "alloc" in str(e) else "n/a"


def measure(device: torch.device, cfg: MatmulConfig) -> dict[str, dict[int, float | str]]:
    """Print a row for each size, and return the figures: dtype -> n -> TFLOPS, or a word."""
    print("       n" + "".join(f"{d:>10}" for d in cfg.dtypes))
    table: dict[str, dict[int, float | str]] = {d: {} for d in cfg.dtypes}
    for n in cfg.sizes:
        print(f"{n:>8}", end="", flush=True)
        for d in cfg.dtypes:
            measured = [v for v in table[d].values() if isinstance(v, float)]
            found = cell(n, d, device, cfg, measured[-1] if measured else 0.0)
            table[d][n] = found
            shown = f"{found:.2f}" if isinstance(found, float) else found
            print(f"{shown:>10}", end="", flush=True)
        print()
    return table


def main() -> None:
    cfg = parse(MatmulConfig, doc=__doc__)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(cfg.device.replace("auto", kind))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as e:
        reason = str(e).splitlines()[0]
        raise UserError(f"--device={cfg.device}: not usable here ({reason})") from None
    name = device_name(device)
    print(f"{name}, torch {torch.__version__}; median TFLOPS of n x n products")
    table = measure(device, cfg)
    peaks = {d: datasheet_tflops(name, d) for d in cfg.dtypes}
    if any(peaks.values()):
        row = "".join(f"{peaks[d] or 'unknown':>10}" for d in cfg.dtypes)
        print(f"    peak{row}  (datasheet, dense)")
    if cfg.json:
        result = {"device": name, "torch": torch.__version__, "command": " ".join(sys.argv)}
        result |= {"tflops": table, "peak": peaks}
        Path(cfg.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run(main)

"""The roof: what this machine's matrix units really do, beside what the datasheet says.

    python bench/matmul.py                                  # fp32, tf32, bf16, fp16; n = 1024 ... 16384 as memory allows
    python bench/matmul.py --dtypes bf16 fp64 --sizes 4096 8192 --json roof.json

Each figure is 2 n³ FLOPs over the median time of C = A @ B for n x n matrices (torch.utils.benchmark, warmed up).
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `python bench/matmul.py` finds ours
from configurator import UserError, parse, run  # noqa: E402
from hardware.gpus import datasheet_tflops  # noqa: E402
from hardware.peak import DTYPES, device_name, measure_tflops  # noqa: E402


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

"""Find the coefficients of Muon's polynomial: SQUARES in training/optimizer.py.

    python bench/polynomial.py                        # the ones that are there
    python bench/polynomial.py --squares=3 --low=0.01

Each line of SQUARES costs a product of matrices. The lines should take every strength s between
`low` and 1 as near to 1 as they can: the largest |s P(s²) - 1| is minimized from random beginnings,
as the mean of a power that grows. Each set that is better than those before it is printed: between
what it takes the strengths to, and its lines.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # so that `python bench/polynomial.py` finds the modules below
from configurator import parse, run  # noqa: E402
from hardware.terminal import ProgressBar  # noqa: E402


@dataclass(frozen=True)
class SearchConfig:
    squares: int = 4  # lines, each of which costs a product of matrices
    low: float = 0.005  # the least strength that is brought near to 1
    tries: int = 40  # random beginnings
    seed: int = 0  # of the random beginnings

    def problems(self) -> list[str]:
        wrong = [f"--{k} must be positive" for k in ("squares", "tries") if getattr(self, k) < 1]
        wrong += ["--low must be between 0 and 1"] * (not 0 < self.low < 1)
        return wrong + ["--seed must be from 0 to 2^63 - 1"] * (not 0 <= self.seed < 2**63)


def strengths_after(lines: Tensor, s: Tensor) -> Tensor:
    """Return what the lines (n, 3) make of each strength in s (m,)."""
    before = P = s * s
    for a, b, c in lines:
        before, P = P, a * P * P + b * before + c
    return s * P


def in_proportion(lines: Tensor) -> Tensor:
    """Return the lines that end with the same P, and have 1 as the largest |P| of all others."""
    x = torch.linspace(0, 1, 10001, dtype=lines.dtype)
    before = P = x
    size_before = size = torch.ones((), dtype=lines.dtype)
    found = []
    for number, (a, b, c) in enumerate(lines, 1):
        line = torch.stack((a * size * size, b * size_before, c))
        new = line[0] * P * P + line[1] * before + line[2]
        largest = new.abs().max() * new[0].sign() if number < len(lines) else torch.ones_like(a)
        found.append(line / largest)
        before, P = P, new / largest
        size_before, size = size, largest
    return torch.stack(found)


def nearer(lines: Tensor, s: Tensor, power: int) -> Tensor:
    """Return lines near the given ones with the least mean of this power of the errors at s."""
    lines = in_proportion(lines).requires_grad_()
    steps = torch.optim.LBFGS([lines], max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        steps.zero_grad()
        errors = (strengths_after(lines, s) - 1).abs()
        largest = errors.max().detach()  # powers of larger numbers would overflow
        loss = (errors / largest).pow(power).mean().pow(1 / power) * largest
        loss.backward()
        return loss

    steps.step(closure)
    return lines.detach()


def main() -> None:
    cfg = parse(SearchConfig, doc=__doc__)
    torch.manual_seed(cfg.seed)
    even = torch.linspace(cfg.low, 1, 500, dtype=torch.float64)
    s = torch.cat((even, torch.logspace(math.log10(cfg.low), 0, 500, dtype=torch.float64)))
    best = math.inf
    for _ in ProgressBar("tries", range(cfg.tries)):
        lines = torch.randn(cfg.squares, 3, dtype=torch.float64)
        for power in (2, 4, 16, 64, 256, 1024):
            lines = nearer(lines, s, power)
        lines = in_proportion(lines)
        error = (strengths_after(lines, s) - 1).abs().max().item()
        if error < best - 1e-4:
            best = error
            rows = "".join(f"    ({a:.4f}, {b:.4f}, {c:.4f}),\n" for a, b, c in lines.tolist())
            ProgressBar.write(f"{1 - error:.3f} to {1 + error:.3f}\n{rows}", end="")


if __name__ == "__main__":
    run(main)

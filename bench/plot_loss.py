"""Draw the loss curves of one or more runs, read from their metrics.jsonl.

python bench/plot_loss.py --runs out/demo                     # writes out/demo/loss.png
python bench/plot_loss.py --runs out/a out/b --png a_b.png    # both runs in one picture
"""

import sys
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # so that `python bench/plot_loss.py` finds the modules below
from configurator import UserError, parse, run  # noqa: E402
from training.plots import plot_loss  # noqa: E402


@dataclass(frozen=True)
class PlotConfig:
    runs: tuple[str, ...] = ()  # folders of runs; each holds a metrics.jsonl
    png: str = ""  # file to write; default: loss.png in the first run's folder

    def problems(self) -> list[str]:
        return [] if self.runs else ["name at least one run: --runs out/demo"]


def main() -> None:
    cfg = parse(PlotConfig, doc=__doc__)
    runs = [Path(r) for r in cfg.runs]
    for folder in runs:
        if not (folder / "metrics.jsonl").exists():
            raise UserError(f"--runs {folder}: no metrics.jsonl there")
    print(plot_loss(runs, cfg.png))


if __name__ == "__main__":
    run(main)

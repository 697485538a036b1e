"""Loss curves of one or more runs, from their metrics.jsonl, as a picture.

python bench/plot_loss.py --runs out/demo                     # -> out/demo/loss.png
python bench/plot_loss.py --runs out/a out/b --png a_b.png    # in one picture
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `python bench/plot_loss.py` finds ours
from configurator import UserError, parse, run  # noqa: E402
from training.plots import plot_loss  # noqa: E402


@dataclass(frozen=True)
class PlotConfig:
    runs: tuple[str, ...] = ()  # run folders, each with a metrics.jsonl
    png: str = ""  # the picture; default: loss.png in the first run's folder

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

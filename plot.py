"""Draw the loss curves of runs: one, or several to compare.

    # the newest run under out/
    python plot.py
    # two runs in one picture
    python plot.py out/a out/b
    python plot.py out/lr_* --x tokens --y bits_per_byte --png lr.png

Each run has one colour. The points are the training loss of single steps, the line through them is
smoothed. Markers are evaluations, a star is the lowest validation loss, whose checkpoint is kept.
The first steps may leave the picture at the top. The learning rate is below. Grey lines are the
losses of the simplest models of the data (docs/results.md, "What a normal loss is").
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configurator import UserError, note, option, parse, run
from training.plots import plot_loss


@dataclass(frozen=True)
class PlotConfig:
    runs: tuple[str, ...] = option((), "folders of runs; default: the newest run")
    out_dir: str = option("out", "where the newest run is looked for")
    x: Literal["steps", "tokens", "time"] = option(
        "steps", "time: of the steps alone, without pauses"
    )
    y: Literal["loss", "bits_per_byte"] = option(
        "loss", "bits_per_byte: comparable across tokenizers"
    )
    png: str = option(
        "", "a .png, .pdf or .svg; default: loss.png there, of several comparison.png"
    )

    def problems(self) -> list[str]:
        if self.png and Path(self.png).suffix not in (".png", ".pdf", ".svg"):
            return [f"png={self.png!r} must end in .png, .pdf or .svg"]
        if not Path(self.png).parent.is_dir():
            return [f"png={self.png!r}: no such folder"]
        return []


def main() -> None:
    cfg = parse(PlotConfig, doc=__doc__, positional="runs")
    folders = find_runs(cfg)
    png = folders[0] / "loss.png" if len(folders) == 1 else folders[0].parent / "comparison.png"
    try:
        print(plot_loss(folders, Path(cfg.png or png), cfg.x, cfg.y))
    except ImportError as e:
        raise UserError(f"{e}: pip install matplotlib") from None


def find_runs(cfg: PlotConfig) -> list[Path]:
    """Return the folders to draw. Raises UserError if there is none.

    A path among others that holds no run is left out, so that out/* names all runs.
    """
    if not cfg.runs:
        logs = list(Path(cfg.out_dir).glob("*/metrics.jsonl"))
        if not logs:
            raise UserError(f"no run under {cfg.out_dir}/: train first, or name a run's folder")
        return [max(logs, key=lambda path: path.stat().st_mtime).parent]
    folders = [Path(name) for name in dict.fromkeys(cfg.runs)]
    runs = [folder for folder in folders if (folder / "metrics.jsonl").exists()]
    if not runs:
        raise UserError(f"{folders[0]}: no metrics.jsonl there: name the folder of a run")
    for folder in folders:
        if folder not in runs and not folder.is_file():  # out/* also names pictures
            note(f"{folder}: no metrics.jsonl there: it is left out")
    return runs


if __name__ == "__main__":
    run(main)

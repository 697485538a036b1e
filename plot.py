"""eveningGPT: draw the losses of runs: one, or several to compare.

    # the newest run under out/
    python plot.py
    # two runs in one picture
    python plot.py out/a out/b
    python plot.py out/lr_* --x tokens --y bits_per_byte --png lr.png

Each run has one colour. The points are the training loss of single steps, and the line through them
is smoothed. Markers in a darker shade are evaluations; crosses at the bottom are skipped steps. The
first steps may be above the plot. The lower panel shows the learning rate. Grey lines are the
n-gram baselines of the data (docs/results.md, "What a normal loss is").
"""

import io
import signal
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while numpy is loaded, until run()

import numpy as np

from configurator import UserError, note, option, parse, run
from hardware.disk import atomic_write
from training.metrics import evaluations, last_start, read_metrics

TITLE = "Losses of training runs, by plot.py"  # in each picture, which is recognised by it
# Okabe and Ito's colours, which people who cannot tell red from green can tell apart.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
# The default font, and others for the characters that it lacks, if they are installed.
FONTS = ["DejaVu Sans", "Noto Sans CJK SC", "WenQuanYi Micro Hei", "PingFang SC"]
FONTS += ["Microsoft YaHei", "SimHei"]
LOSSES = ("loss", "val_loss", "train_eval_loss")
# The n-gram baselines, and what each knows (text/baselines.py).
BASELINES = {"uniform": "equal probabilities", "unigram": "single-token frequencies"}
BASELINES |= {"bigram": "token pairs"}
# x axis -> its label, the key of its records, and the unit
AXES = {"steps": ("step", "", 1), "tokens": ("million tokens", "tokens", 1e6)}
AXES |= {"time": ("hours of training, without pauses", "step_ms", 3.6e6)}
EMPTY = np.empty((2, 0))  # of a curve without points
# Settings that say where a run is, not what it trains.
IGNORED_SETTINGS = {"run_name", "out_dir", "data_dir", "tracker"}
SETTINGS_OF_ONE = ("preset", "n_layer", "n_embd", "optimizer", "lr", "seed", "dataset")


@dataclass(frozen=True)
class PlotConfig:
    runs: tuple[str, ...] = option((), "folders of runs; default: the newest run")
    out_dir: str = option("out", "folder of all runs, for the newest one")
    x: Literal["steps", "tokens", "time"] = option("steps", "time: of the steps, without pauses")
    y: Literal["loss", "bits_per_byte"] = option(
        "loss", "bits_per_byte: comparable across tokenizers"
    )
    png: str = option(
        "", "a .png, .pdf or .svg; default: loss.png in the run, or comparison.png for several runs"
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
    default = folders[0] / "loss.png" if len(folders) == 1 else folders[0].parent / "comparison.png"
    png = Path(cfg.png or default)
    runs = [read_run(folder, cfg.x, cfg.y) for folder in folders]
    if png.exists() and TITLE.encode() not in png.read_bytes():
        raise UserError(f"{png} was not drawn by this program: move it away, or give --png")
    try:
        atomic_write(png, picture(runs, png.suffix[1:], cfg.x, cfg.y))
    except ImportError as e:
        raise UserError(f"{e}: pip install matplotlib") from None
    print(png)


def find_runs(cfg: PlotConfig) -> list[Path]:
    """Return the folders to draw. Raises UserError if there is none.

    Among several paths, those without a run are left out, so that out/* names all runs.
    """
    if not cfg.runs:
        logs = Path(cfg.out_dir).glob("*/metrics.jsonl")
        newest = max(logs, key=lambda path: path.stat().st_mtime, default=None)
        if not newest:
            advice = "train first, or name the folder of a run"
            raise UserError(f"no run under {cfg.out_dir}/: {advice}")
        return [newest.parent]
    folders = [Path(name) for name in dict.fromkeys(cfg.runs)]
    runs = [folder for folder in folders if (folder / "metrics.jsonl").exists()]
    if not runs:
        raise UserError(f"{folders[0]}: no metrics.jsonl there: name the folder of a run")
    for folder in folders:
        if folder not in runs and not folder.is_file():  # out/* also names pictures
            note(f"{folder}: no metrics.jsonl there: left out")
    return runs


@dataclass(frozen=True)
class Run:
    """The data of a run to draw. A resumed run is one run, with one metrics.jsonl."""

    name: str  # the end of its path, such as out/docs, and its lowest validation loss
    settings: dict[str, Any]
    baselines: dict[str, float]  # in the unit of the y axis, as the losses are
    curves: dict[str, np.ndarray]  # key -> x and y of its points: (2, points)


def read_run(folder: Path, x: str, y: str) -> Run:
    """Return the data of the run in a folder. x: a key of AXES. y: loss, or bits_per_byte.

    Time is that of the steps, without evaluations, checkpoints and pauses. Bits per byte need the
    bytes per token, which an evaluation records: those of val.bin hardly differ from those of
    train.bin. Raises UserError if metrics.jsonl is missing or damaged, or has no loss yet.
    """
    path = folder / "metrics.jsonl"
    records = read_metrics(path)
    points: dict[str, list[tuple[int, float]]] = {}  # key -> steps and values
    for record in records:
        for key, value in record.items():
            if isinstance(value, int | float) and abs(value) < 1e30:  # one that can be drawn
                points.setdefault(key, []).append((record["step"], value))
    curves = {key: np.array(pairs, float).T for key, pairs in points.items()}
    if "loss" not in curves and "val_loss" not in curves:
        raise UserError(f"{path}: it has no loss yet: name the folder of a run that has started")

    at, scales = np.zeros(1), np.ones(1)
    if y == "bits_per_byte":
        if not {"val_bits_per_byte", "val_loss"} <= curves.keys():
            raise UserError(f"{folder}: it has no evaluation yet, for bits per byte: use --y loss")
        at, bits = curves["val_bits_per_byte"]
        # A mixture's weights change them.
        scales = bits / np.maximum(np.interp(at, *curves["val_loss"]), 1e-9)
    for key in curves.keys() & {*LOSSES}:
        curves[key][1] *= np.interp(curves[key][0], at, scales)
    start = last_start(records)
    losses = start.get("landmarks", {})
    baselines = {name: losses[name] * scales[-1] for name in BASELINES if name in losses}
    # A path may be long, and may hold bytes that are not UTF-8.
    name = str(Path(*folder.parts[-3:])).encode(errors="backslashreplace").decode()
    if comparable := evaluations(records):
        best = min(comparable, key=comparable.__getitem__)
        loss = comparable[best] * np.interp(best, at, scales)
        name += f": validation {loss:.4f} at step {best:,}"

    if x != "steps":
        _, key, unit = AXES[x]
        if key not in curves:
            raise UserError(f"{path}: no record has {key}: use --x steps")
        at, counted = curves[key]
        if x == "time":
            counted = np.cumsum(np.diff(at, prepend=0) * counted)
        at, counted = np.append(0, at), np.append(0, counted) / unit
        for curve in curves.values():
            curve[0] = np.interp(curve[0], at, counted)
    return Run(name, start.get("settings", {}), baselines, curves)


def smoothed(values: np.ndarray) -> np.ndarray:
    """Return the running mean (n,) of n values, over windows of about 2/3 sqrt(n) values.

    The window is centred. It is narrower near the start, where the loss falls fast, and loses only
    its right half near the end.
    """
    n = len(values)
    positions = np.arange(n)
    left = np.minimum(positions // 4, int(n**0.5 / 3))
    right = np.minimum(left, n - 1 - positions)
    sums = np.append(0, np.cumsum(values))
    return (sums[positions + right + 1] - sums[positions - left]) / (left + right + 1)


def shown_settings(runs: list[Run]) -> list[str]:
    """Return for each run the settings that differ between the runs; for a single one, some."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in IGNORED_SETTINGS)
    shown = [key for key in keys if len({str(run.settings.get(key)) for run in runs}) > 1]
    if len(runs) == 1:
        shown = [key for key in SETTINGS_OF_ONE if key in keys]
    return [" ".join(f"{k}={run.settings.get(k, '?')}" for k in shown) for run in runs]


def limits(runs: list[Run]) -> tuple[float, float]:
    """Return the lowest and highest y to show.

    The first twentieth of each curve may leave the picture, and so may a few of its other points,
    such as spikes.
    """
    curves = [run.curves[key] for run in runs for key in LOSSES if key in run.curves]
    late = [y[x >= 0.05 * x[-1]] for x, y in curves]
    bottom = min(np.quantile(y, 0.01) for y in late)
    top = max(np.quantile(y, 0.98) for y in late)
    margin = 0.06 * (top - bottom) or 0.1
    return bottom - margin, top + margin


# --------------------------------------------------------------------------------------------------
# The picture


def picture(runs: list[Run], kind: str, x: str, y: str) -> bytes:
    """Return the picture of these runs as a file. kind: png, pdf or svg. x, y: see read_run().

    Raises ImportError if there is no matplotlib.
    """
    import matplotlib
    from matplotlib import colormaps, font_manager
    from matplotlib.figure import Figure

    colours = COLOURS
    if len(runs) > len(COLOURS):
        colours = list(colormaps["cividis"](np.linspace(0, 0.9, len(runs))))
    # A character that no font has is drawn as a frame, and that is enough.
    warnings.filterwarnings("ignore", "Glyph .* missing")
    fonts = [font for font in FONTS if font in font_manager.get_font_names()]
    # A $ in the name of a run must not start a formula.
    with matplotlib.rc_context({"font.family": fonts, "text.parse_math": False}):
        fig = Figure(figsize=(9, 6), layout="constrained")  # unlike pyplot, it needs no screen
        losses, rates = fig.subplots(2, sharex=True, height_ratios=[6, 1])
        unit = "loss (nats per token)" if y == "loss" else "bits per byte"
        losses.set(ylim=limits(runs), ylabel=unit)
        for run, colour in zip(runs, colours, strict=False):
            draw_run(losses, rates, run, colour, in_legend=run is runs[0])
        rates.set(ylabel="lr", xlabel=AXES[x][0], xlim=(0, None), ylim=(0, None))
        draw_baselines(losses, runs[0].baselines)
        losses.legend(loc="upper right", fontsize=8)
        name_runs(fig, runs, colours)
        for ax in (losses, rates):
            ax.grid(alpha=0.25)
            ax.spines[["top", "right"]].set_visible(False)
        file = io.BytesIO()
        fig.savefig(file, format=kind, dpi=120, metadata={"Title": TITLE})
    return file.getvalue()


def draw_run(losses: Any, rates: Any, run: Run, colour: Any, in_legend: bool) -> None:
    """Draw a run into the axes of the losses and of the learning rate.

    in_legend: explain the curves in the legend of the axes.
    """
    from matplotlib.colors import to_rgb

    dark = tuple(0.6 * part for part in to_rgb(colour))
    dots = dict(ls="", marker=".", mew=0, ms=4, alpha=0.25)
    cross = dict(ls="", marker="x", transform=losses.get_xaxis_transform())
    x, y = run.curves.get("loss", EMPTY)
    skipped, _ = run.curves.get("bad_steps", EMPTY)
    curves: list[tuple] = [("", x, y, dots), ("training, smoothed", x, smoothed(y), dict(lw=1.5))]
    curves.append(("skipped step (NaN, infinity)", skipped, 0 * skipped + 0.02, cross))
    evaluated = {"val_loss": ("validation", "-o"), "train_eval_loss": ("evaluated on train", "--^")}
    for key, (label, line) in evaluated.items():
        x, y = run.curves.get(key, EMPTY)
        shape = dict(ls=line[:-1], marker=line[-1], ms=4, lw=1, markevery=len(x) // 40 + 1)
        curves.append((label, x, y, shape | {"color": dark}))
    for label, x, y, style in curves:
        if len(x):
            losses.plot(x, y, **{"color": colour, "label": in_legend and label or None} | style)
    rates.plot(*run.curves.get("lr", EMPTY), color=colour, lw=1)


def draw_baselines(losses: Any, baselines: dict[str, float]) -> None:
    """Draw the baselines of the data, where they are within the limits of the axes."""
    bottom, top = losses.get_ylim()
    x_as_fraction = losses.get_yaxis_transform()
    for name, loss in baselines.items():
        if bottom < loss < top:
            losses.axhline(loss, color="#666666", lw=0.8, ls=(0, (6, 3)), zorder=0)
            text = f"{name} ({BASELINES[name]}): {loss:.2f}"
            losses.text(0.4, loss, text, transform=x_as_fraction, va="bottom", fontsize=8)


def name_runs(fig: Any, runs: list[Run], colours: list[Any]) -> None:
    """Write a legend of the runs below: their names, lowest validation losses, and settings."""
    from matplotlib.patches import Patch

    texts = [f"{run.name} {text}" for run, text in zip(runs, shown_settings(runs), strict=True)]
    labels = [textwrap.fill(textwrap.shorten(text, 300), 125) for text in texts]
    patches = [Patch(color=c, label=text) for text, c in zip(labels, colours, strict=False)]
    lines = sum(text.count("\n") + 1 for text in labels)
    fig.set_figheight(6 + 0.2 * max(0, lines - 7))  # a long legend must not hide the curves
    fig.legend(handles=patches, loc="outside lower left", fontsize=8, frameon=False)


if __name__ == "__main__":
    run(main)

"""Draw the loss curves of one or more runs from their metrics.jsonl."""

import io
import math
import textwrap
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configurator import UserError
from hardware.disk import write_whole
from training.metrics import read_metrics

# Okabe and Ito's colours, which people who cannot tell red from green can tell apart.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
GREY = "#666666"
# The losses of the simplest models of the data (text/landmarks.py), and what those models know.
LANDMARKS = {
    "uniform": "equal probabilities",
    "unigram": "single-token frequencies",
    "bigram": "token pairs",
}

# What evaluations write to metrics.jsonl: key -> its name in the legend, and how it is drawn.
EVALUATED = {
    "val_loss": ("validation", dict(ls="-", lw=1.2, marker="o", ms=4)),
    "train_eval_loss": ("evaluated on train", dict(ls="--", lw=1, marker="^", ms=4)),
}
LOSSES = ("loss", *EVALUATED)
TITLE = "Losses of training runs, by plot.py"  # stands in each picture, which is known by it

# x axis -> its label, and the key and unit of what is counted along it
AXES = {"steps": ("step", "", 1), "tokens": ("million tokens", "tokens", 1e6)}
AXES["time"] = ("hours of training, without pauses", "step_ms", 3.6e6)

# Fonts with Chinese characters: the first one that is installed serves where the usual one fails.
CHINESE = ["Noto Sans CJK SC", "WenQuanYi Micro Hei", "PingFang SC", "Microsoft YaHei", "SimHei"]


@dataclass(frozen=True)
class Run:
    """What is drawn of a run. A run that was resumed is one run: its metrics.jsonl goes on."""

    name: str  # the end of its path, as out/demo
    settings: dict[str, Any]
    landmarks: dict[str, float]  # in the unit of the y axis, as the losses are
    curves: dict[str, np.ndarray]  # key -> x and y of its points: (2, points); (2, 0) of none
    best: str  # the lowest validation loss and its step; "" before the first evaluation


def read_run(folder: Path, x: str, y: str) -> Run:
    """Return what is drawn of the run in a folder. x: a key of AXES. y: loss, or bits_per_byte.

    Time is that of the steps alone, without evaluations, checkpoints and pauses. Bits per byte need
    the bytes in a token, which an evaluation tells: those of val.bin hardly differ from those of
    train.bin. Raises UserError if metrics.jsonl is missing or damaged, or has no loss yet.
    """
    path = folder / "metrics.jsonl"
    points: dict[str, list[tuple[int, float]]] = {}  # key -> steps and values
    start: dict[str, Any] = {"settings": {}, "landmarks": {}}
    for record in read_metrics(path):
        if "settings" in record:
            start |= record
        for key, value in record.items():
            if isinstance(value, int | float) and math.isfinite(value):
                points.setdefault(key, []).append((record["step"], value))
    if "loss" not in points and "val_loss" not in points:
        raise UserError(f"{path}: no loss in it yet: name the folder of a run that has begun")
    curves = defaultdict(lambda: np.empty((2, 0)))
    curves |= {key: np.array(pairs, float).T for key, pairs in points.items()}

    scales = [1.0]
    if y == "bits_per_byte":
        if "val_bits_per_byte" not in curves:
            raise UserError(f"{folder}: no evaluation tells the bytes in a token: use --y loss")
        at, bits = curves["val_bits_per_byte"]
        scales = bits / np.interp(at, *curves["val_loss"])  # a mixture's shares change them
        for key in curves.keys() & {*LOSSES}:
            curves[key][1] *= np.interp(curves[key][0], at, scales)
    landmarks = {name: round(loss * scales[-1], 4) for name, loss in start["landmarks"].items()}
    best = ""
    if "val_loss" in curves:
        step, loss = min(curves["val_loss"].T, key=lambda point: point[1])
        best = f": validation {loss:.4f} at step {step:,.0f}"

    if x != "steps":
        _, key, unit = AXES[x]
        at, counted = curves[key]
        if x == "time":
            counted = np.cumsum(np.diff(at, prepend=0) * counted)
        at, counted = np.append(0, at), np.append(0, counted) / unit
        for curve in curves.values():
            curve[0] = np.interp(curve[0], at, counted)
    # A path may be long, and may hold bytes that are not UTF-8.
    name = str(Path(*folder.parts[-3:])).encode(errors="backslashreplace").decode()
    return Run(name, start["settings"], landmarks, curves, best)


def smoothed(values: np.ndarray) -> np.ndarray:
    """Return a running mean of n values, (n,) too: of about 2/3 sqrt(n) of them each.

    The window is centred. It is narrower near the start, where the loss falls fast, and loses only
    its right half near the end.
    """
    n = len(values)
    places = np.arange(n)
    left = np.minimum(places // 4, int(n**0.5 / 3))
    right = np.minimum(left, n - 1 - places)
    sums = np.append(0, np.cumsum(values))
    return (sums[places + right + 1] - sums[places - left]) / (left + right + 1)


def differences(runs: list[Run]) -> list[str]:
    """Return for each run its values of the settings of training that are not the same in all."""
    # Only here: this imports torch, which takes longer than drawing a picture.
    from training.settings import TRAINING

    values = [{k: str(run.settings.get(k, "?")) for k in TRAINING} for run in runs]
    varied = [k for k in TRAINING if len({of_run[k] for of_run in values}) > 1]
    return [" ".join(f"{k}={of_run[k]}" for k in varied) for of_run in values]


# --------------------------------------------------------------------------------------------------
# The picture


def plot_loss(folders: list[Path], png: Path, x: str = "steps", y: str = "loss") -> Path:
    """Draw the runs in these folders into one picture, and return its path.

    png: the file to write: .png, .pdf or .svg. x and y: as in read_run().
    Raises UserError if a run cannot be drawn, and ImportError if there is no matplotlib.
    """
    runs = [read_run(folder, x, y) for folder in folders]
    if png.exists() and TITLE.encode() not in png.read_bytes():
        raise UserError(f"{png} was not drawn by this version: move it away, or give --png")
    import matplotlib
    from matplotlib import colormaps, font_manager
    from matplotlib.figure import Figure

    colours = COLOURS
    if len(runs) > len(COLOURS):
        colours = list(colormaps["cividis"](np.linspace(0, 0.9, len(runs))))
    # Where no font has them, a frame is drawn for each, and that is enough.
    warnings.filterwarnings("ignore", "Glyph .* missing")
    installed = font_manager.get_font_names()
    chinese = [font for font in CHINESE if font in installed][:1]
    # A $ in the name of a run must not begin a formula.
    style = {"font.family": ["DejaVu Sans", *chinese], "text.parse_math": False}
    with matplotlib.rc_context(style):
        fig = Figure(figsize=(9, 6), layout="constrained")  # unlike pyplot, it needs no screen
        losses, rates = fig.subplots(2, sharex=True, height_ratios=[6, 1])
        unit = "loss (nats per token)" if y == "loss" else "bits per byte"
        losses.set(ylim=limits(runs), ylabel=unit)
        draw_landmarks(losses, runs)
        for run, colour in zip(runs, colours, strict=False):
            draw_run(losses, run, colour, in_legend=run is runs[0])
            rates.plot(*run.curves["lr"], color=colour, lw=1)
        rates.set(ylabel="lr", xlabel=AXES[x][0], xlim=(0, None), ylim=(0, None))
        losses.legend(loc="best", fontsize=8)
        for ax in (losses, rates):
            ax.grid(alpha=0.25)
            ax.spines[["top", "right"]].set_visible(False)
        name_runs(fig, losses, runs, colours)
        picture = io.BytesIO()
        fig.savefig(picture, format=png.suffix[1:], dpi=120, metadata={"Title": TITLE})
    write_whole(png, picture.getvalue())
    return png


def draw_run(ax: Any, run: Run, colour: Any, in_legend: bool) -> None:
    """Draw the training loss, smoothed and as it was, and in a darker shade the evaluations.

    A star marks the best of them, and crosses at the bottom the steps that were skipped.
    in_legend: the legend explains the curves by those of this run.
    """
    from matplotlib.colors import to_rgb

    dark = tuple(0.6 * part for part in to_rgb(colour))

    def plot(x: np.ndarray, y: np.ndarray, label: str, **style) -> None:
        if len(x):
            ax.plot(x, y, label=label if in_legend else None, **style)

    x, y = run.curves["loss"]
    ax.plot(x, y, ".", c=colour, mew=0, ms=4, alpha=max(0.1, min(0.4, 80 / (len(x) + 1))))
    plot(x, smoothed(y), "training, smoothed", c=colour, lw=1.5)
    for key, (label, style) in EVALUATED.items():
        x, y = run.curves[key]
        plot(x, y, label, c=dark, markevery=len(x) // 40 + 1, **style)
    x, y = run.curves["val_loss"]
    lowest = np.argsort(y)[:1]
    star = dict(ls="", marker="*", ms=13, mec="white", zorder=5)
    plot(x[lowest], y[lowest], "lowest validation loss", c=dark, **star)
    x, y = run.curves["bad_steps"]
    cross = dict(ls="", marker="x", transform=ax.get_xaxis_transform())
    plot(x, np.full(len(y), 0.02), "skipped step (NaN, infinity)", c=colour, **cross)


def draw_landmarks(ax: Any, runs: list[Run]) -> None:
    """Draw the landmarks of the data that lie in the picture, if all runs share them."""
    bottom, top = ax.get_ylim()
    for name, loss in runs[0].landmarks.items():
        shared = all(run.landmarks == runs[0].landmarks for run in runs)
        if shared and bottom < loss < top - 0.04 * (top - bottom):  # room for the text
            ax.axhline(loss, color=GREY, lw=0.8, ls=(0, (6, 3)), zorder=0)
            text = f"loss of {LANDMARKS[name]}: {loss:.2f}"
            place = ax.get_yaxis_transform()  # x in shares of the axis, y in losses
            ax.text(0.5, loss, text, transform=place, ha="center", va="bottom", c=GREY, fontsize=8)


def limits(runs: list[Run]) -> tuple[float, float]:
    """Return the lowest and highest y to show.

    The first twentieth of each curve may leave the picture, and so may a few of its other points,
    such as spikes.
    """
    curves = [run.curves[key] for run in runs for key in LOSSES]
    late = [y[x >= 0.05 * x[-1]] for x, y in curves if len(x)]
    bottom = min(np.quantile(y, 0.01) for y in late)
    top = max(np.quantile(y, 0.98) for y in late)
    # Show landmarks that lie a little above: a new reader looks for them.
    for loss in runs[0].landmarks.values():
        if top < loss < bottom + 1.3 * (top - bottom):
            top = loss
    margin = 0.06 * (top - bottom) or 0.1
    return bottom - margin, top + margin


def name_runs(fig: Any, ax: Any, runs: list[Run], colours: list[Any]) -> None:
    """Write what a single run is and came to, or a legend of several and in what they differ."""
    from matplotlib.patches import Patch

    if len(runs) == 1:
        s = runs[0].settings
        shown = ("preset", "n_layer", "n_embd", "optimizer", "lr", "seed", "dataset")
        settings = ", ".join(f"{name} {s[name]}" for name in shown if name in s)
        title = f"{runs[0].name}{runs[0].best}\n{settings}"
    else:
        title = f"{len(runs)} runs, their lowest validation losses, and where their settings differ"
        handles = []
        lines = 0
        for run, settings, colour in zip(runs, differences(runs), colours, strict=False):
            text = textwrap.shorten(f"{run.name}{run.best} {settings}", 300)
            label = textwrap.wrap(text, 125)  # as many characters as the picture is wide
            handles.append(Patch(color=colour, label="\n".join(label)))
            lines += len(label)
        fig.set_figheight(6 + 0.2 * max(0, lines - 7))  # a sweep of many must not lose its curves
        fig.legend(handles=handles, loc="outside lower left", fontsize=8, frameon=False)
    ax.set_title(title, loc="left", fontsize=10)

"""Draw the loss curves of one or more runs from their metrics.jsonl."""

import io
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configurator import UserError, note
from hardware.disk import write_whole
from training.metrics import read_metrics
from training.normal import LANDMARKS

# Okabe and Ito's colours, which people who cannot tell red from green can tell apart.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
GREY = "#666666"

# What evaluations write to metrics.jsonl: key -> its name in the legend, and how it is drawn.
EVALUATED = {
    "val_loss": ("validation", dict(ls="-", lw=1.2, marker="o", ms=4)),
    "train_eval_loss": ("evaluated on train", dict(ls="--", lw=1, marker="^", ms=4)),
    "val_loss_average": ("validation, averaged weights", dict(ls=":", lw=1.2, marker="D", ms=3)),
}

# x axis -> its label, and the key and unit of what is counted along it
AXES = {"steps": ("step", "", 1), "tokens": ("million tokens", "tokens", 1e6)}
AXES["time"] = ("hours of training, without pauses", "step_ms", 3.6e6)

# Fonts with Chinese characters: the first one that is installed serves where the usual one fails.
CHINESE = ["Noto Sans CJK SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "PingFang SC"]
CHINESE += ["Microsoft YaHei", "SimHei"]


@dataclass(frozen=True)
class Run:
    """The curves of a run. A run that was resumed is one run: its metrics.jsonl goes on."""

    folder: Path
    points: dict[str, tuple[np.ndarray, np.ndarray]]  # key -> steps and values, (points,) each
    begun: dict[str, Any]  # the last record with settings; {} if there is none
    x: str  # what the x axis shows: steps, tokens, or time in hours
    scale: float  # what a loss is multiplied by to get the unit of the y axis

    @property
    def name(self) -> str:
        """Return the folder's name, shortened. It may hold bytes that are not UTF-8."""
        return shortened(self.folder.resolve().name.encode(errors="backslashreplace").decode())

    def curve(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Return x and y of the points of a key, (points,) each; empty if there are none."""
        steps, values = self.points.get(key, (np.empty(0), np.empty(0)))
        return self.places(steps), values if key == "lr" else values * self.scale

    def places(self, steps: np.ndarray) -> np.ndarray:
        """Return where these steps are on the x axis.

        Time is that of the steps alone, without evaluations, checkpoints and pauses.
        """
        _, key, unit = AXES[self.x]
        if not key:
            return steps
        at, values = self.points.get(key, ([], []))
        if self.x == "time":
            values = np.cumsum(np.diff(at, prepend=0) * values)
        return np.interp(steps, np.append(0, at), np.append(0, values)) / unit

    def best(self) -> str:
        """Return the lowest validation loss and its step; "" before the first evaluation."""
        steps, losses = self.points.get("val_loss", ([], []))
        if not len(losses):
            return ""
        best = np.argmin(losses)
        return f": validation {losses[best] * self.scale:.4f} at step {steps[best]:,.0f}"


def read_run(folder: Path, x: str, y: str) -> Run:
    """Return the curves of the run in a folder. y: loss, or bits_per_byte.

    Bits per byte need the bytes in a token, which an evaluation tells: those of val.bin hardly
    differ from those of train.bin. Raises UserError if metrics.jsonl is missing or damaged, or has
    no loss yet.
    """
    path = folder / "metrics.jsonl"
    values: dict[str, dict[int, float]] = {}  # key -> step -> value
    begun = {}
    for record in read_metrics(path):
        if isinstance(record.get("settings"), dict):
            begun = record
        if "bad_step" in record:
            values.setdefault("bad_step", {})[record["step"]] = 0.0
        for key in ("loss", "lr", "tokens", "step_ms", "val_bits_per_byte", *EVALUATED):
            value = record.get(key)
            if isinstance(value, int | float) and math.isfinite(value):
                values.setdefault(key, {})[record["step"]] = value
    if "loss" not in values and "val_loss" not in values:
        missing = "no loss in it yet" if path.exists() else "no such file"
        raise UserError(f"{path}: {missing}: name the folder of a run that has begun")
    scale = 1.0
    if y == "bits_per_byte":
        both = values.get("val_bits_per_byte", {}).keys() & values.get("val_loss", {}).keys()
        if not both:
            raise UserError(f"{folder}: no evaluation tells the bytes in a token: use --y loss")
        scale = values["val_bits_per_byte"][max(both)] / values["val_loss"][max(both)]
    points = {}
    for key, of_step in values.items():
        steps = sorted(of_step)
        points[key] = np.array(steps, float), np.array([of_step[s] for s in steps], float)
    return Run(folder, points, begun, x, scale)


def smoothed(values: np.ndarray) -> np.ndarray:
    """Return a running mean of n values, (n,) too: of about sqrt(n) neighbours each.

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

    of_runs = [run.begun.get("settings", {}) for run in runs]
    names = [k for k in TRAINING if any(s.get(k) != of_runs[0].get(k) for s in of_runs)]
    values = [" ".join(f"{k}={shortened(str(s.get(k, '?')))}" for k in names) for s in of_runs]
    hashes = ["+".join(run.begun.get("data", {}).values())[:8] for run in runs]
    if "dataset" not in names and len({*hashes}) > 1:
        values = [f"{v} train.bin={h}".strip() for v, h in zip(values, hashes, strict=True)]
    return values


def shortened(text: str) -> str:
    return text if len(text) <= 50 else f"{text[:24]}...{text[-23:]}"


# --------------------------------------------------------------------------------------------------
# The picture


def plot_loss(folders: list[Path], png: Path, x: str = "steps", y: str = "loss") -> Path:
    """Draw the runs in these folders into one picture, and return its path.

    png: the file to write: .png, .pdf or .svg. x: as in Run. y: as in read_run().
    Raises UserError if a run cannot be drawn, and ImportError if there is no matplotlib.
    """
    runs = [read_run(folder, x, y) for folder in folders]
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
    if not chinese and not all(run.name.isascii() for run in runs):
        note(f"no font for Chinese is installed, such as {CHINESE[0]}: names are drawn as frames")
    # A $ in the name of a run must not begin a formula.
    style = {"font.family": ["DejaVu Sans", *chinese], "text.parse_math": False}
    with matplotlib.rc_context(style):
        fig = Figure(figsize=(9, 6), layout="constrained")  # unlike pyplot, it needs no screen
        losses, rates = fig.subplots(2, sharex=True, height_ratios=[6, 1])
        unit = "loss (nats per token)" if y == "loss" else "bits per byte"
        losses.set(ylim=limits(runs), ylabel=unit)
        rates.set(ylabel="lr", xlabel=AXES[x][0])
        draw_landmarks(losses, runs)
        for run, colour in zip(runs, colours, strict=False):
            draw_run(losses, run, colour, named=run is runs[0])
            rates.plot(*run.curve("lr"), color=colour, lw=1)
        rates.set_xlim(left=0)
        rates.set_ylim(bottom=0)
        losses.legend(loc="upper right", fontsize=8)
        for ax in (losses, rates):
            ax.grid(alpha=0.25)
            ax.spines[["top", "right"]].set_visible(False)
        name_runs(fig, losses, runs, colours)
        picture = io.BytesIO()
        fig.savefig(picture, format=png.suffix[1:], dpi=120)
    write_whole(png, picture.getvalue())
    return png


def draw_run(ax: Any, run: Run, colour: Any, named: bool) -> None:
    """Draw the training loss, smoothed and as it was, and in a darker shade the evaluations.

    A star marks the best of them, and crosses at the bottom the steps that were skipped. named: the
    legend explains the curves by those of this run.
    """
    from matplotlib.colors import to_rgb

    dark = tuple(0.6 * part for part in to_rgb(colour))

    def plot(x: np.ndarray, y: np.ndarray, kind: str, **style) -> None:
        if len(x):
            ax.plot(x, y, label=kind if named else None, **style)

    x, y = run.curve("loss")
    ax.plot(x, y, ".", c=colour, mew=0, ms=4, alpha=max(0.1, min(0.4, 80 / (len(x) + 1))))
    plot(x, smoothed(y), "training, smoothed", c=colour, lw=1.5)
    for key, (kind, style) in EVALUATED.items():
        x, y = run.curve(key)
        plot(x, y, kind, c=dark, markevery=len(x) // 40 + 1, **style)
    x, y = run.curve("val_loss")
    best = [np.argmin(y)] if len(y) else []
    star = dict(ls="", marker="*", ms=13, mec="white", zorder=5)
    plot(x[best], y[best], "lowest validation loss", c=dark, **star)
    x, y = run.curve("bad_step")
    cross = dict(ls="", marker="x", transform=ax.get_xaxis_transform())
    plot(x, y + 0.02, "skipped step (NaN, infinity)", c=colour, **cross)


def draw_landmarks(ax: Any, runs: list[Run]) -> None:
    """Draw the landmarks of the data that lie in the picture, if all runs share them."""
    landmarks = [run.begun.get("landmarks") or {} for run in runs]
    bottom, top = ax.get_ylim()
    for name, value in landmarks[0].items():
        value *= runs[0].scale
        inside = bottom < value < top - 0.04 * (top - bottom)  # room for the text
        if inside and all(other == landmarks[0] for other in landmarks):
            ax.axhline(value, color=GREY, lw=0.8, ls=(0, (6, 3)), zorder=0)
            text = f"loss of {LANDMARKS[name][0]}: {value:.2f}"
            place = dict(xy=(0.5, value), xycoords=("axes fraction", "data"), ha="center")
            place |= dict(xytext=(0, 2), textcoords="offset points")
            ax.annotate(text, **place, color=GREY, fontsize=8)


def limits(runs: list[Run]) -> tuple[float, float]:
    """Return the lowest and highest y to show.

    The first twentieth of each curve may leave the picture, and so may a few of its other points,
    such as spikes.
    """
    curves = [run.curve(key) for run in runs for key in ("loss", *EVALUATED)]
    late = [y[x >= 0.05 * x[-1]] for x, y in curves if len(x)]
    bottom = min(np.quantile(y, 0.01) for y in late)
    top = max(np.quantile(y, 0.98) for y in late)
    # Show landmarks that lie a little above: a new reader looks for them.
    for value in (runs[0].begun.get("landmarks") or {}).values():
        value *= runs[0].scale
        if top < value < bottom + 1.3 * (top - bottom):
            top = value
    margin = 0.06 * (top - bottom) or 0.1
    return bottom - margin, top + margin


def name_runs(fig: Any, ax: Any, runs: list[Run], colours: list[Any]) -> None:
    """Write what a single run is and came to, or a legend of several and in what they differ."""
    from matplotlib.patches import Patch

    if len(runs) == 1:
        s = runs[0].begun.get("settings", {})
        shown = ("preset", "n_layer", "n_embd", "optimizer", "lr", "seed", "dataset")
        about = ", ".join(f"{name} {s[name]}" for name in shown if name in s)
        title = f"{runs[0].name}{runs[0].best()}\n{about}"
    else:
        title = f"{len(runs)} runs, their lowest validation losses, and where their settings differ"
        handles = []
        for run, own, colour in zip(runs, differences(runs), colours, strict=False):
            same_name = sum(run.name == other.name for other in runs) > 1
            name = str(run.folder) if same_name else run.name
            handles.append(Patch(color=colour, label=f"{name}{run.best()} {own}"[:200]))
        fig.legend(handles=handles, loc="outside lower left", fontsize=8, frameon=False)
    ax.set_title(title, loc="left", fontsize=10)

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

# The points of single steps: up to so many points -> size and opacity of each.
POINTS = {200: (6, 0.4), 5000: (3, 0.3), math.inf: (1.5, 0.1)}

# Fonts with Chinese characters: the first one that is installed serves where the usual one fails.
CHINESE = ["Noto Sans CJK SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "PingFang SC"]
CHINESE += ["Microsoft YaHei", "SimHei"]


# --------------------------------------------------------------------------------------------------
# The runs


@dataclass(frozen=True)
class Run:
    """The curves of a run. A run that was resumed is one run: its metrics.jsonl goes on."""

    folder: Path
    points: dict[str, tuple[np.ndarray, np.ndarray]]  # key -> steps and values, (points,) each
    begun: dict[str, Any]  # the last record with settings; {} if there is none
    x: str  # what the x axis shows: steps, tokens, or time in seconds
    y: str  # what the y axis shows: loss (in nats per token) or bits_per_byte

    @property
    def name(self) -> str:
        """Return the folder's name. It may hold bytes that are not UTF-8."""
        return self.folder.resolve().name.encode(errors="backslashreplace").decode()

    @property
    def settings(self) -> dict[str, Any]:
        return self.begun.get("settings", {})

    @property
    def scale(self) -> float:
        """Return what a loss is multiplied by to get the unit of the y axis.

        Bits per byte need the bytes in a token, which an evaluation tells. They are those of
        val.bin, and hardly differ from those of train.bin.
        """
        if self.y == "loss":
            return 1.0
        steps, bits = self.points.get("val_bits_per_byte", ([], []))
        loss = dict(zip(*self.points.get("val_loss", ([], [])), strict=True))
        if not len(steps) or not loss.get(steps[-1]):
            why = "no evaluation tells the bytes in a token yet"
            raise UserError(f"{self.folder}: {why}: use --y loss")
        return bits[-1] / loss[steps[-1]]

    def curve(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Return x and y of the points of a key, (points,) each; empty if there are none."""
        steps, values = self.points.get(key, (np.empty(0), np.empty(0)))
        return self.places(steps), values if key == "lr" else values * self.scale

    def places(self, steps: np.ndarray) -> np.ndarray:
        """Return where these steps are on the x axis.

        Time is that of the steps alone, without evaluations, checkpoints and pauses.
        """
        if self.x == "steps":
            return steps
        known, values = self.points.get("tokens" if self.x == "tokens" else "step_ms", ([], []))
        if self.x == "time":
            values = np.cumsum(np.diff(known, prepend=0) * values) / 1e3
        return np.interp(steps, np.append(0, known), np.append(0, values))


def read_run(folder: Path, x: str, y: str) -> Run:
    """Return the curves of the run in a folder.

    Raises UserError if there is no metrics.jsonl, if it is damaged, or if it has no loss yet.
    """
    path = folder / "metrics.jsonl"
    found: dict[str, dict[int, float]] = {}  # key -> step -> value
    begun = {}
    for record in read_metrics(path):
        if isinstance(record.get("settings"), dict):
            begun = record
        if "bad_step" in record:
            found.setdefault("bad_step", {})[record["step"]] = 0.0
        for key in ("loss", "lr", "tokens", "step_ms", "val_bits_per_byte", *EVALUATED):
            value = record.get(key)
            if isinstance(value, int | float) and math.isfinite(value):
                found.setdefault(key, {})[record["step"]] = value
    if "loss" not in found and "val_loss" not in found:
        missing = "no loss in it yet" if path.exists() else "no such file"
        raise UserError(f"{path}: {missing}: name the folder of a run that has begun")
    points = {}
    for key, values in found.items():
        steps = sorted(values)
        points[key] = np.array(steps, float), np.array([values[s] for s in steps], float)
    return Run(folder, points, begun, x, y)


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


def differences(runs: list[Run]) -> dict[str, list[str]]:
    """Return the settings that are not the same in all runs: name -> its value in each run.

    Names, places and reports are left out.
    """
    aside = "run_name out_dir data_dir init_from overwrite progress log_every follow tracker"
    aside += " peak_tflops eval_train sample_every sample_prompt"
    names = dict.fromkeys(name for run in runs for name in run.settings)
    found = {}
    for name in names.keys() - {*aside.split()}:
        values = [run.settings.get(name, "?") for run in runs]
        if any(value != values[0] for value in values):
            found[name] = [f"{v:g}" if isinstance(v, float) else str(v) for v in values]
    hashes = ["+".join(run.begun.get("data", {}).values())[:8] for run in runs]
    if "dataset" not in found and len({*hashes}) > 1:
        found["train.bin"] = hashes
    return {name: found[name] for name in [*names, "train.bin"] if name in found}


# --------------------------------------------------------------------------------------------------
# The picture


def plot_loss(folders: list[Path], png: Path, x: str = "steps", y: str = "loss") -> Path:
    """Draw the runs in these folders into one picture, and return its path.

    png: the file to write: .png, .pdf or .svg. x, y: as in Run.
    Raises UserError if a run cannot be drawn, and ImportError if there is no matplotlib.
    """
    import matplotlib
    from matplotlib import colormaps, font_manager
    from matplotlib.figure import Figure

    runs = [read_run(folder, x, y) for folder in folders]
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
        # Figure, unlike pyplot, needs no screen, and may be used in any thread.
        fig = Figure(figsize=(9, 6), layout="constrained")
        losses, rates = fig.subplots(2, sharex=True, height_ratios=[6, 1])
        losses.set_ylim(*limits(runs))
        draw_landmarks(losses, runs)
        for run, colour in zip(runs, colours, strict=False):
            draw_run(losses, run, colour)
            rates.plot(*run.curve("lr"), color=colour, lw=1)
        label(fig, losses, rates, runs, colours)
        picture = io.BytesIO()
        fig.savefig(picture, format=png.suffix[1:], dpi=120)
    write_whole(png, picture.getvalue())
    return png


def draw_run(ax: Any, run: Run, colour: Any) -> None:
    """Draw the training loss, smoothed and as it was, and in a darker shade the evaluations.

    A star marks the best of them, and crosses at the bottom the steps that were skipped.
    """
    x, y = run.curve("loss")
    size, alpha = next(style for most, style in POINTS.items() if len(x) < most)
    ax.plot(x, y, ".", c=colour, ms=size, mew=0, alpha=alpha)
    ax.plot(x, smoothed(y), c=colour, lw=1.5)
    for key, (_, style) in EVALUATED.items():
        x, y = run.curve(key)
        ax.plot(x, y, c=darker(colour), markevery=len(x) // 40 + 1, **style)
    x, y = run.curve("val_loss")
    if len(x):
        best = np.argmin(y)
        ax.plot(x[best], y[best], "*", c=darker(colour), ms=13, mec="white", zorder=5)
    x, _ = run.curve("bad_step")
    if len(x):
        bottom = np.full(len(x), 0.02)  # as a share of the height
        ax.plot(x, bottom, "x", c=colour, transform=ax.get_xaxis_transform())


def darker(colour: Any) -> tuple[float, ...]:
    from matplotlib.colors import to_rgb

    return tuple(0.6 * part for part in to_rgb(colour))


def draw_landmarks(ax: Any, runs: list[Run]) -> None:
    """Draw the landmarks of the data that lie in the picture, if all runs share them."""
    first = runs[0]
    landmarks = [run.begun.get("landmarks") for run in runs]
    if landmarks[0] and all(other == landmarks[0] for other in landmarks):
        bottom, top = ax.get_ylim()
        for name, value in landmarks[0].items():
            value *= first.scale
            if bottom < value < top - 0.04 * (top - bottom):  # room for the text
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
    low = []
    high = []
    for run in runs:
        for key in ("loss", *EVALUATED):
            x, y = run.curve(key)
            late = y[x >= 0.05 * x[-1]] if len(x) else y
            if len(late):
                low.append(np.quantile(late, 0.01))
                high.append(np.quantile(late, 0.98))
    bottom, top = min(low), max(high)
    # Show landmarks that lie a little above: a new reader looks for them.
    for value in (runs[0].begun.get("landmarks") or {}).values():
        value *= runs[0].scale
        if top < value < bottom + 1.3 * (top - bottom):
            top = value
    margin = 0.06 * (top - bottom) or 0.1
    return bottom - margin, top + margin


def label(fig: Any, losses: Any, rates: Any, runs: list[Run], colours: list[Any]) -> None:
    """Write the axes' labels, the title, a legend of the runs and one of the kinds of curves."""
    from matplotlib.lines import Line2D

    losses.set_ylabel("loss (nats per token)" if runs[0].y == "loss" else "bits per byte")
    rates.set_ylabel("lr", fontsize=9)
    rates.set_ylim(bottom=0)
    rates.tick_params(labelsize=8)
    label_x(rates, runs[0].x)
    for ax in (losses, rates):
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)

    losses.set_title(title(runs), loc="left", fontsize=10)
    if len(runs) > 1:
        of_runs = [
            Line2D([], [], c=colour, lw=3, label=text)
            for text, colour in zip(descriptions(runs), colours, strict=False)
        ]
        fig.legend(handles=of_runs, loc="outside lower left", fontsize=8, frameon=False)

    c = colours[0] if len(runs) == 1 else "black"
    kinds = []
    if any("loss" in run.points for run in runs):
        kinds.append(Line2D([], [], c=c, marker=".", mew=0, lw=1.5, label="training, smoothed"))
    for key, (kind, style) in EVALUATED.items():
        if any(key in run.points for run in runs):
            kinds.append(Line2D([], [], c=darker(c), label=kind, **style))
    if any("val_loss" in run.points for run in runs):
        best = dict(ls="", marker="*", ms=11, mec="white", label="lowest validation loss")
        kinds.append(Line2D([], [], c=darker(c), **best))
    if any("bad_step" in run.points for run in runs):
        kinds.append(Line2D([], [], c=c, ls="", marker="x", label="skipped step (NaN, infinity)"))
    losses.legend(handles=kinds, loc="upper right", fontsize=8)


def label_x(ax: Any, x: str) -> None:
    """Label the x axis: 1,000 steps, 20M tokens, or a time as hours and minutes."""
    from matplotlib import ticker

    ax.set_xlim(left=0)
    if x == "steps":
        ax.set_xlabel("step")
        ax.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    elif x == "tokens":
        ax.set_xlabel("tokens")
        ax.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    else:
        every = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800]
        last = ax.get_xlim()[1]
        tick = next((s for s in every if last / s <= 8), 86400 * math.ceil(last / 86400 / 8))
        unit = 60 if tick < 60 else 3600
        ax.set_xlabel(f"time of training ({'min:s' if unit == 60 else 'h:min'})")
        ax.xaxis.set_major_locator(ticker.MultipleLocator(tick))
        ax.xaxis.set_major_formatter(lambda s, _: f"{s // unit:.0f}:{s % unit * 60 // unit:02.0f}")


def title(runs: list[Run]) -> str:
    """Return what a single run is and came to, or in what several runs differ."""
    if len(runs) > 1:
        names = list(differences(runs))
        more = f" and {len(names) - 6} more" if len(names) > 6 else ""
        if not names:
            return f"{len(runs)} runs with the same settings"
        return f"{len(runs)} runs that differ in {', '.join(names[:6])}{more}"
    run = runs[0]
    lines = [f"{shortened(run.name)}{best_of(run)}"]
    if run.settings:
        s = {k: v if v is not None else "?" for k, v in run.settings.items()}
        shape = f"{s.get('preset')}, {s.get('n_layer')} x {s.get('n_embd')}"
        training = f"{s.get('optimizer', 'adamw')}, lr {s.get('lr')}"
        lines.append(f"{shape}; {training}; seed {s.get('seed')}; data {s.get('dataset')}")
    return "\n".join(lines)


def descriptions(runs: list[Run]) -> list[str]:
    """Return a line of the legend for each run: its name, its own settings, its best loss."""
    found = differences(runs)
    names = [run.name for run in runs]
    lines = []
    for number, run in enumerate(runs):
        name = run.name if names.count(run.name) == 1 else str(run.folder)
        own = [f"{key}={shortened(values[number])}" for key, values in found.items()]
        more = [f"and {len(own) - 6} more"] if len(own) > 6 else []
        settings = f" ({' '.join(own[:6] + more)})" if own else ""
        lines.append(f"{shortened(name)}{settings}{best_of(run)}")
    return lines


def best_of(run: Run) -> str:
    """Return the lowest validation loss and its step; "" before the first evaluation."""
    _, losses = run.curve("val_loss")
    if not len(losses):
        return ""
    best = np.argmin(losses)
    step = run.points["val_loss"][0][best]
    what = f"validation loss {losses[best]:.4f}"
    if run.y != "loss":
        what = f"{losses[best]:.4f} bits per byte"
    return f": {what} at step {step:,.0f}"


def shortened(text: str) -> str:
    return text if len(text) <= 50 else f"{text[:24]}...{text[-23:]}"

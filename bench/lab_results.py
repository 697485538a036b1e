"""What the runs of bench/lab.py have measured: read it, compare it, print it, draw it.

`python -m bench.lab --help` explains the figures and the statistics.
"""

import math
import statistics
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from bench.measure import padded
from training.metrics import read_metrics


@dataclass(frozen=True)
class Result:
    """What a finished run has measured, or the mean of several."""

    tokens: np.ndarray  # tokens read before each evaluation, (evaluations,)
    losses: np.ndarray  # validation loss at each evaluation, (evaluations,)
    by_set: dict[str, float]  # final validation loss on each of the judges
    steps: int
    step_ms: float  # median time of a step: evaluations and checkpoints are not in it

    @property
    def loss(self) -> float:
        return float(self.losses[-1])

    @property
    def seconds(self) -> float:
        return self.steps * self.step_ms / 1e3


Results = dict[str, dict[int, Result]]  # variant -> seed -> result


@dataclass(frozen=True)
class Row:
    """A variant compared with the baseline, over the seeds with which both are finished."""

    variant: str
    verdict: str
    losses: dict[int, float]  # seed -> final validation loss
    loss: float  # their mean
    loss_error: float  # its standard error; NaN for a single seed
    by_set: dict[str, float]  # mean final validation loss on each of the judges
    difference: float  # mean over the seeds of: loss - loss of the baseline
    difference_error: float
    tokens: int  # tokens read in a run
    seconds: float  # time of a run's steps: their number times step_ms
    step_ms: float
    needs_tokens: float  # how many times `tokens` the baseline needs to end with the same loss
    needs_seconds: float  # how many times `seconds`
    needs_sign: str  # "", or < or > if both are bounds only


def read_run(
    folder: Path, judges: list[str], loss: str, data: dict[str, str] | None
) -> Result | None:
    """Return what a run has measured, or None if it is not finished, or has read other data.

    data: the SHA-256 of train.bin of each data set that it shall have read; None: any.
    judges: data sets that the run reads. Its loss is the mean of theirs, each counted once, since
    variants may differ in the weights of a mixture, by which train.py weighs the losses.
    loss: its key in metrics.jsonl.
    """
    records = read_metrics(folder / "metrics.jsonl")
    if data and any(r["data"] != data for r in records if "data" in r):
        return None
    evaluations = [r for r in records if "val_loss" in r]
    if not evaluations or evaluations[-1]["step"] < records[0]["steps"]:
        return None
    # A run with a single data set records its loss only under the key itself.
    losses = [[r.get(f"{loss}/{name}", r[loss]) for r in evaluations] for name in judges]
    step_tokens = records[0]["step_samples"] * records[0]["settings"]["block_size"]
    times = [r["step_ms"] for r in records if "step_ms" in r]
    return Result(
        tokens=step_tokens * np.array([r["step"] for r in evaluations]),
        losses=np.mean(losses, axis=0),
        by_set={name: set_losses[-1] for name, set_losses in zip(judges, losses, strict=True)},
        steps=records[0]["steps"],
        step_ms=statistics.median(times[1:] or times),  # the first step warms up
    )


# --------------------------------------------------------------------------------------------------
# Compare


def compare(results: Results, lengths: list[str]) -> list[Row]:
    """Return a row for each variant that has finished a seed which the baseline has finished too.

    lengths: the names of the baseline at its lengths; the first is the baseline itself.
    """
    rows = []
    for name, runs in results.items():
        seeds = [seed for seed in runs if seed in results.get(lengths[0], {})]
        if seeds:
            rows.append(row_of(name, seeds, results, lengths))
    return rows


def row_of(name: str, seeds: list[int], results: Results, lengths: list[str]) -> Row:
    """Return the row of a variant, with these seeds."""
    means = {v: mean_of(runs, seeds) for v, runs in results.items() if runs.keys() >= set(seeds)}
    mean = means[name]
    baseline = lengths[0]
    losses = {seed: results[name][seed].loss for seed in seeds}
    differences = [losses[seed] - results[baseline][seed].loss for seed in seeds]
    scale = sorted((means[v] for v in lengths if v in means), key=lambda run: run.tokens[-1])
    tokens = int(mean.tokens[-1])
    sign, needs = tokens_needed(mean.loss, [(int(run.tokens[-1]), run.loss) for run in scale])
    baseline_s = means[baseline].seconds / means[baseline].tokens[-1]  # of a token
    return Row(
        variant=name,
        verdict="baseline" if name == baseline else verdict(differences),
        losses=losses,
        loss=mean.loss,
        loss_error=standard_error(losses.values()),
        by_set=mean.by_set,
        difference=statistics.fmean(differences),
        difference_error=standard_error(differences),
        tokens=tokens,
        seconds=mean.seconds,
        step_ms=mean.step_ms,
        needs_tokens=needs / tokens,
        needs_seconds=needs * baseline_s / mean.seconds,
        needs_sign=sign,
    )


def mean_of(runs: dict[int, Result], seeds: list[int]) -> Result:
    """Return the mean of a variant's runs with these seeds.

    The time of a step is their median, because other programs may have disturbed one of the runs;
    of two runs it is the shorter time, because they cannot make a step faster.
    """
    chosen = [runs[seed] for seed in seeds]
    sets = chosen[0].by_set
    return Result(
        tokens=chosen[0].tokens,
        losses=np.mean([run.losses for run in chosen], axis=0),
        by_set={name: statistics.fmean(run.by_set[name] for run in chosen) for name in sets},
        steps=chosen[0].steps,
        step_ms=statistics.median_low([run.step_ms for run in chosen]),
    )


def standard_error(values: Collection[float]) -> float:
    """Return the standard error of the mean of the values; NaN if there is only one."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def verdict(differences: list[float]) -> str:
    """Return what the differences to the baseline, one for each seed, allow to say."""
    if len(differences) < 3:
        return "too few seeds"
    difference = statistics.fmean(differences)
    if abs(difference) <= 3 * standard_error(differences):
        return "no difference seen"
    return "better" if difference < 0 else "worse"


def tokens_needed(loss: float, scale: list[tuple[int, float]]) -> tuple[str, float]:
    """Return how many tokens the baseline needs to end with `loss`, and a sign before them.

    scale: (tokens, final loss) of the baseline at each of its lengths, the shortest first. Between
    two of them the loss is taken to be linear in the logarithm of the tokens. The sign is empty, or
    < or > if `loss` lies beyond the shortest or the longest.
    """
    fewest, highest_loss = scale[0]
    if loss >= highest_loss:
        return "" if loss == highest_loss else "<", fewest
    for (tokens, upper), (more_tokens, lower) in pairwise(scale):
        if loss >= lower:  # and below `upper`, or an earlier pair would have been the one
            part = (upper - loss) / (upper - lower)
            return "", tokens * (more_tokens / tokens) ** part
    return ">", scale[-1][0]


# --------------------------------------------------------------------------------------------------
# Show


def table(rows: list[Row], baseline: str) -> str:
    """Return the rows as a table in Markdown, padded so that a terminal shows its columns too."""
    sets = list(rows[0].by_set)
    sets = sets if len(sets) > 1 else []  # the loss on a single data set is the loss
    heads = ["variant", "seeds", "loss", *sets, "difference", "verdict"]
    heads += [f"{baseline} needs tokens", "needs seconds", "training s", "ms/step"]
    lines = [heads]
    for row in rows:
        line = [row.variant, str(len(row.losses)), f"{row.loss:.4f} ± {row.loss_error:.4f}"]
        line += [f"{row.by_set[name]:.4f}" for name in sets]
        line += [f"{row.difference:+.4f} ± {row.difference_error:.4f}", row.verdict]
        line += [f"{row.needs_sign}{x:.2f} x" for x in (row.needs_tokens, row.needs_seconds)]
        lines.append([*line, f"{row.seconds:.1f}", f"{row.step_ms:.1f}"])
    lines.insert(1, ["---", *["--:"] * (len(heads) - 1)])
    return "\n".join(f"| {' | '.join(line)} |" for line in padded(lines))


def plot(results: Results, rows: list[Row], lengths: list[str], question: str, png: str) -> None:
    """Draw the loss of each variant over the tokens, and the final loss of each run.

    A dashed line joins the ends of the baseline's runs of all lengths. A variant whose curve ends
    to the left of it needs fewer tokens than the baseline for the same loss.
    """
    from matplotlib.figure import Figure  # unlike pyplot, it needs no screen

    fig = Figure(figsize=(12, 6), layout="constrained")
    curves, ends = fig.subplots(1, 2, width_ratios=(3, 2))
    shown = [row for row in rows if row.variant not in lengths[1:]]
    for number, row in enumerate(shown):
        color = f"C{number}"
        runs = [results[row.variant][seed] for seed in row.losses]
        losses = np.array([run.losses for run in runs])
        tokens = runs[0].tokens
        band = (losses.min(axis=0), losses.max(axis=0))
        curves.plot(tokens, losses.mean(axis=0), color=color, label=row.variant)
        curves.fill_between(tokens, *band, color=color, alpha=0.2, lw=0)
        ends.plot([number] * len(runs), losses[:, -1], "o", color=color, alpha=0.6)
        ends.plot(number, row.loss, "_", color="black", ms=24)
    scale = sorted((row.tokens, row.loss) for row in rows if row.variant in lengths)
    if len(scale) > 1:
        tokens, losses = zip(*scale, strict=True)
        curves.plot(tokens, losses, "k--o", ms=4, label=f"{lengths[0]}, ends of all lengths")
    curves.set(xscale="log", xlabel="tokens", ylabel="validation loss (nats per token)")
    curves.set_title("mean of the seeds, and their range", fontsize="medium")
    ends.set_title("final loss of each run, and the mean", fontsize="medium")
    ends.set_xticks(range(len(shown)), [row.variant for row in shown], rotation=45, ha="right")
    ends.margins(x=0.1)
    for panel in (curves, ends):
        panel.grid(alpha=0.3)
    fig.suptitle(question)
    fig.legend(loc="outside lower center", ncols=5)
    fig.savefig(png, format="png", dpi=120)

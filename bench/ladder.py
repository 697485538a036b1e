"""Foretell losses: train a ladder of small models by a config's recipe, and fit a law to them.

    python -m bench.ladder config/demo.py --dataset=mine --max_steps=5000 --minutes=60
    python plan.py config/demo.py --dataset=mine --max_steps=5000 --loss

The rungs are smaller and shorter than the config's model and run: by steps of a square root of 2 in
depth and width, down to a quarter, and of 2 in tokens. None costs more than an eighth of its FLOPs,
and none has less than half of its tokens per parameter: where tokens are few, a large model has not
yet left a small one behind, and the law would say that size is worth nothing (bench/LOG.md).
They are trained from the cheapest on, each as its own train.py in out_dir, and none begins after
the minutes; the same command goes on. With --max_epochs of 2 or more they read the data several
times, and the worth of that is fitted, too.

The law is in training/law.py. It is fitted by the Huber loss of the relative errors, with the delta
of arXiv 2203.15556. Small models hardly tell E, to which the loss falls in the end, from a slower
fall: so E also has a prior, of what large models reach, and is at most half of the lowest loss. The
interval is of a bootstrap: the law is fitted again to its own losses, with errors that are drawn
anew, an E that is drawn about the fit's as widely as the prior, and any form from b^0.6 to b.
NAME.ladder.json goes beside the folder of the data set, and so does a picture of fit and errors.
"""

import math
import os
import sys
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import huber_loss

import configurator
from bench.lab import Run, run_settings, train_all
from bench.lab_results import read_run
from bench.measure import facts_of, not_positive, padded, write_json
from configurator import UserError, option, parse
from hardware.disk import sealed, unseal
from hardware.terminal import ProgressBar
from model import GPT
from text.dataset import open_datasets, open_windows
from text.windows import DataSet
from training.law import FORM, READ_AGAIN, REPEATS, Ladder, law, path_of, recipe_of, worth
from training.plan import make_plan
from training.resume import data_hashes, with_data
from training.settings import TrainConfig, model_config

SHARE = 1 / 8  # of the config's FLOPs, for the most expensive rung
TOKENS_PER_PARAMETER = 1 / 2  # of the config's, for the rung that has the fewest
FEWEST_RUNGS = 7  # for six parameters, of which one has a prior
# The prior of E, in bits per byte: the largest models of 2024 reach 0.54 to 0.64 on the Pile (arXiv
# 2412.19437, table 3). Other texts differ: log E is normal, with this standard deviation.
ENTROPY, LOG_ENTROPY_SD = 0.6, 0.3
MOST_E = 1 / 2  # of the lowest loss of a rung: the bound of E, where a text is easier than thought
DELTA = 1e-3  # of the Huber loss: a relative error beyond it counts as itself, not as its square


@dataclass(frozen=True)
class LadderConfig(TrainConfig):
    out_dir: str = "out/ladder"
    minutes: float = option(60.0, "in this call, no rung begins later than that")
    fewest_steps: int = option(600, "of a rung: a shorter run says little about a longer one")
    draws: int = option(100, "number of fits of the bootstrap")

    def problems(self) -> list[str]:
        problems = TrainConfig.problems(self)
        problems += not_positive(self, "minutes", "fewest_steps", "draws")
        if self.init_from not in ("scratch", "auto") or "," in self.dataset:
            problems.append("init_from, dataset: a ladder begins from scratch, on one data set")
        return problems


@dataclass(frozen=True)
class Rung:
    run: Run
    N: int  # parameters in matrix products
    D: int  # tokens read
    flops: float
    loss: float = math.nan


def main() -> None:
    cfg = with_data(parse(LadderConfig, doc=__doc__))
    (data,) = open_datasets(cfg.dataset, cfg.data_dir)
    rungs, epoch_tokens = rungs_of(cfg, data)
    check(rungs, "let the run have four times --fewest_steps or more, and not be tiny itself")
    path = path_of(data)
    not_in_the_way(path, path.with_suffix(".png"))
    exit_code = train_all([rung.run for rung in rungs], cfg.minutes)
    if exit_code > 1:  # a signal
        sys.exit(exit_code)
    results = [(rung, read_run(rung.run.folder, [data.name])) for rung in rungs]
    trained = [replace(rung, loss=r.loss) for rung, r in results if r and math.isfinite(r.loss)]
    check(trained, "the same command goes on; if rungs failed, the lines above name them")
    ladder = fitted(trained, epoch_tokens, cfg, data)
    print(table(ladder))
    write_json(str(path), sealed(vars(ladder) | facts_of(torch.device("cpu"))))
    draw(ladder, path.with_suffix(".png"))
    print(f"{path}: plan.py --loss reads it. Its picture is {path.with_suffix('.png')}")
    if exit_code:  # a rung failed; the others were enough
        sys.exit(exit_code)


def not_in_the_way(*paths: Path) -> None:
    """Raise UserError if what has the names of the law or its picture is not a ladder's."""
    try:
        unseal(paths[0])  # then its picture is a ladder's, too
    except (OSError, ValueError):
        for path in filter(os.path.lexists, paths):
            advice = "is in the way: bench.ladder did not write it as it is; move it away"
            raise UserError(f"{path} {advice}") from None


def check(rungs: list[Rung], advice: str) -> None:
    """Raise UserError if there are too few rungs to fit a law to."""
    N, D = len({rung.N for rung in rungs}), len({rung.D for rung in rungs})
    if len(rungs) < FEWEST_RUNGS or N < 3 or D < 3:
        least = f"a law needs {FEWEST_RUNGS} rungs, of 3 sizes and 3 lengths"
        raise UserError(f"{least}, not {len(rungs)} of {N} and {D}: {advice}")


# --------------------------------------------------------------------------------------------------
# Rungs


def rungs_of(cfg: LadderConfig, data: DataSet) -> tuple[list[Rung], int]:
    """Return the rungs, the cheapest first, and the tokens of an epoch."""
    windows = open_windows(data, "train", cfg.block_size, documents=cfg.documents)
    plan = make_plan(cfg, 1, cfg.block_size * windows.n_windows)
    config = TrainConfig(**{f.name: getattr(cfg, f.name) for f in fields(TrainConfig)})
    run_D = plan.steps * plan.step_tokens
    run_N, run_flops = flops_of(config, data.meta["vocab_size"], run_D)
    lengths = [plan.steps // 2**k for k in range(40) if plan.steps // 2**k >= cfg.fewest_steps]
    rungs = {}
    for k, steps in product(range(5), lengths):
        length = dict(max_steps=steps, max_epochs=0.0, max_tokens=0, eval_every=steps)
        settings = replace(config, **shape_at(cfg, 2 ** (-k / 2)), **length, save_every=steps)
        D = steps * plan.step_tokens
        N, flops = flops_of(settings, data.meta["vocab_size"], D)
        if flops <= SHARE * run_flops and D / N >= TOKENS_PER_PARAMETER * run_D / run_N:
            name = f"{settings.n_layer} x {settings.n_embd}, {steps:,} steps"
            run = Run(name, cfg.seed, run_settings(settings, cfg.seed), [data.name], "val_loss")
            rungs[run.folder] = Rung(run, N, D, flops)
    total = sum(rung.flops for rung in rungs.values()) / run_flops
    print(f"all rungs together have {total:.2f} x the FLOPs of the run that is to be foretold")
    return sorted(rungs.values(), key=lambda rung: rung.flops), plan.epoch_tokens


def shape_at(cfg: TrainConfig, scale: float) -> dict[str, int]:
    """Return the shape of a model of fewer layers that are narrower, by the same factor."""
    n_head = max(min(2, cfg.n_head), round(scale * cfg.n_head))
    n_embd = 2 * n_head * max(1, round(scale * cfg.n_embd / (2 * n_head)))  # heads of even widths
    groups = max(1, round(n_head * (cfg.n_kv_head or cfg.n_head) / cfg.n_head))
    n_kv_head = max(n for n in range(1, groups + 1) if n_head % n == 0)
    n_layer = max(min(2, cfg.n_layer), round(scale * cfg.n_layer))
    d_ff = max(1, round(cfg.d_ff * n_embd / cfg.n_embd)) if cfg.d_ff else 0
    return dict(n_layer=n_layer, n_head=n_head, n_kv_head=n_kv_head, n_embd=n_embd, d_ff=d_ff)


def flops_of(cfg: TrainConfig, vocab_size: int, tokens: int) -> tuple[int, float]:
    """Return N, the parameters in matrix products, and the FLOPs of a training."""
    with torch.device("meta"):
        model = GPT(model_config(cfg, vocab_size))
    return model.num_params()["matmul"], model.flops_per_token(cfg.block_size) * float(tokens)


# --------------------------------------------------------------------------------------------------
# The fit


def fitted(rungs: list[Rung], U: int, cfg: LadderConfig, data: DataSet) -> Ladder:
    """Return the law of the rungs, and those of the bootstrap. U: tokens of an epoch."""
    rows = [(rung.N, rung.D, rung.loss) for rung in rungs]
    N, D, losses = torch.tensor(rows, dtype=torch.float64).unbind(1)
    val = data.learned("val", cfg.loss_on)
    entropy = ENTROPY * math.log(2) * val["bytes"] / val["tokens"]
    best = math.inf
    for deviate in np.linspace(-2, 2, 11):
        E = torch.tensor(entropy * math.exp(LOG_ENTROPY_SD * deviate)).double()
        candidate = fit(N, D, losses, U, E, FORM)
        errors = losses / law(candidate, N, D, U) - 1
        # -ln of the density, but for a constant: errors are Laplace's, with their best width.
        cost = len(N) * float(errors.abs().mean().log()) + deviate**2 / 2
        if cost < best:
            best, parameters = cost, candidate
    fitted_losses = law(parameters, N, D, U)
    # The fit took up a part of the scatter: as many rungs as there are parameters lie on it.
    freedom = len(N) - 5 - repeats(D, U)
    residuals = (losses / fitted_losses - 1) * (len(N) / freedom) ** 0.5
    generator = torch.Generator().manual_seed(cfg.seed)
    draws = []
    for _ in ProgressBar("bootstrap", range(cfg.draws)):
        drawn = residuals[torch.randint(len(N), (len(N),), generator=generator)]
        E = parameters[0] * (LOG_ENTROPY_SD * torch.randn((), generator=generator)).exp()
        form = 1 - 2 * (1 - FORM) * float(torch.rand((), generator=generator))
        draws.append(fit(N, D, fitted_losses * (1 + drawn), U, E, form))
    figures = [dict(N=r.N, D=r.D, flops=r.flops, loss=r.loss) for r in rungs]
    laws = torch.stack([parameters, *draws]).tolist()
    return Ladder(U, recipe_of(cfg), data_hashes([data]), figures, laws, residuals.tolist())


def repeats(D: Tensor, U: float) -> bool:
    """Return whether the rungs read so much again that its worth, R, can be fitted."""
    return bool(D.max() > READ_AGAIN * U)


def fit(N: Tensor, D: Tensor, losses: Tensor, U: float, E: Tensor, form: float) -> Tensor:
    """Return E, A, a, B, b, c, R of the law of n losses: N, D, losses (n,), U different tokens.

    c is b^form. With E, a, b and R, (L - E)^(1/c) is linear in A and B: least squares, whose
    weights make a Huber loss of it, solve for these at all points of a grid of a, b and R. The grid
    shrinks around its best. If R is fitted, the best may lie outside a grid that shrank too soon:
    where the best so far is at an edge, the grid moves there, and does not shrink in that
    direction.
    """
    E = E.clamp(max=MOST_E * losses.min())
    most = torch.tensor([1.5, 1.5, 10 * REPEATS]).double().log()
    least = torch.tensor([0.05, 0.05, REPEATS / 10]).double().log()
    if not repeats(D, U):
        most[2] = least[2] = math.log(REPEATS)
    center, reach = (most + least) / 2, (most - least) / 2
    above = (losses - E)[:, None]  # (n, 1)
    share = above / losses[:, None]
    for _ in range(24 if repeats(D, U) else 12):
        offsets = [r * torch.linspace(-1, 1, 13 if r else 1) for r in reach]
        grid = (center + torch.cartesian_prod(*offsets)).clamp(least, most).exp()  # (P, 3)
        a, b, R = grid.T[:, :, None]  # (P, 1) each
        c = b**form
        target = above ** (1 / c[:, None])  # (P, n, 1)
        terms = torch.stack([N ** (-a / c), worth(D, U, R) ** (-b / c)], 2) / target  # (P, n, 2)
        size = terms.amax(1, keepdim=True)  # (P, 1, 2)
        terms = terms / size
        weights = share**2
        for _ in range(4):
            weighted = (weights * terms).mT
            squares = weighted @ terms + 1e-12 * torch.eye(2)  # terms may be all but alike
            factors = torch.linalg.solve(squares, weighted.sum(2, keepdim=True))
            factors = factors.clamp(min=1e-12)
            sums = terms @ factors  # (P, n, 1): as shares of the targets
            errors = share * (sums ** c[:, None] - 1)
            weights = share**2 * DELTA / errors.abs().clamp(min=DELTA)
        costs = huber_loss(errors, torch.zeros_like(errors), reduction="none", delta=DELTA)
        best = costs.sum((1, 2)).argmin()
        at_edge = (grid[best].log() - center).abs() > 0.9 * reach
        center = grid[best].log()
        reach = torch.where(at_edge & repeats(D, U), reach, reach / 2)
    A, B = factors[best, :, 0] / size[best, 0]
    a, b, R = grid[best]
    return torch.stack([E, A, a, B, b, c[best, 0], R])


# --------------------------------------------------------------------------------------------------
# Show


def table(ladder: Ladder) -> str:
    """Return the law, and its rungs as a table in Markdown."""
    E, A, a, B, b, c, R = ladder.laws[0]
    lines = [["N", "D", "loss", "above the law"], ["--:"] * 4]
    for rung in ladder.rungs:
        figures = [f"{rung['N']:,}", f"{rung['D']:,}", f"{rung['loss']:.4f}"]
        lines.append([*figures, f"{error(ladder, rung):+.2%}"])
    sums = f"{A:.4g} / N^{a / c:.3f} + {B:.4g} / D'^{b / c:.3f}"
    formula = f"L = {E:.3f} + ({sums})^{c:.3f}, R = {R:.1f}"
    return "\n".join([*(f"| {' | '.join(line)} |" for line in padded(lines)), "", formula])


def error(ladder: Ladder, rung: dict) -> float:
    """Return by which share of it the loss of a rung lies above the law."""
    return rung["loss"] / float(ladder.loss(rung["N"], rung["D"])[0]) - 1


def draw(ladder: Ladder, png: Path) -> None:
    """Draw losses over tokens, the law as a line for each size, and what is above it."""
    from matplotlib.figure import Figure  # unlike pyplot, it needs no screen

    fig = Figure(figsize=(12, 5), layout="constrained")
    losses, errors = fig.subplots(1, 2)
    D = np.array([rung["D"] for rung in ladder.rungs])
    tokens = np.geomspace(D.min(), 8 * D.max(), 50)
    for number, N in enumerate(sorted({rung["N"] for rung in ladder.rungs})):
        color = f"C{number}"
        for rung in ladder.rungs:
            if rung["N"] == N:
                losses.plot(rung["D"], rung["loss"], "o", color=color)
                errors.plot(rung["D"], 100 * error(ladder, rung), "o", color=color)
        curve = [float(ladder.loss(N, D)[0]) for D in tokens]
        losses.plot(tokens, curve, color=color, label=f"N = {N:,}")
    losses.set(xscale="log", xlabel="tokens", ylabel="loss (nats per token)", title=png.stem)
    errors.set(xscale="log", xlabel="tokens", ylabel="loss above the law (%)")
    errors.axhline(0, color="black", lw=0.8)
    fig.legend(loc="outside lower center", ncols=5)
    fig.savefig(png, format="png", dpi=120)


if __name__ == "__main__":
    configurator.run(main)

"""Foretell losses: train a ladder of small models by a config's recipe, and fit a law to them.

    python -m bench.ladder config/demo.py --dataset=mine --minutes=30
    python plan.py config/demo.py --dataset=mine --loss

The rungs are smaller and shorter than the config's model and run, at steps of a square root of 2 in
depth, which the width follows, and in tokens. None costs more than an eighth of its FLOPs. They are
trained from the cheapest on, as long as the minutes allow, each as its own train.py in out_dir;
the same command goes on. With --max_epochs above 1 they read the data several times, and the worth
of that is fitted, too.

The law is in training/law.py. It is fitted to the logarithms of the losses, by the Huber loss with
delta 1e-3 and L-BFGS from several beginnings, as in arXiv 2203.15556. The interval is of a
bootstrap: the law is fitted again to its own losses with residuals that are drawn anew.
ladder.json goes into the folder of the data set, and a picture of fit and residuals beside it.
"""

import time
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path

import torch
from torch.nn.functional import huber_loss

import configurator
from bench.lab import Run, run_settings, train
from bench.lab_results import read_run
from bench.measure import facts_of, not_positive, padded, write_json
from configurator import UserError, parse
from hardware.machine import stop_signals
from hardware.terminal import ProgressBar
from model import GPT
from text.dataset import open_datasets, open_windows
from training.law import FILE, REPEATS, Ladder, law, recipe_of
from training.plan import make_plan
from training.settings import TrainConfig, model_config
from training.start import with_data

SHARE = 1 / 8  # of the config's FLOPs, for the most expensive rung
FEWEST_STEPS = 100  # of a rung: a shorter run says little about a longer one
FEWEST_RUNGS = 8  # for six parameters


@dataclass(frozen=True)
class LadderConfig(TrainConfig):
    out_dir: str = "out/ladder"  # folder of the rungs
    minutes: float = 60.0  # time for the rungs that are not trained yet
    draws: int = 100  # number of fits of the bootstrap

    def problems(self) -> list[str]:
        problems = TrainConfig.problems(self) + not_positive(self, "minutes", "draws")
        if self.init_from != "scratch" or "," in self.dataset or self.batch_size == "auto":
            problems.append("a ladder begins from scratch, on one data set, with a batch_size")
        return problems


@dataclass(frozen=True)
class Rung:
    run: Run
    N: int  # parameters in matrix products
    D: int  # tokens read
    flops: float


def main() -> None:
    cfg = parse(LadderConfig, doc=__doc__)
    cfg = with_data(cfg)
    (data,) = open_datasets(cfg.dataset, cfg.data_dir)
    rungs = rungs_of(cfg)
    exit_code = climb(rungs, cfg.minutes)
    results = [(rung, read_run(rung.run.folder, [data.name])) for rung in rungs]
    trained = [(rung, result.loss) for rung, result in results if result]
    print(f"{len(trained)} of {len(rungs)} rungs are trained")
    if len(trained) < FEWEST_RUNGS:
        raise UserError(f"a fit needs {FEWEST_RUNGS} rungs: give more minutes, or a larger config")
    ladder = fitted(trained, data.meta["splits"]["train"]["tokens"], cfg)
    write_json(str(data.folder / FILE), vars(ladder) | facts_of(torch.device("cpu")))
    print(table(ladder))
    draw(ladder, data.folder / FILE.replace(".json", ".png"))
    print(f"{data.folder / FILE} and its picture: plan.py --loss reads it")
    if exit_code:
        raise SystemExit(exit_code)


# --------------------------------------------------------------------------------------------------
# Rungs


def rungs_of(cfg: LadderConfig) -> list[Rung]:
    """Return the rungs, the cheapest first."""
    (data,) = open_datasets(cfg.dataset, cfg.data_dir)
    windows = open_windows(data, "train", cfg.block_size, documents=cfg.documents)
    plan = make_plan(cfg, 1, cfg.block_size * windows.n_windows)
    config = TrainConfig(**{f.name: getattr(cfg, f.name) for f in fields(TrainConfig)})
    most = SHARE * flops_of(config, data.meta["vocab_size"], plan.steps * plan.step_tokens)[1]
    shapes = {str(shape): shape for shape in (shape_at(cfg, n) for n in halvings(cfg.n_layer, 1))}
    rungs = []
    for shape, steps in product(shapes.values(), halvings(plan.steps, FEWEST_STEPS)):
        length = dict(max_steps=steps, max_epochs=0.0, max_tokens=0)
        settings = replace(config, **shape, **length, eval_every=steps, save_every=steps)
        D = steps * plan.step_tokens
        N, flops = flops_of(settings, data.meta["vocab_size"], D)
        if flops <= most:
            name = f"{settings.n_layer} x {settings.n_embd}, {steps:,} steps"
            run = Run(name, cfg.seed, run_settings(settings, cfg.seed), [data.name], "val_loss")
            rungs.append(Rung(run, N, D, flops))
    return sorted(rungs, key=lambda rung: rung.flops)


def halvings(largest: int, least: int) -> list[int]:
    """Return largest, and it divided by the root of 2 again and again, down to `least`."""
    return [n for k in range(40) if (n := round(largest / 2 ** (k / 2))) >= least]


def shape_at(cfg: TrainConfig, n_layer: int) -> dict[str, int]:
    """Return the shape of a model of fewer layers: as many times narrower, its heads as wide."""
    n_kv_head = cfg.n_kv_head or cfg.n_head
    part = n_layer / cfg.n_layer
    groups = max(1, round(part * n_kv_head))
    n_head = groups * (cfg.n_head // n_kv_head)
    n_embd = n_head * (cfg.n_embd // cfg.n_head)
    d_ff = round(cfg.d_ff * n_embd / cfg.n_embd)
    return dict(n_layer=n_layer, n_head=n_head, n_kv_head=groups, n_embd=n_embd, d_ff=d_ff)


def flops_of(cfg: TrainConfig, vocab_size: int, tokens: int) -> tuple[int, float]:
    """Return N, the parameters in matrix products, and the FLOPs of a training."""
    with torch.device("meta"):
        model = GPT(model_config(cfg, vocab_size))
    return model.num_params()["matmul"], model.flops_per_token(cfg.block_size) * float(tokens)


def climb(rungs: list[Rung], minutes: float) -> int:
    """Train the rungs that are not trained, the cheapest first, and none that takes too long.

    Return the exit code: 1 if a run failed, 128 + number if a signal ended the work.
    """
    todo = [rung for rung in rungs if not read_run(rung.run.folder, rung.run.judges)]
    exit_code = 0
    end = time.monotonic() + 60 * minutes
    with stop_signals() as signals:
        expected = 0.0
        for number, rung in enumerate(ProgressBar("rungs", todo)):
            if time.monotonic() + expected > end:
                ProgressBar.write(f"no time for {len(todo) - number} more: --minutes has an end")
                break
            start = time.monotonic()
            code = train(rung.run, signals)
            if signals:
                return 128 + signals[-1]
            result = read_run(rung.run.folder, rung.run.judges)
            loss = f"loss {result.loss:.4f}" if result else f"exit code {code}, {rung.run.log}"
            exit_code = exit_code or int(not result)
            seconds = time.monotonic() - start
            ProgressBar.write(f"{rung.run.variant} | {loss} | {seconds:.0f} s")
            following = todo[min(number + 1, len(todo) - 1)]
            expected = seconds * following.flops / rung.flops
    return exit_code


# --------------------------------------------------------------------------------------------------
# The fit


def fitted(trained: list[tuple[Rung, float]], different_tokens: int, cfg: LadderConfig) -> Ladder:
    """Return the law of (rung, loss), and those of the bootstrap."""
    N, D, losses = torch.tensor([(r.N, r.D, loss) for r, loss in trained]).double().unbind(1)
    U = different_tokens

    def residuals_of(parameters: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
        return losses.log() - law(parameters, N, D, U).log()

    def fit(losses: torch.Tensor, begin: torch.Tensor) -> torch.Tensor:
        # At the middle of the rungs, A and a hardly depend on each other. So it is with B and b.
        middle = torch.stack([N.log().mean(), D.log().mean()])

        def shifted(p: torch.Tensor, sign: int) -> torch.Tensor:
            moved = p[[1, 3]] - sign * p[[2, 4]].exp() * middle
            return torch.stack([p[0], moved[0], p[2], moved[1], p[4], p[5]])

        p = shifted(begin, 1).requires_grad_()
        lbfgs = torch.optim.LBFGS([p], max_iter=500, line_search_fn="strong_wolfe")

        def closure() -> torch.Tensor:
            lbfgs.zero_grad()
            residuals = residuals_of(shifted(p, -1), losses)
            loss = 1e6 * huber_loss(residuals, torch.zeros_like(N), reduction="sum", delta=1e-3)
            loss.backward()
            return loss

        lbfgs.step(closure)
        return shifted(p.detach(), -1)

    def error(parameters: torch.Tensor) -> float:
        return float(residuals_of(parameters, losses).abs().sum())

    best, rest = losses.min(), losses.max() - losses.min()
    fits = []
    for share, a, b in product((0.3, 0.6, 0.9), (0.2, 0.5), (0.2, 0.5)):
        of_sizes, of_tokens = rest * N.log().mul(a).mean().exp(), rest * D.log().mul(b).mean().exp()
        begin = [share * best, of_sizes, a, of_tokens, b, REPEATS]
        fits.append(fit(losses, torch.tensor(begin).double().log()))
    parameters = min(fits, key=error)
    residuals = residuals_of(parameters, losses)
    # The fit took up a part of the scatter: as many rungs as there are parameters lie on it.
    repeated = bool((D > U).any())
    spread = residuals * (len(N) / max(1, len(N) - 5 - repeated)) ** 0.5
    generator = torch.Generator().manual_seed(cfg.seed)
    draws = []
    for _ in ProgressBar("bootstrap", range(cfg.draws)):
        drawn = spread[torch.randint(len(N), (len(N),), generator=generator)]
        draws.append(fit((law(parameters, N, D, U).log() + drawn).exp(), parameters))
    rungs = [dict(N=r.N, D=r.D, flops=r.flops, loss=loss) for r, loss in trained]
    all_parameters = torch.stack([parameters, *draws]).tolist()
    return Ladder(U, recipe_of(cfg), rungs, all_parameters, spread.tolist())


# --------------------------------------------------------------------------------------------------
# Show


def table(ladder: Ladder) -> str:
    """Return the law, and its rungs as a table in Markdown."""
    E, A, a, B, b, R = torch.tensor(ladder.parameters[0]).exp().tolist()
    lines = [["N", "D", "loss", "of the law", "residual"], ["--:"] * 5]
    for rung, residual in zip(ladder.rungs, errors(ladder), strict=True):
        cells = [f"{rung['N']:,}", f"{rung['D']:,}", f"{rung['loss']:.4f}"]
        lines.append([*cells, f"{rung['loss'] / (1 + residual):.4f}", f"{residual:+.2%}"])
    formula = f"L = {E:.3f} + {A:.4g} / N^{a:.3f} + {B:.4g} / D^{b:.3f}"
    formula += (
        f", R = {R:.1f}" if any(r["D"] > ladder.different_tokens for r in ladder.rungs) else ""
    )
    return "\n".join([*(f"| {' | '.join(line)} |" for line in padded(lines)), "", formula])


def errors(ladder: Ladder) -> list[float]:
    """Return by which share the loss of each rung lies above that of the law."""
    return [r["loss"] / float(ladder.loss(r["N"], r["D"])[0]) - 1 for r in ladder.rungs]


def draw(ladder: Ladder, png: Path) -> None:
    """Draw losses over tokens, a curve of the law for each size, and the residuals."""
    try:
        from matplotlib.figure import Figure  # unlike pyplot, it needs no screen
    except ImportError:
        return

    fig = Figure(figsize=(12, 5), layout="constrained")
    fit, rest = fig.subplots(1, 2)
    sizes = sorted({rung["N"] for rung in ladder.rungs})
    most = max(rung["D"] for rung in ladder.rungs)
    tokens = torch.logspace(4, 12, 801).double()
    tokens = tokens[(tokens < 8 * most) & (tokens > min(r["D"] for r in ladder.rungs))]
    for number, N in enumerate(sizes):
        of_size = [
            (r["D"], r["loss"], e)
            for r, e in zip(ladder.rungs, errors(ladder), strict=True)
            if r["N"] == N
        ]
        D, losses, residuals = zip(*of_size, strict=True)
        fit.plot(D, losses, "o", color=f"C{number}", label=f"N = {N:,}")
        curve = [float(ladder.loss(N, D)[0]) for D in tokens.tolist()]
        fit.plot(tokens, curve, color=f"C{number}", lw=1)
        rest.plot(D, [100 * e for e in residuals], "o", color=f"C{number}")
    fit.set(xscale="log", xlabel="tokens", ylabel="validation loss (nats per token)")
    rest.set(xscale="log", xlabel="tokens", ylabel="loss above the law (%)")
    rest.axhline(0, color="black", lw=0.8)
    fig.legend(loc="outside lower center", ncols=4)
    fig.savefig(png, dpi=120)


if __name__ == "__main__":
    configurator.run(main)

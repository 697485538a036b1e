"""The loss that a training will come to, by the law that bench/ladder.py has fitted to small ones.

    L(N, D) = E + (A / N^(a/c) + B / D'^(b/c))^c

L is the validation loss in nats per token, N the parameters in matrix products, D the tokens read.
E is what no model gets below. With many tokens L - E falls as N^-a, in a large model as D^-b. c
lies between two laws: 1 would be the sum of two powers of Hoffmann et al. 2022 (arXiv 2203.15556),
in which the size of a model counts as much after few tokens as after many; b the law of Kaplan et
al. 2020 (arXiv 2001.08361, equation 1.5), in which it counts less where tokens are few. FORM says
where.
Of U different tokens, D' = U + U R (1 - exp(-(D / U - 1) / R)) if D > U, else D' = D: what is read
again is worth less and less (Muennighoff et al. 2023, arXiv 2305.16264, equation 5).
"""

import math
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from configurator import UserError, changes
from hardware.disk import unseal
from text.windows import DataSet
from training.resume import data_hashes
from training.settings import TRAINING, TrainConfig

# c = b^FORM: 0 would be the law of Hoffmann et al., 1 that of Kaplan et al. A ladder alone often
# tells it wrongly; with 0.8, the losses of larger runs are neither too high nor too low on average
# (bench/LOG.md, 2026-11-28).
FORM = 0.8

# What a ladder varies, and what makes no other training.
NOT_IN_RECIPE = """dataset seed n_layer n_head n_kv_head n_embd d_ff max_steps max_epochs max_tokens
    batch_size dtype compile recompute shard""".split()
READ_AGAIN = 1.5  # epochs, from which on the worth of reading again can be seen
REPEATS = 15.4  # R of arXiv 2305.16264, for a ladder that reads nothing twice


def recipe_of(cfg: TrainConfig) -> dict:
    """Return the settings that two trainings must share to follow the same law."""
    ratios = dict(n_kv_head=cfg.n_head / (cfg.n_kv_head or cfg.n_head), d_ff=cfg.d_ff / cfg.n_embd)
    settings = {k: v for k, v in changes(cfg).items() if k in TRAINING and k not in NOT_IN_RECIPE}
    return settings | {key: round(ratio, 1) for key, ratio in ratios.items()}


def law(parameters: torch.Tensor, N: float, D: float, U: float) -> torch.Tensor:
    """Return L(N, D) for parameters (..., 7), which are E, A, a, B, b, c and R."""
    E, A, a, B, b, c, R = parameters.unbind(-1)
    D = worth(torch.as_tensor(D).double(), U, R)
    return E + (A / N ** (a / c) + B / D ** (b / c)) ** c


def worth(D: torch.Tensor, U: float, R: torch.Tensor) -> torch.Tensor:
    """Return D', as how many different tokens D tokens count, of which U are different."""
    return D.clamp(max=U) + U * R * (1 - torch.exp(-(D / U - 1).clamp(min=0) / R))


@dataclass(frozen=True)
class Ladder:
    """What NAME.ladder.json has, beside the folder of the data set."""

    different_tokens: int  # U, those of an epoch
    recipe: dict  # settings of the training that all rungs share; shapes are taken to scale alike
    data: dict  # hashes of the data set
    rungs: list[dict]  # of each: N, D, flops, loss
    laws: list[list[float]]  # the fit, and then those of the bootstrap: see law()
    residuals: list[float]  # relative errors of single runs

    def loss(self, N: float | torch.Tensor, D: float | torch.Tensor) -> torch.Tensor:
        """Return the losses that the parameters foretell, the fit's first, (1 + draws,).

        For N and D of the shape (n, 1) it returns (n, 1 + draws).
        """
        return law(torch.tensor(self.laws).double(), N, D, self.different_tokens)

    def interval(self, N: float, D: float) -> tuple[float, float, float]:
        """Return the loss of a new run: foretold, and the ends of an interval for nine in ten.

        The interval has the uncertainty of the fit, and by how much larger runs differed from it:
        1.5 %, the root of the mean square of 18 (bench/LOG.md, 2026-11-28).
        """
        losses = self.loss(N, D)
        scatter = 1 + 0.015 * torch.special.ndtri(torch.linspace(0.01, 0.99, 99).double())
        ends = (losses[1:, None] * scatter).quantile(torch.tensor([0.05, 0.95]).double())
        return float(losses[0]), *ends.tolist()

    def fewest_tokens(self) -> float:
        """Return the fewest tokens per parameter that a rung has."""
        return min(rung["D"] / rung["N"] for rung in self.rungs)

    def differs(self, cfg: TrainConfig) -> str:
        """Return which settings of a run are not those of the ladder, or ""."""
        recipe = recipe_of(cfg)
        return ", ".join(k for k in self.recipe | recipe if self.recipe.get(k) != recipe.get(k))

    def best_size(self, flops: float) -> tuple[float, float]:
        """Return the N and D of the lowest loss at 6 N D FLOPs, as if attention cost nothing.

        The law knows nothing of models that are smaller than all rungs, or have fewer tokens for a
        parameter: N stays within these bounds.
        """
        least = min(rung["N"] for rung in self.rungs)
        most = max(least, math.sqrt(flops / 6 / self.fewest_tokens()))
        N = torch.logspace(math.log10(least), math.log10(most), 2001).double()[:, None]
        best = float(N[self.loss(N, flops / 6 / N)[:, 0].argmin()])
        return best, flops / 6 / best


def path_of(data: DataSet) -> Path:
    """Return the path of a data set's ladder. In it, prepare.py would stop at it."""
    return data.folder.with_name(f"{data.name}.ladder.json")


def read_ladder(data: DataSet) -> Ladder:
    """Return the ladder of a data set. Raises UserError if there is none that can be used."""
    path = path_of(data)
    again = "python -m bench.ladder, with the config and the settings of this command"
    try:
        content = unseal(path)
        ladder = Ladder(**{field.name: content[field.name] for field in fields(Ladder)})
    except FileNotFoundError:
        raise UserError(f"{path} is not there: train small models first: {again}") from None
    except (OSError, ValueError, KeyError) as e:
        raise UserError(f"{path} is damaged ({e}): {again}") from None
    if ladder.data != data_hashes([data]):
        raise UserError(f"{path}: {data.name} was prepared again since: {again}")
    if not math.isclose(ladder.laws[0][5], ladder.laws[0][4] ** FORM):
        raise UserError(f"{path} is a law of an earlier version: {again}, fits it anew")
    return ladder

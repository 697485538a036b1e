"""The schedule: learning rate and momentum as functions of the fraction of the run that is done."""

import math

from training.settings import TrainConfig


def lr_at(step: float, steps: float, cfg: TrainConfig) -> float:
    """Return the learning rate of step 0 ... steps - 1. Both arguments are of Plan.position().

    cosine: SGDR, arXiv 1608.03983, eq. 5, one cycle. wsd: MiniCPM, arXiv 2404.06395, section 4.
    """
    warmup = math.ceil(cfg.warmup_ratio * steps)
    if step + 1 <= warmup:
        return cfg.lr * (step + 1) / warmup
    if cfg.schedule == "constant":
        return cfg.lr
    start = warmup  # the step from which the rate falls
    if cfg.schedule == "wsd":
        start = max(warmup, steps - math.ceil(cfg.decay_ratio * steps))
    # t goes from 0 to 1 over the decay, if that has two steps or more. It is 1 at the last step,
    # which thus has min_lr_ratio. (If that is 0, the last step changes nothing.)
    t = max(0, step - start) / max(1, steps - 1 - start)
    fraction = (1 + math.cos(math.pi * t)) / 2 if cfg.schedule == "cosine" else 1 - t
    return cfg.lr * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * fraction)


def momentum_at(step: float, steps: float, cfg: TrainConfig) -> float:
    """Return Muon's momentum at step 0 ... steps - 1. Both arguments are of Plan.position().

    At the start of a run the gradient changes fast, and a mean over fewer steps follows it better.
    In the first tenth the momentum grows linearly from 0.85, as in the records of modded-nanogpt
    of October 2024.
    """
    t = min(1.0, step / (0.1 * steps))
    return (1 - t) * min(0.85, cfg.momentum) + t * cfg.momentum

"""Batch, length and learning rate of a run: pure functions of the settings and the step."""

import math
from dataclasses import dataclass

from configurator import UserError
from training.settings import TrainConfig


@dataclass(frozen=True)
class Plan:
    batch_size: int  # B actually used
    accum: int  # micro-steps in a step
    step_tokens: int  # of all ranks: the multiple of B T world that is nearest to batch_tokens
    epoch_tokens: int  # in a pass over train.bin
    steps: int  # of the run
    begun_step: int = 0  # where this process takes the run up
    begun_tokens: int = 0  # read until there; an earlier process may have had another step_tokens

    def tokens_at(self, step: int) -> int:
        """How many tokens the run has read when `step` steps are done."""
        return self.begun_tokens + (step - self.begun_step) * self.step_tokens

    def smaller(self, block_size: int) -> str:
        """What to do when it does not fit into memory."""
        B, same = self.batch_size, f"the step keeps its {self.step_tokens:,} tokens: the same training"
        less = f"--batch_size={B // 2} ({same})" if B > 1 else f"--block_size={block_size // 2}, or a smaller model"
        return f"at batch_size={B}: try {less}"


def make_plan(cfg: TrainConfig, world: int, epoch_tokens: int, step: int = 0, samples: int = 0) -> Plan:
    """step, samples: what a resumed run has done and read, perhaps in steps of another size."""
    if cfg.batch_size == "auto":
        raise UserError("batch_size=auto is for train.py and bench/plan.py: give a number here")
    T, read = cfg.block_size, samples * cfg.block_size
    B = min(cfg.batch_size, max(1, round(cfg.batch_tokens / (T * world))))  # no more than one step needs
    accum = max(1, round(cfg.batch_tokens / (B * T * world)))
    step_tokens = accum * B * T * world
    limits = [cfg.max_steps] if cfg.max_steps else []
    tokens = [math.ceil(min(cfg.max_epochs * epoch_tokens, 2**62)), cfg.max_tokens]
    limits += [step + (n - read + step_tokens // 2) // step_tokens for n in tokens if n]  # the nearest whole step
    steps = max(min(limits), step, 1)
    return Plan(B, accum, step_tokens, epoch_tokens, steps, step, read)


def even_batch(most: int, cfg: TrainConfig, world: int) -> int:
    """The batch_size above half of `most`, up to it, whose multiple comes nearest to batch_tokens; of equals the largest."""
    sequences = max(1, round(cfg.batch_tokens / (cfg.block_size * world)))  # of a rank in a step
    most = max(1, min(most, sequences))
    return min(range(most, most // 2, -1), key=lambda B: abs(B * round(sequences / B) - sequences))


def lr_at(step: int, steps: int, cfg: TrainConfig) -> float:
    """The learning rate of step 0 ... steps - 1.

    cosine: SGDR, arXiv 1608.03983, eq. 5, one cycle. wsd: MiniCPM, arXiv 2404.06395, section 4.
    """
    warmup = cfg.warmup_steps or math.ceil(cfg.warmup_ratio * steps)
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    if cfg.schedule == "constant":
        return cfg.lr
    begin = max(warmup, steps - math.ceil(cfg.decay_ratio * steps)) if cfg.schedule == "wsd" else warmup
    t = max(0, step - begin) / max(1, steps - 1 - begin)  # 0 ... 1 over the decay; the last step is at min_lr_ratio
    share = (1 + math.cos(math.pi * t)) / 2 if cfg.schedule == "cosine" else 1 - t
    return cfg.lr * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * share)

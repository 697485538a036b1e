"""The plan of a run: its batch size and its length; and Progress, its counters.

All functions are pure: their results depend on nothing but their arguments.
"""

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch.amp import GradScaler

from configurator import UserError
from training.settings import TrainConfig

MAX_DEVIATION = 0.1  # a step should not differ from batch_tokens by a larger fraction than this
MAX_BAD_STEPS = 10  # in a row; then the run ends


@dataclass(frozen=True)
class Plan:
    """The sizes that a run trains with."""

    batch_size: int  # B; less than the setting batch_size if batch_tokens is then met better
    accum: int  # micro-steps in a step
    # Tokens in a step, of all ranks: the multiple of B x T x world that is nearest to batch_tokens.
    step_tokens: int
    epoch_tokens: int  # tokens in a pass over train.bin
    steps: int  # length of the whole run
    ended_by: str = ""  # the limit that ends it, if there are several
    start_step: int = 0  # steps that were done before this process started
    start_tokens: int = 0  # tokens read in them; step_tokens may have been different then
    # The tokens done then, as counted for the limit that ends the run: max_steps counts all steps
    # alike.
    start_count: int = 0
    compiled: bool = False  # by torch.compile

    def tokens_at(self, step: int) -> int:
        """Return how many tokens the run has read when `step` steps are done."""
        return self.start_tokens + (step - self.start_step) * self.step_tokens

    def epochs_at(self, step: int) -> float:
        """Return how many epochs of the present data the tokens of `step` steps are."""
        return self.tokens_at(step) / self.epoch_tokens

    def position(self, step: int) -> float:
        """Return the position in the run when `step` steps are done, in steps of the present size.

        The fraction of the run that is done is position(step) / position(steps). If all steps had
        the same size, position(step) is step.
        """
        return (self.start_count + (step - self.start_step) * self.step_tokens) / self.step_tokens

    def memory_hint(self, block_size: int) -> str:
        """Return advice for a run that does not fit into memory: which option to change."""
        B = self.batch_size
        if B > 1:
            sequences = B * self.accum  # of a rank in a step; a divisor of it keeps their number
            fewer = max(b for b in range(1, B // 2 + 1) if sequences % b == 0)
            flags = f"--batch_size={fewer} --batch_tokens={self.step_tokens}"
            return f"at batch_size={B}: try {flags} (more micro-steps, the same training)"
        return f"at batch_size={B}: try --block_size={block_size // 2}, or a smaller model"


@dataclass
class Progress:
    """Counters of a run. A checkpoint stores each field under its name."""

    step: int = 0  # steps done
    samples: int = 0  # windows read
    # Windows read before switch_data: the position in the data is samples - data_begun.
    data_begun: int = 0
    best_step: int = -1  # step with the lowest validation loss
    best_val_loss: float = math.inf
    losses: list[float] = field(default_factory=list)  # the last 20 finite ones
    bad_steps: int = 0  # steps skipped because their loss or gradient was not finite
    bad_in_a_row: int = 0  # bad steps in a row, up to the last step
    code: str = ""  # SHA-256 of the .py files that trained it, as code_sha256() gives it

    @property
    def data_position(self) -> int:
        """The windows read of the present data."""
        return self.samples - self.data_begun

    @classmethod
    def from_state(cls, training: dict[str, Any]) -> "Progress":
        """Return the progress stored in train_state.pt.

        If the run ended because of too many bad steps in a row, their count starts again at 0.
        Raises UserError if a value is missing, or of another kind.
        """
        for name, default in asdict(cls()).items():
            value = training.get(name)
            fits = type(value) is type(default) and (name not in ("step", "samples") or value >= 0)
            if not fits or (name == "losses" and not all(type(loss) is float for loss in value)):
                raise UserError(f"train_state.pt: {name} is {value!r:.80}: damaged")
        progress = cls(**{f.name: training[f.name] for f in fields(cls)})
        if progress.gives_up():
            progress.bad_in_a_row = 0
        return progress

    def add_step(self, windows: int, loss: float, grad_norm: float, scaler: GradScaler) -> str:
        """Count a step that read `windows` windows. Return "taken", or why take_step() skipped it.

        "no target": none of its tokens counts, as in the middle of a long question. "bad": the loss
        or the gradient is not finite. "overflow" exists in fp16 only, where a gradient may overflow
        while the loss is finite. GradScaler then lowers its scale. If the scale has fallen below 1,
        the gradient overflows even without scaling, and the step counts as bad.
        """
        self.step += 1
        self.samples += windows
        if math.isnan(loss) and grad_norm == 0:
            return "no target"
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.bad_in_a_row = 0
            self.losses = [*self.losses[-19:], loss]
            return "taken"
        if math.isfinite(loss) and scaler.is_enabled() and scaler.get_scale() >= 1:
            return "overflow"
        self.bad_steps += 1
        self.bad_in_a_row += 1
        return "bad"

    def gives_up(self) -> bool:
        """Return whether the run must end, after MAX_BAD_STEPS bad steps in a row."""
        return self.bad_in_a_row >= MAX_BAD_STEPS

    def add_evaluation(self, loss: float) -> None:
        """Record the step and its validation loss if this is the lowest so far."""
        if loss < self.best_val_loss:
            self.best_step = self.step
            self.best_val_loss = loss


def make_plan(
    cfg: TrainConfig, world: int, epoch_tokens: int, progress: Progress | None = None
) -> Plan:
    """Return the plan of a run on `world` processes. progress: of a resumed run.

    Raises UserError if batch_size is still "auto".
    """
    if cfg.batch_size == "auto":
        raise UserError("only train.py and plan.py support batch_size=auto: give a number")
    T = cfg.block_size
    sequences = max(1, round(cfg.batch_tokens / (T * world)))  # what a step needs from each rank
    B = min(cfg.batch_size, sequences)
    if deviation(tokens_of_step(B, cfg, world), cfg) > MAX_DEVIATION:
        B = best_batch(B, cfg, world)
    step_tokens = tokens_of_step(B, cfg, world)
    accum = step_tokens // (B * T * world)

    # The run ends at the first of its limits. A limit in tokens is rounded to the nearest step.
    done = progress or Progress()
    read, size = done.samples * T, step_tokens
    epochs = math.ceil(min(cfg.max_epochs * epoch_tokens, 2**62))  # inf has no ceil
    ends = {"max_steps": cfg.max_steps * size, "max_epochs": epochs, "max_tokens": cfg.max_tokens}
    counts = {"max_steps": done.step * size, "max_epochs": read, "max_tokens": read}
    limits = {k: done.step + (ends[k] - counts[k] + size // 2) // size for k in ends if ends[k]}
    first = min(limits, key=limits.__getitem__, default="max_steps")
    steps = max(limits.get(first, 0), done.step, 1)
    ended_by = first if len(limits) > 1 else ""
    shape = (B, accum, step_tokens, epoch_tokens, steps)
    return Plan(*shape, ended_by, done.step, read, counts[first])


def tokens_of_step(B: int, cfg: TrainConfig, world: int) -> int:
    """Return the multiple of a micro-step's tokens that is nearest to batch_tokens."""
    micro_step = B * cfg.block_size * world
    return max(1, round(cfg.batch_tokens / micro_step)) * micro_step


def deviation(step_tokens: int, cfg: TrainConfig) -> float:
    """Return the relative difference between the tokens of a step and batch_tokens."""
    return abs(step_tokens / cfg.batch_tokens - 1)


def best_batch(limit: int, cfg: TrainConfig, world: int) -> int:
    """Return the batch_size, at most `limit` and at least half of it, that suits batch_tokens best.

    The tokens of a step are then nearest to batch_tokens. Of several such sizes, the largest is
    returned.
    """
    sequences = max(1, round(cfg.batch_tokens / (cfg.block_size * world)))  # per rank in a step
    limit = max(1, min(limit, sequences))

    sizes = range(limit, (limit - 1) // 2, -1)  # of equals, min() takes the first
    return min(sizes, key=lambda B: deviation(tokens_of_step(B, cfg, world), cfg))

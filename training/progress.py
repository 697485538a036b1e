"""How far a run has come: what a checkpoint stores besides model, optimizer and scaler."""

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from configurator import UserError

MAX_BAD_STEPS = 10  # in a row; then the run ends


@dataclass
class Progress:
    """Counters and records of a run. A checkpoint stores each field under its name."""

    step: int = 0  # steps done
    samples: int = 0  # windows read: the place in the data
    best_step: int = -1  # step with the lowest validation loss
    best_val_loss: float = math.inf
    losses: list[float] = field(default_factory=list)  # the last 101 finite ones, for spike()
    bad_steps: int = 0  # steps skipped because their loss or gradient was not finite
    bad_in_a_row: int = 0  # how many such steps came in a row, up to the last step
    data_files: dict[str, list] = field(default_factory=dict)  # path -> stamps of verified files

    @classmethod
    def of_checkpoint(cls, training: dict[str, Any]) -> "Progress":
        """Return the progress stored in train_state.pt.

        If the run ended because of too many bad steps in a row, their count starts again at 0.
        Raises UserError if a value is missing, or of another kind.
        """
        for name, default in asdict(cls()).items():
            if type(training.get(name)) is not type(default):
                raise UserError(f"train_state.pt: {name} is {training.get(name)!r}: not train.py's")
        progress = cls(**{f.name: training[f.name] for f in fields(cls)})
        if progress.gives_up():
            progress.bad_in_a_row = 0
        return progress

    def add_step(
        self, windows: int, loss: float, grad_norm: float, scaler: torch.amp.GradScaler
    ) -> str:
        """Count a step that read `windows` windows. Return "taken", "overflow" or "bad".

        take_step() has skipped a step of the last two kinds. "overflow" exists in fp16 only, where
        a gradient may overflow while the loss is finite. GradScaler handles that: it skips the step
        and lowers its scale. Once the scale has fallen below 1, the gradient overflows even without
        scaling, and the step counts as bad.
        """
        self.step += 1
        self.samples += windows
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.bad_in_a_row = 0
            self.losses = [*self.losses[-100:], loss]
            return "taken"
        if math.isfinite(loss) and scaler.is_enabled() and scaler.get_scale() >= 1:
            return "overflow"
        self.bad_steps += 1
        self.bad_in_a_row += 1
        return "bad"

    def gives_up(self) -> bool:
        """Return whether the run shall end: all of its last steps were bad."""
        return self.bad_in_a_row >= MAX_BAD_STEPS

    def add_evaluation(self, loss: float) -> None:
        """Remember the step and its validation loss if this is the lowest so far."""
        if loss < self.best_val_loss:
            self.best_step = self.step
            self.best_val_loss = loss

"""How far a run is: what a checkpoint adds to model, optimizer and scaler."""

import math
from dataclasses import dataclass, field, fields
from typing import Any

import torch


@dataclass
class Progress:
    step: int = 0  # steps done
    samples: int = 0  # windows read, which is the place in the data
    best_step: int = -1  # the checkpoint with the lowest validation loss
    best_val_loss: float = math.inf
    losses: list[float] = field(default_factory=list)  # of the last finite steps, for spike()
    bad_steps: int = 0  # steps that were skipped since their loss or gradient was not finite
    bad_in_a_row: int = 0
    wandb_id: str = ""
    data_files: dict[str, list] = field(default_factory=dict)  # path -> stamps of the verified file

    @classmethod
    def of_checkpoint(cls, training: dict[str, Any], max_bad_steps: int) -> "Progress":
        """What train_state.pt says. A run that had given up begins to count bad steps anew."""
        progress = cls(**{f.name: training[f.name] for f in fields(cls)})
        if progress.bad_in_a_row >= max_bad_steps:
            progress.bad_in_a_row = 0
        return progress

    def add_step(self, windows: int, loss: float, grad_norm: float, scaler: torch.amp.GradScaler) -> str:
        """Count a step over so many windows: "taken", "overflow" or "bad"; the last two were skipped.

        Overflow: in fp16 a gradient may be infinite while the loss is finite. The scaler then lowers
        its factor, and this is no bad step while there is something left to lower.
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

    def add_evaluation(self, loss: float) -> None:
        if loss < self.best_val_loss:
            self.best_step, self.best_val_loss = self.step, loss

"""A running mean of the weights, kept beside the weights that are trained (the setting `average`).

At a high learning rate the weights swing around a better place, and their mean comes nearer to it
(arXiv 1803.05407). With a constant learning rate it replaces a part of the decay (arXiv
2405.18392). The training never reads the mean.

torch.optim.swa_utils.AveragedModel is not used: it is a second model, which would have to be
compiled for itself to be evaluated, and its moving average has a decay that cannot grow.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from model import GPT


class Average:
    """The mean of the weights over about the last `span` steps.

    Up to step `span` it is the plain mean of the weights after each step. From then on it is an
    exponential moving average: each step multiplies what came before by 1 - 1 / span. So the first
    weights never count for more than others do.

    saved: the state_dict() of a checkpoint, to go on from; None: the mean begins with the next
    step.
    """

    def __init__(self, model: GPT, span: float, saved: dict | None = None):
        self.model = model
        self.span = span
        self.steps = 0  # steps that the mean has followed
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        if saved:
            self.steps = saved["steps"]
            for name, mean in self.weights.items():
                mean.copy_(saved["weights"][name])

    def state_dict(self) -> dict:
        return {"steps": self.steps, "weights": self.weights}

    @torch.no_grad()
    def follow(self) -> None:
        """Move the mean towards the weights after a step. The host does not wait for the device.

        A bad step is a step too: it has left the weights as they were, and these count once more.
        """
        self.steps += 1
        share = max(1 / self.steps, 1 / max(1, self.span))
        torch._foreach_lerp_(list(self.weights.values()), list(self.model.parameters()), share)

    @contextmanager
    def in_the_model(self) -> Iterator[None]:
        """Give the model the mean as its weights for a while, compiled or in DDP as it is."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange the weights and the mean. Only one tensor at a time is copied."""
        for p, mean in zip(self.model.parameters(), self.weights.values(), strict=True):
            held = p.clone()
            p.copy_(mean)
            mean.copy_(held)

"""The loss on texts that the model was not trained on."""

import math
from collections.abc import Callable

import numpy as np
import torch
from tqdm import tqdm

from hardware.machine import Machine, all_sum, to_device
from text.windows import Windows


@torch.no_grad()
def evaluate(
    model: Callable, windows: Windows, tokens: int, B: int, machine: Machine, bar: bool = False
) -> float:
    """Return the mean loss, in nats per token, on about `tokens` tokens of a val.bin (0: on all).

    The windows are always the same ones. The ranks take turns, with B windows at a time.
    bar: show a progress bar if stderr is a terminal.
    """
    model.eval()  # no dropout
    starts = windows.fixed_starts(tokens)
    count = len(starts)
    turn = B * machine.world  # windows that all ranks evaluate at the same time
    end = math.ceil(count / turn) * turn
    disable = None if bar else True  # None: tqdm shows a bar on a terminal only
    totals = torch.zeros(2, device=machine.device)  # sum of the loss over targets; their number
    for first in tqdm(range(machine.rank * B, end, turn), "evaluating", disable=disable):
        # All batches have B windows, so that the model sees a single shape. Past the last window
        # the first ones fill the batch; their targets are set to -1, which the loss ignores.
        rows = np.stack([windows.row(starts[i % count]) for i in range(first, first + B)])
        x, y = to_device(rows, machine.device)
        y = y.clone()
        y[max(0, count - first) :] = -1
        with machine.autocast():
            totals[0] += model(x, y, reduction="sum")
        totals[1] += (y >= 0).sum()
    model.train()
    loss_sum, targets = all_sum(totals).tolist()
    return loss_sum / targets

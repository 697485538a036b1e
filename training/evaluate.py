"""The loss on texts that the model was not trained on."""

from collections.abc import Callable

import numpy as np
import torch
from tqdm import tqdm

from hardware.machine import Machine, all_sum, to_device
from text.windows import Windows


@torch.no_grad()
def evaluate(model: Callable, windows: Windows, tokens: int, B: int, machine: Machine, bar: bool = False) -> float:
    """Mean loss in nats over about `tokens` tokens (0: all) of a val.bin, in fixed windows.

    Each rank takes its share of them, B at a time.
    """
    model.eval()  # no dropout
    starts = windows.fixed_starts(tokens)
    total = torch.zeros(2, device=machine.device)  # loss summed over targets, number of targets
    n, turn = len(starts), B * machine.world
    for i in tqdm(range(machine.rank * B, -(-n // turn) * turn, turn), "evaluating", disable=None if bar else True):
        rows = np.stack([windows.row(starts[j % n]) for j in range(i, i + B)])  # every batch full: one shape
        x, y = to_device(rows, machine.device)
        y = y.clone()
        y[max(0, n - i) :] = -1  # windows beyond the last are only padding
        with machine.autocast():
            total[0] += model(x, y, reduction="sum")
        total[1] += (y >= 0).sum()
    model.train()
    loss, count = all_sum(total).tolist()
    return loss / count

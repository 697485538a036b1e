"""The order of reading: which windows of tokens a run trains on.

Window number 0, 1, ... of a run depends only on the seed, the data sets and their weights,
block_size and `documents`. So a checkpoint stores one number: how many windows were read. A resumed
run starts at the right window at once, and each rank finds its own windows of a step.

The documents of a data set stand one after the other, each followed by an eos, the token that ends
a text. The setting `documents` says what a window is, and what a token may see:

    stream  a window starts and ends anywhere, and a token sees all tokens before it in the window
    mask    the same windows, but a token only sees those of its own document
    pack    windows are filled with whole documents (packing.py), with the same mask
    pad     each window has one document; a longer document is cut

In the last three, an eos counts as the first token of the document after it: the model learns to
start a document after an eos, as it will when it writes. The tokens before the first eos of a
window count as a document of their own.

text/dataset.py opens the files. This module only arranges their tokens.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

# The values of the settings documents, loss_per and loss_on (training/settings.py).
Documents = Literal["stream", "mask", "pack", "pad"]
LossPer = Literal["token", "document"]
LossOn = Literal["all", "answers"]


@dataclass(frozen=True)
class DataSet:
    """One of the data sets that a run reads."""

    name: str
    folder: Path
    meta: dict
    weight: Fraction  # its fraction of the run's windows; all weights add up to 1

    def sha256(self, split: str) -> str:
        """Return the hash of a split's .bin, as meta.json has it."""
        return self.meta["splits"][split]["sha256"]

    def learned(self, split: str, loss_on: LossOn) -> dict[str, int]:
        """Return {tokens, bytes} of the text in a split that is learned."""
        counts = self.meta["splits"][split]
        return counts["answers"] if loss_on == "answers" else counts


class Rows(NamedTuple):
    """Windows as the model reads them."""

    ids: np.ndarray  # (B, T + 1); -1: padding
    weights: np.ndarray | None  # (B, T): loss weight of each target; None: all alike
    eos_id: int | None  # a token sees only its own document, which an eos starts; None: all before


class Windows:
    """An endless sequence of windows over one split: T + 1 tokens each, and T tokens apart.

    A split is train.bin or val.bin, as one array of token ids.

    The first T tokens of a window are the inputs. The last T are the targets: the token after each
    input.

    The sequence consists of epochs. Each epoch visits every window once. The order of the windows
    and the offset of the first window are drawn anew for each epoch, from (seed, epoch). The seed
    is that of the run, and the number of the data set.

    tokens: all token ids of the split, (n,). block_size: T. loss_weights: a LossWeights of
    packing.py; None: all targets count alike. eos_id: as in Rows.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        block_size: int,
        loss_weights: Any = None,
        eos_id: int | None = None,
    ):
        self.tokens = tokens
        self.block_size = block_size
        self.loss_weights = loss_weights
        self.eos_id = eos_id
        self.weighted = loss_weights is not None
        self.cut = ""  # a sentence on documents that are longer than a window
        self.spacing = block_size  # from the start of one window to that of the next
        # Windows in an epoch: as many as fit at every offset from 0 to T - 1.
        self.n_windows = max(1, (len(tokens) - block_size) // block_size)
        # Windows for evaluation: as many as fit at offset 0.
        self.n_fixed = (len(tokens) - 1) // block_size
        # The offset of an epoch is below this. If the tokens are few, some of the T do not fit.
        self.n_offsets = min(block_size, len(tokens) - self.n_windows * block_size)
        # Two epochs are kept: a batch may contain the end of one and the start of the next.
        self.epoch = lru_cache(maxsize=2)(self.draw_epoch)

    def draw_epoch(self, seed: tuple[int, ...], epoch: int) -> tuple[int, np.ndarray]:
        """Return (offset, permutation (n_windows,)) of an epoch."""
        rng = np.random.default_rng((*seed, epoch))
        return int(rng.integers(self.n_offsets)), rng.permutation(self.n_windows)

    def start(self, seed: tuple[int, ...], number: int) -> int:
        """Return the position in the split at which window `number` of the sequence starts."""
        epoch, i = divmod(number, self.n_windows)
        offset, order = self.epoch(seed, epoch)
        return offset + int(order[i]) * self.spacing

    def fixed_starts(self, n_tokens: int) -> list[int]:
        """Return the starts of the windows for evaluation, which are always the same.

        They contain about `n_tokens` tokens (0: all), and are spread evenly over the split.
        """
        n = self.n_fixed
        count = min(n, max(1, n_tokens // self.block_size)) if n_tokens else n
        return [int(i) * self.spacing for i in np.linspace(0, n - 1, count).round()]

    def row(self, start: int) -> np.ndarray:
        """Return the ids (T + 1,) of the window that starts at `start`."""
        return self.tokens[start : start + self.block_size + 1].astype(np.int64)

    def targets(self, start: int) -> np.ndarray:
        """Return the positions in the split of the targets of a window, (T,); -1: no target."""
        return np.arange(start + 1, start + 1 + self.block_size)

    def weights(self, start: int) -> np.ndarray:
        """Return the loss weight of each target of a window, (T,)."""
        targets = self.targets(start)
        is_target = (targets >= 0).astype(np.float32)
        return is_target if self.loss_weights is None else is_target * self.loss_weights.at(targets)


class PackedWindows(Windows):
    """Windows that are filled with whole documents, by a plan of packing.py: pack and pad.

    Each epoch visits them in another order. Here `start` is the number of a window in the plan, not
    the position of a token: with an offset of 0 and a spacing of 1, Windows.start() returns that.

    plan: what packed() of packing.py returns. start_id: the eos, which starts a document.
    """

    def __init__(self, *args: Any, plan: tuple[np.ndarray, np.ndarray], start_id: int):
        super().__init__(*args)
        self.spans, self.bounds = plan
        self.start_id = start_id
        self.n_windows = self.n_fixed = len(self.bounds) - 1
        self.n_offsets = self.spacing = 1
        self.weighted = True  # padding counts nothing

    def positions(self, window: int) -> np.ndarray:
        """Return the position in the split of each token of a window, (T + 1,).

        -1: no token of the split, but an eos if it comes first, and padding elsewhere.
        """
        spans = self.spans[self.bounds[window] : self.bounds[window + 1]].tolist()
        tokens = np.concatenate([np.arange(start, start + count) for start, count in spans])
        if len(tokens) > self.block_size:  # T + 1: in a long document, no eos precedes it
            return tokens
        positions = np.full(self.block_size + 1, -1)
        positions[1 : len(tokens) + 1] = tokens
        return positions

    def row(self, start: int) -> np.ndarray:
        positions = self.positions(start)
        ids = np.where(positions >= 0, self.tokens[positions].astype(np.int64), -1)
        if positions[0] < 0:
            ids[0] = self.start_id
        return ids

    def targets(self, start: int) -> np.ndarray:
        positions = self.positions(start)
        inputs, targets = positions[:-1], positions[1:]
        # A target is learned if its input is the token before it in the split, or if it starts a
        # document: then the token before it is an eos. The tail of a document that was cut fails
        # both: the eos that its window puts before it predicts nothing. A target of 0 or -1 has no
        # token before it: the one that is read instead does not change the result.
        starts_document = (targets == 0) | (self.tokens[targets - 1] == self.start_id)
        return np.where((inputs == targets - 1) | starts_document, targets, -1)


class Loader:
    """The windows of a run, from the training split of one data set or of a mixture.

    Data sets are mixed here and not in prepare.py. So other weights need no new tokens, every data
    set keeps its own counts and hashes, and each epoch of a data set still visits each of its
    windows once.

    Example: with the weights 7/10 and 3/10, the windows 0 to 9 come from the splits
    1 0 0 1 0 0 1 0 0 0. After n windows, the first split has had n x weight of them, rounded down,
    and the second split the rest. Each further split may add 1 to the difference. pick() computes
    this for any window without counting the windows before it.
    """

    def __init__(self, splits: list[Windows], weights: list[Fraction], seed: int = 0):
        self.splits = splits
        self.seed = seed
        self.eos_id = splits[0].eos_id  # as in Rows
        self.weighted = any(windows.weighted for windows in splits)
        # The fraction that each split takes of the windows that the splits before it leave.
        self.remaining_fractions = [w / sum(weights[k:]) for k, w in enumerate(weights)]

    def pick(self, number: int) -> tuple[int, int]:
        """Return (split, number in the sequence of that split) of window `number` of the run."""
        for k, fraction in enumerate(self.remaining_fractions):
            # Split k takes this window if its whole number of windows grows with it.
            taken = int(number * fraction)
            if int((number + 1) * fraction) > taken:
                return k, taken
            number -= taken  # the windows that split k leaves are numbered anew
        raise AssertionError("the last split takes all windows that are left: its fraction is 1")

    def starts(self, number: int, count: int) -> list[tuple[int, int]]:
        """Return (split, start) of `count` windows of the run, from window `number` on."""
        picked = map(self.pick, range(number, number + count))
        return [(k, self.splits[k].start((self.seed, k), i)) for k, i in picked]

    def rows(self, starts: list[tuple[int, int]]) -> Rows:
        """Return the windows that start at `starts`."""
        ids = np.stack([self.splits[k].row(start) for k, start in starts])
        weights = None
        if self.weighted:
            weights = np.stack([self.splits[k].weights(start) for k, start in starts])
        return Rows(ids, weights, self.eos_id)

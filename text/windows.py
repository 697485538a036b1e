"""The order of reading: which windows of tokens a run trains on.

Window number 0, 1, ... of a run depends only on the seed, the data sets with their shares,
block_size and `documents`. So a checkpoint stores one number, how many windows were read. A resumed
run starts at the right window at once, and each rank computes its own share of a step.

The documents of a data set stand one after the other, each followed by an eos. The setting
`documents` says what a window is, and what a token may see:

    stream  a window begins and ends anywhere, and a token sees all tokens before it in the window
    mask    the same windows, but a token only sees those of its own document
    pack    windows are filled with whole documents (packing.py), with the same mask
    pad     each window has one document; one that is longer is cut

In the last three, an eos counts as the first token of the document behind it: the model learns to
begin a document after an eos, as it will when it writes. What stands before the first eos of a
window is a document of its own.

text/dataset.py opens the files. Here is only what becomes of their tokens.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

Documents = Literal["stream", "mask", "pack", "pad"]
LossPer = Literal["token", "document"]
LossOn = Literal["all", "answers"]


@dataclass(frozen=True)
class DataSet:
    """One of the data sets that a run reads."""

    name: str
    folder: Path
    meta: dict
    weight: Fraction  # its share of the run's windows; all weights add up to 1

    def learned(self, split: str, loss_on: LossOn) -> dict[str, int]:
        """Return {tokens, bytes} of what is learned of a split."""
        counts = self.meta["splits"][split]
        return counts["answers"] if loss_on == "answers" else counts


class Rows(NamedTuple):
    """Windows as the model reads them."""

    ids: np.ndarray  # (B, T + 1); -1: padding
    weights: np.ndarray | None  # (B, T): how much the loss of each target counts; None: all alike
    eos_id: int | None  # a token sees only its own document, which an eos begins; None: all before


class Windows:
    """An endless sequence of windows over one split: T + 1 tokens each, and T tokens apart.

    A window has one token more than T, because it gives both the inputs (its first T tokens) and
    the targets (its last T tokens: the one that follows each input).

    The sequence consists of epochs. Each epoch visits every window once. The order of the windows
    and the offset of the first window are drawn anew for each epoch, from (seed, epoch).

    tokens: all token ids of the split, (n,). block_size: T. seed: of the run, and the number of the
    data set. counting: of packing.py, says how much each target counts; None: all count alike.
    """

    def __init__(self, tokens: np.ndarray, block_size: int, seed: tuple, counting: Any):
        self.tokens = tokens
        self.block_size = block_size
        self.seed = seed
        self.counting = counting
        self.weighted = counting is not None
        self.cut = ""  # what becomes of documents that are longer than a window, in words
        self.spacing = block_size  # from the start of one window to that of the next
        # Windows in an epoch: as many as fit at every offset from 0 to T - 1.
        self.n_windows = max(1, (len(tokens) - block_size) // block_size)
        # Windows for evaluation: as many as fit at offset 0.
        self.n_fixed = (len(tokens) - 1) // block_size
        # The offset of an epoch is below this. Of few tokens, only some of all T offsets fit.
        self.n_offsets = min(block_size, len(tokens) - self.n_windows * block_size)
        # Two epochs are kept: a batch may contain the end of one and the beginning of the next.
        self.epoch = lru_cache(maxsize=2)(self.draw_epoch)

    def draw_epoch(self, epoch: int) -> tuple[int, np.ndarray]:
        """Return (offset, permutation (n_windows,)) of an epoch."""
        rng = np.random.default_rng((*self.seed, epoch))
        return int(rng.integers(self.n_offsets)), rng.permutation(self.n_windows)

    def start(self, number: int) -> int:
        """Return where window `number` of the endless sequence begins in the split."""
        epoch, i = divmod(number, self.n_windows)
        offset, order = self.epoch(epoch)
        return offset + int(order[i]) * self.spacing

    def fixed_starts(self, n_tokens: int) -> list[int]:
        """Return the starts of the windows for evaluation, which are always the same.

        They contain about `n_tokens` tokens (0: all), and are spread evenly over the split.
        """
        n = self.n_fixed
        count = min(n, max(1, n_tokens // self.block_size)) if n_tokens else n
        return [int(i) * self.spacing for i in np.linspace(0, n - 1, count).round()]

    def row(self, start: int) -> np.ndarray:
        """Return the ids (T + 1,) of the window that begins at `start`."""
        return self.tokens[start : start + self.block_size + 1].astype(np.int64)

    def targets(self, start: int) -> np.ndarray:
        """Return where in the split the targets of a window are, (T,); -1: there is none."""
        return np.arange(start + 1, start + 1 + self.block_size)

    def weights(self, start: int) -> np.ndarray:
        """Return how much the loss of each target of a window counts, (T,)."""
        targets = self.targets(start)
        is_target = (targets >= 0).astype(np.float32)
        return is_target if self.counting is None else is_target * self.counting.weights(targets)


class PackedWindows(Windows):
    """Windows that are filled with whole documents, as packing.py has planned them: pack and pad.

    Each epoch visits them in another order. `start` is the number of a window in the plan here, and
    not a token: with an offset of 0 and a spacing of 1, that is what Windows.start() returns.

    plan: the pieces, and which of them each window has. eos_id: the token that begins a document.
    """

    def __init__(self, *of_windows: Any, plan: tuple[np.ndarray, np.ndarray], eos_id: int):
        super().__init__(*of_windows)
        self.pieces, self.bounds = plan
        self.eos_id = eos_id
        self.n_windows = self.n_fixed = len(self.bounds) - 1
        self.n_offsets = self.spacing = 1
        self.weighted = True  # padding counts nothing

    def places(self, window: int) -> np.ndarray:
        """Return which token of the split stands at each place of a window, (T + 1,).

        -1: none of them, but an eos at the first place, and padding at all others.
        """
        pieces = self.pieces[self.bounds[window] : self.bounds[window + 1]].tolist()
        tokens = np.concatenate([np.arange(start, start + count) for start, count in pieces])
        if len(tokens) > self.block_size:  # T + 1: in a long document, no eos precedes it
            return tokens
        places = np.full(self.block_size + 1, -1)
        places[1 : len(tokens) + 1] = tokens
        return places

    def row(self, start: int) -> np.ndarray:
        places = self.places(start)
        ids = np.where(places >= 0, self.tokens[places].astype(np.int64), -1)
        if places[0] < 0:
            ids[0] = self.eos_id
        return ids

    def targets(self, start: int) -> np.ndarray:
        places = self.places(start)
        inputs, targets = places[:-1], places[1:]
        # A target is learned if its input is the token before it in the split, or if it begins a
        # document: then an eos is right before it. The rest of a document that was cut fails both:
        # its window puts an eos before it, which says nothing of it. (A target of 0 or -1 has no
        # token before it: what is read in its place does not change the result.)
        begins_document = (targets == 0) | (self.tokens[targets - 1] == self.eos_id)
        return np.where((inputs == targets - 1) | begins_document, targets, -1)


class Loader:
    """The windows of a run, from the training split of one data set, or of several that are mixed.

    Mixing happens here and not in prepare.py. So other shares need no new tokens, every data set
    keeps its own counts and hashes, and each window of a data set is still visited once in each of
    its epochs.

    Example: with the shares 7/10 and 3/10, the windows 0 to 9 come from the splits
    1 0 0 1 0 0 1 0 0 0. After n windows, a split has had n x share of them, rounded down; of two
    splits, the second has had the rest. Each further split may add 1 to the difference. pick()
    computes this for any window without counting the windows before it.
    """

    def __init__(self, splits: list[Windows], weights: list[Fraction], eos_id: int | None = None):
        """eos_id: see Rows."""
        self.splits = splits
        self.eos_id = eos_id
        self.weighted = any(windows.weighted for windows in splits)
        # The share of each split in the windows that the splits before it leave.
        self.share_of_rest = [w / sum(weights[k:]) for k, w in enumerate(weights)]

    def pick(self, number: int) -> tuple[int, int]:
        """Return (split, number in the sequence of that split) of window `number` of the run."""
        for k, share in enumerate(self.share_of_rest):
            # Split k takes this window if its whole number of windows grows with it.
            taken = int(number * share)
            if int((number + 1) * share) > taken:
                return k, taken
            number -= taken  # the windows that split k leaves are numbered anew
        raise AssertionError("the last split takes all windows that are left: its share is 1")

    def starts(self, number: int, count: int) -> list[tuple[int, int]]:
        """Return (split, start) of `count` windows of the run, from window `number` on."""
        picked = map(self.pick, range(number, number + count))
        return [(k, self.splits[k].start(i)) for k, i in picked]

    def rows(self, starts: list[tuple[int, int]]) -> Rows:
        """Return the windows that begin at `starts`."""
        ids = np.stack([self.splits[k].row(start) for k, start in starts])
        weights = None
        if self.weighted:
            weights = np.stack([self.splits[k].weights(start) for k, start in starts])
        return Rows(ids, weights, self.eos_id)

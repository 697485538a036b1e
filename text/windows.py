"""The order of reading: which windows of tokens a run trains on.

Window number 0, 1, ... of a run depends only on the seed, the data sets with their shares, and
block_size. So a checkpoint stores one number, how many windows were read. A resumed run starts at
the right window at once, and each rank computes its own share of a step.

The documents of a data set stand one after the other, each followed by an eos. A window may begin
and end inside a document.
"""

from fractions import Fraction

import numpy as np

from configurator import UserError
from text.dataset import DataSet, open_split


class Windows:
    """An endless sequence of windows over one split: T + 1 tokens each, and T tokens apart.

    A window has one token more than T, because it gives both the inputs (its first T tokens) and
    the targets (its last T tokens: the one that follows each input).

    The sequence consists of epochs. Each epoch visits every window once. The order of the windows
    and the offset of the first window are drawn anew for each epoch, from (seed, epoch).

    tokens: all token ids of the split, (n,). block_size: T.
    """

    def __init__(self, tokens: np.ndarray, block_size: int, seed: tuple[int, ...]):
        self.tokens = tokens
        self.block_size = block_size
        self.seed = seed
        # This many windows fit at every offset from 0 to T - 1.
        self.n_windows = max(1, (len(tokens) - block_size) // block_size)
        # The last two epochs: a batch may contain the end of one and the beginning of the next.
        self.epochs: dict[int, tuple[int, np.ndarray]] = {}

    def epoch(self, epoch: int) -> tuple[int, np.ndarray]:
        """Return (offset, permutation (n_windows,)) of an epoch."""
        if epoch not in self.epochs:
            rng = np.random.default_rng((*self.seed, epoch))
            slack = len(self.tokens) - 1 - self.n_windows * self.block_size
            offset = int(rng.integers(0, min(slack, self.block_size - 1) + 1))
            self.epochs = {e: v for e, v in self.epochs.items() if e == epoch - 1}
            self.epochs[epoch] = offset, rng.permutation(self.n_windows)
        return self.epochs[epoch]

    def start(self, number: int) -> int:
        """Return where window `number` of the endless sequence begins in the split."""
        epoch, i = divmod(number, self.n_windows)
        offset, order = self.epoch(epoch)
        return offset + int(order[i]) * self.block_size

    def fixed_starts(self, n_tokens: int) -> list[int]:
        """Return the starts of the windows for evaluation, which are always the same.

        They contain about `n_tokens` tokens (0: all), and are spread evenly over the split.
        """
        n = (len(self.tokens) - 1) // self.block_size
        count = min(n, max(1, n_tokens // self.block_size)) if n_tokens else n
        return [int(i) * self.block_size for i in np.linspace(0, n - 1, count).round()]

    def row(self, start: int) -> np.ndarray:
        """Return the ids (T + 1,) of the window that begins at `start`."""
        return self.tokens[start : start + self.block_size + 1].astype(np.int64)


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

    def __init__(self, splits: list[Windows], weights: list[Fraction]):
        self.splits = splits
        # The share of each split in the windows that the splits before it leave.
        self.share_of_rest = [w / sum(weights[k:]) for k, w in enumerate(weights)]

    def pick(self, number: int) -> tuple[int, int]:
        """Return (split, number in the sequence of that split) of window `number` of the run."""
        for k, share in enumerate(self.share_of_rest):
            # Split k takes this window if its whole number of windows grows with it.
            before = number * share.numerator // share.denominator
            after = (number + 1) * share.numerator // share.denominator
            if after > before:
                return k, before
            number -= before  # the windows that split k leaves are numbered anew
        raise AssertionError("the last split takes all windows that are left: its share is 1")

    def starts(self, first: int, count: int) -> list[tuple[int, int]]:
        """Return (split, start) of the windows first ... first + count - 1 of the run."""
        picked = map(self.pick, range(first, first + count))
        return [(k, self.splits[k].start(number)) for k, number in picked]

    def rows(self, starts: list[tuple[int, int]]) -> np.ndarray:
        """Return the windows that begin at `starts`, (B, T + 1)."""
        return np.stack([self.splits[k].row(start) for k, start in starts])


def open_windows(
    data: DataSet, split: str, block_size: int, seed: tuple[int, ...] = (0,)
) -> Windows:
    """Open a split of a data set. Raises UserError if it is shorter than one window."""
    tokens = open_split(data.folder, data.meta, split)
    if len(tokens) < block_size + 1:
        found = f"{data.name}/{split}.bin has {len(tokens)} tokens"
        needs = f"block_size={block_size} needs {block_size + 1}"
        more = "more text" if split == "train" else "more text, or with a larger --val_fraction"
        raise UserError(f"{found}, {needs}: lower block_size, or prepare {more}")
    return Windows(tokens, block_size, seed)


def train_loader(sets: list[DataSet], block_size: int, seed: int) -> Loader:
    """Return the Loader over the training splits of the data sets, mixed by their weights."""
    windows = [open_windows(data, "train", block_size, (seed, k)) for k, data in enumerate(sets)]
    return Loader(windows, [data.weight for data in sets])

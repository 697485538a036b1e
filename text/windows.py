"""The order of reading: which windows of tokens each training step reads.

This depends only on (seed, step). So a checkpoint does not save a position, a resumed run does
not read again what came before, and each rank can compute its own share.
"""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np

from configurator import UserError
from text.dataset import DataSet, open_datasets, open_split
from text.tokenizer import SentencePiece, Tiktoken


class Windows:
    """An endless sequence of windows over one split: T + 1 tokens each, and T tokens apart.

    The sequence consists of epochs. Each epoch visits every window once. The order of the windows
    and the offset of the first window are drawn anew for each epoch, from (seed, epoch).

    tokens: (tokens,). block_size: T.
    """

    def __init__(self, tokens: np.ndarray, block_size: int, seed: tuple[int, ...]):
        self.tokens = tokens
        self.block_size = block_size
        self.seed = seed
        # So many windows fit into the split for every possible offset.
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

    def start(self, sample: int) -> int:
        """Return where window number `sample` of the endless sequence begins in the split."""
        epoch, i = divmod(sample, self.n_windows)
        offset, order = self.epoch(epoch)
        return offset + int(order[i]) * self.block_size

    def fixed_starts(self, tokens: int) -> list[int]:
        """Return the starts of the windows for evaluation, which are always the same.

        They contain about `tokens` tokens (0: all), and are spread evenly over the split.
        """
        n = (len(self.tokens) - 1) // self.block_size
        count = min(n, max(1, tokens // self.block_size)) if tokens else n
        return [int(i) * self.block_size for i in np.linspace(0, n - 1, count).round()]

    def row(self, start: int) -> np.ndarray:
        """Return the ids (T + 1,) of the window that begins at `start`."""
        return self.tokens[start : start + self.block_size + 1].astype(np.int64)


class Loader:
    """The samples of a run: windows of one split, or of several splits mixed by given shares.

    Mixing happens here and not in prepare.py. So other shares need no new tokens, every data set
    keeps its own counts and hashes, and each window of a data set is still visited once in each of
    its epochs.

    The shares are kept with whole numbers, in the way a straight line is drawn on a screen
    (Bresenham, 1965). After n samples a data set has had n x share of them, within 1 if there are
    two data sets. The number of a sample in its own data set is known without counting.
    """

    def __init__(self, splits: list[Windows], weights: list[Fraction]):
        self.splits = splits
        # The share of each split in the samples that the splits before it do not take.
        self.shares = [w / sum(weights[k:]) for k, w in enumerate(weights)]

    def pick(self, sample: int) -> tuple[int, int]:
        """Return (split, its own sample number) of sample 0, 1, ... of the run."""
        k = 0
        while True:
            share = self.shares[k]
            # `sample` is counted here among the samples that the splits before k do not take.
            # Of those that come before it, split k takes this many.
            before = sample * share.numerator // share.denominator
            after = (sample + 1) * share.numerator // share.denominator
            if after > before:  # always true for the last split: its share is 1
                return k, before
            sample -= before
            k += 1

    def starts(self, first: int, count: int) -> list[tuple[int, int]]:
        """Return (split, start) of the samples first ... first + count - 1 of the run."""
        picked = map(self.pick, range(first, first + count))
        return [(k, self.splits[k].start(sample)) for k, sample in picked]

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
        raise UserError(f"{found}, {needs}: lower block_size, or prepare more data")
    return Windows(tokens, block_size, seed)


def train_loader(sets: list[DataSet], block_size: int, seed: int) -> Loader:
    """Return the Loader over the training splits of the data sets, mixed by their weights."""
    windows = [open_windows(data, "train", block_size, (seed, k)) for k, data in enumerate(sets)]
    return Loader(windows, [data.weight for data in sets])


def run_loader(path: Path, records: list[dict], step: int) -> tuple[list[DataSet], Loader, range]:
    """Return (data sets, loader, samples of the step) of a run.

    path: its metrics.jsonl, for error messages. records: the content of that file, which includes
    the settings of the run. step: counted from 1, as in the log, metrics.jsonl and bad_steps/.
    Raises UserError if the records do not say what the step trained on, or if a data set was made
    again since then.
    """
    # A record with settings is written when a run begins, and when it resumes with other settings.
    # Its "step" is the number of steps before that, so it is smaller than the steps it describes.
    with_settings = [r for r in records if "settings" in r and r["step"] < step]
    if not with_settings:
        raise UserError(f"{path}: it has no settings of a run that began before step {step}")
    begun = with_settings[-1]
    try:
        last = begun["steps"] if "steps" in begun else max(record["step"] for record in records)
        if step > last:
            raise UserError(f"--step={step}: the run ends with step {last}")
        settings = begun["settings"]
        samples = begun["step_samples"]
        sets = open_datasets(settings["dataset"], settings["data_dir"])
        for data in sets:
            if data.meta["splits"]["train"]["sha256"] != begun["data"][data.name]:
                what = "made again since the run: it no longer holds what the step trained on"
                raise UserError(f"{data.folder}: {what}")
        loader = train_loader(sets, settings["block_size"], settings["seed"])
        first = begun["first_sample"] + (step - 1 - begun["step"]) * samples
        return sets, loader, range(first, first + samples)
    except (KeyError, TypeError, ValueError) as e:
        what = f"the settings of its run are damaged ({type(e).__name__}: {e})"
        raise UserError(f"{path}: {what}") from None


def sample_texts(
    sets: list[DataSet], loader: Loader, samples: range, tokenizer: SentencePiece | Tiktoken
) -> Iterator[tuple[str, str]]:
    """Yield (where it comes from, its text) for each of these samples of a run."""
    eos_id = tokenizer.eos_id
    starts = loader.starts(samples.start, len(samples))
    for sample, (k, start) in zip(samples, starts, strict=True):
        ids = loader.rows([(k, start)])[0]
        texts = []
        for part in np.split(ids, np.flatnonzero(ids == eos_id)):
            texts.append(tokenizer.decode([i for i in part.tolist() if i != eos_id]))
        place = f"tokens {start:,} to {start + len(ids) - 1:,}"
        yield f"sample {sample:,}: {sets[k].name}/train.bin, {place}", "<eos>".join(texts)

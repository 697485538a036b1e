"""The order of reading: which windows a training step sees is a pure function of (seed, step).

So nothing is saved with a checkpoint and nothing is fast-forwarded on a resume, and any rank finds its
share by itself.
"""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np

from configurator import UserError
from text.dataset import DataSet, open_datasets, open_split
from text.tokenizer import SentencePiece, Tiktoken


class Windows:
    """Windows of T + 1 tokens, T apart, over one split (tokens,), as an endless sequence of epochs. Each epoch visits
    every window once, in a permutation and from an offset of its own, both drawn from (seed, epoch).
    """

    def __init__(self, tokens: np.ndarray, block_size: int, seed: tuple[int, ...]):
        self.tokens, self.block_size, self.seed = tokens, block_size, seed
        self.n_windows = max(1, (len(tokens) - block_size) // block_size)  # as many as fit behind every offset
        self.epochs: dict[int, tuple[int, np.ndarray]] = {}  # the last two: a batch may lie across an epoch's edge

    def epoch(self, epoch: int) -> tuple[int, np.ndarray]:
        """(offset, permutation (n_windows,)) of an epoch."""
        if epoch not in self.epochs:
            rng = np.random.default_rng((*self.seed, epoch))
            slack = len(self.tokens) - 1 - self.n_windows * self.block_size
            offset = int(rng.integers(0, min(slack, self.block_size - 1) + 1))
            self.epochs = {e: v for e, v in self.epochs.items() if e == epoch - 1}
            self.epochs[epoch] = offset, rng.permutation(self.n_windows)
        return self.epochs[epoch]

    def start(self, sample: int) -> int:
        """Where window number `sample` of the endless sequence begins in the split."""
        epoch, i = divmod(sample, self.n_windows)
        offset, order = self.epoch(epoch)
        return offset + int(order[i]) * self.block_size

    def fixed_starts(self, tokens: int) -> list[int]:
        """Windows for evaluation: always the same, about `tokens` of them (0: all), spread evenly over the split."""
        n = (len(self.tokens) - 1) // self.block_size
        count = min(n, max(1, tokens // self.block_size)) if tokens else n
        return [int(i) * self.block_size for i in np.linspace(0, n - 1, count).round()]

    def row(self, start: int) -> np.ndarray:
        """The T + 1 ids (T + 1,) of the window that begins at `start`."""
        return self.tokens[start : start + self.block_size + 1].astype(np.int64)


class Loader:
    """The samples of a run: windows of one split, or of several, each with its share.

    Mixing happens here and not in prepare.py, so that other shares need no new tokens, every data set keeps its own
    counts and hashes, and every window of each is still visited once in an epoch of its own. The shares are kept like a
    straight line on a screen (Bresenham, 1965), in whole numbers: after n samples a set has had n x share, within 1 for
    two sets, and its own sample number is known without counting.
    """

    def __init__(self, splits: list[Windows], weights: list[Fraction]):
        self.splits = splits
        self.shares = [w / sum(weights[k:]) for k, w in enumerate(weights)]  # of what the sets before it leave

    def pick(self, sample: int) -> tuple[int, int]:
        """(split, its own sample number) of sample 0, 1, ... of the run."""
        k = 0
        while True:
            share = self.shares[k]
            before = sample * share.numerator // share.denominator  # of the samples that reach k, so many were k's
            if (sample + 1) * share.numerator // share.denominator > before:  # always so for the last: its share is 1
                return k, before
            k, sample = k + 1, sample - before

    def starts(self, first: int, count: int) -> list[tuple[int, int]]:
        """(split, start) of samples first ... first + count - 1 of the run."""
        picked = map(self.pick, range(first, first + count))
        return [(k, self.splits[k].start(sample)) for k, sample in picked]

    def rows(self, starts: list[tuple[int, int]]) -> np.ndarray:
        """The windows at `starts`, (B, T + 1)."""
        return np.stack([self.splits[k].row(start) for k, start in starts])


def open_windows(data: DataSet, split: str, block_size: int, seed: tuple[int, ...] = (0,)) -> Windows:
    tokens = open_split(data.folder, data.meta, split)
    if len(tokens) < block_size + 1:
        found = f"{data.name}/{split}.bin has {len(tokens)} tokens"
        needs = f"block_size={block_size} needs {block_size + 1}"
        raise UserError(f"{found}, {needs}: lower it, or prepare more data")
    return Windows(tokens, block_size, seed)


def train_loader(sets: list[DataSet], block_size: int, seed: int) -> Loader:
    windows = [open_windows(data, "train", block_size, (seed, k)) for k, data in enumerate(sets)]
    return Loader(windows, [data.weight for data in sets])


def run_loader(path: Path, records: list[dict], step: int) -> tuple[list[DataSet], Loader, range]:
    """(data sets, loader, samples of the step) of a run, from the settings in the records of its metrics.jsonl.

    step: as the log, metrics.jsonl and bad_steps/ count, from 1. path: of that file, for what is wrong with it.
    """
    # What was trained from a step on is said behind that step, so that step N follows a record of an earlier one.
    begun = next((r for r in reversed(records) if "settings" in r and r["step"] < step), None)
    if begun is None:
        raise UserError(f"{path}: no settings of a run in it, or of a later step only")
    try:
        last = begun["steps"] if "steps" in begun else max(record["step"] for record in records)
        if step > last:
            raise UserError(f"--step={step}: the run ends with step {last}")
        settings, samples = begun["settings"], begun["step_samples"]
        sets = open_datasets(settings["dataset"], settings["data_dir"])
        for data in sets:
            if data.meta["splits"]["train"]["sha256"] != begun["data"][data.name]:
                raise UserError(f"{data.folder}: made again since the run: it no longer holds what the step trained on")
        loader = train_loader(sets, settings["block_size"], settings["seed"])
        first = begun["first_sample"] + (step - 1 - begun["step"]) * samples
        return sets, loader, range(first, first + samples)
    except (KeyError, TypeError, ValueError) as e:
        raise UserError(f"{path}: damaged, about the settings of its run ({type(e).__name__}: {e})") from None


def sample_texts(
    sets: list[DataSet], loader: Loader, samples: range, tokenizer: SentencePiece | Tiktoken
) -> Iterator[tuple[str, str]]:
    """(where it comes from, its text) of each of these samples of a run."""
    for sample, (k, start) in zip(samples, loader.starts(samples.start, len(samples)), strict=True):
        ids = loader.rows([(k, start)])[0]
        parts = np.split(ids, np.flatnonzero(ids == tokenizer.eos_id))
        text = "<eos>".join(tokenizer.decode([i for i in part.tolist() if i != tokenizer.eos_id]) for part in parts)
        yield f"sample {sample:,}: {sets[k].name}/train.bin, tokens {start:,} to {start + len(ids) - 1:,}", text

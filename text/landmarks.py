"""What a loss is measured against: three simple models of a data set, and their losses on val.bin.

    uniform   all tokens of the vocabulary have the same probability: ln V
    unigram   a token has the probability that its frequency in train.bin gives it
    bigram    the same after each token: the frequencies of the tokens that follow it in train.bin

A GPT begins at the first of them, and soon falls below the second and the third. prepare.py counts
pairs of neighbours for the last two, and writes them into meta.json. The counts come from train.bin
and the loss is that on val.bin, so a token or pair that train.bin lacks must have a probability
too. It gets one by interpolated absolute discounting (Ney, Essen and Kneser, 1994): every count c
above 0 is lowered by D, and what that frees goes to the distribution of the order below.

    p1(v)     = max(c(v) - D, 0) / N       + D types / N           x  1 / V
    p2(w | v) = max(c(v, w) - D, 0) / c(v) + D followers(v) / c(v) x  p1(w)

c(v, w): pairs v w; c(v): pairs that begin with v; N: pairs; types: different tokens that they begin
with; followers(v): different tokens that follow v. D = 0.75 is what Church and Gale (1991) found
for pairs of words.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from text.dataset import DataSet

D = 0.75
STRETCH = 1 << 18  # tokens that are read at a time
# So many pairs of train.bin are counted, at 4 bytes each. In a larger file these are 32 stretches,
# spread evenly. The loss is measured on a quarter as many pairs of val.bin.
MOST = 1 << 23


class Ids:
    """The token ids of train.bin or val.bin, read in stretches.

    The memory of a map of the file would grow with the file, as far as a tool can see.
    """

    def __init__(self, folder: Path, meta: dict, split: str):
        self.path = folder / f"{split}.bin"
        self.dtype = np.dtype(meta["dtype"]).newbyteorder("<")

    def __len__(self) -> int:
        return self.path.stat().st_size // self.dtype.itemsize

    def read(self, start: int, count: int) -> np.ndarray:
        return np.fromfile(self.path, self.dtype, count, offset=start * self.dtype.itemsize)


def count_landmarks(folder: Path, meta: dict) -> dict[str, float]:
    """Return the losses on val.bin of the unigram and the bigram model of train.bin.

    They are in nats per token, rounded to 4 digits. `bigram_tokens` is the number of pairs of
    train.bin that were counted. The result is empty if one of the files has no two tokens.
    folder: where the files are. meta: their dtype and vocab_size, as in meta.json.
    """
    V = meta["vocab_size"]
    train, val = (Ids(folder, meta, split) for split in ("train", "val"))
    if len(train) < 2 or len(val) < 2:
        return {}
    with ThreadPoolExecutor(1) as other:  # numpy lets them run at the same time
        of_val = other.submit(count_pairs, val, V, MOST // 4)
        pairs, counts = count_pairs(train, V, MOST)
    first = pairs // V
    followers = np.bincount(first, minlength=V)  # (V,): different tokens that follow each token
    followed = np.bincount(first, counts, V)  # (V,): how often a token has one that follows
    p1 = np.maximum(followed - D, 0) + D * np.count_nonzero(followed) / V
    p1 /= counts.sum()  # (V,): the probability of each token

    asked, times = of_val.result()
    v, w = np.divmod(asked, V)
    place = np.searchsorted(pairs, asked).clip(max=len(pairs) - 1)
    seen = np.where(pairs[place] == asked, counts[place], 0)  # c(v, w) of each pair of val
    p2 = np.maximum(seen - D, 0) + D * followers[v] * p1[w]
    # A token that nothing has followed tells nothing of the next one.
    p2 = np.where(followed[v] > 0, p2 / np.maximum(followed[v], 1), p1[w])
    models = {"unigram": p1[w], "bigram": p2}
    losses = {name: float(np.average(-np.log(p), weights=times)) for name, p in models.items()}
    rounded = {name: round(loss, 4) for name, loss in losses.items()}
    return rounded | {"bigram_tokens": int(counts.sum())}


def count_pairs(ids: Ids, V: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the different pairs of neighbours, and how often each occurs in about `most` tokens.

    The pair (v, w) is given as the number v V + w. The pairs are sorted.
    """
    n = len(ids) - 1  # all pairs
    starts = range(0, n, STRETCH)
    if n > most:
        starts = np.linspace(0, n - STRETCH, most // STRETCH).astype(int)
    kind = np.uint32 if V <= 1 << 16 else np.int64  # V V - 1 fits into it
    pairs = np.empty(min(n, most), kind)
    done = 0
    for start in starts:
        stretch = ids.read(start, STRETCH + 1).astype(kind)
        pairs[done : done + len(stretch) - 1] = stretch[:-1] * V + stretch[1:]
        done += len(stretch) - 1
    pairs.sort()
    is_new = np.append(True, pairs[1:] != pairs[:-1])
    places = np.flatnonzero(is_new)
    return pairs[places], np.diff(places, append=done)


def mixed_landmarks(sets: list[DataSet]) -> dict[str, float]:
    """Return name -> loss of the landmarks of the data sets of a run, in nats per token.

    In a mixture, each is the mean over the data sets, weighted by their shares. A data set with a
    split of one token has none but ln V: then that is all.
    """
    mixed = {"uniform": math.log(sets[0].meta["vocab_size"])}
    counted = [data.meta["landmarks"] for data in sets]
    if all(counted):
        for name in ("unigram", "bigram"):
            pairs = zip(sets, counted, strict=True)
            mixed[name] = sum(float(data.weight) * of_set[name] for data, of_set in pairs)
    return mixed

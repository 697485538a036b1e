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
from pathlib import Path

import numpy as np

from text.dataset import DataSet, open_split
from text.windows import LossOn

D = 0.75
STRETCH = 1 << 18  # tokens that are read at a time
# So many pairs of train.bin are counted, at 4 bytes each. In a larger file these are 32 stretches,
# spread evenly. The loss is measured on a quarter as many pairs of val.bin.
MOST = 1 << 23


def count_landmarks(folder: Path, meta: dict) -> dict[str, float]:
    """Return the losses on val.bin of the unigram and the bigram model of train.bin.

    They are in nats per token, rounded to 4 digits. `bigram_tokens` is the number of pairs of
    train.bin that were counted. The result is empty if one of the files has no two tokens.
    folder: where the files are. meta: their dtype and vocab_size, as in meta.json.
    """
    V = meta["vocab_size"]
    train, val = (open_split(folder, meta, split) for split in ("train", "val"))
    if len(train) < 2 or len(val) < 2:
        return {}
    pairs, counts = count_pairs(train, V, MOST)
    followers = np.bincount(pairs // V, minlength=V)  # (V,): different tokens that follow each
    followed = np.bincount(pairs // V, counts, V)  # (V,): how often a token has one that follows
    p1 = np.maximum(followed - D, 0) + D * np.count_nonzero(followed) / V
    p1 /= counts.sum()  # (V,): the probability of each token

    val_pairs, times = count_pairs(val, V, MOST // 4)
    v, w = np.divmod(val_pairs, V)
    place = np.searchsorted(pairs, val_pairs).clip(max=len(pairs) - 1)
    seen = np.where(pairs[place] == val_pairs, counts[place], 0)  # c(v, w) of each pair of val
    p2 = np.maximum(seen - D, 0) + D * followers[v] * p1[w]
    # A token that nothing has followed tells nothing of the next one.
    p2 = np.where(followed[v] > 0, p2 / np.maximum(followed[v], 1), p1[w])
    losses = {"unigram": p1[w], "bigram": p2}
    losses = {k: round(float(np.average(-np.log(p), weights=times)), 4) for k, p in losses.items()}
    return losses | {"bigram_tokens": int(counts.sum())}


def count_pairs(ids: np.ndarray, V: int, most_pairs: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the different pairs of neighbours, and how often each occurs, in about `most_pairs`.

    The pair (v, w) is given as the number v V + w. The pairs are sorted.
    """
    n = len(ids) - 1  # all pairs
    starts = range(0, n, STRETCH)
    if n > most_pairs:
        starts = np.linspace(0, n - STRETCH, most_pairs // STRETCH).astype(int)
    dtype = np.uint32 if V <= 1 << 16 else np.int64  # V V - 1 fits into it
    stretches = [ids[start : start + STRETCH + 1].astype(dtype) for start in starts]
    pairs = np.concatenate([stretch[:-1] * V + stretch[1:] for stretch in stretches])
    return np.unique(pairs, return_counts=True)


def mixed_landmarks(sets: list[DataSet], loss_on: LossOn) -> dict[str, float]:
    """Return name -> loss of the landmarks of the data sets of a run, in nats per token.

    There are none of answers alone. In a mixture, each is the mean over the data sets, weighted by
    their shares. A data set with a split of one token has none but ln V: then that is all.
    """
    if loss_on == "answers":
        return {}
    mixed = {"uniform": math.log(sets[0].meta["vocab_size"])}
    for name in ("unigram", "bigram"):
        if all(data.meta["landmarks"] for data in sets):
            mixed[name] = sum(float(x.weight) * x.meta["landmarks"][name] for x in sets)
    return mixed

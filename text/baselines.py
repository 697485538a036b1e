"""N-gram baselines: the losses on val.bin of three simple models of a data set.

    uniform   all tokens of the vocabulary have the same probability: ln V
    unigram   a token has the probability that its frequency in train.bin gives it
    bigram    the same after each token: the frequencies of the tokens that follow it in train.bin

The loss of a GPT starts at the first of them, and soon falls below the second and the third.
prepare.py computes the last two from pairs of neighbours, and writes them to meta.json. The counts
come from train.bin and the losses are measured on val.bin, so a token or pair that is not in
train.bin needs a probability too. Interpolated absolute discounting (Ney, Essen and Kneser, 1994)
gives it one: every count c above 0 is lowered by D, and the probability that this frees goes to the
distribution of the next lower order.

    p1(v)     = max(c(v) - D, 0) / N       + D types / N           x  1 / V
    p2(w | v) = max(c(v, w) - D, 0) / c(v) + D followers(v) / c(v) x  p1(w)

c(v, w): pairs v w; c(v): pairs that start with v; N: pairs; types: different first tokens of pairs;
followers(v): different tokens that follow v. D = 0.75 is the value of Church and Gale (1991) for
pairs of words.
"""

import math
from pathlib import Path

import numpy as np

from text.dataset import DataSet, open_split
from text.windows import LossOn

D = 0.75
SPAN = 1 << 18  # tokens that are read at a time
# At most this many pairs of train.bin are counted, at 4 bytes each. In a larger file these are 32
# spans, evenly spread. The loss is measured on a quarter as many pairs of val.bin.
MAX_PAIRS = 1 << 23


def ngram_losses(folder: Path, meta: dict) -> dict[str, float]:
    """Return the losses of the unigram and the bigram model on val.bin.

    The losses are in nats per token, rounded to 4 digits. `bigram_tokens` is the number of pairs of
    train.bin that were counted. The result is {} if train.bin or val.bin has fewer than two
    tokens. folder: of the data set. meta: their dtype and vocab_size, as in meta.json.
    """
    V = meta["vocab_size"]
    train, val = (open_split(folder, meta, split) for split in ("train", "val"))
    if len(train) < 2 or len(val) < 2:
        return {}
    pairs, counts = count_pairs(train, V, MAX_PAIRS)
    followers = np.bincount(pairs // V, minlength=V)  # (V,): different tokens that follow v
    followed = np.bincount(pairs // V, counts, V)  # (V,): pairs that start with v
    p1 = np.maximum(followed - D, 0) + D * np.count_nonzero(followed) / V
    p1 /= counts.sum()  # (V,): the probability of each token

    val_pairs, times = count_pairs(val, V, MAX_PAIRS // 4)
    v, w = np.divmod(val_pairs, V)
    index = np.searchsorted(pairs, val_pairs).clip(max=len(pairs) - 1)
    seen = np.where(pairs[index] == val_pairs, counts[index], 0)  # c(v, w) of each pair of val
    p2 = np.maximum(seen - D, 0) + D * followers[v] * p1[w]
    # A token that starts no pair of train.bin predicts nothing.
    p2 = np.where(followed[v] > 0, p2 / np.maximum(followed[v], 1), p1[w])
    losses = {"unigram": p1[w], "bigram": p2}
    losses = {k: round(float(np.average(-np.log(p), weights=times)), 4) for k, p in losses.items()}
    return losses | {"bigram_tokens": int(counts.sum())}


def count_pairs(ids: np.ndarray, V: int, max_pairs: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct pairs among about `max_pairs` pairs of neighbours, and their counts.

    The pair (v, w) is the number v V + w. The pairs are sorted.
    """
    n = len(ids) - 1  # all pairs
    starts = range(0, n, SPAN)
    if n > max_pairs:
        starts = np.linspace(0, n - SPAN, max_pairs // SPAN).astype(int)
    dtype = np.uint32 if V <= 1 << 16 else np.int64  # V V - 1 fits into it
    spans = [ids[start : start + SPAN + 1].astype(dtype) for start in starts]
    pairs = np.concatenate([span[:-1] * V + span[1:] for span in spans])
    return np.unique(pairs, return_counts=True)


def mixed_baselines(sets: list[DataSet], loss_on: LossOn) -> dict[str, float]:
    """Return name -> loss of the baselines of a run, in nats per token.

    With loss_on=answers there are none. In a mixture, each is the mean over the data sets, weighted
    by their fractions of the run. If a data set has a split of one token, only uniform is returned.
    """
    if loss_on == "answers":
        return {}
    mixed = {"uniform": math.log(sets[0].meta["vocab_size"])}
    for name in ("unigram", "bigram"):
        if all(data.meta["landmarks"] for data in sets):
            mixed[name] = sum(float(x.weight) * x.meta["landmarks"][name] for x in sets)
    return mixed

"""The n-gram baselines: computed by prepare.py, used by train.py."""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from text.baselines import mixed_baselines, ngram_losses
from text.dataset import DataSet

V = 40


def test_the_losses_are_those_of_the_formulas(tmp_path):
    """Some ids in val never occur in train."""
    rng = np.random.default_rng(0)
    train_ids, val_ids = rng.zipf(1.3, 3000) % (V - 5), rng.zipf(1.2, 500) % V
    for name, tokens in (("train", train_ids), ("val", val_ids)):
        tokens.astype("<u2").tofile(tmp_path / f"{name}.bin")
    counts = np.zeros((V, V))
    np.add.at(counts, (train_ids[:-1], train_ids[1:]), 1)
    c = counts.sum(1)
    p1 = (np.maximum(c - 0.75, 0) + 0.75 * np.count_nonzero(c) / V) / c.sum()
    followers = np.count_nonzero(counts, axis=1)[:, None]
    p2 = (np.maximum(counts - 0.75, 0) + 0.75 * followers * p1) / np.maximum(c, 1)[:, None]
    p2[c == 0] = p1
    assert p1.sum() == pytest.approx(1) and p2.sum(1) == pytest.approx(np.ones(V))
    v, w = val_ids[:-1], val_ids[1:]
    assert ngram_losses(tmp_path, {"vocab_size": V, "dtype": "uint16"}) == {
        "unigram": pytest.approx(-np.log(p1[w]).mean(), abs=1e-4),
        "bigram": pytest.approx(-np.log(p2[v, w]).mean(), abs=1e-4),
        "bigram_tokens": len(train_ids) - 1,
    }


def test_baselines_of_a_mixture_are_weighted_and_a_tiny_data_set_has_none():
    a, b = ({"vocab_size": V, "landmarks": {"unigram": x, "bigram": x - 1}} for x in (3.0, 2.0))
    sets = [DataSet("a", Path(), a, Fraction(3, 4)), DataSet("b", Path(), b, Fraction(1, 4))]
    assert mixed_baselines(sets, "all") == {"uniform": math.log(V), "unigram": 2.75, "bigram": 1.75}
    b["landmarks"] = {}
    assert mixed_baselines(sets, "all") == {"uniform": math.log(V)}

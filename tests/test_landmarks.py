"""What a loss is compared with: counted by prepare.py, said by train.py."""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from conftest import metrics, train_tiny

import text.landmarks as landmarks
from text.dataset import DataSet
from text.landmarks import count_landmarks, mixed_landmarks
from training.metrics import Watch

V = 40
META = {"vocab_size": V, "dtype": "uint16"}


@pytest.fixture
def ids(tmp_path) -> tuple[np.ndarray, np.ndarray]:
    """Write train.bin and val.bin of random ids. Some of those in val never occur in train."""
    rng = np.random.default_rng(0)
    splits = rng.zipf(1.3, 3000) % (V - 5), rng.zipf(1.2, 500) % V
    for name, tokens in zip(("train", "val"), splits, strict=True):
        tokens.astype("<u2").tofile(tmp_path / f"{name}.bin")
    return splits


def test_the_landmarks_are_those_of_the_formulas(ids, tmp_path):
    train_ids, val_ids = ids
    counts = np.zeros((V, V))
    np.add.at(counts, (train_ids[:-1], train_ids[1:]), 1)
    c = counts.sum(1)
    p1 = (np.maximum(c - 0.75, 0) + 0.75 * np.count_nonzero(c) / V) / c.sum()
    followers = np.count_nonzero(counts, axis=1)[:, None]
    p2 = (np.maximum(counts - 0.75, 0) + 0.75 * followers * p1) / np.maximum(c, 1)[:, None]
    p2[c == 0] = p1
    assert p1.sum() == pytest.approx(1) and p2.sum(1) == pytest.approx(np.ones(V))
    v, w = val_ids[:-1], val_ids[1:]
    assert count_landmarks(tmp_path, META) == {
        "unigram": pytest.approx(-np.log(p1[w]).mean(), abs=1e-4),
        "bigram": pytest.approx(-np.log(p2[v, w]).mean(), abs=1e-4),
        "bigram_tokens": len(train_ids) - 1,
    }


def test_of_a_large_file_some_stretches_are_counted(ids, tmp_path, monkeypatch):
    everything = count_landmarks(tmp_path, META)
    monkeypatch.setattr(landmarks, "STRETCH", 100)
    monkeypatch.setattr(landmarks, "MOST", 2000)
    sample = count_landmarks(tmp_path, META)
    assert sample["unigram"] == pytest.approx(everything["unigram"], abs=0.3)
    assert sample["bigram_tokens"] == 2000 and sample["bigram"] != everything["bigram"]


def test_landmarks_of_a_mixture_are_weighted_and_a_tiny_data_set_has_none():
    a, b = ({"vocab_size": V, "landmarks": {"unigram": x, "bigram": x - 1}} for x in (3.0, 2.0))
    sets = [DataSet("a", Path(), a, Fraction(3, 4)), DataSet("b", Path(), b, Fraction(1, 4))]
    assert mixed_landmarks(sets, "all") == {"uniform": math.log(V), "unigram": 2.75, "bigram": 1.75}
    b["landmarks"] = {}
    assert mixed_landmarks(sets, "all") == {"uniform": math.log(V)}


# -- what the log says --


USUAL = {"uniform": 6.0, "unigram": 5.0, "bigram": 4.0}
# With little text, pairs of tokens predict worse than single tokens, and are left out.
LITTLE_TEXT = {"uniform": 6.0, "unigram": 5.0, "bigram": 5.5}


@pytest.mark.parametrize(
    "landmarks, losses, step, record",
    [
        (USUAL, [1.0] * 19, 19, None),  # too few to tell
        (USUAL, [5.5] * 20, 20, {"below": "uniform"}),
        (USUAL, [9.0] * 80 + [3.9] * 20, 100, {"below": "bigram"}),
        (LITTLE_TEXT, [7.0] * 20, 99, None),
        (LITTLE_TEXT, [7.0] * 20, 100, {"not_below": "unigram"}),
        ({"uniform": 6.0}, [7.0] * 20, 100, None),  # nothing to compare with
    ],
)
def test_the_lowest_landmark_or_a_loss_that_stays_above_is_said_once(
    landmarks, losses, step, record
):
    begin = [{"step": 0, "landmarks": landmarks}]
    watch = Watch(begin)
    said = watch.look(losses, step, 100)
    assert (said and said[0]) == (record and {"step": step} | record)
    again = Watch(begin + [said[0]] if said else begin)  # of a resumed run
    if said:
        assert watch.look(losses, step + 1, 100) is again.look(losses, step + 1, 100) is None


def test_a_run_says_it_and_a_resumed_run_does_not_say_it_again(tiny_data, tmp_path, capsys):
    options = ["--lr=1e-2", "--n_layer=1", "--batch_tokens=128", "--eval_every=100"]
    run = train_tiny(tiny_data, tmp_path, *options, "--max_steps=40")
    said = metrics(run, "below")
    assert "unigram" in said.values() and min(said) >= 20
    assert f"step {max(said)}/40 | the loss is below that of " in capsys.readouterr().out
    train_tiny(tiny_data, tmp_path, *options, "--max_steps=42", "--init_from=resume")
    assert metrics(run, "below") == said

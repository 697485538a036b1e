"""What a loss is compared with: counted by prepare.py, said by train.py."""

import json
import math
import shutil
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from conftest import TINY, call, forge, metrics, train_tiny

import text.landmarks as landmarks
import train
from text.dataset import DataSet, read_meta
from text.landmarks import count_landmarks, mixed_landmarks
from training.metrics import Watch

V = 40


@pytest.fixture
def ids(tmp_path) -> tuple[list[int], list[int]]:
    """Write train.bin and val.bin of random ids. Some of those in val never occur in train."""
    rng = np.random.default_rng(0)
    train_ids = (rng.zipf(1.3, 3000) % (V - 5)).astype(np.uint16)
    val_ids = (rng.zipf(1.2, 500) % V).astype(np.uint16)
    train_ids.tofile(tmp_path / "train.bin")
    val_ids.tofile(tmp_path / "val.bin")
    return train_ids.tolist(), val_ids.tolist()


META = {"vocab_size": V, "dtype": "uint16"}


def test_the_landmarks_are_those_of_the_formulas(ids, tmp_path):
    train_ids, val_ids = ids
    ones = Counter(train_ids[:-1])
    twos = Counter(zip(train_ids[:-1], train_ids[1:], strict=True))
    followers = Counter(v for v, _ in twos)

    def p1(w: int) -> float:
        return (max(ones[w] - 0.75, 0) + 0.75 * len(ones) / V) / (len(train_ids) - 1)

    def p2(v: int, w: int) -> float:
        if not ones[v]:
            return p1(w)
        return (max(twos[v, w] - 0.75, 0) + 0.75 * followers[v] * p1(w)) / ones[v]

    assert sum(map(p1, range(V))) == pytest.approx(1)
    for v in (0, 1, V - 6, V - 1):
        assert sum(p2(v, w) for w in range(V)) == pytest.approx(1)
    pairs = list(zip(val_ids[:-1], val_ids[1:], strict=True))
    assert count_landmarks(tmp_path, META) == {
        "unigram": pytest.approx(-np.mean([math.log(p1(w)) for _, w in pairs]), abs=1e-4),
        "bigram": pytest.approx(-np.mean([math.log(p2(v, w)) for v, w in pairs]), abs=1e-4),
        "bigram_tokens": len(train_ids) - 1,
    }


def test_of_a_large_file_some_stretches_are_counted(ids, tmp_path, monkeypatch):
    everything = count_landmarks(tmp_path, META)
    monkeypatch.setattr(landmarks, "STRETCH", 100)
    assert count_landmarks(tmp_path, META) == everything
    monkeypatch.setattr(landmarks, "MOST", 2000)
    some = count_landmarks(tmp_path, META)
    assert some["unigram"] == pytest.approx(everything["unigram"], abs=0.3)
    assert some["bigram_tokens"] == 2000 and some["bigram"] != everything["bigram"]


def test_landmarks_of_a_mixture_are_weighted_and_a_tiny_data_set_has_none():
    a, b = ({"vocab_size": V, "landmarks": {"unigram": x, "bigram": x - 1}} for x in (3.0, 2.0))
    sets = [DataSet("a", Path(), a, Fraction(3, 4)), DataSet("b", Path(), b, Fraction(1, 4))]
    assert mixed_landmarks(sets) == {"uniform": math.log(V), "unigram": 2.75, "bigram": 1.75}
    b["landmarks"] = {}
    assert mixed_landmarks(sets) == {"uniform": math.log(V)}


# -- what the log says --


def test_each_landmark_is_said_once_and_the_lowest_of_several():
    landmarks = {"uniform": 6.0, "unigram": 5.0, "bigram": 4.0}
    watch = Watch(landmarks, [])
    assert watch.look([1.0] * 19, 19, 100) is None  # too few to tell
    assert watch.look([5.5] * 20, 20, 100)[0] == {"step": 20, "below": "uniform"}
    assert watch.look([5.5] * 20, 21, 100) is None
    record, line = watch.look([9.0] * 80 + [3.9] * 20, 100, 100)
    assert record == {"step": 100, "below": "bigram"}
    assert line.startswith("the loss is below that of token pairs (4.00): ")
    again = Watch(landmarks, [record])
    assert again.look([3.9] * 20, 120, 100) is again.look([5.5] * 20, 140, 100) is None


def test_a_loss_that_stays_above_the_frequencies_is_a_warning_once():
    # With little text, pairs of tokens predict worse than single tokens, and are left out.
    landmarks = {"uniform": 6.0, "unigram": 5.0, "bigram": 5.5}
    watch = Watch(landmarks, [])
    assert list(watch.ahead) == ["uniform", "unigram"]
    assert watch.look([7.0] * 20, 99, 100) is None
    record, line = watch.look([7.0] * 20, 100, 100)
    assert record == {"step": 100, "not_below": "unigram"}
    assert line.startswith("warning: the loss (7.00) is still not below") and "\n" not in line
    assert watch.look([7.0] * 20, 101, 100) is None
    assert Watch(landmarks, [record]).look([7.0] * 20, 101, 100) is None
    assert Watch({"uniform": 6.0}, []).look([7.0] * 20, 100, 100) is None  # nothing to compare with


def test_a_run_says_it_and_a_resumed_run_does_not_say_it_again(tiny_data, tmp_path, capsys):
    meta = read_meta(tiny_data / "tiny")
    assert 0 < meta["landmarks"]["bigram"] < meta["landmarks"]["unigram"] < math.log(400)
    options = ["--lr=1e-2", "--n_layer=1", "--batch_tokens=128", "--eval_every=100"]
    run = train_tiny(tiny_data, tmp_path, *options, "--max_steps=40")
    said = metrics(run, "below")
    assert "unigram" in said.values() and min(said) >= 20
    assert f"step {max(said)}/40 | the loss is below that of " in capsys.readouterr().out
    train_tiny(tiny_data, tmp_path, *options, "--max_steps=42", "--init_from=resume")
    assert metrics(run, "below") == said
    assert "the loss is below" not in capsys.readouterr().out


def test_a_learning_rate_of_almost_0_is_told_what_to_look_at(tiny_data, tmp_path, capsys):
    options = ["--max_steps=101", "--lr=1e-9", "--eval_every=200", "--log_every=10"]
    options += ["--n_layer=1", "--batch_tokens=128"]
    run = train_tiny(tiny_data, tmp_path, *options)
    assert metrics(run, "not_below") == {100: "unigram"}
    said = capsys.readouterr().out
    assert "is still not below that of single-token frequencies" in said


def test_a_data_set_without_landmarks_trains_as_before(tiny_data, tmp_path):
    shutil.copytree(tiny_data / "tiny", tmp_path / "tiny")
    meta = read_meta(tmp_path / "tiny")
    meta["landmarks"] = {}
    forge(tmp_path / "tiny", "meta.json", json.dumps(meta).encode())
    call(train.main, *TINY, f"--data_dir={tmp_path}", f"--out_dir={tmp_path}", "--max_steps=2")
    assert list(metrics(tmp_path / "run", "landmarks")[0]) == ["uniform"]

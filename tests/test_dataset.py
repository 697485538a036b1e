"""Opening data sets, and the order in which their tokens are read."""

import os
import random
import shutil
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from conftest import make_records, metrics, prepared, train_tiny

from configurator import UserError
from text.dataset import newest_dataset, open_datasets, train_loader
from text.tokenizer import CL100K_PATTERN, GPT2_PATTERN, faster
from text.windows import Loader, Windows

# -- tokenizers --


@pytest.mark.parametrize("pattern", [GPT2_PATTERN, CL100K_PATTERN])
def test_the_faster_pattern_splits_as_the_original(pattern):
    """Every pair of bytes is a token here. A word that begins one byte later gives other tokens."""
    ranks = {bytes([i]): i for i in range(256)}
    ranks |= {bytes(divmod(i, 256)): 256 + i for i in range(65536)}
    tokens = dict(mergeable_ranks=ranks, special_tokens={"<eos>": 70_000})
    original = tiktoken.Encoding("x", pat_str=pattern, **tokens)
    quick = tiktoken.Encoding("x", pat_str=faster(pattern), **tokens)
    spaces = "\t\n\v\f\r \x1c\x85\xa0\u1680\u2000\u2028\u2029\u202f\u205f\u3000\u200b"
    characters = spaces + "   \n\n\r" * 3 + "ab1234中'stSLl.!éİſK😀\x00\u0301"
    rng = random.Random(0)
    for _ in range(10_000):
        text = "".join(rng.choices(characters, k=rng.randint(0, 14)))
        assert original.encode_ordinary(text) == quick.encode_ordinary(text), repr(text)


# -- the order of reading --


def loader_of(*sizes: int, weights: tuple = (1,), seed: int = 0) -> Loader:
    """Return a Loader of splits of these sizes, with windows of 10 tokens.

    The tokens of split k count up from 10,000 k.
    """
    splits = [np.arange(10_000 * k, 10_000 * k + n, dtype=np.uint16) for k, n in enumerate(sizes)]
    windows = [Windows(tokens, 10) for tokens in splits]
    fractions = [Fraction(w) / sum(map(Fraction, weights)) for w in weights]
    return Loader(windows, fractions, seed)


def test_each_epoch_visits_each_window_once_in_a_new_order():
    loader = loader_of(1003)
    n = loader.splits[0].n_windows
    epochs = [loader.starts(e * n, n) for e in range(4)]
    for starts in epochs:
        rows = loader.rows(starts).ids
        assert rows.shape == (99, 11) and rows.max() <= 1002
        assert len(np.unique(rows[:, :-1])) == 990  # no token twice, so no window twice
        assert (rows[:, :-1] + 1 == rows[:, 1:]).all()
    assert len({tuple(s) for s in epochs}) == 4 and len({min(s) for s in epochs}) > 1


def test_what_a_step_reads_depends_on_its_number_and_the_seed():
    # 300 samples reach beyond the ends of three epochs of 99 windows each.
    loader = loader_of(1003)
    at_once = loader_of(1003).starts(0, 300)
    backwards = [loader.starts(g, 6) for g in reversed(range(0, 300, 6))]
    assert at_once == [s for step in reversed(backwards) for s in step]
    assert at_once != loader_of(1003, seed=1).starts(0, 300)


@pytest.mark.parametrize("n_tokens", [33, 34, 64, 65, 66, 100])
def test_even_the_smallest_data_is_never_read_beyond_its_end(n_tokens):
    windows = Windows(np.arange(n_tokens, dtype=np.uint16), 32)
    drawn = [windows.start((3,), sample) for sample in range(50)]
    for start in [*drawn, *windows.fixed_starts(0), *windows.fixed_starts(32)]:
        assert 0 <= start <= n_tokens - 33
    few, every = windows.fixed_starts(64), windows.fixed_starts(0)
    assert (few[0], few[-1]) == (every[0], every[-1])  # spread over the whole split


MIXTURES = [("0.7", "0.3"), ("1", "1", "1"), ("0.05", "0.9", "0.05"), ("1e-6", "1")]


@pytest.mark.parametrize("weights", MIXTURES)
def test_a_mixture_keeps_its_shares_at_every_moment(weights):
    loader = loader_of(*[1003] * len(weights), weights=weights)
    seen = Counter()
    total = sum(map(Fraction, weights))
    for sample in range(2000):
        k, number = loader.pick(sample)
        assert number == seen[k]  # its own windows in order: none is left out, none comes twice
        seen[k] += 1
        for split, weight in enumerate(weights):
            assert abs(seen[split] - (sample + 1) * Fraction(weight) / total) < len(weights) - 0.5
    # The fractions are exact far away, too, and pick() does not count up to this position.
    picked = [loader.pick(10**15 + i)[0] for i in range(1000)]
    assert abs(picked.count(0) - 1000 * Fraction(weights[0]) / total) <= 1


# -- data sets --


@pytest.fixture
def three_sets(own_data, tmp_path) -> Path:
    """A folder of the data sets tiny, other with its tokenizer, and foreign with another one."""
    records = make_records(200, seed=5)
    prepared(tmp_path, records, "--name=other", f"--tokenizer={own_data}")
    prepared(tmp_path, records, "--name=foreign", "--vocab_size=350")
    return tmp_path


def test_a_mixture_reads_both_sets_and_reports_each(three_sets, capsys):
    mixture = "tiny:0.75,other:0.25"
    run = train_tiny(three_sets, three_sets / "out", f"--dataset={mixture}")
    assert f" epochs of {mixture}\n" in capsys.readouterr().out
    for loss in ("val_loss", "train_eval_loss"):
        tiny, other = (metrics(run, f"{loss}/{name}") for name in ("tiny", "other"))
        for step, of_both in metrics(run, loss).items():
            assert of_both == pytest.approx(0.75 * tiny[step] + 0.25 * other[step])
    loader = train_loader(open_datasets(mixture, three_sets), 32, 1337)
    assert Counter(k for k, _ in loader.starts(0, 8 * 8)) == {0: 48, 1: 16}


def test_weights_left_out_follow_the_sizes(three_sets):
    a, b = open_datasets("tiny,other", three_sets)
    tokens_a, tokens_b = (s.meta["splits"]["train"]["tokens"] for s in (a, b))
    assert a.weight + b.weight == 1 and b.weight / a.weight == Fraction(tokens_b, tokens_a)
    bad = ["tiny:0.5,other", "tiny:1,other:x", "tiny:1,other:-1", "tiny,tiny", "tiny,foreign"]
    for spec in [*bad, "tiny,nowhere", "tiny:1e999", ""]:
        with pytest.raises(UserError, match=r"dataset=|no data set in .*nowhere"):
            open_datasets(spec, three_sets)


def test_the_data_set_that_was_prepared_last_is_taken(tiny_data, tmp_path):
    with pytest.raises(UserError, match="no data set in .*`python prepare.py --input FILE"):
        newest_dataset(tmp_path)

    def put(name: str, time: int) -> Path:
        folder = Path(shutil.copytree(tiny_data / "tiny", tmp_path / name))
        os.utime(folder / "meta.json", (time, time))
        return folder

    for name, time in (("old", 1000), ("new", 2000), (".hidden.tmp", 5000)):
        put(name, time)
    (put("unfinished", 4000) / "meta.json").unlink()
    assert newest_dataset(tmp_path) == "new"

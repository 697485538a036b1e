import json
import os
import random
import shutil
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from conftest import call, forge, make_records, train_tiny, write_jsonl

import prepare
from configurator import UserError
from text.dataset import newest_dataset, open_datasets
from text.tokenizer import SAME_BUT_FASTER
from text.windows import Loader, Windows, train_loader
from training.metrics import read_metrics

# -- tokenizers --


@pytest.mark.parametrize("pattern", SAME_BUT_FASTER)
def test_the_faster_splitting_pattern_splits_as_the_original(pattern):
    """Every pair of bytes is a token here. A word that begins one byte later gives other tokens."""
    ranks = {bytes([i]): i for i in range(256)}
    ranks |= {bytes(divmod(i, 256)): 256 + i for i in range(65536)}
    special = {"<|endoftext|>": 70_000}
    original, faster = (
        tiktoken.Encoding("x", pat_str=p, mergeable_ranks=ranks, special_tokens=special)
        for p in (pattern, SAME_BUT_FASTER[pattern])
    )
    spaces = "\t\n\v\f\r \x1c\x85\xa0\u1680\u2000\u2028\u2029\u202f\u205f\u3000\u200b"
    spaces += "   \n\n\r" * 3
    characters = spaces + "ab1234中'stSLl.!éİſK😀\x00\u0301"
    rng = random.Random(0)
    for _ in range(30_000):
        text = "".join(rng.choices(characters, k=rng.randint(0, 14)))
        assert original.encode_ordinary(text) == faster.encode_ordinary(text), repr(text)


# -- the order of reading --


def loader_of(*sizes: int, weights: tuple = (1,), block_size: int = 10, seed: int = 0) -> Loader:
    """Return a Loader of splits of these sizes. The tokens of split k count up from 10,000 k."""
    splits = [np.arange(10_000 * k, 10_000 * k + n, dtype=np.uint16) for k, n in enumerate(sizes)]
    shares = [Fraction(w) / sum(map(Fraction, weights)) for w in weights]
    windows = [Windows(tokens, block_size, (seed, k)) for k, tokens in enumerate(splits)]
    return Loader(windows, shares)


def test_each_epoch_visits_each_window_once_in_an_order_and_from_an_offset_of_its_own():
    loader = loader_of(1003)
    n = loader.splits[0].n_windows
    assert n == 99
    epochs = [loader.starts(e * n, n) for e in range(4)]
    for starts in epochs:
        rows = loader.rows(starts).ids
        assert rows.shape == (99, 11) and rows.max() <= 1002
        assert len(np.unique(rows[:, :-1])) == 990  # no token twice, so no window twice
        assert (rows[:, :-1] + 1 == rows[:, 1:]).all()
    assert len({tuple(s) for s in epochs}) == 4 and len({min(s) for s in epochs}) > 1


def test_what_a_step_reads_depends_only_on_its_number_and_the_seed():
    # 300 samples reach beyond the ends of three epochs of 99 windows each.
    in_order = [s for g in range(0, 300, 6) for s in loader_of(1003).starts(g, 6)]
    loader = loader_of(1003)
    backwards = [loader.starts(g, 6) for g in reversed(range(0, 300, 6))]
    assert in_order == [s for part in reversed(backwards) for s in part]
    assert in_order != [s for g in range(0, 300, 6) for s in loader_of(1003, seed=1).starts(g, 6)]


@pytest.mark.parametrize("n_tokens", [33, 34, 64, 65, 66, 100])
def test_even_the_smallest_data_is_never_read_beyond_its_end(n_tokens):
    windows = Windows(np.arange(n_tokens, dtype=np.uint16), block_size=32, seed=(3,))
    drawn = [windows.start(sample) for sample in range(50)]
    for start in [*drawn, *windows.fixed_starts(0), *windows.fixed_starts(32)]:
        assert 0 <= start <= n_tokens - 33


def test_the_windows_of_all_ranks_are_those_of_one_process():
    """6 processes with 2 sequences and 1 process with 12 read the same windows in every step."""
    loader = loader_of(5000, 3000, weights=("0.7", "0.3"))
    for step in range(3):
        ranks = [s for rank in range(6) for s in loader.starts(step * 12 + rank * 2, 2)]
        assert Counter(ranks) == Counter(loader.starts(step * 12, 12))


MIXTURES = [("0.7", "0.3"), ("1", "1", "1"), ("0.05", "0.9", "0.05"), ("1e-6", "1")]


@pytest.mark.parametrize("weights", MIXTURES)
def test_a_mixture_keeps_its_shares_at_every_moment_and_each_set_its_own_epochs(weights):
    loader = loader_of(*[1003] * len(weights), weights=weights)
    seen = Counter()
    total = sum(map(Fraction, weights))
    for sample in range(2000):
        k, own = loader.pick(sample)
        assert own == seen[k]  # its own windows in order: none is left out, none comes twice
        seen[k] += 1
        for other, weight in enumerate(weights):
            assert abs(seen[other] - (sample + 1) * Fraction(weight) / total) < len(weights) - 0.5
    far = 10**15  # the shares are exact here, too, and pick() does not count up to this place
    counts = [loader.pick(far + i) for i in range(1000)]
    assert abs(sum(k == 0 for k, _ in counts) - 1000 * Fraction(weights[0]) / total) <= 1


def test_training_on_a_mixture_reads_both_sets_and_reports_each(tiny_data, tmp_path):
    other = write_jsonl(tmp_path / "other.jsonl", make_records(200, seed=5))
    model = f"--tokenizer={tiny_data / 'tiny' / 'tokenizer.model'}"
    options = ["--name=other", f"--data_dir={tiny_data}", model, "--val_fraction=0.1"]
    call(prepare.main, "--input", other, *options)
    run = train_tiny(tiny_data, tmp_path, "--dataset=tiny:0.75,other:0.25")
    records = [r for r in read_metrics(run / "metrics.jsonl") if "val_loss" in r]
    for r in records:
        mean = 0.75 * r["val_loss/tiny"] + 0.25 * r["val_loss/other"]
        assert r["val_loss"] == pytest.approx(mean)
        mean = 0.75 * r["train_eval_loss/tiny"] + 0.25 * r["train_eval_loss/other"]
        assert r["train_eval_loss"] == pytest.approx(mean)
    sets = open_datasets("tiny:0.75,other:0.25", tiny_data)
    read = Counter(k for k, _ in train_loader(sets, 32, 1337).starts(0, 8 * 8))
    assert read == {0: 48, 1: 16}


def test_the_data_set_that_was_prepared_last_is_found_among_all_kinds_of_folders(
    tiny_data, tmp_path, capsys
):
    with pytest.raises(UserError, match="no data set in .*`python prepare.py --input FILE"):
        newest_dataset(tmp_path)

    def put(name: str, time: int, **changes) -> Path:
        folder = Path(shutil.copytree(tiny_data / "tiny", tmp_path / name))
        meta = json.loads((folder / "meta.json").read_text()) | changes
        forge(folder, "meta.json", json.dumps(meta).encode())
        os.utime(folder / "meta.json", (time, time))
        return folder

    put("old", 1000, skipped={"a": 1})
    put("new", 2000)
    assert newest_dataset(tmp_path) == "new"
    put("copy_of_old", 3000, skipped={"a": 1})
    (put("unfinished", 4000, skipped={"b": 1}) / "meta.json").unlink()
    put(".hidden.tmp", 5000, skipped={"c": 1})
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "meta.json").write_text("{}")
    assert newest_dataset(tmp_path) == "new"
    assert not capsys.readouterr().err
    os.truncate(put("damaged", 6000, skipped={"d": 1}) / "train.bin", 10)
    assert newest_dataset(tmp_path) == "new"
    assert "damaged is passed over: " in capsys.readouterr().err
    shutil.rmtree(tmp_path / "old")  # now the copy is what there is
    assert newest_dataset(tmp_path) == "copy_of_old"


def test_weights_left_out_follow_the_sizes_and_wrong_ones_are_refused(tiny_data, tmp_path):
    one, two = (write_jsonl(tmp_path / f"{n}.jsonl", make_records(n, seed=n)) for n in (40, 80))
    model = f"--tokenizer={tiny_data / 'tiny' / 'tokenizer.model'}"
    sets = {"a": (one, model), "b": (two, model), "c": (two, "--vocab_size=350")}
    for name, (path, tokenizer) in sets.items():
        options = [f"--name={name}", f"--data_dir={tmp_path}", tokenizer, "--val_fraction=0.2"]
        call(prepare.main, "--input", path, *options)
    a, b = open_datasets("a,b", tmp_path)
    assert a.weight + b.weight == 1
    tokens_a, tokens_b = (s.meta["splits"]["train"]["tokens"] for s in (a, b))
    assert b.weight / a.weight == Fraction(tokens_b, tokens_a)
    for spec, message in {
        "a:0.5,b": "give every data set a weight, or none",
        "a:0.5,b:x": "expected NAME, or NAME:WEIGHT",
        "a:0.5,b:-1": "weights above 0",
        "a,a": "expected NAME",
        "a,c": "c was made with another tokenizer than a",
        "a,nowhere": "no data set in",
    }.items():
        with pytest.raises(UserError, match=message):
            open_datasets(spec, tmp_path)

"""A corpus of few documents is split by tokens: the last of them become val.bin."""

import numpy as np
import pytest
from conftest import make_records, write_jsonl
from sentencepiece import SentencePieceTrainer
from test_corpora import write_texts
from test_prepare import prepare_set, texts_of

import prepare
from text.dataset import load_tokenizer, open_split, verify
from text.shapes import record_text

PLAY = "\n\n".join(record_text(r)[0] for r in make_records(200)) + "\n"


@pytest.mark.parametrize("val_fraction", [0.1, 0.01, 0.9])
def test_one_text_file_is_split_as_nanogpt_splits_it(tmp_path, val_fraction):
    """With a token for each character. No eos is inside the text."""
    path = tmp_path / "play.txt"
    path.write_text(PLAY, encoding="utf-8")
    folder, meta = prepare_set(tmp_path, path, tokenizer="char", val_fraction=val_fraction)
    at = int(len(PLAY) * (1 - val_fraction))
    for split, text in (("train", PLAY[:at]), ("val", PLAY[at:])):
        assert texts_of(folder, split) == [text]
        counts = meta["splits"][split]
        assert (counts["documents"], counts["tokens"]) == (1, len(text) + 1)
        assert counts["bytes"] == len(text.encode())
    verify(folder, meta, "val")


def test_learned_tokens_are_cut_between_two_of_them(tmp_path, monkeypatch):
    """Even if the text is longer than a segment."""
    monkeypatch.setattr("text.tokenizer.SLICE", 1000)
    path = write_jsonl(tmp_path / "play.jsonl", [{"text": PLAY}])
    folder, meta = prepare_set(tmp_path, path, tokenizer="train", vocab_size=400, val_fraction=0.1)
    *train, _ = open_split(folder, meta, "train").tolist()
    *val, _ = open_split(folder, meta, "val").tolist()
    assert train + val == load_tokenizer(folder).encode(PLAY)
    assert len(train) == int((len(train) + len(val)) * 0.9)
    assert meta["splits"]["val"]["bytes"] == len(texts_of(folder, "val")[0].encode())


CUTS = [
    # Between two documents, where that comes close enough.
    (["a" * 50, "b" * 40, "c" * 12], ["a" * 50, "b" * 40], ["c" * 12], 0.1),
    (["a" * 50, "b" * 40, "c" * 10], ["a" * 50, "b" * 20], ["b" * 20, "c" * 10], 0.3),
    # The hash puts all of these into one split.
    (["the same"] * 10, ["the same"] * 8, ["the same"] * 2, 0.2),
]


@pytest.mark.parametrize("texts, train, val, val_fraction", CUTS)
def test_the_cut_is_between_documents_if_one_ends_near(tmp_path, texts, train, val, val_fraction):
    corpus = write_texts(tmp_path / "c.jsonl", texts)
    folder, _ = prepare_set(tmp_path, corpus, val_fraction=val_fraction)
    assert (texts_of(folder, "train"), texts_of(folder, "val")) == (train, val)


def test_no_conversation_is_cut_in_two(tmp_path, refuses):
    turns = [{"role": r, "content": f"{i} {r}"} for i in range(60) for r in ("user", "assistant")]
    talks = [{"messages": turns}, {"messages": turns[:-20]}, {"messages": turns[:30]}]
    path = write_jsonl(tmp_path / "c.jsonl", talks)
    options = dict(tokenizer="train", vocab_size=290, val_fraction=0.3)
    folder, meta = prepare_set(tmp_path, path, **options)
    assert [meta["splits"][split]["documents"] for split in ("train", "val")] == [2, 1]
    assert texts_of(folder, "val")[0].startswith("<|im_start|>user")
    flags = [f"--{key}={value}" for key, value in options.items()]
    one = write_jsonl(tmp_path / "one.jsonl", talks[:1])
    assert "val.bin" in refuses(prepare.main, "--input", one, f"--data_dir={tmp_path}", *flags)


def test_a_text_that_its_tokenizer_shortens_is_counted_whole(tmp_path):
    """As SentencePiece does by default: it makes one space of several."""
    path = tmp_path / "play.txt"
    path.write_text(PLAY.replace(" ", " " * 9), encoding="utf-8")
    model = tmp_path / "spm"
    options = dict(vocab_size=400, byte_fallback=True, minloglevel=2)
    SentencePieceTrainer.train(input=str(path), model_prefix=str(model), **options)
    folder, meta = prepare_set(tmp_path, path, tokenizer=f"{model}.model", val_fraction=0.1)
    assert list(meta["records"]["changed"].values()) == [1]
    sizes = np.array([meta["splits"][split]["bytes"] for split in ("train", "val")])
    assert sizes.sum() == path.stat().st_size
    assert sizes[1] / sizes.sum() == pytest.approx(0.1, rel=0.1)


def test_many_documents_are_chosen_by_their_hash_as_ever(tmp_path):
    """They stay in their split when files are added. These are the hashes of the files that the
    first version of prepare.py made.
    """
    a = write_jsonl(tmp_path / "a.jsonl", make_records(60))
    folder, meta = prepare_set(tmp_path, a)
    hashes = [counts["sha256"][:16] for counts in meta["splits"].values()]
    assert hashes == ["6f73189f3917d012", "58e7ee0fcb030efe"] and "few_documents" not in meta
    b = write_jsonl(tmp_path / "b.jsonl", make_records(60, seed=2))
    both, _ = prepare_set(tmp_path, b, a, name="both")
    assert set(texts_of(folder, "val")) < set(texts_of(both, "val"))

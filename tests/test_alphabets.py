"""--tokenizer=char and byte: vocabularies that are not learned."""

import re

import pytest
from conftest import call, make_records
from test_corpora import write_texts
from test_hf_tokenizer import MIXED
from test_prepare import documents, prepare_set

import prepare
from text import formats
from text.dataset import load_tokenizer
from text.shapes import record_text
from text.train_tokenizer import RESERVED

PLAY = "First Citizen:\n\tBefore we proceed, any further  hear me speak.\r\n\n" * 20


def made(tmp_path, texts: list[str], kind: str, **options):
    """Return (folder, meta, tokenizer) of a data set of these texts."""
    corpus = write_texts(tmp_path / "c.jsonl", texts)
    folder, meta = prepare_set(tmp_path, corpus, tokenizer=kind, **options)
    return folder, meta, load_tokenizer(folder)


def test_char_vocabulary_is_all_characters_eos_and_unk(tmp_path, monkeypatch):
    """All documents are read, not a sample: one character is in one of 3,000 documents only."""
    monkeypatch.setattr(formats, "CHUNK", 2000)
    texts = ["the loop reads\ttokens\r\n"] * 3000
    texts[2000] += "鎔"
    _, meta, tokenizer = made(tmp_path, texts, "char", train_mb=1)
    characters = [tokenizer.token_bytes(i).decode() for i in range(meta["vocab_size"])]
    assert sorted(characters) == ["", "", *sorted(set("".join(texts)))]
    assert len(tokenizer.encode(texts[2000])) == len(texts[2000])
    assert meta["records"]["changed"] == {}


STRANGE = "a\0\x01\x1f\x85\u2028\ufeff\ufffd\u2581\u2585 \u2581b\r\n\té e\u0301 👩‍👧 \U0010ffff"

TEXTS = [f"x{text}x" for text in (STRANGE, *"\0\x1f\u2581\u2585\r中", *MIXED[:6])]


@pytest.mark.parametrize("kind", ["char", "byte"])
@pytest.mark.parametrize("text", TEXTS)
def test_every_text_of_the_corpus_comes_back(tmp_path, text, kind):
    folder, meta, tokenizer = made(tmp_path, [text], kind)
    assert "".join(documents(folder)) == text and meta["records"]["changed"] == {}
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    if kind == "byte":  # its tokens are the bytes, the space, eos and unk
        assert meta["vocab_size"] == 256 + 3 and len(ids) == len(text.encode())


@pytest.mark.parametrize("reserved", sorted(RESERVED))
def test_a_reserved_character_hides_no_text_from_the_training(tmp_path, reserved):
    text = f"{reserved} 魑魅魍魉 魑魅{reserved}魍魉"
    folder, _, tokenizer = made(tmp_path, [text] * 9, "train", vocab_size=270)
    assert len(tokenizer.encode("魑魅魍魉")) <= 4  # 12 bytes
    assert len(tokenizer.encode("a\u2581b")) == 5  # of the text, not of a space
    assert documents(folder) == {text: 9}


def test_a_wrong_vocab_size_is_answered_with_one_that_fits(tmp_path, refuses):
    corpus = write_texts(tmp_path / "c.jsonl", [record_text(r)[0] for r in make_records(40)])
    options = ["--input", corpus, f"--data_dir={tmp_path}"]
    assert "vocab_size" in refuses(prepare.main, *options, "--vocab_size=262")
    for size, bound in ((263, "more"), (9999, "less")):
        error = refuses(prepare.main, *options, f"--vocab_size={size}")
        call(prepare.main, *options, re.search(rf"--vocab_size=\d+(?= or {bound})", error)[0])


def test_lost_characters_and_ignored_settings_are_told(tmp_path, capsys):
    folder, _, _ = made(tmp_path, [PLAY], "char")
    assert not capsys.readouterr().err
    _, meta, _ = made(tmp_path, [PLAY, PLAY + "é"], str(folder), name="other", vocab_size=600)
    lost = "lost characters that the tokenizer has no token for"
    out, err = capsys.readouterr()
    assert meta["records"]["changed"][lost] == 1 and lost in out and "vocab_size" in err

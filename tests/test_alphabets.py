"""--tokenizer=char and byte: vocabularies that are not learned."""

import pytest
from test_corpora import write_texts
from test_huggingface import MIXED
from test_prepare import documents, prepare_set

from text import formats
from text.dataset import load_tokenizer

PLAY = "First Citizen:\n\tBefore we proceed, any further  hear me speak.\r\n\n" * 20


def made(tmp_path, texts: list[str], kind: str, **options):
    """Return (folder, meta, tokenizer) of a data set of these texts."""
    corpus = write_texts(tmp_path / "c.jsonl", texts)
    folder, meta = prepare_set(tmp_path, corpus, tokenizer=kind, **options)
    return folder, meta, load_tokenizer(folder)


def test_a_char_vocabulary_is_the_characters_of_the_corpus_an_eos_and_an_unk(tmp_path):
    folder, meta, tokenizer = made(tmp_path, [PLAY], "char")
    assert meta["vocab_size"] == len(set(PLAY)) + 2
    pieces = [tokenizer.token_bytes(i).decode() for i in range(meta["vocab_size"])]
    assert sorted(pieces) == ["", "", *sorted(set(PLAY))]
    assert tokenizer.decode(tokenizer.encode(PLAY).tolist()) == PLAY
    assert len(tokenizer.encode(PLAY)) == len(PLAY)
    assert "".join(documents(folder)) == PLAY


def test_no_character_of_the_corpus_is_missing_however_rare(tmp_path, monkeypatch):
    """All documents are read, not a sample: one character is in one of 3,000 documents only."""
    monkeypatch.setattr(formats, "CHUNK", 2000)
    texts = ["the loop reads tokens"] * 3000
    texts[2000] += "鎔"
    _, meta, tokenizer = made(tmp_path, texts, "char", train_mb=1)
    assert meta["vocab_size"] == len(set("".join(texts))) + 2
    assert tokenizer.decode(tokenizer.encode("鎔").tolist()) == "鎔"
    assert meta["records"]["changed"] == {}


STRANGE = "a\0\x01\x1f\x85\u2028\ufeff\ufffd\u2581\u2585 \u2581b\r\n\té e\u0301 👩‍👧 \U0010ffff"


@pytest.mark.parametrize("kind", ["char", "byte"])
@pytest.mark.parametrize("text", [STRANGE, *STRANGE, *MIXED[:6]])
def test_every_text_of_the_corpus_comes_back(tmp_path, kind, text):
    text = f"x{text}x"
    folder, meta, tokenizer = made(tmp_path, [text], kind)
    assert "".join(documents(folder)) == text and meta["records"]["changed"] == {}
    ids = tokenizer.encode(text).tolist()
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


def test_a_byte_vocabulary_is_the_bytes_the_space_an_eos_and_an_unk(tmp_path):
    _, meta, tokenizer = made(tmp_path, [PLAY], "byte")
    assert meta["vocab_size"] == 256 + 3
    for text in MIXED:
        ids = tokenizer.encode(text).tolist()
        assert len(ids) == len(text.encode()) + 2 * text.count("\u2581")
        assert tokenizer.decode(ids) == text

"""A corpus of few documents is split by text: the last characters become val.bin."""

from unittest.mock import Mock

import pytest
from conftest import contents, ended, make_records, write_jsonl
from sentencepiece import SentencePieceTrainer
from test_corpora import write_texts
from test_prepare import prepare_set, texts_of
from test_prepare_durability import TINY_SHARDS, command

import prepare
from configurator import UserError, note
from text import formats
from text.dataset import load_tokenizer, open_split, verify
from text.records import record_text

PLAY = "\n\n".join(record_text(r)[0] for r in make_records(200)) + "\n"


@pytest.mark.parametrize("tokenizer", ["char", "byte"])
@pytest.mark.parametrize("val_fraction", [0.1, 0.01, 0.5, 0.9])
def test_one_text_file_is_split_at_the_last_tenth(tmp_path, prints, tokenizer, val_fraction):
    """Or at the fraction that is asked for, as nanoGPT splits it. No eos is inside the text."""
    path = tmp_path / "play.txt"
    path.write_text(PLAY, encoding="utf-8")
    folder, meta = prepare_set(tmp_path, path, tokenizer=tokenizer, val_fraction=val_fraction)
    at = int(len(PLAY) * (1 - val_fraction))
    for split, text in (("train", PLAY[:at]), ("val", PLAY[at:])):
        assert texts_of(folder, split) == [text]
        counts = meta["splits"][split]
        assert (counts["documents"], counts["characters"]) == (1, len(text))
        assert counts["bytes"] == len(text.encode())
        verify(folder, meta, split)
    report = prints(prepare.main, "--inspect", folder)
    assert f"the last {len(PLAY) - at:,} of {len(PLAY):,} characters are val" in report
    assert "tokens per document" not in report  # which would be the halves of the cut
    # Chinese characters have three bytes.
    assert ("that is few: train a tokenizer" in report) == (tokenizer == "byte")


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".json"])
def test_learned_tokens_are_cut_between_two_of_them(tmp_path, suffix, monkeypatch):
    """Whatever the format, and even if the text is longer than a segment."""
    monkeypatch.setattr("text.encode.SEGMENT", 1000)
    path = tmp_path / f"play{suffix}"
    if suffix == ".txt":
        path.write_text(PLAY, encoding="utf-8")
    else:
        write_jsonl(path, [{"text": PLAY}])
    folder, meta = prepare_set(tmp_path, path, tokenizer="train", vocab_size=400, val_fraction=0.1)
    *train, train_end = open_split(folder, meta, "train").tolist()
    *val, val_end = open_split(folder, meta, "val").tolist()
    tokenizer = load_tokenizer(folder)
    assert train_end == val_end == tokenizer.eos_id
    assert train + val == tokenizer.encode(PLAY).tolist()
    longest = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
    for split, ids in (("train", train), ("val", val)):
        text = tokenizer.decode(ids)
        counts = meta["splits"][split]
        assert (counts["characters"], counts["bytes"]) == (len(text), len(text.encode()))
    assert 0 <= len(tokenizer.decode(val)) - (len(PLAY) - int(len(PLAY) * 0.9)) < longest


CUTS = [
    (["a" * 50, "b" * 40, "c" * 10], ["a" * 50, "b" * 40], ["c" * 10], {"val_fraction": 0.1}),
    # The hash puts all of these into one split.
    (["the same"] * 10, ["the same"] * 8, ["the same"] * 2, {"val_fraction": 0.2}),
]


@pytest.mark.parametrize("texts, train, val, options", CUTS)
def test_the_cut_is_made_in_the_documents_kept(tmp_path, texts, train, val, options, capsys):
    note.cache_clear()  # another test may have printed this one
    folder, _ = prepare_set(tmp_path, write_texts(tmp_path / "c.jsonl", texts), **options)
    assert (texts_of(folder, "train"), texts_of(folder, "val")) == (train, val)
    assert ("2 documents of val also in train" in capsys.readouterr().err) == (train[0] == val[0])


def test_the_marks_of_a_conversation_count_as_no_text_where_it_is_cut(tmp_path):
    turns = [{"role": r, "content": f"{i} {r}"} for i in range(60) for r in ("user", "assistant")]
    path = write_jsonl(tmp_path / "c.jsonl", [{"messages": turns}])
    folder, meta = prepare_set(tmp_path, path, tokenizer="train", vocab_size=290, val_fraction=0.3)
    for split, counts in meta["splits"].items():
        text = texts_of(folder, split)[0].replace("<|im_start|>", "").replace("<|im_end|>", "")
        assert counts["bytes"] == counts["characters"] == len(text)


def test_a_text_that_its_tokenizer_shortens_is_split_at_its_share_and_is_counted(tmp_path, refuses):
    """As SentencePiece does by default: it makes one space of several."""
    path = tmp_path / "play.txt"
    path.write_text(PLAY.replace(" ", " " * 9), encoding="utf-8")
    model = tmp_path / "spm"
    options = dict(vocab_size=400, byte_fallback=True, minloglevel=2)
    SentencePieceTrainer.train(input=str(path), model_prefix=str(model), **options)
    tokenizer = f"{model}.model"
    folder, meta = prepare_set(tmp_path, path, tokenizer=tokenizer, val_fraction=0.1)
    of_val, of_train = (len(texts_of(folder, split)[0]) for split in ("val", "train"))
    assert of_val / (of_val + of_train) == pytest.approx(0.1, rel=0.01)
    assert list(meta["records"]["changed"].values()) == [1]
    path.write_text("word")
    blank = tmp_path / "blank.txt"
    blank.write_text("\u3000" * 4)  # which becomes no token at all
    assert "val.bin would be empty" in refuses(
        prepare.main, "--input", path, blank, f"--tokenizer={tokenizer}", "--val_fraction=0.2"
    )


def test_many_documents_are_chosen_by_their_hash_as_ever(tmp_path):
    """These are the hashes of the files that prepare.py made before it could split by text."""
    _, meta = prepare_set(tmp_path, write_jsonl(tmp_path / "c.jsonl", make_records(60)))
    hashes = [counts["sha256"][:16] for counts in meta["splits"].values()]
    assert hashes == ["6f73189f3917d012", "58e7ee0fcb030efe"] and "few_documents" not in meta


def test_a_killed_run_goes_on_and_ends_in_the_same_bytes(tmp_path, monkeypatch):
    path = tmp_path / "play.txt"
    path.write_text(PLAY, encoding="utf-8")
    whole, _ = prepare_set(tmp_path, path, name="whole")

    with monkeypatch.context() as kill:
        kill.setattr("text.cut.cut_document", Mock(side_effect=UserError("killed")))
        with pytest.raises(UserError, match="killed"):
            prepare_set(tmp_path, path, shard_mb=0.02)
    folder, _ = prepare_set(tmp_path, path, shard_mb=0.02)
    assert contents(folder) == contents(whole)
    assert not (tmp_path / "data" / ".set.tmp").exists()


@pytest.mark.slow
def test_workers_and_processes_do_not_change_a_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "CHUNK", 2000)
    files = [tmp_path / f"{i}.txt" for i in range(3)]
    for i, file in enumerate(files):
        file.write_text(f"{i} {PLAY}", encoding="utf-8")
    one, _ = prepare_set(tmp_path, *files)
    options = [f"--tokenizer={tmp_path / 'bytes.tiktoken'}", "--workers=2", TINY_SHARDS]
    run = ended(command(files, tmp_path / "two", *options, n=2))
    assert run.returncode == 0, run.stderr[-2000:]
    assert contents(tmp_path / "two" / "set") == contents(one)

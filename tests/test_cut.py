"""A corpus of few documents is split by text: the last characters become val.bin."""

from hashlib import sha256

import pytest
import warm
from conftest import call, make_records, write_jsonl
from test_corpora import write_texts
from test_prepare import contents, prepare_set, texts_of, tiktoken_file
from test_prepare_durability import TINY_SHARDS, under_torchrun

import prepare
from configurator import UserError
from text import cut, formats
from text.dataset import load_tokenizer, open_split, verify
from text.records import record_text

PLAY = "\n\n".join(record_text(r)[0] for r in make_records(200)) + "\n"


def as_nanogpt_splits(text: str, val_fraction: float) -> tuple[list[str], list[str]]:
    """Return the documents of both splits, of a corpus of one document."""
    cut = int(len(text) * (1 - val_fraction))
    return [text[:cut]], [text[cut:]]


@pytest.fixture
def small_segments(monkeypatch):
    """A text is encoded in segments of about a thousand characters."""
    monkeypatch.setattr("text.encode.SEGMENT", 1000)
    monkeypatch.setattr(formats, "CHUNK", 2000)


@pytest.mark.parametrize("val_fraction", [0.1, 0.01, 0.5, 0.9])
def test_one_text_file_is_split_at_the_last_tenth(tmp_path, capsys, val_fraction):
    """Or at the fraction that is asked for, as nanoGPT splits it. No eos is inside the text."""
    path = tmp_path / "play.txt"
    path.write_text(PLAY, encoding="utf-8")
    folder, meta = prepare_set(tmp_path, path, val_fraction=val_fraction)
    train, val = as_nanogpt_splits(PLAY, val_fraction)
    assert (texts_of(folder, "train"), texts_of(folder, "val")) == (train, val)
    counts = meta["splits"]["val"]
    assert (counts["documents"], counts["characters"]) == (1, len(val[0]))
    assert counts["bytes"] == len(val[0].encode())
    last = f"the last {len(val[0]):,} of {len(PLAY):,} characters are val"
    assert f"1 document, too few to choose some for val: {last}" in capsys.readouterr().out
    for split in ("train", "val"):
        verify(folder, meta, split)
    call(prepare.main, "--inspect", folder)
    report = capsys.readouterr().out
    assert last in report and "  1 record, read as" in report and "1 document " in report
    assert "1 documents" not in report and "50.00%" not in report  # not the halves of the cut


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".json"])
def test_the_tokens_of_each_split_are_those_of_its_text(tmp_path, small_segments, suffix):
    """Whatever the format, and even if the text is longer than a segment."""
    path = tmp_path / f"play{suffix}"
    if suffix == ".txt":
        path.write_text(PLAY, encoding="utf-8")
    else:
        write_jsonl(path, [{"text": PLAY}])
    options = dict(tokenizer="train", vocab_size=400, val_fraction=0.1)
    folder, meta = prepare_set(tmp_path, path, **options)
    tokenizer = load_tokenizer(folder)
    splits = as_nanogpt_splits(PLAY, 0.1)
    for split, (text,) in zip(("train", "val"), splits, strict=True):
        wanted = [*tokenizer.encode(text).tolist(), meta["eos_id"]]
        assert open_split(folder, meta, split).tolist() == wanted


@pytest.mark.parametrize("number", [2, 3, 9])
def test_of_a_few_files_the_last_characters_are_val(tmp_path, small_segments, number):
    """Only the file at the cut is cut, wherever in its segments that is."""
    texts = [f"book {i} {PLAY[: 3000 * (i + 1)]}" for i in range(number)]
    files = []
    for i, text in enumerate(texts):
        files.append(tmp_path / f"{i}.txt")
        files[-1].write_text(text, encoding="utf-8")
    folder, meta = prepare_set(tmp_path, *files, val_fraction=0.1)
    train = texts_of(folder, "train")
    val = texts_of(folder, "val")
    at = int(len("".join(texts)) * 0.9)
    assert "".join(train) == "".join(texts)[:at] and "".join(val) == "".join(texts)[at:]
    *before, left = train
    right, *behind = val
    assert [*before, left + right, *behind] == texts
    assert meta["few_documents"] == number


def test_a_cut_between_two_documents_cuts_neither(tmp_path):
    texts = ["a" * 50, "b" * 40, "c" * 10]
    folder, _ = prepare_set(tmp_path, write_texts(tmp_path / "c.jsonl", texts), val_fraction=0.1)
    assert texts_of(folder, "train") == texts[:2] and texts_of(folder, "val") == texts[2:]


@pytest.mark.parametrize("at", range(1, 12))
def test_a_cut_is_right_at_the_edges_of_segments_too(tmp_path, monkeypatch, at):
    monkeypatch.setattr("text.encode.SEGMENT", 3)
    text = "ab cd ef\ng\n" + "h"
    path = tmp_path / "c.txt"
    path.write_text(text)
    folder, _ = prepare_set(tmp_path, path, val_fraction=1 - (at + 0.5) / 12)
    assert (texts_of(folder, "train"), texts_of(folder, "val")) == ([text[:at]], [text[at:]])


def test_many_documents_are_chosen_by_their_hash_as_ever(tmp_path):
    """These are the hashes of the files that prepare.py made before it could split by text."""
    folder, meta = prepare_set(tmp_path, write_jsonl(tmp_path / "c.jsonl", make_records(60)))
    found = [sha256((folder / f"{split}.bin").read_bytes()).hexdigest() for split in meta["splits"]]
    assert [digest[:16] for digest in found] == ["6f73189f3917d012", "58e7ee0fcb030efe"]
    assert "few_documents" not in meta


def test_documents_that_the_hash_puts_into_one_split_are_split_by_text(tmp_path):
    """The same document ten times: its hash puts all into one split."""
    corpus = write_texts(tmp_path / "c.jsonl", ["the same"] * 10)
    folder, meta = prepare_set(tmp_path, corpus, val_fraction=0.2)
    assert meta["few_documents"] == 10
    assert texts_of(folder, "train") == ["the same"] * 8
    assert texts_of(folder, "val") == ["the same"] * 2


def test_left_out_documents_do_not_count(tmp_path):
    """Neither equal ones nor short ones: the cut is made in what is left."""
    texts = ["x" * 100, "short", "x" * 100, "y" * 100, "x" * 100]
    corpus = write_texts(tmp_path / "c.jsonl", texts)
    options = dict(dedup=True, min_tokens=10, val_fraction=0.1)
    folder, meta = prepare_set(tmp_path, corpus, **options)
    assert meta["few_documents"] == 2
    assert texts_of(folder, "train") == ["x" * 100, "y" * 80]
    assert texts_of(folder, "val") == ["y" * 20]


def test_a_text_of_one_character_is_one_clear_line(tmp_path, refuses):
    (tmp_path / "c.txt").write_text("x")
    options = [f"--data_dir={tmp_path}", f"--tokenizer={tiktoken_file(tmp_path / 'b.tiktoken')}"]
    error = refuses(prepare.main, "--input", tmp_path / "c.txt", *options)
    assert "train.bin would be empty" in error and "lower --val_fraction" in error


def test_a_killed_run_goes_on_and_ends_in_the_same_bytes(tmp_path, small_segments, monkeypatch):
    path = tmp_path / "play.txt"
    path.write_text(PLAY, encoding="utf-8")
    wanted, _ = prepare_set(tmp_path, path, name="wanted")

    def killed(*_):
        raise UserError("killed")

    with monkeypatch.context() as kill:
        kill.setattr(cut, "text_of", killed)
        with pytest.raises(UserError, match="killed; the finished work is kept"):
            prepare_set(tmp_path, path, shard_mb=0.02)
    folder, _ = prepare_set(tmp_path, path, shard_mb=0.02)
    assert contents(folder) == contents(wanted)
    assert not (tmp_path / "data" / ".set.tmp").exists()


@pytest.mark.slow
def test_workers_and_processes_do_not_change_a_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "CHUNK", 2000)
    files = []
    for i in range(3):
        files.append(tmp_path / f"{i}.txt")
        files[-1].write_text(f"{i} {PLAY}", encoding="utf-8")
    one, _ = prepare_set(tmp_path, *files)
    options = [f"--tokenizer={tmp_path / 'bytes.tiktoken'}", "--workers=2", TINY_SHARDS]
    run = under_torchrun(2, files, tmp_path / "two", *options, run=warm.run)
    assert run.returncode == 0, run.stderr[-2000:]
    assert contents(tmp_path / "two" / "set") == contents(one)

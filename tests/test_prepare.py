import base64
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import call, make_records, write_jsonl

import prepare
from configurator import UserError
from hardware.disk import Lock
from text.dataset import load_tokenizer, open_dataset, open_split
from text.formats import Source, read_chunks
from text.settings import PrepareConfig
from text.shapes import record_text

TEXTS = ["第一篇：你好，世界。", "second: hello\n    indented world"]
TEXTS += ["third 😀 naïve <|endoftext|> </s>"]


def tiktoken_file(path: Path, extra: int = 0) -> Path:
    """Write a .tiktoken vocabulary: the 256 bytes and `extra` pairs of bytes."""
    tokens = [bytes([i]) for i in range(256)] + [bytes(divmod(i, 256)) for i in range(extra)]
    lines = [base64.b64encode(t) + b" %d\n" % rank for rank, t in enumerate(tokens)]
    path.write_bytes(b"".join(lines))
    return path


def prepare_set(tmp_path: Path, *inputs: Path, **options) -> tuple[Path, dict]:
    """Run prepare.py, by default with a tokenizer of bytes. Return the folder and its meta.json."""
    model = tiktoken_file(tmp_path / "bytes.tiktoken")
    options = {"tokenizer": model, "val_fraction": 0.3, "name": "set"} | options
    flags = [f"--{k}={v}" for k, v in options.items()]
    call(prepare.main, "--input", *inputs, f"--data_dir={tmp_path / 'data'}", *flags)
    folder = tmp_path / "data" / options["name"]
    return folder, open_dataset(folder)


def texts_of(folder: Path, split: str) -> list[str]:
    """Return the documents of a split, decoded. Each must end in eos."""
    meta = open_dataset(folder)
    tokenizer = load_tokenizer(folder)
    ids = open_split(folder, meta, split)
    ends = np.flatnonzero(ids == meta["eos_id"]) + 1
    assert ends[-1] == len(ids) and len(ends) == meta["splits"][split]["documents"]
    return [tokenizer.decode(document[:-1].tolist()) for document in np.split(ids, ends)[:-1]]


def all_texts(folder: Path) -> list[str]:
    return texts_of(folder, "train") + texts_of(folder, "val")


def documents(folder: Path) -> Counter:
    """Return how often each document is in the data set, in both splits together."""
    return Counter(all_texts(folder))


# -- records to text --


@pytest.mark.parametrize("chinese", ["均摊分析", "カタカナ", "𠀀𠀁𠀂𠀃"])
def test_marks_are_full_width_from_one_letter_in_twenty_on(chinese):
    for letters, joined in ((76, "a：{}。"), (77, "a: {}")):
        content = chinese + "x" * (letters - 1) + " = (1 + 2) / 3;" * 20
        assert record_text({"title": "a", "content": content})[0] == joined.format(content)


# -- formats --


ENCODINGS = [  # --encoding, a byte order mark as files of Windows begin with, the file's encoding
    ("gb18030", "", "gb18030"),
    ("utf-8", "\ufeff", "utf-8"),
    ("utf-16", "\ufeff", "utf-16-be"),
    ("utf-16-le", "", "utf-16-le"),
    # The mark tells UTF-16 whatever the option.
    ("utf-8", "\ufeff", "utf-16-le"),
    ("gb18030", "\ufeff", "utf-16-be"),
    ("utf-32", "\ufeff", "utf-16-le"),
]


@pytest.mark.parametrize("option, mark, encoding", ENCODINGS)
@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "tsv", "txt"])
def test_every_format_gives_the_same_texts_in_every_encoding(
    tmp_path, suffix, option, mark, encoding
):
    # U+0A0A: no byte of a character of UTF-16 is a line end.
    texts = [f'{t}, 鎔鑄\u0a0a number {i} "quoted"\tand tab' for i in range(12) for t in TEXTS]
    separator = "\t" if suffix == "tsv" else ","
    quoted = [t.replace('"', '""') for t in texts]
    rows = "".join(f'{i}{separator}"{t}"\n' for i, t in enumerate(quoted))
    content = {
        "jsonl": "".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts),
        "json": json.dumps([{"text": t} for t in texts], ensure_ascii=False, indent=2),
        "txt": "\n\n".join(texts),
    }
    path = tmp_path / f"corpus.{suffix}"
    table = f"id{separator}text\n{rows}"
    path.write_bytes((mark + content.get(suffix, table)).encode(encoding))
    folder, meta = prepare_set(tmp_path, path, encoding=option, txt="block")
    assert documents(folder) == Counter(texts)
    assert sum(s["bytes"] for s in meta["splits"].values()) == sum(len(t.encode()) for t in texts)
    assert meta["records"]["bad"] == {}


WHOLE = "file {0}, line one\nline two\n\n \nblock two of {0}\n"
BLOCKS = ["file {0}, line one\nline two", "block two of {0}"]  # also the last one has no line end


PARTS = [("file", [WHOLE]), ("block", BLOCKS), ("line", [*BLOCKS[0].split("\n"), BLOCKS[1]])]


@pytest.mark.parametrize("txt, parts", PARTS)
def test_a_text_file_is_one_document_or_one_a_block_or_line(tmp_path, txt, parts):
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(WHOLE.format(i))
    folder, _ = prepare_set(tmp_path, tmp_path, txt=txt)
    assert documents(folder) == Counter(part.format(i) for part in parts for i in range(20))


def test_bad_records_are_skipped_counted_and_shown_with_their_line(tmp_path, capsys):
    path = write_jsonl(tmp_path / "c.jsonl", [{"text": f"document {i}"} for i in range(20)])
    with open(path, "ab") as f:
        f.write(b'{"text": "cut off\n{"question": "?"}\n{"text": "  "}\n{"text": "half \\ud800"}\n')
        f.write(b'{"text": "a wrong \xff byte"}\n')
    _, meta = prepare_set(tmp_path, path, max_bad=0.2)
    records = meta["records"]
    assert records["read"] == 25 and sum(records["bad"].values()) == 4
    assert records["dropped"] == {"empty": 1} and records["shapes"] == {"{text}": 21}
    report = capsys.readouterr().out
    assert all(f"c.jsonl:{line}: " in report for line in (21, 22, 24, 25))


# -- the files --


@pytest.mark.slow
def test_a_large_vocabulary_is_written_in_32_bits(tmp_path):
    corpus = write_jsonl(tmp_path / "c.jsonl", make_records(30))
    model = tiktoken_file(tmp_path / "a.tiktoken", 65_279)  # plus 256 bytes and eos
    _, fits = prepare_set(tmp_path, corpus, tokenizer=model)
    assert (fits["vocab_size"], fits["dtype"]) == (65_536, "uint16")
    model = tiktoken_file(tmp_path / "b.tiktoken", 65_280)
    large, meta = prepare_set(tmp_path, corpus, tokenizer=model)
    assert (meta["vocab_size"], meta["dtype"]) == (65_537, "uint32")
    assert open_split(large, meta, "train").max() == meta["eos_id"] == 65_536
    assert documents(large) == Counter(record_text(r)[0] for r in make_records(30))


# -- faults --


def test_two_runs_of_one_name_never_mix(tmp_path, refuses):
    corpus = write_jsonl(tmp_path / "c.jsonl", make_records(40))
    scratch = tmp_path / "data" / ".set.tmp"
    other = Lock(scratch / ".lock", "wait")  # a running prepare.py holds this lock
    options = [f"--data_dir={tmp_path / 'data'}", "--name=set"]
    error = refuses(prepare.main, "--input", corpus, *options)
    assert str(scratch) in error and scratch.exists()
    other.release()
    prepare_set(tmp_path, corpus)


def test_a_json_array_cut_off_anywhere_is_an_error(tmp_path):
    whole = json.dumps([{"text": f"doc {i}"} for i in range(6)])
    path = tmp_path / "a.json"
    for end in range(1, len(whole), 3):
        path.write_text(whole[:end])
        with pytest.raises(UserError, match="a.json: element"):
            list(read_chunks([Source.from_path(path, "json")], PrepareConfig(max_record_mb=1)))

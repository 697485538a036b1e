"""Every format, compression, encoding and record shape becomes documents, through prepare.py."""

import bz2
import gzip
import itertools
import json
import lzma
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import POINTERS, call, write_jsonl
from test_prepare import TEXTS, all_texts, documents, prepare_set

import prepare
from text import pool
from text.formats import Source, read_chunks
from text.settings import PrepareConfig
from text.shapes import record_text


def zstd(data: bytes) -> bytes:
    """Compress with a window of 2 GiB, after a frame to skip, as pzstd writes one."""
    module = pytest.importorskip("backports.zstd", reason="needs backports.zstd")
    parameter = module.CompressionParameter
    options = {parameter.window_log: 31, parameter.enable_long_distance_matching: 1}
    packer = module.ZstdCompressor(options=options)
    return b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + packer.compress(data) + packer.flush()


COMPRESS = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress, "zst": zstd}
MANY = [f"{t}, number {i}" for i in range(12) for t in TEXTS]


def jsonl(texts: Iterable[str]) -> str:
    return "".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts)


def write_texts(path: Path, texts: Iterable[str]) -> Path:
    return write_jsonl(path, [{"text": t} for t in texts])


def rows_of(path: Path, **settings) -> list:
    """Return the records of a file, as the reader of its kind yields them."""
    source = Source.from_path(path, path.suffix[1:])
    chunks = read_chunks([source], PrepareConfig(**settings))
    return [record for chunk in chunks for _, record in chunk.records]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_every_compression_is_read_whatever_the_file_is_called(tmp_path, suffix):
    one = COMPRESS[suffix](jsonl(MANY).encode())
    paths = [tmp_path / f"named.jsonl.{suffix.upper()}", tmp_path / "misnamed.jsonl"]
    for path in paths:
        path.write_bytes(one + one)  # as `cat a.gz b.gz` makes it
    folder, _ = prepare_set(tmp_path, *paths)
    assert documents(folder) == Counter(MANY * 4)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_compressed_file_that_is_damaged_is_an_error(tmp_path, refuses, suffix):
    packed = COMPRESS[suffix](jsonl(f"{t} {i}" for i in range(200) for t in TEXTS).encode())
    path = tmp_path / f"cut.jsonl.{suffix}"
    damaged = [packed[: len(packed) - 1], packed[: len(packed) // 2]]
    if suffix != "zst":  # a second stream that is damaged, or none: bz2 and lzma just end there
        damaged += [packed + b"\x01" + packed[1:], packed + bytes(4) + b"garbage"]
    for content in damaged:
        path.write_bytes(content)
        error = refuses(prepare.main, "--input", path, f"--data_dir={tmp_path}", "--name=x")
        assert f"cut.jsonl.{suffix}: damaged" in error


QUOTED = [
    ('id\ttext\n1\t"I go.\n2\tYou stay."\n3\tShe\n', ['"I go.', 'You stay."', "She"]),
    ('id\ttext\n1\t"Yes," she said.\n2\tb\n', ['"Yes," she said.', "b"]),
    ('id\ttext\n1\t"He said ""no""."\n2\t5" nails\n', ['He said "no".', '5" nails']),
    ('id\ttext\n1\t"one\ntwo"\n2\t"a\tb"\n', ["one\ntwo", "a\tb"]),
    ('"id"\t"text"\n"1"\t"all"\n\n', ["all"]),
    ('id\ttext\n1\t"""Return x."""\n2\t"I go.\n3\tb"\n', ['"""Return x."""', '"I go.', 'b"']),
]


@pytest.mark.parametrize("content, texts", QUOTED)
def test_quotes_in_a_tsv_are_text_unless_csv_wrote_it(tmp_path, content, texts):
    path = tmp_path / "a.tsv"
    path.write_text(content)
    assert [row["text"] for row in rows_of(path)] == texts


@pytest.fixture
def write_parquet(tmp_path) -> Callable[..., Path]:
    """write_parquet(columns, **options) writes c.parquet: name -> array; it returns the path."""
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")

    def write(columns: dict | list, names: list | None = None, **options) -> Path:
        parquet.write_table(pyarrow.table(columns, names), tmp_path / "c.parquet", **options)
        return tmp_path / "c.parquet"

    return write


def test_columns_of_parquet_are_read_or_counted(tmp_path, write_parquet, refuses):
    columns = {"text": MANY, "inner": [{"a": text} for text in MANY]}
    path = write_parquet(columns, row_group_size=20)
    for fields, unread in (("", ["inner.a"]), ("inner.a", ["text"]), ("{text}", ["inner.a"])):
        folder, meta = prepare_set(tmp_path, path, fields=fields)
        assert documents(folder) == Counter(MANY) and [*meta["records"]["unread"]] == unread
    path.write_bytes(path.read_bytes()[:-20])
    assert "c.parquet" in refuses(prepare.main, "--input", path)
    write_parquet([MANY, MANY], ["text", "text"])
    assert "c.parquet: " in refuses(prepare.main, "--input", path, f"--data_dir={tmp_path}")


@pytest.mark.parametrize("int96", [False, True])
def test_times_in_parquet_hide_no_text(tmp_path, write_parquet, refuses, int96):
    """They may have the name of a field that is used. Python has no type for most of these."""
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow")

    said = {"role": "user", "content": "?"}
    kinds = {"role": pa.string(), "content": pa.string(), "at": pa.timestamp("ns")}
    columns = {
        "text": ["one"],
        "messages": pa.array([[said]], pa.list_(pa.struct(kinds.items()))),
        "label": pa.array([10**18 + 1], pa.timestamp("ns")),
        "weight": pa.array([2**31 - 1], pa.date32()),
        "input": pa.array([1], pa.time64("ns")),
    }
    path = write_parquet(columns, use_deprecated_int96_timestamps=int96)
    assert rows_of(path) == [dict(text="one", messages=[said], label=None, weight=None, input=None)]
    options = [f"--data_dir={tmp_path}", "--fields=text,label"]
    assert "c.parquet: " in refuses(prepare.main, "--input", path, *options)


WRONG = [(jsonl(MANY).encode("gb18030"), "utf-8"), (b"\0\xd8" * 9, "utf-16")]


@pytest.mark.parametrize("content, encoding", WRONG)
def test_records_of_another_encoding_are_an_error(tmp_path, refuses, content, encoding):
    path = tmp_path / "c.jsonl"
    path.write_bytes(content)
    options = [f"--encoding={encoding}", f"--data_dir={tmp_path}"]
    error = refuses(prepare.main, "--input", path, *options)
    assert str(path) in error and "--encoding" in error


BOOKS = [
    ("gbk", "你好，世界，我来了。", "--encoding=gb18030"),
    ("big5", "你好，世界。這是我們學習的書。", "--encoding=big5"),
    ("latin-1", "Un café à l'été, où êtes-vous ?", "half a character"),
    ("utf-16-le", "Its NULs pass for UTF-8.", "--encoding=utf-16-le"),
]


@pytest.mark.parametrize("encoding, text, way", BOOKS)
def test_a_book_that_is_lost_is_named_with_its_encoding(tmp_path, refuses, encoding, text, way):
    """A named one is an error, however small it is: --max_bad is for records, and for folders."""
    write_texts(tmp_path / "a.jsonl", [f"text {i}" for i in range(2500)])
    book = tmp_path / "b.txt"
    book.write_text(f"{text}\n" * 2000, encoding=encoding)
    options = ["--name=x", "--tokenizer=byte", f"--data_dir={tmp_path}"]
    error = refuses(prepare.main, "--input", tmp_path, "--max_bad=0.05", *options)
    assert "1 of 2,501" in error and "b.txt" in error and way in error
    book.write_text(text, encoding=encoding)
    call(prepare.main, "--input", tmp_path, *options)
    error = refuses(prepare.main, "--input", tmp_path / "a.jsonl", book, *options)
    assert str(book) in error and way in error


def test_the_line_of_a_wrong_byte_is_named_and_a_nul_is_text(tmp_path, refuses):
    path = tmp_path / "a.txt"
    path.write_bytes("第一\0行。\n第二行".encode() + b"\xff\n" + "第三行。\n".encode() * 9)
    error = refuses(prepare.main, "--input", path, f"--data_dir={tmp_path}")
    assert "a.txt, line 2: " in error and "iconv" not in error


QUESTION = {"question": "Q", "answer": "A", "n": 7, "meta": {"source": "web"}, "a.b": "dot"}
QUESTION |= {"a": {"b": "wrong"}, " outer ": " spaces "}


NAMED = [
    ("问：{question}\\n答：{answer}", "问：Q\n答：A"),
    ("{meta.source}: {n}", "web: 7"),
    ("a.b, meta.source", "dot\nweb"),
    ("{ outer }{a.b}", " spaces dot"),
]


@pytest.mark.parametrize("fields, text", NAMED)
def test_other_fields_are_named_by_a_list_or_a_template(fields, text):
    assert record_text(QUESTION, fields)[:2] == (text, fields)


@pytest.mark.parametrize("fields", ["{}", "{question}：{answer", "{a{b}}", "question"])
def test_fields_that_are_no_template_or_exchange_are_refused(tmp_path, refuses, fields):
    path = write_jsonl(tmp_path / "c.jsonl", [QUESTION] * 20)
    options = [f"--data_dir={tmp_path / 'data'}", "--tokenizer=byte", f"--fields={fields}"]
    options += ["--chat"] * (fields == "question")
    assert f"fields={fields}: " in refuses(prepare.main, "--input", path, *options)
    assert not (tmp_path / "data").exists()


def test_a_record_without_the_named_field_stops_before_it_writes(tmp_path, refuses):
    corpus = write_jsonl(tmp_path / "c.jsonl", [{"a": "text"}] * 50 + [{"b": "text"}])
    error = refuses(prepare.main, "--input", corpus, "--fields=a", f"--data_dir={tmp_path}")
    assert all(part in error for part in ("1 of 51", "--max_bad", "c.jsonl:51: ", "{b}"))
    assert not (tmp_path / "c").exists()


def test_format_reads_the_files_of_folders(tmp_path, refuses):
    inputs = tmp_path / "in"
    for name in ("AA", ".git", "__pycache__"):
        (inputs / name).mkdir(parents=True)
    write_texts(inputs / "AA" / "wiki_00", MANY)
    (inputs / "AA" / "wiki_01.bz2").write_bytes(bz2.compress(jsonl(MANY).encode()))
    for name in (".DS_Store", ".part-00000.crc", ".git/HEAD", "__pycache__/a.pyc", "_SUCCESS"):
        (inputs / name).write_bytes(b"" if name == "_SUCCESS" else b"\0\1")
    assert "--format" in refuses(prepare.main, "--input", inputs)
    folder, meta = prepare_set(tmp_path, inputs, format="jsonl")
    assert documents(folder) == Counter(MANY * 2)
    assert sum(meta["sources"][-1]["skipped"].values()) == 5
    write_texts(inputs / "state.json", MANY)
    (inputs / "data.arrow").write_bytes(b"ARROW1")
    assert "data.arrow" in refuses(prepare.main, "--input", inputs)


@pytest.mark.parametrize("pointer, cure", POINTERS)
@pytest.mark.parametrize("suffix", ["txt", "jsonl", "json.gz", "tsv", "parquet", "model"])
def test_a_pointer_is_named_with_its_cure(tmp_path, refuses, suffix, pointer, cure):
    pytest.importorskip("pyarrow", reason="needs pyarrow")
    corpus = path = tmp_path / f"a.{suffix}"
    path.write_text(pointer)
    options = [f"--data_dir={tmp_path}"]
    if suffix == "model":
        options.append(f"--tokenizer={path}")
        corpus = write_texts(tmp_path / "a.jsonl", MANY)
    error = refuses(prepare.main, "--input", corpus, *options)
    assert f"a.{suffix}: " in error and cure in error and "Errno" not in error


def test_texts_about_pointers_are_no_pointers(tmp_path):
    texts = ["# xet version 2 is out\n", "See https://git-lfs.github.com/spec/v1\n", "/annex/a\n"]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.md").write_text(text)
    folder, _ = prepare_set(tmp_path, tmp_path)
    assert "".join(all_texts(folder)) == "".join(texts)


EQUAL_KEYS = ['{"text": "a", "text": "b"}', '{"text": "a", "meta": [{"n": 1, "m": 2, "n": 3}]}']


@pytest.mark.parametrize("record", EQUAL_KEYS)
def test_two_equal_keys_of_an_object_lose_no_value(tmp_path, refuses, record):
    for suffix, place in (("jsonl", "c.jsonl:21: "), ("json", "c.json: element 21: ")):
        path = tmp_path / f"c.{suffix}"
        path.write_text('{"text": "a", "meta": {"text": "b"}}\n' * 20 + record)
        assert place in refuses(prepare.main, "--input", path, f"--data_dir={tmp_path}")
    _, meta = prepare_set(tmp_path, tmp_path / "c.jsonl", max_bad=0.1)
    assert sum(meta["records"]["bad"].values()) == 1


@pytest.mark.parametrize("suffix, separator", [("csv", ","), ("tsv", "\t")])
def test_columns_without_a_name_are_numbered_and_others_stripped(tmp_path, suffix, separator):
    path = tmp_path / f"a.{suffix}"
    path.write_text(("v1, v2 ,, \n" + "ham,one,,\nspam,two,more,\n" * 9).replace(",", separator))
    assert rows_of(path)[1] == {"v1": "spam", "v2": "two", "column 3": "more", "column 4": ""}
    folder, _ = prepare_set(tmp_path, path, fields="v2")
    assert documents(folder) == Counter(["one", "two"] * 9)


@pytest.mark.parametrize("digits", [400, 5000])  # a float has at most 309
@pytest.mark.parametrize("fields", ["", "text"])
@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_integers_of_any_length_are_read(tmp_path, suffix, fields, digits):
    path = tmp_path / f"a.{suffix}"
    path.write_text(f'{{"text": -{"7" * digits}}}\n' * 9)
    folder, _ = prepare_set(tmp_path, path, fields=fields)
    assert documents(folder) == Counter(["-" + "7" * digits] * 9)


# -- what is left out --


def test_a_row_with_too_many_fields_is_bad(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("id,text\n" + "1,one\n" * 9 + "2,two,three\n")
    folder, meta = prepare_set(tmp_path, path, max_bad=0.2)
    assert documents(folder) == {"one": 9}
    assert meta["records"]["examples"][0].startswith(f"{path}:11: ")


def test_separators_are_decoded_and_those_without_effect_named(tmp_path, capsys):
    path = write_texts(tmp_path / "c.jsonl", ["one\ntwo<|e|>three"] * 9)
    folder, meta = prepare_set(tmp_path, path, separators="\\n, <|e|>, <|x|>")
    assert documents(folder) == Counter(["one", "two", "three"] * 9)
    assert meta["records"]["separators"] == {"\n": 9, "<|e|>": 9}
    note = capsys.readouterr().err
    assert "'<|x|>'" in note and "<|e|>" not in note


def test_without_a_terminal_progress_is_a_line_a_minute(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("text.formats.CHUNK", 300)
    path = write_texts(tmp_path / "c.jsonl", [f"text {i}" for i in range(500)])
    clock = itertools.count(0, 20)  # seconds: a chunk takes 20
    monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    prepare_set(tmp_path, path)
    chunks = next(clock) // 20 - 1
    lines = [line for line in capsys.readouterr().err.splitlines() if "%" in line]
    assert len(lines) == chunks // 4 > 5
    assert all(re.search(r"\d%.* \d\d:\d\d", line) for line in lines)


def test_texts_stay_as_they_are_and_min_tokens_drops_short_ones(tmp_path):
    texts = [f"document number {i}" for i in range(40)]
    texts += ["document number 3", "x", "ﬁne １", "bell\a and tab\t", "document number 3"]
    corpus = write_texts(tmp_path / "c.jsonl", texts)
    folder, meta = prepare_set(tmp_path, corpus)
    assert documents(folder) == Counter(texts)
    assert meta["records"]["dropped"] == meta["records"]["changed"] == {}
    folder, meta = prepare_set(tmp_path, corpus, min_tokens=2)
    assert documents(folder) == Counter(texts) - Counter("x")
    assert meta["records"]["dropped"] == {"fewer than 2 tokens": 1}
    assert meta["settings"]["min_tokens"] == 2
    lengths = Counter(len(t.encode()) + 1 for t in documents(folder).elements())
    assert meta["lengths"]["p50"] == sorted(lengths.elements())[21]
    assert meta["lengths"]["max"] == max(lengths)

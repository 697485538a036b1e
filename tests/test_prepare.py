import base64
import fcntl
import gzip
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import call, make_records, write_jsonl

import prepare
from configurator import UserError
from text import formats
from text.dataset import load_tokenizer, open_dataset, open_split, verify
from text.formats import read_json
from text.records import docstrings, record_text
from text.sources import Source, demo_sources
from text.tokenizer import Tiktoken

SHARED = Path(__file__).resolve().parents[2] / "shared"
TEXTS = ["第一篇：你好，世界。", "second: hello\n    indented world", "third 😀 naïve <|endoftext|> </s>"]


def tiktoken_file(path: Path, extra: int = 0) -> Path:
    """A .tiktoken vocabulary of the 256 bytes and `extra` pairs of them."""
    tokens = [bytes([i]) for i in range(256)] + [bytes(divmod(i, 256)) for i in range(extra)]
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % rank for rank, t in enumerate(tokens)))
    return path


def prepare_set(tmp_path: Path, *inputs: Path, **options) -> tuple[Path, dict]:
    """Run prepare.py with a byte tokenizer (unless told otherwise); returns the folder and its meta.json."""
    options = {"tokenizer": tiktoken_file(tmp_path / "bytes.tiktoken"), "val_fraction": 0.3, "name": "set"} | options
    flags = [f"--{k}={v}" for k, v in options.items()]
    call(prepare.main, "--input", *inputs, f"--data_dir={tmp_path / 'data'}", *flags)
    folder = tmp_path / "data" / options["name"]
    return folder, open_dataset(folder)


def documents(folder: Path) -> Counter:
    """The documents of both splits, decoded; every one must end in eos."""
    meta, tokenizer, found = open_dataset(folder), load_tokenizer(folder), Counter()
    for split in ("train", "val"):
        ids = open_split(folder, meta, split)
        assert ids[-1] == meta["eos_id"] and (ids == meta["eos_id"]).sum() == meta["splits"][split]["documents"]
        for document in np.split(ids, np.flatnonzero(ids == meta["eos_id"]) + 1)[:-1]:
            found[tokenizer.decode(document[:-1].tolist())] += 1
    return found


# -- records to text --


def test_a_record_joins_title_summary_and_sections_with_full_width_marks():
    record = {
        "title": "猫",
        "summary": "哺乳动物",
        "sections": [{"title": "习性", "content": "夜行"}, {"title": "食物", "content": "鱼"}],
    }
    assert record_text(record) == ("猫：哺乳动物习性：夜行。食物：鱼。", "{title, summary, sections}")


@pytest.mark.parametrize(
    "record, text",
    [
        ({"title": "a", "summary": "b"}, "a：b"),
        ({"title": "a", "summary": None, "sections": [{"title": "c", "content": "d"}]}, "a：c：d。"),
        ({"title": "a", "content": "b"}, "a：b。"),
        ({"text": "as it is"}, "as it is"),
        ({"text": "t", "id": 7}, "t"),
        ({"title": "t", "text": "as it is"}, "as it is"),
        ({"content": "c"}, "c"),
        ({"completion": "c"}, "c"),
        ({"prompt": "p", "completion": "c"}, "p\nc"),
        ({"instruction": "i", "input": "", "output": "o"}, "i\no"),
        ({"instruction": "i", "input": "n", "output": "o"}, "i\nn\no"),
        ({"title": "a", "summary": "b", "sections": [{"title": "c"}, {"content": 5}]}, "a：bc：。：5。"),
        ({"question": "?"}, None),
        ({"text": 5}, None),
        ({"title": 7, "content": "b"}, "7：b。"),
        ({"title": ["a"], "content": "b"}, None),
        ({"title": "a", "summary": "b", "sections": [{"title": "c", "content": ["d"]}]}, None),
        ({"title": "a", "summary": "b", "sections": ["c"]}, None),
        (["a"], None),
    ],
)
def test_known_record_shapes_and_no_others_become_text(record, text):
    if text is None:
        with pytest.raises(ValueError):
            record_text(record)
    else:
        assert record_text(record)[0] == text


# -- formats --


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv", ".jsonl.gz", ".json.gz", ".csv.gz"])
def test_every_record_format_gives_the_same_documents(tmp_path, suffix):
    texts = [f'{t}, number {i} "quoted"\tand tab' for i in range(12) for t in TEXTS]
    separator = "\t" if "tsv" in suffix else ","
    quoted = "".join(f'{i}{separator}"{t.replace(chr(34), chr(34) * 2)}"\n' for i, t in enumerate(texts))
    content = {
        ".jsonl": "".join(json.dumps({"text": t}) + "\n" for t in texts),
        ".json": json.dumps([{"text": t} for t in texts], ensure_ascii=False, indent=2),
        ".csv": f"id{separator}text\n{quoted}",
    }
    content[".tsv"] = content[".csv"]
    data = ("\ufeff" + content[suffix.removesuffix(".gz")]).encode()  # with a byte order mark, as Windows writes it
    path = tmp_path / f"corpus{suffix}"
    path.write_bytes(gzip.compress(data) if suffix.endswith(".gz") else data)
    folder, meta = prepare_set(tmp_path, path)
    assert documents(folder) == Counter(texts)
    assert sum(s["bytes"] for s in meta["splits"].values()) == sum(len(t.encode()) for t in texts)
    assert meta["records"]["bad"] == {}


@pytest.mark.parametrize("txt, want", [("file", 1), ("block", 2), ("line", 3)])
def test_a_text_file_is_one_document_or_one_a_block_or_line(tmp_path, txt, want):
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(f"file {i}, line one\nline two\n\n \nblock two of {i}\n")
    folder, meta = prepare_set(tmp_path, tmp_path, txt=txt)
    assert sum(s["documents"] for s in meta["splits"].values()) == 20 * want


def test_a_json_array_is_read_in_one_element_of_memory(tmp_path):
    """Elements larger and smaller than the read buffer, and cut by it at every possible place."""
    texts = ["x" * n for n in (0, 1, 65_530, 65_536, 200_000)] + [f"short {i}" for i in range(20_000)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": t} for t in texts]))
    with open(path) as f:
        found = read_json(f, Source(path, "json", "a.json"), "file", 10**6)
        assert [record["text"] for _, record in found] == texts


def test_bad_records_are_skipped_counted_and_shown_with_their_line(tmp_path, capsys):
    path = write_jsonl(tmp_path / "c.jsonl", [{"text": f"document {i}"} for i in range(20)])
    with open(path, "a") as f:
        f.write('{"text": "cut off\n{"question": "?"}\n{"text": "  "}\n{"text": "half \\ud800"}\n')
    folder, meta = prepare_set(tmp_path, path, max_bad=0.2)
    records = meta["records"]
    assert records["read"] == 24 and records["bad"]["not valid JSON"] == 1 and sum(records["bad"].values()) == 3
    assert records["dropped"] == {"empty": 1} and records["shapes"] == {"{text}": 21}
    report = capsys.readouterr().out
    assert "c.jsonl:21: not valid JSON" in report and "c.jsonl:22: no known shape but {question}" in report
    assert "c.jsonl:24: half a surrogate pair" in report and "bad: 3" in report and "dropped: 1" in report


# -- the files --


def test_token_counts_equal_a_direct_count_with_the_tokenizer(tmp_path):
    import sentencepiece

    records = make_records(200)
    folder, meta = prepare_set(tmp_path, write_jsonl(tmp_path / "c.jsonl", records), tokenizer="train", vocab_size=400)
    sp = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    assert sum(s["tokens"] for s in meta["splits"].values()) == sum(
        len(sp.encode(record_text(r)[0])) + 1 for r in records
    )
    assert documents(folder) == Counter(record_text(r)[0] for r in records)
    for split, s in meta["splits"].items():
        assert hashlib.sha256((folder / f"{split}.bin").read_bytes()).hexdigest() == s["sha256"]


def test_a_document_stays_in_its_split_when_files_are_added(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", make_records(60, seed=1))
    b = write_jsonl(tmp_path / "b.jsonl", make_records(60, seed=2))

    def val(folder):
        ids, tokenizer, meta = (
            open_split(folder, open_dataset(folder), "val"),
            load_tokenizer(folder),
            open_dataset(folder),
        )
        return {
            tokenizer.decode(d[:-1].tolist()) for d in np.split(ids, np.flatnonzero(ids == meta["eos_id"]) + 1)[:-1]
        }

    alone, both = (val(prepare_set(tmp_path, *files, name=f"set{len(files)}")[0]) for files in ((a,), (b, a)))
    assert alone < both
    assert alone == both & {record_text(r)[0] for r in make_records(60, seed=1)}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_output_does_not_depend_on_the_number_of_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "CHUNK", 2000)  # so that three workers have something to share
    corpus = write_jsonl(tmp_path / "c.jsonl", make_records(300))
    sets = [
        prepare_set(tmp_path, corpus, tokenizer="train", vocab_size=400, workers=n, name=f"t{n}")[0] for n in (1, 3)
    ]
    assert contents(sets[0]) == contents(sets[1])


def test_a_large_vocabulary_is_written_in_32_bits(tmp_path):
    corpus = write_jsonl(tmp_path / "c.jsonl", make_records(30))
    fits = prepare_set(tmp_path, corpus, tokenizer=tiktoken_file(tmp_path / "a.tiktoken", 65_279))[1]  # + 256 + eos
    large, meta = prepare_set(tmp_path, corpus, tokenizer=tiktoken_file(tmp_path / "b.tiktoken", 65_280))
    assert (fits["vocab_size"], fits["dtype"], meta["vocab_size"], meta["dtype"]) == (
        65_536,
        "uint16",
        65_537,
        "uint32",
    )
    assert open_split(large, meta, "train").max() == meta["eos_id"] == 65_536
    assert documents(large) == Counter(record_text(r)[0] for r in make_records(30))


def test_a_stored_tiktoken_encoding_encodes_as_the_original(tmp_path):
    corpus = write_jsonl(tmp_path / "c.jsonl", [{"text": t} for t in TEXTS * 4])
    original = Tiktoken.from_file(tiktoken_file(tmp_path / "v.tiktoken", 5000), pattern=r"\p{L}+|\s|.")
    info = original.save(tmp_path)
    again = Tiktoken.from_file(tmp_path / info["file"], info["pattern"], info["special"])
    assert all((again.encode(t) == original.encode(t)).all() for t in TEXTS) and again.eos_id == original.eos_id
    folder, _ = prepare_set(tmp_path, corpus)
    assert documents(folder) == Counter(TEXTS * 4)  # "<|endoftext|>" inside a text stays text


@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken"])
def test_token_bytes_put_together_are_the_text(tmp_path, tiny_data, kind):
    tokenizer = (
        load_tokenizer(tiny_data / "tiny")
        if kind == "sentencepiece"
        else Tiktoken.from_file(tiktoken_file(tmp_path / "v"))
    )
    for text in (*TEXTS, "\u2581 a\u2581\u2581b \u2581"):
        ids = tokenizer.encode(text).tolist()
        assert tokenizer.decode(ids) == text and b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    assert tokenizer.token_bytes(tokenizer.eos_id) == b""


# -- faults --


def bad_inputs(tmp_path: Path) -> dict[str, tuple[list[str], str]]:
    """name -> (arguments, a part of the message)."""
    empty, cut, latin = tmp_path / "empty.jsonl", tmp_path / "cut.jsonl.gz", tmp_path / "latin.txt"
    empty.write_text("")
    cut.write_bytes(gzip.compress(b'{"text": "hello"}\n' * 5000)[:-20])
    latin.write_bytes("naïve".encode("latin-1"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "image.png").write_bytes(b"")
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{\n[]\n")
    clash = tmp_path / "clash.tiktoken"
    clash.write_bytes(b"YQ== 0\nYg== 0\n")
    half = tmp_path / "half.json"
    half.write_text('[{"text": "one"}, {"text": "two"}, {"text": "thr')
    one = write_jsonl(tmp_path / "one.jsonl", [{"text": "the only document"}])
    some = write_jsonl(tmp_path / "some.jsonl", make_records(50))
    return {
        "no such file": (["--input", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        "empty folder": (["--input", tmp_path / "folder"], "has no file that ends in .jsonl"),
        "half a JSON array": (["--input", half], "half.json: not valid JSON behind element 2, near"),
        "a name that leads away": (["--input", some, "--name=.."], "must be a plain folder name"),
        "unknown kind": (["--input", tmp_path / "image.png"], "image.png: unknown kind of file"),
        "empty corpus": (["--input", empty], "the input is empty"),
        "empty corpus, ready tokenizer": (["--input", empty, f"--tokenizer={tiktoken_file(tmp_path / 'b.tiktoken')}"], "no documents"),
        "nothing but bad records": (["--input", bad], "all 2 records are bad or empty, as " + str(bad) + ":1: not valid JSON"),
        "cut off": (["--input", cut], "cut.jsonl.gz: damaged or cut off"),
        "not UTF-8": (["--input", latin], "latin.txt: byte 0xef is not of its encoding: say --encoding"),
        "one document": (["--input", one, f"--tokenizer={tmp_path / 'b.tiktoken'}"], "val.bin would be empty: of 1 documents"),
        "ranks that clash": (["--input", some, f"--tokenizer={clash}"], "its ranks are no numbering"),
        "unknown tokenizer": (["--input", some, "--tokenizer=gpt9"], "gpt9: no such file, and no tiktoken encoding"),
        "not a SentencePiece model": (["--input", some, f"--tokenizer={some}.model"], "not a SentencePiece model"),
        "vocabulary too large": (["--input", some, "--vocab_size=50000"], "--vocab_size=50000: SentencePiece cannot train"),
        "unknown option": (["--inptu", some], "did you mean 'input'?"),
        "bad fraction": (["--input", some, "--val_fraction=1.5"], "val_fraction must be between 0 and 1"),
        "no room for a record": (["--input", some, "--max_record_mb=0"], "max_record_mb must be"),
        "a path for a name": (["--input", some, "--name=../x"], "must be a plain folder name"),
    }  # fmt: skip


def test_bad_input_is_one_clear_line_and_the_old_data_set_stays(tmp_path, refuses):
    folder, before = prepare_set(tmp_path, write_jsonl(tmp_path / "good.jsonl", make_records(40)))
    for name, (arguments, message) in bad_inputs(tmp_path).items():
        extra = [] if any("--name" in str(a) for a in arguments) else ["--name=set"]
        error = refuses(prepare.main, *arguments, f"--data_dir={tmp_path / 'data'}", *extra)
        assert message in error, f"{name}: {error}"
        assert open_dataset(folder) == before and os.listdir(tmp_path / "data") == ["set"], name


def test_nothing_but_a_data_set_is_ever_replaced(tmp_path, refuses, monkeypatch):
    """The corpus itself may stand where the data set would go: `--input data/wiki` names data/wiki."""
    (tmp_path / "data" / "wiki").mkdir(parents=True)
    corpus = write_jsonl(tmp_path / "data" / "wiki" / "a.jsonl", make_records(40))
    options = [f"--data_dir={tmp_path / 'data'}", "--vocab_size=400"]
    error = refuses(prepare.main, "--input", corpus.parent, *options)
    assert "exists and is no data set: it holds 'a.jsonl'" in error
    (tmp_path / "data" / "file").write_text("mine")
    assert "is no data set" in refuses(prepare.main, "--input", corpus, "--name=file", *options)
    assert "cannot name a data set" in refuses(prepare.main, "--input", corpus, "--name=a*", *options)
    monkeypatch.chdir(corpus.parent)
    assert "is no data set" in refuses(prepare.main, "--input", ".", *options)  # "." means this folder's name
    assert corpus.exists() and sorted(os.listdir(tmp_path / "data")) == ["file", "wiki"]


def test_two_runs_of_one_name_never_mix(tmp_path, refuses):
    corpus = write_jsonl(tmp_path / "c.jsonl", make_records(40))
    scratch = tmp_path / "data" / ".set.tmp"
    scratch.mkdir(parents=True)
    other = os.open(scratch, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)  # what a running prepare.py holds
    error = refuses(prepare.main, "--input", corpus, f"--data_dir={tmp_path / 'data'}", "--name=set")
    assert "another process is writing" in error and scratch.exists()
    os.close(other)
    prepare_set(tmp_path, corpus)


def test_csv_rows_that_would_lose_text_are_reported(tmp_path, refuses):
    commas = tmp_path / "commas.csv"
    commas.write_text("text\n" + "".join(f"row {i}\n" for i in range(20)) + "row 21, and the rest\n")
    folder, meta = prepare_set(tmp_path, commas, max_bad=0.1)
    assert list(meta["records"]["bad"].values()) == [1]
    assert "commas.csv:22: more fields than the header" in meta["records"]["examples"][0]
    (tmp_path / "open.csv").write_text('text\none\n"never closed\ntwo\nthree\n')
    error = refuses(prepare.main, "--input", tmp_path / "open.csv", "--name=x")
    assert "open.csv:3: not a row of a CSV file" in error


@pytest.mark.parametrize("cut", range(1, 60))
def test_a_json_array_cut_off_anywhere_is_an_error(tmp_path, cut):
    whole = json.dumps([{"text": f"doc {i}"} for i in range(6)])
    path = tmp_path / "a.json"
    path.write_text(whole[:-cut])
    with open(path) as f, pytest.raises(UserError, match="a.json: not valid JSON"):
        list(read_json(f, Source(path, "json", "a.json"), "file", 10**6))


def test_an_id_beyond_the_vocabulary_or_a_truncated_file_is_found(tmp_path, tiny_data):
    folder, meta = prepare_set(tmp_path, write_jsonl(tmp_path / "c.jsonl", make_records(40)))
    verify(folder, meta, "train")
    ids = np.memmap(folder / "train.bin", dtype=meta["dtype"], mode="r+")
    ids[123] = meta["vocab_size"]
    ids.flush()
    with pytest.raises(UserError, match="train.bin: token 123 has id 257, beyond the vocabulary of 257"):
        verify(folder, meta, "train")
    os.truncate(folder / "train.bin", 100)
    with pytest.raises(UserError, match="train.bin: 100 bytes where meta.json says .* truncated"):
        open_dataset(folder)


# -- the embedded corpus and the shared ones --


def test_module_documentation_is_found_without_importing():
    source = (
        '"""What the module is for."""\nraise SystemExit("imported")\n'
        'class A:\n    def f(self):\n        """Return the answer to everything, which is 42."""\n'
        'def short():\n    """Too short."""\n'
        'add_docstr(torch.abs,\n    r"""\nabs(input) -> Tensor\n\nThe absolute value of each element.\n""")\n'
    )
    answer, absolute = "Return the answer to everything, which is 42.", "The absolute value of each element."
    want = f"pkg.m：What the module is for.A.f：{answer}。torch.abs：abs(input) -> Tensor\n\n{absolute}。"
    assert docstrings(source.encode(), "pkg.m") == want


def test_the_demo_corpus_is_large_and_the_same_every_time():
    sources = demo_sources()
    some = [docstrings(s.path.read_bytes(), s.name) for s in sources[:200]]
    assert sources == demo_sources() and len(sources) > 1000
    assert sum(map(len, some)) > 300_000 and some[0].startswith("__future__：")


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared corpora")
def test_gpt2_counts_of_a_real_corpus_equal_tiktoken(tmp_path):
    code = "import sys, prepare; from configurator import run; run(prepare.main)"
    corpus = tmp_path / "some.jsonl"
    with gzip.open(SHARED / "corpora" / "oi_wiki_zh.jsonl.gz", "rt", encoding="utf-8") as f:
        corpus.write_text("".join(line for line, _ in zip(f, range(60), strict=False)), encoding="utf-8")
    env = os.environ | {
        "TIKTOKEN_CACHE_DIR": str(SHARED / "tiktoken_cache"),
        "PYTHONPATH": str(Path(prepare.__file__).parent),
    }
    options = ["--input", corpus, "--name=zh", f"--data_dir={tmp_path}", "--tokenizer=gpt2", "--val_fraction=0.1"]
    subprocess.run([sys.executable, "-c", code, *map(str, options)], env=env, check=True, capture_output=True)
    meta, tokenizer = open_dataset(tmp_path / "zh"), load_tokenizer(tmp_path / "zh")
    records = [json.loads(line) for line in corpus.read_text(encoding="utf-8").splitlines()]
    assert sum(s["tokens"] for s in meta["splits"].values()) == sum(
        len(tokenizer.encode(record_text(r)[0])) + 1 for r in records
    )
    assert (meta["vocab_size"], meta["eos_id"], meta["dtype"]) == (50257, 50256, "uint16")
    assert documents(tmp_path / "zh") == Counter(record_text(r)[0] for r in records)

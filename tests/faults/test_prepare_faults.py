"""prepare.py deletes nothing that it did not write, and makes the right data set or none."""

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from conftest import REPO, call, contents, make_records, write_jsonl
from test_prepare import documents, prepare_set

import prepare
from configurator import UserError
from text import formats, records, sources
from text.dataset import open_dataset
from text.formats import Source, read_chunks
from text.records import Tally
from text.settings import PrepareConfig

CHUNK = 20_000  # bytes: 300 records are several chunks


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(formats, "CHUNK", CHUNK)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("corpus")
    return [write_jsonl(folder / f"{i}.jsonl", make_records(300, seed=i)) for i in range(2)]


@pytest.fixture(scope="module")
def reference(corpus, tmp_path_factory) -> dict[str, bytes]:
    """The files of the data set that prepare.py makes of the corpus: name -> content."""
    root = tmp_path_factory.mktemp("reference")
    return contents(prepare_set(root, *corpus, tokenizer="train", vocab_size=400)[0])


def options(data: Path, *more: str) -> list[str]:
    """Return options like those of prepare_set() in test_prepare.py."""
    usual = ["--name=set", "--val_fraction=0.3", "--vocab_size=400"]
    return [f"--data_dir={data}", *usual, *more]


def tree(folder: Path) -> dict[Path, bytes]:
    """Return the content of everything in a folder."""
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


# -- nothing is deleted --

NOT_OURS = {  # path -> its content, or None for a link to somebody's folder
    "a folder in the scratch folder": {".set.tmp/set/thesis.tex": "precious"},
    "a link in the scratch folder": {".set.tmp/set": None},
    "a link for a data set": {"set": None},
    "another meta.json": {"set/train.bin": "1", "set/val.bin": "2", "set/meta.json": "{}"},
    "a file": {"set": "mine"},
    "a corpus": {"set/a.jsonl": '{"text": "precious"}'},
}


@pytest.mark.parametrize("case", NOT_OURS)
def test_what_prepare_did_not_write_is_refused_and_kept(corpus, tmp_path, refuses, case):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "train.bin").write_text("a file of somebody, elsewhere")
    for name, content in NOT_OURS[case].items():
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.symlink_to(tmp_path / "precious")
        else:
            path.write_text(content)
    everything = tree(tmp_path)
    error = refuses(prepare.main, "--input", corpus[0], *options(tmp_path / "data"))
    assert str(tmp_path / "data" / name.split("/")[0]) in error and tree(tmp_path) == everything


@pytest.mark.parametrize("changed", ["data/set/train.bin", "mine.jsonl"])
def test_a_data_set_that_differs_from_its_files_is_kept(corpus, tmp_path, capsys, changed):
    mine = Path(shutil.copy(corpus[0], tmp_path / "mine.jsonl"))
    old, _ = prepare_set(tmp_path, mine)
    shutil.copy(corpus[1], tmp_path / changed)  # the same name is not the same text
    before = contents(old)
    for _ in range(2):
        call(prepare.main, "--input", mine, *options(old.parent))
    assert sorted(os.listdir(old.parent)) == ["set", "set.old"]
    kept = old.parent / "set.old"
    assert before.items() <= contents(kept).items() and contents(old) != before
    assert str(kept) in capsys.readouterr().err


@pytest.mark.parametrize("name", ["vocab.json", "notes/a.txt"])
def test_what_somebody_put_into_a_data_set_is_kept_alone(corpus, tmp_path, capsys, name):
    old, _ = prepare_set(tmp_path, corpus[0])
    (old / name).parent.mkdir(exist_ok=True)
    (old / name).write_text("precious")
    capsys.readouterr()
    call(prepare.main, "--input", corpus[0], *options(old.parent))
    kept = old.parent / "set.old"
    assert contents(kept) == {name: b"precious"}
    (note,) = capsys.readouterr().err.splitlines()
    assert str(kept) in note and name.split("/")[0] in note and "changed" not in note


# The calls of the system after which a run is killed: at some of them the disk changes.
KILLER = """
import os, sys
sys.path.insert(0, {repo!r})
import prepare
calls = 0
def audit(event, arguments):
    global calls
    if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir") and {data!r} in str(
        arguments[0]
    ):
        calls += 1
        if calls == {number}:
            os._exit(9)
sys.addaudithook(audit)
prepare.main()
"""


@pytest.mark.slow
def test_a_kill_before_any_change_on_the_disk_loses_no_data(corpus, reference, tmp_path):
    """The old data set is whole, under its name or as NAME.old."""
    folder, _ = prepare_set(tmp_path, *corpus, tokenizer="byte")
    data, old = folder.parent, contents(folder)
    backup = shutil.copytree(data, tmp_path / "backup")
    arguments = ["--input", *map(str, corpus), *options(data)]
    for number in range(1, 999, 13):
        code = KILLER.format(repo=str(REPO), data=str(data), number=number)
        run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True)
        if run.returncode == 0:
            break
        assert run.returncode == 9, run.stderr[-2000:]
        whole = [contents(path) for path in (folder, data / "set.old") if path.exists()]
        assert old in whole or reference in whole
        call(prepare.main, "--input", *corpus, *options(data))
        assert contents(folder) == reference and not (data / ".set.tmp").exists()
        shutil.rmtree(data)
        shutil.copytree(backup, data)
    assert number > 10 and contents(folder) == reference


def test_a_file_that_changes_while_it_is_read_is_an_error(corpus, tmp_path, refuses):
    path = shutil.copy(corpus[0], tmp_path / "c.jsonl")
    source = Source.from_path(path, "jsonl")
    for change in (b"", b'{"text": "one more"}\n'):  # the first one only sets its times
        os.utime(path, (0, 0))
        path.write_bytes(path.read_bytes() + change)
        with pytest.raises(UserError, match="c.jsonl: it changed"):
            list(read_chunks([source], PrepareConfig()))
    (source,) = read = [Source.from_path(path, "jsonl")]
    list(read_chunks(read, PrepareConfig()))
    assert source.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


# -- which files are read --


def test_linked_folders_are_followed_and_every_file_is_read_once(tmp_path, capsys):
    folder = tmp_path / "corpus"
    places = {"a": folder, "b": folder / "sub", "c": tmp_path / "elsewhere"}
    for name, place in places.items():
        place.mkdir(exist_ok=True)
        write_jsonl(place / f"{name}.jsonl", [{"text": f"text {name} {i}"} for i in range(20)])
    (folder / "0_link").symlink_to(tmp_path / "elsewhere")
    (folder / "1_link").symlink_to(folder)  # a loop
    (folder / "0_sub").symlink_to(folder / "sub")  # a second name of a folder
    (folder / "linked.jsonl").symlink_to(folder / "sub" / "b.jsonl")
    os.link(folder / "a.jsonl", folder / "z.jsonl")
    for name in ("picture.PNG", "archive.tar.gz", "README"):
        (folder / name).write_bytes(b"")
    data, meta = prepare_set(tmp_path, folder)
    assert documents(data) == {f"text {name} {i}": 1 for name in places for i in range(20)}
    names = [Path(s["path"]).relative_to(folder) for s in meta["sources"] if "sha256" in s]
    assert list(map(str, names)) == ["0_link/c.jsonl", "0_sub/b.jsonl", "a.jsonl"]
    skipped = {".png": 1, ".tar.gz": 1, "no suffix": 1, sources.READ_ALREADY: 2}
    assert meta["sources"][-1] == {"path": str(folder), "skipped": skipped}
    assert f"skipped in {folder}: " in capsys.readouterr().out


def test_what_prepare_writes_is_never_read_as_a_corpus(corpus, tmp_path):
    """The data_dir is inside the input. It holds data sets, and files that a killed run left."""
    shutil.copy(corpus[0], tmp_path)
    data = tmp_path / "data"
    call(prepare.main, "--input", tmp_path, *options(data, "--name=another"))
    (data / ".third.tmp" / "set").mkdir(parents=True)
    (data / ".third.tmp" / "set" / "tokenizer.json").write_text("{}")
    call(prepare.main, "--input", tmp_path, *options(data))
    meta = open_dataset(data / "set")
    assert [s["path"] for s in meta["sources"] if "sha256" in s] == [str(tmp_path / "0.jsonl")]
    assert meta["sources"][-1]["skipped"][sources.OUR_OWN] >= 5


def test_a_link_to_nothing_or_a_pipe_is_an_error(corpus, tmp_path, refuses):
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (tmp_path / "link.jsonl", tmp_path / "pipe.jsonl"):
        assert f"--input {path}: " in refuses(prepare.main, "--input", tmp_path, *options(tmp_path))
        path.unlink()


NAMES = ["测试".encode("gbk"), "测试".encode(), "café [".encode("latin-1")]


@pytest.mark.slow
def test_files_may_have_any_name_in_any_locale(tmp_path):
    """The locale C knows ASCII alone."""
    corpus = os.fsencode(tmp_path) + b"/" + NAMES[0]
    os.mkdir(corpus)
    for name in NAMES:
        named = write_jsonl(tmp_path / "c", make_records(100))
        shutil.copy(named, corpus + b"/" + name + b".jsonl")
    data = tmp_path / "data"
    options = ["--input", corpus, f"--data_dir={data}", "--val_fraction=0.3", "--workers=2"]
    inspecting = ["--inspect", os.fsencode(data) + b"/" + NAMES[0]]
    for argv in ([*options, "--vocab_size=400"], inspecting):
        environment = os.environ | {"PYTHONUTF8": "0", "LC_ALL": "C"}
        argv = [sys.executable, "prepare.py", *argv]
        ended = subprocess.run(argv, cwd=REPO, capture_output=True, env=environment)
        assert ended.returncode == 0, ended.stderr.decode(errors="replace")
    (data,) = data.iterdir()
    in_one_order = [corpus + b"/" + NAMES[i] + b".jsonl" for i in (2, 0, 1)]
    assert [os.fsencode(s["path"]) for s in open_dataset(data)["sources"]] == in_one_order


# -- records --

LIMIT = 50_000
TOO_LONG = "longer than --max_record_mb=0.05"


@pytest.mark.parametrize("chunk", [1000, 1 << 20])
@pytest.mark.parametrize(
    "suffix, txt, encoding",
    [("jsonl", "file", "utf-8"), ("jsonl", "file", "utf-16"), ("txt", "line", "utf-8")],
)
def test_a_record_beyond_the_limit_is_bad_and_the_next_are_read(
    tmp_path, monkeypatch, suffix, txt, encoding, chunk
):
    monkeypatch.setattr(formats, "CHUNK", chunk)
    texts = [f"text {i}" for i in range(60)]
    over = "z" * (3 * LIMIT)
    lines = [*texts[:20], over, *texts[20:], over, ""]
    if suffix == "jsonl":
        lines = [json.dumps({"text": line}) for line in lines[:-1]]
    path = tmp_path / f"c.{suffix}"
    path.write_text("\n".join(lines), encoding=encoding)
    cfg = PrepareConfig(encoding=encoding, txt=txt, max_record_mb=LIMIT / 1e6)
    tally = Tally()
    chunks = read_chunks([Source.from_path(path, suffix)], cfg)
    sent = (pickle.loads(pickle.dumps(chunk)) for chunk in chunks)  # to a worker
    parsed = [d for chunk in sent for d in records.documents(chunk, cfg, tally)]
    assert [document.texts for document in parsed] == [[text] for text in texts]
    assert tally.bad == {TOO_LONG: 2} and tally.examples[0] == f"{path}:21: {TOO_LONG}"
    assert tally.characters["bad"] > 2 * LIMIT  # as far as they are read


BEGINNINGS = {"json": '[{"text": "', "jsonl": '{"text": "', "csv": 'text\n"', "txt": ""}


@pytest.mark.slow
@pytest.mark.parametrize("suffix", BEGINNINGS)
def test_memory_does_not_grow_with_a_record(tmp_path, suffix):
    """A process reads a record of 25 million characters, where 1 million is the limit."""
    path = tmp_path / f"c.{suffix}"
    path.write_text(BEGINNINGS[suffix] + ("z" * 1999 + "\n" * (suffix == "csv")) * 12_500)
    tracemalloc.start()
    try:
        chunks = read_chunks([Source.from_path(path, suffix)], PrepareConfig(max_record_mb=1))
        ((_, record),) = [record for chunk in chunks for record in chunk.records]
        assert suffix in ("jsonl", "txt") and record  # a worker refuses it
    except UserError:
        assert suffix in ("json", "csv")
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 20_000_000


LONG = "z" * (LIMIT + 1)
REFUSED = {  # (name of the file, its content, where the error is)
    "an element": ("c.json", f'[{{"text": "one"}}, {{"text": "{LONG}"}}]', "element 2"),
    "a field without end": ("c.csv", 'text\none\n"' + "z\n" * LIMIT, "c.csv:3"),
    "a column twice": ("c.csv", "text,text\none,two\n", "c.csv:1"),
    "a comma left out": ("c.json", '[{"text": "one"}, {"a": "one" "x": 1}]', "element 2"),
    "a number without end": ("c.json", '{"text": "one"}, ' + "1" * 2 * LIMIT, "element 2"),
    "nested too deeply": ("c.json", '{"text": "one"}, ' + "[" * 10_000, "element 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_error_says_where_the_next_record_cannot_be_found(tmp_path, refuses, case):
    name, content, place = REFUSED[case]
    path = tmp_path / name
    path.write_text(content)
    error = refuses(prepare.main, "--input", path, *options(tmp_path, "--max_record_mb=0.05"))
    assert str(path) in error and place in error and "--max_record_mb" in error


def test_a_long_file_or_row_is_bad_and_the_next_is_read(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for name, length in (("a", LIMIT + 1), ("b", LIMIT), ("c", 10)):
        (texts / f"{name}.txt").write_text(name * length)
    limit = dict(max_record_mb=0.05, max_bad=1)
    folder, meta = prepare_set(tmp_path, texts, **limit)
    assert meta["records"]["examples"] == [f"{texts / 'a.txt'}: {TOO_LONG}"]
    assert "".join(documents(folder)) == "b" * LIMIT + "c" * 10
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    rows = make_records(60)
    rows[30]["sections"].append({"title": "", "content": LONG})
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    _, meta = prepare_set(tmp_path, tmp_path / "c.parquet", **limit)
    assert meta["records"]["examples"] == [f"{tmp_path / 'c.parquet'}: row 31: {TOO_LONG}"]


def test_an_element_may_be_cut_by_the_edge_at_every_place(tmp_path):
    others = [None, -1.5e-10, 123456789, float("-inf"), {}, [[], {"z": "]}"}]]
    tricky = [{"text": '\u4e2d\U0001f600 \\ " \\\\ \b', "x": others}]
    tricky += [1234567890123, -2.5e-10, 1.5e300]
    path = tmp_path / "c.json"
    for shift in range(len(json.dumps(tricky)) + 10):
        values = [{"text": "x" * (65_536 - shift)}, *tricky, {"text": "the last"}]
        for text in (json.dumps(values), "\n".join(map(json.dumps, values))):
            path.write_text(text)
            chunks = read_chunks([Source.from_path(path, "json")], PrepareConfig(max_record_mb=1))
            assert [v for chunk in chunks for _, v in chunk.records] == values, shift


def test_a_text_does_not_steer_the_terminal(tmp_path, prints):
    values = [{"text": f"\x1b[2J\x07 text {i}\tand\nmore"} for i in range(50)]
    folder, _ = prepare_set(tmp_path, write_jsonl(tmp_path / "a.jsonl", values))
    shown = prints(prepare.main, f"--inspect={folder}", "--count=2")
    assert "\x1b" not in shown and "[2J" in shown and "\tand\nmore" in shown

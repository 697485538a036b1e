"""prepare.py deletes nothing that it did not write, and makes the right data set or none."""

import bz2
import errno
import hashlib
import io
import json
import lzma
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO, call, make_records, write_jsonl
from test_prepare import contents, documents, prepare_set, tiktoken_file

sys.path.insert(0, str(Path(__file__).parent))
import harness

import prepare
from configurator import UserError
from hardware import disk
from text import folders, formats, records, sources, train_tokenizer
from text.dataset import open_dataset
from text.formats import Reader
from text.ranks import Ranks
from text.records import Cleaning, Tally
from text.sources import Source

KILL = "lambda *arguments: os._exit(9)"
CHUNK = 20_000  # bytes: 300 records are several chunks, and each chunk ends a shard


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
    """Return options like those of prepare_set() in test_prepare.py, but each chunk is a shard."""
    usual = ["--name=set", "--val_fraction=0.3", "--vocab_size=400", "--shard_mb=0.001"]
    return [f"--data_dir={data}", *usual, *more]


def killed(data: Path, patch: str, *arguments, stdin: bytes = b"") -> None:
    """Run prepare.py in a process of its own, which kills itself where `patch` tells it to."""
    code = f"import os, sys; sys.path.insert(0, {str(REPO)!r})\n"
    code += "from text import folders, formats\nfrom hardware import disk\nimport prepare\n"
    code += f"formats.CHUNK = {CHUNK}\n{patch}\nprepare.main()"
    argv = [sys.executable, "-c", code, "--input", *map(str, arguments), *options(data)]
    done = subprocess.run(argv, capture_output=True, input=stdin)
    assert done.returncode == 9, done.stderr[-2000:]


def after_commit(number: int) -> str:
    """Return a patch for killed(): die one write after this many commits of the journal."""
    return f"""
write, commit, commits = prepare.Part.write, prepare.Part.commit, []
def counting(*arguments):
    commit(*arguments)
    commits.append(0)
def last_write(part, encoded):
    write(part, encoded)
    if len(commits) == {number}:
        part.files["train"].file.flush()
        os._exit(9)
prepare.Part.commit, prepare.Part.write = counting, last_write
"""


def fails(path: Path, *_):
    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))


def tree(folder: Path) -> dict[str, str]:
    """Return what is in a folder: path -> hash of a file, target of a link, or "" for a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = os.readlink(path) if path.is_symlink() else ""
        if path.is_file() and not path.is_symlink():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


# -- nothing is deleted or cut --


@pytest.mark.slow
@pytest.mark.parametrize("then", ["other settings", "more files"])
def test_a_data_set_that_shares_files_with_the_scratch_folder_is_not_cut(corpus, tmp_path, then):
    """A kill right after the exchange of the folders leaves each .bin file with two names."""
    model = f"--tokenizer={tiktoken_file(tmp_path / 'b.tiktoken')}"
    killed(tmp_path, f"prepare.remove_scratch = {KILL}", corpus[0], model)
    live = tmp_path / "set" / "train.bin"
    assert live.stat().st_nlink == 2
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("precious")
    os.link(thesis, tmp_path / ".set.tmp" / "part0" / ".train.bin.tmp")
    with open(live, "rb") as mapped_by_a_training:
        before = mapped_by_a_training.read()
        more = [*corpus, model] if then == "more files" else [corpus[0], model, "--normalize=NFKC"]
        killed(tmp_path, after_commit(1), *more)
        mapped_by_a_training.seek(0)
        assert mapped_by_a_training.read() == before
        call(prepare.main, "--input", *more, *options(tmp_path))
        mapped_by_a_training.seek(0)
        assert mapped_by_a_training.read() == before
    wanted = dict(normalize="NFKC") if then == "other settings" else {}
    fresh, _ = prepare_set(tmp_path, *[path for path in more if isinstance(path, Path)], **wanted)
    assert live.read_bytes() == (fresh / "train.bin").read_bytes() != before
    assert thesis.read_text() == "precious"


def put_in_the_way(data: Path, what: str) -> str:
    """Put something there that prepare.py did not make. Return what the error must say."""
    scratch = data / ".set.tmp"
    target = data / "set"
    outside = data / "precious"
    outside.mkdir(parents=True)
    (outside / "train.bin").write_text("a file of somebody, elsewhere")
    a_set = {"train.bin": "1", "val.bin": "2", "tokenizer.model": "3", "meta.json": "{}"}
    if what == "a folder of the scratch folder's name":
        scratch.mkdir()
        (scratch / "thesis.tex").write_text("precious")
        return "thesis.tex is in the folder that prepare.py works in"
    if what == "a data set moved to that name":
        scratch.mkdir()
        for name, text in a_set.items():
            (scratch / name).write_text(text)
        return ".set.tmp/meta.json is in the folder that prepare.py works in"
    if what == "a file in a part":
        (scratch / "part0").mkdir(parents=True)
        (scratch / "part0" / "notes.md").write_text("precious")
        return "notes.md is in the folder that prepare.py works in"
    if what == "a link for a scratch folder":
        scratch.symlink_to(outside)
        return ".set.tmp is a link"
    if what == "a link for a part":
        scratch.mkdir()
        (scratch / "part0").symlink_to(outside)
        return "part0 is in the folder that prepare.py works in"
    if what == "a link in a part":
        (scratch / "part0").mkdir(parents=True)
        (scratch / "part0" / "train.bin").symlink_to(outside / "train.bin")
        return "train.bin is in the folder that prepare.py works in"
    if what == "a link for a data set":
        target.symlink_to(outside)
        return "set exists and is no data set"
    if what == "a link to nothing for a data set":
        target.symlink_to(data / "nowhere")
        return "set exists and is no data set"
    target.mkdir()
    for name, text in a_set.items():
        (target / name).write_text(text)
    if what == "another meta.json":
        return "set exists and is no data set: it holds 'meta.json'"
    if what == "a meta.json that is nested a thousandfold":
        (target / "meta.json").write_text("[" * 100_000)
        return "set/meta.json is damaged (nested too deeply)"
    prepare_set(data.parent, write_jsonl(data.parent / "c.jsonl", make_records(40)), name="other")
    shutil.rmtree(target)
    (data / "other").rename(target)
    (target / "chat_template.jinja").write_text("mine: prepare.py has copied none here")
    assert what == "a file of ours that prepare.py did not write"
    return "set holds 'chat_template.jinja', which prepare.py did not write"


@pytest.mark.parametrize(
    "what",
    [
        "a folder of the scratch folder's name",
        "a data set moved to that name",
        "a file in a part",
        "a link for a scratch folder",
        "a link for a part",
        "a link in a part",
        "a link for a data set",
        "a link to nothing for a data set",
        "another meta.json",
        "a meta.json that is nested a thousandfold",
        "a file of ours that prepare.py did not write",
    ],
)
def test_what_is_not_of_prepare_is_refused_and_nothing_is_touched(corpus, tmp_path, refuses, what):
    message = put_in_the_way(tmp_path / "data", what)
    before = tree(tmp_path)
    error = refuses(prepare.main, "--input", corpus[0], *options(tmp_path / "data"))
    assert message in error and tree(tmp_path) == before
    if "nested" in what:
        error = refuses(prepare.main, "--inspect", tmp_path / "data" / "set")
        assert "set/meta.json: damaged" in error


def test_a_folder_of_somebody_called_old_stays(corpus, tmp_path):
    (tmp_path / ".set.old").mkdir()
    (tmp_path / ".set.old" / "thesis.tex").write_text("precious")
    for least in ("0", "1"):
        call(prepare.main, "--input", *corpus, *options(tmp_path, f"--min_tokens={least}"))
    assert (tmp_path / ".set.old" / "thesis.tex").read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == [".set.old", "set"]


@pytest.mark.parametrize("name", ["notes.md", "train.bin"])
def test_what_is_put_into_the_data_set_meanwhile_is_not_deleted(
    corpus, reference, tmp_path, monkeypatch, capsys, name
):
    """The old data set stays with it, under another name, also after the next run."""
    data = tmp_path / "data"
    merge = prepare.merge
    old, _ = prepare_set(tmp_path, write_jsonl(tmp_path / "old.jsonl", make_records(40)))

    def somebody_writes(*arguments):
        (old / name).write_text("precious")
        return merge(*arguments)

    monkeypatch.setattr(prepare, "merge", somebody_writes)
    call(prepare.main, "--input", *corpus, *options(data))
    monkeypatch.undo()
    for _ in range(2):
        assert contents(old) == reference and sorted(os.listdir(data)) == [".set.old", "set"]
        assert (data / ".set.old" / name).read_text() == "precious"
        assert f"{data / '.set.old'} stays" in capsys.readouterr().err
        call(prepare.main, "--input", *corpus, *options(data))


def test_a_finished_set_that_waits_is_not_encoded_again(
    corpus, reference, tmp_path, refuses, monkeypatch
):
    with monkeypatch.context() as bad_disk:
        bad_disk.setattr(folders, "put_in_place", fails)
        refuses(prepare.main, "--input", *corpus, *options(tmp_path, "--shard_mb=64"))
    monkeypatch.setattr(prepare.Encoder, "__call__", None)  # which would fail
    call(prepare.main, "--input", *corpus, *options(tmp_path, "--shard_mb=64"))
    assert contents(tmp_path / "set") == reference and os.listdir(tmp_path) == ["set"]


def test_a_file_that_comes_at_the_last_moment_is_not_deleted(corpus, tmp_path, monkeypatch, capsys):
    """The file comes after the last look at the data set, and before the exchange."""
    data = tmp_path / "data"
    old, _ = prepare_set(tmp_path, write_jsonl(tmp_path / "old.jsonl", make_records(40)))
    put = folders.put_in_place

    def somebody_writes(*arguments):
        (old / "notes.md").write_text("precious")
        return put(*arguments)

    monkeypatch.setattr(folders, "put_in_place", somebody_writes)
    call(prepare.main, "--input", *corpus, *options(data))
    (left,) = data.rglob("notes.md")
    assert left.read_text() == "precious" and f"{left.parent} stays" in capsys.readouterr().err
    assert open_dataset(old)["records"]["read"] == 600


KILLS = {
    "between them": f"""
rename = disk.Path.rename
def second(path, target):
    ({KILL})() if path.parent.name == ".set.tmp" else rename(path, target)
disk.Path.rename = second
""",
    "behind both": f"""
put = folders.put_in_place
folders.put_in_place = lambda *arguments: (put(*arguments), ({KILL})())
""",
    "in the old data set": f"""
unlink = disk.Path.unlink
def first(path, **options):
    unlink(path, **options)
    ({KILL})() if path.parent.name == ".set.old" else None
disk.Path.unlink = first
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("at", KILLS)
def test_a_kill_at_the_two_renames_loses_no_data_set(corpus, reference, tmp_path, refuses, at):
    """On a disk that cannot exchange two names, the old data set has another name for a moment."""
    folder, meta = prepare_set(tmp_path, write_jsonl(tmp_path / "old.jsonl", make_records(40)))
    data = folder.parent
    no_exchange = "disk.exchange = lambda a, b: False\n"
    killed(data, no_exchange + KILLS[at], *corpus)
    assert (data / ".set.old").is_dir() and folder.exists() == (at != "between them")
    if at == "between them":  # any next command puts the old data set back
        refuses(prepare.main, "--input", "nowhere", *options(data))
        assert open_dataset(folder) == meta
    call(prepare.main, "--input", *corpus, *options(data))
    assert contents(folder) == reference and os.listdir(data) == ["set"]


def test_what_is_left_of_an_old_data_set_goes_only_if_all_of_it_is_ours(tmp_path, capsys):
    folder, _ = prepare_set(tmp_path, write_jsonl(tmp_path / "c.jsonl", make_records(40)))
    left = [folder.with_name(name) for name in (".set.old", ".set.old2", ".set.old3", ".sets.old")]
    for copy in left:
        shutil.copytree(folder, copy)
    (left[1] / "notes.md").write_text("precious")
    (left[2] / "train.bin").write_bytes(b"precious")
    prepare_set(tmp_path, tmp_path / "c.jsonl")
    assert sorted(folder.parent.iterdir()) == [*left[1:], folder]
    notes = capsys.readouterr().err
    assert [f"{copy} stays" in notes for copy in left] == [False, True, True, False]


def test_another_users_data_set_is_replaced_and_what_stays_of_it_is_noted(tmp_path):
    """Its folder cannot be written, as that of another user. For root that takes setpriv."""
    corpus = write_jsonl(tmp_path / "c.jsonl", make_records(40))
    folder, _ = prepare_set(tmp_path, write_jsonl(tmp_path / "old.jsonl", make_records(30)))
    folder.chmod(0o555)
    argv = [sys.executable, REPO / "prepare.py", "--input", corpus, "--tokenizer=byte"]
    if os.geteuid() == 0:
        if not shutil.which("setpriv"):
            pytest.skip("needs setpriv")
        argv = ["setpriv", "--bounding-set=-dac_override", *argv]
    argv += options(folder.parent)[:2]
    done = subprocess.run(argv, capture_output=True, text=True)
    old = folder.with_name(".set.old")
    assert done.returncode == 0 and f"note: {old} stays" in done.stderr, done.stderr
    assert open_dataset(folder)["records"]["read"] == 40
    old.chmod(0o755)


def test_a_refusal_leaves_no_folder_behind(corpus, tmp_path, refuses):
    (tmp_path / "data" / "set").mkdir(parents=True)
    (tmp_path / "data" / "set" / "mine").write_text("precious")
    refuses(prepare.main, "--input", corpus[0], *options(tmp_path / "data"))
    refuses(prepare.main, "--input", "nowhere.jsonl", *options(tmp_path / "data", "--name=other"))
    assert sorted(tree(tmp_path / "data")) == ["set", "set/mine"]


def test_a_name_that_the_disk_takes_for_another_is_refused(corpus, tmp_path, refuses, monkeypatch):
    """On a disk that ignores case, the folder `Wiki` exists if there is one named `wiki`."""
    prepare_set(tmp_path, corpus[0], name="set")
    monkeypatch.setattr(prepare.os, "listdir", lambda path: ["Set", ".set.tmp"])
    error = refuses(prepare.main, "--input", corpus[0], *options(tmp_path / "data"))
    assert "this disk does not distinguish this name" in error


# -- no data set is wrong --


def hurt(path: Path, how: str, rng: random.Random) -> None:
    if how == "flip":
        harness.flip(path, rng)
    elif how == "cut":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "lose":
        path.unlink()
    else:
        path.write_text(how)


DAMAGE = []
for name in ("part0/train.bin", "part0/val.bin", "part0/rows.bin"):
    DAMAGE += [(name, how) for how in ("flip", "cut", "lose")]
for how in ("flip", "cut", "[]", "{}", "[" * 100_000, '{"sha256": 1}'):
    DAMAGE.append(("part0/journal.json", how))


@pytest.fixture(scope="module")
def interrupted(corpus, tmp_path_factory) -> Path:
    """The scratch folder of a run that was killed after its second shard."""
    root = tmp_path_factory.mktemp("interrupted")
    killed(root, after_commit(2), *corpus)
    return root / ".set.tmp"


@pytest.mark.parametrize("name, how", DAMAGE, ids=[f"{name}-{how[:8]}" for name, how in DAMAGE])
def test_damage_to_an_interrupted_preparation_is_found_and_made_good(
    corpus, reference, interrupted, tmp_path, capsys, name, how
):
    shutil.copytree(interrupted, tmp_path / ".set.tmp")
    size = json.loads((interrupted / "part0" / "journal.json").read_text())["files"]
    path = tmp_path / ".set.tmp" / name
    if name.endswith(".bin"):  # bytes beyond the size in the journal do not count
        os.truncate(path, size[path.stem][0])
    hurt(path, how, random.Random(0))
    call(prepare.main, "--input", *corpus, *options(tmp_path))
    said = capsys.readouterr().out
    assert contents(tmp_path / "set") == reference and os.listdir(tmp_path) == ["set"]
    assert "what an interrupted run has finished is discarded and made again: " in said


def test_without_damage_an_interrupted_preparation_goes_on(
    corpus, reference, interrupted, tmp_path, capsys
):
    shutil.copytree(interrupted, tmp_path / ".set.tmp")
    part = interrupted / "part0"
    size, _ = json.loads((part / "journal.json").read_text())["files"]["train"]
    assert (part / "train.bin").stat().st_size > size  # the rest is cut off
    call(prepare.main, "--input", *corpus, *options(tmp_path))
    said = capsys.readouterr().out
    assert "continuing after" in said
    assert contents(tmp_path / "set") == reference


def test_a_disk_that_fails_for_a_moment_costs_no_work(
    corpus, reference, interrupted, tmp_path, refuses, monkeypatch, capsys
):
    shutil.copytree(interrupted, tmp_path / ".set.tmp")

    with monkeypatch.context() as bad_disk:
        bad_disk.setattr("text.encode.reopened", fails)
        error = refuses(prepare.main, "--input", *corpus, *options(tmp_path))
    assert "train.bin: Input/output error; the finished work is kept" in error
    call(prepare.main, "--input", *corpus, *options(tmp_path))
    assert "continuing after" in capsys.readouterr().out and contents(tmp_path / "set") == reference


def test_a_damaged_journal_does_not_stand_in_the_way_of_an_error(corpus, tmp_path, refuses):
    scratch = tmp_path / ".set.tmp" / "part0"
    for content in ("[]", "{}", "[" * 100_000, '{"text": 1e9}'):
        scratch.mkdir(parents=True, exist_ok=True)
        (scratch / "journal.json").write_text(content)
        error = refuses(prepare.main, "--input", "nowhere.jsonl", *options(tmp_path))
        assert "nowhere.jsonl: no such file" in error
        assert not scratch.parent.exists()


@pytest.mark.parametrize("name", ["part0/train.bin", "part0/rows.bin", "tokenizer/tokenizer.model"])
def test_what_another_program_changes_meanwhile_is_found(
    corpus, reference, tmp_path, refuses, monkeypatch, name
):
    """On a network disk without locks, another prepare.py may do this."""
    commit = prepare.Part.commit
    path = tmp_path / ".set.tmp" / name

    def then_it_changes(*arguments):
        commit(*arguments)
        harness.flip(path, random.Random(0))

    with monkeypatch.context() as another:
        another.setattr(prepare.Part, "commit", then_it_changes)
        error = refuses(prepare.main, "--input", *corpus, *options(tmp_path, "--shard_mb=64"))
    assert f"{path}: changed after it was written" in error and not (tmp_path / "set").exists()
    call(prepare.main, "--input", *corpus, *options(tmp_path))
    assert contents(tmp_path / "set") == reference


@pytest.mark.parametrize("tokenizer", ["train", "ready"])
def test_a_file_that_grows_while_it_is_read_is_an_error(
    corpus, tmp_path, refuses, monkeypatch, tokenizer
):
    growing = tmp_path / "growing.jsonl"
    shutil.copy(corpus[0], growing)
    model = f"--tokenizer={tiktoken_file(tmp_path / 'b.tiktoken')}"
    ready = [model] if tokenizer == "ready" else []
    readinto = sources.HashedFile.readinto

    def somebody_writes(file, buffer):  # each time that a part of the file is read
        with open(growing, "a") as f:
            f.write('{"text": "one more"}\n')
        return readinto(file, buffer)

    with monkeypatch.context() as somebody:
        somebody.setattr(sources.HashedFile, "readinto", somebody_writes)
        error = refuses(prepare.main, "--input", growing, *options(tmp_path, *ready))
    assert f"{growing}: it changed while it was read: run the same command again" in error
    call(prepare.main, "--input", growing, *options(tmp_path, *ready))
    (read,) = open_dataset(tmp_path / "set")["sources"]
    data = growing.read_bytes()
    assert (read["bytes"], read["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())


def test_a_file_that_changes_between_readings_is_an_error(corpus, tmp_path, refuses, monkeypatch):
    """This holds even if its size and its time stay the same."""
    path = tmp_path / "c.jsonl"
    shutil.copy(corpus[0], path)
    train = train_tokenizer.train_sentencepiece

    def then_it_changes(*arguments):
        model = train(*arguments)
        stat = path.stat()
        path.write_bytes(path.read_bytes().replace(b"loop", b"pool"))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        return model

    monkeypatch.setattr(train_tokenizer, "train_sentencepiece", then_it_changes)
    error = refuses(prepare.main, "--input", path, *options(tmp_path))
    assert "c.jsonl: it changed while it was read" in error


@pytest.mark.slow
@pytest.mark.parametrize("then", ["the same", "another"])
def test_standard_input_goes_on_if_the_same_is_piped(corpus, tmp_path, capsys, monkeypatch, then):
    model = f"--tokenizer={tiktoken_file(tmp_path / 'b.tiktoken')}"
    first = corpus[0].read_bytes()
    second = first if then == "the same" else corpus[1].read_bytes()
    killed(tmp_path, after_commit(2), "-", model, stdin=first)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(second)))
    call(prepare.main, "--input", "-", *options(tmp_path, model))
    said = {"the same": "continuing after", "another": "standard input changed"}
    assert said[then] in capsys.readouterr().out
    whole, _ = prepare_set(tmp_path, corpus[0] if then == "the same" else corpus[1])
    assert (tmp_path / "set" / "train.bin").read_bytes() == (whole / "train.bin").read_bytes()


def test_an_empty_last_file_belongs_to_a_process_too(tmp_path):
    sources = [Source(Path(str(i)), "jsonl", str(i), size) for i, size in enumerate((5, 5, 0))]
    for world in (1, 2, 3, 4):
        shares = [prepare.share_of(sources, Ranks(rank, world)) for rank in range(world)]
        assert [s.name for share in shares for s in share] == ["0", "1", "2"]


def test_processes_that_see_other_files_are_an_error(corpus, tmp_path, monkeypatch):
    """With another list of files, a process would take another share than is left to it."""
    cfg = prepare.PrepareConfig(input=(str(corpus[0]), str(corpus[1])))
    monkeypatch.setattr(Ranks, "gather", lambda self, value: [value, value[:1]])
    with pytest.raises(UserError, match="1.jsonl: not the same for the processes 0 and 1"):
        prepare.find_input(cfg, {}, tmp_path, tmp_path, Ranks(0, 2))


@pytest.mark.slow
def test_a_refusal_under_torchrun_shows_no_traceback_of_the_other_process(corpus, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "mine").write_text("precious")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    argv = [*launch, str(REPO / "prepare.py"), "--input", *map(str, corpus), *options(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200)
    assert "error: " in done.stderr and "set exists and is no data set" in done.stderr
    assert "[rank1]: Traceback" not in done.stderr and "[rank0]: Traceback" not in done.stderr


def test_a_process_of_an_earlier_job_that_still_writes_is_noticed(corpus, tmp_path, refuses):
    """It may run on another machine: its part is locked, but the scratch folder is not."""
    held = disk.Lock(tmp_path / ".set.tmp" / "part0", "")
    error = refuses(prepare.main, "--input", *corpus, *options(tmp_path))
    assert "another process is writing" in error and "part0" in error
    held.close()


def test_no_memory_is_one_clear_line(corpus, tmp_path, refuses, monkeypatch):
    def fails(*arguments):
        raise MemoryError

    monkeypatch.setattr(prepare, "count", fails)
    error = refuses(prepare.main, "--input", *corpus, *options(tmp_path))
    assert "out of memory: lower --workers or --max_record_mb; the finished work is kept" in error


# -- which files are read --


def test_linked_folders_are_followed_and_every_folder_and_file_is_read_once(tmp_path):
    texts = {name: f"text of {name}" for name in ("a", "b", "c", "d")}
    folder = tmp_path / "corpus"
    elsewhere = tmp_path / "elsewhere"
    places = {"a": folder, "b": folder / "sub", "c": elsewhere, "d": elsewhere / "deep"}
    for name, place in places.items():
        place.mkdir(parents=True, exist_ok=True)
        write_jsonl(place / f"{name}.jsonl", [{"text": f"{texts[name]} {i}"} for i in range(20)])
    (folder / "0_link").symlink_to(elsewhere)
    (folder / "1_link").symlink_to(elsewhere / "deep")  # reached twice
    (folder / "2_link").symlink_to(folder)  # a loop
    (folder / "0_sub").symlink_to(folder / "sub")  # a second name of a folder
    (folder / "linked.jsonl").symlink_to(folder / "sub" / "b.jsonl")
    os.link(folder / "a.jsonl", folder / "z.jsonl")
    (folder / "picture.PNG").write_bytes(b"")
    (folder / "archive.tar.gz").write_bytes(b"")
    (folder / "README").write_text("")
    data, meta = prepare_set(tmp_path, folder)
    assert documents(data).keys() == {f"{text} {i}" for text in texts.values() for i in range(20)}
    assert set(documents(data).values()) == {1}
    read = [Path(s["path"]).relative_to(folder) for s in meta["sources"] if "sha256" in s]
    in_order = ["0_link/c.jsonl", "0_link/deep/d.jsonl", "a.jsonl", "linked.jsonl"]
    assert list(map(str, read)) == in_order
    skipped = {".png": 1, ".tar.gz": 1, "no suffix": 1, sources.OTHER_NAME: 2}
    assert meta["sources"][-1] == {"path": str(folder), "skipped": skipped}


def test_what_was_passed_by_is_shown(tmp_path, capsys):
    (tmp_path / "c").mkdir()
    write_jsonl(tmp_path / "c" / "a.jsonl", make_records(40))
    (tmp_path / "c" / "b.pdf").write_text("")
    prepare_set(tmp_path, tmp_path / "c")
    assert f"skipped in {tmp_path / 'c'}: 1 x .pdf" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["a link to nothing", "a link in a circle", "a pipe"])
def test_what_has_the_name_of_a_corpus_and_is_no_file_is_an_error(corpus, tmp_path, refuses, what):
    (tmp_path / "c").mkdir()
    shutil.copy(corpus[0], tmp_path / "c")
    path = tmp_path / "c" / "more.jsonl"
    if what == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path if what == "a link in a circle" else tmp_path / "nowhere")
    error = refuses(prepare.main, "--input", tmp_path / "c", *options(tmp_path))
    assert f"--input {path}: " in error
    path.rename(path.with_suffix(".sock"))  # a corpus does not have such a name
    if what != "a link in a circle":
        call(prepare.main, "--input", tmp_path / "c", *options(tmp_path))


def test_a_file_given_by_two_names_is_read_once(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(corpus[0].parent)
    inputs = [corpus[0], corpus[0].name, f"../{corpus[0].parent.name}/{corpus[0].name}", corpus[0]]
    _, meta = prepare_set(tmp_path, *inputs)
    assert meta["records"]["read"] == 300
    again = {s["path"]: s["skipped"] for s in meta["sources"] if "skipped" in s}
    assert again == {str(path): {sources.OTHER_NAME: 1} for path in inputs[1:3]}


def test_what_prepare_writes_is_never_read_as_a_corpus(corpus, tmp_path, refuses):
    """The data_dir is inside the input. It holds data sets, and files that a killed run left."""
    folder = tmp_path / "crawl"
    folder.mkdir()
    shutil.copy(corpus[0], folder)
    data = folder / "data"
    call(prepare.main, "--input", folder, *options(data))
    call(prepare.main, "--input", folder, *options(data, "--name=other"))
    killed(data, after_commit(1), folder)
    (data / "other").rename(data / "another")
    shutil.copytree(data / ".set.tmp", data / ".third.tmp")
    for name in ("data/set/meta.json", "data/.set.tmp/part0/journal.json"):
        error = refuses(prepare.main, "--input", folder / name, *options(data))
        assert "prepare.py wrote this file; name only the files of the corpus" in error
    call(prepare.main, "--input", folder, *options(data))
    meta = open_dataset(data / "set")
    assert [s["path"] for s in meta["sources"] if "sha256" in s] == [str(folder / "0.jsonl")]
    assert meta["sources"][-1]["skipped"][sources.OUR_OWN] > 10


NAMES = [b"\xb2\xe2\xca\xd4", "测试".encode(), b"caf\xe9 ["]  # GBK, UTF-8, Latin-1


@pytest.mark.slow
@pytest.mark.parametrize("locale", ["UTF-8", "C"])
def test_names_of_files_may_be_any_bytes_in_any_locale(corpus, tmp_path, locale):
    folder = os.fsencode(tmp_path) + b"/" + NAMES[0]
    os.mkdir(folder)
    for i, name in enumerate(NAMES):
        records = [{"text": f"document {i} {n}"} for n in range(20)] + [{"no": "text"}]
        with open(folder + b"/" + name + b".jsonl", "wb") as f:
            f.write("".join(json.dumps(r) + "\n" for r in records).encode())
    env = os.environ | ({"LC_ALL": "C", "PYTHONUTF8": "0"} if locale == "C" else {})
    program = [sys.executable, str(REPO / "prepare.py")]
    data = tmp_path / "data"
    model = f"--tokenizer={tiktoken_file(tmp_path / 'b.tiktoken')}"
    more = [f"--data_dir={data}", model, "--val_fraction=0.3", "--max_bad=0.5", "--workers=2"]
    done = subprocess.run([*program, "--input", folder, *more], capture_output=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    (target,) = data.iterdir()
    assert os.fsencode(target.name) == NAMES[0]
    meta = open_dataset(target)
    in_one_order = [folder + b"/" + NAMES[i] + b".jsonl" for i in (2, 0, 1)]
    assert [os.fsencode(s["path"]) for s in meta["sources"]] == in_one_order
    assert sum(meta["records"]["bad"].values()) == len(NAMES)
    done = subprocess.run([*program, "--inspect", target], capture_output=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]


# -- records --


def test_a_number_that_is_none_is_no_text(tmp_path):
    records = [{"title": f"title {i}", "content": "", "score": float("nan")} for i in range(40)]
    records += [{"title": float(value), "content": "text"} for value in ("nan", "inf", "-inf")]
    _, meta = prepare_set(tmp_path, write_jsonl(tmp_path / "c.jsonl", records), max_bad=0.1)
    bad = {"title is nan, no text": 1, "title is inf, no text": 1, "title is -inf, no text": 1}
    assert meta["records"]["bad"] == bad


def test_parquet_may_hold_such_numbers_too(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    rows = [{"title": i / 2, "content": "text"} for i in range(40)]
    rows[20]["title"] = float("nan")
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    _, meta = prepare_set(tmp_path, tmp_path / "c.parquet", max_bad=0.1)
    assert meta["records"]["bad"] == {"title is nan, no text": 1}


LIMIT = 50_000
TOO_LONG = "longer than --max_record_mb=0.05"
KINDS = {  # (suffix, --txt, encoding)
    "jsonl": ("jsonl", "file", "utf-8"),
    "utf-16": ("jsonl", "file", "utf-16"),
    "line": ("txt", "line", "utf-8"),
    "block": ("txt", "block", "utf-8"),
}


def with_long_records(kind: str) -> tuple[str, list[str]]:
    """Return a corpus (two records beyond LIMIT, one of exactly LIMIT) and the texts that fit."""
    texts = [f"text {i}" for i in range(60)]
    if kind in ("line", "block"):
        over = "z" * (3 * LIMIT) if kind == "line" else ("z" * 99 + "\n") * (LIMIT // 99)
        fits = "y" * (LIMIT - 1)
        lines = texts.copy()
        between = "\n" if kind == "line" else "\n \n"
        texts = [*texts[:20], fits, *texts[20:]]
    else:
        tricky = 'a "quote", a [bracket] and a } \\ ' * 3000
        over = json.dumps({"text": tricky, "more": [{"x": "]"}] * 10})
        texts = [*texts[:20], "x" * (LIMIT - len('{"text": ""}')), *texts[20:]]
        lines = [json.dumps({"text": text}) for text in texts]
        fits = lines.pop(20)
        between = "\n"
    return between.join([*lines[:20], over, fits, *lines[20:40], over, *lines[40:], ""]), texts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1000, 1 << 20])
def test_a_record_beyond_the_limit_is_bad_and_the_next_are_read(tmp_path, monkeypatch, kind, chunk):
    monkeypatch.setattr(formats, "CHUNK", chunk)
    suffix, txt, encoding = KINDS[kind]
    corpus, texts = with_long_records(kind)
    path = tmp_path / f"c.{suffix}"
    tally = Tally()
    path.write_bytes(corpus.encode(encoding))
    sources = [Source.at(path, suffix)]
    chunks = list(Reader(sources, encoding, txt, LIMIT).chunks())
    found = [records.documents(chunk, Cleaning(), tally) for chunk in chunks]
    assert [text.rstrip("\n") for documents in found for _, text, *_ in documents] == texts
    assert tally.bad == {TOO_LONG: 2} and tally.records == len(texts) + 2
    line = 41 if kind == "block" else 21
    assert tally.examples[0] == f"{path}:{line}: {TOO_LONG}"
    for n, chunk in enumerate(chunks):  # a restart after any chunk reads the same
        rest = Reader(sources, encoding, txt, LIMIT, chunk.file, chunk.record).chunks()
        assert str([c.records for c in rest]) == str([c.records for c in chunks[n + 1 :]])


MEASURE = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from configurator import UserError
from text.formats import Reader
from text.sources import Source
source = Source.at(Path(sys.argv[2]), sys.argv[3])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
chunks = Reader([source], sys.argv[5], sys.argv[4], 10**6).chunks()
try:
    ((_, record),) = [record for chunk in chunks for record in chunk.records]
    assert isinstance(record, ValueError), record
except UserError as e:
    assert source.kind == "json", e
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


LARGE = KINDS | {"array": ("json", "file", "utf-8"), "file": ("txt", "file", "utf-8")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LARGE)
def test_memory_does_not_grow_with_a_record(tmp_path, kind):
    """A process reads a record of 200 million characters, where 1 million is the limit."""
    suffix, txt, encoding = LARGE[kind]
    begin = '[{"text": [' if kind == "array" else '{"text": ['
    part = '["[{' + "z" * 1990 + '", 1],'
    end = "1]}]" if kind == "array" else "1]}\n"
    if suffix == "txt":
        begin = ""
        part = "z" * 1999 + ("\n" if kind == "block" else "z")
        end = "\n\n"
    path = tmp_path / f"c.{suffix}"
    with open(path, "w", encoding=encoding) as f:
        f.write(begin)
        for _ in range(100):
            f.write(part * 1000)
        f.write(end)
    argv = [sys.executable, "-c", MEASURE, str(REPO), str(path), *LARGE[kind]]
    grown = subprocess.run(argv, capture_output=True, text=True)
    assert grown.returncode == 0, grown.stderr
    assert int(grown.stdout) < 50_000  # kilobytes


@pytest.mark.parametrize("begin, end", ["[]", ("", "")])
def test_an_element_of_json_beyond_the_limit_is_an_error_that_says_which(
    tmp_path, refuses, begin, end
):
    path = tmp_path / "c.json"
    path.write_text(f'{begin}{{"text": "one"}}, {{"text": "{"z" * LIMIT}"}}{end}')
    error = refuses(prepare.main, "--input", path, *options(tmp_path, "--max_record_mb=0.05"))
    assert f"{path}: element 2: {TOO_LONG}" in error


def test_a_text_file_beyond_the_limit_is_bad_and_the_next_is_read(tmp_path):
    for name, length in (("a", LIMIT + 1), ("b", LIMIT), ("c", 10)):
        (tmp_path / f"{name}.txt").write_text(name * length)
    files = sorted(tmp_path.glob("?.txt"))
    folder, meta = prepare_set(tmp_path, *files, max_record_mb=0.05, max_bad=0.5)
    assert meta["records"]["examples"] == [f"{files[0]}: {TOO_LONG}"]
    assert "".join(documents(folder)) == "b" * LIMIT + "c" * 10


LONG_ROWS = {
    "a line": "z" * LIMIT,
    "a field of many lines": '"' + "z\n" * LIMIT + '"',
    "a field that is never closed": '"' + "z\n" * LIMIT,
}


@pytest.mark.parametrize("case", LONG_ROWS)
def test_a_row_of_csv_beyond_the_limit_is_an_error_that_says_where(tmp_path, refuses, case):
    path = tmp_path / "c.csv"
    rows = [f"row {i}" for i in range(30)]
    path.write_text("\n".join(["text", *rows, LONG_ROWS[case], "one more"]))
    error = refuses(prepare.main, "--input", path, *options(tmp_path, "--max_record_mb=0.05"))
    assert f"{path}:32: not a row of a CSV file ({TOO_LONG}: raise that" in error
    if case != "a field that is never closed":
        assert prepare_set(tmp_path, path, max_record_mb=1)[1]["records"]["read"] == 32


def test_a_row_of_parquet_beyond_the_limit_is_bad(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    path = tmp_path / "c.parquet"
    rows = make_records(60)
    rows[30]["sections"].append({"title": "", "content": "z" * LIMIT})
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    _, meta = prepare_set(tmp_path, path, max_record_mb=0.05, max_bad=0.1)
    assert meta["records"]["examples"] == [f"{path}: row 31: {TOO_LONG}"]


@pytest.mark.slow
def test_a_killed_run_with_a_record_beyond_the_limit_ends_in_the_same_bytes(tmp_path):
    records = make_records(300)
    records[150]["summary"] = "z" * LIMIT
    corpus = write_jsonl(tmp_path / "c.jsonl", records)
    more = ["--max_record_mb=0.05", "--max_bad=0.1"]
    for commits in (1, 1, 1):
        killed(tmp_path / "data", after_commit(commits), corpus, *more)
    call(prepare.main, "--input", corpus, *options(tmp_path / "data", *more))
    call(prepare.main, "--input", corpus, *options(tmp_path / "data", *more, "--name=whole"))
    assert contents(tmp_path / "data" / "set") == contents(tmp_path / "data" / "whole")
    assert open_dataset(tmp_path / "data" / "set")["settings"]["max_record_mb"] == 0.05


def test_another_limit_is_another_preparation(corpus, tmp_path, capsys):
    model = f"--tokenizer={tiktoken_file(tmp_path / 'b.tiktoken')}"
    killed(tmp_path, after_commit(1), *corpus, model)
    call(prepare.main, "--input", *corpus, *options(tmp_path, model, "--max_record_mb=1"))
    assert "the settings or the tokenizer changed" in capsys.readouterr().out


def test_work_done_by_other_rules_is_done_again(corpus, tmp_path, capsys, monkeypatch):
    """An update of this program may join the fields of a record by other marks."""
    model = f"--tokenizer={tiktoken_file(tmp_path / 'b.tiktoken')}"
    killed(tmp_path, after_commit(1), *corpus, model)
    monkeypatch.setattr("text.settings.RULES", 0)
    call(prepare.main, "--input", *corpus, *options(tmp_path, model))
    assert "the settings or the tokenizer changed" in capsys.readouterr().out


class Counting:
    """A text file that counts the characters that were read."""

    def __init__(self, path: Path):
        self.file = open(path, encoding="utf-8")
        self.taken = 0

    def read(self, n: int) -> str:
        text = self.file.read(n)
        self.taken += len(text)
        return text


WRONG = {
    '{"text": "one" "x": 1}': "Expecting ',' delimiter",
    '{"text": nil}': "Expecting value",
    '{"text": "a\nb"}': "Invalid control character",
    '{"text": "\\q"}': "Invalid \\escape",
    "}": "Expecting value",
    "[" * 10_000: "nested too deeply",
    "1" * 5000: "a number with too many digits",
}


@pytest.mark.parametrize("wrong", WRONG, ids=[name[:24] for name in WRONG])
@pytest.mark.parametrize("begin", ["[", ""])
def test_a_json_file_with_an_error_is_not_read_to_its_end(tmp_path, wrong, begin):
    path = tmp_path / "c.json"
    good = '{"text": "a document"},\n'
    path.write_text(begin + good * 3 + wrong + ",\n" + good * 200_000)
    f = Counting(path)
    with pytest.raises(UserError, match="c.json: not valid JSON after element 3, near ") as error:
        list(formats.read_json(f, Source(path, "json", "c.json"), "file", 64_000_000))
    assert WRONG[wrong] in str(error.value) and f.taken < 300_000, f.taken


def test_an_element_may_be_cut_by_the_windows_edge_at_every_place(tmp_path):
    others = [None, True, False, -1.5e-10, 123456789, float("-inf"), {}, [[], {"z": "]}"}]]
    tricky = [{"text": '\u4e2d\U0001f600 \\ " \\\\ \b', "x": others}, {"text": "", "y": others}]
    for shift in range(len(json.dumps(tricky)) + 10):
        records = [{"text": "x" * (65_536 - shift)}, *tricky, {"text": "the last"}]
        path = tmp_path / "c.json"
        for text in (json.dumps(records), "\n".join(map(json.dumps, records))):
            path.write_text(text)
            with open(path, encoding="utf-8") as f:
                found = formats.read_json(f, Source(path, "json", "c.json"), "file", 10**6)
                assert [record for _, record in found] == records, shift


def test_numbers_at_the_windows_edge_stay_whole(tmp_path):
    for shift in range(40):
        path = tmp_path / "c.json"
        numbers = [1234567890123, 1.5e300, -2.5e-10, 7]
        path.write_text("[" + " " * (65_536 - shift) + ", ".join(map(str, numbers)) + "]")
        with open(path, encoding="utf-8") as f:
            found = formats.read_json(f, Source(path, "json", "c.json"), "file", 10**6)
            assert [record for _, record in found] == numbers, shift


def test_chunks_are_small_however_their_records_are_nested(tmp_path):
    """Otherwise 4,096 records with long sections would be in memory at once."""
    sections = [{"title": "s", "content": "z" * 10_000}]
    records = [{"title": f"{i}", "sections": sections} for i in range(50)]
    path = tmp_path / "c.json"
    path.write_text(json.dumps(records))
    chunks = list(Reader([Source.at(path, "json")], "utf-8", "file", 10**6).chunks())
    assert max(len(chunk.records) for chunk in chunks) <= 3
    assert [record for chunk in chunks for _, record in chunk.records] == records


# -- what readers of the code found --


@pytest.mark.parametrize("module, suffix", [(bz2, ".bz2"), (lzma, ".xz")])
def test_a_file_of_several_streams_is_read_whole_or_refused(tmp_path, refuses, module, suffix):
    """pbzip2 and pixz write such files. Python's readers end silently at a damaged stream."""
    lines = [json.dumps({"text": f"document {i}"}).encode() + b"\n" for i in range(60)]
    first, second = (module.compress(b"".join(part)) for part in (lines[:40], lines[40:]))
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(first + second + (bytes(4) if module is lzma else b""))
    _, meta = prepare_set(tmp_path, path)
    assert meta["records"]["read"] == 60
    for damaged in (bytes([second[0] ^ 1]) + second[1:], second[:-9], b"garbage"):
        path.write_bytes(first + damaged)
        assert "damaged or cut off" in refuses(prepare.main, "--input", path, *options(tmp_path))


@pytest.mark.parametrize("name", ["train.bin", "tokenizer.model", "meta.json", "a link"])
def test_a_file_of_somebody_elses_with_the_name_of_one_of_ours_stays(
    corpus, reference, tmp_path, name
):
    folder, meta = prepare_set(tmp_path, *corpus, tokenizer="train", vocab_size=400)
    path = folder / ("train.bin" if name == "a link" else name)
    text = json.dumps(meta | {"mine": 1}) if name == "meta.json" else "precious"
    path.write_text(text)
    if name == "a link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    call(prepare.main, "--input", *corpus, *options(tmp_path / "data"))
    left = folder.with_name(".set.old") / path.name
    assert contents(folder) == reference and left.read_text() == text
    assert left.is_symlink() == (name == "a link")


def test_equal_blocks_are_equal_wherever_they_stand_in_a_file(tmp_path):
    for i in range(30):
        text = f"poem {i}\nline two"
        (tmp_path / f"{i}a.txt").write_text(text)
        (tmp_path / f"{i}b.txt").write_text(text + "\n\n" + text)
    folder, meta = prepare_set(tmp_path, *sorted(tmp_path.glob("*.txt")), txt="block", dedup="true")
    assert set(documents(folder).values()) == {1} and len(documents(folder)) == 30


def test_text_in_fields_that_are_not_read_is_counted(tmp_path, capsys):
    section = {"title": "A", "content": "B", "sections": [{"title": "C", "content": "lost"}]}
    record = {"summary": "S", "content": "lead", "sections": [section]}
    records = [{"title": str(i)} | record for i in range(40)]
    _, meta = prepare_set(tmp_path, write_jsonl(tmp_path / "a.jsonl", records))
    shape = "{title, summary, sections}"
    unread = {f"content, beside {shape}": 40, f"sections in sections, beside {shape}": 40}
    assert meta["records"]["unread"] == unread
    said = "fields that were not read (--fields= chooses fields): 40 x content, beside"
    assert said in capsys.readouterr().out


def test_a_column_that_is_there_twice_is_refused(tmp_path, refuses):
    path = tmp_path / "a.csv"
    path.write_text("text,text\none,two\n")
    error = refuses(prepare.main, "--input", path, *options(tmp_path))
    assert "a.csv:1: the header has the column 'text' twice" in error


def test_links_that_lead_back_do_not_keep_a_pattern_from_its_end(tmp_path):
    folder = tmp_path / "deep" / "er"
    folder.mkdir(parents=True)
    write_jsonl(folder / "a.jsonl", make_records(50))
    for name in ("l1", "l2"):
        (folder / name).symlink_to(".")
    _, meta = prepare_set(tmp_path, tmp_path / "deep" / "**" / "*.jsonl")
    assert meta["records"]["read"] == 50


def test_a_record_of_millions_of_values_is_a_bad_one(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", make_records(50))
    with path.open("a") as f:
        f.write('{"text": "deep", "d": [' + "{}," * 1_100_000 + "{}]}\n")
    _, meta = prepare_set(tmp_path, path, max_bad=0.1)
    assert meta["records"]["bad"] == {"it holds more than 1,000,000 values": 1}


def test_a_text_does_not_steer_the_terminal(tmp_path, capsys):
    records = [{"text": f"\x1b[2J\x07 text {i}\tand\nmore"} for i in range(50)]
    folder, _ = prepare_set(tmp_path, write_jsonl(tmp_path / "a.jsonl", records))
    capsys.readouterr()
    call(prepare.main, f"--inspect={folder}", "--count=2")
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\\x1b[2J\\x07 text" in shown and "\tand\nmore" in shown

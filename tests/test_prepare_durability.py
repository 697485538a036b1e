"""A long job that is killed, or short of memory or disk, ends in the same bytes or in one line."""

import gzip
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPO, contents, make_records, metrics, python, saved, write_jsonl
from test_prepare import documents, prepare_set

import prepare
from hardware.limits import read_or_empty
from text.dataset import load_tokenizer
from training.huggingface import from_pretrained


def resident(pid: int) -> int:
    """Return the resident memory, in bytes, of a process and of all its descendants."""
    total = 0
    try:
        total = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for thread in Path(f"/proc/{pid}/task").iterdir():
            children = (thread / "children").read_text().split()
            total += sum(resident(int(child)) for child in children)
    except OSError:  # the process has ended in the meantime
        pass
    return total


def command(corpus: list[Path], data: Path, *options: str) -> list[str]:
    usual = [f"--data_dir={data}", "--name=set", "--val_fraction=0.3", "--vocab_size=400"]
    return python(1, REPO / "prepare.py", "--input", *corpus, *usual, *options)


def started(argv: list[str], **options) -> tuple[subprocess.Popen, list[int]]:
    """Start prepare.py; return it, and the ids of its workers, when the first of them runs."""
    run = subprocess.Popen(argv, stdout=subprocess.DEVNULL, text=True, **options)
    workers = []
    while not workers and run.poll() is None:
        time.sleep(0.002)
        pids = subprocess.run(
            ["pgrep", "-P", str(run.pid), "-f", "spawn_main"], capture_output=True
        )
        workers = [int(pid) for pid in pids.stdout.split()]
    return run, workers


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> list[Path]:
    """Three files of a few chunks each, and an empty one. One is compressed; one is there twice."""
    folder = tmp_path_factory.mktemp("corpus")
    files = [write_jsonl(folder / f"{i}.jsonl", make_records(4000, seed=i % 2)) for i in range(3)]
    (folder / "1.jsonl.gz").write_bytes(gzip.compress(files[1].read_bytes()))
    files[1] = folder / "1.jsonl.gz"
    files.append(write_jsonl(folder / "3.jsonl", []))
    return files


@pytest.fixture(scope="module")
def reference(corpus, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("reference")
    return prepare_set(root, *corpus, tokenizer="train", vocab_size=400, workers=1)[0]


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 1.2])
def test_a_kill_ends_the_workers(corpus, tmp_path, delay):
    run, workers = started(command(corpus, tmp_path, "--workers=2"))
    time.sleep(delay)
    run.kill()
    run.wait()
    assert workers
    deadline = time.monotonic() + 120
    # What has ended has no command line, even if nobody has asked for its exit code.
    while any(read_or_empty(f"/proc/{pid}/cmdline") for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_the_number_of_workers_does_not_change_a_byte(corpus, reference, tmp_path):
    argv = command(corpus, tmp_path, "--workers=3")
    subprocess.run(argv, check=True, capture_output=True)
    assert contents(tmp_path / "set") == contents(reference)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.15])
def test_ctrl_c_while_workers_start_or_work_is_one_line(corpus, tmp_path, delay):
    argv = command(corpus, tmp_path, "--workers=3")
    run, _ = started(argv, start_new_session=True, stderr=subprocess.PIPE)
    time.sleep(delay)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal sends it: to all processes
    error = run.communicate(timeout=60)[1]
    assert run.returncode == 130 and error.strip() == "interrupted"
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_killed_worker_is_one_clear_line(tmp_path):
    line = json.dumps({"text": "a line of a text\n" * 60}) + "\n"
    (tmp_path / "c.jsonl").write_text(line * 40_000)
    argv = command([tmp_path / "c.jsonl"], tmp_path / "data", "--tokenizer=byte", "--workers=2")
    run, workers = started(argv, stderr=subprocess.PIPE)
    os.kill(workers[0], signal.SIGKILL)
    lines = run.communicate(timeout=60)[1].splitlines()
    [error] = [line for line in lines if not line.startswith("note: ")]
    assert run.returncode == 2 and "--workers" in error
    assert os.listdir(tmp_path / "data") == []


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_leaves_nothing(corpus, tmp_path):
    """A limit on file sizes stands for a full disk: the write fails with another error number."""

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, 1_500_000))

    argv = command(corpus, tmp_path)
    run = subprocess.run(argv, preexec_fn=limit, capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.count("\n") == 1, run.stderr
    assert str(tmp_path / ".set.tmp") in run.stderr and os.listdir(tmp_path) == []


# -- memory --


@pytest.mark.slow
@pytest.mark.parametrize("name", ["many.jsonl", "one.txt"])
def test_memory_does_not_grow_with_the_corpus_or_with_a_document(tmp_path, name):
    """For any input, the bound is 200 MB, and 175 MB for each worker. The inputs here are a corpus
    of 80 MB and a document of 16 MB.
    """
    line = "the loop reads tokens and writes weights\n"
    text = json.dumps({"text": line * 25}) + "\n"
    (tmp_path / name).write_text(text * 80_000 if name == "many.jsonl" else line * 400_000)
    small = write_jsonl(tmp_path / "small.jsonl", [{"text": f"document {i}"} for i in range(100)])
    argv = command([tmp_path / name, small], tmp_path, "--tokenizer=byte", "--workers=2")
    run = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    peak = 0  # of all processes together, in bytes
    while run.poll() is None:
        peak = max(peak, resident(run.pid))
        time.sleep(0.02)
    assert run.returncode == 0 and peak < 500e6, peak


# -- inspection --


def test_inspect_verifies_a_data_set_and_shows_documents(reference, prints, refuses):
    texts = list(documents(reference))
    printed = prints(prepare.main, "--inspect", reference, "--count=2")
    report, first, second = printed.split("---- train, tokens ")
    assert "12,000 records" in report and "{title, summary, sections}" in report
    assert first.startswith("0 to ") and second.split(", then eos\n")[1].rstrip("\n") in texts
    for place in ("1000", "random"):
        shown = prints(prepare.main, "--inspect", reference, f"--show={place}", "--count=1")
        heading, text = shown.split("---- train, tokens ")[1].split(", then eos\n")
        begin, end = (int(n.replace(",", "")) for n in heading.split(" to "))
        assert text.rstrip("\n") in texts and (place == "random" or begin <= 1000 <= end)
    assert "--show" in refuses(prepare.main, "--inspect", reference, "--show=99999999")


def test_inspect_finds_damage(reference, tmp_path, refuses):
    path = Path(shutil.copytree(reference, tmp_path / "set"), "val.bin")
    data = path.read_bytes()
    for content in (bytes([data[0] ^ 1]) + data[1:], data[:100]):
        path.write_bytes(content)
        assert "val.bin: " in refuses(prepare.main, "--inspect", path.parent)


def test_inspect_shows_exactly_what_a_step_trained_on(tiny_data, trains, prints):
    """With a learning rate of 0, the loss of the step is that of the model on these texts."""
    run = trains("--lr=1e-30", "--eval_every=100")
    logged = metrics(run, "loss")[3]
    with open(run / "metrics.jsonl", "a") as f:
        f.write('{"step": 9, "lo')  # a kill in the middle of a line leaves this
    _, *parts = prints(prepare.main, "--inspect", run, "--step=3").split("---- sample ")
    ids = np.fromfile(tiny_data / "tiny" / "train.bin", np.uint16).astype(np.int64)
    firsts = [int(re.search(r"target: token ([\d,]+)", p)[1].replace(",", "")) for p in parts]
    rows = np.stack([ids[first - 1 : first + 32] for first in firsts])
    assert len(rows) == 8
    model = from_pretrained(saved(run))
    loss = model(*map(torch.from_numpy, (rows[:, :-1], rows[:, 1:]))).item()
    assert logged == pytest.approx(loss, rel=1e-6)
    tokenizer = load_tokenizer(tiny_data / "tiny")
    for part, row in zip(parts, rows, strict=True):
        texts = np.split(row, np.flatnonzero(row == tokenizer.eos_id))
        decoded = [tokenizer.decode(t[t != tokenizer.eos_id].tolist()) for t in texts]
        _, pairs, text = part.split("\n", 2)
        assert text.rstrip("\n") == "<eos>".join(decoded).rstrip("\n")
        assert pairs.count(" -> ") == 1 + 6  # of the heading, and of the first six tokens

"""Small real inputs (a corpus in Chinese and English, and a data set that prepare.py makes of it),
and functions that run a script.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

# Set these before torch is imported. Each process has one thread, because several run at a time.
# Where a test asks for more threads, as test_train.py does, those that wait for work sleep: they
# would otherwise spin, and take the CPU from other processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["HF_HUB_OFFLINE"] = "1"
import torch
import warm
from safetensors.torch import load_file

import configurator
import prepare
import train
from hardware import disk
from hardware.machine import Machine, pick_dtype
from model import GPT
from training import report
from training.huggingface import architecture_of, save_weights, to_config
from training.run_folder import newest_checkpoint

# A shell that starts the tests in the background has SIGINT ignored; their processes shall not.
signal.signal(signal.SIGINT, signal.default_int_handler)
REPO = Path(__file__).resolve().parents[1]
report.END_SECONDS = 240  # plot.py has a low priority, and other tests run at the same time

CPU = Machine(0, 0, 1, torch.device("cpu"), torch.float32, "test")

# Where a CPU emulates bf16, or oneDNN is told to, large products in it take minutes.
EMULATES = pick_dtype("auto", CPU.device)[0] != torch.bfloat16 or "ONEDNN_MAX_CPU_ISA" in os.environ
NEEDS_BF16 = pytest.mark.skipif(EMULATES, reason="this CPU emulates bf16")

# A model that trains in a second. Every test that trains uses these options and adds its own.
TINY = ["--preset=llama", "--n_layer=2", "--n_head=4", "--n_kv_head=2", "--n_embd=32"]
TINY += ["--block_size=32", "--batch_size=4", "--batch_tokens=256", "--max_steps=8", "--lr=3e-3"]
TINY += ["--log_every=1", "--eval_every=4", "--save_every=4", "--device=cpu", "--dtype=float32"]
TINY += ["--peak_tflops=1", "--dataset=tiny", "--sample_every=0"]
TINY += ["--tracker=off"]  # a test of the picture says --tracker=none

# Executed in a process that trains: its 31st step waits for a signal.
WAITS = """
import itertools, time, train
take_step, steps = train.take_step, itertools.count()
def waits(*args):
    while next(steps) >= 30 and not args[-1]:
        time.sleep(0.01)
    return take_step(*args)
train.take_step = waits
"""


# What stands in place of a large file, and a part of the advice to fetch it.
POINTERS = [
    ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
    ("/annex/objects/SHA256E-s313500--7d.txt\n", "git annex get"),
    ("../../.git/annex/objects/Vw/9q/MD5E-s5--ab.txt/MD5E-s5--ab.txt", "git annex get"),
    ("# xet version 0\nfilesize = 5\nhash = 'ab'\n", "git xet materialize"),
]


def make_records(n: int, seed: int = 0) -> list[dict]:
    rng = random.Random(seed)
    words = "the loop reads tokens and writes weights 模型 训练 数据 学习率 梯度 naïve 😀 x=1;"
    records = []
    for i in range(n):
        text = [" ".join(rng.choices(words.split(), k=rng.randint(5, 40))) for _ in range(3)]
        sections = [{"title": "节", "content": t} for t in text[1:]]
        records.append({"title": f"条目 {i}", "summary": text[0], "sections": sections})
    return records


def write_jsonl(path: Path, records: list[dict]) -> Path:
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def transformers():
    module = pytest.importorskip("transformers", reason="needs the package transformers")
    module.logging.set_verbosity_error()
    return module


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> Path:
    """A folder of data sets that contains the data set `tiny`."""
    root = tmp_path_factory.mktemp("data")
    prepared(root, make_records(300))
    return root


@pytest.fixture
def own_data(tiny_data, tmp_path) -> Path:
    """A copy of `tiny` for a test that changes it, tmp_path/tiny."""
    return shutil.copytree(tiny_data / "tiny", tmp_path / "tiny")


def prepared(data: Path, records: list[dict], *options: str) -> Path:
    """Make the data set `tiny` of these records, if no option says otherwise; return its folder."""
    data.mkdir(exist_ok=True)
    corpus = write_jsonl(data / "corpus.jsonl", records)
    usual = ["--name=tiny", "--vocab_size=400", "--val_fraction=0.1", f"--data_dir={data}"]
    call(prepare.main, "--input", corpus, *usual, *options)
    return data / "tiny"


def call(main: Callable[[], None], *argv: str) -> None:
    """Run a script's main() in this process with these arguments."""
    with patch.object(sys, "argv", ["script.py", *map(str, argv)]):
        main()


def facts_of(main: Callable[[], None], folder: Path, *argv: str) -> dict:
    """Run a measurement, and return what it writes to the file of --json."""
    out = folder / "facts.json"
    call(main, *argv, f"--json={out}")
    return json.loads(out.read_text())


@pytest.fixture
def refuses(capsys) -> Callable[..., str]:
    """refuses(main, *argv) checks that a script ends with exit code 2 and one error line, which it
    returns. Only notes may come before it.
    """

    def check(main: Callable[[], None], *argv: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            call(lambda: configurator.run(main), *argv)
        assert exit_info.value.code == 2
        del exit_info  # and with it the frames of a run that failed: one holds its lock
        *notes, error = capsys.readouterr().err.splitlines()
        assert error.startswith("error: "), error
        assert all(line.startswith("note: ") for line in notes), notes
        return error

    return check


@pytest.fixture
def prints(capsys) -> Callable[..., str]:
    """prints(main, *argv) runs a script and returns what it prints on stdout."""

    def run(main: Callable[[], None], *argv: str) -> str:
        capsys.readouterr()  # what was printed before
        call(main, *argv)
        return capsys.readouterr().out

    return run


def train_tiny(data: Path, out: Path, *options: str) -> Path:
    """Train TINY in this process; return out/run."""
    call(train.main, *TINY, f"--data_dir={data}", f"--out_dir={out}", *options)
    return out / "run"


@pytest.fixture
def trains(tiny_data, tmp_path) -> Callable[..., Path]:
    """trains(*options) trains TINY in tmp_path, on the data set `tiny`; it returns tmp_path/run."""
    return partial(train_tiny, tiny_data, tmp_path)


def python(n: int, *argv: str) -> list[str]:
    """Return the command that runs a script in n processes: by torchrun, if they are several."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}"]
    return [sys.executable, *(launch if n > 1 else []), *map(str, argv)]


def training(n: int, data: Path, out: Path, *options: str) -> list[str]:
    """Return the command that trains TINY in n processes."""
    return python(n, REPO / "train.py", *TINY, f"--data_dir={data}", f"--out_dir={out}", *options)


def ended(command: list[str], run=warm.run) -> subprocess.CompletedProcess:
    """Run a command to its end. warm.run starts the ranks of torchrun without it."""
    return run(command, cwd=REPO, capture_output=True, text=True, timeout=240)


def train_on(n: int, data: Path, out: Path, *options: str) -> Path:
    """Train TINY on n ranks; return out/run."""
    done = ended(training(n, data, out, *options))
    assert done.returncode == 0, done.stderr[-3000:]
    return out / "run"


@pytest.fixture(scope="session")
def finished(tiny_data, tmp_path_factory) -> Path:
    """A run of TINY, which tests only read."""
    return train_tiny(tiny_data, tmp_path_factory.mktemp("finished"))


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    """A copy of it, tmp_path/run."""
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def evaluates(monkeypatch) -> Callable[[dict[int, float]], None]:
    """evaluates(losses) lets the evaluation of a step find losses[step], whatever the model is."""

    report_evaluation = report.Report.evaluation

    def set_losses(losses: dict[int, float]) -> None:
        def evaluation(self, step, found, seconds):
            found = {key: [losses[step] for _ in of_sets] for key, of_sets in found.items()}
            return report_evaluation(self, step, found, seconds)

        monkeypatch.setattr(report.Report, "evaluation", evaluation)

    return set_losses


def save_model(model: GPT, folder: Path, **ids: int) -> None:
    """Write the config.json and the weights of a model to a folder."""
    c = model.config
    (folder / "config.json").write_bytes(disk.json_bytes(to_config(c, **ids)))
    save_weights(architecture_of(c), c, dict(model.named_parameters()), folder)


def saved(run: Path) -> Path:
    """Return the newest checkpoint of a run."""
    return newest_checkpoint(run / "ckpt")


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def end(run: Path, step: int = 8) -> dict[tuple, torch.Tensor]:
    """Return the weights and the optimizer's state of a checkpoint."""
    folder = run / "ckpt" / f"step_{step:08d}"
    state = torch.load(folder / "train_state.pt", weights_only=True)["optimizer"]["state"]
    moments = {(i, k): v for i, of_weight in state.items() for k, v in of_weight.items()}
    return load_file(folder / "model.safetensors") | moments


def same(run: Path, other: Path, step: int = 8) -> bool:
    a, b = end(run, step), end(other, step)
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def stop_at_4(run: Path, out: Path) -> None:
    """Copy a run as if it had been killed after its first checkpoint."""
    shutil.copytree(run, out / "run")
    shutil.rmtree(out / "run" / "ckpt" / "step_00000008")


def resumes(data: Path, out: Path, *options: str, trains=train_tiny) -> Path:
    """Train a run, and again from its first checkpoint, with the same end. Return the latter."""
    straight = trains(data, out / "straight", *options)
    stop_at_4(straight, out)
    run = trains(data, out, *options, "--init_from=resume")
    assert same(run, straight)
    for key in ("loss", "grad_norm", "val_loss", "train_eval_loss", "sample"):
        assert metrics(run, key) == metrics(straight, key)
    return run


def forge(folder: Path, name: str = "", content: bytes = b"") -> None:
    """Put a file into a folder as an attacker would: with matching hashes in meta.json and in the
    manifest.
    """
    if name == "meta.json":
        content = disk.json_bytes(disk.sealed(json.loads(content)))
    if name:
        (folder / name).write_bytes(content)
    if (folder / disk.MANIFEST).exists():
        (folder / disk.MANIFEST).write_bytes(disk.json_bytes(disk.manifest(folder)))


def metrics(run: Path, key: str) -> dict[int, float]:
    """Return step -> value of a key, from metrics.jsonl."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {r["step"]: r[key] for r in records if key in r}

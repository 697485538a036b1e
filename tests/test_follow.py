"""follow.py: what it makes of a run's files, and that nothing in it can touch the training."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import REPO, call, metrics, train_tiny
from safetensors.torch import load_file

import follow
import train
from training import report
from training.runs import newest_checkpoint

# A package wandb or swanlab that writes down how it is called, and fails as the test wants.
STAND_IN = """
import json, os, signal, time

def note(*what):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps(what) + "\\n")
    fault = os.environ.get("FAULT", "")
    if fault == what[0]:
        raise ConnectionError("the network is down")
    if fault == f"hang in {what[0]}":
        time.sleep(1000)
    if fault == f"kill in {what[0]}":
        os.kill(os.getpid(), signal.SIGKILL)

class Run:
    def log(self, values, step):
        note("log", step, sorted(values))
    def finish(self):
        note("finish")

def init(project, name=None, experiment_name=None, config=None, id=None, **options):
    note("init", project, name or experiment_name, config["max_steps"], id)
    return Run()

log, finish = Run().log, Run().finish
"""


@pytest.fixture
def calls(tmp_path, monkeypatch) -> Callable[[], list]:
    """calls() returns how the stand-ins for wandb and swanlab were called so far."""
    for name in ("wandb", "swanlab"):
        (tmp_path / "packages").mkdir(exist_ok=True)
        (tmp_path / "packages" / f"{name}.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    path = tmp_path / "calls"
    return lambda: [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tiny_data, tmp_path_factory) -> Path:
    """A run that nothing follows."""
    return train_tiny(tiny_data, tmp_path_factory.mktemp("alone"))


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(newest_checkpoint(run / "ckpt") / "model.safetensors")


def by_hand(*options) -> subprocess.CompletedProcess:
    argv = [sys.executable, str(REPO / "follow.py"), *map(str, options)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60)


def test_the_last_picture_exists_when_the_training_ends(alone, tiny_data, tmp_path, capfd):
    assert not (alone / "loss.png").exists()
    run = train_tiny(tiny_data, tmp_path, "--follow")
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert f"loss plot: {run / 'loss.png'}\n" in capfd.readouterr().out
    assert sorted(path.name for path in run.iterdir()) == ["ckpt", "loss.png", "metrics.jsonl"]


FAULTS = [
    "init",
    "log",
    "finish",
    "kill in log",
    pytest.param("hang in log", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tracker_that_fails_hangs_or_is_killed_changes_no_bit_of_the_run(
    alone, tiny_data, tmp_path, monkeypatch, capfd, calls, fault
):
    monkeypatch.setenv("FAULT", fault)
    if "hang" in fault:
        monkeypatch.setattr(report, "PATIENCE", 3)
    run = train_tiny(tiny_data, tmp_path, "--tracker=wandb", "--follow")  # an exit code would raise
    assert calls()
    out = capfd.readouterr().out
    assert "the network is down" in out or f"python follow.py {run}" in out
    for key in ("loss", "grad_norm", "val_loss"):
        assert metrics(run, key) == metrics(alone, key)
    of_both = weights(run), weights(alone)
    assert all(torch.equal(of_both[0][name], of_both[1][name]) for name in of_both[1])
    if " in " not in fault:  # only the tracker is given up
        assert (run / "loss.png").exists()


def test_a_resumed_run_is_the_same_one_at_wandb_and_no_step_is_sent_twice(
    tiny_data, tmp_path, monkeypatch, calls
):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    options = ["--tracker=wandb", "--follow"]
    run = train_tiny(tiny_data, tmp_path, *options)
    shutil.rmtree(run / "ckpt" / "step_00000008")  # as if it had been killed after step 4
    train_tiny(tiny_data, tmp_path, *options, "--init_from=resume", "--max_steps=9")
    inits = [one for one in calls() if one[0] == "init"]
    assert inits[0][:4] == ["init", "mine", "run", 8] and inits[1][3] == 9
    assert inits[0][4] == inits[1][4] and len(inits) == 2
    losses = [step for name, step, keys in (c for c in calls() if c[0] == "log") if "loss" in keys]
    assert losses == list(range(1, 10))


def test_an_overwritten_run_is_another_one_at_wandb(tiny_data, tmp_path, calls):
    for more in ([], ["--overwrite"]):
        train_tiny(tiny_data, tmp_path, "--max_steps=2", "--tracker=wandb", "--follow", *more)
    ids = [one[4] for one in calls() if one[0] == "init"]
    assert len(set(ids)) == 2
    assert [one[1] for one in calls() if one[0] == "log" and "loss" in one[2]] == [1, 2, 1, 2]


def test_a_copy_is_followed_by_hand_and_what_was_sent_is_not_sent_again(
    alone, tmp_path, monkeypatch, calls
):
    copy = shutil.copytree(alone, tmp_path / "copy")
    monkeypatch.setenv("FAULT", "kill in finish")
    by_hand(copy, "--tracker=swanlab")
    monkeypatch.delenv("FAULT")
    done = by_hand(copy, "--tracker=swanlab")
    assert done.returncode == 0 and str(copy / "loss.png") in done.stdout
    losses = [step for name, step, keys in (c for c in calls() if c[0] == "log") if "loss" in keys]
    assert losses == list(range(1, 9))
    assert calls()[0][:3] == ["init", "gpt", "copy"]


def test_it_ends_by_itself_when_the_training_is_killed(alone, tmp_path):
    """A killed process closes its end of the pipe, and says nothing in the record of the run."""
    copy = shutil.copytree(alone, tmp_path / "copy")
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[:-1]))
    argv = [sys.executable, str(REPO / "follow.py"), str(copy), "--beside"]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE)
    process.stdin.close()
    assert process.wait(60) == 0 and (copy / "loss.png").exists()


@pytest.mark.parametrize("argv", [[], ["{tmp}/none"], ["{tmp}", "{tmp}"]])
def test_what_is_no_run_is_refused(tmp_path, refuses, argv):
    refuses(follow.main, *(arg.format(tmp=tmp_path) for arg in argv))


def test_a_tracker_that_is_missing_is_named(alone, tmp_path, refuses, monkeypatch):
    monkeypatch.setattr("training.settings.find_spec", lambda name: None)
    said = refuses(train.main, "--max_steps=1", "--tracker=swanlab")
    assert "tracker=swanlab" in said and "pip install swanlab" in said
    copy = shutil.copytree(alone, tmp_path / "copy")
    monkeypatch.setitem(sys.modules, "swanlab", None)
    call(follow.main, copy, "--tracker=swanlab")
    assert (copy / "loss.png").exists()


@pytest.mark.slow
def test_offline_wandb_gets_the_metrics(alone, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs the package wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    copy = shutil.copytree(alone, tmp_path / "copy")
    done = by_hand(copy, "--tracker=wandb")
    assert "failed" not in done.stdout
    assert list((copy / "wandb").glob("offline-run-*/*.wandb"))


def test_tensorboard_gets_the_metrics(alone, tmp_path):
    pytest.importorskip("tensorboard", reason="needs the package tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    copy = shutil.copytree(alone, tmp_path / "copy")
    by_hand(copy, "--tracker=tensorboard")
    shown = EventAccumulator(str(copy / "tensorboard")).Reload()
    points = {event.step: event.value for event in shown.Scalars("loss")}
    assert points == pytest.approx(metrics(copy, "loss"), rel=1e-6)


@pytest.mark.slow
def test_no_tracker_is_imported_unless_asked_for():
    code = "import sys, train, prepare, sample, follow; "
    code += "assert not {'wandb', 'tensorboard', 'matplotlib', 'tiktoken'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=REPO, check=True)
    code = "import sys, follow; assert not {'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=REPO, check=True, env=os.environ)

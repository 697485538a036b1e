"""follow.py: what it makes of a run's files, and that nothing in it can touch the training."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest
import warm
from conftest import REPO, call, metrics, same

import follow
import train
from training import report

# A package wandb or swanlab that writes down how it is called, and fails as the test wants.
STAND_IN = """
import json, os, signal, time

def call(function, *values, **options):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps([function, *values, options], default=str) + "\\n")
    fault = os.environ.get("FAULT", "")
    if fault == function:
        raise ConnectionError("the network is down")
    if fault == f"hang in {function}":
        time.sleep(1000)
    if fault == f"kill in {function}":
        os.kill(os.getpid(), signal.SIGKILL)

init = lambda **options: call("init", **options)
log = lambda values, step: call("log", step, sorted(values))
finish = lambda: call("finish")
"""


@pytest.fixture
def calls(tmp_path, monkeypatch) -> Callable[[], tuple[list, list]]:
    """calls() returns the options of each init() of the stand-ins, and the steps with a loss."""
    (tmp_path / "packages").mkdir()
    for name in ("wandb", "swanlab"):
        (tmp_path / "packages" / f"{name}.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))

    def read() -> tuple[list, list]:
        lines = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
        losses = [step for name, step, *keys in lines if name == "log" and "loss" in keys[0]]
        return [options for name, *_, options in lines if name == "init"], losses

    return read


def by_hand(*options) -> subprocess.CompletedProcess:
    argv = [sys.executable, str(REPO / "follow.py"), *map(str, options)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, input="")


def test_the_last_picture_exists_when_the_training_ends(finished, trains, capfd):
    assert not (finished / "loss.png").exists()
    run = trains("--tracker=none")
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert f"loss plot: {run / 'loss.png'}\n" in capfd.readouterr().out
    assert sorted(path.name for path in run.iterdir()) == ["ckpt", "loss.png", "metrics.jsonl"]


HANGS = pytest.param("hang in log", marks=pytest.mark.slow)


@pytest.mark.parametrize("fault", ["log", "kill in log", HANGS])
def test_a_tracker_that_fails_hangs_or_is_killed_changes_no_bit_of_the_run(
    finished, trains, monkeypatch, capfd, calls, fault
):
    monkeypatch.setenv("FAULT", fault)
    if "hang" in fault:
        monkeypatch.setattr(report, "PATIENCE", 8)
    run = trains("--tracker=wandb")  # an exit code would raise
    assert calls() and f"python follow.py {run}" in capfd.readouterr().out
    for key in ("loss", "grad_norm", "val_loss"):
        assert metrics(run, key) == metrics(finished, key)
    assert same(run, finished)
    if " in " not in fault:  # only the tracker is given up
        assert (run / "loss.png").exists()


def test_a_resumed_run_is_the_same_one_at_wandb_and_sends_no_step_twice(trains, monkeypatch, calls):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    options = ["--tracker=wandb"]
    run = trains(*options)
    shutil.rmtree(run / "ckpt" / "step_00000008")  # as if it had been killed after step 4
    trains(*options, "--init_from=resume", "--max_steps=9")
    (begun, resumed), losses = calls()
    assert (begun["project"], begun["name"], begun["config"]["max_steps"]) == ("mine", "run", 8)
    assert resumed["config"]["max_steps"] == 9 and resumed["id"] == begun["id"]
    assert losses == list(range(1, 10))
    trains(*options, "--max_steps=2", "--overwrite")
    (_, _, another), losses = calls()
    assert another["id"] != begun["id"] and losses[9:] == [1, 2]


def test_a_copy_is_followed_by_hand_and_what_was_sent_is_not_sent_again(copied, monkeypatch, calls):
    monkeypatch.setenv("FAULT", "kill in finish")
    by_hand(copied, "--tracker=swanlab")
    monkeypatch.delenv("FAULT")
    done = by_hand(copied, "--tracker=swanlab")
    assert done.returncode == 0 and str(copied / "loss.png") in done.stdout
    inits, losses = calls()
    assert losses == list(range(1, 9))
    assert (inits[0]["project"], inits[0]["experiment_name"]) == ("gpt", "run")


def test_it_ends_when_the_folder_is_that_of_another_run(copied, tmp_path, monkeypatch, refuses):
    """Else the tracker would show two runs as one, and the other one's follow.json be lost."""
    lines = (copied / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copied / "metrics.jsonl").write_text("".join(lines[:-1]))  # it goes on
    another = lines[0].replace('"lr": ', '"lr": 1')

    def replaced(*_) -> tuple:
        copied.rename(f"{copied}.old")
        copied.mkdir()
        (copied / "metrics.jsonl").write_text(another)
        return ([], [], [])

    monkeypatch.setattr("follow.select.select", replaced)
    assert "another run" in refuses(follow.main, str(copied))
    assert not (copied / "loss.png").exists()


def test_it_ends_by_itself_when_the_training_is_killed(copied):
    """A killed process closes its end of the pipe, and says nothing in the record of the run."""
    lines = (copied / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copied / "metrics.jsonl").write_text("".join(lines[:-1]))
    ended = warm.run([sys.executable, str(REPO / "follow.py"), str(copied), "--beside"])
    assert ended.returncode == 0 and (copied / "loss.png").exists()


def test_a_tracker_that_is_missing_is_named(copied, refuses, monkeypatch, capsys):
    monkeypatch.setattr("training.settings.find_spec", lambda name: None)
    assert "tracker=swanlab" in refuses(train.main, "--max_steps=1", "--tracker=swanlab")
    monkeypatch.setitem(sys.modules, "swanlab", None)
    with pytest.raises(SystemExit, match="2"):
        call(follow.main, copied, "--tracker=swanlab")
    assert "swanlab failed" in capsys.readouterr().out and (copied / "loss.png").exists()


@pytest.mark.slow
def test_offline_wandb_gets_the_metrics(copied, monkeypatch):
    pytest.importorskip("wandb", reason="needs the package wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert by_hand(copied, "--tracker=wandb").returncode == 0
    assert list((copied / "wandb").glob("offline-run-*/*.wandb"))


def test_tensorboard_gets_the_metrics(copied):
    pytest.importorskip("tensorboard", reason="needs the package tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    by_hand(copied, "--tracker=tensorboard")
    shown = EventAccumulator(str(copied / "tensorboard")).Reload()
    points = {event.step: event.value for event in shown.Scalars("loss")}
    assert points == pytest.approx(metrics(copied, "loss"), rel=1e-6)


@pytest.mark.slow
def test_following_needs_no_torch():
    """So it starts at once beside the training, also where there is no torch."""
    code = "import sys, follow, plot; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=REPO, check=True)

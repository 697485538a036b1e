"""metrics.jsonl, loss.png and trackers: what a run reports. No fault of theirs harms it."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from unittest.mock import Mock

import pytest
from conftest import CPU, ended, metrics, same, training

import train
from text.dataset import open_datasets
from training import report
from training.metrics import read_metrics
from training.plan import Progress, make_plan
from training.run_folder import RunFolder
from training.settings import TrainConfig
from training.tracker import Tracker

# A package wandb that writes down how it is called, and fails as the test wants.
STAND_IN = """
import json, os

def call(function, *values, **options):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps([function, *values, options], default=str) + "\\n")
    if os.environ.get("FAULT") == function:
        raise ConnectionError("the network is down")

init = lambda **options: call("init", **options)
log = lambda values, step: call("log", step, sorted(values))
finish = lambda: call("finish")
"""


@pytest.fixture
def calls(tmp_path, monkeypatch) -> Callable[[str], list]:
    """calls(function) returns the arguments of each call of a function of the stand-in."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(STAND_IN)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))

    def read(function: str) -> list:
        lines = map(json.loads, (tmp_path / "calls").read_text().splitlines())
        return [arguments for name, *arguments in lines if name == function]

    return read


def test_loss_png_is_there_when_the_run_ends(finished, trains):
    assert not (finished / "loss.png").exists()
    run = trains("--tracker=none")
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    names = {path.name for path in run.iterdir()}
    assert names == {".lock", "ckpt", "loss.png", "metrics.jsonl"}


@pytest.mark.parametrize("fault", ["init", "log", "finish"])
def test_tracker_that_raises_is_one_warning(finished, trains, monkeypatch, calls, capfd, fault):
    monkeypatch.setenv("FAULT", fault)
    run = trains("--tracker=wandb")
    assert "".join(capfd.readouterr()).count("the network is down") == 1
    assert same(run, finished) and (run / "loss.png").exists()


def test_resumed_run_goes_on_as_the_same_tracker_run(trains, monkeypatch, calls):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    run = trains("--tracker=wandb")
    shutil.rmtree(run / "ckpt" / "step_00000008")  # as if it had been killed after step 4
    trains("--tracker=wandb", "--init_from=resume", "--max_steps=9")
    trains("--tracker=wandb", "--max_steps=2", "--overwrite")
    begun, resumed, another = (options for (options,) in calls("init"))
    assert (begun["project"], begun["name"], begun["config"]["max_steps"]) == ("mine", "run", 8)
    assert resumed["config"]["max_steps"] == 9 and resumed["id"] == begun["id"] != another["id"]
    losses = [step for step, keys, _ in calls("log") if "loss" in keys]
    assert losses == [*range(1, 9), *range(5, 10), 1, 2]


def test_a_resume_records_each_step_once_and_does_not_time_the_first(copied, trains):
    """It is a warm-up."""
    shutil.rmtree(copied / "ckpt" / "step_00000008")
    trains("--init_from=resume")
    records = read_metrics(copied / "metrics.jsonl")
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 9))
    assert metrics(copied, "step_ms").keys() == set(range(1, 9)) - {5}


@pytest.fixture
def make_report(tiny_data, tmp_path) -> Callable[..., report.Report]:
    """make_report(records, done) returns the report of a run of 100 steps; `done` are done."""

    def make(records: list[dict], done: int = 0) -> report.Report:
        every = dict(max_steps=100, eval_every=30, batch_tokens=1024, tracker="off")
        cfg, progress = TrainConfig(**every), Progress(step=done, losses=[1.0])
        sets = open_datasets("tiny", tiny_data)
        plan, run = make_plan(cfg, 1, 10_000), RunFolder(tmp_path, locks=False)
        return report.Report(cfg, CPU, plan, sets, progress, run, records)

    return make


def test_eta_counts_the_evaluations_to_come(make_report, tmp_path):
    """The first one is predicted; a resumed run has the time of the last one."""
    clock = Mock(step=50, data_s=0.0, **{"seconds.return_value": 10.0})  # one second a step
    for records in ([], [{"step": 30, "eval_s": 20.0}]):
        reports = make_report(records, done=60)
        predicted = reports.sets[0].meta["splits"]["val"]["tokens"] / reports.plan.step_tokens
        reports.step(1.0, 1e-3, 1.0, 1, None, clock)
        reports.close()
        eval_s = 20.0 if records else predicted
        # At steps 60, 90 and 100.
        assert metrics(tmp_path, "eta_s") == {60: pytest.approx(40 + 3 * eval_s)}


def test_numbers_that_are_not_finite_are_left_out(make_report, tmp_path, capsys):
    """NaN is no JSON."""
    reports = make_report([{"step": 0, "lr": math.inf}])
    losses = {"val_loss": [2.0], "val_document_loss": [1.0], "train_eval_loss": [math.nan]}
    assert reports.evaluation(1, losses, 1.0) == 2.0
    assert math.isnan(reports.evaluation(2, losses | {"val_loss": [math.nan]}, 1.0))
    reports.outcome("bad", math.inf, math.nan, Mock())
    reports.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    first, finite, nan, _ = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert first == {"step": 0} and nan.keys() == {"step", "val_document_loss", "eval_s"}
    assert finite.keys() - nan.keys() == {"val_loss", "val_ppl", "val_bits_per_byte"}
    assert "train nan" not in capsys.readouterr().out


def test_a_full_disk_is_one_warning_and_no_error(make_report, capsys):
    reports = make_report([])
    reports.file = open("/dev/full", "a")
    for step in range(3):
        reports.sample(step, "text")
    reports.close()
    assert capsys.readouterr().out.count("warning") == 1


def test_steps_sent_to_a_tracker_never_go_back(tmp_path, calls):
    """A save ends while later steps are logged."""
    run = {"step": 0, "settings": {}, "tracker_run": "id"}
    tracker = Tracker("wandb", tmp_path, run, pytest.fail)
    for record in ({"step": 5, "loss": 1.0}, {"step": 4, "save_s": 0.1}, {"step": 6, "loss": 1.0}):
        tracker.send(record)
    assert [step for step, *_ in calls("log")] == [5, 5, 6]


def test_missing_tracker_is_named(refuses, monkeypatch):
    monkeypatch.setattr("training.settings.find_spec", lambda name: None)
    assert "tracker=swanlab" in refuses(train.main, "--max_steps=1", "--tracker=swanlab")


@pytest.mark.slow
def test_offline_wandb_gets_the_metrics(tiny_data, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs the package wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    done = ended(training(1, tiny_data, tmp_path, "--tracker=wandb"), subprocess.run)
    assert done.returncode == 0 and "warning" not in done.stdout
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))


def test_tensorboard_gets_the_metrics(trains):
    pytest.importorskip("tensorboard", reason="needs the package tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = trains("--tracker=tensorboard")
    shown = EventAccumulator(str(run / "tensorboard")).Reload()
    points = {event.step: event.value for event in shown.Scalars("loss")}
    assert points == pytest.approx(metrics(run, "loss"), rel=1e-6)

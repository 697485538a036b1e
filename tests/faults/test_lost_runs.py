"""A run is never lost, and nothing that train.py did not write is ever deleted."""

import errno
import fcntl
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import Mock

import harness
import pytest
import torch
from conftest import (
    call,
    contents,
    end,
    forge,
    make_records,
    metrics,
    prepared,
    same,
    saved,
    train_tiny,
    training,
)
from safetensors.torch import load_file, save_file
from test_faults import ENDLESS, launch, poison, steps_in

import prepare
import sample
import train
from configurator import UserError, note
from hardware.disk import damage, remove_files
from model import GPT
from plot import read_run
from text.dataset import load_tokenizer, open_datasets
from text.windows import DataSet
from training import checkpoint, startup
from training.checkpoint import shared_files
from training.metrics import read_metrics
from training.plan import Progress, make_plan
from training.run_folder import RunFolder, newest_run
from training.schedule import lr_at
from training.settings import TrainConfig, model_config


def put(folder: Path, *names: str) -> dict[str, bytes]:
    """Write files of somebody else into a folder; return all that it contains then."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("precious")
    return visible(folder)


def visible(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder, without those of locks."""
    files = contents(folder)
    return {name: files[name] for name in files if not name.endswith(".lock")}


def happens(monkeypatch, micro_step: int, *events: Callable[[], object]) -> None:
    """Let something happen within a micro-step."""

    def change(loss):
        for event in events:
            event()
        return loss

    poison(monkeypatch, micro_step, change=change)


def terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


# -- what is not a run --


@pytest.mark.parametrize("name", ["src/main.py", "metrics.jsonl", "ckpt/weights.pt"])
def test_a_folder_of_others_is_refused_or_moved_whole(trains, tmp_path, refuses, name):
    files = put(tmp_path / "proj", "thesis.tex", name)
    assert str(tmp_path / "proj") in refuses(lambda: trains("--run_name=proj"))
    assert visible(tmp_path / "proj") == files
    trains("--run_name=proj", "--overwrite", "--max_steps=1")
    assert visible(tmp_path / "proj.old") == files


def test_a_disk_that_is_mounted_as_ckpt_is_no_run(trains, tmp_path):
    (tmp_path / "run" / "ckpt" / "lost+found").mkdir(parents=True)
    trains("--max_steps=1")


def test_records_of_a_start_that_saved_nothing_are_kept(trains, tmp_path, refuses):
    refuses(lambda: trains("--lr=1e38", "--warmup_ratio=0", "--grad_clip=0"))
    recorded = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    run = trains("--init_from=auto", "--max_steps=1")
    assert (run / "metrics_kept.jsonl").read_bytes() == recorded


@pytest.mark.parametrize("more, kept", [([], False), (["--keep=3"], False), (["--lr=1e-5"], True)])
def test_records_that_a_resume_does_not_repeat_are_kept(copied, trains, more, kept):
    shutil.rmtree(copied / "ckpt" / "step_00000008")
    recorded = (copied / "metrics.jsonl").read_bytes()
    trains("--init_from=resume", *more)
    assert (copied / "metrics_kept.jsonl").exists() == kept
    assert not kept or (copied / "metrics_kept.jsonl").read_bytes() == recorded
    assert metrics(copied, "loss").keys() == set(range(1, 9))


def test_a_resume_records_a_checkpoint_that_was_not_recorded(copied, trains):
    """metrics.jsonl says which checkpoints there were: without them, auto must not begin anew."""
    lines = (copied / "metrics.jsonl").read_text().splitlines(keepends=True)
    unsaved = [line for line in lines if '"saved"' not in line]
    (copied / "metrics.jsonl").write_text("".join(unsaved))
    trains("--init_from=resume", "--max_steps=12")
    assert metrics(copied, "saved").keys() == {8, 12}


def test_settings_of_a_start_that_saved_nothing_are_told(copied, trains, monkeypatch, capsys):
    """Once; and only those that this start does not have."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train, "take_step", Mock(side_effect=KeyboardInterrupt))
        more = ["--seed=7", "--weight_decay=0.5", "--max_steps=12", "--tracker=none"]
        trains("--init_from=resume", *more)
    assert "the last start" not in capsys.readouterr().err
    for told in (True, False):
        note.cache_clear()
        trains("--init_from=resume", "--weight_decay=0.5", "--max_steps=9")
        err = capsys.readouterr().err
        assert ("the last start had seed=7, max_steps=12, but" in err) == told


GIVEN = [*(("model", name) for name in ("run", "checkpoint", "another", "missing"))]


@pytest.mark.parametrize("began, given", [*GIVEN, ("scratch", "run")])
def test_a_model_that_a_resume_does_not_use_is_named(
    finished, tmp_path, trains, capsys, began, given
):
    """The run continues with its own weights."""
    base = finished.parent / "run"
    paths = {"run": base, "checkpoint": saved(base), "another": base / "ckpt" / "step_00000004"}
    paths["missing"] = tmp_path / "nowhere"
    name = f"--run_name={began}"
    trains(name, "--max_steps=1", *([f"--init_from={base}"] if began == "model" else []))
    capsys.readouterr()
    trains(name, f"--init_from={paths[given]}", "--init_from=auto", "--max_steps=2")
    is_base = began == "model" and given in ("run", "checkpoint")
    assert (f"init_from={paths[given]} is ignored" in capsys.readouterr().err) == (not is_base)
    settings = json.loads((saved(tmp_path / began) / "train_config.json").read_text())
    assert settings["init_from"] == ("scratch" if began == "scratch" else str(saved(base)))


def copy_as_99(step_4: Path) -> None:
    shutil.copytree(step_4, step_4.with_name("step_00000099"))


def link_as_99(step_4: Path) -> None:
    step_4.with_name("step_00000099").symlink_to(step_4.name)


@pytest.mark.parametrize("put_99", [copy_as_99, link_as_99])
def test_a_checkpoint_under_another_number_is_not_resumed(copied, trains, put_99, capsys):
    put_99(copied / "ckpt" / "step_00000004")
    run = trains("--init_from=resume", "--max_steps=9", "--keep=9")
    assert "step_00000099 is a copy of step 4" in capsys.readouterr().err
    assert steps_in(run) == ["04", "08", "09", "99_kept"]


# -- --overwrite --


def test_overwrite_moves_an_earlier_run_away_whole(copied, finished, trains, tmp_path, capsys):
    (copied / "ckpt" / "step_00000002").symlink_to(finished / "ckpt" / "step_00000004")
    (tmp_path / "run.old").mkdir()  # somebody's
    files = put(copied, "notes.txt", "ckpt/step_00000004/model.gguf", "wandb/x")
    moved = tmp_path / "run.old2"
    run = trains("--overwrite", "--seed=7")
    assert visible(moved) == files and (moved / "ckpt" / "step_00000002").is_symlink()
    assert visible(run).keys() == visible(finished).keys()
    assert metrics(run, "loss") != metrics(finished, "loss")
    # The run that was moved is no longer the newest one, but it can go on under its new name.
    os.utime(moved / "ckpt" / "step_00000008" / "manifest.json")
    assert newest_run(tmp_path) == run
    call(train.main, f"--out_dir={tmp_path}", "--run_name=run.old2", "--init_from=resume")
    assert "nothing is left to do" in capsys.readouterr().out


def test_a_resume_does_not_overwrite_again(copied, trains, tmp_path, refuses, monkeypatch):
    more = ["--overwrite", "--seed=7", "--max_steps=4"]
    trains(*more)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")  # torchrun would give them again
    assert "--init_from=auto" in refuses(lambda: trains(*more))
    run = trains(*more, "--init_from=auto", "--max_steps=8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.old"]
    assert metrics(run, "loss").keys() == set(range(1, 9))


@pytest.mark.parametrize("option", ["--overwrite", "--init_from=auto"])
def test_overwrite_ended_before_a_save_loses_nothing(copied, trains, tmp_path, monkeypatch, option):
    """The second start begins again: no checkpoint is there."""
    files = visible(copied)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint.Saver, "save", Mock(side_effect=KeyboardInterrupt))
        trains("--overwrite")
    run = trains(option)
    assert visible(tmp_path / "run.old") == files
    assert visible(run).keys() - {"metrics_kept.jsonl"} == files.keys()
    assert metrics(run, "loss").keys() == set(range(1, 9))


def test_a_resume_after_a_killed_overwrite_names_the_runs(copied, tmp_path, refuses, trains):
    trains("--overwrite", "--max_steps=2")
    shutil.rmtree(copied / "ckpt")
    error = refuses(train.main, f"--out_dir={tmp_path}", "--init_from=resume")
    assert "run, run.old" in error and "--run_name" in error and "auto" not in error


@pytest.mark.parametrize("option", ["--overwrite", "--init_from=resume"])
def test_linked_checkpoints_are_refused_and_stay(finished, trains, tmp_path, refuses, option):
    """They would be pruned."""
    theirs = shutil.copytree(finished, tmp_path / "theirs")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ckpt").symlink_to(theirs / "ckpt")
    assert f"{tmp_path}/run/ckpt" in refuses(lambda: trains(option, "--save_every=2"))
    assert contents(theirs) == contents(finished)


@pytest.mark.parametrize("more", ["--seed=7", "--overwrite", "--init_from=resume"])
def test_a_run_has_one_writer(copied, trains, tmp_path, refuses, more):
    files = visible(copied)
    lock = RunFolder(copied)
    assert str(copied) in refuses(lambda: trains(more))
    assert visible(copied) == files
    lock.release()
    trains("--init_from=resume")


NO_LOCKS = [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP]


@pytest.mark.parametrize("number", NO_LOCKS)
def test_without_locks_a_file_names_the_one_writer(tmp_path, monkeypatch, number):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, "no locks here")))
    path = tmp_path / "run" / ".lock_holder"
    here = socket.gethostname()

    def refused(holder: str) -> str:
        path.write_text(holder)
        with pytest.raises(UserError) as error:
            RunFolder(path.parent)
        assert path.read_text() == holder
        return str(error.value)

    RunFolder(path.parent).release()
    assert all(word in refused("1234\nnode7\n") for word in ("1234", "node7", f"delete {path}"))
    refused(f"{os.getppid()}\n{here}\n")  # it is running
    ended = subprocess.Popen(["true"])
    ended.wait()
    path.write_text(f"{ended.pid}\n{here}\n")
    lock = RunFolder(path.parent)
    assert lock.is_held() and path.read_text().split()[:2] == [str(os.getpid()), here]
    with pytest.raises(UserError):
        RunFolder(path.parent)
    path.rename(path.with_name("moved"))
    path.write_text("1234\nnode7\n")
    assert not lock.is_held()


def test_a_lock_that_fails_names_its_file(tmp_path, monkeypatch, trains, refuses):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.EIO, "I/O error")))
    assert f"{tmp_path}/run/.lock: I/O error" in refuses(trains)


@pytest.mark.parametrize("what", ["file", "dangling link"])
def test_a_run_s_name_that_is_no_folder_is_refused(tmp_path, trains, refuses, what):
    run = tmp_path / "run"
    run.write_text("precious") if what == "file" else run.symlink_to(tmp_path / "nowhere")
    error = refuses(lambda: trains("--overwrite"))
    assert f"{run} is not a folder" in error and "--run_name" in error


def test_a_folder_in_the_way_of_a_save_is_named(trains, tmp_path, refuses):
    in_the_way = tmp_path / "run" / "ckpt" / ".tmp_step_00000008"
    files = put(in_the_way, "x")
    assert f"{in_the_way}: File exists" in refuses(lambda: trains("--save_every=100"))
    assert visible(in_the_way) == files


def moved(run: Path, other: Path) -> None:
    run.rename(run.with_name("elsewhere"))


def deleted(run: Path, other: Path) -> None:
    shutil.rmtree(run)


def unlocked(run: Path, other: Path) -> None:
    (run / ".lock").unlink()


def replaced(run: Path, other: Path) -> None:
    moved(run, other)
    shutil.copytree(other, run)
    RunFolder(run).release()


def checkpoints_replaced(run: Path, other: Path) -> None:
    (run / "ckpt").rename(run.with_name("ckpt elsewhere"))
    shutil.copytree(other / "ckpt", run / "ckpt")


@pytest.fixture(scope="module")
def straight(tiny_data, tmp_path_factory) -> Path:
    return train_tiny(tiny_data, tmp_path_factory.mktemp("straight"), "--keep=1", "--max_steps=12")


@pytest.mark.parametrize("at", [6, 8], ids=["within", "at the last step"])
@pytest.mark.parametrize("change", [moved, deleted, unlocked, replaced, checkpoints_replaced])
def test_a_run_writes_no_folder_but_its_own(
    finished, straight, trains, tmp_path, monkeypatch, refuses, change, at
):
    """What it holds is saved beside the folder, and can go on."""
    run = tmp_path / "run"
    put(tmp_path / "run_moved", "precious")
    with monkeypatch.context() as patch:
        happens(patch, 2 * at - 2, lambda: change(run, finished))
        error = refuses(lambda: trains("--keep=1", "--max_steps=12"))
    assert "--run_name=run_moved2" in error
    if change in (replaced, checkpoints_replaced):
        assert visible(run / "ckpt") == visible(finished / "ckpt")
    assert run.exists() == (change not in (moved, deleted))
    assert saved(tmp_path / "run_moved2").name == f"step_0000000{at}"
    trains("--run_name=run_moved2", "--init_from=resume", "--max_steps=12")
    assert same(tmp_path / "run_moved2", straight, 12)


@pytest.mark.slow
def test_all_ranks_end_when_the_folder_is_moved(tiny_data, tmp_path):
    process = launch(2, tiny_data, tmp_path, *ENDLESS)
    harness.wait_for(process, lambda: harness.steps_done(tmp_path) >= 20)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    out, err = process.communicate(timeout=60)
    assert process.returncode != 0 and err.count("error: ") == 1 and "Traceback" not in err
    assert not damage(saved(tmp_path / "run_moved")) and not (tmp_path / "run").exists()


def test_a_signal_whose_save_finds_the_folder_gone_is_saved(trains, tmp_path, monkeypatch, refuses):
    happens(monkeypatch, 10, terminated, lambda: moved(tmp_path / "run", tmp_path))
    assert "run_moved" in refuses(trains)
    assert saved(tmp_path / "run_moved").name == "step_00000005"


def test_a_checkpoint_that_somebody_deleted_is_saved_again(trains, tmp_path, monkeypatch):
    """The signal comes in the step after it was saved, whose checkpoint is the run's progress."""
    straight = trains().rename(tmp_path / "straight")

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        # In the first micro-step of step 5.
        happens(patch, 8, lambda: shutil.rmtree(tmp_path / "run" / "ckpt"), terminated)
        trains("--save_every=4")
    assert saved(tmp_path / "run").name == "step_00000004"
    trains("--init_from=resume")
    assert same(tmp_path / "run", straight)


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_no_file_of_a_run_is_written_through_a_link(copied, trains, tmp_path, link):
    (tmp_path / "thesis.tex").write_text("precious")
    link(tmp_path / "thesis.tex", copied / ".metrics.jsonl.tmp")
    trains("--init_from=resume", "--max_steps=9")
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_a_renamed_data_set_is_the_same(copied, own_data, tmp_path, finished, capsys):
    """And a data_dir that is not here is told apart from a data set that was never made."""
    shutil.rmtree(saved(copied))
    own_data.rename(tmp_path / "other")
    resume = [f"--out_dir={tmp_path}", "--run_name=run", "--init_from=resume", "--dataset=other"]
    call(train.main, f"--data_dir={tmp_path}", *resume)
    assert same(copied, finished)
    out, err = capsys.readouterr()
    assert "tiny -> other" in out and "another order" not in out and "anew" not in err


@pytest.mark.parametrize("setting, keeps_shape", [
    ("--optimizer=muon", True), ("--block_size=16", True), ("--n_layer=3", False),
    ("--preset=gpt2", False),
])  # fmt: skip
def test_a_refused_resume_names_a_way_that_obeys_the_setting(
    copied, trains, refuses, setting, keeps_shape
):
    """A run that starts from the checkpoint keeps the shape of its model."""
    error = refuses(lambda: trains("--init_from=resume", setting))
    assert (f"--init_from={saved(copied)}" in error) is keeps_shape


@pytest.fixture
def resuming(copied, tiny_data, tmp_path) -> list[str]:
    """Options that resume the run where the data set `other` is, and its own is not."""
    tokenizer = f"--tokenizer={tiny_data / 'tiny'}"
    prepared(tmp_path / "d", make_records(200, seed=3), tokenizer, "--name=other")
    folders = [f"--out_dir={tmp_path}", f"--data_dir={tmp_path / 'd'}"]
    return [*folders, "--run_name=run", "--init_from=resume"]


def test_switch_data_goes_on_with_other_data(copied, resuming, tmp_path, refuses, prints):
    """They are read from their beginning; optimizer, schedule and tokens go on; best is anew."""
    switch = [*resuming, "--dataset=other", "--max_steps=16"]
    assert "--switch_data" in refuses(train.main, *switch)
    prepared(tmp_path / "d", make_records(200), "--tokenizer=byte", "--name=bytes")
    error = refuses(train.main, *switch, "--dataset=bytes")
    assert "--switch_data" not in error and "--init_from=" not in error
    call(train.main, *switch, "--switch_data")
    shutil.copytree(copied, tmp_path / "straight")
    shutil.rmtree(saved(copied))
    call(train.main, *resuming)  # it has switched
    assert metrics(copied, "loss") == metrics(tmp_path / "straight", "loss")
    assert metrics(copied, "tokens")[16] == 16 * 256
    assert end(copied, 16)[0, "step"] == 16
    shown = prints(prepare.main, "--inspect", copied, "--step=9", f"--data_dir={tmp_path / 'd'}")
    assert "---- sample 0: " in shown
    state = torch.load(saved(copied) / "train_state.pt", weights_only=True)
    assert state["best_step"] > 8


def test_a_switch_whose_checkpoint_is_damaged_is_not_undone(copied, resuming, refuses):
    switch = ["--switch_data", "--dataset=other", "--max_steps=16", "--save_every=50"]
    call(train.main, *resuming, *switch, "--eval_every=50")
    losses, newest = metrics(copied, "loss"), saved(copied)
    (newest / "model.safetensors").write_bytes(b"")
    for _ in range(2):
        assert "--switch_data" in refuses(train.main, *resuming)
        assert newest.exists()
    call(train.main, *resuming, "--switch_data")
    assert metrics(copied, "loss") == losses
    assert newest.with_name(f"{newest.name}_kept").exists()


def test_a_data_dir_that_is_elsewhere_is_named(copied, tmp_path, refuses, monkeypatch):
    settings = json.loads((saved(copied) / "train_config.json").read_text()) | {"data_dir": "d"}
    forge(saved(copied), "train_config.json", json.dumps(settings).encode())
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        error = refuses(train.main, "--out_dir=.", "--run_name=run", "--init_from=resume")
        assert "data_dir=d" in error and "--data_dir" in error
        (tmp_path / "d").mkdir(exist_ok=True)  # of another project


# -- checkpoints that cannot be seen, or that lie --


def lose_manifests(ckpt: Path) -> None:
    for path in ckpt.glob("*/manifest.json"):
        path.unlink()


def unmount(ckpt: Path) -> None:
    shutil.rmtree(ckpt)
    ckpt.symlink_to("/nowhere/disk")


@pytest.mark.parametrize("hide", [lose_manifests, unmount, shutil.rmtree])
@pytest.mark.parametrize("init_from", ["auto", "resume"])
def test_a_run_of_unseen_checkpoints_is_refused(copied, trains, refuses, hide, init_from):
    hide(copied / "ckpt")
    files = visible(copied)
    assert str(copied) in refuses(lambda: trains(f"--init_from={init_from}"))
    assert visible(copied) == files


def test_a_resume_deletes_what_a_kill_left_half_written(trains):
    run = trains("--max_steps=4")
    left = run / "ckpt" / ".tmp_step_00000012"
    shutil.copytree(run / "ckpt" / "step_00000004", left)
    (left / "manifest.json").unlink()
    precious = shutil.copytree(left, run / "precious")
    left.with_name(".tmp_step_00000001").symlink_to(precious)
    trains("--init_from=resume")
    assert not left.exists() and Path(precious, "config.json").exists()


# -- signals --


def test_a_signal_gives_a_step_up_and_the_end_is_the_same(finished, trains, tmp_path, monkeypatch):
    """A step may take hours on a laptop. Its micro-steps so far are lost, and no more."""
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        happens(patch, 10, terminated)  # in the first of the two micro-steps of step 6
        trains()
    assert ended.value.code == 128 + signal.SIGTERM
    assert saved(tmp_path / "run").name == "step_00000005"
    run = trains("--init_from=resume")
    assert metrics(run, "loss") == metrics(finished, "loss") and same(run, finished)


@pytest.mark.parametrize("within, step", [("evaluation", 4), ("evaluation", 8), ("sample", 4)])
def test_a_signal_within_a_pause_gives_it_up(trains, tmp_path, monkeypatch, within, step):
    """The weights are saved. What was given up is done after the resume, once."""
    forward, after = GPT.forward, []
    more = ["--save_every=100", "--sample_every=4"]
    straight = trains(*more).rename(tmp_path / "straight")

    def interrupt(model, idx, targets=None, *args, **options):
        wanted = "sample" if targets is None else "evaluation"
        if wanted == within and not model.training and harness.steps_done(tmp_path) == step:
            os.kill(os.getpid(), signal.SIGTERM)
            after.append(idx)
        return forward(model, idx, targets, *args, **options)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(GPT, "forward", interrupt)
        trains(*more)
    assert ended.value.code == 128 + signal.SIGTERM and len(after) == 1
    assert saved(tmp_path / "run").name == f"step_0000000{step}"
    run = trains(*more, "--init_from=resume")
    assert same(run, straight)
    for key in ("loss", "val_loss", "sample"):
        recorded = [r["step"] for r in read_metrics(run / "metrics.jsonl") if key in r]
        assert metrics(run, key) == metrics(straight, key) and recorded == [*metrics(run, key)]


def test_a_checkpoint_is_written_before_its_evaluation(
    finished, trains, tmp_path, monkeypatch, evaluates
):
    """Its validation loss, which may be the best, is known all the same after a resume."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train, "evaluate_all", Mock(side_effect=KeyboardInterrupt))
        trains()
    assert steps_in(tmp_path / "run") == ["04"] and not metrics(tmp_path / "run", "val_loss")
    run = trains("--init_from=resume")
    assert same(run, finished) and metrics(run, "val_loss") == metrics(finished, "val_loss")
    shutil.rmtree(saved(run))
    evaluates({8: 9.0, 12: 9.0})  # worse than before
    trains("--init_from=resume", "--max_steps=12", "--keep=1")
    state = torch.load(saved(run) / "train_state.pt", weights_only=True)
    assert (state["best_step"], state["best_val_loss"]) == (4, metrics(run, "val_loss")[4])
    assert steps_in(run) == ["04", "12"]


# -- pruning --


@pytest.mark.slow
def test_a_fresh_checkpoint_is_not_pruned_for_damaged_newer_ones(trains):
    run = trains("--max_steps=24", "--eval_every=100", "--keep=9")
    for name in ("step_00000020", "step_00000024"):
        (run / "ckpt" / name / "model.safetensors").write_bytes(b"damaged")
    more = ["--init_from=resume", "--eval_every=100", "--keep=2"]
    trains(*more, "--save_every=1", "--max_steps=18")
    # The best one and the newest two.
    assert steps_in(run) == ["16", "17", "18", "20_kept", "24_kept"]
    assert not damage(run / "ckpt" / "step_00000018")
    assert all(damage(path) for path in (run / "ckpt").glob("*_kept"))


@pytest.mark.parametrize("every, steps", [(4, [8, 12, 16, 20]), (5, [8, 10, 15, 20])])
def test_a_resumed_checkpoint_is_judged_by_a_new_measure(
    copied, trains, capsys, evaluates, every, steps
):
    """It may be the best, for pruning, --which=best and the picture. Older losses do not count."""
    losses = dict(zip(steps, (2.0, 3.0, 4.0, 5.0), strict=True))
    evaluates(losses)
    more = ["--init_from=resume", "--max_steps=20", "--keep=1", f"--eval_every={every}"]
    trains(*more, "--eval_tokens=64")
    new = {step: loss for step, loss in metrics(copied, "val_loss").items() if step >= 8}
    assert new == losses and steps_in(copied) == ["08", "20"]
    call(sample.main, f"--ckpt={copied}", "--which=best", "--max_new_tokens=1", "--device=cpu")
    assert "step_00000008, the best" in capsys.readouterr().err
    assert "at step 8" in read_run(copied, "steps", "loss").name


def test_a_new_measure_is_recorded_once_and_forgotten_with_it(copied, trains, evaluates):
    """A resume from the same checkpoint judges it again; with the old measure, it is known."""
    old = metrics(copied, "val_loss")[8]
    for loss in (2.0, 1.0):
        evaluates({8: loss, 12: 3.0})
        trains("--init_from=resume", "--max_steps=12", "--eval_tokens=64")
        records = [r for r in read_metrics(copied / "metrics.jsonl") if r["step"] == 8]
        assert [r["val_loss"] for r in records if "val_loss" in r] == [old, loss]
        shutil.rmtree(saved(copied))
    evaluates({12: old + 1})
    trains("--init_from=resume", "--max_steps=12")
    state = torch.load(saved(copied) / "train_state.pt", weights_only=True)
    assert metrics(copied, "val_loss")[8] == old
    assert (state["best_step"], state["best_val_loss"]) == (8, old)


MIXTURES = [  # before, after, whether losses can be compared, whether the order of windows changes
    ("tiny,other", "tiny,other", True, False),
    ("tiny,other", "other,tiny", True, True),
    ("tiny,other", "tiny:0.5,other:0.5", False, True),
    ("tiny:1,other:1", "tiny:0.5,other:0.5", True, False),
    ("tiny:1,other:2", "other:4,tiny:2", True, True),
    ("tiny,other", "tiny,grown", False, False),
    ("other", "grown", True, False),  # train.bin grew, val.bin stayed
    ("tiny", "other", False, False),
]


@pytest.fixture
def mixed(own_data, tmp_path) -> Callable[[str], tuple[TrainConfig, list[DataSet]]]:
    """mixed(spec) returns the settings and the data sets. `grown` is `other` with more tokens."""
    tokenizer = f"--tokenizer={own_data}"
    prepared(tmp_path, make_records(200, seed=3), "--name=other", tokenizer)
    meta = json.loads((tmp_path / "other" / "meta.json").read_text())
    meta["splits"]["train"] |= {"tokens": 2 * meta["splits"]["train"]["tokens"], "sha256": "2"}
    shutil.copytree(tmp_path / "other", tmp_path / "grown")
    forge(tmp_path / "grown", "meta.json", json.dumps(meta).encode())
    os.truncate(tmp_path / "grown" / "train.bin", meta["splits"]["train"]["tokens"] * 2)

    def open_sets(spec: str) -> tuple[TrainConfig, list[DataSet]]:
        return TrainConfig(dataset=spec), open_datasets(spec, tmp_path, hashes=False)

    return open_sets


@pytest.mark.parametrize("before, now, comparable, reordered", MIXTURES)
def test_sizes_and_places_of_data_sets_are_their_weights_and_order(
    mixed, own_data, before, now, comparable, reordered
):
    cfg, sets = mixed(before)
    shape = model_config(cfg, sets[0].meta["vocab_size"])
    files = shared_files(cfg, sets, load_tokenizer(own_data), shape)
    content = [json.loads(files[name]) for name in ("train_config.json", "meta.json")]
    progress = Progress(step=8, best_step=4, best_val_loss=1.0)
    checkpoint = startup.Saved(*content, asdict(progress))
    progress, known = startup.progress_of(checkpoint, *mixed(now), {})
    assert (progress.best_step == 4) == comparable == ("evaluates" not in known)
    changed = " ".join(startup.settings_changed(checkpoint, *mixed(now)))
    assert ("order of windows" in changed) == reordered and (now in changed) == (now != before)


def test_pruning_leaves_what_somebody_added_or_linked(copied, trains, tmp_path, evaluates):
    ckpt = copied / "ckpt"
    backup = put(shutil.copytree(ckpt / "step_00000004", ckpt / "step_00000004_backup"))
    shutil.copytree(ckpt / "step_00000004", tmp_path / "archive")
    (ckpt / "step_00000002").symlink_to(tmp_path / "archive")
    added = {"model.gguf", "average/config.json", "vocab.json", "chat_template.jinja"}
    put(ckpt / "step_00000004", *added)
    evaluates({16: 1.0})
    trains("--max_steps=16", "--init_from=resume", "--keep=1", "--eval_every=100")
    assert steps_in(copied) == ["02", "04", "04_backup", "12", "16"]  # the last is the best, too
    assert visible(ckpt / "step_00000004").keys() == added
    assert visible(ckpt / "step_00000004_backup") == backup == visible(tmp_path / "archive")


def test_a_deletion_that_was_killed_is_finished_by_the_next(copied, monkeypatch):
    folder = saved(copied)
    put(folder, "notes.txt")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint, "remove_files", one_then_interrupted)
        checkpoint.delete_checkpoint(folder)
    assert saved(copied) != folder and len(visible(folder)) > 4
    checkpoint.delete_checkpoint(folder)
    assert visible(folder).keys() == {"notes.txt"}


def one_then_interrupted(folder: Path, names: list[str]) -> None:
    remove_files(folder, names[:1])
    raise KeyboardInterrupt


def test_a_manifest_deletes_nothing_outside_its_folder(copied, tmp_path):
    folder = saved(copied)
    put(tmp_path, "mine.txt")
    (folder / "manifest.json").write_text(json.dumps({"../../../mine.txt": {}, "..": {}}))
    assert (folder / "../../../mine.txt").exists()
    checkpoint.delete_checkpoint(folder)
    assert (tmp_path / "mine.txt").exists() and (folder / "model.safetensors").exists()


def test_a_damaged_manifest_stops_no_other_deletion(copied, trains):
    (copied / "ckpt" / "step_00000004" / "manifest.json").write_text("{")
    trains("--max_steps=20", "--init_from=resume", "--keep=1", "--eval_every=100")
    left = steps_in(copied)
    assert "04" in left and "20" in left and "12" not in left


# -- a terminal, a pipe or a disk that goes away --


@pytest.mark.slow
@pytest.mark.parametrize("streams", [">/dev/full 2>&1", "<&- >&- 2>&-", "| head -n1"])
def test_a_training_needs_no_output(tiny_data, tmp_path, streams):
    argv = training(1, tiny_data, tmp_path)
    assert subprocess.run(["sh", "-c", f'"$@" {streams}', "sh", *argv]).returncode == 0
    assert metrics(tmp_path / "run", "loss").keys() == set(range(1, 9))
    assert saved(tmp_path / "run").name == "step_00000008"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_whose_output_nobody_reads_goes_on_and_is_saved(tiny_data, tmp_path, number):
    argv = training(1, tiny_data, tmp_path, *ENDLESS)
    receive, send = os.pipe()
    fcntl.fcntl(send, fcntl.F_SETPIPE_SZ, 4096)  # about 20 lines
    process = subprocess.Popen(argv, stdout=send, stderr=send)
    os.close(send)
    harness.wait_for(process, lambda: harness.steps_done(tmp_path) >= 100)
    process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number and saved(tmp_path / "run")
    with open(receive) as reader:
        assert "step 1/" in reader.read()


@pytest.mark.slow
def test_under_nohup_a_closed_terminal_ends_nothing(tiny_data, tmp_path):
    argv = ["nohup", *training(1, tiny_data, tmp_path, "--max_steps=60")]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    harness.wait_for(process, lambda: harness.steps_done(tmp_path) >= 5)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=120) == 0 and len(metrics(tmp_path / "run", "loss")) == 60


@pytest.mark.slow
def test_ctrl_c_that_also_ends_the_tee_behind_a_run_saves_it(tiny_data, tmp_path):
    argv = training(1, tiny_data, tmp_path, *ENDLESS)
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    harness.wait_for(process, lambda: harness.steps_done(tmp_path) >= 5)
    process.stderr.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 130 and saved(tmp_path / "run")


# -- the plan, flipped bits, and files of other programs --


@pytest.mark.parametrize("end", [{"max_tokens": 100_000}, {"max_epochs": 0.37}, {"max_steps": 50}])
def test_a_resume_with_the_same_batch_plans_the_same_end(end):
    cfg = TrainConfig(block_size=64, batch_size=4, batch_tokens=768, **end)
    plan = make_plan(cfg, 1, epoch_tokens=1_000_003)
    for step in range(0, plan.steps, 7):
        done = Progress(step, step * plan.step_tokens // 64)
        again = make_plan(cfg, 1, 1_000_003, done)
        assert again.steps == plan.steps
        assert again.tokens_at(plan.steps) == plan.tokens_at(plan.steps)
        assert (again.position(step), again.position(plan.steps)) == (step, plan.steps)


@pytest.mark.parametrize("end", [{"max_tokens": 20_480}, {"max_epochs": 0.2}, {"max_steps": 40}])
@pytest.mark.parametrize("size", [128, 256, 384, 1024])
def test_the_schedule_goes_on_where_it_was_with_other_batches(end, size):
    """Half of the run is done, or a tenth, in which the warm-up ended."""
    for step in (4, 20):
        cfg = TrainConfig(block_size=32, batch_size=1, lr=1, warmup_ratio=0.06, **end)
        plan = make_plan(replace(cfg, batch_tokens=512), 1, 102_400)
        cfg = replace(cfg, batch_tokens=size)
        again = make_plan(cfg, 1, 102_400, Progress(step, step * 512 // 32))
        before, after = (lr_at(p.position(step), p.position(p.steps), cfg) for p in (plan, again))
        assert after == pytest.approx(before, abs=0.02)
        assert lr_at(again.position(again.steps - 1), again.position(again.steps), cfg) == 0.1


def test_no_flipped_bit_of_a_checkpoint_loads_as_another_model(copied, refuses):
    folder = saved(copied)
    rng = random.Random(5)
    for name in 12 * ("config.json", "model.safetensors", "meta.json", "tokenizer.model"):
        content = (folder / name).read_bytes()
        harness.flip(folder / name, rng)
        refuses(sample.main, f"--ckpt={folder}", "--device=cpu")
        (folder / name).write_bytes(content)


def test_no_meta_json_leads_out_of_its_folder(own_data, tmp_path, refuses):
    """Though its hash is right."""
    meta = json.loads((own_data / "meta.json").read_text(encoding="utf-8"))
    meta["tokenizer"] |= {"file": "../x", "sha256": "", "files": {}}
    shutil.copyfile(own_data / "tokenizer.model", tmp_path / "x")
    forge(own_data, "meta.json", json.dumps(meta).encode())
    assert "'../x'" in refuses(prepare.main, "--inspect", own_data)
    assert "'../x'" in refuses(lambda: train_tiny(tmp_path, tmp_path))


def test_a_tensor_that_is_not_finite_is_refused_by_its_name(finished, trains, tmp_path, refuses):
    """Such a run trained to its end and never saved, if the data never use the row."""
    name = "model.embed_tokens.weight"
    folder = shutil.copytree(saved(finished), tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    weights[name][5] = math.nan
    save_file(weights, folder / "model.safetensors")
    forge(folder)
    assert name in refuses(lambda: trains(f"--init_from={folder}"))
    assert name in refuses(sample.main, f"--ckpt={folder}")

"""A run is never lost, and nothing that train.py did not write is ever deleted."""

import copy
import fcntl
import gc
import hashlib
import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import warm
from conftest import REPO, call, forge, metrics, train_tiny
from safetensors.torch import load_file, save_file
from test_faults import ENDLESS, launch, options, poison

sys.path.insert(0, str(Path(__file__).parent))
import harness

import prepare
import sample
import train
from configurator import UserError
from hardware.disk import Lock, damage
from model import GPT
from training import checkpoint, report, runs
from training.plan import make_plan
from training.resume import find_origin
from training.runs import newest_checkpoint, newest_intact, newest_run, run_folder
from training.settings import TrainConfig


@pytest.fixture(scope="module")
def finished(tiny_data, tmp_path_factory) -> Path:
    """A run of 8 steps with checkpoints of steps 4 and 8."""
    return train_tiny(tiny_data, tmp_path_factory.mktemp("finished"))


def command(data: Path, out: Path, *more: str) -> list[str]:
    return [sys.executable, str(REPO / "train.py"), *options(data, out, *more)]


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# -- what is not a run --


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
@pytest.mark.parametrize("how", ["scratch", "auto", "resume"])
def test_a_folder_that_is_no_run_is_refused_and_keeps_every_file(
    tiny_data, tmp_path, refuses, how, overwrite
):
    project = tmp_path / "proj"
    for name in ("ckpt/weights.pt", "src/main.py", "thesis.tex", "metrics.jsonl"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("precious")
    before = contents(tmp_path)
    more = ["--run_name=proj", f"--init_from={how}", *overwrite]
    refuses(train.main, *options(tiny_data, tmp_path, *more))
    (project / "metrics.jsonl").unlink()  # now no file has a name that files of a run have
    error = refuses(train.main, *options(tiny_data, tmp_path, *more))
    assert "is not the folder of a run" in error or "there is no checkpoint in" in error
    del before["proj/metrics.jsonl"]
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", [".", "..", "a/b", "", "a\nb", "a\x1b[2Jb"])
def test_a_run_name_that_is_another_folder_is_refused(tiny_data, tmp_path, refuses, name):
    (tmp_path / "thesis.tex").write_text("precious")
    out = tmp_path / "out"
    more = [f"--run_name={name}", "--overwrite"]
    assert "must be a plain folder name" in refuses(train.main, *options(tiny_data, out, *more))
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_a_resume_records_the_checkpoint_that_a_killed_process_could_not_record(
    finished, tiny_data, tmp_path
):
    """metrics.jsonl says which checkpoints there were: without them, auto must not begin anew."""
    run = shutil.copytree(finished, tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    unsaved = [line for line in lines if '"saved"' not in line and '"ended"' not in line]
    (run / "metrics.jsonl").write_text("".join(unsaved))
    train_tiny(tiny_data, tmp_path, "--init_from=resume", "--max_steps=12")
    assert metrics(run, "saved") == {8: "step_00000008", 12: "step_00000012"}


# -- --overwrite --


def test_overwrite_moves_the_earlier_run_out_of_the_way_with_all_that_is_in_its_folder(
    finished, tiny_data, tmp_path, capsys
):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for name in ("notes.txt", "ckpt/step_00000004/model.gguf", "bad_steps/mine.txt", "wandb/x"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("precious")
    (run / "ckpt" / "step_00000002").symlink_to(finished / "ckpt" / "step_00000004")
    (tmp_path / "run.old-1").mkdir()  # somebody's
    before = contents(run)
    train_tiny(tiny_data, tmp_path, "--overwrite", "--seed=7")
    assert contents(tmp_path / "run.old-2") == before
    assert (tmp_path / "run.old-2" / "ckpt" / "step_00000002").is_symlink()
    assert str(tmp_path / "run.old-2") in capsys.readouterr().out
    assert sorted(os.listdir(run)) == ["ckpt", "metrics.jsonl"]
    assert sorted(os.listdir(run / "ckpt")) == ["step_00000004", "step_00000008"]
    assert metrics(run, "loss") != metrics(finished, "loss")
    # The run that was moved is no longer the newest one, but it can go on under its new name.
    assert newest_run(tmp_path) == run
    os.utime(tmp_path / "run.old-2" / "ckpt" / "step_00000008" / "manifest.json")
    assert newest_run(tmp_path) == run
    call(train.main, f"--out_dir={tmp_path}", "--run_name=run.old-2", "--init_from=resume")
    assert "nothing is left to do" in capsys.readouterr().out


def test_a_resume_does_not_overwrite_again(finished, tiny_data, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    more = ["--overwrite", "--seed=7", "--max_steps=4"]
    train_tiny(tiny_data, tmp_path, *more)
    run = train_tiny(tiny_data, tmp_path, *more, "--init_from=auto", "--max_steps=8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.old-1"]
    assert metrics(run, "loss").keys() == set(range(1, 9))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["--overwrite", "--init_from=auto"])
def test_overwrite_that_is_killed_before_the_first_checkpoint_loses_nothing(
    finished, tiny_data, tmp_path, how
):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    before = contents(run)
    process = launch(1, tiny_data, tmp_path, "--overwrite", *ENDLESS)
    harness.wait_for(process, (tmp_path / "run.old-1").exists)
    harness.wait_for(process, lambda: harness.steps_done(tmp_path) >= 2)
    process.kill()
    process.communicate()
    train_tiny(tiny_data, tmp_path, how)
    assert contents(tmp_path / "run.old-1") == before
    assert contents(run).keys() == before.keys()


def test_a_kill_between_the_steps_of_overwrite_leaves_the_earlier_run_whole(
    finished, tiny_data, tmp_path, monkeypatch
):
    for number, name in enumerate(("rename", "unlink", "mkdir")):
        out = tmp_path / str(number)
        run = shutil.copytree(finished, out / "run")
        with run_folder(run) as lock, monkeypatch.context() as kill:
            kill.setattr(Path, name, Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                runs.replace_run(run, lock)
        moved = out / ("run" if name == "rename" else "run.old-1")
        assert contents(finished).items() <= contents(moved).items()
        assert (find_origin(TrainConfig(init_from="auto"), run, print).path is None) == (
            name != "rename"
        )


@pytest.mark.parametrize("option", ["--overwrite", "--init_from=resume"])
def test_a_link_to_the_checkpoints_of_another_run_is_refused_and_they_stay(
    finished, tiny_data, tmp_path, refuses, option
):
    """With --overwrite, they were deleted."""
    shutil.copytree(finished, tmp_path / "theirs")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ckpt").symlink_to(tmp_path / "theirs" / "ckpt")
    before = contents(tmp_path / "theirs")
    more = [option, "--save_every=2"]
    assert "theirs/ckpt" in refuses(train.main, *options(tiny_data, tmp_path, *more))
    shutil.copy(finished / "metrics.jsonl", tmp_path / "run")  # now it is a run, as it seems
    assert "theirs/ckpt" in refuses(train.main, *options(tiny_data, tmp_path, *more))
    assert contents(tmp_path / "theirs") == before


def test_a_disk_that_ckpt_links_to_has_one_writer(finished, tiny_data, tmp_path, refuses):
    for name in ("run", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ckpt").symlink_to(tmp_path / "disk")
    held = Lock(tmp_path / "disk", "wait")
    assert "another process is writing" in refuses(train.main, *options(tiny_data, tmp_path))
    held.close()
    (tmp_path / "disk").mkdir()
    run = train_tiny(tiny_data, tmp_path)
    assert newest_checkpoint(run / "ckpt").name == "step_00000008"


@pytest.mark.parametrize(
    "name", [".metrics.jsonl.tmp", ".loss.png.tmp", "bad_steps/step_00000005.txt"]
)
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_no_file_of_a_run_is_written_through_a_link(
    finished, tiny_data, tmp_path, monkeypatch, name, link
):
    run = shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "thesis.tex").write_text("precious")
    (run / name).parent.mkdir(exist_ok=True)
    link(tmp_path / "thesis.tex", run / name)
    for step in (5, 8):
        shutil.rmtree(run / f"ckpt/step_{step:08d}", ignore_errors=True)
    poison(monkeypatch, 0, 1)  # step 5, after the resume at step 4
    train_tiny(tiny_data, tmp_path, "--init_from=resume", "--save_every=100", "--follow")
    assert (run / "loss.png").read_bytes() and (run / "bad_steps" / "step_00000005.txt").is_file()
    assert (tmp_path / "thesis.tex").read_text() == "precious"


# -- checkpoints that cannot be seen --


def lose_manifests(run: Path) -> str:
    for path in (run / "ckpt").glob("*/manifest.json"):
        path.unlink()
    return "manifest.json"


def unmount(run: Path) -> str:
    shutil.rmtree(run / "ckpt")
    (run / "ckpt").symlink_to("/nowhere/disk")
    return "is a link to /nowhere/disk, which is not there: is its disk mounted?"


def lose_ckpt(run: Path) -> str:
    shutil.rmtree(run / "ckpt")
    return "metrics.jsonl says that step 4 was saved"


def ckpt_is_a_file(run: Path) -> str:
    shutil.rmtree(run / "ckpt")
    (run / "ckpt").write_text("")
    return "cannot look for checkpoints: Not a directory"


def rename_all(run: Path) -> str:
    for path in (run / "ckpt").iterdir():
        path.rename(path.with_name(f"{path.name}_backup"))
    return "step_00000004_backup is there"


WAYS_TO_HIDE = [lose_manifests, unmount, lose_ckpt, ckpt_is_a_file, rename_all]


@pytest.mark.parametrize("hide", WAYS_TO_HIDE)
@pytest.mark.parametrize("how", ["auto", "resume"])
def test_a_run_whose_checkpoints_cannot_be_seen_is_refused_and_stays(
    finished, tiny_data, tmp_path, refuses, hide, how
):
    shutil.copytree(finished, tmp_path / "run")
    message = hide(tmp_path / "run")
    before = contents(tmp_path)
    assert message in refuses(train.main, *options(tiny_data, tmp_path, f"--init_from={how}"))
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_auto_begins_again_where_a_run_was_killed_before_its_first_checkpoint(tiny_data, tmp_path):
    process = launch(1, tiny_data, tmp_path, "--init_from=auto", *ENDLESS)
    harness.wait_for(process, lambda: harness.steps_done(tmp_path) >= 2)
    process.kill()
    process.communicate()
    run = train_tiny(tiny_data, tmp_path, "--init_from=auto")
    assert metrics(run, "loss").keys() == set(range(1, 9))


def test_a_checkpoint_under_the_number_of_another_is_refused(
    finished, tiny_data, tmp_path, refuses
):
    shutil.copytree(finished, tmp_path / "run")
    ckpt = tmp_path / "run" / "ckpt"
    shutil.copytree(ckpt / "step_00000004", ckpt / "step_00000099")
    error = refuses(train.main, *options(tiny_data, tmp_path, "--init_from=resume"))
    assert "step_00000099 holds step 4: it was renamed, or copied from another" in error


def test_a_renamed_average_or_checkpoint_is_refused_by_all_that_read_it(
    tiny_data, tmp_path, refuses
):
    run = train_tiny(tiny_data, tmp_path, "--average=0.5")
    (run / "ckpt" / "step_00000004").rename(run / "ckpt" / "step_00000006")
    for name in ("step_00000006", "step_00000006/average"):
        error = refuses(sample.main, f"--ckpt={run / 'ckpt' / name}", "--device=cpu")
        assert f"{name} holds step 4" in error
    shutil.rmtree(run / "ckpt" / "step_00000008")
    error = refuses(train.main, *options(tiny_data, tmp_path, "--init_from=resume"))
    assert "step_00000006 holds step 4" in error


@pytest.mark.parametrize("name", [".tmp_step_00000012-0123abcd", ".step_00000002.old"])
def test_a_resume_deletes_what_a_kill_left_half_written_or_half_deleted(tiny_data, tmp_path, name):
    run = train_tiny(tiny_data, tmp_path, "--average=0.5", "--max_steps=4")
    left = run / "ckpt" / name
    shutil.copytree(run / "ckpt" / "step_00000004", left)
    (left / "manifest.json").unlink()
    mine = shutil.copytree(left, run / "ckpt" / f"{name}.mine")
    (run / "ckpt" / ".step_00000001.old").symlink_to(mine)
    train_tiny(tiny_data, tmp_path, "--average=0.5", "--init_from=resume")
    assert (
        not left.exists() and (run / "ckpt" / f"{name}.mine" / "average" / "config.json").exists()
    )


# -- one writer --


def test_the_lock_is_on_a_file_that_is_open_for_writing_and_names_its_holder(tmp_path):
    """NFS forwards such a lock to its server, but none on a folder."""
    held = Lock(tmp_path / "run", "wait")
    with open(tmp_path / "run" / ".lock", "r+b") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.raises(UserError, match=f"process {os.getpid()} on "):
        Lock(tmp_path / "run", "wait")
    held.close()
    assert os.listdir(tmp_path) == []


def test_a_lock_of_another_user_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "open", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(UserError, match="a lock that another user left"):
        Lock(tmp_path, "wait")


def test_a_lock_on_a_disk_that_became_read_only_is_released(tmp_path, monkeypatch):
    held = Lock(tmp_path / "run", "wait")
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", Mock(side_effect=OSError(30, "Read-only file system")))
        held.close()
    Lock(tmp_path / "run", "wait").close()


def test_a_save_that_fails_gives_its_room_back(tiny_data, tmp_path, monkeypatch, refuses):
    """A file that is deleted while it is open keeps its place on the disk."""
    monkeypatch.setattr(torch, "save", Mock(side_effect=OSError(28, "No space left")))
    gc.disable()
    try:
        refuses(lambda: train_tiny(tiny_data, tmp_path))
        links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    finally:
        gc.enable()
    assert not [path for path in links if "tmp_step" in path]


@pytest.mark.slow
def test_a_last_save_that_fails_ends_all_ranks_without_a_traceback(tiny_data, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(REPO / "train.py"), *options(tiny_data, tmp_path, "--max_steps=4")]
    command = ["bash", "-c", 'ulimit -f 100; exec "$@"', "bash", *command]  # 100 KiB a file
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode and "could not be written" in ended.stdout
    assert "error: " in ended.stderr and "end_run" not in ended.stderr


@pytest.mark.parametrize("make", [lambda path: path.write_text("mine"), os.mkfifo])
def test_a_lock_that_somebody_else_wrote_stays_as_it_is(make, tmp_path):
    path = tmp_path / ".lock"
    make(path)
    with pytest.raises(UserError, match="not a file that this program wrote"):
        Lock(tmp_path, "wait")
    assert path.is_fifo() or path.read_text() == "mine"


def test_two_processes_that_save_a_step_at_the_same_moment_do_not_mix(
    finished, tiny_data, tmp_path, monkeypatch
):
    """On a disk whose locks do not meet. One saves while the other has written a part."""
    write_folder = checkpoint.Saver.write_folder

    def interrupted(self, new, c, weights, training):
        write_folder(self, new, c, weights, training)
        if self.token != "01234567":
            second = copy.copy(self)
            second.token = "01234567"
            zeros = {name: torch.zeros_like(w) for name, w in weights.items()}
            second.write(c, zeros, training, 0.0)

    monkeypatch.setattr(checkpoint.Saver, "write_folder", interrupted)
    run = train_tiny(tiny_data, tmp_path)
    for n in (4, 8):
        folder = run / "ckpt" / f"step_{n:08d}"
        expected = (finished / "ckpt" / folder.name / "model.safetensors").read_bytes()
        assert not damage(folder) and (folder / "model.safetensors").read_bytes() == expected
        assert not damage(folder.with_name(f"{folder.name}_kept-1"))  # the other one's
    assert len(os.listdir(run / "ckpt")) == 4


def test_what_becomes_of_a_run_is_decided_under_its_lock(tiny_data, tmp_path, refuses, capsys):
    """A process that decided without the lock would delete what another one trains meanwhile."""
    (tmp_path / "run").mkdir()
    held = Lock(tmp_path / "run", "wait")
    try:
        for how in ("auto", "scratch"):
            error = refuses(train.main, *options(tiny_data, tmp_path, f"--init_from={how}"))
            assert "another process is writing" in error and not capsys.readouterr().out
    finally:
        held.close()
    train_tiny(tiny_data, tmp_path, "--init_from=auto")


def test_a_lock_on_a_folder_that_was_removed_meanwhile_is_not_one(tmp_path):
    folder = tmp_path / "run"
    first = Lock(folder, "wait")
    shutil.rmtree(folder)
    second = Lock(folder, "wait")
    first.close()
    with pytest.raises(UserError):
        Lock(folder, "wait")
    second.close()
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("taken", [False, True])
def test_a_run_whose_folder_is_removed_holds_the_new_one_or_ends(
    tiny_data, tmp_path, refuses, taken
):
    """The lock went with the folder. Two runs in one place would prune each other's checkpoints."""
    process = launch(1, tiny_data, tmp_path, *ENDLESS, "--save_every=10")
    run = tmp_path / "run"
    harness.wait_for(process, lambda: harness.steps_done(tmp_path) >= 2)
    if taken:
        # A rename takes no time, so this process is the first that has the lock on the new folder.
        run.rename(tmp_path / "moved")
        held = Lock(run, "wait")
        assert process.wait(timeout=120) == 2
        assert "another process is writing" in process.communicate()[1]
        held.close()
        return
    run.rename(tmp_path / "moved")
    harness.wait_for(process, lambda: harness.steps_done(tmp_path) >= 2)
    more = ["--overwrite", "--seed=5"]
    assert "another process is writing" in refuses(train.main, *options(tiny_data, tmp_path, *more))
    process.kill()
    process.communicate()


def test_other_texts_to_judge_by_are_other_data(tiny_data, tmp_path, refuses):
    shutil.copytree(tiny_data / "tiny", tmp_path / "tiny")
    train_tiny(tmp_path, tmp_path)
    meta = json.loads((tmp_path / "tiny" / "meta.json").read_text())
    ids = (tmp_path / "tiny" / "val.bin").read_bytes()
    eos = meta["eos_id"].to_bytes(2, "little")
    ends = [at + 2 for at in range(0, len(ids) - 2, 2) if ids[at : at + 2] == eos]
    ids = ids[: ends[-1]]  # without the last document
    (tmp_path / "tiny" / "val.bin").write_bytes(ids)
    meta["splits"]["val"] |= {"tokens": len(ids) // 2, "documents": len(ends)}
    meta["splits"]["val"] |= {"sha256": hashlib.sha256(ids).hexdigest()}
    forge(tmp_path / "tiny", "meta.json", json.dumps(meta).encode())
    more = ["--init_from=resume", "--max_steps=12"]
    error = refuses(train.main, *options(tmp_path, tmp_path, *more))
    assert "was trained with other data: tiny/val.bin is " in error


FILES = ["ckpt/step_00000008/model.safetensors", "ckpt/step_00000008/manifest.json"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["metrics.jsonl", *FILES])
def test_a_fifo_in_place_of_a_file_is_named_and_not_waited_for(finished, tiny_data, tmp_path, name):
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / name).unlink()
    os.mkfifo(tmp_path / "run" / name)
    argv = command(tiny_data, tmp_path, "--init_from=resume", "--max_steps=9")
    done = warm.run(argv, capture_output=True, text=True, timeout=120)
    assert f"{name}: not a plain file" in done.stdout + done.stderr
    assert done.returncode == (2 if name == "metrics.jsonl" else 0)


# -- bad steps at the end --


def test_a_bad_last_step_does_not_cost_what_came_before(tiny_data, tmp_path, monkeypatch):
    poison(monkeypatch, 14, 15)  # step 8 of 8
    run = train_tiny(tiny_data, tmp_path, "--save_every=100", "--eval_every=100")
    folder = newest_checkpoint(run / "ckpt")
    assert folder.name == "step_00000008" and not damage(folder)
    assert all(torch.isfinite(w).all() for w in load_file(folder / "model.safetensors").values())


def test_a_signal_in_a_bad_step_saves_and_the_run_goes_on_from_there(
    tiny_data, tmp_path, monkeypatch, capsys
):
    forward = GPT.forward
    calls = itertools.count()

    def broken(self, idx, targets=None, *args, **kwargs):
        loss = forward(self, idx, targets, *args, **kwargs)
        if self.training and next(calls) == 11:  # in the last micro-step of step 6
            os.kill(os.getpid(), signal.SIGTERM)
            return loss * math.nan
        return loss

    monkeypatch.setattr(GPT, "forward", broken)
    with pytest.raises(SystemExit) as ended:
        train_tiny(tiny_data, tmp_path, "--save_every=100", "--eval_every=100")
    assert ended.value.code == 128 + signal.SIGTERM
    folder = newest_checkpoint(tmp_path / "run" / "ckpt")
    assert folder.name == "step_00000006"
    assert f"--init_from=resume goes on from {folder}" in capsys.readouterr().out
    monkeypatch.undo()
    run = train_tiny(tiny_data, tmp_path, "--init_from=resume")
    assert metrics(run, "loss").keys() == {1, 2, 3, 4, 5, 7, 8}


def test_a_signal_within_a_step_gives_the_step_up_and_the_run_ends_the_same(
    finished, tiny_data, tmp_path, monkeypatch, capsys
):
    """A step may take hours on a laptop. Its micro-steps so far are lost, and no more."""
    forward = GPT.forward
    calls = itertools.count()

    def interrupted(self, idx, targets=None, *args, **kwargs):
        if self.training and next(calls) == 10:  # in the first of the two micro-steps of step 6
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(self, idx, targets, *args, **kwargs)

    monkeypatch.setattr(GPT, "forward", interrupted)
    with pytest.raises(SystemExit) as ended:
        train_tiny(tiny_data, tmp_path)
    assert ended.value.code == 128 + signal.SIGTERM and next(calls) == 11
    assert newest_checkpoint(tmp_path / "run" / "ckpt").name == "step_00000005"
    monkeypatch.undo()
    run = train_tiny(tiny_data, tmp_path, "--init_from=resume")
    weights = [load_file(r / "ckpt/step_00000008/model.safetensors") for r in (run, finished)]
    assert metrics(run, "loss") == metrics(finished, "loss")
    assert all(torch.equal(w, weights[1][name]) for name, w in weights[0].items())


def test_weights_that_are_not_finite_are_not_saved_over_good_ones(
    tiny_data, tmp_path, monkeypatch, refuses
):
    step = torch.optim.AdamW.step
    calls = itertools.count()

    def spoil(self, *args, **kwargs):
        step(self, *args, **kwargs)
        if next(calls) == 5:  # in step 6, loss and gradient are finite, but not the new weights
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(math.nan)

    monkeypatch.setattr(torch.optim.AdamW, "step", spoil)
    more = ["--save_every=4", "--max_bad_steps=3", "--max_steps=40", "--eval_every=100"]
    error = refuses(train.main, *options(tiny_data, tmp_path, *more))
    folder = newest_checkpoint(tmp_path / "run" / "ckpt")
    assert "3 steps in a row" in error and folder.name == "step_00000004" and str(folder) in error


def test_a_run_that_gave_up_goes_on_behind_the_bad_steps(tiny_data, tmp_path, monkeypatch, refuses):
    poison(monkeypatch, *range(8, 12))  # steps 5 and 6
    more = ["--save_every=100", "--eval_every=100", "--max_bad_steps=2"]
    refuses(train.main, *options(tiny_data, tmp_path, *more))
    run = train_tiny(tiny_data, tmp_path, *more, "--init_from=resume")
    assert metrics(run, "loss").keys() == {1, 2, 3, 4, 7, 8}


def test_a_resume_keeps_what_was_kept_because_of_bad_steps(
    tiny_data, tmp_path, monkeypatch, refuses
):
    poison(monkeypatch, *range(8, 12))  # steps 5 and 6
    more = ["--save_every=2", "--eval_every=100", "--max_bad_steps=2", "--keep=1"]
    refuses(train.main, *options(tiny_data, tmp_path, *more))
    monkeypatch.setattr(train, "loop", lambda *_: False)
    run = train_tiny(tiny_data, tmp_path, *more, "--init_from=resume")
    assert {path.name for path in run.glob("ckpt/step_*")} == {"step_00000004", "step_00000006"}


# -- pruning --


@pytest.mark.slow
def test_a_fresh_checkpoint_is_not_pruned_for_damaged_newer_ones(tiny_data, tmp_path):
    run = train_tiny(tiny_data, tmp_path, "--max_steps=24", "--eval_every=100", "--keep=9")
    for name in ("step_00000020", "step_00000024"):
        (run / "ckpt" / name / "model.safetensors").write_bytes(b"damaged")
    more = ["--init_from=resume", "--eval_every=100", "--keep=2"]
    train_tiny(tiny_data, tmp_path, *more, "--save_every=1", "--max_steps=18")
    damaged = ["step_00000020_kept-1", "step_00000024_kept-1"]
    kept = ["step_00000016", "step_00000017", "step_00000018"]  # the best one and the newest two
    assert sorted(os.listdir(run / "ckpt")) == [*kept, *damaged]
    assert newest_intact(run / "ckpt")[0].name == "step_00000018"
    train_tiny(tiny_data, tmp_path, *more, "--max_steps=24")
    written = ["step_00000018", "step_00000020", "step_00000024"]
    assert sorted(os.listdir(run / "ckpt")) == sorted([*written, *damaged])
    assert all(damage(run / "ckpt" / name) for name in damaged)


def test_pruning_passes_by_copies_links_and_checkpoints_with_somebodys_files(
    tiny_data, tmp_path, capsys
):
    run = train_tiny(tiny_data, tmp_path, "--eval_every=100")
    ckpt = run / "ckpt"
    shutil.copytree(ckpt / "step_00000004", ckpt / "step_00000004_backup")
    shutil.copytree(ckpt / "step_00000004", tmp_path / "archive")
    (ckpt / "step_00000002").symlink_to(tmp_path / "archive")
    (ckpt / "step_00000004" / "notes.md").write_text("precious")
    before = contents(tmp_path / "archive"), contents(ckpt / "step_00000004_backup")
    more = ["--max_steps=24", "--keep=1", "--init_from=resume", "--eval_every=100"]
    train_tiny(tiny_data, tmp_path, *more)
    there = ["step_00000002", "step_00000004", "step_00000004_backup"]
    assert sorted(os.listdir(ckpt)) == [*there, "step_00000020", "step_00000024"]
    assert not damage(ckpt / "step_00000004")
    assert before == (contents(tmp_path / "archive"), contents(ckpt / "step_00000004_backup"))
    assert capsys.readouterr().out.count("is kept: it holds notes.md") == 1


# -- a terminal, a pipe or a disk that goes away --


def finish(process: subprocess.Popen) -> str:
    err = process.communicate(timeout=120)[1] or ""
    assert "Traceback" not in err, err
    return err


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_a_full_disk_does_not_take_ends_nothing(tiny_data, tmp_path):
    with open("/dev/full", "w") as full:
        done = warm.run(command(tiny_data, tmp_path), stdout=full, stderr=full)
    assert done.returncode == 0
    assert metrics(tmp_path / "run", "loss").keys() == set(range(1, 9))
    assert newest_checkpoint(tmp_path / "run" / "ckpt").name == "step_00000008"


@pytest.mark.slow
def test_a_training_needs_no_output_at_all(tiny_data, tmp_path):
    argv = command(tiny_data, tmp_path)
    done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *argv])
    assert done.returncode == 0
    assert newest_checkpoint(tmp_path / "run" / "ckpt").name == "step_00000008"


@pytest.mark.slow
def test_a_closed_pipe_ends_nothing(tiny_data, tmp_path):
    process = launch(1, tiny_data, tmp_path, "--max_steps=60", start=subprocess.Popen)
    process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    finish(process)
    assert process.returncode == 0 and len(metrics(tmp_path / "run", "loss")) == 60


@pytest.mark.slow
def test_a_closed_terminal_saves_the_step_unless_nohup_was_asked_for(tiny_data, tmp_path):
    pid, terminal = os.forkpty()
    if pid == 0:  # this child has its own session, on its own terminal
        os.execv(sys.executable, command(tiny_data, tmp_path, *ENDLESS))
    seen = b""
    while harness.steps_done(tmp_path) < 20 and len(seen) < 1_000_000:
        seen += os.read(terminal, 1 << 16)
    os.close(terminal)  # like a closed window: SIGHUP, and every later write fails with EIO
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP, seen[-2000:]
    done = int(newest_checkpoint(tmp_path / "run" / "ckpt").name[5:])
    assert done == max(metrics(tmp_path / "run", "loss")) < 100000

    def ignore_hangup():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does

    argv = command(tiny_data, tmp_path / "nohup", "--max_steps=60")
    process = subprocess.Popen(argv, stdout=-3, stderr=-1, text=True, preexec_fn=ignore_hangup)
    harness.wait_for(process, lambda: harness.steps_done(tmp_path / "nohup") >= 5)
    process.send_signal(signal.SIGHUP)
    finish(process)
    assert process.returncode == 0 and len(metrics(tmp_path / "nohup" / "run", "loss")) == 60


# -- metrics.jsonl --


@pytest.mark.parametrize("what", ["deleted", "moved", "replaced", "its folder too"])
def test_metrics_that_vanish_during_a_run_are_written_again(
    tiny_data, tmp_path, monkeypatch, capsys, what
):
    write = report.Metrics.write
    path = tmp_path / "run" / "metrics.jsonl"

    def meddle(self, record, *args, **kwargs):
        if record["step"] == 5 and "loss" in record:
            if what == "deleted":
                path.unlink()
            elif what == "moved":
                path.rename(tmp_path / "elsewhere")
            elif what == "replaced":  # as an editor does when it saves
                (tmp_path / "new").write_bytes(path.read_bytes())
                (tmp_path / "new").replace(path)
            else:  # in one step, as a thread may be saving there
                path.parent.rename(tmp_path / "gone")
                shutil.rmtree(tmp_path / "gone", ignore_errors=True)
        write(self, record, *args, **kwargs)

    monkeypatch.setattr(report.Metrics, "write", meddle)
    train_tiny(tiny_data, tmp_path)
    assert metrics(tmp_path / "run", "loss").keys() == set(range(1, 9))
    assert ("all of it is written again" in capsys.readouterr().out) == (what != "replaced")


NOT_RECORDS = [b"[1]", b'{"loss": 1}', b'{"step": "x"}', b"\xff\xfe", b"[" * 100_000]


@pytest.mark.parametrize("line", NOT_RECORDS)
def test_a_line_of_the_metrics_that_is_no_record_is_named(
    finished, tiny_data, tmp_path, refuses, line
):
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_bytes(line + b"\n" + path.read_bytes())
    more = ["--init_from=resume", "--max_steps=10"]
    error = refuses(train.main, *options(tiny_data, tmp_path, *more))
    assert "metrics.jsonl:1: damaged; delete this line" in error


def test_a_folder_of_data_that_is_removed_does_not_turn_a_bad_step_into_an_end(
    tiny_data, tmp_path, monkeypatch, capfd
):
    shutil.copytree(tiny_data / "tiny", tmp_path / "tiny")
    poison(monkeypatch, 6)
    watch = report.Metrics.log_outcome

    def remove(self, *args):
        shutil.rmtree(tmp_path / "tiny", ignore_errors=True)
        return watch(self, *args)

    monkeypatch.setattr(report.Metrics, "log_outcome", remove)
    run = train_tiny(tmp_path, tmp_path, "--follow")
    assert "warning: no texts of the skipped step 4" in capfd.readouterr().out
    assert newest_checkpoint(run / "ckpt").name == "step_00000008"


# -- tokens --


def test_tokens_are_counted_as_they_are_read_when_a_resume_changes_the_batch(
    finished, tiny_data, tmp_path, capsys
):
    shutil.copytree(finished, tmp_path / "run")
    more = ["--batch_tokens=512", "--max_tokens=4096", "--max_steps=0"]
    run = train_tiny(tiny_data, tmp_path, "--init_from=resume", *more)
    tokens = metrics(run, "tokens")
    assert [tokens[step] for step in (7, 8, 9, 12)] == [7 * 256, 8 * 256, 8 * 256 + 512, 4096]
    assert max(tokens) == 12
    assert "length: 12 optimization steps = 4,096 tokens" in capsys.readouterr().out
    epochs = metrics(run, "epoch")
    assert epochs[12] / epochs[8] == pytest.approx(2)


LIMITS = {"max_tokens": 100_000, "max_epochs": 0.37, "max_steps": 50}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_resume_with_the_same_batch_plans_the_same_end(limit):
    end = {limit: LIMITS[limit]}
    cfg = TrainConfig(block_size=64, batch_size=4, batch_tokens=768, **end)
    plan = make_plan(cfg, 1, epoch_tokens=1_000_003)
    for step in range(0, plan.steps, 7):
        again = make_plan(cfg, 1, 1_000_003, step, step * plan.step_tokens // 64)
        assert again.steps == plan.steps
        assert again.tokens_at(plan.steps) == plan.tokens_at(plan.steps)


# -- names that are not UTF-8 --


@pytest.mark.slow
@pytest.mark.parametrize("locale", [{}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
@pytest.mark.parametrize("name", ["模型".encode("gbk"), "模型".encode()])
def test_folders_may_have_any_name(tiny_data, tmp_path, locale, name):
    out = os.path.join(os.fsencode(tmp_path), name)
    train_it = [*options(tiny_data, tmp_path), b"--out_dir=" + out, b"--run_name=" + name]
    environment = os.environ | locale
    run = subprocess.run if locale else warm.run
    for more in ([], ["--init_from=resume", "--max_steps=10"]):
        argv = [sys.executable, str(REPO / "train.py"), *train_it, *more]
        done = run(argv, capture_output=True, env=environment)
        assert done.returncode == 0, done.stderr.decode(errors="replace")
    argv = [sys.executable, str(REPO / "sample.py"), b"--out_dir=" + out, "--device=cpu"]
    done = run([*argv, "--max_new_tokens=3"], capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert b"step_00000010" in done.stderr, done.stderr.decode(errors="replace")


# -- reading while a training prunes --


def test_sampling_takes_the_next_checkpoint_when_one_is_deleted_meanwhile(
    finished, tmp_path, monkeypatch, capsys
):
    shutil.copytree(finished, tmp_path / "run")
    first = newest_checkpoint(tmp_path / "run" / "ckpt")
    read = sample.from_pretrained

    def pruned(folder):
        if folder == first and first.exists():
            assert not runs.discard(first)
        return read(folder)

    monkeypatch.setattr(sample, "from_pretrained", pruned)
    call(sample.main, f"--out_dir={tmp_path}", "--max_new_tokens=3", "--device=cpu")
    assert "step_00000004" in capsys.readouterr().err


# -- flipped bits --


def outcome(folder: Path, data: Path) -> object:
    """Return what sample.py and fine-tuning read from a checkpoint: the weights, the shape and the
    tokens of a text. Return "refused" if they refuse it.
    """
    try:
        source = sample.from_pretrained(folder)
        tokenizer = sample.load_tokenizer(folder)
    except (ValueError, train.UserError):
        return "refused"
    weights = {name: w.numpy().tobytes() for name, w in source.state_dict().items()}
    ids = tokenizer.encode("the loop reads 模型 tokens\n x=1;").tolist()
    return weights, source.config, ids, tokenizer.eos_id, tokenizer.prefix


def test_no_flipped_bit_of_a_checkpoint_loads_as_another_model(finished, tiny_data, tmp_path):
    folder = tmp_path / "step_00000008"
    shutil.copytree(newest_checkpoint(finished / "ckpt"), folder)
    whole = outcome(folder, tiny_data)
    assert whole != "refused"
    rng = random.Random(5)
    files = sorted(folder.iterdir())
    refused = 0
    for number in range(150):
        path = files[number % len(files)]
        content = path.read_bytes()
        harness.flip(path, rng)
        found = outcome(folder, tiny_data)
        refused += found == "refused"
        assert found in ("refused", whole), path
        path.write_bytes(content)
    assert refused > 60  # the other flips are in train_state.pt and other files that are not read


def test_a_changed_meta_json_is_refused(tiny_data, tmp_path, refuses):
    shutil.copytree(tiny_data / "tiny", tmp_path / "tiny")
    path = tmp_path / "tiny" / "meta.json"
    meta = json.loads(path.read_text(encoding="utf-8"))
    splits = meta["splits"] | {"val": meta["splits"]["train"]}
    for changes in ({"vocab_size": 440}, {"eos_id": 0}, {"splits": splits}, {"lengths": {}}):
        path.write_text(json.dumps(meta | changes), encoding="utf-8")
        error = refuses(train.main, *options(tmp_path, tmp_path))
        assert "meta.json: damaged" in error


FOREIGN = [
    {"format_version": 1},
    {"vocab_size": 10**30},
    {"eos_id": 5},  # it never ends a document
    {"dtype": "O"},
    {"dtype": "float64"},
    {"splits": []},
    {"tokenizer": {"kind": "tiktoken", "file": "x", "sha256": "", "special": 5}},
    {"tokenizer": {"kind": "tiktoken", "file": "../x", "sha256": ""}},
]


@pytest.mark.parametrize("changes", FOREIGN, ids=str)
def test_a_meta_json_of_another_program_is_one_line_whatever_hash_it_has(
    tiny_data, tmp_path, refuses, changes
):
    folder = Path(shutil.copytree(tiny_data / "tiny", tmp_path / "tiny"))
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    forge(folder, "meta.json", json.dumps(meta | changes).encode())
    assert str(folder) in refuses(prepare.main, "--inspect", folder)
    assert str(folder) in refuses(train.main, *options(tmp_path, tmp_path))


def test_val_bin_is_verified_before_it_judges_a_model(finished, tiny_data, tmp_path, refuses):
    shutil.copytree(tiny_data / "tiny", tmp_path / "tiny")
    path = tmp_path / "tiny" / "val.bin"
    ids = bytearray(path.read_bytes())
    ids[100] ^= 1  # another valid token id: no other check can notice it
    path.write_bytes(ids)
    ckpt = newest_checkpoint(finished / "ckpt")
    error = refuses(sample.main, f"--ckpt={ckpt}", f"--eval={tmp_path / 'tiny'}", "--device=cpu")
    assert "val.bin: " in error and "it was changed" in error


def test_weights_without_a_finite_loss_are_an_error_of_the_evaluation(
    finished, tiny_data, tmp_path, refuses
):
    folder = spoiled(finished, tmp_path / "large", "model.norm.weight", 3e38)
    error = refuses(sample.main, f"--ckpt={folder}", f"--eval={tiny_data / 'tiny'}", "--device=cpu")
    assert "the loss is nan" in error


def spoiled(run: Path, folder: Path, name: str, value: float) -> Path:
    """Return a copy of a run's newest checkpoint, with a value in one row of a tensor."""
    shutil.copytree(newest_checkpoint(run / "ckpt"), folder)
    weights = load_file(folder / "model.safetensors")
    weights[name][5] = value
    save_file(weights, folder / "model.safetensors")
    forge(folder)
    return folder


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_with_a_number_that_is_not_finite_is_refused_by_the_name_of_the_tensor(
    finished, tiny_data, tmp_path, refuses, value
):
    """Such a run trained to its end and never saved, if the data never use the row."""
    folder = spoiled(finished, tmp_path / "broken", "model.embed_tokens.weight", value)
    train_it = lambda: train_tiny(tiny_data, tmp_path, f"--init_from={folder}")  # noqa: E731
    for main, argv in ((train_it, []), (sample.main, [f"--ckpt={folder}", "--device=cpu"])):
        assert "model.embed_tokens.weight holds NaN or infinity" in refuses(main, *argv)
    assert not (tmp_path / "run").exists()


def test_a_skipped_save_is_a_warning_at_once_and_a_second_one_in_a_row_ends_the_run(
    tiny_data, tmp_path, monkeypatch, capsys
):
    step = torch.optim.AdamW.step
    calls = itertools.count(1)

    def spoil(self, *args, **kwargs):
        step(self, *args, **kwargs)
        if next(calls) in (
            3,
            5,
            6,
        ):  # after step 3 and 5 only; the row of a token that never occurs
            row = self.param_groups[0]["params"][0].data[1]
            row.fill_(math.inf if row.isfinite().all() else 0.0)

    monkeypatch.setattr(torch.optim.AdamW, "step", spoil)
    more = ["--save_every=1", "--max_steps=40", "--eval_every=100"]
    with pytest.raises(UserError, match="ended at step 4 with NaN or infinity in wte.weight"):
        train_tiny(tiny_data, tmp_path, *more)
    said = capsys.readouterr().out
    assert [f"step {n} is not saved: wte.weight" in said for n in (2, 3, 4)] == [False, True, True]
    assert newest_checkpoint(tmp_path / "run" / "ckpt").name == "step_00000002"

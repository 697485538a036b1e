"""A run is never lost, and nothing that train.py did not write is ever deleted."""

import fcntl
import json
import math
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from unittest.mock import Mock

import harness
import pytest
from conftest import call, contents, forge, metrics, same, saved, train_tiny, training
from safetensors.torch import load_file, save_file
from test_faults import ENDLESS, at_step_5, poison, steps_in
from training.runs import newest_run

import prepare
import sample
import train
from configurator import UserError
from hardware.disk import Lock, damage
from text.hf_tokenizer import HF_FILES
from text.tokenizer import SentencePiece, Tiktoken
from training import checkpoint
from training.plan import make_plan
from training.settings import TrainConfig

# -- what is not a run --


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
@pytest.mark.parametrize("init_from", ["scratch", "auto", "resume"])
def test_a_folder_of_others_is_refused_and_kept(trains, tmp_path, refuses, init_from, overwrite):
    project = tmp_path / "proj"
    for name in ("ckpt/weights.pt", "src/main.py", "thesis.tex", "metrics.jsonl"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("precious")
    files = contents(project)
    more = ["--run_name=proj", f"--init_from={init_from}", *overwrite]
    refuses(lambda: trains(*more))
    (project / "metrics.jsonl").unlink()  # now no file has a name that files of a run have
    assert str(project) in refuses(lambda: trains(*more))
    del files["metrics.jsonl"]
    assert contents(project) == files


def test_a_disk_that_is_mounted_as_ckpt_is_no_reason_to_refuse_a_run(trains, tmp_path):
    # Two of these a killed process leaves.
    for name in ("ckpt/.tmp_step_1-0123abcd", "ckpt/lost+found", "metrics_kept.jsonl"):
        (tmp_path / "run" / name).mkdir(parents=True)
    trains("--max_steps=1", "--init_from=auto")


@pytest.mark.parametrize("name", ("ckpt", "ckpt/weights.pt", "ckpt/step_00000001/weights.pt"))
def test_a_ckpt_of_others_is_refused_before_the_run_trains(name, trains, tmp_path, refuses):
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    path.write_text("precious")
    assert "holds 'ckpt' and no run" in refuses(lambda: trains("--overwrite"))
    assert path.read_text() == "precious"


def test_a_resume_records_the_checkpoint_that_a_killed_process_could_not_record(copied, trains):
    """metrics.jsonl says which checkpoints there were: without them, auto must not begin anew."""
    lines = (copied / "metrics.jsonl").read_text().splitlines(keepends=True)
    unsaved = [line for line in lines if '"saved"' not in line and '"ended"' not in line]
    (copied / "metrics.jsonl").write_text("".join(unsaved))
    trains("--init_from=resume", "--max_steps=12")
    assert metrics(copied, "saved") == {8: "step_00000008", 12: "step_00000012"}


def test_what_a_start_that_saved_nothing_has_recorded_is_kept(trains, tmp_path, refuses):
    refuses(lambda: trains("--lr=1e38", "--warmup_ratio=0", "--grad_clip=0"))
    recorded = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    run = trains("--init_from=auto", "--max_steps=1")
    assert (run / "metrics_kept.jsonl").read_bytes() == recorded


# -- --overwrite --


def test_overwrite_moves_an_earlier_run_away_whole(copied, finished, trains, tmp_path, capsys):
    for name in ("notes.txt", "ckpt/step_00000004/model.gguf", "bad/mine.txt", "wandb/x"):
        (copied / name).parent.mkdir(parents=True, exist_ok=True)
        (copied / name).write_text("precious")
    (copied / "ckpt" / "step_00000002").symlink_to(finished / "ckpt" / "step_00000004")
    (tmp_path / "run.old").mkdir()  # somebody's
    files = contents(copied)
    moved = tmp_path / "run.old2"
    run = trains("--overwrite", "--seed=7")
    assert contents(moved) == files and (moved / "ckpt" / "step_00000002").is_symlink()
    assert str(moved) in capsys.readouterr().out
    assert sorted(os.listdir(run)) == ["ckpt", "metrics.jsonl"] and steps_in(run) == ["04", "08"]
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
    files = contents(copied)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train, "save", Mock(side_effect=KeyboardInterrupt))
        trains("--overwrite")
    run = trains(option)
    assert contents(tmp_path / "run.old") == files
    assert contents(run).keys() == files.keys() and metrics(run, "loss").keys() == set(range(1, 9))


@pytest.mark.parametrize("option", ["--overwrite", "--init_from=resume"])
def test_linked_checkpoints_are_refused_and_stay(finished, trains, tmp_path, refuses, option):
    """They would be pruned."""
    theirs = shutil.copytree(finished, tmp_path / "theirs")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ckpt").symlink_to(theirs / "ckpt")
    for _ in range(2):
        error = refuses(lambda: trains(option, "--save_every=2"))
        assert f"{tmp_path}/run/ckpt is a link" in error
        shutil.copy(finished / "metrics.jsonl", tmp_path / "run")  # now it is a run, as it seems
    assert contents(theirs) == contents(finished)


def test_a_run_has_one_writer_whom_the_error_names(trains, tmp_path, refuses):
    held = Lock(tmp_path / "run", "wait")
    for more in ([], ["--overwrite"], ["--init_from=resume"]):
        error = refuses(lambda: trains(*more))  # noqa: B023
        assert f"{tmp_path / 'run'} (process {os.getpid()} on " in error
    held.close()


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_no_file_of_a_run_is_written_through_a_link(copied, trains, tmp_path, link):
    (tmp_path / "thesis.tex").write_text("precious")
    for name in (".metrics.jsonl.tmp", ".loss.png.tmp"):
        link(tmp_path / "thesis.tex", copied / name)
    shutil.rmtree(copied / "ckpt/step_00000008")
    trains("--init_from=resume", "--save_every=100", "--tracker=none")
    assert (copied / "loss.png").read_bytes()
    assert (tmp_path / "thesis.tex").read_text() == "precious"


# -- checkpoints that cannot be seen, or that lie --


def lose_manifests(ckpt: Path) -> None:
    for path in ckpt.glob("*/manifest.json"):
        path.unlink()


def unmount(ckpt: Path) -> None:
    shutil.rmtree(ckpt)
    ckpt.symlink_to("/nowhere/disk")


@pytest.mark.parametrize("hide", [lose_manifests, unmount, shutil.rmtree])
@pytest.mark.parametrize("init_from", ["auto", "resume"])
def test_a_run_of_unseen_checkpoints_is_refused(copied, trains, tmp_path, refuses, hide, init_from):
    hide(copied / "ckpt")
    files = contents(tmp_path)
    assert str(copied) in refuses(lambda: trains(f"--init_from={init_from}"))
    assert contents(tmp_path) == files


def test_a_checkpoint_under_the_number_of_another_costs_nothing(copied, finished, trains):
    shutil.copytree(copied / "ckpt" / "step_00000004", copied / "ckpt" / "step_00000099")
    trains("--init_from=resume")
    assert metrics(copied, "loss") == metrics(finished, "loss")
    assert steps_in(copied) == ["04", "08", "08_kept", "99_kept"]


def test_a_resume_deletes_what_a_kill_left_half_written_or_half_deleted(trains):
    run = trains("--max_steps=4")
    left = run / "ckpt" / ".tmp_step_00000012-0123abcd"
    shutil.copytree(run / "ckpt" / "step_00000004", left)
    (left / "manifest.json").unlink()
    precious = shutil.copytree(left, f"{left}.mine")
    left.with_name(".tmp_step_00000001-0123abcd").symlink_to(precious)
    trains("--init_from=resume")
    assert not left.exists() and Path(precious, "config.json").exists()


# -- one writer --


def test_the_lock_is_on_a_file_that_is_open_for_writing(tmp_path):
    """NFS forwards such a lock to its server, but none on a folder."""
    held = Lock(tmp_path / "out" / "run", "wait")
    with open(tmp_path / "out" / "run" / ".lock", "r+b") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    held.close()
    assert os.listdir(tmp_path) == []


def test_a_disk_without_locks_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(37, "No locks available")))
    Lock(tmp_path, "wait").close()
    assert "no locks" in capsys.readouterr().err


def test_a_lock_that_somebody_else_wrote_stays_as_it_is(tmp_path):
    (tmp_path / ".lock").write_text("mine")
    with pytest.raises(UserError, match=".lock is not a file"):
        Lock(tmp_path, "wait")
    assert (tmp_path / ".lock").read_text() == "mine"


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


def test_a_moved_run_saves_nothing_in_the_place_of_another(trains, tmp_path, monkeypatch, refuses):
    """The lock went with the folder. Two runs in one place would prune each other's checkpoints."""
    locks = []

    def move_and_take() -> None:
        (tmp_path / "run").rename(tmp_path / "moved")
        locks.append(Lock(tmp_path / "run", "wait"))

    at_step_5(monkeypatch, move_and_take)
    assert "another process" in refuses(trains)
    locks[0].close()
    assert not (tmp_path / "run").exists()  # nothing was written there


def put_in_its_place(run: Path, other: Path) -> None:
    run.rename(run.with_name("moved"))
    other.rename(run)


def link_in_its_place(run: Path, other: Path) -> None:
    run.rename(run.with_name("moved"))
    run.symlink_to(other)


def link_its_checkpoints(run: Path, other: Path) -> None:
    (run / "ckpt").rename(run.with_name("moved"))
    (run / "ckpt").symlink_to(other / "ckpt")


@pytest.mark.parametrize("swap", [put_in_its_place, link_in_its_place, link_its_checkpoints])
def test_another_run_that_takes_the_place_of_one_that_trains_stays_as_it_is(
    finished, trains, tmp_path, monkeypatch, refuses, swap
):
    other = Path(shutil.copytree(finished, tmp_path / "other"))
    files = contents(other)
    at_step_5(monkeypatch, lambda: swap(tmp_path / "run", other))
    refuses(trains)
    assert contents(other if other.exists() else tmp_path / "run") == files


def test_a_checkpoint_that_another_process_wrote_is_kept_beside_ours(finished, trains, monkeypatch):
    """On a disk whose locks do not meet."""
    put_in_place = checkpoint.put_in_place

    def late(draft: Path, target: Path, *name_aside: str) -> Path | None:
        assert checkpoint.temporary(target) != draft  # the other process writes to another folder
        shutil.copytree(finished / "ckpt" / "step_00000004", target)
        return put_in_place(draft, target, *name_aside)

    monkeypatch.setattr(checkpoint, "put_in_place", late)
    run = trains("--seed=7")
    assert steps_in(run) == ["04", "04_kept", "08", "08_kept"]
    assert not any(damage(path) for path in (run / "ckpt").iterdir())
    theirs = (finished / "ckpt/step_00000004/model.safetensors").read_bytes()
    for name, is_theirs in (("step_00000004", False), ("step_00000004_kept", True)):
        assert ((run / "ckpt" / name / "model.safetensors").read_bytes() == theirs) == is_theirs


# -- signals --


def test_a_signal_gives_a_step_up_and_the_end_is_the_same(finished, trains, tmp_path, monkeypatch):
    """A step may take hours on a laptop. Its micro-steps so far are lost, and no more."""

    def interrupt(loss):
        os.kill(os.getpid(), signal.SIGTERM)
        return loss

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        poison(patch, 10, change=interrupt)  # in the first of the two micro-steps of step 6
        trains()
    assert ended.value.code == 128 + signal.SIGTERM
    assert saved(tmp_path / "run").name == "step_00000005"
    run = trains("--init_from=resume")
    assert metrics(run, "loss") == metrics(finished, "loss") and same(run, finished)


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


def link_it(folder: Path, tmp_path: Path) -> None:
    folder.rename(tmp_path / "archive")
    folder.symlink_to(tmp_path / "archive")


def add_a_chat_template(folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").write_text("precious")


def add_a_folder_that_the_manifest_lists(folder: Path, tmp_path: Path) -> None:
    (folder / "average").mkdir()
    forge(folder, "average/config.json", b"{}")


def edit_it(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{}")


def average_its_weights(folder: Path, tmp_path: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-4] + b"mean")


CHANGES = [link_it, add_a_chat_template, add_a_folder_that_the_manifest_lists, edit_it]


@pytest.mark.parametrize("change", [*CHANGES, average_its_weights])
def test_pruning_spares_what_somebody_changed_and_says_so(copied, trains, tmp_path, capsys, change):
    folder = copied / "ckpt" / "step_00000004"
    backup = shutil.copytree(folder, f"{folder}_backup")
    change(folder, tmp_path)
    files = contents(folder), contents(Path(backup))
    trains("--max_steps=16", "--init_from=resume", "--keep=1", "--eval_every=100")
    assert (contents(folder), contents(Path(backup))) == files
    assert steps_in(copied) == ["04", "04_backup", "12", "16"]  # the last is the best, too
    assert capsys.readouterr().err.count("step_00000004 is kept: ") == 1


def test_every_file_that_came_with_a_tokenizer_is_known_to_be_ours():
    assert {SentencePiece.file, Tiktoken.file, *HF_FILES} < checkpoint.OUR_FILES


# -- a terminal, a pipe or a disk that goes away --


@pytest.mark.slow
@pytest.mark.parametrize("streams", [">/dev/full 2>&1", "<&- >&- 2>&-", "| head -n1"])
def test_a_training_needs_no_output(tiny_data, tmp_path, streams):
    argv = training(1, tiny_data, tmp_path)
    assert subprocess.run(["sh", "-c", f'"$@" {streams}', "sh", *argv]).returncode == 0
    assert metrics(tmp_path / "run", "loss").keys() == set(range(1, 9))
    assert saved(tmp_path / "run").name == "step_00000008"


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


# -- metrics.jsonl --


def save_in_an_editor(path: Path) -> None:
    while '"saved"' not in path.read_text():  # a thread appends that step 4 is saved
        time.sleep(0.01)
    shutil.copy(path, path.parents[1] / "new")
    os.replace(path.parents[1] / "new", path)


def move_its_folder(path: Path) -> None:
    path.parent.rename(path.parents[1] / "moved")


def save_an_older_state(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:99])


def link_it_to_a_diary(path: Path) -> None:
    diary, link = (path.parents[1] / name for name in ("diary", "link"))
    diary.write_text("mine")
    link.symlink_to(diary)
    os.replace(link, path)  # at once: a thread may just be writing that step 4 is saved


MEDDLE = [os.unlink, save_in_an_editor, move_its_folder, save_an_older_state, link_it_to_a_diary]


@pytest.mark.parametrize("meddle", MEDDLE)
def test_metrics_that_vanish_are_written_again(trains, tmp_path, monkeypatch, capsys, meddle):
    at_step_5(monkeypatch, lambda: meddle(tmp_path / "run" / "metrics.jsonl"))
    run = trains()
    assert metrics(run, "loss").keys() == set(range(1, 9)) and "08" in steps_in(run)
    warned = "all of it is written again" in capsys.readouterr().out
    assert warned == (meddle is not save_in_an_editor)
    if meddle in (save_an_older_state, link_it_to_a_diary):
        kept = (run / "metrics_kept.jsonl").read_bytes()
        assert kept == b"mine" or len(kept) == 99


@pytest.mark.parametrize("end", [{"max_tokens": 100_000}, {"max_epochs": 0.37}, {"max_steps": 50}])
def test_a_resume_with_the_same_batch_plans_the_same_end(end):
    cfg = TrainConfig(block_size=64, batch_size=4, batch_tokens=768, **end)
    plan = make_plan(cfg, 1, epoch_tokens=1_000_003)
    for step in range(0, plan.steps, 7):
        again = make_plan(cfg, 1, 1_000_003, step, step * plan.step_tokens // 64)
        assert again.steps == plan.steps
        assert again.tokens_at(plan.steps) == plan.tokens_at(plan.steps)


# -- flipped bits, and files of other programs --


def test_no_flipped_bit_of_a_checkpoint_loads_as_another_model(copied, refuses):
    folder = saved(copied)
    rng = random.Random(5)
    for name in 12 * ("config.json", "model.safetensors", "meta.json", "tokenizer.model"):
        content = (folder / name).read_bytes()
        harness.flip(folder / name, rng)
        refuses(sample.main, f"--ckpt={folder}", "--device=cpu")
        (folder / name).write_bytes(content)


def test_no_meta_json_leads_out_of_its_folder_though_its_hash_is_right(own_data, tmp_path, refuses):
    meta = json.loads((own_data / "meta.json").read_text(encoding="utf-8"))
    meta["tokenizer"] |= {"file": "../x", "sha256": ""}
    shutil.copyfile(own_data / "tokenizer.model", tmp_path / "x")
    for files in ({}, {"../x": ""}):
        meta["tokenizer"]["files"] = files
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
    assert not (tmp_path / "run").exists()

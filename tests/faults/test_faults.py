"""A few seeded rounds of harness.py, which can do hundreds, and faults that need a closer look."""

import itertools
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import warm
from conftest import REPO, TINY, call, forge, metrics, torchrun, train_tiny
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
import harness

import prepare
import train
from hardware.disk import damage
from model import GPT
from training import checkpoint
from training.huggingface import from_pretrained
from training.metrics import spike
from training.runs import newest_checkpoint


@pytest.mark.slow
def test_killed_signalled_and_damaged_runs_end_identical(tmp_path, monkeypatch):
    """The undisturbed runs, for comparison, start cold, and those of 2 ranks under torchrun."""
    monkeypatch.setattr(harness, "Popen", warm.Popen)
    monkeypatch.setattr(harness, "LIFE", 1.5)
    rounds = harness.soak(4, seed=1, parallel=1, root=tmp_path, jobs=["bf16", "2 processes"])
    assert all(r.identical and not r.traceback for r in rounds), [r.faults for r in rounds]


ENDLESS = ["--max_steps=100000", "--save_every=100000", "--eval_every=100000"]


def options(data: Path, out: Path, *more: str) -> list[str]:
    return [*TINY, f"--data_dir={data}", f"--out_dir={out}", *more]


@pytest.fixture(scope="module")
def finished(tiny_data, tmp_path_factory) -> Path:
    return train_tiny(tiny_data, tmp_path_factory.mktemp("finished"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["flip a byte", "cut a file", "lose a file"])
def test_a_damaged_file_of_a_checkpoint_is_named_and_the_one_before_is_taken(
    finished, tiny_data, tmp_path, fault, capsys
):
    names = sorted(p.name for p in newest_checkpoint(finished / "ckpt").iterdir())
    for name in names:
        out = tmp_path / name
        shutil.copytree(finished, out / "run")
        path = newest_checkpoint(out / "run" / "ckpt") / name
        data = path.read_bytes()
        if fault == "lose a file":
            path.unlink()
        elif fault == "cut a file":
            path.write_bytes(data[: len(data) // 2])
        else:
            path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
        run = train_tiny(tiny_data, out, "--init_from=resume")
        said = capsys.readouterr().out
        assert "at step 4" in said, name
        # A folder without a manifest is not a checkpoint, so it is not a damaged one either.
        if name != "manifest.json" or fault != "lose a file":
            assert "warning: " in said and "damaged; taking" in said, name
            assert name in said or "manifest.json" in said, name
        assert metrics(run, "loss") == metrics(finished, "loss")


def test_when_all_checkpoints_are_damaged_nothing_is_overwritten(
    finished, tiny_data, tmp_path, refuses
):
    shutil.copytree(finished, tmp_path / "run")
    for path in (tmp_path / "run" / "ckpt").glob("*/model.safetensors"):
        os.truncate(path, 100)
    before = sorted(p.name for p in (tmp_path / "run" / "ckpt").rglob("*"))
    for how in ("resume", "auto"):
        error = refuses(train.main, *options(tiny_data, tmp_path, f"--init_from={how}"))
        assert "model.safetensors" in error
    assert sorted(p.name for p in (tmp_path / "run" / "ckpt").rglob("*")) == before


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "meta.json", "tokenizer.model"])
def test_a_damaged_data_set_is_found_before_the_first_step(tiny_data, tmp_path, refuses, name):
    shutil.copytree(tiny_data / "tiny", tmp_path / "tiny")
    path = tmp_path / "tiny" / name
    data = path.read_bytes()
    flipped = b"[]" if name == "meta.json" else data[:1001] + bytes([data[1001] ^ 1]) + data[1002:]
    for content in (data[: len(data) // 2], flipped, None):
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        error = refuses(train.main, *options(tmp_path, tmp_path / "out"))
        assert name in error or "no data set in" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fault", ["zeros", "touched", "replaced", "deleted"])
def test_data_that_change_in_place_during_a_run_end_it_at_the_next_save(
    tiny_data, tmp_path, monkeypatch, refuses, fault
):
    """They were trained on. A file that was touched, replaced or deleted is read as it was."""
    shutil.copytree(tiny_data / "tiny", tmp_path / "tiny")
    path = tmp_path / "tiny" / "train.bin"
    take_step = train.take_step
    calls = itertools.count(1)

    def change(*args, **kwargs):
        if next(calls) == 6:
            if fault == "zeros":
                with open(path, "r+b") as file:
                    file.write(bytes(1000))
            elif fault == "touched":
                os.utime(path)
            elif fault == "replaced":
                (tmp_path / "new").write_bytes(b"\1\0" * 500)
                (tmp_path / "new").rename(path)
            else:
                path.unlink()
        return take_step(*args, **kwargs)

    monkeypatch.setattr(train, "take_step", change)
    run = tmp_path / "run"
    if fault == "zeros":
        error = refuses(train.main, *options(tmp_path, tmp_path))
        assert str(path) in error and newest_checkpoint(run / "ckpt").name == "step_00000004"
    else:
        train_tiny(tmp_path, tmp_path)
        assert newest_checkpoint(run / "ckpt").name == "step_00000008"


@pytest.mark.slow
def test_a_data_file_that_is_cut_while_it_is_read_is_explained(tiny_data, tmp_path):
    """The system ends the process with SIGBUS, which said nothing."""
    shutil.copytree(tiny_data / "tiny", tmp_path / "tiny")
    process = launch(1, tmp_path, tmp_path, *ENDLESS)
    harness.wait_for(process, lambda: harness.steps_done(tmp_path) >= 2)
    os.truncate(tmp_path / "tiny" / "train.bin", 100)
    assert process.wait(timeout=60) == 2
    assert "cut short" in process.communicate()[1]


@pytest.mark.parametrize("name", ["samples", "best_val_loss", "data_files"])
def test_a_train_state_of_another_program_is_one_line(finished, tiny_data, tmp_path, refuses, name):
    shutil.copytree(finished, tmp_path / "run")
    folder = newest_checkpoint(tmp_path / "run" / "ckpt")
    state = torch.load(folder / "train_state.pt", weights_only=True)
    torch.save(state | {name: [None]}, folder / "train_state.pt")
    forge(folder)
    error = refuses(train.main, *options(tiny_data, tmp_path, "--init_from=resume"))
    assert name in error


def test_data_that_changed_under_a_run_is_refused_and_other_settings_are_reported(
    finished, tiny_data, tmp_path, refuses, capsys
):
    from conftest import make_records, write_jsonl

    shutil.copytree(finished, tmp_path / "run")
    corpus = write_jsonl(tmp_path / "other.jsonl", make_records(301))
    to_prepare = ["--input", corpus, "--name=tiny", f"--data_dir={tmp_path}", "--val_fraction=0.1"]
    call(prepare.main, *to_prepare, f"--tokenizer={tiny_data / 'tiny' / 'tokenizer.model'}")
    error = refuses(train.main, *options(tmp_path, tmp_path, "--init_from=resume"))
    assert "was trained with other data: " in error
    assert "train.bin is " in error and "(SHA-256)" in error
    other = ["--vocab_size=400", "--drop_control", "--train_mb=1", "--min_tokens=60"]
    call(prepare.main, *to_prepare, *other)
    error = refuses(train.main, *options(tmp_path, tmp_path, "--init_from=resume"))
    assert "tokenizer is" in error
    capsys.readouterr()
    more = ["--init_from=resume", "--max_steps=10", "--lr=0.001", "--batch_size=2"]
    call(train.main, *options(tiny_data, tmp_path, *more))
    said = capsys.readouterr().out
    changed = "batch_size 4 -> 2, max_steps 8 -> 10, lr 0.003 -> 0.001"
    assert f"\nchanged since the checkpoint: {changed}\n" in said
    assert metrics(tmp_path / "run", "loss").keys() == set(range(1, 11))


def test_another_batch_goes_on_with_the_next_window(finished, tiny_data, tmp_path, capsys):
    """The place in the data is counted in windows, so that none is left out or read twice."""
    shutil.copytree(finished, tmp_path / "run")
    train_tiny(tiny_data, tmp_path, "--init_from=resume", "--batch_tokens=512", "--max_steps=10")
    capsys.readouterr()
    for step, first, count in ((8, 56, 8), (9, 64, 16), (10, 80, 16)):
        call(prepare.main, "--inspect", tmp_path / "run", f"--step={step}")
        said = capsys.readouterr().out
        assert f"---- sample {first}: " in said and said.count("---- sample") == count


@pytest.mark.slow
def test_another_number_of_processes_goes_on_with_the_same_windows(finished, tiny_data, tmp_path):
    """Two processes continue after step 4: all ranks have one place in the data together."""
    name = "step_00000004"
    shutil.copytree(finished / "ckpt" / name, tmp_path / "run" / "ckpt" / name)
    shutil.copy(finished / "metrics.jsonl", tmp_path / "run")
    run = torchrun(2, tiny_data, tmp_path, "--init_from=resume", run=warm.run)
    assert metrics(run, "loss") == pytest.approx(metrics(finished, "loss"), rel=1e-5)
    assert metrics(run, "val_loss") == pytest.approx(metrics(finished, "val_loss"), rel=1e-5)
    assert metrics(run, "first_sample") == {0: 0, 4: 32}
    assert metrics(run, "step_samples") == {0: 8, 4: 8}


def test_settings_that_are_changed_on_resume_take_effect(finished, tiny_data, tmp_path):
    sizes = {}
    for decay in (0.1, 30.0):
        shutil.copytree(finished, tmp_path / f"{decay}" / "run")
        more = ["--init_from=resume", "--max_steps=12", f"--weight_decay={decay}"]
        train_tiny(tiny_data, tmp_path / f"{decay}", *more)
        model = from_pretrained(newest_checkpoint(tmp_path / f"{decay}" / "run" / "ckpt"))
        sizes[decay] = model.wte.weight.norm().item()
    assert sizes[30.0] < 0.95 * sizes[0.1]


# -- signals --


def launch(n: int, data: Path, out: Path, *options: str, launcher="", start=warm.Popen):
    """Start a training; return its process. torchrun itself starts it if `launcher` has options."""
    launch = f"-m torch.distributed.run --standalone --nproc_per_node={n} {launcher}".split()
    argv = [sys.executable, *(launch if n > 1 else []), str(REPO / "train.py"), *TINY]
    argv += [f"--data_dir={data}", f"--out_dir={out}", *options]
    return (subprocess.Popen if launcher else start)(argv, stdout=-1, stderr=-1, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_saves_the_step_and_ends_with_its_code(tiny_data, tmp_path, number):
    process = launch(1, tiny_data, tmp_path, *ENDLESS)
    harness.wait_for(process, lambda: harness.steps_done(tmp_path) >= 20)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Traceback" not in err, err
    folder = newest_checkpoint(tmp_path / "run" / "ckpt")
    done = int(folder.name[5:])
    assert not damage(folder)
    assert metrics(tmp_path / "run", "loss").keys() == set(range(1, done + 1))
    assert f"stopped by a signal after step {done}: --init_from=resume goes on from {folder}" in out


@pytest.mark.slow
def test_one_rank_told_to_stop_stops_all_after_the_same_step(tiny_data, tmp_path):
    process = launch(2, tiny_data, tmp_path, *ENDLESS)
    harness.wait_for(process, lambda: harness.steps_done(tmp_path) >= 20)
    os.kill(harness.workers(process)[1], signal.SIGUSR1)  # rank 1 alone
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    folder = newest_checkpoint(tmp_path / "run" / "ckpt")
    assert not damage(folder) and int(folder.name[5:]) == max(metrics(tmp_path / "run", "loss"))


@pytest.mark.slow
def test_torchrun_restarts_a_killed_rank_and_no_step_is_missing(tiny_data, tmp_path):
    more = ["--max_steps=60", "--batch_size=2", "--save_every=10", "--eval_every=20"]
    whole = train_tiny(tiny_data, tmp_path / "whole", *more)
    more += ["--init_from=auto"]
    process = launch(2, tiny_data, tmp_path, *more, launcher="--max_restarts=1")
    harness.wait_for(process, lambda: harness.steps_done(tmp_path) >= 25)
    os.kill(harness.workers(process)[1], signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "resumed from" in out
    assert metrics(tmp_path / "run", "loss") == pytest.approx(metrics(whole, "loss"), rel=1e-3)


@pytest.mark.slow
def test_torchrun_hands_the_warning_of_slurm_to_all_ranks(tiny_data, tmp_path):
    hand_on = "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1"
    process = launch(2, tiny_data, tmp_path, *ENDLESS, launcher=hand_on)
    harness.wait_for(process, lambda: harness.steps_done(tmp_path) >= 20)
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=60)
    folder = newest_checkpoint(tmp_path / "run" / "ckpt")
    assert not damage(folder)
    assert f"stopped by a signal after step {int(folder.name[5:])}" in out


@pytest.mark.slow
def test_two_processes_never_write_one_run(tiny_data, tmp_path, refuses):
    """When torchrun is killed, its workers go on training, and may meet those of a new torchrun."""
    process = launch(1, tiny_data, tmp_path, *ENDLESS, "--save_every=5", start=subprocess.Popen)
    harness.wait_for(process, lambda: newest_checkpoint(tmp_path / "run" / "ckpt"))
    for how in ("--overwrite", "--init_from=resume"):
        error = refuses(train.main, *options(tiny_data, tmp_path, how, "--max_steps=100000"))
        assert f"another process is writing {tmp_path}/run" in error
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0].count("stopped by a signal") == 1


# -- losses and gradients that are not finite --


def poison(monkeypatch, *bad_calls: int, value: float = float("nan")) -> None:
    """Multiply the loss of these micro-steps by `value`, like a bad batch or a broken kernel."""
    forward = GPT.forward
    calls = itertools.count()

    def broken(self, idx, targets=None, *args, **kwargs):
        loss = forward(self, idx, targets, *args, **kwargs)
        if self.training and next(calls) in bad_calls:
            return loss * value
        return loss

    monkeypatch.setattr(GPT, "forward", broken)


def test_the_best_weights_are_saved_though_the_step_before_their_evaluation_was_bad(
    tiny_data, tmp_path, monkeypatch
):
    poison(monkeypatch, 6, 7)  # step 4, after which the first evaluation is the best so far
    run = train_tiny(tiny_data, tmp_path, "--save_every=100")
    assert metrics(run, "bad_steps") == {4: 1}
    assert metrics(run, "saved").keys() == {4, 8}


def test_a_step_that_is_not_finite_is_skipped_counted_and_its_texts_are_kept(
    tiny_data, tmp_path, monkeypatch, capsys
):
    poison(monkeypatch, 5)  # the second micro-step of step 3
    run = train_tiny(tiny_data, tmp_path, "--follow")
    said = capsys.readouterr().out
    assert "step 3/8 | warning: loss nan, norm of the gradient nan: skipped" in said
    assert metrics(run, "loss").keys() == {1, 2, 4, 5, 6, 7, 8}
    assert metrics(run, "bad_steps") == {3: 1}
    model = from_pretrained(newest_checkpoint(run / "ckpt"))
    assert all(torch.isfinite(p).all() for p in model.parameters())
    text = (run / "bad_steps" / "step_00000003.txt").read_text()
    call(prepare.main, "--inspect", run, "--step=3")
    shown = capsys.readouterr().out
    assert text.count("---- sample") == 8
    assert all(part.strip() in text for part in shown.split("---- ")[1:])


def test_too_many_bad_steps_in_a_row_end_the_run_and_leave_the_last_good_checkpoint(
    tiny_data, tmp_path, monkeypatch, refuses
):
    poison(monkeypatch, *range(10, 1000), value=float("inf"))  # from step 6 on
    more = ["--max_steps=50", "--save_every=1", "--max_bad_steps=4"]
    error = refuses(train.main, *options(tiny_data, tmp_path, *more))
    message = "4 steps in a row without a finite loss and gradient, the last at step 9: lower lr"
    assert message in error
    kept = sorted(p.name for p in (tmp_path / "run" / "ckpt").iterdir())
    # The good ones before, the best (step 8 still has the weights of step 5, which are better than
    # those of step 4), and the last. No good one was pruned for the last.
    assert kept == [f"step_{step:08d}" for step in (3, 4, 5, 8, 9)]
    weights = [load_file(tmp_path / "run" / "ckpt" / name / "model.safetensors") for name in kept]
    good, _, last = weights[2:]
    assert all(torch.equal(last[k], good[k]) for k in good)  # the bad steps changed nothing


@pytest.mark.slow
def test_the_fp16_scalers_own_skips_are_told_apart_and_its_state_is_resumed(
    tiny_data, tmp_path, monkeypatch, capsys
):
    """This is fp16 on the CPU, which train.py would refuse. The scaler does the same there."""
    scaler = partial(torch.amp.GradScaler, init_scale=2.0**40, growth_interval=3)
    monkeypatch.setattr("hardware.machine.pick_dtype", lambda *_: (torch.float16, "for this test"))
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    more = ["--max_steps=40", "--save_every=30", "--eval_every=100"]
    whole = train_tiny(tiny_data, tmp_path / "whole", *more)
    said = capsys.readouterr().out
    skipped = metrics(whole, "loss_scale")
    assert len(skipped) > 5 and "warning" not in said
    assert "fp16 overflow: skipped, the loss is scaled by " in said
    assert metrics(whole, "loss").keys() == set(range(1, 41)) - skipped.keys()
    assert not metrics(whole, "bad_steps")
    shutil.copytree(whole / "ckpt" / "step_00000030", tmp_path / "run" / "ckpt" / "step_00000030")
    shutil.copy(whole / "metrics.jsonl", tmp_path / "run")
    resumed = train_tiny(tiny_data, tmp_path, *more, "--init_from=resume")
    for key in ("loss", "loss_scale"):
        assert metrics(resumed, key) == metrics(whole, key)


def test_a_run_that_began_in_another_dtype_goes_on_in_fp16(tiny_data, tmp_path, monkeypatch):
    """It may move from an A100 to a V100. The checkpoint of the A100 has no state of a scaler."""
    train_tiny(tiny_data, tmp_path, "--max_steps=8")
    monkeypatch.setattr("hardware.machine.pick_dtype", lambda *_: (torch.float16, "for this test"))
    run = train_tiny(tiny_data, tmp_path, "--max_steps=12", "--init_from=resume")
    assert newest_checkpoint(run / "ckpt").name == "step_00000012" and 12 in metrics(run, "loss")


def test_an_fp16_run_whose_gradient_overflows_at_every_scale_ends(
    tiny_data, tmp_path, monkeypatch, refuses
):
    forward = GPT.forward

    def broken(self, *args, **kwargs):
        loss = forward(self, *args, **kwargs)
        if loss.requires_grad:
            loss.register_hook(lambda grad: grad * float("inf"))
        return loss

    monkeypatch.setattr(GPT, "forward", broken)
    monkeypatch.setattr("hardware.machine.pick_dtype", lambda *_: (torch.float16, "for this test"))
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=8.0))
    more = ["--max_steps=30", "--max_bad_steps=4"]
    error = refuses(train.main, *options(tiny_data, tmp_path, *more))
    # Only the scaler treats the first overflows. Those at a scale of 1 count as bad steps.
    assert metrics(tmp_path / "run", "loss_scale") == {1: 4, 2: 2, 3: 1}
    assert "4 steps in a row without a finite loss and gradient, the last at step 7" in error


@pytest.mark.slow
def test_a_leap_of_the_loss_is_a_warning(tiny_data, tmp_path, monkeypatch, capsys):
    poison(monkeypatch, 2 * 45, value=3.0)
    run = train_tiny(tiny_data, tmp_path, "--max_steps=60", "--eval_every=100", "--lr=1e-4")
    assert metrics(run, "spike_z").keys() == {46} and "deviations high" in capsys.readouterr().out


def test_the_robust_z_score_is_that_of_the_formula():
    losses = [float(i % 7) for i in range(70)]  # median 3; deviations from it 0 to 3, with median 2
    assert spike(losses, 13.0) == pytest.approx(10 / (1.4826 * 2))
    assert spike(losses[:29], 1e9) == 0.0


# -- the disk, the memory --


@pytest.mark.slow
def test_a_full_disk_while_saving_does_not_end_the_training(tiny_data, tmp_path):
    """A limit on the size of files stands for a full disk. Only the weights are larger than it."""

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))

    argv = [sys.executable, str(REPO / "train.py"), *options(tiny_data, tmp_path)]
    done = subprocess.run(argv, preexec_fn=limit, capture_output=True, text=True)
    assert done.stdout.count("could not be written") == 2, done.stdout
    assert "training goes on" in done.stdout, done.stdout
    assert metrics(tmp_path / "run", "loss").keys() == set(range(1, 9))
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1 and "make room" in done.stderr, done.stderr
    assert not list((tmp_path / "run" / "ckpt").glob("*"))


def test_a_failed_save_leaves_the_checkpoint_before_it_and_the_next_one_is_written(
    tiny_data, tmp_path, monkeypatch, capsys
):
    save = torch.save
    calls = itertools.count()

    def full(*args, **kwargs):
        if next(calls) == 1:
            raise OSError(28, "No space left on device")
        save(*args, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    run = train_tiny(tiny_data, tmp_path, "--save_every=2", "--eval_every=100")
    said = capsys.readouterr().out
    assert "step_00000004 could not be written (No space left on device); training goes on" in said
    kept = sorted(p.name for p in (run / "ckpt").iterdir())
    assert kept == ["step_00000002", "step_00000006", "step_00000008"]


def test_an_old_checkpoint_that_cannot_be_deleted_is_no_failed_save(
    tiny_data, tmp_path, monkeypatch, capsys
):
    def fail(path):
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(checkpoint, "discard", fail)
    run = train_tiny(tiny_data, tmp_path, "--save_every=2", "--eval_every=100", "--keep=1")
    said = capsys.readouterr().out
    assert "an older checkpoint could not be deleted" in said and "could not be written" not in said
    assert len(list((run / "ckpt").iterdir())) == 4


def test_saving_does_not_stop_the_training(tiny_data, tmp_path, monkeypatch):
    """Training goes on during a save, and the checkpoint holds the state of its own step."""
    save = torch.save
    went_on = []

    def after_another_step(state, path):
        if not went_on:  # only for the first of two checkpoints: no step follows the last one
            before = metrics(tmp_path / "run", "loss")
            until = time.monotonic() + 60
            while metrics(tmp_path / "run", "loss") == before and time.monotonic() < until:
                time.sleep(0.01)
            went_on.append(metrics(tmp_path / "run", "loss") != before)
        save(state, path)

    monkeypatch.setattr(torch, "save", after_another_step)
    more = ["--save_every=4", "--eval_every=100", "--keep=9"]
    run = train_tiny(tiny_data, tmp_path, *more)
    assert went_on == [True]
    monkeypatch.undo()
    quick = train_tiny(tiny_data, tmp_path / "quick", *more)
    for step in ("step_00000004", "step_00000008"):
        slow_one, quick_one = (r / "ckpt" / step / "model.safetensors" for r in (run, quick))
        assert slow_one.read_bytes() == quick_one.read_bytes()


def test_a_folder_that_cannot_be_written_is_one_line(tiny_data, tmp_path, refuses):
    (tmp_path / "out").write_text("a file where the folder would be")
    error = refuses(train.main, *options(tiny_data, tmp_path / "out"))
    assert "out" in error and "Not a directory" in error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_out_of_memory_says_which_flags_would_fit(tiny_data, tmp_path, monkeypatch, refuses, error):
    def forward(*args, **kwargs):
        raise error

    monkeypatch.setattr(GPT, "forward", forward)
    said = refuses(train.main, *options(tiny_data, tmp_path))
    fits = "try --batch_size=2 --batch_tokens=256 (more micro-steps, the same training)"
    assert f"out of memory at batch_size=4: {fits}" in said
    said = refuses(train.main, *options(tiny_data, tmp_path, "--batch_size=1", "--overwrite"))
    assert "try --block_size=16, or a smaller model" in said


def test_no_code_in_a_checkpoint_is_ever_run(finished, tiny_data, tmp_path, refuses):
    shutil.copytree(finished, tmp_path / "run")

    class Evil:
        def __reduce__(self):
            return (Path(tmp_path / "pwned").write_text, ("x",))

    folder = newest_checkpoint(tmp_path / "run" / "ckpt")
    torch.save({"step": 8, "optimizer": Evil()}, folder / "train_state.pt")
    forge(folder)
    error = refuses(train.main, *options(tiny_data, tmp_path, "--init_from=resume"))
    assert "cannot be read" in error and not (tmp_path / "pwned").exists()

"""A few seeded rounds of harness.py, which can do hundreds, and faults that need a closer look."""

import itertools
import math
import os
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import harness
import pytest
import torch
import warm
from conftest import forge, make_records, metrics, prepared, same, saved, train_tiny, training
from safetensors.torch import load_file

import prepare
from hardware.disk import damage
from model import GPT
from text import dataset
from text.dataset import open_datasets
from training.huggingface import from_pretrained


@pytest.mark.slow
def test_killed_signalled_and_damaged_runs_end_identical(tmp_path, monkeypatch):
    """The undisturbed runs, for comparison, start cold, and those of 2 ranks under torchrun."""
    monkeypatch.setattr(harness, "Popen", warm.Popen)
    monkeypatch.setattr(harness, "LIFE", 1.5)
    rounds = harness.soak(1, seed=1, parallel=1, root=tmp_path, jobs=["packed"])  # 2 ranks, bf16
    assert all(r.identical and not r.problem for r in rounds), [r.faults for r in rounds]


ENDLESS = ["--max_steps=100000", "--save_every=100000", "--eval_every=100000"]


def steps_in(run: Path) -> list[str]:
    """Return what is in the folder of the checkpoints, without the zeros of the numbers."""
    return sorted(path.name.replace("step_000000", "") for path in (run / "ckpt").iterdir())


FILES = ["model.safetensors", "train_state.pt", "manifest.json", "train_config.json"]


@pytest.mark.parametrize("name, fault", [*zip(FILES, itertools.cycle(harness.DAMAGE))])
def test_a_damaged_file_is_named_and_the_save_before_it_taken(
    finished, copied, trains, capsys, name, fault
):
    harness.hurt(saved(copied) / name, fault, random.Random(3))
    trains("--init_from=resume")
    out, err = capsys.readouterr()
    assert "at step 4" in out and (name in err or "manifest.json" in err)
    assert metrics(copied, "loss") == metrics(finished, "loss")


@pytest.mark.parametrize("fault", harness.DAMAGE)
@pytest.mark.parametrize("name", ["train.bin", "val.bin", "meta.json", "tokenizer.model"])
def test_a_damaged_data_set_is_found_before_any_step(own_data, tmp_path, refuses, name, fault):
    harness.hurt(own_data / name, fault, random.Random(3))
    error = refuses(lambda: train_tiny(tmp_path, tmp_path))
    assert name in error or "no data set in" in error
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def reverse(path: Path) -> None:
    """Put another text of the same size and time in the place of a file."""
    before = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def reverse_a_copy(path: Path) -> None:
    shutil.copy2(path, path.with_suffix(".copy"))
    reverse(path.with_suffix(".copy"))
    path.with_suffix(".copy").replace(path)


def punch(path: Path) -> None:
    """Make the second half of a file a hole, and give the file an old time."""
    size = path.stat().st_size
    os.truncate(path, size // 2)
    os.truncate(path, size)
    os.utime(path, (0, 0))


@pytest.mark.parametrize("change", [reverse, reverse_a_copy, punch])
@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
@pytest.mark.parametrize("starts_before", [0, 1])
def test_other_data_of_the_same_size_are_found_at_a_start(
    own_data, tmp_path, refuses, change, name, starts_before
):
    for _ in range(starts_before):
        open_datasets("tiny", tmp_path, hashes=True)
    change(own_data / name)
    assert name in refuses(lambda: train_tiny(tmp_path, tmp_path))


def test_a_data_set_is_hashed_once_and_again_when_copied(own_data, tmp_path, monkeypatch):
    hashed = Mock(wraps=dataset.verify)
    monkeypatch.setattr(dataset, "verify", hashed)

    def hashes() -> int:
        hashed.reset_mock()
        open_datasets("tiny", tmp_path, hashes=True)
        return hashed.call_count

    assert [hashes(), hashes()] == [2, 0]
    shutil.copytree(own_data, tmp_path / "copy")
    shutil.rmtree(own_data)
    (tmp_path / "copy").rename(own_data)
    assert [hashes(), hashes()] == [2, 0]
    (own_data / ".verified.json").write_text("[]")
    read_only = Mock(side_effect=OSError(30, "Read-only file system"))
    monkeypatch.setattr(dataset, "atomic_write", read_only)
    assert [hashes(), hashes()] == [2, 2]


def test_a_strange_train_state_is_one_line_and_runs_no_code(copied, trains, tmp_path, refuses):
    class Evil:
        def __reduce__(self):
            return (Path(tmp_path / "pwned").write_text, ("x",))

    folder = saved(copied)
    state = torch.load(folder / "train_state.pt", weights_only=True)
    strange = [("samples", [None]), ("samples", -1), ("best_val_loss", "1"), ("losses", ["a"])]
    contents = [(name, state | {name: value}) for name, value in strange]
    contents += [("train_state.pt", [state]), ("train_state.pt", state | {"optimizer": Evil()})]
    for name, content in contents:
        torch.save(content, folder / "train_state.pt")
        forge(folder)
        assert name in refuses(lambda: trains("--init_from=resume"))
    torch.save(state, folder / "train_state.pt")
    forge(folder, "meta.json", b"{}")
    assert "meta.json" in refuses(lambda: trains("--init_from=resume"))
    assert not (tmp_path / "pwned").exists()


def test_data_that_changed_under_a_run_are_refused_by_name(copied, tiny_data, tmp_path, refuses):
    records = [*make_records(300, seed=5), {"text": "gradient " * 99}]
    prepared(tmp_path, records, f"--tokenizer={tiny_data / 'tiny' / 'tokenizer.model'}")
    resume = partial(train_tiny, tmp_path, tmp_path, "--init_from=resume")
    error = refuses(resume)
    assert "tiny/train.bin" in error and "tiny/val.bin" in error and "tokenizer" not in error
    prepared(tmp_path, records)
    assert "tokenizer" in refuses(resume)


def test_another_batch_goes_on_with_the_next_window(copied, trains, prints):
    """The place in the data is counted in windows, so that none is left out or read twice."""
    trains("--init_from=resume", "--batch_tokens=512", "--max_tokens=4096", "--max_steps=0")
    for step, first, count in ((8, 56, 8), (9, 64, 16), (10, 80, 16)):
        shown = prints(prepare.main, "--inspect", copied, f"--step={step}")
        assert f"---- sample {first}: " in shown and shown.count("---- sample") == count
    tokens, epochs = metrics(copied, "tokens"), metrics(copied, "epoch")
    assert [tokens[step] for step in (7, 8, 9, 12)] == [7 * 256, 8 * 256, 8 * 256 + 512, 4096]
    assert max(tokens) == 12 and epochs[12] / epochs[8] == pytest.approx(2)


def test_an_epoch_is_a_pass_over_the_windows_of_now(copied, trains):
    """pad has another number of windows in an epoch than stream."""
    trains("--init_from=resume", "--documents=pad", "--max_epochs=0.3", "--max_steps=0")
    epochs = metrics(copied, "epoch")
    assert epochs[9] > 1.1 * epochs[8] * 9 / 8
    assert epochs[max(epochs)] == pytest.approx(0.3, abs=epochs[10] - epochs[9])


# -- signals --


def launch(n: int, data: Path, out: Path, *more: str) -> warm.Popen:
    """Start a training of n processes. Return its process, or the one that stands for torchrun."""
    return warm.Popen(training(n, data, out, *more), stdout=-1, stderr=-1, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_a_signal_saves_the_step_and_ends_with_its_code(tiny_data, tmp_path, name):
    number = signal.Signals[name]
    process = launch(1, tiny_data, tmp_path, *ENDLESS)
    harness.wait_for(process, lambda: harness.steps_done(tmp_path) >= 20)
    process.send_signal(number)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 128 + number and "Traceback" not in err, err
    folder = saved(tmp_path / "run")
    done = int(folder.name[5:])
    assert not damage(folder)
    assert metrics(tmp_path / "run", "loss").keys() == set(range(1, done + 1))


@pytest.mark.slow
def test_one_rank_told_to_stop_stops_all_after_the_same_step(tiny_data, tmp_path):
    process = launch(2, tiny_data, tmp_path, *ENDLESS)
    harness.wait_for(process, lambda: harness.steps_done(tmp_path) >= 20)
    os.kill(harness.workers(process)[1], signal.SIGUSR1)  # rank 1 alone
    _, err = process.communicate(timeout=240)
    assert process.returncode != 0
    folder = saved(tmp_path / "run")
    assert not damage(folder) and int(folder.name[5:]) == max(metrics(tmp_path / "run", "loss"))


# -- losses and gradients that are not finite --


def poison(monkeypatch, *bad_calls: int, change=lambda loss: loss * math.nan) -> None:
    """Change the loss of these micro-steps, like a bad batch or a broken kernel."""
    forward = GPT.forward
    calls = itertools.count()

    def broken(self, idx, targets=None, *args, **kwargs):
        loss = forward(self, idx, targets, *args, **kwargs)
        if self.training and next(calls) in bad_calls:
            return change(loss)
        return loss

    monkeypatch.setattr(GPT, "forward", broken)


def test_the_best_weights_are_saved_after_a_bad_step(trains, monkeypatch):
    poison(monkeypatch, 6, 7)  # step 4, after which the first evaluation is the best so far
    run = trains("--save_every=100")
    assert metrics(run, "bad_steps") == {4: 1}
    assert metrics(run, "saved").keys() == {4, 8}


def test_a_bad_step_is_skipped_and_counted_and_can_be_read(trains, monkeypatch, capsys, prints):
    poison(monkeypatch, 5)  # the second micro-step of step 3
    run = trains()
    assert "step 3/8 | warning: loss nan" in capsys.readouterr().out
    assert metrics(run, "loss").keys() == {1, 2, 4, 5, 6, 7, 8}
    assert metrics(run, "bad_steps") == {3: 1}
    assert all(p.isfinite().all() for p in from_pretrained(saved(run)).parameters())
    assert prints(prepare.main, "--inspect", run, "--step=3").count("---- sample") == 8


def test_too_many_bad_steps_end_a_run_that_can_go_on(
    trains, tmp_path, monkeypatch, refuses, evaluates
):
    evaluates({4: 3.0, 8: 2.0, 12: 1.0})
    poison(monkeypatch, *range(10, 18), change=lambda loss: loss * math.inf)  # steps 6 to 9
    monkeypatch.setattr("training.plan.MAX_BAD_STEPS", 4)
    more = ["--max_steps=12", "--save_every=1"]
    assert "4 steps in a row" in refuses(lambda: trains(*more))
    # The good ones before, the best (step 8 still has the weights of step 5), and the last. No good
    # one was pruned for the last.
    assert steps_in(tmp_path / "run") == ["03", "04", "05", "08", "09"]
    kept = sorted((tmp_path / "run" / "ckpt").iterdir())
    good, _, last = [load_file(path / "model.safetensors") for path in kept[2:]]
    assert all(torch.equal(last[k], good[k]) for k in good)  # the bad steps changed nothing
    run = trains(*more, "--init_from=resume")
    assert metrics(run, "loss").keys() == {*range(1, 6), 10, 11, 12}


@pytest.fixture
def in_fp16(monkeypatch) -> None:
    """fp16 on the CPU, which train.py would refuse. The scaler does the same there."""
    monkeypatch.setattr("hardware.machine.pick_dtype", lambda *_: (torch.float16, "for this test"))


@pytest.mark.slow
def test_fp16_skips_are_told_apart_and_the_scaler_is_resumed(in_fp16, trains, monkeypatch, capsys):
    scaler = partial(torch.amp.GradScaler, init_scale=2.0**40, growth_interval=3)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    more = ["--max_steps=40", "--save_every=30", "--eval_every=100"]
    run = trains(*more)
    printed = capsys.readouterr().out
    loss, skipped = (metrics(run, key) for key in ("loss", "loss_scale"))
    assert len(skipped) > 5 and "warning" not in printed and "fp16 overflow" in printed
    assert loss.keys() == set(range(1, 41)) - skipped.keys() and not metrics(run, "bad_steps")
    shutil.rmtree(run / "ckpt" / "step_00000040")
    trains(*more, "--init_from=resume")
    assert (metrics(run, "loss"), metrics(run, "loss_scale")) == (loss, skipped)


def test_a_run_that_began_in_another_dtype_goes_on_in_fp16(copied, in_fp16, trains):
    """It may move from an A100 to a V100. The checkpoint of the A100 has no state of a scaler."""
    trains("--max_steps=12", "--init_from=resume")
    assert saved(copied).name == "step_00000012"


def test_fp16_that_overflows_at_every_scale_ends(in_fp16, trains, tmp_path, monkeypatch, refuses):
    def overflow(loss: torch.Tensor) -> torch.Tensor:
        loss.register_hook(lambda grad: grad * math.inf)
        return loss

    poison(monkeypatch, *range(60), change=overflow)
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=8.0))
    monkeypatch.setattr("training.plan.MAX_BAD_STEPS", 4)
    error = refuses(lambda: trains("--max_steps=30"))
    # Only the scaler treats the first overflows. Those at a scale of 1 count as bad steps.
    assert metrics(tmp_path / "run", "loss_scale") == {1: 4, 2: 2, 3: 1}
    assert "4 steps in a row" in error and "step 7" in error


# -- the disk, the memory --


def test_a_failed_save_is_a_warning_and_the_next_one_is_made(trains, monkeypatch, capsys):
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(torch, "save", Mock(side_effect=[None, full, None, None]))
    run = trains("--save_every=2", "--eval_every=100")
    assert "step_00000004 could not be written" in capsys.readouterr().out
    assert steps_in(run) == ["02", "06", "08"]


def test_saving_does_not_stop_the_training(finished, trains, tmp_path, monkeypatch):
    """Training goes on during a save, and the checkpoint holds the state of its own step."""
    save = torch.save

    def after_another_step(state, file):
        assert any(harness.steps_done(tmp_path) >= 5 or time.sleep(0.1) for _ in range(600))
        save(state, file)

    monkeypatch.setattr(torch, "save", after_another_step)
    run = trains()
    for step in ("step_00000004", "step_00000008"):
        slow_one, quick_one = (r / "ckpt" / step / "model.safetensors" for r in (run, finished))
        assert slow_one.read_bytes() == quick_one.read_bytes()


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
def test_out_of_memory_says_which_flags_would_fit(trains, monkeypatch, refuses, kind):
    def runs_out(*args, **kwargs):
        raise kind("can't allocate memory: you tried")

    monkeypatch.setattr(GPT, "forward", runs_out)
    assert "--batch_size=2 --batch_tokens=256" in refuses(trains)
    assert "--block_size=16" in refuses(lambda: trains("--batch_size=1", "--overwrite"))


def run_out_above(monkeypatch, largest: int) -> None:
    """Let the model run out of memory with more sequences than `largest`."""
    forward = GPT.forward

    def limited(self, idx, *args, **kwargs):
        if idx.size(0) > largest:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, idx, *args, **kwargs)

    monkeypatch.setattr(GPT, "forward", limited)


def test_batch_size_auto_halves_what_does_not_fit(trains, monkeypatch, tmp_path, refuses):
    two = trains("--batch_size=2").rename(tmp_path / "two")
    run_out_above(monkeypatch, 2)
    assert same(trains("--batch_size=auto"), two)
    run_out_above(monkeypatch, 0)
    assert "out of memory" in refuses(lambda: trains("--batch_size=auto", "--overwrite"))

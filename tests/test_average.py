"""The setting `average`: the mean that it keeps, and the folder out/RUN/average that it writes."""

import itertools
import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import warm
from conftest import TINY, call, metrics, torchrun, train_tiny
from safetensors.torch import load_file
from test_memory import on_meta, shape
from test_model import make
from torch.utils._pytree import keystr, tree_flatten_with_path

import sample
import train
from hardware.disk import damage
from training import checkpoint
from training.average import Average
from training.memory import Step, always_held
from training.resume import read_training
from training.runs import replace_run

# Every step is saved, so that a test can compute the mean from the checkpoints.
AVERAGE = ["--average=0.5", "--dropout=0.1", "--save_every=1", "--keep=9"]


@pytest.fixture(scope="module")
def averaged(tiny_data, tmp_path_factory) -> Path:
    """A run of 8 steps, with a mean over about 4 of them."""
    return train_tiny(tiny_data, tmp_path_factory.mktemp("averaged"), *AVERAGE)


def options(data: Path, out: Path, *more: str) -> list[str]:
    return [*TINY, f"--data_dir={data}", f"--out_dir={out}", *more]


def step(run: Path, number: int, place: str = "ckpt") -> Path:
    return run / place / f"step_{number:08d}"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# -- what the mean is --


def mean_by_hand(weights: list[dict], span: float) -> dict[str, torch.Tensor]:
    """The mean of the weights after each step: first plain, after `span` steps exponential."""
    mean: dict[str, torch.Tensor] = {}
    for n, now in enumerate(weights, 1):
        share = 1 / min(n, max(1, span))
        mean = {k: (1 - share) * mean.get(k, w) + share * w for k, w in now.items()}
    return mean


def near(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert found.keys() == want.keys()
    for name, mean in found.items():
        torch.testing.assert_close(mean, want[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("span", [4, 2.4, 100, 0.3])
def test_the_average_is_the_mean_that_the_formula_says(span):
    model = make("llama")
    average = Average(model, span)
    past = []
    for _ in range(10):
        with torch.no_grad():
            for p in model.parameters():
                p += torch.randn_like(p)
        past.append({k: p.detach().clone() for k, p in model.named_parameters()})
        average.follow()
    near(average.weights, mean_by_hand(past, span))
    if span == 100:  # the plain mean
        near(average.weights, {k: sum(w[k] for w in past) / 10 for k in past[0]})
    if span == 0.3:  # the weights themselves
        assert all(torch.equal(w, past[-1][k]) for k, w in average.weights.items())


def test_the_average_of_a_run_is_that_of_the_weights_after_its_steps(averaged):
    past = [weights(step(averaged, n)) for n in range(1, 9)]
    near(weights(step(averaged, 8, "average")), mean_by_hand(past, 4))


def test_the_model_has_its_own_weights_again_after_it_had_the_mean():
    model = make("llama", tie_embeddings=True)
    average = Average(model, 10)
    own, mean = ({k: torch.randn_like(p) for k, p in model.named_parameters()} for _ in range(2))
    model.load_state_dict(own, strict=False)
    average.weights = {k: w.clone() for k, w in mean.items()}
    with pytest.raises(ZeroDivisionError), average.in_the_model():
        assert all(torch.equal(p, mean[k]) for k, p in model.named_parameters())
        raise ZeroDivisionError  # an error in the evaluation
    assert all(torch.equal(p, own[k]) for k, p in model.named_parameters())
    assert all(torch.equal(w, mean[k]) for k, w in average.weights.items())


def test_an_average_changes_nothing_of_the_training(averaged, tiny_data, tmp_path):
    run = train_tiny(tiny_data, tmp_path, *AVERAGE, "--average=0")
    assert not (run / "average").exists()
    for n in range(1, 9):
        pair = [contents(step(r, n)) for r in (run, averaged)]
        assert pair[0].keys() == pair[1].keys()
        assert pair[0]["model.safetensors"] == pair[1]["model.safetensors"]
    for key in ("loss", "grad_norm", "val_loss"):
        assert metrics(run, key) == metrics(averaged, key)
    assert "average" not in read_training(step(run, 8)).training
    assert not metrics(run, "val_loss_average")
    best = [read_training(step(r, 8)).training["best_step"] for r in (run, averaged)]
    assert best[0] == best[1]


def test_a_bad_step_counts_the_weights_before_it_once_more(tiny_data, tmp_path, monkeypatch):
    forward = train.GPT.forward
    calls = itertools.count()

    def broken(self, idx, targets=None, *args, **kwargs):
        loss = forward(self, idx, targets, *args, **kwargs)
        bad = self.training and next(calls) in (10, 11)  # step 6
        return loss * math.nan if bad else loss

    monkeypatch.setattr(train.GPT, "forward", broken)
    run = train_tiny(tiny_data, tmp_path, *AVERAGE)
    assert metrics(run, "bad_steps") == {6: 1} and not step(run, 6).exists()
    past = [weights(step(run, n)) for n in (1, 2, 3, 4, 5, 5, 7, 8)]
    near(weights(step(run, 8, "average")), mean_by_hand(past, 4))


@pytest.mark.slow
def test_two_processes_with_muon_train_and_average_as_one(tiny_data, tmp_path):
    more = ["--batch_size=2", "--average=0.5", "--optimizer=muon"]
    one = train_tiny(tiny_data, tmp_path / "1", *more)
    two = torchrun(2, tiny_data, tmp_path / "2", *more, run=warm.run)
    key = "val_loss_average"
    assert metrics(two, key) == pytest.approx(metrics(one, key), rel=1e-3)
    for place in ("ckpt", "average"):
        pair = [weights(step(run, 8, place)) for run in (one, two)]
        assert max((w - pair[1][k]).abs().max().item() for k, w in pair[0].items()) < 1e-3


# -- resume --


def test_resume_with_an_average_is_bit_identical(averaged, tiny_data, tmp_path):
    shutil.copytree(averaged, tmp_path / "run")
    for n in (6, 7, 8):
        shutil.rmtree(step(tmp_path / "run", n))
    run = train_tiny(tiny_data, tmp_path, *AVERAGE, "--init_from=resume")
    for place in ("ckpt", "average"):
        pair = [weights(step(r, 8, place)) for r in (run, averaged)]
        assert all(torch.equal(w, pair[1][name]) for name, w in pair[0].items())
    pair = [read_training(step(r, 8)).training["average"] for r in (run, averaged)]
    assert pair[0]["steps"] == pair[1]["steps"] == 8
    assert all(torch.equal(w, pair[1]["weights"][k]) for k, w in pair[0]["weights"].items())
    for key in ("loss", "val_loss", "val_loss_average"):
        assert metrics(run, key) == metrics(averaged, key)


def test_an_average_that_is_switched_on_later_begins_there(tiny_data, tmp_path, capsys):
    saves = ["--save_every=1", "--keep=9", "--schedule=constant"]
    train_tiny(tiny_data, tmp_path, *saves, "--max_steps=4")
    more = [*saves, "--max_steps=6", "--init_from=resume", "--average=1"]
    run = train_tiny(tiny_data, tmp_path, *more)
    said = capsys.readouterr().out
    assert "note: the checkpoint holds no average: it begins with the next step" in said
    assert "average 0.0 -> 1.0" in said
    last = [weights(step(run, n)) for n in (5, 6)]
    for name, mean in weights(step(run, 6, "average")).items():
        torch.testing.assert_close(mean, (last[0][name] + last[1][name]) / 2)


def test_an_average_that_is_switched_off_is_dropped_and_its_folders_stay(
    averaged, tiny_data, tmp_path
):
    shutil.copytree(averaged, tmp_path / "run")
    before = contents(tmp_path / "run" / "average")
    more = [*AVERAGE, "--average=0", "--max_steps=10", "--init_from=resume"]
    run = train_tiny(tiny_data, tmp_path, *more)
    assert "average" not in read_training(step(run, 10)).training
    assert metrics(run, "val_loss_average").keys() == {4, 8}
    assert contents(run / "average") == before


def test_averages_of_later_steps_stay_until_the_run_comes_there(averaged, tiny_data, tmp_path):
    run = shutil.copytree(averaged, tmp_path / "run")
    for n in (6, 7, 8):
        shutil.rmtree(step(run, n))
    train_tiny(tiny_data, tmp_path, *AVERAGE, "--init_from=resume", "--max_steps=6")
    assert sorted(os.listdir(run / "average")) == [f"step_{n:08d}" for n in (5, 6, 7, 8)]
    train_tiny(tiny_data, tmp_path, *AVERAGE, "--init_from=resume")
    assert sorted(os.listdir(run / "average")) == [f"step_{n:08d}" for n in (7, 8)]


def test_the_last_average_is_written_by_a_resume_if_a_kill_came_before_it(
    averaged, tiny_data, tmp_path, capsys
):
    shutil.copytree(averaged, tmp_path / "run")
    target = step(tmp_path / "run", 8, "average")
    for left in (".tmp_step_00000008-0123abcd", ".step_00000006.old"):  # half written, half deleted
        shutil.copytree(target, target.with_name(left))
    shutil.rmtree(target)
    train_tiny(tiny_data, tmp_path, *AVERAGE, "--init_from=resume")
    assert "nothing is left to do" in capsys.readouterr().out
    assert contents(target) == contents(step(averaged, 8, "average"))
    assert sorted(os.listdir(target.parent)) == ["step_00000007", "step_00000008"]


# -- what is reported and saved --


def test_the_average_is_a_model_folder_that_sample_py_opens(averaged, tiny_data, tmp_path, capsys):
    assert sorted(os.listdir(averaged / "average")) == ["step_00000007", "step_00000008"]
    folder = step(averaged, 8, "average")
    of_training = {"train_state.pt", "train_config.json"}
    files = contents(folder)
    beside = contents(step(averaged, 8))
    assert not damage(folder) and files.keys() == beside.keys() - of_training
    differ = {name for name, content in files.items() if content != beside[name]}
    assert differ == {"model.safetensors", "manifest.json"}
    capsys.readouterr()
    call(sample.main, f"--ckpt={folder}", "--max_new_tokens=3", "--device=cpu")
    assert str(folder) in capsys.readouterr().err
    call(sample.main, f"--out_dir={averaged.parent}", "--max_new_tokens=3", "--device=cpu")
    assert str(step(averaged, 8)) in capsys.readouterr().err  # without --ckpt: the run's checkpoint
    tuned = train_tiny(tiny_data, tmp_path, f"--init_from={folder}", "--max_steps=1")
    assert metrics(tuned, "loss")[1] < 5.7


def test_the_loss_of_the_average_is_that_of_the_saved_model(averaged, tiny_data, capsys):
    for place, key in (("ckpt", "val_loss"), ("average", "val_loss_average")):
        to_eval = [f"--eval={tiny_data / 'tiny'}", "--block_size=32", "--dtype=float32"]
        call(sample.main, f"--ckpt={step(averaged, 8, place)}", *to_eval, "--device=cpu")
        said = re.search(r"validation loss ([0-9.]+)", capsys.readouterr().out)
        assert float(said[1]) == pytest.approx(metrics(averaged, key)[8], abs=1e-4)


def test_the_log_line_and_the_records_have_the_loss_on_each_data_set(tiny_data, tmp_path, capsys):
    for name in ("tiny", "other"):
        shutil.copytree(tiny_data / "tiny", tmp_path / name)
    more = ["--dataset=tiny:0.5,other:0.5", "--average=0.5", "--max_steps=4"]
    run = train_tiny(tmp_path, tmp_path, *more)
    of_all = metrics(run, "val_loss_average")[4]
    of_each = [metrics(run, f"val_loss_average/{name}")[4] for name in ("tiny", "other")]
    assert of_all == pytest.approx(sum(of_each) / 2)
    assert f" | averaged weights {of_all:.4f}\n" in capsys.readouterr().out


def test_an_average_that_cannot_be_written_is_a_warning(tiny_data, tmp_path, monkeypatch, capsys):
    save = checkpoint.save_pretrained

    def full(c, state, folder, *args):
        if folder.path.parent.name == "average":
            raise OSError(28, "No space left on device")
        save(c, state, folder, *args)

    monkeypatch.setattr(checkpoint, "save_pretrained", full)
    run = train_tiny(tiny_data, tmp_path, "--average=0.5")
    said = capsys.readouterr().out
    for n in (4, 8):
        failed = f"warning: {step(run, n, 'average')} could not be written (No space left on"
        assert failed in said and not damage(step(run, n))
    assert not os.listdir(run / "average")
    monkeypatch.undo()
    train_tiny(tiny_data, tmp_path, "--average=0.5", "--init_from=resume")
    assert not damage(step(run, 8, "average"))


def test_an_old_average_that_cannot_be_deleted_is_a_warning(
    tiny_data, tmp_path, monkeypatch, capsys
):
    def fail(*args):
        raise train.UserError("cannot look for checkpoints: Input/output error")

    monkeypatch.setattr(checkpoint, "averages", fail)
    run = train_tiny(tiny_data, tmp_path, "--average=0.5")
    assert "could not be deleted (cannot look for checkpoints" in capsys.readouterr().out
    assert not damage(step(run, 8, "average"))


# -- files of others --


def put_foreign_files(run: Path) -> dict[str, bytes]:
    """Put files of other programs into average/, also under names that averages of a run have."""
    place = run / "average"
    mine = ["notes.txt", "mine/model.pt", "step_best/x", "step_00000004_backup/config.json"]
    mine += [".mine", "replaced-1/step_00000004/config.json"]
    # An average that somebody else has computed: it has no manifest.
    mine += ["step_00000002/model.safetensors", "step_00000002/config.json"]
    for name in mine:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("precious")
    return {name: b"precious" for name in mine}


def test_foreign_files_in_average_stay(tiny_data, tmp_path, capsys):
    run = train_tiny(tiny_data, tmp_path, "--average=0.5", "--max_steps=4")
    mine = put_foreign_files(run)
    (step(run, 4, "average") / "model.gguf").write_text("precious")
    step(run, 8, "average").mkdir()
    (step(run, 8, "average") / "model.safetensors").write_text("precious")
    shutil.copytree(step(run, 4, "average"), tmp_path / "archive")
    step(run, 3, "average").symlink_to(tmp_path / "archive")
    archive = contents(tmp_path / "archive")
    train_tiny(tiny_data, tmp_path, "--average=0.5", "--max_steps=16", "--init_from=resume")
    found = contents(run / "average")
    assert {name: found[name] for name in mine} == mine
    assert found["step_00000004/model.gguf"] == b"precious" and not damage(step(run, 4, "average"))
    assert found["step_00000008_kept-1/model.safetensors"] == b"precious"
    assert step(run, 3, "average").is_symlink() and contents(tmp_path / "archive") == archive
    ours = [p.parent.name for p in (run / "average").glob("step_*/manifest.json")]
    assert sorted(ours) == [f"step_{n:08d}" for n in (3, 4, 12, 16)]
    assert capsys.readouterr().out.count("step_00000004 is kept: it holds model.gguf") == 1


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_overwrite_moves_averages_aside_and_deletes_only_those(
    averaged, tiny_data, tmp_path, share, capsys
):
    run = shutil.copytree(averaged, tmp_path / "run")
    mine = put_foreign_files(run)
    (step(run, 7, "average") / "model.gguf").write_text("precious")
    step(run, 3, "average").symlink_to(Path("..") / ".." / "archive")
    shutil.copytree(step(run, 8, "average"), tmp_path / "archive")
    train_tiny(tiny_data, tmp_path, "--overwrite", "--seed=7", f"--average={share}")
    found = contents(run / "average")
    assert {name: found[name] for name in mine} == mine
    assert os.listdir(step(run, 3, "average")) == os.listdir(tmp_path / "archive")
    aside = run / "average" / "replaced-2"  # replaced-1 is somebody's
    assert sorted(os.listdir(aside)) == ["step_00000007", "why-this-is-here.txt"]
    assert found["replaced-2/step_00000007/model.gguf"] == b"precious"
    assert "step_00000007 is kept: it holds model.gguf" in capsys.readouterr().out
    assert step(run, 8, "average").exists() == (share > 0)


def test_overwrite_leaves_no_empty_folder_of_averages(averaged, tiny_data, tmp_path):
    shutil.copytree(averaged, tmp_path / "run")
    run = train_tiny(tiny_data, tmp_path, "--overwrite", "--max_steps=1")
    assert sorted(os.listdir(run)) == ["ckpt", "loss.png", "metrics.jsonl"]


def test_a_run_that_was_killed_while_it_replaced_another_begins_again(
    averaged, tiny_data, tmp_path
):
    run = shutil.copytree(averaged, tmp_path / "run")
    replace_run(run)  # and a kill before the new run has written anything
    half_deleted = run / "average" / "replaced-1" / ".step_00000007.old"
    shutil.copytree(step(averaged, 7, "average"), half_deleted)
    train_tiny(tiny_data, tmp_path, "--average=0.5", "--init_from=auto")
    assert not list(run.rglob("replaced-*")) and len(os.listdir(run / "average")) == 2


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
@pytest.mark.parametrize("how", ["scratch", "auto", "resume"])
def test_averages_without_their_run_are_refused_and_stay(
    averaged, tiny_data, tmp_path, refuses, how, overwrite
):
    """They may be somebody's, or all that is left of a run."""
    shutil.copytree(averaged / "average", tmp_path / "run" / "average")
    before = contents(tmp_path)
    more = ["--average=0.5", f"--init_from={how}", *overwrite]
    error = refuses(train.main, *options(tiny_data, tmp_path, *more))
    assert "is not the folder of a run" in error or "there is no checkpoint in" in error
    assert contents(tmp_path) == before


@pytest.mark.parametrize("what", ["a file", "a broken link"])
def test_something_else_called_average_stays_and_costs_only_the_averages(
    tiny_data, tmp_path, capsys, what
):
    run = train_tiny(tiny_data, tmp_path, "--max_steps=1")
    if what == "a file":
        (run / "average").write_text("precious")
    else:
        (run / "average").symlink_to("/nowhere/disk")
    train_tiny(tiny_data, tmp_path, "--max_steps=2", "--init_from=resume", "--average=0.5")
    assert not damage(step(run, 2))
    assert "average/step_00000002 could not be written" in capsys.readouterr().out
    train_tiny(tiny_data, tmp_path, "--max_steps=3", "--overwrite")
    assert sorted(os.listdir(run / "ckpt")) == ["step_00000003"]
    if what == "a file":
        assert (run / "average").read_text() == "precious"
    else:
        assert os.readlink(run / "average") == "/nowhere/disk"


# -- memory --


def test_an_average_takes_4_bytes_a_parameter():
    model = on_meta(shape("llama", 8000, 256))
    P = sum(p.numel() for p in model.parameters())
    without, kept = (always_held(model, Step(1, 64, average=a)) for a in (False, True))
    assert kept.pop("average") == 4 * P and kept == without


def test_an_average_is_a_share_of_the_run(tiny_data, tmp_path, refuses):
    for share in ("1.5", "-0.1"):
        error = refuses(train.main, *options(tiny_data, tmp_path, f"--average={share}"))
        assert "average must be between 0 and 1" in error
    run = train_tiny(tiny_data, tmp_path, "--average=0.5", "--max_steps=1")
    settings = json.loads((step(run, 1) / "train_config.json").read_text())
    assert settings["average"] == 0.5


def leaves(path: Path) -> tuple[list[torch.Tensor], list]:
    """Return the tensors of a .pt file, and everything else in it with its place."""
    found, _ = tree_flatten_with_path(torch.load(path, weights_only=True))
    tensors = [x for _, x in found if isinstance(x, torch.Tensor)]
    return tensors, [(keystr(at), x) for at, x in found if not isinstance(x, torch.Tensor)]


def test_without_memory_for_a_copy_the_same_files_are_written(
    averaged, tiny_data, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(checkpoint, "room", lambda needed: 0.0)
    run = train_tiny(tiny_data, tmp_path, *AVERAGE)
    assert capsys.readouterr().out.count("no memory for a copy of weights and optimizer") == 1
    for place in ("ckpt", "average"):
        found, expected = (contents(folder / place) for folder in (run, averaged))
        assert found.keys() == expected.keys()
        for path, content in found.items():
            name = Path(path).name
            if name == "train_state.pt":
                tensors, others = leaves(run / place / path)
                expected_tensors, expected_others = leaves(averaged / place / path)
                assert others == expected_others and len(tensors) == len(expected_tensors)
                assert all(map(torch.equal, tensors, expected_tensors)), path
            elif name not in ("manifest.json", "train_config.json"):  # they name the out_dir
                assert content == expected[path], path

"""The setting `average`: the mean that it keeps, and the folder average/ in each checkpoint."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import call, metrics, train_tiny
from safetensors.torch import load_file
from test_model import make

import sample
from hardware.disk import damage
from training.average import Average
from training.checkpoint import read_training

# Every step is saved, so that a test can compute the mean from the checkpoints.
AVERAGE = ["--average=0.5", "--dropout=0.1", "--save_every=1", "--keep=9"]


@pytest.fixture(scope="module")
def averaged(tiny_data, tmp_path_factory) -> Path:
    """A run of 8 steps, with a mean over about 4 of them."""
    return train_tiny(tiny_data, tmp_path_factory.mktemp("averaged"), *AVERAGE)


@pytest.fixture
def copied(averaged, tmp_path) -> Path:
    """A copy of it, tmp_path/run."""
    return shutil.copytree(averaged, tmp_path / "run")


def step(run: Path, number: int) -> Path:
    return run / "ckpt" / f"step_{number:08d}"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


# -- what the mean is --


def mean_by_hand(weights: list[dict], span: float) -> dict[str, torch.Tensor]:
    """The mean of the weights after each step: first plain, after `span` steps exponential."""
    mean: dict[str, torch.Tensor] = {}
    for n, after in enumerate(weights, 1):
        share = 1 / min(n, max(1, span))
        mean = {k: (1 - share) * mean.get(k, w) + share * w for k, w in after.items()}
    return mean


def near(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-5)


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
    for n in range(1, 9):
        pair = [(step(r, n) / "model.safetensors").read_bytes() for r in (run, averaged)]
        assert pair[0] == pair[1] and not (step(run, n) / "average").exists()
    for key in ("loss", "grad_norm", "val_loss"):
        assert metrics(run, key) == metrics(averaged, key)
    plain, other = (read_training(step(r, 8)).training for r in (run, averaged))
    assert "average" not in plain and plain["best_step"] == other["best_step"]
    assert not metrics(run, "val_loss_average")


# -- resume --


@pytest.mark.parametrize("damaged", [False, True])
def test_resume_with_an_average_is_bit_identical(averaged, copied, tiny_data, tmp_path, damaged):
    """A damaged average makes its checkpoint a damaged one: that before it is taken."""
    shutil.rmtree(step(copied, 8))
    if damaged:
        path = step(copied, 7) / "average" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    train_tiny(tiny_data, tmp_path, *AVERAGE, "--init_from=resume")
    for name in ("model.safetensors", "average/model.safetensors"):
        assert (step(copied, 8) / name).read_bytes() == (step(averaged, 8) / name).read_bytes()
    pair = [read_training(step(r, 8)).training["average"] for r in (copied, averaged)]
    assert pair[0]["steps"] == pair[1]["steps"] == 8
    assert all(torch.equal(w, pair[1]["weights"][k]) for k, w in pair[0]["weights"].items())
    for key in ("loss", "val_loss", "val_loss_average"):
        assert metrics(copied, key) == metrics(averaged, key)


def test_an_average_that_is_switched_on_later_begins_there(tiny_data, tmp_path, capsys):
    saves = ["--save_every=1", "--keep=9", "--schedule=constant"]
    train_tiny(tiny_data, tmp_path, *saves, "--max_steps=4")
    more = [*saves, "--max_steps=6", "--init_from=resume", "--average=1"]
    run = train_tiny(tiny_data, tmp_path, *more)
    printed = capsys.readouterr().out
    assert "holds no average" in printed and "average 0.0 -> 1.0" in printed
    past = [weights(step(run, n)) for n in (5, 6)]
    near(weights(step(run, 6) / "average"), mean_by_hand(past, 2))


def test_an_average_that_is_switched_off_is_dropped(copied, tiny_data, tmp_path):
    train_tiny(tiny_data, tmp_path, "--average=0", "--max_steps=10", "--init_from=resume")
    assert "average" not in read_training(step(copied, 10)).training
    assert metrics(copied, "val_loss_average").keys() == {4, 8}
    assert [n for n in range(1, 11) if (step(copied, n) / "average").exists()] == [*range(1, 9)]


# -- what is reported and saved --


def test_the_average_is_a_model_folder_that_sample_py_opens(averaged, tiny_data, tmp_path, capsys):
    folder = step(averaged, 8) / "average"
    differ = {"model.safetensors", "manifest.json"}
    of_training = {"train_state.pt", "train_config.json"}
    beside = {p.name: p.read_bytes() for p in step(averaged, 8).iterdir() if p.is_file()}
    files = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert not damage(folder) and files.keys() == beside.keys() - of_training
    assert {name for name, content in files.items() if content != beside[name]} == differ
    call(sample.main, f"--ckpt={folder}", "--max_new_tokens=3", "--device=cpu")
    assert str(folder) in capsys.readouterr().err
    tuned = train_tiny(tiny_data, tmp_path, f"--init_from={folder}", "--max_steps=1")
    assert metrics(tuned, "loss")[1] < 5.7


def test_the_loss_of_the_average_is_that_of_the_saved_model(averaged, tiny_data, capsys):
    for place, key in ((".", "val_loss"), ("average", "val_loss_average")):
        to_eval = [f"--eval={tiny_data / 'tiny'}", "--block_size=32", "--dtype=float32"]
        call(sample.main, f"--ckpt={step(averaged, 8) / place}", *to_eval, "--device=cpu")
        printed = re.search(r"validation loss ([0-9.]+)", capsys.readouterr().out)
        assert float(printed[1]) == pytest.approx(metrics(averaged, key)[8], abs=1e-4)

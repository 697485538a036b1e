"""plot.py and loss.png: what is drawn. The figures are read before they become pixels."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from conftest import call
from matplotlib.figure import Figure

import plot
from plot import limits, read_run, shown_settings

SETTINGS = dict(run_name="a", dataset="web", n_layer=12, lr=6e-4, seed=1, block_size=64)


def write_run(folder: Path, losses: dict[int, float], **settings) -> Path:
    """Write a metrics.jsonl: steps of 100 tokens and 2 s each; every 100th is evaluated."""
    landmarks = {"uniform": 9.0, "unigram": 7.0}
    records = [dict(step=0, settings=SETTINGS | settings, landmarks=landmarks)]
    records.append(dict(step=5, bad_step="loss nan", bad_steps=1))
    for step, loss in losses.items():
        records.append(dict(step=step, loss=loss, lr=1e-3, tokens=100 * step, step_ms=2000.0))
        if step % 100 == 0:
            bits = loss / math.log(2) / (4 if step < 500 else 5)  # after another mixture
            records.append(dict(step=step, val_loss=loss, val_bits_per_byte=bits))
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def falling(last: float = 3.0) -> dict[int, float]:
    return {step: last + 6 * math.exp(-step / 40) for step in range(10, 1001, 10)}


@pytest.mark.parametrize("options", [[], ["--x=tokens", "--y=bits_per_byte"], ["--x=time"]])
def test_every_kind_of_run_is_drawn(tmp_path, capsys, options):
    """Also one with NaN, one with a single evaluation, and one whose name is no ASCII."""
    runs = [write_run(tmp_path / "plain", falling()), write_run(tmp_path / "中 $x^2", falling(2.5))]
    runs.append(write_run(tmp_path / "nan", falling() | {50: math.nan, 100: math.nan}))
    runs.append(write_run(tmp_path / "one", {100: 4.0}, lr=1e-3))
    call(plot.main, tmp_path / "one", f"--png={tmp_path}/p.png", *options)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "other").mkdir()
    others = [tmp_path / "other", tmp_path / "p.png"]
    call(plot.main, *runs, *others, f"--png={tmp_path}/p.svg", *options)
    assert "<svg" in (tmp_path / "p.svg").read_text()
    assert capsys.readouterr().err.count("other: no metrics.jsonl there") == 1


def test_newest_run_is_drawn_but_not_over_a_foreign_file(tmp_path, capsys, refuses):
    for name in ("old", "new"):
        write_run(tmp_path / name, falling())
    os.utime(tmp_path / "old" / "metrics.jsonl", (1, 1))
    call(plot.main, f"--out_dir={tmp_path}")
    assert capsys.readouterr().out.strip() == f"{tmp_path}/new/loss.png"
    call(plot.main, f"--out_dir={tmp_path}")  # its own picture may be replaced
    Figure().savefig(tmp_path / "new" / "loss.png")
    precious = (tmp_path / "new" / "loss.png").read_bytes()
    assert "new/loss.png" in refuses(plot.main, f"--out_dir={tmp_path}")
    assert (tmp_path / "new" / "loss.png").read_bytes() == precious


def test_first_steps_and_spikes_do_not_flatten_the_curve(tmp_path):
    low, high = limits([read_run(write_run(tmp_path / "a", falling()), "steps", "loss")])
    assert 2.5 < low < 3 and 3.5 < high < 6
    spiked = write_run(tmp_path / "b", falling() | {510: 1e4})
    assert limits([read_run(spiked, "steps", "loss")])[0] == pytest.approx(low, abs=0.5)


def test_axes_count_steps_tokens_hours_and_bits_per_byte(tmp_path):
    folder = write_run(tmp_path / "a", falling())
    runs = {x: read_run(folder, x, "bits_per_byte") for x in ("steps", "tokens", "time")}
    x = {key: run.curves["val_loss"][0][[0, -1]] for key, run in runs.items()}
    assert x["steps"].tolist() == [100, 1000] and x["tokens"].tolist() == [0.01, 0.1]
    assert x["time"] == pytest.approx(np.array([200, 2000]) / 3600)
    curves = runs["steps"].curves
    assert curves["val_loss"][1] == pytest.approx(curves["val_bits_per_byte"][1])


def test_the_legend_lists_the_settings_that_differ(tmp_path):
    folders = [write_run(tmp_path / "a", falling()), write_run(tmp_path / "b", falling(), lr=1e-3)]
    runs = [read_run(folder, "steps", "loss") for folder in folders]
    assert shown_settings(runs) == ["lr=0.0006", "lr=0.001"]
    assert shown_settings(runs[:1]) == ["n_layer=12 lr=0.0006 seed=1 dataset=web"]
    assert runs[1].name.endswith(": validation 3.0000 at step 1,000")


@pytest.mark.filterwarnings("error:constrained_layout")
def test_legend_of_40_runs_leaves_room_for_the_curves(tmp_path):
    runs = [write_run(tmp_path / f"lr_{n}", falling(), lr=n * 1e-4) for n in range(1, 41)]
    call(plot.main, *runs, f"--png={tmp_path}/p.png")


DAMAGED = [{"settings": None}, {"landmarks": [1]}, {"judged_by": "x"}, {"val_loss": "x"}]


@pytest.mark.parametrize("record", DAMAGED, ids=str)
def test_a_damaged_record_is_named(tmp_path, refuses, record):
    folder = write_run(tmp_path / "a", falling())
    with open(folder / "metrics.jsonl", "a") as f:
        f.write(json.dumps({"step": 1000} | record) + "\n")
    number = len((folder / "metrics.jsonl").read_text().splitlines())
    assert f"metrics.jsonl:{number}" in refuses(plot.main, folder)


@pytest.mark.parametrize("axis", ["tokens", "time"])
def test_an_axis_that_no_record_has_is_refused(tmp_path, refuses, axis):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    assert "--x steps" in refuses(plot.main, folder, f"--x={axis}")

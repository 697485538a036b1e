"""plot.py and loss.png: what is drawn. The figures are read before they become pixels."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from conftest import call, metrics

import plot
from training.plots import differences, limits, read_run, smoothed

SETTINGS = dict(run_name="a", dataset="web", n_layer=12, lr=6e-4, seed=1, block_size=64)


def write_run(folder: Path, losses: dict[int, float], *more: dict, **settings) -> Path:
    """Write a metrics.jsonl: steps of 100 tokens and 2 s each; every 100th is evaluated."""
    begun = dict(step=0, settings=SETTINGS | settings, data={"web": "0f"}, steps=1000)
    records = [begun | {"step_samples": 8, "landmarks": {"uniform": 9.0, "unigram": 7.0}}, *more]
    for step, loss in losses.items():
        about = dict(lr=1e-3, tokens=100 * step, step_ms=2000.0)
        records.append(dict(step=step, loss=loss) | about)
        if step % 100 == 0:
            bits = loss / math.log(2) / 4
            records.append(dict(step=step, val_loss=loss, val_bits_per_byte=bits))
    folder.mkdir(parents=True)
    lines = [json.dumps(record) + "\n" for record in sorted(records, key=lambda r: r["step"])]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def falling(last: float = 3.0) -> dict[int, float]:
    return {step: last + 6 * math.exp(-step / 40) for step in range(10, 1001, 10)}


@pytest.mark.parametrize("options", [[], ["--x=tokens", "--y=bits_per_byte"], ["--x=time"]])
def test_every_kind_of_run_is_drawn(tmp_path, capsys, options):
    """Also one with NaN, one with a single evaluation, and one whose name is no ASCII."""
    damaged = [dict(step=55, bad_step="loss nan"), dict(step=100, val_loss=math.nan)]
    write_run(tmp_path / "plain", falling())
    write_run(tmp_path / "nan", falling() | {50: math.nan}, *damaged)
    write_run(tmp_path / "one", {100: 4.0}, lr=1e-3)
    write_run(tmp_path / "中文 $x^2", falling(2.5))
    call(plot.main, tmp_path / "one", f"--png={tmp_path}/p.png", *options)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "other").mkdir()
    call(plot.main, f"{tmp_path}/*", f"--png={tmp_path}/p.svg", *options)
    assert "<svg" in (tmp_path / "p.svg").read_text()
    assert "other: no metrics.jsonl there: it is left out" in capsys.readouterr().err


def test_without_a_name_the_newest_run_is_drawn(tmp_path, capsys):
    write_run(tmp_path / "old", falling())
    write_run(tmp_path / "new", falling())
    os.utime(tmp_path / "old" / "metrics.jsonl", (1, 1))
    call(plot.main, f"--out_dir={tmp_path}")
    assert capsys.readouterr().out.strip() == f"{tmp_path}/new/loss.png"


def test_the_first_steps_and_a_spike_do_not_flatten_the_rest(tmp_path):
    losses = falling()
    low, high = limits([read_run(write_run(tmp_path / "a", losses), "steps", "loss")])
    assert 2.5 < low < 3 and 3.5 < high < 6
    losses[510] = 1e4
    again = limits([read_run(write_run(tmp_path / "b", losses), "steps", "loss")])
    assert again[0] == pytest.approx(low, abs=0.5)


def test_smoothing_keeps_a_line_and_takes_out_noise():
    line = np.linspace(9, 3, 400)
    assert np.allclose(smoothed(line)[:390], line[:390])
    noise = np.random.default_rng(0).normal(size=10_000)
    assert smoothed(noise)[1000:].std() < 0.2


def test_time_is_that_of_the_steps_and_units_are_those_of_the_records(tmp_path):
    folder = write_run(tmp_path / "a", falling())
    steps = np.array([10.0, 500.0, 1000.0])
    hours = read_run(folder, "time", "loss").places(steps)
    assert hours == pytest.approx(np.array([20, 1000, 2000]) / 3600)
    assert read_run(folder, "tokens", "loss").places(steps).tolist() == [0.001, 0.05, 0.1]
    in_bits = read_run(folder, "steps", "bits_per_byte").curve("val_loss")[1]
    assert in_bits == pytest.approx(list(metrics(folder, "val_bits_per_byte").values()))


def test_the_legend_says_how_the_configs_differ(tmp_path):
    runs = [write_run(tmp_path / "a", falling()), write_run(tmp_path / "b", falling(), lr=1e-3)]
    a, b = (read_run(folder, "steps", "loss") for folder in runs)
    assert differences([a, b]) == ["lr=0.0006", "lr=0.001"]
    assert b.best() == ": validation 3.0000 at step 1,000"

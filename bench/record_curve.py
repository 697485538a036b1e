"""Record the curve of a config: train it with several seeds, and write config/curves/NAME.json.

    python bench/record_curve.py config/shakespeare_char.py
    python bench/record_curve.py config/demo.py --seeds 1 2 3

plot.py and loss.png draw the recorded curve beneath each run with the same settings and the same
train.bin, whatever its seed: a grey line, the mean of the recorded runs, and a band of three
standard deviations on each side. Every setting of train.py is accepted too.

The runs are in out/curves/. Stop at any time, for example by Ctrl-C: the same command goes on.
"""

import math
import shlex
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # so that `python bench/record_curve.py` finds the modules below
import configurator  # noqa: E402
from configurator import UserError, changes, parse  # noqa: E402
from hardware.disk import content_sha256, json_bytes, write_whole  # noqa: E402
from hardware.machine import start  # noqa: E402
from hardware.peak import device_name  # noqa: E402
from text.dataset import open_datasets  # noqa: E402
from training.metrics import read_metrics  # noqa: E402
from training.normal import CURVES, essence  # noqa: E402
from training.plots import Run, read_run, smoothed  # noqa: E402
from training.settings import TrainConfig  # noqa: E402


@dataclass(frozen=True)
class RecordConfig(TrainConfig):
    out_dir: str = "out/curves"  # folder of the runs
    # ---- Recorded curve ----
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)  # one run with each
    json: str = ""  # file to write; default: config/curves/NAME.json, NAME being run_name

    def problems(self) -> list[str]:
        wrong = TrainConfig.problems(self)
        if len(set(self.seeds)) < 3 or min(self.seeds) < 0:
            wrong.append("seeds must be three different numbers or more, and not negative")
        return wrong


def main() -> None:
    cfg = parse(RecordConfig, doc=__doc__)
    sets = open_datasets(cfg.dataset, cfg.data_dir)
    if len(sets) > 1:
        raise UserError(f"dataset={cfg.dataset}: a curve is recorded on one data set")
    train_sha256 = sets[0].meta["splits"]["train"]["sha256"]
    runs = [finished(cfg, seed, train_sha256) for seed in cfg.seeds]
    losses = [run.points["loss"] for run in runs]
    path = Path(cfg.json or CURVES / f"{cfg.run_name}.json")
    path.parent.mkdir(exist_ok=True)
    curve = {
        "name": cfg.run_name,
        "seeds": list(cfg.seeds),
        "loss": mean_and_std([(steps, smoothed(values)) for steps, values in losses]),
        "val_loss": mean_and_std([run.points["val_loss"] for run in runs]),
        "machine": device_name(start(cfg.device, cfg.dtype).device),
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
        "essence": essence(runs[0].begun),
    }
    write_whole(path, json_bytes(curve))
    print(f"{path}: {len(runs)} runs, last validation loss {curve['val_loss']['mean'][-1]:.4f}")


def finished(cfg: RecordConfig, seed: int, train_sha256: str) -> Run:
    """Return the finished run of the config with a seed, after training what is left of it.

    The run's folder is named by a hash of its settings and data, so that a changed config is
    trained anew.
    """
    only_here = {f.name for f in fields(RecordConfig)} - {f.name for f in fields(TrainConfig)}
    settings = {k: v for k, v in changes(cfg).items() if k not in only_here}
    settings |= {"seed": seed, "out_dir": cfg.out_dir, "init_from": "auto", "progress": "line"}
    if cfg.max_steps:  # evaluations change nothing of the training: have ten or more
        settings["eval_every"] = min(cfg.eval_every, math.ceil(cfg.max_steps / 10))
    name = content_sha256(settings | {"train_sha256": train_sha256})[:8]
    settings["run_name"] = f"{cfg.run_name}-seed{seed}-{name}"
    folder = Path(cfg.out_dir) / settings["run_name"]
    if not is_finished(folder):
        options = [f"--{key}={value}" for key, value in settings.items()]
        argv = [sys.executable, str(REPO / "train.py"), *options]
        if code := subprocess.run(argv).returncode:
            raise UserError(f"exit code {code} from {shlex.join(argv)}")
    return read_run(folder, "steps", "loss")


def is_finished(folder: Path) -> bool:
    """Return whether a run has evaluated its last step."""
    if not (folder / "metrics.jsonl").exists():
        return False
    evaluated = {r["step"] for r in read_metrics(folder / "metrics.jsonl") if "val_loss" in r}
    return read_run(folder, "steps", "loss").begun["steps"] in evaluated


def mean_and_std(curves: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, list[float]]:
    """Return mean and standard deviation over the runs, at 200 steps at most.

    curves: steps and values of each run. A few runs tell a variance badly, so it is averaged over
    five neighbouring points.
    """
    steps = curves[0][0]
    if any(not np.array_equal(other, steps) for other, _ in curves):
        raise UserError("the runs were not logged at the same steps: a step was skipped")
    values = np.stack([values for _, values in curves])  # (runs, points)
    variance = values.var(axis=0, ddof=1)
    five = np.ones(min(5, len(steps)))
    near = np.convolve(variance, five, "same") / np.convolve(np.ones_like(variance), five, "same")
    kept = np.unique(np.linspace(0, len(steps) - 1, 200).astype(int))
    return {
        "steps": steps[kept].astype(int).tolist(),
        "mean": values.mean(axis=0)[kept].round(4).tolist(),
        "std": np.sqrt(near)[kept].round(4).tolist(),
    }


if __name__ == "__main__":
    configurator.run(main)

"""The core stands alone: what `import train` loads is a whole trainer, without the other files."""

import shutil
import subprocess
import sys
from pathlib import Path

from conftest import REPO, metrics
from test_house import loaded_by

# What training/start.py does for a run, as short as it can be: here the data are random numbers.
BEGIN_AND_TRAIN = """
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

import train
from hardware.disk import Lock
from hardware.machine import Machine
from model import GPT
from text.windows import DataSet, Loader, Windows
from training.checkpoint import Saver
from training.job import Data, Job
from training.plan import Progress, make_plan
from training.report import Metrics, MetricsFile
from training.settings import TrainConfig, model_config

cfg = TrainConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=4, batch_tokens=128,
    max_steps=30, lr=1e-2, eval_every=10, log_every=1, sample_every=0, tracker="off")
machine = Machine(0, 0, 1, torch.device("cpu"), torch.float32, "for this test")
folder = Path("out")
lock = Lock(folder, "")
ids = np.random.default_rng(0).zipf(1.5, 5000).clip(max=63).astype(np.uint16)
windows = Windows(ids, cfg.block_size, (0,), None)
sets = [DataSet("zipf", folder, {"splits": {"val": {"tokens": 5000, "bytes": 5000}}}, Fraction(1))]
loader = Loader([windows], [Fraction(1)])
data = Data(loader, *[[windows]] * 3, sets, SimpleNamespace(eos_id=0), [1], lambda: None)
model = GPT(model_config(cfg, 64))
model.init_weights("gpt2")
optimizer = torch.optim.AdamW(model.param_groups(0.1), lr=cfg.lr)
for group in optimizer.param_groups:
    group["scale"] = 1.0
progress = Progress()
plan = make_plan(cfg, 1, len(ids))
file = MetricsFile(folder / "metrics.jsonl", [], lock, print)
metrics = Metrics(cfg, machine, plan, sets, progress, file)


def save_weights(weights, folder):
    torch.save(weights, folder / "weights.pt")


saver = Saver(folder / "ckpt", save_weights, {}, cfg.keep, lock, print, metrics.log_save)
scaler = torch.amp.GradScaler("cpu", enabled=False)
train.train(Job(cfg, folder, machine, plan, data, model, model, optimizer, scaler, progress,
    metrics, saver, None))
"""


def test_what_import_train_loads_trains_evaluates_and_saves_without_the_other_files(tmp_path):
    for path in loaded_by("train"):
        target = tmp_path / path.relative_to(REPO)
        target.parent.mkdir(exist_ok=True)
        shutil.copy(path, target)
    shutil.copy(REPO / "training" / "elsewhere.txt", tmp_path / "training")
    command = [sys.executable, "-c", BEGIN_AND_TRAIN]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    losses = metrics(tmp_path / "out", "loss")
    assert losses[30] < losses[1] - 0.5
    assert metrics(tmp_path / "out", "val_loss").keys() == {10, 20, 30}
    assert "manifest.json" in {p.name for p in Path(tmp_path, "out/ckpt/step_00000030").iterdir()}

"""How long do nanoGPT with its own recipe and this trainer with a config of ours take to a loss?

    python bench/race.py config/shakespeare_char.py --nanogpt=../nanoGPT --recipe="
        config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20
        --log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128
        --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"

For each seed, nanoGPT's train.py runs on our .bin files, from command to exit, and then ours. The
final weights of both are evaluated in fp32 on all windows of val.bin. Every setting of train.py is
accepted too. Two times are compared: that of the whole command, and that of its training alone,
which is the number of steps times the median time of a step, without compilation, evaluations and
checkpoints.
"""

import os
import pickle
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # so that `python bench/race.py` finds the modules below
from configurator import UserError, changes, parse, run  # noqa: E402
from hardware.disk import json_bytes, write_whole  # noqa: E402
from hardware.machine import Machine  # noqa: E402
from text.dataset import open_datasets  # noqa: E402
from text.windows import open_windows  # noqa: E402
from training.evaluate import evaluate  # noqa: E402
from training.huggingface import from_pretrained  # noqa: E402
from training.metrics import read_metrics  # noqa: E402
from training.runs import newest_checkpoint  # noqa: E402
from training.settings import TrainConfig, with_data  # noqa: E402


@dataclass(frozen=True)
class RaceConfig(TrainConfig):
    # ---- Race ----
    nanogpt: str = ""  # folder of a nanoGPT checkout
    recipe: str = ""  # the options of nanoGPT's train.py, in quotes
    seeds: tuple[int, ...] = (1, 2, 3)  # one race with each
    json: str = ""  # also write the figures to this file

    def problems(self) -> list[str]:
        wrong = TrainConfig.problems(self)
        if not (Path(self.nanogpt) / "train.py").exists():
            wrong.append(f"no train.py in nanogpt={self.nanogpt!r}")
        if not re.search(r"--max_iters=\d+", self.recipe):
            wrong.append("recipe must say --max_iters=N")
        return wrong


@dataclass(frozen=True)
class Finish:
    """What a trainer has come to."""

    loss: float  # of its final weights, on all windows of val.bin
    training: float  # seconds: steps times the median time of a step
    whole: float  # seconds from the command to its exit
    steps: int
    parameters: int


@dataclass
class Race:
    seed: int
    finish: dict[str, Finish] = field(default_factory=dict)  # name of the trainer -> finish


def main() -> None:
    cfg = with_data(parse(RaceConfig, doc=__doc__))
    races = []
    for seed in cfg.seeds:
        race = Race(seed)
        with tempfile.TemporaryDirectory() as folder:
            race.finish["nanoGPT"] = run_nanogpt(cfg, seed, Path(folder))
            race.finish["ours"] = run_ours(cfg, seed, Path(folder))
        races.append(race)
        for name, finish in race.finish.items():
            print(f"seed {seed} | {name:7} | {line(finish)}", flush=True)
    medians = {name: median([race.finish[name] for race in races]) for name in races[0].finish}
    for name, finish in medians.items():
        print(f"median | {name:7} | {line(finish)}")
    theirs = medians["nanoGPT"]
    mine = medians["ours"]
    times = f"{theirs.training / mine.training:.2f} times as long in training"
    times += f", and {theirs.whole / mine.whole:.2f} times from command to exit"
    print(f"nanoGPT took {times}; our loss less its loss is {mine.loss - theirs.loss:+.4f}")
    if cfg.json:
        write_whole(Path(cfg.json), json_bytes({"races": [asdict(race) for race in races]}))


def run_nanogpt(cfg: RaceConfig, seed: int, folder: Path) -> Finish:
    """Run nanoGPT's train.py in `folder`, with our data.

    Its seed is changed, it prints every step, and it saves its weights at each evaluation, the last
    of which must come after the last step.
    """
    data = open_datasets(cfg.dataset, cfg.data_dir)[0]
    home = folder / "nanogpt"
    shutil.copytree(cfg.nanogpt, home, ignore=shutil.ignore_patterns("data", ".git", "out*"))
    script = (home / "train.py").read_text()
    if "1337 + seed_offset" not in script:
        raise UserError(f"{cfg.nanogpt}/train.py sets its seed in an unknown way")
    (home / "train.py").write_text(script.replace("1337 + seed_offset", f"{seed} + seed_offset"))
    link = home / "data" / "ours"
    link.mkdir(parents=True)
    for split in ("train", "val"):
        (link / f"{split}.bin").symlink_to((data.folder / f"{split}.bin").resolve())
    (link / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": data.meta["vocab_size"]}))
    options = [*shlex.split(cfg.recipe), "--dataset=ours", "--out_dir=out", "--log_interval=1"]
    steps = int(re.findall(r"--max_iters=(\d+)", cfg.recipe)[-1])
    options.append("--always_save_checkpoint=True")  # its last evaluation saves the final weights
    output, whole = timed([sys.executable, "train.py", *options], home)
    times = [float(ms) for ms in re.findall(r"^iter \d+: .*time ([0-9.]+)ms", output, re.M)]
    saved = home / "out" / "ckpt.pt"
    if not saved.exists() or torch.load(saved, weights_only=True)["iter_num"] != steps:
        raise UserError(f"nanoGPT has not saved its final weights: say --eval_interval={steps}")
    return finish_of(cfg, saved, steps, statistics.median(times) / 1e3, whole)


def run_ours(cfg: RaceConfig, seed: int, folder: Path) -> Finish:
    """Run train.py in `folder`."""
    only_here = {f.name for f in fields(RaceConfig)} - {f.name for f in fields(TrainConfig)}
    cfg = replace(cfg, seed=seed, out_dir=str(folder / "ours"))
    cfg = replace(cfg, data_dir=str(Path(cfg.data_dir).resolve()), follow=False)
    cfg = replace(cfg, eval_train=False, sample_every=0)
    settings = {k: v for k, v in changes(cfg).items() if k not in only_here}
    options = [f"--{key}={value}" for key, value in settings.items()]
    whole = timed([sys.executable, str(REPO / "train.py"), *options], folder)[1]
    run_folder = Path(cfg.out_dir) / cfg.run_name
    records = read_metrics(run_folder / "metrics.jsonl")
    times = [r["step_ms"] for r in records if "step_ms" in r]
    checkpoint = newest_checkpoint(run_folder / "ckpt")
    step_s = statistics.median(times[1:] or times) / 1e3  # the first step warms up
    return finish_of(cfg, checkpoint, records[0]["steps"], step_s, whole)


def timed(argv: list[str], folder: Path) -> tuple[str, float]:
    """Run a command in `folder`. Return its output, and the seconds until its exit."""
    begun = time.perf_counter()
    both = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    done = subprocess.run(argv, cwd=folder, env=os.environ | {"PYTHONUNBUFFERED": "1"}, **both)
    seconds = time.perf_counter() - begun
    if done.returncode:
        print(done.stdout[-4000:], file=sys.stderr)
        raise UserError(f"the above ended with exit code {done.returncode}: {shlex.join(argv)}")
    return done.stdout, seconds


def finish_of(cfg: RaceConfig, path: Path, steps: int, step_s: float, whole: float) -> Finish:
    """Return the finish of the final weights in `path`."""
    model = from_pretrained(path)
    if model.config.block_size != cfg.block_size:
        raise UserError(f"block_size is {model.config.block_size} there and {cfg.block_size} here")
    data = open_datasets(cfg.dataset, cfg.data_dir)[0]
    machine = Machine(0, 0, 1, torch.device("cpu"), torch.float32, "for an equal evaluation")
    loss = evaluate(model, open_windows(data, "val", cfg.block_size), 0, 64, machine)
    return Finish(loss, steps * step_s, whole, steps, model.num_params()["total"])


def median(finishes: list[Finish]) -> Finish:
    """Return the medians of all figures."""
    of_each = {f.name: [getattr(finish, f.name) for finish in finishes] for f in fields(Finish)}
    return Finish(**{name: statistics.median(values) for name, values in of_each.items()})


def line(finish: Finish) -> str:
    size = f"{finish.parameters / 1e6:.3f}M parameters"
    times = f"training {finish.training:.1f} s ({finish.steps:g} steps)"
    return f"loss {finish.loss:.4f} | {times} | command to exit {finish.whole:.1f} s | {size}"


if __name__ == "__main__":
    run(main)

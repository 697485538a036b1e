"""The folder of a run, out/RUN: one process writes it; its checkpoints are found by their names."""

import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from configurator import UserError, note
from hardware.disk import LOCK, MANIFEST, Lock, leads_to, remove_files, set_aside
from text.hf_tokenizer import TOKENIZER_FILES
from training.huggingface import read_shape
from training.metrics import evaluations, read_metrics
from training.settings import TrainConfig

# The files that train.py writes to a checkpoint. A killed one has no manifest that lists them.
CHECKPOINT_FILES = [MANIFEST, "model.safetensors", "config.json", "train_state.pt"]
CHECKPOINT_FILES += ["train_config.json", "meta.json", *TOKENIZER_FILES]


class RunFolder:
    """out/RUN, which rank 0 locks until release(), or until its process ends."""

    def __init__(self, path: Path, locks: bool = True):
        """Lock the folder, and remove what a killed process left there, if `locks`: on rank 0.

        Raises UserError if another process holds the lock, if the path is no folder, or if ckpt is
        a link: it may lead to the checkpoints of another run, which would be pruned.
        """
        self.path = path
        self.moved = False  # whether another folder may have this path now
        self.lock: Lock | None = None
        self.ckpt: os.stat_result | None = None  # of ckpt/, as soon as there is one
        if not locks:
            return
        if os.path.lexists(path) and not path.is_dir():
            raise UserError(f"{path} is not a folder: move it away, or choose another --run_name")
        if (path / "ckpt").is_symlink():
            raise UserError(f"{path / 'ckpt'} is a link: link out/RUN or out instead")
        advice = "stop it, and the workers of a killed torchrun, or choose another --run_name"
        self.lock = Lock(path / LOCK, advice)
        for temporary in path.glob("ckpt/.tmp_step_*"):
            remove_files(temporary, CHECKPOINT_FILES)
        with suppress(FileNotFoundError):
            self.ckpt = os.stat(path / "ckpt")

    def with_earlier_renamed(self) -> "RunFolder":
        """Rename an earlier run to RUN.old. Return the new RUN, or this one if it is empty."""
        if not holds_files(self.path):
            return self
        earlier = set_aside(self.path, f"{self.path.name}.old")
        note(f"the earlier run is now {earlier}: delete it when you no longer need it")
        self.release()
        return RunFolder(self.path)

    def is_held(self) -> bool:
        """Return whether the path still leads to the folder that was locked, with its ckpt/."""
        ckpt_dir = self.path / "ckpt"
        same = not (self.ckpt and ckpt_dir.exists()) or leads_to(ckpt_dir, self.ckpt)
        return same and (not self.lock or self.lock.is_held())

    def is_ours(self) -> bool:
        """Return whether the folder may be written. If it is another one now, end the run."""
        if not self.moved and not self.is_held():
            self.moved = True
            os.kill(os.getpid(), signal.SIGTERM)  # all ranks finish the step, and the run is saved
        return not self.moved

    def release(self) -> None:
        if self.lock:
            self.lock.release()


def holds_files(folder: Path) -> bool:
    """Return whether a folder holds more than hidden files and an empty ckpt/."""
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    if "ckpt" in names and not any(numbered(folder / "ckpt")):
        names.remove("ckpt")
    return bool(names - {"lost+found"})


def newest_run(out_dir: Path) -> Path | None:
    """Return the run, out_dir/RUN, with the newest checkpoint, or None if there is none.

    Runs that --overwrite has renamed are ignored.
    """
    saved = {}  # run -> time of its newest checkpoint
    for ckpt_dir in out_dir.glob("*/ckpt"):
        with suppress(OSError):  # the run has just deleted this checkpoint
            newest = newest_checkpoint(ckpt_dir)
            if newest and not re.search(r"\.old-?[0-9]*$", ckpt_dir.parent.name):
                saved[ckpt_dir.parent] = (newest / MANIFEST).stat().st_mtime
    return max(saved, key=saved.__getitem__, default=None)


def with_model(options: dict[str, Any]) -> dict[str, Any]:
    """Return settings with the folder of the model to fine-tune, and with its block_size if needed.

    The default block_size is lowered to the context of the model; a given one stays. The folder of
    a run means its newest checkpoint. Raises UserError if the model cannot be read.
    """
    init_from = options.get("init_from", "scratch")
    if init_from == "scratch":
        return options
    if newest := newest_checkpoint(Path(init_from) / "ckpt"):
        init_from = str(newest)
        options = options | {"init_from": init_from}
    context = read_shape(init_from).block_size
    return {"block_size": min(TrainConfig().block_size, context)} | options


def losses_of(run: Path) -> dict[Path, float]:
    """Return the validation loss of each checkpoint of a run, newest first.

    Checkpoints that were not evaluated, or on other data than the last one, are left out. Raises
    UserError if metrics.jsonl is damaged.
    """
    losses = evaluations(read_metrics(run / "metrics.jsonl"))
    checkpoints = complete_checkpoints(run / "ckpt")
    return {path: losses[step_of(path)] for path in checkpoints if step_of(path) in losses}


def numbered(ckpt_dir: Path) -> list[Path]:
    """Return the folders named step_N in ckpt_dir, complete or not, newest first.

    Raises OSError if ckpt_dir cannot be listed: an unreadable folder is not an empty one.
    """
    try:
        names = os.listdir(ckpt_dir)
    except (FileNotFoundError, NotADirectoryError):  # the latter: under a file, nanoGPT's ckpt.pt
        return []
    paths = [ckpt_dir / name for name in names if re.fullmatch(r"step_[0-9]{8,18}", name)]
    return sorted(paths, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def complete_checkpoints(ckpt_dir: Path) -> list[Path]:
    """Return the checkpoints that have a manifest, newest first. The manifest is written last."""
    return [path for path in numbered(ckpt_dir) if (path / MANIFEST).is_file()]


def newest_checkpoint(ckpt_dir: Path) -> Path | None:
    return next(iter(complete_checkpoints(ckpt_dir)), None)

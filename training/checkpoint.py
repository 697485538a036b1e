"""Checkpoints: write them in the background, find them, delete them. resume.py reads them.

A checkpoint is a Hugging Face model folder, with the files that a resumed run needs beside it:

    out/RUN/ckpt/step_00001000/
        model.safetensors, config.json    the model, as training/huggingface.py writes it
        meta.json, tokenizer.*            meta.json and the tokenizer of the data set
        tokenizer.json, ...               the same tokenizer for Hugging Face's tools
        train_state.pt                    optimizer, scaler, step, and place in the data:
                                          tensors and numbers, no code
        train_config.json                 the settings of the run
        manifest.json                     size and SHA-256 of every other file

A checkpoint is either complete or not there. It is written to a temporary folder beside the others,
synced to the disk and renamed. A thread does this from a copy in host memory, for which alone the
training waits. If the newest checkpoint turns out to be damaged, a resumed run takes the one before
it.

Only files that this program writes are deleted, each by its name. A checkpoint that holds any other
file is kept whole.
"""

import os
import re
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from configurator import UserError, note
from hardware.disk import MANIFEST, Lock, damage, finish, put_in_place, remove_only
from hardware.machine import whole

# The files that train.py writes to a checkpoint.
OUR_FILES = set(
    """
    model.safetensors config.json train_state.pt train_config.json meta.json manifest.json
    tokenizer.model tokenizer.tiktoken tokenizer.json tokenizer_config.json special_tokens_map.json
    added_tokens.json vocab.json merges.txt chat_template.jinja generation_config.json
    """.split()
)
# To read these again takes long: pruning does so only if they may have been changed since.
LARGE = {"model.safetensors", "train_state.pt"}


# --------------------------------------------------------------------------------------------------
# Write


@dataclass
class Saver:
    """Write checkpoints in the background, one at a time, and delete the older ones."""

    folder: Path  # of the checkpoints
    save_weights: Callable[[dict[str, Tensor], Path], None]  # writes name -> value to a folder
    files: dict[str, bytes]  # name -> content of those that are the same in each checkpoint
    keep: int  # how many of the newest checkpoints stay, besides the best one
    lock: Lock | None  # of the run's folder, on the rank that writes; None on the others
    say: Callable[[str], None]  # prints a line
    report: Callable[[int, Path, float], None]  # of step, path and seconds, once it is on the disk
    writing: Future | None = None
    failed: str = ""  # why the last checkpoint could not be written; empty if it could

    def __post_init__(self):
        self.pool = ThreadPoolExecutor(1)

    def save(self, model: nn.Module, optimizer, scaler, progress) -> None:
        """Begin to write step_N. All ranks must call this; rank 0 writes.

        The one before must be on the disk: see wait(). progress: a dataclass of numbers.
        """
        started = time.perf_counter()
        training = asdict(progress)
        training |= {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
        weights = to_host(dict(model.named_parameters()), keep=self.lock is not None)
        training = to_host(training, keep=self.lock is not None)
        if self.lock:
            self.writing = self.pool.submit(self.write, weights, training, started)

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is on the disk."""
        if self.writing:
            self.writing.result()

    def write(self, weights: dict, training: dict, started: float) -> None:
        """Write a checkpoint, put it in place, report it, and prune the older ones.

        started: when the save began, by time.perf_counter().

        If the disk is full or fails, this is a warning, and self.failed holds the reason. Training
        goes on, since the earlier checkpoints are still there.
        """
        step = training["step"]
        target = self.folder / f"step_{step:08d}"
        draft = temporary(target)
        try:
            self.lock.renew()
            if self.folder.is_symlink():
                raise OSError(f"{self.folder} is a link now")
            self.write_folder(draft, weights, training)
            # Where a disk has no locks, another process may have written this step.
            if earlier := put_in_place(draft, target, f"{target.name}_kept"):
                self.say(f"note: {target} is kept as {earlier.name}")
        except (OSError, UserError) as e:
            with suppress(OSError):
                remove_only(draft, OUR_FILES)
            self.failed = f"{target} could not be written ({getattr(e, 'strerror', None) or e})"
            self.say(f"warning: {self.failed}; training goes on, earlier checkpoints are intact")
            return
        self.failed = ""
        self.report(step, target, time.perf_counter() - started)
        if not training["bad_in_a_row"]:  # after a bad step, older weights may be better
            self.prune(step, training["best_step"])

    def write_folder(self, folder: Path, weights: dict, training: dict) -> None:
        """Write all files of a checkpoint and sync them to the disk, the manifest last."""
        folder.mkdir(parents=True)
        self.save_weights(weights, folder)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        with open(folder / "train_state.pt", "wb") as file:
            try:
                torch.save(training, file)
            except RuntimeError as e:  # on top of the reason
                raise e.__context__ if isinstance(e.__context__, OSError) else e from None
        finish(folder)

    def prune(self, step: int, best_step: int) -> None:
        """Delete what the complete checkpoint of `step` replaces.

        These are the checkpoints up to `step`, except the best one and the `keep` newest of the
        others. note() says, and only once, which stay because somebody else's files are in them.
        """
        try:
            earlier = [path for path in numbered(self.folder) if step_of(path) <= step]
            others = [path for path in earlier if step_of(path) != best_step]
            for path in others[self.keep :]:
                if reason := discard(path):
                    note(f"{path} is kept: {reason}")
        except OSError as e:
            self.say(f"warning: an older checkpoint could not be deleted ({e})")


def to_host(state: Any, keep: bool) -> Any:
    """Return a copy in host memory of the tensors in a state_dict, or in dicts of such.

    Sharded tensors are gathered one after the other, so all ranks must call this. Those that do not
    keep the copy get None for each tensor.
    """
    if isinstance(state, dict):
        return {k: to_host(v, keep) for k, v in state.items()}
    if isinstance(state, Tensor):
        gathered = whole(state.detach())
        return gathered.to("cpu", copy=True) if keep else None
    return state


def temporary(checkpoint: Path) -> Path:
    """Return a path beside a checkpoint that no other process uses, to write or delete it there."""
    return checkpoint.with_name(f".tmp_{checkpoint.name}-{secrets.token_hex(4)}")


# --------------------------------------------------------------------------------------------------
# Find


def numbered(ckpt_dir: Path) -> list[Path]:
    """Return the checkpoints in a folder, complete or not, newest first.

    Whatever is named step_ and a number counts as one. Raises OSError if the folder cannot be
    listed: checkpoints that cannot be seen must not be taken for such that do not exist.
    """
    try:
        names = os.listdir(ckpt_dir)
    except (FileNotFoundError, NotADirectoryError):  # the latter: behind nanoGPT's ckpt.pt
        return []
    paths = [ckpt_dir / name for name in names if re.fullmatch(r"step_[0-9]{8,18}", name)]
    return sorted(paths, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def whole_checkpoints(ckpt_dir: Path) -> list[Path]:
    """Return the checkpoints that have a manifest, newest first. The manifest is written last."""
    return [path for path in numbered(ckpt_dir) if (path / MANIFEST).is_file()]


def newest_checkpoint(ckpt_dir: Path) -> Path | None:
    return next(iter(whole_checkpoints(ckpt_dir)), None)


# --------------------------------------------------------------------------------------------------
# Delete


def is_untouched(path: Path, manifest: Path) -> bool:
    """Return whether a file is no newer than the manifest, which is written last.

    Its ctime counts, too: nobody can set that back.
    """
    if not manifest.exists():
        return False
    file, last = path.lstat(), manifest.lstat()
    return file.st_mtime_ns <= last.st_mtime_ns and file.st_ctime_ns <= last.st_ctime_ns


def discard(checkpoint: Path) -> str:
    """Delete a checkpoint. If it holds anything that is not ours, leave it and return what.

    Ours are files of our names that are as the manifest says. One that somebody has changed since,
    such as tokenizer_config.json or weights that were averaged, is theirs.
    """
    if checkpoint.is_symlink() or not checkpoint.is_dir():
        return "it is not a folder of its own"
    paths = [path for path in checkpoint.rglob("*") if path.is_symlink() or not path.is_dir()]
    names = {path.relative_to(checkpoint).as_posix() for path in paths} - {MANIFEST}
    manifest = checkpoint / MANIFEST
    names -= {name for name in LARGE & names if is_untouched(checkpoint / name, manifest)}
    foreign = min(names - OUR_FILES, default="")  # also average/... of an earlier version
    if problem := foreign or damage(checkpoint, [], required=sorted(names)):
        return f"it holds what is not ours, or was edited ({problem})"
    # It is renamed first, so that nobody finds half a checkpoint under its name.
    remove_only(checkpoint.rename(temporary(checkpoint)), OUR_FILES)
    return ""

"""The folder of a run, out/RUN: find its checkpoints, check them, and delete what the run wrote.

training/checkpoint.py writes the checkpoints. training/resume.py decides which one a run starts
from. Nothing here deletes a file that train.py did not write.
"""

import math
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from configurator import UserError, note
from hardware.disk import LOCK, MANIFEST, Lock, damage, remove_only, set_aside
from text.hf_tokenizer import HF_FILES
from text.tokenizer import SentencePiece, Tiktoken
from training.metrics import read_metrics

# The files that train.py writes to a checkpoint, and to the folder `average` in it.
OURS = {"model.safetensors", "config.json", "train_state.pt", "train_config.json", "meta.json"}
OURS |= {MANIFEST, SentencePiece.file, Tiktoken.file, *HF_FILES}
# Pruning would take long if it read these again.
LARGE = {"model.safetensors", "train_state.pt", "average/model.safetensors"}


# --------------------------------------------------------------------------------------------------
# Checkpoints: find them, check them, delete them


def numbered(ckpt_dir: Path) -> list[Path]:
    """Return the checkpoints in a folder, complete or not, newest first.

    Whatever is named step_ and a number counts as one. Raises UserError if the folder cannot be
    listed: checkpoints that cannot be seen must not be taken for checkpoints that do not exist.
    """
    try:
        names = os.listdir(ckpt_dir)
    except OSError as e:
        if isinstance(e, FileNotFoundError) and not ckpt_dir.is_symlink():
            return []
        unseen = f"{ckpt_dir}: cannot look for checkpoints ({e.strerror})"
        raise UserError(f"{unseen}: is its disk mounted?") from None
    paths = [ckpt_dir / name for name in names if re.fullmatch(r"step_[0-9]{8,18}", name)]
    return sorted(paths, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def whole_checkpoints(ckpt_dir: Path) -> list[Path]:
    """Return the checkpoints that have a manifest, newest first. The manifest is written last."""
    return [path for path in numbered(ckpt_dir) if (path / MANIFEST).is_file()]


def newest_checkpoint(ckpt_dir: Path) -> Path | None:
    return next(iter(whole_checkpoints(ckpt_dir)), None)


def newest_run(out_dir: Path) -> Path | None:
    """Return the run, out_dir/RUN, that has saved a checkpoint last, or None if there is none.

    Runs that --overwrite has moved out of the way do not count.
    """
    saved = {}  # run -> time of its newest checkpoint
    for ckpt_dir in out_dir.glob("*/ckpt"):
        try:
            newest = newest_checkpoint(ckpt_dir)
            if newest and not re.search(r"\.old-?[0-9]*$", ckpt_dir.parent.name):
                saved[ckpt_dir.parent] = (newest / MANIFEST).stat().st_mtime
        except (UserError, OSError) as e:
            note(str(e))  # a disk is not mounted, or the run has just deleted this checkpoint
    return max(saved, key=saved.get, default=None)


def losses_of(run: Path) -> dict[Path, float]:
    """Return the validation loss of each checkpoint of a run that was evaluated, newest first.

    Raises UserError if metrics.jsonl is damaged.
    """
    records = read_metrics(run / "metrics.jsonl")
    losses = {r["step"]: r["val_loss"] for r in records if r.get("val_loss", math.inf) < math.inf}
    checkpoints = whole_checkpoints(run / "ckpt")
    return {path: losses[step_of(path)] for path in checkpoints if step_of(path) in losses}


def newest_intact(ckpt_dir: Path) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint whose files are all as its manifest says, or None.

    The second result says of each newer checkpoint in which way it is damaged.
    """
    problems: list[str] = []
    for path in numbered(ckpt_dir):
        problem = damage(path, required=("model.safetensors", "config.json", "train_state.pt"))
        if not problem:
            return path, problems
        problems.append(problem)
    return None, problems


def temporary(checkpoint: Path) -> Path:
    """Return a path beside a checkpoint that no other process uses, to write or delete it there."""
    return checkpoint.with_name(f".tmp_{checkpoint.name}-{secrets.token_hex(4)}")


def prune(ckpt_dir: Path, step: int, best_step: int, keep: int) -> list[str]:
    """Delete what the complete checkpoint of `step` replaces.

    These are the checkpoints up to `step`, except the best one and the `keep` newest of the
    others. Return a note for each that stays because somebody else's files are in it.
    """
    earlier = [path for path in numbered(ckpt_dir) if step_of(path) <= step]
    others = [path for path in earlier if step_of(path) != best_step]
    reasons = {path: discard(path) for path in others[keep:]}
    return [f"note: {path} is kept: {reason}" for path, reason in reasons.items() if reason]


def discard(checkpoint: Path) -> str:
    """Delete a checkpoint. If it holds anything that is not ours, leave it and return what.

    Ours is what its manifest lists. A file that somebody has edited since, such as
    tokenizer_config.json, is theirs; the large files are not looked at.
    """
    if checkpoint.is_symlink() or not checkpoint.is_dir():
        return "it is not a folder of its own"
    paths = [path for path in checkpoint.rglob("*") if path.is_symlink() or not path.is_dir()]
    names = {path.relative_to(checkpoint).as_posix() for path in paths} - LARGE - {MANIFEST}
    if problem := damage(checkpoint, [], required=sorted(names)):
        return f"somebody has edited it, or put something there ({problem})"
    # It is renamed first, so that nobody finds half a checkpoint under its name.
    remove_checkpoint(checkpoint.rename(temporary(checkpoint)))
    return ""


def remove_checkpoint(folder: Path) -> None:
    """Delete our files in a checkpoint, whole or not, and its folders if they are then empty."""
    remove_only(folder / "average", OURS)
    remove_only(folder, OURS)


# --------------------------------------------------------------------------------------------------
# The folder of a run: out/RUN


def is_run(folder: Path) -> bool:
    """Return whether train.py has written a run to this folder.

    The content of the files decides, not their names: anybody may have a folder called ckpt.
    """
    try:
        records = read_metrics(folder / "metrics.jsonl")
    except (UserError, OSError):
        records = []  # the file is damaged, or train.py did not write it
    begins = any("step_samples" in record for record in records)
    return begins or bool(whole_checkpoints(folder / "ckpt"))


def others_in(folder: Path) -> list[str]:
    """Return, sorted, what is in a folder that is not of a run.

    If there is anything, find_origin() refuses the folder, unless it is a run already. For
    metrics.jsonl, find_origin() has a check of its own.
    """
    ours = {LOCK, "metrics.jsonl", ".metrics.jsonl.tmp", "ckpt", "wandb", "swanlog", "tensorboard"}
    return sorted(set(os.listdir(folder)) - ours) if folder.is_dir() else []


def replace_run(folder: Path, lock: Lock) -> Path | None:
    """Move an earlier run out of the way, and lock a new folder under its name.

    All that is in out/RUN goes with it, to out/RUN.old (or RUN.old2, ...), which this program never
    touches again. Return that folder, or None if there is no earlier run.
    """
    if not is_run(folder):
        return None
    earlier = set_aside(folder, f"{folder.name}.old")
    (earlier / LOCK).unlink(missing_ok=True)
    lock.renew()
    return earlier


def tidy(ckpt_dir: Path, step: int) -> list[str]:
    """Clear the way for a run that begins, or goes on, with this step. Return what there is to say.

    Delete what a process left that was killed while it saved or deleted a checkpoint. Checkpoints
    of later steps are damaged, or the run would go on from there: they are renamed.
    """
    for path in ckpt_dir.glob(".tmp_step_*"):
        by_us = re.fullmatch(r"\.tmp_step_[0-9]+-[0-9a-f]{8}", path.name)
        if by_us and not path.is_symlink():
            remove_checkpoint(path)
    later = [path for path in numbered(ckpt_dir) if step_of(path) > step]
    return [f"note: {path} is kept as {set_aside(path, f'{path.name}_kept')}" for path in later]


@contextmanager
def run_folder(folder: Path) -> Iterator[Lock]:
    """Hold the lock of a run's folder, so that no other process decides or writes anything in it.

    If ckpt is a link, the folder that it leads to is locked as well. The folder is made if it does
    not exist, and removed again if nothing was put into it. Raises UserError if another process
    holds a lock, or if ckpt is a link to the checkpoints of another run, which would be pruned.
    """
    instead = "stop it (a killed torchrun leaves its workers behind), or choose another --run_name"
    ckpt_dir = folder / "ckpt"
    with ExitStack() as locks:
        lock = locks.enter_context(closing(Lock(folder, instead)))
        if ckpt_dir.is_symlink() and ckpt_dir.is_dir():
            linked = ckpt_dir.resolve()
            of_another = linked.parent != folder.resolve() and is_run(linked.parent)
            if numbered(linked) and (of_another or not (folder / "metrics.jsonl").exists()):
                problem = f"{ckpt_dir} is a link to the checkpoints of another run, {linked}"
                raise UserError(f"{problem}: remove it, or choose another --run_name")
            locks.enter_context(closing(Lock(linked, instead)))
        yield lock

"""The folder of a run, out/RUN: find its checkpoints, check them, and delete what the run wrote.

training/checkpoint.py writes the checkpoints. training/resume.py decides which one a run starts
from. Nothing here deletes a file that train.py did not write.
"""

import math
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from configurator import UserError, note
from hardware.disk import LOCK, MANIFEST, Lock, damage, read_object, remove_only, set_aside
from text.hf_tokenizer import HF_FILES
from text.tokenizer import SentencePiece, Tiktoken
from training.metrics import read_metrics

# The files of a checkpoint that this program writes, and may delete: in the folder itself, and in
# its folder `average`.
OURS = {"model.safetensors", "config.json", "train_state.pt", "train_config.json", "meta.json"}
OURS |= {MANIFEST, SentencePiece.file, Tiktoken.file, *HF_FILES}


# --------------------------------------------------------------------------------------------------
# Checkpoints: find them, check them, delete them


def numbered(ckpt_dir: Path) -> list[Path]:
    """Return the checkpoints in a folder, complete or not, newest first.

    Whatever is named step_ and a number counts as one. Raises UserError if the folder cannot be
    listed: checkpoints that cannot be seen must not be taken for checkpoints that do not exist.
    """
    try:
        names = os.listdir(ckpt_dir)
    except FileNotFoundError:
        if ckpt_dir.is_symlink():
            broken = f"{ckpt_dir} is a link to {os.readlink(ckpt_dir)}, which is not there"
            raise UserError(f"{broken}: is its disk mounted?") from None
        return []
    except OSError as e:
        raise UserError(f"{ckpt_dir}: cannot look for checkpoints: {e.strerror}") from None
    paths = [ckpt_dir / name for name in names if re.fullmatch(r"step_[0-9]{8,18}", name)]
    return sorted(paths, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def check_step(path: Path) -> None:
    """Raise UserError if a checkpoint, or the average in one, bears the number of another step.

    Raises OSError or ValueError if its meta.json cannot be read. A model folder of another program
    has none.
    """
    checkpoint = path.parent if path.name == "average" else path
    if re.fullmatch(r"step_[0-9]+", checkpoint.name) and (path / "meta.json").exists():
        step = read_object(path / "meta.json").get("step", step_of(checkpoint))
        if step != step_of(checkpoint):
            renamed = "it was renamed, or copied from another"
            raise UserError(f"{path} holds step {step}: {renamed}: move it elsewhere")


def whole_checkpoints(ckpt_dir: Path) -> list[Path]:
    """Return the checkpoints that have a manifest, newest first. The manifest is written last."""
    return [path for path in numbered(ckpt_dir) if (path / MANIFEST).is_file()]


def newest_checkpoint(ckpt_dir: Path) -> Path | None:
    return next(iter(whole_checkpoints(ckpt_dir)), None)


def newest_run(out_dir: Path) -> Path | None:
    """Return the run, out_dir/RUN, that has saved a checkpoint last, or None if there is none.

    Runs that --overwrite has moved out of the way do not count.
    """
    saved: dict[float, Path] = {}  # time of its newest checkpoint -> run
    for ckpt_dir in out_dir.glob("*/ckpt"):
        if re.search(r"\.old-[0-9]+$", ckpt_dir.parent.name):
            continue
        try:
            newest = newest_checkpoint(ckpt_dir)
            if newest:
                saved[(newest / MANIFEST).stat().st_mtime] = ckpt_dir.parent
        except (UserError, OSError) as e:
            note(str(e))  # a disk is not mounted, or the run has just deleted this checkpoint
    return saved[max(saved)] if saved else None


def losses_of(run: Path) -> dict[Path, float]:
    """Return the validation loss of each checkpoint of a run that was evaluated, newest first.

    Raises UserError if metrics.jsonl is damaged.
    """
    records = read_metrics(run / "metrics.jsonl")
    losses = {
        r["step"]: r["val_loss"] for r in records if math.isfinite(r.get("val_loss", math.nan))
    }
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


def not_ours(checkpoint: Path) -> str:
    """Return the name of something in a checkpoint that train.py did not write, or ""."""
    average = checkpoint / "average"
    ours = {average} | {folder / name for folder in (checkpoint, average) for name in OURS}
    others = [path for path in checkpoint.rglob("*") if path.is_symlink() or path not in ours]
    return str(min(others).relative_to(checkpoint)) if others else ""


def discard(path: Path) -> str:
    """Delete a checkpoint. If it must not be deleted, leave it as it is and return the reason.

    A file that somebody has edited, such as tokenizer_config.json, is theirs. Only the small files
    are looked at.
    """
    if path.is_symlink():
        return "it is a link"
    if not path.is_dir():
        return "it is not a folder"
    if other := not_ours(path):
        return f"it holds {other}, which train.py did not write"
    for folder in (path, path / "average"):
        if (folder / MANIFEST).is_file():
            changed = damage(folder, OURS - {"model.safetensors", "train_state.pt"})
            if changed:
                return f"somebody has edited it ({changed})"
    # It is renamed first, so that nobody finds half a checkpoint under its name.
    remove_checkpoint(set_aside(path))
    return ""


def remove_checkpoint(folder: Path) -> None:
    """Delete the files of a checkpoint, whole or not, and its folders if they are then empty."""
    if not folder.is_symlink():
        remove_only(folder / "average", OURS)
        remove_only(folder, OURS)


def keep_aside(path: Path) -> str:
    """Rename what is in the way to step_N_kept-1 (or -2, ...), which nothing here touches again.

    Return what there is to say about it.
    """
    kept = path.rename(free_name(path.with_name(f"{path.name}_kept")))
    return f"note: {path} is kept as {kept.name}"


def free_name(path: Path) -> Path:
    """Return `path` with -1, -2, ... appended to its name: the first that does not exist."""
    number = 1
    while os.path.lexists(path.with_name(f"{path.name}-{number}")):
        number += 1
    return path.with_name(f"{path.name}-{number}")


# --------------------------------------------------------------------------------------------------
# The folder of a run: out/RUN


def is_run(folder: Path) -> bool:
    """Return whether train.py has written a run to this folder.

    The content of the files decides, not their names: anybody may have a folder called ckpt.
    """
    try:
        if any("step_samples" in record for record in read_metrics(folder / "metrics.jsonl")):
            return True
    except (UserError, OSError):
        pass  # the file is damaged, or train.py did not write it
    checkpoints = [path for path in whole_checkpoints(folder / "ckpt") if not path.is_symlink()]
    return any((path / "train_state.pt").exists() for path in checkpoints)


def others_in(folder: Path) -> list[str]:
    """Return, sorted, what is in a folder that is not of a run.

    If there is anything, find_origin() refuses the folder, unless it is a run already. For
    metrics.jsonl, find_origin() has a check of its own.
    """
    ours = {LOCK, "metrics.jsonl", ".metrics.jsonl.tmp", "ckpt", "wandb", "swanlog", "tensorboard"}
    return sorted(set(os.listdir(folder)) - ours) if folder.is_dir() else []


def replace_run(folder: Path, lock: Lock) -> Path | None:
    """Move an earlier run out of the way, and lock a new folder under its name.

    All that is in out/RUN goes with it, to out/RUN.old-1 (or -2, ...), which this program never
    touches again. Return that folder, or None if there is no earlier run.
    """
    if not is_run(folder):
        return None
    earlier = free_name(folder.with_name(f"{folder.name}.old"))
    folder.rename(earlier)
    (earlier / LOCK).unlink(missing_ok=True)
    lock.renew()
    return earlier


def tidy(ckpt_dir: Path, step: int) -> list[str]:
    """Clear the way for a run that begins, or goes on, with this step. Return what there is to say.

    Delete what a process left that was killed while it saved or deleted a checkpoint. Checkpoints
    of later steps are damaged, or the run would go on from there: they are renamed.
    """
    for path in ckpt_dir.glob(".*step_*"):
        if re.fullmatch(r"\.tmp_step_[0-9]+-[0-9a-f]{8}|\.step_[0-9]+\.old[0-9]*", path.name):
            remove_checkpoint(path)
    return [keep_aside(path) for path in numbered(ckpt_dir) if step_of(path) > step]


@contextmanager
def run_folder(folder: Path) -> Iterator[Lock]:
    """Hold the lock of a run's folder, so that no other process decides or writes anything in it.

    If ckpt is a link, the folder that it leads to is locked as well. The folder is made if it does
    not exist, and removed again if nothing was put into it. Raises UserError if another process
    holds a lock, or if ckpt is a link to the checkpoints of another run.
    """
    made = [path for path in folder.parents if not path.exists()]
    stop = "stop it (a killed torchrun can leave its workers behind)"
    instead = f"{stop}, or choose another --run_name"
    ckpt_dir = folder / "ckpt"
    try:
        with ExitStack() as locks:
            lock = locks.enter_context(closing(Lock(folder, instead)))
            if ckpt_dir.is_symlink() and ckpt_dir.is_dir():
                check_link(folder, ckpt_dir)
                locks.enter_context(closing(Lock(ckpt_dir.resolve(), instead)))
            yield lock
    finally:
        try:
            for path in made:
                path.rmdir()  # fails unless the folder is empty
        except OSError:
            pass


def check_link(folder: Path, ckpt_dir: Path) -> None:
    """Raise UserError if ckpt is a link to checkpoints of another run, which would be pruned."""
    home = ckpt_dir.resolve().parent
    of_another = home != folder.resolve() and is_run(home)
    if numbered(ckpt_dir) and (of_another or not os.path.lexists(folder / "metrics.jsonl")):
        problem = f"{ckpt_dir} is a link to the checkpoints of another run, {ckpt_dir.resolve()}"
        raise UserError(f"{problem}: remove the link, or choose another --run_name")

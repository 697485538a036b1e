"""The folder of a run, out/RUN: whether it is one, which is the newest, who may write there, and
what is cleared away before.

training/checkpoint.py has the checkpoints in it. training/resume.py decides what a run starts from.
Nothing here deletes a file that train.py did not write.
"""

import math
import re
from pathlib import Path

from configurator import UserError, note
from hardware.disk import LOCK, MANIFEST, Lock, remove_only, set_aside
from training.checkpoint import OUR_FILES, newest_checkpoint, numbered, step_of, whole_checkpoints
from training.metrics import read_metrics


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
        except OSError as e:
            note(str(e))  # a disk fails, or the run has just deleted this checkpoint
    return max(saved, key=saved.get, default=None)


def losses_of(run: Path) -> dict[Path, float]:
    """Return the validation loss of each checkpoint of a run that was evaluated, newest first.

    Raises UserError if metrics.jsonl is damaged.
    """
    records = read_metrics(run / "metrics.jsonl")
    losses = {r["step"]: r["val_loss"] for r in records if r.get("val_loss", math.inf) < math.inf}
    checkpoints = whole_checkpoints(run / "ckpt")
    return {path: losses[step_of(path)] for path in checkpoints if step_of(path) in losses}


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


def lock_run(folder: Path) -> Lock:
    """Take the lock of a run's folder, so that no other process decides or writes anything in it.

    The folder is made if it does not exist; close() removes it again if nothing was put into it.
    Raises UserError if another process holds the lock, or if ckpt is a link: it may lead to the
    checkpoints of another run, which would be pruned, or to a disk that is not mounted.
    """
    if (folder / "ckpt").is_symlink():
        advice = "move what it leads to here; the folder of a run, or out_dir, may be a link"
        raise UserError(f"{folder / 'ckpt'} is a link: {advice}")
    instead = "stop it (a killed torchrun leaves its workers behind), or choose another --run_name"
    return Lock(folder, instead)


def tidy(folder: Path, step: int, records: list[dict]) -> list[str]:
    """Clear the way for a run that begins, or goes on, with this step. Return what there is to say.

    Delete what a process left that was killed while it saved or deleted a checkpoint. Checkpoints
    of later steps are damaged, or the run would go on from there: they are renamed. So is what a
    start with other settings recorded, which saved nothing. records: those of this run so far.
    """
    for path in folder.glob("ckpt/.tmp_step_*"):
        # as temporary() in training/checkpoint.py names it
        by_us = re.fullmatch(r"\.tmp_step_[0-9]+-[0-9a-f]{8}", path.name)
        if by_us and not path.is_symlink():
            remove_only(path, OUR_FILES)
    kept = {path: f"{path.name}_kept" for path in numbered(folder / "ckpt") if step_of(path) > step}
    path = folder / "metrics.jsonl"
    if read_metrics(path)[:1] not in ([], records[:1]):
        kept[path] = "metrics_kept.jsonl"
    return [f"note: {path} is kept as {set_aside(path, name)}" for path, name in kept.items()]

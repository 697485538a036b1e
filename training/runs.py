"""The folder of a run, out/RUN: find its checkpoints, check them, and delete what the run wrote.

training/checkpoint.py writes the checkpoints, and averages of the weights beside them.
training/resume.py decides which checkpoint a run starts from. Nothing here deletes a file that
train.py did not write.
"""

import math
import os
import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from configurator import UserError, note
from hardware.disk import LOCK, MANIFEST, Lock, damage, read_object, remove_only, set_aside
from text.hf_tokenizer import HF_FILES
from text.tokenizer import SentencePiece, Tiktoken
from training.metrics import read_metrics

# The files of a checkpoint that this program writes, and may delete.
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
    found = [ckpt_dir / name for name in names if re.fullmatch(r"step_[0-9]{8,18}", name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def check_step(path: Path) -> None:
    """Raise UserError if a checkpoint or an average bears the number of another step.

    Raises OSError or ValueError if its meta.json cannot be read. A model folder of another program
    has none.
    """
    if re.fullmatch(r"step_[0-9]+", path.name) and (path / "meta.json").exists():
        step = read_object(path / "meta.json").get("step", step_of(path))
        if step != step_of(path):
            renamed = "it was renamed, or copied from another"
            raise UserError(f"{path} holds step {step}: {renamed}: move it elsewhere")


def whole_checkpoints(ckpt_dir: Path) -> list[Path]:
    """Return the checkpoints that have a manifest, newest first. The manifest is written last."""
    return [path for path in numbered(ckpt_dir) if (path / MANIFEST).is_file()]


def newest_checkpoint(ckpt_dir: Path) -> Path | None:
    return next(iter(whole_checkpoints(ckpt_dir)), None)


def newest_run(out_dir: Path) -> Path | None:
    """Return the run, out_dir/RUN, that has saved a checkpoint last, or None if there is none."""
    found: dict[float, Path] = {}  # time of its newest checkpoint -> run
    for ckpt_dir in out_dir.glob("*/ckpt"):
        try:
            newest = newest_checkpoint(ckpt_dir)
            if newest:
                found[(newest / MANIFEST).stat().st_mtime] = ckpt_dir.parent
        except (UserError, OSError) as e:
            note(str(e))  # a disk is not mounted, or the run has just deleted this checkpoint
    return found[max(found)] if found else None


def losses_of(run: Path) -> dict[Path, float]:
    """Return the validation loss of each checkpoint of a run that was evaluated, newest first.

    Raises UserError if metrics.jsonl is damaged.
    """
    records = read_metrics(run / "metrics.jsonl")
    losses = {
        r["step"]: r["val_loss"] for r in records if math.isfinite(r.get("val_loss", math.nan))
    }
    there = whole_checkpoints(run / "ckpt")
    return {path: losses[step_of(path)] for path in there if step_of(path) in losses}


def newest_intact(ckpt_dir: Path) -> tuple[Path | None, dict[str, str]]:
    """Return the newest checkpoint whose files are all as its manifest says, or None.

    The second result names each newer checkpoint, with what is wrong with it.
    """
    wrong: dict[str, str] = {}
    for folder in numbered(ckpt_dir):
        found = damage(folder, required=("model.safetensors", "config.json", "train_state.pt"))
        if not found:
            return folder, wrong
        wrong[folder.name] = found
    return None, wrong


def discard(path: Path, known_damaged: bool = False) -> str:
    """Delete a checkpoint. If it must not be deleted, leave it as it is and return the reason.

    A file that somebody has edited, such as tokenizer_config.json, is theirs. Only the small files
    are looked at; and not if the checkpoint is known to be damaged.
    """
    if path.is_symlink():
        return "it is a link"
    if not path.is_dir():
        return "it is not a folder"
    others = sorted(set(os.listdir(path)) - OURS)
    if others:
        return f"it holds {others[0]}, which train.py did not write"
    if not known_damaged and (path / MANIFEST).is_file():
        changed = damage(path, OURS - {"model.safetensors", "train_state.pt"})
        if changed:
            return f"somebody has edited it ({changed})"
    # It is renamed first, so that nobody finds half a checkpoint under its name.
    remove_only(set_aside(path), OURS)
    return ""


def make_way(target: Path, required: Collection[str] = ()) -> None:
    """Rename what stands at `target`, where a checkpoint will go, if it must not be replaced.

    It must not be replaced if it is no folder, or a folder that holds a file that train.py did not
    write, or that lacks a file of `required`, which train.py always writes. Its new name is
    step_N_kept-1 (or -2, ...), and this program never touches it again.
    """
    if not os.path.lexists(target):
        return
    is_folder = target.is_dir() and not target.is_symlink()
    names = set(os.listdir(target)) if is_folder else set()
    if not is_folder or names - OURS or set(required) - names:
        target.rename(free_name(target.with_name(f"{target.name}_kept")))


def free_name(path: Path) -> Path:
    """Return `path` with -1, -2, ... appended to its name: the first that does not exist."""
    number = 1
    while os.path.lexists(found := path.with_name(f"{path.name}-{number}")):
        number += 1
    return found


# --------------------------------------------------------------------------------------------------
# The folder of a run: out/RUN

REPLACED = "why-this-is-here.txt"  # replace_run() puts this file into each folder that it makes
# Beside ckpt/ and bad_steps/. wandb/ belongs to wandb.
RUN_FILES = ["metrics.jsonl", "loss.png", "follow.json"]


def averages(folder: Path) -> list[Path]:
    """Return the averages that a run has saved in out/RUN/average, newest first.

    Only a folder with a manifest counts: one that lacks it is somebody's own average.
    """
    place = folder / "average"
    found = whole_checkpoints(place) if place.is_dir() else []
    return [path for path in found if not path.is_symlink()]


def is_run(folder: Path) -> bool:
    """Return whether train.py has written a run to this folder.

    The content of the files decides, not their names: anybody may have a folder called ckpt.
    """
    for place in (folder, *replaced(folder)):  # a kill in replace_run() leaves a part in each
        try:
            if any("step_samples" in record for record in read_metrics(place / "metrics.jsonl")):
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
    inside = set(os.listdir(folder)) if folder.is_dir() else set()
    ours = {LOCK, "metrics.jsonl", ".metrics.jsonl.tmp", "ckpt", "wandb", "swanlog", "tensorboard"}
    ours |= {path.name for path in replaced(folder)}
    if replaced(folder / "average"):  # else it may be somebody's, or all that is left of a run
        ours.add("average")
    return sorted(inside - ours)


def replaced(folder: Path) -> list[Path]:
    """Return the folders to which replace_run() has moved what was in `folder`.

    They are known by the file REPLACED that it left in them, not by their names replaced-N alone.
    """
    found = folder.glob("replaced-*")
    return [path for path in found if (path / REPLACED).is_file() and not path.is_symlink()]


def sweep(folder: Path) -> None:
    """Delete what a process left behind that was killed while it saved or deleted a checkpoint."""
    left = re.compile(r"\.tmp_step_[0-9]+(-[0-9a-f]{8})?|\.step_[0-9]+\.old[0-9]*")
    places = [folder / "ckpt", folder / "average"]
    for place in [*places, *replaced(places[0]), *replaced(places[1])]:
        for path in place.glob(".*step_*"):
            if left.fullmatch(path.name):
                remove_only(path, OURS)


def replace_run(folder: Path) -> Path | None:
    """Move the earlier run's own files aside. Everything else stays where it is.

    They go to new folders replaced-N in out/RUN, out/RUN/ckpt and out/RUN/average. Saver.prune()
    deletes them once the new run has a complete checkpoint. Returns the folder replaced-N in
    out/RUN/ckpt, or None if there is none.
    """
    ckpt_dir = folder / "ckpt"
    its_own = {
        folder: [*RUN_FILES, *bad_step_texts(folder)],
        ckpt_dir: [path.name for path in numbered(ckpt_dir)],
        folder / "average": [path.name for path in averages(folder)],
    }
    why = "train.py deletes this folder's run once the new one has a checkpoint.\n"
    for place, names in its_own.items():
        there = [name for name in names if os.path.lexists(place / name)]
        if there:
            aside = free_name(place / "replaced")
            aside.mkdir()
            (aside / REPLACED).write_text(why)
            for name in there:
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                (place / name).rename(aside / name)
    remove_only(folder / "bad_steps", [])
    return max(replaced(ckpt_dir), key=lambda path: (len(path.name), path.name), default=None)


def bad_step_texts(folder: Path) -> list[str]:
    """Return the files bad_steps/step_N.txt of a run, relative to its folder."""
    texts = folder / "bad_steps"
    names = os.listdir(texts) if texts.is_dir() and not texts.is_symlink() else []
    return [f"bad_steps/{name}" for name in names if re.fullmatch(r"step_[0-9]{8,}\.txt", name)]


def remove_run_files(folder: Path) -> None:
    """Delete a run's own files from a folder replaced-N, then the folder itself if it is empty."""
    remove_only(folder / "bad_steps", [Path(name).name for name in bad_step_texts(folder)])
    remove_only(folder, [*RUN_FILES, REPLACED])


@contextmanager
def run_folder(folder: Path) -> Iterator[Lock]:
    """Hold the lock of a run's folder, so that no other process decides or writes anything in it.

    If ckpt or average is a link, what it links to is locked as well. The folder is made if it does
    not exist, and removed again if nothing was put into it. Raises UserError if another process
    holds a lock, or if such a link leads to another run.
    """
    made = [path for path in folder.parents if not path.exists()]
    stop = "stop it (a killed torchrun can leave its workers behind)"
    instead = f"{stop}, or choose another --run_name"
    try:
        with ExitStack() as locks:
            lock = locks.enter_context(closing(Lock(folder, instead)))
            for place in linked(folder):
                locks.enter_context(closing(Lock(place, instead)))
            yield lock
    finally:
        try:
            for path in made:
                path.rmdir()  # fails unless the folder is empty
        except OSError:
            pass


def linked(folder: Path) -> list[Path]:
    """Return the folders that ckpt and average of a run are links to.

    Raises UserError if one of them is of another run, which would be pruned like this one's own.
    """
    places = (folder / "ckpt", folder / "average")
    links = [place for place in places if place.is_symlink() and place.is_dir()]
    for place in links:
        home = place.resolve().parent
        elsewhere = home != folder.resolve() and is_run(home)
        if numbered(place) and (elsewhere or not os.path.lexists(folder / "metrics.jsonl")):
            problem = f"{place} is a link to the checkpoints of another run, {place.resolve()}"
            raise UserError(f"{problem}: remove the link, or choose another --run_name")
    return [place.resolve() for place in links]

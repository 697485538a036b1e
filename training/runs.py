"""out/RUN on the disk: finding checkpoints, judging them, and deleting what is a run's own."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from configurator import UserError
from hardware.disk import (
    MANIFEST,
    Lock,
    damage,
    remove_only,
    set_aside,
)
from text.hf_tokenizer import HF_FILES
from text.tokenizer import SentencePiece, Tiktoken
from training.plots import read_metrics

OURS = {"model.safetensors", "config.json", "train_state.pt", "train_config.json", "meta.json", MANIFEST}
OURS |= {SentencePiece.file, Tiktoken.file, *HF_FILES}


# ---------------------------------------------------------------------------------------------------------------------
# Finding, judging and deleting them


def numbered(ckpt_dir: Path) -> list[Path]:
    """The checkpoints in a folder by their names, step_ and a number, whole or not; the newest first.

    UserError where one cannot look: checkpoints that are not seen must not be taken for none.
    """
    try:
        names = os.listdir(ckpt_dir)
    except FileNotFoundError:
        if ckpt_dir.is_symlink():
            leads = f"{ckpt_dir} is a link to {os.readlink(ckpt_dir)}, which is not there"
            raise UserError(f"{leads}: is its disk mounted?") from None
        return []
    except OSError as e:
        raise UserError(f"{ckpt_dir}: its checkpoints cannot be looked for: {e.strerror}") from None
    found = [ckpt_dir / name for name in names if re.fullmatch(r"step_[0-9]{8,18}", name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def whole_checkpoints(ckpt_dir: Path) -> list[Path]:
    """Newest first. Whole means that the manifest, which is written last, is there."""
    return [path for path in numbered(ckpt_dir) if (path / MANIFEST).is_file()]


def newest_checkpoint(ckpt_dir: Path) -> Path | None:
    return next(iter(whole_checkpoints(ckpt_dir)), None)


def newest_intact(ckpt_dir: Path) -> tuple[Path | None, dict[str, str]]:
    """(the newest checkpoint all of whose files are what they were, {name of a newer one: what is wrong with it})."""
    wrong: dict[str, str] = {}
    for folder in numbered(ckpt_dir):
        found = damage(folder, required=("model.safetensors", "config.json", "train_state.pt"))
        if not found:
            return folder, wrong
        wrong[folder.name] = found
    return None, wrong


def discard(path: Path) -> str:
    """Delete a checkpoint; where it must not be deleted, say why."""
    if path.is_symlink() or not path.is_dir():
        return "it is a link" if path.is_symlink() else "it is no folder"
    if others := sorted(set(os.listdir(path)) - OURS):
        return f"it holds {others[0]}, which is not of this program"
    remove_only(set_aside(path), OURS)  # first the name: nobody shall find half a checkpoint
    return ""


def make_way(target: Path) -> None:
    """Where a checkpoint is to be replaced that holds somebody's file, or is a link: rename it, for good."""
    others = target.is_dir() and set(os.listdir(target)) - OURS
    if target.is_symlink() or others:
        target.rename(free_name(target.with_name(f"{target.name}_kept")))


def free_name(path: Path) -> Path:
    number = 1
    while os.path.lexists(found := path.with_name(f"{path.name}-{number}")):
        number += 1
    return found


# ---------------------------------------------------------------------------------------------------------------------
# The folder of a run: out/RUN

REPLACED = "why-this-is-here.txt"  # in each folder replaced-N that is ours
RUN_FILES = ["metrics.jsonl", "loss.png"]  # beside ckpt/ and bad_steps/; wandb/ belongs to wandb


def is_run(folder: Path) -> bool:
    """Did train.py write here? By what is in the files, not by their names: anybody may have a folder ckpt."""
    try:
        if any("step_samples" in record for record in read_metrics(folder / "metrics.jsonl")):
            return True
    except (UserError, OSError):
        pass  # damaged, or no file of ours
    checkpoints = [path for path in whole_checkpoints(folder / "ckpt") if not path.is_symlink()]
    return any((path / "train_state.pt").exists() for path in checkpoints)


def others_in(folder: Path) -> list[str]:
    """What lies in the folder of no run, and would be in the way of one; metrics.jsonl is asked for apart."""
    inside = set(os.listdir(folder)) if folder.is_dir() else set()
    ours = {"metrics.jsonl", ".metrics.jsonl.tmp", "ckpt", "wandb", *(p.name for p in replaced(folder))}
    return sorted(inside - ours)


def replaced(folder: Path) -> list[Path]:
    """Where replace_run() has put what was in the folder; known by the file that it left there."""
    return [path for path in folder.glob("replaced-*") if (path / REPLACED).is_file() and not path.is_symlink()]


def sweep(ckpt_dir: Path) -> None:
    """Delete what a kill inside a save, or inside a deletion, has left."""
    left = re.compile(r"\.tmp_step_[0-9]+|\.step_[0-9]+\.old[0-9]*")
    for place in (ckpt_dir, *replaced(ckpt_dir)):
        for path in place.glob(".*step_*"):
            if left.fullmatch(path.name):
                remove_only(path, OURS)


def replace_run(folder: Path) -> Path | None:
    """Move the earlier run's own files into folders replaced-1, from which Saver.prune deletes them once the
    new run has a whole checkpoint; returns where its checkpoints are. Everything else stays where it is.
    """
    ckpt_dir = folder / "ckpt"
    in_run, in_ckpt = [*RUN_FILES, *bad_step_texts(folder)], [p.name for p in numbered(ckpt_dir)]
    for place, names in ((folder, in_run), (ckpt_dir, in_ckpt)):
        if there := [name for name in names if os.path.lexists(place / name)]:
            aside = free_name(place / "replaced")
            aside.mkdir()
            (aside / REPLACED).write_text("train.py deletes this folder's run once the new one has a checkpoint.\n")
            for name in there:
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                (place / name).rename(aside / name)
    remove_only(folder / "bad_steps", [])
    return max(replaced(ckpt_dir), default=None)


def bad_step_texts(folder: Path) -> list[str]:
    """bad_steps/step_N.txt, those that are there."""
    texts = folder / "bad_steps"
    names = os.listdir(texts) if texts.is_dir() and not texts.is_symlink() else []
    return [f"bad_steps/{name}" for name in names if re.fullmatch(r"step_[0-9]{8,}\.txt", name)]


def remove_run_files(folder: Path) -> None:
    """Delete a run's own files from a folder replaced-N, and it, unless it holds something else."""
    remove_only(folder / "bad_steps", [Path(name).name for name in bad_step_texts(folder)])
    remove_only(folder, [*RUN_FILES, REPLACED])


@contextmanager
def run_folder(folder: Path) -> Iterator[Lock]:
    """Hold the run's folder, so that no other process decides or writes anything in it meanwhile.

    It is made if it is not there, and removed again if nothing was put into it.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    held = Lock(folder, "stop it (a killed torchrun can leave its workers behind), or choose another --run_name")
    try:
        yield held
    finally:
        try:
            for path in made:
                path.rmdir()  # which only an empty folder can be
        except OSError:
            pass
        held.close()

"""The scratch folder beside a data set, and which files in both folders prepare.py may delete."""

import os
import re
from contextlib import suppress
from pathlib import Path

from configurator import UserError, note
from hardware.disk import LOCK, Lock, file_sha256, put_in_place, remove_only, unseal
from text.dataset import files_of
from text.hf_tokenizer import HF_FILES
from text.tokenizer import SentencePiece, Tiktoken

# What prepare.py makes in the scratch folder: these folders, and in them files of these names.
FOLDERS = re.compile(r"part\d+|cut|set")
FILES = {SentencePiece.file, Tiktoken.file, *HF_FILES, "meta.json", "journal.json"}
FILES |= {"train.bin", "val.bin", "rows.bin"}
FILES |= {LOCK, *(f".{name}.tmp" for name in FILES)}

AWAY = "move it away, or choose another --name"  # what an error about a user's file suggests


def claim(target: Path, scratch: Path) -> Lock:
    """Lock the scratch folder and return the lock.

    Raises UserError if another prepare.py holds the lock, or if one of the two folders contains
    something that prepare.py did not write.
    """
    if scratch.is_symlink():
        raise UserError(f"{scratch} is a link, but prepare.py works there: {AWAY}")
    lock = Lock(scratch, "choose another --name")
    try:
        for path in sorted(scratch.rglob("*")):
            if path.parent == scratch:
                is_ours = path.name == LOCK or FOLDERS.fullmatch(path.name)
            else:
                is_ours = path.name in FILES and FOLDERS.fullmatch(path.parent.name)
            if path.is_symlink() or not is_ours:
                raise UserError(f"{path}: prepare.py works here, but did not write it: {AWAY}")
        pattern = re.compile(rf"\.{re.escape(target.name)}\.old\d*")
        old_sets = sorted(p for p in target.parent.iterdir() if pattern.fullmatch(p.name))
        if old_sets and not os.path.lexists(target) and (scratch / "set" / "meta.json").exists():
            # A kill between the renames of replace_set() may have left the data set there.
            with suppress(UserError):
                own_files(old_sets[-1])
                old_sets.pop().rename(target)
        if os.path.lexists(target):
            own_files(target)
            for old in old_sets:
                remove_old(old)
        return lock
    except BaseException:
        lock.close()
        raise


def own_files(folder: Path) -> dict[str, str]:
    """Return {name: SHA-256} of the files of a data set; meta.json is the last one, with "".

    Raises UserError if the folder contains anything else: it may be where a user keeps a corpus.
    """
    if folder.is_symlink() or not folder.is_dir():
        raise UserError(f"{folder} exists and is no data set: {AWAY}")
    files = {}  # none, if meta.json is not of prepare.py, or was changed
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        meta = unseal(folder / "meta.json")
        files = {f"{split}.bin": meta["splits"][split]["sha256"] for split in ("train", "val")}
        files |= files_of(meta["tokenizer"]) | {"meta.json": ""}
    present = sorted(os.listdir(folder))
    for name in present:
        if name not in files:
            raise UserError(f"{folder}: {name!r} is not of a data set by prepare.py: {AWAY}")
    return {name: sha256 for name, sha256 in files.items() if name in present}


def remove_old(old: Path) -> None:
    """Delete a data set that was replaced, or say in a note why it stays.

    A file that does not have the hash in meta.json may be a user's own. meta.json is deleted last:
    if this is killed, the next run knows by it that the rest is ours.
    """
    try:
        files = own_files(old)
        for name, sha256 in files.items():
            if sha256 and file_sha256(old / name) != sha256:
                raise UserError(f"{name} is not what meta.json says")
        remove_only(old, files)
    except (UserError, OSError) as e:  # an OSError where it is another user's, for example
        note(f"{old} stays: {e}")


def replace_set(new: Path, target: Path) -> None:
    """Put the finished folder in the place of the old data set, then delete the old one.

    Two kinds of old data sets stay: one with a file that prepare.py did not write, as .NAME.old;
    and one that shares no input file with the new one, as NAME.old.
    """
    is_other = (target / "meta.json").exists() and inputs_of(target).isdisjoint(inputs_of(new))
    # claim() looks for .NAME.old after a kill.
    old = put_in_place(new, target, f"{target.name}.old" if is_other else f".{target.name}.old")
    if is_other:
        note(f"the data set of that name, which was made of other files, is {old} now")
    elif old:
        remove_old(old)


def inputs_of(folder: Path) -> set[str]:
    """Return path and hash of each file that a data set was made of, as one text."""
    sources = unseal(folder / "meta.json")["sources"]
    return {f"{s['path']} {s.get('sha256')}" for s in sources if "skipped" not in s}


def remove_scratch(scratch: Path) -> None:
    """Delete what prepare.py wrote in the scratch folder. Its lock is still held, and stays."""
    for path in scratch.glob("*"):
        if FOLDERS.fullmatch(path.name):
            remove_only(path, FILES)

"""The scratch folder beside a data set, and which files in both folders prepare.py may delete."""

import hashlib
import json
import os
import re
import unicodedata
from pathlib import Path
from typing import Any

from configurator import UserError, note
from hardware.disk import (
    LOCK,
    Lock,
    file_sha256,
    put_in_place,
    read_object,
    remove_only,
    set_aside,
    unseal,
)
from text.dataset import files_of, tokenizer_files
from text.hf_tokenizer import HF_FILES
from text.tokenizer import SentencePiece, Tiktoken

TOKENIZER_FILES = {SentencePiece.file, Tiktoken.file, *HF_FILES}
PART_FILES = {"train.bin", "val.bin", "rows.bin", "journal.json"}
PART_FILES |= {LOCK, *(f".{name}.tmp" for name in PART_FILES)}

# The folders in the scratch folder and the files in them. "part" stands for part0, part1, ...
WORK = {
    "tokenizer": {*TOKENIZER_FILES, "info.json", ".info.json.tmp"},
    "part": PART_FILES,
    "cut": PART_FILES,
    "set": {*TOKENIZER_FILES, "train.bin", "val.bin", "meta.json", ".meta.json.tmp"},
}

STDIN = "stdin"  # the file in the scratch folder that standard input is copied to

SPLITS = {"train", "val"}
AWAY = "move it away, or choose another --name"  # what an error about a user's file suggests


def work_files(folder: Path) -> set[str]:
    """Return the names of the files that prepare.py writes in a folder of the scratch folder."""
    return WORK.get(re.sub(r"(?<=^part)\d+$", "", folder.name), set())


def claim(target: Path, scratch: Path) -> Lock:
    """Lock the scratch folder and return the lock.

    Raises UserError if another prepare.py holds the lock, or if one of the two folders contains
    something that prepare.py did not write.
    """
    if scratch.is_symlink():
        needs = "prepare.py needs a folder of its own there"
        raise UserError(f"{scratch} is a link, but {needs}: remove the link")
    held = Lock(scratch, "choose another --name")
    try:
        for path in sorted(scratch.rglob("*")):
            in_a_folder = path.parent != scratch and path.name in work_files(path.parent)
            at_the_top = path.parent == scratch and (work_files(path) or path.name in (STDIN, LOCK))
            if path.is_symlink() or not (in_a_folder or at_the_top):
                place = "is in the folder that prepare.py works in"
                reason = "this version of prepare.py did not write it"
                raise UserError(f"{path} {place}, but {reason}: {AWAY}")
        bring_back(target, scratch)
        names = [unicodedata.normalize("NFC", name) for name in os.listdir(target.parent)]
        if target.exists() and unicodedata.normalize("NFC", target.name) not in names:
            same = "this disk does not distinguish this name from that of an existing folder"
            raise UserError(f"{target}: {same}: choose another --name")
        names_in_set(target)
        for name in names:
            if target.exists() and re.fullmatch(rf"\.{re.escape(target.name)}\.old\d*", name):
                remove_old(target.with_name(name))
        return held
    except BaseException:
        held.close()
        raise


def bring_back(target: Path, scratch: Path) -> None:
    """Give the old data set its name back if a kill between two renames took it away.

    These are the renames of put_in_place(), on a disk that cannot exchange two names in one step.
    """
    old = target.with_name(f".{target.name}.old")
    another = target.with_name(f".{target.name}.old2")
    finished = (scratch / "set" / "meta.json").exists()
    if finished and old.exists() and not os.path.lexists(target) and not os.path.lexists(another):
        try:
            names_in_set(old)
        except UserError:  # prepare.py did not write this folder
            return
        old.rename(target)


def names_in_set(folder: Path) -> list[str]:
    """Return the names of the files of a data set; [] if the folder does not exist.

    Raises UserError if the folder contains anything else: it may be where a user keeps a corpus.
    """
    if not os.path.lexists(folder):
        return []
    if folder.is_symlink() or not folder.is_dir():
        raise UserError(f"{folder} exists and is no data set: {AWAY}")
    present = sorted(path.name for path in folder.iterdir())
    names = set()  # of the files that belong to the data set
    if "meta.json" in present:
        try:
            meta = read_object(folder / "meta.json")
            if isinstance(meta["format_version"], int) and meta["splits"].keys() == SPLITS:
                names = {path.name for path in tokenizer_files(folder, meta["tokenizer"])}
                names |= {"train.bin", "val.bin", "meta.json"}
        except (OSError, ValueError) as e:
            raise UserError(f"{folder}/meta.json is damaged ({e}): {AWAY}") from None
        except (LookupError, TypeError, AttributeError):
            pass  # another program wrote this meta.json
    others = [name for name in present if name not in names]
    if others:
        holds = "holds" if names else "exists and is no data set: it holds"
        raise UserError(f"{folder} {holds} {others[0]!r}, which prepare.py did not write: {AWAY}")
    return present


def own_names(folder: Path) -> list[str]:
    """Return the names of the files of a data set, with meta.json as the last one.

    Raises UserError unless the files have the hashes of what prepare.py wrote: a file with the
    right name may still be a user's own file.
    """
    names = names_in_set(folder)
    if not names:
        return []
    try:
        meta = unseal(folder / "meta.json")
        hashes = {f"{split}.bin": counts["sha256"] for split, counts in meta["splits"].items()}
        hashes |= files_of(meta["tokenizer"])
        for name in names:
            path = folder / name
            if path.is_symlink() or (name in hashes and file_sha256(path) != hashes[name]):
                raise UserError(f"{path} is not what meta.json says, so it may be of somebody else")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as e:
        raise UserError(f"{folder}/meta.json was changed by something else ({e})") from None
    return sorted(names, key="meta.json".__eq__)


def remove_old(old: Path) -> None:
    """Delete a data set that was replaced before a kill, or say in a note why it stays."""
    try:
        remove_names(old, own_names(old))
    except UserError as e:
        note(f"{old} stays: {e}")


def remove_names(old: Path, names: list[str]) -> None:
    """Delete these files of a data set that was replaced, and note what stays.

    If this is killed, the next run knows by meta.json, the last one, that the rest is ours.
    """
    try:
        if not remove_only(old, names):
            note(f"{old} stays: it holds files that prepare.py did not write")
    except OSError as e:  # another user's files, for example
        note(f"{old} stays: {e}")


def replace_set(new: Path, target: Path) -> None:
    """Put the finished folder in the place of the old data set, then delete the old one.

    An old data set with a file that prepare.py did not write stays, as .NAME.old.
    """
    names = []
    try:
        names = own_names(target)
    except UserError as e:
        note(f"{set_aside(target)} stays: {e}")
    old = put_in_place(new, target)
    if old:
        remove_names(old, names)


def remove_scratch(scratch: Path) -> None:
    """Delete what prepare.py wrote in the scratch folder. Its lock is still held, and stays."""
    for path in scratch.glob("*"):
        remove_only(path, work_files(path))
    remove_only(scratch, [STDIN])
    if {*os.listdir(scratch)} - {LOCK}:
        note(f"{scratch} stays: it holds files that prepare.py did not write")


def fingerprint(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

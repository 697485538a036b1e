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
    content_sha256,
    file_sha256,
    put_in_place,
    read_object,
    remove_only,
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

AWAY = "move it away, or choose another --name"  # what an error about a user's file suggests


def work_files(folder: Path) -> set[str]:
    """Return the names of the files that prepare.py writes in a folder of the scratch folder."""
    return WORK.get(re.sub(r"(?<=^part)\d+$", "", folder.name), set())


def claim(target: Path, scratch: Path) -> tuple[Lock, dict[str, tuple]]:
    """Lock the scratch folder; return the lock and the files of the data set at `target`.

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
                where = "is in the folder that prepare.py works in"
                whose = "this version of prepare.py did not write it"
                raise UserError(f"{path} {where}, but {whose}: {AWAY}")
        bring_back(target, scratch)
        names = [unicodedata.normalize("NFC", name) for name in os.listdir(target.parent)]
        if target.exists() and unicodedata.normalize("NFC", target.name) not in names:
            same = "this disk does not distinguish this name from that of an existing folder"
            raise UserError(f"{target}: {same}: choose another --name")
        before = files_of_set(target)
        check_own(target, sorted(before))
        for name in names:
            if before and re.fullmatch(rf"\.{re.escape(target.name)}\.old\d*", name):
                remove_replaced(target.with_name(name))
        return held, before
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
            files_of_set(old)
        except UserError:  # prepare.py did not write this folder
            return
        old.rename(target)


def remove_replaced(old: Path, files: dict[str, tuple] | None = None) -> None:
    """Delete a data set that was replaced, or say in a note why it stays.

    files: those of the data set. None: it was left by a kill, and is only deleted if its files have
    the hashes of what prepare.py wrote.
    """
    try:
        if files is None:
            files = files_of_set(old)
            check_own(old, sorted(files))
        # meta.json goes last: if this is killed, the next run knows by it that the rest is ours.
        if not remove_only(old, sorted(files, key="meta.json".__eq__)):
            note(f"{old} stays: it holds files that prepare.py did not write")
    except (UserError, OSError) as e:  # another user's files, for example
        note(f"{old} stays: {e}")


def files_of_set(folder: Path) -> dict[str, tuple]:
    """Return name -> (inode, size, time of change) of the files of a data set; {} if there is none.

    Raises UserError if the folder contains anything else: it may be where a user keeps a corpus.
    """
    if not os.path.lexists(folder):
        return {}
    if folder.is_symlink() or not folder.is_dir():
        raise UserError(f"{folder} exists and is no data set: {AWAY}")
    present = sorted(path.name for path in folder.iterdir())
    names = set()  # of the files that belong to the data set
    if "meta.json" in present:
        try:
            meta = read_object(folder / "meta.json")
            version = meta["format_version"]
            splits = meta["splits"].keys()
            if isinstance(version, int) and splits == {"train", "val"}:
                names = {path.name for path in tokenizer_files(folder, meta["tokenizer"])}
                names |= {"train.bin", "val.bin", "meta.json"}
        except (OSError, ValueError) as e:
            raise UserError(f"{folder}/meta.json is damaged ({e}): {AWAY}") from None
        except (LookupError, TypeError, AttributeError):
            pass  # another program wrote this meta.json
    others = [name for name in present if name not in names]
    if others:
        what = "holds" if names else "exists and is no data set: it holds"
        raise UserError(f"{folder} {what} {others[0]!r}, which prepare.py did not write: {AWAY}")
    stats = {name: (folder / name).lstat() for name in present}
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def check_own(folder: Path, names: list[str]) -> None:
    """Raise UserError unless the files of a data set have the hashes of what prepare.py wrote.

    A file with the right name may still be a user's own file.
    """
    if not names:
        return
    meta = read_object(folder / "meta.json")
    if meta.get("sha256") != content_sha256(meta):
        raise UserError(f"{folder}/meta.json was changed by something else: {AWAY}")
    try:
        hashes = {f"{split}.bin": counts["sha256"] for split, counts in meta["splits"].items()}
        hashes |= files_of(meta["tokenizer"])
    except (LookupError, TypeError, AttributeError):
        what = "does not state the hashes of the data set's files"
        raise UserError(f"{folder}/meta.json {what}: {AWAY}") from None
    for name in names:
        path = folder / name
        if path.is_symlink() or not path.is_file():
            raise UserError(f"{path} is no plain file, so prepare.py did not write it: {AWAY}")
        if name in hashes and file_sha256(path) != hashes[name]:
            what = "does not have its hash from meta.json, so it may be another program's file"
            raise UserError(f"{path} {what}: {AWAY}")


def replace_set(new: Path, target: Path, before: dict[str, tuple]) -> None:
    """Put the finished folder in the place of the old data set, then delete the old one.

    before: the files of the old data set, as claim() returned them.
    Raises UserError if they have changed since then.
    """
    now = files_of_set(target)
    changed = [name for name in now.keys() | before if now.get(name) != before.get(name)]
    if changed:
        what = "was changed by something else meanwhile, so the data set was not replaced"
        raise UserError(f"{target / min(changed)} {what}")
    old = put_in_place(new, target)
    if old:
        remove_replaced(old, before)


def remove_scratch(scratch: Path) -> None:
    """Delete what prepare.py wrote in the scratch folder. Its lock is still held, and stays."""
    for path in scratch.glob("*"):
        remove_only(path, work_files(path))
    remove_only(scratch, [STDIN])
    if {*os.listdir(scratch)} - {LOCK}:
        note(f"{scratch} stays: it holds files that prepare.py did not write")


def fingerprint(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

"""The scratch folder beside a data set, and what in either of them is ours to delete."""

import hashlib
import json
import os
import re
import unicodedata
from pathlib import Path
from typing import Any

from configurator import UserError, note
from hardware.disk import Lock, content_sha256, file_sha256, put_in_place, read_object, remove_only
from text.dataset import tokenizer_files
from text.hf_tokenizer import HF_FILES
from text.tokenizer import SentencePiece, Tiktoken

TOKENIZER_FILES = {SentencePiece.file, Tiktoken.file, *HF_FILES}


PART_FILES = {"train.bin", "val.bin", "rows.bin", "journal.json"}


WORK = {  # the folders in the scratch folder (part0, part1, ...) and the files in them
    "tokenizer": {*TOKENIZER_FILES, "info.json", ".info.json.tmp"},
    "part": {*PART_FILES, *(f".{name}.tmp" for name in PART_FILES)},
    "set": {*TOKENIZER_FILES, "train.bin", "val.bin", "meta.json", ".meta.json.tmp"},
}


STDIN = "stdin"  # a file in the scratch folder: what was piped in


def work_files(folder: Path) -> set[str]:
    return WORK.get(re.sub(r"(?<=^part)\d+$", "", folder.name), set())


def claim(target: Path, scratch: Path) -> tuple[Lock, dict[str, tuple]]:
    """Lock the scratch folder: (the lock, the files of the data set that stands at `target`).

    UserError if another prepare.py has it, or if what is in the way was not written by prepare.py.
    """
    if scratch.is_symlink():
        raise UserError(f"{scratch} is a link, and prepare.py works there: remove it")
    held = Lock(scratch, "choose another --name")
    try:
        for path in sorted(scratch.rglob("*")):
            in_a_folder = path.parent != scratch and path.name in work_files(path.parent)
            at_the_top = path.parent == scratch and (work_files(path) or path.name == STDIN)
            if path.is_symlink() or not (in_a_folder or at_the_top):
                what = "is in the folder that prepare.py works in, and not of this prepare.py"
                raise UserError(f"{path} {what}: move it away, or choose another --name")
        bring_back(target, scratch)
        names = [unicodedata.normalize("NFC", name) for name in os.listdir(target.parent)]
        if target.exists() and unicodedata.normalize("NFC", target.name) not in names:
            raise UserError(f"{target}: this disk has that by another name: choose another --name")
        before = files_of_set(target)
        check_own(target, sorted(before))
        return held, before
    except BaseException:
        remove_only(scratch, ())  # where it was made for this
        held.close()
        raise


def bring_back(target: Path, scratch: Path) -> None:
    """Of a run that was killed between the two renames of put_in_place(): the old data set."""
    old, another = (target.with_name(f".{target.name}.old{n}") for n in ("", "2"))
    finished = (scratch / "set" / "meta.json").exists()
    if finished and old.exists() and not os.path.lexists(target) and not os.path.lexists(another):
        try:
            files_of_set(old)
        except UserError:  # somebody's own
            return
        old.rename(target)


def files_of_set(folder: Path) -> dict[str, tuple]:
    """name -> (inode, size, time of change) of the files of a data set; {} if nothing is there.

    UserError if anything else is there, a folder of somebody's corpus above all.
    """
    if not os.path.lexists(folder):
        return {}
    away = "move it away, or choose another --name"
    if folder.is_symlink() or not folder.is_dir():
        raise UserError(f"{folder} exists and is no data set: {away}")
    inside, names = sorted(path.name for path in folder.iterdir()), set()
    if "meta.json" in inside:
        try:
            meta = read_object(folder / "meta.json")
            version, splits = meta["format_version"], meta["splits"].keys()
            if isinstance(version, int) and splits == {"train", "val"}:
                names = {path.name for path in tokenizer_files(folder, meta["tokenizer"])}
                names |= {"train.bin", "val.bin", "meta.json"}
        except (OSError, ValueError) as e:
            raise UserError(f"{folder}/meta.json is damaged ({e}): {away}") from None
        except (LookupError, TypeError, AttributeError):
            pass  # that of another program
    if others := [name for name in inside if name not in names]:
        what = "holds" if names else "exists and is no data set: it holds"
        raise UserError(f"{folder} {what} {others[0]!r}, which prepare.py did not write: {away}")
    stats = {name: (folder / name).lstat() for name in inside}
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def check_own(folder: Path, names: list[str]) -> None:
    """UserError unless the files of a data set hold what prepare.py wrote, by their hashes.

    What carries one of its names may be somebody's own all the same.
    """
    if not names:
        return
    away = "move it away, or choose another --name"
    meta = read_object(folder / "meta.json")
    if meta["format_version"] > 1 and meta.get("sha256") != content_sha256(meta):
        raise UserError(f"{folder}/meta.json was changed by something else: {away}")
    try:
        hashes = {f"{split}.bin": counts["sha256"] for split, counts in meta["splits"].items()}
        info = meta["tokenizer"]
        hashes |= info.get("files", {info["file"]: info["sha256"]})
    except (LookupError, TypeError, AttributeError):
        raise UserError(f"{folder}/meta.json does not say what is in its files: {away}") from None
    for name in names:
        path = folder / name
        if path.is_symlink() or not path.is_file():
            raise UserError(f"{path} is no plain file, so prepare.py did not write it: {away}")
        if name in hashes and file_sha256(path) != hashes[name]:
            raise UserError(f"{path} is not what meta.json says, so it may be somebody's: {away}")


def replace_set(new: Path, target: Path, before: dict[str, tuple]) -> None:
    """Put the finished folder in the place of the data set that was there `before`; delete that."""
    now = files_of_set(target)
    if changed := [name for name in now.keys() | before if now.get(name) != before.get(name)]:
        raise UserError(f"{target / min(changed)} was changed by something else: not replaced")
    old = put_in_place(new, target)
    if old and not remove_only(old, before):
        note(f"{old} stays: it holds what prepare.py did not write")


def remove_scratch(scratch: Path) -> None:
    for path in scratch.glob("*"):
        remove_only(path, work_files(path))
    if not remove_only(scratch, [STDIN]) and scratch.exists():
        note(f"{scratch} stays: it holds what prepare.py did not write")


def fingerprint(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

"""How this program writes files, and how it recognises files that it has written.

    write_whole     write a file so that a kill leaves the old file or the new one, never a part
    put_in_place    sync a new folder to the disk, and rename it
    set_aside       rename what is in the way, to a name that is free
    remove_only     delete files that are given by name, and the folder only if it is then empty
    sealed, unseal  a JSON object that contains the SHA-256 of its own content
    manifest        the size and SHA-256 of every file of a folder; damage() checks them
    lock_file       only one process may write a folder

No function here deletes a file whose name it was not given. This module needs no torch, and only
configurator.py of this project.
"""

import errno
import hashlib
import json
import os
import stat
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from configurator import UserError

MANIFEST = "manifest.json"
LOCK = ".lock"

# --------------------------------------------------------------------------------------------------
# Writing


def sync_to_disk(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, would survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def atomic_write(path: Path, content: bytes) -> None:
    """Write a file, or replace it, in one step. A kill leaves the old file or the new one."""
    aside = path.with_name(f".{path.name}.tmp")
    aside.unlink(missing_ok=True)  # of a killed process; or a link, which is not to be followed
    try:
        aside.write_bytes(content)
        sync_to_disk(aside)
    except OSError as e:
        e.filename = e.filename or str(path)  # a full disk does not name it
        raise
    aside.replace(path)


def json_bytes(content: Any) -> bytes:
    """Return `content` as indented JSON in UTF-8.

    The name of a file may contain bytes that are not UTF-8, for example on an old disk with GBK
    names. Python represents such bytes as lone surrogates. backslashreplace writes them as \\udcXX,
    which JSON reads back.
    """
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")


def sync_and_rename(temporary: Path, target: Path) -> None:
    """Sync a folder of new files to the disk, then rename it: target is whole, or not there."""
    for path in (*temporary.iterdir(), temporary):
        sync_to_disk(path)
    temporary.rename(target)
    sync_to_disk(target.parent)


def set_aside(path: Path, name: str) -> Path:
    """Rename `path` to `name`, or to `name`2, `name`3 and so on. Return the new path.

    The first of these that does not exist is taken.
    """
    aside = path.with_name(name)
    number = 1
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"{name}{number}")
    return path.rename(aside)


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Delete the files and links with these names, then the folder if it is empty.

    Other files in it belong to somebody, and stay. If the folder itself is a link, nothing is
    deleted.
    """
    if folder.is_symlink() or not folder.is_dir():
        return
    for name in names:
        path = folder / name
        if path.is_symlink() or path.is_file():
            path.unlink(missing_ok=True)
    with suppress(OSError):  # it is not empty
        folder.rmdir()


# --------------------------------------------------------------------------------------------------
# Reading


def check_regular_file(path: str | Path) -> None:
    """Raise OSError if the path is not a plain file, with its content. (A FIFO may never end.)

    After `git clone` without Git LFS, a small text that names the content stands in its place.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    with open(path, "rb") as file:
        if file.read(40) == b"version https://git-lfs.github.com/spec/":
            problem = "a pointer of Git LFS, not the file itself: run `git lfs pull` in its folder"
            raise OSError(errno.EINVAL, problem, str(path))


def file_sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal. Raises OSError if it cannot be read."""
    check_regular_file(path)
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def read_object(path: Path) -> dict:
    """Return the JSON object in a file.

    Raises OSError if the file cannot be read. Raises ValueError, with a message of one line, if it
    does not contain a JSON object.
    """
    check_regular_file(path)
    try:
        content = json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError(f"it is a {type(content).__name__}, not an object {{...}}")
    return content


def code_sha256() -> str:
    """Return the SHA-256 of the loaded .py files of this project, whatever folder it lies in."""
    root = Path(__file__).parents[1]
    files = [Path(m.__file__) for m in sys.modules.values() if getattr(m, "__file__", None)]
    ours = {f.relative_to(root): f for f in files if f.suffix == ".py" and root in f.parents}
    # One folder deep: a virtual environment may lie here, too.
    names = sorted(name for name in ours if len(name.parts) < 3)
    return content_sha256({str(name): file_sha256(ours[name]) for name in names})


def content_sha256(content: dict) -> str:
    """Return the SHA-256 of a JSON object without its key sha256.

    It does not depend on the order of the keys, nor on the spaces in the file.
    """
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def sealed(content: dict) -> dict:
    """Return the content with its own SHA-256 added, by which unseal() detects a change."""
    return content | {"sha256": content_sha256(content)}


def unseal(path: Path) -> dict:
    """Return the content of a file that sealed() made.

    Raises OSError if the file cannot be read, and ValueError if it was changed.
    """
    content = read_object(path)
    if content.get("sha256") != content_sha256(content):
        raise ValueError("its content does not have the SHA-256 that it states")
    return content


def manifest(folder: Path) -> dict[str, dict]:
    """Return the size and SHA-256 of each file in a folder and below, by its name: a/b in a/."""
    paths = [path for path in sorted(folder.rglob("*")) if not path.is_dir()]
    names = [path.relative_to(folder).as_posix() for path in paths]
    return {name: entry_of(folder / name) for name in names if name != MANIFEST}


def entry_of(path: Path) -> dict:
    """Return the size and SHA-256 of a file, as they stand in a manifest."""
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def damage(folder: Path, names: Iterable[str] | None = None, required: Iterable[str] = ()) -> str:
    """Compare the files of a folder with its manifest. Return the first problem, or "".

    names: check only those of these files that the manifest lists; None: check all that it lists.
    required: files that it must list. A flipped bit in it can turn one name into another.
    """
    try:
        entries = read_object(folder / MANIFEST)
        listed = entries.keys() if names is None else entries.keys() & set(names)
        for name in (*required, *listed):
            if name not in entries or entry_of(folder / name) != entries[name]:
                return f"{folder / name}: not what {MANIFEST} says"
    except OSError as e:
        return f"{e.filename}: {e.strerror}"
    except ValueError as e:
        return f"{folder / MANIFEST}: damaged ({e})"
    return ""


# --------------------------------------------------------------------------------------------------
# One writer


def lock_file(path: Path, advice: str) -> FileLock:
    """Lock a file, which is made if need be, until release() or the end of this process.

    Raises UserError, which ends in `advice`, if another process holds the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise UserError(f"{path.parent}: another process is writing it: {advice}") from None
    return lock

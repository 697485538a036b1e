"""Write files safely, and recognise files that this program has written.

    atomic_write      write a file so that a kill leaves the old file or the new one, never a part
    sync_and_rename   sync a new folder to the disk, and rename it
    set_aside         rename a file or folder to a free name
    remove_files      delete files that are given by name, then the folder if it is empty
    sealed, unseal    a JSON object that contains the SHA-256 of its own content
    manifest          the size and SHA-256 of every file of a folder; damage() checks them
    Lock              only one process may write a folder

No function here deletes a file whose name it was not given. This module needs no torch, and only
configurator.py of this project.
"""

import errno
import hashlib
import itertools
import json
import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from configurator import UserError

MANIFEST = "manifest.json"
LOCK = ".lock"
# How a pointer begins -> the program that it belongs to, and the command that fetches the file.
POINTERS = {
    rb"version https://git-lfs\.github\.com/spec/": ("Git LFS", "git lfs pull"),
    # The second is a link of Git on a disk without links.
    rb"/annex/objects/\w+-|[./]*\.git/annex/objects/": ("git-annex", "git annex get ."),
    rb"# xet version \d+\s+filesize": ("Git Xet", "git xet materialize ."),
}
# What flock says on a disk without locks: Lustre without flock, NFS without lockd, some FUSE disks.
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)

# --------------------------------------------------------------------------------------------------
# Writing


def sync_to_disk(path: Path) -> None:
    """Wait until the content of a file, or the list of names in a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def atomic_write(path: Path, content: bytes) -> None:
    """Write a file, or replace it, in one step. A kill leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # of a killed process; or a link, which must not be followed
    try:
        temporary.write_bytes(content)
        sync_to_disk(temporary)
    except OSError as e:
        e.filename = e.filename or str(path)  # the error of a full disk has no name
        raise
    temporary.replace(path)


def json_bytes(content: Any) -> bytes:
    """Return `content` as indented JSON in UTF-8.

    The name of a file may contain bytes that are not UTF-8, for example on an old disk with GBK
    names. Python represents such bytes as lone surrogates. backslashreplace writes them as \\udcXX,
    which JSON reads back.
    """
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")


def sync_and_rename(temporary: Path, target: Path, aside: str = "") -> Path | None:
    """Sync a folder of new files to the disk, then rename it: target is complete or missing.

    aside: a new name for an old target. Return its new path, or None if there was none.
    """
    for path in (*temporary.iterdir(), temporary):
        sync_to_disk(path)
    old = set_aside(target, aside) if aside and os.path.lexists(target) else None
    temporary.rename(target)
    sync_to_disk(target.parent)
    return old


def free_path(path: Path) -> Path:
    """Return the first of `path`, `path`2, `path`3, ... that does not exist."""
    names = itertools.chain([""], map(str, itertools.count(2)))
    paths = (path.with_name(path.name + number) for number in names)
    return next(free for free in paths if not os.path.lexists(free))


def set_aside(path: Path, name: str) -> Path:
    """Rename `path` to the first free name of `name`, `name`2, `name`3, ... Return the new path."""
    return path.rename(free_path(path.with_name(name)))


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Delete the files and links with these names, then the folder if it is empty.

    Other files stay. If the folder itself is a link, nothing is deleted.
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
    """Raise OSError if the path is not a regular file, or is a pointer, as of Git LFS.

    Reading a FIFO may never end. A pointer is the small text that `git clone` puts in place of a
    large file, which another program has to fetch.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with open(path, "rb") as file:
        head = file.read(100)
    for beginning, (program, command) in POINTERS.items():
        if re.match(beginning, head):
            problem = f"a pointer of {program}, not the file itself: run `{command}` in its folder"
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


def content_sha256(content: dict) -> str:
    """Return the SHA-256 of a JSON object without its key sha256.

    The order of the keys and the spaces in the file do not matter.
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
        raise ValueError("its content does not match its sha256")
    return content


def manifest(folder: Path) -> dict[str, dict]:
    """Return name -> size and SHA-256 of each file in a folder and its subfolders."""
    paths = [path for path in sorted(folder.rglob("*")) if not path.is_dir()]
    names = [path.relative_to(folder).as_posix() for path in paths]
    return {name: entry_of(folder / name) for name in names if name != MANIFEST}


def entry_of(path: Path) -> dict:
    """Return the entry of a file in a manifest: its size and SHA-256."""
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def damage(folder: Path, names: Iterable[str] | None = None, required: Iterable[str] = ()) -> str:
    """Compare the files of a folder with its manifest. Return the first problem, or "".

    names: check only these files, as far as the manifest lists them; None: check all that it lists.
    required: files that the manifest must list. A flipped bit can turn one name into another.
    """
    try:
        entries = read_object(folder / MANIFEST)
        listed = entries.keys() if names is None else entries.keys() & set(names)
        for name in (*required, *listed):
            if name not in entries or entry_of(folder / name) != entries[name]:
                return f"{folder / name}: does not match {MANIFEST}"
    except OSError as e:
        return f"{e.filename}: {e.strerror}"
    except ValueError as e:
        return f"{folder / MANIFEST}: damaged ({e})"
    return ""


# --------------------------------------------------------------------------------------------------
# One writer


def leads_to(path: Path, file: os.stat_result) -> bool:
    """Return whether a path still leads to the file or folder that it once led to."""
    try:
        return os.path.samestat(os.stat(path), file)
    except OSError as e:  # another error is one of the disk, which the next write will report
        return e.errno not in (errno.ENOENT, errno.ENOTDIR)


class Lock:
    """The right of this process alone to write a folder, until release() or its end.

    It is a lock on a file in the folder. On a disk without locks, a second file names the process
    and its computer instead. If it is killed, only that computer can tell: elsewhere, the user has
    to delete this file.
    """

    def __init__(self, path: Path, advice: str):
        """Lock a file, which is created if needed.

        Raises UserError, which ends in `advice`, if another process holds the lock.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.lock: BaseFileLock = FileLock(path, thread_local=False, fallback_to_soft=False)
        try:
            try:
                self.lock.acquire(blocking=False)
            except OSError as e:
                if e.errno not in NO_LOCKS:
                    raise
                self.path = path.with_name(f"{path.name}_holder")
                self.lock = SoftFileLock(self.path, thread_local=False)
                self.lock.acquire(blocking=False)
            self.file = os.stat(self.path)
        except Timeout as e:
            problem = f"{path.parent}: another process is writing to it: {advice}"
            if self.path != path:
                problem += f". {e} If it was killed, delete {self.path}"
            raise UserError(problem) from None
        except OSError as e:
            raise OSError(e.errno, e.strerror, str(self.path)) from None

    def is_held(self) -> bool:
        """Return whether the path still leads to the locked file.

        It does not if the folder was moved or deleted: another process may write there now.
        """
        return leads_to(self.path, self.file)

    def release(self) -> None:
        self.lock.release()

"""How this program writes files, and how it recognises files that it has written.

    write_whole     write a file so that a kill leaves the old file or the new one, never a part
    finish          sync a folder of new files, and write the manifest of them
    put_in_place    give it its name in one step; the old folder is kept, under another name
    remove_only     delete files that are given by name, and the folder only if it is then empty
    sealed, unseal  a JSON object that contains the SHA-256 of its own content
    manifest        the size and SHA-256 of every file of a folder; damage() checks them
    Lock            only one process may write a folder

No function here deletes a file whose name it was not given. This module needs no torch, and only
configurator.py of this project.
"""

import ctypes
import errno
import fcntl
import functools
import hashlib
import json
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from configurator import UserError, note

MANIFEST = "manifest.json"
LOCK = ".lock"
HOLDER = " (process "  # what the file LOCK begins with, or it is still empty


# --------------------------------------------------------------------------------------------------
# Writing


def sync_to_disk(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, would survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, or replace it, in one step. A kill leaves the old file or the new one."""
    aside = path.with_name(f".{path.name}.tmp")
    aside.unlink(missing_ok=True)  # of a killed process; or a link, which is not to be followed
    with open(aside, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def json_bytes(content: Any) -> bytes:
    """Return `content` as indented JSON in UTF-8.

    The name of a file may contain bytes that are not UTF-8, for example on an old disk with GBK
    names. Python represents such bytes as lone surrogates. backslashreplace writes them as \\udcXX,
    which JSON reads back.
    """
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")


def finish(folder: Path) -> None:
    """Sync the files of a folder to the disk, and write its manifest, which comes last."""
    entries = manifest(folder)
    for name in entries:
        sync_to_disk(folder / name)
    path = folder / MANIFEST
    path.write_bytes(json_bytes(entries))
    sync_to_disk(path)
    sync_to_disk(folder)


def put_in_place(new: Path, target: Path) -> Path | None:
    """Give the finished folder `new` the name `target`. Return the new path of the old `target`.

    It is None if there was no such folder. Linux exchanges the two names in one step. Elsewhere
    two renames are needed: a kill between them leaves the old folder at the path that set_aside
    gave it, and no target.
    """
    sync_to_disk(new)
    if not target.exists():
        old = None
        new.rename(target)
    elif exchange(new, target):
        old = new
    else:
        old = set_aside(target)
        new.rename(target)
    sync_to_disk(target.parent)
    return old


def exchange(a: Path, b: Path) -> bool:
    """Exchange two names in one step. Return False if the system or the disk cannot do that."""
    AT_FDCWD = -100  # see renameat2(2): relative paths start at the current folder
    RENAME_EXCHANGE = 2
    try:
        swap = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):  # macOS, an old C library
        return False
    return swap(AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b), RENAME_EXCHANGE) == 0


def set_aside(path: Path) -> Path:
    """Rename `path` to .NAME.old, or to .NAME.old2 and so on if that exists. Return the new path.

    prepare.py looks for .NAME.old after a kill.
    """
    old = path.with_name(f".{path.name}.old")
    number = 1
    while os.path.lexists(old):
        number += 1
        old = path.with_name(f".{path.name}.old{number}")
    path.rename(old)
    return old


def remove_only(folder: Path, names: Iterable[str]) -> bool:
    """Delete the files and links with these names, then the folder if it is empty.

    Return whether the folder was deleted. Other files in it belong to somebody, and stay. If the
    folder itself is a link, nothing is deleted.
    """
    if folder.is_symlink() or not folder.is_dir():
        return False
    for name in names:
        path = folder / name
        if os.path.lexists(path) and (path.is_symlink() or not path.is_dir()):
            path.unlink(missing_ok=True)
    try:
        folder.rmdir()
    except OSError:  # not empty
        return False
    return True


# --------------------------------------------------------------------------------------------------
# Reading


def only_plain(path: str | Path) -> None:
    """Raise OSError if the path is not a plain file. Reading a FIFO would wait for ever."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a plain file", str(path))


def file_sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal. Raises OSError if it cannot be read."""
    only_plain(path)
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        return digest.hexdigest()


def read_object(path: Path) -> dict:
    """Return the JSON object in a file.

    Raises OSError if the file cannot be read. Raises ValueError, with a message of one line, if it
    does not contain a JSON object.
    """
    only_plain(path)
    try:
        content = json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError(f"it is a {type(content).__name__}, not an object {{...}}")
    return content


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


def inside(folder: Path, name: str) -> Path:
    """Return the path of the file `name`, which was read from a JSON file in the folder.

    Raises UserError if it would not be directly in the folder.
    """
    plain = isinstance(name, str) and name not in ("", ".", "..") and "\0" not in name
    if not plain or name != Path(name).name:
        problem = f"it names the file {name!r}, which is not in this folder: not read"
        raise UserError(f"{folder}: {problem}")
    return folder / name


def manifest(folder: Path) -> dict[str, dict]:
    """Return the size and SHA-256 of each file in a folder and below, by its name: a/b in a/."""
    paths = [path for path in sorted(folder.rglob("*")) if not path.is_dir()]
    names = [path.relative_to(folder).as_posix() for path in paths]
    return {name: entry_of(folder / name) for name in names if name != MANIFEST}


def entry_of(path: Path) -> dict:
    """Return the size and SHA-256 of a file, as they stand in a manifest."""
    stat = path.stat()
    return {
        "bytes": stat.st_size,
        "sha256": sha256_of(path, stat.st_ino, stat.st_size, stat.st_ctime_ns),
    }


@functools.lru_cache(maxsize=64)
def sha256_of(path: Path, inode: int, size: int, changed: int) -> str:
    """Return file_sha256(path). It is computed again only after the file has been changed."""
    return file_sha256(path)


def damage(folder: Path, names: Iterable[str] | None = None, required: Iterable[str] = ()) -> str:
    """Compare the files of a folder with its manifest. Return the first problem, or "".

    names: check only those of these files that the manifest lists; None: check all that it lists.
    required: files that the manifest must list. A flipped bit in it can turn one name into another.
    """
    try:
        entries = read_object(folder / MANIFEST)
        missing = sorted(set(required) - entries.keys())
        if missing:
            return f"{folder / MANIFEST}: it does not list {missing[0]}"
        checked = entries.keys() if names is None else entries.keys() & set(names)
        for name in checked:
            path = folder
            for part in name.split("/"):
                path = inside(path, part)
            if entry_of(path) != {key: entries[name][key] for key in ("bytes", "sha256")}:
                return f"{path}: not what {MANIFEST} says"
    except OSError as e:
        return f"{e.filename}: {e.strerror}"
    except (UserError, ValueError, KeyError, TypeError) as e:
        return f"{folder / MANIFEST}: damaged ({e})"
    return ""


# --------------------------------------------------------------------------------------------------
# One writer


class Lock:
    """The right to write a folder, which one process holds until close() or its end.

    The folder is made if it does not exist, and removed again by close() if nothing was put into
    it. Raises UserError if another process holds the lock. instead: what the user can do then,
    other than wait.

    What is locked is the file LOCK in the folder, opened for writing: NFS tells its server of such
    a lock, and so all computers, but not of a lock on the folder itself.
    """

    def __init__(self, folder: Path, instead: str):
        self.folder = folder
        self.instead = instead
        self.made = not folder.exists()
        self.handle = self.take()

    def take(self) -> int:
        """Lock the folder that has the name now, and return the file descriptor of its LOCK."""
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / LOCK
            try:
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            except PermissionError:
                whose = "this user may not write it; it may be a lock that another user left"
                instead = f"if nobody writes there, delete it, or {self.instead}"
                raise UserError(f"{path}: {whose}: {instead}") from None
            plain = stat.S_ISREG(os.fstat(handle).st_mode)
            content = os.pread(handle, 99, 0).decode("ascii", "replace") if plain else "none"
            if content and not (content.startswith(HOLDER) and content.isprintable()):
                os.close(handle)
                foreign = f"{path} is not a file that this program wrote"
                raise UserError(f"{foreign}: move it elsewhere")
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                busy = f"another process is writing {self.folder}{content}"
                raise UserError(f"{busy}: wait for it, or {self.instead}") from None
            except OSError as e:
                if e.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS):
                    raise
                note(f"{self.folder}: its disk has no locks: let only one process write there")
                return handle
            # The process that held the lock may have removed the folder since it was opened above.
            if self.is_at(handle):
                os.ftruncate(handle, 0)
                holder = f"{HOLDER}{os.getpid()} on {os.uname().nodename})"
                os.pwrite(handle, holder.encode("ascii", "replace"), 0)
                return handle
            os.close(handle)

    def is_at(self, handle: int) -> bool:
        """Return whether this descriptor is that of the folder that has the name now."""
        path = self.folder / LOCK
        return path.exists() and os.path.samestat(os.fstat(handle), path.stat())

    def is_held(self) -> bool:
        """Return whether the lock is on the folder that has the name now."""
        return self.is_at(self.handle)

    def renew(self) -> None:
        """Lock the folder that has the name now, if it is not the one that is locked.

        The folder may have been moved or deleted, and the lock with it. Raises UserError if another
        process holds the lock of the new one. Only one thread may call this.
        """
        if not self.is_held():
            moved = self.handle
            self.handle = self.take()
            os.close(moved)

    def close(self) -> None:
        with suppress(OSError):  # the disk may have become read-only
            if self.is_at(self.handle):
                (self.folder / LOCK).unlink()
        os.close(self.handle)  # NFS keeps a deleted file in the folder for as long as it is open
        if self.made:
            with suppress(OSError):  # the folder is not empty
                self.folder.rmdir()

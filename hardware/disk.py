"""How this program writes files, and how it knows its own again.

    write_whole     a file is there whole or not at all
    put_in_place    the same for a folder; what stood there before is handed back, not deleted
    remove_only     deletes files by their names, and a folder only when it is empty
    sealed, unseal  a JSON object that holds the SHA-256 of its own content
    manifest        the size and SHA-256 of every file of a folder; damage() compares
    Lock            a folder has one writer

Nothing here deletes what it was not told by name. No torch, and no other file of ours but the
configurator's UserError.
"""

import ctypes
import errno
import fcntl
import functools
import hashlib
import json
import os
import stat
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from configurator import UserError

MANIFEST = "manifest.json"


# --------------------------------------------------------------------------------------------------
# Writing


def sync_to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, would survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file in one step: a kill leaves the old one or the new one."""
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_bytes(content)
    sync_to_disk(aside)
    aside.replace(path)


def json_bytes(content: Any) -> bytes:
    """JSON as people read it, in UTF-8.

    The name of a file may hold bytes that are not UTF-8 (an old GBK disk). Python carries them as
    lone surrogates, and backslashreplace writes those as \\udcXX, which JSON reads back.
    """
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")


def put_in_place(new: Path, target: Path) -> Path | None:
    """Give the finished folder `new` the name `target`; returns where the old `target` is now.

    Linux exchanges two names in one step. Elsewhere a kill between the two renames leaves the old
    folder under the name that this function returns, and no target.
    """
    sync_to_disk(new)
    old = None
    if target.exists():
        old = new if exchange(new, target) else set_aside(target)
    if old is not new:
        new.rename(target)
    sync_to_disk(target.parent)
    return old


def exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step; False where the system or the disk cannot."""
    here, flag = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of renameat2(2)
    try:
        swap = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):  # macOS, an old C library
        return False
    return swap(here, os.fsencode(a), here, os.fsencode(b), flag) == 0


def set_aside(path: Path) -> Path:
    """Rename `path` to .NAME.old, where prepare.py looks after a kill; or to the next free name."""
    old, number = path.with_name(f".{path.name}.old"), 1
    while os.path.lexists(old):
        number += 1
        old = path.with_name(f".{path.name}.old{number}")
    path.rename(old)
    return old


def remove_only(folder: Path, names: Iterable[str]) -> bool:
    """Delete the files (or links) of these names, then the folder if it is empty; True if so.

    Whatever else lies in it is somebody's, and stays. A link in place of the folder stays too.
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
    """OSError for what is no plain file: to read a FIFO would be to wait for ever."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a plain file", str(path))


def file_sha256(path: str | Path) -> str:
    only_plain(path)
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def read_object(path: Path) -> dict:
    """The JSON object in a file. OSError if it cannot be read; ValueError, in a line, if it is none."""
    only_plain(path)
    try:
        content = json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError(f"a {type(content).__name__} where an object {{...}} belongs")
    return content


def content_sha256(content: dict) -> str:
    """Of all but the key sha256, whatever the order of the keys and the spaces between them."""
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def sealed(content: dict) -> dict:
    """The content with its own SHA-256, by which unseal() finds a change."""
    return content | {"sha256": content_sha256(content)}


def unseal(path: Path) -> dict:
    """The content of a sealed file. OSError or ValueError if it is not there, or not as it was."""
    content = read_object(path)
    if content.get("sha256") != content_sha256(content):
        raise ValueError("its content does not have the SHA-256 that it states")
    return content


def inside(folder: Path, name: str) -> Path:
    """The file that a JSON of the folder names; UserError if that is not in the folder."""
    plain = isinstance(name, str) and name not in ("", ".", "..") and "\0" not in name
    if not plain or name != Path(name).name:
        raise UserError(f"{folder}: it names the file {name!r}, which is not in it: not read")
    return folder / name


def manifest(folder: Path) -> dict[str, dict]:
    """name -> size and SHA-256 of each file in a folder."""
    return {p.name: entry_of(p) for p in sorted(folder.iterdir()) if p.name != MANIFEST}


def entry_of(path: Path) -> dict:
    found = path.stat()
    known = sha256_of(path, found.st_ino, found.st_size, found.st_ctime_ns)
    return {"bytes": found.st_size, "sha256": known}


@functools.lru_cache(maxsize=64)
def sha256_of(path: Path, inode: int, size: int, changed: int) -> str:
    """file_sha256, once for as long as the file is not touched."""
    return file_sha256(path)


def damage(folder: Path, names: Iterable[str] | None = None, required: Iterable[str] = ()) -> str:
    """What is wrong with the files of a folder that has a manifest, in a line; empty if nothing is.

    names: look only at these, as far as the manifest has them; default: all. required: the manifest
    must have these: a flipped bit in it can make one name another.
    """
    try:
        entries = read_object(folder / MANIFEST)
        if missing := sorted(set(required) - entries.keys()):
            return f"{folder / MANIFEST}: it does not list {missing[0]}"
        for name in entries if names is None else entries.keys() & set(names):
            path = inside(folder, name)
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
    """Holds a folder, as the only process, until close() or the end of the process.

    UserError if another process holds it; `instead` says what else to do. The folder is made if it is
    not there.
    """

    def __init__(self, folder: Path, instead: str):
        self.folder, self.instead = folder, instead
        self.one_at_a_time = threading.Lock()  # a thread that saves asks too, and would find this process in its way
        self.handle = self.take()

    def take(self) -> int:
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                busy = f"another process is writing {self.folder}: wait for it, or {self.instead}"
                raise UserError(busy) from None
            except OSError as e:
                if e.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS):
                    raise
                return handle  # some network disks have no locks
            # Whoever held it before may have removed the folder since it was opened here.
            if self.is_at(handle):
                return handle
            os.close(handle)

    def is_at(self, handle: int) -> bool:
        return self.folder.exists() and os.path.samestat(os.fstat(handle), self.folder.stat())

    def renew(self) -> None:
        """Before something is written: the folder may have been moved or deleted since, and with it
        the lock. Then the one that has its name now is held, or UserError.
        """
        with self.one_at_a_time:
            if not self.is_at(self.handle):
                moved, self.handle = self.handle, self.take()
                os.close(moved)

    def close(self) -> None:
        os.close(self.handle)

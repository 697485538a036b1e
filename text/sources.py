"""The files of a corpus: which files the --input arguments name, and their content.

find_sources() lists the files (demo.py: those of the demo corpus). HashedFile reads a file and
computes its SHA-256 at the same time, and decompressed() unpacks what was read.
"""

import bz2
import glob
import gzip
import hashlib
import io
import lzma
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from configurator import UserError

KINDS = "jsonl ndjson json csv tsv txt md parquet".split()
COMPRESSED = (".gz", ".xz", ".bz2", ".zst")
EXPECTED = f"{', '.join('.' + k for k in KINDS)}, plain or with {', '.join(COMPRESSED)}"

# Reasons to skip a file. They are printed, and written into meta.json.
OTHER_NAME = "another name of a file that is read"
OUR_OWN = "written by prepare.py"


# --------------------------------------------------------------------------------------------------
# One file


@dataclass
class Source:
    """A file to read. Its SHA-256 is filled in when it has been read."""

    path: Path
    kind: str  # one of KINDS, or "py": a module of the demo corpus
    name: str  # the name that messages and meta.json show
    bytes: int = 0  # size on the disk, so of the compressed data
    changed: int = 0  # time of the last change in ns
    sha256: str = ""
    content: str = ""  # only for standard input: its SHA-256, since its time of change says nothing

    @classmethod
    def at(cls, path: Path, kind: str, name: str = "") -> "Source":
        """Return the Source of an existing file. name: what messages show instead of the path."""
        stat = path.stat()
        return cls(path, kind, name or name_of(path), stat.st_size, stat.st_mtime_ns)

    def same_file(self) -> tuple:
        """Return what an interrupted run compares to decide whether this is still the same file."""
        return self.name, self.kind, self.bytes, self.content or self.changed

    def check_unchanged(self, sha256: str) -> None:
        """Store the hash of what was just read.

        Raises UserError if size or time differ from those in this Source, or if an earlier reading
        gave another hash.
        """
        stat = self.path.stat()
        same = (stat.st_size, stat.st_mtime_ns) == (self.bytes, self.changed)
        if not same or self.sha256 not in ("", sha256):
            raise self.changed_error()
        self.sha256 = sha256

    def changed_error(self) -> UserError:
        again = "run the same command again when nothing writes to it"
        return UserError(f"{self.name}: it changed while it was read: {again}")


def name_of(path: Path) -> str:
    """Return a path as messages and meta.json show it.

    A name that the locale cannot decode is decoded as UTF-8. In that case a lone surrogate stands
    for each byte that is not UTF-8.
    """
    try:
        str(path).encode()
        return str(path)
    except UnicodeEncodeError:
        return os.fsencode(path).decode("utf-8", "surrogateescape")


def in_order(path: Path) -> list[bytes]:
    """Return a key to sort paths by: bytes, so that the order is the same in every locale."""
    return os.fsencode(path).split(b"/")


def suffix_of(path: Path) -> str:
    """Return the suffixes that tell the kind and the compression: .jsonl.gz for DUMP.JSONL.gz."""
    name = Path(path.name.lower())
    packed = name.suffix if name.suffix in COMPRESSED else ""
    return Path(name.name.removesuffix(packed)).suffix + packed


def kind_of(path: Path) -> str | None:
    """Return the member of KINDS that the file's name ends in, or None."""
    kind = suffix_of(path).strip(".").partition(".")[0]
    return kind if kind in KINDS else None


def identity(path: str | Path) -> tuple[int, int]:
    """Return (device, inode), which is the same for all names of a file.

    A file has several names because of links, or because the disk does not distinguish a and A.
    """
    stat = os.stat(path)
    return stat.st_dev, stat.st_ino


# --------------------------------------------------------------------------------------------------
# All files of a corpus


def find_sources(
    inputs: Iterable[str], kind: str = "auto", own: Iterable[Path] = ()
) -> tuple[list[Source], dict[str, Counter]]:
    """Return the files that the --input arguments name, and how many files were skipped and why.

    The files come in a fixed order, each file once. Folders are searched with all their subfolders.
    kind: the kind of all files; "auto": by the name of each. own: the files that the caller itself
    writes, which cannot be input. The second result maps an argument to its skipped files:
    reason (OTHER_NAME, OUR_OWN, or the suffix of a file of unknown kind) -> number of files.

    Raises UserError for an argument that names nothing, and for a file that cannot be input.
    """
    sources: list[Source] = []
    skipped: dict[str, Counter] = {}
    own_files = {identity(path) for path in own}
    names: dict[tuple[int, int], set[Path]] = {}  # identity of a file -> the names found for it
    for argument in inputs:
        counts = Counter()
        skipped[name_of(Path(argument))] = counts
        for file in named_files(argument, counts):
            file_kind = kind_of(file) if kind == "auto" else kind
            if not file_kind:
                wanted = f"expected {EXPECTED}, or give --format=KIND"
                raise UserError(f"--input {file}: unknown kind of file; {wanted}")
            if not file.is_file():
                raise UserError(f"--input {file}: not a regular file; pipe it in with --input -")
            if identity(file) in own_files:
                problem = "prepare.py wrote this file; name only the files of the corpus"
                raise UserError(f"--input {file}: {problem}")
            other_names = names.setdefault(identity(file), set())
            if not other_names:
                sources.append(Source.at(file, file_kind))
            elif file not in other_names:
                counts[OTHER_NAME] += 1
            other_names.add(file)
    return sources, {argument: counts for argument, counts in skipped.items() if counts}


def named_files(argument: str, skipped: Counter) -> Iterator[Path]:
    """Yield the files that one --input argument names: a file, a folder or a pattern of these.

    Of a folder, only the files of a known kind are yielded; `skipped` counts the others. Raises
    UserError if there is no such file, or if a folder has no file of a known kind.
    """
    paths = [argument] if os.path.exists(argument) else sorted(matches(argument))
    if not paths:
        raise UserError(f"--input {argument}: no such file or folder")
    for path in map(Path, paths):
        if not path.is_dir():
            yield path
            continue
        files = sorted(walk(path, skipped), key=in_order)
        if not files:
            there = ", ".join(f"{n:,} x {reason}" for reason, n in skipped.items()) or "nothing"
            expected = f"the folder has no file that ends in {EXPECTED}"
            raise UserError(f"--input {path}: {expected}; it has {there}")
        yield from files


def matches(pattern: str) -> list[str]:
    """Return the paths that match a pattern, as glob.glob does, except that ** follows no links.

    A link to a folder may lead back to a folder above it, and the search would go round in circles.
    """
    parts = Path(pattern).parts
    if "**" not in parts:
        return glob.glob(pattern)
    deep = parts.index("**")
    start = Path(*parts[:deep])
    rest = str(Path(*parts[deep:]))
    paths = []
    for folder in map(Path, glob.glob(str(start))):
        for path in folder.glob(rest):
            is_hidden = "/." in f"/{path.relative_to(folder)}"  # glob.glob leaves these out too
            if not is_hidden:
                paths.append(str(path))
    return paths


def walk(folder: Path, skipped: Counter) -> Iterator[Path]:
    """Yield the files of a known kind in a folder and its subfolders. `skipped` counts the others.

    Links to folders are followed, but each folder is read only once: under its own name if that is
    below `folder`, and else under the name of a link to it. Data sets and scratch folders of
    prepare.py are skipped.

    Raises UserError for a folder that cannot be read, and for a name that has the suffix of a known
    kind but is not a file, such as a pipe or a link to a file that does not exist.
    """
    starts = [folder]
    seen = set()
    for start in starts:  # it grows: links to folders wait until all folders have been read
        for at, folders, names in os.walk(start, onerror=refuse_folder):
            present = {*folders, *names}
            is_data_set = {"train.bin", "val.bin", "meta.json"} <= present
            is_hidden = re.fullmatch(r"\..+\.tmp", os.path.basename(at))
            is_scratch = is_hidden and present & {"tokenizer", "part0"}
            if identity(at) in seen:
                folders.clear()
                continue
            seen.add(identity(at))
            if is_data_set or is_scratch:
                skipped[OUR_OWN] += len(present)
                folders.clear()
                continue
            folders.sort()
            starts += [path for name in folders if (path := Path(at, name)).is_symlink()]
            for path in (Path(at, name) for name in names):
                if not kind_of(path):
                    skipped[suffix_of(path) or "no suffix"] += 1
                elif path.is_file():
                    yield path
                else:
                    problem = "a link to a file that does not exist, or not a regular file"
                    raise UserError(f"--input {path}: {problem}: remove it")


def refuse_folder(error: OSError) -> None:
    raise UserError(f"--input {error.filename}: {error.strerror}") from None


# --------------------------------------------------------------------------------------------------
# The content of a file


class HashedFile(io.RawIOBase):
    """The file of a Source, opened to read. It counts and hashes (SHA-256) the bytes that are read.

    Raises UserError if there are more bytes to read than the Source says: the file grows, perhaps
    without end.
    """

    def __init__(self, source: Source):
        self.source = source
        self.file = open(source.path, "rb", buffering=0)
        self.digest = hashlib.sha256()
        self.bytes_read = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        n = self.file.readinto(buffer)
        self.digest.update(memoryview(buffer)[:n])
        self.bytes_read += n
        if self.bytes_read > self.source.bytes:
            raise self.source.changed_error()
        return n

    def close(self) -> None:
        self.file.close()
        super().close()


def decompressed(raw: io.BufferedReader, name: str) -> io.BufferedIOBase:
    """Return a stream of the decompressed bytes of `raw`; `raw` itself if it is not compressed.

    The first bytes of the file tell the compression. Unlike the name, they are right for a renamed
    file too, and for standard input. name: of the file, for messages.
    """
    head = raw.peek(10)
    if head.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=raw)
    if head.startswith(b"\xfd7zXZ\x00"):
        return io.BufferedReader(Streams(raw, lzma.LZMADecompressor, b"\0"), 1 << 16)
    if re.match(rb"BZh[1-9]1AY&SY", head):
        return io.BufferedReader(Streams(raw, bz2.BZ2Decompressor), 1 << 16)
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        return zstd_module(name).ZstdFile(raw)
    return raw


def zstd_module(name: str) -> ModuleType:
    try:
        from compression import zstd  # since Python 3.14
    except ImportError:
        try:
            from backports import zstd
        except ImportError:
            needed = "the package backports.zstd: pip install backports.zstd"
            raise UserError(f"{name}: .zst needs {needed}") from None
    return zstd


class Streams(io.RawIOBase):
    """The decompressed bytes of several streams in one file, as pbzip2 and pixz write them.

    Anything else after the first stream is an error. bz2.BZ2File and lzma.LZMAFile would take it
    for the end of the file. Raises EOFError, OSError or lzma.LZMAError for damaged data.
    """

    def __init__(self, raw: io.BufferedReader, decompressor: Callable, padding: bytes = b""):
        """decompressor: class that unpacks one stream. padding: byte allowed between streams."""
        self.raw = raw
        self.decompressor = decompressor
        self.padding = padding
        self.stream = decompressor()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        output = b""
        while not output:
            data = b""
            if self.stream.eof:
                data = self.stream.unused_data.lstrip(self.padding)
                while not data and self.raw.peek():
                    data = self.raw.read1().lstrip(self.padding)
                if not data:
                    return 0
                self.stream = self.decompressor()
            elif self.stream.needs_input:
                data = self.raw.read1()
                if not data:
                    raise EOFError("its last stream has no end")
            output = self.stream.decompress(data, len(buffer))
        buffer[: len(output)] = output
        return len(output)

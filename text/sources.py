"""The files of a corpus: which ones the --input arguments name, and their bytes, decompressed and hashed."""

import bz2
import glob
import gzip
import hashlib
import importlib.util
import io
import lzma
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from configurator import UserError

KINDS = "jsonl ndjson json csv tsv txt md parquet".split()
COMPRESSED = (".gz", ".xz", ".bz2", ".zst")
EXPECTED = f"{', '.join('.' + k for k in KINDS)}, plain or with {', '.join(COMPRESSED)}"


@dataclass
class Source:
    """A file to read. What is known only when it has been read is filled in then."""

    path: Path
    kind: str  # one of KINDS, or "py": a module of the demo corpus
    name: str  # as messages show it
    bytes: int = 0  # on the disk
    changed: int = 0  # time of the last change, ns
    sha256: str = ""
    content: str = ""  # its SHA-256 instead of a time that says nothing: of standard input

    @classmethod
    def at(cls, path: Path, kind: str, name: str = "") -> "Source":
        stat = path.stat()
        return cls(path, kind, name or name_of(path), stat.st_size, stat.st_mtime_ns)

    def same_file(self) -> tuple:
        return self.name, self.kind, self.bytes, self.content or self.changed

    def check_unchanged(self, sha256: str) -> None:
        """When it has been read: UserError if it is no longer what was found, or read before."""
        stat = self.path.stat()
        same = (stat.st_size, stat.st_mtime_ns) == (self.bytes, self.changed)
        if not same or self.sha256 not in ("", sha256):
            raise self.changed_error()
        self.sha256 = sha256

    def changed_error(self) -> UserError:
        again = "run the same command again when nothing writes to it"
        return UserError(f"{self.name}: it changed while it was read: {again}")


def name_of(path: Path) -> str:
    """As messages show it: by the locale, else as UTF-8; lone surrogates stand for other bytes."""
    try:
        str(path).encode()
        return str(path)
    except UnicodeEncodeError:
        return os.fsencode(path).decode("utf-8", "surrogateescape")


def in_order(path: Path) -> list[bytes]:
    """A key for sorting, which makes a folder the same corpus in any locale."""
    return os.fsencode(path).split(b"/")


def suffix_of(path: Path) -> str:
    """What tells the kind of a file and its compression: .jsonl.gz of DUMP.JSONL.gz."""
    name = Path(path.name.lower())
    packed = name.suffix if name.suffix in COMPRESSED else ""
    return Path(name.name.removesuffix(packed)).suffix + packed


def kind_of(path: Path) -> str | None:
    kind = suffix_of(path).strip(".").partition(".")[0]
    return kind if kind in KINDS else None


OTHER_NAME, OUR_OWN = "another name of a file that is read", "written by prepare.py"


def find_sources(
    inputs: Iterable[str], kind: str = "auto", own: Iterable[Path] = ()
) -> tuple[list[Source], dict[str, Counter]]:
    """(the files that the --input arguments name, in a fixed order, each once; what was passed by).

    Folders are searched through. own: files that the caller writes, which therefore are no input.
    What was passed by: argument -> suffix of a file, or another reason -> number of files.
    """
    sources: list[Source] = []
    passed_by: dict[str, Counter] = {}
    own_files = {identity(path) for path in own}
    names: dict[tuple[int, int], set[Path]] = {}  # of each file
    for argument in inputs:
        passed = passed_by[name_of(Path(argument))] = Counter()
        here = os.path.exists(argument)
        paths = [argument] if here else sorted(matches(argument))
        if not paths:
            raise UserError(f"--input {argument}: no such file or folder")
        for path in map(Path, paths):
            files = sorted(walk(path, passed), key=in_order) if path.is_dir() else [path]
            if not files:
                there = ", ".join(f"{n:,} x {what}" for what, n in passed.items()) or "nothing"
                expected = f"the folder has no file that ends in {EXPECTED}"
                raise UserError(f"--input {path}: {expected}; it has {there}")
            for file in files:
                this_kind = kind_of(file) if kind == "auto" else kind
                if not this_kind:
                    raise UserError(f"--input {file}: unknown kind of file; expected {EXPECTED}, or say --format=KIND")
                if not file.is_file():
                    raise UserError(f"--input {file}: no regular file; pipe it in with --input -")
                if identity(file) in own_files:
                    ours = "prepare.py has written it: name the corpus alone"
                    raise UserError(f"--input {file}: {ours}")
                known = names.setdefault(identity(file), set())
                if not known:
                    sources.append(Source.at(file, this_kind))
                elif file not in known:
                    passed[OTHER_NAME] += 1
                known.add(file)
    return sources, {argument: counts for argument, counts in passed_by.items() if counts}


def matches(pattern: str) -> list[str]:
    """As glob.glob, but that ** does not follow links to folders, which may lead back to where they stand."""
    parts = Path(pattern).parts
    if "**" not in parts:
        return glob.glob(pattern)
    deep = parts.index("**")
    start, rest = Path(*parts[:deep]), str(Path(*parts[deep:]))
    found = [(Path(folder), path) for folder in glob.glob(str(start)) for path in Path(folder).glob(rest)]
    return [str(path) for folder, path in found if "/." not in f"/{path.relative_to(folder)}"]  # nothing hidden


def identity(path: Path) -> tuple[int, int]:
    """The same for all names of a file: links, and A and a on a disk that takes them for one."""
    stat = path.stat()
    return stat.st_dev, stat.st_ino


def walk(folder: Path, passed: Counter) -> Iterator[Path]:
    """The files of a corpus below a folder; `passed` counts the others.

    Links to folders are followed; each folder is read once, by its own name if that lies below. An
    error is a folder that cannot be read, and what has the name of a corpus and is no file: a link
    to nothing, a pipe.
    """
    folders, links, seen = [folder], [], set()
    while folders or links:
        at = folders.pop() if folders else links.pop(0)
        try:
            if identity(at) in seen:
                continue
            seen.add(identity(at))
            with os.scandir(at) as entries:
                inside = sorted(entries, key=lambda entry: entry.name)
            names = {entry.name for entry in inside}
            scratch = re.fullmatch(r"\..+\.tmp", at.name) and names & {"tokenizer", "part0"}
            if scratch or {"train.bin", "val.bin", "meta.json"} <= names:
                passed[OUR_OWN] += len(inside)
                continue
            for entry in inside:
                path = at / entry.name
                if entry.is_dir():
                    (links if entry.is_symlink() else folders).append(path)
                elif not kind_of(path):
                    passed[suffix_of(path) or "no suffix"] += 1
                elif entry.is_file():
                    yield path
                else:
                    what = "a link to nothing, or no regular file"
                    raise UserError(f"--input {path}: {what}: remove it")
        except OSError as e:
            raise UserError(f"--input {e.filename or at}: {e.strerror}") from None


class HashedFile(io.RawIOBase):
    """A source's file that knows how much of it was read, and the SHA-256 of that."""

    def __init__(self, source: Source):
        self.source, self.file = source, open(source.path, "rb", buffering=0)
        self.digest, self.bytes_read = hashlib.sha256(), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        n = self.file.readinto(buffer)
        self.digest.update(memoryview(buffer)[:n])
        self.bytes_read += n
        if self.bytes_read > self.source.bytes:  # it grows, and may do so without end
            raise self.source.changed_error()
        return n

    def close(self) -> None:
        self.file.close()
        super().close()


def decompressed(raw: io.BufferedReader, name: str) -> io.BufferedIOBase:
    """By its first bytes, not by its name: they are right for renamed files and for standard input too."""
    head = raw.peek(10)
    if head.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=raw)
    if head.startswith(b"\xfd7zXZ\x00"):
        return io.BufferedReader(Streams(raw, lzma.LZMADecompressor, b"\0"), 1 << 16)
    if re.match(rb"BZh[1-9]1AY&SY", head):
        return io.BufferedReader(Streams(raw, bz2.BZ2Decompressor), 1 << 16)
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        try:
            from compression import zstd  # Python 3.14
        except ImportError:
            try:
                from backports import zstd
            except ImportError:
                raise UserError(f"{name}: .zst needs the package backports.zstd: pip install backports.zstd") from None
        return zstd.ZstdFile(raw)
    return raw


class Streams(io.RawIOBase):
    """One compressed stream after the other, as pbzip2 and pixz write them. Anything else behind the first is
    an error, where bz2.BZ2File and lzma.LZMAFile take it for the end of the file. padding: allowed between them.
    """

    def __init__(self, raw: io.BufferedReader, decompressor: Callable, padding: bytes = b""):
        self.raw, self.new, self.padding = raw, decompressor, padding
        self.stream, self.rest = decompressor(), b""

    def readable(self) -> bool:
        return True

    def without_padding(self, data: bytes) -> bytes:
        return data.lstrip(self.padding) if self.padding else data

    def readinto(self, buffer) -> int:
        while True:
            if self.stream.eof:
                self.rest = self.without_padding(self.stream.unused_data)
                while not self.rest:
                    data = self.raw.read1(1 << 16)
                    if not data:
                        return 0
                    self.rest = self.without_padding(data)
                self.stream = self.new()
            data = self.rest
            if self.stream.needs_input and not data:
                data = self.raw.read1(1 << 16)
                if not data:
                    raise EOFError("Compressed file ended before the end-of-stream marker was reached")
            self.rest = b""
            try:
                made = self.stream.decompress(data, len(buffer))
            except OSError as e:  # as bz2 says that it is damaged
                raise EOFError(str(e)) from None
            if made:
                buffer[: len(made)] = made
                return len(made)


def demo_sources() -> list[Source]:
    """The modules of the standard library, numpy and torch, tests and vendored packages left out."""
    roots = [Path(sysconfig.get_paths()["stdlib"])]
    for package in ("numpy", "torch"):
        spec = importlib.util.find_spec(package)
        if spec is None:
            raise UserError(f"{package} is not installed: pip install -r requirements.txt")
        roots.append(Path(spec.origin).parent)
    left_out = set("site-packages test tests testing idlelib lib2to3 turtledemo ensurepip __pycache__".split())
    found = []
    for root in roots:
        files = [p for p in root.rglob("*.py") if not left_out.intersection(p.relative_to(root).parts)]
        for path in sorted(p for p in files if not p.name.startswith(("test_", "_sysconfigdata"))):
            parts = path.relative_to(root if root is roots[0] else root.parent).with_suffix("").parts
            found.append(Source.at(path, "py", ".".join(parts).removesuffix(".__init__")))
    return found

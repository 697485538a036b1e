"""The files of a corpus: find those that the --input arguments name, and decompress them.

find_sources() lists the files, and decompressed() unpacks one. docstrings.py lists Python modules.
"""

import bz2
import glob
import gzip
import importlib
import io
import lzma
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from configurator import UserError
from hardware.disk import file_sha256

KINDS = {kind: kind for kind in ("jsonl", "json", "csv", "tsv", "txt", "parquet")}
KINDS |= {"ndjson": "jsonl", "md": "txt"}  # suffix of a file -> its kind
CUT = 1 << 18  # bytes that are unpacked at a time
COMPRESSED = (".gz", ".xz", ".bz2", ".zst")
EXPECTED = f".{', .'.join(KINDS)}, all but .parquet also with {', '.join(COMPRESSED)}"
UNKNOWN_KIND = f"unknown kind of file (.arrow: save as .parquet); expected {EXPECTED}, or --format"
KINDS["arrow"] = ""  # data in a kind that cannot be read: it is an error, and not skipped

# Reasons to skip a file. They are printed, and written into meta.json.
READ_ALREADY = "read already, by this name or another one"
OUR_OWN = "written by prepare.py"


# --------------------------------------------------------------------------------------------------
# One file


@dataclass
class Source:
    """A file to read. Its SHA-256 is filled in when it has been read."""

    path: Path
    kind: str  # one that KINDS maps to, or "py": a Python module
    name: str  # the name that messages and meta.json show
    bytes: int = 0  # size on the disk, so of the compressed data
    changed: int = 0  # ctime in ns, since `cp -p` and `touch` can set mtime
    sha256: str = ""

    @classmethod
    def from_path(cls, path: Path, kind: str, name: str = "") -> "Source":
        """Return the Source of an existing file. name: shown in messages instead of the path."""
        stat = path.stat()
        return cls(path, kind, name or str(path), stat.st_size, stat.st_ctime_ns)

    def finish(self) -> None:
        """Fill in the SHA-256 after the file was read. Raises UserError if it has changed."""
        self.sha256 = self.sha256 or file_sha256(self.path)
        stat = self.path.stat()
        if (stat.st_size, stat.st_ctime_ns) != (self.bytes, self.changed):
            raise UserError(f"{self.name}: it changed while it was read: run the command again")


def sort_key(path: Path) -> list[bytes]:
    """Return a sort key of a path: bytes, so that the order is the same in every locale."""
    return os.fsencode(path).split(b"/")


def suffix_of(path: Path) -> str:
    """Return the suffixes of the kind and the compression: .jsonl.gz for DUMP.JSONL.gz."""
    name = Path(path.name.lower())
    packed = name.suffix if name.suffix in COMPRESSED else ""
    return Path(name.name.removesuffix(packed)).suffix + packed


def kind_of(path: Path) -> str | None:
    """Return the kind of file that the name indicates, or None."""
    return KINDS.get(suffix_of(path).strip(".").partition(".")[0])


def identity(path: str | Path) -> tuple[int, int]:
    """Return (device, inode), which is the same for all names of a file.

    A file has several names because of links, or because the disk does not distinguish a and A.
    """
    stat = os.stat(path)
    return stat.st_dev, stat.st_ino


# --------------------------------------------------------------------------------------------------
# All files of a corpus


def find_sources(inputs: Iterable[str], kind: str) -> tuple[list[Source], dict[str, Counter]]:
    """Return the files that the --input arguments name, and the number of skipped files by reason.

    The files come in a fixed order, each file once. Folders are searched with all their subfolders.
    kind: the kind of all files; "auto": by the name of each. The second result maps an argument to
    its skipped files: reason (READ_ALREADY, OUR_OWN, or the suffix of a file of unknown kind) ->
    number of files.

    Raises UserError for an argument that names nothing, and for a file that cannot be input.
    """
    sources: dict[tuple[int, int], Source] = {}  # by the identity of the file
    skipped: dict[str, Counter] = {}
    for argument in inputs:
        counts = skipped.setdefault(argument, Counter())
        for file in named_files(argument, kind, counts):
            file_kind = kind_of(file) if kind == "auto" else kind
            if not file_kind:
                raise UserError(f"--input {file}: {UNKNOWN_KIND}")
            if not file.is_file():
                raise UserError(f"--input {file}: not a regular file, or a broken link: remove it")
            source = Source.from_path(file, file_kind)
            if sources.setdefault(identity(file), source) is not source:
                counts[READ_ALREADY] += 1
    return list(sources.values()), {name: counts for name, counts in skipped.items() if counts}


def named_files(argument: str, kind: str, skipped: Counter) -> Iterator[Path]:
    """Yield the files that one --input argument names: a file, a folder or a pattern of these.

    For a folder, walk() finds the files, and `skipped` counts the others. Raises UserError if there
    is no such file, or if a folder has no file to read.
    """
    names = [argument] if os.path.exists(argument) else glob.glob(argument, recursive=True)
    paths = sorted(map(Path, names), key=sort_key)
    if not paths:
        raise UserError(f"--input {argument}: no such file or folder")
    for path in paths:
        files = sorted(walk(path, kind, skipped), key=sort_key) if path.is_dir() else [path]
        if not files:
            raise UserError(f"--input {path}: no file ends in {EXPECTED}: give --format=KIND")
        yield from files


def walk(folder: Path, kind: str, skipped: Counter) -> Iterator[Path]:
    """Yield the files of a known kind in a folder and its subfolders. `skipped` counts the others.

    If the kind is not "auto", files of unknown kinds are yielded too, except hidden ones, such as
    .DS_Store and those in .git/, and empty ones, such as Spark's _SUCCESS.
    Links to folders are followed, but each folder is read only once, under the first of its names.
    Data sets and scratch folders of prepare.py are skipped. Raises UserError for a folder that
    cannot be read, or that contains token ids of another program.
    """
    seen = set()  # identities of the folders so far: a link may lead back to one of them
    for parent, folders, names in os.walk(folder, onerror=refuse_folder, followlinks=True):
        present = {*folders, *names}
        is_scratch = re.fullmatch(r"\..+\.tmp", os.path.basename(parent))
        if identity(parent) in seen:
            folders.clear()
        elif is_scratch or {"train.bin", "val.bin", "meta.json"} <= present:
            skipped[OUR_OWN] += len(present)
            folders.clear()
        elif {"train.bin", "val.bin"} <= present:
            advice = "give the text that they were made of, such as nanoGPT's input.txt"
            raise UserError(f"--input {parent}: train.bin and val.bin are no text: {advice}")
        else:
            folders.sort()
            for path in (Path(parent, name) for name in names):
                is_hidden = re.search(r"(^|/)(\.|__pycache__/)", str(path.relative_to(folder)))
                is_taken = kind != "auto" and not is_hidden and path.stat().st_size
                if kind_of(path) is not None or is_taken:
                    yield path
                else:
                    skipped[suffix_of(path) or "no suffix"] += 1
        seen.add(identity(parent))


def refuse_folder(error: OSError) -> None:
    raise UserError(f"--input {error.filename}: {error.strerror}") from None


# --------------------------------------------------------------------------------------------------
# The content of a file


class Unpacked(io.RawIOBase):
    """The decompressed bytes of a file of one or several streams, as `cat a.xz b.xz` makes it.

    BZ2File and LZMAFile would end without an error where a later stream is damaged.
    """

    def __init__(self, raw: io.BufferedReader, decompressor: Callable):
        self.raw = raw
        self.decompressor = decompressor
        self.stream = decompressor()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while True:
            packed = b""
            if self.stream.eof:  # zeros may stand between streams of .xz
                packed = self.stream.unused_data.lstrip(b"\0") or self.raw.read(CUT).lstrip(b"\0")
                if not packed:
                    return 0
                self.stream = self.decompressor()
            elif self.stream.needs_input and not (packed := self.raw.read(CUT)):
                raise EOFError("its end is missing")
            if data := self.stream.decompress(packed, len(buffer)):
                buffer[: len(data)] = data
                return len(data)


def decompressed(raw: io.BufferedReader, name: str) -> io.BufferedReader | gzip.GzipFile:
    """Return a stream of the decompressed bytes of `raw`; `raw` itself if it is not compressed.

    The first bytes of the file decide, since a file may have been renamed. name: of the file, for
    messages.
    """
    head = raw.peek(10)
    if head.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=raw)
    if head.startswith(b"\xfd7zXZ\x00"):
        return io.BufferedReader(Unpacked(raw, lzma.LZMADecompressor))
    if re.match(rb"BZh[1-9]1AY&SY", head):
        return io.BufferedReader(Unpacked(raw, bz2.BZ2Decompressor))
    # The second is a skippable frame, as pzstd writes first; 31 is for zstd --ultra --long=31.
    if re.match(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", head):
        zstd = import_for(name, "backports.zstd", "compression.zstd", "backports.zstd")
        return zstd.ZstdFile(raw, options={zstd.DecompressionParameter.window_log_max: 31})
    return raw


def import_for(name: str, package: str, *modules: str) -> ModuleType:
    """Return the first of these modules that is installed, to read the file `name`.

    Raises UserError, which names `package`, if none is installed.
    """
    for module in modules:
        with suppress(ImportError):
            return importlib.import_module(module)
    raise UserError(f"{name}: reading it needs {package}: pip install {package}")

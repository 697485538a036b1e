"""The files of a corpus: those that the --input arguments name."""

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from configurator import UserError
from text import compression
from text.formats import KINDS, Source

READABLE, PACKED = ", ".join(filter(KINDS.get, KINDS)), ", ".join(compression.SUFFIXES)
EXPECTED = f"{READABLE}, all but .parquet also with {PACKED}"
UNKNOWN_KIND = f"unknown kind of file (.arrow: save as .parquet); expected {EXPECTED}, or --format"

# Reasons to skip a file. They are printed, and written into meta.json.
READ_ALREADY = "read already, by this name or another one"
OUR_OWN = "written by prepare.py"


def sort_key(path: Path) -> list[bytes]:
    """Return a sort key of a path: bytes, so that the order is the same in every locale."""
    return os.fsencode(path).split(b"/")


def suffixes_of(path: Path) -> tuple[str, str]:
    """Return the suffixes of the kind and the compression: (.jsonl, .gz) for DUMP.JSONL.gz."""
    name = Path(path.name.lower())
    packed = name.suffix if name.suffix in compression.SUFFIXES else ""
    return Path(name.name.removesuffix(packed)).suffix, packed


def kind_of(path: Path) -> str | None:
    """Return the kind of file that the name indicates, or None."""
    return KINDS.get(suffixes_of(path)[0])


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
                    skipped["".join(suffixes_of(path)) or "no suffix"] += 1
        seen.add(identity(parent))


def refuse_folder(error: OSError) -> None:
    raise UserError(f"--input {error.filename}: {error.strerror}") from None

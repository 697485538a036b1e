"""Join the parts, in the order of the input, into one data set."""

import io
import math
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from hardware.disk import sync_to_disk
from text.encode import ROW, GrowingFile, Part


def read_rows(parts: list[Part]) -> Iterator[tuple[Part, np.ndarray]]:
    """Yield (part, some of its rows (documents,)) of all parts, a quarter million at a time."""
    for part in parts:
        with open(part.paths["rows"], "rb") as f:
            while len(rows := np.fromfile(f, ROW, 1 << 18)):
                yield part, rows


def number_of_documents(parts: list[Part]) -> int:
    return sum(part.paths["rows"].stat().st_size for part in parts) // ROW.itemsize


def find_duplicates(parts: list[Part]) -> np.ndarray:
    """Return (documents,) bool: True for a document if an earlier one has the same digest.

    All rows are read several times. Each time only a share of the digests is compared, which bounds
    the memory.
    """
    duplicate = np.ones(number_of_documents(parts), bool)
    shares = math.ceil(len(duplicate) / (1 << 20))
    for share in range(shares):
        digests = []
        places = []  # the number of the document of each digest
        n_read = 0
        for _, rows in read_rows(parts):
            in_share = np.flatnonzero(rows["digest"][:, 1] % shares == share)
            digests.append(rows["digest"][in_share])
            places.append(in_share + n_read)
            n_read += len(rows)
        # return_index: of several equal digests, the place of the first one
        _, earliest = np.unique(np.concatenate(digests), axis=0, return_index=True)
        duplicate[np.concatenate(places)[earliest]] = False
    return duplicate


def kept_rows(
    parts: list[Part], duplicate: np.ndarray
) -> Iterator[tuple[Part, np.ndarray, np.ndarray]]:
    """Yield (part, rows, which of them are kept) in the order of the input.

    duplicate: the documents that are left out, as find_duplicates() returns them.
    """
    n_read = 0
    for part, rows in read_rows(parts):
        yield part, rows, ~duplicate[n_read : n_read + len(rows)]
        n_read += len(rows)


def count(parts: list[Part], duplicate: np.ndarray) -> tuple[dict[str, dict], Counter]:
    """Return the counts of each split, and {length in tokens: documents}."""
    zeros = dict(tokens=0, documents=0, bytes=0, characters=0)
    counts = {"train": zeros.copy(), "val": zeros.copy()}
    lengths: Counter = Counter()
    for _, rows, kept in kept_rows(parts, duplicate):
        for split, total in counts.items():
            of_split = rows[kept & (rows["val"] == (split == "val"))]
            total["documents"] += len(of_split)
            for name in ("tokens", "bytes", "characters"):
                total[name] += int(of_split[name].sum())
        lengths.update(rows["tokens"][kept].tolist())
    return counts, lengths


def merge(parts: list[Part], duplicate: np.ndarray, folder: Path, itemsize: int) -> dict[str, list]:
    """Write train.bin and val.bin into the folder; return the GrowingFile.state() of each.

    The parts are not changed. If this process is killed here, only this step has to be repeated.
    """
    states = {}
    for split in ("train", "val"):
        target = folder / f"{split}.bin"
        if len(parts) == 1 and not duplicate.any():
            with suppress(OSError):  # this file system has no hard links
                os.link(parts[0].paths[split], target)  # a second name for it: nothing is copied
                states[split] = parts[0].states[split]
        if split not in states:
            sources = {part: open(part.paths[split], "rb") for part in parts}
            out = GrowingFile(target, "xb")
            for part, rows, kept in kept_rows(parts, duplicate):
                of_split = rows["val"] == (split == "val")
                sizes = rows["tokens"][of_split] * itemsize
                copy_documents(sources[part], out, sizes, kept[of_split])
            states[split] = out.state()
            for file in (out.file, *sources.values()):
                file.close()
        sync_to_disk(target)
    return states


def copy_documents(
    source: io.BufferedReader, out: GrowingFile, sizes: np.ndarray, kept: np.ndarray
) -> None:
    """Copy the documents that are kept from the source's position to `out`, and skip the others.

    sizes: bytes of each document. kept: bool for each document.
    """
    # The documents between two edges are neighbours that are all kept or all skipped.
    edges = np.flatnonzero(np.diff(kept, prepend=~kept[:1], append=~kept[-1:]))
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        left = int(sizes[start:end].sum())
        if not kept[start]:
            source.seek(left, os.SEEK_CUR)
            continue
        while left and (data := source.read(min(left, 1 << 22))):
            out.write(data)
            left -= len(data)

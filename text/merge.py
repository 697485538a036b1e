"""The parts, in the order of the input, become one data set."""

import io
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hardware.disk import sync_to_disk
from text.encode import ROW, GrowingFile, Part


def read_rows(part: Part) -> Iterator[np.ndarray]:
    """The documents of a part, (documents,) of ROW, the pieces of a long one summed up; a quarter million at a time."""
    with open(part.paths["rows"], "rb") as f:
        rows = np.empty(0, ROW)
        while len(more := np.fromfile(f, ROW, 1 << 18)):
            rows = np.concatenate([rows, more])
            edges = np.flatnonzero(rows["end"]) + 1  # behind each whole document
            if len(edges):
                found, begins = rows[edges - 1], np.concatenate([[0], edges[:-1]])
                for count in ("tokens", "bytes", "characters"):
                    found[count] = np.add.reduceat(rows[count][: edges[-1]], begins)
                rows = rows[edges[-1] :]
                yield found


def find_duplicates(parts: list[Part]) -> np.ndarray:
    """(documents,) bool: has an earlier document the same digest? A share of all digests at a time: memory is bounded."""
    n = sum(len(rows) for part in parts for rows in read_rows(part))
    if not n:
        return np.zeros(0, bool)
    again, shares = np.zeros(n, bool), n // (1 << 20) + 1
    for share in range(shares):
        digests, places, base = [], [], 0
        for rows in (rows for part in parts for rows in read_rows(part)):
            mine = np.flatnonzero(rows["digest"][:, 1] % shares == share)
            digests.append(rows["digest"][mine])
            places.append(mine + base)
            base += len(rows)
        place = np.concatenate(places)
        _, first = np.unique(np.concatenate(digests), axis=0, return_index=True)  # the first of equal ones
        again[place] = True
        again[place[first]] = False
    return again


def kept_rows(parts: list[Part], again: np.ndarray) -> Iterator[tuple[Part, np.ndarray, np.ndarray]]:
    """(part, its rows, which of them stay) for a quarter million documents at a time, in the order of the input."""
    seen = 0
    for part in parts:
        for rows in read_rows(part):
            yield part, rows, ~again[seen : seen + len(rows)] if len(again) else np.ones(len(rows), bool)
            seen += len(rows)


def count(parts: list[Part], again: np.ndarray) -> tuple[dict[str, dict], Counter]:
    """The counts of each split, and {length in tokens: documents}."""
    counts = {split: dict(tokens=0, documents=0, bytes=0, characters=0) for split in ("train", "val")}
    lengths: Counter = Counter()
    for _, rows, kept in kept_rows(parts, again):
        for split, total in counts.items():
            mine = rows[kept & (rows["val"] == (split == "val"))]
            total["documents"] += len(mine)
            for name in ("tokens", "bytes", "characters"):
                total[name] += int(mine[name].sum())
        lengths.update(rows["tokens"][kept].tolist())
    return counts, lengths


def merge(parts: list[Part], again: np.ndarray, folder: Path, itemsize: int) -> dict[str, list]:
    """Write folder/{train,val}.bin; returns the state() of each.

    The parts stay as they are, so that a kill in here costs nothing but this step.
    """
    states = {}
    for split in ("train", "val"):
        target = folder / f"{split}.bin"
        if len(parts) == 1 and not again.any():
            states[split] = parts[0].states[split]
            try:
                os.link(parts[0].paths[split], target)  # a second name costs nothing
            except OSError:  # a file system that has no such thing
                shutil.copyfile(parts[0].paths[split], target)
        else:
            sources = {part.paths[split]: open(part.paths[split], "rb") for part in parts}
            out = GrowingFile(target, "xb")
            for part, rows, kept in kept_rows(parts, again):
                mine = rows["val"] == (split == "val")
                sizes = rows["tokens"][mine] * itemsize
                copy_documents(sources[part.paths[split]], out, sizes, kept[mine])
            states[split] = out.state()
            for file in (out.file, *sources.values()):
                file.close()
        sync_to_disk(target)
    return states


def copy_documents(
    source: io.BufferedReader,
    out: GrowingFile,
    sizes: np.ndarray,
    kept: np.ndarray,
) -> None:
    """Copy the kept ones of documents of `sizes` bytes that stand at the source's position, and pass by the others."""
    edges = np.flatnonzero(np.diff(kept, prepend=~kept[:1], append=~kept[-1:])) if len(kept) else []
    for begin, end in zip(edges[:-1], edges[1:], strict=True):  # a run of documents that share one fate
        left = int(sizes[begin:end].sum())
        if not kept[begin]:
            source.seek(left, os.SEEK_CUR)
            continue
        while left and (data := source.read(min(left, 1 << 22))):
            out.write(data)
            left -= len(data)

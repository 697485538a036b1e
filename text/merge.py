"""Join the parts, in the order of the input, into one data set."""

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from hardware.disk import sync_to_disk
from text.encode import ROW, HashedFile, Part


def read_rows(parts: list[Part]) -> Iterator[tuple[Part, np.ndarray]]:
    """Yield (part, some of its rows (documents,)) of all parts, a quarter million at a time."""
    for part in parts:
        with open(part.paths["rows"], "rb") as f:
            while len(rows := np.fromfile(f, ROW, 1 << 18)):
                yield part, rows


def count(parts: list[Part]) -> tuple[dict[str, dict], Counter]:
    """Return the counts of each split, and {length in tokens: documents}."""
    zeros = dict(tokens=0, documents=0, bytes=0, characters=0)
    counts = {"train": zeros.copy(), "val": zeros.copy()}
    lengths: Counter = Counter()
    for _, rows in read_rows(parts):
        for split, total in counts.items():
            of_split = rows[rows["val"] == (split == "val")]
            total["documents"] += len(of_split)
            for name in ("tokens", "bytes", "characters"):
                total[name] += int(of_split[name].sum())
        lengths.update(rows["tokens"].tolist())
    return counts, lengths


def merge(parts: list[Part], folder: Path) -> dict[str, list]:
    """Write train.bin and val.bin into the folder; return the HashedFile.state() of each.

    The parts are not changed. If this process is killed here, only this step has to be repeated.
    """
    states = {}
    for split in ("train", "val"):
        target = folder / f"{split}.bin"
        if len(parts) == 1:
            with suppress(OSError):  # this file system has no hard links
                os.link(parts[0].paths[split], target)  # a second name for it: nothing is copied
                states[split] = parts[0].states[split]
        if split not in states:
            with HashedFile(target, "xb") as out:
                for part in parts:
                    with open(part.paths[split], "rb") as source:
                        shutil.copyfileobj(source, out, 1 << 22)
                states[split] = out.state()
        sync_to_disk(target)
    return states

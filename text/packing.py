"""Windows that are filled with whole documents, and the length of the document of each token.

A document of n tokens is followed by its eos, and so gives n + 1 targets: each of its tokens, and
the eos. Their inputs are the eos before the document and its n tokens. So here an eos *begins* a
document, as it does when sample.py writes a new one. The eos before the first document of a file,
where there is none, is added.

Packing puts documents together so that they fill windows of T inputs, best fit first: from the
longest document to the shortest, each goes into the window with the least room that is enough for
it (arXiv 2404.10830). A document with more than T inputs has windows of its own. What is left of it
at the end, its tail, is packed like a document: an eos stands before it, which does not predict
anything. Behind the last document of a window there may be padding, which is not trained on.

The plan of the windows depends on the tokens and T only. It is computed once, for 250,000
documents at a time, and kept in two files in data/.windows/, where each run maps it into memory.
"""

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from configurator import UserError
from hardware.disk import sync_to_disk
from text.dataset import DataSet
from text.landmarks import Ids

TOGETHER = 250_000  # documents that are packed together
STRETCH = 1 << 22  # tokens that are read at a time

# A window of the plan consists of pieces. Before each piece there is an eos, which may be the last
# token of the piece before it. A piece with T + 1 tokens is a whole window, without that eos.
PIECE = np.dtype([("first", "<i8"), ("count", "<u4")])  # its first token in the split; its tokens


def best_fit(lengths: np.ndarray, T: int) -> tuple[np.ndarray, int]:
    """Return the bin (n,) of each of n items, of these lengths (n,), and the number of bins.

    No bin has more than T. The longest item goes first, and each into the fullest bin that has room
    for it.
    """
    bins = np.empty(len(lengths), np.int64)
    count = 0
    with_room: list[list[int]] = [[] for _ in range(T + 1)]  # room -> the bins that have it
    rooms = 0  # bit r is set if there are bins with room r
    order = np.argsort(-lengths, kind="stable")
    for item, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1  # the lowest bit that is set
            bin = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room = T
            bin = count
            count += 1
        bins[item] = bin
        if room > length:
            with_room[room - length].append(bin)
            rooms |= 1 << (room - length)
    return bins, count


def pack(ends: np.ndarray, begin: int, T: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack documents into windows. Return the pieces, and how many of them each window has.

    ends: where the eos of each document is, (n,). begin: the first token of the first of them.
    """
    begins = np.append(begin, ends[:-1] + 1)
    inputs = ends - begins + 1
    # The windows of long documents: they begin at the input before the document's first token.
    whole = np.where(inputs > T, inputs // T, 0)
    of_document = np.arange(whole.sum()) - np.repeat(whole.cumsum() - whole, whole)  # 0, 1, 2, ...
    first = np.repeat(begins - 1, whole) + of_document * T
    windows = np.empty(len(first), PIECE)
    windows["first"] = first
    windows["count"] = T + 1
    # Everything else: documents, and tails. A tail repeats the last token before it as an input.
    rest = inputs - whole * T
    is_tail = whole > 0
    pieces = np.empty(len(ends), PIECE)
    pieces["first"] = np.where(is_tail, begins - 1 + whole * T, begins)
    pieces["count"] = np.where(is_tail, rest + 1, rest)
    pieces = pieces[rest > 0]
    bins, count = best_fit(pieces["count"], T)
    pieces = pieces[np.argsort(bins, kind="stable")]
    per_window = np.append(np.ones(len(windows), int), np.bincount(bins, minlength=count))
    return np.append(windows, pieces), per_window


def document_ends(ids: Ids, eos_id: int, what: str) -> Iterator[np.ndarray]:
    """Yield where the eos of each document is, for at most TOGETHER documents at a time.

    what: the word before the progress bar, which is shown on a terminal.
    """
    waiting: list[np.ndarray] = []
    count = 0
    for at in tqdm(range(0, len(ids), STRETCH), what, disable=None, leave=False):
        found = np.flatnonzero(ids.read(at, STRETCH) == eos_id) + at
        while count + len(found) >= TOGETHER:
            missing = TOGETHER - count
            yield np.concatenate([*waiting, found[:missing]])
            found = found[missing:]
            waiting = []
            count = 0
        waiting.append(found)
        count += len(found)
    if count:
        yield np.concatenate(waiting)


def write_plan(ids: Ids, eos_id: int, T: int, pieces_file: BinaryIO, bounds_file: BinaryIO) -> None:
    """Write the pieces of all windows, and the number of the first piece of each window."""
    begin = 0
    so_far = 0
    for ends in document_ends(ids, eos_id, f"packing {ids.path.name}"):
        pieces, per_window = pack(ends, begin, T)
        begin = int(ends[-1]) + 1
        pieces_file.write(pieces)
        bounds_file.write((per_window.cumsum() - per_window + so_far).astype("<i8"))
        so_far += len(pieces)
    bounds_file.write(np.array([so_far], "<i8"))


def packed(data: DataSet, split: str, T: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the plan of a split: its pieces, and the first piece of each window with the end."""
    if T < 2:
        raise UserError("windows of one token cannot hold documents: raise block_size")

    def write(folder: Path) -> None:
        with open(folder / "pieces.bin", "xb") as pieces, open(folder / "bounds.bin", "xb") as ends:
            write_plan(Ids(data.folder, data.meta, split), data.meta["eos_id"], T, pieces, ends)

    folder = computed_once(data, f"{split}-packed{T}", write)
    pieces = np.memmap(folder / "pieces.bin", PIECE, "r")
    return pieces, np.memmap(folder / "bounds.bin", "<i8", "r")


def ends_of(data: DataSet, split: str) -> np.ndarray:
    """Return where the eos of each document of a split is, (documents,)."""

    def write(folder: Path) -> None:
        ids = Ids(data.folder, data.meta, split)
        with open(folder / "ends.bin", "xb") as f:
            for ends in document_ends(ids, data.meta["eos_id"], f"documents of {ids.path.name}"):
                f.write(ends.astype("<i8"))

    return np.memmap(computed_once(data, f"{split}-ends", write) / "ends.bin", "<i8", "r")


def computed_once(data: DataSet, what: str, write: Callable[[Path], None]) -> Path:
    """Return a folder with what write(folder) has written, now or in an earlier run.

    It is beside the data set, or where nothing can be written there, in a folder that lasts as long
    as this process. Its name has the hash of the tokens: with other tokens it is another folder.
    """
    sha256 = data.meta["splits"][what.partition("-")[0]]["sha256"]
    place = data.folder.parent / ".windows"
    folder = place / f"{data.name}-{what}-{sha256[:16]}"
    if folder.exists():
        return folder
    try:
        place.mkdir(exist_ok=True)
        new = Path(tempfile.mkdtemp(dir=place, prefix="."))
    except OSError:  # it is another user's, or on a disk that can only be read
        new = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, new, ignore_errors=True)
        write(new)
        return new
    try:
        write(new)
        for path in new.iterdir():
            sync_to_disk(path)
        new.chmod(0o755)  # other users may train on the same data set
        new.rename(folder)
    except OSError:
        if not folder.exists():  # else another process was faster
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return folder

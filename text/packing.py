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
documents at a time, and kept in data/.windows/, where each run maps it into memory. It is made only
of tokens that have the hash of meta.json, it names that hash, and its own files have a manifest:
what does not fit is not used, but made anew.
"""

import atexit
import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from configurator import OneRankError, UserError, note
from hardware.disk import (
    MANIFEST,
    damage,
    json_bytes,
    manifest,
    remove_only,
    sync_to_disk,
    write_whole,
)
from hardware.terminal import ProgressBar
from text.dataset import DataSet, verify
from text.landmarks import Ids

TOGETHER = 250_000  # documents that are packed together
STRETCH = 1 << 22  # tokens that are read at a time
AT_ONCE = 1 << 20  # windows of long documents that are computed at a time
VERSION = 2  # of the files

# A window of the plan consists of pieces. Before each piece there is an eos, which may be the last
# token of the piece before it. A piece with T + 1 tokens is the middle of a long document: a whole
# window, without that eos.
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


def pack(ends: np.ndarray, begin: int, T: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pack documents into windows. Yield pieces, and how many of them each window has.

    ends: where the eos of each document is, (n,). begin: the first token of the first of them.
    """
    begins = np.append(begin, ends[:-1] + 1)
    inputs = ends - begins + 1
    # The windows of long documents.
    whole = np.where(inputs > T, inputs // T, 0)
    so_far = whole.cumsum()
    for at in range(0, int(so_far[-1]), AT_ONCE):
        number = np.arange(at, min(at + AT_ONCE, int(so_far[-1])))
        document = np.searchsorted(so_far, number, "right")
        in_document = number - (so_far - whole)[document]  # 0, 1, 2, ... of its document
        windows = np.empty(len(number), PIECE)
        begins_it = in_document == 0  # then an eos stands before it, as before any other piece
        windows["first"] = begins[document] - 1 + in_document * T + begins_it
        windows["count"] = T + 1 - begins_it
        yield windows, np.ones(len(windows), int)
    # Everything else: documents, and tails. A tail repeats the last token before it as an input.
    rest = inputs - whole * T
    is_tail = whole > 0
    pieces = np.empty(len(ends), PIECE)
    pieces["first"] = np.where(is_tail, begins - 1 + whole * T, begins)
    pieces["count"] = np.where(is_tail, rest + 1, rest)
    pieces = pieces[rest > 0]
    bins, count = best_fit(pieces["count"], T)
    yield pieces[np.argsort(bins, kind="stable")], np.bincount(bins, minlength=count)


def document_ends(data: DataSet, split: str) -> Iterator[np.ndarray]:
    """Yield where the eos of each document is, for at most TOGETHER documents at a time.

    All tokens are read. Raises UserError if they are not those that meta.json describes.
    """
    ids = Ids(data.folder, data.meta, split)
    eos_id = data.meta["eos_id"]
    digest = hashlib.sha256()
    waiting: list[np.ndarray] = []
    count = 0
    for at in ProgressBar(f"finding documents of {split}", range(0, len(ids), STRETCH)):
        tokens = ids.read(at, STRETCH)
        digest.update(tokens)
        found = np.flatnonzero(tokens == eos_id) + at
        while count + len(found) >= TOGETHER:
            missing = TOGETHER - count
            yield np.concatenate([*waiting, found[:missing]])
            found = found[missing:]
            waiting = []
            count = 0
        waiting.append(found)
        count += len(found)
    if digest.hexdigest() != data.meta["splits"][split]["sha256"] or tokens[-1] != eos_id:
        verify(data.folder, data.meta, split)  # says what is wrong
        raise UserError(f"{ids.path}: it is being changed: wait until it is whole")
    if count:
        yield np.concatenate(waiting)


def packed(data: DataSet, split: str, T: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the plan of a split: the pieces of all windows (pieces,), and the number of the first
    piece of each window, with the number of all pieces at the end, (windows + 1,).
    """

    def write(folder: Path) -> None:
        begin = 0
        so_far = 0
        with open(folder / "pieces.bin", "xb") as out, open(folder / "bounds.bin", "xb") as bounds:
            for ends in document_ends(data, split):
                for pieces, per_window in pack(ends, begin, T):
                    out.write(pieces)
                    first = per_window.cumsum() - per_window + so_far
                    bounds.write(first.astype("<i8"))
                    so_far += len(pieces)
                begin = int(ends[-1]) + 1
            bounds.write(np.array([so_far], "<i8"))

    folder = computed_once(data, split, f"packed{T}", write)
    pieces = np.memmap(folder / "pieces.bin", PIECE, "r")
    return pieces, np.memmap(folder / "bounds.bin", "<i8", "r")


def ends_of(data: DataSet, split: str) -> np.ndarray:
    """Return where the eos of each document of a split is, (documents,)."""

    def write(folder: Path) -> None:
        with open(folder / "ends.bin", "xb") as f:
            for ends in document_ends(data, split):
                f.write(ends.astype("<i8"))

    return np.memmap(computed_once(data, split, "ends", write) / "ends.bin", "<i8", "r")


ABOUT = "about.json"  # names the tokens that the other files were computed from
FILES = ("pieces.bin", "bounds.bin", "ends.bin", ABOUT, MANIFEST)  # that computed_once() may delete


def computed_once(data: DataSet, split: str, what: str, write: Callable[[Path], None]) -> Path:
    """Return a folder with what write(folder) has written, now or in an earlier run.

    It is beside the data set, or where nothing can be written there, in a folder that lasts as long
    as this process. Its name has the hash of the tokens: with other tokens it is another folder. If
    its files are not those that were written, or not of these tokens, they are made anew. Raises
    OneRankError if there is no room for them.
    """
    home = data.folder.resolve()
    place = home.parent / ".windows"
    sha256 = data.meta["splits"][split]["sha256"]
    folder = place / f"{home.name}-{split}-{what}-v{VERSION}-{sha256[:16]}"
    about = json_bytes({"tokens": sha256, "what": what, "version": VERSION})

    def is_there() -> bool:
        return not damage(folder, required=[ABOUT]) and (folder / ABOUT).read_bytes() == about

    try:
        if is_there():
            return folder
        if not place.exists():
            place.mkdir()
            place.chmod(home.parent.stat().st_mode)  # whoever may write data sets may write here
        for left in place.glob(".*"):  # by processes that were killed
            if time.time() - left.stat().st_mtime > 86_400:
                remove_only(left, FILES)
        new = Path(tempfile.mkdtemp(dir=place, prefix="."))
        try:
            write(new)
            (new / ABOUT).write_bytes(about)
            write_whole(new / MANIFEST, json_bytes(manifest(new)))
            for path in (*new.iterdir(), new):
                path.chmod(0o755 if path == new else 0o644)  # for other users, too
                sync_to_disk(path)
            remove_only(folder, FILES)  # it is there only if it is damaged
            new.rename(folder)
            return folder
        finally:
            remove_only(new, FILES)
    except OSError as e:
        # Another user's folder, a disk that is full or can only be read, or another process that
        # was faster.
        if is_there():
            return folder
        note(f"{e.filename or folder}: {e.strerror}: the windows are planned for this run only")
    try:
        new = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, new, ignore_errors=True)
        write(new)
        return new
    except OSError as e:
        plan = f"writing the plan of the windows of {home}/{split}.bin in TMPDIR"
        raise OneRankError(f"{plan}: {e.strerror}: set TMPDIR to a folder with more room") from None

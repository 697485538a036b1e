"""A corpus of few documents is split by its text: its last characters become val.bin.

As a rule, a hash decides for each document whether it goes to train.bin or to val.bin (encode.py).
A single file of text cannot be split like that. The parts are written as always. When all documents
and characters are counted, they are cut: the last val_fraction of all characters becomes val.bin,
and the document at the cut becomes two documents.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from configurator import UserError
from hardware.disk import remove_only
from text.encode import ROW, Encoded, Encoder, Part
from text.folders import WORK
from text.records import Tally, documents
from text.settings import PrepareConfig, cleaning, reader_of
from text.sources import Source

Shares = list[tuple[list[Source], Part]]  # the part of each process, and the files it was made of


def too_few(splits: dict[str, dict], val_fraction: float) -> bool:
    """Return whether there are too few documents to choose some of them for val.bin.

    Fewer than 1 / val_fraction are too few. So are more, if the hash puts all into one split.
    """
    numbers = [counts["documents"] for counts in splits.values()]
    return sum(numbers) * val_fraction < 1 or 0 in numbers


def cut_by_text(
    cfg: PrepareConfig,
    shares: Shares,
    duplicate: np.ndarray,
    splits: dict[str, dict],
    encoder: Encoder,
    folder: Path,
) -> Part:
    """Write the documents of all parts into one new part in `folder`, and return it.

    Of their n characters, the first int(n * (1 - val_fraction)) go to its train.bin, the others to
    its val.bin. duplicate: the documents that are left out, as in merge(). splits: the counts of
    the others. Raises UserError if a split would be empty.
    """
    n = sum(counts["characters"] for counts in splits.values())
    cut = int(n * (1 - cfg.val_fraction))
    for split, size, advice in (("train", cut, "lower"), ("val", n - cut, "raise")):
        if size == 0:
            empty = f"the input is too short: {advice} --val_fraction, or give more text"
            raise UserError(f"{split}.bin would be empty: {empty}")
    remove_only(folder, WORK["cut"])
    new = Part(folder, key="")
    new.open([])
    end = 0  # how many characters come before the end of the document
    for sources, row, ids in kept_rows(shares, duplicate, encoder.dtype):
        begin = end
        end += int(row["characters"])
        if begin < cut < end:
            text = text_of(row, sources, cfg)
            write(new, *half(row, text[: cut - begin], False, encoder))
            write(new, *half(row, text[cut - begin :], True, encoder))
        else:
            row["val"] = end > cut
            write(new, row, ids)
    new.commit(0, 0, [])
    new.close()
    return new


def kept_rows(
    shares: Shares, duplicate: np.ndarray, dtype: np.dtype
) -> Iterator[tuple[list[Source], np.ndarray, np.ndarray]]:
    """Yield (the files of its part, row, its token ids) for each row, in the order of the input."""
    number = 0  # of the document
    for sources, part in shares:
        files = {val: open(part.paths["val" if val else "train"], "rb") for val in (False, True)}
        for row in np.fromfile(part.paths["rows"], ROW):
            ids = np.fromfile(files[bool(row["val"])], dtype, int(row["tokens"]))
            if not (len(duplicate) and duplicate[number]):
                yield sources, row, ids
            number += 1
        for file in files.values():
            file.close()


def text_of(row: np.ndarray, sources: list[Source], cfg: PrepareConfig) -> str:
    """Read the files again, up to the text of this row, and return it.

    Its ids would not do: there are tokenizers that do not decode every text to itself.
    """
    for chunk in reader_of(sources, cfg).chunks():
        for _, text, utf8 in documents(chunk, cleaning(cfg), Tally()):
            if hashlib.sha256(utf8).digest()[:16] == row["digest"].tobytes():
                return text
    raise UserError("the input changed while it was read: run the same command again")


def half(row: np.ndarray, text: str, val: bool, encoder: Encoder) -> tuple[np.ndarray, np.ndarray]:
    """Return the row and the ids of one half of a document that is cut; this is its `text`."""
    row = row.copy()
    ids = np.concatenate([encoder.encode(text), encoder.eos])
    row["val"] = val
    row["tokens"] = len(ids)
    row["bytes"] = len(text.encode())
    row["characters"] = len(text)
    return row, ids


def write(part: Part, row: np.ndarray, ids: np.ndarray) -> None:
    """Append a row and its ids to the files of a part."""
    data = ids.tobytes()
    train, val = (b"", data) if row["val"] else (data, b"")
    part.write(Encoded(np.array([row]), train, val, Tally()))

"""A corpus of few documents is split by its text: its last characters become val.bin.

As a rule, a hash decides for each document whether it goes to train.bin or to val.bin (encode.py).
A single file of text cannot be split like that. The parts are written as always. When all documents
and characters are counted, they are cut: the last val_fraction of all characters becomes val.bin,
and the document at the cut becomes two documents. They are cut between two tokens: a token in which
the first character of val begins goes to val as a whole.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from configurator import note
from hardware.disk import remove_only
from hardware.terminal import plural
from text.encode import Encoded, Encoder, Part
from text.folders import FILES
from text.merge import read_rows
from text.records import Tally


def too_few(splits: dict[str, dict], val_fraction: float) -> bool:
    """Return whether there are too few documents to choose some of them for val.bin.

    Fewer than 1 / val_fraction are too few. So are more, if the hash puts all into one split.
    """
    numbers = [counts["documents"] for counts in splits.values()]
    return sum(numbers) * val_fraction < 1 or 0 in numbers


def cut_by_text(parts: list[Part], characters: int, encoder: Encoder, folder: Path) -> Part:
    """Write the documents of all parts into one new part in `folder`, and return it.

    The documents have `characters` characters. The first int(characters * (1 - val_fraction)) go to
    train.bin, the others to val.bin.
    """
    cut = int(characters * (1 - encoder.cfg.val_fraction))
    remove_only(folder, FILES)
    folder.mkdir(exist_ok=True)
    new_part = Part(folder, key="", sources=[])
    new_part.open()
    of_train = set()  # hashes of its documents
    repeated = 0  # documents of val that train has, too
    end = 0  # how many characters come before the end of the document
    for row, ids in documents_of(parts, encoder.dtype):
        start = end
        end += int(row["characters"])
        row["val"] = start >= cut
        halves = [(row, ids)]
        if start < cut < end and len(ids) > 1:  # it may have no token but its eos
            halves = cut_document(row, ids, cut - start, encoder)
        key = hash(ids.tobytes())
        repeated += end > cut and key in of_train
        if start < cut:
            of_train.add(key)
        for half, half_ids in halves:
            data = half_ids.tobytes()
            train, val = (b"", data) if half["val"] else (data, b"")
            new_part.write(Encoded(np.array([half]), train, val, Tally()))
    new_part.commit(0, 0)
    new_part.close()
    if repeated:
        problem = f"{plural(repeated, 'document')} of val also in train"
        note(f"{problem}: a loss on val tells what was memorised; leave out the repetitions")
    return new_part


def documents_of(parts: list[Part], dtype: np.dtype) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (row, its token ids) of each document, in the order of the input."""
    files = {path: open(path, "rb") for part in parts for path in part.paths.values()}
    for part, rows in read_rows(parts):
        for row in rows:
            file = files[part.paths["val" if row["val"] else "train"]]
            yield row, np.fromfile(file, dtype, int(row["tokens"]))
    for file in files.values():
        file.close()


def cut_document(
    row: np.ndarray, ids: np.ndarray, characters: int, encoder: Encoder
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (row, ids) of its halves, cut before the token in which character `characters` begins.

    If that is the first token, there is only the second half: the document.
    """
    tokenizer = encoder.tokenizer
    tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    if tokenizer.unk_id >= 0:  # it stands for at least one character
        tokens[tokenizer.unk_id] = b"?"
    sizes = np.array([len(token) for token in tokens], np.uint16)
    # In UTF-8 a byte of the form 10xxxxxx continues a character.
    starts = np.array([sum(byte >> 6 != 0b10 for byte in token) for token in tokens], np.uint16)
    counts = {"bytes": sizes[ids[:-1]], "characters": starts[ids[:-1]]}  # without the eos
    started = np.cumsum(counts["characters"], dtype=np.uint32)
    # The tokens may decode to fewer characters than there were: the same share of these.
    characters = characters * int(started[-1]) // int(row["characters"])
    at = min(int(np.searchsorted(started, characters, side="right")), len(started) - 1)
    left, right = row.copy(), row.copy()
    right["val"] = True
    left["tokens"] = at + 1
    right["tokens"] = len(ids) - at
    for name, of_token in counts.items():
        # A share of the row's own count, since some tokenizers do not decode every text to itself.
        left[name] = int(row[name]) * int(of_token[:at].sum()) // int(of_token.sum())
        right[name] -= left[name]
    return [(left, np.append(ids[:at], encoder.eos)), (right, ids[at:])] if at else [(right, ids)]

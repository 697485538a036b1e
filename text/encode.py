"""Turn documents into token ids, on all cores.

Every process writes its tokens into a part: files that only grow, and a journal. The journal says
how much of the files is finished and which place in the input that corresponds to.
"""

import hashlib
import io
import itertools
import os
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from configurator import OneRankError, UserError
from hardware.disk import Lock, json_bytes, sealed, write_whole
from hardware.terminal import ProgressBar
from text.chat import marks_of
from text.dataset import id_type
from text.formats import Chunk, Reader
from text.pool import in_order
from text.records import Tally, check_bad, documents, foreseen
from text.settings import PrepareConfig
from text.sources import Source
from text.tokenizer import IM_END, IM_START, Tokenizer, open_tokenizer

# One row for each document, in the order of the input: its tokens with the eos, the bytes of its
# UTF-8, its characters, and whether it is in val.bin and not in train.bin.
ROW = np.dtype([("tokens", "<u8"), ("bytes", "<u8"), ("characters", "<u8"), ("val", "?")])
SEGMENT = 1 << 20  # characters; a longer document is encoded in segments, to save memory


class Encoded(NamedTuple):
    """What an Encoder makes of a chunk; train and val are the token ids as bytes."""

    rows: np.ndarray  # (documents,) of ROW
    train: bytes
    val: bytes
    tally: Tally


@dataclass
class Encoder:
    """A Task that encodes the documents of a chunk, each followed by one eos."""

    cfg: PrepareConfig
    file: Path  # of the tokenizer
    info: dict  # its description, with vocab_size and eos_id

    def __post_init__(self):
        self.dtype = id_type(self.info["vocab_size"])
        self.eos = np.array([self.info["eos_id"]], self.dtype)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Open the tokenizer at its first use, in the worker, which was sent only its path."""
        return open_tokenizer(self.file, self.info)

    def __call__(self, chunk: Chunk) -> Encoded:
        tally = Tally()
        rows: list[tuple] = []
        ids: dict[bool, list[np.ndarray]] = {False: [], True: []}  # of train.bin, of val.bin
        read = list(documents(chunk, self.cfg, tally))
        pieces = [piece for document in read for piece in document.pieces]
        every = self.encode_all(pieces)
        for document in read:
            encoded = list(itertools.islice(every, len(document.pieces)))
            if problems := [e for e in encoded if isinstance(e, ValueError)]:
                tally.reject(document.place, str(problems[0]))
                continue
            tokens = self.with_marks(encoded)
            if len(tokens) < self.cfg.min_tokens:
                tally.dropped[f"fewer than {self.cfg.min_tokens} tokens"] += 1
                continue
            digest = hashlib.sha256(document.utf8).digest()
            if self.tokenizer.unk_id in tokens:
                tally.changed["lost characters that the tokenizer has no token for"] += 1
            # One document in 64, and each book: it may be all there is. Longer ones take memory.
            elif digest[0] < 4 or 1 << 16 < len(document.utf8) < 1 << 20:
                decoded = [self.tokenizer.decode(ids.tolist()) for ids in encoded]
                if decoded != document.pieces:
                    tally.changed["its tokens decode to another text (only some are tried)"] += 1
            # Only the hash of its text decides the split of a document: if files are added or
            # reordered, it stays there.
            val = int.from_bytes(digest[:8], "big") < self.cfg.val_fraction * 2**64
            ids[val] += [tokens, self.eos]
            size = len(document.utf8) - len(encoded) + 1  # without the byte for each mark
            rows.append((len(tokens) + 1, size, sum(map(len, document.pieces)), val))
        return Encoded(np.array(rows, ROW), b"".join(ids[False]), b"".join(ids[True]), tally)

    def encode_all(self, pieces: list[str]) -> Iterator[np.ndarray | ValueError]:
        """Yield the ids (n,) of each piece, or the ValueError that says why it has none."""
        short = self.tokenizer.encode_all([piece for piece in pieces if len(piece) <= SEGMENT])
        for piece in pieces:
            try:
                yield next(short) if len(piece) <= SEGMENT else self.encode(piece)
            except ValueError as e:
                yield e

    def with_marks(self, encoded: list[np.ndarray]) -> np.ndarray:
        """Return the ids (n,) of a document: those of its pieces, with its marks between them."""
        if len(encoded) == 1:
            return encoded[0].astype(self.dtype)
        ids = marks_of(self.tokenizer)
        if not ids or self.eos[0] in ids or self.tokenizer.adds_space:
            missing = f"{self.cfg.tokenizer}: it has no special tokens {IM_START} and {IM_END}"
            missing += " beside its eos, or it puts a space behind them"
            raise UserError(f"--tokenizer={missing}; --tokenizer=train has them")
        marks = itertools.cycle([np.array([mark]) for mark in ids])
        joined = itertools.chain.from_iterable(zip(marks, encoded[1:], strict=False))
        return np.concatenate([encoded[0], *joined]).astype(self.dtype)

    def encode(self, text: str) -> np.ndarray:
        """Return the ids (n,) of a text. A long one is encoded in segments."""
        parts = list(segments(text))
        if self.tokenizer.adds_space:  # a later segment has it already, as its first character
            parts[1:] = [part.removeprefix(" ") for part in parts[1:]]
        encoded = map(self.tokenizer.encode, parts)
        return np.concatenate([ids.astype(self.dtype) for ids in encoded])


def segments(text: str) -> Iterator[str]:
    """Yield a text in segments of about SEGMENT characters.

    A segment ends after a word, before a space. Neither GPT-2's pattern nor a SentencePiece BPE
    makes a token that reaches across this place (but one trained with split_by_whitespace=False),
    so the tokens are those of the whole text.
    Where a million characters have no such place, the segment ends after a line, or else anywhere.
    """
    start = 0
    for end in range(2 * SEGMENT, len(text) + SEGMENT, SEGMENT):
        window = text[start:end]
        last = re.match(r"(?s).*\S(?= .)", window) or re.match(r"(?s).*\n", window)
        size = last.end() if last else len(window)
        yield window[:size]
        start += size
    yield text[start:]


# --------------------------------------------------------------------------------------------------
# The part of one process


class HashedFile(io.FileIO):
    """A file that hashes (SHA-256) what is read from it or written to it, from its beginning on.

    It has no buffer, so state() is that of the file on the disk.
    """

    read, readall = io.RawIOBase.read, io.RawIOBase.readall  # FileIO's own do not call readinto()

    def __init__(self, path: str | Path, mode: str = "rb"):
        super().__init__(path, mode)
        self.digest = hashlib.sha256()
        self.bytes_read = 0

    def readinto(self, buffer) -> int:
        n = super().readinto(buffer)
        self.digest.update(memoryview(buffer)[:n])
        self.bytes_read += n
        return n

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:  # the system may write a part of it
            n = super().write(left)
            self.digest.update(left[:n])
            left = left[n:]

    def state(self) -> list:
        """Return the place in the file, and the hash of all before it."""
        return [self.tell(), self.digest.hexdigest()]


class Part:
    """The tokens and rows that one process writes, in a folder of its own that only it writes to.

    The files only grow. The journal contains their sizes and hashes, and the position in the input
    that these correspond to. It is replaced as a whole, and only when a shard is on the disk. A
    restart cuts the files to the sizes in the journal.
    """

    def __init__(self, folder: Path, key: str, sources: list[Source]):
        self.folder = folder
        self.journal = folder / "journal.json"
        self.key = key  # identifies the settings, the tokenizer, the rank and the number of ranks
        self.sources = sources  # the files that the process reads
        self.paths = {name: folder / f"{name}.bin" for name in ("train", "val", "rows")}
        self.file = 0  # the position in the input when it was opened: this file,
        self.record = 0  # of which so many records are done
        self.text = 0  # characters so far
        self.tally = Tally()
        self.states = {}  # name -> HashedFile.state() when the journal was written
        self.files = {}  # name -> HashedFile, while the part is open

    def open(self) -> None:
        """Begin with empty files."""
        for name, path in self.paths.items():
            # Unlink the old file, do not cut it: a data set may have a hard link to the same file.
            path.unlink(missing_ok=True)
            self.files[name] = HashedFile(path, "xb")

    def write(self, encoded: Encoded) -> None:
        self.files["train"].write(encoded.train)
        self.files["val"].write(encoded.val)
        self.files["rows"].write(encoded.rows.tobytes())
        self.tally.add(encoded.tally)
        self.text += int(encoded.rows["characters"].sum())

    def commit(self, file: int, record: int) -> None:
        """Write everything to the disk, then the journal, with this position in the input."""
        for name, growing in self.files.items():
            os.fsync(growing.fileno())
            self.states[name] = growing.state()
        content = {"key": self.key, "file": file, "record": record, "text": self.text}
        content |= {"files": self.states, "tally": vars(self.tally)}
        # The hash of the file at this position is not known before its end is read.
        content["hashes"] = [source.sha256 for source in self.sources[:file]]
        write_whole(self.journal, json_bytes(sealed(content)))

    def close(self) -> None:
        for file in self.files.values():
            file.close()
        self.files = {}  # open files cannot be sent to another process, and the part is, to rank 0


def encode_part(cfg: PrepareConfig, part: Part, encoder: Encoder, workers: int, total: int) -> None:
    """Encode the files of this process, as far as an earlier run has not done so, into its part.

    The part is committed after every --shard_mb million characters. total: bytes that all processes
    read.
    """
    try:
        with closing(Lock(part.folder, "choose another --name")), closing(part):
            part.open()
            reader = Reader(part.sources, cfg)
            size = sum(source.bytes for source in part.sources)
            with ProgressBar("encoding", total=size, unit_scale=True) as bar:
                for chunk, encoded in in_order(encoder, reader.chunks(), workers):
                    part.write(encoded)
                    check_bad(part.tally, cfg, foreseen(part.tally, chunk, total))
                    bar.update(chunk.bytes_read - bar.n)
            part.commit(len(part.sources), 0)
    except UserError as e:
        raise OneRankError(str(e)) from None  # the other ranks do not know of it

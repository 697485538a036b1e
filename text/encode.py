"""Documents become token ids, on all cores.

Every process writes a part, and a journal that says how much of the part counts.
"""

import hashlib
import io
import os
import shutil
import signal
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import cached_property
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from configurator import UserError
from hardware.disk import Lock, json_bytes, sealed, unseal, write_whole
from text.formats import PIECE, Chunk, Reader, pieces
from text.records import Cleaning, Tally, documents
from text.sources import Source
from text.tokenizer import SentencePiece, Tiktoken, open_tokenizer

Task = Callable[[Chunk], Any]  # it is sent to the workers once, at their start


def texts_of(cleaning: Cleaning, chunk: Chunk) -> tuple[list[str], Tally]:
    """Task, with `cleaning` given: the documents of a chunk."""
    tally = Tally()
    return [text for _, text, *_ in documents(chunk, cleaning, tally)], tally


# A row for every document, in the order of the input. Of a document in pieces each piece has one; `end` marks the last.
ROW = np.dtype(
    [("digest", "<u8", 2), ("tokens", "<u8"), ("bytes", "<u8"), ("characters", "<u8"), ("val", "?"), ("end", "?")]
)


class Encoded(NamedTuple):
    rows: np.ndarray  # (documents,) of ROW
    train: bytes
    val: bytes
    tally: Tally


class Encoder:
    """Task: the documents of a chunk as token ids."""

    def __init__(self, tokenizer_file: Path, info: dict, cleaning: Cleaning, min_tokens: int, val_fraction: float):
        self.file, self.info, self.cleaning = tokenizer_file, info, cleaning
        self.min_tokens, self.val_fraction = min_tokens, val_fraction
        self.dtype = id_type(info["vocab_size"])
        self.eos = np.array([info["eos_id"]], self.dtype)

    @cached_property
    def tokenizer(self) -> SentencePiece | Tiktoken:
        return open_tokenizer(self.file, self.info)  # in the worker: it cannot be sent there

    def __call__(self, chunk: Chunk) -> Encoded:
        tally, rows, ids = Tally(), [], {"train": [], "val": []}
        for where, text, utf8, piece in list(documents(chunk, self.cleaning, tally)):  # all first: kinder to caches
            try:
                tokens = self.encode(text)
            except ValueError as e:
                tally.reject(where, str(e), piece)
                continue
            if len(tokens) < self.min_tokens and not piece:
                tally.dropped[f"fewer than {self.min_tokens} tokens"] += 1
                continue
            own = hashlib.sha256(utf8).digest()[:16]
            if own[0] < 4 and self.tokenizer.decode(tokens.tolist()) != text:  # one document in 64 is tried
                tally.changed["its tokens decode to another text (1 in 64 is tried)"] += 1
            end, digest = (bool(piece.whole), piece.whole or own) if piece else (True, own)
            val = in_val(piece.first if piece else own, self.val_fraction)
            ids["val" if val else "train"] += [tokens, self.eos] if end else [tokens]
            rows.append(struct.pack("<16s3Q2?", digest, len(tokens) + end, len(utf8), len(text), val, end))
        train, val = (np.concatenate([*ids[split], self.eos[:0]]).tobytes() for split in ("train", "val"))
        return Encoded(np.frombuffer(b"".join(rows), ROW), train, val, tally)

    def encode(self, text: str) -> np.ndarray:
        """The ids (n,) of a text, a long one in pieces: its ids as Python numbers would be ten times as large."""
        if len(text) <= PIECE:
            return self.tokenizer.encode(text).astype(self.dtype)
        parts = pieces(io.StringIO(text, newline="").read)
        return np.concatenate([self.tokenizer.encode(part).astype(self.dtype) for part, _ in parts])


def id_type(vocab_size: int) -> np.dtype:
    return np.dtype("<u2" if vocab_size <= 65536 else "<u4")


def in_val(digest: bytes, val_fraction: float) -> bool:
    """By a hash of the text alone: another file, or another order, moves no document from one split to the other."""
    return int.from_bytes(digest[:8], "big") < val_fraction * 2**64


task: Task | None = None  # of this worker


def start_worker(given: Task) -> None:
    global task
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which ends this one
    threading.Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()  # should it be killed
    task = given


def work(chunk: Chunk) -> Any:
    return task(chunk)


def in_order(given: Task, chunks: Iterator[Chunk], workers: int) -> Iterator[tuple[Chunk, Any]]:
    """(chunk without its records, result) of each chunk, in their order, few of them in memory at a time."""
    if workers == 1:
        for chunk in chunks:
            yield chunk, given(chunk)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), start_worker, (given,))
    waiting: deque = deque()
    try:
        for chunk in chunks:
            waiting.append((replace(chunk, records=[]), pool.submit(work, chunk)))
            del chunk
            if len(waiting) > 2 * workers:
                position, future = waiting.popleft()
                yield position, future.result()
        for position, future in waiting:
            yield position, future.result()
    except BrokenProcessPool:
        raise UserError("a worker was killed, by the system when memory runs out: lower --workers") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class GrowingFile:
    """A file that is written at its end only, and the SHA-256 of all that is in it."""

    def __init__(self, path: Path, mode: str):
        self.file, self.digest = open(path, mode), hashlib.sha256()

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.digest.update(data)

    def state(self) -> list:
        return [self.file.tell(), self.digest.hexdigest()]


def reopened(path: Path, state: list, bar: tqdm) -> GrowingFile:
    """A file as it was when it had this state(); ValueError if it is no longer so."""
    if path.stat().st_nlink > 1:  # a data set has it too
        copy = path.with_name(f".{path.name}.tmp")
        shutil.copyfile(path, copy)
        copy.replace(path)
    growing, size = GrowingFile(path, "r+b"), state[0]
    while data := growing.file.read(min(1 << 20, size - growing.file.tell())):
        growing.digest.update(data)
        bar.update(len(data))
    if growing.state() != state:
        growing.file.close()
        raise ValueError(f"{path.name} is not as it was written")
    growing.file.truncate()
    return growing


class Part:
    """The tokens and rows of one process, in a folder of its own, which has one writer.

    The files only grow. The journal, replaced whole once a shard is on the disk, has their sizes
    and hashes, and the position in the input that they belong to. A restart cuts off what is more.
    """

    def __init__(self, folder: Path, key: str):
        self.folder, self.journal, self.key = folder, folder / "journal.json", key
        self.paths = {name: folder / f"{name}.bin" for name in ("train", "val", "rows")}
        self.file, self.record, self.text, self.tally = 0, 0, 0, Tally()  # text: characters so far
        self.states = {}  # name -> GrowingFile.state() when the journal was written
        self.held, self.files = None, {}  # while it is open

    def open(self, sources: list[Source]) -> None:
        """Go on from the journal if it is of this work, and input and files are as it says."""
        self.held = Lock(self.folder, "choose another --name")
        if self.journal.exists():
            try:
                self.go_on(unseal(self.journal), sources)
                done = f"{self.text / 1e6:,.0f} million characters"
                print(f"going on behind {done} that an interrupted run has finished")
                return
            except FileNotFoundError as e:
                why = f"{e.filename} is gone"
            except (ValueError, LookupError, TypeError, AttributeError) as e:
                why = f"{self.journal}: {e}"
            print(f"what an interrupted run has finished is made anew: {why}")
            self.journal.unlink()
        for name, path in self.paths.items():
            path.unlink(missing_ok=True)  # not cut: a data set may have it too, by another name
            self.files[name] = GrowingFile(path, "xb")

    def go_on(self, found: dict, sources: list[Source]) -> None:
        """Take up the work where the journal `found` has left it; ValueError: why it cannot be."""
        if found["key"] != self.key:
            raise ValueError("the settings or the tokenizer are others now")
        for number, (*file, _) in enumerate(found["sources"]):
            if number >= len(sources) or list(sources[number].same_file()) != file:
                raise ValueError(f"{file[0]} is not what it was, or not in its place")
        counts = found["tally"].items()
        tally = Tally(**{k: Counter(v) if isinstance(v, dict) else v for k, v in counts})
        with progress_bar("verifying", sum(size for size, _ in found["files"].values())) as bar:
            for name, path in self.paths.items():
                self.files[name] = reopened(path, found["files"][name], bar)
        self.file, self.record = found["file"], found["record"]
        self.text, self.tally = found["text"], tally
        for source, (*_, sha256) in zip(sources, found["sources"], strict=False):
            source.sha256 = sha256 or source.sha256

    def write(self, encoded: Encoded) -> None:
        self.files["train"].write(encoded.train)
        self.files["val"].write(encoded.val)
        self.files["rows"].write(encoded.rows.tobytes())
        self.tally.add(encoded.tally)
        self.text += int(encoded.rows["characters"].sum())

    def commit(self, file: int, record: int, sources: list[Source]) -> None:
        self.file, self.record = file, record
        for growing in self.files.values():
            growing.file.flush()
            os.fsync(growing.file.fileno())
        read = [[*s.same_file(), s.sha256 if i < file else ""] for i, s in enumerate(sources[: file + 1])]
        self.states = {name: growing.state() for name, growing in self.files.items()}
        place = {"key": self.key, "file": file, "record": record, "sources": read}
        done = {"files": self.states, "text": self.text, "tally": vars(self.tally)}
        write_whole(self.journal, json_bytes(sealed(place | done)))

    def close(self) -> None:
        for growing in self.files.values():
            growing.file.close()
        if self.held is not None:
            self.held.close()
        self.held, self.files = None, {}  # what is left can be sent to rank 0


def encode(
    part: Part, reader: Reader, encoder: Encoder, workers: int, shard: float, check: Callable[[Tally, Chunk], None]
) -> None:
    """Write the part of the reader's sources, from wherever it stands; a shard of so many characters is committed at
    once. check(tally, chunk) is called after every chunk, and may end it by an error.
    """
    started, begun_at, committed = time.perf_counter(), part.text, part.text
    sources = reader.sources
    with progress_bar("encoding", sum(s.bytes for s in sources)) as bar:
        for chunk, encoded in in_order(encoder, reader.chunks(), workers):
            part.write(encoded)
            check(part.tally, chunk)
            if part.text - committed >= shard:
                part.commit(chunk.file, chunk.record, sources)
                committed = part.text
            rate = (part.text - begun_at) / 1e6 / (time.perf_counter() - started)
            size = part.files["train"].file.tell() / 1e6
            bar.set_postfix_str(f"{rate:.1f}M characters/s, {size:,.0f} MB of tokens")
            bar.update(chunk.bytes_read - bar.n)
    part.commit(len(sources), 0, sources)


def progress_bar(what: str, total: int) -> tqdm:
    """Over bytes on the disk; none where stderr is not a terminal."""
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=None, dynamic_ncols=True)

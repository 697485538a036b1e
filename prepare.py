"""Corpora -> data/NAME/: token ids that train.py reads in place, and all that is known about them.

    python prepare.py                                                   # the demo corpus: this Python's own documentation
    python prepare.py --input books/ wiki.jsonl.gz --name wiki          # train a SentencePiece tokenizer on it, then encode
    python prepare.py --input wiki.jsonl.gz --name wiki_gpt2 --tokenizer gpt2
    zcat dump.gz | python prepare.py --input - --name dump              # standard input, JSON Lines unless --format says
    torchrun --nproc_per_node=4 prepare.py --input 'crawl/*.jsonl.zst'  # many processes or machines, one data set
    python prepare.py --inspect data/wiki                               # verify a data set and read in it
    python prepare.py --inspect out/RUN --step 1200                     # the text that a step of a run trained on

Reads .jsonl (.ndjson), .json (an array, or objects one after the other), .csv, .tsv, .txt (.md) and .parquet, each also
compressed as .gz, .xz, .bz2 or .zst, in constant memory. A record {title, summary, sections: [{title, content}]} becomes
`title：summary`, then `title：content。` for each section; {title, content} is one such section; {text}, {content},
{completion} and {instruction, input, output} are known too, and --fields names others.

A run that was killed goes on where it stood when the same command is given again; until the end the data set of before
stays whole. The result does not depend on the number of workers, processes or interruptions, to the byte.
Nothing is deleted but files that prepare.py has written itself, in data/NAME and in data/.NAME.tmp.
"""

import codecs
import hashlib
import importlib.metadata
import io
import json
import os
import random
import re
import shutil
import signal
import struct
import sys
import threading
import time
import unicodedata
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from tqdm import tqdm

from configurator import OneRankError, UserError, note, parse, run
from hardware.disk import (
    Lock,
    content_sha256,
    file_sha256,
    json_bytes,
    put_in_place,
    read_object,
    remove_only,
    sealed,
    sync_to_disk,
    unseal,
    write_whole,
)
from text.corpora import (
    CHUNK,
    CONTROL,
    PIECE,
    Chunk,
    Cleaning,
    Reader,
    Source,
    Tally,
    demo_sources,
    documents,
    find_sources,
    pieces,
)
from text.dataset import (
    FORMAT_VERSION,
    document_texts,
    find_tokenizer,
    load_tokenizer,
    open_dataset,
    tokenizer_files,
    tokenizer_folder,
    verify,
)
from text.tokenizer import HF_FILES, SentencePiece, Tiktoken, hugging_face_files, open_tokenizer
from text.windows import run_loader, sample_texts
from training.plots import read_metrics


@dataclass(frozen=True)
class PrepareConfig:
    # ---- Input ----
    input: tuple[str, ...] = ()  # files, folders, globs, - for standard input; none: the docs of this Python
    format: Literal["auto", "jsonl", "json", "csv", "tsv", "txt", "parquet"] = "auto"  # auto: by the file's name
    fields: str = ""  # of a record: question,answer or a template '{question} {answer}'; default: the known shapes
    txt: Literal["file", "block", "line"] = "file"  # a document of a .txt: all of it, a blank-line block, a line
    encoding: str = "utf-8"  # of all files; gb18030 reads GBK and GB2312 too
    # ---- Cleaning: off unless asked for, and counted ----
    min_tokens: int = 0  # leave out shorter documents (the encyclopedia recipe: 6); the eos is not counted
    dedup: bool = False  # keep only the first of equal documents
    normalize: Literal["none", "NFC", "NFKC"] = "none"  # Unicode normal form; NFKC also turns ， and １ into , and 1
    drop_control: bool = False  # remove control characters other than tab and line ends
    # ---- Bad records: counted and shown ----
    max_bad: float = 0.01  # more than this share of records that cannot be read is an error
    strict: bool = False  # the first one is an error
    max_record_mb: float = 64.0  # million characters (.jsonl: bytes); more is bad, in .csv an error
    # ---- Output ----
    name: str = ""  # writes data_dir/NAME/; default: demo, or the first input's name
    data_dir: str = "data"  # where data sets live
    val_fraction: float = 0.01  # share of documents for val.bin, chosen by a hash of the text
    # ---- Tokenizer ----
    tokenizer: str = "train"  # train: SentencePiece on this input; gpt2, ...; a .model or .tiktoken file; a folder
    vocab_size: int = 4096  # tokens, for --tokenizer=train
    train_mb: int = 10  # million characters of random sample to train a tokenizer on; 50 for a large vocabulary
    # ---- Work ----
    workers: int = 0  # processes; 0: one for each core
    shard_mb: float = 64.0  # million characters between two points from which a killed run goes on
    # ---- Inspection: --inspect FOLDER writes nothing ----
    inspect: str = ""  # a data set to verify and to read in; with --step, a run
    split: Literal["train", "val"] = "train"  # of the documents to show
    show: str = "first"  # documents: first, random, or the number of a token
    count: int = 3  # so many of them
    step: int = -1  # of the run, counted from 1 as in its log: show the windows that it trained on

    def problems(self) -> list[str]:
        checks = {
            "val_fraction must be between 0 and 1, both excluded": 0 < self.val_fraction < 1,
            "max_bad must be between 0 and 1": 0 <= self.max_bad <= 1,
            "vocab_size must be at least 300: 256 bytes and a few words": self.vocab_size >= 300,
            "train_mb, shard_mb and count must be positive": min(self.train_mb, self.shard_mb, self.count) > 0,
            "max_record_mb must be between 0.001 and 1,000,000": 0.001 <= self.max_record_mb <= 1e6,
            "steps count from 1": self.step == -1 or self.step > 0,
            "workers and min_tokens must not be negative": min(self.workers, self.min_tokens) >= 0,
            "show must be first, random or the number of a token": re.fullmatch(r"first|random|\d+", self.show),
            f"name {self.name!r} must be a plain folder name": "/" not in self.name and self.name[:1] != ".",
            f"encoding {self.encoding!r} is unknown": is_encoding(self.encoding),
        }
        return [problem for problem, ok in checks.items() if not ok]


def is_encoding(name: str) -> bool:
    try:
        return codecs.lookup(name)._is_text_encoding
    except LookupError:
        return False


def cleaning(cfg: PrepareConfig) -> Cleaning:
    return Cleaning(cfg.fields, cfg.normalize, cfg.drop_control)


def reader_of(sources: list[Source], cfg: PrepareConfig, file: int = 0, record: int = 0) -> Reader:
    return Reader(sources, cfg.encoding, cfg.txt, int(cfg.max_record_mb * 1e6), file, record)


def what_is_read(cfg: PrepareConfig) -> list:
    """The settings that decide which texts a file holds."""
    return [cleaning(cfg), cfg.txt, cfg.encoding, cfg.max_record_mb]


# ---------------------------------------------------------------------------------------------------------------------
# Workers: chunks of records in, in any process; results out, in order


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

    def __init__(self, tokenizer_file: Path, info: dict, cfg: PrepareConfig):
        self.file, self.info, self.cfg = tokenizer_file, info, cfg
        self.dtype = id_type(info["vocab_size"])
        self.eos = np.array([info["eos_id"]], self.dtype)

    @cached_property
    def tokenizer(self) -> SentencePiece | Tiktoken:
        return open_tokenizer(self.file, self.info)  # in the worker: it cannot be sent there

    def __call__(self, chunk: Chunk) -> Encoded:
        cfg, tally, rows, ids = self.cfg, Tally(), [], {"train": [], "val": []}
        for where, text, utf8, piece in list(documents(chunk, cleaning(cfg), tally)):  # all first: kinder to the caches
            try:
                tokens = self.encode(text)
            except ValueError as e:
                tally.reject(where, str(e), piece)
                continue
            if len(tokens) < cfg.min_tokens and not piece:
                tally.dropped[f"fewer than {cfg.min_tokens} tokens"] += 1
                continue
            own = hashlib.sha256(utf8).digest()[:16]
            if own[0] < 4 and self.tokenizer.decode(tokens.tolist()) != text:  # one document in 64 is tried
                tally.changed["its tokens decode to another text (1 in 64 is tried)"] += 1
            end, digest = (bool(piece.whole), piece.whole or own) if piece else (True, own)
            val = in_val(piece.first if piece else own, cfg.val_fraction)
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


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer


def make_tokenizer(cfg: PrepareConfig, sources: list[Source], workers: int, folder: Path) -> dict:
    """The tokenizer that --tokenizer asks for, saved in `folder`; returns what meta.json says of it."""
    known = [cfg.vocab_size, cfg.train_mb, what_is_read(cfg), [s.same_file() for s in sources]]
    key = fingerprint(known) if cfg.tokenizer == "train" else None
    path = folder / "info.json"
    if key and path.exists():
        try:
            kept = unseal(path)
            info = kept["tokenizer"]
            if kept["key"] == key and file_sha256(folder / info["file"]) == info["sha256"]:
                print("the tokenizer of the interrupted run is whole: it stays")
                return info
            why = "it is damaged, or of other input or settings"
        except (OSError, ValueError, LookupError, TypeError) as e:
            why = f"{path}: {e}"
        print(f"the tokenizer of the interrupted run is made anew: {why}")
    ready = None if key else find_tokenizer(cfg.tokenizer)
    beside = tokenizer_folder(cfg.tokenizer)
    came_with = {f.name: f.read_bytes() for f in hugging_face_files(beside)} if beside else {}
    remove_only(folder, WORK["tokenizer"])
    folder.mkdir()
    for file, content in came_with.items():
        (folder / file).write_bytes(content)
    tokenizer = ready or SentencePiece(train_sentencepiece(cfg, sources, workers, folder))
    info = tokenizer.save(folder)
    info |= {"sha256": file_sha256(folder / info["file"])}
    info |= {"vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id}
    write_whole(path, json_bytes(sealed({"key": key, "tokenizer": info})))
    return info


def train_sentencepiece(cfg: PrepareConfig, sources: list[Source], workers: int, folder: Path) -> Path:
    """Train a BPE that loses nothing: no normalisation, spaces kept, bytes for characters outside the vocabulary."""
    import sentencepiece

    # A uniform sample of 4,000-character pieces (reservoir sampling, Vitter's algorithm R): memory stays bounded.
    length, rng, sample, seen, tally = 4000, random.Random(0), [], 0, Tally()
    reader = reader_of(sources, cfg)
    total = sum(s.bytes for s in sources)
    with progress_bar("reading for the tokenizer", total) as bar:
        for chunk, (texts, counts) in in_order(partial(texts_of, cleaning(cfg)), reader.chunks(), workers):
            tally.add(counts)
            check_bad(tally, cfg, foreseen(tally, chunk, total))
            for piece in (text[i : i + length] for text in texts for i in range(0, len(text), length)):
                if len(sample) < cfg.train_mb * 1_000_000 // length:
                    sample.append(piece)
                elif (slot := rng.randrange(seen + 1)) < len(sample):
                    sample[slot] = piece
                seen += 1
            bar.update(chunk.bytes_read - bar.n)
    if not sample:
        raise UserError(no_documents(tally))
    check_bad(tally, cfg, tally.records)
    path = folder / SentencePiece.file
    try:
        with open(path, "wb") as f:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(sample),
                model_writer=f,
                model_type="bpe",
                vocab_size=cfg.vocab_size,
                byte_fallback=True,
                character_coverage=0.9995,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=False,
                allow_whitespace_only_pieces=True,  # indentation is one token
                split_digits=True,
                max_sentence_length=8 * length,  # bytes
                num_threads=16,  # recorded in the model file, whose bytes must not depend on the machine
                minloglevel=2,
            )
    except (RuntimeError, ValueError) as e:
        reason = str(e).split("] ")[-1]  # of "Internal: file(line) [condition] reason"
        raise UserError(f"--vocab_size={cfg.vocab_size}: SentencePiece cannot train on this input: {reason}") from None
    return path


# ---------------------------------------------------------------------------------------------------------------------
# Encode: every process writes a part, and a journal that says how much of it counts


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
        self.files = {}
        if self.held is not None:
            self.held.close()


def encode(part: Part, sources: list[Source], encoder: Encoder, cfg: PrepareConfig, workers: int, total: int) -> None:
    """Write the part of these sources, from wherever it stands; total: bytes of the sources of all processes."""
    started, begun_at, committed = time.perf_counter(), part.text, part.text
    reader = reader_of(sources, cfg, part.file, part.record)
    with progress_bar("encoding", sum(s.bytes for s in sources)) as bar:
        for chunk, encoded in in_order(encoder, reader.chunks(), workers):
            part.write(encoded)
            check_bad(part.tally, cfg, foreseen(part.tally, chunk, total))
            if part.text - committed >= cfg.shard_mb * 1e6:
                part.commit(chunk.file, chunk.record, sources)
                committed = part.text
            rate = (part.text - begun_at) / 1e6 / (time.perf_counter() - started)
            size = part.files["train"].file.tell() / 1e6
            bar.set_postfix_str(f"{rate:.1f}M characters/s, {size:,.0f} MB of tokens")
            bar.update(chunk.bytes_read - bar.n)
    part.commit(len(sources), 0, sources)


def foreseen(tally: Tally, chunk: Chunk, total: int) -> int:
    """About how many records `total` bytes of input will have, so that a hopeless run need not end first."""
    return max(10_000, tally.records * total // max(1, chunk.bytes_read))


def check_bad(tally: Tally, cfg: PrepareConfig, records: int) -> None:
    """UserError if the bad ones are more than max_bad of `records`."""
    bad = sum(tally.bad.values())
    if bad and cfg.strict:
        raise UserError(f"{tally.examples[0]} (--strict)")
    if bad > cfg.max_bad * records:
        share = f"{bad:,} bad records of {tally.records:,}, more than --max_bad={cfg.max_bad:g}"
        raise UserError(f"{share}, as {tally.examples[0]}: mend them, or raise --max_bad")


# ---------------------------------------------------------------------------------------------------------------------
# Merge: the parts, in the order of the input, become one data set


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


# ---------------------------------------------------------------------------------------------------------------------
# Folders: the scratch folder beside the data set, and what in either of them is ours to delete

TOKENIZER_FILES = {SentencePiece.file, Tiktoken.file, *HF_FILES}
PART_FILES = {"train.bin", "val.bin", "rows.bin", "journal.json"}
WORK = {  # the folders in the scratch folder (part0, part1, ...) and the files in them
    "tokenizer": {*TOKENIZER_FILES, "info.json", ".info.json.tmp"},
    "part": {*PART_FILES, *(f".{name}.tmp" for name in PART_FILES)},
    "set": {*TOKENIZER_FILES, "train.bin", "val.bin", "meta.json", ".meta.json.tmp"},
}
STDIN = "stdin"  # a file in the scratch folder: what was piped in


def work_files(folder: Path) -> set[str]:
    return WORK.get(re.sub(r"(?<=^part)\d+$", "", folder.name), set())


def claim(target: Path, scratch: Path) -> tuple[Lock, dict[str, tuple]]:
    """Lock the scratch folder: (the lock, the files of the data set that stands at `target`).

    UserError if another prepare.py has it, or if what is in the way was not written by prepare.py.
    """
    if scratch.is_symlink():
        raise UserError(f"{scratch} is a link, and prepare.py works there: remove it")
    held = Lock(scratch, "choose another --name")
    try:
        for path in sorted(scratch.rglob("*")):
            in_a_folder = path.parent != scratch and path.name in work_files(path.parent)
            at_the_top = path.parent == scratch and (work_files(path) or path.name == STDIN)
            if path.is_symlink() or not (in_a_folder or at_the_top):
                what = "is in the folder that prepare.py works in, and not of this prepare.py"
                raise UserError(f"{path} {what}: move it away, or choose another --name")
        bring_back(target, scratch)
        names = [unicodedata.normalize("NFC", name) for name in os.listdir(target.parent)]
        if target.exists() and unicodedata.normalize("NFC", target.name) not in names:
            raise UserError(f"{target}: this disk has that by another name: choose another --name")
        before = files_of_set(target)
        check_own(target, sorted(before))
        return held, before
    except BaseException:
        remove_only(scratch, ())  # where it was made for this
        held.close()
        raise


def bring_back(target: Path, scratch: Path) -> None:
    """Of a run that was killed between the two renames of put_in_place(): the old data set."""
    old, another = (target.with_name(f".{target.name}.old{n}") for n in ("", "2"))
    finished = (scratch / "set" / "meta.json").exists()
    if finished and old.exists() and not os.path.lexists(target) and not os.path.lexists(another):
        try:
            files_of_set(old)
        except UserError:  # somebody's own
            return
        old.rename(target)


def files_of_set(folder: Path) -> dict[str, tuple]:
    """name -> (inode, size, time of change) of the files of a data set; {} if nothing is there.

    UserError if anything else is there, a folder of somebody's corpus above all.
    """
    if not os.path.lexists(folder):
        return {}
    away = "move it away, or choose another --name"
    if folder.is_symlink() or not folder.is_dir():
        raise UserError(f"{folder} exists and is no data set: {away}")
    inside, names = sorted(path.name for path in folder.iterdir()), set()
    if "meta.json" in inside:
        try:
            meta = read_object(folder / "meta.json")
            version, splits = meta["format_version"], meta["splits"].keys()
            if isinstance(version, int) and splits == {"train", "val"}:
                names = {path.name for path in tokenizer_files(folder, meta["tokenizer"])}
                names |= {"train.bin", "val.bin", "meta.json"}
        except (OSError, ValueError) as e:
            raise UserError(f"{folder}/meta.json is damaged ({e}): {away}") from None
        except (LookupError, TypeError, AttributeError):
            pass  # that of another program
    if others := [name for name in inside if name not in names]:
        what = "holds" if names else "exists and is no data set: it holds"
        raise UserError(f"{folder} {what} {others[0]!r}, which prepare.py did not write: {away}")
    stats = {name: (folder / name).lstat() for name in inside}
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def check_own(folder: Path, names: list[str]) -> None:
    """UserError unless the files of a data set hold what prepare.py wrote, by their hashes.

    What carries one of its names may be somebody's own all the same.
    """
    away = "move it away, or choose another --name"
    meta = read_object(folder / "meta.json") if "meta.json" in names else {}
    if "sha256" in meta and meta["sha256"] != content_sha256(meta):
        raise UserError(f"{folder}/meta.json was changed by something else: {away}")
    hashes = {f"{split}.bin": s.get("sha256") for split, s in meta.get("splits", {}).items()}
    info = meta.get("tokenizer", {})
    hashes |= info.get("files", {info.get("file"): info.get("sha256")})
    for name in names:
        path = folder / name
        if path.is_symlink() or not path.is_file():
            raise UserError(f"{path} is no plain file, so prepare.py did not write it: {away}")
        if hashes.get(name) and file_sha256(path) != hashes[name]:
            raise UserError(f"{path} is not what meta.json says, so it may be somebody's: {away}")


def replace_set(new: Path, target: Path, before: dict[str, tuple]) -> None:
    """Put the finished folder in the place of the data set that was there `before`; delete that."""
    now = files_of_set(target)
    if changed := [name for name in now.keys() | before if now.get(name) != before.get(name)]:
        raise UserError(f"{target / min(changed)} was changed by something else: not replaced")
    old = put_in_place(new, target)
    if old and not remove_only(old, before):
        note(f"{old} stays: it holds what prepare.py did not write")


def remove_scratch(scratch: Path) -> None:
    for path in scratch.glob("*"):
        remove_only(path, work_files(path))
    if not remove_only(scratch, [STDIN]) and scratch.exists():
        note(f"{scratch} stays: it holds what prepare.py did not write")


def fingerprint(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# Reports


def progress_bar(what: str, total: int) -> tqdm:
    """Over bytes on the disk; none where stderr is not a terminal."""
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=None, dynamic_ncols=True)


def no_documents(tally: Tally) -> str:
    if tally.examples:
        return f"no documents: all {tally.records:,} records are bad or empty, as {tally.examples[0]}"
    why = "; ".join(f"{n:,} {reason}" for reason, n in tally.dropped.items())
    return f"no documents: {why or 'the input is empty'}"


def describe_lengths(lengths: Counter) -> dict:
    """Percentiles (the smallest length that so many percent of the documents do not exceed) and a histogram by powers
    of two: up to N tokens -> [documents, their tokens].
    """
    values = sorted(lengths)
    cumulative = np.cumsum([lengths[v] for v in values])
    percentiles = {
        f"p{p}": values[int(np.searchsorted(cumulative, cumulative[-1] * p / 100))] for p in (1, 10, 50, 90, 99)
    }
    histogram: dict[str, list[int]] = {}
    for value in values:
        bucket = histogram.setdefault(str(max(16, 1 << (value - 1).bit_length())), [0, 0])
        bucket[0] += lengths[value]
        bucket[1] += lengths[value] * value
    return percentiles | {"max": values[-1], "histogram": histogram}


def report(meta: dict, folder: Path) -> str:
    info, splits, lengths, records = meta["tokenizer"], meta["splits"], meta["lengths"], meta["records"]
    lines = [f"{folder}: {info['kind']} tokenizer, vocabulary {meta['vocab_size']:,}, {meta['dtype']}"]
    for split, s in splits.items():
        counts = f"{s['documents']:>12,} documents {s['tokens']:>15,} tokens {s['bytes']:>15,} bytes of text"
        lines.append(f"  {split:<6} {counts}")
    characters, tokens = (sum(s[key] for s in splits.values()) for key in ("characters", "tokens"))
    lines.append(f"  {characters / tokens:.2f} characters per token (eos counted)")
    shapes = ", ".join(f"{k}: {n:,}" for k, n in records["shapes"].items())
    lines.append(f"  {records['read']:,} records, read as {shapes}")
    for source in meta["sources"]:
        if "skipped" in source:
            counts = ", ".join(f"{n:,} x {what}" for what, n in source["skipped"].items())
            lines.append(f"  skipped in {source['path']}: {counts}")
    for what in ("bad", "dropped", "changed"):
        lines.append(f"  {what}: {sum(records[what].values()):,}")
        lines += [f"    {n:,} x {reason}" for reason, n in records[what].items()]
        lines += [f"    e.g. {example}" for example in records["examples"]] if what == "bad" else []
    if unread := records.get("unread"):  # sets of before 2026-11-22 have none
        lines.append("  not read (--fields= names what is): " + ", ".join(f"{n:,} x {k}" for k, n in unread.items()))
    percentiles = ", ".join(f"{k} {v:,}" for k, v in lengths.items() if k != "histogram")
    lines.append(f"  tokens per document: {percentiles}")
    lines.append(f"    {'up to':>9}  {'documents':<31} longer: documents, and tokens in them")
    counts = np.array(list(lengths["histogram"].values()))  # (rows, 2): documents, and tokens in them
    shares, longer = counts[:, 0] / counts[:, 0].sum(), 1 - counts.cumsum(axis=0) / counts.sum(axis=0)
    for edge, share, (beyond, inside) in zip(lengths["histogram"], shares, longer, strict=True):
        bar = "\u2588" * round(20 * share / shares.max())
        lines.append(f"    {int(edge):>9,}  {bar:<20} {share:>8.2%}  {beyond:>16.2%} {inside:>16.2%}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# Inspection


def inspect(cfg: PrepareConfig) -> None:
    folder = Path(cfg.inspect)
    if cfg.step > 0:
        path = folder / "metrics.jsonl"
        if not path.is_file():
            raise UserError(f"{folder}: no metrics.jsonl there; --step needs the folder of a run, out/RUN")
        sets, loader, samples = run_loader(path, read_metrics(path), cfg.step)
        for data in sets:
            verify(data.folder, data.meta, "train")
        texts = sample_texts(sets, loader, samples, load_tokenizer(sets[0].folder))
    else:
        meta = open_dataset(folder)
        print(report(meta, folder))
        for split in ("train", "val"):
            verify(folder, meta, split)
        print("  verified: hashes, every id below the vocabulary, an eos behind every document\n")
        texts = document_texts(folder, meta, cfg.split, cfg.show, cfg.count)
    for heading, text in texts:
        print(f"---- {heading}\n{CONTROL.sub(escaped, text)}")


def escaped(found: re.Match) -> str:
    """A control character as it is spelled: texts from the web must not steer the terminal."""
    return repr(found[0])[1:-1]


# ---------------------------------------------------------------------------------------------------------------------


@contextmanager
def all_ranks() -> Iterator[tuple[int, int]]:
    """(rank, world) under torchrun, else (0, 1)."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world == 1:
        yield 0, 1
        return
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(days=7))  # one rank may have much more to read than another
    try:
        yield dist.get_rank(), world
        gather(None, world)
    finally:
        dist.destroy_process_group()  # its threads must not outlive the interpreter


def gather(value: Any, world: int) -> list[Any]:
    """The values of all ranks, on every rank. Nobody goes on before all have come here."""
    if world == 1:
        return [value]
    import torch.distributed as dist

    found: list[Any] = [None] * world
    try:
        dist.all_gather_object(found, value)
    except RuntimeError:  # the connection is closed
        raise OneRankError("another process of this job has ended: it says why itself") from None
    return found


def share_of(sources: list[Source], rank: int, world: int) -> list[Source]:
    """The files of a rank: a stretch of about its share of the bytes, so that the parts follow one another."""
    total = sum(s.bytes for s in sources)
    middles = np.cumsum([s.bytes for s in sources]) - [s.bytes / 2 for s in sources]
    ranks = [min(world - 1, int(middle * world / max(1, total))) for middle in middles]
    return [source for source, its in zip(sources, ranks, strict=True) if its == rank]


def find_input(
    cfg: PrepareConfig,
    target: Path,
    scratch: Path,
    world: int,
) -> tuple[list[Source], dict[str, Counter]]:
    """The files to read, and what find_sources() has passed by."""
    if "-" in cfg.input:
        if len(cfg.input) > 1 or world > 1:
            raise UserError("--input -: standard input goes alone, into one process")
        return [take_in(sys.stdin.buffer, cfg, scratch / STDIN)], {}
    if cfg.input:
        folders = [path for folder in (target, scratch) for path in folder.rglob("*")]
        own = [path for path in folders if path.is_file()]
        sources, passed_by = find_sources(cfg.input, cfg.format, own)
    else:
        sources, passed_by = demo_sources(), {}
    lists = gather([(s.name, s.kind, s.bytes) for s in sources], world)
    for rank, other in enumerate(lists):
        if other != lists[0]:  # then some would be read twice, or by nobody
            name, *_ = next(iter({*other} ^ {*lists[0]}), other[0])
            what = f"not the same for the processes 0 and {rank}"
            raise UserError(f"{name}: {what}: all must see the same files")
    return sources, passed_by


def take_in(stdin: io.BufferedReader, cfg: PrepareConfig, path: Path) -> Source:
    """Standard input as a file, since it is read twice; another prepare.py with the same input goes on as with a file."""
    path.unlink(missing_ok=True)
    with open(path, "xb") as f:
        shutil.copyfileobj(stdin, f, 1 << 20)
    source = Source.at(path, "jsonl" if cfg.format == "auto" else cfg.format, "standard input")
    source.content = source.sha256 = file_sha256(path)
    return source


def main() -> None:
    cfg = parse(PrepareConfig, doc=__doc__)
    if cfg.inspect:
        inspect(cfg)
        return
    with all_ranks() as (rank, world), second_ctrl_c_ends_all():
        make_data_set(cfg, rank, world)


@contextmanager
def second_ctrl_c_ends_all() -> Iterator[None]:
    """The first Ctrl-C ends the work in order. A second one kills what still waits, such as the workers: that may
    happen at any moment, since the same command goes on from what is on the disk.
    """
    pressed: list[int] = []

    def press(number: int, frame) -> None:
        if pressed:
            for child in active_children():
                child.kill()
            os._exit(128 + number)
        pressed.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        if not pressed:  # else it stays: Python waits for the workers as it ends
            signal.signal(signal.SIGINT, before)


def make_data_set(cfg: PrepareConfig, rank: int, world: int) -> None:
    """Everything around `build`: the folders, their lock, and what becomes of them when it fails."""
    name = cfg.name or (Path(cfg.input[0]).resolve().name.split(".")[0] if cfg.input else "demo")
    name = "stdin" if name == "-" else name
    if not re.fullmatch(r"[^./*?:,\[\x00-\x1f][^/*?:,\x00-\x1f]{0,99}", name):
        raise UserError(f"{name!r} cannot name a data set: give --name=NAME, a plain folder name")
    target = Path(cfg.data_dir) / name
    scratch = target.with_name(f".{name}.tmp")  # beside it: a rename stays in one file system
    held, before = claim(target, scratch) if rank == 0 else (None, {})
    gather(None, world)
    if not scratch.exists():
        raise UserError(f"{scratch} of rank 0 is not here: data_dir must be a folder that all machines share")
    try:
        said = build(cfg, target, before, scratch, rank, world)
        if rank == 0:
            remove_scratch(scratch)
    except BaseException as e:
        kept = ""
        if worth_keeping(scratch, cfg):
            kept = f"; what is done is kept in {scratch}: the same command goes on from there"
        elif rank == 0:
            remove_scratch(scratch)
        if isinstance(e, OSError) and not isinstance(e, BrokenPipeError):  # a full disk, above all
            raise OneRankError(f"{e.filename or f'writing {target}'}: {e.strerror}{kept}") from None
        if isinstance(e, MemoryError):
            raise OneRankError(f"out of memory: lower --workers or --max_record_mb{kept}") from None
        if isinstance(e, UserError):
            e.args = (f"{e}{kept}",)
        elif kept and rank == 0:
            print(kept[2:], file=sys.stderr)
        raise
    finally:
        if rank == 0:
            held.close()
    if rank == 0:
        print(said)


def build(
    cfg: PrepareConfig,
    target: Path,
    before: dict[str, tuple],
    scratch: Path,
    rank: int,
    world: int,
) -> str:
    """Make the data set and put it in the place of the one `before`; what there is to say of it."""
    started = time.perf_counter()
    sources, passed_by = find_input(cfg, target, scratch, world)
    total = sum(s.bytes for s in sources)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = cfg.workers or max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    workers = 1 if not cfg.workers and total < 4e6 else workers  # not worth the start of a process

    # tokenizer
    folder = scratch / "tokenizer"
    info = make_tokenizer(cfg, sources, workers, folder) if rank == 0 else None
    info = gather(info, world)[0]

    # every process writes a part
    positions = [CHUNK, PIECE]  # a record of .jsonl is a block of lines, of a long .txt a piece
    settings = [what_is_read(cfg), cfg.min_tokens, cfg.val_fraction, positions]
    mine = share_of(sources, rank, world)
    part = Part(scratch / f"part{rank}", fingerprint([FORMAT_VERSION, info, settings, rank, world]))
    try:
        part.open(mine)
        encode(part, mine, Encoder(folder / info["file"], info, cfg), cfg, workers, total)
    except UserError as e:
        raise OneRankError(str(e)) from None  # the other ranks know nothing of it
    finally:
        part.close()
    finished = gather((mine, part), world)
    if rank > 0:
        return ""

    # all of them together are the data set
    tally, parts = Tally(), [part for _, part in finished]
    for part in parts:
        tally.add(part.tally)
    check_bad(tally, cfg, tally.records)
    written = {folder / info["file"]: info["sha256"]}
    written |= {part.paths[name]: state[1] for part in parts for name, state in part.states.items()}
    for path, sha256 in written.items():  # a bad disk, or another prepare.py where no lock works
        if file_sha256(path) != sha256:
            raise UserError(f"{path}: changed after it was written: run the same command again")
    new = scratch / "set"
    remove_only(new, WORK["set"])
    new.mkdir()
    dtype = id_type(info["vocab_size"])
    again = find_duplicates(parts) if cfg.dedup else np.zeros(0, bool)
    if again.any():
        tally.dropped["equal to an earlier document"] = int(again.sum())
    splits, lengths = count(parts, again)
    states = merge(parts, again, new, dtype.itemsize)
    if not lengths:
        raise UserError(no_documents(tally))
    for split, counts in splits.items():
        if not counts["documents"]:
            hint = "raise --val_fraction" if split == "val" else "lower --val_fraction"
            raise UserError(
                f"{split}.bin would be empty: of {lengths.total()} documents none fell there; {hint}, "
                "or cut text files into more documents with --txt=block or --txt=line"
            )
        size, counts["sha256"] = states[split]
        if size != counts["tokens"] * dtype.itemsize:
            raise UserError(f"{scratch}: a file there has changed: run the same command again")
    of_tokenizer = [folder / info["file"], *hugging_face_files(folder)]
    for path in of_tokenizer:
        shutil.copyfile(path, new / path.name)
        sync_to_disk(new / path.name)
    info["files"] = {path.name: file_sha256(new / path.name) for path in of_tokenizer}
    if cfg.input:
        read = [{"path": s.name, "bytes": s.bytes, "sha256": s.sha256} for sources, _ in finished for s in sources]
        read += [{"path": name, "skipped": counts} for name, counts in passed_by.items()]
    else:
        versions = {p: importlib.metadata.version(p) for p in ("numpy", "torch")}
        read = [{"path": "docstrings", "python": sys.version.split()[0], **versions}]
    records = {"read": tally.records} | {k: v for k, v in vars(tally).items() if k != "records"}
    shown = "format fields txt encoding min_tokens dedup normalize drop_control val_fraction".split()
    meta = {
        "format_version": FORMAT_VERSION,
        "dtype": dtype.name,
        "splits": splits,
        "vocab_size": info["vocab_size"],
        "eos_id": info["eos_id"],
        "tokenizer": {k: v for k, v in info.items() if k not in ("vocab_size", "eos_id")},
        "lengths": describe_lengths(lengths),
        "records": records,
        "sources": read,
        "settings": {k: getattr(cfg, k) for k in (*shown, "max_record_mb")},
    }
    write_whole(new / "meta.json", json_bytes(sealed(meta)))

    ids = np.fromfile(new / "train.bin", dtype, 400).tolist()
    end = ids.index(info["eos_id"]) if info["eos_id"] in ids else None
    text = load_tokenizer(new).decode(ids[:end])
    said = f"\n{report(meta, target)}\n  the first document, decoded back from its ids:"
    said += f"\n    {text[:300]!r}{' ...' * (len(text) > 300)}"
    replace_set(new, target, before)
    return f"{said}\n  made in {time.perf_counter() - started:.0f} s by {workers * world} workers"


def worth_keeping(scratch: Path, cfg: PrepareConfig) -> bool:
    """Is a shard finished, or all of it, from which the same command can go on?"""
    if (scratch / "set" / "meta.json").exists():
        return True
    for path in scratch.glob("part*/journal.json"):
        try:
            if unseal(path)["text"] >= cfg.shard_mb * 1e6:
                return True
        except (OSError, ValueError, LookupError, TypeError):  # damaged: nothing can go on from it
            continue
    return False


if __name__ == "__main__":
    run(main)

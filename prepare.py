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
"""

import codecs
import ctypes
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
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from tqdm import tqdm

from configurator import OneRankError, UserError, parse, run
from corpora import PIECE, Chunk, Cleaning, Reader, Source, Tally, demo_sources, documents, find_sources, pieces
from dataset import (
    FORMAT_VERSION,
    document_texts,
    file_sha256,
    find_tokenizer,
    load_tokenizer,
    lock,
    open_dataset,
    run_loader,
    sample_texts,
    sync_to_disk,
    tokenizer_folder,
    verify,
)
from tokenizer import HF_FILES, SentencePiece, Tiktoken, hugging_face_files, open_tokenizer


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
    step: int = -1  # of the run: show the windows that it trains on

    def problems(self) -> list[str]:
        checks = {
            "val_fraction must be between 0 and 1, both excluded": 0 < self.val_fraction < 1,
            "max_bad must be between 0 and 1": 0 <= self.max_bad <= 1,
            "vocab_size must be at least 300: 256 bytes and a few words": self.vocab_size >= 300,
            "train_mb, shard_mb and count must be positive": min(self.train_mb, self.shard_mb, self.count) > 0,
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
    known = [cfg.vocab_size, cfg.train_mb, cleaning(cfg), cfg.txt, cfg.encoding, *(s.same_file() for s in sources)]
    key = fingerprint(known) if cfg.tokenizer == "train" else None
    path = folder / "info.json"
    if key and path.exists() and (info := json.loads(path.read_text()))["key"] == key:
        print("the tokenizer of the interrupted run is whole: it stays")
        return info
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if cfg.tokenizer == "train":
        tokenizer = SentencePiece(train_sentencepiece(cfg, sources, workers, folder))
    else:
        tokenizer = find_tokenizer(cfg.tokenizer)
        if came_with := tokenizer_folder(cfg.tokenizer):
            for file in hugging_face_files(came_with):
                shutil.copy(file, folder)
    info = tokenizer.save(folder)
    info |= {"sha256": file_sha256(folder / info["file"]), "key": key}
    info |= {"vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id}
    write_json(path, info)
    return info


def train_sentencepiece(cfg: PrepareConfig, sources: list[Source], workers: int, folder: Path) -> Path:
    """Train a BPE that loses nothing: no normalisation, spaces kept, bytes for characters outside the vocabulary."""
    import sentencepiece

    # A uniform sample of 4,000-character pieces (reservoir sampling, Vitter's algorithm R): memory stays bounded.
    length, rng, sample, seen, tally = 4000, random.Random(0), [], 0, Tally()
    reader = Reader(sources, cfg.encoding, cfg.txt)
    total = sum(s.bytes for s in sources)
    with progress_bar("reading for the tokenizer", sources) as bar:
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


class Part:
    """The tokens and rows of one process. The files only grow; the journal, replaced whole once a shard is on the disk,
    has their sizes and the position in the input that they belong to. What lies behind it is cut off by a restart.
    """

    def __init__(self, folder: Path, rank: int, key: str):
        self.paths = {name: folder / f"part{rank}.{name}.bin" for name in ("train", "val", "rows")}
        self.journal, self.key = folder / f"part{rank}.json", key
        self.file, self.record, self.text, self.tally = 0, 0, 0, Tally()  # text: characters so far

    def open(self, sources: list[Source]) -> bool:
        """Go on from the journal, if it is of this work and the files read so far are the same; True if so."""
        try:
            found = json.loads(self.journal.read_text())
            same = found["key"] == self.key and len(found["sources"]) <= len(sources)
            for source, (*file, sha256) in zip(sources, found["sources"], strict=False):
                same = same and list(source.same_file()) == file
                source.sha256 = sha256
        except (OSError, ValueError, KeyError):
            same = False
        if same:
            self.file, self.record, self.text = found["file"], found["record"], found["text"]
            counters = {k: Counter(v) if isinstance(v, dict) else v for k, v in found["tally"].items()}
            self.tally = Tally(**counters)
        else:
            self.journal.unlink(missing_ok=True)
        self.files = {}
        for name, path in self.paths.items():
            self.files[name] = open(path, "ab")
            self.files[name].truncate(found["sizes"][name] if same else 0)
        return same

    def write(self, encoded: Encoded) -> None:
        self.files["train"].write(encoded.train)
        self.files["val"].write(encoded.val)
        self.files["rows"].write(encoded.rows.tobytes())
        self.tally.add(encoded.tally)
        self.text += int(encoded.rows["characters"].sum())

    def close(self) -> None:
        for f in self.files.values():
            f.close()
        self.files = {}

    def commit(self, file: int, record: int, sources: list[Source]) -> None:
        self.file, self.record = file, record
        for f in self.files.values():
            f.flush()
            os.fsync(f.fileno())
        sizes = {name: path.stat().st_size for name, path in self.paths.items()}
        read = [[*s.same_file(), s.sha256 if i < file else ""] for i, s in enumerate(sources[: file + 1])]
        place = {"key": self.key, "file": file, "record": record, "text": self.text}
        write_json(self.journal, place | {"sizes": sizes, "sources": read, "tally": vars(self.tally)})


def encode(part: Part, sources: list[Source], encoder: Encoder, cfg: PrepareConfig, workers: int, total: int) -> None:
    """Write the part of these sources, from wherever it stands; total: bytes of the sources of all processes."""
    if part.open(sources):
        print(f"going on behind {part.text / 1e6:,.0f} million characters that an interrupted run has finished")
    started, begun_at, committed = time.perf_counter(), part.text, part.text
    reader = Reader(sources, cfg.encoding, cfg.txt, part.file, part.record)
    with progress_bar("encoding", sources) as bar:
        for chunk, encoded in in_order(encoder, reader.chunks(), workers):
            part.write(encoded)
            check_bad(part.tally, cfg, foreseen(part.tally, chunk, total))
            if part.text - committed >= cfg.shard_mb * 1e6:
                part.commit(chunk.file, chunk.record, sources)
                committed = part.text
            rate = (part.text - begun_at) / 1e6 / (time.perf_counter() - started)
            bar.set_postfix_str(f"{rate:.1f}M characters/s, {part.files['train'].tell() / 1e6:,.0f} MB of tokens")
            bar.update(chunk.bytes_read - bar.n)
    part.commit(len(sources), 0, sources)
    part.close()


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


def merge(parts: list[Part], again: np.ndarray, folder: Path, itemsize: int) -> None:
    """Write folder/{train,val}.bin. The parts stay as they are, so that a kill in here costs nothing but this step."""
    for split in ("train", "val"):
        target = folder / f"{split}.bin"
        if len(parts) == 1 and not again.any():
            try:
                os.link(parts[0].paths[split], target)  # a second name costs nothing
            except OSError:  # a file system that has no such thing
                shutil.copyfile(parts[0].paths[split], target)
        else:
            sources = {part.paths[split]: open(part.paths[split], "rb") for part in parts}
            with open(target, "wb") as out:
                for part, rows, kept in kept_rows(parts, again):
                    mine = rows["val"] == (split == "val")
                    copy_documents(sources[part.paths[split]], out, rows["tokens"][mine] * itemsize, kept[mine])
            for source in sources.values():
                source.close()
        sync_to_disk(target)


def copy_documents(source: io.BufferedReader, out: io.BufferedWriter, sizes: np.ndarray, kept: np.ndarray) -> None:
    """Copy the kept ones of documents of `sizes` bytes that stand at the source's position, and pass by the others."""
    edges = np.flatnonzero(np.diff(kept, prepend=~kept[:1], append=~kept[-1:])) if len(kept) else []
    for begin, end in zip(edges[:-1], edges[1:], strict=True):  # a run of documents that share one fate
        left = int(sizes[begin:end].sum())
        if not kept[begin]:
            source.seek(left, os.SEEK_CUR)
            continue
        while left:
            data = source.read(min(left, 1 << 22))
            out.write(data)
            left -= len(data)


# ---------------------------------------------------------------------------------------------------------------------
# Folders: the scratch folder beside the data set, and the moment at which it takes the other's place

SET_FILES = {"train.bin", "val.bin", "meta.json", SentencePiece.file, Tiktoken.file, *HF_FILES}


def check_target(target: Path, name: str) -> None:
    """Refuse to replace anything that is not a data set, a folder of somebody's corpus above all."""
    if not re.fullmatch(r"[^./*?:,\[\x00-\x1f][^/*?:,\x00-\x1f]{0,99}", name):
        raise UserError(f"{name!r} cannot name a data set: give --name=NAME, a plain folder name")
    if os.path.lexists(target):
        a_folder = target.is_dir() and not target.is_symlink()
        inside = {p.name for p in target.iterdir()} if a_folder else {target.name}
        others = sorted(inside - SET_FILES if "meta.json" in inside else inside)
        if others:
            raise UserError(f"{target} exists and is no data set (see {others[0]!r}): choose another --name")


def put_in_place(new: Path, target: Path) -> None:
    """Put the finished folder in the place of the old one, in one step where the system can exchange two names (Linux)."""
    sync_to_disk(new)
    if target.exists():
        try:
            libc, here, exchange = ctypes.CDLL(None, use_errno=True), -100, 2  # AT_FDCWD, RENAME_EXCHANGE
            if libc.renameat2(here, os.fsencode(new), here, os.fsencode(target), exchange):
                raise OSError(ctypes.get_errno(), "renameat2")
        except (AttributeError, OSError):
            old = target.with_name(f".{target.name}.old")  # found again by the next prepare.py
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
            new.rename(target)
            shutil.rmtree(old, ignore_errors=True)
    else:
        new.rename(target)
    sync_to_disk(target.parent)


def write_json(path: Path, content: dict) -> None:
    """Whole or not at all."""
    tmp = path.with_suffix(".tmp")
    tmp.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    sync_to_disk(tmp)
    tmp.rename(path)


def fingerprint(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# Reports


def progress_bar(what: str, sources: list[Source]) -> tqdm:
    """Over the bytes on the disk; none where stderr is not a terminal."""
    total = sum(s.bytes for s in sources)
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
    for what in ("bad", "dropped", "changed"):
        lines.append(f"  {what}: {sum(records[what].values()):,}")
        lines += [f"    {n:,} x {reason}" for reason, n in records[what].items()]
        lines += [f"    e.g. {example}" for example in records["examples"]] if what == "bad" else []
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
    if cfg.step >= 0:
        texts = sample_texts(*run_loader(folder, cfg.step))
    else:
        meta = open_dataset(folder)
        print(report(meta, folder))
        for split in ("train", "val"):
            verify(folder, meta, split)
        print("  verified: hashes, every id below the vocabulary, an eos behind every document\n")
        texts = document_texts(folder, meta, cfg.split, cfg.show, cfg.count)
    for heading, text in texts:
        print(f"---- {heading}\n{text}")


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
    dist.all_gather_object(found, value)
    return found


def share_of(sources: list[Source], rank: int, world: int) -> list[Source]:
    """The files of a rank: a stretch of about its share of the bytes, so that the parts follow one another."""
    total = sum(s.bytes for s in sources)
    middles = np.cumsum([s.bytes for s in sources]) - [s.bytes / 2 for s in sources]
    return [s for s, middle in zip(sources, middles, strict=True) if int(middle * world / max(1, total)) == rank]


def take_in(stdin: io.BufferedReader, cfg: PrepareConfig, path: Path) -> Source:
    """Standard input as a file, since it is read twice; another prepare.py with the same input goes on as with a file."""
    with open(path, "wb") as f:
        shutil.copyfileobj(stdin, f, 1 << 20)
    source = Source.at(path, "jsonl" if cfg.format == "auto" else cfg.format, "standard input")
    source.changed = int(file_sha256(path)[:15], 16)  # the time says nothing here
    return source


def main() -> None:
    cfg = parse(PrepareConfig, doc=__doc__)
    if cfg.inspect:
        inspect(cfg)
        return
    with all_ranks() as (rank, world):
        make_data_set(cfg, rank, world)


def make_data_set(cfg: PrepareConfig, rank: int, world: int) -> None:
    """Everything around `build`: the folders, their lock, and what becomes of them when it fails."""
    name = cfg.name or (Path(cfg.input[0]).resolve().name.split(".")[0] if cfg.input else "demo")
    name = "stdin" if name == "-" else name
    target = Path(cfg.data_dir) / name
    scratch = target.with_name(f".{name}.tmp")  # beside it: a rename stays in one file system
    if rank == 0:
        check_target(target, name)
        old = target.with_name(f".{name}.old")
        if old.exists() and not target.exists():  # killed inside put_in_place
            old.rename(target)
        scratch.mkdir(parents=True, exist_ok=True)
        held = lock(scratch, "choose another --name")
    gather(None, world)
    if not scratch.exists():
        raise UserError(f"{scratch} of rank 0 is not here: data_dir must be a folder that all machines share")
    try:
        build(cfg, target, scratch, rank, world)
    except BaseException as e:
        kept = ""
        if worth_keeping(scratch, cfg):
            kept = f"; what is done is kept in {scratch}: the same command goes on from there"
        elif rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
        if isinstance(e, OSError) and not isinstance(e, BrokenPipeError):  # a full disk, above all
            raise OneRankError(f"{e.filename or f'writing {target}'}: {e.strerror}{kept}") from None
        if isinstance(e, UserError):
            e.args = (f"{e}{kept}",)
        elif kept and rank == 0:
            print(kept[2:], file=sys.stderr)
        raise
    finally:
        if rank == 0:
            os.close(held)
    if rank == 0:
        shutil.rmtree(scratch, ignore_errors=True)


def build(cfg: PrepareConfig, target: Path, scratch: Path, rank: int, world: int) -> None:
    started = time.perf_counter()
    if "-" in cfg.input:
        if len(cfg.input) > 1 or world > 1:
            raise UserError("--input -: standard input goes alone, into one process")
        sources = [take_in(sys.stdin.buffer, cfg, scratch / "stdin")]
    else:
        sources = find_sources(cfg.input, cfg.format) if cfg.input else demo_sources()
    total = sum(s.bytes for s in sources)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = cfg.workers or max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    workers = 1 if not cfg.workers and total < 4e6 else workers  # not worth the start of a process

    # tokenizer
    folder = scratch / "tokenizer"
    if rank == 0:
        make_tokenizer(cfg, sources, workers, folder)
    gather(None, world)
    info = json.loads((folder / "info.json").read_text())

    # every process writes a part
    settings = [cleaning(cfg), cfg.txt, cfg.encoding, cfg.min_tokens, cfg.val_fraction]
    mine = share_of(sources, rank, world)
    part = Part(scratch, rank, fingerprint([FORMAT_VERSION, info, settings, rank, world]))
    try:
        encode(part, mine, Encoder(folder / info["file"], info, cfg), cfg, workers, total)
    except UserError as e:
        raise OneRankError(str(e)) from None  # the other ranks know nothing of it
    finished = gather((mine, part), world)
    if rank > 0:
        return

    # all of them together are the data set
    tally, parts = Tally(), [part for _, part in finished]
    for part in parts:
        tally.add(part.tally)
    check_bad(tally, cfg, tally.records)
    new = scratch / "set"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    dtype = id_type(info["vocab_size"])
    again = find_duplicates(parts) if cfg.dedup else np.zeros(0, bool)
    if again.any():
        tally.dropped["equal to an earlier document"] = int(again.sum())
    splits, lengths = count(parts, again)
    merge(parts, again, new, dtype.itemsize)
    if not lengths:
        raise UserError(no_documents(tally))
    for split, counts in splits.items():
        if not counts["documents"]:
            hint = "raise --val_fraction" if split == "val" else "lower --val_fraction"
            raise UserError(
                f"{split}.bin would be empty: of {lengths.total()} documents none fell there; {hint}, "
                "or cut text files into more documents with --txt=block or --txt=line"
            )
        counts["sha256"] = file_sha256(new / f"{split}.bin")
    for path in (folder / info["file"], *hugging_face_files(folder)):
        shutil.copy(path, new)
        sync_to_disk(new / path.name)
    if cfg.input:
        read = [{"path": s.name, "bytes": s.bytes, "sha256": s.sha256} for sources, _ in finished for s in sources]
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
        "tokenizer": {k: v for k, v in info.items() if k not in ("key", "vocab_size", "eos_id")},
        "lengths": describe_lengths(lengths),
        "records": records,
        "sources": read,
        "settings": {k: getattr(cfg, k) for k in shown},
    }
    write_json(new / "meta.json", meta)
    put_in_place(new, target)

    print(f"\n{report(meta, target)}")
    ids = np.fromfile(target / "train.bin", dtype, 400).tolist()
    text = load_tokenizer(target).decode(ids[: ids.index(info["eos_id"]) if info["eos_id"] in ids else None])
    print(f"  the first document, decoded back from its ids:\n    {text[:300]!r}{' ...' * (len(text) > 300)}")
    print(f"  made in {time.perf_counter() - started:.0f} s by {workers * world} workers")


def worth_keeping(scratch: Path, cfg: PrepareConfig) -> bool:
    """Is a shard finished, from which the same command can go on?"""
    journals = [json.loads(path.read_text()) for path in scratch.glob("part*.json")]
    return any(journal["text"] >= cfg.shard_mb * 1e6 for journal in journals)


if __name__ == "__main__":
    run(main)

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
import importlib.metadata
import io
import os
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any, Literal

import numpy as np

from configurator import OneRankError, UserError, parse, run
from hardware.disk import file_sha256, json_bytes, remove_only, sealed, sync_to_disk, unseal, write_whole
from text.dataset import (
    FORMAT_VERSION,
    document_texts,
    find_tokenizer,
    load_tokenizer,
    open_dataset,
    tokenizer_folder,
    verify,
)
from text.encode import Encoder, Part, encode, id_type, in_order, progress_bar, texts_of
from text.folders import STDIN, WORK, claim, fingerprint, remove_scratch, replace_set
from text.formats import CHUNK, PIECE, Chunk, Reader
from text.hf_tokenizer import hugging_face_files
from text.look import describe_lengths, escaped, no_documents, report
from text.merge import count, find_duplicates, merge
from text.records import CONTROL, Cleaning, Tally
from text.sources import Source, demo_sources, find_sources
from text.tokenizer import SentencePiece
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
# Several processes: each reads its share of the input


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

    def check(tally: Tally, chunk: Chunk) -> None:
        check_bad(tally, cfg, foreseen(tally, chunk, total))

    part = Part(scratch / f"part{rank}", fingerprint([FORMAT_VERSION, info, settings, rank, world]))
    try:
        part.open(mine)
        encoder = Encoder(folder / info["file"], info, cleaning(cfg), cfg.min_tokens, cfg.val_fraction)
        reader = reader_of(mine, cfg, part.file, part.record)
        encode(part, reader, encoder, workers, cfg.shard_mb * 1e6, check)
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

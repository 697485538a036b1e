"""Turn corpora into a data set: data/NAME/ holds the token ids that train.py maps into memory,
and a description of them.

The demo corpus, which is the documentation of this Python, numpy and torch:
    python prepare.py
Train a SentencePiece tokenizer on the input, then encode the input with it:
    python prepare.py --input books/ wiki.jsonl.gz --name wiki
Download a file, and use its characters as tokens (or bytes: --tokenizer byte):
    python prepare.py --input https://HOST/a.txt --name chars --tokenizer char
Use a tokenizer that exists already:
    python prepare.py --input wiki.jsonl.gz --name wiki_gpt2 --tokenizer gpt2
Read standard input; it is JSON Lines unless --format says otherwise:
    zcat dump.gz | python prepare.py --input - --name dump
Make one data set with many processes or machines:
    torchrun --nproc_per_node=4 prepare.py --input 'crawl/*.gz' --name crawl
Verify a data set and show some of its documents:
    python prepare.py --inspect data/wiki
Show the text that one step of a training run trained on:
    python prepare.py --inspect out/RUN --step 1200

prepare.py reads .jsonl (.ndjson), .json (an array, or objects one after the other), .csv, .tsv,
.txt (.md) and .parquet. Each of them may be compressed as .gz, .xz, .bz2 or .zst. The memory that
it needs does not grow with the input.

These shapes of a record are known. {title, summary, sections: [{title, content}]} becomes
`title：summary`, followed by `title：content。` for each section, if at least one letter in twenty
is Chinese or Japanese, and otherwise `title: summary`, with a paragraph `title: content` for each
section. {title, content} is written like one such section. {text}, {content}, {completion},
{prompt, completion} and {instruction, input, output} are known too. --fields chooses other fields.

A hash of each document decides whether it goes to train.bin or to val.bin. A corpus of fewer than
1 / val_fraction documents, such as one text file, is split by text instead: its last characters, a
val_fraction of them, become val.bin.

If prepare.py is killed, run the same command again: it continues from the work that is finished.
The old data set stays complete until the new one replaces it. The number of workers, processes
and interruptions does not change one byte of the result. prepare.py deletes only files that it
wrote itself, in data/NAME, data/.NAME.tmp and data/.NAME.old. It downloads a file once, to
data/downloads, and uses it again from there.
"""

import io
import os
import re
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from configurator import OneRankError, UserError, columns, folded, note, parse, run
from hardware.disk import (
    file_sha256,
    json_bytes,
    remove_only,
    sealed,
    sync_to_disk,
    unseal,
    write_whole,
)
from text.cut import Shares, cut_by_text, too_few
from text.dataset import FORMAT_VERSION, load_tokenizer, open_dataset, verify
from text.demo import demo_sources
from text.download import download_all, file_of, is_url, without_secrets
from text.encode import Encoder, Part, encode
from text.folders import STDIN, WORK, claim, fingerprint, remove_scratch, replace_set
from text.formats import CHUNK, Chunk
from text.hf_tokenizer import hugging_face_files
from text.landmarks import count_landmarks
from text.look import (
    describe_set,
    describe_sources,
    document_texts,
    first_document,
    no_documents,
    report,
    settings_of,
    warn_of_large_vocabulary,
)
from text.merge import count, find_duplicates, merge
from text.ranks import Ranks, all_ranks, share_of
from text.records import Tally, printable
from text.replay import run_loader, sample_texts
from text.settings import PrepareConfig, check_bad, cleaning, foreseen, reader_of, what_is_read
from text.sources import Source, find_sources
from text.train_tokenizer import make_tokenizer
from training.metrics import read_metrics

# --------------------------------------------------------------------------------------------------
# Input


def find_input(
    cfg: PrepareConfig, files: dict[str, Path], target: Path, scratch: Path, ranks: Ranks
) -> tuple[list[Source], dict[str, Counter]]:
    """Return the files to read, and for each --input argument how many files were skipped and why.

    files: URL -> the file that was downloaded from there. Raises UserError if the processes do not
    see the same files.
    """
    if "-" in cfg.input:
        if len(cfg.input) > 1 or ranks.world > 1:
            rule = "standard input must be the only input, and be read by one process"
            raise UserError(f"--input -: {rule}")
        return [take_in(sys.stdin.buffer, cfg, scratch / STDIN)], {}
    if cfg.input:
        paths = [path for folder in (target, scratch) for path in folder.rglob("*")]
        own = [path for path in paths if path.is_file()]
        inputs = [str(files.get(argument, argument)) for argument in cfg.input]
        sources, skipped = find_sources(inputs, cfg.format, own)
        urls = {file: without_secrets(url) for url, file in files.items()}
        for source in sources:
            source.name = urls.get(source.path, source.name)
    else:
        if cfg.name not in ("", "demo"):
            note("no --input is given: the corpus is documentation of Python, numpy and torch")
        sources = demo_sources()
        skipped = {}
    lists = ranks.gather([(s.name, s.kind, s.bytes) for s in sources])
    for rank, other in enumerate(lists):
        if other != lists[0]:  # some files would be read twice, or by no process
            only_in_one = {*other} ^ {*lists[0]}
            name, *_ = next(iter(only_in_one), other[0])
            problem = f"not the same for the processes 0 and {rank}"
            raise UserError(f"{name}: {problem}: all processes must see the same files")
    return sources, skipped


def take_in(stdin: io.BufferedReader, cfg: PrepareConfig, path: Path) -> Source:
    """Copy standard input to the file `path`, because the input may be read twice.

    The file is identified by its content. If an interrupted command is run again with the same
    content, it continues as it does with a file.
    """
    path.unlink(missing_ok=True)
    with open(path, "xb") as f:
        shutil.copyfileobj(stdin, f, 1 << 20)
    kind = "jsonl" if cfg.format == "auto" else cfg.format
    source = Source.at(path, kind, "standard input")
    source.content = source.sha256 = file_sha256(path)
    return source


# --------------------------------------------------------------------------------------------------
# Commands: inspect a data set, or make one


def inspect(cfg: PrepareConfig) -> None:
    """Verify a data set and print some documents, or print what a step of a run trained on."""
    folder = Path(cfg.inspect)
    if cfg.step > 0:
        path = folder / "metrics.jsonl"
        if not path.is_file():
            needs = "--step needs the folder of a run, out/RUN"
            raise UserError(f"{folder}: no metrics.jsonl there; {needs}")
        sets, loader, samples = run_loader(path, read_metrics(path), cfg.step)
        for data in sets:
            verify(data.folder, data.meta, "train")
        texts = sample_texts(sets, loader, samples, load_tokenizer(sets[0].folder))
    else:
        meta = open_dataset(folder)
        print(folded(printable(report(meta, folder)), columns()))
        for split in ("train", "val"):
            verify(folder, meta, split)
        print("  verified: hashes, every id below the vocabulary, an eos behind every document\n")
        texts = document_texts(folder, meta, "train", cfg.show, cfg.count)
    for heading, text in texts:
        print(f"---- {heading}\n{printable(text)}")


def main() -> None:
    cfg = parse(PrepareConfig, doc=__doc__)
    if cfg.inspect:
        inspect(cfg)
        return
    with all_ranks() as ranks:
        make_data_set(cfg, ranks)


def name_of_set(cfg: PrepareConfig) -> str:
    """Return --name, or a name made from the first input.

    Raises UserError if this is not a plain folder name.
    """
    name = "demo"
    if cfg.name:
        name = cfg.name
    elif cfg.input:
        first = cfg.input[0]
        try:
            path = file_of(first, Path(cfg.data_dir)) if is_url(first) else Path(first).resolve()
        except FileNotFoundError:
            raise UserError("the current folder was deleted: go to another one") from None
        name = path.name.split(".")[0]
    if name == "-":
        name = "stdin"
    if name == "downloads":
        raise UserError(f"{cfg.data_dir}/downloads is for files from the web: give another --name")
    if not re.fullmatch(r"[^./*?:,\[\x00-\x1f][^/*?:,\x00-\x1f]{0,99}", name):
        raise UserError(f"{name!r} cannot name a data set: give --name=NAME, a plain folder name")
    return name


def make_data_set(cfg: PrepareConfig, ranks: Ranks) -> None:
    """Lock the folders, call `build`, and print its report.

    If `build` fails, keep the scratch folder if the same command can continue from it, remove it
    otherwise, and say so in the error message.
    """
    name = name_of_set(cfg)
    target = Path(cfg.data_dir) / name
    scratch = target.with_name(f".{name}.tmp")  # in the same folder: a rename needs one file system
    is_first = ranks.rank == 0
    lock = claim(target, scratch) if is_first else None
    ranks.gather(None)
    if not scratch.exists():
        missing = f"{scratch}: rank 0 made this folder, but this process does not see it"
        raise UserError(f"{missing}: data_dir must be a folder that all machines share")
    try:
        text = build(cfg, target, scratch, ranks)
        if is_first:
            remove_scratch(scratch)
    except BaseException as e:
        hint = ""
        if worth_keeping(scratch, cfg):
            again = "run the same command again to continue"
            hint = f"; the finished work is kept in {scratch}: {again}"
        elif is_first:
            remove_scratch(scratch)
        if isinstance(e, OSError) and not isinstance(e, BrokenPipeError):  # most often: a full disk
            where = e.filename or f"writing {target}"
            raise OneRankError(f"{where}: {e.strerror}{hint}") from None
        if isinstance(e, MemoryError):
            raise OneRankError(f"out of memory: lower --workers or --max_record_mb{hint}") from None
        if isinstance(e, UserError):
            e.args = (f"{e}{hint}",)
        elif hint and is_first:
            print(hint.removeprefix("; "), file=sys.stderr)
        raise
    finally:
        if is_first:
            lock.close()
            remove_only(scratch, ())  # if it is empty
    if is_first:
        print(folded(printable(text), columns()))


def worth_keeping(scratch: Path, cfg: PrepareConfig) -> bool:
    """Return whether a later run can continue: a shard or the whole data set is finished."""
    if (scratch / "set" / "meta.json").exists():
        return True
    for path in scratch.glob("part*/journal.json"):
        try:
            if unseal(path)["text"] >= cfg.shard_mb * 1e6:
                return True
        except (OSError, ValueError, LookupError, TypeError):  # damaged: useless for a later run
            continue
    return False


# --------------------------------------------------------------------------------------------------
# Making a data set: tokenizer, one part for each process, all parts joined, old set replaced


def build(cfg: PrepareConfig, target: Path, scratch: Path, ranks: Ranks) -> str:
    """Make the data set in `scratch`, put it in the place of the old one, and return the report.

    Ranks above 0 return "".
    """
    started = time.perf_counter()
    files = ranks.of_first(lambda: download_all(cfg.input, Path(cfg.data_dir), cfg.format))
    sources, skipped = find_input(cfg, files, target, scratch, ranks)
    total = sum(s.bytes for s in sources)
    workers = number_of_workers(cfg, total)

    tokenizer = scratch / "tokenizer"
    info = ranks.of_first(lambda: make_tokenizer(cfg, sources, workers, tokenizer))
    file = tokenizer / info["file"]
    encoder = Encoder(file, info, cleaning(cfg), cfg.min_tokens, cfg.val_fraction)

    share = share_of(sources, ranks)
    part = Part(scratch / f"part{ranks.rank}", part_key(cfg, info, ranks))
    encode_share(cfg, part, share, encoder, workers, total)
    shares = ranks.gather((share, part))
    if ranks.rank > 0:
        return ""

    new = scratch / "set"
    meta = write_set(cfg, shares, encoder, skipped, new)
    warning = warn_of_large_vocabulary(meta) if cfg.tokenizer == "train" else ""
    text = f"\n{report(meta, target)}\n{warning}{first_document(new, meta)}"
    replace_set(new, target)
    return f"{text}\n  made in {time.perf_counter() - started:.0f} s"


def number_of_workers(cfg: PrepareConfig, total: int) -> int:
    """Return how many workers this process uses for `total` bytes; 1: it does the work itself."""
    if cfg.workers:
        return cfg.workers
    if total < 4e6:  # starting processes would take longer than the work
        return 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count()
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def part_key(cfg: PrepareConfig, info: dict, ranks: Ranks) -> str:
    """Return a hash of all that decides the content of a part, except the files that are read."""
    # The journal of a part counts records. In .jsonl such a record is a block of lines of about
    # CHUNK characters: with another size the same count would mean another place in the file.
    settings = [what_is_read(cfg), cfg.min_tokens, cfg.val_fraction, CHUNK]
    return fingerprint([FORMAT_VERSION, info, settings, *ranks])


def encode_share(
    cfg: PrepareConfig, part: Part, share: list[Source], encoder: Encoder, workers: int, total: int
) -> None:
    """Encode the files of this process into its part. total: bytes that all processes read."""

    def check(tally: Tally, chunk: Chunk) -> None:
        check_bad(tally, cfg, foreseen(tally, chunk, total))

    try:
        part.open(share)
        reader = reader_of(share, cfg, part.file, part.record)
        encode(part, reader, encoder, workers, cfg.shard_mb * 1e6, check)
    except UserError as e:
        raise OneRankError(str(e)) from None  # the other ranks do not know of it
    finally:
        part.close()


def write_set(
    cfg: PrepareConfig, shares: Shares, encoder: Encoder, skipped: dict[str, Counter], new: Path
) -> dict:
    """Write the data set of all parts into the folder `new`, and return its meta.json."""
    parts = [part for _, part in shares]
    tally = Tally()
    for part in parts:
        tally.add(part.tally)
    check_bad(tally, cfg, tally.records)
    info = encoder.info
    check_unchanged({encoder.file: info["sha256"]} | hashes(parts, "rows"))
    remove_only(new, WORK["set"])
    new.mkdir()
    splits, lengths, few = write_splits(cfg, shares, tally, encoder, new)
    info["files"] = copy_tokenizer(encoder.file, new)
    meta = describe_set(cfg, info, splits, lengths, tally)
    if few:
        meta["few_documents"] = few
    check_unchanged(hashes(parts, "train") | hashes(parts, "val"))
    meta["landmarks"] = count_landmarks(new, meta)
    sources = [source for share, _ in shares for source in share]
    meta |= {"sources": describe_sources(cfg, sources, skipped), "settings": settings_of(cfg)}
    write_whole(new / "meta.json", json_bytes(sealed(meta)))
    return meta


def hashes(parts: list[Part], name: str) -> dict[Path, str]:
    """Return {path: SHA-256 when it was written} for a file of each part: train, val or rows."""
    return {part.paths[name]: part.states[name][1] for part in parts}


def check_unchanged(written: dict[Path, str]) -> None:
    """Raise UserError if a file does not have the SHA-256 any more that it was written with.

    The reason may be a bad disk, or another prepare.py on a disk where locks do not work.
    """
    for path, sha256 in written.items():
        if file_sha256(path) != sha256:
            raise UserError(f"{path}: changed after it was written: run the same command again")


def write_splits(
    cfg: PrepareConfig, shares: Shares, tally: Tally, encoder: Encoder, new: Path
) -> tuple[dict[str, dict], Counter, int]:
    """Join the parts into new/train.bin and new/val.bin; with --dedup leave out duplicates.

    Return the counts and the hash of each split, {length in tokens: documents}, and the number of
    documents if they were too few to be split in any other way than by text, else 0.
    """
    parts = [part for _, part in shares]
    duplicate = find_duplicates(parts) if cfg.dedup else np.zeros(0, bool)
    if duplicate.any():
        tally.dropped["equal to an earlier document"] = int(duplicate.sum())
    splits, lengths = count(parts, duplicate)
    if not lengths:
        raise UserError(no_documents(tally))
    few = 0
    if too_few(splits, cfg.val_fraction):
        few = lengths.total()
        parts = [cut_by_text(cfg, shares, duplicate, splits, encoder, new.parent / "cut")]
        duplicate = np.zeros(0, bool)
        splits, lengths = count(parts, duplicate)
    itemsize = encoder.dtype.itemsize
    states = merge(parts, duplicate, new, itemsize)
    for split, counts in splits.items():
        size, counts["sha256"] = states[split]
        if size != counts["tokens"] * itemsize:
            changed = f"{new.parent}: a file in this folder has changed"
            raise UserError(f"{changed}: run the same command again")
    return splits, lengths, few


def copy_tokenizer(file: Path, new: Path) -> dict[str, str]:
    """Copy the tokenizer's file, and those beside it; return {name: SHA-256}."""
    hashes = {}
    for path in [file, *hugging_face_files(file.parent)]:
        copy = new / path.name
        shutil.copyfile(path, copy)
        sync_to_disk(copy)
        hashes[path.name] = file_sha256(copy)
    return hashes


if __name__ == "__main__":
    run(main)

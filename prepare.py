"""Turn corpora into a data set: data/NAME/ holds the token ids that train.py maps into memory,
and a description of them.

The demo corpus, which is the documentation of this Python, numpy and torch:
    python prepare.py
Train a SentencePiece tokenizer on the input, then encode the input with it:
    python prepare.py --input books/ wiki.jsonl.gz --name wiki
Use the characters of a text as tokens (or its bytes: --tokenizer byte):
    python prepare.py --input a.txt --name chars --tokenizer char
Use a tokenizer that exists already:
    python prepare.py --input wiki.jsonl.gz --name wiki_gpt2 --tokenizer gpt2
Make one data set with many processes or machines:
    torchrun --nproc_per_node=4 prepare.py --input 'crawl/*.gz' --name crawl
Questions about the demo corpus and their answers, as conversations, with the demo's tokenizer:
    python prepare.py --chat --tokenizer data/demo
Verify a data set and show some of its documents:
    python prepare.py --inspect data/wiki
Show the text that one step of a training run trained on:
    python prepare.py --inspect out/RUN --step 1200

prepare.py reads .jsonl (.ndjson), .json (an array, or objects one after the other), .csv, .tsv,
.txt (.md) and .parquet. All but the last may be compressed as .gz, .xz, .bz2 or .zst. The memory
that it needs does not grow with the input.

These shapes of a record are known. {title, summary, sections: [{title, content}]} becomes
`title：summary`, followed by `title：content。` for each section, if at least one letter in twenty
is Chinese or Japanese, and otherwise `title: summary`, with a paragraph `title: content` for each
section. {title, content} is written like one such section. {text}, {content}, {completion},
{prompt, completion} and {instruction, input, output} are known too. --fields chooses other fields.
{messages} and {conversations}, lists of {role, content} or {from, value}, become conversations in
ChatML, and with --chat so do instructions and prompts with their answers.

A hash of each document decides whether it goes to train.bin or to val.bin. A corpus of fewer than
1 / val_fraction documents, such as one text file, is split by text instead: its last characters, a
val_fraction of them, become val.bin.

If prepare.py is killed, run the same command again: it continues from the work that is finished.
The old data set stays complete until the new one replaces it. The number of workers, processes
and interruptions does not change one byte of the result. prepare.py deletes only files that it
wrote itself, in data/NAME, data/.NAME.tmp and data/.NAME.old.
"""

import os
import re
import time
from collections import Counter
from pathlib import Path

from configurator import OneRankError, UserError, columns, folded, note, parse, run
from hardware.disk import content_sha256, file_sha256, json_bytes, remove_only, sealed, write_whole
from text import look
from text.cut import cut_by_text, too_few
from text.dataset import FORMAT_VERSION, open_dataset, verify
from text.demo import TAUGHT, demo_sources
from text.encode import Encoder, Part, encode_part
from text.folders import claim, remove_scratch, replace_set
from text.formats import CHUNK
from text.landmarks import count_landmarks
from text.merge import count, merge
from text.ranks import Ranks, all_ranks, share_of
from text.records import CHAT, Tally, check_bad, document_settings, printable
from text.replay import texts_of_step
from text.settings import PrepareConfig
from text.sources import Source, find_sources
from text.train_tokenizer import make_tokenizer
from training.metrics import read_metrics


def main() -> None:
    cfg = parse(PrepareConfig, doc=__doc__)
    if cfg.inspect:
        inspect(cfg)
        return
    with all_ranks() as ranks:
        make_data_set(cfg, ranks)


def inspect(cfg: PrepareConfig) -> None:
    """Verify a data set and print some documents, or print what a step of a run trained on."""
    folder = Path(cfg.inspect)
    if cfg.step > 0:
        path = folder / "metrics.jsonl"
        texts = texts_of_step(path, read_metrics(path), cfg.step)
    else:
        if (folder / "metrics.jsonl").is_file():
            raise UserError(f"--inspect {folder}: the folder of a run: add --step N")
        meta = open_dataset(folder)
        print(folded(printable(look.report(meta, folder)), columns()))
        for split in ("train", "val"):
            verify(folder, meta, split)
        print("  verified: both files have the hashes that meta.json says\n")
        texts = look.document_texts(folder, meta, cfg.show, cfg.count)
    for heading, text in texts:
        print(f"---- {heading}\n{printable(text)}")


def make_data_set(cfg: PrepareConfig, ranks: Ranks) -> None:
    """Lock the folders, call `build`, and print its report.

    If `build` fails, the scratch folder stays if the same command can continue from it, and a line
    says so.
    """
    name = name_of_set(cfg)
    target = Path(cfg.data_dir) / name
    scratch = target.with_name(f".{name}.tmp")  # in the same folder: a rename needs one file system
    lock = claim(target, scratch) if ranks.rank == 0 else None
    ranks.gather(None)
    if not scratch.exists():
        raise UserError(f"{scratch}: rank 0 made it, but it is not here: share data_dir")
    is_kept = False
    try:
        text = build(cfg, target, scratch, ranks)
    except BaseException as e:
        is_kept = is_worth_keeping(scratch, cfg)
        if is_kept and lock:
            print(f"finished work is kept in {scratch}: run the same command again to continue")
        if isinstance(e, MemoryError):
            raise OneRankError("out of memory: lower --workers or --max_record_mb") from None
        if isinstance(e, OSError) and not isinstance(e, BrokenPipeError):  # often a full disk
            raise OneRankError(f"{e.filename or f'writing {target}'}: {e.strerror}") from None
        raise
    finally:
        if lock:
            if not is_kept:
                remove_scratch(scratch)
            lock.close()
            remove_only(scratch, ())  # if it is empty
    if lock:
        print(folded(printable(text), columns()))


def name_of_set(cfg: PrepareConfig) -> str:
    """Return --name, or a name made from the first input.

    Raises UserError if this is not a plain folder name.
    """
    if cfg.name or not cfg.input:
        name = cfg.name or ("chat" if cfg.chat else "demo")
    else:
        path = Path(cfg.input[0])
        name = (path.name or path.resolve().name).split(".")[0]
    if not re.fullmatch(r"[^-./*?:,\[\x00-\x1f][^/*?:,\x00-\x1f]{0,99}", name):
        raise UserError(f"name {name!r} must be a plain folder name: give another --name")
    return name


def is_worth_keeping(scratch: Path, cfg: PrepareConfig) -> bool:
    """Return whether a later run can continue: a shard or the whole data set is finished."""
    size = sum(path.stat().st_size for path in scratch.glob("part*/*.bin"))
    # Few tokens have less than two bytes, and few stand for more than eight characters.
    has_shard = any(scratch.glob("part*/journal.json")) and size >= cfg.shard_mb * 1e6 / 4
    return has_shard or (scratch / "set" / "meta.json").exists()


# --------------------------------------------------------------------------------------------------
# Making a data set: input, tokenizer, a part for each process, all parts joined, old set replaced


def build(cfg: PrepareConfig, target: Path, scratch: Path, ranks: Ranks) -> str:
    """Make the data set in `scratch`, put it in the place of the old one, and return the report.

    Ranks above 0 return "".
    """
    started = time.perf_counter()
    sources, skipped = ranks.of_first(lambda: find_input(cfg))
    total = sum(s.bytes for s in sources)
    workers = number_of_workers(cfg, total)

    folder = scratch / "set"
    info = ranks.of_first(lambda: make_tokenizer(cfg, sources, workers, folder))
    encoder = Encoder(cfg, folder / info["file"], info)

    # The journal of a part counts records. In .jsonl such a record is a block of lines of about
    # CHUNK characters: with another size the same count would mean another place in the file.
    key = {"format": FORMAT_VERSION, "chunk": CHUNK, "tokenizer": info, "ranks": ranks}
    key |= {"documents": document_settings(cfg)}
    part = Part(scratch / f"part{ranks.rank}", content_sha256(key), share_of(sources, ranks))
    encode_part(cfg, part, encoder, workers, total)
    parts = ranks.gather(part)
    if ranks.rank > 0:
        return ""

    hashed = [source for part in parts for source in part.sources]
    meta = write_set(cfg, parts, encoder, look.describe_sources(cfg, hashed, skipped), folder)
    warning = look.warn_of_large_vocabulary(meta) if cfg.tokenizer == "train" else ""
    text = f"\n{look.report(meta, target)}\n{warning}{look.first_document(folder, meta)}"
    replace_set(folder, target)
    return f"{text}\n  made in {time.perf_counter() - started:.0f} s"


def find_input(cfg: PrepareConfig) -> tuple[list[Source], dict[str, Counter]]:
    """Return the files to read, and for each --input argument how many were skipped and why."""
    if not cfg.input:
        if cfg.name not in ("", "demo", "chat"):
            note("no --input is given: the corpus is documentation of Python, numpy and torch")
        return [s for s in demo_sources() if not cfg.chat or s.name in TAUGHT], {}
    return find_sources(cfg.input, cfg.format)


def number_of_workers(cfg: PrepareConfig, total: int) -> int:
    """Return how many workers this process uses for `total` bytes; 1: it does the work itself."""
    if cfg.workers:
        return cfg.workers
    if total < 4e6:  # starting processes would take longer than the work
        return 1
    is_limited = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if is_limited else os.cpu_count()
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def write_set(
    cfg: PrepareConfig, parts: list[Part], encoder: Encoder, sources: list[dict], folder: Path
) -> dict:
    """Write the data set of all parts to the folder of its tokenizer, and return its meta.json.

    sources: what it says of the files that were read.
    """
    tally = Tally()
    written = {encoder.file: encoder.info["sha256"]}
    for part in parts:
        tally.add(part.tally)
        written |= {path: part.states[name][1] for name, path in part.paths.items()}
    for path, sha256 in written.items():
        # Where a disk has no locks, another prepare.py may have written to it.
        if file_sha256(path) != sha256:
            raise UserError(f"{path}: changed after it was written: run the same command again")
    check_bad(tally, cfg, tally.records)
    splits, lengths = count(parts)
    if not lengths:
        raise UserError(look.no_documents(tally))
    few = lengths.total() if too_few(splits, cfg.val_fraction) else 0
    if few:
        characters = sum(counts["characters"] for counts in splits.values())
        parts = [cut_by_text(parts, characters, encoder, folder.parent / "cut")]
        splits, lengths = count(parts)
    for split, counts in splits.items():
        if not counts["documents"]:
            raise UserError(f"{split}.bin would be empty: give more text or another --val_fraction")

    states = merge(parts, folder)
    for split, counts in splits.items():
        _, counts["sha256"] = states[split]
    meta = look.describe_set(encoder.info, splits, lengths, tally)
    if few:
        meta["few_documents"] = few
    if not cfg.fields and any(shape.startswith(CHAT) for shape in tally.shapes):
        for split, counts in splits.items():
            counts["answers"] = look.count_answers(folder, meta, split, encoder.tokenizer)
    meta["landmarks"] = count_landmarks(folder, meta)
    meta |= {"sources": sources, "settings": document_settings(cfg)}
    write_whole(folder / "meta.json", json_bytes(sealed(meta)))
    return meta


if __name__ == "__main__":
    run(main)

"""eveningGPT: turn corpora into a data set. data/NAME/ contains the token ids that train.py maps
into memory, and a description of them.

The documentation of this Python, numpy and torch, a corpus for a first BPE:
    python prepare.py
Train a SentencePiece tokenizer on the input, then encode the input with it:
    python prepare.py --input books/ wiki.jsonl.gz --name wiki
Use the characters of a text as tokens, or its bytes with --tokenizer byte:
    python prepare.py --input a.txt --name chars --tokenizer char
Use a tokenizer that exists already:
    python prepare.py --input wiki.jsonl.gz --name wiki_gpt2 --tokenizer gpt2
Make conversations about that documentation, questions and answers, with the same tokenizer:
    python prepare.py --chat --tokenizer data/docs
Verify a data set and show some of its documents:
    python prepare.py --inspect data/wiki
Show the text that one step of a training run trained on:
    python prepare.py --inspect out/RUN --step 1200

prepare.py reads .jsonl (.ndjson), .json (an array, or a sequence of objects), .csv, .tsv, .txt
(.md) and .parquet. All but .parquet may be compressed as .gz, .xz, .bz2 or .zst. Its memory does
not grow with the input.

It recognizes these formats of a record. {title, summary, sections: [{title, content}]} becomes
`title：summary`, followed by `title：content。` for each section, if at least one letter in twenty
is Chinese or Japanese, and otherwise `title: summary`, with a paragraph `title: content` for each
section. {title, text} is written like one such section; {text}, {content} and other names of a text
may stand alone. A question and its answer, such as {instruction, input, output}, become lines.
{messages} and {conversations}, lists of {role, content} or {from, value}, become conversations in
ChatML, and with --chat so do questions with their answers. --fields chooses other fields. What is
not read is counted; if it is more text than what is read, nothing is written.

A hash of each document decides whether it goes to train.bin or to val.bin. A corpus of fewer than
1 / val_fraction documents, such as one text file, is split by tokens instead: its last tokens, a
val_fraction of them, become val.bin. No conversation is cut in two.

The new data set is written to data/.NAME.tmp, and renamed when it is complete. Until then the old
one stays: if prepare.py is killed, run the same command again. The number of workers does not
change the result. An old data set that was made of other files, or was changed since, is not
deleted: it becomes data/NAME.old. Neither are files that others have put into its folder.
"""

import os
import re
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while numpy is loaded, until run()

from configurator import UserError, columns, folded, harmless, note, parse, run
from hardware.containers import cpu_quota
from hardware.disk import (
    LOCK,
    Lock,
    atomic_write,
    json_bytes,
    remove_files,
    sealed,
    sync_and_rename,
    unseal,
)
from text import report
from text.baselines import ngram_losses
from text.dataset import VERIFIED, files_of, open_dataset, verify
from text.docstrings import TAUGHT, docstring_sources
from text.encode import Encoder, write_splits
from text.formats import Source
from text.hf_tokenizer import TOKENIZER_FILES
from text.records import RULES
from text.settings import PrepareConfig
from text.sources import find_sources
from text.train_tokenizer import make_tokenizer
from training.metrics import read_metrics

# The files that we write to the folder of a data set. prepare.py deletes no others there.
DATA_FILES = {"train.bin", "val.bin", "meta.json", VERIFIED}  # and those of the tokenizer
FILES = DATA_FILES | {*TOKENIZER_FILES}
FILES |= {f".{name}.tmp" for name in FILES}  # atomic_write() was killed
# The settings that determine the documents of a data set, for meta.json.
DOCUMENT_SETTINGS = ("format", "fields", "chat", "txt", "encoding", "min_tokens", "val_fraction")
DOCUMENT_SETTINGS += ("max_record_mb", "separators")


def main() -> None:
    cfg = parse(PrepareConfig, doc=__doc__)
    if cfg.inspect:
        inspect(cfg)
    else:
        make_data_set(cfg)


def inspect(cfg: PrepareConfig) -> None:
    """Verify a data set and print some documents, or print what a step of a run trained on."""
    folder = Path(cfg.inspect)
    if cfg.step > 0:
        path = folder / "metrics.jsonl"
        texts = report.texts_of_step(path, read_metrics(path), cfg.step)
    else:
        if (folder / "metrics.jsonl").is_file():
            raise UserError(f"--inspect {folder} is the folder of a run: add --step N")
        meta = open_dataset(folder)
        print(folded(harmless(report.summary(meta, folder)), columns()))
        for split in ("train", "val"):
            verify(folder, meta, split)
        print("  verified: both files have the hashes in meta.json\n")
        texts = report.document_texts(folder, meta, cfg.show, cfg.count)
    for heading, text in texts:
        print(f"---- {heading}\n{harmless(text)}")


def make_data_set(cfg: PrepareConfig) -> None:
    """Make the data set in a temporary folder, replace the old one by it, and print the report."""
    started = time.perf_counter()
    sources, skipped = find_input(cfg)
    target = Path(cfg.data_dir) / data_set_name(cfg)
    if os.path.lexists(target):
        try:
            unseal(target / "meta.json")
        except (OSError, ValueError):
            problem = "exists and is not a data set of prepare.py"
            raise UserError(f"{target} {problem}: move it away, or give another --name") from None
    scratch = target.with_name(f".{target.name}.tmp")  # on the same file system, for renames
    lock = Lock(scratch / LOCK, "wait for it, or give another --name")
    new = scratch / "set"
    try:
        remove_files(new, FILES)  # of a killed run
        new.mkdir()
        meta = write_set(cfg, sources, skipped, new)
        if not lock.is_held():
            raise UserError(f"{scratch} was moved or deleted: run the same command again")
        text = f"{report.summary(meta, target)}\n{report.first_document(new, meta)}"
        replace(target, new, meta)
    except OSError as e:
        e.filename = e.filename or str(scratch)  # the error of a full disk has no name
        raise
    finally:
        if lock.is_held():
            remove_files(new, FILES)
            remove_files(scratch, [LOCK, lock.path.name])
        lock.release()
    print(folded(harmless(text), columns()))
    print(f"  made in {time.perf_counter() - started:.0f} s")


def data_set_name(cfg: PrepareConfig) -> str:
    """Return --name, or a name made from the first input.

    Raises UserError if it is not a plain folder name.
    """
    if cfg.name or not cfg.input:
        name = cfg.name or ("chat" if cfg.chat else "docs")
    else:
        path = Path(cfg.input[0])
        name = (path.name or path.resolve().name).split(".")[0]
    if not re.fullmatch(r"[^-./*?:,\[\x00-\x1f][^/*?:,\x00-\x1f]{0,99}", name):
        raise UserError(f"name {name!r} must be a plain folder name: give another --name")
    return name


def replace(target: Path, new: Path, meta: dict) -> None:
    """Replace the old data set by the new one, which has this meta.json.

    The old one becomes NAME.old. If it is intact and made of the same files, those that its
    meta.json names are then deleted.
    """
    if old := sync_and_rename(new, target, f"{target.name}.old"):
        problem = f"the old data set was made of other files, or changed since: it is now {old}"
        with suppress(UserError):  # it is damaged
            before = open_dataset(old)
            if inputs_of(before) == inputs_of(meta):
                open_dataset(old, hashes=True)  # it also writes .verified.json
                remove_files(old, DATA_FILES | files_of(before["tokenizer"]).keys())
                others = ", ".join(sorted(path.name for path in old.glob("*")))
                problem = f"{old} keeps what prepare.py has not written to {target}: {others}"
        if old.exists():
            note(problem)


def inputs_of(meta: dict) -> list[dict]:
    """Return the path, size and hash of each file that a data set was made of."""
    return [source for source in meta["sources"] if "skipped" not in source]


# --------------------------------------------------------------------------------------------------
# Making a data set: input, tokenizer, token ids, description


def find_input(cfg: PrepareConfig) -> tuple[list[Source], dict[str, Counter]]:
    """Return the files to read, and for each --input argument the skipped files by reason."""
    if not cfg.input:
        return [s for s in docstring_sources() if not cfg.chat or s.name in TAUGHT], {}
    return find_sources(cfg.input, cfg.format)


def number_of_workers(cfg: PrepareConfig, total: int) -> int:
    """Return the number of workers for `total` bytes; 1: this process does the work itself."""
    if cfg.workers or total < 4e6:  # starting processes would take longer than the work
        return cfg.workers or 1
    is_limited = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if is_limited else os.cpu_count() or 1
    return max(1, min(cores, int(cpu_quota())))


def write_set(
    cfg: PrepareConfig, sources: list[Source], skipped: dict[str, Counter], folder: Path
) -> dict:
    """Write a data set to an empty folder, and return its meta.json, which is written last.

    skipped: for each --input argument, the number of skipped files by reason.
    """
    workers = number_of_workers(cfg, sum(source.bytes for source in sources))
    info = make_tokenizer(cfg, sources, workers, folder)
    encoder = Encoder(cfg, folder / info["file"], info)
    writer, tally = write_splits(cfg, sources, encoder, workers, folder)
    if absent := ", ".join(repr(s) for s in cfg.split_at if s not in tally.separators):
        note(f"--separators: no text has {absent} (conversations stay whole)")
    for split, counts in writer.counts.items():
        if not counts["documents"]:
            raise UserError(f"{split}.bin would be empty: give more text or another --val_fraction")

    meta = report.describe_set(info, writer.counts, writer.lengths, tally)
    if writer.few:
        meta["few_documents"] = writer.few
    if tally.has_conversations:
        for split, counts in writer.counts.items():
            counts["answers"] = report.count_answers(folder, meta, split, encoder.tokenizer)
    meta["landmarks"] = ngram_losses(folder, meta)
    meta["sources"] = report.describe_sources(cfg, sources, skipped)
    meta["settings"] = {name: getattr(cfg, name) for name in DOCUMENT_SETTINGS} | {"rules": RULES}
    atomic_write(folder / "meta.json", json_bytes(sealed(meta)))
    return meta


if __name__ == "__main__":
    run(main)

"""Measure how fast prepare.py is, compared with the tokenizer library alone, and its peak memory.

    # the corpus, repeated until it is 300 MB of JSON
    python -m bench.prepare CORPUS.jsonl.gz --tokenizer gpt2
    # a longer input shows that the memory does not grow with it
    python -m bench.prepare CORPUS.jsonl.gz --mb 2000 --json out.json

Three ways to encode the corpus take turns, `rounds` times, and the results are medians:
    library   the tokenizer library on one core, with all texts already in memory
              (tiktoken's encode_ordinary, SentencePiece's encode)
    plain     one process that works as many training scripts do:
              json.loads, encode, extend a list, np.array(ids).tofile
    ours      prepare.py on all cores: start, read, parse, hash, encode and write
Rates are in MB of UTF-8 text per second. The goal is ours >= 0.85 x cores x library. Where other
programs keep the cores busy, look at the processor time instead: ours needs what the library needs,
and its own share for everything else.
"""

import gzip
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken
import torch

from bench.measure import REPO, facts_of, no_folder, not_positive, take_turns, write_json
from configurator import UserError, parse, run
from text.hf_tokenizer import find_tokenizer
from text.records import record_text
from text.tokenizer import SentencePiece, Tiktoken


@dataclass(frozen=True)
class BenchConfig:
    corpus: tuple[str, ...] = ()  # a .jsonl.gz file; it may stand without --corpus
    mb: int = 300  # repeat the corpus until it is this many MB of JSON
    tokenizer: str = "gpt2"  # as for prepare.py: a tiktoken name, a SentencePiece .model, ...
    workers: int = 0  # worker processes of prepare.py; 0: one for each core
    rounds: int = 3  # how often each of the three is timed
    json: str = ""  # also write the figures to this file

    def problems(self) -> list[str]:
        problems = not_positive(self, "mb", "rounds") + no_folder(self, "json")
        if len(self.corpus) != 1:
            problems.append("name a corpus: python -m bench.prepare CORPUS.jsonl.gz")
        return problems


def read_corpus(path: str) -> tuple[bytes, list[str]]:
    """Return the JSON Lines of a .jsonl.gz file, and the text of each line.

    Raises UserError if the file is damaged, or has a line that is not a record.
    """
    try:
        data = gzip.open(path).read()
        texts = [record_text(json.loads(line))[0] for line in data.splitlines()]
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as e:
        raise UserError(f"{path}: not a whole .jsonl.gz file of records ({e})") from None
    return data, texts


# --------------------------------------------------------------------------------------------------
# The three ways to encode it


class Cost(NamedTuple):
    seconds: float
    processor_seconds: float  # of all processes together
    peak_bytes: int = 0  # resident memory of all processes together


def in_process(work: Callable[[], None]) -> Cost:
    """Return what it costs to call work() in this process."""
    start_time = time.perf_counter()
    start_work = time.process_time()
    work()
    return Cost(time.perf_counter() - start_time, time.process_time() - start_work)


def library_encode(tokenizer: SentencePiece | Tiktoken) -> Callable[[str], list[int]]:
    """Return the library's own encode function, without anything around it.

    For tiktoken it cuts words with tiktoken's own pattern, and not with our faster one.
    """
    if isinstance(tokenizer, SentencePiece):
        return tokenizer.sp.encode
    e = tokenizer.encoding
    unchanged = tiktoken.Encoding(
        e.name,
        pat_str=tokenizer.pattern,
        mergeable_ranks=e._mergeable_ranks,
        special_tokens=e._special_tokens,
    )
    return unchanged.encode_ordinary


def library(texts: list[str], encode: Callable[[str], list[int]]) -> None:
    for text in texts:
        encode(text)


def plain(corpus: Path, encode: Callable[[str], list[int]], out: Path, vocab_size: int) -> None:
    """Read a .jsonl.gz file and write its ids to `out`, the plain way."""
    ids = []
    with gzip.open(corpus, "rt", encoding="utf-8") as f:
        for line in f:
            ids.extend(encode(record_text(json.loads(line))[0]))
            ids.append(0)
    np.array(ids, dtype=np.uint16 if vocab_size <= 65_536 else np.uint32).tofile(out)


def resident(pid: int) -> int:
    """Return the resident memory, in bytes, of a process and of all its descendants.

    Memory that several processes share is counted once for each of them.
    """
    total = 0
    try:
        total = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for thread in Path(f"/proc/{pid}/task").iterdir():
            children = (thread / "children").read_text().split()
            total += sum(resident(int(child)) for child in children)
    except OSError:  # the process has ended in the meantime
        pass
    return total


def children_seconds() -> float:
    """Return the processor time of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def ours(corpus: Path, cfg: BenchConfig, folder: Path) -> Cost:
    """Run prepare.py, and return what all its processes cost."""
    command = [sys.executable, str(REPO / "prepare.py"), f"--input={corpus}", "--name=bench"]
    command += [f"--tokenizer={cfg.tokenizer}", f"--workers={cfg.workers}", f"--data_dir={folder}"]
    peaks = [0]
    ended = threading.Event()
    start_work = children_seconds()
    start_time = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def look() -> None:
        while not ended.wait(0.1):  # each look takes half a millisecond
            peaks.append(resident(process.pid))

    looking = threading.Thread(target=look)
    looking.start()
    process.wait()
    seconds = time.perf_counter() - start_time
    ended.set()
    looking.join()
    if process.returncode:
        raise UserError("prepare.py failed: see its message above")
    return Cost(seconds, children_seconds() - start_work, max(peaks))


# --------------------------------------------------------------------------------------------------


def main() -> None:
    cfg = parse(BenchConfig, doc=__doc__, positional="corpus")
    data, texts = read_corpus(cfg.corpus[0])
    tokenizer = find_tokenizer(cfg.tokenizer)
    encode = library_encode(tokenizer)
    text_mb = sum(len(t.encode()) for t in texts) / 1e6
    times = math.ceil(cfg.mb * 10**6 / len(data))
    cores = cfg.workers or len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as tmp:
        once = Path(tmp) / "once.jsonl.gz"
        once.write_bytes(gzip.compress(data, 6))
        repeated = Path(tmp) / "repeated.jsonl.gz"
        with open(repeated, "wb") as f:
            for _ in range(times):
                f.write(once.read_bytes())
        vocab_size = tokenizer.vocab_size
        in_plain_way = partial(plain, once, encode, Path(tmp) / "plain.bin", vocab_size)
        contestants = {
            "library": partial(in_process, partial(library, texts, encode)),
            "plain": partial(in_process, in_plain_way),
            "ours": partial(ours, repeated, cfg, Path(tmp)),
        }
        costs = take_turns(contestants, cfg.rounds)
    mb = {"library": text_mb, "plain": text_mb, "ours": text_mb * times}

    rates = {k: mb[k] / statistics.median(c.seconds for c in costs[k]) for k in costs}
    work = {k: statistics.median(c.processor_seconds for c in costs[k]) / mb[k] for k in costs}
    share = rates["ours"] / cores / rates["library"]
    work_share = work["library"] / work["ours"]
    peak = max(c.peak_bytes for c in costs["ours"])
    size = f"{times} x {text_mb:.1f} MB of text"
    print(f"{size}, {cfg.tokenizer}, {cores} workers; medians of {cfg.rounds}")
    for name, rate in rates.items():
        ratios = [f"{rate / rates[peer]:5.2f} x {peer}" for peer in ("library", "plain")]
        print(f"  {name:<8} {rate:7.2f} MB/s   {'   '.join(ratios)}")
    print(f"  ours / (cores x library) = {share:.2f}")
    print(f"  processor time, library / ours = {work_share:.2f}")
    print(f"  peak resident memory of all processes of prepare.py: {peak / 1e6:.0f} MB")
    facts = facts_of(torch.device("cpu")) | {
        "packages": {p: version(p) for p in ("numpy", "tiktoken", "sentencepiece")},
        "text_mb": mb,
        "mb_per_s": rates,
        "share": share,
        "processor_time_share": work_share,
        "peak_bytes": peak,
        "costs": {name: [cost._asdict() for cost in turns] for name, turns in costs.items()},
    }
    write_json(cfg.json, facts)


if __name__ == "__main__":
    run(main)

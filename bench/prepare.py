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
import platform
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
from importlib.metadata import version
from pathlib import Path

import numpy as np
import tiktoken

from configurator import UserError, parse, run
from text.dataset import find_tokenizer
from text.records import record_text
from text.tokenizer import SentencePiece, Tiktoken

REPO = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class BenchConfig:
    corpus: str = ""  # a .jsonl.gz file
    mb: int = 300  # repeat the corpus until it is this many MB of JSON
    tokenizer: str = "gpt2"  # as for prepare.py: a tiktoken name, a SentencePiece .model, ...
    workers: int = 0  # worker processes of prepare.py; 0: one for each core
    rounds: int = 3  # how often each of the three is timed
    json: str = ""  # also write the figures to this file

    def problems(self) -> list[str]:
        return [f"--{k} must be positive" for k in ("mb", "rounds") if getattr(self, k) < 1]


# --------------------------------------------------------------------------------------------------
# The corpus


def read_corpus(path: str) -> tuple[bytes, list[str]]:
    """Return the JSON Lines of a .jsonl.gz file, and the text of each line.

    Raises UserError if the file is damaged, empty, or has a line that is not a record.
    """
    try:
        data = gzip.open(path).read()
    except (OSError, EOFError, zlib.error) as e:  # gzip raises OSErrors of its own
        reason = getattr(e, "strerror", None) or e
        raise UserError(f"{path}: not a whole .jsonl.gz file ({reason})") from None
    texts = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            texts.append(record_text(json.loads(line))[0])
        except (ValueError, RecursionError) as e:
            raise UserError(f"{path}, line {number}: not a record ({e})") from None
    if not texts:
        raise UserError(f"{path}: it is empty")
    return data, texts


# --------------------------------------------------------------------------------------------------
# The three ways to encode it


def library_encode(tokenizer: SentencePiece | Tiktoken) -> Callable[[str], list[int]]:
    """Return the library's own encode function, without anything around it.

    For tiktoken it cuts words with tiktoken's own pattern, and not with our faster one.
    """
    if isinstance(tokenizer, SentencePiece):
        return tokenizer.sp.encode
    e = tokenizer.encoding
    own = tiktoken.Encoding(
        e.name,
        pat_str=tokenizer.pattern,
        mergeable_ranks=e._mergeable_ranks,
        special_tokens=e._special_tokens,
    )
    return own.encode_ordinary


def library(texts: list[str], encode: Callable[[str], list[int]]) -> tuple[float, float]:
    """Encode all texts once with the library. Return the seconds, and those of processor time."""
    started = time.perf_counter()
    worked = time.process_time()
    for text in texts:
        encode(text)
    return time.perf_counter() - started, time.process_time() - worked


def plain(corpus: Path, encode: Callable[[str], list[int]], out: Path, vocab_size: int) -> float:
    """Return the seconds of the plain way: read a .jsonl.gz file, and write its ids to `out`."""
    started = time.perf_counter()
    ids = []
    with gzip.open(corpus, "rt", encoding="utf-8") as f:
        for line in f:
            ids.extend(encode(record_text(json.loads(line))[0]))
            ids.append(0)
    np.array(ids, dtype=np.uint16 if vocab_size <= 65_536 else np.uint32).tofile(out)
    return time.perf_counter() - started


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


def children_time() -> float:
    """Return the seconds of processor time of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def ours(corpus: Path, cfg: BenchConfig, folder: Path) -> tuple[float, float, int]:
    """Run prepare.py; return its seconds, and those of processor time and the peak resident memory
    of all its processes.
    """
    command = [sys.executable, str(REPO / "prepare.py"), f"--input={corpus}", "--name=bench"]
    command += [f"--tokenizer={cfg.tokenizer}", f"--workers={cfg.workers}", f"--data_dir={folder}"]
    peaks = [0]
    ended = threading.Event()
    worked = children_time()
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def look() -> None:
        while not ended.wait(0.1):  # each look takes half a millisecond
            peaks.append(resident(process.pid))

    looking = threading.Thread(target=look)
    looking.start()
    process.wait()
    took = time.perf_counter() - started
    ended.set()
    looking.join()
    if process.returncode:
        raise UserError("prepare.py failed: see its message above")
    return took, children_time() - worked, max(peaks)


# --------------------------------------------------------------------------------------------------


def parse_arguments() -> BenchConfig:
    """Parse the command line, on which the corpus may stand first, without an option's name."""
    argv = sys.argv[1:]
    if argv and not argv[0].startswith("-"):
        argv = [*argv[1:], f"--corpus={argv[0]}"]
    cfg = parse(BenchConfig, argv, doc=__doc__)
    if not cfg.corpus:
        raise UserError("name a corpus: python -m bench.prepare CORPUS.jsonl.gz")
    return cfg


def main() -> None:
    cfg = parse_arguments()
    data, texts = read_corpus(cfg.corpus)
    tokenizer = find_tokenizer(cfg.tokenizer)
    encode = library_encode(tokenizer)
    text_mb = sum(len(t.encode()) for t in texts) / 1e6
    times = math.ceil(cfg.mb * 10**6 / len(data))
    cores = cfg.workers or len(os.sched_getaffinity(0))
    seconds: dict[str, list[float]] = {"library": [], "plain": [], "ours": []}  # for one corpus
    worked: dict[str, list[float]] = {"library": [], "ours": []}  # seconds of processor time
    peaks = []
    with tempfile.TemporaryDirectory() as tmp:
        once = Path(tmp) / "once.jsonl.gz"
        once.write_bytes(gzip.compress(data, 6))
        del data
        repeated = Path(tmp) / "repeated.jsonl.gz"
        with open(repeated, "wb") as f:
            for _ in range(times):
                f.write(once.read_bytes())
        for turn in range(cfg.rounds):
            took, work = library(texts, encode)
            seconds["library"].append(took)
            worked["library"].append(work)
            out = Path(tmp) / "plain.bin"
            seconds["plain"].append(plain(once, encode, out, tokenizer.vocab_size))
            took, work, peak = ours(repeated, cfg, Path(tmp))
            seconds["ours"].append(took / times)
            worked["ours"].append(work / times)
            peaks.append(peak)
            print(f"round {turn + 1} of {cfg.rounds}", file=sys.stderr)

    rates = {name: text_mb / statistics.median(found) for name, found in seconds.items()}
    share = rates["ours"] / cores / rates["library"]
    work_share = statistics.median(worked["library"]) / statistics.median(worked["ours"])
    size = f"{times} x {text_mb:.1f} MB of text"
    print(f"{size}, {cfg.tokenizer}, {cores} workers; medians of {cfg.rounds}")
    for name, rate in rates.items():
        ratios = [f"{rate / rates[other]:5.2f} x {other}" for other in ("library", "plain")]
        print(f"  {name:<8} {rate:7.2f} MB/s   {'   '.join(ratios)}")
    print(f"  ours / (cores x library) = {share:.2f}")
    print(f"  processor time, library / ours = {work_share:.2f}")
    print(f"  peak resident memory of all processes of prepare.py: {max(peaks) / 1e6:.0f} MB")
    if cfg.json:
        cpu = platform.processor() or platform.machine()
        python = platform.python_version()
        found = {
            "command": ["bench/prepare.py", *sys.argv[1:]],
            "machine": {"python": python, "cpu": cpu, "cores": os.cpu_count()},
            "versions": {p: version(p) for p in ("numpy", "tiktoken", "sentencepiece")},
            "text_mb": text_mb * times,
            "mb_per_s": rates,
            "share": share,
            "processor_time_share": work_share,
            "peak_bytes": max(peaks),
            "seconds": seconds,
            "processor_seconds": worked,
        }
        Path(cfg.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    run(main)

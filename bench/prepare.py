"""Measure how fast prepare.py is, compared with the tokenizer library alone, and its peak memory.

    # the corpus, repeated until it is 300 MB of JSON
    python -m bench.prepare CORPUS.jsonl.gz --tokenizer gpt2
    # a longer input shows that the memory does not grow with it
    python -m bench.prepare CORPUS.jsonl.gz --mb 2000

Two ways to encode the corpus take turns, `rounds` times, and the results are medians:
    library   the tokenizer library on one core, with all texts already in memory
              (tiktoken's encode_ordinary, SentencePiece's encode)
    ours      prepare.py on all cores: start, read, parse, hash, encode and write
Rates are in MB of UTF-8 text per second. The goal is ours >= 0.85 x cores x library. Where other
programs keep the cores busy, look at the processor time instead: ours needs what the library needs,
and its own share for everything else.
"""

import gzip
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import tiktoken

from bench.measure import REPO, not_positive, turns
from configurator import UserError, option, parse, run
from text.hf_tokenizer import find_tokenizer
from text.records import record_text
from text.tokenizer import SentencePiece, Tiktoken


@dataclass(frozen=True)
class BenchConfig:
    corpus: tuple[str, ...] = option((), "a .jsonl.gz file; it may stand without --corpus")
    mb: int = option(300, "repeat the corpus until it is this many MB of JSON")
    tokenizer: str = option(
        "gpt2", "as for prepare.py: a tiktoken name, a SentencePiece .model, ..."
    )
    workers: int = option(0, "worker processes of prepare.py; 0: one for each core")
    rounds: int = option(3, "how often each of the two is timed")

    def problems(self) -> list[str]:
        problems = not_positive(self, "mb", "rounds")
        if len(self.corpus) != 1:
            problems.append("name a corpus: python -m bench.prepare CORPUS.jsonl.gz")
        return problems


# --------------------------------------------------------------------------------------------------
# The two ways to encode it


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


def prepare(corpus: Path, cfg: BenchConfig, folder: Path) -> int:
    """Run prepare.py. Return the most bytes of memory that all its processes had at once."""
    command = [sys.executable, str(REPO / "prepare.py"), f"--input={corpus}", "--name=bench"]
    command += [f"--tokenizer={cfg.tokenizer}", f"--workers={cfg.workers}", f"--data_dir={folder}"]
    peak = 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:  # waiting with a limit notices the end 50 ms late at most
        peak = max(peak, resident(process.pid))
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
    if process.returncode:
        raise UserError("prepare.py failed: see its message above")
    return peak


# --------------------------------------------------------------------------------------------------


def main() -> None:
    cfg = parse(BenchConfig, doc=__doc__, positional="corpus")
    try:
        data = gzip.open(cfg.corpus[0]).read()
        texts = [record_text(json.loads(line))[0] for line in data.splitlines()]
    except (OSError, EOFError, zlib.error, ValueError) as e:
        raise UserError(f"{cfg.corpus[0]}: not a whole .jsonl.gz file of records ({e})") from None
    encode = library_encode(find_tokenizer(cfg.tokenizer))
    text_mb = sum(len(t.encode()) for t in texts) / 1e6
    times = math.ceil(cfg.mb * 10**6 / len(data))
    cores = cfg.workers or len(os.sched_getaffinity(0))
    peak = 0
    mb = {"library": text_mb, "ours": text_mb * times}
    seconds: dict[str, list[float]] = {name: [] for name in mb}
    processor: dict[str, list[float]] = {name: [] for name in mb}  # seconds of all processes
    with tempfile.TemporaryDirectory() as tmp:
        repeated = Path(tmp, "repeated.jsonl.gz")
        repeated.write_bytes(gzip.compress(data, 6) * times)
        for name in turns(mb, cfg.rounds):
            start_time, start = time.perf_counter(), sum(os.times()[:4])
            if name == "ours":
                peak = max(peak, prepare(repeated, cfg, Path(tmp)))
            else:
                for text in texts:
                    encode(text)
            seconds[name].append(time.perf_counter() - start_time)
            processor[name].append(sum(os.times()[:4]) - start)

    rates = {name: mb[name] / statistics.median(seconds[name]) for name in mb}
    work = {name: statistics.median(processor[name]) / mb[name] for name in mb}
    size = f"{times} x {text_mb:.1f} MB of text"
    print(f"{size}, {cfg.tokenizer}, {cores} workers; medians of {cfg.rounds}")
    for name, rate in rates.items():
        print(f"  {name:<8} {rate:7.2f} MB/s")
    print(f"  ours / (cores x library) = {rates['ours'] / cores / rates['library']:.2f}")
    print(f"  processor time, library / ours = {work['library'] / work['ours']:.2f}")
    print(f"  peak resident memory of all processes of prepare.py: {peak / 1e6:.0f} MB")


if __name__ == "__main__":
    run(main)

"""How fast is prepare.py against the tokenizer library alone, and how much memory does it take?

    python bench/prepare.py CORPUS.jsonl.gz --tokenizer gpt2            # the corpus repeated to 300 MB of JSON
    python bench/prepare.py CORPUS.jsonl.gz --mb 2000 --json out.json   # the memory does not grow

In one run, in turn, `rounds` times; medians:
    library   the tokenizer library on one core, on texts already in memory (tiktoken's encode_ordinary, SentencePiece's encode)
    plain     one process, as training scripts have it: json.loads, encode, extend a list, np.array(ids).tofile
    ours      prepare.py on all cores: reading, parsing, hashing, encoding and writing, its start included
Rates are in MB of UTF-8 text a second. The bar: ours >= 0.85 x cores x library.
"""

import gzip
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from configurator import UserError, parse, run  # noqa: E402
from text.dataset import find_tokenizer  # noqa: E402
from text.records import record_text  # noqa: E402
from text.tokenizer import SentencePiece, Tiktoken  # noqa: E402


@dataclass(frozen=True)
class BenchConfig:
    corpus: str = ""  # a .jsonl.gz file
    mb: int = 300  # repeat it up to so many MB of JSON
    tokenizer: str = "gpt2"  # as prepare.py takes it: a tiktoken name, a SentencePiece .model, ...
    workers: int = 0  # of prepare.py; 0: all cores
    rounds: int = 3  # of each of the three
    json: str = ""  # write the figures here too

    def problems(self) -> list[str]:
        return [f"--{k} must be positive" for k in ("mb", "rounds") if getattr(self, k) < 1]


def resident(pid: int) -> int:
    """Bytes of memory of a process and all below it (what they share counts once for each)."""
    total = 0
    try:
        total = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for thread in Path(f"/proc/{pid}/task").iterdir():
            total += sum(resident(int(child)) for child in (thread / "children").read_text().split())
    except OSError:  # it has ended meanwhile
        pass
    return total


def read_corpus(path: str) -> tuple[bytes, list[str]]:
    """(the JSON Lines of a .jsonl.gz file, the text of each). UserError for one that is damaged."""
    try:
        data = gzip.open(path).read()
    except (OSError, EOFError, zlib.error) as e:  # gzip's own errors are OSErrors too
        reason = getattr(e, "strerror", None) or e
        raise UserError(f"{path}: not a whole .jsonl.gz file ({reason})") from None
    texts = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            texts.append(record_text(json.loads(line))[0])
        except (ValueError, RecursionError) as e:
            raise UserError(f"{path}, line {number}: no record ({e})") from None
    if not texts:
        raise UserError(f"{path}: it is empty")
    return data, texts


def library_encode(tokenizer: SentencePiece | Tiktoken) -> Callable[[str], list[int]]:
    """The library's own function, as it comes."""
    if isinstance(tokenizer, SentencePiece):
        return tokenizer.sp.encode
    return tokenizer.encoding.encode_ordinary


def library(texts: list[str], encode: Callable[[str], list[int]]) -> float:
    """Seconds for one pass over the texts."""
    started = time.perf_counter()
    for text in texts:
        encode(text)
    return time.perf_counter() - started


def plain(corpus: Path, encode: Callable[[str], list[int]], out: Path, vocab_size: int) -> float:
    started = time.perf_counter()
    ids = []
    with gzip.open(corpus, "rt", encoding="utf-8") as f:
        for line in f:
            ids.extend(encode(record_text(json.loads(line))[0]))
            ids.append(0)
    np.array(ids, dtype=np.uint16 if vocab_size <= 65_536 else np.uint32).tofile(out)
    return time.perf_counter() - started


def ours(corpus: Path, cfg: BenchConfig, folder: Path) -> tuple[float, int]:
    """(seconds, largest resident memory of all processes together) of prepare.py."""
    command = [sys.executable, str(REPO / "prepare.py"), f"--input={corpus}", f"--tokenizer={cfg.tokenizer}"]
    command += ["--name=bench", f"--data_dir={folder}", f"--workers={cfg.workers}"]
    started, peak = time.perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, resident(process.pid))
        time.sleep(0.05)
    if process.returncode:
        raise UserError("prepare.py failed")
    return time.perf_counter() - started, peak


def main() -> None:
    argv = sys.argv[1:]
    corpus = argv.pop(0) if argv and not argv[0].startswith("-") else ""
    cfg = parse(BenchConfig, [*argv, *([f"--corpus={corpus}"] if corpus else [])], doc=__doc__)
    if not cfg.corpus:
        raise UserError("name a corpus: python bench/prepare.py CORPUS.jsonl.gz")
    data, texts = read_corpus(cfg.corpus)
    tokenizer = find_tokenizer(cfg.tokenizer)
    text_mb, times = sum(len(t.encode()) for t in texts) / 1e6, -(-cfg.mb * 10**6 // len(data))
    encode = library_encode(tokenizer)
    cores = cfg.workers or len(os.sched_getaffinity(0))
    seconds: dict[str, list[float]] = {"library": [], "plain": [], "ours": []}
    peaks = []
    with tempfile.TemporaryDirectory() as tmp:
        once, repeated = Path(tmp) / "once.jsonl.gz", Path(tmp) / "repeated.jsonl.gz"
        once.write_bytes(gzip.compress(data, 6))
        with open(repeated, "wb") as f:
            for _ in range(times):
                f.write(once.read_bytes())
        del data
        for turn in range(cfg.rounds):
            seconds["library"].append(library(texts, encode))
            out = Path(tmp) / "plain.bin"
            seconds["plain"].append(plain(once, encode, out, tokenizer.vocab_size))
            took, peak = ours(repeated, cfg, Path(tmp))
            seconds["ours"].append(took / times)
            peaks.append(peak)
            print(f"round {turn + 1} of {cfg.rounds}", file=sys.stderr)
    rates = {name: text_mb / statistics.median(found) for name, found in seconds.items()}
    share = rates["ours"] / cores / rates["library"]
    print(f"{times} x {text_mb:.1f} MB of text, {cfg.tokenizer}, {cores} workers; medians of {cfg.rounds}")
    for name, rate in rates.items():
        print(
            f"  {name:<8} {rate:7.2f} MB/s   {rate / rates['library']:5.2f} x library   {rate / rates['plain']:5.2f} x plain"
        )
    print(f"  ours / (cores x library) = {share:.2f}")
    print(f"  largest resident memory of all its processes: {max(peaks) / 1e6:.0f} MB")
    if cfg.json:
        machine = {
            "python": platform.python_version(),
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
        }
        versions = {p: version(p) for p in ("numpy", "tiktoken", "sentencepiece")}
        found = {
            "command": ["bench/prepare.py", *sys.argv[1:]],
            "machine": machine,
            "versions": versions,
            "text_mb": text_mb * times,
        }
        found |= {"mb_per_s": rates, "share": share, "peak_bytes": max(peaks), "seconds": seconds}
        Path(cfg.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    run(main)

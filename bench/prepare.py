"""Measure how fast prepare.py is, compared with the tokenizer library alone.

    # the corpus, repeated until it is 300 MB of JSON
    python -m bench.prepare CORPUS.jsonl.gz --tokenizer gpt2

Two ways to encode the corpus take turns, `rounds` times, and the results are medians:
    library   the tokenizer library on one core, with all texts already in memory
              (tiktoken's encode_ordinary, SentencePiece's encode, tokenizers' encode_batch_fast)
    ours      prepare.py on all cores: start, read, parse, hash, encode and write
Rates are in MB of UTF-8 text per second. The goal is ours >= 0.85 x cores x library, and with a
Hugging Face folder, whose library is the slowest, >= 0.9.
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
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL

import tiktoken

from bench.measure import REPO, in_turns, table
from configurator import UserError, option, parse, run
from text.hf_tokenizer import from_hugging_face
from text.shapes import record_text
from text.tokenizer import SentencePiece, Tiktoken


@dataclass(frozen=True)
class BenchConfig:
    corpus: tuple[str, ...] = option((), "a .jsonl.gz file; it may stand without --corpus")
    mb: int = option(300, "repeat the corpus until it is this many MB of JSON", minimum=1)
    tokenizer: str = option("gpt2", "a tiktoken name, a .model, or a Hugging Face folder")
    workers: int = option(0, "worker processes of prepare.py; 0: one for each core")
    rounds: int = option(3, "how often each of the two is timed", minimum=1)

    def problems(self) -> list[str]:
        if len(self.corpus) != 1:
            return ["name a corpus: python -m bench.prepare CORPUS.jsonl.gz"]
        return []


def main() -> None:
    cfg = parse(BenchConfig, doc=__doc__, positional="corpus")
    try:
        data = gzip.open(cfg.corpus[0]).read()
        texts = [record_text(json.loads(line))[0] for line in data.splitlines()]
    except (OSError, EOFError, ValueError) as e:
        raise UserError(f"{cfg.corpus[0]}: not a whole .jsonl.gz file of records ({e})") from None
    if cfg.tokenizer.endswith(".model"):
        encode = SentencePiece(cfg.tokenizer).sp.encode
    elif Path(cfg.tokenizer).is_dir():
        library = from_hugging_face(Path(cfg.tokenizer)).library

        def encode(text: str) -> list:
            return library.encode_batch_fast([text], add_special_tokens=False)
    else:
        Tiktoken.from_name(cfg.tokenizer)  # raises UserError for an unknown name
        encode = tiktoken.get_encoding(cfg.tokenizer).encode_ordinary
    text_mb = sum(len(t.encode()) for t in texts) / 1e6
    times = math.ceil(cfg.mb * 10**6 / len(data))
    cores = cfg.workers or len(os.sched_getaffinity(0))
    mb = {"library": text_mb, "ours": text_mb * times}
    with tempfile.TemporaryDirectory() as tmp:
        repeated = Path(tmp, "repeated.jsonl.gz")
        repeated.write_bytes(gzip.compress(data, 6) * times)
        argv = [sys.executable, str(REPO / "prepare.py"), f"--input={repeated}", "--name=bench"]
        argv += [f"--tokenizer={cfg.tokenizer}", f"--data_dir={tmp}", f"--workers={cfg.workers}"]

        def measure(name: str) -> list[float]:
            start_time = time.perf_counter()
            if name == "ours":
                subprocess.run(argv, stdout=DEVNULL, check=True)
            else:
                for text in texts:
                    encode(text)
            return [time.perf_counter() - start_time]

        seconds = in_turns(mb, cfg.rounds, measure)
    rates = {name: mb[name] / statistics.median(seconds[name]) for name in mb}
    size = f"{times} x {text_mb:.1f} MB of text"
    title = f"{size}, {cfg.tokenizer}, {cores} workers; medians of {cfg.rounds}"
    table(title, [{"": name, "MB/s": rate} for name, rate in rates.items()])
    print(f"  ours / (cores x library) = {rates['ours'] / cores / rates['library']:.2f}")


if __name__ == "__main__":
    run(main)

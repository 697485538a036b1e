"""Corpora -> data/NAME/: token ids that train.py reads in place, and all that is known about them.

    python prepare.py                                                   # the demo corpus: this Python's own documentation
    python prepare.py --input books/ wiki.jsonl.gz --name wiki          # train a SentencePiece tokenizer on it, then encode
    python prepare.py --input wiki.jsonl.gz --name wiki_gpt2 --tokenizer gpt2

    train.bin, val.bin   one flat little-endian array of token ids, every document followed by one eos;
                         uint16 when vocab_size <= 65,536, else uint32
    tokenizer.*          the tokenizer, so that the folder is all that training and sampling need
    meta.json            counts, hashes, sources, what was skipped and why; written last: it says that the set is whole

Reads .jsonl (.ndjson), .json (an array, or objects one after the other), .csv, .tsv and .txt (.md), each also as .gz.
A record {title, summary, sections: [{title, content}]} becomes `title：summary`, then `title：content。` for each section;
{title, content} is one such section; {text} is taken as it is.
"""

import array
import ast
import base64
import csv
import fcntl
import glob
import gzip
import hashlib
import importlib.metadata
import importlib.util
import inspect
import io
import itertools
import json
import os
import random
import re
import shutil
import sys
import sysconfig
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from tqdm import tqdm

from configurator import UserError, parse, run

FORMAT_VERSION = 1


@dataclass(frozen=True)
class PrepareConfig:
    # ---- Input ----
    input: tuple[str, ...] = ()  # files, folders, globs; none: the docs of this Python, numpy and torch
    txt: Literal["file", "block", "line"] = "file"  # a document of a .txt: all of it, a blank-line block, a line
    val_fraction: float = 0.01  # share of documents for val.bin, chosen by a hash of the text
    # ---- Output ----
    name: str = ""  # writes data_dir/NAME/; default: demo, or the first input's name
    data_dir: str = "data"  # where data sets live
    # ---- Tokenizer ----
    tokenizer: str = "train"  # train: SentencePiece on this input; gpt2, cl100k_base, ...; a .model or .tiktoken file
    vocab_size: int = 4096  # tokens, for --tokenizer=train
    train_mb: int = 50  # a tokenizer is trained on a random sample of at most so many million characters
    threads: int = 0  # for encoding; 0: all cores

    def problems(self) -> list[str]:
        checks = {
            "val_fraction must be between 0 and 1, both excluded": 0 < self.val_fraction < 1,
            "vocab_size must be at least 300: 256 bytes and a few words": self.vocab_size >= 300,
            "train_mb must be positive": self.train_mb > 0,
            "threads must not be negative": self.threads >= 0,
            f"name {self.name!r} must be a plain folder name": self.name == Path(self.name).name
            and self.name[:1] != ".",
        }
        return [problem for problem, ok in checks.items() if not ok]


# ---------------------------------------------------------------------------------------------------------------------
# Format: how train.py, sample.py and the tests open a data set


def read_meta(folder: Path) -> dict:
    """meta.json of a data set or of a checkpoint."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        version = meta["format_version"]
    except FileNotFoundError:
        raise UserError(f"no data set in {folder}: make it with `python prepare.py --name {folder.name}`") from None
    except (ValueError, KeyError, TypeError) as e:
        raise UserError(f"{folder}/meta.json: damaged ({e}); run prepare.py again") from None
    if version != FORMAT_VERSION:
        raise UserError(f"{folder}: format {version}, expected {FORMAT_VERSION}; run prepare.py again")
    return meta


def open_dataset(folder: str | Path) -> dict:
    """meta.json of a whole data set; UserError if there is none, or if a file is not the one it describes."""
    folder = Path(folder)
    meta = read_meta(folder)
    for split in ("train", "val"):
        path, size = folder / f"{split}.bin", meta["splits"][split]["tokens"] * np.dtype(meta["dtype"]).itemsize
        found = path.stat().st_size if path.exists() else "no file"
        if found != size:
            raise UserError(
                f"{path}: {found} bytes where meta.json says {size}: truncated or replaced; run prepare.py again"
            )
    return meta


def open_split(folder: str | Path, meta: dict, split: str) -> np.memmap:
    """The token ids of a split, (tokens,), in place on the disk."""
    return np.memmap(Path(folder) / f"{split}.bin", dtype=np.dtype(meta["dtype"]).newbyteorder("<"), mode="r")


def check_ids(folder: str | Path, meta: dict, split: str) -> None:
    """Read a split once; UserError at the first id that the vocabulary does not have (on a GPU it would be an assert)."""
    ids = open_split(folder, meta, split)
    for start in range(0, len(ids), 1 << 24):
        part = ids[start : start + (1 << 24)]
        if part.max() >= meta["vocab_size"]:
            at = int(np.argmax(part >= meta["vocab_size"]))
            raise UserError(
                f"{folder}/{split}.bin: token {start + at} has id {part[at]}, beyond the vocabulary of "
                f"{meta['vocab_size']}: the file was changed after it was made; run prepare.py again"
            )


def file_sha256(path: str | Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# Sources: files -> records -> text. A source knows nothing of tokens.

RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
SUFFIXES = (*RECORD_SUFFIXES, ".txt", ".md")
SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can spell one, UTF-8 cannot


@dataclass
class Progress:
    """Where reading stands, for the progress bars and the report."""

    bytes_read: int = 0  # on disk, of the files finished and of the one being read
    skipped: Counter = field(default_factory=Counter)  # reason -> records
    examples: list[str] = field(default_factory=list)  # the first few, as file:line: reason

    def skip(self, where: str, reason: str) -> None:
        self.skipped[reason] += 1
        if len(self.examples) < 5:
            self.examples.append(f"{where}: {reason}")


def no_documents(progress: Progress) -> str:
    n = sum(progress.skipped.values())
    return "no documents: " + (
        f"all {n:,} records were skipped, as {progress.examples[0]}" if n else "the input is empty"
    )


def find_files(inputs: Iterable[str]) -> list[Path]:
    """The files that the --input arguments name, folders searched through, in a fixed order."""
    files = []
    for name in inputs:
        paths = [Path(name)] if os.path.exists(name) else [Path(p) for p in sorted(glob.glob(name, recursive=True))]
        if not paths:
            raise UserError(f"--input {name}: no such file or folder")
        for path in paths:
            inside = sorted(walk(path)) if path.is_dir() else [path]
            if not inside:
                raise UserError(
                    f"--input {path}: the folder has no file that ends in {', '.join(SUFFIXES)}, plain or .gz"
                )
            files += inside
    for path in files:
        if not kind_of(path):
            raise UserError(f"--input {path}: unknown kind of file; expected {', '.join(SUFFIXES)}, plain or .gz")
    return list(dict.fromkeys(files))


def walk(folder: Path) -> Iterator[Path]:
    """The files below a folder that we can read; an unreadable folder in it is an error, not an omission."""

    def fail(error: OSError) -> None:
        raise UserError(f"--input {error.filename}: {error.strerror}")

    for root, _, names in os.walk(folder, onerror=fail):
        yield from (path for name in names if kind_of(path := Path(root, name)) and path.is_file())


def kind_of(path: Path) -> str | None:
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    return suffix if suffix in SUFFIXES else None


def read_texts(files: list[Path], txt: str, progress: Progress) -> Iterator[str]:
    """The documents of all files in order, streaming; what cannot be read as one is skipped and counted."""
    before = 0
    for path in files:
        kind = kind_of(path)
        try:
            with open(path, "rb") as raw:
                stream = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
                newline = "" if kind in (".csv", ".tsv") else None
                with io.TextIOWrapper(stream, encoding="utf-8-sig", newline=newline) as f:
                    documents = read_records(f, kind, path, progress) if kind in RECORD_SUFFIXES else read_txt(f, txt)
                    for text in documents:
                        progress.bytes_read = before + raw.tell()
                        if not text.strip("：。 \t\r\n"):
                            progress.skip(str(path), "empty document")
                        elif not text.isascii() and SURROGATE.search(text):
                            progress.skip(str(path), "half a surrogate pair, which is no character")
                        else:
                            yield text
        except OSError as e:  # gzip's own errors too
            raise UserError(f"{path}: {e.strerror or e}") from None
        except (EOFError, zlib.error) as e:
            raise UserError(f"{path}: damaged or cut off ({e})") from None
        except UnicodeDecodeError as e:
            raise UserError(f"{path}: not UTF-8 ({e.reason}, byte {e.object[e.start]:#04x}): convert it") from None
        except csv.Error as e:
            raise UserError(f"{path}: not a CSV file ({e})") from None
        before += path.stat().st_size


def read_txt(f: io.TextIOWrapper, txt: str) -> Iterator[str]:
    if txt == "file":
        yield f.read()
    elif txt == "line":
        yield from (line.rstrip("\n") for line in f)
    else:
        for blank, lines in itertools.groupby(f, key=lambda line: not line.strip()):
            if not blank:
                yield "".join(lines)


def read_records(f: io.TextIOWrapper, kind: str, path: Path, progress: Progress) -> Iterator[str]:
    readers = {".json": read_json, ".csv": read_csv, ".tsv": read_csv}
    for where, record in readers.get(kind, read_jsonl)(f, str(path)):
        if isinstance(record, ValueError):
            progress.skip(where, str(record))
            continue
        text = record_text(record)
        if text is None:
            shape = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
            progress.skip(where, f"no {{title, summary, sections}}, {{title, content}} or {{text}} but {shape}"[:120])
        else:
            yield text


def read_jsonl(f: io.TextIOWrapper, path: str) -> Iterator[tuple[str, object]]:
    for number, line in enumerate(f, 1):
        if line.strip():
            try:
                yield f"{path}:{number}", json.loads(line)
            except (ValueError, RecursionError):
                yield f"{path}:{number}", ValueError("not valid JSON")


def read_json(f: io.TextIOWrapper, path: str) -> Iterator[tuple[str, object]]:
    """An array of any length, or objects one after the other, one element in memory at a time."""
    decoder, blank, size, number, at = json.JSONDecoder(), re.compile(r"[\s,]*"), 1 << 16, 0, 0
    buffer = f.read(size).lstrip()
    more, closing = bool(buffer), "]" if buffer.startswith("[") else ""
    buffer = buffer.removeprefix("[")
    while True:
        at = blank.match(buffer, at).end()
        try:
            record, end = decoder.raw_decode(buffer, at)
            whole = not more or end < len(buffer) or isinstance(record, dict | list)  # 12 may go on as 123
        except (ValueError, RecursionError):  # cut off by the buffer's end, or not JSON at all
            whole = False
        if whole:
            number, at, size = number + 1, end, 1 << 16
            yield f"{path}: element {number}", record
        elif more:
            chunk = f.read(size)
            buffer, at, more = buffer[at:] + chunk, 0, bool(chunk)
            size = min(2 * size, 1 << 28)  # a large element is not decoded from its start for every 64 KB
        elif (rest := buffer[at:].rstrip()) != closing:
            where = f"behind element {number}, near {rest[:40]!r}" if rest else "at its end, which has no ]"
            raise UserError(f"{path}: not valid JSON {where}: mend it there")
        else:
            return


def read_csv(f: io.TextIOWrapper, path: str) -> Iterator[tuple[str, object]]:
    csv.field_size_limit(1 << 30)
    tabs = Path(path.removesuffix(".gz")).suffix.lower() == ".tsv"
    rows = csv.DictReader(f, dialect="excel-tab" if tabs else "excel", strict=True)  # strict: an open quote is an error
    for row in rows:
        surplus = ValueError("more fields than the header: quote a text that holds the separator")
        yield f"{path}:{rows.line_num}", surplus if None in row else row


def record_text(record: object) -> str | None:
    """A record as one text, in the joining format of the Chinese encyclopedia corpora; None if it has no known shape."""

    def get(part: dict, key: str) -> str:
        value = part.get(key)
        if isinstance(value, str | int | None):
            return "" if value is None else str(value)
        raise TypeError(f"{key} is a {type(value).__name__}, no text")

    try:
        title, sections = get(record, "title"), record.get("sections")
        if isinstance(record.get("summary"), str) or isinstance(sections, list):
            parts = [f"{get(s, 'title')}：{get(s, 'content')}。" for s in sections or []]
            return f"{title}：{get(record, 'summary')}" + "".join(parts)
    except (AttributeError, TypeError):  # a list where a text or a record belongs
        return None
    if isinstance(record.get("content"), str):
        return f"{title}：{record['content']}。" if title else record["content"]
    return record["text"] if isinstance(record.get("text"), str) else None


# ---------------------------------------------------------------------------------------------------------------------
# The demo corpus: the documentation of the Python that runs this, parsed from source, never imported


def demo_texts(progress: Progress) -> Iterator[str]:
    """One text a module of the standard library, numpy and torch that has documentation."""
    for root, files in demo_files():
        for path in files:
            module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            if record := module_record(path, module):
                yield record_text(record)
            progress.bytes_read += path.stat().st_size


def demo_files() -> list[tuple[Path, list[Path]]]:
    """(folder that module names count from, its Python files), tests and vendored packages left out."""
    roots = [Path(sysconfig.get_paths()["stdlib"])]
    for package in ("numpy", "torch"):
        spec = importlib.util.find_spec(package)
        if spec is None:
            raise UserError(f"{package} is not installed: pip install -r requirements.txt")
        roots.append(Path(spec.origin).parent)
    left_out = set("site-packages test tests testing idlelib lib2to3 turtledemo ensurepip __pycache__".split())
    found = []
    for root in roots:
        files = [p for p in root.rglob("*.py") if not left_out.intersection(p.relative_to(root).parts)]
        files = [p for p in files if not p.name.startswith(("test_", "_sysconfigdata"))]
        found.append((root if root is roots[0] else root.parent, sorted(files)))
    return found


def module_record(path: Path, module: str) -> dict | None:
    """{title, summary, sections} of a module's docstrings; None if it has none."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # a template, or a file for another Python
        return None
    sections = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = None
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name, text = prefix + child.name, ast.get_docstring(child)
                visit(child, f"{name}.")
            elif isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
                name, text = added_docstring(child.value)
            if name and text and len(text) >= 40:  # not "See base class."
                sections.append({"title": name, "content": text})

    visit(tree, "")
    summary = ast.get_docstring(tree) or ""
    return {"title": module, "summary": summary, "sections": sections} if summary or sections else None


def added_docstring(call: ast.Call) -> tuple[str | None, str]:
    """What numpy and torch do for functions written in C: add_newdoc("module", "name", "text"), add_docstr(name, "text")."""
    if not (isinstance(call.func, ast.Name) and call.func.id.startswith(("add_docstr", "add_newdoc"))):
        return None, ""
    names = [a.value if isinstance(a, ast.Constant) else ast.unparse(a) for a in call.args]
    texts = [n for n in names if isinstance(n, str) and "\n" in n]
    return (".".join(n for n in names if "\n" not in str(n)), inspect.cleandoc(texts[0])) if texts else (None, "")


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers. Both kinds have vocab_size, eos_id, encode_batch(texts), encode(text), decode(ids) and token_bytes(id).


class SentencePiece:
    kind, file = "sentencepiece", "tokenizer.model"

    def __init__(self, path: str | Path):
        import sentencepiece

        self.path = Path(path)
        try:
            self.sp = sentencepiece.SentencePieceProcessor(model_proto=self.path.read_bytes())
        except (OSError, RuntimeError) as e:
            raise UserError(f"tokenizer {path}: not a SentencePiece model ({str(e).strip()})") from None
        self.vocab_size, self.eos_id = self.sp.vocab_size(), self.sp.eos_id()
        self.space_sign = [self.sp.piece_to_id(f"<0x{byte:02X}>") for byte in "\u2581".encode()]
        if self.eos_id < 0:
            raise UserError(f"tokenizer {path}: it has no eos token, which ends every document")

    def encode_batch(self, texts: list[str], threads: int) -> list[list[int]]:
        batch = self.sp.encode(texts, num_threads=threads)
        for i, text in enumerate(texts):
            if "\u2581" in text:
                batch[i] = self.encode(text)
        return batch

    def encode(self, text: str) -> list[int]:
        """SentencePiece writes a space as U+2581; a text's own U+2581 goes in as its three bytes, so as to come back."""
        first, *rest = self.sp.encode(text.split("\u2581"))
        return first + [token for part in rest for token in (*self.space_sign, *part)]

    def decode(self, ids: list[int]) -> str:
        return self.sp.decode(ids)

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 that a token adds to a text; one Chinese character can take three tokens."""
        piece = self.sp.id_to_piece(token)
        if self.sp.is_byte(token):
            return bytes([int(piece[1:-1], 16)])  # <0xE4>
        return b"" if self.sp.is_control(token) or self.sp.is_unknown(token) else piece.replace("\u2581", " ").encode()

    def save(self, folder: Path) -> dict:
        (folder / self.file).write_bytes(self.sp.serialized_model_proto())
        return {"kind": self.kind, "file": self.file}


class Tiktoken:
    kind, file = "tiktoken", "tokenizer.tiktoken"

    def __init__(self, encoding):
        self.encoding, self.vocab_size = encoding, encoding.n_vocab
        self.eos_id, self.special = encoding._special_tokens["<|endoftext|>"], set(encoding._special_tokens.values())

    @classmethod
    def by_name(cls, name: str) -> "Tiktoken":
        import tiktoken

        if name not in tiktoken.list_encoding_names():
            known = ", ".join(tiktoken.list_encoding_names())
            raise UserError(f"--tokenizer {name}: no such file, and no tiktoken encoding; it knows {known}")
        try:
            return cls(tiktoken.get_encoding(name))
        except OSError as e:  # requests' errors are OSErrors
            where = "set TIKTOKEN_CACHE_DIR to a folder that has it"
            raise UserError(f"--tokenizer {name}: cannot be downloaded ({type(e).__name__}); {where}") from None

    @classmethod
    def from_file(cls, path: str | Path, pattern: str | None = None, special: dict | None = None) -> "Tiktoken":
        """A .tiktoken file (a line a token: base64 and rank) with its splitting pattern; default: cl100k's, Qwen's, Llama 3's."""
        import tiktoken

        try:
            lines = [line.split() for line in Path(path).read_bytes().splitlines() if line]
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
            if (
                not ranks
                or len(set(ranks.values())) < len(ranks)
                or not 0 <= min(ranks.values()) <= max(ranks.values()) < 1 << 24
            ):
                raise ValueError("its ranks are no numbering")
        except (OSError, ValueError) as e:
            raise UserError(f"tokenizer {path}: not a .tiktoken file ({e})") from None
        special = special or {"<|endoftext|>": max(ranks.values()) + 1}
        encoding = tiktoken.Encoding(
            Path(path).stem, pat_str=pattern or CL100K_PATTERN, mergeable_ranks=ranks, special_tokens=special
        )
        return cls(encoding)

    def encode_batch(self, texts: list[str], threads: int) -> list[list[int]]:
        try:
            return self.encoding.encode_ordinary_batch(texts, num_threads=threads)
        except BaseException as e:  # a panic in tiktoken's Rust is no Exception
            if type(e).__name__ != "PanicException":
                raise
            raise UserError(f"tiktoken cannot encode this input: {str(e).splitlines()[0][:100]}") from None

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(text)  # "<|endoftext|>" in a text is text

    def decode(self, ids: list[int]) -> str:
        return self.encoding.decode(ids)

    def token_bytes(self, token: int) -> bytes:
        try:
            return self.encoding.decode_single_token_bytes(token) if token not in self.special else b""
        except KeyError:  # a hole in the numbering
            return b""

    def save(self, folder: Path) -> dict:
        e = self.encoding
        ranks = sorted(e._mergeable_ranks.items(), key=lambda item: item[1])
        (folder / self.file).write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % rank for t, rank in ranks))
        return {
            "kind": self.kind,
            "file": self.file,
            "pattern": e._pat_str,
            "special": e._special_tokens,
            "name": e.name,
        }


CL100K_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


SET_FILES = {"train.bin", "val.bin", "meta.json", SentencePiece.file, Tiktoken.file}


def load_tokenizer(folder: str | Path) -> SentencePiece | Tiktoken:
    """The tokenizer of a data set or of a checkpoint, checked against the hash in its meta.json."""
    info = read_meta(Path(folder))["tokenizer"]
    path = Path(folder) / info["file"]
    if not path.exists() or file_sha256(path) != info["sha256"]:
        raise UserError(f"{path}: missing, or not the tokenizer that the data was made with")
    if info["kind"] == "sentencepiece":
        return SentencePiece(path)
    return Tiktoken.from_file(path, info["pattern"], info["special"])


def make_tokenizer(
    cfg: PrepareConfig, texts: Iterable[str], progress: Progress, scratch: Path
) -> SentencePiece | Tiktoken:
    """The tokenizer that --tokenizer asks for; `texts` is read only if it is to be trained."""
    if cfg.tokenizer == "train":
        return SentencePiece(train_sentencepiece(texts, progress, cfg, scratch))
    if cfg.tokenizer.endswith(".model"):
        return SentencePiece(cfg.tokenizer)
    return Tiktoken.from_file(cfg.tokenizer) if cfg.tokenizer.endswith(".tiktoken") else Tiktoken.by_name(cfg.tokenizer)


def train_sentencepiece(texts: Iterable[str], progress: Progress, cfg: PrepareConfig, scratch: Path) -> Path:
    """Train a BPE that loses nothing: no normalisation, spaces kept, bytes for characters outside the vocabulary."""
    import sentencepiece

    # A uniform sample of 4,000-character pieces (reservoir sampling, Vitter's algorithm R): memory stays bounded.
    length, rng, sample = 4000, random.Random(0), []
    pieces = (text[i : i + length] for text in texts for i in range(0, len(text), length))
    for seen, piece in enumerate(pieces):
        if len(sample) < cfg.train_mb * 1_000_000 // length:
            sample.append(piece)
        elif (slot := rng.randrange(seen + 1)) < len(sample):
            sample[slot] = piece
    if not sample:
        raise UserError(no_documents(progress))
    path = scratch / SentencePiece.file
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
    except (RuntimeError, ValueError) as e:  # its message: "Internal: file(line) [condition] reason"
        raise UserError(
            f"--vocab_size={cfg.vocab_size}: SentencePiece cannot train on this input: {str(e).split('] ')[-1]}"
        ) from None
    return path


# ---------------------------------------------------------------------------------------------------------------------
# Encode and write


class SplitWriter:
    """One .bin as it grows, with the counts and the hash that meta.json records."""

    def __init__(self, path: Path, dtype: str):
        self.file, self.dtype, self.digest = open(path, "wb"), np.dtype(dtype).newbyteorder("<"), hashlib.sha256()
        self.tokens = self.documents = self.bytes = self.characters = 0

    def write(self, text: str, ids: list[int]) -> None:
        data = np.array(ids, self.dtype).tobytes()
        self.file.write(data)
        self.digest.update(data)
        self.tokens, self.documents = self.tokens + len(ids), self.documents + 1
        self.bytes += len(text.encode())
        self.characters += len(text)

    def close(self) -> dict:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        counts = {k: getattr(self, k) for k in ("tokens", "documents", "bytes", "characters")}
        return counts | {"sha256": self.digest.hexdigest()}


def split_of(text: str, val_fraction: float) -> str:
    """By a hash of the text alone: another file, or another order, moves no document from one split to the other."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return "val" if int.from_bytes(digest, "big") < val_fraction * 2**64 else "train"


def batches(texts: Iterable[str], characters: int = 1 << 20) -> Iterator[list[str]]:
    """Texts in lists of about a million characters: enough for every thread, small enough to forget."""
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode(texts: Iterable[str], tokenizer, cfg: PrepareConfig, folder: Path, bar: tqdm, progress: Progress) -> tuple:
    """Write both splits. Returns (dtype and counts for meta.json, every document's tokens, the first one decoded back)."""
    dtype = "uint16" if tokenizer.vocab_size <= 65536 else "uint32"
    writers = {split: SplitWriter(folder / f"{split}.bin", dtype) for split in ("train", "val")}
    lengths, first, started = array.array("I"), None, time.perf_counter()
    for batch in batches(texts):
        for text, ids in zip(batch, tokenizer.encode_batch(batch, cfg.threads or os.cpu_count()), strict=True):
            if first is None:
                first = tokenizer.decode(ids)
                if first != text:
                    tqdm.write("warning: the tokenizer changes the text: the first document decodes to something else")
            ids.append(tokenizer.eos_id)
            writers[split_of(text, cfg.val_fraction)].write(text, ids)
            lengths.append(len(ids))
        tokens, megabytes = (sum(getattr(w, k) for w in writers.values()) for k in ("tokens", "bytes"))
        rate = megabytes / 1e6 / (time.perf_counter() - started)
        bar.set_postfix_str(f"{rate:.1f} MB/s of text, {tokens / 1e6:.1f}M tokens")
    splits = {split: writer.close() for split, writer in writers.items()}
    if not lengths:
        raise UserError(no_documents(progress))
    for split, counts in splits.items():
        if not counts["documents"]:
            hint = "raise --val_fraction" if split == "val" else "lower --val_fraction"
            raise UserError(
                f"{split}.bin would be empty: of {len(lengths)} documents none fell there; {hint}, "
                "or cut text files into more documents with --txt=block or --txt=line"
            )
    return {"dtype": dtype, "splits": splits}, np.frombuffer(lengths, dtype=np.uint32), first


def with_bar(texts: Iterator[str], progress: Progress, total: int, what: str) -> tuple[Iterator[str], tqdm]:
    """`texts` with a progress bar over the bytes on disk (none where stderr is not a terminal)."""
    bar = tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=None, dynamic_ncols=True)

    def follow() -> Iterator[str]:
        for text in texts:
            bar.update(progress.bytes_read - bar.n)
            yield text
        bar.update(total - bar.n)
        bar.close()

    return follow(), bar


def check_target(target: Path, name: str) -> None:
    """Refuse to replace anything that is not a data set, a folder of somebody's corpus above all."""
    if not re.fullmatch(r"[^./*?\[\x00-\x1f][^/*?\x00-\x1f]{0,99}", name):
        raise UserError(f"{name!r} cannot name a data set: give --name=NAME, a plain folder name")
    if os.path.lexists(target):
        a_folder = target.is_dir() and not target.is_symlink()
        others = sorted({p.name for p in target.iterdir()} - SET_FILES) if a_folder else [target.name]
        if others:
            raise UserError(f"{target} exists and is no data set (see {others[0]!r}): choose another --name")


def replace_folder(new: Path, target: Path) -> None:
    """Put the finished folder in place of the old one: a reader meets one of them whole, never half of each."""
    old = target.with_name(f".{target.name}.old")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def report(meta: dict, first: str, examples: list[str], folder: Path, seconds: float) -> str:
    splits, lengths, skipped = meta["splits"], meta["lengths"], meta["skipped"]

    def total(key: str) -> int:
        return sum(s[key] for s in splits.values())

    kind, V = meta["tokenizer"]["kind"], meta["vocab_size"]
    lines = [f"\n{folder}: {kind} tokenizer, vocabulary {V:,}, {meta['dtype']}, {seconds:.0f} s"]
    for split, s in splits.items():
        counts = f"{s['documents']:>12,} documents {s['tokens']:>15,} tokens {s['bytes']:>15,} bytes of text"
        lines.append(f"  {split:<6} {counts}")
    lines.append(f"  {total('characters') / total('tokens'):.2f} characters per token (eos counted)")
    lines.append("  tokens per document: " + ", ".join(f"{k} {v:,}" for k, v in lengths.items()))
    lines.append(f"  skipped: {sum(skipped.values()):,}")
    lines += [f"    {n:,} x {reason}" for reason, n in skipped.items()]
    lines += [f"    e.g. {example}" for example in examples]
    lines.append(f"  the first document, decoded back from its ids:\n    {first[:300]!r}{' ...' * (len(first) > 300)}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------


def main() -> None:
    cfg = parse(PrepareConfig, doc=__doc__)
    if cfg.input:
        files = find_files(cfg.input)
        sources = [{"path": str(p), "bytes": p.stat().st_size, "sha256": file_sha256(p)} for p in files]
        name = cfg.name or Path(cfg.input[0]).resolve().name.split(".")[0]
        total = sum(s["bytes"] for s in sources)
    else:
        files, name = [], cfg.name or "demo"
        versions = {p: importlib.metadata.version(p) for p in ("numpy", "torch")}
        sources = [{"path": "docstrings", "python": sys.version.split()[0], **versions}]
        total = sum(p.stat().st_size for _, paths in demo_files() for p in paths)

    def texts(what: str) -> tuple[Iterator[str], tqdm, Progress]:
        progress = Progress()
        source = read_texts(files, cfg.txt, progress) if cfg.input else demo_texts(progress)
        return *with_bar(source, progress, total, what), progress

    started, target = time.perf_counter(), Path(cfg.data_dir) / name
    check_target(target, name)
    old, scratch = (target.with_name(f".{name}.{end}") for end in ("old", "tmp"))  # a rename stays in one file system
    if old.exists() and not target.exists():  # killed between the two renames of replace_folder
        old.rename(target)
    scratch.mkdir(parents=True, exist_ok=True)
    lock = os.open(scratch, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another prepare.py is writing {target}: wait for it, or choose another --name") from None
    try:
        for left in scratch.iterdir():  # by a run that was killed
            left.unlink()
        stream, _, progress = texts("reading for the tokenizer")
        tokenizer = make_tokenizer(cfg, stream, progress, scratch)
        stream, bar, progress = texts("encoding")
        counts, lengths, first = encode(stream, tokenizer, cfg, scratch, bar, progress)
        percentiles = {f"p{p}": int(np.percentile(lengths, p)) for p in (1, 10, 50, 90, 99)}
        meta = {
            "format_version": FORMAT_VERSION,
            **counts,
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
            "tokenizer": (info := tokenizer.save(scratch)) | {"sha256": file_sha256(scratch / info["file"])},
            "lengths": percentiles | {"max": int(lengths.max())},
            "sources": sources,
            "skipped": dict(progress.skipped),
            "settings": {"val_fraction": cfg.val_fraction, "txt": cfg.txt},
        }
        (scratch / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        replace_folder(scratch, target)
    finally:  # Ctrl-C too: nothing half-written is left
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)
    print(report(meta, first, progress.examples, target, time.perf_counter() - started))


if __name__ == "__main__":
    run(main)

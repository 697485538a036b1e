"""Corpora as people have them -> documents: files, formats, encodings, record shapes, cleaning. It knows no tokens.

A corpus is read in one process, which only cuts files into records (`Reader`), and understood in many, which parse
records, join their fields and clean the text (`documents`). So the slow part runs on every core, in whatever order, and
a position in the input is one pair of numbers.
"""

import ast
import bz2
import codecs
import csv
import glob
import gzip
import hashlib
import importlib.util
import inspect
import io
import itertools
import json
import lzma
import os
import re
import sysconfig
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from configurator import UserError

# ---------------------------------------------------------------------------------------------------------------------
# Files

KINDS = "jsonl ndjson json csv tsv txt md parquet".split()
COMPRESSED = (".gz", ".xz", ".bz2", ".zst")
EXPECTED = f"{', '.join('.' + k for k in KINDS)}, plain or with {', '.join(COMPRESSED)}"


@dataclass
class Source:
    """A file to read. What is known only when it has been read is filled in then."""

    path: Path
    kind: str  # one of KINDS, or "py": a module of the demo corpus
    name: str  # as messages show it
    bytes: int = 0  # on the disk
    changed: int = 0  # time of the last change, ns
    sha256: str = ""

    @classmethod
    def at(cls, path: Path, kind: str, name: str = "") -> "Source":
        stat = path.stat()
        return cls(path, kind, name or str(path), stat.st_size, stat.st_mtime_ns)

    def same_file(self) -> tuple:
        return self.name, self.kind, self.bytes, self.changed


def kind_of(path: Path) -> str | None:
    name = path.name.lower()
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    kind = Path(name).suffix[1:]
    return kind if kind in KINDS else None


def find_sources(inputs: Iterable[str], kind: str = "auto") -> list[Source]:
    """The files that the --input arguments name, folders searched through, in a fixed order, each once."""
    found: dict[Path, Source] = {}
    for name in inputs:
        paths = [Path(name)] if os.path.exists(name) else [Path(p) for p in sorted(glob.glob(name, recursive=True))]
        if not paths:
            raise UserError(f"--input {name}: no such file or folder")
        for path in paths:
            inside = sorted(walk(path)) if path.is_dir() else [path]
            if not inside:
                raise UserError(f"--input {path}: the folder has no file that ends in {EXPECTED}")
            for file in inside:
                if kind == "auto" and not kind_of(file):
                    raise UserError(f"--input {file}: unknown kind of file; expected {EXPECTED}, or say --format=KIND")
                if not file.is_file():
                    raise UserError(f"--input {file}: no regular file; pipe it in with --input -")
                found.setdefault(file, Source.at(file, kind_of(file) if kind == "auto" else kind))
    return list(found.values())


def walk(folder: Path) -> Iterator[Path]:
    """The files below a folder that we can read; an unreadable folder in it is an error, not an omission."""

    def fail(error: OSError) -> None:
        raise UserError(f"--input {error.filename}: {error.strerror}")

    for root, _, names in os.walk(folder, onerror=fail):
        yield from (path for name in names if kind_of(path := Path(root, name)) and path.is_file())


class HashedFile(io.RawIOBase):
    """A file that knows how much of it was read, and the SHA-256 of that."""

    def __init__(self, path: Path):
        self.file, self.digest, self.bytes_read = open(path, "rb", buffering=0), hashlib.sha256(), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        n = self.file.readinto(buffer)
        self.digest.update(memoryview(buffer)[:n])
        self.bytes_read += n
        return n

    def close(self) -> None:
        self.file.close()
        super().close()


def decompressed(raw: io.BufferedReader, name: str) -> io.BufferedIOBase:
    """By its first bytes, not by its name: they are right for renamed files and for standard input too."""
    head = raw.peek(10)
    if head.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=raw)
    if head.startswith(b"\xfd7zXZ\x00"):
        return lzma.LZMAFile(raw)
    if re.match(rb"BZh[1-9]1AY&SY", head):
        return bz2.BZ2File(raw)
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        try:
            from compression import zstd  # Python 3.14
        except ImportError:
            try:
                from backports import zstd
            except ImportError:
                raise UserError(f"{name}: .zst needs the package backports.zstd: pip install backports.zstd") from None
        return zstd.ZstdFile(raw)
    return raw


# ---------------------------------------------------------------------------------------------------------------------
# Reader: files -> chunks of records, in one process, no faster than they are taken


class Lines(NamedTuple):
    """Whole lines of a .jsonl file, left to a worker as they are, since all that the reader does is done on one core."""

    data: bytes
    encoding: str
    file: str
    first: int  # number of the first line


class Piece(NamedTuple):
    """A part of a document too long to hold: its tokens are made piece by piece."""

    text: str
    first: bytes  # digest of the document's first piece, which decides its split
    whole: bytes  # digest of the whole document, in its last piece; empty before


@dataclass
class Chunk:
    """Records to understand together, about a megabyte, and where the reader stands behind them."""

    kind: str
    records: list[tuple[str, Any]]  # (where, as file:line; a text, a Piece, Lines, or what a parser made of it)
    file: int = 0
    record: int = 0  # so many of that file have been read
    bytes_read: int = 0  # on the disk, of all files


CHUNK = 1 << 20  # characters
PIECE = 1 << 20  # characters; a longer document is cut
BLANK = "：。 \t\r\n"


class Reader:
    """The records of all files in order, from a position on."""

    def __init__(self, sources: list[Source], encoding: str, txt: str, file: int = 0, record: int = 0):
        self.sources, self.encoding, self.txt, self.file, self.record = sources, encoding, txt, file, record

    def chunks(self) -> Iterator[Chunk]:
        before = sum(s.bytes for s in self.sources[: self.file])
        chunk, size = Chunk("", []), 0
        for file in range(self.file, len(self.sources)):
            source = self.sources[file]
            skip = self.record if file == self.file else 0
            for number, bytes_read, where, record in self.records(source, skip):
                if chunk.records and (size >= CHUNK or len(chunk.records) >= 4096 or chunk.kind != source.kind):
                    yield chunk
                    chunk, size = Chunk("", []), 0
                chunk.kind = source.kind
                chunk.records.append((where, record))
                chunk.file, chunk.record, chunk.bytes_read = file, number, before + bytes_read
                size += weight(record)
            before += source.bytes
        if chunk.records:
            yield chunk

    def records(self, source: Source, skip: int) -> Iterator[tuple[int, int, str, Any]]:
        """(how many so far, bytes read, where, record) of one file; at its end its hash is known."""
        try:
            with HashedFile(source.path) as raw:
                if source.kind == "parquet":
                    found = read_parquet(source)
                elif source.kind == "py":
                    found = iter([(source.name, raw.read())])
                else:
                    stream = decompressed(io.BufferedReader(raw, 1 << 18), source.name)
                    if source.kind in ("jsonl", "ndjson") and has_ascii_line_ends(self.encoding):
                        found = read_lines(stream, source, self.encoding)
                    else:
                        encoding = "utf-8-sig" if codecs.lookup(self.encoding).name == "utf-8" else self.encoding
                        newline = "" if source.kind in ("csv", "tsv") else None
                        text = io.TextIOWrapper(stream, encoding, errors="surrogateescape", newline=newline)
                        found = READERS[source.kind](text, source, self.txt)
                for number, (where, record) in enumerate(found, 1):
                    if number > skip:
                        yield number, raw.bytes_read, where, record
                while raw.read(1 << 20):
                    pass  # what no reader wanted counts in the hash too
                source.sha256 = raw.digest.hexdigest()
        except OSError as e:  # gzip's and bz2's own errors too
            raise UserError(f"{source.name}: {e.strerror or e}") from None
        except (EOFError, zlib.error, lzma.LZMAError) as e:
            raise UserError(f"{source.name}: damaged or cut off ({e})") from None
        except UnicodeError as e:  # encodings whose errors cannot be kept for later, as UTF-16
            raise UserError(f"{source.name}: not {self.encoding} ({e}): give --encoding") from None
        except csv.Error as e:
            raise UserError(f"{source.name}: not a CSV file ({e})") from None


def weight(record: Any) -> int:
    """About how many characters of text."""
    if isinstance(record, str | bytes):
        return len(record)
    if isinstance(record, Lines | Piece):
        return len(record[0])
    return 200 + sum(len(v) for v in record.values() if isinstance(v, str)) if isinstance(record, dict) else 200


def has_ascii_line_ends(encoding: str) -> bool:
    """Is a byte 0x0A always a line end, as in UTF-8 and GB18030 but not in UTF-16?"""
    return codecs.lookup(encoding).name in ("utf-8", "gb18030", "gbk", "gb2312", "ascii", "iso8859-1", "cp1252")


def read_lines(stream: io.BufferedIOBase, source: Source, encoding: str) -> Iterator[tuple[str, Lines]]:
    """A .jsonl file in blocks of about a megabyte that end where a line ends."""
    rest, first = [], 1
    while data := stream.read(CHUNK):
        if end := data.rfind(b"\n") + 1:
            block = b"".join([*rest, data[:end]])
            yield source.name, Lines(block, encoding, source.name, first)
            first += block.count(b"\n")
            rest = []
        rest.append(data[end:])
    if any(rest):
        yield source.name, Lines(b"".join(rest), encoding, source.name, first)


def read_jsonl(f: io.TextIOWrapper, source: Source, txt: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(f, 1):
        if not line.isspace():
            yield f"{source.name}:{number}", line


def read_json(f: io.TextIOWrapper, source: Source, txt: str) -> Iterator[tuple[str, Any]]:
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
            yield f"{source.name}: element {number}", record
        elif more:
            chunk = f.read(size)
            buffer, at, more = buffer[at:] + chunk, 0, bool(chunk)
            size = min(2 * size, 1 << 28)  # a large element is not decoded from its start for every 64 KB
        elif (rest := buffer[at:].rstrip()) != closing:
            where = f"behind element {number}, near {rest[:40]!r}" if rest else "at its end, which has no ]"
            raise UserError(f"{source.name}: not valid JSON {where}: mend it there")
        else:
            return


def read_csv(f: io.TextIOWrapper, source: Source, txt: str) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(1 << 30)
    dialect = "excel-tab" if source.kind == "tsv" else "excel"
    rows = csv.DictReader(f, dialect=dialect, strict=True)  # strict: an open quote is an error
    for row in rows:
        surplus = ValueError("more fields than the header: quote a text that holds the separator")
        yield f"{source.name}:{rows.line_num}", surplus if None in row else row


def read_parquet(source: Source) -> Iterator[tuple[str, dict]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{source.name}: .parquet needs the package pyarrow: pip install pyarrow") from None
    try:
        with pyarrow.parquet.ParquetFile(source.path, pre_buffer=False) as table:
            rows = (row for batch in table.iter_batches(256, use_threads=False) for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield f"{source.name}: row {number}", row
    except pyarrow.ArrowException as e:
        raise UserError(f"{source.name}: not a whole Parquet file ({str(e).splitlines()[0][:120]})") from None


def read_txt(f: io.TextIOWrapper, source: Source, txt: str) -> Iterator[tuple[str, str | Piece]]:
    if txt == "line":
        yield from ((f"{source.name}:{n}", line.rstrip("\n")) for n, line in enumerate(f, 1) if not line.isspace())
        return
    if txt == "block":
        for blank, lines in itertools.groupby(enumerate(f, 1), key=lambda line: line[1].isspace()):
            if not blank:
                number, line = next(lines)
                yield f"{source.name}:{number}", line + "".join(line for _, line in lines)
        return
    first, digest = b"", hashlib.sha256()
    for text, last in pieces(f.read):
        if last and not first:  # the usual case: one piece is all
            yield source.name, text
            return
        digest.update(text.encode("utf-8", "surrogateescape"))
        first = first or digest.digest()[:16]
        yield source.name, Piece(text, first, digest.digest()[:16] if last else b"")


READERS = dict(
    jsonl=read_jsonl, ndjson=read_jsonl, json=read_json, csv=read_csv, tsv=read_csv, txt=read_txt, md=read_txt
)


def pieces(read: Callable[[int], str]) -> Iterator[tuple[str, bool]]:
    """(part, is it the last) of a document; read(n) gives its next n characters. Parts end before a space behind a word,
    where neither GPT-2's splitting nor a SentencePiece BPE ever joins, so that the tokens are those of the whole
    document; where there is no such place in a million characters, behind a line, and at worst anywhere.
    """
    text = read(PIECE)
    while following := read(PIECE):
        text += following
        cut = re.match(r"(?s).*\S(?= )", text) or re.match(r"(?s).*\n", text)
        at = cut.end() if cut else len(text)
        yield text[:at], False
        text = text[at:]
    yield text, True


# ---------------------------------------------------------------------------------------------------------------------
# Documents: what a record says, as one clean text


class Cleaning(NamedTuple):
    """The settings of prepare.py that decide what text a record becomes."""

    fields: str = ""
    normalize: str = "none"
    drop_control: bool = False


@dataclass
class Tally:
    """What became of the records. Everything that is not a document is counted here, with its reason."""

    records: int = 0
    bad: Counter = field(default_factory=Counter)  # reason -> records that could not be read
    dropped: Counter = field(default_factory=Counter)  # reason -> documents left out
    changed: Counter = field(default_factory=Counter)  # reason -> documents whose text was changed
    shapes: Counter = field(default_factory=Counter)  # {text}, {title, content}, ... -> records read so
    examples: list[str] = field(default_factory=list)  # the first few bad ones, as file:line: reason

    def reject(self, where: str, reason: str, piece: Piece | None) -> None:
        if piece:  # half of its document may be written already
            raise UserError(f"{where}: {reason}: mend it there") from None
        self.bad[reason] += 1
        if len(self.examples) < 5:
            self.examples.append(f"{where}: {reason}")

    def add(self, other: "Tally") -> None:
        self.records += other.records
        for name in ("bad", "dropped", "changed", "shapes"):
            getattr(self, name).update(getattr(other, name))
        self.examples = (self.examples + other.examples)[:5]


CONTROL = re.compile("[\0-\b\v\f\x0e-\x1f\x7f-\x9f\ufeff]")  # all of C0 and C1 but tab and line ends, and a stray BOM


def documents(chunk: Chunk, cleaning: Cleaning, tally: Tally) -> Iterator[tuple[str, str, bytes, Piece | None]]:
    """(where, text, its UTF-8, the Piece that it is, if it is one) of each record of a chunk that is a document."""
    for where, record in itertools.chain.from_iterable(map(unpacked, chunk.records)):
        piece = record if isinstance(record, Piece) else None
        if piece is None or piece.whole:
            tally.records += 1
        try:
            text, shape = understand(chunk.kind, piece.text if piece else record, where, cleaning.fields)
            text = clean(text, cleaning, tally)
            utf8 = to_utf8(text)
        except ValueError as e:
            tally.reject(where, str(e), piece)
            continue
        if piece is None or piece.whole:
            tally.shapes[shape] += 1
        if text.strip(BLANK) or piece:
            yield where, text, utf8, piece
        else:
            tally.dropped["empty"] += 1


def unpacked(record: tuple[str, Any]) -> Iterable[tuple[str, Any]]:
    """(where, record), or (where, line) for each of its Lines."""
    lines = record[1]
    if not isinstance(lines, Lines):
        return [record]
    text = lines.data.decode(lines.encoding, "surrogateescape").removeprefix("\ufeff")
    numbered = enumerate(text.split("\n"), lines.first)
    return ((f"{lines.file}:{number}", line) for number, line in numbered if line and not line.isspace())


def to_utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as e:
        code = ord(text[e.start])
        if 0xDC80 <= code <= 0xDCFF:  # what surrogateescape makes of a byte
            raise ValueError(f"byte 0x{code - 0xDC00:02x} is not of its encoding: say --encoding") from None
        raise ValueError("half a surrogate pair, which is no character") from None  # JSON can spell it


def understand(kind: str, record: Any, where: str, fields: str) -> tuple[str, str]:
    """(text, shape) of a record as its reader left it; ValueError says what is wrong with it."""
    if isinstance(record, ValueError):
        raise record
    if kind in ("txt", "md"):
        return record, "plain text"
    if kind == "py":
        return docstrings(record, where), "docstrings"
    if kind in ("jsonl", "ndjson"):
        try:
            record = json.loads(record)
        except (ValueError, RecursionError):
            raise ValueError("not valid JSON") from None
    return record_text(record, fields)


def clean(text: str, cleaning: Cleaning, tally: Tally) -> str:
    """The text as it is to be learned; unchanged unless a switch says otherwise."""
    if cleaning.normalize != "none" and not unicodedata.is_normalized(cleaning.normalize, text):
        text = unicodedata.normalize(cleaning.normalize, text)
        tally.changed[f"brought to {cleaning.normalize}"] += 1
    if cleaning.drop_control and CONTROL.search(text):
        text = CONTROL.sub("", text)
        tally.changed["control characters removed"] += 1
    return text


def get(record: dict, key: str) -> str:
    """A field as text: a number is written out, null and absence are empty; ValueError if it is a list or a record."""
    value = record.get(key)
    if type(value) is str:
        return value
    if isinstance(value, int | float | None):
        return "" if value is None else str(value)
    raise ValueError(f"{key} is a {type(value).__name__}, no text")


def record_text(record: Any, fields: str = "") -> tuple[str, str]:
    """(text, shape) of a record. The joining of titles, summaries and sections is that of the Chinese encyclopedia
    corpora; `fields` names others: `question,answer` (joined by line ends), or a template: `问：{question}答：{answer}`.
    """
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__} where a record {{...}} belongs")
    if fields:
        return chosen_fields(record, fields), fields
    sections = record.get("sections")
    if isinstance(sections, list) or isinstance(record.get("summary"), str):
        text = f"{get(record, 'title')}：{get(record, 'summary')}{join_sections(sections)}"
        return text, "{title, summary, sections}"
    if isinstance(text := record.get("content"), str):
        title = get(record, "title")
        return (f"{title}：{text}。", "{title, content}") if title else (text, "{content}")
    if isinstance(text := record.get("text"), str):
        return text, "{text}"
    if isinstance(text := record.get("completion"), str):
        prompt = get(record, "prompt")
        return (f"{prompt}\n{text}", "{prompt, completion}") if prompt else (text, "{completion}")
    if isinstance(record.get("instruction"), str) and isinstance(record.get("output"), str):
        parts = [get(record, key) for key in ("instruction", "input", "output")]
        return "\n".join(filter(None, parts)), "{instruction, input, output}"
    raise ValueError(f"no known shape but {{{', '.join(map(str, record))}}}: say --fields="[:120])


def join_sections(sections: Any) -> str:
    try:
        return "".join([s["title"] + "：" + s["content"] + "。" for s in sections])
    except (TypeError, KeyError, IndexError):  # something is missing, or no text: look closer
        if not isinstance(sections, list | None) or not all(isinstance(s, dict) for s in sections or []):
            raise ValueError("sections is no list of {title, content}") from None
        return "".join([f"{get(s, 'title')}：{get(s, 'content')}。" for s in sections or []])


def chosen_fields(record: dict, fields: str) -> str:
    """a.b is field b of the record in field a."""

    def value(name: str) -> str:
        *path, last = name.strip().split(".")
        inner = record
        for key in path:
            inner = inner.get(key)
            if not isinstance(inner, dict):
                raise ValueError(f"no field {name}")
        if last not in inner:
            raise ValueError(f"no field {name}")
        return get(inner, last)

    if "{" in fields:
        return re.sub(r"\{([^{}]+)\}", lambda m: value(m[1]), fields.replace("\\n", "\n"))
    return "\n".join(filter(None, map(value, fields.split(","))))


# ---------------------------------------------------------------------------------------------------------------------
# The demo corpus: the documentation of the Python that runs this, parsed from source, never imported


def demo_sources() -> list[Source]:
    """The modules of the standard library, numpy and torch, tests and vendored packages left out."""
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
        for path in sorted(p for p in files if not p.name.startswith(("test_", "_sysconfigdata"))):
            parts = path.relative_to(root if root is roots[0] else root.parent).with_suffix("").parts
            found.append(Source.at(path, "py", ".".join(parts).removesuffix(".__init__")))
    return found


def docstrings(source: bytes, module: str) -> str:
    """The docstrings of a module as title, summary and sections; empty if it has none."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a template, or a file for another Python
        return ""
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
    if not summary and not sections:
        return ""
    return record_text({"title": module, "summary": summary, "sections": sections})[0]


def added_docstring(call: ast.Call) -> tuple[str | None, str]:
    """What numpy and torch do for functions written in C: add_newdoc("module", "name", "text"), add_docstr(name, "text")."""
    if not (isinstance(call.func, ast.Name) and call.func.id.startswith(("add_docstr", "add_newdoc"))):
        return None, ""
    names = [a.value if isinstance(a, ast.Constant) else ast.unparse(a) for a in call.args]
    texts = [n for n in names if isinstance(n, str) and "\n" in n]
    return (".".join(n for n in names if "\n" not in str(n)), inspect.cleandoc(texts[0])) if texts else (None, "")

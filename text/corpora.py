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
import math
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
    content: str = ""  # its SHA-256 instead of a time that says nothing: of standard input

    @classmethod
    def at(cls, path: Path, kind: str, name: str = "") -> "Source":
        stat = path.stat()
        return cls(path, kind, name or name_of(path), stat.st_size, stat.st_mtime_ns)

    def same_file(self) -> tuple:
        return self.name, self.kind, self.bytes, self.content or self.changed

    def check_unchanged(self, sha256: str) -> None:
        """When it has been read: UserError if it is no longer what was found, or read before."""
        stat = self.path.stat()
        same = (stat.st_size, stat.st_mtime_ns) == (self.bytes, self.changed)
        if not same or self.sha256 not in ("", sha256):
            raise self.changed_error()
        self.sha256 = sha256

    def changed_error(self) -> UserError:
        again = "run the same command again when nothing writes to it"
        return UserError(f"{self.name}: it changed while it was read: {again}")


def name_of(path: Path) -> str:
    """As messages show it: by the locale, else as UTF-8; lone surrogates stand for other bytes."""
    try:
        str(path).encode()
        return str(path)
    except UnicodeEncodeError:
        return os.fsencode(path).decode("utf-8", "surrogateescape")


def in_order(path: Path) -> list[bytes]:
    """A key for sorting, which makes a folder the same corpus in any locale."""
    return os.fsencode(path).split(b"/")


def suffix_of(path: Path) -> str:
    """What tells the kind of a file and its compression: .jsonl.gz of DUMP.JSONL.gz."""
    name = Path(path.name.lower())
    packed = name.suffix if name.suffix in COMPRESSED else ""
    return Path(name.name.removesuffix(packed)).suffix + packed


def kind_of(path: Path) -> str | None:
    kind = suffix_of(path).strip(".").partition(".")[0]
    return kind if kind in KINDS else None


OTHER_NAME, OUR_OWN = "another name of a file that is read", "written by prepare.py"


def find_sources(
    inputs: Iterable[str], kind: str = "auto", own: Iterable[Path] = ()
) -> tuple[list[Source], dict[str, Counter]]:
    """(the files that the --input arguments name, in a fixed order, each once; what was passed by).

    Folders are searched through. own: files that the caller writes, which therefore are no input.
    What was passed by: argument -> suffix of a file, or another reason -> number of files.
    """
    sources: list[Source] = []
    passed_by: dict[str, Counter] = {}
    own_files = {identity(path) for path in own}
    names: dict[tuple[int, int], set[Path]] = {}  # of each file
    for argument in inputs:
        passed = passed_by[name_of(Path(argument))] = Counter()
        here = os.path.exists(argument)
        paths = [argument] if here else sorted(matches(argument))
        if not paths:
            raise UserError(f"--input {argument}: no such file or folder")
        for path in map(Path, paths):
            files = sorted(walk(path, passed), key=in_order) if path.is_dir() else [path]
            if not files:
                there = ", ".join(f"{n:,} x {what}" for what, n in passed.items()) or "nothing"
                expected = f"the folder has no file that ends in {EXPECTED}"
                raise UserError(f"--input {path}: {expected}; it has {there}")
            for file in files:
                this_kind = kind_of(file) if kind == "auto" else kind
                if not this_kind:
                    raise UserError(f"--input {file}: unknown kind of file; expected {EXPECTED}, or say --format=KIND")
                if not file.is_file():
                    raise UserError(f"--input {file}: no regular file; pipe it in with --input -")
                if identity(file) in own_files:
                    ours = "prepare.py has written it: name the corpus alone"
                    raise UserError(f"--input {file}: {ours}")
                known = names.setdefault(identity(file), set())
                if not known:
                    sources.append(Source.at(file, this_kind))
                elif file not in known:
                    passed[OTHER_NAME] += 1
                known.add(file)
    return sources, {argument: counts for argument, counts in passed_by.items() if counts}


def matches(pattern: str) -> list[str]:
    """As glob.glob, but that ** does not follow links to folders, which may lead back to where they stand."""
    parts = Path(pattern).parts
    if "**" not in parts:
        return glob.glob(pattern)
    deep = parts.index("**")
    start, rest = Path(*parts[:deep]), str(Path(*parts[deep:]))
    found = [(Path(folder), path) for folder in glob.glob(str(start)) for path in Path(folder).glob(rest)]
    return [str(path) for folder, path in found if "/." not in f"/{path.relative_to(folder)}"]  # nothing hidden


def identity(path: Path) -> tuple[int, int]:
    """The same for all names of a file: links, and A and a on a disk that takes them for one."""
    stat = path.stat()
    return stat.st_dev, stat.st_ino


def walk(folder: Path, passed: Counter) -> Iterator[Path]:
    """The files of a corpus below a folder; `passed` counts the others.

    Links to folders are followed; each folder is read once, by its own name if that lies below. An
    error is a folder that cannot be read, and what has the name of a corpus and is no file: a link
    to nothing, a pipe.
    """
    folders, links, seen = [folder], [], set()
    while folders or links:
        at = folders.pop() if folders else links.pop(0)
        try:
            if identity(at) in seen:
                continue
            seen.add(identity(at))
            with os.scandir(at) as entries:
                inside = sorted(entries, key=lambda entry: entry.name)
            names = {entry.name for entry in inside}
            scratch = re.fullmatch(r"\..+\.tmp", at.name) and names & {"tokenizer", "part0"}
            if scratch or {"train.bin", "val.bin", "meta.json"} <= names:
                passed[OUR_OWN] += len(inside)
                continue
            for entry in inside:
                path = at / entry.name
                if entry.is_dir():
                    (links if entry.is_symlink() else folders).append(path)
                elif not kind_of(path):
                    passed[suffix_of(path) or "no suffix"] += 1
                elif entry.is_file():
                    yield path
                else:
                    what = "a link to nothing, or no regular file"
                    raise UserError(f"--input {path}: {what}: remove it")
        except OSError as e:
            raise UserError(f"--input {e.filename or at}: {e.strerror}") from None


class HashedFile(io.RawIOBase):
    """A source's file that knows how much of it was read, and the SHA-256 of that."""

    def __init__(self, source: Source):
        self.source, self.file = source, open(source.path, "rb", buffering=0)
        self.digest, self.bytes_read = hashlib.sha256(), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        n = self.file.readinto(buffer)
        self.digest.update(memoryview(buffer)[:n])
        self.bytes_read += n
        if self.bytes_read > self.source.bytes:  # it grows, and may do so without end
            raise self.source.changed_error()
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
        return io.BufferedReader(Streams(raw, lzma.LZMADecompressor, b"\0"), 1 << 16)
    if re.match(rb"BZh[1-9]1AY&SY", head):
        return io.BufferedReader(Streams(raw, bz2.BZ2Decompressor), 1 << 16)
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


class Streams(io.RawIOBase):
    """One compressed stream after the other, as pbzip2 and pixz write them. Anything else behind the first is
    an error, where bz2.BZ2File and lzma.LZMAFile take it for the end of the file. padding: allowed between them.
    """

    def __init__(self, raw: io.BufferedReader, decompressor: Callable, padding: bytes = b""):
        self.raw, self.new, self.padding = raw, decompressor, padding
        self.stream, self.rest = decompressor(), b""

    def readable(self) -> bool:
        return True

    def without_padding(self, data: bytes) -> bytes:
        return data.lstrip(self.padding) if self.padding else data

    def readinto(self, buffer) -> int:
        while True:
            if self.stream.eof:
                self.rest = self.without_padding(self.stream.unused_data)
                while not self.rest:
                    data = self.raw.read1(1 << 16)
                    if not data:
                        return 0
                    self.rest = self.without_padding(data)
                self.stream = self.new()
            data = self.rest
            if self.stream.needs_input and not data:
                data = self.raw.read1(1 << 16)
                if not data:
                    raise EOFError("Compressed file ended before the end-of-stream marker was reached")
            self.rest = b""
            try:
                made = self.stream.decompress(data, len(buffer))
            except OSError as e:  # as bz2 says that it is damaged
                raise EOFError(str(e)) from None
            if made:
                buffer[: len(made)] = made
                return len(made)


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
    """The records of all files in order, from a position on.

    limit: characters of a record, or bytes where .jsonl is cut into lines before it is decoded. A
    longer one is bad, and little more than this of it is ever in memory.
    """

    def __init__(
        self,
        sources: list[Source],
        encoding: str,
        txt: str,
        limit: int,
        file: int = 0,
        record: int = 0,
    ):
        self.sources, self.encoding, self.txt, self.limit = sources, encoding, txt, limit
        self.file, self.record = file, record

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
            with HashedFile(source) as raw:
                if source.kind == "parquet":
                    found = read_parquet(source, self.limit)
                elif source.kind == "py":
                    found = iter([(source.name, raw.read())])
                else:
                    stream = decompressed(io.BufferedReader(raw, 1 << 18), source.name)
                    if source.kind in ("jsonl", "ndjson") and has_ascii_line_ends(self.encoding):
                        found = read_lines(stream, source, self.encoding, self.limit)
                    else:
                        encoding = "utf-8-sig" if codecs.lookup(self.encoding).name == "utf-8" else self.encoding
                        newline = "" if source.kind in ("csv", "tsv") else None
                        text = io.TextIOWrapper(stream, encoding, errors="surrogateescape", newline=newline)
                        found = READERS[source.kind](text, source, self.txt, self.limit)
                for number, (where, record) in enumerate(found, 1):
                    if number > skip:
                        yield number, raw.bytes_read, where, record
                while raw.read(1 << 20):
                    pass  # what no reader wanted counts in the hash too
                source.check_unchanged(raw.digest.hexdigest())
        except OSError as e:  # gzip's and bz2's own errors too
            raise UserError(f"{source.name}: {e.strerror or e}") from None
        except (EOFError, zlib.error, lzma.LZMAError) as e:
            raise UserError(f"{source.name}: damaged or cut off ({e})") from None
        except UnicodeError as e:  # encodings whose errors cannot be kept for later, as UTF-16
            raise UserError(f"{source.name}: not {self.encoding} ({e}): give --encoding") from None


def weight(record: Any) -> int:
    """About how many characters of text."""
    if isinstance(record, str | bytes):
        return len(record)
    return len(record[0]) if isinstance(record, Lines | Piece) else 200 + characters(record)


def characters(record: Any) -> int:
    """Of all texts in a record, however they are nested."""
    total, todo = 0, [record]
    while todo:
        value = todo.pop()
        if isinstance(value, str | bytes):
            total += len(value)
        elif isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, list):
            todo += value
    return total


def too_long(limit: int) -> ValueError:
    """What stands for a record that is longer than the limit."""
    return ValueError(f"longer than --max_record_mb={limit / 1e6:g}")


def has_ascii_line_ends(encoding: str) -> bool:
    """Is a byte 0x0A always a line end, as in UTF-8 and GB18030 but not in UTF-16?"""
    return codecs.lookup(encoding).name in ("utf-8", "gb18030", "gbk", "gb2312", "ascii", "iso8859-1", "cp1252")


# What a reader gives: (where, record), with a ValueError for a record that cannot be one.
Records = Iterator[tuple[str, Any]]


def read_lines(stream: io.BufferedIOBase, source: Source, encoding: str, limit: int) -> Records:
    """A .jsonl file in blocks of about a megabyte that end where a line ends."""
    rest, first, length = [], 1, 0  # of the line that has not ended yet: bytes, number, length
    while data := stream.read(min(CHUNK, limit)):  # a line that lies in it whole is not too long
        end = data.find(b"\n")
        length += len(data) if end < 0 else end
        if length > limit:
            rest = []
            if end < 0:
                continue
            yield f"{source.name}:{first}", too_long(limit)
            first, data = first + 1, data[end + 1 :]
        if cut := data.rfind(b"\n") + 1:
            block = b"".join([*rest, data[:cut]])
            yield source.name, Lines(block, encoding, source.name, first)
            first += block.count(b"\n")
            rest = []
        rest.append(data[cut:])
        if end >= 0:
            length = len(data) - cut
    if length > limit:
        yield f"{source.name}:{first}", too_long(limit)
    elif any(rest):
        yield source.name, Lines(b"".join(rest), encoding, source.name, first)


def lines_of(f: io.TextIOWrapper, limit: int) -> Iterator[tuple[int, str | ValueError]]:
    """(number, line) of a text."""
    for number in itertools.count(1):
        line = f.readline(limit + 1)
        if not line:
            return
        if len(line) <= limit or line.endswith("\n"):
            yield number, line
            continue
        del line
        while (more := f.readline(CHUNK)) and not more.endswith("\n"):
            pass
        yield number, too_long(limit)


def is_blank(line: str | ValueError) -> bool:
    return isinstance(line, str) and line.isspace()


def read_jsonl(f: io.TextIOWrapper, source: Source, txt: str, limit: int) -> Records:
    for number, line in lines_of(f, limit):
        if not is_blank(line):
            yield f"{source.name}:{number}", line


class Window:
    """The stretch of a long text that is looked at: `text` from the place `at` on."""

    def __init__(self, f: io.TextIOWrapper):
        self.f, self.text, self.at, self.before, self.ended = f, "", 0, 0, False

    def read_on(self, size: int) -> None:
        """Take in `size` characters more, and leave what lies before `at`."""
        more = self.f.read(size)
        self.before += self.at
        self.text, self.at, self.ended = self.text[self.at :] + more, 0, not more

    def skip(self, what: re.Pattern) -> str:
        """Go behind all of `what`; the character that stands there, "" at the end of the text."""
        while True:
            self.at = what.match(self.text, self.at).end()
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self.read_on(1 << 16)

    def skip_element(self) -> bool:
        """Go behind the string, array or object that begins here, holding little of it.

        False if the text ends before it does.
        """
        depth, in_string = 0, self.text[self.at] == '"'
        self.at += in_string
        while not self.ended:
            while self.at < len(self.text):
                if in_string:
                    sign = IN_STRING.search(self.text, self.at)
                    in_string = not sign or sign[0] != '"'
                    self.at = sign.end() if sign else len(self.text)
                    self.at += bool(sign) and in_string  # what a backslash escapes
                else:
                    self.at = UP_TO_BRACKET.match(self.text, self.at).end()
                    sign = self.text[self.at : self.at + 1]
                    in_string = sign == '"'
                    depth += (sign in ("[", "{")) - (sign in ("]", "}"))
                    self.at += len(sign)
                if depth == 0 and not in_string:
                    return True
            behind = self.at - len(self.text)  # 1 where a backslash at the edge escapes what comes
            self.at = len(self.text)
            self.read_on(CHUNK)
            self.at = behind
        return False


SPACE, BETWEEN = re.compile(r"\s*"), re.compile(r"[\s,]*")
IN_STRING = re.compile(r'["\\]')
# And what lies before a bracket: whole strings and all that is no string.
UP_TO_BRACKET = re.compile(r'(?s)(?:[^"\[\]{}]+|"[^"\\]*(?:\\.[^"\\]*)*")*')
EDGE = 16  # an error so close to the edge may be the edge: -Infinity and 1.5e+10 are shorter


def read_json(f: io.TextIOWrapper, source: Source, txt: str, limit: int) -> Records:
    """An array of any length, or objects one after the other, one element in memory at a time."""
    decoder, window, number = json.JSONDecoder(), Window(f), 0

    def fail(at: int, why: str) -> UserError:
        near = window.text[max(window.at, at - 20) : at + 20]
        what = f"(character {window.before + at + 1:,}: {why})"
        place = f"behind element {number}, near {near!r} {what}"
        return UserError(f"{source.name}: not valid JSON {place}: mend it there")

    in_array = window.skip(SPACE) == "["
    window.at += in_array
    while sign := window.skip(BETWEEN):
        if in_array and sign == "]":
            window.at += 1
            if window.skip(SPACE):
                raise fail(window.at, "the array has ended")
            return
        size = 1 << 16
        while True:
            held = len(window.text) - window.at
            try:
                record, end = decoder.raw_decode(window.text, window.at)
                if window.ended or isinstance(record, dict | list) or end + EDGE < len(window.text):
                    break  # 12 at the edge may go on as 123
            except json.JSONDecodeError as e:
                cut = e.msg.startswith("Unterminated string") or e.pos + EDGE > len(window.text)
                if window.ended or not cut:
                    raise fail(e.pos, e.msg) from None
            except RecursionError:
                raise fail(window.at, "nested too deeply") from None
            except ValueError:
                raise fail(window.at, "a number of too many digits") from None
            if held > limit:
                if sign not in '"[{' or not window.skip_element():
                    raise fail(len(window.text), f"{too_long(limit)}, and without an end")
                record, end = too_long(limit), window.at
                break
            window.read_on(min(size, limit + (1 << 16) - held))
            size *= 2  # a large element is not decoded from its start for every 64 KB
        if end - window.at > limit:
            record = too_long(limit)
        number, window.at = number + 1, end
        yield f"{source.name}: element {number}", record
    if in_array:
        raise fail(len(window.text), "its end has no ]")


def read_csv(f: io.TextIOWrapper, source: Source, txt: str, limit: int) -> Records:
    csv.field_size_limit(max(limit, csv.field_size_limit()))
    begin, held = 1, 0  # the line where the row begins, and how many characters of it were read

    def lines() -> Iterator[str]:
        nonlocal held
        while line := f.readline(limit + 1):
            held += len(line)
            if held > limit:
                raise csv.Error(f"{too_long(limit)}: raise that, unless a quote is never closed")
            yield line

    dialect = "excel-tab" if source.kind == "tsv" else "excel"
    rows = csv.DictReader(lines(), dialect=dialect, strict=True)  # an open quote is an error
    try:
        header = rows.fieldnames or []
        begin = rows.line_num + 1
        if twice := [name for name in header if header.count(name) > 1]:
            what = f"the header has the column {twice[0]!r} twice: rename one of them"
            raise UserError(f"{source.name}:{rows.line_num}: {what}")
        for row in rows:
            if None in row:
                why = "more fields than the header: quote a text that holds the separator"
                row = ValueError(why)
            yield f"{source.name}:{rows.line_num}", row
            begin, held = rows.line_num + 1, 0
    except csv.Error as e:  # where the next row begins, nobody can tell
        raise UserError(f"{source.name}:{begin}: not a row of a CSV file ({e})") from None


def read_parquet(source: Source, limit: int) -> Records:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{source.name}: .parquet needs the package pyarrow: pip install pyarrow") from None
    try:
        with pyarrow.parquet.ParquetFile(source.path, pre_buffer=False) as table:
            rows = (row for batch in table.iter_batches(256, use_threads=False) for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                fits = characters(row) <= limit
                yield f"{source.name}: row {number}", row if fits else too_long(limit)
    except pyarrow.ArrowException as e:
        raise UserError(f"{source.name}: not a whole Parquet file ({str(e).splitlines()[0][:120]})") from None


def read_txt(f: io.TextIOWrapper, source: Source, txt: str, limit: int) -> Records:
    """Each line, each block between blank lines, or all of a file, which may be of any length."""
    if txt == "line":
        for number, line in lines_of(f, limit):
            if not is_blank(line):
                whole = isinstance(line, str)
                yield f"{source.name}:{number}", line.rstrip("\n") if whole else line
    elif txt == "block":
        block, size, begin = [], 0, 0  # its lines, its characters, the number of its first line
        for number, line in itertools.chain(lines_of(f, limit), [(0, "\n")]):
            if not is_blank(line):
                begin = begin or number
                size += len(line) if isinstance(line, str) else limit + 1
                if size <= limit:
                    block.append(line)
                else:
                    block.clear()
            elif begin:
                # Without its last line end, which a block at the end of a file may lack: equal texts are equal.
                text = "".join(block).removesuffix("\n")
                yield f"{source.name}:{begin}", text if size <= limit else too_long(limit)
                block, size, begin = [], 0, 0
    else:
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
    unread: Counter = field(default_factory=Counter)  # field beside those of a shape -> records that have it
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
        for name in ("bad", "dropped", "changed", "unread", "shapes"):
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
            text, shape = understand(chunk.kind, piece.text if piece else record, where, cleaning.fields, tally)
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


MOST_VALUES = 1_000_000  # of one record: in Python each takes some 60 bytes or more


def understand(kind: str, record: Any, where: str, fields: str, tally: Tally) -> tuple[str, str]:
    """(text, shape) of a record as its reader left it; ValueError says what is wrong with it."""
    if isinstance(record, ValueError):
        raise record
    if kind in ("txt", "md"):
        return record, "plain text"
    if kind == "py":
        return docstrings(record, where), "docstrings"
    if kind in ("jsonl", "ndjson"):
        if len(record) > MOST_VALUES and record.count(",") > MOST_VALUES:
            raise ValueError(f"it holds more than {MOST_VALUES:,} values")
        try:
            record = json.loads(record)
        except (ValueError, RecursionError):
            raise ValueError("not valid JSON") from None
    text, shape = record_text(record, fields)
    if not fields:
        tally.unread.update(unread_fields(record, shape))
    return text, shape


TEXT_FIELDS = set("title summary sections content text prompt completion instruction input output".split())


def unread_fields(record: dict, shape: str) -> list[str]:
    """Fields that hold text in one of the known shapes, and that this shape does not read."""
    used = shape.strip("{}").split(", ")
    sections = record.get("sections")
    found = [key for key in TEXT_FIELDS & record.keys() if key not in used and record[key]]
    if "sections" in used and isinstance(sections, list) and any("sections" in section for section in sections):
        found.append("sections in sections")
    return [f"{key}, beside {shape}" for key in sorted(found)]


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
    """A field as text: a number is written out, null and absence are empty; else a ValueError."""
    value = record.get(key)
    if type(value) is str:
        return value
    if isinstance(value, float) and not math.isfinite(value):  # Python's JSON takes NaN, Infinity
        raise ValueError(f"{key} is {value}, no text")
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

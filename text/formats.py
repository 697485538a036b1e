"""File formats: a function for each kind of file splits it into records.

read_chunks() reads all files of a corpus so. One process does that, and the workers parse the
records (records.py). So the slow part runs on all cores.
"""

import codecs
import csv
import io
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from configurator import UserError
from hardware.disk import check_regular_file, file_sha256
from text.compression import Stream, decompressed, import_for
from text.settings import PrepareConfig

CHUNK = 1 << 20  # characters


@dataclass
class Source:
    """A file to read. Its SHA-256 is filled in when it has been read."""

    path: Path
    kind: str  # of READERS
    name: str  # the name that messages and meta.json show
    bytes: int = 0  # size on the disk, so of the compressed data
    changed: int = 0  # ctime in ns, since `cp -p` and `touch` can set mtime
    sha256: str = ""

    @classmethod
    def from_path(cls, path: Path, kind: str, name: str = "") -> "Source":
        """Return the Source of an existing file. name: shown in messages instead of the path."""
        stat = path.stat()
        return cls(path, kind, name or str(path), stat.st_size, stat.st_ctime_ns)

    def finish(self) -> None:
        """Fill in the SHA-256 after the file was read. Raises UserError if it has changed."""
        self.sha256 = self.sha256 or file_sha256(self.path)
        stat = self.path.stat()
        if (stat.st_size, stat.st_ctime_ns) != (self.bytes, self.changed):
            raise UserError(f"{self.name}: it changed while it was read: run the command again")


class Lines(NamedTuple):
    """Whole lines of a .jsonl file, as they are in the file.

    A worker splits and decodes them, since this module runs on one core only.
    """

    data: bytes
    first: int  # number of the first line


# (location, record) for each record of a file. The location is "file:line" or similar. The record
# is a text, Lines, the source code of a Python module in bytes, or a dict or other value from a
# parser. A record that is longer than cfg.max_record may be cut, but only beyond the limit:
# records.py refuses it.
Records = Iterator[tuple[str, Any]]


def characters(record: Any) -> int:
    """Return the number of characters of all texts in a record, however deep they are nested."""
    total = 0
    values = [record]
    for value in values:  # it grows
        if isinstance(value, str | bytes):
            total += len(value)
        elif isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list | Lines):
            values += value
    return total


# The byte order mark of UTF-16. The first of the two may also begin that of UTF-32.
UTF16_MARK = re.compile(rb"\xff\xfe(?!\0\0)|\xfe\xff")


def text_of(stream: Stream, cfg: PrepareConfig, newline: str | None = None) -> io.TextIOWrapper:
    """Return the text of a file, in UTF-16 if it has its mark, and otherwise in cfg.encoding."""
    is_utf8 = codecs.lookup(cfg.encoding).name == "utf-8"
    encoding = "utf-8-sig" if is_utf8 else cfg.encoding  # leaves out a byte order mark
    if UTF16_MARK.match(stream.peek(4)):
        encoding = "utf-16"
    return io.TextIOWrapper(stream, encoding, errors="surrogateescape", newline=newline)


# --------------------------------------------------------------------------------------------------
# Lines: JSON Lines, and text


def read_jsonl(stream: Stream, source: Source, cfg: PrepareConfig) -> Records:
    """Yield Lines of about a megabyte. Lines of UTF-16 become bytes in cfg.line_encoding."""
    lines: Any = stream
    if cfg.line_encoding != cfg.encoding or UTF16_MARK.match(stream.peek(4)):
        lines = text_of(stream, cfg)
    number = 1  # of the first line that has not been yielded
    while block := lines.read(CHUNK):
        end = lines.readline(cfg.max_record + 1)  # of the last line in the block
        skip_line(lines, end)
        block += end
        if isinstance(block, str):
            block = block.encode(cfg.line_encoding, "surrogateescape")
        data = block.removesuffix(b"\n")
        yield source.name, Lines(data, number)
        number += data.count(b"\n") + 1


def lines_of(f: io.TextIOBase, limit: int) -> Iterator[str]:
    """Yield each line of a text, but at most limit + 1 characters of it."""
    while line := f.readline(limit + 1):
        if len(line) > limit:
            skip_line(f, line)
        yield line


def skip_line(f: io.IOBase, line: str | bytes) -> None:
    """Read on to the end of a line, of which `line` has been read."""
    while line and line[-1:] not in ("\n", b"\n"):
        line = f.readline(CHUNK)


def read_txt(stream: Stream, source: Source, cfg: PrepareConfig) -> Records:
    """Yield the documents of a text file: the file, or its lines, or its blocks of lines."""
    f, limit = text_of(stream, cfg), cfg.max_record
    if cfg.txt == "file":
        yield source.name, f.read(limit + 1)
        return
    lines = enumerate(lines_of(f, limit), 1)
    for is_blank, block in itertools.groupby(lines, lambda numbered: numbered[1].isspace()):
        if is_blank:
            continue
        for number, text in block:
            if cfg.txt == "block":
                for _, line in block:  # the rest of it
                    if len(text) <= limit:  # else it is not kept: it may be the rest of the file
                        text += line
            # The last line end is removed: the block at the end of a file may have none, and equal
            # blocks must give equal texts.
            yield f"{source.name}:{number}", text.removesuffix("\n")


# --------------------------------------------------------------------------------------------------
# JSON: an array of any length, or a sequence of objects

BETWEEN_ELEMENTS = re.compile(r"[\s,]*")
# A number this close to the end of the window may continue after it: 12 as 123, 1.5 as 1.5e+10.
EDGE = 16
WINDOW = 1 << 16  # characters that are read at a time, at least


def object_of(pairs: list[tuple[str, Any]]) -> dict:
    """Return a JSON object. Raises ValueError if two keys are equal: one value would be lost."""
    if len(item := dict(pairs)) < len(pairs):
        raise ValueError("two keys of an object are equal")
    return item


def integer_of(digits: str) -> int | str:
    """Return a JSON integer, or its digits: Python refuses to convert 4,300 of them."""
    return int(digits) if len(digits) < 4000 else digits


DECODER = json.JSONDecoder(parse_int=integer_of, object_pairs_hook=object_of)


def read_json(stream: Stream, source: Source, cfg: PrepareConfig) -> Records:
    """Yield the elements of one array, or the values that follow one another in the file.

    Only one element and one window of the text are in memory at a time. Raises UserError where the
    text is not valid JSON, and for an element beyond the limit, since its end may never come.
    """
    f = text_of(stream, cfg)
    window = f.read(WINDOW).lstrip()
    closing = "]" if window.startswith("[") else ""
    start = len(closing)
    number = 1  # of the next element
    while True:
        start = next(BETWEEN_ELEMENTS.finditer(window, start)).end()
        record = problem = None
        try:
            record, end = DECODER.raw_decode(window, start)
        except (json.JSONDecodeError, RecursionError) as e:  # wrong, or cut by the window's end
            problem = e
            end = len(window)
        except ValueError as e:
            raise UserError(f"{source.name}: element {number}: {e}") from None
        size = end - start
        if end + EDGE > len(window) and size <= cfg.max_record:
            # The window doubles, so that a large element is decoded only a few times.
            more = f.read(max(WINDOW, len(window) - start))
            window = window[start:] + more
            start = 0
            if more:
                continue
            if window.strip() == closing:
                return
        if problem or size > cfg.max_record:
            first = max(0, getattr(problem, "pos", start) - 20)
            near = f"not valid JSON, or longer than --max_record_mb, near {window[first:][:40]!r}"
            raise UserError(f"{source.name}: element {number}: {near}")
        yield f"{source.name}: element {number}", record
        number += 1
        start += size


# --------------------------------------------------------------------------------------------------
# CSV, Parquet, and Python modules


def read_csv(stream: Stream, source: Source, cfg: PrepareConfig) -> Records:
    """Yield each row as a dict: column -> text. None is the key of fields beyond the header's.

    Raises UserError for a row that cannot be parsed: the start of the next row is then unknown.
    """
    csv.field_size_limit(cfg.max_record)  # else an unclosed quote takes the rest of the file
    dialect = "excel-tab" if source.kind == "tsv" else "excel"
    quoting = csv.QUOTE_MINIMAL if has_csv_quotes(source, cfg) else csv.QUOTE_NONE
    f = text_of(stream, cfg, newline="")
    rows = csv.DictReader(f, dialect=dialect, quoting=quoting, strict=True)
    start = 1  # the first line of the row
    try:
        names = [name.strip() for name in rows.fieldnames or []]
        # Excel writes a comma for each empty column at the end.
        header = rows.fieldnames = [name or f"column {i}" for i, name in enumerate(names, 1)]
        if len(set(header)) < len(header):
            raise csv.Error("two columns have the same name: rename one of them")
        start = rows.line_num + 1
        for row in rows:
            yield f"{source.name}:{rows.line_num}", row
            start = rows.line_num + 1
    except csv.Error as e:
        problem = f"not a row of a CSV file, or longer than --max_record_mb ({e})"
        raise UserError(f"{source.name}:{start}: {problem}") from None


# In a field that starts with a quote. """Return x.""" may also be text, of a Python module.
DOUBLED_QUOTE = re.compile(r'(?:^|\t)"(?:[^\t"]|"")*[^\t"]""[^\t\r\n"]')


def has_csv_quotes(source: Source, cfg: PrepareConfig) -> bool:
    """Return whether the quotes in a table enclose fields, as in CSV, or are ordinary text.

    In a TSV, they enclose fields if one is doubled within a field, if the header is quoted, or if
    the first and last lines of a row are not both rows by themselves.
    """
    if source.kind == "csv":
        return True
    lines: list[str] = []  # of the current row
    header: set[int] = set()  # how many tabs its line has
    is_quoted = has_rows_within = False
    with open(source.path, "rb") as raw:
        f = text_of(decompressed(raw, source.name), cfg, newline="")
        rows = csv.reader((lines.append(line) or line for line in f), "excel-tab", strict=True)
        try:
            for row in rows:
                if DOUBLED_QUOTE.search("".join(lines)):
                    return True
                tabs = {lines[i].count("\t") for i in (0, -1)}
                header = header or tabs
                is_quoted |= rows.line_num == 1 and lines[0].startswith('"')
                if row and (len(lines) > 1 or tabs != {len(row) - 1}):
                    is_quoted |= tabs != header
                    has_rows_within |= tabs == header
                lines.clear()
        except csv.Error:
            return False
    return is_quoted and not has_rows_within


TIME = re.compile("physical_type: INT96|logical_type: (Time|Date)")  # of a Parquet column


def read_parquet(stream: Stream, source: Source, cfg: PrepareConfig) -> Records:
    """Yield each row as a dict: column -> value, None for a time that --fields does not name.

    pyarrow opens the file itself.
    """
    parquet = import_for(source.name, "pyarrow", "pyarrow.parquet")
    import pyarrow

    try:
        with parquet.ParquetFile(source.path, pre_buffer=False) as table:
            names = table.schema_arrow.names
            if len(set(names)) < len(names):
                raise ValueError("two columns have the same name: rename one of them")
            # Also within structs. Python has no type for nanoseconds, or for the year 10,000.
            leaves = map(table.schema.column, range(table.metadata.num_columns))
            columns = [c.path for c in leaves if cfg.chooses(c.path) or not TIME.search(f"{c}")]
            batches = table.iter_batches(256, columns=columns, use_threads=False)
            rows = (dict.fromkeys(names) | row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield f"{source.name}: row {number}", row
    except (pyarrow.ArrowException, ValueError, OverflowError) as e:  # also a date beyond Python's
        reason = str(e).splitlines()[0][:120]
        raise UserError(f"{source.name}: not a readable Parquet file ({reason})") from None


def read_module(stream: Stream, source: Source, cfg: PrepareConfig) -> Records:
    yield source.name, stream.read()


# Kind of file -> the function that yields its records, from its decompressed bytes.
READERS = {"jsonl": read_jsonl, "json": read_json, "csv": read_csv, "tsv": read_csv}
READERS |= {"txt": read_txt, "parquet": read_parquet}
# Suffix of a file -> its kind; "": it has data that cannot be read, so it must not be skipped.
KINDS = {f".{kind}": kind for kind in READERS} | {".ndjson": "jsonl", ".md": "txt", ".arrow": ""}
READERS["py"] = read_module  # docstrings.py lists these files


# --------------------------------------------------------------------------------------------------
# From the files of a corpus to chunks of records


class Chunk(NamedTuple):
    """Records, about a megabyte, that one worker parses."""

    records: list[tuple[str, Any]]  # as in Records
    bytes_read: int = 0  # bytes on the disk up to its end, summed over all files


def read_chunks(sources: list[Source], cfg: PrepareConfig) -> Iterator[Chunk]:
    """Yield the records of all files in order.

    A record that is much longer than cfg.max_record is never in memory as a whole. Raises UserError
    for a file that cannot be read, is damaged, or changes.
    """
    earlier = 0  # bytes of the files so far
    records: list[tuple[str, Any]] = []
    size = 0
    for source in sources:
        for position, location, record in read_source(source, cfg):
            records.append((location, record))
            size += 200 + characters(record)  # 200: a short record takes memory, too
            if size >= CHUNK:
                yield Chunk(records, earlier + position)
                records = []
                size = 0
        earlier += source.bytes
    if records:
        yield Chunk(records, earlier)


def read_source(source: Source, cfg: PrepareConfig) -> Iterator[tuple[int, str, Any]]:
    """Yield (bytes read, location, record) for each record of one file."""
    try:
        check_regular_file(source.path)
        with open(source.path, "rb") as raw:
            stream = decompressed(raw, source.name)
            for location, record in READERS[source.kind](stream, source, cfg):
                yield raw.tell(), location, record
        source.finish()
    except Exception as e:
        unreadable = (OSError, EOFError, zlib.error, lzma.LZMAError, UnicodeError)
        if not isinstance(e, unreadable) and type(e).__name__ != "ZstdError":
            raise
        # Only an error of the system has a strerror: the others are of a decompressor, or of
        # UTF-16, where surrogateescape cannot keep wrong bytes.
        damage = f"damaged or cut off, or not in --encoding={cfg.encoding} ({e})"
        raise UserError(f"{source.name}: {getattr(e, 'strerror', None) or damage}") from None

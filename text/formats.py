"""File formats: a Reader cuts the files of a corpus into records.

One process runs the Reader, and many processes parse what it found (records.py). So the slow part
runs on every core, in any order, while the position in the input stays one pair of numbers: the
file, and the record in it.
"""

import codecs
import csv
import io
import itertools
import json
import lzma
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from configurator import UserError
from text.settings import PrepareConfig
from text.sources import HashedFile, Source, decompressed, import_for

CHUNK = 1 << 20  # characters


# --------------------------------------------------------------------------------------------------
# What a Reader gives


class Lines(NamedTuple):
    """Whole lines of a .jsonl file, as they are in the file.

    A worker splits and decodes them, since everything that the Reader does runs on one core only.
    """

    data: bytes
    encoding: str
    first: int  # number of the first line


@dataclass
class Chunk:
    """Some records (about a megabyte) to parse together, and the Reader's position after them."""

    kind: str
    # (place, record). The place is "file:line" or similar. The record is a text, Lines, a dict or
    # other value from a parser, or a ValueError that says why the record cannot be read.
    records: list[tuple[str, Any]]
    file: int = 0  # the file that the position is in
    record: int = 0  # number of records of that file up to the position; Lines count as one
    bytes_read: int = 0  # bytes on the disk up to the position, of all files together


Records = Iterator[tuple[str, Any]]  # the records of a Chunk


@dataclass
class Reader:
    """Reads the records of all files in order, from any position on.

    limit: the greatest length of a record, in characters (in bytes where .jsonl is cut into lines
    before it is decoded). A longer record becomes a ValueError, and little more than `limit` of it
    is ever in memory.
    """

    sources: list[Source]
    cfg: PrepareConfig
    file: int = 0  # file and record: the position to begin at, as in a Chunk
    record: int = 0

    def __post_init__(self):
        self.limit = int(self.cfg.max_record_mb * 1e6)

    def chunks(self) -> Iterator[Chunk]:
        earlier = sum(s.bytes for s in self.sources[: self.file])  # bytes of the files so far
        chunk = Chunk("", [])
        size = 0
        for file in range(self.file, len(self.sources)):
            source = self.sources[file]
            skip = self.record if file == self.file else 0
            for number, bytes_read, place, record in self.records(source, skip):
                if chunk.records and (size >= CHUNK or chunk.kind != source.kind):
                    yield chunk
                    chunk = Chunk("", [])
                    size = 0
                chunk.kind = source.kind
                chunk.records.append((place, record))
                chunk.file = file
                chunk.record = number
                chunk.bytes_read = earlier + bytes_read
                size += 200 + characters(record)  # 200: so many short ones need memory, too
            earlier += source.bytes
        if chunk.records:
            yield chunk

    def records(self, source: Source, skip: int) -> Iterator[tuple[int, int, str, Any]]:
        """Yield (number of the record from 1, bytes read so far, place, record) of one file.

        The first `skip` records are read but not yielded. After the last record, the hash of the
        whole file is checked and stored in the source. Raises UserError for a file that cannot be
        read, is damaged, or changes.
        """
        try:
            with HashedFile(source.path) as raw:
                # The stream closes raw when it is garbage-collected, so it is kept to the end.
                stream = self.opened(source, raw)
                records = READERS[source.kind](stream, source, self)
                for number, (place, record) in enumerate(records, 1):
                    if number > skip:
                        yield number, raw.bytes_read, place, record
                while stream.read(1 << 20):
                    pass  # the hash includes bytes that no record needed
                source.check_unchanged(raw.digest.hexdigest())
        except Exception as e:
            unreadable = (OSError, EOFError, zlib.error, lzma.LZMAError, UnicodeError)
            if not isinstance(e, unreadable) and type(e).__name__ != "ZstdError":
                raise
            # Only an error of the system has a strerror: the others are of a decompressor, or of
            # UTF-16, where surrogateescape cannot keep wrong bytes.
            damage = f"damaged or cut off, or not in --encoding={self.cfg.encoding} ({e})"
            problem = getattr(e, "strerror", None) or damage
            raise UserError(f"{source.name}: {problem}") from None

    def opened(self, source: Source, raw: HashedFile) -> io.IOBase:
        """Return what a function in READERS reads: raw, or its decompressed bytes, or its text."""
        if source.kind in ("parquet", "py"):
            return raw
        stream = decompressed(io.BufferedReader(raw, 1 << 18), source.name)
        # In ASCII, GB18030 and UTF-8, but not in UTF-16, a byte 0x0A is always a line end.
        if source.kind in ("jsonl", "ndjson") and "\n".encode(self.cfg.encoding) == b"\n":
            return stream
        is_utf8 = codecs.lookup(self.cfg.encoding).name == "utf-8"
        encoding = "utf-8-sig" if is_utf8 else self.cfg.encoding  # leaves out a byte order mark
        newline = "" if source.kind in ("csv", "tsv") else None
        return io.TextIOWrapper(stream, encoding, errors="surrogateescape", newline=newline)


def characters(record: Any, limit: float = math.inf) -> int:
    """Return how many characters all texts in a record have, however deep they are nested.

    Lists without texts are passed by. With a limit, it stops to count beyond that.
    """
    total = 0
    values = [record]
    for value in values:  # it grows
        if total > limit:
            break
        if isinstance(value, str | bytes):
            total += len(value)
        elif isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list | Lines) and set(map(type, value)) - {int, float, type(None)}:
            values += value
    return total


def too_long(limit: int) -> ValueError:
    """Return what stands in place of a record that is longer than the limit."""
    return ValueError(f"longer than --max_record_mb={limit / 1e6:g}")


# --------------------------------------------------------------------------------------------------
# Lines: JSON Lines, and text


def read_jsonl(stream: io.IOBase, source: Source, reader: Reader) -> Records:
    """Yield Lines of about a megabyte. Those of a stream that is decoded (UTF-16) become UTF-8."""
    is_text = isinstance(stream, io.TextIOBase)
    newline = "\n" if is_text else b"\n"
    encoding = "utf-8" if is_text else reader.cfg.encoding
    number = 1  # of the first line that has not been yielded
    # No block is longer than the limit. So a line that lies within one block is not too long.
    while block := stream.read(min(CHUNK, reader.limit)):
        start = block.rfind(newline) + 1  # of the last line in the block
        end = stream.readline(reader.limit + 1)  # of that line
        is_long = len(block) - start + len(end.rstrip(newline)) > reader.limit
        if is_long:
            skip_line(stream, end)
        lines = block[:start] if is_long else block + end
        if lines:
            data = lines.encode(errors="surrogateescape") if is_text else lines
            yield source.name, Lines(data, encoding, number)
        number += lines.count(newline)
        if is_long:
            yield f"{source.name}:{number}", too_long(reader.limit)
            number += 1


def lines_of(f: io.TextIOBase, limit: int) -> Iterator[tuple[int, str]]:
    """Yield (number, line) for each line of a text.

    Of a line that is longer than the limit, only the first limit + 1 characters are given.
    """
    for number, line in enumerate(iter(lambda: f.readline(limit + 1), ""), 1):
        if len(line) > limit:
            skip_line(f, line)
        yield number, line


def skip_line(f: io.IOBase, line: str | bytes) -> None:
    """Read on to the end of a line, of which `line` has been read."""
    while line and line[-1:] not in ("\n", b"\n"):
        line = f.readline(CHUNK)


def read_txt(f: io.TextIOBase, source: Source, reader: Reader) -> Records:
    """Yield the documents of a text file: it is one, or its lines are, or its blocks of lines."""
    limit = reader.limit
    if reader.cfg.txt == "file":
        text = f.read(limit + 1)
        yield source.name, text if len(text) <= limit else too_long(limit)
        return

    def document_of(numbered: tuple[int, str]) -> tuple:
        """Return what is equal for neighbours if they are lines of one document."""
        number, line = numbered
        return line.isspace(), number if reader.cfg.txt == "line" else 0

    for (blank, _), lines in itertools.groupby(lines_of(f, limit), document_of):
        if blank:
            continue
        start = 0  # the number of its first line
        size = 0
        block = []
        for number, line in lines:
            start = start or number
            size += len(line)
            if size <= limit:  # else the block is not kept: it may be the rest of the file
                block.append(line)
        # The last line end is removed: the block at the end of a file may have none, and equal
        # blocks must give equal texts.
        text = "".join(block).removesuffix("\n")
        yield f"{source.name}:{start}", text if size <= limit else too_long(limit)


# --------------------------------------------------------------------------------------------------
# JSON: an array of any length, or objects one after the other

BETWEEN_ELEMENTS = re.compile(r"[\s,]*")
# A number this close to the end of the window may go on behind it: 12 as 123, 1.5 as 1.5e+10.
EDGE = 16
WINDOW = 1 << 16  # characters that are read at a time, at least
DECODER = json.JSONDecoder()


def read_json(f: io.TextIOWrapper, source: Source, reader: Reader) -> Records:
    """Yield the elements of one array, or the values that follow one another in the file.

    Only one element and one window of the text are in memory at a time. Raises UserError where the
    text is not valid JSON, and for an element beyond the limit, since its end may never come.
    """
    window = f.read(WINDOW).lstrip()
    closing = "]" if window.startswith("[") else ""
    window = window.removeprefix("[")
    at = 0
    number = 1  # of the next element
    while True:
        at = BETWEEN_ELEMENTS.match(window, at).end()
        problem = None
        try:
            record, end = DECODER.raw_decode(window, at)
        except (ValueError, RecursionError) as e:  # it is wrong, or cut by the window's end
            problem = e
            end = len(window)
        size = end - at
        if end + EDGE > len(window) and size <= reader.limit:
            # The window doubles, so that a large element is decoded only a few times.
            more = f.read(max(WINDOW, len(window) - at))
            window = window[at:] + more
            at = 0
            if more:
                continue
            if window.strip() == closing:
                return
        if problem or size > reader.limit:
            place = max(0, getattr(problem, "pos", at) - 20)
            near = f"not valid JSON, or longer than --max_record_mb, near {window[place:][:40]!r}"
            raise UserError(f"{source.name}: element {number}: {near}")
        yield f"{source.name}: element {number}", record
        number += 1
        at += size


# --------------------------------------------------------------------------------------------------
# CSV, Parquet, and the modules of the demo corpus


def read_csv(f: io.TextIOWrapper, source: Source, reader: Reader) -> Records:
    """Yield each row as a dict: column -> text.

    Raises UserError for a row that cannot be parsed, since nothing tells where the next one begins.
    """
    csv.field_size_limit(reader.limit)  # else a quote that is left open takes the whole file

    def lines() -> Iterator[str]:
        for _, line in lines_of(f, reader.limit):
            if len(line) > reader.limit:
                raise csv.Error(too_long(reader.limit))
            yield line

    dialect = "excel-tab" if source.kind == "tsv" else "excel"
    rows = csv.DictReader(lines(), dialect=dialect, strict=True)  # an open quote is an error
    start = 1  # the line where the row begins
    try:
        header = rows.fieldnames or []
        for name in header:
            if header.count(name) > 1:
                raise csv.Error(f"the header has the column {name!r} twice: rename one of them")
        start = rows.line_num + 1
        for row in rows:
            if None in row:
                reason = "more fields than the header: quote a text that holds the separator"
                row = ValueError(reason)
            yield f"{source.name}:{rows.line_num}", row
            start = rows.line_num + 1
    except csv.Error as e:
        problem = f"not a row of a CSV file, or longer than --max_record_mb ({e})"
        raise UserError(f"{source.name}:{start}: {problem}") from None


def read_parquet(raw: HashedFile, source: Source, reader: Reader) -> Records:
    """Yield each row as a dict: column -> value. pyarrow opens the file itself."""
    parquet = import_for(source.name, "pyarrow", "pyarrow.parquet")
    import pyarrow

    try:
        with parquet.ParquetFile(source.path, pre_buffer=False) as table:
            batches = table.iter_batches(256, use_threads=False)
            rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(rows, 1):
                fits = characters(row) <= reader.limit
                yield f"{source.name}: row {number}", row if fits else too_long(reader.limit)
    except (pyarrow.ArrowException, ValueError, OverflowError) as e:  # also a date beyond Python's
        reason = str(e).splitlines()[0][:120]
        raise UserError(f"{source.name}: not a Parquet file to be read ({reason})") from None


def read_module(raw: HashedFile, source: Source, reader: Reader) -> Records:
    yield source.name, raw.read()


# The function for each kind of file. It reads the stream that Reader.opened() returns.
READERS = {"jsonl": read_jsonl, "ndjson": read_jsonl, "json": read_json, "csv": read_csv}
READERS |= {"tsv": read_csv, "txt": read_txt, "md": read_txt}
READERS |= {"parquet": read_parquet, "py": read_module}

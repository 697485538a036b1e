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
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from configurator import UserError
from text.sources import HashedFile, Source, decompressed

CHUNK = 1 << 20  # characters


# --------------------------------------------------------------------------------------------------
# What a Reader gives


class Lines(NamedTuple):
    """Whole lines of a .jsonl file, as they are in the file.

    A worker splits and decodes them, since everything that the Reader does runs on one core only.
    """

    data: bytes
    encoding: str
    file: str
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


# What the functions below yield: the records of a Chunk.
Records = Iterator[tuple[str, Any]]


@dataclass
class Reader:
    """Reads the records of all files in order, from any position on.

    limit: the greatest length of a record, in characters (in bytes where .jsonl is cut into lines
    before it is decoded). A longer record becomes a ValueError, and little more than `limit` of it
    is ever in memory.
    """

    sources: list[Source]
    encoding: str
    txt: str  # how a text file is cut into documents: "line", "block" or "file"
    limit: int
    file: int = 0  # file and record: the position to begin at, as in a Chunk
    record: int = 0

    def chunks(self) -> Iterator[Chunk]:
        before = sum(s.bytes for s in self.sources[: self.file])  # bytes of the files before
        chunk = Chunk("", [])
        size = 0
        for file in range(self.file, len(self.sources)):
            source = self.sources[file]
            skip = self.record if file == self.file else 0
            for number, bytes_read, where, record in self.records(source, skip):
                full = size >= CHUNK or len(chunk.records) >= 4096
                if chunk.records and (full or chunk.kind != source.kind):
                    yield chunk
                    chunk = Chunk("", [])
                    size = 0
                chunk.kind = source.kind
                chunk.records.append((where, record))
                chunk.file = file
                chunk.record = number
                chunk.bytes_read = before + bytes_read
                size += weight(record)
            before += source.bytes
        if chunk.records:
            yield chunk

    def records(self, source: Source, skip: int) -> Iterator[tuple[int, int, str, Any]]:
        """Yield (number of the record from 1, bytes read so far, place, record) of one file.

        The first `skip` records are read but not yielded. After the last record, the hash of the
        whole file is checked and stored in the source. Raises UserError for a file that cannot be
        read, is damaged, or changes.
        """
        try:
            with HashedFile(source) as raw:
                # The stream closes raw when it is garbage-collected, so it is kept to the end.
                stream = self.opened(source, raw)
                records = self.parsed(source, stream)
                for number, (where, record) in enumerate(records, 1):
                    if number > skip:
                        yield number, raw.bytes_read, where, record
                while raw.read(1 << 20):
                    pass  # the hash includes bytes that no record needed
                source.check_unchanged(raw.digest.hexdigest())
        except OSError as e:  # without strerror it is of gzip or bz2
            problem = e.strerror or f"damaged or cut off ({e})"
            raise UserError(f"{source.name}: {problem}") from None
        except (EOFError, zlib.error, lzma.LZMAError) as e:
            raise UserError(f"{source.name}: damaged or cut off ({e})") from None
        except UnicodeError as e:  # in UTF-16, surrogateescape cannot keep wrong bytes
            option = "set --encoding to the encoding of the file"
            raise UserError(f"{source.name}: not {self.encoding} ({e}): {option}") from None

    def opened(self, source: Source, raw: HashedFile) -> io.IOBase:
        """Return the stream that parsed() reads: raw, or its decompressed bytes, or its text."""
        if source.kind in ("parquet", "py"):
            return raw
        stream = decompressed(io.BufferedReader(raw, 1 << 18), source.name)
        if source.kind in ("jsonl", "ndjson") and has_ascii_line_ends(self.encoding):
            return stream
        is_utf8 = codecs.lookup(self.encoding).name == "utf-8"
        encoding = "utf-8-sig" if is_utf8 else self.encoding  # leaves out a byte order mark
        newline = "" if source.kind in ("csv", "tsv") else None
        return io.TextIOWrapper(stream, encoding, errors="surrogateescape", newline=newline)

    def parsed(self, source: Source, stream: io.IOBase) -> Records:
        if source.kind == "parquet":
            return read_parquet(source, self.limit)  # opens the file itself
        if source.kind == "py":
            return iter([(source.name, stream.read())])
        if isinstance(stream, io.TextIOWrapper):
            return READERS[source.kind](stream, source, self.txt, self.limit)
        return read_lines(stream, source, self.encoding, self.limit)


def weight(record: Any) -> int:
    """Return about how many characters of text a record has."""
    if isinstance(record, str | bytes):
        return len(record)
    if isinstance(record, Lines):
        return len(record.data)
    return 200 + characters(record)


def characters(record: Any) -> int:
    """Return how many characters all texts in a record have, however deep they are nested."""
    total = 0
    todo = [record]
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
    """Return what stands in place of a record that is longer than the limit."""
    return ValueError(f"longer than --max_record_mb={limit / 1e6:g}")


# --------------------------------------------------------------------------------------------------
# JSON Lines


def has_ascii_line_ends(encoding: str) -> bool:
    """Return whether a byte 0x0A is always a line end: in UTF-8 and GB18030, but not in UTF-16."""
    names = ("utf-8", "gb18030", "gbk", "gb2312", "ascii", "iso8859-1", "cp1252")
    return codecs.lookup(encoding).name in names


def read_lines(stream: io.BufferedIOBase, source: Source, encoding: str, limit: int) -> Records:
    """Yield a .jsonl file as Lines of about a megabyte; too_long() for a line beyond the limit."""
    rest: list[bytes] = []  # what has been read of the line that has not ended yet
    number = 1  # of that line
    length = 0  # of that line, so far
    # No block is longer than the limit. So a line that lies within one block is not too long.
    while data := stream.read(min(CHUNK, limit)):
        line_end = data.find(b"\n")
        length += len(data) if line_end < 0 else line_end
        if length > limit:
            rest = []
            if line_end < 0:
                continue
            yield f"{source.name}:{number}", too_long(limit)
            number += 1
            data = data[line_end + 1 :]
        cut = data.rfind(b"\n") + 1  # the end of the last whole line, 0 if there is none
        if cut:
            block = b"".join([*rest, data[:cut]])
            yield source.name, Lines(block, encoding, source.name, number)
            number += block.count(b"\n")
            rest = []
        rest.append(data[cut:])
        if line_end >= 0:
            length = len(data) - cut
    if length > limit:
        yield f"{source.name}:{number}", too_long(limit)
    elif any(rest):
        yield source.name, Lines(b"".join(rest), encoding, source.name, number)


def lines_of(f: io.TextIOWrapper, limit: int) -> Iterator[tuple[int, str | ValueError]]:
    """Yield (number, line) for each line of a text, with too_long() for a line beyond the limit."""
    for number in itertools.count(1):
        line = f.readline(limit + 1)
        if not line:
            return
        if len(line) <= limit or line.endswith("\n"):
            yield number, line
            continue
        del line  # frees its memory
        while (more := f.readline(CHUNK)) and not more.endswith("\n"):
            pass
        yield number, too_long(limit)


def is_blank(line: str | ValueError) -> bool:
    return isinstance(line, str) and line.isspace()


def read_jsonl(f: io.TextIOWrapper, source: Source, txt: str, limit: int) -> Records:
    """Yield each line that is not blank, for the encodings that read_lines() cannot cut."""
    for number, line in lines_of(f, limit):
        if not is_blank(line):
            yield f"{source.name}:{number}", line


# --------------------------------------------------------------------------------------------------
# JSON: an array of any length, or objects one after the other

BETWEEN_ELEMENTS = re.compile(r"[\s,]*")
# Where an error or the end of a number is this close to the end of the window, the window may have
# cut a value in two. What may be cut, such as -Infinity or the e+10 of 1.5e+10, is shorter.
EDGE = 16
WINDOW = 1 << 16  # characters that are read at a time, at least
DECODER = json.JSONDecoder()


def read_json(f: io.TextIOWrapper, source: Source, txt: str, limit: int) -> Records:
    """Yield the elements of one array, or the values that follow one another in the file.

    Only one element and one window of the text are in memory at a time. Raises UserError where the
    text is not valid JSON, and for an element beyond the limit, since its end may never come.
    """
    window = f.read(1)
    while window.isspace():
        window = f.read(1)
    in_array = window == "["
    if in_array:
        window = ""
    number = 0  # of the elements so far

    def error(at: int, why: str) -> UserError:
        near = window[max(0, at - 20) : at + 20]
        place = f"after element {number}, near {near!r} ({why})"
        return UserError(f"{source.name}: not valid JSON {place}: correct the file there")

    def beyond_limit() -> UserError:
        hint = "raise that limit, or look there for a quote or a bracket that is not closed"
        return UserError(f"{source.name}: element {number + 1}: {too_long(limit)}: {hint}")

    while True:
        # The window doubles, so that a large element is decoded from its start only a few times.
        more = f.read(max(WINDOW, len(window)))
        window += more
        at = BETWEEN_ELEMENTS.match(window).end()
        while at < len(window):
            if in_array and window[at] == "]":
                behind = itertools.chain([window[at + 1 :]], iter(lambda: f.read(WINDOW), ""))
                if any(map(str.strip, behind)):
                    raise error(at + 1, "text after the end of the array")
                return
            try:
                record, end = DECODER.raw_decode(window, at)
            except json.JSONDecodeError as e:
                is_cut = e.msg.startswith("Unterminated string") or e.pos + EDGE > len(window)
                if not (more and is_cut):
                    raise error(e.pos, e.msg) from None
                if len(window) - at > limit:
                    raise beyond_limit() from None
                break
            except RecursionError:
                raise error(at, "nested too deeply") from None
            except ValueError:
                raise error(at, "a number with too many digits") from None
            is_closed = isinstance(record, dict | list)
            if more and not is_closed and end + EDGE >= len(window):
                break  # a number at the edge may not be complete: 12 may go on as 123
            if end - at > limit:
                raise beyond_limit()
            number += 1
            yield f"{source.name}: element {number}", record
            at = BETWEEN_ELEMENTS.match(window, end).end()
        window = window[at:]
        if not more:
            if in_array:
                raise error(len(window), "the closing ] is missing")
            return


# --------------------------------------------------------------------------------------------------
# CSV, Parquet and text


def read_csv(f: io.TextIOWrapper, source: Source, txt: str, limit: int) -> Records:
    """Yield each row as a dict: column -> text.

    Raises UserError for a row that cannot be parsed, since nothing tells where the next one begins.
    """
    csv.field_size_limit(max(limit, csv.field_size_limit()))
    begin = 1  # the line where the current row begins
    held = 0  # how many characters of it have been read

    def lines() -> Iterator[str]:
        nonlocal held
        while line := f.readline(limit + 1):
            held += len(line)
            if held > limit:
                hint = "raise that limit, or close a quote that was left open"
                raise csv.Error(f"{too_long(limit)}: {hint}")
            yield line

    dialect = "excel-tab" if source.kind == "tsv" else "excel"
    rows = csv.DictReader(lines(), dialect=dialect, strict=True)  # an open quote is an error
    try:
        header = rows.fieldnames or []
        begin = rows.line_num + 1
        twice = [name for name in header if header.count(name) > 1]
        if twice:
            problem = f"the header has the column {twice[0]!r} twice: rename one of them"
            raise UserError(f"{source.name}:{rows.line_num}: {problem}")
        for row in rows:
            if None in row:
                why = "more fields than the header: quote a text that holds the separator"
                row = ValueError(why)
            yield f"{source.name}:{rows.line_num}", row
            begin = rows.line_num + 1
            held = 0
    except csv.Error as e:
        raise UserError(f"{source.name}:{begin}: not a row of a CSV file ({e})") from None


def read_parquet(source: Source, limit: int) -> Records:
    """Yield each row as a dict: column -> value."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        needed = "the package pyarrow: pip install pyarrow"
        raise UserError(f"{source.name}: .parquet needs {needed}") from None
    try:
        with pyarrow.parquet.ParquetFile(source.path, pre_buffer=False) as table:
            batches = table.iter_batches(256, use_threads=False)
            rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(rows, 1):
                fits = characters(row) <= limit
                yield f"{source.name}: row {number}", row if fits else too_long(limit)
    except pyarrow.ArrowException as e:
        reason = str(e).splitlines()[0][:120]
        raise UserError(f"{source.name}: not a whole Parquet file ({reason})") from None


def read_txt(f: io.TextIOWrapper, source: Source, txt: str, limit: int) -> Records:
    """Yield the documents of a text file. txt: what a document is; "line", "block" or "file"."""
    if txt == "line":
        yield from text_lines(f, source, limit)
    elif txt == "block":
        yield from text_blocks(f, source, limit)
    else:
        text = f.read(limit + 1)
        yield source.name, text if len(text) <= limit else too_long(limit)


def text_lines(f: io.TextIOWrapper, source: Source, limit: int) -> Records:
    for number, line in lines_of(f, limit):
        if not is_blank(line):
            fits = isinstance(line, str)
            yield f"{source.name}:{number}", line.rstrip("\n") if fits else line


def text_blocks(f: io.TextIOWrapper, source: Source, limit: int) -> Records:
    """Yield each block of lines between blank lines."""
    block: list[str] = []
    size = 0  # characters of the block
    begin = 0  # number of its first line; 0: no block has begun
    blank_at_end = [(0, "\n")]  # ends the last block
    for number, line in itertools.chain(lines_of(f, limit), blank_at_end):
        if not is_blank(line):
            begin = begin or number
            size += len(line) if isinstance(line, str) else limit + 1
            if size <= limit:
                block.append(line)
            else:
                block.clear()
        elif begin:
            # The last line end is removed: the block at the end of a file may have none, and equal
            # blocks must give equal texts.
            text = "".join(block).removesuffix("\n")
            yield f"{source.name}:{begin}", text if size <= limit else too_long(limit)
            block = []
            size = 0
            begin = 0


# One function for each kind of file that Reader.opened() opens as text.
READERS = {"jsonl": read_jsonl, "ndjson": read_jsonl, "json": read_json}
READERS |= {"csv": read_csv, "tsv": read_csv, "txt": read_txt, "md": read_txt}

"""File formats: a Reader cuts the files of a corpus into records, in one process.

What a record says is understood elsewhere (records.py), in many processes. So the slow part runs on every
core, in whatever order, and a position in the input is one pair of numbers: the file, and the record in it.
"""

import codecs
import csv
import hashlib
import io
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from configurator import UserError
from text.sources import HashedFile, Source, decompressed


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

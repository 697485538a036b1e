"""Records become documents: parse a record, read its fields (shapes.py), and count the outcome.

Tokens come later (encode.py).
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from json import JSONDecodeError
from typing import Any, NamedTuple

from configurator import UserError, harmless
from text.chat import RECORD_FLAGS, SPECIAL, Parts, chatml, flag_parts, is_refused, turns_of
from text.docstrings import conversations, documentation
from text.formats import DECODER, Chunk, Lines, characters
from text.settings import PrepareConfig
from text.shapes import read_conversation, record_text

# Any other text counts as empty: join() makes ：。 of a section without a title and content.
NOT_BLANK = re.compile(r"[^\s：。]")

# The version of the rules by which a file becomes records, and a record a text, for meta.json.
RULES = 9

CHAT = "conversations"  # the report's name for their shapes


class Document(NamedTuple):
    """A document before it becomes tokens."""

    location: str  # file:line or similar
    parts: Parts  # its text, or the parts of a conversation (chat.py)
    utf8: bytes  # to_utf8() of them, without the flags
    characters: int  # of its record

    @property
    def texts(self) -> list[str]:
        return [part for part in self.parts if part is not SPECIAL]


@dataclass
class Tally:
    """Counts of the records by outcome. A record that is left out is counted with the reason."""

    records: int = 0
    # Of the records: "read", "bad". Of what is read of them: "text".
    characters: Counter = field(default_factory=Counter)
    bad: Counter = field(default_factory=Counter)  # reason -> records that could not be read
    dropped: Counter = field(default_factory=Counter)  # reason -> documents left out
    changed: Counter = field(default_factory=Counter)  # reason -> documents whose text was changed
    checked: int = 0  # documents whose tokens were decoded
    shapes: Counter = field(default_factory=Counter)  # {text}, {title, content}, ... -> records
    unread: Counter = field(default_factory=Counter)  # path of a field -> records that it is in
    unread_characters: Counter = field(default_factory=Counter)  # path -> characters of its texts
    separators: Counter = field(default_factory=Counter)  # of cfg.separators -> how often found
    # Name of a special token that a text contains -> how often. It is encoded as ordinary text.
    names: Counter = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)  # first bad records, as file:line: reason

    @property
    def has_conversations(self) -> bool:
        return any(shape.startswith(f"{CHAT} {{") for shape in self.shapes)

    def reject(self, where: str, reason: str) -> None:
        """Count a bad record."""
        self.bad[reason] += 1
        if len(self.examples) < 5:
            self.examples.append(f"{where}: {reason}")

    def leave_out(self, sizes: dict[str, int], records: Counter | None = None) -> None:
        """Count the fields that are not read, path -> characters, of a record or of several."""
        for path, size in sizes.items():
            name = path
            if name not in self.unread:
                # Keys may be data, such as names of people: they must not fill the memory.
                name = " ".join(harmless(path).split())[:80] if len(self.unread) < 200 else "others"
            self.unread[name] += records[path] if records else 1
            self.unread_characters[name] += size

    def add(self, other: "Tally") -> None:
        self.records += other.records
        self.checked += other.checked
        for name, counts in vars(self).items():
            if isinstance(counts, Counter) and not name.startswith("unread"):
                counts.update(getattr(other, name))
        self.leave_out(other.unread_characters, other.unread)
        self.examples = (self.examples + other.examples)[:5]


def check_bad(tally: Tally, cfg: PrepareConfig, records: int) -> None:
    """Raise UserError if more than the fraction max_bad of `records`, or of their text, is bad."""
    bad, n, size = sum(tally.bad.values()), tally.records, tally.characters
    if bad > cfg.max_bad * records or size["bad"] * n > cfg.max_bad * size["read"] * records:
        problem = f"{bad:,} of {n:,} so far, {size['bad']:,} of {size['read']:,} characters"
        problem = f"bad records: {problem}, above --max_bad={cfg.max_bad:g}"
        raise UserError(
            f"{problem}: correct these records, or raise max_bad; the first: {tally.examples[0]}"
        )


def check_unread(tally: Tally, cfg: PrepareConfig) -> None:
    """Raise UserError if more text is not read than read, unless a setting chose that."""
    unread, read = tally.unread_characters, tally.characters["text"]
    if unread.total() > read and not (cfg.fields or cfg.allow_unread):
        most = ", ".join(f"{path} ({size:,})" for path, size in unread.most_common(5))
        problem = f"{unread.total():,} characters are not read, and {read:,} are: {most}"
        ways = "give --allow_unread, or choose by --fields=NAME,NAME (not in conversations)"
        raise UserError(f"--input: {problem}: {ways}")


# --------------------------------------------------------------------------------------------------
# From a chunk to documents


def documents(chunk: Chunk, cfg: PrepareConfig, tally: Tally) -> Iterator[Document]:
    """Yield each document in a chunk. All records are counted in `tally`.

    Raises UserError for a text file that --input names and that cannot be read.
    """
    records = (unpack(location, record, cfg) for location, record in chunk.records)
    for location, record, size in itertools.chain.from_iterable(records):
        tally.records += 1
        tally.characters["read"] += size
        try:
            if size > cfg.max_record:
                raise ValueError(f"longer than --max_record_mb={cfg.max_record_mb:g}")
            parts, flags, shape = parse_record(record, cfg, tally)
            # Its hash decides the split, and must not depend on which answers are learned.
            utf8 = to_utf8(parts, cfg.encoding)
        except (ValueError, RecursionError) as e:
            tally.characters["bad"] += size
            line = f", line {e.args[1]}" if isinstance(record, str) and e.args[1:] else ""
            if location in cfg.input:  # the record is the whole file
                raise UserError(f"--input {location}{line}: {e.args[0]}") from None
            tally.reject(location + line, str(e.args[0]))
            continue
        tally.shapes[shape] += 1
        if not parts:
            tally.dropped["marked as not to be learned"] += 1
            continue
        found = [Document(location, parts + flags, utf8, size)]
        if cfg.separators and SPECIAL not in parts:
            (text,) = found[0].texts
            texts = re.split(f"({'|'.join(map(re.escape, cfg.split_at))})", text)
            tally.separators.update(texts[1::2])
            found = [Document(location, [t], t.encode(), len(t)) for t in texts[::2]]
        full = [document for document in found if any(map(NOT_BLANK.search, document.texts))]
        if not full:
            tally.dropped["empty"] += 1
        yield from full


def unpack(location: str, record: Any, cfg: PrepareConfig) -> Iterator[tuple[str, Any, int]]:
    """Yield (location, record, characters) for each record in a record of a Chunk.

    These are the lines of Lines that are not blank, decoded from JSON; the texts of a Python
    module, or with cfg.chat the conversations about it; and any other record itself. A line that
    is longer than cfg.max_record is not decoded.
    """
    if isinstance(record, bytes):
        for text in (conversations if cfg.chat else documentation)(record, location):
            yield location, text, characters(text)
    elif isinstance(record, Lines):
        for number, line in enumerate(record.data.split(b"\n"), record.first):
            place = f"{location}:{number}"
            if len(line) > cfg.max_record:
                yield place, None, len(line)
                continue
            # Files that were joined may have a byte order mark within.
            try:
                text = line.decode(cfg.line_encoding, "surrogateescape").removeprefix("\ufeff")
            except UnicodeDecodeError:  # UTF-7 and ISO-2022-JP: surrogateescape fails there
                text = "\udcff"
            if text and not text.isspace():
                yield place, json_value(text), len(text)
    else:
        yield location, record, characters(record)


def json_value(text: str) -> Any:
    """Return the value of a line of JSON, or the error that says what is wrong."""
    try:
        return DECODER.decode(text)
    except (JSONDecodeError, RecursionError):
        return ValueError("not JSON in one line: try --format=json or --encoding=utf-16")
    except ValueError as e:
        return e


def parse_record(record: Any, cfg: PrepareConfig, tally: Tally) -> tuple[Parts, Parts, str]:
    """Return (parts, flags, shape) of a record. Raises ValueError, which says what is wrong.

    A conversation that is not to be learned has no parts.
    """
    if isinstance(record, ValueError):
        raise record
    if isinstance(record, dict) and None in record:  # of read_csv()
        raise ValueError("more fields than the header: quote fields with a separator")
    if found := read_conversation(record, cfg.fields, cfg.chat):
        messages, shape, unread = found
        turns = turns_of(messages)
        is_learned = any(t.role == "assistant" and t.is_learned for t in turns)
        if isinstance(record, dict) and is_refused(record, RECORD_FLAGS):
            is_learned = False
        tally.leave_out(unread)
        tally.characters["text"] += sum(len(turn.content) for turn in turns)
        return chatml(turns) if is_learned else [], flag_parts(turns), f"{CHAT} {shape}"
    text, shape, unread = record_text(record, cfg.fields)
    tally.leave_out(unread)
    tally.characters["text"] += len(text)
    return [text], [], shape


def to_utf8(parts: Parts, encoding: str) -> bytes:
    """Return the texts in UTF-8, and 0xFF, which no UTF-8 has, for each special token.

    Raises ValueError for a lone surrogate, which has no UTF-8. encoding: of the file, which the
    texts were decoded from with surrogateescape.
    """
    try:
        return b"".join([b"\xff" if part is SPECIAL else part.encode() for part in parts])
    except UnicodeEncodeError as e:
        # surrogateescape makes such halves of bytes that it cannot decode, and JSON has \ud800.
        problem = f"a byte of another --encoding than {encoding}, or half a character"
        if name := chinese_encoding(e.object, encoding):
            problem = f"in {name}: iconv -f {name} -t utf-8 FILE, or, if all are, --encoding={name}"
        raise ValueError(problem, e.object.count("\n", 0, e.start) + 1) from None


def chinese_encoding(text: str, encoding: str) -> str:
    """Return the Chinese encoding of a text that was read in the wrong `encoding`; "" if none."""
    for name in ("gb18030", "big5"):
        with suppress(UnicodeError):
            decoded = text.encode(encoding, "surrogateescape").decode(name)
            # Other texts decode to few of the commonest characters. UTF-8 with a few wrong bytes
            # would become longer.
            if 100 * len(re.findall("[的一是不了在人有我]", decoded)) > len(decoded) < len(text):
                return name
    return ""

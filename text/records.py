"""Records become documents: parse a record, and join its fields to a text.

Tokens come later (encode.py).
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from configurator import UserError
from hardware.terminal import harmless
from text.chat import (
    FLAGS,
    MESSAGE_FIELDS,
    chatml,
    is_refused,
    turns_of,
    unread_fields,
    without_flags,
)
from text.docstrings import conversations, documentation
from text.formats import DECODER, Chunk, Lines, characters, too_long
from text.settings import FIELD, PrepareConfig

# Any other text counts as empty: join() makes ：。 of a section without a title and content.
NOT_BLANK = re.compile(r"[^\s：。]")

# The version of the rules by which a file becomes records, and a record a text, for meta.json.
RULES = 8

CONVERSATIONS = ("messages", "conversations", "conversation")  # fields that hold one
QUESTIONS = (("instruction", "input", "output"), ("prompt", "completion"))  # the last: the answer
CHAT = "conversations"  # the report's name for their shapes


class Document(NamedTuple):
    """A document before it becomes tokens."""

    location: str  # file:line or similar
    # Its text. A conversation is cut at its special tokens, which are not text, and after the
    # header of each message (chat.py).
    spans: list[list[str]]
    utf8: bytes  # of its text; 0xFF, which is not UTF-8, stands for each special token

    @property
    def texts(self) -> list[str]:
        return list(itertools.chain.from_iterable(self.spans))


@dataclass
class Tally:
    """Counts of the records by outcome. A record that is left out is counted with the reason."""

    records: int = 0
    characters: Counter = field(default_factory=Counter)  # of the records: "read", "bad"
    bad: Counter = field(default_factory=Counter)  # reason -> records that could not be read
    dropped: Counter = field(default_factory=Counter)  # reason -> documents left out
    changed: Counter = field(default_factory=Counter)  # reason -> documents whose text was changed
    shapes: Counter = field(default_factory=Counter)  # {text}, {title, content}, ... -> records
    unread: Counter = field(default_factory=Counter)  # field of conversations -> ignored in these
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

    def add(self, other: "Tally") -> None:
        self.records += other.records
        for name in ("characters", "bad", "dropped", "changed", "shapes", "unread", "names"):
            getattr(self, name).update(getattr(other, name))
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


# --------------------------------------------------------------------------------------------------
# From a chunk to documents


def documents(chunk: Chunk, cfg: PrepareConfig, tally: Tally) -> Iterator[Document]:
    """Yield each document in a chunk. All records are counted in `tally`.

    Raises UserError for a text file that --input names and that cannot be read.
    """
    records = (unpack(chunk.kind, location, record, cfg) for location, record in chunk.records)
    for location, record in itertools.chain.from_iterable(records):
        tally.records += 1
        tally.characters["read"] += characters(record)
        try:
            spans, shape = understand(chunk.kind, record, cfg, tally)
            # Its hash decides the split, and must not depend on which answers are learned.
            messages = without_flags(spans)
            utf8 = b"\xff".join(to_utf8("".join(span), cfg.encoding) for span in messages)
        except ValueError as e:
            tally.characters["bad"] += characters(record)
            line = f", line {e.args[1]}" if chunk.kind == "txt" and e.args[1:] else ""
            if chunk.kind == "txt" and location in cfg.input:  # the file is one record
                raise UserError(f"--input {location}{line}: {e.args[0]}") from None
            tally.reject(location + line, str(e.args[0]))
            continue
        if chunk.kind in ("csv", "tsv"):
            if any("\n" in (text or "") for text in record.values()):
                shape += " in rows that span lines"
            if None in record.values():
                shape += " in rows with fewer fields than the header"
        tally.shapes[shape] += 1
        if not spans:
            tally.dropped["marked as not to be learned"] += 1
            continue
        found = [Document(location, spans, utf8)]
        if cfg.separators and len(spans) == 1:
            names = sorted(map(str.strip, cfg.separators.split(",")), key=len, reverse=True)
            parts = re.split("|".join(map(re.escape, names)), spans[0][0])
            found = [Document(location, [[part]], part.encode()) for part in parts]
        full = [document for document in found if any(map(NOT_BLANK.search, document.texts))]
        if not full:
            tally.dropped["empty"] += 1
        yield from full


def unpack(kind: str, location: str, record: Any, cfg: PrepareConfig) -> Iterator[tuple[str, Any]]:
    """Yield (location, record) for each record in a record of a Chunk.

    These are the lines of Lines that are not blank; the texts of a Python module, or with cfg.chat
    the conversations about it; and any other record itself.
    """
    if kind == "py":
        for text in (conversations if cfg.chat else documentation)(record, location):
            yield location, text
    elif isinstance(record, Lines):
        encoding = cfg.encoding if cfg.has_byte_lines else "utf-8"
        for number, line in enumerate(record.data.split(b"\n"), record.first):
            # Files that were joined may have a byte order mark within.
            try:
                text = line.decode(encoding, "surrogateescape").removeprefix("\ufeff")
            except UnicodeDecodeError:  # UTF-7 and ISO-2022-JP: surrogateescape fails there
                text = "\udcff"
            if len(line) > cfg.max_record:
                yield f"{location}:{number}", too_long(cfg.max_record)
            elif text and not text.isspace():
                yield f"{location}:{number}", text
    else:
        yield location, record


def understand(
    kind: str, record: Any, cfg: PrepareConfig, tally: Tally
) -> tuple[list[list[str]], str]:
    """Return (spans, shape) of a record. Raises ValueError, which says what is wrong.

    A conversation that is not to be learned has no spans.
    """
    if isinstance(record, ValueError):
        raise record
    if kind == "txt":
        if 4 * record.count("\0") > len(record):
            raise ValueError("a quarter of it is NUL: of --encoding=utf-16-le or utf-16-be?")
        return [[record]], "plain text"
    if kind == "jsonl":
        try:
            record = DECODER.decode(record)
        except (ValueError, RecursionError):
            raise ValueError(
                "not JSON in one line: try --format=json or --encoding=utf-16"
            ) from None
    if isinstance(record, dict):
        messages, used = conversation_in(record, cfg)
        if used:
            messages = [*map(joined_content, messages)] if isinstance(messages, list) else messages
            turns = turns_of(messages)
            if not cfg.fields:
                tally.unread.update(unread_fields(record, used))
            message_fields = set().union(*(unread_fields(m, MESSAGE_FIELDS) for m in messages))
            tally.unread.update(f"{key} of messages" for key in message_fields)
            is_learned = any(t.role == "assistant" and t.is_learned for t in turns)
            spans = chatml(turns) if is_learned and not is_refused(record) else []
            return spans, f"{CHAT} {{{', '.join(used)}}}"
        # A label of a text may be a class. It is ignored, and so it is counted.
        flags = [key for key in FLAGS if key in record and is_refused({key: record[key]})]
        tally.unread.update(f"{key} of texts" for key in flags)
    text, shape = record_text(record, cfg.fields)
    return [[text]], shape


def conversation_in(record: dict, cfg: PrepareConfig) -> tuple[Any, list[str]]:
    """Return the messages of a record that is a conversation, and the fields that hold them.

    If the record is no conversation, there are no such fields. With cfg.chat, a question and its
    answer are a conversation: the fields of cfg.fields, or of QUESTIONS. A field `system` is the
    first message.
    """
    system = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    used = ["system"] * len(system)
    for key in CONVERSATIONS if not cfg.fields else ():
        # A conversation may also be the name of one.
        is_one = isinstance(messages := record.get(key), list) or key != "conversation"
        if is_one and messages not in (None, "", []):
            messages = system + messages if isinstance(messages, list) else messages
            return messages, [*used, key]
    known = [cfg.fields.split(",")] if cfg.fields else QUESTIONS
    for names in known if cfg.chat else ():
        if cfg.fields or (record.get(names[0]) is not None and names[-1] in record):
            read = chosen_fields if cfg.fields else get
            *questions, answer = [read(record, name) for name in names]
            messages = [{"role": "user", "content": "\n".join(filter(None, questions))}]
            messages.append({"role": "assistant", "content": answer})
            return system + messages, [*used, *names]
    return None, []


def joined_content(message: Any) -> Any:
    """Return a message whose content, if it is a list of texts, is joined to one text.

    Nothing is put between the texts, as in the chat templates of models.
    """
    if not isinstance(message, dict):
        raise ValueError(f"a conversation holds a {type(message).__name__} in place of a message")
    if isinstance(parts := message.get("content"), list):
        if all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
            return message | {"content": "".join(get(p, "text") or get(p, "value") for p in parts)}
    return message


def to_utf8(text: str, encoding: str) -> bytes:
    """Return the text in UTF-8. Raises ValueError for a lone surrogate, which has no UTF-8.

    encoding: of the file, which the text was decoded from with surrogateescape.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as e:
        # surrogateescape makes such halves of bytes that it cannot decode, and JSON has \ud800.
        problem = f"a byte of another --encoding than {encoding}, or half a character"
        if other := chinese_encoding(text, encoding):
            problem = f"in {other}: give --encoding={other}, or iconv -f {other} -t utf-8 FILE"
        raise ValueError(problem, text.count("\n", 0, e.start) + 1) from None


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


# --------------------------------------------------------------------------------------------------
# From a record with fields to a text


def record_text(record: Any, fields: str = "") -> tuple[str, str]:
    """Return (text, shape) of a record. Raises ValueError if it has no known shape.

    join() joins titles, summaries and sections. `fields` names other fields: a list
    `question,answer`, joined by line ends, or a template `问：{question}答：{answer}`.
    """
    if isinstance(record, str) and not fields:
        return record, "a text"
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, not an object: --format=json reads arrays")
    if fields:
        return chosen_fields(record, fields), fields
    sections = record.get("sections")
    if isinstance(sections, list) or isinstance(record.get("summary"), str):
        head = (get(record, "title"), get(record, "summary"))
        return join(head, pairs_of(sections)), "{title, summary, sections}"
    if isinstance(text := record.get("content"), str):
        if title := get(record, "title"):
            return join(None, [(title, text)]), "{title, content}"
        return text, "{content}"
    if isinstance(text := record.get("text"), str):
        return text, "{text}"
    if isinstance(text := record.get("completion"), str):
        if prompt := get(record, "prompt"):
            return f"{prompt}\n{text}", "{prompt, completion}"
        return text, "{completion}"
    if isinstance(record.get("instruction"), str) and isinstance(record.get("output"), str):
        parts = [get(record, key) for key in ("instruction", "input", "output")]
        return "\n".join(filter(None, parts)), "{instruction, input, output}"
    known = ("content", "text", "completion", "output", "instruction")
    if others := [name for name in known if not isinstance(record.get(name, ""), str)]:
        name = min(others, key=lambda name: record[name] is None)
        return record_text(record | {name: get(record, name)})  # or get() says what is wrong
    if any(record.get(key) == [] for key in CONVERSATIONS):
        raise ValueError("a conversation without messages")
    names = harmless(", ".join(map(str, record)))[:80]
    advice = "name others by --fields=NAME,NAME; jq -c '.NAME[]' FILE prints the records of a list"
    raise ValueError(f"{{{names}}} has no text in a known field: {advice}")


def get(record: dict, key: str) -> str:
    """Return a field as text: a number as its digits, null or a missing field as "".

    The texts of a list become lines. Raises ValueError for anything else.
    """
    value = record.get(key)
    if type(value) is str:
        return value
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if isinstance(value, float) and not math.isfinite(value):  # json reads NaN and Infinity
        raise ValueError(f"{key} is {value}, not text")
    if isinstance(value, int | float | None):
        return "" if value is None else str(value)
    raise ValueError(f"{key} is a {type(value).__name__}, not text")


def pairs_of(sections: Any) -> list[tuple[str, str]]:
    """Return (title, content) of each section. Raises ValueError if they have another form."""
    if sections is None:
        return []
    if not isinstance(sections, list) or not all(isinstance(s, dict) for s in sections):
        raise ValueError("sections is not a list of {title, content}")
    return [(get(s, "title"), get(s, "content")) for s in sections]


def join(head: tuple[str, str] | None, sections: list[tuple[str, str]]) -> str:
    """Return one text of a title and a summary, and of the titles and contents of sections.

    In Chinese and Japanese, as in Chinese encyclopedia corpora, it is `title：summary`, followed by
    `title：content。` for each section. In other languages it is `title: summary`, and a paragraph
    `title: content` for each section; what is empty is left out.
    """
    pairs = [head, *sections] if head else sections
    if is_chinese("".join(itertools.chain.from_iterable(pairs))):
        text = "：".join(head) if head else ""
        return text + "".join([f"{title}：{content}。" for title, content in sections])
    paragraphs = [": ".join(filter(str.strip, pair)) for pair in pairs]
    return "\n\n".join(filter(None, paragraphs))


def is_chinese(text: str) -> bool:
    """Return whether at least one letter in twenty is a Chinese character or Japanese kana.

    Only ASCII letters count as other letters. One in twenty is enough, because a Chinese text on
    programming or mathematics consists mostly of code and formulas.
    """
    if text.isascii():
        return False
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")  # (characters,)
    chinese = count_between(codes, 0x3040, 0x9FFF) + count_between(codes, 0x20000, 0x3FFFF)
    ascii_letters = count_between(codes | 32, ord("a"), ord("z"))
    return chinese > 0 and 20 * chinese >= chinese + ascii_letters


def count_between(codes: np.ndarray, low: int, high: int) -> int:
    # A code below `low` wraps around to a large number.
    return int(np.count_nonzero(codes - low <= high - low))


def chosen_fields(record: dict, fields: str) -> str:
    """Return the text of the fields that --fields names.

    The name a.b is the field a.b, or else the field b in the field a.
    """

    def value(name: str) -> str:
        if (full_name := name if name in record else name.strip()) in record:
            return get(record, full_name)
        *path, last = name.strip().split(".")
        inner = record
        for key in path:
            inner = inner.get(key) if isinstance(inner, dict) else None
        if not isinstance(inner, dict) or last not in inner:
            raise ValueError(f"no field {name!r}")
        return get(inner, last)

    if "{" in fields:
        return FIELD.sub(lambda m: value(m[1]), fields.replace("\\n", "\n"))
    return "\n".join(filter(None, map(value, fields.split(","))))

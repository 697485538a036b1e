"""Records become documents: parse a record, join its fields, clean the text. No tokens are known here."""

import ast
import inspect
import itertools
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from configurator import UserError
from text.formats import Chunk, Lines, Piece

BLANK = "：。 \t\r\n"  # a text of these alone is empty


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

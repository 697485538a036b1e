"""The shapes of a record: which of its fields are read, and how they become a text or messages.

They are tried in this order. Names are compared without case, and a field that holds nothing counts
as missing.

    conversation   the first of CONVERSATIONS, a list of messages, after the field `system`; or a
                   line that is such a list; with --chat, also a question and its answer
    question       a text of TEXTS, unless it holds the answer already; the question, CONTEXTS and
                   the answer, by the names of PAIRS
    text           `title`, `abstract`, and the first of TEXTS; a `summary` of it is not read
    encyclopedia   `title`, `summary` or `abstract`, and the sections, which may have sections
    others         `title`, and `abstract` or `completion`

--fields names other fields in place of these. Anything else is a bad record.

Each function that reads a field adds (id of the dict or list that holds it, its key) to a set of
what was read. unread() returns the rest of the record, which the report counts.
"""

import itertools
import math
import re
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np

from configurator import harmless
from text.chat import FLAGS, NO, RECORD_FLAGS, ROLES, YES
from text.settings import FIELD

CONVERSATIONS = ("messages", "conversations", "conversation")
TEXTS = ("content", "text", "body", "article", "passage", "dialogue", "dialog", "document")
TEXTS += ("raw_content", "code", "story", "lyrics", "review")
# Names of a question, and those of its answer. A `solution` shows how to find the `answer`.
PAIRS = (
    (("user", "human"), ("assistant",)),
    (
        ("instruction", "question", "prompt", "query", "problem", "input", "inputs"),
        ("output", "solution", "answer", "response", "completion", "targets"),
    ),
)
CONTEXTS = ("context", "input")  # between a question and its answer
CHOICES = {"choices", "options", "option_a", "a"}  # of a question: fields that need a template
# Of a section.
HEADINGS = ("title", "heading", "name")
PARAGRAPHS = ("content", "text", "paragraphs")
# A string that is no text: a URL, a date, a short word with a digit or a sign as in an id or a
# path, a long one as in base64.
NO_TEXT = re.compile(
    r"\w+:(//|\w+/\w+;)[!-~]*|[\d\s:/.,TZ+%-]*"
    r"|(?=\S*[\d_/\\@:=#])[!-z|~]{1,100}|(?=\S*\d)[\w+/=-]*",
    re.ASCII,
)
# A field with such a name may say what is to be learned, whatever it holds.
MARK = re.compile("mask|train|learn|loss|weight|label")
# Where a flag is obeyed, or says nothing.
OBEYED = {*RECORD_FLAGS} | {f"{name}[].{flag}" for name in CONVERSATIONS for flag in FLAGS}


@lru_cache(1024)  # the records of a corpus have the same names
def lower_names(names: tuple[str, ...]) -> dict[str, str]:
    """Return lower-case name -> name of each. A name in lower case comes before others."""
    lower = {name.strip().lower(): name for name in names} | {name: name for name in names}
    return {known: name for known, name in lower.items() if known}


class Fields:
    """The fields of a record, by names in lower case. read: see the top of this file."""

    def __init__(self, record: dict, read: set):
        self.record = record
        self.read = read
        self.names = lower_names(tuple(record))

    def value(self, name: str) -> Any:
        return self.record[self.names[name]] if name in self.names else None

    def first(self, names: tuple[str, ...]) -> str:
        """Return the first of these names that holds text, or else that exists; "" if none does."""
        if self.names.keys().isdisjoint(names):
            return ""
        present = [name for name in names if name in self.names]
        return next((name for name in present if holds_text(self.value(name))), present[0])

    def take(self, name: str) -> str:
        """Read a field as field_text() does."""
        if name not in self.names:
            return ""
        key = self.names[name]
        self.read.add((id(self.record), key))
        return field_text(self.record[key], key)

    def optional(self, name: str) -> str:
        """Read a field that may be missing, blank or false."""
        value = self.value(name)
        is_missing = value is False or (isinstance(value, str) and not value.strip())
        return "" if is_missing else self.take(name)


def as_text(value: Any) -> str | None:
    """Return a value as text: a number as its digits, null as "", a list of texts as lines.

    Returns None for anything else.
    """
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    is_number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return str(value) if is_number else None  # json reads NaN and Infinity


def holds_text(value: Any) -> bool:
    """Return whether a value is a text that is not blank, or a number."""
    text = as_text(value)
    return bool(text) and not text.isspace() and type(value) is not bool


def field_text(value: Any, name: str) -> str:
    """Return a field as as_text() does. Raises ValueError if it is no text."""
    text = as_text(value)
    if text is None:
        what = value if isinstance(value, float) else f"a {type(value).__name__}"
        way = {dict: f": name a field in it, {name}.NAME, by --fields", list: f": or {name}.0.NAME"}
        raise ValueError(f"{name} is {what}, not text{way.get(type(value), '')}")
    return text


def listed(record: dict) -> str:
    """Return the names of a record's fields for a message."""
    return f"{{{harmless(', '.join(map(str, record)))[:80]}}}"


@lru_cache(1024)
def is_mark(path: str) -> bool:
    return not path.endswith("]") and bool(MARK.search(path.rpartition(".")[2].lower()))


def unread(record: dict, read: set, obeyed: set[str]) -> dict[str, int]:
    """Return path -> characters of each field that holds text, and that was not read.

    A path is written as in jq: `meta.source`, `sections[].text`. Numbers, dates, URLs and ids are
    no texts. A MARK counts whatever it holds, unless it is OBEYED, with a value of `obeyed`.
    """
    found: dict[str, int] = {}
    values: list[tuple[str, Any]] = [("", record)]
    for path, value in values:  # it grows
        if isinstance(value, str):
            if not NO_TEXT.fullmatch(value):
                found[path] = found.get(path, 0) + len(value)
                continue
        elif isinstance(value, dict):
            here, start = id(value), f"{path}." if path else ""
            values += [(start + key, x) for key, x in value.items() if (here, key) not in read]
        elif isinstance(value, list | tuple):
            left = [x for i, x in enumerate(value) if (id(value), i) not in read]
            values += [(path if type(x) is str else f"{path}[]", x) for x in left]
        if isinstance(value, bytes) or is_mark(path):
            is_obeyed = path.lower() in OBEYED and str(value).lower() in obeyed
            if value not in (None, "", [], {}) and not is_obeyed:
                found.setdefault(path, 0)
    return found


# --------------------------------------------------------------------------------------------------
# Texts


def record_text(record: Any, fields: str = "") -> tuple[str, str, dict[str, int]]:
    """Return (text, shape, unread()) of a record that is no conversation.

    `fields` names other fields: a list `question,answer`, joined by line ends, or a template
    `问：{question}答：{answer}`. Raises ValueError if the record has no known shape.
    """
    if isinstance(record, str):
        if 4 * record.count("\0") > len(record):
            raise ValueError("a quarter of it is NUL: of --encoding=utf-16-le or utf-16-be?")
        return record, "plain text", {}
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise ValueError(f"a {kind}, not an object: in a .jsonl, --format=json reads arrays")
    item = Fields(record, set())
    if fields:
        text, shape = chosen_fields(record, fields, item.read), fields
    else:
        text, names = shaped_text(item)
        shape = f"{{{', '.join(names)}}}"
    return text, shape, unread(record, item.read, YES)


def shaped_text(item: Fields) -> tuple[str, list[str]]:
    """Return the text of a record, and the names of the fields that it was made of."""
    if "content" in item.names and str(item.value("role")).lower() in ROLES:
        raise ValueError("a single message: put all messages of a conversation into one list")
    name, names = item.first(TEXTS), question_and_answer(item)
    has_text = holds_text(item.value(name))
    if names and (not has_text or name in names):
        parts = {name: part for name in names if (part := item.optional(name))}
        return "\n".join(parts.values()), list(parts)
    if has_text:
        return titled_text(item, name)
    if isinstance(item.value("sections"), list) or isinstance(item.value("summary"), str):
        head = (item.optional("title"), item.optional(item.first(("summary", "abstract"))))
        return join(head, read_sections(item)), ["title", "summary", "sections"]
    if name := name or item.first(("abstract", "completion")):
        return titled_text(item, name)
    if any(item.value(name) == [] for name in CONVERSATIONS):
        raise ValueError("a conversation without messages")
    problem, advice = "no text in a known field", "name others by --fields=NAME,NAME"
    if name := item.first(PAIRS[1][0]):
        problem = "a question without an answer in a known field"
        advice = f"name it by --fields={item.names[name]},NAME, where NAME may be a.b or a.0"
    elif any(isinstance(x, list) and x and type(x[0]) is dict for x in item.record.values()):
        advice += "; jq -c '.NAME[]' FILE prints the records of a list"
    raise ValueError(f"{listed(item.record)} has {problem}: {advice}")


def titled_text(item: Fields, name: str) -> tuple[str, list[str]]:
    """Return shaped_text() of a record with a text. Its title and abstract come first."""
    names = [n for n in ("abstract",) if n != name and holds_text(item.value(n))] + [name]
    text = "\n\n".join([item.take(name) for name in names])
    if title := item.optional("title"):
        return join(None, [(title, text)]), ["title", *names]
    return text, names


def question_and_answer(item: Fields) -> list[str]:
    """Return the names of a question, of what belongs to it, and of its answer; [] if none.

    Raises ValueError if more than one field may be the question or the answer.
    """
    for questions, answers in PAIRS:
        question, answer = item.first(questions), item.first(answers)
        if question and answer:
            break
    else:
        return []
    named, full = item.names[question], item.names[answer]
    fields = f"--fields={named},{full}"
    others = {*questions, *answers} - {question, answer, *CONTEXTS}
    others -= {"answer"} if answer == "solution" else set()
    if others := [name for name in others if holds_text(item.value(name))]:
        raise ValueError(f"{', '.join(sorted(others))} beside {question} and {answer}: {fields}")
    if choices := [name for name in CHOICES if item.value(name)]:
        problem = f"{min(choices)} beside {question} and {answer}: write them into one text"
        template = f"{{{named}}} {{{item.names[min(choices)]}}} {{{full}}}"
        raise ValueError(f"{problem}, as by --fields='{template}'")
    texts = item.value(answer) if isinstance(item.value(answer), list) else [item.value(answer)]
    if len(texts) > 1:
        problem = f"{answer} is a list of {len(texts)} answers, not one"
        raise ValueError(f"{problem}: {fields}.0 reads the first")
    between = [name for name in CONTEXTS if name in item.names and name != question]
    text = item.first(TEXTS)
    passage = item.value(text)
    if holds_text(passage) and not all(str(text) in str(passage) for text in texts):
        return [text, question, *between, answer]
    return [question, *between, answer]


def read_sections(item: Fields) -> list[tuple[str, str]]:
    """Return (title, content) of each section of a record, and of the sections in it.

    Raises ValueError if they have another form, or hold text under unknown names alone.
    """
    sections = item.value("sections")
    if not isinstance(sections, list | None):
        raise ValueError(f"sections is a {type(sections).__name__}, not a list of sections")
    sections = sections or []
    with suppress(KeyError, TypeError):  # {title, content} alone: read three times as fast
        pairs = [(record["title"], record["content"]) for record in sections]
        kinds = set(map(type, itertools.chain.from_iterable(pairs)))
        if kinds == {str} and sum(map(len, sections)) == 2 * len(pairs):
            item.read.add((id(item.record), item.names["sections"]))
            return pairs
    pairs = []
    for record in sections:
        if not isinstance(record, dict):
            raise ValueError(f"a section is a {type(record).__name__}, not an object")
        section = Fields(record, item.read)
        title, text = section.take(section.first(HEADINGS)), section.take(section.first(PARAGRAPHS))
        inner = read_sections(section) if "sections" in section.names else []
        if not (text or inner) and unread(record, item.read, YES):
            raise ValueError(f"a section {listed(record)} has no {' or '.join(PARAGRAPHS)}")
        pairs += [(title, text), *inner] if title or text or not inner else inner
    return pairs


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


# --------------------------------------------------------------------------------------------------
# Conversations


def read_conversation(
    record: Any, fields: str, chat: bool
) -> tuple[list[dict], str, dict[str, int]] | None:
    """Return (messages, shape, unread()) of a record that is a conversation; else None.

    A message has a `role` and a `content`, whatever their names were. With `chat`, a question and
    its answer are a conversation, too: those that `fields` names, or those of PAIRS. Raises
    ValueError if the messages have another form.
    """
    if isinstance(record, list) and not fields and all(isinstance(m, dict) for m in record):
        record = {"messages": record}
    if not isinstance(record, dict):
        return None
    if not chat and lower_names(tuple(record)).keys().isdisjoint(CONVERSATIONS):
        return None
    item = Fields(record, set())
    if not fields and (name := conversation_name(item)):
        messages, names = read_messages(item.value(name), item.read), [name]
    elif chat and fields:
        names = fields.split(",")
        messages = dialogue([chosen_fields(record, name, item.read) for name in names])
    elif chat and (names := question_and_answer(item)):
        messages = dialogue([item.optional(name) for name in names])
    else:
        return None
    if system := item.optional("system"):
        messages = [{"role": "system", "content": system}, *messages]
        names = ["system", *names]
    return messages, f"{{{', '.join(names)}}}", unread(record, item.read, NO | YES)


def conversation_name(item: Fields) -> str:
    """Return the name of the field that holds a conversation, or "".

    The field `conversation` may also hold the name of one, and `messages` a number.
    """
    for name in CONVERSATIONS:
        kinds = list if name == "conversation" else list | str
        if isinstance(messages := item.value(name), kinds) and messages:
            return name
    return ""


def dialogue(texts: list[str]) -> list[dict]:
    """Return the messages of a question, which may have several parts, and its answer, the last."""
    question = "\n".join(filter(None, texts[:-1]))
    return [{"role": "user", "content": question}, {"role": "assistant", "content": texts[-1]}]


def read_messages(messages: Any, read: set) -> list[dict]:
    """Return the messages, each with `role`, `content` and its other fields, by lower-case names.

    A message without a role may be a question with its answer, and a system prompt before it.
    """
    if not isinstance(messages, list):
        raise ValueError(f"a conversation is a {type(messages).__name__}, not a list of messages")
    found = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} is a {type(message).__name__}, not an object")
        item = Fields(message, read)
        others = {name: item.value(name) for name in item.names}
        if role := item.optional(item.first(("role", "from"))):
            found.append(others | {"role": role, "content": read_content(item, number)})
        elif names := question_and_answer(item):
            if system := item.optional("system"):
                found.append({"role": "system", "content": system})
            found += [others | turn for turn in dialogue([item.optional(n) for n in names])]
        else:
            raise ValueError(f"message {number}, {listed(message)}, has no role or from")
    return found


def read_content(item: Fields, number: int) -> str:
    """Return the content of a message. Texts of a list are joined, with nothing in between.

    So do the chat templates of models. Raises ValueError for another form.
    """
    name = item.first(("content", "value", "text"))
    content = item.value(name)
    if isinstance(content, str | None):
        return item.take(name)
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        raise ValueError(f"message {number}: {name} is a {type(content).__name__}, not a text")
    item.read.update((id(part), "type") for part in parts)
    texts = [Fields(part, item.read) for part in parts]
    return "".join([text.take(text.first(("text", "value"))) for text in texts])


# --------------------------------------------------------------------------------------------------
# --fields


def chosen_fields(record: dict, fields: str, read: set) -> str:
    """Return the text of the fields that --fields names.

    The name a.b is the field a.b, or else the field b in the field a; a.0 is the first element of
    the list a.
    """

    def text(name: str) -> str:
        full = name if name in record else name.strip()
        inner: Any = record
        place = None
        for part in [full] if full in record else full.split("."):
            is_index = isinstance(inner, list) and part.isdecimal() and int(part) < len(inner)
            if not is_index and not (isinstance(inner, dict) and part in inner):
                raise ValueError(f"no field {name!r} in {listed(record)}")
            key = int(part) if is_index else part
            place = id(inner), key
            inner = inner[key]
        read.add(place)
        return field_text(inner, name)

    if "{" in fields:
        return FIELD.sub(lambda m: text(m[1]), fields.replace("\\n", "\n"))
    return "\n".join(filter(None, map(text, fields.split(","))))

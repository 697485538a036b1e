"""The shapes of a record: which of its fields are read, and how they become a text or messages.

They are tried in this order. Names are compared without case, and a field that holds nothing counts
as missing. What a shape does not read is returned with it, and the report counts it.

    conversation   the first of CONVERSATIONS, a list of messages, after the field `system`; or a
                   line that is such a list
    dialogue       with --chat: the first of QUESTIONS, `context` and `input`, the first of ANSWERS
    text           `title`, `abstract`, and the first of TEXTS; a `summary` of it is not read
    instruction    without --chat: the fields of a dialogue, as lines
    encyclopedia   `title`, `summary` or `abstract`, and the sections, which may have sections

--fields names other fields in place of these. Anything else is a bad record.
"""

import itertools
import math
import re
from functools import lru_cache
from typing import Any

import numpy as np

from hardware.terminal import harmless
from text.chat import FLAGS, NO, YES
from text.settings import FIELD

CONVERSATIONS = ("messages", "conversations", "conversation")
TEXTS = ("content", "text", "body", "article", "dialogue", "dialog", "document", "raw_content")
QUESTIONS = ("instruction", "question", "prompt", "query", "problem", "input", "user", "human")
ANSWERS = ("output", "answer", "response", "completion", "solution", "assistant")
# Of a section.
HEADINGS = ("title", "heading", "name")
PARAGRAPHS = ("content", "text", "paragraphs")
CONTEXTS = ("context", "input")  # between a question and its answer
# A string that is no text: a URL, a word with a digit or a sign as in an id or a path, a date.
NO_TEXT = re.compile(r"\w+://\S*|(?=\S*[\d_/\\@:=#])[!-~]*|[\d\s:/.,TZ+%-]*")
# A field of a conversation with such a name may say what is to be learned, whatever it holds.
MARK = re.compile("mask|train|learn|loss|weight|label")
EMPTY = (None, "", [], {})


@lru_cache(1024)  # the records of a corpus have the same names
def lower_names(names: tuple[str, ...]) -> dict[str, str]:
    """Return lower-case name -> name of each. A name in lower case comes before others."""
    return {name.strip().lower(): name for name in names} | {name: name for name in names}


class Fields:
    """The fields of a record, by names in lower case, and `rest`: what has not been read of it."""

    def __init__(self, record: dict):
        self.record = record
        self.rest = dict(record)
        self.names = lower_names(tuple(record))

    def value(self, name: str) -> Any:
        return self.record.get(self.names.get(name))

    def first(self, names: tuple[str, ...]) -> str:
        """Return the first of these names that holds text, or else that exists; "" if none does."""
        for name in names:
            if name in self.names and holds_text(self.value(name)):
                return name
        return next((name for name in names if name in self.names), "")

    def take(self, name: str) -> str:
        """Return a field as get() does. It counts as read then."""
        key = self.names.get(name, name)
        text = get(self.record, key)
        self.rest.pop(key, None)
        return text


def holds_text(value: Any) -> bool:
    """Return whether get() reads a value as a text that is not blank."""
    if isinstance(value, str):
        return value != "" and not value.isspace()
    if isinstance(value, list):
        return all(isinstance(text, str) for text in value) and any(map(str.strip, value))
    return isinstance(value, int | float) and math.isfinite(value)


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


def listed(record: dict) -> str:
    """Return the names of a record's fields for a message."""
    return f"{{{harmless(', '.join(map(str, record)))[:80]}}}"


@lru_cache(1)
def paths_of(fields: str) -> set[str]:
    """Return the paths of the fields that --fields names; a list that a.0 names is read."""
    names = FIELD.findall(fields) or [*filter(None, fields.split(","))]
    return {re.sub(r"\.\d+$", "", name.strip()) for name in names} | {*names}


@lru_cache(1024)
def mark_of(path: str) -> str:
    """Return the name at the end of a path if it is a MARK, else ""."""
    name = path.rpartition(".")[2]
    return name if MARK.search(name) and not name.endswith("]") else ""


def unread(rest: dict, obeyed: set[str], fields: str = "") -> dict[str, int]:
    """Return path -> characters of each field that holds text in what was not read of a record.

    A path is written as in jq: `meta.source`, `sections[].text`. Numbers, dates, URLs and ids are
    no texts. A MARK counts whatever it holds, unless it is one of FLAGS with a value of `obeyed`.
    fields: --fields, whose names are left out.
    """
    read = paths_of(fields)
    found: dict[str, int] = {}
    values: list[tuple[str, Any]] = list(rest.items())
    for path, value in values:  # it grows
        if path in read or value in EMPTY:
            continue
        if isinstance(value, str) and not NO_TEXT.fullmatch(value):
            found[path] = found.get(path, 0) + len(value)
        elif (mark := mark_of(path)) and not (mark in FLAGS and str(value).lower() in obeyed):
            found.setdefault(path, 0)
        if isinstance(value, dict):
            values += [(f"{path}.{key}", inner) for key, inner in value.items()]
        elif isinstance(value, list):
            values += [(path if type(inner) is str else f"{path}[]", inner) for inner in value]
    return found


# --------------------------------------------------------------------------------------------------
# Texts


def record_text(record: Any, fields: str = "") -> tuple[str, str, dict]:
    """Return (text, shape, what was not read) of a record that is no conversation.

    `fields` names other fields: a list `question,answer`, joined by line ends, or a template
    `问：{question}答：{answer}`. Raises ValueError if the record has no known shape.
    """
    if isinstance(record, str) and not fields:
        return record, "a text", {}
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, not an object: --format=json reads arrays")
    if fields:
        return chosen_fields(record, fields), fields, unread(record, YES, fields)
    item = Fields(record)
    text, names = shaped_text(item)
    return text, f"{{{', '.join(names)}}}", unread(item.rest, YES)


def shaped_text(item: Fields) -> tuple[str, list[str]]:
    """Return the text of a record, and the names of the fields that it was made of."""
    name = item.first(TEXTS)
    if holds_text(item.value(name)):
        return titled_text(item, name)
    if names := question_and_answer(item):
        parts = {name: part for name in names if (part := item.take(name))}
        return "\n".join(parts.values()), list(parts)
    if isinstance(item.value("sections"), list) or isinstance(item.value("summary"), str):
        head = (item.take("title"), item.take(item.first(("summary", "abstract")) or "summary"))
        pairs, item.rest["sections"] = read_sections(item.value("sections"))
        return join(head, pairs), ["title", "summary", "sections"]
    if name := name or item.first(("abstract", "completion")):
        return titled_text(item, name)
    if any(item.value(name) == [] for name in CONVERSATIONS):
        raise ValueError("a conversation without messages")
    advice = "name others by --fields=NAME,NAME; jq -c '.NAME[]' FILE prints the records of a list"
    raise ValueError(f"{listed(item.record)} has no text in a known field: {advice}")


def titled_text(item: Fields, name: str) -> tuple[str, list[str]]:
    """Return shaped_text() of a record with a text. Its title and abstract come first."""
    names = [n for n in ("abstract",) if n != name and holds_text(item.value(n))] + [name]
    text = "\n\n".join([item.take(name) for name in names])
    if title := item.take("title"):
        return join(None, [(title, text)]), ["title", *names]
    return text, names


def question_and_answer(item: Fields) -> list[str]:
    """Return the names of a question, of what comes between, and of the answer; [] if none."""
    question, answer = item.first(QUESTIONS), item.first(ANSWERS)
    if not (question and answer):
        return []
    if isinstance(answers := item.value(answer), list) and len(answers) > 1:
        problem = f"{answer} is a list of {len(answers)} answers, not one"
        raise ValueError(f"{problem}: --fields={question},{answer}.0 reads the first")
    return [question, *[n for n in CONTEXTS if n in item.names and n != question], answer]


def read_sections(sections: Any) -> tuple[list[tuple[str, str]], list[dict]]:
    """Return (title, content) of each section and of the sections in it; and what was not read.

    Raises ValueError if they have another form, or hold text under unknown names alone.
    """
    if not isinstance(sections, list | None):
        raise ValueError(f"sections is a {type(sections).__name__}, not a list of sections")
    pairs, left = [], []
    for section in sections or ():
        if not isinstance(section, dict):
            raise ValueError(f"a section is a {type(section).__name__}, not an object")
        item = Fields(section)
        title, text = item.take(item.first(HEADINGS)), item.take(item.first(PARAGRAPHS))
        inner = []
        if "sections" in item.names:
            inner, item.rest[item.names["sections"]] = read_sections(item.value("sections"))
        if not (text or inner) and unread(item.rest, YES):
            raise ValueError(f"a section {listed(section)} has no {' or '.join(PARAGRAPHS)}")
        pairs += [(title, text), *inner] if title or text or not inner else inner
        left += [item.rest] if item.rest else []
    return pairs, left


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
    """Return (messages, shape, what was not read: path -> characters); None if it is a text.

    A message has a `role` and a `content`, whatever their names were. With `chat`, a question and
    its answer are a conversation, too: those that `fields` names, or the first of QUESTIONS and
    ANSWERS. Raises ValueError if the messages have another form.
    """
    if isinstance(record, list) and not fields and all(isinstance(m, dict) for m in record):
        record = {"messages": record}
    if not isinstance(record, dict):
        return None
    if not chat and lower_names(tuple(record)).keys().isdisjoint(CONVERSATIONS):
        return None
    item = Fields(record)
    if not fields and (name := conversation_name(item)):
        messages, item.rest[item.names[name]] = read_messages(item.value(name))
        names = [name]
    elif chat and fields:
        names = fields.split(",")
        messages = dialogue([chosen_fields(record, name) for name in names])
    elif chat and (names := question_and_answer(item)):
        messages = dialogue([item.take(name) for name in names])
    else:
        return None
    if system := item.take("system"):
        messages = [{"role": "system", "content": system}, *messages]
        names = ["system", *names]
    return messages, f"{{{', '.join(names)}}}", unread(item.rest, NO | YES, fields)


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


def read_messages(messages: Any) -> tuple[list[dict], list[dict]]:
    """Return the messages, each with `role` and `content`, and what was not read of each.

    A message without a role may be a question with its answer, and a system prompt before it.
    """
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError(f"a conversation is a {type(messages).__name__}, not a list of messages")
    items = [Fields(message) for message in messages]
    found = []
    for item in items:
        role, content = item.first(("role", "from")), item.first(("content", "value", "text"))
        if not role and (names := question_and_answer(item)):
            system = item.take("system")
            found += [{"role": "system", "content": system}] * bool(system)
            found += dialogue([item.take(name) for name in names])
        else:
            read = {"role": item.value(role), "content": joined_parts(item.value(content))}
            found.append(item.record | read)
            item.rest |= {item.names[name]: None for name in (role, content) if name}
    return found, [item.rest for item in items]


def joined_parts(content: Any) -> Any:
    """Return a content; if it is a list of texts, they are joined with nothing in between.

    So do the chat templates of models.
    """
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        if all(part.get("type") == "text" for part in content):
            return "".join(get(part, "text") or get(part, "value") for part in content)
    return content


# --------------------------------------------------------------------------------------------------
# --fields


def chosen_fields(record: dict, fields: str) -> str:
    """Return the text of the fields that --fields names.

    The name a.b is the field a.b, or else the field b in the field a; a.0 is the first element of
    the list a.
    """

    def text(name: str) -> str:
        if (key := name if name in record else name.strip()) in record:
            return get(record, key)
        inner = outer = record
        for key in name.strip().split("."):
            is_list = isinstance(inner, list)
            outer = {str(i): part for i, part in enumerate(inner)} if is_list else inner
            if not isinstance(outer, dict) or key not in outer:
                raise ValueError(f"no field {name!r}")
            inner = outer[key]
        return get(outer, key)

    if "{" in fields:
        return FIELD.sub(lambda m: text(m[1]), fields.replace("\\n", "\n"))
    return "\n".join(filter(None, map(text, fields.split(","))))

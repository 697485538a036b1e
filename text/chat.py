"""Conversations: from a record to messages, to ChatML, and which of its tokens are an answer.

In a data set, a conversation is a document in ChatML:

    <|im_start|>user
    Why is the sky blue?<|im_end|>
    <|im_start|>assistant
    Air scatters blue light most.<|im_end|>

with an eos after the last line end. <|im_start|> and <|im_end|> are tokens of their own, which no
text is encoded to: the same letters in a message are ordinary tokens. So the tokens alone say what
an answer is, and loss_on=answers needs nothing beside them.

Where some answers are not to be learned, a pair of marks for each answer stands at the end of the
document, with a line end between them if it is not to be learned. They come after all messages, so
they are in the context of none.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from text.tokenizer import IM_END, IM_START, Tokenizer

# What other data sets call the roles.
ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant"}
ROLES |= dict.fromkeys(("gpt", "bot", "chatgpt", "bing", "bard", "model"), "assistant")
# Fields that say whether a record or a message is to be learned, and the values that say so.
MARKS = ("label", "train", "loss", "weight")
NO = {"false", "0", "0.0"}
YES = {"true", "1", "1.0", "none"}
MESSAGE_FIELDS = {"role", "from", "content", "value"}


class Turn(NamedTuple):
    """A message of a conversation."""

    role: str
    content: str
    is_learned: bool = True  # of an answer, if loss_on=answers


def is_refused(item: dict) -> bool:
    """Return whether a record or a message says that it is not to be learned."""
    return any(str(item.get(key)).lower() in NO for key in MARKS)


def unread_fields(item: dict, read: Collection[str]) -> set[str]:
    """Return the fields of a record or a message that nothing reads."""
    marks = {key for key in MARKS if str(item.get(key)).lower() in NO | YES}
    return item.keys() - set(read) - marks


def turns_of(messages: Any) -> list[Turn]:
    """Return the messages of a conversation.

    An empty system message is left out. Raises ValueError unless user and assistant take turns,
    behind at most one system message, and the assistant has the last word.
    """
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError(f"a conversation is a {type(messages).__name__}, not a list of messages")
    turns = []
    for number, message in enumerate(messages, 1):
        name = message.get("from") if message.get("role") is None else message["role"]
        content = message.get("value") if message.get("content") is None else message["content"]
        role = ROLES.get(str(name))
        if role is None or not isinstance(content, str | None):
            accepted = "a text of system, user or assistant"
            raise ValueError(f"message {number}, of role {name!r:.40}, is not {accepted}")
        is_empty = not (content or "").strip()
        if role == "system" and number == 1 and is_empty:
            continue
        expected = "user" if not turns or turns[-1][0] != "user" else "assistant"
        if role != expected and (role != "system" or number > 1):
            raise ValueError(f"message {number}: the {role} speaks where the {expected} should")
        if is_empty:
            raise ValueError(f"message {number}, of the {role}, is empty")
        turns.append(Turn(role, content, not is_refused(message)))
    if not turns or turns[-1].role != "assistant":
        raise ValueError("a conversation without an answer at its end")
    return turns


def chatml(turns: list[Turn]) -> list[list[str]]:
    """Return the texts between the marks of a conversation: start, end, start, end, ...

    The header of a message, `user` and a line end, is a text of its own: its tokens are those of a
    prompt, even if the content begins with spaces, with which a line end may be one token.
    """
    pieces = [[""]]
    for turn in turns:
        pieces += [[f"{turn.role}\n", turn.content], ["\n"]]
    learned = [turn.is_learned for turn in turns if turn.role == "assistant"]
    if not all(learned):
        for is_learned in learned:
            pieces += [["" if is_learned else "\n"], [""]]
    return pieces


def without_flags(pieces: list[list[str]]) -> list[list[str]]:
    """Return the pieces of a document without those that say which answers are learned."""
    messages = sum(len(piece) == 2 for piece in pieces)  # a header and a content each
    return pieces[: 1 + 2 * messages]


def message_ids(role: str, content: list[int], tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a message with this content, and of the line end after it."""
    start, end = marks_of(tokenizer)
    header = tokenizer.encode(f"{role}\n").tolist()
    return [start, *header, *content, end, *tokenizer.encode("\n").tolist()]


def answer_header(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that each answer follows."""
    return [marks_of(tokenizer)[0], *tokenizer.encode("assistant\n").tolist()]


def question_ids(question: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a conversation that begins with a question, up to the answer."""
    message = message_ids("user", tokenizer.encode(question).tolist(), tokenizer)
    return [*tokenizer.prefix, *message, *answer_header(tokenizer)]


def marks_of(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of <|im_start|> and <|im_end|>; [] if the tokenizer lacks one of them."""
    marks = [tokenizer.special_id(name) for name in (IM_START, IM_END)]
    return [] if -1 in marks else marks


def answers_of(ids: np.ndarray, places: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return where each answer begins, and where it ends, in turn: (2 answers,).

    An answer begins after <|im_start|>assistant and its line end, and ends after its <|im_end|>.
    One that is cut by the end of train.bin ends before its eos. One that is not to be learned does
    not count.

    ids: of a split, (n,). places: where its eos and its marks are, in their order.
    """
    if not marks_of(tokenizer):
        return np.zeros(0, int)
    start_mark, end_mark = marks_of(tokenizer)
    header = tokenizer.encode("assistant\n")
    is_start = ids[places] == start_mark
    starts = places[is_start]
    begins = starts + 1 + len(header)
    ends = np.append(places, len(ids))[np.flatnonzero(is_start) + 1]  # the next mark, or an eos
    headers = np.minimum(starts[:, None] + 1 + np.arange(len(header)), len(ids) - 1)
    is_answer = (ids[headers] == header).all(axis=1) & (begins <= ends)
    gaps = ends - starts
    if (is_flag := gaps <= 2).any():  # a message has more tokens: its role, a line end, a content
        documents = np.searchsorted(places[ids[places] == tokenizer.eos_id], starts)
        is_flagged = is_answer & np.isin(documents, documents[is_flag])
        is_answer[is_flagged] = gaps[is_flag] == 1
    begins, ends = begins[is_answer], ends[is_answer]
    ends = ends + (ids[np.minimum(ends, len(ids) - 1)] == end_mark)
    return np.stack([begins, ends], axis=1).ravel()

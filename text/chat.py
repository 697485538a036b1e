"""Conversations: from a record to messages, to ChatML, and which of its tokens are an answer.

In a data set, a conversation is a document in ChatML:

    <|im_start|>user
    Why is the sky blue?<|im_end|>
    <|im_start|>assistant
    Air scatters blue light most.<|im_end|>

with an eos after the last line end. <|im_start|> and <|im_end|> are tokens of their own, which no
text is encoded to: the same letters in a message are ordinary tokens. So the tokens alone say what
an answer is, and loss_on=answers needs nothing beside them.
"""

from typing import Any

import numpy as np

from text.tokenizer import IM_END, IM_START, Tokenizer

# What other data sets call the roles.
ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant"}
ROLES |= dict.fromkeys(("gpt", "bot", "chatgpt", "bing", "bard", "model"), "assistant")


def turns_of(messages: Any) -> list[tuple[str, str]]:
    """Return (role, content) of each message of a conversation.

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
        turns.append((role, content))
    if not turns or turns[-1][0] != "assistant":
        raise ValueError("a conversation without an answer at its end")
    return turns


def chatml(turns: list[tuple[str, str]]) -> list[str]:
    """Return the texts between the marks of a conversation: start, end, start, end, ..."""
    pieces = [""]
    for role, content in turns:
        pieces += [f"{role}\n{content}", "\n"]
    return pieces


def question_ids(question: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a conversation that begins with a question, up to the answer."""
    start, end = marks_of(tokenizer)
    ids = list(tokenizer.prefix)
    for mark, text in ((start, f"user\n{question}"), (end, "\n"), (start, "assistant\n")):
        ids += [mark, *tokenizer.encode(text).tolist()]
    return ids


def marks_of(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of <|im_start|> and <|im_end|>; [] if the tokenizer lacks one of them."""
    marks = [tokenizer.special_id(name) for name in (IM_START, IM_END)]
    return [] if -1 in marks else marks


def answers_of(ids: np.ndarray, places: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return where each answer begins, and where it ends, in turn: (2 answers,).

    An answer begins behind the token with the line end after <|im_start|>assistant, and ends behind
    its <|im_end|>. One that val.bin begins with, because a few documents were cut by text, has no
    beginning and does not count; one that train.bin ends with ends before its eos.

    ids: of a split, (n,). places: where its eos and its marks are, in their order.
    """
    start_mark, end_mark = marks_of(tokenizer) or (-1, -1)
    header = tokenizer.encode("assistant")
    is_start = ids[places] == start_mark
    begins = places[is_start] + len(header) + 2
    ends = np.append(places, len(ids))[np.flatnonzero(is_start) + 1]  # the next mark, or an eos
    headers = np.minimum(places[is_start][:, None] + 1 + np.arange(len(header)), len(ids) - 1)
    is_answer = (ids[headers] == header).all(axis=1) & (begins <= ends)
    begins, ends = begins[is_answer], ends[is_answer]
    ends = ends + (ids[np.minimum(ends, len(ids) - 1)] == end_mark)
    return np.stack([begins, ends], axis=1).ravel()

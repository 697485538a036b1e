"""Conversations: from a record to messages, to ChatML, and the positions of the answers in it.

In a data set, a conversation is a document in ChatML:

    <|im_start|>user
    Why is the sky blue?<|im_end|>
    <|im_start|>assistant
    Air scatters blue light most.<|im_end|>

with an eos after the last line end. <|im_start|> and <|im_end|> are special tokens, to which no
text is encoded: the same letters in a message are ordinary tokens. So the tokens alone tell where
the answers are, and loss_on=answers needs no other file.

If some answers are not to be learned, the document ends with one pair of special tokens for each
answer. A line end between the two means that the answer is not to be learned. The pairs come after
all messages, so no message has them in its context.
"""

from typing import NamedTuple

import numpy as np

from text.tokenizer import IM_END, IM_START, Tokenizer

# Names of the roles in other data sets -> the role.
ROLES = dict.fromkeys(("system", "developer"), "system") | dict.fromkeys(("user", "human"), "user")
BOTS = ("assistant", "gpt", "bot", "chatgpt", "bing", "bard", "model")
ROLES |= dict.fromkeys(BOTS, "assistant")
# What tells the messages of a tool call: their roles, and fields of a message without a text.
TOOLS = ("tool", "function", "observation", "function_call", "tool_call", "ipython")
CALLS = ("tool_calls", "function_call")
# Fields that say whether a message is to be learned, or a record, and the values that say so.
FLAGS = ("label", "train", "loss", "weight")
RECORD_FLAGS = ("label", "train", "weight")  # the loss of a record is a measurement
NO = {"false", "0", "0.0"}
YES = {"true", "1", "1.0", "none"}


# The parts of a document: texts, which are encoded one by one, and SPECIAL for each special token:
# <|im_start|> and <|im_end|> take turns.
SPECIAL = None
Parts = list[str | None]


class Turn(NamedTuple):
    """A message of a conversation."""

    role: str
    content: str
    is_learned: bool = True  # of an answer, if loss_on=answers


def is_refused(item: dict, flags: tuple[str, ...] = FLAGS) -> bool:
    """Return whether a flag of a record or a message says that it is not to be learned."""
    return any(str(item[key]).lower() in NO for key in item if key.lower() in flags)


def turns_of(messages: list[dict]) -> list[Turn]:
    """Return the messages of a conversation, which have a `role` and a `content`.

    An empty system message is left out. Raises ValueError unless user and assistant take turns,
    after at most one system message, and the assistant has the last word.
    """
    turns = []
    for number, message in enumerate(messages, 1):
        name, content = message["role"], message["content"]
        is_empty = not content.strip()
        if name.lower() in TOOLS or (is_empty and any(map(message.get, CALLS))):
            raise ValueError(f"message {number}, of role {name}: tool calls are not supported")
        role = ROLES.get(name.lower())
        if role is None:
            problem = "is not of system, user or assistant"
            raise ValueError(f"message {number}, of {name:.40}, {problem}")
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


def chatml(turns: list[Turn]) -> Parts:
    """Return the parts of the messages of a conversation.

    The header of a message, `user` and a line end, is a part. So its tokens are those of a prompt,
    even if the content starts with spaces, with which a line end may form one token.
    """
    parts: Parts = []
    for turn in turns:
        parts += [SPECIAL, f"{turn.role}\n", turn.content, SPECIAL, "\n"]
    return parts


def flag_parts(turns: list[Turn]) -> Parts:
    """Return the parts after the messages, if some of the answers are not to be learned."""
    learned = [turn.is_learned for turn in turns if turn.role == "assistant"]
    parts: Parts = []
    for is_learned in learned if not all(learned) else []:
        parts += [SPECIAL, SPECIAL] if is_learned else [SPECIAL, "\n", SPECIAL]
    return parts


def message_ids(role: str, content: list[int], tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a message with this content, and of the line end after it."""
    start, end = chatml_ids(tokenizer)
    header = tokenizer.encode(f"{role}\n")
    return [start, *header, *content, end, *tokenizer.encode("\n")]


def answer_header(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the header of an answer."""
    return [chatml_ids(tokenizer)[0], *tokenizer.encode("assistant\n")]


def question_ids(question: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a conversation that starts with a question, up to the answer."""
    message = message_ids("user", tokenizer.encode(question), tokenizer)
    return [*tokenizer.prefix, *message, *answer_header(tokenizer)]


def chatml_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of <|im_start|> and <|im_end|>; [] if the tokenizer lacks one of them."""
    ids = [tokenizer.special_id(name) for name in (IM_START, IM_END)]
    return [] if -1 in ids else ids


def answer_bounds(ids: np.ndarray, positions: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return the start and the end of each answer, in turn: (2 answers,).

    An answer starts after <|im_start|>assistant and its line end, and ends after its <|im_end|>.
    An answer that is cut by the end of train.bin ends before its eos. Answers that are not to be
    learned are left out.

    ids: of a split, (n,). positions: those of the eos and of the special tokens, in order.
    """
    if not chatml_ids(tokenizer):
        return np.zeros(0, int)
    start_id, end_id = chatml_ids(tokenizer)
    header = tokenizer.encode("assistant\n")
    is_start = ids[positions] == start_id
    message_starts = positions[is_start]
    answer_starts = message_starts + 1 + len(header)
    ends = np.append(positions, len(ids))[np.flatnonzero(is_start) + 1]  # the next special token
    headers = np.minimum(message_starts[:, None] + 1 + np.arange(len(header)), len(ids) - 1)
    is_answer = (ids[headers] == header).all(axis=1) & (answer_starts <= ends)
    gaps = ends - message_starts
    if (is_flag := gaps <= 2).any():  # a message has more tokens: its role, a line end, a content
        documents = np.searchsorted(positions[ids[positions] == tokenizer.eos_id], message_starts)
        is_flagged = is_answer & np.isin(documents, documents[is_flag])
        is_answer[is_flagged] = gaps[is_flag] == 1
    answer_starts, ends = answer_starts[is_answer], ends[is_answer]
    ends = ends + (ids[np.minimum(ends, len(ids) - 1)] == end_id)
    return np.stack([answer_starts, ends], axis=1).ravel()

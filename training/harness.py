"""Questions with choices, and texts, judged as EleutherAI's lm-evaluation-harness judges them.

For both, the log-likelihood of a text after a context is the sum of ln p of its tokens, where the
model sees as many tokens before each as fit into block_size. The figures are those of the harness
(0.4.13) for a task of the kind multiple_choice, or loglikelihood_rolling.
"""

import json
import math
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from configurator import UserError
from hardware.disk import only_plain, read_object
from hardware.machine import Machine
from hardware.terminal import ProgressBar, plural
from model import GPT
from text.tokenizer import SentencePiece, Tiktoken

Tokenizer = SentencePiece | Tiktoken


@torch.no_grad()
def log_likelihood(model: GPT, context: list[int], ids: list[int], machine: Machine) -> float:
    """Return ln p(ids | context). Of the context, only the end counts if it is too long."""
    row = torch.tensor([(context + ids)[-model.config.block_size - 1 :]], device=machine.device)
    x, y = row[:, :-1], row[:, 1:].clone()
    y[:, : -len(ids)] = -1
    with machine.autocast():
        return -model(x, y, reduction="sum").item()


def first_token(folder: Path, tokenizer: Tokenizer) -> int:
    """Return what stands before a text that has no context: the bos that the folder of the model
    names, else the eos.
    """
    try:
        bos = read_object(folder / "tokenizer_config.json").get("bos_token")
    except (OSError, ValueError):  # a tokenizer without that file
        return [*tokenizer.prefix, tokenizer.eos_id][0]
    name = bos.get("content") if isinstance(bos, dict) else bos
    if not isinstance(name, str):
        return tokenizer.eos_id
    if tokenizer.kind == Tiktoken.kind:
        return tokenizer.encoding._special_tokens.get(name, tokenizer.eos_id)
    return tokenizer.sp.piece_to_id(name)


def judge_choices(
    path: Path, delimiter: str, model: GPT, tokenizer: Tokenizer, first: int, machine: Machine
) -> str:
    """Return how many questions the model answers rightly, in words.

    path: JSON Lines of {"question": text, "choices": [texts], "answer": number of the right one,
    from 0}. delimiter: what stands between a question and a choice. first: as first_token() says.
    The answer of the model is the choice with the highest log-likelihood per character; a second
    figure is without "per character". Behind ± is the standard error. Raises UserError for a wrong
    line.
    """
    right: list[bool] = []
    right_in_all: list[bool] = []  # by the log-likelihood of the whole choice
    model.eval()
    for where, record in records(path):
        question, choices, answer = question_of(where, record)
        scores = []
        for choice in choices:
            # A space belongs to the word behind it, as in the tokens of a text.
            context = question.rstrip()
            text = question[len(context) :] + delimiter + choice
            before = [*tokenizer.prefix, *encoded(tokenizer, context, where)]
            whole = [*tokenizer.prefix, *encoded(tokenizer, context + text, where)]
            if not question:
                before = [first]
                whole = [first, *whole[len(tokenizer.prefix) :]]
            elif not before:
                before = [first]
                whole = [first, *whole]
            ids = whole[len(before) :]
            if not 0 < len(ids) <= model.config.block_size:
                size = f"{len(ids)} tokens, the model sees {model.config.block_size}"
                raise UserError(f"{where}: the choice {choice[:40]!r} has {size}")
            scores.append(log_likelihood(model, before, ids, machine))
        per_character = [s / len(choice) for s, choice in zip(scores, choices, strict=True)]
        right.append(per_character.index(max(per_character)) == answer)
        right_in_all.append(scores.index(max(scores)) == answer)
    if not right:
        raise UserError(f"{path}: it has no questions")
    accuracy = f"accuracy {with_error(right)} by log-likelihood per character"
    accuracy += f", {with_error(right_in_all)} by log-likelihood"
    return f"{accuracy} | {plural(len(right), 'question')}"


def judge_texts(path: Path, model: GPT, tokenizer: Tokenizer, first: int, machine: Machine) -> str:
    """Return bits per byte and perplexities on texts, in words.

    path: JSON Lines of {"text": ...}. Each text is read from its beginning, and the tokenizer's
    prefix is counted as a part of it. Raises UserError for a wrong line.
    """
    T = model.config.block_size
    total = 0.0
    in_bytes = words = count = 0
    model.eval()
    for where, record in records(path):
        text = record.get("text")
        if not isinstance(text, str) or not text:
            raise UserError(f'{where}: expected {{"text": "..."}}, with a text that is not empty')
        ids = [*tokenizer.prefix, *encoded(tokenizer, text, where)]
        # Windows of T tokens to predict. The last one goes back as far as the model can see.
        for at in range(0, len(ids), T):
            begin = [first] if at == 0 else ids[max(0, at - T) : at]
            total += log_likelihood(model, begin, ids[at : at + T], machine)
        in_bytes += len(text.encode())
        words += len(re.split(r"\s+", text))  # as the harness counts them
        count += 1
    if not count:
        raise UserError(f"{path}: it has no texts")
    bits = -total / in_bytes / math.log(2)
    perplexities = f"byte perplexity {2**bits:.4f}"
    if -total / words < 700:  # e to the power of more is no number
        perplexities += f" | word perplexity {math.exp(-total / words):.4f}"
    return f"{bits:.4f} bits per byte | {perplexities} | {plural(count, 'text')}"


def records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("FILE, line N", record) of a file of JSON Lines, with a progress bar on a terminal."""
    try:
        only_plain(path)
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as e:
        raise UserError(f"{path}: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise UserError(f"{path}: not UTF-8 ({e.reason} at byte {e.start})") from None
    for number, line in enumerate(ProgressBar("judging", lines), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise UserError(f"{where}: not JSON ({e})") from None
        if not isinstance(record, dict):
            raise UserError(f"{where}: expected an object, found {line[:40]!r}")
        yield where, record


def question_of(where: str, record: dict[str, Any]) -> tuple[str, list[str], int]:
    """Return question, choices and answer of a record. Raises UserError if they are wrong."""
    question, choices, answer = (record.get(k) for k in ("question", "choices", "answer"))
    texts = [question, *choices] if isinstance(choices, list) else [None]
    if not all(isinstance(text, str) for text in texts) or not all(texts[1:]) or len(texts) < 3:
        shape = '{"question": "...", "choices": ["...", "..."], "answer": 0}'
        raise UserError(f"{where}: expected {shape}, with two choices or more, none of them empty")
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        most = len(choices) - 1
        raise UserError(f"{where}: answer={answer!r} is not the number of a choice, 0 to {most}")
    return question, choices, answer


def encoded(tokenizer: Tokenizer, text: str, where: str) -> list[int]:
    try:
        text.encode()  # half of a surrogate pair cannot be written
        return tokenizer.encode(text).tolist()
    except ValueError as e:
        raise UserError(f"{where}: it has no tokens: {e}") from None


def with_error(right: list[bool]) -> str:
    """Return the share of right answers with its standard error."""
    share = statistics.fmean(right)
    if len(right) < 2:
        return f"{share:.4f}"
    return f"{share:.4f} ± {statistics.stdev(right) / math.sqrt(len(right)):.4f}"

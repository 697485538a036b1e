"""Evaluation: the loss of a model on fixed windows of tokens, and a text that it writes."""

import codecs
import itertools
import math
import re
from dataclasses import replace
from fractions import Fraction

import torch

from configurator import UserError, note
from hardware.generation import generate
from hardware.machine import Machine, all_sum, autocast
from hardware.terminal import ProgressBar
from model import GPT
from text.chat import question_ids
from text.dataset import open_split, open_windows
from text.tokenizer import IM_END, IM_START, Tokenizer
from text.windows import DataSet, Documents, Loader, Windows
from training.batches import to_batch
from training.settings import TrainConfig


def evaluation_windows(sets: list[DataSet], cfg: TrainConfig) -> dict[str, list[Windows]]:
    """Return the windows of each evaluated loss: one Windows for each data set.

    val_loss and train_eval_loss, on val.bin and train.bin, use documents=stream whatever the
    setting is, so that runs can be compared. val_document_loss is on val.bin with documents=pack:
    each document is read alone; there is none if val.bin is one document. With loss_on=answers,
    each window has one conversation.
    Raises UserError if no answer would be evaluated.
    """
    T, loss_on = cfg.block_size, cfg.loss_on
    # A window that starts within an answer would ask for its rest without the question.
    documents: Documents = "pad" if loss_on == "answers" else "stream"
    kinds: dict[str, tuple[str, Documents]] = {
        "val_loss": ("val", documents),
        "train_eval_loss": ("train", documents),
    }
    if any(data.meta["splits"]["val"]["documents"] > 1 for data in sets):
        kinds["val_document_loss"] = ("val", "pack")
    windows = {
        key: [open_windows(d, split, T, documents=kind, loss_on=loss_on) for d in sets]
        for key, (split, kind) in kinds.items()
    }
    for key in [key for key in windows if key.startswith("val")]:
        for data, one in zip(sets, windows[key], strict=True):
            if not any(one.weights(start).any() for start in one.fixed_starts(cfg.eval_tokens)):
                problem = f"no answer of {data.name} is in an evaluated window"
                raise UserError(f"loss_on=answers: {problem}: raise block_size or --val_fraction")
    return windows


def first_words(data: DataSet, tokenizer: Tokenizer, limit: int) -> str:
    """Return the start of the first document of val.bin, or of its first question: whole words of
    one line, in at most `limit` characters.
    """
    ids = open_split(data.folder, data.meta, "val")[:4096].tolist()
    text = tokenizer.decode([*itertools.takewhile(lambda i: i != data.meta["eos_id"], ids)])
    question = text.partition(f"{IM_START}user\n")[2].partition(IM_END)[0]
    line = (question or text).strip().partition("\n")[0]
    # In Chinese and Japanese, a word may end after any character.
    whole = re.match(rf".{{0,{limit}}}(?![^\W\u3040-\u9fff])", line)
    return (whole and whole[0].rstrip()) or line[:limit]


def prompt_ids(
    cfg: TrainConfig, sets: list[DataSet], tokenizer: Tokenizer
) -> tuple[TrainConfig, list[int]]:
    """Return the settings with the text of sample_prompt, if it is auto, and the ids of the prompt.

    It is a question with loss_on=answers. Raises UserError if samples are wanted, and the ids are
    more than block_size, or the prompt cannot be encoded.
    """
    if cfg.sample_prompt == "auto":
        limit = min(32, cfg.block_size // 8)  # a character has at most four tokens
        cfg = replace(cfg, sample_prompt=first_words(sets[0], tokenizer, limit))
    if not cfg.sample_every:
        return cfg, []
    try:
        if cfg.loss_on == "answers":
            ids = question_ids(cfg.sample_prompt, tokenizer)
        else:
            ids = [*tokenizer.prefix, *tokenizer.encode(cfg.sample_prompt)]
    except ValueError as e:
        raise UserError(f"sample_prompt cannot be encoded: {e}") from None
    if len(ids) > (T := cfg.block_size):
        raise UserError(f"sample_prompt has {len(ids)} tokens, block_size is {T}: shorten it")
    note_unknown(cfg.sample_prompt, tokenizer)
    return cfg, ids or [tokenizer.eos_id]


def sample_length(sets: list[DataSet]) -> int:
    """Return the number of tokens of a sample: those of about 200 bytes of text."""
    val = sets[0].meta["splits"]["val"]
    return math.ceil(200 * val["tokens"] / val["bytes"])


def note_unknown(prompt: str, tokenizer: Tokenizer) -> None:
    """Print a note if the tokenizer has no token for some characters of a prompt."""
    if tokenizer.unk_id in tokenizer.encode(prompt):
        unknown = [c for c in sorted(set(prompt)) if tokenizer.unk_id in tokenizer.encode(c)]
        note(f"the tokenizer has no token for {', '.join(map(repr, unknown))}: the model reads unk")


def evaluate_all(
    model: torch.nn.Module,
    windows: dict[str, list[Windows]],
    cfg: TrainConfig,
    B: int,
    machine: Machine,
) -> dict[str, list[float]]:
    """Return the losses of evaluation_windows(): a key -> one loss for each data set.

    On train.bin, as many tokens are evaluated as on val.bin. Raises Stopped: see Machine.
    """
    losses: dict[str, list[float]] = {}
    for key, windows_of_sets in windows.items():
        losses[key] = []
        for one, val in zip(windows_of_sets, windows["val_loss"], strict=True):
            tokens = cfg.eval_tokens
            if key == "train_eval_loss":
                tokens = len(val.fixed_starts(tokens)) * cfg.block_size
            losses[key].append(evaluate(model, one, tokens, B, machine))
    return losses


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    windows: Windows,
    tokens: int,
    B: int,
    machine: Machine,
    bar: bool = False,
) -> float:
    """Return the mean loss, in nats per token, on about `tokens` tokens of a split (0: all of it).

    It is NaN if none of these tokens counts. Raises Stopped if a signal arrives at any rank.

    The windows are always the same. The ranks take turns, with B windows each.
    bar: show a progress bar if stderr is a terminal.
    """
    loader = Loader([windows], [Fraction(1)])
    model.eval()  # no dropout
    starts = windows.fixed_starts(tokens)
    count = len(starts)
    turn = B * machine.world  # windows that all ranks evaluate at the same time
    batches = range(machine.rank * B, math.ceil(count / turn) * turn, turn)
    totals = torch.zeros(2, device=machine.device)  # sum of the loss over targets; their number
    for start in ProgressBar("evaluating", batches, disable=None if bar else True):
        machine.stop_if_asked()
        # All batches have B windows, so that the model sees a single shape. The first windows fill
        # the last batch; their targets are set to -1, which the loss ignores.
        rows = loader.rows([(0, starts[i % count]) for i in range(start, start + B)])
        x, y, _, _ = to_batch(rows, machine.device)
        y[max(0, count - start) :] = -1
        with autocast(machine):
            totals[0] += model(x, y, eos_id=windows.eos_id, reduction="sum")
        totals[1] += (y >= 0).sum()
    model.train()
    loss_sum, targets = all_sum(totals).tolist()
    return loss_sum / targets if targets else math.nan


def write_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: list[int],
    length: int,
    seed: int,
    machine: Machine,
) -> str:
    """Return the model's continuation of a prompt: `length` tokens, or fewer if the document ends.

    Raises Stopped if a signal arrives at any rank. prompt: token ids.
    The seed of the random choices is fixed. This does not change the training, which sets a seed
    before each step.

    All tokens are generated even if the document ends early, so that all ranks call the model
    equally often: with sharded weights they must.
    Raises ArithmeticError if the output of the model is not finite.
    """
    torch.manual_seed(seed)
    idx = torch.tensor([prompt], device=model.wte.weight.device)  # (1, T)
    model.eval()  # no dropout
    tokens = []
    try:
        # A low temperature suits a model that has not learned much.
        for token in generate(model, idx, length, temperature=0.5):
            tokens.append(token)
            machine.stop_if_asked()
    finally:
        model.train()
    ends = {tokenizer.eos_id, tokenizer.special_id(IM_END)}  # the second ends an answer
    ids = itertools.takewhile(lambda token: token not in ends, torch.cat(tokens).tolist())
    text = b"".join(map(tokenizer.token_bytes, ids))
    # This decoder drops the last character if its bytes are incomplete.
    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(text)

"""Continue a text with a model, or measure its loss on a data set.

Without settings, the newest checkpoint of the newest run continues the run's sample_prompt, which
is also what it continued during the training. If that is empty, it begins a new document:

    python sample.py
    python sample.py --prompt "Robot.sing: Return" "RobotError: Raised when"
    python sample.py --ckpt out/demo/ckpt/step_00000800 --prompt "$(cat prompt.txt)"
    # three new documents
    python sample.py --prompt "" --num_samples 3
    # the checkpoint with the lowest validation loss
    python sample.py --ckpt out/demo --which best
    # a prompt a line, until Ctrl-D
    python sample.py --interactive
    # a conversation, with a model that was trained on conversations
    python sample.py --chat --system "You answer in one sentence."
    # two conversations of one question each
    python sample.py --chat --prompt "Why is the sky blue?" "What is a loop?"
    # loss, perplexity and bits per byte of a data set
    python sample.py --ckpt ../Qwen3-0.6B-Base --eval data/mine

A base model continues a text; it does not chat. With --chat, a model that was trained on
conversations sees all messages so far. When they no longer fit into its window, it does not see the
oldest of them, and a line says so. Without max_new_tokens, an answer ends where the model ends it,
or when the window is full.

A model folder is all that is needed: it holds the shape, the weights and the tokenizer. It may be a
checkpoint of train.py, or a GPT2LMHeadModel, Llama, Qwen2 or Qwen3 from anywhere.
nanoGPT's ckpt.pt also needs --tokenizer. A text starts after an eos, as the documents did in
training, and ends at the next eos. In a folder that train.py did not write, it starts as the
tokenizer there says. Let no prompt end in a space: the first token of a word has its own. A low
temperature suits a small model, since its unlikely tokens are noise; try 0.8 or 1 for a large one.
"""

import codecs
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, Literal

import torch

from configurator import UserError, note, parse, run
from hardware import kernels
from hardware.decoding import record_decoding
from hardware.device import pick_device, pick_dtype
from hardware.disk import read_object
from hardware.machine import Machine, memory_advice
from hardware.terminal import harmless, plural
from model import GPT, KVCache
from text.chat import marks_of
from text.dataset import DataSet, load_tokenizer, open_dataset, open_windows, verify
from text.hf_tokenizer import CHATML, find_tokenizer, read_json, tokenizer_of_model
from text.tokenizer import IM_END, IM_START, Tokenizer, same_ids
from training.checkpoint import newest_checkpoint
from training.evaluate import evaluate
from training.huggingface import NANOGPT, from_pretrained, unverified
from training.report import in_other_units
from training.runs import losses_of, newest_run


@dataclass(frozen=True)
class SampleConfig:
    # ---- What to continue ----
    ckpt: str = ""  # a model folder, or a run's folder out/RUN; default: the newest run
    which: Literal["newest", "best"] = "newest"  # of a run's checkpoints; best: by validation loss
    tokenizer: str = ""  # if the model has none: a folder, a .model or .tiktoken file, or gpt2, ...
    out_dir: str = "out"  # where the runs are
    prompt: tuple[str, ...] = ()  # texts to continue ('': a new document); default: sample_prompt
    interactive: bool = False  # read prompts from the terminal
    # ---- A conversation, in place of a text to continue ----
    chat: bool = False  # answer what is typed; or each prompt, in a conversation of its own
    system: str = ""  # the system message, with which a conversation begins
    # ---- How ----
    block_size: int = 0  # tokens in a window of chat or eval; 0: all that the model sees, to 1,024
    num_samples: int = 1  # continuations of each prompt, made in one batch
    max_new_tokens: int = 0  # of each text; 0: 256, chat: no limit
    temperature: float = 0.6  # 0: always the likeliest token; 1: the model's own probabilities
    top_k: int = 0  # choose among the k likeliest tokens; 0: all
    top_p: float = 0.95  # choose among the likeliest tokens that reach this probability; 1: all
    seed: int = 1337  # of the random choices
    # ---- Evaluation, in place of text ----
    eval: str = ""  # a data set's folder, data/NAME: measure the loss on its val.bin
    eval_tokens: int = 0  # of it, in whole windows, fixed and evenly spread; 0: all
    batch_size: int = 8  # windows at a time
    # ---- Device ----
    device: str = "auto"  # auto: cuda, then mps, then cpu
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # of weights and arithmetic

    def problems(self) -> list[str]:
        lowest = dict(num_samples=1, max_new_tokens=0, temperature=0, top_k=0)
        lowest |= dict(eval_tokens=0, block_size=0, batch_size=1)
        problems = [f"{k} must be at least {n}" for k, n in lowest.items() if getattr(self, k) < n]
        if not 0 <= self.seed < 2**63:
            problems.append("seed must be between 0 and 2^63")
        if not 0 < self.top_p <= 1:
            problems.append("top_p must be above 0 and at most 1")
        if self.prompt and self.interactive:
            problems.append("give prompt or interactive, not both")
        if self.chat and (self.interactive or self.eval or self.num_samples > 1):
            problems.append("chat goes without interactive, eval, num_samples")
        if self.system and not self.chat:
            problems.append("system is the first message of a conversation: add --chat")
        return problems


# --------------------------------------------------------------------------------------------------
# The model and its tokenizer


def window(cfg: SampleConfig, model: GPT) -> int:
    """Return how many tokens the model shall see. Raises UserError if it cannot see as many."""
    most = model.config.block_size
    if cfg.block_size > most:
        raise UserError(f"--block_size {cfg.block_size}: the model sees {most} tokens")
    return cfg.block_size or min(most, 1024)


def pick_machine(cfg: SampleConfig) -> Machine:
    """Return the device and the dtype: of the weights, or of autocast if a loss is measured.

    Raises UserError if they cannot be used.
    """
    kernels.install()
    device = pick_device(cfg.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dtype, reason = pick_dtype(cfg.dtype, device)
    if cfg.dtype == "auto" and dtype == torch.float16 and not cfg.eval:
        # In fp16, numbers may overflow where autocast computes in fp32.
        dtype = torch.float32
    return Machine(0, 0, 1, device, dtype, reason)


def find_checkpoint(cfg: SampleConfig) -> tuple[Path, str]:
    """Return --ckpt, or a checkpoint of the newest run under out_dir, and what to say of it.

    Raises UserError if there is none.
    """
    run = Path(cfg.ckpt) if cfg.ckpt else newest_run(Path(cfg.out_dir))
    if run is None:
        raise UserError(f"no checkpoint under {cfg.out_dir}/: train one first, or name a --ckpt")
    is_nanogpt = run.suffix == NANOGPT and run.exists()
    if not run.is_dir() and not is_nanogpt:
        raise UserError(f"--ckpt {run}: no such folder")
    if is_nanogpt or (run / "config.json").exists():
        return run, str(run)
    losses = losses_of(run)
    checkpoint = newest_checkpoint(run / "ckpt")
    if cfg.which == "best":
        checkpoint = min(losses, key=losses.get, default=None)
    if checkpoint is None:
        names = "name a run, as out/demo, or a checkpoint, as out/demo/ckpt/step_00000800"
        raise UserError(f"--ckpt {run}: no model, no --which={cfg.which} checkpoint in it: {names}")
    loss = f", validation loss {losses[checkpoint]:.4f}" if checkpoint in losses else ""
    return checkpoint, f"{checkpoint}, the {cfg.which} of {run}{loss}"


def open_model(cfg: SampleConfig) -> tuple[Path, str, GPT, Tokenizer]:
    """Return the folder of the model, what to say of it, the model on the CPU, and its tokenizer.

    A training that runs meanwhile may delete the newest checkpoint. Then the next one is taken.
    """
    while True:
        folder, label = find_checkpoint(cfg)
        try:
            model = from_pretrained(folder)
            return folder, label, model, model_tokenizer(folder, model.config.vocab_size, cfg)
        except (UserError, OSError):
            if folder.exists():
                raise


def model_tokenizer(folder: Path, vocab_size: int, cfg: SampleConfig) -> Tokenizer:
    """Return the tokenizer of a model: its own, or that of --tokenizer, or that of --eval.

    vocab_size: of the model. Raises UserError if there is no tokenizer, if it has more tokens than
    the model, or if two of them do not make the same ids.
    """
    of_model = tokenizer_of_model(folder)
    named = find_tokenizer(cfg.tokenizer) if cfg.tokenizer else None
    of_data = load_tokenizer(Path(cfg.eval)) if cfg.eval else None
    tokenizer = of_model or named or of_data
    if tokenizer is None:
        raise UserError(f"{folder}: no tokenizer is there: name one, as in --tokenizer=gpt2")
    if not same_ids(named or tokenizer, tokenizer):
        raise UserError(f"--tokenizer={cfg.tokenizer}: makes other ids than the one in {folder}")
    if not same_ids(of_data or tokenizer, tokenizer):
        again = f"prepare the same texts with --tokenizer={cfg.tokenizer or folder}"
        raise UserError(f"--eval {cfg.eval}: made with another tokenizer than the model's: {again}")
    if tokenizer.vocab_size > vocab_size:
        sizes = f"{vocab_size:,} tokens, its tokenizer {tokenizer.vocab_size:,}"
        raise UserError(f"{folder}: the model has {sizes}")
    if tokenizer is of_data:
        note(f"{folder} has no tokenizer: its ids are assumed to be those of {cfg.eval}")
    return tokenizer


# --------------------------------------------------------------------------------------------------
# Continue a text


def read_prompts(cfg: SampleConfig, folder: Path) -> list[str]:
    """Return the texts of --prompt, or the sample_prompt of the run that wrote the checkpoint."""
    if cfg.prompt:
        return list(cfg.prompt)
    with suppress(OSError, ValueError):  # where it is not a checkpoint of train.py
        return [str(read_object(folder / "train_config.json").get("sample_prompt") or "")]
    return [""]


def encode(text: str, tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """Return a text of the user, where U+FFFD stands for what is no UTF-8, and its token ids."""
    # A terminal can pass any bytes. Python holds those that are not UTF-8 as surrogates.
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    try:
        ids = tokenizer.encode(text).tolist()
    except ValueError as e:
        raise UserError(f"the prompt cannot be encoded: {e}") from None
    if tokenizer.unk_id in ids:
        unknown = [c for c in sorted(set(text)) if tokenizer.unk_id in tokenizer.encode(c)]
        note(f"the tokenizer has no token for {', '.join(map(repr, unknown))}: the model reads unk")
    return text, ids


def encode_prompt(prompt: str, tokenizer: Tokenizer, block_size: int) -> tuple[str, list[int]]:
    """Return the text to continue and its token ids, which follow the tokenizer's prefix.

    The prefix of our own tokenizers is an eos, since a document begins after one. Raises UserError
    if the ids are more than block_size.
    """
    prompt, ids = encode(prompt, tokenizer)
    room = block_size - len(tokenizer.prefix)
    if len(ids) > room:
        raise UserError(f"the prompt has {len(ids):,} tokens, the model sees {room:,}: shorten it")
    return prompt, [*tokenizer.prefix, *ids] or [tokenizer.eos_id]


def typed(label: str, advice: str, read: Callable[[str], Any]) -> Iterator[Any]:
    """Yield read(line) of each line that is typed, until the input ends. Print its UserErrors.

    The label stands in front of each line, and the advice above all, if stdin is a terminal.
    """
    in_terminal = sys.stdin.isatty()
    if in_terminal:
        with suppress(ImportError):  # not every Python is built with it
            import readline  # noqa: F401 input() then edits a line, also one of wide characters
        print(advice)
    while True:
        try:
            yield read(input(label if in_terminal else ""))
        except EOFError:
            if in_terminal:
                print()  # Ctrl-D leaves the cursor behind the label
            return
        except KeyboardInterrupt:  # it may have been meant for the answer, a moment ago
            if not in_terminal:
                raise
            print("\nCtrl-D ends the program.")
        except UserError as e:
            print(f"error: {e}", file=sys.stderr)


def continue_text(
    model: GPT, tokenizer: Tokenizer, prompt: str, ids: list[int], cfg: SampleConfig
) -> None:
    """Print num_samples continuations of a prompt, all made in one batch, and their speed.

    The first is printed while it is made, the others after it.
    """
    started = time.perf_counter()
    eos_id = tokenizer.eos_id
    steps: list[list[int]] = []  # the next token of each text, (B,)

    def first_text() -> Iterator[int]:
        for step in next_tokens(model, ids, cfg.max_new_tokens or 256, cfg, eos_id=eos_id):
            steps.append(step)
            yield step[0]

    shown = harmless if sys.stdout.isatty() else str  # a file gets each character as it is
    print(shown(prompt), end="", flush=True)
    tokens = first_text()
    for piece in decoded(tokens, tokenizer):
        print(shown(piece), end="", flush=True)
    print()
    if cfg.num_samples > 1:
        list(tokens)  # the other texts may be longer
    for number in range(1, cfg.num_samples):
        text = "".join(decoded([step[number] for step in steps], tokenizer))
        print(f"---------------- sample {number + 1}\n{shown(prompt + text)}")
    count = sum(token != eos_id for step in steps for token in step)
    print(f"[{speed(count, started)}]", file=sys.stderr)


def next_tokens(
    model: GPT, ids: list[int], count: int, cfg: SampleConfig, **options
) -> Iterator[list[int]]:
    """Yield up to `count` times the next token of num_samples texts that begin with ids, (B,).

    options: more of generate(). Raises UserError if the logits are not finite.
    """
    idx = torch.tensor(ids, device=model.wte.weight.device).expand(cfg.num_samples, -1)  # (B, T)
    options |= dict(temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p)
    try:
        for tokens in model.generate(idx, count, **options):
            yield tokens.tolist()
    except ArithmeticError as e:
        raise UserError(f"{e}: try --dtype=float32") from None


def speed(count: int, started: float) -> str:
    return f"{plural(count, 'token')}, {count / (time.perf_counter() - started):.1f} tok/s"


def decoded(tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text of each token up to an eos, and in the end what is left."""
    # The decoder holds back the bytes of a character until it is complete.
    utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in takewhile(lambda token: token != tokenizer.eos_id, tokens):
        yield utf8.decode(tokenizer.token_bytes(token))
    yield utf8.decode(b"", final=True)


# --------------------------------------------------------------------------------------------------
# A conversation


class Conversation:
    """The messages so far as token ids, in ChatML: see text/chat.py.

    Their keys and values stay between the answers, so that only new tokens go through the model.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, cfg: SampleConfig):
        """Raises UserError if the system message is too long."""
        self.model = model
        self.tokenizer = tokenizer
        self.cfg = cfg
        self.window = window(cfg, model)
        self.start_mark, self.end_mark = marks_of(tokenizer)
        self.ending = [self.end_mark, *tokenizer.encode("\n").tolist()]  # of a message
        self.header = [self.start_mark, *tokenizer.encode("assistant\n").tolist()]  # of an answer
        self.opening = list(tokenizer.prefix)  # what each conversation begins with
        if cfg.system:
            self.opening += self.message("system", cfg.system)
        self.exchanges: list[list[int]] = []  # a message of the user and its answer each
        self.cache = KVCache(model.config, 1, self.window, model.wte.weight)

    def message(self, role: str, text: str) -> list[int]:
        """Return the ids of a message. Raises UserError if they leave no room for an answer."""
        _, ids = encode(f"{role}\n{text}", self.tokenizer)
        ids = [self.start_mark, *ids, *self.ending]
        room = max(0, self.window - len(self.opening) - len(self.header) - 1)
        if len(ids) > room:
            raise UserError(f"the {role} message has {len(ids):,} tokens, the model sees {room:,}")
        return ids

    def typed_message(self, line: str) -> list[int]:
        """Return the ids of a message; [] for an empty line, and for /reset, which it obeys."""
        if line.strip() == "/reset":
            self.forget(len(self.exchanges))
            print("[a new conversation]", file=sys.stderr)
        return self.message("user", line) if line.strip() not in ("", "/reset") else []

    def forget(self, count: int) -> None:
        """Drop the oldest exchanges, and keep what comes before them."""
        del self.exchanges[:count]
        self.cache.length = min(self.cache.length, len(self.opening))

    def prompt(self, question: list[int]) -> list[int]:
        """Return the ids that the answer follows. Drop the oldest exchanges if it has little room.

        It should have max_new_tokens, at most half of the window; by default a quarter.
        """
        room = self.window - len(self.opening) - len(question) - len(self.header)
        room -= min(self.cfg.max_new_tokens or self.window // 4, self.window // 2)
        count = 0
        while sum(map(len, self.exchanges[count:])) > max(0, room):
            count += 1
        if count:
            self.forget(count)
            unseen = f"the model no longer sees the {2 * count} oldest messages"
            print(f"note: the window is full: {unseen}", file=sys.stderr)
        return [*self.opening, *chain(*self.exchanges), *question, *self.header]

    def answer(self, question: list[int]) -> None:
        """Print the answer to a message, while it is made, and its speed. Keep both."""
        started = time.perf_counter()
        ids = self.prompt(question)
        limit, reason = self.window - len(ids), "the window is full"
        if 0 < self.cfg.max_new_tokens < limit:
            limit, reason = self.cfg.max_new_tokens, "max_new_tokens is reached"
        answer: list[int] = []

        def until_the_end() -> Iterator[int]:
            for (token,) in next_tokens(self.model, ids, limit, self.cfg, cache=self.cache):
                if token in (self.end_mark, self.tokenizer.eos_id):
                    return
                answer.append(token)
                yield token

        remark = ""
        try:
            for piece in decoded(until_the_end(), self.tokenizer):
                print(harmless(piece), end="", flush=True)
        except KeyboardInterrupt:
            if self.cfg.prompt or not sys.stdin.isatty():
                raise
            remark = ", stopped"
        if len(answer) == limit:
            remark = f", unfinished: {reason}"
        print()
        print(f"[{speed(len(answer), started)}{remark}]", file=sys.stderr)
        self.exchanges.append([*question, *self.header, *answer, *self.ending])


def check_chat(folder: Path, tokenizer: Tokenizer) -> None:
    """Raise UserError if a model cannot read a conversation.

    Print a note if it has learned from none, or perhaps in another template than --chat writes.
    """
    if not marks_of(tokenizer):
        raise UserError(f"{folder}: its tokenizer has no {IM_START} and {IM_END}, as --chat needs")
    path = folder / "chat_template.jinja"
    config = read_json(folder / "tokenizer_config.json")
    template = path.read_text("utf-8", "replace") if path.exists() else config.get("chat_template")
    if not template:
        note(f"{folder} has no chat template: it was probably not trained on conversations")
    elif str(template).rstrip().removeprefix("{{ bos_token }}") != CHATML:
        plain = "--chat writes plain ChatML, with no system message but that of --system"
        note(f"{folder} has a chat template of its own, which may ask for more: {plain}")


def converse(model: GPT, tokenizer: Tokenizer, cfg: SampleConfig, label: str) -> None:
    """Answer each prompt in a conversation of its own; without any, what is typed, in one."""
    conversation = Conversation(model, tokenizer, cfg)
    advice = "Type a message. /reset begins anew, Ctrl-C ends an answer, Ctrl-D the program."
    asked = [conversation.message("user", text) for text in cfg.prompt]
    print(f"[{label}]", file=sys.stderr)  # not above the error of a message that is too long
    questions = asked or typed("you> ", advice, conversation.typed_message)
    for number, question in enumerate(questions):
        if asked:
            print("----------------\n" * (number > 0) + f"you> {cfg.prompt[number]}")
            conversation.forget(len(conversation.exchanges))
        if question:
            conversation.answer(question)


# --------------------------------------------------------------------------------------------------
# Measure the loss


def evaluate_on(folder: Path, model: GPT, cfg: SampleConfig, machine: Machine) -> str:
    """Return the model's loss on the val.bin of a data set, in words.

    It has two losses. For the first, windows begin anywhere, and a token sees all tokens before it.
    For the second, each document is read alone, from its own beginning. Bits per byte can be
    compared between models with different tokenizers. Raises UserError if the data set was changed,
    or if a loss is not finite.
    """
    T = window(cfg, model)
    data = DataSet(folder.name, folder, open_dataset(folder), Fraction(1))
    verify(folder, data.meta, "val")
    windows = open_windows(data, "val", T)
    count = len(windows.fixed_starts(cfg.eval_tokens))
    B = min(cfg.batch_size, count)
    loss = evaluate(model, windows, cfg.eval_tokens, B, machine, bar=True)
    if not math.isfinite(loss):
        raise UserError(f"the loss is {loss}: the weights are damaged, or need another --dtype")
    windows = open_windows(data, "val", T, documents="pack")
    eos_id = data.meta["eos_id"]
    by_document = evaluate(model, windows, cfg.eval_tokens, B, machine, eos_id=eos_id, bar=True)
    val = data.meta["splits"]["val"]
    _, _, units = in_other_units(loss, val["bytes"] / val["tokens"])
    losses = f"validation loss {loss:.4f} (by document {by_document:.4f}) | {units}"
    return f"{losses} | {plural(count, 'window')} of {T:,} tokens"


# --------------------------------------------------------------------------------------------------


def main() -> None:
    cfg = parse(SampleConfig, doc=__doc__)
    machine = pick_machine(cfg)
    with memory_advice("here: lower --num_samples, --batch_size or --block_size"):
        folder, label, model, tokenizer = open_model(cfg)
        size = f"{model.num_params()['total'] / 1e6:.1f}M parameters"
        precision = f"{machine.device} {str(machine.dtype).removeprefix('torch.')}"
        label = ", ".join(filter(None, [label, size, precision, unverified(folder)]))
        if cfg.eval:
            losses = evaluate_on(Path(cfg.eval), model.to(machine.device), cfg, machine)
            print(f"{Path(cfg.eval)}: {losses} | {folder}")
            print(f"[{label}]", file=sys.stderr)
            return

        T = model.config.block_size
        if cfg.chat:
            check_chat(folder, tokenizer)
        elif cfg.interactive:
            advice = "Type the beginning of a text; nothing: a new document. Ctrl-D ends."
            prompts = typed("prompt> ", advice, lambda line: encode_prompt(line, tokenizer, T))
        else:
            prompts = [encode_prompt(text, tokenizer, T) for text in read_prompts(cfg, folder)]
        model.to(machine.device, machine.dtype).eval()
        record_decoding(model)
        torch.manual_seed(cfg.seed)
        if cfg.chat:
            converse(model, tokenizer, cfg, label)
            return
        print(f"[{label}]", file=sys.stderr)
        for number, (prompt, ids) in enumerate(prompts):
            if number and not (cfg.interactive and sys.stdin.isatty()):
                print("----------------")
            continue_text(model, tokenizer, prompt, ids, cfg)


if __name__ == "__main__":
    run(main)

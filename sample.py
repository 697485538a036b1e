"""eveningGPT: continue a text with a model, or measure its loss on a data set.

Without settings, the newest checkpoint of the newest run continues the run's sample_prompt, as the
samples during training did. If the prompt is empty, it starts a new document:

    python sample.py
    python sample.py --prompt "Robot.sing: Return" "RobotError: Raised when"
    python sample.py --ckpt out/docs/ckpt/step_00001000 --prompt "$(cat prompt.txt)"
    # three new documents
    python sample.py --prompt "" --num_samples 3
    # the checkpoint with the lowest validation loss
    python sample.py --ckpt out/docs --which best
    # one prompt per line, until Ctrl-D
    python sample.py --interactive
    # a conversation, with a model that was trained on conversations
    python sample.py --chat --system "You answer in one sentence."
    # two conversations of one question each
    python sample.py --chat --prompt "Why is the sky blue?" "What is a loop?"
    # loss, perplexity and bits per byte of a data set
    python sample.py --ckpt ../Qwen3-0.6B-Base --eval data/mine

A base model continues a text; it does not chat. With --chat, a model that was trained on
conversations sees all messages so far. When they no longer fit into its window, the oldest are
dropped, and a line says so. Without max_new_tokens, an answer ends where the model ends it, or when
the window is full.

A model folder contains all that is needed: the shape, the weights and the tokenizer. It may be a
checkpoint of train.py, or a GPT2LMHeadModel, Llama, Qwen2 or Qwen3 from anywhere.
nanoGPT's ckpt.pt also needs --tokenizer. A text starts after an eos, as documents do in training,
and ends at the next eos. With a model of another program, it starts as its tokenizer files say. Do
not end a prompt with a space: the first token of a word includes its space. A low temperature suits
a small model, since its unlikely tokens are noise; try 0.8 or 1 for a large one.
"""

import codecs
import math
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Literal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while torch is loaded, until run()

import torch

from configurator import UserError, harmless, note, one_line, option, parse, run
from hardware.disk import MANIFEST
from hardware.generation import KVCache, generate
from hardware.kernels import pick_kernels
from hardware.limits import memory_advice
from hardware.machine import Machine, pick_device, pick_dtype
from hardware.terminal import plural
from model import GPT
from text.chat import answer_header, chatml_ids, message_ids
from text.dataset import DataSet, load_tokenizer, open_dataset, open_windows, verify
from text.hf_tokenizer import CHATML, find_tokenizer, read_json, tokenizer_of_model
from text.tokenizer import IM_END, IM_START, Tokenizer, same_ids
from training.evaluate import evaluate, note_unknown
from training.huggingface import NANOGPT, from_pretrained, unverified
from training.metrics import perplexity_and_bits
from training.run_folder import losses_of, newest_checkpoint, newest_run


@dataclass(frozen=True)
class SampleConfig:
    ckpt: str = option(
        "", "a model folder or a run, out/RUN; default: the newest run", group="The model"
    )
    which: Literal["newest", "best"] = option("newest", "best: by validation loss")
    tokenizer: str = option("", "for a model without one: a folder, a file, or a name such as gpt2")
    out_dir: str = option("out", "folder of all runs")

    prompt: tuple[str, ...] = option(
        (), "texts to continue ('': a new document); default: the run's", group="What to continue"
    )
    interactive: bool = option(False, "read prompts from the terminal")
    chat: bool = option(False, "answer typed messages, or each prompt in its own conversation")
    system: str = option("", "system message at the start of a conversation")

    block_size: int = option(
        0,
        "window of chat and eval, in tokens; 0: that of the model, but at most 1,024",
        minimum=0,
        group="How",
    )
    num_samples: int = option(1, "continuations of each prompt, made in one batch", minimum=1)
    max_new_tokens: int = option(0, "tokens per text; 0: 256, and no limit in a chat", minimum=0)
    temperature: float = option(0.6, "divides the logits; 0: always the likeliest token", minimum=0)
    top_k: int = option(0, "choose among the k likeliest tokens; 0: all", minimum=0)
    top_p: float = option(
        0.95,
        "choose among the likeliest tokens that reach this probability; 1: all",
        above=0,
        maximum=1,
    )
    seed: int = option(1337, "seed of the random choices", minimum=0)

    eval: str = option(
        "", "measure the loss on val.bin of data/NAME", group="Evaluation, instead of a text"
    )
    eval_tokens: int = option(0, "tokens of val.bin, in evenly spread windows; 0: all", minimum=0)
    batch_size: int = option(8, "windows per batch", minimum=1)

    device: str = option("auto", "auto: cuda, then mps, then cpu", group="Device")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = option(
        "auto", "dtype of the weights and the arithmetic"
    )

    def problems(self) -> list[str]:
        problems = []
        if self.prompt and self.interactive:
            problems.append("give prompt or interactive, not both")
        if self.chat and (self.interactive or self.eval or self.num_samples > 1):
            problems.append("chat cannot be combined with interactive, eval or num_samples")
        if self.system and not self.chat:
            problems.append("system is the first message of a conversation: add --chat")
        return problems


# --------------------------------------------------------------------------------------------------
# The model and its tokenizer


def window_size(cfg: SampleConfig, model: GPT) -> int:
    """Return the window of --chat and --eval, in tokens. Raises UserError if it is too long."""
    most = model.config.block_size
    if cfg.block_size > most:
        raise UserError(f"--block_size {cfg.block_size}: the model's context is {most} tokens")
    return cfg.block_size or min(most, 1024)


def pick_machine(cfg: SampleConfig) -> Machine:
    """Return the device and the dtype: of the weights, or of autocast if a loss is measured.

    Raises UserError if they cannot be used.
    """
    device = pick_device(cfg.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dtype, reason = pick_dtype(cfg.dtype, device)
    if cfg.dtype == "auto" and dtype == torch.float16 and not cfg.eval:
        # In fp16, numbers may overflow where autocast computes in fp32.
        dtype = torch.float32
    return Machine(0, 0, 1, device, dtype, reason)


def find_checkpoint(cfg: SampleConfig) -> tuple[Path, str]:
    """Return --ckpt, or a checkpoint of the newest run under out_dir, and its description.

    Raises UserError if there is none.
    """
    run = Path(cfg.ckpt) if cfg.ckpt else newest_run(Path(cfg.out_dir))
    if run is None or not run.exists():
        raise UserError(f"--ckpt {run or cfg.out_dir}: no such folder, or no run in it")
    is_model = any((run / name).exists() for name in ("config.json", "adapter_config.json"))
    if run.suffix == NANOGPT or is_model:
        return run, str(run)
    losses = losses_of(run)
    best = min(losses, key=losses.__getitem__, default=None)
    checkpoint = best if cfg.which == "best" else newest_checkpoint(run / "ckpt")
    if checkpoint is None:
        raise UserError(f"--ckpt {run}: it has no model and no --which={cfg.which} checkpoint")
    loss = f", validation loss {losses[checkpoint]:.4f}" if checkpoint in losses else ""
    return checkpoint, f"{checkpoint}, the {cfg.which} of {run}{loss}"


def open_model(cfg: SampleConfig) -> tuple[Path, str, GPT, Tokenizer]:
    """Return the folder of the model, its description, the model on the CPU, and its tokenizer.

    A run that trains may delete a checkpoint while it is opened: then the next one is opened.
    """
    while True:
        folder, label = find_checkpoint(cfg)
        try:
            model, tokenizer = read_model(folder, cfg)
            break
        except Exception:
            if folder == Path(cfg.ckpt) or (folder / MANIFEST).exists():
                raise
    size = f"{model.num_params()['total'] / 1e6:.1f}M parameters"
    return folder, ", ".join(filter(None, [label, size, unverified(folder)])), model, tokenizer


def read_model(folder: Path, cfg: SampleConfig) -> tuple[GPT, Tokenizer]:
    """Return the model of a folder, on the CPU, and its tokenizer.

    The tokenizer is the model's own, or that of --tokenizer, or that of --eval. Raises UserError if
    there is none, if it has more tokens than the model, or if two of them make other ids.
    """
    model = from_pretrained(folder)
    own_tokenizer = tokenizer_of_model(folder)
    found = [(str(folder), own_tokenizer)] if own_tokenizer else []
    if cfg.tokenizer:
        found.append((f"--tokenizer={cfg.tokenizer}", find_tokenizer(cfg.tokenizer)))
    if cfg.eval:
        found.append((f"--eval {cfg.eval}", load_tokenizer(Path(cfg.eval))))
    if not found:
        raise UserError(f"{folder}: it has no tokenizer: name one, as in --tokenizer=gpt2")
    first, tokenizer = found[0]
    for source, other in found[1:]:
        if not same_ids(other, tokenizer):
            again = f"prepare the same texts with --tokenizer={cfg.tokenizer or folder}"
            raise UserError(f"{source}: its ids are not those of {first}: {again}")
    # nanoGPT's models of characters have no eos. A .tiktoken file of them has one, the next id.
    if tokenizer.vocab_size > model.config.vocab_size + (folder.suffix == NANOGPT):
        sizes = f"{model.config.vocab_size:,} tokens, its tokenizer {tokenizer.vocab_size:,}"
        raise UserError(f"{folder}: the model has {sizes}")
    if first.startswith("--eval"):
        note(f"{folder} has no tokenizer: its ids are assumed to be those of {cfg.eval}")
    return model, tokenizer


# --------------------------------------------------------------------------------------------------
# Continue a text


def encode(text: str, tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """Return a text of the user, with U+FFFD for bytes that are not UTF-8, and its token ids."""
    # A terminal can pass any bytes. Python holds those that are not UTF-8 as surrogates.
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    try:
        ids = tokenizer.encode(text)
    except ValueError as e:
        raise UserError(f"the prompt cannot be encoded: {e}") from None
    note_unknown(text, tokenizer)
    return text, ids


def encode_prompt(prompt: str, tokenizer: Tokenizer, block_size: int) -> tuple[str, list[int]]:
    """Return the text to continue and its token ids, which follow the tokenizer's prefix.

    The prefix of our own tokenizers is an eos, since a document starts after one. Raises UserError
    if the ids are more than block_size.
    """
    prompt, ids = encode(prompt, tokenizer)
    limit = block_size - len(tokenizer.prefix)
    if len(ids) > limit:
        problem = f"the prompt has {len(ids):,} tokens, the model sees {limit:,}"
        raise UserError(f"{problem}: shorten it (without --prompt it is the run's sample_prompt)")
    return prompt, [*tokenizer.prefix, *ids] or [tokenizer.eos_id]


def typed_lines(label: str, advice: str) -> Iterator[str]:
    """Yield each line that is typed, until the input ends.

    If stdin is a terminal, the advice is printed first, and the label before each line.
    """
    in_terminal = sys.stdin.isatty()
    if in_terminal:
        with suppress(ImportError):  # not every Python is built with it
            import readline  # noqa: F401 lets input() edit lines, also with wide characters
        print(advice)
    try:
        while True:
            yield input(label if in_terminal else "")
    except EOFError:
        print(end="\n" if in_terminal else "")  # Ctrl-D leaves the cursor after the label


def continue_text(model: GPT, tokenizer: Tokenizer, prompt: str, cfg: SampleConfig) -> None:
    """Print num_samples continuations of a prompt, all made in one batch, and their speed.

    The first is printed while it is made, the others after it. Raises UserError if the prompt is
    too long.
    """
    prompt, ids = encode_prompt(prompt, tokenizer, model.config.block_size)
    started = time.perf_counter()
    shown = harmless if sys.stdout.isatty() else str  # a file gets each character as it is
    eos_id = tokenizer.eos_id
    utf8 = new_decoder()
    steps: list[list[int]] = []  # the next token of each text, (B,)
    print(shown(prompt), end="", flush=True)
    for step in next_tokens(model, ids, cfg.max_new_tokens or 256, cfg, eos_id=eos_id):
        steps.append(step)
        if step[0] != eos_id:
            print(shown(utf8.decode(tokenizer.token_bytes(step[0]))), end="", flush=True)
    print(utf8.decode(b"", final=True))
    for number in range(1, cfg.num_samples):
        tokens = [step[number] for step in steps if step[number] != eos_id]
        text = b"".join(map(tokenizer.token_bytes, tokens)).decode(errors="replace")
        print(f"---------------- sample {number + 1}\n{shown(prompt + text)}")
    count = sum(token != eos_id for step in steps for token in step)
    print(f"[{speed(count, started)}]", file=sys.stderr)


def next_tokens(
    model: GPT, ids: list[int], count: int, cfg: SampleConfig, **options
) -> Iterator[list[int]]:
    """Yield up to `count` times the next token of num_samples texts that start with ids, (B,).

    options: more of generate(). Raises UserError if the logits are not finite.
    """
    idx = torch.tensor(ids, device=model.wte.weight.device).expand(cfg.num_samples, -1)  # (B, T)
    options |= dict(temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p, record=True)
    # Each token has a seed of its own, so the draws of a row do not depend on the rows below it.
    seed = int(torch.randint(2**62, ()))
    kind = idx.device.type  # torch.manual_seed() would seed all kinds, which takes 0.15 ms
    generator = torch.default_generator if kind == "cpu" else torch.get_device_module(kind)
    try:
        for n, tokens in enumerate(generate(model, idx, count, **options), 1):
            generator.manual_seed(seed + n)
            yield tokens.tolist()
    except ArithmeticError as e:
        raise UserError(f"{e}: try --dtype=float32") from None


def new_decoder() -> codecs.IncrementalDecoder:
    """Return a decoder that keeps the bytes of a character until it is complete."""
    return codecs.getincrementaldecoder("utf-8")(errors="replace")


def speed(count: int, started: float) -> str:
    return f"{plural(count, 'token')}, {count / (time.perf_counter() - started):.1f} tok/s"


# --------------------------------------------------------------------------------------------------
# A conversation


class Conversation:
    """The messages so far as token ids, in ChatML: see text/chat.py.

    Their keys and values are kept between answers, so that only new tokens go through the model.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, cfg: SampleConfig):
        """Raises UserError if the system message is too long."""
        self.model = model
        self.tokenizer = tokenizer
        self.cfg = cfg
        self.window = window_size(cfg, model)
        _, self.end_id = chatml_ids(tokenizer)
        self.ending = [self.end_id, *tokenizer.encode("\n")]  # of a message
        self.header = answer_header(tokenizer)
        self.opening = list(tokenizer.prefix)  # the start of each conversation
        if cfg.system:
            self.opening += self.message("system", cfg.system)
        self.exchanges: list[list[int]] = []  # a message of the user and its answer each
        self.cache = KVCache(model.config, 1, self.window, model.wte.weight)

    def reset(self) -> None:
        """Start a new conversation."""
        self.exchanges.clear()
        self.cache.length = 0

    def message(self, role: str, text: str) -> list[int]:
        """Return the ids of a message. Raises UserError if they leave no space for an answer."""
        _, content = encode(text, self.tokenizer)
        ids = message_ids(role, content, self.tokenizer)
        limit = max(0, self.window - len(self.opening) - len(self.header) - 1)
        if len(ids) > limit:
            raise UserError(f"the {role} message has {len(ids):,} tokens, the model sees {limit:,}")
        return ids

    def prompt(self, question: list[int]) -> list[int]:
        """Return the ids before an answer. Drop the oldest exchanges if it has too little space.

        The space for it is max_new_tokens, at most half of the window; by default a quarter.
        """
        space = self.window - len(self.opening) - len(question) - len(self.header)
        space -= min(self.cfg.max_new_tokens or self.window // 4, self.window // 2)
        count = len(self.exchanges)
        while self.exchanges and sum(map(len, self.exchanges)) > space:
            del self.exchanges[0]
        if dropped := count - len(self.exchanges):
            self.cache.length = min(self.cache.length, len(self.opening))
            unseen = f"the model no longer sees the {2 * dropped} oldest messages"
            print(f"note: the window is full: {unseen}", file=sys.stderr)
        return [*self.opening, *chain(*self.exchanges), *question, *self.header]

    def answer(self, question: list[int]) -> None:
        """Print the answer to a message while it is generated, and its speed. Store both."""
        started = time.perf_counter()
        ids = self.prompt(question)
        space = self.window - len(ids)
        limit = min(self.cfg.max_new_tokens or space, space)
        reason = "the window is full" if limit == space else "max_new_tokens is reached"
        remark = f", unfinished: {reason}"
        utf8 = new_decoder()
        answer: list[int] = []
        try:
            for (token,) in next_tokens(self.model, ids, limit, self.cfg, cache=self.cache):
                if token in (self.end_id, self.tokenizer.eos_id):
                    remark = ""
                    break
                answer.append(token)
                text = utf8.decode(self.tokenizer.token_bytes(token))
                print(harmless(text), end="", flush=True)
        except KeyboardInterrupt:
            if self.cfg.prompt or not sys.stdin.isatty():
                raise
            remark = ", stopped"
        print(utf8.decode(b"", final=True))
        print(f"[{speed(len(answer), started)}{remark}]", file=sys.stderr)
        self.exchanges.append([*question, *self.header, *answer, *self.ending])


def chat_template(folder: Path) -> str:
    """Return the chat template of a model folder, or "" if it has none."""
    with suppress(OSError):
        return (folder / "chat_template.jinja").read_text("utf-8", "replace")
    return str(read_json(folder / "tokenizer_config.json").get("chat_template") or "")


def check_chat(folder: Path, tokenizer: Tokenizer) -> None:
    """Raise UserError if the tokenizer of a model cannot encode a conversation.

    Print a note if the model was probably trained without conversations, or with another template.
    """
    if not chatml_ids(tokenizer):
        raise UserError(f"{folder}: --chat needs a tokenizer with {IM_START} and {IM_END}")
    template = chat_template(folder)
    if not template:
        note(f"{folder} has no chat template: it was probably not trained on conversations")
    elif template.rstrip().removeprefix("{{ bos_token }}") != CHATML:
        plain = "--chat writes plain ChatML, with no system message except --system"
        note(f"{folder} has a chat template of its own, which may differ: {plain}")


# --------------------------------------------------------------------------------------------------
# Measure the loss


def evaluate_on(folder: Path, model: GPT, cfg: SampleConfig, machine: Machine) -> str:
    """Return a line with the model's loss on the val.bin of a data set.

    It has two losses. For the first, windows start anywhere, and a token sees all tokens before it.
    For the second, each document is read alone, from its start. Bits per byte can be compared
    between models with different tokenizers. Raises UserError if the data set was changed, or if
    the loss is not finite.
    """
    T = window_size(cfg, model)
    data = DataSet(folder.name, folder, open_dataset(folder), Fraction(1))
    verify(folder, data.meta, "val")
    windows = open_windows(data, "val", T)
    packed = open_windows(data, "val", T, documents="pack")
    tokens = cfg.eval_tokens
    count = len(windows.fixed_starts(tokens))
    B = min(cfg.batch_size, count)
    loss = evaluate(model, windows, tokens, B, machine, bar=True)
    if not math.isfinite(loss):
        raise UserError(f"the loss is {loss}: the weights are damaged, or need another --dtype")
    by_document = evaluate(model, packed, tokens, B, machine, bar=True)
    val = data.meta["splits"]["val"]
    _, _, units = perplexity_and_bits(loss, val["bytes"] / val["tokens"])
    losses = f"validation loss {loss:.4f} (by document {by_document:.4f}) | {units}"
    return f"{losses} | {plural(count, 'window')} of {T:,} tokens"


# --------------------------------------------------------------------------------------------------


def respond(folder: Path, model: GPT, tokenizer: Tokenizer, cfg: SampleConfig, label: str) -> None:
    """Continue or answer each prompt. If a typed prompt is too long, print an error and go on."""
    conversation = None
    advice = "Type the start of a text, or nothing for a new document. Ctrl-D ends."
    if cfg.chat:
        check_chat(folder, tokenizer)
        conversation = Conversation(model, tokenizer, cfg)
        advice = "Type a message. /reset starts anew, Ctrl-C stops an answer, Ctrl-D exits."
    elif cfg.prompt and chat_template(folder).rstrip().endswith(CHATML):
        note(f"{folder} was trained on conversations: --chat asks it, --prompt continues a text")
    is_typed = cfg.interactive or (cfg.chat and not cfg.prompt)
    prompts: Iterable[str] = typed_lines("you> " if cfg.chat else "prompt> ", advice)
    if not is_typed:
        trained = read_json(folder / "train_config.json")  # {} if train.py did not write the folder
        prompts = cfg.prompt or [str(trained.get("sample_prompt") or "")]
        for prompt in prompts:  # a prompt that is too long is an error before any output
            if conversation:
                conversation.message("user", prompt)
            else:
                encode_prompt(prompt, tokenizer, model.config.block_size)
    print(f"[{one_line(label)}]", file=sys.stderr)
    failed = False
    for number, prompt in enumerate(prompts):
        if number and not (is_typed and (cfg.chat or sys.stdin.isatty())):
            print("----------------")
        if not is_typed:
            torch.manual_seed(cfg.seed)  # the texts do not depend on earlier prompts
        if conversation and not is_typed:
            print(f"you> {prompt}")
            conversation.reset()
        try:
            if conversation is None:
                continue_text(model, tokenizer, prompt, cfg)
            elif is_typed and prompt.strip() == "/reset":
                conversation.reset()
                print("[a new conversation]", file=sys.stderr)
            elif prompt.strip() or not is_typed:
                conversation.answer(conversation.message("user", prompt.strip()))
        except UserError as e:
            if not is_typed:
                raise
            print(f"error: {one_line(str(e))}", file=sys.stderr)
            failed = True
    if failed and not sys.stdin.isatty():  # tell a script that an answer is missing
        sys.exit(1)


def main() -> None:
    cfg = parse(SampleConfig, doc=__doc__)
    machine = pick_machine(cfg)
    with memory_advice("here: lower --num_samples, --batch_size or --block_size"):
        folder, label, model, tokenizer = open_model(cfg)
        model.use(pick_kernels(machine.device))
        label = f"{label}, {machine.device} {str(machine.dtype).removeprefix('torch.')}"
        if cfg.eval:
            losses = evaluate_on(Path(cfg.eval), model.to(machine.device), cfg, machine)
            print(f"{Path(cfg.eval)}: {losses} | {folder}")
            print(f"[{one_line(label)}]", file=sys.stderr)
            return
        model.to(machine.device, machine.dtype).eval()
        torch.manual_seed(cfg.seed)
        respond(folder, model, tokenizer, cfg, label)


if __name__ == "__main__":
    run(main)

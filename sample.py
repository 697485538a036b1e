"""Continue a text with a model, or measure its loss on a data set.

The first command takes the newest checkpoint of the newest run, and begins a new document:

    python sample.py
    python sample.py --prompt "def main(" --num_samples 3 --temperature 0.7
    python sample.py --ckpt out/demo/ckpt/step_00000400 --prompt_file prompt.txt
    python sample.py --ckpt out/demo --which best                   # by validation loss
    python sample.py --interactive                                  # a prompt a line, until Ctrl-D
    python sample.py --ckpt ../Qwen3-0.6B-Base --eval data/mine     # loss, perplexity, bits/byte

A base model continues a text; it does not chat. A model folder is all that is needed: it holds the
shape, the weights and the tokenizer. It may be a checkpoint of train.py, or a GPT2LMHeadModel,
LlamaForCausalLM or Qwen3ForCausalLM from anywhere. nanoGPT's ckpt.pt also needs --tokenizer. A text
starts after an eos, as the documents did in training, and ends at the next eos. In a folder that
train.py did not write, it starts as the tokenizer there says.
"""

import codecs
import math
import sys
import time
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

import torch

from configurator import UserError, note, parse, run
from hardware.machine import Machine, memory_advice, pick_device, pick_dtype
from model import GPT
from text.dataset import (
    DataSet,
    find_tokenizer,
    load_tokenizer,
    open_dataset,
    tokenizer_of_model,
    verify,
)
from text.tokenizer import SentencePiece, Tiktoken, same_ids
from text.windows import open_windows
from training.evaluate import evaluate
from training.huggingface import from_pretrained, is_nanogpt, unverified
from training.report import in_other_units
from training.runs import losses_of, newest_checkpoint, newest_run, step_of

Tokenizer = SentencePiece | Tiktoken


@dataclass(frozen=True)
class SampleConfig:
    # ---- What to continue ----
    ckpt: str = ""  # a model folder, or a run's folder out/RUN; default: the newest run
    which: Literal["newest", "best"] = "newest"  # of a run's checkpoints; best: by validation loss
    tokenizer: str = ""  # if the model has none: a folder, a .model or .tiktoken file, or gpt2, ...
    out_dir: str = "out"  # where the runs are
    prompt: str = ""  # the text to continue; empty: begin a new document
    prompt_file: str = ""  # or a file that holds the text
    interactive: bool = False  # read prompts from the terminal
    # ---- How ----
    num_samples: int = 1  # continuations of each prompt, made in one batch
    max_new_tokens: int = 256  # tokens in each continuation, at most
    temperature: float = 0.8  # 0: always the likeliest token; 1: the model's own probabilities
    top_k: int = 0  # choose among the k likeliest tokens; 0: all
    top_p: float = 0.95  # choose among the likeliest tokens that reach this probability; 1: all
    stop_at_eos: bool = True  # end a text where the model ends it
    seed: int = 1337  # of the random choices
    # ---- Evaluation, in place of text ----
    eval: str = ""  # a data set's folder, data/NAME: measure the loss on its val.bin
    eval_tokens: int = 0  # how many tokens of it, in fixed windows spread evenly; 0: all
    block_size: int = 0  # tokens in a window; 0: as many as the model sees, at most 1,024
    batch_size: int = 8  # windows at a time
    # ---- Device ----
    device: str = "auto"  # auto: cuda, then mps, then cpu
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # of weights and arithmetic

    def problems(self) -> list[str]:
        positive = "num_samples max_new_tokens batch_size"
        not_negative = "temperature top_k eval_tokens block_size"
        wrong = [f"{k} must be positive" for k in positive.split() if getattr(self, k) < 1]
        wrong += [f"{k} must not be negative" for k in not_negative.split() if getattr(self, k) < 0]
        if not 0 <= self.seed < 2**63:
            wrong.append("seed must be between 0 and 2^63")
        if self.interactive and (self.prompt or self.prompt_file):
            ways = "leave out prompt and prompt_file"
            wrong.append(f"interactive reads its prompts from the terminal: {ways}")
        if not 0 < self.top_p <= 1:
            wrong.append("top_p must be above 0 and at most 1")
        if self.prompt and self.prompt_file:
            wrong.append("give prompt or prompt_file, not both")
        return wrong


# --------------------------------------------------------------------------------------------------
# Find the model and its tokenizer


def find_checkpoint(cfg: SampleConfig) -> tuple[Path, str]:
    """Return --ckpt, or a checkpoint of the newest run under out_dir, and what is known of it.

    Raises UserError if there is none.
    """
    run = Path(cfg.ckpt) if cfg.ckpt else newest_run(Path(cfg.out_dir))
    if run is None:
        train = "train one first (python train.py config/demo.py)"
        raise UserError(f"no checkpoint under {cfg.out_dir}/: {train}, or name one with --ckpt")
    if (run / "config.json").exists() or is_nanogpt(run):
        return run, ""
    newest = newest_checkpoint(run / "ckpt")
    if newest is None:
        expected = "a folder with config.json and model.safetensors, or that of a run"
        raise UserError(f"--ckpt {run}: no checkpoint there ({expected})")
    try:
        losses = losses_of(run)
    except (UserError, OSError) as e:
        if cfg.which == "best":
            raise UserError(f"--which=best needs the validation losses: {e}") from None
        losses = {}
    best = min(losses, key=losses.get, default=None)
    if cfg.which == "best" and best is None:
        raise UserError(f"--which=best: no checkpoint of {run} was evaluated: leave it out")
    taken = best if cfg.which == "best" else newest
    about = f"the {cfg.which} of {run}"
    if taken in losses:
        about += f", validation loss {losses[taken]:.4f}"
    if best not in (None, taken):
        about += f" (--which=best: {losses[best]:.4f} at step {step_of(best)})"
    return taken, about


def open_model(cfg: SampleConfig) -> tuple[Path, str, GPT, Tokenizer | None]:
    """Return the folder of the model, what is known of it, the model, and its tokenizer.

    A training that runs meanwhile may delete the newest checkpoint. Then the next one is taken.
    """
    while True:
        folder, known = find_checkpoint(cfg)
        try:
            with memory_advice("for the weights of this model in fp32"):
                return folder, known, from_pretrained(folder), model_tokenizer(folder, cfg)
        except (UserError, ValueError) as e:
            if folder.exists():
                why = str(e) if isinstance(e, UserError) else f"{folder}: cannot be loaded ({e})"
                raise UserError(why) from None


def model_tokenizer(folder: Path, cfg: SampleConfig) -> Tokenizer | None:
    """Return the model's tokenizer, or None if it has none. Only an evaluation needs none."""
    tokenizer = find_tokenizer(cfg.tokenizer) if cfg.tokenizer else tokenizer_of_model(folder)
    if tokenizer is None and not cfg.eval:
        raise UserError(f"{folder}: no tokenizer is there: name one, as in --tokenizer=gpt2")
    return tokenizer


# --------------------------------------------------------------------------------------------------
# Continue a text


def read_prompt(cfg: SampleConfig) -> str:
    """Return --prompt, or the content of --prompt_file."""
    if not cfg.prompt_file:
        return cfg.prompt
    try:
        prompt = Path(cfg.prompt_file).read_text(encoding="utf-8-sig")
    except OSError as e:
        raise UserError(f"--prompt_file {cfg.prompt_file}: {e.strerror}") from None
    except UnicodeDecodeError as e:
        wrong = f"not UTF-8 ({e.reason} at byte {e.start})"
        raise UserError(f"--prompt_file {cfg.prompt_file}: {wrong}") from None
    if not prompt.strip():
        empty = "holds no text; leave it out to begin a new document"
        raise UserError(f"--prompt_file {cfg.prompt_file}: {empty}")
    return prompt


def encode_prompt(prompt: str, tokenizer: Tokenizer, block_size: int) -> tuple[str, list[int]]:
    """Return the text to continue and its token ids, which follow the tokenizer's prefix.

    The prefix of our own tokenizers is an eos, since a document begins after one. Raises UserError
    if the ids are more than block_size.
    """
    # A terminal can pass any bytes. Python holds those that are not UTF-8 as surrogates.
    prompt = prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    try:
        own = tokenizer.encode(prompt).tolist()
    except ValueError as e:
        raise UserError(f"the prompt has no tokens: {e}") from None
    if tokenizer.unk_id in own:
        unknown = [c for c in sorted(set(prompt)) if tokenizer.unk_id in tokenizer.encode(c)]
        note(f"the tokenizer has no token for {', '.join(map(repr, unknown))}: the model reads unk")
    ids = [*tokenizer.prefix, *own] or [tokenizer.eos_id]
    if len(ids) > block_size:
        most = block_size - len(tokenizer.prefix)
        raise UserError(f"the prompt has {len(own):,} tokens, the model sees {most:,}: shorten it")
    return prompt, ids


def continue_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    ids: list[int],
    cfg: SampleConfig,
    generator: torch.Generator,
) -> None:
    """Print num_samples continuations of a prompt, all made in one batch.

    The first is printed while it is made, the others after it.
    """
    idx = torch.tensor([ids] * cfg.num_samples, device=model.wte.weight.device)  # (B, T)
    # The decoder holds back the bytes of a character until it is complete.
    utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
    eos_id = tokenizer.eos_id if cfg.stop_at_eos else None
    settings = dict(temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p)
    settings |= dict(eos_id=eos_id, generator=generator)

    print(prompt, end="", flush=True)
    made = []
    started = time.perf_counter()
    try:
        for token in model.generate(idx, cfg.max_new_tokens, **settings):  # (B,)
            made.append(token)
            print(utf8.decode(tokenizer.token_bytes(int(token[0]))), end="", flush=True)
    except ArithmeticError as e:
        raise UserError(f"{e}: try --dtype=float32") from None
    print(utf8.decode(b"", final=True))
    rows = torch.stack(made, dim=1).tolist()
    seconds = time.perf_counter() - started

    for number, row in enumerate(rows[1:], 2):
        text = b"".join(map(tokenizer.token_bytes, row)).decode(errors="replace")
        print(f"---------------- sample {number}\n{prompt}{text}")
    if eos_id is None:
        count = sum(len(row) for row in rows)
    else:  # the tokens before the first eos of each row
        count = sum((row + [eos_id]).index(eos_id) for row in rows)
    print(f"[{count} tokens, {count / seconds:.1f} tok/s]", file=sys.stderr)


def answer_prompts(
    model: GPT, tokenizer: Tokenizer, cfg: SampleConfig, generator: torch.Generator
) -> None:
    """Read prompts from the terminal and continue each, until the input ends."""
    while True:
        try:
            line = input("prompt> ")
        except EOFError:
            return
        try:
            prompt, ids = encode_prompt(line, tokenizer, model.config.block_size)
        except UserError as e:
            print(f"error: {e}", file=sys.stderr)
            continue
        continue_text(model, tokenizer, prompt, ids, cfg, generator)


# --------------------------------------------------------------------------------------------------
# Measure the loss


def evaluate_on(
    folder: Path,
    model: GPT,
    model_folder: Path,
    tokenizer: Tokenizer | None,
    cfg: SampleConfig,
    machine: Machine,
) -> str:
    """Return a line with the model's loss on the val.bin of a data set.

    Bits per byte can be compared between models with different tokenizers. Raises UserError if the
    data set does not fit the model, or if the loss is not finite.
    """
    meta = open_dataset(folder)
    if tokenizer is not None and not same_ids(tokenizer, load_tokenizer(folder)):
        again = f"prepare the same texts with --tokenizer={cfg.tokenizer or model_folder}"
        raise UserError(f"--eval {folder}: made with another tokenizer than the model's: {again}")
    V = model.config.vocab_size
    if meta["vocab_size"] > V:
        larger = f"a vocabulary of {meta['vocab_size']:,}; the model has {V:,}"
        raise UserError(f"--eval {folder}: {larger}")
    T = cfg.block_size or min(model.config.block_size, 1024)
    if T > model.config.block_size:
        raise UserError(f"--block_size {T}: the model sees {model.config.block_size} tokens")
    verify(folder, meta, "val")
    val = meta["splits"]["val"]
    windows = open_windows(DataSet(folder.name, folder, meta, Fraction(1)), "val", T)
    count = len(windows.fixed_starts(cfg.eval_tokens))
    B = min(cfg.batch_size, count)
    loss = evaluate(model, windows, cfg.eval_tokens, B, machine, bar=True)
    if not math.isfinite(loss):
        damaged = "its weights are damaged, or need another --dtype"
        raise UserError(f"--eval {folder}: the loss of {model_folder} is {loss}: {damaged}")
    _, _, units = in_other_units(loss, val["bytes"] / val["tokens"])
    figures = f"validation loss {loss:.4f} | {units}"
    return f"{folder}: {figures} | {count:,} windows of {T:,} tokens"


def main() -> None:
    cfg = parse(SampleConfig, doc=__doc__)
    find_checkpoint(cfg)  # first, because a missing checkpoint is the likeliest mistake
    prompt = read_prompt(cfg)
    device = pick_device(cfg.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dtype, why = pick_dtype(cfg.dtype, device)
    folder, known, model, tokenizer = open_model(cfg)
    with memory_advice("for the weights of this model in fp32"):
        model.to(device)
    if cfg.dtype == "auto" and dtype == torch.float16 and not cfg.eval:
        # To make text, the weights themselves are in dtype. In fp16, numbers may overflow where
        # autocast, which only an evaluation uses, computes in fp32.
        dtype = torch.float32
    size = f"{model.num_params()['total'] / 1e6:.1f}M parameters"
    precision = f"{device} {str(dtype).removeprefix('torch.')}"
    about = ", ".join(filter(None, [str(folder), known, size, precision, unverified(folder)]))

    if cfg.eval:
        machine = Machine(0, 0, 1, device, dtype, why)
        with memory_advice("in the evaluation: lower --batch_size or --block_size"):
            print(evaluate_on(Path(cfg.eval), model, folder, tokenizer, cfg, machine))
        print(f"[{about}]", file=sys.stderr)
        if tokenizer is None:
            assumed = f"its ids are assumed to be those of {cfg.eval}"
            print(f"note: no tokenizer is there: {assumed}", file=sys.stderr)
        return

    V = model.config.vocab_size
    if tokenizer.vocab_size > V:
        larger = f"its tokenizer has {tokenizer.vocab_size:,} tokens"
        raise UserError(f"{folder}: a vocabulary of {V:,}; {larger}")
    model = model.to(dtype).eval()
    prompt, ids = encode_prompt(prompt, tokenizer, model.config.block_size)
    generator = torch.Generator(device).manual_seed(cfg.seed)
    print(f"[{about}]", file=sys.stderr)
    if cfg.interactive:
        answer_prompts(model, tokenizer, cfg, generator)
    else:
        with memory_advice("for so many texts at once: lower --num_samples"):
            continue_text(model, tokenizer, prompt, ids, cfg, generator)


if __name__ == "__main__":
    run(main)

"""Text from a model, or its loss on a data set.

    python sample.py                                          # the newest checkpoint of the newest run, from nothing
    python sample.py --prompt "def main(" --num_samples 3 --temperature 0.7
    python sample.py --ckpt out/demo/ckpt/step_00000400 --prompt_file prompt.txt
    python sample.py --interactive                            # a prompt a line, until Ctrl-D
    python sample.py --ckpt ../Qwen3-0.6B-Base --eval data/mine        # loss, perplexity and bits per byte

A base model continues text, it does not chat. A folder is all that is needed: it holds the shape, the weights and the
tokenizer. It may be a checkpoint of train.py, or anybody's GPT2LMHeadModel, LlamaForCausalLM or Qwen3ForCausalLM; nanoGPT's
ckpt.pt needs --tokenizer beside it. A text starts behind an eos, as the documents did in training (in a folder of others: as
its tokenizer has it), and ends at the next one.
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
from hardware.disk import MANIFEST
from hardware.machine import Machine, memory_advice, pick_device, pick_dtype
from model import GPT
from text.dataset import DataSet, find_tokenizer, load_tokenizer, open_dataset, tokenizer_of_model, verify
from text.tokenizer import SentencePiece, Tiktoken, same_ids
from text.windows import open_windows
from training.evaluate import evaluate
from training.huggingface import from_pretrained, is_nanogpt, unverified
from training.report import in_other_units
from training.runs import newest_checkpoint


@dataclass(frozen=True)
class SampleConfig:
    # ---- What to continue ----
    ckpt: str = ""  # a model folder; default: the newest checkpoint under out_dir
    tokenizer: str = ""  # for a model that has none: a data set's folder, a .model or .tiktoken file, gpt2, ...
    out_dir: str = "out"  # where runs live
    prompt: str = ""  # the text to continue; empty: a new document
    prompt_file: str = ""  # or a file that holds it
    interactive: bool = False  # read prompts from the terminal
    # ---- How ----
    num_samples: int = 1  # continuations of each prompt, made in one batch
    max_new_tokens: int = 256  # in each
    temperature: float = 0.8  # 0: always the likeliest token; 1: the model's own probabilities
    top_k: int = 0  # only the k likeliest tokens; 0: all
    top_p: float = 0.95  # only the likeliest tokens that make up this probability; 1: all
    stop_at_eos: bool = True  # end a text where the model ends it
    seed: int = 1337  # of the dice
    # ---- Evaluation, in place of text ----
    eval: str = ""  # a data set's folder, data/NAME: the loss on its val.bin
    eval_tokens: int = 0  # so many of them, in fixed windows spread evenly; 0: all
    block_size: int = 0  # tokens in a window; 0: the model's, at most 1,024
    batch_size: int = 8  # windows at a time
    # ---- Device ----
    device: str = "auto"  # auto: cuda, then mps, then cpu
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # of the weights and the arithmetic

    def problems(self) -> list[str]:
        positive, not_negative = "num_samples max_new_tokens batch_size", "temperature top_k eval_tokens block_size"
        wrong = [f"{k} must be positive" for k in positive.split() if getattr(self, k) < 1]
        wrong += [f"{k} must not be negative" for k in not_negative.split() if getattr(self, k) < 0]
        if not 0 <= self.seed < 2**63:
            wrong.append("seed must be between 0 and 2^63")
        if self.interactive and (self.prompt or self.prompt_file):
            wrong.append("interactive reads its prompts from the terminal: give it none")
        if not 0 < self.top_p <= 1:
            wrong.append("top_p must be above 0 and at most 1")
        if self.prompt and self.prompt_file:
            wrong.append("give prompt or prompt_file, not both")
        return wrong


def find_checkpoint(cfg: SampleConfig) -> Path:
    if cfg.ckpt:
        folder = Path(cfg.ckpt)
        if not (folder / "config.json").exists() and not is_nanogpt(folder):
            raise UserError(f"--ckpt {folder}: no checkpoint there (a folder with config.json and model.safetensors)")
        return folder
    found: dict[float, Path] = {}  # time of writing -> checkpoint
    for ckpt_dir in Path(cfg.out_dir).glob("*/ckpt"):
        try:
            if newest := newest_checkpoint(ckpt_dir):
                found[(newest / MANIFEST).stat().st_mtime] = newest
        except (UserError, OSError) as e:  # a disk that is not mounted, or a checkpoint that was just superseded
            note(str(e))
    if not found:
        raise UserError(
            f"no checkpoint under {cfg.out_dir}/: train one first (python train.py config/demo.py), or name one with --ckpt"
        )
    return found[max(found)]


def open_model(cfg: SampleConfig) -> tuple[Path, GPT, SentencePiece | Tiktoken | None]:
    """(folder, model, its tokenizer) of the checkpoint that is meant. A training may delete it meanwhile: then the next."""
    while True:
        folder = find_checkpoint(cfg)
        try:
            with memory_advice("for the weights of this model in fp32"):
                return folder, from_pretrained(folder), model_tokenizer(folder, cfg)
        except (UserError, ValueError) as e:
            if cfg.ckpt or folder.exists():
                why = str(e) if isinstance(e, UserError) else f"{folder}: cannot be loaded ({e})"
                raise UserError(why) from None


def encode_prompt(prompt: str, tokenizer: SentencePiece | Tiktoken, block_size: int) -> tuple[str, list[int]]:
    """(the text that is continued, its ids behind the tokenizer's prefix: ours is an eos, since a document begins)."""
    prompt = prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # a terminal can pass any bytes
    try:
        own = tokenizer.encode(prompt).tolist()
    except ValueError as e:
        raise UserError(f"the prompt has no tokens: {e}") from None
    ids = [*tokenizer.prefix, *own] or [tokenizer.eos_id]
    if len(ids) > block_size:
        most = block_size - len(tokenizer.prefix)
        raise UserError(f"the prompt has {len(own):,} tokens, the model sees {most:,}: shorten it")
    return prompt, ids


def continue_text(
    model: GPT, tokenizer, prompt: str, ids: list[int], cfg: SampleConfig, generator: torch.Generator
) -> None:
    """Print num_samples continuations: the first as it is made, the others, made in the same batch, after it."""
    idx = torch.tensor([ids] * cfg.num_samples, device=model.wte.weight.device)  # (B, T)
    utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")  # holds back half a Chinese character
    eos_id = tokenizer.eos_id if cfg.stop_at_eos else None
    settings = dict(temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p, eos_id=eos_id, generator=generator)

    print(prompt, end="", flush=True)
    made, started = [], time.perf_counter()
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
    count = sum(len(row) if eos_id is None else (row + [eos_id]).index(eos_id) for row in rows)
    print(f"[{count} tokens, {count / seconds:.1f} tok/s]", file=sys.stderr)


def model_tokenizer(folder: Path, cfg: SampleConfig) -> SentencePiece | Tiktoken | None:
    """The model's tokenizer; None if it has none, which evaluation can do without."""
    tokenizer = find_tokenizer(cfg.tokenizer) if cfg.tokenizer else tokenizer_of_model(folder)
    if tokenizer is None and not cfg.eval:
        raise UserError(f"{folder}: no tokenizer is there: name it, as --tokenizer=gpt2")
    return tokenizer


def evaluate_on(
    folder: Path,
    model: GPT,
    model_folder: Path,
    tokenizer: SentencePiece | Tiktoken | None,
    cfg: SampleConfig,
    machine: Machine,
) -> str:
    """A line with the model's loss on a data set's val.bin; bits per byte can be compared between tokenizers."""
    meta = open_dataset(folder)
    if tokenizer is not None and not same_ids(tokenizer, load_tokenizer(folder)):
        again = f"prepare the same texts once more, with --tokenizer={cfg.tokenizer or model_folder}"
        raise UserError(f"--eval {folder}: made with another tokenizer than the model's: {again}")
    if (V := meta["vocab_size"]) > model.config.vocab_size:
        raise UserError(f"--eval {folder}: a vocabulary of {V:,}; the model has {model.config.vocab_size:,}")
    T = cfg.block_size or min(model.config.block_size, 1024)
    if T > model.config.block_size:
        raise UserError(f"--block_size {T}: the model sees {model.config.block_size} tokens")
    verify(folder, meta, "val")
    windows, val = open_windows(DataSet(folder.name, folder, meta, Fraction(1)), "val", T), meta["splits"]["val"]
    count = len(windows.fixed_starts(cfg.eval_tokens))
    loss = evaluate(model, windows, cfg.eval_tokens, min(cfg.batch_size, count), machine, bar=True)
    if not math.isfinite(loss):
        damaged = "its weights are damaged, or need another --dtype"
        raise UserError(f"--eval {folder}: the loss of {model_folder} is {loss}: {damaged}")
    return f"{folder}: {in_other_units(loss, val['bytes'] / val['tokens'])[2]} | {count:,} windows of {T:,} tokens"


def main() -> None:
    cfg = parse(SampleConfig, doc=__doc__)
    find_checkpoint(cfg)  # before all else: the likeliest mistake
    try:
        prompt = Path(cfg.prompt_file).read_text(encoding="utf-8-sig") if cfg.prompt_file else cfg.prompt
    except OSError as e:
        raise UserError(f"--prompt_file {cfg.prompt_file}: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise UserError(f"--prompt_file {cfg.prompt_file}: not UTF-8 ({e.reason} at byte {e.start})") from None
    if cfg.prompt_file and not prompt.strip():
        raise UserError(f"--prompt_file {cfg.prompt_file}: holds no text; leave it out to begin a new document")
    device = pick_device(cfg.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dtype, why = pick_dtype(cfg.dtype, device)
    folder, model, tokenizer = open_model(cfg)
    with memory_advice("for the weights of this model in fp32"):
        model.to(device)
    if cfg.dtype == "auto" and dtype == torch.float16 and not cfg.eval:
        dtype = torch.float32  # the weights themselves in fp16, without autocast's fp32 islands, may overflow
    size = f"{model.num_params()['total'] / 1e6:.1f}M parameters"
    precision = str(dtype).removeprefix("torch.")
    about = ", ".join(filter(None, [str(folder), size, f"{device} {precision}", unverified(folder)]))
    if cfg.eval:
        machine = Machine(0, 0, 1, device, dtype, why)
        with memory_advice("in the evaluation: lower --batch_size or --block_size"):
            print(evaluate_on(Path(cfg.eval), model, folder, tokenizer, cfg, machine))
        print(f"[{about}]", file=sys.stderr)
        if tokenizer is None:
            print(f"note: no tokenizer is there: its ids are taken to be those of {cfg.eval}", file=sys.stderr)
        return
    if tokenizer.vocab_size > (V := model.config.vocab_size):
        raise UserError(f"{folder}: a vocabulary of {V:,}; its tokenizer has {tokenizer.vocab_size:,} tokens")
    model = model.to(dtype).eval()
    start = encode_prompt(prompt, tokenizer, model.config.block_size)
    generator = torch.Generator(device).manual_seed(cfg.seed)
    print(f"[{about}]", file=sys.stderr)
    if not cfg.interactive:
        with memory_advice("of so many texts at once: lower --num_samples"):
            continue_text(model, tokenizer, *start, cfg, generator)
        return
    while True:
        try:
            prompt = input("prompt> ")
        except EOFError:
            return
        try:
            start = encode_prompt(prompt, tokenizer, model.config.block_size)
        except UserError as e:
            print(f"error: {e}", file=sys.stderr)
            continue
        continue_text(model, tokenizer, *start, cfg, generator)


if __name__ == "__main__":
    run(main)

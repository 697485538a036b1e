"""Text from a checkpoint.

    python sample.py                                          # the newest checkpoint of the newest run, from nothing
    python sample.py --prompt "def main(" --num_samples 3 --temperature 0.7
    python sample.py --ckpt out/demo/ckpt/step_00000400 --prompt_file prompt.txt
    python sample.py --interactive                            # a prompt a line, until Ctrl-D

A base model continues text, it does not chat. A checkpoint folder is all that is needed: it holds the shape, the weights
and the tokenizer. Every text starts behind an eos, as the documents did in training, and ends at the next one.
"""

import codecs
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from configurator import UserError, parse, run
from dataset import load_tokenizer
from model import GPT, newest_checkpoint
from train import pick_dtype


@dataclass(frozen=True)
class SampleConfig:
    # ---- What to continue ----
    ckpt: str = ""  # a checkpoint folder; default: the newest one under out_dir
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
    # ---- Device ----
    device: str = "auto"  # auto: cuda, then mps, then cpu
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # of the weights and the arithmetic

    def problems(self) -> list[str]:
        wrong = [f"{k} must be positive" for k in ("num_samples", "max_new_tokens") if getattr(self, k) < 1]
        wrong += [f"{k} must not be negative" for k in ("temperature", "top_k") if getattr(self, k) < 0]
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
        if not (folder / "config.json").exists():
            raise UserError(f"--ckpt {folder}: no checkpoint there (a folder with config.json and model.safetensors)")
        return folder
    found = [c for run_dir in Path(cfg.out_dir).glob("*/ckpt") if (c := newest_checkpoint(run_dir))]
    if not found:
        raise UserError(
            f"no checkpoint under {cfg.out_dir}/: train one first (python train.py config/demo.py), or name one with --ckpt"
        )
    return max(found, key=lambda c: (c / "manifest.json").stat().st_mtime)


def encode_prompt(prompt: str, tokenizer, block_size: int) -> tuple[str, list[int]]:
    """(the text that is continued, its ids behind an eos: a document begins)."""
    prompt = prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # a terminal can pass any bytes
    ids = [tokenizer.eos_id, *tokenizer.encode(prompt).tolist()]
    if len(ids) > block_size:
        raise UserError(f"the prompt has {len(ids) - 1:,} tokens, the model sees {block_size - 1:,}: shorten it")
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


def main() -> None:
    cfg = parse(SampleConfig, doc=__doc__)
    folder = find_checkpoint(cfg)
    try:
        prompt = Path(cfg.prompt_file).read_text(encoding="utf-8-sig") if cfg.prompt_file else cfg.prompt
    except OSError as e:
        raise UserError(f"--prompt_file {cfg.prompt_file}: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise UserError(f"--prompt_file {cfg.prompt_file}: not UTF-8 ({e.reason} at byte {e.start})") from None
    if cfg.prompt_file and not prompt.strip():
        raise UserError(f"--prompt_file {cfg.prompt_file}: holds no text; leave it out to begin a new document")
    device = cfg.device
    if device == "auto":
        device = (torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")).type
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as e:
        raise UserError(f"--device={device}: not usable here ({str(e).splitlines()[0]})") from None
    dtype, _ = pick_dtype(cfg.dtype, torch.device(device))
    if cfg.dtype == "auto" and dtype == torch.float16:
        dtype = torch.float32  # the weights themselves in fp16, without autocast's fp32 islands, may overflow
    try:
        model = GPT.from_pretrained(folder).to(device, dtype).eval()
    except (OSError, ValueError) as e:
        raise UserError(f"{folder}: cannot be loaded ({str(e).splitlines()[0]})") from None
    tokenizer = load_tokenizer(folder)
    start = encode_prompt(prompt, tokenizer, model.config.block_size)
    generator = torch.Generator(device).manual_seed(cfg.seed)
    print(
        f"[{folder}, {model.num_params()['total'] / 1e6:.1f}M parameters, {device} {str(dtype).removeprefix('torch.')}]",
        file=sys.stderr,
    )
    if not cfg.interactive:
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

"""Continue a text with a model, or measure its loss on a data set.

Without settings, the newest checkpoint of the newest run continues the run's sample_prompt, which
is also what it continued during the training. If that is empty, it begins a new document:

    python sample.py
    python sample.py --prompt "Robot.sing: Return" "RobotError: Raised when"
    python sample.py --ckpt out/demo/ckpt/step_00000600 --prompt "$(cat prompt.txt)"
    # three new documents
    python sample.py --prompt "" --num_samples 3
    # the checkpoint with the lowest validation loss
    python sample.py --ckpt out/demo --which best
    # a prompt a line, until Ctrl-D
    python sample.py --interactive
    # loss, perplexity and bits per byte of a data set
    python sample.py --ckpt ../Qwen3-0.6B-Base --eval data/mine

A base model continues a text; it does not chat. A model folder is all that is needed: it holds the
shape, the weights and the tokenizer. It may be a checkpoint of train.py, or a GPT2LMHeadModel,
Llama, Mistral, Qwen2 or Qwen3 from anywhere. nanoGPT's ckpt.pt also needs --tokenizer. A text
starts after an eos, as the documents did in training, and ends at the next eos. In a folder that
train.py did not write, it starts as the tokenizer there says. Let no prompt end in a space: the
first token of a word has its own. A low temperature suits a small model, since its unlikely tokens
are noise; try 0.8 or 1 for a large one.
"""

import codecs
import math
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

import torch

from configurator import UserError, names_elsewhere, note, parse, run
from hardware import kernels
from hardware.decoding import record_decoding
from hardware.disk import MANIFEST, damage, read_object
from hardware.machine import Machine, memory_advice, pick_device, pick_dtype
from hardware.terminal import plural
from model import GPT
from text.dataset import DataSet, load_tokenizer, open_dataset, open_windows, verify
from text.hf_tokenizer import find_tokenizer, tokenizer_of_model
from text.tokenizer import Tokenizer, same_ids
from training.checkpoint import newest_checkpoint
from training.evaluate import evaluate
from training.huggingface import from_pretrained, nanogpt_file, unverified
from training.report import in_other_units
from training.runs import losses_of, newest_run

# Without max_new_tokens, a text ends with its line from this number of tokens on,
ENOUGH = 256
MOST = 320  # and here in any case


@dataclass(frozen=True)
class SampleConfig:
    elsewhere = names_elsewhere("training/elsewhere_sample.txt")
    argument = "--prompt TEXT"
    # ---- What to continue ----
    ckpt: str = ""  # a model folder, or a run's folder out/RUN; default: the newest run
    which: Literal["newest", "best"] = "newest"  # of a run's checkpoints; best: by validation loss
    tokenizer: str = ""  # if the model has none: a folder, a .model or .tiktoken file, or gpt2, ...
    out_dir: str = "out"  # where the runs are
    prompt: tuple[str, ...] = ()  # texts to continue ('': a new document); default: sample_prompt
    interactive: bool = False  # read prompts from the terminal
    # ---- How ----
    num_samples: int = 1  # continuations of each prompt, made in one batch
    max_new_tokens: int = 0  # of each continuation; 0: at the end of a line, 256 to 320
    temperature: float = 0.6  # 0: always the likeliest token; 1: the model's own probabilities
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
        lowest = dict(num_samples=1, max_new_tokens=0, temperature=0, top_k=0)
        lowest |= dict(eval_tokens=0, block_size=0, batch_size=1)
        problems = [f"{k} must be at least {n}" for k, n in lowest.items() if getattr(self, k) < n]
        if not 0 <= self.seed < 2**63:
            problems.append("seed must be between 0 and 2^63")
        if not 0 < self.top_p <= 1:
            problems.append("top_p must be above 0 and at most 1")
        if self.prompt and self.interactive:
            problems.append("give prompt or interactive, not both")
        return problems


# --------------------------------------------------------------------------------------------------
# The model and its tokenizer


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
    if (run / "config.json").exists() or nanogpt_file(run):
        return run, str(run)
    losses = losses_of(run)
    checkpoint = newest_checkpoint(run / "ckpt")
    if cfg.which == "best":
        checkpoint = min(losses, key=losses.get, default=None)
    if checkpoint is None:
        missing = f"no model is there, and no checkpoint of a run for --which={cfg.which}"
        raise UserError(f"--ckpt {run}: {missing}")
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
        except (UserError, ValueError, OSError) as e:
            if folder.exists():
                problem = e if isinstance(e, UserError) else f"{folder}: cannot be loaded ({e})"
                raise UserError(str(problem)) from None


def model_tokenizer(folder: Path, vocab_size: int, cfg: SampleConfig) -> Tokenizer:
    """Return the tokenizer of a model: its own, or that of --tokenizer, or that of --eval.

    vocab_size: of the model. Raises UserError if there is no tokenizer, if it has more tokens than
    the model, or if two of them do not make the same ids.
    """
    of_model = tokenizer_of_model(folder)
    named = find_tokenizer(cfg.tokenizer) if cfg.tokenizer else None
    of_data = load_tokenizer(cfg.eval) if cfg.eval else None
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
    settings = "train_config.json"
    if (folder / MANIFEST).exists() and (problem := damage(folder, [settings])):
        raise UserError(f"{problem}: give --prompt, and it is not needed")
    try:
        return [str(read_object(folder / settings).get("sample_prompt") or "")]
    except (OSError, ValueError):  # it is not a checkpoint of train.py
        return [""]


def encode_prompt(prompt: str, tokenizer: Tokenizer, block_size: int) -> tuple[str, list[int]]:
    """Return the text to continue and its token ids, which follow the tokenizer's prefix.

    The prefix of our own tokenizers is an eos, since a document begins after one. Raises UserError
    if the ids are more than block_size.
    """
    # A terminal can pass any bytes. Python holds those that are not UTF-8 as surrogates.
    prompt = prompt.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    try:
        ids = tokenizer.encode(prompt).tolist()
    except ValueError as e:
        raise UserError(f"the prompt has no tokens: {e}") from None
    if tokenizer.unk_id in ids:
        unknown = [c for c in sorted(set(prompt)) if tokenizer.unk_id in tokenizer.encode(c)]
        note(f"the tokenizer has no token for {', '.join(map(repr, unknown))}: the model reads unk")
    room = block_size - len(tokenizer.prefix)
    if len(ids) > room:
        raise UserError(f"the prompt has {len(ids):,} tokens, the model sees {room:,}: shorten it")
    return prompt, [*tokenizer.prefix, *ids] or [tokenizer.eos_id]


def typed_prompts(tokenizer: Tokenizer, block_size: int) -> Iterator[tuple[str, list[int]]]:
    """Yield the prompts that are typed in the terminal and their ids, until the input ends."""
    if sys.stdin.isatty():
        print("Type the beginning of a text; nothing: a new document. Ctrl-D ends.")
    while True:
        try:
            yield encode_prompt(input("prompt> "), tokenizer, block_size)
        except EOFError:
            print()  # Ctrl-D leaves the cursor behind the prompt
            return
        except UserError as e:
            print(f"error: {e}", file=sys.stderr)


def continue_text(
    model: GPT, tokenizer: Tokenizer, prompt: str, ids: list[int], cfg: SampleConfig
) -> None:
    """Print num_samples continuations of a prompt, all made in one batch, and their speed.

    The first is printed while it is made, the others after it.
    """
    started = time.perf_counter()
    idx = torch.tensor([ids] * cfg.num_samples, device=model.wte.weight.device)  # (B, T)
    eos_id = tokenizer.eos_id if cfg.stop_at_eos else None
    settings = dict(temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p, eos_id=eos_id)
    steps: list[list[int]] = []  # the next token of each text, (B,)

    def first_text() -> Iterator[int]:
        try:
            for tokens in model.generate(idx, cfg.max_new_tokens or MOST, **settings):
                steps.append(tokens.tolist())
                yield steps[-1][0]
        except ArithmeticError as e:
            raise UserError(f"{e}: try --dtype=float32") from None

    print(prompt, end="", flush=True)
    tokens = first_text()
    for piece in text_pieces(tokens, tokenizer, cfg):
        print(piece, end="", flush=True)
    print()
    if cfg.num_samples > 1:
        list(tokens)  # the other texts may be longer
    for number in range(1, cfg.num_samples):
        text = "".join(text_pieces([step[number] for step in steps], tokenizer, cfg))
        print(f"---------------- sample {number + 1}\n{prompt}{text}")
    count = sum(token != eos_id for step in steps for token in step)
    rate = count / (time.perf_counter() - started)
    print(f"[{plural(count, 'token')}, {rate:.1f} tok/s]", file=sys.stderr)


def text_pieces(tokens: Iterable[int], tokenizer: Tokenizer, cfg: SampleConfig) -> Iterator[str]:
    """Yield the text of the tokens piece by piece, up to the place where it ends.

    It ends at an eos, and without max_new_tokens also at the first line end after ENOUGH tokens.
    """
    # The decoder holds back the bytes of a character until it is complete.
    utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for number, token in enumerate(tokens, 1):
        if cfg.stop_at_eos and token == tokenizer.eos_id:
            break
        piece = utf8.decode(tokenizer.token_bytes(token))
        if not cfg.max_new_tokens and number >= ENOUGH and "\n" in piece:
            yield piece.partition("\n")[0]
            return
        yield piece
    yield utf8.decode(b"", final=True)


# --------------------------------------------------------------------------------------------------
# Measure the loss


def evaluate_on(folder: Path, model: GPT, cfg: SampleConfig, machine: Machine) -> str:
    """Return the model's loss on the val.bin of a data set, in words.

    It has two losses. For the first, windows begin anywhere, and a token sees all tokens before it.
    For the second, each document is read alone, from its own beginning. Bits per byte can be
    compared between models with different tokenizers. Raises UserError if the data set was changed,
    or if a loss is not finite.
    """
    T = cfg.block_size or min(model.config.block_size, 1024)
    if T > model.config.block_size:
        raise UserError(f"--block_size {T}: the model sees {model.config.block_size} tokens")
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
        if cfg.interactive:
            prompts = typed_prompts(tokenizer, T)
        else:
            prompts = [encode_prompt(text, tokenizer, T) for text in read_prompts(cfg, folder)]
        model.to(machine.device, machine.dtype).eval()
        record_decoding(model)
        torch.manual_seed(cfg.seed)
        print(f"[{label}]", file=sys.stderr)
        for number, (prompt, ids) in enumerate(prompts):
            if number and not cfg.interactive:
                print("----------------")
            continue_text(model, tokenizer, prompt, ids, cfg)


if __name__ == "__main__":
    run(main)

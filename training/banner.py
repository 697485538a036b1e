"""What a run says before its first step: the lines that describe it, and what to say at its end."""

import math
import sys
from pathlib import Path

import torch

from configurator import changes, row
from hardware.kernels import attention_kernel
from hardware.machine import Machine, capacity
from hardware.terminal import plural
from model import GPT, GPTConfig
from text.dataset import DataSet
from text.hf_tokenizer import llama_cpp_note, transformers_note
from text.tokenizer import SentencePiece, Tiktoken
from text.windows import Loader, share_within
from training.checkpoint import newest_checkpoint
from training.huggingface import caveat, hf_class
from training.memory import Step, largest_batch, needed
from training.plan import Plan, batch_warning, different_tokens, length_warnings
from training.report import in_words
from training.settings import TrainConfig


def banner(
    cfg: TrainConfig,
    sets: list[DataSet],
    loader: Loader,
    machine: Machine,
    plan: Plan,
    model: GPT,
    one_step: Step,
) -> str:
    """Return the lines that describe a run before its first step.

    loader: the windows of the run. one_step: what the memory of a step depends on.
    """
    c = model.config
    T = cfg.block_size
    V = sets[0].meta["vocab_size"]
    tokens = plan.tokens_at(plan.steps)
    batch = f"{plan.batch_size} x {T} x {plan.accum} accumulation x {machine.world} processes"
    shape = f"{hf_class(c) or 'GPT'}, {c.n_layer} layers x {c.n_embd}, "
    shape += f"{c.n_head} heads of {c.head_dim} ({c.n_kv_head} for keys and values)"
    params = model.num_params()
    attention = attention_kernel(c.n_head, T, c.head_dim, machine.device, machine.dtype, c.dropout)
    if machine.device.type == "cuda" and attention == "math":
        attention += ": warning: slow, no fused kernel takes this head_dim and dtype here"
    if cfg.documents != "stream":
        attention = f"within a document: {share_within(loader):.0%} of the T x T pairs of tokens"
    size = needed(model, one_step)
    room = capacity(machine.device)

    rows = {
        "settings": " ".join(f"{k}={v}" for k, v in changes(cfg).items()),
        "data": "; ".join(data_text(data, tokens) for data in sets) + f"; vocabulary {V:,}",
        "batch": f"{cfg.batch_tokens:,} tokens a step asked, {plan.step_tokens:,} actual = {batch}",
        "length": f"{plan.steps:,} optimization steps = {tokens:,} tokens"
        f" = {tokens / plan.epoch_tokens:.2f} epochs",
        "model": "; ".join(filter(None, [shape, caveat(c)])),
        "parameters": f"{params['total']:,} trainable, "
        f"{params['embedding'] / params['total']:.0%} of them embeddings; "
        f"{tokens / params['total']:.2g} tokens per parameter",
        "precision": f"{str(machine.dtype).removeprefix('torch.')}: {machine.why}",
        "attention": attention,
        "memory": f"{size / 1e9:.1f} GB predicted, of {room / 1e9:.1f}; "
        f"batch_size may be {largest_batch(model, one_step, room):,} at most",
    }
    different = different_tokens(tokens, sets)
    if different < 0.99 * tokens:
        rows["parameters"] += f", {different / params['total']:.2g} without repetitions"
    if warning := batch_warning(plan.step_tokens, cfg, machine.world):
        rows["batch"] += f"\n{warning}"
    for warning in length_warnings(plan, cfg, sets):
        rows["length"] += f"\n{warning}"
    gpus = torch.cuda.device_count() if machine.device.type == "cuda" else 1
    if machine.world == 1 and gpus > 1:
        command = f"torchrun --nproc_per_node={gpus} {' '.join(sys.argv)}"
        rows["GPUs"] = f"1 of {gpus} is used; to use all: {command}"
    if plan.begun_step == 0 and cfg.init_from in ("scratch", "auto"):
        rows["first loss"] = f"ln({V}) = {math.log(V):.2f} expected"
    return "\n".join(row(f"{key:>11}: ", value) for key, value in rows.items())


def slow_steps(flops: float, peak: float | None) -> str:
    """Return what to say before steps that take longer than a minute; "" if they do not.

    flops: of a step. peak: TFLOPS of all devices together, of which 40 % are reached, or None.
    """
    seconds = flops / (0.4e12 * peak) if peak else 0.0
    if seconds < 60:
        return ""
    shorter = "a smaller --batch_tokens makes it shorter; config/demo.py is a run for a CPU"
    return f"note: a step takes about {in_words(seconds)} here, at 40 % of the peak: {shorter}"


def data_text(data: DataSet, tokens: int) -> str:
    """Return the size of a data set and, in a mixture, its share of the run's `tokens` tokens."""
    train = data.meta["splits"]["train"]
    text = f"{data.name}: {plural(train['documents'], 'document')}, {train['tokens']:,} tokens"
    if data.weight < 1:
        text += f", {float(data.weight):.1%} of the windows = {data.epochs(tokens):.2f} epochs"
    return text


def last_lines(folder: Path, c: GPTConfig, tokenizer: SentencePiece | Tiktoken) -> str:
    """Return where the newest checkpoint of a run is, and what other programs must be told of it.

    c: the shape of the model.
    """
    kind = hf_class(c)
    notes = [transformers_note(tokenizer, kind), llama_cpp_note(tokenizer, kind, c.vocab_size)]
    lines = [f"checkpoint: {newest_checkpoint(folder / 'ckpt')}"]
    lines += [f"    elsewhere: {note} (docs/interchange.md)" for note in notes if note]
    return "\n".join(lines)

"""The banner: the lines that describe a run before its first step, with warnings."""

import math
import sys

import torch

from configurator import changes, row
from hardware.kernels import attention_kernel
from hardware.limits import memory_capacity
from hardware.machine import Machine
from hardware.terminal import plural
from model import GPT, INIT, GPTConfig
from text.windows import DataSet, Loader
from training.huggingface import ONLY_OURS, OURS, architecture_of
from training.memory import Workload, bytes_needed, largest_batch
from training.plan import Plan
from training.settings import TrainConfig

MOST_EPOCHS = 4  # repeated this often, text is worth about as much as new text: arXiv 2305.16264


def banner(
    cfg: TrainConfig,
    sets: list[DataSet],
    loader: Loader,
    machine: Machine,
    plan: Plan,
    model: GPT,
) -> str:
    """Return the lines that describe a run before its first step.

    loader: of the run's windows.
    """
    c = model.config
    device = machine.device
    attention = "within a document"
    if loader.eos_id is None:
        shape = (c.n_head, cfg.block_size, c.head_dim)
        attention = attention_kernel(*shape, device, machine.dtype, c.dropout)
    if device.type == "cuda" and attention == "math":
        attention += ": warning: slow, no fused kernel takes this head_dim and dtype here"
    empty = fraction_without_target(loader)
    capacity = memory_capacity(device)
    workload = Workload.of(cfg, plan, machine)
    rows = {
        "settings": " ".join(f"{k}={v}" for k, v in changes(cfg).items()),
        "data": "; ".join(describe_data(data) for data in sets),
        "windows": "; ".join(filter(None, (windows.cut for windows in loader.splits))),
        "no target": f"in {empty:.0%} of the windows, which teach nothing" if empty else "",
    }
    rows |= rows_of_plan(plan, cfg, sets, model, machine.world)
    rows |= rows_of_model(model, cfg.block_size)
    rows["parameters"] += f"; tokens per parameter: {rows.pop('tokens per parameter')}"
    rows["precision"] = f"{str(machine.dtype).removeprefix('torch.')}: {machine.why}"
    rows["attention"] = attention
    rows["memory"] = f"{bytes_needed(model, workload) / 1e9:.1f} GB predicted, "
    rows["memory"] += f"{capacity / 1e9:.1f} GB available; "
    rows["memory"] += f"largest batch_size that fits: {largest_batch(model, workload, capacity):,}"
    if device.type == "cuda" and machine.world == 1 and (gpus := torch.cuda.device_count()) > 1:
        command = f"torchrun --nproc_per_node={gpus} {' '.join(sys.argv)}"
        rows["GPUs"] = f"1 of {gpus} is used; to use all: {command}"
    if plan.start_step == 0 and cfg.init_from == "scratch":
        V = sets[0].meta["vocab_size"]
        rows["first loss"] = f"{first_loss(c, cfg.init):.2f} expected; ln({V}) = {math.log(V):.2f}"
    return "\n".join(row(f"{key:>11}: ", value) for key, value in rows.items() if value)


def first_loss(c: GPTConfig, init: str) -> float:
    """Return the expected loss of a model before its first step.

    After the last norm, the mean square of the residual stream is 1. So the logits have the
    variance n_embd std², and half of it is added to ln V, the loss of equal logits.
    """
    std = 0.02 if c.tie_embeddings else INIT[init]("head", c.n_embd, c.vocab_size, c.n_layer)
    return math.log(c.vocab_size) + c.n_embd * std**2 / 2


def rows_of_model(model: GPT, T: int) -> dict[str, str]:
    """Return the description of a model, for sequences of T tokens: heading -> text."""
    c = model.config
    n = model.num_params()
    a = architecture_of(c)
    shape = f"{a.name}, {c.n_layer} layers x {c.n_embd}, {c.n_head} heads of "
    shape += f"{c.head_dim} ({c.n_kv_head} for keys and values), d_ff {c.d_ff}, "
    shape += f"vocabulary {c.vocab_size:,}, T = {T}"
    return {
        "model": f"{shape}; {ONLY_OURS}" if a is OURS else shape,
        "parameters": f"{n['total']:,}, {n['embedding'] / n['total']:.0%} of them embeddings",
    }


def rows_of_plan(
    plan: Plan, cfg: TrainConfig, sets: list[DataSet], model: GPT, world: int
) -> dict[str, str]:
    """Return the batch and the length of a run, with warnings: heading -> text.

    sets: [] for a plan without data. world: processes.
    """
    tokens = plan.tokens_at(plan.steps)
    batch = f"{plan.batch_size} x {cfg.block_size} x {plan.accum} accumulation x {world}"
    batch += f" = {plan.step_tokens:,} tokens a step"
    if plan.step_tokens != cfg.batch_tokens:
        batch += f"; {cfg.batch_tokens:,} requested"
    length = f"{plural(plan.steps, 'step')} = {plural(tokens, 'token')}"
    if sets:
        length += f" = {plan.epochs_at(plan.steps):,.2f} epochs of {cfg.dataset or sets[0].name}"
    length += f", ended by {plan.ended_by}" if plan.ended_by else ""
    if (done := plan.position(plan.start_step)) != plan.start_step:
        length += f"\nnote: earlier steps had another size: {done / plan.position(plan.steps):.1%}"
        length += " of the run is done, and the schedule continues from there"
    length += repetition_warnings(tokens, cfg, sets)
    ratio = f"{tokens / model.num_params()['total']:.3g}"
    return {"batch": batch, "length": length, "tokens per parameter": ratio}


def describe_data(data: DataSet) -> str:
    """Return the size of a data set and, in a mixture, its fraction of the run's windows."""
    train = data.meta["splits"]["train"]
    text = f"{data.name}: {plural(train['documents'], 'document')}, {train['tokens']:,} tokens"
    return text if data.weight == 1 else f"{text}, {float(data.weight):.1%} of the windows"


def fraction_without_target(loader: Loader, count: int = 256) -> float:
    """Return the fraction of the first `count` windows of a run in which no target counts."""
    weights = loader.rows(loader.starts(0, count)).weights
    return 0.0 if weights is None else 1 - float(weights.any(axis=1).mean())


# --------------------------------------------------------------------------------------------------
# Warnings


def pace_note(flops: float, peak: float | None) -> str:
    """Return a note if a step takes more than a minute, at 40 % of the peak; else "".

    flops: of a step on each device. peak: TFLOPS of one device, or None.
    """
    seconds = flops / (0.4e12 * peak) if peak else 0
    if seconds <= 60:
        return ""
    shorter = "a smaller --batch_tokens makes it shorter; config/demo.py is a run for a CPU"
    return f"note: a step takes about {seconds / 60:,.0f} min here, at 40 % of the peak: {shorter}"


def repetition_warnings(tokens: int, cfg: TrainConfig, sets: list[DataSet]) -> str:
    """Return a line for each data set that a run of `tokens` tokens reads too often.

    One reading more than MOST_EPOCHS is accepted. There is no warning for fine-tuning, which reads
    few texts several times, or with documents=pad, where an epoch contains padding.
    """
    if cfg.init_from != "scratch" or cfg.documents == "pad":
        return ""
    times = {d.name: tokens * float(d.weight) / d.meta["splits"]["train"]["tokens"] for d in sets}
    repeated = {name: n for name, n in times.items() if n > MOST_EPOCHS + 1}
    advice = f"beyond about {MOST_EPOCHS}, repeated text is worth less and less (arXiv 2305.16264):"
    advice += f" prepare more text, lower batch_tokens, or give --max_epochs={MOST_EPOCHS}"
    warnings = [f"warning: {name} is read {n:,.1f} times; {advice}" for name, n in repeated.items()]
    return "".join(f"\n{warning}" for warning in warnings)

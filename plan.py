"""eveningGPT: plan a training run: its memory, time and energy, from its settings alone.

    # on six A100; --max_tokens=20e9 sets another length
    python plan.py config/train_1b.py --gpu=a100-80g --nproc=6
    python plan.py config/train_100m.py --gpu=v100-16g --nproc=6

Like train.py, it uses the data set that was prepared last, unless --dataset names one. With
--vocab_size it reads no data: then the run needs a length in steps or tokens.

All settings of train.py are accepted. The results come from formulas: those in training/memory.py,
flops_per_token in model.py, and those below. For the time of a run on this machine, start it and
read `eta` in the log of train.py.
"""

import re
import signal
from dataclasses import dataclass, replace
from itertools import product

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while torch is loaded, until run()

import torch

import configurator
from configurator import UserError, columns, folded, given_settings, option, row, validated
from hardware.limits import memory_advice, memory_capacity
from hardware.machine import Machine, pick_device, pick_dtype
from hardware.peak import CARDS, datasheet_peak, device_name, find_gpu, peak_tflops
from model import GPT, GPTConfig
from text.dataset import DataSet, open_datasets, open_windows
from training.banner import rows_of_model, rows_of_plan
from training.batch_size import plan_run
from training.huggingface import read_shape
from training.memory import Workload, bytes_needed, largest_batch, overhead, step_memory
from training.plan import Plan
from training.run_folder import with_model
from training.settings import (
    OPTIMIZERS,
    SHARDABLE,
    SHARDS,
    TrainConfig,
    extend_context,
    model_config,
    with_data,
)


@dataclass(frozen=True)
class PlanConfig(TrainConfig):
    gpu: str = option(
        "", "v100-16g, a100-80g, 4090, h100, ...; default: this machine's device", group="Where"
    )
    nproc: int = option(1, "number of devices, with one process each")
    vocab_size: int = option(
        0, "plan without data, for a vocabulary of this size; 0: the data set's", group="How much"
    )

    def problems(self) -> list[str]:
        problems = TrainConfig.problems(self)
        if not 0 <= self.vocab_size < 2**31 or self.nproc < 1:
            problems.append("vocab_size must be at least 0 and below 2^31, nproc at least 1")
        if self.vocab_size and not (self.max_steps or self.max_tokens):
            problems.append("vocab_size: a plan without data needs max_steps or max_tokens")
        if self.resume == "yes":
            problems.append("init_from=resume: a plan cannot resume a run; give the run's settings")
        return problems


@dataclass(frozen=True)
class Device:
    """A device of the planned run."""

    name: str
    kind: str  # cuda, cpu or mps
    dtype: torch.dtype  # of autocast
    tflops: float | None  # peak in that dtype; None if unknown
    source: str  # where the peak comes from
    bytes: float  # size of its memory
    watts: int | None = None


@dataclass(frozen=True)
class PlannedRun:
    """The input of the sections below."""

    cfg: PlanConfig
    sets: list[DataSet]
    model: GPT  # on the meta device: its weights have shapes only
    device: Device
    plan: Plan
    workload: Workload


def planned_run(cfg: PlanConfig) -> PlannedRun:
    """Return the run that the settings describe."""
    sets = prepared(cfg)
    with torch.device("meta"), memory_advice("on any device: make the model smaller"):
        model = GPT(shape_of(cfg, cfg.vocab_size or sets[0].meta["vocab_size"]))
    device = named_gpu(cfg) if cfg.gpu else own_device(cfg)
    T = cfg.block_size
    ways = dict(documents=cfg.documents, loss_on=cfg.loss_on)
    windows = [open_windows(data, "train", T, **ways) for data in sets]
    epoch_tokens = T * sum(w.n_windows for w in windows)
    machine = Machine(0, 0, cfg.nproc, torch.device(device.kind), device.dtype, "")
    planned, plan = plan_run(cfg, model, machine, epoch_tokens, device.bytes)
    cfg = replace(cfg, batch_size=planned.batch_size)
    return PlannedRun(cfg, sets, model, device, plan, Workload.of(cfg, plan, machine))


def prepared(cfg: PlanConfig) -> list[DataSet]:
    """Return the data sets, or [] for a plan without data.

    Raises UserError if a data set is missing or damaged.
    """
    if cfg.vocab_size:
        return []
    try:
        return open_datasets(with_data(cfg).dataset, cfg.data_dir)
    except UserError as e:
        raise UserError(f"{e}; --vocab_size=N plans without data") from None


def shape_of(cfg: PlanConfig, vocab_size: int) -> GPTConfig:
    """Return the shape of the model, from the settings or from the model to fine-tune.

    Raises UserError if that model cannot be read.
    """
    if cfg.init_from == "scratch":
        return model_config(cfg, vocab_size)
    return extend_context(replace(read_shape(cfg.init_from), dropout=cfg.dropout), cfg)


def named_gpu(cfg: PlanConfig) -> Device:
    """Return the GPU that --gpu names: from the table, or with the given memory and speed.

    Raises UserError if there is no such GPU, or if it does not support cfg.dtype.
    """
    card = find_gpu(cfg.gpu)
    dtype = torch.bfloat16 if card is None or "bf16" in card.tflops else torch.float16
    if cfg.dtype != "auto":
        dtype = getattr(torch, cfg.dtype)
    gb = sum(map(float, re.findall(r"(?:^|[\s_-])(\d+(?:\.\d+)?)gb?$", cfg.gpu.lower())))
    if card is None and not (gb and cfg.peak_tflops):
        cards = ", ".join(f"{card.name} {card.memory_gb}GB" for card in CARDS)
        others = "for another GPU, give its memory and speed: --gpu=4060-8g --peak_tflops=12"
        raise UserError(f"gpu: {cfg.gpu!r} is not in the table of GPUs; {others}; it has {cards}")
    peak, source = datasheet_peak(card.name, dtype) if card else (None, "")
    if card and peak is None:
        raise UserError(f"dtype={cfg.dtype}: not supported by {card.name}; leave dtype out")
    if cfg.peak_tflops:
        peak, source = peak_tflops(torch.device("cuda"), dtype, cfg.peak_tflops)
    if card is None:
        return Device(cfg.gpu, "cuda", dtype, peak, source, gb * 1e9)
    name = f"{card.name} {card.memory_gb} GB"
    return Device(name, "cuda", dtype, peak, source, card.bytes, card.watts)


def own_device(cfg: PlanConfig) -> Device:
    """Return the device of this machine, with the memory that train.py would have now."""
    device = pick_device(cfg.device)
    dtype = pick_dtype(cfg.dtype, device)[0]
    peak, source = peak_tflops(device, dtype, cfg.peak_tflops)
    size = memory_capacity(device) / (1 if device.type == "cuda" else cfg.nproc)
    name = device_name(device)
    card = find_gpu(name)
    return Device(name, device.type, dtype, peak, source, size, card.watts if card else None)


# --------------------------------------------------------------------------------------------------
# The sections


def section(title: str, rows: dict[str, str]) -> None:
    print(folded(f"\n{title}", columns()))
    width = max(map(len, rows))
    for key, value in rows.items():
        print(row(f"  {key:<{width}}  ", value))


def duration(hours: float) -> str:
    """Return hours as text, in a suitable unit: s, minutes, hours or days."""
    if hours <= 1 / 12:
        return f"{hours * 3600:.1f} s"
    if hours < 1:
        return f"{hours * 60:.1f} minutes"
    return f"{hours:,.1f} hours" if hours < 48 else f"{hours / 24:,.1f} days"


# ---- Memory ----


def print_memory(run: PlannedRun) -> None:
    moment, parts = step_memory(run.model, run.workload)
    peak = sum(parts.values())
    parts |= overhead(run.model, peak, run.workload)
    total = sum(parts.values())
    rows = {part: f"{size / 1e9:>8.3f} GB" for part, size in parts.items() if size}
    verdict = "fits" if total <= run.device.bytes else "DOES NOT FIT"
    rows["all"] = f"{total / 1e9:>8.3f} GB of {run.device.bytes / 1e9:.1f}: {verdict}"
    if run.device.kind == "cuda":
        rows["predicted peak"] = f"{peak / 1e9:>8.3f} GB by torch.cuda.max_memory_allocated"
    mode = "compiled" if run.workload.compiled else "eager"
    section(
        f"Memory of each device at batch_size {run.workload.B}, {mode}; the peak is {moment}", rows
    )


def print_choices(run: PlannedRun) -> PlannedRun:
    """Print the memory of other settings. If the run does not fit, print flags with which it fits.

    Return the run with these flags, if there are any. The cheapest come first: recompute=blocks
    takes up to a third more time, and shard sends more data.
    """
    workload = run.workload
    choices = {}
    for shard, again in product(SHARDS if workload.world > 1 else ["none"], [False, True]):
        flags = [f"--shard={shard}"] * (shard != "none") + ["--recompute=blocks"] * again
        choices[" ".join(flags)] = replace(workload, shard=shard, recompute=again)
    fitting = [flags for flags in choices if predicted_to_fit(run, choices[flags])]
    for name in SHARDABLE if workload.zero else OPTIMIZERS:
        if name != workload.optimizer:
            choices[f"--optimizer={name}"] = replace(workload, optimizer=name)
    rows = {}
    for flags, choice in choices.items():
        size = bytes_needed(run.model, choice)
        largest = largest_batch(run.model, choice, run.device.bytes)
        mark = "  <- current settings" if choice == workload else ""
        text = f"{size / 1e9:>8.2f} GB, largest batch_size {largest:,}{mark}"
        rows[flags or "neither shard nor recompute"] = text
    B, T = workload.B, workload.T
    section(f"Memory at batch_size {B}, and the largest that fits, of {T} tokens", rows)
    if predicted_to_fit(run, workload):
        return run
    if not fitting:
        advice = "nothing fits: lower batch_size to that of a row, or use more devices"
        print(f"  {advice}, or a smaller model")
        return run
    print(f"  it fits with {fitting[0]}\n  (the time below is with that)")
    workload = choices[fitting[0]]
    recompute = "blocks" if workload.recompute else "none"
    return replace(run, workload=workload, cfg=replace(run.cfg, recompute=recompute))


def predicted_to_fit(run: PlannedRun, workload: Workload) -> bool:
    return bytes_needed(run.model, workload) <= run.device.bytes


# ---- Time ----


def repeated_flops(model: GPT, T: int) -> int:
    """Return the FLOPs per token that recompute=blocks repeats: the forward pass of the blocks.

    In eager mode torch omits the last product of each block; this is not counted.
    """
    c = model.config
    weights = model.num_params()["matmul"] - c.vocab_size * c.n_embd  # of the blocks: 2 FLOPs each
    return 2 * weights + 4 * c.n_layer * c.n_head * c.head_dim * T  # and q k^T, and its result v


def print_time(run: PlannedRun) -> None:
    """Print batch, length and FLOPs of the run, and its hours at some fractions of the peak."""
    cfg = run.cfg
    tokens = run.plan.steps * run.plan.step_tokens
    params = run.model.num_params()["total"]
    flops = tokens * run.model.flops_per_token(cfg.block_size)
    work = f"{flops:.3g} (6 N + 12 L d T a token); {6 * params * tokens:.3g} by 6 N D"
    if cfg.recompute == "blocks":
        flops += tokens * repeated_flops(run.model, cfg.block_size)
        work += f"; {flops:.3g} with the blocks' forward pass computed twice"
    rows = rows_of_plan(run.plan, cfg, run.sets, run.model, cfg.nproc)
    rows["tokens per parameter"] += " (Chinchilla's optimum: about 20)"
    rows["FLOPs"] = work
    if tflops := run.device.tflops:
        rows |= rows_of_hours(run, flops, tflops)
    section("Time", rows)


def rows_of_hours(run: PlannedRun, flops: float, tflops: float) -> dict[str, str]:
    """Return the time and energy for `flops` FLOPs, at several fractions of the peak."""
    cfg = run.cfg
    rows = {}
    # A given peak may be a measured speed: a fraction of it has no meaning.
    for fraction in (1.0,) if cfg.peak_tflops else (0.15, 0.2, 0.3, 0.4, 0.55):
        hours = flops / (fraction * tflops * 1e12 * 3600 * cfg.nproc)
        text = duration(hours)
        if run.device.watts:
            kwh = hours * run.device.watts * cfg.nproc / 1e3
            energy = f"{kwh:,.1f} kWh" if kwh < 1e4 else f"{kwh / 1e3:,.0f} MWh"
            text += f", {energy} ({cfg.nproc:,} x {run.device.watts} W)"
        rows[f"at {fraction:.0%} of peak"] = text
    return rows


def print_network(run: PlannedRun) -> None:
    """Print the bytes that a device sends in a step, and their time between two computers.

    A ring of devices crosses each link between computers once. So the link carries this many bytes,
    however many devices a computer has. Sending that overlaps with computing costs no time.
    """
    accum = run.plan.accum
    sent = dict(none=8, optimizer=8, gradients=4 + 4 * accum, all=12 * accum)  # bytes a parameter
    rows = {}
    for shard in SHARDS:
        size = sent[shard] * run.model.num_params()["total"]
        seconds = ", ".join(f"{size * 8e-9 / rate:,.2f}" for rate in (10, 100, 400))
        rows[f"--shard={shard}"] = f"{size / 1e9:>8.2f} GB: {seconds} s"
    if run.device.tflops:
        flops = run.plan.step_tokens * run.model.flops_per_token(run.cfg.block_size)
        seconds = flops / (0.4 * run.device.tflops * 1e12 * run.cfg.nproc)
        rows["computing, at 40%"] = f"{seconds:>8,.2f} s"
    section("Data sent per step, and its time between nodes at 10, 100 and 400 Gbit/s", rows)


# --------------------------------------------------------------------------------------------------


def main() -> None:
    cfg = validated(PlanConfig, with_model(given_settings(PlanConfig, doc=__doc__)))
    run = planned_run(cfg)
    dtype = str(run.workload.dtype).removeprefix("torch.")
    print(f"{cfg.run_name}: {cfg.nproc:,} x {run.device.name}, {dtype}; {run.device.source}")
    section("Model", rows_of_model(run.model, run.workload.T))
    print_memory(run)
    print_time(print_choices(run))
    if cfg.nproc > 1:
        print_network(run)


if __name__ == "__main__":
    configurator.run(main)

"""What a run starts from: random weights, a model folder, or the newest checkpoint of its own.

In the order in which a run comes to them:

    settings_of_run   its settings; a resumed run has those of its newest checkpoint
    find_origin       what it starts from, decided by rank 0 from what is on the disk
    read_training     what the checkpoint says of the run that wrote it
    check_fits        compares them, and the shape of its model, with settings and data
    model_to_tune     the model of another run or program, made ready for the settings and the data

Each raises UserError if something is missing or does not fit.
"""

import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from configurator import UserError, changes, checked, note, set_value
from hardware.disk import LOCK, damage, read_object
from model import GPT, GPTConfig, rope_table
from text.dataset import DataSet, load_tokenizer, newest_dataset, tokenizer_id
from text.hf_tokenizer import tokenizer_of_model
from text.tokenizer import same_ids
from training.checkpoint import newest_checkpoint, numbered, whole_checkpoints
from training.huggingface import from_pretrained, is_utf8, load_tensors, shape_in
from training.metrics import read_metrics
from training.runs import is_run, newest_run
from training.settings import PLACE, TrainConfig, model_config

# --------------------------------------------------------------------------------------------------
# Its settings


def settings_of_run(options: dict[str, Any]) -> TrainConfig:
    """Return the settings of the run that a command line starts or resumes.

    A resumed run has the settings of its newest checkpoint. Those that are given now override them.
    A model to fine-tune is not taken beyond its context, unless a block_size is given.

    options: the settings of config files and command line, without defaults. Raises UserError for a
    setting that is out of its range.
    """
    cfg = TrainConfig(**options)
    if cfg.init_from not in ("resume", "auto"):
        if cfg.overwrite and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            problem = "a restart by --max_restarts would overwrite what was trained before it"
            raise UserError(f"overwrite: {problem}: give --init_from=auto and another --run_name")
        return checked(TrainConfig, with_model(options))
    # The command that began a run gave its length. A command without one does not repeat that, and
    # without a run_name it means the run that was trained last.
    names_run = {"run_name", "max_steps", "max_epochs", "max_tokens"} & options.keys()
    resumes = cfg.init_from == "resume" and not names_run
    if newest := newest_run(Path(cfg.out_dir)) if resumes else None:
        options = options | {"run_name": newest.name}
    folder = Path(cfg.out_dir) / options.get("run_name", cfg.run_name)
    earlier = earlier_settings(folder / "ckpt")
    name = earlier.pop("run_name", folder.name)
    if newest:
        if name != newest.name and newest_checkpoint(newest.with_name(name) / "ckpt"):
            problem = f"{newest}, the newest run, began as {name}, which is there, too"
            raise UserError(f"{problem}: give --run_name")
        note(f"no run_name is given: the newest run is resumed, {newest}")
    return checked(TrainConfig, earlier | options)


def with_model(options: dict[str, Any]) -> dict[str, Any]:
    """Return settings with the folder of the model to fine-tune, and its block_size if it is short.

    It is short below the default; a block_size that is given stays. The folder of a run stands for
    its newest checkpoint. If the model cannot be read, from_pretrained() will say so.
    """
    init_from = options.get("init_from", "scratch")
    if init_from in ("scratch", "resume", "auto"):
        return options
    if newest := newest_checkpoint(Path(init_from) / "ckpt"):
        init_from = str(newest)
        options = options | {"init_from": init_from}
    try:
        context = shape_in(init_from).block_size
    except UserError:
        return options
    return {"block_size": min(TrainConfig.block_size, context)} | options


def with_data(cfg: TrainConfig) -> TrainConfig:
    """Return the settings; if they name no data set, with the one that was prepared last."""
    if cfg.dataset:
        return cfg
    name = newest_dataset(cfg.data_dir)
    note(f"dataset={name} is taken, the newest in {cfg.data_dir}/")
    return replace(cfg, dataset=name)


def earlier_settings(ckpt_dir: Path) -> dict[str, Any]:
    """Return the settings of the newest checkpoint in ckpt_dir, or {} if there is none.

    Left out are out_dir, how the run was started, and settings that this version does not have.
    Only the hash of the file that is read is compared here: find_origin() compares the others,
    under the run's lock.
    """
    file = "train_config.json"
    for path in whole_checkpoints(ckpt_dir):
        if damage(path, [file], required=[file]):
            continue
        values: dict[str, Any] = {}
        for key, value in read_object(path / file).items():
            if not hasattr(TrainConfig, key):
                note(f"{path / file}: this version has no setting {key}={value}")
            elif key not in ("init_from", "overwrite", "out_dir"):
                set_value(TrainConfig, values, key, value, f"{path / file}")
        return values
    return {}


# --------------------------------------------------------------------------------------------------
# Its origin


def find_origin(cfg: TrainConfig, folder: Path, say: Callable[[str], None]) -> Path | None:
    """Return what cfg.init_from means for the run in `folder`, whose lock the caller holds.

    With resume and auto it is a checkpoint of this run, else a model folder; None: random weights.
    Raises UserError if the run would lose something that is there, or cannot find what it needs.
    """
    if cfg.init_from in ("resume", "auto"):
        if checkpoint := own_checkpoint(cfg, folder, say):
            return checkpoint
    path = None if cfg.init_from in ("scratch", "auto") else Path(cfg.init_from)
    if not is_run(folder):
        # The lock is there, and perhaps what a process left that was killed when it began, or what
        # an empty disk has.
        left = r"\.metrics\.jsonl\.tmp|metrics_kept\.jsonl\d*|\.tmp_step_.*|lost\+found"
        others = {name for name in os.listdir(folder) if not re.fullmatch(left, name)} - {LOCK}
        ckpt = folder / "ckpt"
        if ckpt.is_dir() and all(re.fullmatch(left, name) for name in os.listdir(ckpt)):
            others -= {"ckpt"}
        if others:
            raise UserError(f"{folder} holds {min(others)!r} and no run: give another --run_name")
    elif cfg.init_from != "auto":  # which goes on with a run that ended before it saved anything
        if not cfg.overwrite:
            advice = "--run_name=NAME is another, --overwrite moves it out of the way"
            if newest_checkpoint(folder / "ckpt"):
                advice += f", --run_name={cfg.run_name} --init_from=resume continues it"
            raise UserError(f"{folder} holds an earlier run: {advice}")
        if path is not None and folder.resolve() in path.resolve().parents:
            raise UserError(f"--overwrite would move {path}: give the new run another --run_name")
    if cfg.init_from == "auto":
        say(f"note: there is no checkpoint in {folder}: the run begins from random weights")
    return path


def own_checkpoint(cfg: TrainConfig, folder: Path, say: Callable[[str], None]) -> Path | None:
    """Return the newest checkpoint of the run whose files are all as its manifest says.

    Of newer ones, a warning says in which way they are damaged. Returns None only if init_from=auto
    may start anew. Raises UserError if the run has checkpoints but none is intact, or if there is
    nothing that init_from=resume could go on from.
    """
    ckpt_dir = folder / "ckpt"
    problems = []
    for path in numbered(ckpt_dir):
        problem = damage(path, required=("model.safetensors", "config.json", "train_state.pt"))
        if not problem:
            return path
        say(f"warning: {problem}: damaged; the checkpoint before it is taken, if there is one")
        problems.append(problem)
    path = folder / "metrics.jsonl"
    records = read_metrics(path)
    saved = [record["step"] for record in records if "saved" in record]
    evidence = [*problems, *(f"{path} says that step {step} was saved" for step in saved)]
    if evidence:
        advice = "bring them back, or give up on them with --init_from=scratch --overwrite"
        raise UserError(f"no checkpoint in {ckpt_dir} is intact ({evidence[0]}): {advice}")
    start = next((r["settings"] for r in records if {"step_samples", "settings"} <= r.keys()), {})
    if (began := start.get("init_from", "scratch")) != "scratch":
        problem = f"{folder} began from {began} and saved nothing before it ended"
        raise UserError(f"{problem}: begin it again with --init_from=MODEL --overwrite")
    if cfg.init_from == "resume":
        advice = "--init_from=auto begins it"
        if newest := newest_run(Path(cfg.out_dir)):
            advice += f", --run_name={newest.name} is the newest run"
        raise UserError(f"init_from=resume: there is no checkpoint in {ckpt_dir}; {advice}")
    return None


# --------------------------------------------------------------------------------------------------
# A run that is resumed


@dataclass(frozen=True)
class Earlier:
    """What a checkpoint says of the run that wrote it."""

    settings: dict  # train_config.json
    meta: dict  # meta.json
    training: dict  # train_state.pt


def read_training(folder: Path) -> Earlier:
    """Read everything in a checkpoint but the model and the tokenizer.

    Raises UserError or OSError if a file cannot be read.
    """
    path = folder / "train_state.pt"
    # mmap: a tensor takes memory only when it is read, and all processes share that memory. But
    # torch opens such a file by its name in UTF-8, which is another one on an old disk in GBK.
    try:
        training = load_tensors(path, mmap=is_utf8(path))
        jsons = (read_object(folder / name) for name in ("train_config.json", "meta.json"))
        return Earlier(*jsons, training)
    except ValueError as e:
        raise UserError(f"{path}, or a .json beside it: {e}") from None


def check_fits(
    folder: Path, earlier: Earlier, c: GPTConfig, cfg: TrainConfig, sets: list[DataSet]
) -> None:
    """Raise UserError unless a resumed run has the shape, optimizer and data of its checkpoint.

    c: the shape of the model. One that is fine-tuned has its own, whatever settings the run began
    with: so a setting fits that is as it was, or as the model is.
    """
    trained_on, names = sorted(earlier.meta["trained_on"]), sorted(data.name for data in sets)
    another = f"start a new run with --init_from={folder} --run_name=NAME"
    if names != trained_on:
        problem = f"{folder} was trained on {', '.join(trained_on)}, not on {', '.join(names)}"
        raise UserError(f"{problem}: give that --dataset, or {another}")
    settings = {k: v for k, v in earlier.settings.items() if hasattr(cfg, k)}
    began_with = fixed(replace(cfg, **settings), c.vocab_size)
    has = began_with | asdict(c)
    here = {k: v for k, v in fixed(cfg, c.vocab_size).items() if v != began_with[k]}
    there = {k: has[k] for k in here} | {"tokenizer": tokenizer_id(earlier.meta["tokenizer"])}
    for key, split in (("trained_on", "train"), ("judged_by", "val")):
        there |= {f"{name}/{split}.bin": sha256 for name, sha256 in earlier.meta[key].items()}
    here |= data_hashes(sets) | {"tokenizer": tokenizer_id(sets[0].meta["tokenizer"])}
    differ = [
        f"{k} is {there.get(k, 'missing')!s:.20} there, {here.get(k, 'missing')!s:.20} here"
        for k in sorted(there | here)
        if there.get(k) != here.get(k)
    ]
    if differ:
        advice = "give the same settings and data as before (prepare.py keeps the data that it"
        advice += f" replaces as NAME.old if no input file is the same), or {another}"
        raise UserError(f"checkpoint {folder} does not fit: {'; '.join(differ)}: {advice}")


def fixed(cfg: TrainConfig, vocab_size: int) -> dict[str, Any]:
    """Return what cannot change within a run: shape, optimizer, and on what it learns.

    rope_scaling is taken as it stands: a model to fine-tune may have RoPE although the settings,
    which it ignores, say otherwise.
    """
    shape = asdict(model_config(replace(cfg, rope_scaling=""), vocab_size))
    return shape | {k: getattr(cfg, k) for k in ("rope_scaling", "optimizer", "loss_on")}


def data_hashes(sets: list[DataSet]) -> dict[str, str]:
    """Return the SHA-256 of each .bin, as meta.json has it."""
    splits = [(data.name, *split) for data in sets for split in data.meta["splits"].items()]
    return {f"{name}/{split}.bin": counts["sha256"] for name, split, counts in splits}


def settings_changed(earlier: Earlier, cfg: TrainConfig) -> list[str]:
    """Return `lr 0.001 -> 0.002` for each setting that changed since the checkpoint was written.

    Those of the place are left out: they do not change what the model learns. Settings that are not
    given again are those of the checkpoint.
    """
    saved = earlier.settings
    order = " (the windows come in another order: some are read twice, others never)"
    return [
        f"{k} {saved[k]} -> {value}{order if k in ('seed', 'dataset', 'documents') else ''}"
        for k, value in asdict(cfg).items()
        if k not in PLACE and saved.get(k, value) != value
    ]


# --------------------------------------------------------------------------------------------------
# A model that is fine-tuned


def model_to_tune(
    folder: Path, cfg: TrainConfig, sets: list[DataSet], say: Callable[[str], None]
) -> GPT:
    """Return a model to fine-tune on these data sets, on the CPU.

    It keeps its shape, whatever n_layer and the other settings say. But one with RoPE is made ready
    for longer sequences, if block_size and rope_scaling ask for them.

    Raises UserError if its vocabulary is too small, or if its token ids mean other tokens than the
    data's. A model without a tokenizer is accepted, with a note.
    """
    model = from_pretrained(folder, dropout=cfg.dropout)
    c = model.config
    vocab_size = sets[0].meta["vocab_size"]
    if c.vocab_size < vocab_size:
        problem = f"{folder}: a vocabulary of {c.vocab_size}, but the data has {vocab_size}"
        fits = f"a tokenizer of {c.vocab_size} tokens or fewer, such as --tokenizer={folder}"
        raise UserError(f"{problem}: prepare it with {fits}")
    extended = longer(c, cfg)
    if extended != c:
        length = f"block_size {c.block_size} -> {extended.block_size}"
        if extended.rope_scaling != c.rope_scaling:
            length += f", rope_scaling {c.rope_scaling!r} -> {extended.rope_scaling!r}"
        note(f"{folder} has never seen such long sequences: {length}")
        model.config = extended
        model.rope = rope_table(extended)
    tokenizer = tokenizer_of_model(folder)
    if tokenizer is None:
        say(f"note: {folder} has no tokenizer: its ids are assumed to be those of {sets[0].name}")
    elif not same_ids(tokenizer, load_tokenizer(sets[0].folder)):
        problem = f"the tokenizer of {folder} is not that of {sets[0].folder}"
        raise UserError(f"{problem}: prepare the data with --tokenizer={folder}")
    shape = asdict(extended) | {"block_size": cfg.block_size}
    if others := [f"{k}={v}" for k, v in changes(cfg).items() if v != shape.get(k, v)]:
        note(f"{folder} keeps its own shape: {' '.join(others)} is ignored")
    return model


def longer(c: GPTConfig, cfg: TrainConfig) -> GPTConfig:
    """Return the shape of a model that serves sequences of cfg.block_size, with its rope_scaling.

    Raises UserError if it cannot.
    """
    if c.pos == "learned" and cfg.block_size > c.block_size:
        learned = f"the model has learned positions for {c.block_size} tokens, and no others"
        raise UserError(f"block_size={cfg.block_size}: {learned}: a model with RoPE has them all")
    length = max(c.block_size, cfg.block_size)
    try:
        return replace(c, block_size=length, rope_scaling=cfg.rope_scaling or c.rope_scaling)
    except ValueError as e:
        raise UserError(str(e)) from None

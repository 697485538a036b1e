"""What a run starts from: random weights, a model folder, or the newest checkpoint of its own.

settings_of_run() adds the settings that a resumed run had before. find_origin() decides what it
starts from. The other functions load that model and raise UserError if the settings or the data do
not fit it. training/runs.py finds and checks checkpoints on the disk.
"""

import os
import pickle
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from configurator import UserError, checked, note, set_value
from hardware.disk import damage, read_object
from model import GPT, GPTConfig, rope_table
from text.dataset import DataSet, load_tokenizer, tokenizer_id
from text.hf_tokenizer import tokenizer_of_model
from text.tokenizer import same_ids
from training.huggingface import from_pretrained, is_utf8, shape_in
from training.metrics import read_metrics
from training.runs import (
    is_run,
    newest_checkpoint,
    newest_intact,
    newest_run,
    numbered,
    others_in,
    whole_checkpoints,
)
from training.settings import PLACE, TrainConfig, model_config


def settings_of_run(options: dict[str, Any]) -> TrainConfig:
    """Return the settings of the run that a command line starts or resumes.

    A resumed run has the settings of its newest checkpoint. Those that are given now override them.
    A model to fine-tune is not taken beyond its context, unless a block_size is given.

    options: the settings of config files and command line, without defaults. Raises UserError for a
    setting that is out of its range.
    """
    cfg = TrainConfig(**options)
    if cfg.init_from not in ("resume", "auto"):
        return checked(TrainConfig, with_context(options))
    # The command that began a run gave its length. A command without one does not repeat that, and
    # without a run_name it means the run that was trained last.
    names_run = {"run_name", "max_steps", "max_epochs", "max_tokens"} & options.keys()
    if cfg.init_from == "resume" and not names_run and (newest := newest_run(Path(cfg.out_dir))):
        note(f"no run_name is given: the newest run is resumed, {newest}")
        options = options | {"run_name": newest.name}
    ckpt_dir = Path(cfg.out_dir) / options.get("run_name", cfg.run_name) / "ckpt"
    return checked(TrainConfig, earlier_settings(ckpt_dir) | options)


def with_context(options: dict[str, Any]) -> dict[str, Any]:
    """Return settings with the block_size of the model to fine-tune, if that is below the default.

    A block_size that is given stays. If the model cannot be read, load_model() will say so.
    """
    init_from = options.get("init_from", "scratch")
    if init_from in ("scratch", "resume", "auto"):
        return options
    try:
        context = shape_in(init_from).block_size
    except ValueError:
        return options
    return {"block_size": min(TrainConfig.block_size, context)} | options


def earlier_settings(ckpt_dir: Path) -> dict[str, Any]:
    """Return the settings of the newest checkpoint in ckpt_dir, or {} if there is none.

    Left out are those that say where the run is and how to start it, and those that this version
    does not have. Only the hash of the file that is read is compared here: find_origin() compares
    the others, under the run's lock.
    """
    file = "train_config.json"
    for path in whole_checkpoints(ckpt_dir):
        if damage(path, [file], required=[file]):
            continue
        values: dict[str, Any] = {}
        unknown = []
        for key, value in read_object(path / file).items():
            if key not in asdict(TrainConfig()):
                unknown.append(f"{key}={value}")
            elif key not in ("init_from", "overwrite", "out_dir", "run_name"):
                set_value(TrainConfig, values, key, value, f"{path / file}")
        if unknown:
            note(f"{path / file}: this version has no setting {', '.join(unknown)}")
        return values
    return {}


@dataclass(frozen=True)
class Origin:
    """What a run starts from. One rank decides it, under the lock of the run's folder."""

    path: Path | None = None  # a checkpoint or a model folder; None: random weights
    resume: bool = False


def find_origin(cfg: TrainConfig, folder: Path, say: Callable[[str], None]) -> Origin:
    """Return what cfg.init_from means for the run in `folder`.

    Raises UserError if the run would lose something that is there, or cannot find what it needs.
    """
    if cfg.init_from in ("resume", "auto"):
        checkpoint = own_checkpoint(cfg, folder, say)
        if checkpoint:
            return Origin(checkpoint, resume=True)
    others = others_in(folder)
    if others and not is_run(folder):
        advice = "give another --run_name or --out_dir"
        raise UserError(f"{folder} holds {others[0]!r} and is not the folder of a run: {advice}")
    if cfg.init_from == "auto":
        return Origin()  # there is no run, or it ended before its first checkpoint
    path = None if cfg.init_from == "scratch" else Path(cfg.init_from)
    if os.path.lexists(folder / "metrics.jsonl") or numbered(folder / "ckpt"):
        if not is_run(folder):
            foreign = "files with the names of a run's files, which train.py did not write"
            raise UserError(f"{folder} holds {foreign}: move them elsewhere")
        if not cfg.overwrite:
            advice = "--init_from=resume goes on with it, --overwrite moves it out of the way"
            raise UserError(f"{folder} holds an earlier run: {advice}, --run_name=NAME is another")
        if path is not None and folder.resolve() in path.resolve().parents:
            raise UserError(f"--overwrite would move {path}: give the new run another --run_name")
    return Origin(path)


def own_checkpoint(cfg: TrainConfig, folder: Path, say: Callable[[str], None]) -> Path | None:
    """Return the newest intact checkpoint of the run itself, and warn of newer damaged ones.

    Returns None only if init_from=auto may start anew. Raises UserError if the run has checkpoints
    but none is intact, or if there is nothing that init_from=resume could go on from.
    """
    ckpt_dir = folder / "ckpt"
    newest, problems = newest_intact(ckpt_dir)
    instead = f"taking {newest} instead" if newest else "there is no intact checkpoint"
    for problem in problems:
        say(f"warning: {problem}: damaged; {instead}")
    if newest:
        return newest
    # What shows that the run has saved checkpoints: damaged or renamed ones, or its records.
    evidence = [*problems, *(f"only {path} is there" for path in sorted(ckpt_dir.glob("step_*")))]
    path = folder / "metrics.jsonl"
    saved = (record["step"] for record in read_metrics(path) if "saved" in record)
    evidence += [f"{path} says that step {step} was saved" for step in saved]
    if evidence:
        advice = "bring them back, or give up on them with --init_from=scratch --overwrite"
        raise UserError(f"no checkpoint in {ckpt_dir} is intact ({evidence[0]}): {advice}")
    if cfg.init_from == "resume":
        run = newest_run(Path(cfg.out_dir))
        name = run.name if run else "NAME"
        advice = f"name another run (--run_name={name}), or use init_from=scratch"
        raise UserError(f"init_from=resume: there is no checkpoint in {ckpt_dir}; {advice}")
    return None


@dataclass(frozen=True)
class Earlier:
    """What a checkpoint says of the run that wrote it."""

    settings: dict  # train_config.json
    meta: dict  # meta.json
    training: dict  # train_state.pt


def load_model(
    folder: Path, cfg: TrainConfig, vocab_size: int, earlier: Earlier | None = None
) -> GPT:
    """Return the model of a checkpoint, or a model to fine-tune, on the CPU.

    A model to fine-tune keeps its shape, whatever n_layer and the other settings say. But one with
    RoPE is made ready for longer sequences, if block_size and rope_scaling ask for them.

    vocab_size: of the data. earlier: what the checkpoint says, if the run is resumed.
    Raises UserError if the model cannot be loaded or has too small a vocabulary; or if a setting of
    the shape of a resumed run has changed, unless its new value is the one that the model has.
    """
    try:
        model = from_pretrained(folder, dropout=cfg.dropout)
    except ValueError as e:
        hint = ""
        if not folder.exists():
            hint = "; nothing is downloaded: it must be a folder on this disk"
        elif newest := newest_checkpoint(folder / "ckpt"):
            hint = f"; it is the folder of a run: give {newest}"
        raise UserError(f"init_from={folder}: cannot be loaded ({e}{hint})") from None
    has = model.config
    if earlier:
        # A model that is fine-tuned has its own shape, whatever settings the run began with.
        settings = {k: v for k, v in earlier.settings.items() if hasattr(cfg, k)}
        began_with = shape_asked(replace(cfg, **settings), vocab_size)
        differ = [
            f"{k} is {getattr(has, k)} there, {value} here"
            for k, value in shape_asked(cfg, vocab_size).items()
            if value not in (began_with[k], getattr(has, k))
        ]
        if differ:
            raise UserError(f"checkpoint {folder} does not fit the settings: {'; '.join(differ)}")
        return model
    if has.vocab_size < vocab_size:
        size = f"vocab_size is {has.vocab_size} there, {vocab_size} in the data"
        raise UserError(f"init_from={folder} does not fit the data: {size}")
    extended = longer(has, cfg)
    if extended != has:
        change = f"it has never seen positions from {has.block_size} on"
        if extended.rope_scaling != has.rope_scaling:
            change = f"rope_scaling {has.rope_scaling!r} -> {extended.rope_scaling!r}"
        length = f"block_size {has.block_size} -> {extended.block_size}"
        note(f"{folder} goes on with longer sequences: {length}, {change}")
        model.config = extended
        model.rope = rope_table(extended)
    return model


def shape_asked(cfg: TrainConfig, vocab_size: int) -> dict[str, Any]:
    """Return the shape of the model that the settings ask for.

    rope_scaling is taken as it stands: a model to fine-tune may have RoPE although the settings,
    which it ignores, say otherwise.
    """
    shape = asdict(model_config(replace(cfg, rope_scaling=""), vocab_size))
    return shape | {"rope_scaling": cfg.rope_scaling}


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


def check_copy(folder: Path) -> None:
    """Raise UserError unless the checkpoint that rank 0 found is intact on this computer too."""
    problem = damage(folder)
    if problem:
        advice = "out_dir must be on a disk that all computers share, or hold the same checkpoint"
        raise UserError(f"{problem}: {advice} on each")


def read_training(folder: Path) -> Earlier:
    """Read everything in a checkpoint but the model and the tokenizer.

    Nothing in it is executed: with weights_only=True, torch.load reads tensors and numbers only.
    Raises UserError if a file cannot be read.
    """
    try:
        settings = read_object(folder / "train_config.json")
        meta = read_object(folder / "meta.json")
        path = folder / "train_state.pt"
        # mmap: a tensor takes memory only when it is read, and all processes share that memory. But
        # torch maps no file whose name is not UTF-8, on the disk and as Python has it.
        mmap = is_utf8(path) and path == Path(str(path).encode(errors="replace").decode())
        training = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError:
        # torch's own message is left out: it explains how to load the file and run its code.
        reason = "it holds more than tensors and numbers"
        raise UserError(f"{folder}/train_state.pt: cannot be read: {reason}") from None
    except (OSError, ValueError, RuntimeError, EOFError, LookupError, TypeError) as e:
        raise UserError(f"{folder}: cannot be read ({str(e).splitlines()[0]})") from None
    return Earlier(settings, meta, training)


def data_hashes(sets: list[DataSet]) -> dict[str, str]:
    """Return the SHA-256 of each .bin, as meta.json has it."""
    return {
        f"{data.name}/{split}.bin": counts["sha256"]
        for data in sets
        for split, counts in data.meta["splits"].items()
    }


def check_data(earlier: Earlier, sets: list[DataSet], folder: Path) -> None:
    """Raise UserError if the tokenizer or a data set changed since the checkpoint was written."""
    current = data_hashes(sets) | {"tokenizer": tokenizer_id(sets[0].meta["tokenizer"])}
    saved = {"tokenizer": tokenizer_id(earlier.meta["tokenizer"])}
    for key, split in (("trained_on", "train"), ("judged_by", "val")):
        saved |= {f"{name}/{split}.bin": sha256 for name, sha256 in earlier.meta[key].items()}
    differ = [
        f"{k} is {saved.get(k, 'missing')[:12]} there, {current.get(k, 'missing')[:12]} here"
        for k in sorted(saved | current)
        if saved.get(k) != current.get(k)
    ]
    if differ:
        again = "give the same --dataset as before, or prepare the same data again"
        problem = f"checkpoint {folder} was trained with other data: {'; '.join(differ)}"
        raise UserError(f"{problem} (SHA-256): {again}, or {as_new_run(folder)}")


def check_optimizer(earlier: Earlier, cfg: TrainConfig, folder: Path) -> None:
    """Raise UserError if the checkpoint holds the state of another optimizer."""
    saved = earlier.settings["optimizer"]
    if saved != cfg.optimizer:
        problem = f"checkpoint {folder} holds the state of {saved}, not of {cfg.optimizer}"
        advice = f"resume with --optimizer={saved}, or {as_new_run(folder)}"
        raise UserError(f"{problem}: {advice}")


def as_new_run(folder: Path) -> str:
    return f"start a new run with --init_from={folder} --run_name=NAME"


def check_tokenizer(folder: Path, sets: list[DataSet], say: Callable[[str], None]) -> None:
    """Raise UserError if the token ids of a model to fine-tune mean other tokens than the data's.

    A model without a tokenizer is accepted, with a note.
    """
    tokenizer = tokenizer_of_model(folder)
    if tokenizer is None:
        assumed = f"its ids are assumed to be those of {sets[0].name}"
        say(f"note: {folder} has no tokenizer to compare: {assumed}")
    elif not same_ids(tokenizer, load_tokenizer(sets[0].folder)):
        problem = f"its tokenizer is not the one that made {sets[0].folder}"
        advice = f"prepare the data with --tokenizer={folder}"
        raise UserError(f"init_from={folder}: {problem}: {advice}")


def settings_changed(earlier: Earlier, cfg: TrainConfig) -> list[str]:
    """Return `lr 0.001 -> 0.002` for each setting that changed since the checkpoint was written.

    Those of the place are left out: they do not change what the model learns. Settings that are not
    given again are those of the checkpoint.
    """
    saved = earlier.settings
    order = " (the windows come in another order: some are read twice, others never)"
    return [
        f"{k} {saved[k]} -> {value}{order if k in ('seed', 'dataset') else ''}"
        for k, value in asdict(cfg).items()
        if k not in PLACE and saved.get(k, value) != value
    ]

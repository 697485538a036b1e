"""What a run starts from: nothing, a model, or its own newest checkpoint; and whether that fits settings and data."""

import os
import pickle
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from configurator import UserError
from hardware.disk import (
    damage,
    read_object,
)
from model import GPT, GPTConfig
from text.dataset import (
    DataSet,
    load_tokenizer,
    tokenizer_id,
    tokenizer_of_model,
)
from text.tokenizer import same_ids
from training.huggingface import from_pretrained
from training.plots import METRICS_VERSION, read_metrics
from training.runs import is_run, newest_intact, numbered, others_in, replaced, step_of
from training.settings import TrainConfig


@dataclass(frozen=True)
class Origin:
    """What a run starts from; decided by one rank, under the lock of the run's folder."""

    path: Path | None = None  # a checkpoint or a model; None: scratch
    resume: bool = False
    damaged: frozenset[str] = frozenset()  # newer checkpoints of the run that are not whole


def find_origin(cfg: TrainConfig, folder: Path, say: Callable[[str], None]) -> Origin:
    """What init_from means. folder: the run's own. UserError where going on would lose something."""
    ckpt_dir = folder / "ckpt"
    if cfg.init_from in ("resume", "auto"):
        newest, damaged = newest_intact(ckpt_dir)
        for wrong in damaged.values():
            say(f"warning: {wrong}: damaged; {f'taking {newest} instead' if newest else 'no other is there'}")
        if newest is not None:
            return Origin(newest, True, frozenset(damaged))
        if found := traces(folder, damaged):
            ways = "bring them back, or give up on them with --init_from=scratch --overwrite"
            raise UserError(f"init_from={cfg.init_from}: no whole checkpoint in {ckpt_dir}: {found}; {ways}")
        if cfg.init_from == "resume":
            before = "".join(f"; those that --overwrite replaced are in {p}" for p in replaced(ckpt_dir))
            none = f"init_from=resume: no checkpoint in {ckpt_dir}: there is none{before}"
            raise UserError(f"{none}; use init_from=scratch")
    if (others := others_in(folder)) and not is_run(folder):
        raise UserError(f"{folder} holds {others[0]!r} and is no run: give another --run_name or --out_dir")
    if cfg.init_from == "auto":
        return Origin()  # no run, or one that ended before its first checkpoint
    path = None if cfg.init_from == "scratch" else Path(cfg.init_from)
    if os.path.lexists(folder / "metrics.jsonl") or numbered(ckpt_dir):
        if not cfg.overwrite:
            ways = "--init_from=resume goes on with it, --overwrite replaces it, --run_name=NAME starts another"
            raise UserError(f"{folder} holds an earlier run: {ways}")
        if not is_run(folder):
            raise UserError(f"{folder} holds files with the names of a run that train.py did not write: move them")
        if links := [found for found in numbered(ckpt_dir) if found.is_symlink()]:
            raise UserError(f"--overwrite: {links[-1]} is a link, which train.py did not make: move it elsewhere")
        if path is not None and folder.resolve() in path.resolve().parents:
            raise UserError(f"--overwrite would delete {path}: give the new run another --run_name")
    return Origin(path)


def traces(folder: Path, damaged: dict[str, str]) -> str:
    """What says that a run has checkpoints, though none is whole; empty if nothing does."""
    if damaged:
        return f"all are damaged, as {next(iter(damaged.values()))}"
    names = os.listdir(folder / "ckpt") if (folder / "ckpt").is_dir() else []
    if odd := sorted(name for name in names if name.startswith("step_")):
        return f"only {odd[0]} is there"
    path = folder / "metrics.jsonl"
    if not os.path.lexists(path):
        return ""
    records = read_metrics(path)
    if saved := [record["step"] for record in records if "saved" in record]:
        return f"{path} says that step {max(saved)} was saved"
    if not any(record.get("format_version") == METRICS_VERSION for record in records):  # it would not say so
        return f"{path} goes to step {max((record['step'] for record in records), default=0)}"
    return ""


def load_model(folder: Path, dropout: float, wanted: GPTConfig, before: GPTConfig | None = None) -> GPT:
    """A checkpoint's model, in its own shape. wanted: what the settings make of it now; before: when its run was last started.

    UserError if it cannot be loaded; to fine-tune, if vocabulary or block_size are too small; to resume (before is given), if
    the settings mean another shape than they did. They need not be the model's: a run may have begun with somebody else's.
    """
    try:
        model = from_pretrained(folder, dropout=dropout)
    except ValueError as e:
        where = "" if folder.exists() else "; nothing is downloaded: it must be a folder on this disk"
        raise UserError(f"init_from={folder}: cannot be loaded ({e}{where})") from None
    found, there, now = asdict(model.config), asdict(before or model.config), asdict(wanted)
    differ = [k for k in ("vocab_size", "block_size") if found[k] < now[k]]
    if before is not None and not differ:
        differ = [k for k in now if now[k] not in (found[k], there[k])]
    if differ:
        both = "; ".join(f"{k} is {there[k]} there, {now[k]} here" for k in differ)
        raise UserError(f"checkpoint {folder} does not fit the settings: {both}")
    return model


@dataclass(frozen=True)
class Earlier:
    """What a checkpoint says of the run that wrote it."""

    settings: dict
    meta: dict
    training: dict


def check_copy(folder: Path) -> None:
    """UserError unless a checkpoint is on this computer too, as whole as where rank 0 found it."""
    if wrong := damage(folder):
        shared = "out_dir must be on a disk that all computers share, or hold the same checkpoint on each"
        raise UserError(f"{wrong}: {shared}")


def read_training(folder: Path) -> Earlier:
    """All but the model. Nothing in it is executed: torch.load reads tensors and numbers only."""
    try:
        settings = read_object(folder / "train_config.json")
        meta = read_object(folder / "meta.json")
        training = torch.load(folder / "train_state.pt", map_location="cpu", weights_only=True)
        step = training["step"]
    except pickle.UnpicklingError:  # torch's own words explain how to run the code all the same
        raise UserError(f"{folder}/train_state.pt: cannot be read: it holds more than tensors and numbers") from None
    except (OSError, ValueError, RuntimeError, EOFError, LookupError, TypeError) as e:
        raise UserError(f"{folder}: cannot be read ({str(e).splitlines()[0]})") from None
    if step != step_of(folder):
        raise UserError(f"{folder} holds step {step}: it was renamed, or copied from another: take it out of there")
    return Earlier(settings, meta, training)


def check_data(earlier: Earlier, sets: list[DataSet], folder: Path) -> None:
    """UserError if a data set, or the tokenizer, is not the one that the checkpoint was trained with."""
    tokenizer, before = (tokenizer_id(meta["tokenizer"]) for meta in (sets[0].meta, earlier.meta))
    differ = [f"tokenizer is {before[:12]} there, {tokenizer[:12]} here"] if tokenizer != before else []
    for key, split in (("trained_on", "train"), ("judged_by", "val")):
        now = {d.name: d.meta["splits"][split]["sha256"] for d in sets}
        recorded = earlier.meta.get(key, now)  # checkpoints of before 2026-11-22 do not say what judged them
        for name in sorted(recorded | now):
            before, found = recorded.get(name, "missing"), now.get(name, "missing")
            if before != found:
                differ.append(f"{name}/{split}.bin is {before[:12]} there, {found[:12]} here (SHA-256)")
    if differ:
        start = "prepare the same data again, or start with --init_from and --run_name as a run of its own"
        raise UserError(f"checkpoint {folder} was trained with other data: {'; '.join(differ)}: {start}")


def check_tokenizer(folder: Path, sets: list[DataSet], say: Callable[[str], None]) -> None:
    """UserError if the ids of a model that is fine-tuned have another meaning than those of the data."""
    theirs = tokenizer_of_model(folder)
    if theirs is None:
        say(f"note: {folder} has no tokenizer to compare: its ids are taken to be those of {sets[0].name}")
    elif not same_ids(theirs, load_tokenizer(sets[0].folder)):
        again = f"prepare it with --tokenizer={folder}"
        raise UserError(f"init_from={folder}: its tokenizer is not the one that made {sets[0].folder}: {again}")


def settings_changed(earlier: Earlier, cfg: TrainConfig) -> list[str]:
    """`lr 0.001 -> 0.002` for each setting that is another one now; those of where and how one looks at it left out."""
    about = "init_from overwrite out_dir data_dir run_name progress log_every wandb wandb_project".split()
    now = {k: v for k, v in asdict(cfg).items() if k not in about}
    return [f"{k} {earlier.settings[k]} -> {v}" for k, v in now.items() if earlier.settings.get(k, v) != v]

"""Checkpoints: a Hugging Face model directory, and beside it what training needs. Whole or not there.

    out/RUN/ckpt/step_00001000/
        model.safetensors, config.json    the model, as huggingface.py writes it
        meta.json, tokenizer.*            of the data set; and tokenizer.json, by which Hugging Face's tools open it
        train_state.pt                    optimizer, scaler, step, place in the data: tensors and numbers, no code
        train_config.json                 the settings
        manifest.json                     size and SHA-256 of every other file

A checkpoint is written to a sibling folder, synced to the disk and renamed, by a thread: training waits only for the copy
to host memory. When the newest one turns out to be damaged, the one before it is taken.
"""

import copy
import json
import os
import pickle
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from configurator import UserError
from dataset import DataSet, file_sha256, load_tokenizer, lock, sync_to_disk, tokenizer_id, tokenizer_of_model
from huggingface import ONLY_OURS, from_pretrained, hf_class, save_pretrained
from model import GPT, GPTConfig
from tokenizer import hugging_face_files, read_json, same_ids, to_hugging_face


def to_host(state: Any) -> Any:
    """A copy of a state_dict, or of anything made of dicts, lists and tensors, in host memory."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {k: to_host(v) for k, v in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(to_host(v) for v in state)
    return copy.copy(state)


class Saver:
    """Writes checkpoints in the background, one at a time, and drops the older ones."""

    def __init__(self, ckpt_dir: Path, cfg: Any, sets: list[DataSet], say: Callable[[str], None]):
        self.ckpt_dir, self.cfg, self.sets, self.say = ckpt_dir, cfg, sets, say
        self.pool, self.writing = ThreadPoolExecutor(1), Future()
        self.writing.set_result(None)
        self.failed = ""  # why the last one could not be written
        folder, info = sets[0].folder, sets[0].meta["tokenizer"]
        self.tokenizer = load_tokenizer(folder)
        self.came_with = read_json(folder / "tokenizer_config.json")
        # by name: ours, and what came with it for Hugging Face's tools, or is made for them; now, whatever becomes of the data set
        self.tokenizer_files = {p.name: p.read_bytes() for p in (folder / info["file"], *hugging_face_files(folder))}

    def save(self, model: GPT, optimizer, scaler, state: dict) -> None:
        """Begin to write step_N; returns when all is copied. state: step, best_step and what else is to be found again."""
        self.wait()
        weights = to_host(dict(model.named_parameters()))
        training = to_host(state | {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()})
        self.writing = self.pool.submit(self.write, model, weights, training)

    def wait(self) -> None:
        """Until the checkpoint that is being written is on the disk."""
        self.writing.result()

    def write(self, model: GPT, weights: dict, training: dict) -> None:
        started = time.perf_counter()
        target = self.ckpt_dir / f"step_{training['step']:08d}"
        tmp = self.ckpt_dir / f".tmp_{target.name}"
        try:
            shutil.rmtree(tmp, ignore_errors=True)
            tmp.mkdir(parents=True)
            prefix = self.tokenizer.prefix
            save_pretrained(model.config, weights, tmp, self.tokenizer.eos_id, prefix[0] if prefix else None)
            torch.save(training, tmp / "train_state.pt")
            write_json(tmp / "train_config.json", asdict(self.cfg))
            data = {d.name: d.meta["splits"]["train"]["sha256"] for d in self.sets}
            write_json(tmp / "meta.json", self.sets[0].meta | {"trained_on": data})
            if "tokenizer.json" not in self.tokenizer_files:
                made = to_hugging_face(self.tokenizer, model.config.block_size, self.came_with)
                self.tokenizer_files |= {name: json_bytes(content) for name, content in made.items()}
            for name, content in self.tokenizer_files.items():
                (tmp / name).write_bytes(content)
            files = {p.name: {"bytes": p.stat().st_size, "sha256": file_sha256(p)} for p in sorted(tmp.iterdir())}
            write_json(tmp / "manifest.json", files)
            for path in (*tmp.iterdir(), tmp):
                sync_to_disk(path)
            shutil.rmtree(target, ignore_errors=True)  # a resumed run that comes by again
            tmp.rename(target)
            sync_to_disk(self.ckpt_dir)
            older = [p for p in whole_checkpoints(self.ckpt_dir) if int(p.name[5:]) != training["best_step"]]
            for path in older[self.cfg.keep :]:
                shutil.rmtree(path)
            self.failed = ""
            note = "" if hf_class(model.config) else f"; {ONLY_OURS}"
            self.say(f"step {training['step']}: saved {target} in {time.perf_counter() - started:.1f} s{note}")
        except (OSError, RuntimeError, SafetensorError) as e:  # a full disk, as each of the writers says it
            shutil.rmtree(tmp, ignore_errors=True)
            self.failed = f"{target} could not be written ({(getattr(e, 'strerror', None) or str(e)).splitlines()[0]})"
            self.say(f"warning: {self.failed}; training goes on, the checkpoint before it is whole")


def json_bytes(content: dict) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def write_json(path: Path, content: dict) -> None:
    path.write_bytes(json_bytes(content))


# ---------------------------------------------------------------------------------------------------------------------
# Finding and reading them


def whole_checkpoints(ckpt_dir: Path) -> list[Path]:
    """Newest first. Whole means that the manifest, which is written last, is there."""
    return sorted((p.parent for p in ckpt_dir.glob("step_*/manifest.json")), reverse=True)


def newest_checkpoint(ckpt_dir: Path) -> Path | None:
    return next(iter(whole_checkpoints(ckpt_dir)), None)


def damage(folder: Path) -> str:
    """What is wrong with a checkpoint's files: the first that is not what manifest.json says; empty if all are."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        for name, entry in manifest.items():
            path = folder / Path(name).name
            if path.stat().st_size != entry["bytes"] or file_sha256(path) != entry["sha256"]:
                return f"{path}: not what manifest.json says"
        if not {"model.safetensors", "config.json", "train_state.pt"} <= manifest.keys():
            return f"{folder}/manifest.json: incomplete"
    except OSError as e:
        return f"{e.filename}: {e.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{folder}/manifest.json: damaged"
    return ""


def newest_intact(ckpt_dir: Path) -> tuple[Path | None, list[str]]:
    """(the newest checkpoint all of whose files are what they were, what is wrong with the newer ones)."""
    wrong: list[str] = []
    for folder in whole_checkpoints(ckpt_dir):
        if not (found := damage(folder)):
            return folder, wrong
        wrong.append(found)
    return None, wrong


# ---------------------------------------------------------------------------------------------------------------------
# What a run starts from


def find_source(cfg: Any, folder: Path, say: Callable[[str], None]) -> tuple[Path | None, bool]:
    """The checkpoint that init_from means (None: scratch), and whether this is to resume. folder: the run's own."""
    newest, damaged = newest_intact(folder / "ckpt") if cfg.init_from in ("resume", "auto") else (None, [])
    for wrong in damaged:
        say(f"warning: {wrong}: damaged; {f'taking {newest} instead' if newest else 'no other is there'}")
    if newest is None and (damaged or cfg.init_from == "resume"):
        found = f"all are damaged, as {damaged[0]}" if damaged else "there is none"
        raise UserError(
            f"init_from={cfg.init_from}: no checkpoint in {folder / 'ckpt'}: {found}; use init_from=scratch"
        )
    if newest is not None:
        return newest, True
    source = None if cfg.init_from in ("scratch", "auto") else Path(cfg.init_from)
    earlier = (folder / "metrics.jsonl").exists() or whole_checkpoints(folder / "ckpt")
    if earlier and not cfg.overwrite and cfg.init_from != "auto":
        ways = "--init_from=resume goes on with it, --overwrite replaces it, --run_name=NAME starts another"
        raise UserError(f"{folder} holds an earlier run: {ways}")
    inside = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    if inside and not inside & {"metrics.jsonl", "metrics.tmp", "ckpt"}:
        raise UserError(f"{folder} holds {min(inside)!r} and is no run: give another --run_name or --out_dir")
    if source is not None and cfg.overwrite and folder.resolve() in source.resolve().parents:
        raise UserError(f"--overwrite would delete {source}: give the new run another --run_name")
    return source, False


@contextmanager
def run_folder(folder: Path, fresh: bool, is_main: bool):
    """The run's folder, emptied for a fresh run, and written by no other process meanwhile."""
    if not is_main:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    handle = lock(folder, "stop it (a killed torchrun can leave its workers behind), or choose another --run_name")
    try:
        for path in folder.iterdir() if fresh else folder.glob("ckpt/.tmp_*"):  # left by a kill inside a save
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield
    finally:
        os.close(handle)


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


def read_training(folder: Path) -> Earlier:
    """All but the model. Nothing in it is executed: torch.load reads tensors and numbers only."""
    try:
        settings = json.loads((folder / "train_config.json").read_text())
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        training = torch.load(folder / "train_state.pt", map_location="cpu", weights_only=True)
        return Earlier(settings, meta, training)
    except (OSError, ValueError, RuntimeError, pickle.UnpicklingError, EOFError) as e:
        raise UserError(f"{folder}: cannot be read ({str(e).splitlines()[0]})") from None


def check_data(earlier: Earlier, sets: list[DataSet], folder: Path) -> None:
    """UserError if a data set, or the tokenizer, is not the one that the checkpoint was trained with."""
    tokenizer, before = (tokenizer_id(meta["tokenizer"]) for meta in (sets[0].meta, earlier.meta))
    differ = [f"tokenizer is {before[:12]} there, {tokenizer[:12]} here"] if tokenizer != before else []
    now = {d.name: d.meta["splits"]["train"]["sha256"] for d in sets}
    for name in sorted(earlier.meta["trained_on"] | now):
        before, found = earlier.meta["trained_on"].get(name, "missing"), now.get(name, "missing")
        if before != found:
            differ.append(f"{name}/train.bin is {before[:12]} there, {found[:12]} here (SHA-256)")
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


def settings_changed(earlier: Earlier, cfg: Any) -> list[str]:
    """`lr 0.001 -> 0.002` for each setting that is another one now; those of where and how one looks at it left out."""
    about = "init_from overwrite out_dir data_dir run_name progress log_every wandb wandb_project".split()
    now = {k: v for k, v in asdict(cfg).items() if k not in about}
    return [f"{k} {earlier.settings[k]} -> {v}" for k, v in now.items() if earlier.settings.get(k, v) != v]

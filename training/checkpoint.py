"""Checkpoints: a Hugging Face model directory, and beside it what training needs. Whole or not there.

    out/RUN/ckpt/step_00001000/
        model.safetensors, config.json    the model, as huggingface.py writes it
        meta.json, tokenizer.*            of the data set; and tokenizer.json, by which Hugging Face's
                                          tools open it
        train_state.pt                    optimizer, scaler, step, place in the data: tensors and
                                          numbers, no code
        train_config.json                 the settings
        manifest.json                     size and SHA-256 of every other file

A checkpoint is written to a sibling folder, synced to the disk and renamed, by a thread: training waits
only for the copy to host memory. When the newest one turns out to be damaged, the one before it is taken.

What is deleted is named here: the files of OURS, in folders called step_N. A checkpoint that holds any
other file stays whole, and so does everything else in out/RUN.
"""

import copy
import errno
import os
import pickle
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from configurator import UserError
from hardware.disk import (
    MANIFEST,
    Lock,
    damage,
    json_bytes,
    manifest,
    put_in_place,
    read_object,
    remove_only,
    sealed,
    set_aside,
    sync_to_disk,
)
from model import GPT, GPTConfig
from text.dataset import (
    FORMAT_VERSION,
    DataSet,
    load_tokenizer,
    tokenizer_files,
    tokenizer_id,
    tokenizer_of_model,
)
from text.tokenizer import (
    HF_FILES,
    SentencePiece,
    Tiktoken,
    llama_cpp_note,
    read_json,
    same_ids,
    to_hugging_face,
)
from training.huggingface import caveat, from_pretrained, hf_class, save_pretrained
from training.plots import METRICS_VERSION, read_metrics
from training.progress import Progress
from training.settings import TrainConfig

OURS = {"model.safetensors", "config.json", "train_state.pt", "train_config.json", "meta.json", MANIFEST}
OURS |= {SentencePiece.file, Tiktoken.file, *HF_FILES}


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
    """Writes checkpoints in the background, one at a time, and drops the older ones.

    damaged: the names of those in ckpt_dir that were found damaged. lock: of the run's folder, on the rank
    that saves. report(step, path, seconds, note) is called for each that is whole on the disk.
    """

    def __init__(
        self,
        ckpt_dir: Path,
        cfg: TrainConfig,
        sets: list[DataSet],
        tokenizer: SentencePiece | Tiktoken,
        damaged: Iterable[str],
        lock: Lock | None,
        say: Callable[[str], None],
        report: Callable[[int, Path, float, str], None],
    ):
        self.ckpt_dir, self.cfg, self.sets, self.tokenizer = ckpt_dir, cfg, sets, tokenizer
        self.damaged = set(damaged)
        self.lock, self.say, self.report = lock, say, report
        self.pool = ThreadPoolExecutor(1)
        self.writing: Future = Future()
        self.writing.set_result(None)
        self.saved, self.failed = False, ""  # is one whole; why the last one could not be written
        self.kept: set[Path] = set()  # checkpoints that hold somebody's file, of which was told
        folder, info = sets[0].folder, sets[0].meta["tokenizer"]
        self.came_with = read_json(folder / "tokenizer_config.json")
        # By name: ours, and what came with it for Hugging Face's tools, or is made for them. Now, since the
        # data set may be gone when a checkpoint is written.
        self.tokenizer_files = {p.name: p.read_bytes() for p in tokenizer_files(folder, info)}

    def save(self, model: GPT, optimizer, scaler, progress: Progress) -> None:
        """Begin to write step_N; returns when all is copied."""
        self.wait()
        weights = to_host(dict(model.named_parameters()))
        training = to_host(asdict(progress) | {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()})
        self.writing = self.pool.submit(self.write, model, weights, training)

    def wait(self) -> None:
        """Until the checkpoint that is being written is on the disk."""
        self.writing.result()

    def write(self, model: GPT, weights: dict, training: dict) -> None:
        started = time.perf_counter()
        step = training["step"]
        target = self.ckpt_dir / f"step_{step:08d}"
        tmp = self.ckpt_dir / f".tmp_{target.name}"
        try:
            self.lock.renew()
            remove_only(tmp, OURS)  # of a save that failed
            tmp.mkdir(parents=True)
            prefix = self.tokenizer.prefix
            save_pretrained(model.config, weights, tmp, self.tokenizer.eos_id, prefix[0] if prefix else None)
            torch.save(training, tmp / "train_state.pt")
            write_json(tmp / "train_config.json", asdict(self.cfg))
            write_json(tmp / "meta.json", self.meta())
            if "tokenizer.json" not in self.tokenizer_files:
                made = to_hugging_face(self.tokenizer, model.config.block_size, self.came_with)
                self.tokenizer_files |= {name: json_bytes(content) for name, content in made.items()}
            for name, content in self.tokenizer_files.items():
                (tmp / name).write_bytes(content)
            write_json(tmp / MANIFEST, manifest(tmp))
            for path in tmp.iterdir():
                sync_to_disk(path)
            make_way(target)
            if old := put_in_place(tmp, target):  # a run that was resumed comes by again
                remove_only(old, OURS)
            self.damaged.discard(target.name)
            self.failed = ""
            note = self.for_others(model.config) if not self.saved else ""
            self.saved = True
            self.report(step, target, time.perf_counter() - started, note)
            if not training["bad_in_a_row"]:  # else older weights may be the better ones
                self.prune(step, training["best_step"])
        except (OSError, RuntimeError, SafetensorError) as e:  # a full disk, as each of the writers says it
            full = self.ckpt_dir.is_dir() and shutil.disk_usage(self.ckpt_dir).free < 2**20
            remove_only(tmp, OURS)
            reason = (getattr(e, "strerror", None) or str(e)).splitlines()[0]
            if full and not isinstance(e, OSError):  # torch and safetensors name the write, not its reason
                reason = os.strerror(errno.ENOSPC)
            self.failed = f"{target} could not be written ({reason})"
            self.say(f"warning: {self.failed}; training goes on, the checkpoint before it is whole")

    def for_others(self, c: GPTConfig) -> str:
        """What other programs cannot open, or have to be told."""
        notes = caveat(c), llama_cpp_note(self.tokenizer, hf_class(c), c.vocab_size)
        return "".join(f"; {note}" for note in notes if note)

    def meta(self) -> dict:
        """meta.json of the data, with what a resume compares; the manifest has the tokenizer's files."""
        meta = self.sets[0].meta
        tokenizer = {k: v for k, v in meta["tokenizer"].items() if k != "files"}
        hashes = {
            key: {d.name: d.meta["splits"][split]["sha256"] for d in self.sets}
            for key, split in (("trained_on", "train"), ("judged_by", "val"))
        }
        return sealed(meta | hashes | {"format_version": FORMAT_VERSION, "tokenizer": tokenizer})

    def prune(self, step: int, best_step: int) -> None:
        """Delete what step_N, which is whole now, supersedes: but for the `keep` newest and the best, the
        checkpoints up to it, and the run that --overwrite replaced.

        Those of later steps were found damaged when this run was resumed. They count for nothing, and
        are replaced when the run comes by.
        """
        reached = [path for path in numbered(self.ckpt_dir) if step_of(path) <= step]
        best = self.ckpt_dir / f"step_{best_step:08d}"
        whole = [path for path in reached if path.name not in self.damaged and path != best]
        gone = [path for path in reached if path not in (best, *whole[: self.cfg.keep])]
        for folder in replaced(self.ckpt_dir):
            gone += numbered(folder)
        for path in gone:
            if (other := discard(path)) and path not in self.kept:
                self.kept.add(path)
                self.say(f"note: {path} is kept: {other}")
        for folder in replaced(self.ckpt_dir):
            if not numbered(folder):
                remove_only(folder, [REPLACED])
        for folder in replaced(self.ckpt_dir.parent):
            remove_run_files(folder)


def write_json(path: Path, content: dict) -> None:
    path.write_bytes(json_bytes(content))


# ---------------------------------------------------------------------------------------------------------------------
# Finding, judging and deleting them


def numbered(ckpt_dir: Path) -> list[Path]:
    """The checkpoints in a folder by their names, step_ and a number, whole or not; the newest first.

    UserError where one cannot look: checkpoints that are not seen must not be taken for none.
    """
    try:
        names = os.listdir(ckpt_dir)
    except FileNotFoundError:
        if ckpt_dir.is_symlink():
            leads = f"{ckpt_dir} is a link to {os.readlink(ckpt_dir)}, which is not there"
            raise UserError(f"{leads}: is its disk mounted?") from None
        return []
    except OSError as e:
        raise UserError(f"{ckpt_dir}: its checkpoints cannot be looked for: {e.strerror}") from None
    found = [ckpt_dir / name for name in names if re.fullmatch(r"step_[0-9]{8,18}", name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def whole_checkpoints(ckpt_dir: Path) -> list[Path]:
    """Newest first. Whole means that the manifest, which is written last, is there."""
    return [path for path in numbered(ckpt_dir) if (path / MANIFEST).is_file()]


def newest_checkpoint(ckpt_dir: Path) -> Path | None:
    return next(iter(whole_checkpoints(ckpt_dir)), None)


def newest_intact(ckpt_dir: Path) -> tuple[Path | None, dict[str, str]]:
    """(the newest checkpoint all of whose files are what they were, {name of a newer one: what is wrong with it})."""
    wrong: dict[str, str] = {}
    for folder in numbered(ckpt_dir):
        found = damage(folder, required=("model.safetensors", "config.json", "train_state.pt"))
        if not found:
            return folder, wrong
        wrong[folder.name] = found
    return None, wrong


def discard(path: Path) -> str:
    """Delete a checkpoint; where it must not be deleted, say why."""
    if path.is_symlink() or not path.is_dir():
        return "it is a link" if path.is_symlink() else "it is no folder"
    if others := sorted(set(os.listdir(path)) - OURS):
        return f"it holds {others[0]}, which is not of this program"
    remove_only(set_aside(path), OURS)  # first the name: nobody shall find half a checkpoint
    return ""


def make_way(target: Path) -> None:
    """Where a checkpoint is to be replaced that holds somebody's file, or is a link: rename it, for good."""
    others = target.is_dir() and set(os.listdir(target)) - OURS
    if target.is_symlink() or others:
        target.rename(free_name(target.with_name(f"{target.name}_kept")))


def free_name(path: Path) -> Path:
    number = 1
    while os.path.lexists(found := path.with_name(f"{path.name}-{number}")):
        number += 1
    return found


# ---------------------------------------------------------------------------------------------------------------------
# The folder of a run: out/RUN

REPLACED = "why-this-is-here.txt"  # in each folder replaced-N that is ours
RUN_FILES = ["metrics.jsonl", "loss.png"]  # beside ckpt/ and bad_steps/; wandb/ belongs to wandb


def is_run(folder: Path) -> bool:
    """Did train.py write here? By what is in the files, not by their names: anybody may have a folder ckpt."""
    try:
        if any("step_samples" in record for record in read_metrics(folder / "metrics.jsonl")):
            return True
    except (UserError, OSError):
        pass  # damaged, or no file of ours
    checkpoints = [path for path in whole_checkpoints(folder / "ckpt") if not path.is_symlink()]
    return any((path / "train_state.pt").exists() for path in checkpoints)


def others_in(folder: Path) -> list[str]:
    """What lies in the folder of no run, and would be in the way of one; metrics.jsonl is asked for apart."""
    inside = set(os.listdir(folder)) if folder.is_dir() else set()
    ours = {"metrics.jsonl", ".metrics.jsonl.tmp", "ckpt", "wandb", *(p.name for p in replaced(folder))}
    return sorted(inside - ours)


def replaced(folder: Path) -> list[Path]:
    """Where replace_run() has put what was in the folder; known by the file that it left there."""
    return [path for path in folder.glob("replaced-*") if (path / REPLACED).is_file() and not path.is_symlink()]


def sweep(ckpt_dir: Path) -> None:
    """Delete what a kill inside a save, or inside a deletion, has left."""
    left = re.compile(r"\.tmp_step_[0-9]+|\.step_[0-9]+\.old[0-9]*")
    for place in (ckpt_dir, *replaced(ckpt_dir)):
        for path in place.glob(".*step_*"):
            if left.fullmatch(path.name):
                remove_only(path, OURS)


def replace_run(folder: Path) -> Path | None:
    """Move the earlier run's own files into folders replaced-1, from which Saver.prune deletes them once the
    new run has a whole checkpoint; returns where its checkpoints are. Everything else stays where it is.
    """
    ckpt_dir = folder / "ckpt"
    in_run, in_ckpt = [*RUN_FILES, *bad_step_texts(folder)], [p.name for p in numbered(ckpt_dir)]
    for place, names in ((folder, in_run), (ckpt_dir, in_ckpt)):
        if there := [name for name in names if os.path.lexists(place / name)]:
            aside = free_name(place / "replaced")
            aside.mkdir()
            (aside / REPLACED).write_text("train.py deletes this folder's run once the new one has a checkpoint.\n")
            for name in there:
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                (place / name).rename(aside / name)
    remove_only(folder / "bad_steps", [])
    return max(replaced(ckpt_dir), default=None)


def bad_step_texts(folder: Path) -> list[str]:
    """bad_steps/step_N.txt, those that are there."""
    texts = folder / "bad_steps"
    names = os.listdir(texts) if texts.is_dir() and not texts.is_symlink() else []
    return [f"bad_steps/{name}" for name in names if re.fullmatch(r"step_[0-9]{8,}\.txt", name)]


def remove_run_files(folder: Path) -> None:
    """Delete a run's own files from a folder replaced-N, and it, unless it holds something else."""
    remove_only(folder / "bad_steps", [Path(name).name for name in bad_step_texts(folder)])
    remove_only(folder, [*RUN_FILES, REPLACED])


@contextmanager
def run_folder(folder: Path) -> Iterator[Lock]:
    """Hold the run's folder, so that no other process decides or writes anything in it meanwhile.

    It is made if it is not there, and removed again if nothing was put into it.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    held = Lock(folder, "stop it (a killed torchrun can leave its workers behind), or choose another --run_name")
    try:
        yield held
    finally:
        try:
            for path in made:
                path.rmdir()  # which only an empty folder can be
        except OSError:
            pass
        held.close()


# ---------------------------------------------------------------------------------------------------------------------
# What a run starts from


@dataclass(frozen=True)
class Source:
    """What a run starts from; decided by one rank, under the lock of the run's folder."""

    path: Path | None = None  # a checkpoint or a model; None: scratch
    resume: bool = False
    damaged: frozenset[str] = frozenset()  # newer checkpoints of the run that are not whole


def find_source(cfg: TrainConfig, folder: Path, say: Callable[[str], None]) -> Source:
    """What init_from means. folder: the run's own. UserError where going on would lose something."""
    ckpt_dir = folder / "ckpt"
    if cfg.init_from in ("resume", "auto"):
        newest, damaged = newest_intact(ckpt_dir)
        for wrong in damaged.values():
            say(f"warning: {wrong}: damaged; {f'taking {newest} instead' if newest else 'no other is there'}")
        if newest is not None:
            return Source(newest, True, frozenset(damaged))
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
        return Source()  # no run, or one that ended before its first checkpoint
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
    return Source(path)


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

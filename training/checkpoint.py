"""Checkpoints: write them in the background, delete older ones, read them.

A checkpoint is a Hugging Face model folder, plus the files that a resumed run needs:

    out/RUN/ckpt/step_00001000/
        model.safetensors, config.json    the model, as training/huggingface.py writes it
        meta.json, tokenizer.*            meta.json and the tokenizer of the data set
        tokenizer.json, ...               the same tokenizer for Hugging Face's tools
        train_state.pt                    optimizer, scaler, step, and position in the data:
                                          tensors and numbers, no code
        train_config.json                 the settings of the run
        manifest.json                     size and SHA-256 of every other file

A checkpoint is either complete or missing: it is written to a temporary folder, synced to the disk
and renamed. A thread does this from a copy in host memory; training waits for that copy only. If
the newest checkpoint is damaged, a resumed run uses the previous one.

Only folders named step_N in ckpt/ are deleted, and in them only the files that manifest.json lists.
"""

import math
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from configurator import UserError, note
from hardware.disk import (
    MANIFEST,
    damage,
    free_path,
    json_bytes,
    manifest,
    read_object,
    remove_files,
    sealed,
    set_aside,
    sync_and_rename,
)
from hardware.machine import Machine
from hardware.sharded import full_tensor, is_sharded, local_shard
from model import GPTConfig
from text.dataset import files_of, hashes_of, weights_of
from text.hf_tokenizer import (
    answer_ends,
    chat_files,
    read_json,
    to_hugging_face,
    with_class_and_eos,
)
from text.tokenizer import HuggingFace, Tokenizer
from text.windows import DataSet
from training.huggingface import (
    architecture_of,
    is_utf8,
    load_tensors,
    save_weights,
    to_config,
)
from training.plan import Progress
from training.run_folder import CHECKPOINT_FILES, RunFolder, numbered, step_of
from training.settings import TrainConfig

# --------------------------------------------------------------------------------------------------
# Write


@dataclass
class Saver:
    """Write the checkpoints of a run in the background, one at a time, and delete older ones."""

    run: RunFolder
    config: GPTConfig  # of the model
    files: dict[str, bytes]  # see shared_files()
    keep: int  # how many of the newest checkpoints stay, in addition to the best one
    machine: Machine
    saved: Callable[[int, Path, float], None]  # reports a step, its checkpoint, and the seconds
    step: int  # of the last checkpoint; at first the one that the run resumes, or 0
    failed: str = ""  # why the last checkpoint could not be written; "" if it was
    lost: str = ""  # why checkpoints go to another folder than that of the run
    writing: Future | None = None

    def __post_init__(self) -> None:
        self.folder = self.run.path / "ckpt"
        self.pool = ThreadPoolExecutor(1)

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        progress: Progress,
    ) -> None:
        """Start to write the checkpoint of this step, if there is none yet. All ranks must call it.

        This waits until the previous checkpoint is on the disk. Raises UserError, on all ranks, if
        a weight is not finite.
        """
        if progress.step == self.step:  # somebody may have deleted it
            exists = not self.step or (self.folder / f"step_{self.step:08d}").exists()
            is_written = exists or bool(self.writing and not self.writing.done())
            if all(self.machine.gather(is_written or not self.machine.is_main)):
                return
        self.step = progress.step
        check_finite(model, self.machine, self.step)
        started = time.perf_counter()
        self.wait()
        state = asdict(progress)
        state |= {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
        weights = to_host(dict(model.named_parameters()), self.machine.is_main)
        state = to_host(state, self.machine.is_main)
        if self.machine.is_main:
            self.writing = self.pool.submit(self.write, weights, state, started)

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is on the disk."""
        if self.writing:
            self.writing.result()

    def close(self) -> None:
        """End the thread, as soon as the last checkpoint is on the disk."""
        self.wait()
        self.pool.shutdown()

    def write(self, weights: dict[str, Tensor], state: dict, started: float) -> None:
        """Write a checkpoint, rename it, and report it.

        If the folder of the run was moved or deleted, another run may have this name now. Then the
        checkpoint goes to a new folder beside it, and the run ends.

        started: of the save, by time.perf_counter(). If the disk is full or fails, this prints a
        warning, and training continues: the earlier checkpoints are still there.
        """
        if not self.lost and not self.run.is_ours():
            run = self.run.path
            self.lost = f"{run} was moved, deleted or replaced while this run wrote to it"
            self.folder = free_path(run.with_name(f"{run.name}_moved")) / "ckpt"
        target = self.folder / f"step_{state['step']:08d}"
        temporary = target.with_name(f".tmp_{target.name}")
        try:
            self.run.ckpt = None  # until the new one is known: a record may be written now
            self.folder.mkdir(parents=bool(self.lost), exist_ok=True)
            self.run.ckpt = os.stat(self.folder)
            temporary.mkdir()
            save_weights(architecture_of(self.config), self.config, weights, temporary)
            for name, content in self.files.items():
                (temporary / name).write_bytes(content)
            with open(temporary / "train_state.pt", "wb") as file:
                torch.save(state, file)
            (temporary / MANIFEST).write_bytes(json_bytes(manifest(temporary)))
            if os.path.lexists(target):
                set_aside(target, f"{target.name}_kept")
            sync_and_rename(temporary, target)
        except (OSError, RuntimeError, MemoryError) as e:  # torch.save() wraps an OSError
            with suppress(OSError):
                if self.lost or self.run.is_ours():
                    remove_files(temporary, CHECKPOINT_FILES)
            cause = e.__context__ or e
            reason = getattr(cause, "strerror", None) or e
            if name := getattr(cause, "filename", None):
                reason = f"{name}: {reason}"
            self.failed = f"{target} could not be written ({reason})"
            self.machine.print0(f"warning: {self.failed}; training continues")
            return
        self.failed = ""
        self.saved(state["step"], target, time.perf_counter() - started)

    def prune(self, progress: Progress) -> None:
        """Delete older checkpoints, as soon as the last one is on the disk.

        Call it after the evaluation of the step, which may find that the new one is the best.
        """
        if self.writing and not progress.bad_in_a_row:  # after bad steps, older ones may be better
            done = (self.writing, progress.step, progress.best_step)
            self.writing = self.pool.submit(self.delete_older, *done)

    def delete_older(self, written: Future, step: int, best_step: int) -> None:
        """Delete the checkpoints up to `step`, except the best one and the `keep` newest others."""
        written.result()
        if self.failed:
            return
        others = [path for path in numbered(self.folder) if step_of(path) <= step]
        others = [path for path in others if step_of(path) != best_step]
        for path in others[self.keep :]:
            try:
                if self.lost or self.run.is_ours():
                    delete_checkpoint(path)
            except (OSError, ValueError) as e:
                self.machine.print0(f"warning: {path} could not be deleted ({e})")


def delete_checkpoint(folder: Path) -> None:
    """Delete the files that the manifest of a checkpoint lists, then the folder if it is empty.

    The manifest is renamed first, so that the folder no longer counts as a checkpoint, and deleted
    last: after a kill, the next call goes on. Raises ValueError if the manifest is damaged.
    """
    names = folder / f".{MANIFEST}"
    if (folder / MANIFEST).exists() and not folder.is_symlink():
        (folder / MANIFEST).replace(names)
    if names.exists():
        ours = [name for name in read_object(names) if "/" not in name]
        remove_files(folder, [*ours, names.name])


def check_finite(model: torch.nn.Module, machine: Machine, step: int) -> None:
    """Raise UserError, on all ranks, if a weight is NaN or infinite: no step can repair that."""
    finite = {name: local_shard(p).isfinite().all() for name, p in model.named_parameters()}
    flags = torch.stack(list(finite.values())).tolist()  # one wait for all
    broken = next((name for name, good in zip(finite, flags, strict=True) if not good), "")
    if broken := max(machine.gather(broken)):
        advice = "lower lr; --init_from=resume continues from the last checkpoint, if there is one"
        raise UserError(f"step {step} is not saved: NaN or infinity in {broken}: {advice}")


def to_host(state: Any, keep: bool) -> Any:
    """Return a copy in host memory of all tensors in a state_dict, which may be nested.

    Sharded tensors are gathered one by one, so all ranks must call this. On ranks with keep=False,
    each tensor becomes None.
    """
    if isinstance(state, dict):
        return {k: to_host(v, keep) for k, v in state.items()}
    if isinstance(state, Tensor):
        full = full_tensor(state.detach())
        return full.to("cpu", copy=True) if keep else None
    return state


def shared_files(
    cfg: TrainConfig, sets: list[DataSet], tokenizer: Tokenizer, c: GPTConfig
) -> dict[str, bytes]:
    """Return name -> content of the files that are the same in each checkpoint of a run.

    They are read before the first step, since the data set may be gone when a checkpoint is
    written. meta.json is that of the first data set, plus the hashes of all data sets, which a
    resumed run compares. If no tokenizer.json came with the tokenizer, one is made. If a data set
    has conversations, the files include a chat template. c: the shape of the model.
    """
    folder, meta = sets[0].folder, sets[0].meta
    changes = {
        "trained_on": hashes_of(sets, "train"),
        "judged_by": hashes_of(sets, "val"),
        "weights": weights_of(sets),
        # manifest.json has the hashes of the tokenizer's files
        "tokenizer": {k: v for k, v in meta["tokenizer"].items() if k != "files"},
    }
    files = {name: (folder / name).read_bytes() for name in files_of(meta["tokenizer"])}
    if isinstance(tokenizer, HuggingFace):
        files["tokenizer_config.json"] = with_class_and_eos(tokenizer, files)
    elif "tokenizer.json" not in files:
        made = to_hugging_face(tokenizer, c.block_size, read_json(folder / "tokenizer_config.json"))
        if not made:
            note("other programs may read this tokenizer differently: docs/interchange.md")
        files |= {name: json_bytes(content) for name, content in made.items()}
    if "generation_config.json" in files:
        files["generation_config.json"] = answer_ends(tokenizer, files["generation_config.json"])
    if any("answers" in d.meta["splits"]["train"] for d in sets):
        files |= chat_files(tokenizer, files)
    bos_id = next(iter(tokenizer.prefix), None)
    files["config.json"] = json_bytes(to_config(c, tokenizer.eos_id, bos_id))
    files["meta.json"] = json_bytes(sealed(meta | changes))
    return files | {"train_config.json": json_bytes(asdict(cfg))}


# --------------------------------------------------------------------------------------------------
# Read


@dataclass(frozen=True)
class Saved:
    """The files of a checkpoint that describe the run that wrote it."""

    settings: dict  # train_config.json
    meta: dict  # meta.json
    state: dict  # train_state.pt


def read_state(folder: Path, verify: bool = False) -> Saved:
    """Read the checkpoint's files, except for the model and the tokenizer.

    verify: whether to compare all of its files with its manifest; find_start() has done so on rank
    0's computer. Raises UserError or OSError if a file cannot be read, or is damaged.
    """
    if verify and (problem := damage(folder)):
        raise UserError(f"{problem}: all computers must have the same checkpoint")
    try:
        meta = read_object(folder / "meta.json")
        if missing := {"trained_on", "judged_by", "tokenizer"} - meta.keys():
            raise ValueError(f"meta.json has no {min(missing)}")
        # Earlier versions did not store the weights of a mixture.
        meta = {"weights": dict.fromkeys(meta["trained_on"], "1")} | meta
        return Saved(read_object(folder / "train_config.json"), meta, load_state(folder))
    except ValueError as e:
        raise UserError(f"{folder / 'train_state.pt'}, or a .json next to it: {e}") from None


def load_state(checkpoint: Path) -> dict[str, Any]:
    """Return the content of train_state.pt. Raises ValueError if it cannot be read."""
    # With mmap, a tensor takes memory only when it is read, and all processes share that memory.
    # But torch opens paths as UTF-8, so a path in GBK is read without mmap.
    state = load_tensors(checkpoint / "train_state.pt", mmap=is_utf8(checkpoint))
    if not isinstance(state, dict):
        raise ValueError(f"it is a {type(state).__name__}, not a dict")
    return state


def load_optimizer(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, state: dict
) -> None:
    """Load the state of a checkpoint into the optimizer and the scaler.

    Only the moments are loaded: betas and weight decay may have changed. pop() frees the memory of
    loaded tensors. The file is mapped: each tensor is read when it is copied.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    moments = {
        i: {k: sharded_like(params[i], x) for k, x in tensors.items()}
        for i, tensors in state.pop("optimizer")["state"].items()
    }
    optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})
    if scale := state.pop("scaler"):  # empty if that process did not train in fp16
        scaler.load_state_dict(scale)


def sharded_like(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a copy of the full tensor x, sharded as p is, on the device of p.

    If x is in a file that is mapped into memory, a rank reads only the rows that it holds.
    """
    if x.dim() == 0:
        return x.clone()  # a counter of steps: the optimizer chooses its device
    if not is_sharded(p):
        return x.to(p.device, copy=True)
    mesh = p.device_mesh  # p is a DTensor; to import its class takes half a second
    n = math.ceil(x.size(0) / mesh.size())
    rows = x[n * mesh.get_local_rank() :][:n].to(p.device, p.dtype, copy=True)
    return type(p).from_local(rows, mesh, p.placements, shape=p.shape, stride=p.stride())


def intact_checkpoint(ckpt_dir: Path) -> Path | None:
    """Return the newest checkpoint whose files match its manifest and its number, or None."""
    for path in numbered(ckpt_dir):
        problem = damage(path, required=("model.safetensors", "config.json", "train_state.pt"))
        if not problem:
            step = step_of(path)
            with suppress(ValueError):  # read_state() will say what is wrong
                step = load_state(path).get("step", step)
            if step == step_of(path):
                return path
            problem = f"{path} is a copy of step {step}"
        note(f"{problem}: damaged; the previous checkpoint is used, if there is one")
    return None


def set_newer_aside(checkpoint: Path) -> None:
    """Rename newer checkpoints, which are damaged, to step_N_kept.

    The run that continues from this one will write these steps again.
    """
    for path in numbered(checkpoint.parent):
        if step_of(path) > step_of(checkpoint):
            set_aside(path, f"{path.name}_kept")

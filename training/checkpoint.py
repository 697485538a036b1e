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
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from hardware.disk import (
    MANIFEST,
    Lock,
    json_bytes,
    manifest,
    put_in_place,
    remove_only,
    sealed,
    sync_to_disk,
)
from model import GPT, GPTConfig
from text.dataset import (
    FORMAT_VERSION,
    DataSet,
    tokenizer_files,
)
from text.hf_tokenizer import llama_cpp_note, read_json, to_hugging_face
from text.tokenizer import SentencePiece, Tiktoken
from training.huggingface import caveat, hf_class, save_pretrained
from training.progress import Progress
from training.runs import (
    OURS,
    REPLACED,
    discard,
    make_way,
    numbered,
    remove_run_files,
    replaced,
    step_of,
)
from training.settings import TrainConfig


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

"""Save a run: write checkpoints and averages in the background, and delete the older ones.

A checkpoint is a Hugging Face model folder, with the files that a resumed run needs beside it:

    out/RUN/ckpt/step_00001000/
        model.safetensors, config.json    the model, as training/huggingface.py writes it
        meta.json, tokenizer.*            meta.json and the tokenizer of the data set
        tokenizer.json, ...               the same tokenizer for Hugging Face's tools
        train_state.pt                    optimizer, scaler, step, and place in the data:
                                          tensors and numbers, no code
        train_config.json                 the settings of the run
        manifest.json                     size and SHA-256 of every other file

With the setting `average`, the averaged weights are saved after each checkpoint, as a model folder
of their own. out/RUN/average/step_00001000/ has the files above, but no train_state.pt and no
train_config.json: the state of the average is in the train_state.pt of the checkpoint. The newest
two are kept.

A checkpoint is either complete or not there. A thread writes it to a temporary folder beside the
others, syncs that to the disk and renames it. Training waits only for the copy to host memory.
If the newest checkpoint turns out to be damaged, a resumed run takes the one before it.

Only files that this program writes are deleted, each by its name: see OURS and RUN_FILES in
training/runs.py. A checkpoint that holds any other file is kept whole, and everything else in
out/RUN stays.

training/runs.py finds checkpoints, checks them and deletes them. training/resume.py decides which
one a run starts from.
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

from configurator import UserError
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
from text.dataset import FORMAT_VERSION, DataSet, tokenizer_files
from text.hf_tokenizer import llama_cpp_note, read_json, to_hugging_face
from text.tokenizer import SentencePiece, Tiktoken
from training.average import Average
from training.huggingface import caveat, hf_class, save_pretrained
from training.progress import Progress
from training.runs import (
    OURS,
    REPLACED,
    averages,
    discard,
    make_way,
    numbered,
    remove_run_files,
    replaced,
    step_of,
)
from training.settings import TrainConfig


def to_host(state: Any) -> Any:
    """Return a copy in host memory of a state_dict: any nesting of dicts, lists and tensors."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {k: to_host(v) for k, v in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(to_host(v) for v in state)
    return copy.copy(state)


class Saver:
    """Write checkpoints and averages in the background, one at a time, and delete the older ones.

    damaged: names of the checkpoints in ckpt_dir that were found to be damaged.
    lock: the lock of the run's folder, on the rank that saves.
    report(step, path, seconds, note): called for each checkpoint once it is complete on the disk.
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
        self.ckpt_dir = ckpt_dir
        self.average_dir = ckpt_dir.with_name("average")
        self.cfg = cfg
        self.sets = sets
        self.tokenizer = tokenizer
        self.damaged = set(damaged)
        self.lock = lock
        self.say = say
        self.report = report
        self.pool = ThreadPoolExecutor(1)
        self.writing: Future = Future()
        self.writing.set_result(None)
        self.saved = False  # whether this process has written a complete checkpoint
        self.failed = ""  # why the last checkpoint could not be written; empty if it could
        self.kept: set[Path] = set()  # what prune() must not delete and has already reported
        folder = sets[0].folder
        info = sets[0].meta["tokenizer"]
        self.came_with = read_json(folder / "tokenizer_config.json")
        # File name -> content: the tokenizer's own file, and the files for Hugging Face's tools, as
        # far as they came with it. write_files() makes tokenizer.json if it did not come. They are
        # read now, because the data set may be gone when a checkpoint is written.
        self.tokenizer_files = {p.name: p.read_bytes() for p in tokenizer_files(folder, info)}

    def save(
        self, model: GPT, optimizer, scaler, average: Average | None, progress: Progress
    ) -> None:
        """Begin to write step_N. Returns when everything is copied to host memory."""
        self.wait()
        weights = to_host(dict(model.named_parameters()))
        states = {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
        if average:
            states["average"] = average.state_dict()
        training = to_host(asdict(progress) | states)
        self.writing = self.pool.submit(self.write, model.config, weights, training)

    def save_missing(self, average: Average, step: int) -> None:
        """Begin to write the average of step_N, from which the run is resumed, if it is not there.

        The process that wrote the checkpoint may have been killed before it wrote the average. If
        the run is at its end, no other average comes after it.
        """
        if not (self.average_dir / f"step_{step:08d}" / MANIFEST).is_file():
            weights = to_host(average.weights)
            c = average.model.config
            self.writing = self.pool.submit(self.write_average, c, weights, step)

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is on the disk."""
        self.writing.result()

    def write(self, c: GPTConfig, weights: dict, training: dict) -> None:
        """Write a checkpoint, put it in place, report it, and prune the older ones.

        If the disk is full or fails, this is a warning, and self.failed holds the reason. Training
        goes on, since the earlier checkpoints are still there.
        """
        started = time.perf_counter()
        step = training["step"]
        target = self.ckpt_dir / f"step_{step:08d}"
        try:
            old = self.put(target, c, weights, training)
        except OSError as e:
            self.failed = str(e)
            self.say(f"warning: {self.failed}; training goes on, earlier checkpoints are intact")
            return
        self.damaged.discard(target.name)
        self.failed = ""
        note = "" if self.saved else self.for_others(c)
        self.saved = True
        self.report(step, target, time.perf_counter() - started, note)
        try:
            if old:  # after a resume, the run came to a step that it had already saved
                remove_only(old, OURS)
            if not training["bad_in_a_row"]:  # after a bad step, older weights may be better
                self.prune(step, training["best_step"])
        except OSError as e:
            what = f"{e.filename or self.ckpt_dir}: {e.strerror}"
            self.say(f"warning: an older checkpoint could not be deleted ({what})")
        except UserError as e:  # a folder of older checkpoints cannot be listed
            self.say(f"warning: {e}")
        if "average" in training:
            self.write_average(c, training["average"]["weights"], step)

    def write_average(self, c: GPTConfig, weights: dict, step: int) -> None:
        """Write the averaged weights of a step, and keep only the average before it.

        If that fails, it is a warning: the checkpoint holds the average too.
        """
        target = self.average_dir / f"step_{step:08d}"
        try:
            old = self.put(target, c, weights)
        except OSError as e:
            self.say(f"warning: {e}; training goes on, the checkpoint holds the average too")
            return
        self.say(f"step {step}: saved {target}")
        try:
            if old:
                remove_only(old, OURS)
            reached = [p for p in averages(self.average_dir.parent) if step_of(p) <= step]
            self.delete(reached[2:])
        except (OSError, UserError) as e:
            self.say(f"warning: an older average could not be deleted ({e})")

    def put(
        self, target: Path, c: GPTConfig, weights: dict, training: dict | None = None
    ) -> Path | None:
        """Write a checkpoint, or an average, in a folder beside `target`, and put it in place.

        training: the content of train_state.pt; None: it is an average. Return the new path of what
        `target` was before; None if there was nothing. Raises OSError, with the reason in words.
        """
        tmp = target.with_name(f".tmp_{target.name}")
        try:
            self.lock.renew()
            remove_only(tmp, OURS)  # left by a save that failed
            tmp.mkdir(parents=True)
            self.write_files(tmp, c, weights, training)
            for path in tmp.iterdir():
                sync_to_disk(path)
            make_way(target, required=() if training else (MANIFEST,))
            return put_in_place(tmp, target)
        except (OSError, RuntimeError, SafetensorError) as e:
            full = tmp.parent.is_dir() and shutil.disk_usage(tmp.parent).free < 2**20
            remove_only(tmp, OURS)
            reason = (getattr(e, "strerror", None) or str(e)).splitlines()[0]
            # On a full disk torch raises RuntimeError, and safetensors raises SafetensorError.
            # Both name the write that failed, but not the reason.
            if full and not isinstance(e, OSError):
                reason = os.strerror(errno.ENOSPC)
            raise OSError(f"{target} could not be written ({reason})") from None

    def write_files(self, tmp: Path, c: GPTConfig, weights: dict, training: dict | None) -> None:
        """Write all files of put() to the folder tmp. The manifest comes last."""
        prefix = self.tokenizer.prefix
        bos_id = prefix[0] if prefix else None
        save_pretrained(c, weights, tmp, self.tokenizer.eos_id, bos_id)
        if training:
            torch.save(training, tmp / "train_state.pt")
            write_json(tmp / "train_config.json", asdict(self.cfg))
        write_json(tmp / "meta.json", self.meta())
        if "tokenizer.json" not in self.tokenizer_files:
            made = to_hugging_face(self.tokenizer, c.block_size, self.came_with)
            self.tokenizer_files |= {name: json_bytes(content) for name, content in made.items()}
        for name, content in self.tokenizer_files.items():
            (tmp / name).write_bytes(content)
        write_json(tmp / MANIFEST, manifest(tmp))

    def for_others(self, c: GPTConfig) -> str:
        """Return what other programs cannot open of this checkpoint, or have to be told."""
        notes = [caveat(c), llama_cpp_note(self.tokenizer, hf_class(c), c.vocab_size)]
        return "".join(f"; {note}" for note in notes if note)

    def meta(self) -> dict:
        """Return the content of meta.json: that of the first data set, with these changes.

        It gets the hashes of all data sets, which a resumed run compares. The hashes of the
        tokenizer's files are left out, since manifest.json has them.
        """
        meta = self.sets[0].meta
        tokenizer = {k: v for k, v in meta["tokenizer"].items() if k != "files"}
        changes = {
            "trained_on": {d.name: d.meta["splits"]["train"]["sha256"] for d in self.sets},
            "judged_by": {d.name: d.meta["splits"]["val"]["sha256"] for d in self.sets},
            "format_version": FORMAT_VERSION,
            "tokenizer": tokenizer,
        }
        return sealed(meta | changes)

    def prune(self, step: int, best_step: int) -> None:
        """Delete what the complete checkpoint of `step` replaces.

        These are the run that --overwrite replaced, and the checkpoints up to `step`, except the
        best one and the `keep` newest of the others that are not damaged. Checkpoints of later
        steps stay: they were found damaged when this run was resumed, and each of them is replaced
        when the run comes to its step.
        """
        reached = [path for path in numbered(self.ckpt_dir) if step_of(path) <= step]
        best = self.ckpt_dir / f"step_{best_step:08d}"
        whole = [path for path in reached if path.name not in self.damaged and path != best]
        stay = {best, *whole[: self.cfg.keep]}
        self.delete([path for path in reached if path not in stay])
        for folder in [*replaced(self.ckpt_dir), *replaced(self.average_dir)]:
            self.delete(numbered(folder))
            if not numbered(folder) and remove_only(folder, [REPLACED]):
                remove_only(folder.parent, [])  # average/, if the new run saves no averages
        for folder in replaced(self.ckpt_dir.parent):
            remove_run_files(folder)

    def delete(self, paths: list[Path]) -> None:
        """Delete checkpoints, but keep and report those that hold files of somebody else's."""
        for path in paths:
            why_not = discard(path)
            if why_not and path not in self.kept:
                self.kept.add(path)
                self.say(f"note: {path} is kept: {why_not}")


def write_json(path: Path, content: dict) -> None:
    path.write_bytes(json_bytes(content))

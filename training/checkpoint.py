"""Save a run: write checkpoints in the background, and delete the older ones.

A checkpoint is a Hugging Face model folder, with the files that a resumed run needs beside it:

    out/RUN/ckpt/step_00001000/
        model.safetensors, config.json    the model, as training/huggingface.py writes it
        meta.json, tokenizer.*            meta.json and the tokenizer of the data set
        tokenizer.json, ...               the same tokenizer for Hugging Face's tools
        train_state.pt                    optimizer, scaler, step, and place in the data:
                                          tensors and numbers, no code
        train_config.json                 the settings of the run
        manifest.json                     size and SHA-256 of every other file
        average/                          with the setting `average`: the averaged weights, as a
                                          model folder of its own

A checkpoint is either complete or not there. It is written to a temporary folder beside the others,
synced to the disk and renamed. A thread does this from a copy in host memory, for which alone the
training waits. If the newest checkpoint turns out to be damaged, a resumed run takes the one before
it.

Only files that this program writes are deleted, each by its name: see OURS in training/runs.py. A
checkpoint that holds any other file is kept whole, and everything else in out/RUN stays.

training/runs.py finds checkpoints, checks them and deletes them. training/resume.py decides which
one a run starts from.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configurator import UserError
from hardware.disk import Lock, finish, json_bytes, put_in_place, sealed
from hardware.machine import Machine
from model import GPT, GPTConfig
from text.dataset import FORMAT_VERSION, DataSet, tokenizer_files
from text.hf_tokenizer import read_json, to_hugging_face
from text.tokenizer import SentencePiece, Tiktoken
from training.average import Average
from training.huggingface import save_pretrained
from training.progress import Progress
from training.runs import prune, remove_checkpoint, temporary
from training.settings import TrainConfig
from training.shards import whole


@dataclass(frozen=True)
class SmallFiles:
    """What is the same in each checkpoint of a run. The data set may be gone when it is written."""

    settings: bytes  # the content of train_config.json
    of_data: dict[str, bytes]  # meta.json and the tokenizer's files: name -> content
    eos_id: int
    bos_id: int | None


def small_files(
    cfg: TrainConfig, c: GPTConfig, sets: list[DataSet], tokenizer: SentencePiece | Tiktoken
) -> SmallFiles:
    """Return the small files of a run that trains a model of the shape c.

    meta.json is that of the first data set, with the hashes of all data sets, which a resumed run
    compares. The hashes of the tokenizer's files are left out, since manifest.json has them. If no
    tokenizer.json came with the tokenizer, it is made.
    """
    data = sets[0]
    entry = {k: v for k, v in data.meta["tokenizer"].items() if k != "files"}
    changes = {
        "trained_on": {d.name: d.meta["splits"]["train"]["sha256"] for d in sets},
        "judged_by": {d.name: d.meta["splits"]["val"]["sha256"] for d in sets},
        "format_version": FORMAT_VERSION,
        "tokenizer": entry,
    }
    files = {p.name: p.read_bytes() for p in tokenizer_files(data.folder, data.meta["tokenizer"])}
    if "tokenizer.json" not in files:
        came_with = read_json(data.folder / "tokenizer_config.json")
        made = to_hugging_face(tokenizer, c.block_size, came_with)
        files |= {name: json_bytes(content) for name, content in made.items()}
    files["meta.json"] = json_bytes(sealed(data.meta | changes))
    bos_id = tokenizer.prefix[0] if tokenizer.prefix else None
    return SmallFiles(json_bytes(asdict(cfg)), files, tokenizer.eos_id, bos_id)


class Saver:
    """Write checkpoints in the background, one at a time, and delete the older ones.

    folder: of the checkpoints. keep: how many stay, besides the best one. lock: that of the run's
    folder, on the rank that writes; None on the others.
    report(step, path, seconds): called for each checkpoint once it is complete on the disk.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        files: SmallFiles,
        machine: Machine,
        lock: Lock | None,
        report: Callable[[int, Path, float], None],
    ):
        self.folder = folder
        self.keep = keep
        self.files = files
        self.machine = machine
        self.lock = lock
        self.report = report
        self.pool = ThreadPoolExecutor(1)
        self.writing: Future | None = None
        self.skipped = 0  # saves in a row that were skipped: the weights were not finite
        self.failed = ""  # why the last checkpoint could not be written; empty if it could
        self.notes: set[str] = set()  # what was said of checkpoints that are not ours to delete

    def save(
        self, model: GPT, optimizer, scaler, average: Average | None, progress: Progress
    ) -> None:
        """Begin to write step_N. All ranks must call this; rank 0 writes."""
        self.wait()
        self.skipped = 0
        started = time.perf_counter()
        training = asdict(progress)
        training |= {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
        if average:
            training["average"] = average.state_dict()
        weights = to_host(dict(model.named_parameters()), keep=self.lock is not None)
        training = to_host(training, keep=self.lock is not None)
        if self.lock:
            self.writing = self.pool.submit(self.write, model.config, weights, training, started)

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is on the disk."""
        if self.writing:
            self.writing.result()

    def write(self, c: GPTConfig, weights: dict, training: dict, started: float) -> None:
        """Write a checkpoint, put it in place, report it, and prune the older ones.

        started: when the save began, by time.perf_counter().

        If the disk is full or fails, this is a warning, and self.failed holds the reason. Training
        goes on, since the earlier checkpoints are still there.
        """
        step = training["step"]
        target = self.folder / f"step_{step:08d}"
        draft = temporary(target)
        try:
            self.lock.renew()
            self.write_folder(draft, c, weights, training)
            # Where a disk has no locks, another process may have written this step.
            if kept := put_in_place(draft, target, f"{target.name}_kept"):
                self.machine.say(f"note: {target} is kept as {kept.name}")
        except OSError as e:
            with suppress(OSError):
                remove_checkpoint(draft)
            self.failed = f"{target} could not be written ({e.strerror or e})"
            goes_on = "training goes on, earlier checkpoints are intact"
            self.machine.say(f"warning: {self.failed}; {goes_on}")
            return
        self.failed = ""
        self.report(step, target, time.perf_counter() - started)
        if training["bad_in_a_row"]:
            return  # the last step was bad: older weights may be better
        try:
            for line in prune(self.folder, step, training["best_step"], self.keep):
                if line not in self.notes:
                    self.notes.add(line)
                    self.machine.say(line)
        except (OSError, UserError) as e:
            self.machine.say(f"warning: an older checkpoint could not be deleted ({e})")

    def write_folder(self, folder: Path, c: GPTConfig, weights: dict, training: dict) -> None:
        """Write all files of a checkpoint and sync them to the disk, the manifest last."""
        self.write_model(folder, c, weights)
        if "average" in training:
            self.write_model(folder / "average", c, training["average"]["weights"])
            finish(folder / "average")
        (folder / "train_config.json").write_bytes(self.files.settings)
        with open(folder / "train_state.pt", "wb") as file:
            try:
                torch.save(training, file)
            except RuntimeError as e:  # on top of the reason
                raise e.__context__ if isinstance(e.__context__, OSError) else e from None
        finish(folder)

    def write_model(self, folder: Path, c: GPTConfig, weights: dict) -> None:
        """Make a model folder: the weights, their shape, and the tokenizer."""
        folder.mkdir(parents=True)
        save_pretrained(c, weights, folder, self.files.eos_id, self.files.bos_id)
        for name, content in self.files.of_data.items():
            (folder / name).write_bytes(content)


def to_host(state: Any, keep: bool) -> Any:
    """Return a copy in host memory of the tensors in a state_dict, or in dicts of such.

    Sharded tensors are gathered one after the other, so all ranks must call this. Those that do not
    keep the copy get None for each tensor.
    """
    if isinstance(state, dict):
        return {k: to_host(v, keep) for k, v in state.items()}
    if isinstance(state, Tensor):
        gathered = whole(state.detach())
        return gathered.to("cpu", copy=True) if keep else None
    return state

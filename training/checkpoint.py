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
others, syncs that to the disk and renames it. Training waits only for the copy to host memory. With
the setting `shard`, or if memory has no room for the copy, it waits until the tensors are written
(and with `average`, until all is on the disk). The files are the same.
If the newest checkpoint turns out to be damaged, a resumed run takes the one before it.

Only files that this program writes are deleted, each by its name: see OURS and RUN_FILES in
training/runs.py. A checkpoint that holds any other file is kept whole, and everything else in
out/RUN stays.

training/runs.py finds checkpoints, checks them and deletes them. training/resume.py decides which
one a run starts from.
"""

import copy
import secrets
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from configurator import UserError
from hardware.disk import (
    MANIFEST,
    Lock,
    NewFolder,
    damage,
    json_bytes,
    put_in_place,
    remove_only,
    sealed,
)
from hardware.machine import room
from model import GPT, GPTConfig
from text.dataset import FORMAT_VERSION, DataSet, tokenizer_files
from text.hf_tokenizer import read_json, to_hugging_face
from text.tokenizer import SentencePiece, Tiktoken
from training.average import Average
from training.huggingface import save_pretrained
from training.progress import Progress
from training.runs import (
    OURS,
    REPLACED,
    averages,
    check_step,
    discard,
    make_way,
    numbered,
    remove_run_files,
    replaced,
    step_of,
)
from training.settings import TrainConfig
from training.shards import is_shared, whole
from training.stream import save, save_state, tensors_in


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
    needed: bytes of host memory that a step takes in each process; None: those that it has.
    lock: the lock of the run's folder, on the rank that saves.
    report(step, path, seconds): called for each checkpoint once it is complete on the disk.
    """

    def __init__(
        self,
        ckpt_dir: Path,
        cfg: TrainConfig,
        sets: list[DataSet],
        tokenizer: SentencePiece | Tiktoken,
        damaged: Iterable[str],
        needed: float | None,
        lock: Lock | None,
        say: Callable[[str], None],
        report: Callable[[int, Path, float], None],
    ):
        self.ckpt_dir = ckpt_dir
        self.average_dir = ckpt_dir.with_name("average")
        self.cfg = cfg
        self.sets = sets
        self.tokenizer = tokenizer
        self.damaged = set(damaged)
        self.needed = needed
        self.said_no_room = False
        self.lock = lock
        self.say = say
        self.report = report
        # In the names of the folders that this process writes before they get their own. Another
        # process that trains this run too, where a disk has no locks, has another one.
        self.token = secrets.token_hex(4)
        self.pool = ThreadPoolExecutor(1)
        self.writing: Future = Future()
        self.writing.set_result(None)
        self.unfinished: NewFolder | None = None  # the last one that was begun
        self.skipped = 0  # saves in a row that were skipped: the weights were not finite
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
        """Begin to write step_N. All ranks must call this; rank 0 writes.

        If each rank holds everything, this copies it to host memory, and the thread writes it. If
        the ranks share it out, or if host memory has no room for a copy, this writes one tensor
        after the other, and the thread does what is left.
        """
        self.wait()
        self.skipped = 0
        started = time.perf_counter()
        weights = dict(model.named_parameters())
        training = asdict(progress)
        training |= {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
        if average:
            training["average"] = average.state_dict()
        c = model.config
        shared = is_shared(model.wte.weight)
        without_copy = shared or (self.lock and not self.has_room([weights, training]))
        if without_copy:
            target = self.ckpt_dir / f"step_{progress.step:08d}"
            write_tensors = self.write_one_by_one(c, weights, training, target)
            training = {k: v for k, v in training.items() if k not in ("optimizer", "scaler")}
        elif self.lock:
            weights = to_host(weights)
            training = to_host(training)
            write_tensors = partial(self.write_tensors, c, weights, training)
        if self.lock:
            self.writing = self.pool.submit(self.write, c, training, write_tensors, started)
        if without_copy and average:
            self.wait()  # the thread writes the average itself

    def has_room(self, state: Any) -> bool:
        """Return whether host memory has room for a copy of this state. Say so if it has not."""
        size = sum(x.nbytes for x in tensors_in(state))
        if size <= room(self.needed):
            return True
        if not self.said_no_room:
            what = f"a copy of weights and optimizer ({size / 1e9:.1f} GB)"
            self.say(f"note: no memory for {what}: training waits while they are written")
        self.said_no_room = True
        return False

    def catch_up(self, average: Average | None, training: dict) -> None:
        """Begin what the process that wrote the checkpoint of a resumed run was killed before.

        That is to write the average of its step, and to delete what the checkpoint replaces. If the
        run is at its end, no other checkpoint comes after it. training: its train_state.pt.
        """
        self.clean_up(training)
        target = self.average_dir / f"step_{training['step']:08d}"
        if average and average.steps:
            if not damage(target, ["meta.json"], required=["meta.json"]):
                check_step(target)
                return
            copied = self.has_room(average.weights)
            weights = to_host(average.weights) if copied else average.weights
            c = average.model.config
            self.writing = self.pool.submit(self.write_average, c, weights, training)
            if not copied:
                self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is on the disk."""
        self.writing.result()

    def write(
        self,
        c: GPTConfig,
        training: dict,
        write_tensors: Callable[[Path], NewFolder],
        started: float,
    ) -> None:
        """Write a checkpoint, put it in place, report it, and prune the older ones.

        write_tensors: see put(). started: when the save began, by time.perf_counter().

        If the disk is full or fails, this is a warning, and self.failed holds the reason. Training
        goes on, since the earlier checkpoints are still there.
        """
        step = training["step"]
        target = self.ckpt_dir / f"step_{step:08d}"
        try:
            old = self.put(target, c, write_tensors)
        except OSError as e:
            self.failed = str(e)
            self.say(f"warning: {self.failed}; training goes on, earlier checkpoints are intact")
            return
        self.damaged.discard(target.name)
        self.failed = ""
        self.report(step, target, time.perf_counter() - started)
        self.clean_up(training, old)  # after a resume, the run may come to a step that it had saved
        if "average" in training:
            self.write_average(c, training["average"]["weights"], training)

    def write_average(self, c: GPTConfig, weights: dict, training: dict) -> None:
        """Write the averaged weights of a step, and keep only the average before it.

        If that fails, it is a warning: the checkpoint holds the average too.
        """
        target = self.average_dir / f"step_{training['step']:08d}"
        try:
            write_tensors = partial(self.write_tensors, c, weights, None)
            old = self.put(target, c, write_tensors, is_average=True)
        except OSError as e:
            self.say(f"warning: {e}; training goes on, the checkpoint holds the average too")
            return
        self.say(f"step {training['step']}: saved {target}")
        self.clean_up(training, old)

    def clean_up(self, training: dict, old: Path | None = None) -> None:
        """Delete `old`, what a checkpoint was before, and prune. If that fails, it is a warning."""
        try:
            if old:
                remove_only(old, OURS)
            if not training["bad_in_a_row"]:  # after a bad step, older weights may be better
                self.prune(training["step"], training["best_step"])
        except (OSError, UserError) as e:
            self.say(f"warning: an older checkpoint could not be deleted ({e})")

    def put(
        self,
        target: Path,
        c: GPTConfig,
        write_tensors: Callable[[Path], NewFolder],
        is_average: bool = False,
    ) -> Path | None:
        """Write a checkpoint, or an average, in a folder beside `target`, and put it in place.

        write_tensors(target): make that folder and write the large files. Return the new path of
        what `target` was before; None if there was nothing. Raises OSError, with the reason in
        words.
        """
        try:
            folder = write_tensors(target)
            if not is_average:
                folder.write("train_config.json", json_bytes(asdict(self.cfg)))
            self.write_small_files(folder, c, step_of(target))
            folder.finish()
            make_way(target, required=(MANIFEST,) if is_average else ())
            return put_in_place(folder.path, target)
        except OSError as e:
            if self.unfinished:
                self.unfinished.close()  # else the disk would keep what is deleted now
            remove_only(self.temporary(target), OURS)
            raise OSError(f"{target} could not be written ({e.strerror or e})") from None

    def temporary(self, target: Path) -> Path:
        return target.with_name(f".tmp_{target.name}-{self.token}")

    def new_folder(self, target: Path) -> NewFolder:
        """Make the folder in which a checkpoint is written before it gets its name."""
        self.lock.renew()
        remove_only(self.temporary(target), OURS)  # left by a save that failed
        self.unfinished = NewFolder(self.temporary(target))
        return self.unfinished

    def write_tensors(
        self, c: GPTConfig, weights: dict, training: dict | None, target: Path
    ) -> NewFolder:
        """Write the large files to a new folder. training: None for an average."""
        folder = self.new_folder(target)
        save_pretrained(c, weights.items(), folder, *self.ends())
        if training:
            save(training, folder.open("train_state.pt"))
        return folder

    def write_one_by_one(
        self, c: GPTConfig, weights: dict, training: dict, target: Path
    ) -> Callable[[Path], NewFolder]:
        """Write the large files of a checkpoint, one tensor after the other, without a copy of all.

        All ranks must call this if they share the tensors out. After an error rank 0 goes on to
        gather, because the other ranks do. Return a function for put(): it raises that error, or
        returns the folder.
        """
        gathered = (whole(x) for x in (*weights.values(), *tensors_in(training)))
        writing: Future = Future()
        try:
            if self.lock:
                folder = self.new_folder(target)
                save_pretrained(c, zip(weights, gathered, strict=False), folder, *self.ends())
                save_state(folder.open("train_state.pt"), training, gathered)
                writing.set_result(folder)
        except OSError as e:
            writing.set_exception(e)
        for _ in gathered:
            pass
        return lambda target: writing.result()

    def ends(self) -> tuple[int, int | None]:
        """Return the ids of the tokens at the end and the beginning of a text."""
        prefix = self.tokenizer.prefix
        return self.tokenizer.eos_id, prefix[0] if prefix else None

    def write_small_files(self, folder: NewFolder, c: GPTConfig, step: int) -> None:
        """Write what belongs to every model."""
        folder.write("meta.json", json_bytes(self.meta(step)))
        if "tokenizer.json" not in self.tokenizer_files:
            made = to_hugging_face(self.tokenizer, c.block_size, self.came_with)
            self.tokenizer_files |= {name: json_bytes(content) for name, content in made.items()}
        for name, content in self.tokenizer_files.items():
            folder.write(name, content)

    def meta(self, step: int) -> dict:
        """Return the content of meta.json: that of the first data set, with these changes.

        It gets the step of the weights, and the hashes of all data sets, which a resumed run
        compares. Those of the tokenizer's files are left out, since manifest.json has them.
        """
        meta = self.sets[0].meta
        tokenizer = {k: v for k, v in meta["tokenizer"].items() if k != "files"}
        changes = {
            "step": step,
            "trained_on": {d.name: d.meta["splits"]["train"]["sha256"] for d in self.sets},
            "judged_by": {d.name: d.meta["splits"]["val"]["sha256"] for d in self.sets},
            "format_version": FORMAT_VERSION,
            "tokenizer": tokenizer,
        }
        return sealed(meta | changes)

    def prune(self, step: int, best_step: int) -> None:
        """Delete what the complete checkpoint of `step` replaces.

        These are the run that --overwrite replaced, and the checkpoints up to `step`, except the
        best one and the `keep` newest of the others that are not damaged; and all averages up to
        `step` but two. Checkpoints of later steps stay: they were found damaged when this run was
        resumed, and each of them is replaced when the run comes to its step.
        """
        reached = [path for path in numbered(self.ckpt_dir) if step_of(path) <= step]
        best = self.ckpt_dir / f"step_{best_step:08d}"
        whole = [path for path in reached if path.name not in self.damaged and path != best]
        stay = {best, *whole[: self.cfg.keep]}
        self.delete([path for path in reached if path not in stay])
        of_averages = averages(self.average_dir.parent)
        self.delete([path for path in of_averages if step_of(path) <= step][2:])
        for folder in [*replaced(self.ckpt_dir), *replaced(self.average_dir)]:
            self.delete(numbered(folder))
            if not numbered(folder) and remove_only(folder, [REPLACED]):
                remove_only(folder.parent, [])  # average/, if the new run saves no averages
        for folder in replaced(self.ckpt_dir.parent):
            remove_run_files(folder)

    def delete(self, paths: list[Path]) -> None:
        """Delete checkpoints, but keep and report those that hold files of somebody else's."""
        for path in paths:
            why_not = discard(path, path.name in self.damaged)
            if why_not and path not in self.kept:
                self.kept.add(path)
                self.say(f"note: {path} is kept: {why_not}")

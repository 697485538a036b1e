"""Report the events of a run: records in metrics.jsonl, log lines, numbers for a tracker, loss.png.

Only rank 0 reports. No failure here ends a run. plot.py draws loss.png in a process of its own.
"""

import math
import os
import resource
import shlex
import subprocess
import sys
import threading
import time
import uuid
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import torch
from torch.amp import GradScaler

from configurator import note
from hardware.disk import set_aside
from hardware.machine import Clock, Machine
from hardware.terminal import ProgressBar, is_terminal, quoted
from model import GPTConfig
from text.baselines import mixed_baselines
from text.dataset import hashes_of, validation_id, weights_of
from text.windows import DataSet
from training.huggingface import architecture_of
from training.metrics import (
    json_line,
    last_start,
    perplexity_and_bits,
    read_metrics,
    records_until,
    start_metrics,
)
from training.plan import Plan, Progress
from training.run_folder import RunFolder
from training.settings import FREE, START, TRAINING, TrainConfig, on_resume
from training.tracker import Tracker

PLOT = Path(__file__).resolve().parents[1] / "plot.py"
END_SECONDS = 20  # how long the end of a run waits for a picture


class Report:
    """Reports the events of a run, until close(). Ranks other than 0 report nothing."""

    def __init__(
        self,
        cfg: TrainConfig,
        machine: Machine,
        plan: Plan,
        sets: list[DataSet],
        progress: Progress,
        run: RunFolder,
        records: list[dict],
    ):
        """Replace metrics.jsonl in the folder of the run, and start the tracker.

        records: the first of metrics.jsonl.
        """
        self.cfg = cfg
        self.machine = machine
        self.plan = plan
        self.sets = sets
        self.progress = progress
        self.run = run
        self.lost = False  # whether a record could not be written
        # The seconds of the last evaluation, perhaps of an earlier process.
        self.eval_s = next((r["eval_s"] for r in reversed(records) if "eval_s" in r), None)
        self.drawing: subprocess.Popen | None = None
        self.drawn = time.monotonic()  # when the last drawing started
        self.tracker: Tracker | None = None
        self.mutex = threading.Lock()  # the thread that saves checkpoints reports, too
        self.bar_context = ExitStack()
        shown = machine.is_main and is_terminal()
        steps = dict(total=plan.steps, initial=progress.step)
        self.bar = ProgressBar("step", disable=not shown, **steps)
        if machine.is_main:
            self.file = start_metrics(run.path / "metrics.jsonl", records)
            self.bar_context.enter_context(self.bar.pinned())
            if cfg.tracker not in ("none", "off"):
                self.tracker = Tracker(cfg.tracker, run.path, last_start(records), machine.print0)

    def outcome(self, outcome: str, loss: float, grad_norm: float, scaler: GradScaler) -> None:
        """Count the last step, and report it if it overflowed or was bad.

        outcome: the result of Progress.add_step().
        """
        self.bar.update()
        step = self.progress.step
        if outcome == "overflow":
            scale = scaler.get_scale()
            line = f"fp16 overflow: step skipped, loss scale reduced to {scale:g}"
            self.write(dict(step=step, loss_scale=scale), line)
        elif outcome == "bad":
            problem = f"loss {loss:.4g}, norm of the gradient {grad_norm:.4g}"
            record = dict(step=step, bad_step=problem, bad_steps=self.progress.bad_steps)
            read = f"python prepare.py --inspect {shlex.quote(str(self.run.path))} --step {step}"
            self.write(record, f"warning: {problem}: step skipped; to read its texts: {read}")

    def step(
        self, loss: float, lr: float, grad_norm: float, flops: int, peak: float | None, clock: Clock
    ) -> None:
        """Report the last step, with the speed since the last log line.

        loss: NaN if the step had no target. flops: FLOPs per token. peak: TFLOPS of a device; None
        if unknown.
        """
        step, plan = self.progress.step, self.plan
        record = {"step": step, "loss": loss, "grad_norm": grad_norm}
        if math.isnan(loss):
            record = {"step": step, "targets": 0}
        record |= {"lr": lr, "tokens": plan.tokens_at(step), "epoch": plan.epochs_at(step)}
        if clock.step == 0 or clock.step > plan.start_step:  # the first after a resume is a warm-up
            step_s = clock.seconds() / (step - clock.step)
            rate = plan.step_tokens / step_s
            mfu = rate * flops / 1e12 / (peak * self.machine.world) if peak else None
            if mfu and mfu > 0.9 and self.machine.device.type == "cpu" and not self.cfg.peak_tflops:
                mfu = None  # other programs slowed down the measurement of the peak
            record |= {
                "tokens_per_s": rate,
                "tflops": rate * flops / 1e12,
                "mfu": mfu,
                "step_ms": 1e3 * step_s,
                "data_ms": 1e3 * clock.data_s / (step - clock.step),
                "memory_gb": peak_memory(self.machine.device) / 1e9,
                "eta_s": self.seconds_left(step, step_s),
            }
            self.bar.set_postfix_str(f"{rate / 1e3:.1f}k tok/s", refresh=False)
        self.write(record, log_line(record))
        clock.restart(step)

    def seconds_left(self, step: int, step_s: float) -> float:
        """Return the predicted seconds to the end of the run, with evaluations and without saves.

        Each evaluation is predicted to take as long as the last one. The first one has three losses
        at most, and its forward passes take a third of the time of training. The evaluation of this
        step itself is included. step_s: seconds of a step.
        """
        eval_s = self.eval_s
        if eval_s is None:
            sizes = [data.meta["splits"]["val"]["tokens"] for data in self.sets]
            tokens = sum(min(n, self.cfg.eval_tokens or n) for n in sizes)
            eval_s = step_s * tokens / self.plan.step_tokens
        last, every = self.plan.steps, self.cfg.eval_every
        evaluations = math.ceil(last / every) - (step - 1) // every
        return (last - step) * step_s + evaluations * eval_s

    def evaluation(self, step: int, losses: dict[str, list[float]], seconds: float) -> float:
        """Report an evaluation after a step, draw loss.png, and return the validation loss.

        losses: key in the record -> a loss for each data set, in nats per token, as of
        evaluation_windows(). The mean of each is weighted by the weights of the data sets.
        seconds: duration of the evaluation.
        """
        record: dict[str, Any] = {"step": step}
        for key, set_losses in losses.items():
            pairs = list(zip(self.sets, set_losses, strict=True))
            record[key] = sum(float(data.weight) * loss for data, loss in pairs)
            if len(pairs) > 1:
                record |= {f"{key}/{data.name}": loss for data, loss in pairs}
        counts = [(d.weight, d.learned("val", self.cfg.loss_on)) for d in self.sets]
        token_bytes = sum(weight * val["bytes"] / val["tokens"] for weight, val in counts)
        ppl, bits_per_byte, units = perplexity_and_bits(record["val_loss"], float(token_bytes))

        others = {"train": "train_eval_loss", "by document": "val_document_loss"}
        # NaN: none of the tokens that were evaluated on train.bin counts.
        there = {name: record[key] for name, key in others.items() if key in record}
        parts = [f"{name} {loss:.4f}" for name, loss in there.items() if not math.isnan(loss)]
        line = f"validation loss {record['val_loss']:.4f} ({', '.join(parts)}) | {units}"
        of_val = [key for key in record if key.startswith("val_loss/")]
        line += "".join(f" | {key.removeprefix('val_loss/')} {record[key]:.4f}" for key in of_val)
        record |= dict(val_ppl=ppl, val_bits_per_byte=bits_per_byte, eval_s=seconds)
        self.eval_s = seconds
        self.write(record, line)
        if time.monotonic() - self.drawn > 30:  # drawing takes seconds of a CPU core
            self.draw()
        return record["val_loss"]

    def sample(self, step: int, text: str) -> None:
        """Report a text that the model has written after a step."""
        prompt = self.cfg.sample_prompt
        line = f"the model continues {prompt!r}:" if prompt else "the model writes:"
        if self.cfg.loss_on == "answers":
            line = f"the model answers {prompt!r}:"
            prompt = ""
        self.write(dict(step=step, sample=prompt + text), f"{line}\n{quoted(prompt + text)}")

    def saved(self, step: int, path: Path, seconds: float) -> None:
        """Report that the checkpoint of a step is complete on the disk. Any thread may call this.

        If metrics.jsonl records a checkpoint and none can be found, a disk may be missing: then
        init_from=auto must not start from scratch.
        """
        record = dict(step=step, saved=path.name, save_s=seconds)
        self.write(record, f"saved {path} in {seconds:.1f} s")

    def write(self, record: dict, line: str = "") -> None:
        """Report one event: a record for programs, and a line for people."""
        if not self.machine.is_main:
            return
        with self.mutex:
            self.run.is_ours()  # the file itself is ours, wherever it was moved
            try:
                print(json_line(record), file=self.file, end="", flush=True)
            except OSError as e:
                if not self.lost:
                    problem = f"{self.file.name}: {e.strerror}"
                    self.machine.print0(f"warning: {problem}: records are lost")
                self.lost = True
            if self.tracker:
                self.tracker.send(record)
        if line:
            self.machine.print0(f"step {record['step']}/{self.plan.steps} | {line}")

    def draw(self) -> None:
        """Start to draw loss.png, unless an earlier drawing is still running."""
        if not self.machine.is_main or self.cfg.tracker == "off" or not self.run.is_ours():
            return
        if self.drawing and self.drawing.poll() is None:
            return
        self.drawn = time.monotonic()
        command = [sys.executable, str(PLOT), str(self.run.path)]
        streams = dict(stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)
        with suppress(OSError):  # close() says that there is no picture
            # In a session of its own, it does not receive the Ctrl-C that stops this process.
            self.drawing = subprocess.Popen(command, **streams, start_new_session=True)
            os.setpriority(os.PRIO_PROCESS, self.drawing.pid, 10)  # training has priority

    def close(self) -> None:
        """Draw the last picture, and end the run at the tracker."""
        if not self.machine.is_main:
            return
        if self.progress.losses and self.cfg.tracker != "off" and not self.run.moved:
            text = f"note: no loss plot; to draw it: python plot.py {self.run.path}"
            with suppress(subprocess.TimeoutExpired):
                if self.drawing:
                    self.drawing.wait(END_SECONDS)
                self.draw()
                if self.drawing and self.drawing.wait(END_SECONDS) == 0:
                    text = f"loss plot: {self.run.path / 'loss.png'}"
            self.machine.print0(text)
        if self.tracker:
            self.tracker.close()
        with suppress(OSError):  # a full disk
            self.file.close()
        self.bar_context.close()


def log_line(record: dict[str, Any]) -> str:
    """Return the log line of a step, from its record."""
    line = "no target in this step: it was skipped"
    if "loss" in record:
        line = f"loss {record['loss']:.3f} | lr {record['lr']:.1e} | grad {record['grad_norm']:.2f}"
    if "step_ms" in record:  # its speed was measured
        tflops, mfu = record["tflops"], record["mfu"]
        line += f" | {record['tokens_per_s'] / 1e3:.1f}k tok/s"
        line += f" | {tflops:.{1 if tflops >= 10 else 3}f} TFLOPS"
        line += f" | MFU {'n/a' if mfu is None else f'{mfu:.1%}'} | {record['step_ms']:.0f} ms"
        line += f" | data {record['data_ms']:.1f} ms | mem {record['memory_gb']:.1f} GB"
        line += f" | eta {ProgressBar.format_interval(record['eta_s'])}"
    return line


def first_records(
    run: Path, cfg: TrainConfig, plan: Plan, sets: list[DataSet], c: GPTConfig, progress: Progress
) -> list[dict]:
    """Return the records that metrics.jsonl has when this process starts to train.

    These are the records of earlier processes, up to the step at which this one starts, and one of
    this start.
    """
    step = progress.step
    before = read_metrics(path := run / "metrics.jsonl")
    records = records_until(before, step) if step else []
    if step and not any(r["step"] == step and "saved" in r for r in records):
        # The process that wrote the checkpoint was killed before it could record it.
        records.append({"step": step, "saved": f"step_{step:08d}"})

    settings = {k: v for k, v in asdict(cfg).items() if k != "overwrite"}
    if cfg.init_from != "scratch":  # the model that is fine-tuned has its own shape
        model_settings = {k: v for k, v in asdict(c).items() if k in settings and k != "block_size"}
        settings |= model_settings | {"preset": architecture_of(c).name}
    ids = [record["tracker_run"] for record in records if "tracker_run" in record]
    # `prepare.py --inspect RUN --step N` reads this record to find a step's texts.
    start = {
        "step": step,
        "first_sample": progress.samples - progress.data_begun,
        "settings": settings,
        "step_samples": plan.step_tokens // cfg.block_size,
        "steps": plan.steps,
        "data": hashes_of(sets, "train"),
        "judged_by": validation_id(hashes_of(sets, "val"), weights_of(sets), cfg.eval_tokens),
        "landmarks": mixed_baselines(sets, cfg.loss_on),
        # A resumed run continues the same run at a tracker. SwanLab wants 21 characters.
        "tracker_run": ids[-1] if ids else uuid.uuid4().hex[:21],
    }
    # The settings of a start that saved nothing are in no checkpoint: the run has lost them.
    last = last_start(before)
    saved = last_start(records).get("settings", {})
    gone = [
        f"{k}={v}"
        for k, v in last.get("settings", {}).items()
        if k not in on_resume(START, FREE) and v not in (saved.get(k), settings.get(k, v))
    ]
    if gone:
        problem = f"the last start had {', '.join(gone)}, but left no intact checkpoint"
        note(f"{problem}: to keep these settings, give them again")
    # Steps that will not be repeated in the same way, because the last start saved nothing, or
    # because the run resumes before them with other settings.
    is_lost = any(record["step"] > step for record in before)
    if path.exists() and (not step or (is_lost and trained_with(last) != trained_with(start))):
        note(f"{path} is kept as {set_aside(path, 'metrics_kept.jsonl').name}")
    return [*records, start]


def trained_with(run: dict) -> list:
    """Return the values in the record of a start that change the steps after it."""
    values = map(run.get("settings", {}).get, TRAINING)
    return [run.get("step_samples"), run.get("data"), *values]


def peak_memory(device: torch.device) -> int:
    """Return the peak memory so far in bytes: allocated on a GPU, else resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

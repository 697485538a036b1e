"""Report the events of a run: records in metrics.jsonl, log lines, numbers for a tracker, loss.png.

Only rank 0 reports. No failure here ends a run: the first one of a tracker's package is a warning,
and then it gets no more numbers. plot.py draws loss.png in a process of its own.
"""

import importlib
import math
import os
import resource
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import InitVar, asdict, dataclass
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import torch
from torch.amp import GradScaler

from configurator import note
from hardware.disk import Lock, set_aside
from hardware.machine import Clock, Machine
from hardware.terminal import ProgressBar, is_terminal, quoted
from model import GPTConfig
from text.baselines import mixed_baselines
from text.windows import DataSet
from training.evaluate import judged_by, val_hashes, weights_of
from training.huggingface import architecture_of
from training.metrics import json_line, read_metrics, records_until, start_metrics
from training.plan import Plan, Progress
from training.settings import FREE, START, TRAINING, TrainConfig, on_resume

PLOT = Path(__file__).resolve().parents[1] / "plot.py"
END_SECONDS = 20  # how long the end of a run waits for the last picture


@dataclass
class Report:
    """Reports the events of a run, until close(). Ranks other than 0 report nothing."""

    cfg: TrainConfig
    machine: Machine
    plan: Plan
    sets: list[DataSet]
    progress: Progress
    folder: Path  # of the run
    records: InitVar[list[dict]]  # the first records of metrics.jsonl
    lock: Lock | None = None  # of the folder, on rank 0
    moved: bool = False  # whether the folder is no longer that of the run

    def __post_init__(self, records: list[dict]):
        self.drawing: subprocess.Popen | None = None
        self.drawn = time.monotonic()  # when the last drawing started
        self.tracker: Tracker | None = None
        self.lost = False  # whether a record could not be written
        # Seconds of the last evaluation and the last save: eval_every, save_every. Those of an
        # evaluation may be of an earlier process.
        seconds = [record["eval_s"] for record in records if "eval_s" in record]
        self.pauses: dict[str, float] = {"eval_every": seconds[-1]} if seconds else {}
        self.mutex = threading.Lock()  # the thread that saves checkpoints reports, too
        self.bar_context = ExitStack()
        shown = self.machine.is_main and is_terminal()
        steps = dict(total=self.plan.steps, initial=self.progress.step)
        self.bar = ProgressBar("step", disable=not shown, **steps)
        if self.machine.is_main:
            self.file = start_metrics(self.folder / "metrics.jsonl", records)
            self.bar_context.enter_context(self.bar.pinned())
            if self.cfg.tracker not in ("none", "off"):
                self.start_tracker(records)

    def start_tracker(self, records: list[dict]) -> None:
        """Start to send numbers. A resumed run continues the same run at the tracker."""
        name = self.cfg.tracker
        ids = [r["tracker_run"] for r in records if r.get("tracker") == name]
        run_id = ids[-1] if ids else uuid.uuid4().hex[:21]  # SwanLab wants 21 characters
        settings = [r["settings"] for r in records if "settings" in r][-1]
        step = self.progress.step
        if not ids:
            self.write(dict(step=step, tracker=name, tracker_run=run_id))
        with self.tracker_may_fail():
            self.tracker = Tracker(name, self.folder, settings, run_id, step)

    @contextmanager
    def tracker_may_fail(self) -> Iterator[None]:
        """Turn an error of the tracker's package into a warning, and leave the tracker out."""
        try:
            yield
        except (Exception, SystemExit) as e:
            self.tracker = None
            reason = " ".join(f"{type(e).__name__}: {e}".split())[:200]
            problem = f"warning: {self.cfg.tracker} failed ({reason})"
            self.machine.print0(f"{problem}; metrics.jsonl has all numbers")

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
            self.write(record, f"warning: {problem}: step skipped; {self.how_to_read(step)}")

    def step(
        self, loss: float, lr: float, grad_norm: float, flops: int, peak: float | None, clock: Clock
    ) -> None:
        """Report the last step, with the speed since the last log line.

        loss: NaN if the step had no target. flops: FLOPs per token. peak: TFLOPS of all devices
        together; None if unknown.
        """
        step = self.progress.step
        plan = self.plan
        tokens = plan.tokens_at(step)
        record = {"step": step, "loss": loss, "grad_norm": grad_norm}
        line = f"loss {loss:.3f} | lr {lr:.1e} | grad {grad_norm:.2f}"
        if math.isnan(loss):
            record, line = {"step": step, "targets": 0}, "no target in this step: it was skipped"
        record |= {"lr": lr, "tokens": tokens, "epoch": plan.epochs_at(step)}
        if clock.step == 0 or clock.step > plan.start_step:  # the first after a resume is a warm-up
            step_s = clock.seconds() / (step - clock.step)
            rate = plan.step_tokens / step_s
            tflops = rate * flops / 1e12
            mfu = tflops / peak if peak else None
            if mfu and mfu > 0.9 and self.machine.device.type == "cpu" and not self.cfg.peak_tflops:
                mfu = None  # other programs slowed down the measurement of the peak
            eta = (plan.steps - step) * step_s + self.pauses_from(step, rate)
            record |= {
                "tokens_per_s": rate,
                "tflops": tflops,
                "mfu": mfu,
                "step_ms": 1e3 * step_s,
                "data_ms": 1e3 * clock.data_s / (step - clock.step),
                "memory_gb": peak_memory(self.machine.device) / 1e9,
                "eta_s": eta,
            }
            speed = f"{rate / 1e3:.1f}k tok/s"
            self.bar.set_postfix_str(speed, refresh=False)
            line += f" | {speed} | {tflops:.{1 if tflops >= 10 else 3}f} TFLOPS"
            line += f" | MFU {'n/a' if mfu is None else f'{mfu:.1%}'} | {record['step_ms']:.0f} ms"
            line += f" | data {record['data_ms']:.1f} ms | mem {record['memory_gb']:.1f} GB"
            line += f" | eta {ProgressBar.format_interval(eta)}"
        self.write(record, line)
        clock.restart(step)

    def pauses_from(self, step: int, rate: float) -> float:
        """Return the predicted seconds of all evaluations and saves from a step on.

        Each is predicted to take as long as the last one. The first evaluation has three losses,
        and its forward passes take a third of the time of training. Those of the step itself are
        included. rate: tokens trained per second.
        """
        tokens = [data.meta["splits"]["val"]["tokens"] for data in self.sets]
        evaluated = sum(min(n, self.cfg.eval_tokens or n) for n in tokens)
        pauses = {"eval_every": evaluated / rate} | self.pauses
        every = {key: getattr(self.cfg, key) for key in pauses}
        last = self.plan.steps
        return sum(s * (-(-last // every[k]) - (step - 1) // every[k]) for k, s in pauses.items())

    def how_to_read(self, step: int) -> str:
        """Return the command that prints the texts of a step."""
        run = shlex.quote(str(self.folder))
        return f"to read its texts: python prepare.py --inspect {run} --step {step}"

    def evaluation(self, step: int, losses: dict[str, list[float]], seconds: float) -> float:
        """Report an evaluation after a step, draw loss.png, and return the validation loss.

        losses: key in the record -> a loss for each data set, in nats per token, as of
        evaluation_windows(). The mean of each is weighted by the weights of the data sets.
        seconds: duration of the evaluation.
        """
        mean = {}
        by_set = {}
        for key, set_losses in losses.items():
            pairs = list(zip(self.sets, set_losses, strict=True))
            mean[key] = sum(float(data.weight) * loss for data, loss in pairs)
            if len(pairs) > 1:
                by_set |= {f"{key}/{data.name}": loss for data, loss in pairs}
        counts = [(d.weight, d.learned("val", self.cfg.loss_on)) for d in self.sets]
        token_bytes = sum(weight * val["bytes"] / val["tokens"] for weight, val in counts)
        ppl, bits_per_byte, units = perplexity_and_bits(mean["val_loss"], float(token_bytes))

        others = {"train": mean["train_eval_loss"], "by document": mean["val_document_loss"]}
        # NaN: none of the tokens that were evaluated on train.bin counts.
        parts = [f"{name} {loss:.4f}" for name, loss in others.items() if not math.isnan(loss)]
        line = f"validation loss {mean['val_loss']:.4f} ({', '.join(parts)}) | {units}"
        of_val = [key for key in by_set if key.startswith("val_loss/")]
        line += "".join(f" | {key.removeprefix('val_loss/')} {by_set[key]:.4f}" for key in of_val)
        units_record = dict(val_ppl=ppl, val_bits_per_byte=bits_per_byte, eval_s=seconds)
        self.pauses["eval_every"] = seconds
        self.write({"step": step} | mean | by_set | units_record, line)
        if time.monotonic() - self.drawn > 30:  # drawing takes seconds of a CPU core
            self.draw()
        return mean["val_loss"]

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

    def owns_folder(self) -> bool:
        """Return whether the folder is still that of this run. If it is not, the run is to end."""
        if self.lock and not self.lock.is_held():
            self.lose_folder()
        return not self.moved

    def lose_folder(self) -> None:
        """End the run after this step: its folder, or ckpt/ in it, is another one now."""
        if not self.moved:
            self.moved = True
            os.kill(os.getpid(), signal.SIGTERM)  # all ranks finish the step, and the run is saved

    def write(self, record: dict, line: str = "") -> None:
        """Report one event: a record for programs, and a line for people."""
        if not self.machine.is_main:
            return
        with self.mutex:
            if self.file.closed:
                return
            self.owns_folder()  # the file itself is ours, wherever it was moved
            try:
                print(json_line(record), file=self.file, end="", flush=True)
            except OSError as e:
                if not self.lost:
                    problem = f"{self.file.name}: {e.strerror}"
                    self.machine.print0(f"warning: {problem}: records are lost")
                self.lost = True
            if self.tracker:
                numbers = {k: v for k, v in record.items() if type(v) in (int, float)}
                with self.tracker_may_fail():
                    self.tracker.log({k: v for k, v in numbers.items() if math.isfinite(v)})
        if line:
            self.machine.print0(f"step {record['step']}/{self.plan.steps} | {line}")

    def draw(self) -> None:
        """Start to draw loss.png, unless an earlier drawing is still running."""
        if not self.machine.is_main or self.cfg.tracker == "off" or not self.owns_folder():
            return
        if self.drawing and self.drawing.poll() is None:
            return
        self.drawn = time.monotonic()
        command = [sys.executable, str(PLOT), str(self.folder)]
        streams = dict(stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)
        with suppress(OSError):  # close() says that there is no picture
            # In a session of its own, it does not receive the Ctrl-C that stops this process.
            self.drawing = subprocess.Popen(command, **streams, start_new_session=True)
            os.setpriority(os.PRIO_PROCESS, self.drawing.pid, 10)  # training has priority

    def close(self) -> None:
        """Draw the last picture, and end the run at the tracker. Later reports are ignored."""
        if not self.machine.is_main:
            return
        end = time.monotonic() + END_SECONDS
        if self.progress.losses and self.cfg.tracker != "off" and not self.moved:
            self.wait_for_drawing(end)
            self.draw()
            self.wait_for_drawing(end)
            if self.drawing and self.drawing.returncode == 0:
                self.machine.print0(f"loss plot: {self.folder / 'loss.png'}")
            else:
                self.machine.print0(f"note: no loss plot; to draw it: python plot.py {self.folder}")
        if self.tracker:
            with self.tracker_may_fail():
                self.tracker.finish()
        with self.mutex, suppress(OSError):  # a full disk
            self.file.close()
        self.bar_context.close()

    def wait_for_drawing(self, end: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            if self.drawing:
                self.drawing.wait(max(0.0, end - time.monotonic()))


def first_records(
    path: Path, cfg: TrainConfig, plan: Plan, sets: list[DataSet], c: GPTConfig, progress: Progress
) -> list[dict]:
    """Return the records that metrics.jsonl has when this process starts to train.

    These are the records of earlier processes, up to the step at which this one starts. If the
    settings differ from those recorded last, a record of the new settings follows.
    """
    step = progress.step
    before = read_metrics(path)
    records = records_until(before, step) if step else []
    if step and not any(r["step"] == step and "saved" in r for r in records):
        # The process that wrote the checkpoint was killed before it could record it.
        records.append({"step": step, "saved": f"step_{step:08d}"})

    settings = {k: v for k, v in asdict(cfg).items() if k != "overwrite"}
    if cfg.init_from != "scratch":  # the model that is fine-tuned has its own shape
        model_settings = {k: v for k, v in asdict(c).items() if k in settings and k != "block_size"}
        settings |= model_settings | {"preset": architecture_of(c).name}
    # `prepare.py --inspect RUN --step N` reads this record to find a step's texts.
    run = {
        "settings": settings,
        "step_samples": plan.step_tokens // cfg.block_size,
        "steps": plan.steps,
        "data": {data.name: data.meta["splits"]["train"]["sha256"] for data in sets},
        "judged_by": judged_by(cfg, val_hashes(sets), weights_of(sets)),
        "landmarks": mixed_baselines(sets, cfg.loss_on),
    }
    # The settings of a start that saved nothing are in no checkpoint: the run has lost them.
    started = [r["settings"] for r in before if "settings" in r and r["step"] >= step]
    of_last = {k: v for k, v in (started or [{}])[-1].items() if k not in on_resume(START, FREE)}
    if gone := [f"{k}={v}" for k, v in of_last.items() if settings.get(k, v) != v]:
        problem = f"the last start had {', '.join(gone)}, but left no intact checkpoint"
        note(f"{problem}: to keep these settings, give them again")
    recorded = next((r for r in reversed(records) if "settings" in r), {})
    if any(recorded.get(key) != value for key, value in run.items()):
        records.append({"step": step, "first_sample": progress.samples - progress.data_begun} | run)
    # Steps that will not be repeated in the same way, because an earlier start saved nothing, or
    # because the run resumes before them with other settings.
    lost = [record for record in before if record["step"] > step]
    ways = [trained_with(r) for r in (recorded, *lost, run) if "settings" in r]
    if (path.exists() and not step) or (lost and any(way != ways[0] for way in ways)):
        note(f"{path} is kept as {set_aside(path, 'metrics_kept.jsonl').name}")
    return records


def trained_with(run: dict) -> list:
    """Return the values in a record of first_records() that change the steps after it."""
    return [run.get("step_samples"), run.get("data"), *map(run["settings"].get, TRAINING)]


class Tracker:
    """The run at wandb, SwanLab or TensorBoard. Their errors are not caught here."""

    def __init__(self, name: str, folder: Path, settings: dict, run_id: str, step: int):
        """Start to track the run in a folder, with its settings.

        run_id: of the run at the tracker, which is continued if it exists. step: the last one that
        is not trained again.
        """
        self.step = step  # the last one sent
        self.writer: Any = None
        if name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            # purge_step: later steps of an earlier process are replaced.
            self.writer = SummaryWriter(folder / "tensorboard", purge_step=step + 1)
            return
        os.environ.setdefault("WANDB_SILENT", "true")  # its lines would tear the progress bar
        os.environ.setdefault("WANDB_CONSOLE", "off")
        for action in ("INIT", "FINISH"):  # else wandb waits for a network, for minutes
            os.environ.setdefault(f"WANDB_{action}_TIMEOUT", "15")
        options = dict(
            project=os.environ.get(f"{name.upper()}_PROJECT", "eveningGPT"), config=settings
        )
        options |= dict(name=folder.resolve().name, id=run_id, resume="allow")
        options |= {"dir": folder} if name == "wandb" else {"logdir": str(folder / "swanlog")}
        self.service = importlib.import_module(name)
        self.service.init(**options)

    def log(self, numbers: dict) -> None:
        """Send numbers, one of which is their step."""
        if self.writer:
            for key, value in numbers.items():
                self.writer.add_scalar(key, value, numbers["step"])
            return
        # A save ends after later steps were logged. wandb ignores what goes back to its step.
        self.step = max(self.step, numbers["step"])
        self.service.log(numbers, step=self.step)

    def finish(self) -> None:
        """Wait until all numbers are sent."""
        if self.writer:
            self.writer.close()
        else:
            self.service.finish()


def peak_memory(device: torch.device) -> int:
    """Return the peak memory so far in bytes: allocated on a GPU, else resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def perplexity_and_bits(loss: float, token_bytes: float) -> tuple[float, float, str]:
    """Return the perplexity and the bits per byte of a loss in nats per token, and both as a text.

    token_bytes: mean number of bytes of text in a token.
    """
    ppl = math.exp(min(loss, 700.0))  # the largest float is about e^709
    bits_per_byte = loss / math.log(2) / token_bytes
    return ppl, bits_per_byte, f"perplexity {ppl:.2f} | {bits_per_byte:.4f} bits per byte"

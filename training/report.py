"""Report what happens in a run: a record in metrics.jsonl, a line on the terminal, the numbers to a
tracker, and a picture of the losses. Only rank 0 reports.

Nothing here ends a run or holds up a step. A tracker's package may fail or wait for a network: it
is called in a thread of its own. plot.py draws loss.png in a process of its own.
"""

import importlib
import json
import math
import os
import resource
import shlex
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue
from subprocess import DEVNULL

import torch
from torch.amp import GradScaler

from hardware.machine import Clock, Machine
from hardware.terminal import ProgressBar, in_a_terminal, quoted
from text.windows import DataSet
from training.metrics import start_metrics
from training.plan import Plan, Progress
from training.settings import TrainConfig

PLOT = Path(__file__).resolve().parents[1] / "plot.py"
END_SECONDS = 20  # how long the end of a run waits for the last picture and for the tracker


class Report:
    """Reports the events of a run, until close(). On other ranks than 0 its methods report nothing.

    folder: of the run. records: those with which its metrics.jsonl begins.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        machine: Machine,
        plan: Plan,
        sets: list[DataSet],
        progress: Progress,
        folder: Path,
        records: list[dict],
    ):
        self.cfg = cfg
        self.machine = machine
        self.plan = plan
        self.sets = sets
        self.progress = progress
        self.folder = folder
        self.drawing: subprocess.Popen | None = None
        self.tracker: Tracker | None = None
        self.unigram = math.inf  # the loss of single-token frequencies, in nats per token
        self.noted: set[str] = set()  # warnings that are given once
        self.mutex = threading.Lock()  # the thread that saves checkpoints reports, too
        self.opened = ExitStack()
        shown = machine.is_main and in_a_terminal()
        self.bar = ProgressBar("step", disable=not shown, total=plan.steps, initial=progress.step)
        if not machine.is_main:
            return
        self.opened.enter_context(self.bar.below())
        self.file = start_metrics(folder / "metrics.jsonl", records)
        for record in records:
            self.unigram = record.get("landmarks", {}).get("unigram", self.unigram)
        if cfg.tracker not in ("none", "off"):
            # A resumed run goes on as the same run at the tracker.
            ids = [r["tracker_run"] for r in records if r.get("tracker") == cfg.tracker]
            run_id = ids[-1] if ids else uuid.uuid4().hex[:21]  # the length that SwanLab wants
            settings = [r["settings"] for r in records if "settings" in r][-1]
            self.tracker = Tracker(cfg.tracker, folder, settings, run_id, progress.step, machine)
            if not ids:
                self.write(dict(step=progress.step, tracker=cfg.tracker, tracker_run=run_id))

    def outcome(self, outcome: str, loss: float, grad_norm: float, scaler: GradScaler) -> None:
        """Count the last step, and report it if it was skipped or has a loss far above the others.

        outcome: as Progress.add_step() returns it.
        """
        self.bar.update()
        step = self.progress.step
        if outcome == "taken":
            z = spike(self.progress.losses[:-1], loss)
            if z > 8:
                line = f"warning: loss {loss:.3f} is {z:.0f} deviations high"
                self.write(dict(step=step, spike_loss=loss, spike_z=z), line)
        elif outcome == "overflow":
            scale = scaler.get_scale()
            line = f"fp16 overflow: skipped, the loss is scaled by {scale:g} now"
            self.write(dict(step=step, loss_scale=scale), line)
        else:
            problem = f"loss {loss:.4g}, norm of the gradient {grad_norm:.4g}"
            record = dict(step=step, bad_step=problem, bad_steps=self.progress.bad_steps)
            self.write(record, f"warning: {problem}: skipped; {self.how_to_read(step)}")

    def step(
        self, loss: float, lr: float, grad_norm: float, flops: int, peak: float | None, clock: Clock
    ) -> None:
        """Report the last step, with the speed since the last log line.

        flops: FLOPs per token. peak: TFLOPS of all devices together; None if unknown.
        """
        step = self.progress.step
        plan = self.plan
        step_s = clock.seconds() / (step - clock.step)
        rate = plan.step_tokens / step_s
        tflops = rate * flops / 1e12
        mfu = tflops / peak if peak else None
        if mfu and mfu > 1 and self.machine.device.type == "cpu" and not self.cfg.peak_tflops:
            mfu = None  # other programs slowed this machine down while its peak was measured
        tokens = plan.tokens_at(step)
        record = {
            "step": step,
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens": tokens,
            "epoch": tokens / plan.epoch_tokens,
            "tokens_per_s": rate,
            "tflops": tflops,
            "mfu": mfu,
            "step_ms": 1e3 * step_s,
            "data_ms": 1e3 * clock.data_s / (step - clock.step),
            "memory_gb": most_memory(self.machine.device) / 1e9,
            "eta_s": (plan.steps - step) * step_s,
        }
        speed = f"{rate / 1e3:.1f}k tok/s"
        self.bar.set_postfix_str(speed, refresh=False)
        line = f"loss {loss:.3f} | lr {lr:.1e} | grad {grad_norm:.2f} | {speed}"
        line += f" | {tflops:.{1 if tflops >= 10 else 3}f} TFLOPS"
        line += f" | MFU {'n/a' if mfu is None else f'{mfu:.1%}'} | {record['step_ms']:.0f} ms"
        line += f" | data {record['data_ms']:.1f} ms | mem {record['memory_gb']:.1f} GB"
        self.write(record, f"{line} | eta {ProgressBar.format_interval(record['eta_s'])}")
        # By this step, every model should have learned more than how frequent each token is.
        due = max(100, 0.05 * plan.steps, 2 * self.cfg.warmup_ratio * plan.steps)
        mean = statistics.mean(self.progress.losses[-20:])
        if clock.step < due <= step and mean > self.unigram:
            line = f"warning: the loss ({mean:.2f}) is still not below that of single-token"
            line += f" frequencies ({self.unigram:.2f}): check lr and the data;"
            self.write(dict(step=step, not_below="unigram"), f"{line} {self.how_to_read(step)}")
        clock.restart(step)

    def how_to_read(self, step: int) -> str:
        """Return the command that prints the texts of a step."""
        run = shlex.quote(str(self.folder))
        return f"read its texts by: python prepare.py --inspect {run} --step {step}"

    def evaluation(self, step: int, losses: dict[str, list[float]], seconds: float) -> float:
        """Report an evaluation after a step, draw loss.png, and return the validation loss.

        losses: key in the record -> a loss for each data set, in nats per token. val_loss: on its
        val.bin; val_document_loss: the same, where each document is read alone from its own
        beginning, and each window of one that is longer than a window; train_eval_loss: on windows
        of its train.bin. The mean of each is weighted by the shares of the data sets in the run.
        seconds: how long the evaluation took.
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
        ppl, bits_per_byte, units = in_other_units(mean["val_loss"], float(token_bytes))

        line = f"validation loss {mean['val_loss']:.4f} (train {mean['train_eval_loss']:.4f}, "
        line += f"by document {mean['val_document_loss']:.4f}) | {units}"
        for key, loss in by_set.items():
            if key.startswith("val_loss/"):
                line += f" | {key.removeprefix('val_loss/')} {loss:.4f}"
        in_units = dict(val_ppl=ppl, val_bits_per_byte=bits_per_byte, eval_s=seconds)
        self.write({"step": step} | mean | by_set | in_units, line)
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

        If metrics.jsonl has a record of a checkpoint and none can be found, a disk is missing, and
        init_from=auto must not start from scratch.
        """
        record = dict(step=step, saved=path.name, save_s=seconds)
        self.write(record, f"saved {path} in {seconds:.1f} s")

    def write(self, record: dict, line: str = "") -> None:
        """Report one event: the record for programs, the line for people."""
        if not self.machine.is_main or self.file.closed:
            return
        with self.mutex:
            try:
                print(json.dumps(record), file=self.file, flush=True)
            except OSError as e:
                self.say_once(f"warning: {self.file.name}: {e.strerror}: records may be lost")
        if self.tracker:
            self.tracker.queue.put(record)
        if line:
            self.machine.say(f"step {record['step']}/{self.plan.steps} | {line}")

    def say_once(self, line: str) -> None:
        if line not in self.noted:
            self.noted.add(line)
            self.machine.say(line)

    def draw(self) -> None:
        """Start to draw loss.png, unless an earlier drawing still goes on."""
        if not self.machine.is_main or self.cfg.tracker == "off":
            return
        if self.drawing and self.drawing.poll() is None:
            return
        self.check_drawing()
        command = [sys.executable, str(PLOT), str(self.folder)]
        # In a session of its own, it does not receive the Ctrl-C that stops this process.
        streams = dict(stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)
        try:
            self.drawing = subprocess.Popen(command, **streams, start_new_session=True)
            os.setpriority(os.PRIO_PROCESS, self.drawing.pid, 10)  # the training comes first
        except OSError as e:
            self.say_once(f"note: loss.png cannot be drawn: {e.strerror}")

    def check_drawing(self) -> None:
        if self.drawing and self.drawing.poll():
            self.say_once(f"note: loss.png cannot be drawn: python plot.py {self.folder} says why")

    def close(self) -> None:
        """Draw the last picture, and end the run at the tracker. Nothing may be reported later.

        This takes END_SECONDS at most.
        """
        if not self.machine.is_main:
            return
        deadline = time.monotonic() + END_SECONDS
        if self.tracker:
            self.tracker.queue.put(None)
        if self.progress.losses:
            self.wait_for_drawing(deadline)
            self.draw()
            self.wait_for_drawing(deadline)
            self.check_drawing()
            if self.drawing and self.drawing.returncode == 0:
                self.machine.say(f"loss plot: {self.folder / 'loss.png'}")
        if self.tracker:
            self.tracker.end(deadline)
        with suppress(OSError):  # a full disk
            self.file.close()
        self.opened.close()

    def wait_for_drawing(self, deadline: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            if self.drawing:
                self.drawing.wait(max(0.0, deadline - time.monotonic()))


class Tracker:
    """Sends numbers to wandb, SwanLab or TensorBoard, in a thread that no step waits for.

    If the package fails, that is one warning. settings: of the run. run_id: the run of this id goes
    on at the tracker if there is one. step: the last one that is not trained again.
    """

    def __init__(
        self, name: str, folder: Path, settings: dict, run_id: str, step: int, machine: Machine
    ):
        self.name = name
        self.folder = folder
        self.settings = settings
        self.run_id = run_id
        self.first_step = step + 1
        self.machine = machine
        self.queue: SimpleQueue[dict | None] = SimpleQueue()  # of records; None ends the run
        self.thread = threading.Thread(target=self.send_all, daemon=True)
        self.thread.start()

    def send_all(self) -> None:
        try:
            if self.name == "tensorboard":
                self.write_events()
            else:
                self.send_to_service()
        except (Exception, SystemExit) as e:
            reason = " ".join(str(e).split())[:200]
            self.machine.say(
                f"warning: {self.name} failed ({reason}): metrics.jsonl has all numbers"
            )

    def numbers(self) -> Iterator[dict[str, float]]:
        """Yield the numbers of each record, until the run ends."""
        while (record := self.queue.get()) is not None:
            yield {key: value for key, value in record.items() if type(value) in (int, float)}

    def write_events(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step: the steps that are trained again replace those of the earlier process.
        writer = SummaryWriter(self.folder / "tensorboard", purge_step=self.first_step)
        for numbers in self.numbers():
            for key, value in numbers.items():
                writer.add_scalar(key, value, numbers["step"])
        writer.close()

    def send_to_service(self) -> None:
        """Call wandb or SwanLab. WANDB_MODE=offline or SWANLAB_MODE=offline only writes files."""
        title = self.folder.resolve().name
        options = {
            "wandb": dict(name=title, dir=self.folder),
            "swanlab": dict(experiment_name=title, logdir=str(self.folder / "swanlog")),
        }
        os.environ.setdefault("WANDB_SILENT", "true")  # its lines would tear the progress bar
        os.environ.setdefault("WANDB_CONSOLE", "off")
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", str(END_SECONDS - 5))
        project = os.environ.get(f"{self.name.upper()}_PROJECT", "gpt")
        run = dict(project=project, config=self.settings, id=self.run_id, resume="allow")
        package = importlib.import_module(self.name)
        package.init(**run, **options[self.name])
        for numbers in self.numbers():
            package.log(numbers, step=numbers["step"])
        package.finish()

    def end(self, deadline: float) -> None:
        """Wait until all is sent, to the deadline at most."""
        self.thread.join(max(0.0, deadline - time.monotonic()))
        if self.thread.is_alive():
            self.machine.say(f"warning: {self.name} is still busy: metrics.jsonl has it all")
        # Its package may wait for the network when Python ends, too.
        threading.Thread(target=end_with_main_thread, daemon=True).start()


def end_with_main_thread() -> None:
    """End this process soon after its main thread, whatever else it waits for."""
    threading.main_thread().join()
    time.sleep(END_SECONDS)
    os._exit(1)


def most_memory(device: torch.device) -> int:
    """Return the most bytes so far: allocated on a GPU, else resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def in_other_units(loss: float, token_bytes: float) -> tuple[float, float, str]:
    """Return the perplexity and the bits per byte of a loss in nats per token, and both as a text.

    token_bytes: mean number of bytes of text in a token.
    """
    ppl = math.exp(min(loss, 700.0))  # the largest float is about e^709
    bits_per_byte = loss / math.log(2) / token_bytes
    return ppl, bits_per_byte, f"perplexity {ppl:.2f} | {bits_per_byte:.4f} bits per byte"


def spike(losses: list[float], loss: float) -> float:
    """Return how many deviations a loss lies above those before it: a robust z-score.

    A deviation is 1.4826 times the median distance from the median (Iglewicz and Hoaglin, 1993),
    which is the standard deviation if the losses have a normal distribution. The result is 0 for
    fewer than 30 losses.
    """
    if len(losses) < 30:
        return 0.0
    median = statistics.median(losses)
    deviation = 1.4826 * statistics.median(abs(x - median) for x in losses)
    return (loss - median) / max(deviation, 1e-3 * abs(median))

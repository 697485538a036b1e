"""What a run says while it trains: log lines on the terminal, and the same as records in
metrics.jsonl. Only rank 0 reports.

All that only looks (loss.png, wandb and others) reads these records, in a process of its own:
follow.py. No fault there can touch a step.
"""

import json
import math
import os
import resource
import shlex
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.amp import GradScaler

from hardware.disk import Lock, set_aside, write_whole
from hardware.machine import Clock, Machine
from hardware.terminal import ProgressBar, in_a_terminal, quoted
from text.windows import DataSet
from training.plan import Plan, Progress
from training.settings import TrainConfig

FOLLOW = Path(__file__).resolve().parents[1] / "follow.py"
PATIENCE = 20  # seconds that train.py waits at its end for the last picture


class MetricsFile:
    """The metrics.jsonl that a run writes. Neither a full disk nor a lost file stops the training.

    records: what stands in it at the start. lock: of the run's folder. say: prints a warning.
    """

    def __init__(self, path: Path, records: list[dict], lock: Lock, say: Callable[[str], None]):
        self.path = path
        self.starts = [r for r in records if "landmarks" in r]  # of the run, and when it went on
        self.lock = lock
        self.say = say
        self.content = bytearray(b"".join(map(line_of, records)))  # all that the file should hold
        self.is_whole = True  # whether it does
        self.mutex = threading.Lock()  # the thread that saves checkpoints appends lines, too
        write_whole(path, self.content)

    def append(self, record: dict) -> None:
        """Append a line. If that fails, a later line writes the file again, all of it."""
        line = line_of(record)
        with self.mutex:
            written = len(self.content)
            self.content += line
            was_whole = self.is_whole
            self.is_whole = False
            try:
                if not self.lock.is_held():
                    return  # the folder was moved or deleted: the next save makes it again
                exists = os.path.lexists(self.path)
                if was_whole and exists and self.path.lstat().st_size == written:
                    with open(self.path, "ab") as file:
                        file.write(line)
                else:
                    warning = f"warning: {self.path} was not whole: all of it is written again"
                    if was_whole and exists:  # an older copy, a link, or somebody's own file
                        kept = set_aside(self.path, "metrics_kept.jsonl")
                        warning += f"; what was there is {kept}"
                    write_whole(self.path, self.content)
                    self.say(warning)
                self.is_whole = True
            except OSError as e:
                if was_whole:
                    self.say(f"warning: {self.path}: {e.strerror}: it is written again later")


def line_of(record: dict) -> bytes:
    return json.dumps(record).encode() + b"\n"


@dataclass
class Metrics:
    """Reports the events of a run: first to metrics.jsonl, then to the terminal.

    metrics.jsonl comes first because it is the authoritative record of the run.
    """

    cfg: TrainConfig
    machine: Machine
    plan: Plan
    sets: list[DataSet]
    progress: Progress
    file: MetricsFile | None  # of this run, on rank 0; None on the others

    def __post_init__(self):
        landmarks = [r["landmarks"] for r in self.file.starts] if self.file else []
        self.unigram = landmarks[-1].get("unigram", math.inf) if landmarks else math.inf
        shown = self.machine.is_main and in_a_terminal()
        steps = dict(total=self.plan.steps, initial=self.progress.step)
        self.bar = ProgressBar("step", disable=not shown, **steps)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keep the bar below all lines and follow.py beside the run while the block goes on."""
        follower = nullcontext()
        if self.file and self.cfg.tracker != "off":
            follower = followed(self.file.path.parent, self.machine.say)
        with self.bar.below(), follower:
            yield

    def log_outcome(self, outcome: str, loss: float, grad_norm: float, scaler: GradScaler) -> None:
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

    def log_step(
        self, loss: float, lr: float, grad_norm: float, flops: int, peak: float | None, clock: Clock
    ) -> None:
        """Report the last step, with the speed since the last log line.

        flops: FLOPs per token. peak: TFLOPS of all devices together; None if unknown.
        """
        step = self.progress.step
        plan = self.plan
        seconds = clock.seconds()
        steps = step - clock.step
        rate = steps * plan.step_tokens / seconds
        tflops = rate * flops / 1e12
        mfu = tflops / peak if peak else None
        device = self.machine.device
        if mfu and mfu > 1 and device.type == "cpu" and not self.cfg.peak_tflops:
            mfu = None  # other programs slowed this machine down while its peak was measured
        # The most memory so far: allocated on a GPU, else resident in this process. Of the latter,
        # macOS counts bytes and Linux kilobytes.
        unit = 1 if sys.platform == "darwin" else 1024
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        if device.type == "cuda":
            memory = torch.cuda.max_memory_allocated()
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
            "step_ms": 1e3 * seconds / steps,
            "data_ms": 1e3 * clock.data_s / steps,
            "memory_gb": memory / 1e9,
            "eta_s": (plan.steps - step) * seconds / steps,
        }
        self.bar.set_postfix_str(f"{rate / 1e3:.1f}k tok/s", refresh=False)
        line = f"loss {loss:.3f} | lr {lr:.1e} | grad {grad_norm:.2f} | {rate / 1e3:.1f}k tok/s"
        line += f" | {tflops:.{1 if tflops >= 10 else 3}f} TFLOPS"
        line += f" | MFU {'n/a' if mfu is None else f'{mfu:.1%}'} | {record['step_ms']:.0f} ms"
        line += f" | data {record['data_ms']:.1f} ms | mem {record['memory_gb']:.1f} GB"
        self.write(record, f"{line} | eta {ProgressBar.format_interval(record['eta_s'])}")
        # By this step, every model should have learned more than how frequent each token is.
        patience = max(100, 0.05 * plan.steps, 2 * self.cfg.warmup_ratio * plan.steps)
        mean = statistics.mean(self.progress.losses[-20:])
        last_line = (step - 1) // self.cfg.log_every * self.cfg.log_every
        if last_line < patience <= step and mean > self.unigram:
            line = f"warning: the loss ({mean:.2f}) is still not below that of single-token"
            line += f" frequencies ({self.unigram:.2f}): is lr far too high or too low,"
            line += f" are the texts right? {self.how_to_read(step)}"
            self.write(dict(step=step, not_below="unigram"), line)
        clock.restart(step)

    def how_to_read(self, step: int) -> str:
        """Return by which command people can read the texts of a step."""
        run = shlex.quote(f"{self.cfg.out_dir}/{self.cfg.run_name}")
        return f"read its texts by: python prepare.py --inspect {run} --step {step}"

    def log_eval(self, step: int, losses: dict[str, list[float]], seconds: float) -> float:
        """Report an evaluation after a step, and return the validation loss.

        losses: key in the record -> a loss for each data set. val_loss: on its val.bin;
        val_document_loss: the same, where each document is read alone from its own beginning, and
        each window of one that is longer than a window; train_eval_loss: on windows of its
        train.bin. The mean of each is weighted by the shares of the data sets in the run. seconds:
        how long the evaluation took.
        """
        mean = {}
        by_set = {}
        for key, of_sets in losses.items():
            pairs = list(zip(self.sets, of_sets, strict=True))
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
        return mean["val_loss"]

    def log_sample(self, step: int, text: str) -> None:
        """Report a text that the model has written after a step."""
        prompt = self.cfg.sample_prompt
        line = f"the model continues {prompt!r}:" if prompt else "the model writes:"
        if self.cfg.loss_on == "answers":
            line = f"the model answers {prompt!r}:"
            prompt = ""
        self.write(dict(step=step, sample=prompt + text), f"{line}\n{quoted(prompt + text)}")

    def log_save(self, step: int, path: Path, seconds: float) -> None:
        """Report that the checkpoint of a step is complete on the disk.

        If metrics.jsonl has a record of a checkpoint and none can be found, a disk is missing, and
        init_from=auto must not start from scratch. The thread that saves calls this.
        """
        record = dict(step=step, saved=path.name, save_s=seconds)
        self.write(record, f"saved {path} in {seconds:.1f} s")

    def write(self, record: dict, line: str) -> None:
        """Report one event: the record for programs, the line for people."""
        if self.file:
            self.file.append(record)
            line = f"step {record['step']}/{self.plan.steps} | {line}"
            self.machine.say(line)

    def close(self) -> None:
        """End the record of the run: follow.py, started by hand, need not wait for more."""
        if self.file:
            self.file.append(dict(step=self.progress.step, ended=True))


@contextmanager
def followed(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Let follow.py look at the run in the folder, in a process of its own, during the block.

    Its input ends with the block, or with this process, however that ends: then it draws the last
    picture. This process waits some seconds for that, and asks nothing else of it.
    """
    command = [sys.executable, str(FOLLOW), str(folder), "--beside"]
    later = f"loss.png and the tracker are left to: python follow.py {folder}"
    try:
        # In a session of its own, it does not receive the Ctrl-C that stops this process.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    except OSError as e:
        say(f"warning: follow.py cannot be started ({e.strerror}): {later}")
        yield
        return
    try:
        yield
    finally:
        process.stdin.close()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with all that a tracker has started
            process.wait()
        if process.returncode:
            say(f"warning: follow.py has ended early or took too long: {later}")


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

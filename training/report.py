"""What a run says while it trains: log lines on the terminal, and the same as records in
metrics.jsonl. Only rank 0 reports.

All that only looks (loss.png, wandb and others, the texts of bad steps) reads these records, in a
process of its own: follow.py. No fault there can touch a step.
"""

import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
from torch.amp import GradScaler

from configurator import columns
from hardware.disk import Lock
from hardware.machine import Machine
from hardware.terminal import ProgressBar, fitted, in_a_terminal, quoted
from text.dataset import DataSet
from text.landmarks import mixed_landmarks
from training.metrics import MetricsFile, read_metrics
from training.normal import Watch, spike
from training.plan import Plan
from training.progress import Progress
from training.settings import TrainConfig

FOLLOW = Path(__file__).resolve().parents[1] / "follow.py"
PATIENCE = 20  # seconds that train.py waits at its end for the last picture


def peak_memory(device: torch.device) -> float:
    """Return the most bytes used so far: allocated on a GPU, else resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Clock:
    """Measures the seconds since the last log line, and how many of them went by waiting for data.

    Time spent inside `paused()` (evaluation, saving) does not count.
    """

    def __init__(self, machine: Machine, step: int):
        self.machine = machine
        self.restart(step)

    def restart(self, step: int) -> None:
        """Start a new measurement after step `step`."""
        self.machine.synchronize()
        self.step = step
        self.begun = time.perf_counter()
        self.data = 0.0  # seconds of waiting for data

    def seconds(self) -> float:
        """Return the seconds since restart(), without the pauses."""
        self.machine.synchronize()
        return time.perf_counter() - self.begun

    def step_seconds(self, step: int) -> float:
        """Return the seconds of a step since restart(), `step` being the last. Does not wait."""
        return (time.perf_counter() - self.begun) / (step - self.step)

    @contextmanager
    def paused(self):
        before = self.seconds()
        yield
        self.begun += self.seconds() - before

    @contextmanager
    def waiting_for_data(self):
        before = time.perf_counter()
        yield
        self.data += time.perf_counter() - before


class Metrics:
    """Reports the events of a run: first to metrics.jsonl, then to the terminal.

    metrics.jsonl comes first because it is the authoritative record of the run.
    """

    def __init__(
        self,
        folder: Path,
        cfg: TrainConfig,
        machine: Machine,
        plan: Plan,
        sets: list[DataSet],
        progress: Progress,
        lock: Lock | None,
    ):
        self.folder = folder
        self.machine = machine
        self.cfg = cfg
        self.plan = plan
        self.progress = progress
        self.sets = sets
        shown = machine.is_main and in_a_terminal()
        options = dict(total=plan.steps, initial=progress.step, end="{desc}")
        self.bar = ProgressBar("step", shown=shown, **options)
        self.saved: list[dict] = []  # records of the thread that saves, which write() appends
        if machine.is_main:
            path = folder / "metrics.jsonl"
            records = first_records(path, cfg, plan, sets, progress, machine.say)
            self.watch = Watch(mixed_landmarks(sets), records)
            self.file = MetricsFile(path, records, lock, machine.say)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keep the bar below all lines and follow.py beside the run while the block goes on."""
        wanted = self.machine.is_main and self.cfg.follow
        follower = followed(self.folder, self.machine.say) if wanted else nullcontext()
        with self.bar.below(), follower:
            try:
                yield
            finally:
                self.append_saved()  # an error may end the run here

    def move_bar(self, clock: Clock) -> None:
        """Show the last step in the progress bar, with the speed since the last log line.

        The host does not wait for the device here, so the bar costs a step some microseconds.
        """
        if self.bar.disable:
            return
        done = self.progress.step
        seconds = clock.step_seconds(done)
        rate = self.plan.step_tokens / seconds
        left = in_words((self.plan.steps - done) * seconds)
        self.bar.set_description_str(f"eta {left} | {rate / 1e3:.1f}k tok/s", refresh=False)
        self.bar.update(done - self.bar.n)

    def log_step(
        self,
        loss: float,
        lr: float,
        grad_norm: float,
        flops: int,
        peak: float | None,
        clock: Clock,
    ) -> None:
        """Report the last step, with the speed since the last log line.

        flops: FLOPs per token. peak: TFLOPS of all devices together; None if unknown.
        """
        done = self.progress.step
        plan = self.plan
        seconds = clock.seconds()
        steps = done - clock.step
        rate = steps * plan.step_tokens / seconds
        tflops = rate * flops / 1e12
        mfu = tflops / peak if peak else None
        if mfu and mfu > 1 and self.machine.device.type == "cpu" and not self.cfg.peak_tflops:
            mfu = None  # other programs slowed this machine down while its peak was measured
        tokens = plan.tokens_at(done)
        record = {
            "step": done,
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens": tokens,
            "epoch": tokens / plan.epoch_tokens,
            "tokens_per_s": rate,
            "tflops": tflops,
            "mfu": mfu,
            "step_ms": 1e3 * seconds / steps,
            "data_ms": 1e3 * clock.data / steps,
            "memory_gb": peak_memory(self.machine.device) / 1e9,
            "eta_s": (plan.steps - done) * seconds / steps,
        }
        self.write(record, step_line(record))
        warmup = self.cfg.warmup_ratio * plan.steps
        patience = max(100, 0.05 * plan.steps, 2 * warmup)
        if self.machine.is_main and (news := self.watch.look(self.progress.losses, done, patience)):
            self.write(*news)
        clock.restart(done)

    def log_eval(
        self,
        done: int,
        losses: list[float],
        by_document: list[float],
        of_train: list[float] | None,
        averaged: list[float] | None,
        seconds: float,
    ) -> float:
        """Report an evaluation after step `done`, and return the validation loss.

        losses: one for each data set's val.bin. The validation loss is their mean, weighted by the
        shares of the data sets in the run. by_document: the same, where each document is read alone
        from its own beginning. of_train: the same for windows of each train.bin, if they were
        evaluated. averaged: the losses of the averaged weights on each val.bin, if there are any.
        seconds: how long the evaluation took.
        """
        record: dict = dict(step=done)

        def mean(name: str, of_sets: list[float]) -> float:
            """Record the losses on the data sets and their mean, weighted by the shares."""
            pairs = list(zip(self.sets, of_sets, strict=True))
            record[name] = sum(float(data.weight) * of_set for data, of_set in pairs)
            if len(pairs) > 1:
                record.update({f"{name}/{data.name}": of_set for data, of_set in pairs})
            return record[name]

        loss = mean("val_loss", losses)
        counts = [(data.weight, data.meta["splits"]["val"]) for data in self.sets]
        token_bytes = sum(weight * val["bytes"] / val["tokens"] for weight, val in counts)
        ppl, bits_per_byte, units = in_other_units(loss, float(token_bytes))
        record |= dict(val_ppl=ppl, val_bits_per_byte=bits_per_byte, eval_s=seconds)
        more = [f"by document {mean('val_document_loss', by_document):.4f}"]
        if of_train is not None:
            more.insert(0, f"train {mean('train_eval_loss', of_train):.4f}")
        line = f"validation loss {loss:.4f} ({', '.join(more)}) | {units}"
        if len(self.sets) > 1:
            for data, of_set in zip(self.sets, losses, strict=True):
                line += f" | {data.name} {of_set:.4f}"
        if averaged is not None:
            line += f" | averaged weights {mean('val_loss_average', averaged):.4f}"
        self.write(record, line)
        return loss

    def log_sample(self, done: int, text: str) -> None:
        """Report a text that the model has written after step `done`, with its prompt."""
        prompt = self.cfg.sample_prompt
        shown = repr(prompt if len(prompt) <= 40 else f"{prompt[:37]}...")
        line = f"the model continues {shown}:" if prompt else "the model writes:"
        self.write(dict(step=done, sample=text), line, quoted(text))

    def log_save(self, step: int, path: Path, seconds: float) -> None:
        """Report that the checkpoint of a step is complete on the disk.

        metrics.jsonl gets a record of it too. If it has one and no checkpoint can be found, a disk
        is missing, and init_from=auto must not start from scratch. A thread saves, and calls this:
        the record is appended with the next one.
        """
        self.saved.append(dict(step=step, saved=path.name, save_s=seconds))
        self.machine.say(f"step {step}: saved {path} in {seconds:.1f} s")

    def log_outcome(self, outcome: str, loss: float, grad_norm: float, scaler: GradScaler) -> None:
        """Report the last step if it was skipped, or if its loss is far above those before it.

        outcome: as Progress.add_step() returns it.
        """
        done = self.progress.step
        if outcome == "taken":
            z = spike(self.progress.losses[:-1], loss)
            if z > 8:
                line = f"warning: loss {loss:.3f} is {z:.0f} deviations high"
                self.write(dict(step=done, spike_loss=loss, spike_z=z), line)
        elif outcome == "overflow":
            scale = scaler.get_scale()
            line = f"fp16 overflow: skipped, the loss is scaled by {scale:g} now"
            self.write(dict(step=done, loss_scale=scale), line)
        else:
            problem = f"loss {loss}, norm of the gradient {grad_norm}"
            record = dict(step=done, bad_step=problem, bad_steps=self.progress.bad_steps)
            self.write(record, f"warning: {problem}: skipped")

    def write(self, record: dict, line: str, block: str = "") -> None:
        """Report one event: the record for programs, for people a line and perhaps a block."""
        if not self.machine.is_main:
            return
        self.append(record)
        line = fitted(f"step {record['step']}/{self.plan.steps} | {line}", columns())
        self.machine.say(f"{line}\n{block}" if block else line)

    def append(self, record: dict) -> None:
        self.append_saved()
        self.file.append(record)

    def append_saved(self) -> None:
        while self.saved:
            self.file.append(self.saved.pop(0))

    def close(self) -> None:
        """End the record of the run: follow.py, started by hand, need not wait for more."""
        if self.machine.is_main:
            self.append(dict(step=self.progress.step, ended=True))
            self.file.close()


@contextmanager
def followed(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Let follow.py look at the run in the folder, in a process of its own, during the block.

    Its input ends with the block, or with this process, however that ends: then it draws the last
    picture. This process waits some seconds for that, and asks nothing else of it.
    """
    left = f"loss.png and the tracker are left to: python follow.py {folder}"
    command = [sys.executable, str(FOLLOW), str(folder), "--beside"]
    try:
        # In a session of its own, it does not receive the Ctrl-C that stops this process.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    except OSError as e:
        say(f"warning: follow.py cannot be started ({e.strerror}): {left}")
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
            say(f"warning: follow.py has ended early or took too long: {left}")


def first_records(
    path: Path,
    cfg: TrainConfig,
    plan: Plan,
    sets: list[DataSet],
    progress: Progress,
    say: Callable[[str], None],
) -> list[dict]:
    """Return the records that metrics.jsonl has when this process starts to train.

    These are the records of earlier processes, up to the step at which this one starts. One with
    the settings of this process follows if they differ from those recorded last. Warn if those of
    earlier processes are incomplete, or belong to another run.
    """
    step = progress.step
    earlier = read_metrics(path) if step else []
    # This process repeats later steps.
    records = [r for r in earlier if r["step"] <= step and "ended" not in r]
    last = next((r for r in reversed(records) if "settings" in r), {})
    reached = max((r["step"] for r in records), default=0)
    if step - reached > max(cfg.log_every, last.get("settings", {}).get("log_every", 0)):
        gap = f"lacks the lines of steps {reached + 1} to {step}: they are lost"
        say(f"warning: {path} {gap}")
    of_step = [r["loss"] for r in records if r["step"] == step and "loss" in r]
    if of_step and of_step[-1:] != progress.losses[-1:]:
        other = f"its loss of step {step} is not the one in the checkpoint"
        say(f"warning: {path}: {other}: its lines may be of another run")
    if step and not any(r["step"] == step and "saved" in r for r in records):
        # The process that wrote the checkpoint was killed before it could record it.
        records.append({"step": step, "saved": f"step_{step:08d}"})

    # `prepare.py --inspect RUN --step N` and follow.py read this record to find a step's texts.
    how_to_start = {"init_from", "overwrite"}
    now = {
        "settings": {k: v for k, v in asdict(cfg).items() if k not in how_to_start},
        "step_samples": plan.step_tokens // cfg.block_size,
        "steps": plan.steps,
        "data": {data.name: data.meta["splits"]["train"]["sha256"] for data in sets},
        "landmarks": mixed_landmarks(sets),
    }
    if any(last.get(key) != value for key, value in now.items()):
        place = {"step": step, "first_sample": progress.samples}
        records.append(place | now)
    return records


def step_line(record: dict) -> str:
    """Return the log line for a record of log_step()."""
    r = record
    digits = 1 if r["tflops"] >= 10 else 3
    mfu = "n/a" if r["mfu"] is None else f"{100 * r['mfu']:.1f}%"
    parts = [
        f"loss {r['loss']:.3f} | lr {r['lr']:.1e} | grad {r['grad_norm']:.2f}",
        f"{r['tokens_per_s'] / 1e3:.1f}k tok/s | {r['tflops']:.{digits}f} TFLOPS | MFU {mfu}",
        f"{r['step_ms']:.0f} ms | data {r['data_ms']:.1f} ms | mem {r['memory_gb']:.1f} GB",
        f"eta {in_words(r['eta_s'])}",
    ]
    return " | ".join(parts)


def in_words(seconds: float) -> str:
    """Return a time as 1m15s or 3h12m."""
    minutes = int(seconds) // 60
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes}m{int(seconds) % 60:02d}s"


def in_other_units(loss: float, token_bytes: float) -> tuple[float, float, str]:
    """Return the perplexity and the bits per byte of a loss in nats per token, and both as a text.

    token_bytes: mean number of bytes of text in a token.
    """
    ppl = math.exp(min(loss, 700.0))  # the largest float is about e^709
    bits_per_byte = loss / math.log(2) / token_bytes
    return ppl, bits_per_byte, f"perplexity {ppl:.2f} | {bits_per_byte:.4f} bits per byte"

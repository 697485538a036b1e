"""What a run reports: to metrics.jsonl, to the terminal, to loss.png, to wandb and TensorBoard.

Only rank 0 reports. If the disk is full or wandb fails, there is a warning, and training goes on.
"""

import json
import math
import os
import resource
import statistics
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch.amp import GradScaler

from configurator import changes, columns, row
from hardware.disk import Lock, write_whole
from hardware.kernels import attention_kernel
from hardware.machine import Machine, capacity
from hardware.terminal import ProgressBar, fitted, in_a_terminal, plural, quoted
from model import GPT, GPTConfig
from text.dataset import DataSet
from text.hf_tokenizer import llama_cpp_note, transformers_note
from text.landmarks import mixed_landmarks
from text.replay import sample_texts
from text.tokenizer import SentencePiece, Tiktoken
from text.windows import Loader, share_within, train_loader
from training.huggingface import caveat, hf_class
from training.memory import Step, largest_batch, needed
from training.metrics import METRICS_VERSION, read_metrics
from training.normal import Watch
from training.plan import Plan, batch_warning, different_tokens, length_warnings
from training.plots import plot_loss
from training.progress import Progress
from training.runs import newest_checkpoint
from training.settings import TrainConfig


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


class Picture:
    """Draws loss.png while the run goes on.

    A thread draws, because that takes about a second, and with several ranks all would wait. It
    draws at most a fiftieth of the time, and no error in it stops the training.
    """

    pause = 20  # seconds from one picture to the next, at least

    def __init__(self, folder: Path):
        self.folder = folder
        self.thread = threading.Thread()  # of the latest drawing
        self.earliest = time.monotonic() + self.pause  # when the next drawing may begin

    def draw(self) -> None:
        """Begin to draw, unless the last picture is too new. Return at once."""
        if not self.thread.is_alive() and time.monotonic() >= self.earliest:
            self.thread = threading.Thread(target=self.drawn)
            self.thread.start()

    def finish(self) -> str:
        """Draw the last picture. Return where it is, or why there is none."""
        if self.thread.is_alive():
            self.thread.join()
        return self.drawn()

    def drawn(self) -> str:
        begun = time.monotonic()
        try:
            return f"loss plot: {plot_loss([self.folder], self.folder / 'loss.png')}"
        except ImportError:
            return "no loss plot: pip install matplotlib"
        except (Exception, SystemExit) as e:  # a full disk, an edited line, an error in matplotlib
            return f"no loss plot: {' '.join(str(e).split())}"
        finally:
            now = time.monotonic()
            self.earliest = now + max(self.pause, 50 * (now - begun))


class Metrics:
    """Reports the events of a run: first to metrics.jsonl, then to the terminal, then elsewhere.

    metrics.jsonl comes first because it is the authoritative record of the run.
    """

    def __init__(
        self,
        folder: Path,
        cfg: TrainConfig,
        machine: Machine,
        plan: Plan,
        sets: list[DataSet],
        tokenizer: SentencePiece | Tiktoken,
        progress: Progress,
        lock: Lock | None,
    ):
        self.machine = machine
        self.cfg = cfg
        self.plan = plan
        self.progress = progress
        self.sets = sets
        self.tokenizer = tokenizer
        self.lock = lock
        self.path = folder / "metrics.jsonl"
        shown = cfg.progress == "bar" or (cfg.progress == "auto" and in_a_terminal())
        options = dict(total=plan.steps, initial=progress.step, end="{desc}")
        self.bar = ProgressBar("step", shown=shown and machine.is_main, **options)
        self.wandb = None
        self.tensorboard = None
        self.wandb_id = progress.wandb_id  # names the run at wandb, so that a resume continues it
        if not machine.is_main:
            return
        records = self.first_records()
        write_whole(self.path, b"".join(map(line_of, records)))
        self.watch = Watch(mixed_landmarks(sets), records)
        self.picture = Picture(folder)
        self.file = os.open(self.path, os.O_RDWR | os.O_APPEND)
        self.unwritten = b""  # lines that a full disk did not take
        self.one_at_a_time = threading.Lock()  # the loop writes lines, and the thread that saves
        # Not the loader of train.py: a thread is reading from that one.
        self.loader = train_loader(sets, cfg.block_size, cfg.seed, cfg.documents)
        if cfg.wandb:
            self.open_wandb(folder)
        if cfg.tensorboard:
            self.open_tensorboard(folder)

    def first_records(self) -> list[dict]:
        """Return the records that metrics.jsonl has when this process starts to train.

        These are the records of earlier processes, up to the step at which this one starts. One
        with the settings of this process follows if they differ from those recorded last.
        """
        cfg = self.cfg
        step = self.progress.step
        earlier = read_metrics(self.path) if step else []
        records = [r for r in earlier if r["step"] <= step]  # this process repeats later steps
        last = next((r for r in reversed(records) if "settings" in r), {})
        self.check_earlier(records, last.get("settings", {}).get("log_every", 0))

        # `prepare.py --inspect RUN --step N` reads this record to find the texts of a step.
        how_to_start = {"init_from", "overwrite"}
        settings = {k: v for k, v in asdict(cfg).items() if k not in how_to_start}
        now = {
            "settings": settings,
            "step_samples": self.plan.step_tokens // cfg.block_size,
            "steps": self.plan.steps,
            "data": {data.name: data.meta["splits"]["train"]["sha256"] for data in self.sets},
            "landmarks": mixed_landmarks(self.sets),
        }
        if any(last.get(key) != value for key, value in now.items()):
            place = {"step": step, "first_sample": self.progress.samples}
            records.append(place | {"format_version": METRICS_VERSION} | now)
        return records

    def check_earlier(self, records: list[dict], log_every: int) -> None:
        """Warn if the records of earlier processes are incomplete, or belong to another run.

        log_every: the setting that they were written with.
        """
        step = self.progress.step
        reached = max((r["step"] for r in records), default=0)
        if step - reached > max(self.cfg.log_every, log_every):
            gap = f"lacks the lines of steps {reached + 1} to {step}: they are lost"
            self.machine.say(f"warning: {self.path} {gap}")
        of_step = [r["loss"] for r in records if r["step"] == step and "loss" in r]
        if of_step and of_step[-1:] != self.progress.losses[-1:]:
            what = f"its loss of step {step} is not the one in the checkpoint"
            self.machine.say(f"warning: {self.path}: {what}: its lines may be of another run")

    def open_wandb(self, folder: Path) -> None:
        """Start the run at wandb, or continue the one that an earlier process has started."""
        with self.may_fail("wandb"):
            import wandb

            options = dict(project=self.cfg.wandb_project, name=self.cfg.run_name, dir=folder)
            if self.progress.wandb_id:
                options |= dict(id=self.progress.wandb_id, resume="allow")
            self.wandb = wandb.init(config=asdict(self.cfg), **options)
            self.wandb_id = self.wandb.id

    def open_tensorboard(self, folder: Path) -> None:
        """Write to out/RUN/tensorboard. A resumed run goes on there, from its own step."""
        with self.may_fail("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            # From purge_step on, TensorBoard no longer shows what earlier processes have written.
            begin = self.progress.step + 1
            self.tensorboard = SummaryWriter(folder / "tensorboard", purge_step=begin)

    @contextmanager
    def may_fail(self, tool: str):
        """Turn any error of wandb or tensorboard into a warning, and stop using it."""
        try:
            yield
        except (Exception, SystemExit) as e:
            setattr(self, tool, None)
            reason = " ".join(str(e).split())[:200]
            self.machine.say(f"warning: {tool} failed; going on without it ({reason})")

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
        done: int,
        loss: float,
        lr: float,
        grad_norm: float,
        flops: int,
        peak: float | None,
        clock: Clock,
    ) -> None:
        """Report step `done`, with the speed since the last log line.

        flops: FLOPs per token. peak: TFLOPS of all devices together; None if unknown.
        """
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
        warmup = self.cfg.warmup_steps or self.cfg.warmup_ratio * plan.steps
        patience = max(100, 0.05 * plan.steps, 2 * warmup)
        if self.machine.is_main and (said := self.watch.look(self.progress.losses, done, patience)):
            self.write(*said)
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
        if self.machine.is_main:
            self.picture.draw()
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
        is missing, and init_from=auto must not start from scratch.
        """
        self.append(dict(step=step, saved=path.name, save_s=seconds))
        self.machine.say(f"step {step}: saved {path} in {seconds:.1f} s")

    def log_outcome(
        self, outcome: str, loss: float, grad_norm: float, scaler: GradScaler, samples: range
    ) -> None:
        """Report the last step if it was skipped, or if its loss is far above those before it.

        outcome: as Progress.add_step() returns it. samples: the windows that the step has read.
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
            what = f"loss {loss}, norm of the gradient {grad_norm}"
            where = f"; {self.write_texts(done, samples, what)}" if self.machine.is_main else ""
            record = dict(step=done, bad_step=what, bad_steps=self.progress.bad_steps)
            self.write(record, f"warning: {what}: skipped{where}")

    def write_texts(self, done: int, samples: range, what: str) -> str:
        """Write the texts of a skipped step to bad_steps/, so that people can look for the cause.

        what: what was wrong with the step. Return where the texts are, or why there are none.
        """
        path = self.path.parent / "bad_steps" / f"step_{done:08d}.txt"
        found = sample_texts(self.sets, self.loader, samples, self.tokenizer)
        texts = "".join(f"\n---- {where}\n{text}\n" for where, text in found)
        content = f"step {done}: {what}\n{texts}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, content.encode("utf-8", "backslashreplace"))
            return f"its texts are in {path}"
        except OSError as e:
            return f"its texts could not be written to {path} ({e.strerror})"

    def write(self, record: dict, line: str, block: str = "") -> None:
        """Report one event: the record for programs, for people a line and perhaps a block."""
        if not self.machine.is_main:
            return
        self.append(record)
        line = fitted(f"step {record['step']}/{self.plan.steps} | {line}", columns())
        self.machine.say(f"{line}\n{block}" if block else line)
        values = {name: value for name, value in record.items() if name != "step"}
        if self.wandb is not None:
            with self.may_fail("wandb"):
                self.wandb.log(values, step=record["step"])
        if self.tensorboard is not None:
            with self.may_fail("tensorboard"):
                for name, value in values.items():
                    if isinstance(value, int | float):
                        self.tensorboard.add_scalar(name, value, record["step"])

    def append(self, record: dict) -> None:
        """Append a line to metrics.jsonl. If the disk is full, keep it in memory for later."""
        with self.one_at_a_time:
            warned = bool(self.unwritten)
            self.unwritten += line_of(record)
            try:
                self.find_file()
                while self.unwritten:
                    written = os.write(self.file, self.unwritten)
                    self.unwritten = self.unwritten[written:]
            except OSError as e:
                if not warned:
                    kept = "training goes on, the lines are kept for later"
                    self.machine.say(f"warning: {self.path}: {e.strerror}; {kept}")

    def find_file(self) -> None:
        """Open metrics.jsonl again if the file at its path is not the one that is open.

        Somebody may have moved, deleted or replaced it since the last line, or the run's folder. If
        it is missing, write it again in full: the open file can still be read.
        """
        self.lock.renew()
        if self.path.exists() and os.path.samestat(self.path.stat(), os.fstat(self.file)):
            return
        if not self.path.exists():
            write_whole(self.path, os.pread(self.file, os.fstat(self.file).st_size, 0))
            again = "was moved or deleted: all of it is written again"
            self.machine.say(f"warning: {self.path} {again}")
        os.close(self.file)
        self.file = os.open(self.path, os.O_RDWR | os.O_APPEND)

    def close(self, c: GPTConfig) -> None:
        """End the reports: draw the loss, and say where the newest checkpoint is.

        If transformers or llama.cpp have to be told something about a model of the shape c, say it.
        """
        if self.wandb is not None:
            with self.may_fail("wandb"):
                self.wandb.finish()
        if self.tensorboard is not None:
            with self.may_fail("tensorboard"):
                self.tensorboard.close()
        if not self.machine.is_main:
            return
        if self.unwritten:
            lines = self.unwritten.count(b"\n")
            print(f"warning: {self.path}: the last {lines} lines could not be written")
        os.close(self.file)
        print(self.picture.finish())
        kind = hf_class(c)
        notes = [transformers_note(self.tokenizer, kind)]
        notes.append(llama_cpp_note(self.tokenizer, kind, c.vocab_size))
        newest = newest_checkpoint(self.path.parent / "ckpt")
        print(f"checkpoint: {newest}")
        for text in filter(None, notes):
            print(f"    elsewhere: {text} (docs/interchange.md)")


def line_of(record: dict) -> bytes:
    """Return the line of metrics.jsonl for a record."""
    return json.dumps(record).encode() + b"\n"


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


def banner(
    cfg: TrainConfig,
    sets: list[DataSet],
    loader: Loader,
    machine: Machine,
    plan: Plan,
    model: GPT,
    one_step: Step,
    peak_source: str,
    scratch: bool,
    newest_data: bool,
) -> str:
    """Return the lines that describe a run before its first step.

    loader: the windows of the run. one_step: what the memory of a step depends on. peak_source: the
    peak that MFU refers to, and its source. scratch: the weights are newly drawn. newest_data: the
    data set was not named; it is the one that was prepared last.
    """
    c = model.config
    B = plan.batch_size
    T = cfg.block_size
    V = sets[0].meta["vocab_size"]
    kind = machine.device.type
    tokens = plan.tokens_at(plan.steps)
    epochs = tokens / plan.epoch_tokens
    data = "; ".join(data_text(d, tokens, mixed=len(sets) > 1) for d in sets)
    if newest_data:
        data = f"the set prepared last, as no --dataset is given: {data}"
    batch = f"{B} x {T} x {plan.accum} accumulation x {machine.world} processes"

    shape = f"{hf_class(c) or 'GPT'}, {c.n_layer} layers x {c.n_embd}, "
    shape += f"{c.n_head} heads of {c.head_dim} ({c.n_kv_head} for keys and values)"
    if others := caveat(c):
        shape += f"; {others}"
    params = model.num_params()
    embeddings = f"{params['embedding'] / params['total']:.0%} of them embeddings"
    size = f"{params['total']:,} trainable, {embeddings}"
    size += f"; {tokens / params['total']:.2g} tokens per parameter"
    different = different_tokens(tokens, sets)
    if different < 0.99 * tokens:
        size += f", {different / params['total']:.2g} without repetitions"

    attention = attention_kernel(c.n_head, T, c.head_dim, machine.device, machine.dtype, c.dropout)
    if kind == "cuda" and attention == "math":
        attention += ": warning: slow, with the T x T matrix in memory; "
        attention += "no fused kernel takes this head_dim and dtype here"

    here = capacity(machine.device)
    memory = f"{needed(model, one_step) / 1e9:.1f} GB predicted, of {here / 1e9:.1f}"

    rows = {
        "settings": " ".join(f"{k}={v}" for k, v in changes(cfg).items()),
        "data": f"{data}; vocabulary {V:,}",
        "examples": f"{plan.epoch_tokens // T:,} windows of {T} tokens in an epoch",
        "batch": f"{cfg.batch_tokens:,} tokens a step asked, {plan.step_tokens:,} actual = {batch}",
        "length": f"{plan.steps:,} optimization steps = {tokens:,} tokens = {epochs:.2f} epochs",
        "model": shape,
        "parameters": size,
        "compute": f"{model.flops_per_token(T) * tokens:.3g} FLOPs (6 N + 12 L d T a token)",
        "precision": f"{str(machine.dtype).removeprefix('torch.')}: {machine.why}",
        "attention": attention,
        "memory": f"{memory}; batch_size may be {largest_batch(model, one_step, here):,} at most",
        "peak": peak_source,
    }
    if cfg.documents == "pack":
        targets = sum(data.meta["splits"]["train"]["tokens"] for data in sets)
        padding = 1 - targets / plan.epoch_tokens
        rows["examples"] += f", packed with whole documents: {padding:.2%} of them is padding"
    if cfg.documents != "stream":
        share = f"{share_within(loader):.0%} of the T x T pairs of tokens are in one document"
        rows["attention"] = f"within a document: {share}; MFU counts all of them"
    if cfg.loss_per == "document":
        rows["loss"] = "each document of train.bin counts the same, however long it is"
    if warning := batch_warning(plan.step_tokens, cfg, machine.world):
        rows["batch"] += f"\n{warning}"
    for warning in length_warnings(plan, cfg, sets):
        rows["length"] += f"\n{warning}"
    if cfg.recompute == "blocks":
        rows["compute"] += "; the forward pass of the blocks runs twice, which MFU does not count"
    if cfg.shard != "none":
        what = {"optimizer": "optimizer's state", "gradients": "optimizer's state and gradients"}
        rows["shared out"] = f"{what.get(cfg.shard, 'all')}, among {machine.world} processes"
        if machine.world == 1:
            rows["shared out"] = "nothing: there is one process"
    gpus = torch.cuda.device_count() if kind == "cuda" else 1
    if machine.world == 1 and gpus > 1:
        command = f"torchrun --nproc_per_node={gpus} {' '.join(sys.argv)}"
        rows["GPUs"] = f"1 of {gpus} is used; to use all: {command}"
    if scratch:
        rows["first loss"] = f"ln({V}) = {math.log(V):.2f} expected"
    return "\n".join(row(f"{key:>11}: ", value) for key, value in rows.items())


def slow_steps(flops: float, peak: float | None) -> str:
    """Return what to say before steps that take longer than a minute; "" if they do not.

    flops: of a step. peak: TFLOPS of all devices together, of which 40 % are reached, or None.
    """
    seconds = flops / (0.4e12 * peak) if peak else 0.0
    if seconds < 60:
        return ""
    shorter = "a smaller --batch_tokens makes it shorter; config/demo.py is a run for a CPU"
    return f"note: a step takes about {in_words(seconds)} here, at 40 % of the peak: {shorter}"


def data_text(data: DataSet, tokens: int, mixed: bool) -> str:
    """Return the size of a data set; in a mixture, also its part of the run's `tokens` tokens."""
    train = data.meta["splits"]["train"]
    documents = plural(train["documents"], "document")
    text = f"{data.name}: {documents}, {train['tokens']:,} tokens"
    if mixed:
        share = float(data.weight)
        text += f", {share:.1%} of the windows = {data.epochs(tokens):.2f} epochs"
    return text

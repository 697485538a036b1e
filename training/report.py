"""What a run says of itself: to metrics.jsonl, to the terminal, to wandb. train.py's loop stays free of it.

Only rank 0 reports. A disk that is full and a wandb that fails are warnings: training goes on.
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
from tqdm import tqdm

from configurator import UserError, changes
from hardware.disk import Lock, write_whole
from hardware.kernels import attention_kernel
from hardware.machine import Machine, capacity
from model import GPT
from text.dataset import DataSet
from text.tokenizer import SentencePiece, Tiktoken
from text.windows import sample_texts, train_loader
from training.huggingface import caveat, hf_class
from training.memory import Step, largest_batch, needed
from training.plan import Plan
from training.plots import METRICS_VERSION, plot_loss, read_metrics
from training.progress import Progress
from training.runs import newest_checkpoint
from training.settings import TrainConfig


def peak_memory(device: torch.device) -> float:
    """Bytes: allocated on the GPU; elsewhere resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Clock:
    """Time since the last log line: of steps, without what was spent in `paused`; of waiting for data."""

    def __init__(self, machine: Machine, step: int):
        self.machine = machine
        self.restart(step)

    def restart(self, step: int) -> None:
        self.machine.synchronize()
        self.step, self.begun, self.data = step, time.perf_counter(), 0.0

    def seconds(self) -> float:
        self.machine.synchronize()
        return time.perf_counter() - self.begun

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
    """metrics.jsonl first: it is the truth; then the terminal, then wandb when asked."""

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
        self.machine, self.cfg, self.plan, self.progress = machine, cfg, plan, progress
        self.sets, self.tokenizer, self.lock = sets, tokenizer, lock
        self.path = folder / "metrics.jsonl"
        self.bar = self.wandb = None
        self.wandb_id = progress.wandb_id  # of the run there, which a resume goes on with
        if not machine.is_main:
            return
        start_step = progress.step
        before = read_metrics(self.path) if start_step else []
        kept = [r for r in before if r["step"] <= start_step]  # what came after is done again
        last = next((r for r in reversed(kept) if "settings" in r), {})
        reached = max((r["step"] for r in kept), default=0)
        if start_step - reached > max(cfg.log_every, last.get("settings", {}).get("log_every", 0)):
            machine.say(f"warning: {self.path} lacks the lines of steps {reached + 1} to {start_step}: they are lost")
        there = next((r["loss"] for r in reversed(kept) if r["step"] == start_step and "loss" in r), None)
        if there is not None and [there] != progress.losses[-1:]:
            what = f"the loss of step {start_step} is another one there than in the checkpoint"
            machine.say(f"warning: {self.path}: {what}: its lines may be of another run")
        how = {"init_from", "overwrite"}  # of no meaning for what is trained
        begun = {"settings": {k: v for k, v in asdict(cfg).items() if k not in how}}
        begun |= {"step_samples": plan.step_tokens // cfg.block_size, "steps": plan.steps}
        begun |= {"data": {d.name: d.meta["splits"]["train"]["sha256"] for d in sets}}
        if any(last.get(k) != v for k, v in begun.items()):  # what `prepare.py --inspect RUN --step N` goes by
            kept.append(
                {"step": start_step, "first_sample": progress.samples, "format_version": METRICS_VERSION} | begun
            )
        write_whole(self.path, b"".join(map(line_of, kept)))
        self.file, self.unwritten = os.open(self.path, os.O_RDWR | os.O_APPEND), b""
        self.one_at_a_time = threading.Lock()  # the loop writes, and the thread that saves
        self.loader = train_loader(sets, cfg.block_size, cfg.seed)  # its own: train.py's is read by a thread
        if cfg.progress == "bar" or (cfg.progress == "auto" and sys.stderr.isatty()):
            self.bar = tqdm(total=plan.steps, initial=start_step, dynamic_ncols=True, unit="step")
        if cfg.wandb:
            with self.wandb_may_fail():
                import wandb

                known = dict(id=progress.wandb_id, resume="allow") if progress.wandb_id else {}
                self.wandb = wandb.init(
                    project=cfg.wandb_project, name=cfg.run_name, dir=folder, config=asdict(cfg), **known
                )
                self.wandb_id = self.wandb.id

    @contextmanager
    def wandb_may_fail(self):
        """Not logged in, unreachable, failing in the middle: a warning, and training goes on with metrics.jsonl alone."""
        try:
            yield
        except Exception as e:
            self.wandb = None
            self.machine.say(f"warning: wandb failed; going on without it ({' '.join(str(e).split())[:200]})")

    def log_step(
        self, done: int, loss: float, lr: float, grad_norm: float, flops: int, peak: float | None, clock: Clock
    ):
        """What is known after step `done`. flops: of a token; peak: TFLOPS of all devices, None if unknown."""
        seconds, steps, plan = clock.seconds(), done - clock.step, self.plan
        rate = steps * plan.step_tokens / seconds
        tflops = rate * flops / 1e12
        mfu = tflops / peak if peak else None
        tokens = plan.tokens_at(done)
        record = dict(step=done, loss=loss, lr=lr, grad_norm=grad_norm, tokens=tokens)
        record |= dict(epoch=tokens / plan.epoch_tokens, tokens_per_s=rate, tflops=tflops, mfu=mfu)
        record |= dict(step_ms=1e3 * seconds / steps, data_ms=1e3 * clock.data / steps)
        record |= dict(memory_gb=peak_memory(self.machine.device) / 1e9, eta_s=(plan.steps - done) * seconds / steps)
        hours, minutes, rest = record["eta_s"] // 3600, record["eta_s"] // 60 % 60, record["eta_s"] % 60
        parts = [
            f"loss {loss:.3f} | lr {lr:.1e} | grad {grad_norm:.2f}",
            f"{rate / 1e3:.1f}k tok/s | {tflops:.{1 if tflops >= 10 else 3}f} TFLOPS",
            "MFU n/a" if mfu is None else f"MFU {100 * mfu:.1f}%",
            f"{record['step_ms']:.0f} ms | data {record['data_ms']:.1f} ms | mem {record['memory_gb']:.1f} GB",
            f"eta {hours:.0f}h{minutes:02.0f}m" if hours else f"eta {minutes:.0f}m{int(rest):02d}s",
        ]
        self.write(record, " | ".join(parts), in_bar=True)
        clock.restart(done)  # until the next line

    def log_eval(self, done: int, losses: list[float], seconds: float) -> float:
        """losses: of each data set's val.bin. Returns their mean, each with its data set's share of the run."""
        sets = self.sets
        loss = sum(float(d.weight) * x for d, x in zip(sets, losses, strict=True))
        token_bytes = sum(d.weight * d.meta["splits"]["val"]["bytes"] / d.meta["splits"]["val"]["tokens"] for d in sets)
        ppl, bits_per_byte, line = in_other_units(loss, float(token_bytes))
        record = dict(step=done, val_loss=loss, val_ppl=ppl, val_bits_per_byte=bits_per_byte, eval_s=seconds)
        if len(sets) > 1:
            record |= {f"val_loss/{d.name}": x for d, x in zip(sets, losses, strict=True)}
            line += "".join(f" | {d.name} {x:.4f}" for d, x in zip(sets, losses, strict=True))
        self.write(record, line)
        return loss

    def log_save(self, step: int, path: Path, seconds: float, note: str) -> None:
        """A checkpoint is whole on the disk. It is said in metrics.jsonl too: where it says so and none can be
        found, a disk is missing, and init_from=auto must not begin anew.
        """
        self.append(dict(step=step, saved=path.name, save_s=seconds))
        self.machine.say(f"step {step}: saved {path} in {seconds:.1f} s{note}")

    def log_outcome(
        self, outcome: str, loss: float, grad_norm: float, scaler: torch.amp.GradScaler, samples: range
    ) -> None:
        """A step that was skipped, or whose loss leaps. outcome: of Progress.add_step; samples: of the step."""
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
        """The texts of a step that was skipped, so that the culprit can be read."""
        path = self.path.parent / "bad_steps" / f"step_{done:08d}.txt"
        found = sample_texts(self.sets, self.loader, samples, self.tokenizer)
        texts = "".join(f"\n---- {where}\n{text}\n" for where, text in found)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"step {done}: {what}\n{texts}", encoding="utf-8", errors="backslashreplace")
            return f"its texts are in {path}"
        except OSError as e:
            return f"its texts could not be written to {path} ({e.strerror})"

    def write(self, record: dict, line: str, in_bar: bool = False) -> None:
        """One event: the record for programs, the line for people."""
        if not self.machine.is_main:
            return
        self.append(record)
        if self.bar is not None and in_bar:
            self.bar.set_postfix_str(line)
            self.bar.update(record["step"] - self.bar.n)
        else:
            self.machine.say(f"step {record['step']}/{self.plan.steps} | {line}")
        if self.wandb is not None:
            with self.wandb_may_fail():
                self.wandb.log({k: v for k, v in record.items() if k != "step"}, step=record["step"])

    def append(self, record: dict) -> None:
        """A line for metrics.jsonl. What a full disk does not take waits, and the training goes on."""
        with self.one_at_a_time:
            waiting = bool(self.unwritten)
            self.unwritten += line_of(record)
            try:
                self.find_file()
                while self.unwritten:
                    written = os.write(self.file, self.unwritten)
                    self.unwritten = self.unwritten[written:]
            except OSError as e:
                if not waiting:
                    kept = "training goes on, the lines are kept for later"
                    self.machine.say(f"warning: {self.path}: {e.strerror}; {kept}")

    def find_file(self) -> None:
        """Somebody may have moved, deleted or replaced metrics.jsonl since the last line, or the run's folder."""
        self.lock.renew()
        if self.path.exists() and os.path.samestat(self.path.stat(), os.fstat(self.file)):
            return
        if not self.path.exists():  # what was open is still there to be read
            write_whole(self.path, os.pread(self.file, os.fstat(self.file).st_size, 0))
            self.machine.say(f"warning: {self.path} was moved or deleted: all of it is written again")
        os.close(self.file)
        self.file = os.open(self.path, os.O_RDWR | os.O_APPEND)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        if self.wandb is not None:
            with self.wandb_may_fail():
                self.wandb.finish()
        if not self.machine.is_main:
            return
        if self.unwritten:
            lines = self.unwritten.count(b"\n")
            print(f"warning: {self.path}: the last {lines} lines could not be written")
        os.close(self.file)
        try:
            print(f"loss plot: {plot_loss([self.path.parent])}")
        except ImportError:
            print("no loss plot: pip install matplotlib")
        except (OSError, UserError, ValueError) as e:  # a full disk, a line that somebody has changed
            print(f"no loss plot: {e}")
        print(f"checkpoint: {newest_checkpoint(self.path.parent / 'ckpt')}")


def line_of(record: dict) -> bytes:
    return json.dumps(record).encode() + b"\n"


def in_other_units(loss: float, token_bytes: float) -> tuple[float, float, str]:
    """(perplexity, bits per byte, a line that says them) of a loss in nats per token. token_bytes: of text, in a token."""
    ppl = math.exp(min(loss, 700.0))  # a float ends at e^709
    bits_per_byte = loss / math.log(2) / token_bytes
    return ppl, bits_per_byte, f"validation loss {loss:.4f} | perplexity {ppl:.2f} | {bits_per_byte:.4f} bits per byte"


def spike(losses: list[float], loss: float) -> float:
    """How far a loss lies above those before it, as a robust z-score: in deviations of 1.4826 x the median deviation
    (Iglewicz and Hoaglin, 1993, which is the standard deviation of a normal distribution). 0 while there are few.
    """
    if len(losses) < 30:
        return 0.0
    median = statistics.median(losses)
    spread = 1.4826 * statistics.median(abs(x - median) for x in losses)
    return (loss - median) / max(spread, 1e-3 * abs(median))


def banner(
    cfg: TrainConfig,
    sets: list[DataSet],
    machine: Machine,
    plan: Plan,
    model: GPT,
    compiled: bool,
    peak_source: str,
    scratch: bool,
) -> str:
    step = Step(
        plan.batch_size, cfg.block_size, plan.accum, machine.dtype, compiled, machine.device.type, machine.world
    )
    here = capacity(machine.device)
    memory = f"{needed(model, step) / 1e9:.1f} GB predicted, of {here / 1e9:.1f}"
    n, c, T, V = model.num_params(), model.config, cfg.block_size, sets[0].meta["vocab_size"]
    tokens = plan.tokens_at(plan.steps)
    data = []
    for d in sets:
        train = d.meta["splits"]["train"]
        epochs = f", {float(d.weight):.1%} of the windows = {float(d.weight) * tokens / train['tokens']:.2f} epochs"
        counts = f"{train['documents']:,} documents, {train['tokens']:,} tokens"
        data.append(f"{d.name}: {counts}{epochs if len(sets) > 1 else ''}")
    batch = f"{plan.batch_size} x {T} x {plan.accum} accumulation x {machine.world} processes"
    heads = f"{c.n_head} heads of {c.head_dim} ({c.n_kv_head} for keys and values)"
    kernel = attention_kernel(c.n_head, T, c.head_dim, machine.device, machine.dtype, c.dropout)
    slow = ": warning: slow, with the T x T matrix in memory; no fused kernel takes this head_dim and dtype here"
    odd = caveat(c)
    size = f"{n['total']:,} trainable, {n['embedding'] / n['total']:.0%} of them embeddings"
    rows = {
        "settings": " ".join(f"{k}={v}" for k, v in changes(cfg).items()),
        "data": f"{'; '.join(data)}; vocabulary {V:,}",
        "examples": f"{plan.epoch_tokens // T:,} windows of {T} tokens in an epoch",
        "batch": f"{cfg.batch_tokens:,} tokens a step asked, {plan.step_tokens:,} actual = {batch}",
        "length": f"{plan.steps:,} optimization steps = {tokens:,} tokens = {tokens / plan.epoch_tokens:.2f} epochs",
        "model": f"{hf_class(c) or 'GPT'}, {c.n_layer} layers x {c.n_embd}, {heads}{'; ' * bool(odd)}{odd}",
        "parameters": f"{size}; {tokens / n['total']:.2g} tokens per parameter",
        "compute": f"{model.flops_per_token(T) * tokens:.3g} FLOPs (6 N + 12 L d T a token)",
        "precision": f"{str(machine.dtype).removeprefix('torch.')}: {machine.why}",
        "attention": kernel + slow * (machine.device.type == "cuda" and kernel == "math"),
        "memory": f"{memory}; the largest batch_size is {largest_batch(model, step, here):,}",
        "peak": peak_source,
    }
    if scratch:
        rows["first loss"] = f"ln({V}) = {math.log(V):.2f} expected"
    return "\n".join(f"{k:>11}: {v}" for k, v in rows.items())

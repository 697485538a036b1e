"""Train a GPT. Read it from main() down: the loop is the last page, and what it calls stands above in order of use.

    python train.py config/demo.py                                       # a laptop's CPU, or one GPU
    torchrun --nproc_per_node=6 train.py config/train_100m.py            # six GPUs
    python train.py config/train_100m.py --n_layer=2 --max_steps=20      # any setting below can be changed

Words: B = batch_size, T = block_size; a *step* is one update of the weights, made of `accum` *micro-steps* on each of
`world` processes (ranks), each of B x T tokens. Every interval below counts steps.
"""

import ctypes
import gc
import inspect
import itertools
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from configurator import OneRankError, UserError, parse, run
from hardware.disk import MANIFEST, Lock, file_sha256
from hardware.peak import peak_tflops
from model import GPT, INIT, PRESETS, GPTConfig
from text.dataset import DataSet, Loader, Windows, load_tokenizer, open_datasets, train_loader, verify_new
from text.tokenizer import SentencePiece, Tiktoken
from training.checkpoint import (
    Earlier,
    Saver,
    Source,
    check_copy,
    check_data,
    check_tokenizer,
    find_source,
    load_model,
    newest_checkpoint,
    read_training,
    replace_run,
    run_folder,
    settings_changed,
    sweep,
)
from training.huggingface import unverified
from training.memory import Step, auto_batch, capacity, out_of_memory
from training.report import Clock, Metrics, banner

# ---------------------------------------------------------------------------------------------------------------------
# Settings: the reference manual. `python train.py --help` prints this list.


@dataclass(frozen=True)
class TrainConfig:
    # ---- Run ----
    run_name: str = "run"  # it writes out_dir/run_name/
    out_dir: str = "out"  # where runs live
    init_from: str = "scratch"  # scratch; resume: the run's newest checkpoint; auto: resume if it can; a model's folder: fine-tune it
    overwrite: bool = False  # scratch may delete an earlier run of the same name
    seed: int = 1337  # of the weights, the data order and dropout
    # ---- Data ----
    dataset: str = "demo"  # what prepare.py wrote to data_dir; several as wiki:0.7,code:0.3 (shares of the windows)
    data_dir: str = "data"  # where data sets live
    block_size: int = 1024  # T, tokens in a sequence
    # ---- Model ----
    preset: Literal["gpt2", "llama", "qwen3"] = "gpt2"  # sets the switches below that say preset
    n_layer: int = 12  # blocks
    n_head: int = 12  # query heads
    n_kv_head: int = 0  # key/value heads; 0: n_head
    n_embd: int = 768  # width of the residual stream
    head_dim: int = 0  # 0: n_embd / n_head
    d_ff: int = 0  # width inside the MLP; 0: 4 n_embd, for swiglu 8/3 n_embd
    pos: Literal["preset", "learned", "rope"] = "preset"  # position encoding
    norm: Literal["preset", "layernorm", "rmsnorm"] = "preset"  # normalisation before attention, MLP and head
    mlp: Literal["preset", "gelu", "gelu_tanh", "swiglu"] = "preset"  # kind of MLP
    bias: bool | Literal["preset"] = "preset"  # biases in linear layers and LayerNorm
    qk_norm: bool | Literal["preset"] = "preset"  # RMSNorm on queries and keys
    tie_embeddings: bool | Literal["preset"] = "preset"  # one matrix for wte and lm_head
    rope_theta: float = 10000.0  # base of the rotation frequencies
    norm_eps: float = 1e-5  # added to the variance
    dropout: float = 0.0  # 0 for pretraining; 0.1 and more when the data is seen many times
    init: str = "gpt2"  # a scheme of model.py's INIT: gpt2, llama, xavier, kaiming, lecun, small, deepnorm, zero_proj
    # ---- Batch ----
    batch_size: int | Literal["auto"] = 16  # B, sequences per device and micro-step; auto: as many as fit
    batch_tokens: int = 524_288  # tokens per step over all devices; the accumulation follows from it
    # ---- Length: the run ends at the first of these that is not 0 ----
    max_steps: int = 0  # steps
    max_epochs: float = 0.0  # passes over train.bin
    max_tokens: int = 0  # tokens
    # ---- Optimizer: AdamW ----
    lr: float = 6e-4  # highest learning rate
    weight_decay: float = 0.1  # on matrices and embeddings, not on biases and norms
    beta1: float = 0.9  # memory of the gradient's mean
    beta2: float = 0.95  # memory of its square
    grad_clip: float = 1.0  # largest norm of the gradient; 0: no clipping
    max_bad_steps: int = 10  # so many steps in a row without a finite loss and gradient, all skipped, end the run
    # ---- Schedule of lr ----
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"  # wsd: warm-up, stable, decay
    warmup_steps: int = 0  # linear rise from 0; 0: warmup_ratio of the run
    warmup_ratio: float = 0.01  # share of the run's steps
    decay_ratio: float = 0.2  # wsd: the last share of the run, linear down to min_lr_ratio
    min_lr_ratio: float = 0.1  # lr at the end, as a share of lr
    # ---- Evaluation and checkpoints ----
    eval_every: int = 250  # steps; also at the end
    eval_tokens: int = 1_000_000  # of val.bin, in fixed windows spread evenly; 0: all of it
    save_every: int = 1000  # steps; also at the end
    keep: int = 2  # newest checkpoints kept, beside the best by validation loss
    # ---- Precision and device ----
    device: str = "auto"  # auto: cuda, then mps, then cpu
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # of matrix products; weights are always fp32
    compile: bool | Literal["auto"] = "auto"  # torch.compile; auto: on for cuda, and for long runs on a CPU
    # ---- Logging ----
    log_every: int = 10  # steps
    progress: Literal["auto", "bar", "line"] = "auto"  # auto: a bar on a terminal, a line per log step elsewhere
    peak_tflops: float = 0.0  # of one device, for MFU; 0: its datasheet; on a CPU a measured matrix product
    wandb: bool = False  # mirror the metrics to Weights & Biases (WANDB_MODE=offline works)
    wandb_project: str = "gpt"  # its project

    def problems(self) -> list[str]:
        positive = "block_size n_layer n_head n_embd batch_tokens lr rope_theta norm_eps"
        positive += " eval_every save_every keep log_every max_bad_steps"
        not_negative = "n_kv_head head_dim d_ff max_steps max_epochs max_tokens weight_decay grad_clip warmup_steps"
        not_negative += " eval_tokens peak_tflops seed"
        shares, below_1 = "warmup_ratio decay_ratio min_lr_ratio", "beta1 beta2 dropout"
        wrong = [f"{k} must be positive" for k in positive.split() if not getattr(self, k) > 0]
        wrong += [f"{k} must not be negative" for k in not_negative.split() if not getattr(self, k) >= 0]
        wrong += [f"{k} must be between 0 and 1" for k in shares.split() if not 0 <= getattr(self, k) <= 1]
        wrong += [f"{k} must be at least 0 and below 1" for k in below_1.split() if not 0 <= getattr(self, k) < 1]
        if self.batch_size != "auto" and self.batch_size < 1:
            wrong.append("batch_size must be positive")
        if self.seed >= 2**62:
            wrong.append("seed must be below 2^62")
        odd = any(ord(letter) < 32 or ord(letter) == 127 for letter in self.run_name)
        if self.run_name in ("", ".", "..") or self.run_name != Path(self.run_name).name or odd:
            wrong.append(f"run_name {self.run_name!r} must be a plain folder name")
        if self.init not in INIT:
            wrong.append(f"init={self.init!r} is none of {', '.join(INIT)}")
        if not (self.max_steps or self.max_epochs or self.max_tokens):
            wrong.append("the run has no end: set max_steps, max_epochs or max_tokens")
        if self.wandb and find_spec("wandb") is None:
            wrong.append("wandb=true needs the package wandb: pip install wandb")
        return wrong


# ---------------------------------------------------------------------------------------------------------------------
# Machine: asked once, here; afterwards only fields are read


@dataclass(frozen=True)
class Machine:
    rank: int  # of this process, 0 ... world - 1
    local_rank: int  # on this computer
    world: int  # processes
    device: torch.device
    dtype: torch.dtype  # of autocast
    why: str  # that dtype
    group: Any = None  # of all ranks, for what they say to each other before and after the loop

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def say(self, text: str) -> None:
        """A line on the terminal, from one of all processes, above the progress bar if there is one."""
        if self.is_main:
            tqdm.write(text)
            sys.stdout.flush()

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank. It waits for the slowest, be it for hours."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, self.group)
        return found

    def together(self, work: Callable[[], Any]) -> Any:
        """work() on every rank. Where it fails on one, all of them raise its UserError, and none waits for it."""
        result, wrong = None, ""
        try:
            result = work()
        except UserError as e:
            wrong = str(e)
        except OSError as e:
            wrong = f"{e.filename or 'writing'}: {e.strerror}"
        found = self.gather(wrong)
        if any(found):
            rank = next(rank for rank, text in enumerate(found) if text)
            raise UserError(found[rank] if all(found) else f"rank {rank}: {found[rank]}")
        return result

    def decide(self, work: Callable[[], Any]) -> Any:
        """work() on rank 0 alone; its result, or its UserError, on every rank."""
        return self.gather(self.together(lambda: work() if self.is_main else None))[0]

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def synchronize(self) -> None:
        """Wait for the work that is queued on the device: a clock is read only after this."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def fetch(self, x: torch.Tensor) -> Callable[[], list[float]]:
        """Start to copy x to the host. What is returned waits for the copy alone, not for work queued behind it."""
        if self.device.type != "cuda":
            return x.tolist
        copy, done = x.to("cpu", non_blocking=True), torch.cuda.Event()
        done.record()
        return lambda: done.synchronize() or copy.tolist()


def start(cfg: TrainConfig) -> Machine:
    rank, local_rank, world = (int(os.environ.get(*k)) for k in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
    device = pick_device(cfg.device, local_rank)
    if device.type == "cpu":
        keep_freed_memory()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in fp32
        if world == 1 and (n := torch.cuda.device_count()) > 1:
            all_of_them = f"torchrun --nproc_per_node={n} train.py {' '.join(sys.argv[1:])}"
            print(f"note: 1 of {n} GPUs is used; for all: {all_of_them}")
    group = None
    if "RANK" in os.environ:
        # torchrun hands restarted workers the store of the attempt before, in which stale addresses stand (torch 2.13)
        store, *_ = next(dist.rendezvous("env://"))
        if os.environ.get("GROUP_WORLD_SIZE") == "1":  # of several computers, each counts its own restarts
            store = dist.PrefixStore(f"attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        backend, on = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        # In the loop, the longest that one rank waits for another is for a checkpoint on its way to a slow disk.
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world, device_id=on, timeout=timedelta(minutes=30)
        )
        # Around it, one may have to read all data, or to compile, while the others wait.
        group = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    dtype, why = pick_dtype(cfg.dtype, device)
    return Machine(rank, local_rank, world, device, dtype, why, group)


def keep_freed_memory() -> None:
    """Have glibc keep large freed tensors, where each step would pay for fresh pages from the kernel (bench/LOG.md)."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library: macOS, musl
        return
    M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
    mallopt(M_MMAP_MAX, 0)  # no block gets pages of its own, to be unmapped when it is freed
    mallopt(M_TRIM_THRESHOLD, -1)  # and the heap never shrinks


def pick_device(asked: str, local_rank: int = 0) -> torch.device:
    """auto: cuda, then mps, then cpu. UserError if it cannot be used."""
    kind = asked
    if asked == "auto":
        kind = (torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")).type
    try:
        device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
        torch.zeros(1, device=device).item()  # which a device without numbers, meta, has not
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        raise OneRankError(f"--device={asked}: not usable here ({str(e).splitlines()[0]})") from None
    return device


def pick_dtype(asked: str, device: torch.device) -> tuple[torch.dtype, str]:
    """The autocast dtype, and why. auto: bf16 only where the hardware multiplies it natively, not where it is emulated."""
    if asked != "auto":
        if asked == "float16" and device.type != "cuda":
            raise UserError(f"dtype=float16 needs a CUDA device; on {device.type} use bfloat16 or float32")
        return getattr(torch, asked), "as asked"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major >= 8 or torch.version.hip:
            return torch.bfloat16, f"compute capability {major}.{minor} multiplies it natively"
        return torch.float16, f"compute capability {major}.{minor} has no native bfloat16"
    if device.type == "cpu":
        has = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
        if native := [k for k in ("amx_bf16", "avx512_bf16", "bf16") if has.get(k)]:
            return torch.bfloat16, f"this CPU has {native[0]}"
        return torch.float32, "this CPU has no native bfloat16"
    return torch.float32, f"the safe choice on {device.type}"


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """SIGTERM, Ctrl-C, SIGUSR1 (Slurm's warning) and SIGHUP (a closed terminal) let the step end; then the run is saved
    and ends with 128 + number. A second Ctrl-C ends it at once. Under nohup SIGHUP is ignored, as it was asked for.
    Yields the list that their numbers are put into.
    """
    caught: list[int] = []

    def catch(number: int, frame) -> None:
        if caught and number == signal.SIGINT:
            os._exit(128 + number)
        caught.append(number)

    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, catch) for number in numbers}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def memory_advice(advice: str):
    """Out of memory, in one line that says what would fit."""
    try:
        yield
    except (RuntimeError, MemoryError) as e:
        if not out_of_memory(e):
            raise
        raise OneRankError(f"out of memory {advice}") from None


def all_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum of x over all ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def least(number: int, machine: Machine) -> int:
    """The smallest of the ranks' numbers."""
    x = torch.tensor(number, device=machine.device)
    if dist.is_initialized():
        dist.all_reduce(x, dist.ReduceOp.MIN)
    return int(x)


def to_device(rows: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, both (B, T), of windows (B, T + 1)."""
    both = torch.from_numpy(rows)
    both = both.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else both.to(device)
    return both[:, :-1], both[:, 1:]


def read_ahead(loader: Loader, sample: int, B: int, machine: Machine) -> Iterator[np.ndarray]:
    """This rank's batches of windows (B, T + 1), from `sample` of the run on; a thread reads one while another is trained on."""
    firsts = itertools.count(sample + machine.rank * B, machine.world * B)  # the ranks take turns

    def read() -> np.ndarray:
        return loader.rows(loader.starts(next(firsts), B))

    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(read)
        while True:
            rows, reading = reading.result(), thread.submit(read)
            yield rows


# ---------------------------------------------------------------------------------------------------------------------
# Plan: batch, length and learning rate, all pure functions of the settings and the step


@dataclass(frozen=True)
class Plan:
    batch_size: int  # B actually used
    accum: int  # micro-steps in a step
    step_tokens: int  # of all ranks: the multiple of B T world that is nearest to batch_tokens
    epoch_tokens: int  # in a pass over train.bin
    steps: int  # of the run
    begun_step: int = 0  # where this process takes the run up
    begun_tokens: int = 0  # read until there; an earlier process may have had another step_tokens

    def tokens_at(self, step: int) -> int:
        """How many tokens the run has read when `step` steps are done."""
        return self.begun_tokens + (step - self.begun_step) * self.step_tokens

    def smaller(self, block_size: int) -> str:
        """What to do when it does not fit into memory."""
        B, same = self.batch_size, f"the step keeps its {self.step_tokens:,} tokens: the same training"
        less = f"--batch_size={B // 2} ({same})" if B > 1 else f"--block_size={block_size // 2}, or a smaller model"
        return f"at batch_size={B}: try {less}"


def make_plan(cfg: TrainConfig, world: int, epoch_tokens: int, step: int = 0, samples: int = 0) -> Plan:
    """step, samples: what a resumed run has done and read, perhaps in steps of another size."""
    if cfg.batch_size == "auto":
        raise UserError("batch_size=auto is for train.py and bench/plan.py: give a number here")
    T, read = cfg.block_size, samples * cfg.block_size
    B = min(cfg.batch_size, max(1, round(cfg.batch_tokens / (T * world))))  # no more than one step needs
    accum = max(1, round(cfg.batch_tokens / (B * T * world)))
    step_tokens = accum * B * T * world
    limits = [cfg.max_steps] if cfg.max_steps else []
    tokens = [math.ceil(min(cfg.max_epochs * epoch_tokens, 2**62)), cfg.max_tokens]
    limits += [step + (n - read + step_tokens // 2) // step_tokens for n in tokens if n]  # the nearest whole step
    steps = max(min(limits), step, 1)
    return Plan(B, accum, step_tokens, epoch_tokens, steps, step, read)


def even_batch(most: int, cfg: TrainConfig, world: int) -> int:
    """The batch_size above half of `most`, up to it, whose multiple comes nearest to batch_tokens; of equals the largest."""
    sequences = max(1, round(cfg.batch_tokens / (cfg.block_size * world)))  # of a rank in a step
    most = max(1, min(most, sequences))
    return min(range(most, most // 2, -1), key=lambda B: abs(B * round(sequences / B) - sequences))


def lr_at(step: int, steps: int, cfg: TrainConfig) -> float:
    """The learning rate of step 0 ... steps - 1.

    cosine: SGDR, arXiv 1608.03983, eq. 5, one cycle. wsd: MiniCPM, arXiv 2404.06395, section 4.
    """
    warmup = cfg.warmup_steps or math.ceil(cfg.warmup_ratio * steps)
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    if cfg.schedule == "constant":
        return cfg.lr
    begin = max(warmup, steps - math.ceil(cfg.decay_ratio * steps)) if cfg.schedule == "wsd" else warmup
    t = max(0, step - begin) / max(1, steps - 1 - begin)  # 0 ... 1 over the decay; the last step is at min_lr_ratio
    share = (1 + math.cos(math.pi * t)) / 2 if cfg.schedule == "cosine" else 1 - t
    return cfg.lr * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * share)


# ---------------------------------------------------------------------------------------------------------------------
# Model


def model_config(cfg: TrainConfig, vocab_size: int) -> GPTConfig:
    shared = {f.name: getattr(cfg, f.name) for f in fields(GPTConfig) if f.name != "vocab_size"}
    switches = {k: PRESETS[cfg.preset][k] for k, v in shared.items() if v == "preset"}
    try:
        return GPTConfig(vocab_size=vocab_size, **(shared | switches))
    except ValueError as e:
        raise UserError(str(e)) from None


def wants_compile(cfg: TrainConfig, kind: str, flops: float) -> bool:
    """flops: of the run. On a CPU 5e14 take ten minutes or more; to compile takes half a minute."""
    return cfg.compile is True or (cfg.compile == "auto" and (kind == "cuda" or (kind == "cpu" and flops > 5e14)))


def fit_batch(cfg: TrainConfig, model: GPT, loader: Loader, machine: Machine, compiled: bool, most: int | None) -> int:
    """batch_size=auto: what training/memory.py predicts to fit, tried out, and less where that runs out of memory after all.

    most: what a resumed run had, which it keeps if it can.
    """
    step = Step(1, cfg.block_size, 2, machine.dtype, compiled, machine.device.type, machine.world)
    predicted = auto_batch(model, step, capacity(machine.device))
    most = min(predicted, most or predicted)
    while True:
        B = even_batch(least(most, machine), cfg, machine.world)
        fits = has_room(model, loader.rows(loader.starts(0, B)), machine, compiled)
        model.zero_grad(set_to_none=True)
        gc.collect()
        if machine.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()  # what is logged is the run's peak, not a trial's
        fits = bool(least(fits, machine))
        if compiled and not (fits and machine.world == 1):
            torch.compiler.reset()  # what was compiled without DDP would be taken with it, and not be split at its buckets
        if fits:
            machine.say(f"batch_size=auto: {B}, tried out (at most {predicted} here)")
            return B
        if B == 1:
            half = f"--block_size={cfg.block_size // 2}"
            raise UserError(f"out of memory at batch_size=1: try {half}, or a smaller model")
        most = B * 7 // 8


def has_room(model: GPT, rows: np.ndarray, machine: Machine, compiled: bool) -> bool:
    """Try two micro-steps, the second onto the gradients of the first, beside tensors in place of the optimizer's moments and
    of DDP's buckets.
    """
    try:
        copies = 2 + 2 * (machine.world > 1)
        _beside = [torch.empty_like(p) for p in model.parameters() for _ in range(copies)]
        x, y = to_device(rows, machine.device)
        fast = (try_compile(model, x, y, machine)[0] if compiled else None) or model
        for _ in range(2):
            with machine.autocast():
                loss = fast(x, y)
            loss.backward()
        machine.synchronize()
        return True
    except (RuntimeError, MemoryError) as e:
        if not out_of_memory(e):
            raise
        return False


def try_compile(
    model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, machine: Machine
) -> tuple[Callable | None, str]:
    """(the compiled model, tried out on one batch, or None; why it failed). It waits for no other rank."""
    try:
        fast = torch.compile(model, dynamic=False)
        # Without DDP's sums of gradients: a rank on which this fails would never come to them.
        with getattr(model, "no_sync", nullcontext)(), machine.autocast():
            fast(x, y).backward()
        machine.synchronize()
        return fast, ""
    except Exception as e:  # a missing C++ compiler, an old GPU: anything that eager mode does without
        if out_of_memory(e):
            raise
        return None, f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
    finally:
        model.zero_grad(set_to_none=True)


def compile_together(
    model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, machine: Machine, advice: str
) -> Callable:
    """torch.compile on every rank, or on none: one that went on without it would sum its gradients in other pieces,
    for which the others would wait for ever. advice: what to do when memory does not suffice.
    """
    started = time.perf_counter()

    def work() -> tuple[Callable | None, str]:
        with memory_advice(advice):
            return try_compile(model, x, y, machine)

    fast, failed = machine.together(work)
    reasons = machine.gather(failed)
    if not any(reasons):
        machine.say(f"compiled in {time.perf_counter() - started:.1f} s")
        return fast
    rank = next(rank for rank, reason in enumerate(reasons) if reason)
    where = f" on rank {rank}" if machine.world > 1 else ""
    machine.say(f"warning: torch.compile failed{where}; going on without it, slower ({reasons[rank]})")
    torch.compiler.reset()
    return model


@torch.no_grad()
def evaluate(model: Callable, windows: Windows, tokens: int, B: int, machine: Machine, bar: bool = False) -> float:
    """Mean loss in nats over about `tokens` tokens (0: all) of a val.bin in fixed windows, B at a time, shared out over the ranks."""
    model.eval()  # no dropout
    starts = windows.fixed_starts(tokens)
    total = torch.zeros(2, device=machine.device)  # loss summed over targets, number of targets
    n, turn = len(starts), B * machine.world
    for i in tqdm(range(machine.rank * B, -(-n // turn) * turn, turn), "evaluating", disable=None if bar else True):
        rows = np.stack([windows.row(starts[j % n]) for j in range(i, i + B)])  # every batch full: one shape
        x, y = to_device(rows, machine.device)
        y = y.clone()
        y[max(0, n - i) :] = -1  # windows beyond the last are only padding
        with machine.autocast():
            total[0] += model(x, y, reduction="sum")
        total[1] += (y >= 0).sum()
    model.train()
    loss, count = all_sum(total).tolist()
    return loss / count


# ---------------------------------------------------------------------------------------------------------------------
# Before the loop: what it trains, and on what; and whether all ranks mean the same


def load(
    cfg: TrainConfig, machine: Machine, source: Source
) -> tuple[list[DataSet], Loader, list[Windows], SentencePiece | Tiktoken, GPT, Earlier | None]:
    """(data sets, loader, windows of each val.bin, tokenizer, model on the device, what the checkpoint says of its run).

    The tokenizer is opened now: the folder may be gone when a checkpoint or the texts of a bad step need it.
    """
    sets = open_datasets(cfg.dataset, cfg.data_dir)
    loader = train_loader(sets, cfg.block_size, cfg.seed)
    val_windows = [data.windows("val", cfg.block_size) for data in sets]
    wanted = model_config(cfg, sets[0].meta["vocab_size"])
    earlier = None
    with memory_advice("for the weights alone: make n_layer or n_embd smaller"):
        if source.path is None:
            model = GPT(wanted)
            torch.manual_seed(cfg.seed)  # the same weights on every rank
            model.init_weights(cfg.init)
        elif source.resume:
            if machine.local_rank == 0 and not machine.is_main:
                check_copy(source.path)  # which rank 0 has done for its own computer
            earlier = read_training(source.path)
            # A run that began with somebody's model has that shape, whatever its settings say. They must only say
            # what they said then.
            known = {k: v for k, v in earlier.settings.items() if hasattr(cfg, k)}
            before = model_config(replace(cfg, **known), wanted.vocab_size)
            model = load_model(source.path, cfg.dropout, wanted, before)
            check_data(earlier, sets, source.path)
        else:
            model = load_model(source.path, cfg.dropout, wanted)
            check_tokenizer(source.path, sets, machine.say)
            if found := unverified(source.path):
                machine.say(f"note: {source.path}: {found}")
        model.to(machine.device)
    return sets, loader, val_windows, load_tokenizer(sets[0].folder), model, earlier


def check_ranks(machine: Machine, facts: dict[str, Any]) -> None:
    """UserError, on all ranks, if a fact is another one on one of them."""
    found = machine.gather(facts)
    for rank, theirs in enumerate(found):
        for what, value in theirs.items():
            if value != found[0].get(what):
                both = f"{what} is {value} on rank {rank}, {found[0].get(what)} on rank 0"
                raise UserError(f"the ranks differ: {both}: all must see the same files and get the same settings")


def what_ranks_share(cfg: TrainConfig, machine: Machine, sets: list[DataSet], source: Source, state: dict) -> dict:
    """What must be alike on all ranks, for they would train on without noticing."""
    local = "out_dir data_dir init_from device progress wandb wandb_project peak_tflops".split()  # paths may differ
    facts = {name: value for name, value in asdict(cfg).items() if name not in local}
    facts |= {"torch": torch.__version__, "dtype in use": str(machine.dtype), "kind of device": machine.device.type}
    facts |= {"first step": state["step"], "first sample": state["samples"], "resuming": source.resume}
    if source.path is not None:
        manifest = source.path / MANIFEST
        facts["checkpoint"] = file_sha256(manifest)[:12] if manifest.exists() else "without a manifest"
    for data in sets:
        facts |= {f"{data.name}/{split}.bin": s["sha256"][:12] for split, s in data.meta["splits"].items()}
    return facts


def all_finite(model: torch.nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in model.parameters())


# ---------------------------------------------------------------------------------------------------------------------


def main() -> None:
    cfg = parse(TrainConfig, doc=__doc__)
    machine = start(cfg)
    folder = Path(cfg.out_dir) / cfg.run_name
    with ExitStack() as held:
        # What becomes of the folder is decided by one process, which nobody disturbs until the run is over.
        lock = machine.together(lambda: held.enter_context(run_folder(folder)) if machine.is_main else None)
        train(cfg, machine, folder, lock)


def train(cfg: TrainConfig, machine: Machine, folder: Path, lock: Lock | None) -> None:
    # data and model: new, resumed, or taken from another run
    source = machine.decide(lambda: find_source(cfg, folder, machine.say))
    loaded = machine.together(lambda: load(cfg, machine, source))
    sets, loader, val_windows, tokenizer, model, earlier = loaded
    epoch_tokens = sum(windows.n_windows for windows in loader.splits) * cfg.block_size

    # state: all that a checkpoint adds to model, optimizer and scaler
    state = {"step": 0, "samples": 0, "best_step": -1, "best_val_loss": math.inf, "losses": [], "bad_steps": 0}
    state |= {"bad_in_a_row": 0, "wandb_id": "", "data_files": {}}
    saved_optimizer = saved_scaler = None
    if earlier:
        state = earlier.training
        saved_optimizer, saved_scaler = state.pop("optimizer"), state.pop("scaler")
        if state["bad_in_a_row"] >= cfg.max_bad_steps:  # it had given up; what follows may be better
            state["bad_in_a_row"] = 0
    check_ranks(machine, what_ranks_share(cfg, machine, sets, source, state))

    # Each computer reads its own files; the others of its ranks wait.
    verified = machine.together(
        lambda: verify_new(sets, state["data_files"], machine.say) if machine.local_rank == 0 else {}
    )
    state["data_files"] = {}
    for stamps in machine.gather(verified):
        for path, stamp in stamps.items():
            known = state["data_files"].setdefault(path, [])
            known += [stamp] if stamp not in known else []

    # batch: as many sequences at once as asked, or as fit, which changes nothing of what is learned
    flops = model.flops_per_token(cfg.block_size)
    place = (state["step"], state["samples"])
    plan = make_plan(replace(cfg, batch_size=1), machine.world, epoch_tokens, *place)
    compiled = wants_compile(cfg, machine.device.type, flops * plan.tokens_at(plan.steps))
    if cfg.batch_size == "auto":
        most = earlier.settings["batch_size"] if earlier else None
        cfg = replace(cfg, batch_size=fit_batch(cfg, model, loader, machine, compiled, most))
    plan = make_plan(cfg, machine.world, epoch_tokens, *place)

    # optimizer
    groups, betas = model.param_groups(cfg.weight_decay), (cfg.beta1, cfg.beta2)
    fused = machine.device.type in ("cuda", "cpu")  # the one of mps takes found_inf, but does not heed it (torch 2.13)
    optimizer = torch.optim.AdamW(groups, lr=cfg.lr, betas=betas, fused=fused)
    scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.dtype == torch.float16)
    if saved_optimizer:
        # moments from the checkpoint, but betas and weight decay as they are set now
        optimizer.load_state_dict(optimizer.state_dict() | {"state": saved_optimizer["state"]})
    if saved_scaler:  # empty where that run was not in fp16
        scaler.load_state_dict(saved_scaler)

    # say what will happen, then wrap: DDP first and compile second, so that communication overlaps the backward pass
    peak, peak_source = peak_tflops(machine.device, machine.dtype, cfg.peak_tflops)
    peak = peak and peak * machine.world
    machine.say(banner(cfg, sets, machine, plan, model, compiled, peak_source, source.path is None))
    if earlier:
        machine.say(f"resumed from {source.path} at step {state['step']}")
        if changed := settings_changed(earlier, cfg):
            machine.say(f"settings that were changed since: {', '.join(changed)}")
        if plan.steps == state["step"]:
            machine.say("nothing is left to do: to train on, raise max_steps, max_epochs or max_tokens")
    parallel = model
    if dist.is_initialized():
        # rope is a constant: no rank needs to send it at every step (the option's name is new in 2.13)
        names = inspect.signature(DistributedDataParallel.__init__).parameters
        flags = {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}
        on = [machine.local_rank] if machine.device.type == "cuda" else None
        parallel = DistributedDataParallel(model, device_ids=on, gradient_as_bucket_view=True, **flags)
    fast = parallel
    if compiled:
        x, y = to_device(loader.rows(loader.starts(0, plan.batch_size)), machine.device)
        fast = compile_together(parallel, x, y, machine, plan.smaller(cfg.block_size))

    start_step, stopping = state["step"], False
    windows = plan.step_tokens // cfg.block_size  # of all ranks in a step
    machine.decide(lambda: sweep(folder / "ckpt"))
    if not source.resume and (old := machine.decide(lambda: replace_run(folder))):
        machine.say(f"the earlier run's checkpoints are in {old} until this one has a whole one")
    advice = memory_advice(plan.smaller(cfg.block_size))
    reader = closing(read_ahead(loader, state["samples"], plan.batch_size, machine))
    with stop_signals() as signals, advice, reader as batches:
        metrics = machine.together(lambda: Metrics(folder, cfg, machine, plan, sets, tokenizer, state, lock))
        ckpt = folder / "ckpt"
        saver = machine.together(
            lambda: Saver(ckpt, cfg, sets, tokenizer, source.damaged, lock, machine.say, metrics.log_save)
        )
        clock = Clock(machine, start_step)
        for step in range(start_step, plan.steps + 1):  # the extra turn only evaluates and saves
            gave_up = state["bad_in_a_row"] >= cfg.max_bad_steps
            last = step == plan.steps or stopping or gave_up
            if step > start_step and (step == plan.steps or step % cfg.eval_every == 0):
                with clock.paused():
                    before = time.perf_counter()
                    losses = [evaluate(fast, val, cfg.eval_tokens, plan.batch_size, machine) for val in val_windows]
                    loss = metrics.log_eval(step, losses, time.perf_counter() - before)
                if loss < state["best_val_loss"]:
                    state |= {"best_step": step, "best_val_loss": loss}
            due = step % cfg.save_every == 0 or step == state["best_step"]
            # After a bad step the weights are those from before it: good, unless they are what makes the loss bad.
            good = not state["bad_in_a_row"] or (last and all_finite(model))
            if step > start_step and (last or due) and good and machine.is_main:
                with clock.paused():  # for the copy; a thread writes it
                    saver.save(model, optimizer, scaler, state | {"step": step})
            if last:
                break

            # ---- one optimizer step ----
            lr = lr_at(step, plan.steps, cfg)
            for group in optimizer.param_groups:
                group["lr"] = lr
            torch.manual_seed(cfg.seed + 1_000_003 * (step + 1) + machine.rank)  # dropout depends on the step alone
            loss_sum = torch.zeros((), device=machine.device)
            for micro in range(plan.accum):
                with clock.waiting_for_data():
                    x, y = to_device(next(batches), machine.device)
                sync = micro == plan.accum - 1 or parallel is model
                with nullcontext() if sync else parallel.no_sync():  # around the forward too: DDP decides there
                    with machine.autocast():
                        loss = fast(x, y) / plan.accum  # a mean of means over equal sizes is the mean
                    scaler.scale(loss).backward()
                loss_sum += loss.detach()
            scaler.unscale_(optimizer)
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip or math.inf)
            # What all ranks must agree on, in one sum: the loss, and whether one of them was told to stop.
            facts = torch.stack([loss_sum, torch.full_like(loss_sum, float(len(signals) > 0))])
            facts = torch.cat([all_sum(facts) / machine.world, grad_norm[None]])
            facts_on_host = machine.fetch(facts)
            if scaler.is_enabled():
                scaler.step(optimizer)  # skips a step whose gradient is not finite
                scaler.update()  # and then scales less
            elif fused:
                # As the scaler tells the optimizer: the device itself skips the step, and the host need not wait to decide.
                optimizer.found_inf = 1.0 - facts.isfinite().all().float()
                optimizer.step()
            elif all(map(math.isfinite, facts.tolist())):
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            mean_loss, stopping, grad_norm = facts_on_host()  # the one wait of a step: a GPU is busy with the optimizer
            samples = range(state["samples"], state["samples"] + windows)
            state["samples"] = samples.stop

            # ---- everything below only reports ----
            done = step + 1
            finite = metrics.watch(done, mean_loss, grad_norm, scaler, samples)  # the same on every rank
            if step == start_step:
                gc.collect()
                gc.freeze()  # what lives now lives on: the garbage collector need not look at it again and again
            if finite and (done == 1 or done % cfg.log_every == 0 or done == plan.steps):
                metrics.log_step(done, mean_loss, lr, grad_norm, flops, peak, clock)
            elif step == start_step:  # the first step after a resume warms up: it is not timed
                clock.restart(done)
        saver.wait()
        machine.gather(None)  # no rank leaves before the checkpoint is on the disk

    metrics.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    if saver.failed:
        raise UserError(f"{saver.failed}: make room, and --init_from=resume goes on from the one before")
    newest = newest_checkpoint(folder / "ckpt") if machine.is_main else None
    if gave_up:
        bad = f"{state['bad_in_a_row']} steps in a row without a finite loss and gradient, the last at step {step}"
        ways = f"lower lr, or try dtype=float32, or read {folder}/bad_steps/"
        left = f"the newest checkpoint is {newest}" if newest else "no checkpoint was saved"
        raise UserError(f"{bad}: {ways}; {left}")
    if stopping:
        goes_on = f"--init_from=resume goes on from {newest}" if newest else "nothing was saved yet"
        machine.say(f"stopped by a signal after step {step}: {goes_on}")
        sys.exit(128 + (signals[-1] if signals else signal.SIGTERM))  # none: another rank was told to


if __name__ == "__main__":
    run(main, needs_output=False)

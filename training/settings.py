"""The settings of a run: the reference manual. `python train.py --help` prints this list."""

import sys
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from configurator import UserError
from model import INIT, PRESETS, GPTConfig


@dataclass(frozen=True)
class TrainConfig:
    # ---- Run ----
    run_name: str = "run"  # it writes out_dir/run_name/
    out_dir: str = "out"  # where runs live
    init_from: str = "scratch"  # scratch; resume: the run's newest checkpoint; auto: resume if it can; a model's folder: fine-tune it
    overwrite: bool = False  # replace an earlier run of the same name, once the new one has a whole checkpoint
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
        if self.wandb and "wandb" not in sys.modules and find_spec("wandb") is None:
            wrong.append("wandb=true needs the package wandb: pip install wandb")
        return wrong


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

"""All settings of a training run, with their defaults. `python train.py --help` prints this list.

A setting is one line: name, type, default and explanation. --help reads the explanation from the
comment behind the default (configurator.py).
"""

import re
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from configurator import UserError, names_elsewhere
from model import ACTIVATIONS, INIT, PRESETS, GPTConfig
from text.windows import Documents, LossOn, LossPer

# Each setting stands in the class of what it concerns: these classes answer which settings two runs
# must share to train alike, and which may differ from one computer to another.


@dataclass(frozen=True)
class Place:
    """Where a run is, and on what it runs: it learns the same elsewhere, up to rounding."""

    # ---- Run ----
    run_name: str = "run"  # the run writes its files to out_dir/run_name/
    out_dir: str = "out"  # folder of all runs
    init_from: str = "scratch"  # scratch, resume, auto (resume or scratch), or a model to fine-tune
    overwrite: bool = False  # first rename the folder of an earlier run of this name to RUN.old
    data_dir: str = "data"  # folder of all data sets
    device: str = "auto"  # auto: cuda, then mps, then cpu
    peak_tflops: float = 0.0  # of one device, for MFU; 0: datasheet, or on a CPU a measured product
    # loss.png is drawn in any case but off. WANDB_MODE=offline, then `wandb sync`: no network.
    tracker: Literal["none", "wandb", "swanlab", "tensorboard", "off"] = "none"  # off: no loss.png


@dataclass(frozen=True)
class Training:
    """What is trained, and how. Another value makes another model, if only by rounding."""

    # ---- Data: token files that prepare.py wrote ----
    dataset: str = ""  # in data_dir; wiki:0.7,code:0.3 mixes two; none: the one prepared last
    seed: int = 1337  # seed of the initial weights, the data order and dropout
    block_size: int = 1024  # T, tokens in a sequence
    documents: Documents = "stream"  # mask, pack, pad: keep documents apart (docs/data.md)
    loss_per: LossPer = "token"  # what counts as much as each other: a token, or a document
    loss_on: LossOn = "all"  # answers: of conversations, learn only what the assistant says
    # ---- Model ----
    preset: Literal[tuple(PRESETS)] = "gpt2"  # positions, norms, and what says preset: model.py
    n_layer: int = 12  # number of blocks
    n_head: int = 12  # number of query heads
    n_kv_head: int = 0  # number of key/value heads; 0: n_head
    n_embd: int = 768  # width of the residual stream
    d_ff: int = 0  # width inside the MLP; 0: 4 n_embd, with a gate 8/3 n_embd
    mlp: Literal[("preset", *ACTIVATIONS)] = "preset"  # activation; gpt2: gelu, else swiglu
    # With qwen2, queries, keys and values have one, whatever bias is.
    bias: bool | Literal["preset"] = "preset"  # in linear layers and LayerNorm; gpt2: true
    tie_embeddings: bool | Literal["preset"] = "preset"  # lm_head is wte; gpt2: true
    rope_theta: float = 10000.0  # base of the rotation frequencies
    rope_scaling: str = ""  # linear:2 and such, for longer sequences; Llama 3.2: llama3:32,1,4,8192
    dropout: float = 0.0  # 0 for pretraining; a high weight_decay helps more (docs/data.md)
    init: Literal[tuple(INIT)] = "gpt2"  # standard deviations of the first weights: model.py
    # ---- Batch: a step consists of as many micro-steps (accumulation) as batch_tokens needs ----
    batch_size: int | Literal["auto"] = 16  # B, sequences in a device's micro-step; auto: what fits
    batch_tokens: int = 524_288  # tokens per step on all devices together
    # ---- Length: the run ends at the first of these limits; 0 means no limit ----
    max_steps: int = 0  # in steps
    max_epochs: float = 0.0  # in passes over train.bin
    max_tokens: int = 0  # in tokens
    # ---- Optimizer ----
    optimizer: Literal["adamw", "muon", "adafactor"] = "adamw"  # muon: for the blocks' matrices
    lr: float = 6e-4  # highest learning rate; adafactor: a share of the weights, try 0.03
    embed_lr: float = 1.0  # learning rate of the embeddings, as a share of lr
    vector_lr: float = 1.0  # learning rate of norms and biases, as a share of lr
    weight_decay: float = 0.1  # on matrices and embeddings; 1 if the data is read many times
    beta1: float = 0.9  # decay rate of the running mean of the gradient
    beta2: float = 0.95  # decay rate of the running mean of the squared gradient
    momentum: float = 0.95  # muon: the same of its mean; it grows from 0.85 at the beginning
    grad_clip: float = 1.0  # a gradient with a larger norm is scaled down to it; 0: no clipping
    # ---- Schedule of the learning rate: a linear warm-up from 0, then one of these shapes ----
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"  # wsd: decays late
    warmup_ratio: float = 0.01  # length of the warm-up as a share of the run's steps
    decay_ratio: float = 0.2  # wsd: length of the linear decay, as a share of the run's steps
    min_lr_ratio: float = 0.1  # at the last step, as a share of lr; 0: that step changes nothing
    # ---- Precision and speed: the weights are always stored in fp32 ----
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # of the matrix products
    compile: bool | Literal["auto"] = "auto"  # torch.compile; auto: on cuda, and long runs on a CPU
    # ---- Memory: for models that do not fit (docs/cost.md) ----
    recompute: Literal["none", "blocks"] = "none"  # blocks: keep their inputs only, compute twice
    # What the processes share out: the optimizer's state; the gradients too; all: the weights too.
    shard: Literal["none", "optimizer", "gradients", "all"] = "none"  # ZeRO stage 0, 1, 2 or 3


@dataclass(frozen=True)
class Report:
    """What is said and kept of a run. It changes nothing of the training."""

    # ---- Evaluation, samples, checkpoints: every so many steps, and at the end of the run ----
    eval_every: int = 250  # steps between two evaluations
    eval_tokens: int = 1_000_000  # of val.bin, in whole windows, fixed and evenly spread; 0: all
    sample_every: int = 250  # steps between two short texts that the model writes; 0: none
    sample_prompt: str = ""  # beginning of these texts, may be empty; loss_on=answers: a question
    save_every: int = 1000  # steps between two checkpoints
    keep: int = 2  # newest checkpoints to keep, besides the one with the best validation loss
    log_every: int = 10  # steps between two log lines


RANGES = [  # settings, what they must be, and the test of it
    ("block_size n_layer n_head n_embd batch_tokens lr rope_theta", "positive", lambda x: x > 0),
    ("eval_every save_every keep log_every", "positive", lambda x: x > 0),
    ("n_kv_head d_ff max_steps max_epochs max_tokens sample_every", "at least 0", lambda x: x >= 0),
    ("weight_decay grad_clip embed_lr vector_lr", "at least 0", lambda x: x >= 0),
    ("eval_tokens peak_tflops", "at least 0", lambda x: x >= 0),
    ("beta1 beta2 momentum dropout", "at least 0 and below 1", lambda x: 0 <= x < 1),
    ("warmup_ratio decay_ratio min_lr_ratio", "between 0 and 1", lambda x: 0 <= x <= 1),
    ("seed", "at least 0 and below 2^62", lambda x: 0 <= x < 2**62),
]


@dataclass(frozen=True)
class TrainConfig(Report, Training, Place):
    elsewhere = names_elsewhere("training/elsewhere.txt")

    def problems(self) -> list[str]:
        """Return one message for each setting that is out of its range."""
        problems = [
            f"{name} must be {expected}"
            for names, expected, accepts in RANGES
            for name in names.split()
            if not accepts(getattr(self, name))
        ]
        if self.batch_size != "auto" and self.batch_size < 1:
            problems.append("batch_size must be positive")
        plain = self.run_name not in ("", "..") and self.run_name == Path(self.run_name).name
        if not plain or re.search(r"[\x00-\x1f\x7f]", self.run_name):
            problems.append(f"run_name {self.run_name!r} must be a plain folder name")
        if any("\ud800" <= letter <= "\udfff" for letter in self.sample_prompt):
            problems.append(f"sample_prompt {self.sample_prompt!r} must be UTF-8")
        has_end = self.max_steps or self.max_epochs or self.max_tokens
        if not has_end and self.init_from != "resume":  # a resumed run has an end already
            problems.append("the run has no end: name a config, or give max_steps or max_epochs")
        if self.schedule == "wsd" and self.warmup_ratio + self.decay_ratio > 1:
            problems.append("warmup_ratio and decay_ratio must be at most 1 together")
        if self.shard != "none" and self.optimizer == "adafactor":
            problems.append(f"shard={self.shard} goes with adamw or muon")
        if self.tracker not in ("none", "off") and find_spec(self.tracker) is None:
            problems.append(f"tracker={self.tracker} needs: pip install {self.tracker}")
        return problems


PLACE = [field.name for field in fields(Place)]
TRAINING = [field.name for field in fields(Training)]


def model_config(cfg: TrainConfig, vocab_size: int) -> GPTConfig:
    """Return the shape of the model. A setting that says "preset" gets the preset's value.

    Raises UserError if the settings contradict each other.
    """
    names = [field.name for field in fields(GPTConfig) if field.name in TRAINING]
    shape = {name: getattr(cfg, name) for name in names if getattr(cfg, name) != "preset"}
    try:
        return GPTConfig(**PRESETS[cfg.preset] | shape, vocab_size=vocab_size)
    except ValueError as e:
        raise UserError(str(e)) from None

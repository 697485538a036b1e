"""The settings of a training run, with their defaults: `python train.py --help` prints them."""

import re
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal, get_args

from configurator import UserError, metadata_of, note, option
from model import ACTIVATIONS, INIT, PRESETS, GPTConfig
from text.dataset import newest_dataset
from text.windows import Documents, LossOn, LossPer

# What a setting means to a run that is resumed. Without a mark, it may change what the run learns
# from there on, and the change is listed.
START = "start"  # of this start alone: it is not taken from the checkpoint
FREE = "free"  # it changes the model by rounding at most
REPORTS = "reports"  # it changes what is reported and saved; the change is listed
ORDER = "order"  # it changes the order of windows: some are read twice, others never
FIXED = "fixed"  # another value is refused

OptimizerName = Literal["adamw", "muon", "adafactor"]
OPTIMIZERS = get_args(OptimizerName)
SHARDABLE = ("adamw", "muon")  # by `shard`
Shard = Literal["none", "optimizer", "gradients", "all"]
SHARDS = get_args(Shard)  # by the stage of ZeRO


@dataclass(frozen=True)
class TrainConfig:
    # A setting -> its names in nanoGPT, MiniMind and transformers' Trainer.
    ELSEWHERE: ClassVar = {
        "lr": ["learning_rate"],
        "min_lr_ratio, a fraction of lr": ["min_lr"],
        "warmup_ratio, a fraction of the run": ["warmup_iters", "warmup_steps"],
        "schedule": ["lr_scheduler_type", "decay_lr"],
        "max_steps": ["max_iters", "iters"],
        "max_steps, which the schedule spans": ["lr_decay_iters"],
        "max_epochs": ["epochs", "num_train_epochs"],
        "batch_size": ["per_device_train_batch_size"],
        "batch_tokens, the tokens of a step on all GPUs": [
            "gradient_accumulation_steps",
            "accumulation_steps",
        ],
        "block_size": ["max_seq_len", "max_length"],
        "n_embd": ["hidden_size", "dim"],
        "n_layer": ["num_hidden_layers"],
        "n_head": ["num_attention_heads"],
        "n_kv_head": ["num_key_value_heads"],
        "d_ff": ["intermediate_size"],
        "optimizer": ["optim"],
        "grad_clip": ["max_grad_norm"],
        "eval_every": ["eval_interval", "eval_steps"],
        "eval_tokens, in tokens": ["eval_iters"],
        "sample.py --eval": ["eval_only"],
        "save_every": ["save_interval", "save_steps"],
        "log_every": ["log_interval", "logging_steps"],
        "dtype": ["bf16", "fp16", "precision"],
        "recompute=blocks": ["gradient_checkpointing"],
        "tracker=wandb": ["wandb_log", "use_wandb", "report_to", "wandb_project"],
        "run_name": ["wandb_run_name"],
        "run_name, in out_dir": ["output_dir", "save_dir"],
        "init_from": ["from_weight", "model_name_or_path"],
        "resume": ["from_resume", "resume_from_checkpoint"],
        "dataset, after python prepare.py --input FILE": ["data_path"],
        "chosen automatically": ["flash_attn", "backend"],
        "part of --preset": ["pos", "norm", "norm_eps", "qk_norm", "qkv_bias"],
        "not possible: no mixture of experts": ["use_moe", "num_experts", "n_routed_experts"],
        "not needed": ["always_save_checkpoint", "num_workers"],
    }
    # A setting -> the one that it suits. That of a config file is dropped if the command line gives
    # another value for the latter: the prompt of one data set says nothing to a model of another.
    SUITS: ClassVar = {"sample_prompt": "dataset"}
    # A setting and its value -> the settings that they are short for.
    SHORT: ClassVar = {
        ("init_from", "resume"): {"resume": "yes"},
        ("init_from", "auto"): {"resume": "auto"},
        ("init_from", "scratch"): {"init_from": "scratch", "resume": "no"},
    }

    run_name: str = option(
        "run",
        "name of the run, which writes its files to out_dir/run_name/",
        group="Run",
        resume=FREE,
    )
    out_dir: str = option("out", "folder of all runs", resume=START)
    init_from: str = option(
        "scratch",
        "scratch: random weights; or a model folder to fine-tune. resume and auto are short for "
        "--resume=yes and --resume=auto",
        resume=START,
    )
    resume: Literal["no", "auto", "yes"] = option(
        "no",
        "yes: continue from the newest checkpoint of this run; auto: start the run if it has none",
        resume=START,
    )
    overwrite: bool = option(
        False, "rename an existing run of this name to RUN.old before the start", resume=START
    )
    switch_data: bool = option(
        False,
        "let a resumed run switch to another dataset, read from its start (docs/resume.md)",
        resume=START,
    )
    data_dir: str = option("data", "folder of all data sets", resume=FREE)
    device: str = option("auto", "auto: cuda, then mps, then cpu", resume=FREE)
    peak_tflops: float = option(
        0.0,
        "peak speed of one device, for MFU; 0: from the datasheet of a GPU, or measured on a CPU",
        minimum=0,
        resume=FREE,
    )
    # WANDB_MODE=offline, then `wandb sync`: for computers without a network.
    tracker: Literal["none", "wandb", "swanlab", "tensorboard", "off"] = option(
        "none",
        "also send the metrics to this service; off: do not draw loss.png either",
        resume=FREE,
    )

    dataset: str = option(
        "", "data set in data_dir; wiki:0.7,code:0.3 mixes two; default: the newest", group="Data"
    )
    seed: int = option(
        1337,
        "seed of the initial weights, the data order and dropout",
        minimum=0,
        below=2**62,
        resume=ORDER,
    )
    block_size: int = option(1024, "T, tokens in a sequence", above=0, resume=FIXED)
    documents: Documents = option(
        "stream", "mask, pack and pad keep documents apart (docs/data.md)", resume=ORDER
    )
    loss_per: LossPer = option("token", "weight the loss per token or per document")
    loss_on: LossOn = option(
        "all", "answers: train only on the answers of the assistant in conversations", resume=FIXED
    )

    preset: str = option(
        "gpt2",
        "architecture; sets every option below whose value is preset (model.py)",
        choices=tuple(PRESETS),
        group="Model",
    )
    n_layer: int = option(12, "number of blocks", above=0, maximum=1000, resume=FIXED)
    n_head: int = option(12, "number of query heads", above=0, resume=FIXED)
    n_kv_head: int = option(0, "number of key/value heads; 0: n_head", minimum=0, resume=FIXED)
    n_embd: int = option(768, "width of the residual stream", above=0, resume=FIXED)
    d_ff: int = option(
        0, "width inside the MLP; 0: 4 n_embd, with a gate 8/3 n_embd", minimum=0, resume=FIXED
    )
    mlp: str = option(
        "preset",
        "activation of the MLP; preset: gelu for gpt2, else swiglu",
        choices=("preset", *ACTIVATIONS),
        resume=FIXED,
    )
    # With qwen2, queries, keys and values have a bias in any case.
    bias: bool | Literal["preset"] = option(
        "preset", "biases in linear layers and LayerNorm; preset: true for gpt2", resume=FIXED
    )
    tie_embeddings: bool | Literal["preset"] = option(
        "preset", "lm_head shares the weights of wte; preset: true for gpt2", resume=FIXED
    )
    rope_theta: float = option(10000.0, "base of the rotation frequencies", above=0, resume=FIXED)
    rope_scaling: str = option(
        "", "RoPE scaling for longer sequences: linear:2, or llama3:32,1,4,8192", resume=FIXED
    )
    dropout: float = option(
        0.0,
        "dropout probability; on repeated data a high weight_decay helps more (docs/data.md)",
        minimum=0,
        below=1,
    )
    init: str = option(
        "gpt2", "initialization scheme of the weights (model.py)", choices=tuple(INIT)
    )

    batch_size: int | Literal["auto"] = option(
        16,
        "B, sequences per micro-step on each device; auto: what fits into memory",
        minimum=1,
        group="Batch",
    )
    batch_tokens: int = option(
        524_288, "tokens per step on all devices; gradient accumulation follows from it", above=0
    )

    max_steps: int = option(
        0,
        "number of steps",
        minimum=0,
        group="Length: the first of these limits ends the run; 0: no limit",
    )
    max_epochs: float = option(0.0, "number of passes over train.bin", minimum=0)
    max_tokens: int = option(0, "number of tokens", minimum=0)

    optimizer: OptimizerName = option(
        "adamw",
        "muon: Muon for the matrices of the blocks, AdamW for the rest",
        group="Optimizer",
        resume=FIXED,
    )
    lr: float = option(
        6e-4,
        "peak learning rate; adafactor: relative to the scale of the weights, try 0.03",
        above=0,
    )
    embed_lr: float = option(1.0, "learning rate of the embeddings, relative to lr", minimum=0)
    vector_lr: float = option(1.0, "learning rate of norms and biases, relative to lr", minimum=0)
    weight_decay: float = option(
        0.1,
        "weight decay of matrices and embeddings; try 1 if the data is read many times",
        minimum=0,
    )
    beta1: float = option(0.9, "decay rate of the running mean of the gradient", minimum=0, below=1)
    beta2: float = option(
        0.95, "decay rate of the running mean of the squared gradient", minimum=0, below=1
    )
    momentum: float = option(
        0.95,
        "muon: decay rate of the running mean of the gradient; it grows from 0.85 at the start",
        minimum=0,
        below=1,
    )
    grad_clip: float = option(1.0, "maximum norm of the gradient; 0: no clipping", minimum=0)

    schedule: Literal["cosine", "linear", "wsd", "constant"] = option(
        "cosine",
        "learning rate after a linear warm-up; wsd: constant, then a linear decay",
        group="Schedule",
    )
    warmup_ratio: float = option(
        0.01, "warm-up, as a fraction of the run's steps", minimum=0, maximum=1
    )
    decay_ratio: float = option(
        0.2, "wsd: decay, as a fraction of the run's steps", minimum=0, maximum=1
    )
    min_lr_ratio: float = option(
        0.1, "learning rate of the last step, relative to lr", minimum=0, maximum=1
    )

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = option(
        "auto",
        "dtype of matrix products under autocast; the weights stay in fp32",
        group="Precision and speed",
    )
    compile: bool | Literal["auto"] = option(
        "auto", "torch.compile; auto: on CUDA, and for long runs on a CPU"
    )

    recompute: Literal["none", "blocks"] = option(
        "none",
        "blocks: activation checkpointing, which keeps only the input of each block",
        group="Memory",
    )
    shard: Shard = option(
        "none",
        "what is sharded over the ranks: the optimizer's state (ZeRO 1), gradients too (ZeRO 2), "
        "or all: weights too (ZeRO 3)",
    )

    eval_every: int = option(
        250,
        "steps between two evaluations",
        above=0,
        group="Evaluation, samples, checkpoints",
        resume=REPORTS,
    )
    eval_tokens: int = option(
        1_000_000,
        "tokens of val.bin per evaluation, evenly spread; 0: all",
        minimum=0,
        resume=REPORTS,
    )
    sample_every: int = option(
        250, "steps between two samples of the model; 0: none", minimum=0, resume=REPORTS
    )
    sample_prompt: str = option(
        "auto",
        "prompt of the samples, or a question (loss_on=answers); auto: words of val.bin",
        resume=REPORTS,
    )
    save_every: int = option(1000, "steps between two checkpoints", above=0, resume=REPORTS)
    keep: int = option(
        2, "number of newest checkpoints to keep, besides the best one", above=0, resume=REPORTS
    )
    log_every: int = option(10, "steps between two log lines", above=0, resume=REPORTS)

    def problems(self) -> list[str]:
        """Return one message for each contradiction between the settings."""
        problems = []
        plain = self.run_name not in ("", "..") and self.run_name == Path(self.run_name).name
        if not plain or re.search(r"[\x00-\x1f\x7f]", self.run_name):
            problems.append(f"run_name {self.run_name!r} must be a plain folder name")
        if any("\ud800" <= letter <= "\udfff" for letter in self.sample_prompt):
            problems.append(f"sample_prompt {self.sample_prompt!r} must be UTF-8")
        has_end = self.max_steps or self.max_epochs or self.max_tokens
        if not has_end and self.resume != "yes":  # a resumed run has an end already
            problems.append("the run has no end: name a config, or give max_steps or max_epochs")
        if self.schedule == "wsd" and self.warmup_ratio + self.decay_ratio > 1:
            problems.append("warmup_ratio + decay_ratio must be at most 1")
        if self.shard != "none" and self.optimizer not in SHARDABLE:
            problems.append(f"shard={self.shard} needs optimizer {' or '.join(SHARDABLE)}")
        if self.tracker not in ("none", "off") and find_spec(self.tracker) is None:
            problems.append(f"tracker={self.tracker} needs: pip install {self.tracker}")
        return problems


def on_resume(*meanings: str) -> list[str]:
    """Return the names of the settings with one of these meanings to a resumed run."""
    names = [field.name for field in fields(TrainConfig)]
    return [name for name in names if metadata_of(TrainConfig, name)["resume"] in meanings]


TRAINING = on_resume("", ORDER, FIXED)  # they decide which model a run trains


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


def extend_context(c: GPTConfig, cfg: TrainConfig) -> GPTConfig:
    """Return the shape of a model, extended to cfg.block_size and cfg.rope_scaling.

    Raises UserError if the model cannot be extended.
    """
    if c.pos == "learned" and cfg.block_size > c.block_size:
        learned = f"the model has learned positions for {c.block_size} tokens only"
        raise UserError(f"block_size={cfg.block_size}: {learned}: lower it, or use RoPE")
    length = max(c.block_size, cfg.block_size)
    try:
        return replace(c, block_size=length, rope_scaling=cfg.rope_scaling or c.rope_scaling)
    except ValueError as e:
        raise UserError(str(e)) from None


def with_data(cfg: TrainConfig) -> TrainConfig:
    """Return the settings; if they name no data set, with the one that was prepared last."""
    if cfg.dataset:
        return cfg
    name = newest_dataset(cfg.data_dir)
    note(f"dataset={name} is used, the newest in {cfg.data_dir}/")
    return replace(cfg, dataset=name)

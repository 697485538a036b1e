"""All settings of a training run, with their defaults. `python train.py --help` prints this list.

A setting is one line: name, type, default and explanation. --help reads the explanation from the
comment behind the default (configurator.py).
"""

from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from configurator import UserError, note
from model import ACTIVATIONS, INIT, PRESETS, GPTConfig
from text.dataset import newest_dataset
from text.windows import Documents, LossPer

# What "here it is ..." goes on with -> what other trainers call it, for those who try that name.
ELSEWHERE = {
    "init_from": "model_name_or_path from_weight base_model from_pretrained pretrained",
    "init_from=resume": "resume resume_from_checkpoint from_resume resume_from",
    "overwrite": "overwrite_output_dir",
    "run_name": "wandb_run_name experiment_name exp_name",
    "run_name, in out_dir": "output_dir save_dir",
    "python prepare.py --input FILE --name NAME, then --dataset=NAME": "data_path train_file input"
    " train_files data_files dataset_name",
    "data_dir": "dataset_dir",
    "prepare.py --tokenizer": "tokenizer tokenizer_name tokenizer_path",
    "prepare.py --vocab_size": "vocab_size",
    "prepare.py --val_fraction": "val_split val_size val_set_size test_size",
    "block_size": "cutoff_len max_length max_seq_len max_seq_length seq_len seq_length n_ctx"
    " sequence_len sequence_length context_length model_max_length max_position_embeddings",
    "documents=pack, or mask": "packing neat_packing sample_packing",
    "n_embd": "hidden_size dim model_dim d_model hidden_dim",
    "n_layer": "num_hidden_layers num_layers depth",
    "n_head": "num_attention_heads num_heads",
    "n_kv_head": "num_key_value_heads",
    "d_ff": "intermediate_size",
    "batch_size": "per_device_train_batch_size per_device_eval_batch_size device_batch_size"
    " micro_batch_size local_batch_size",
    "batch_tokens = batch_size x block_size x accumulation x GPUs": "gradient_accumulation_steps"
    " gradient_accumulation grad_accum_steps grad_accum accumulation_steps total_batch_size"
    " global_batch_size",
    "max_steps": "max_iters num_iterations steps iters max_train_steps train_iters total_steps",
    "max_steps, which the schedule spans": "lr_decay_iters",
    "max_epochs": "num_train_epochs num_epochs epochs",
    "max_tokens": "total_tokens",
    "lr": "learning_rate max_lr",
    "min_lr_ratio, a share of lr": "min_lr",
    "schedule": "lr_scheduler_type lr_scheduler",
    "schedule=constant, for an lr that does not decay": "decay_lr",
    "warmup_steps": "warmup_iters lr_warmup_steps num_warmup_steps",
    "optimizer": "optim",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "grad_clip": "max_grad_norm clip_grad max_norm gradient_clipping gradient_clip_val",
    "average, a share of the run": "ema use_ema ema_decay",
    "eval_every": "eval_steps eval_interval eval_strategy evaluation_strategy val_check_interval",
    "eval_tokens, in tokens": "eval_iters eval_max_iters",
    "sample.py --eval": "eval_only do_eval",
    "save_every": "save_steps save_interval checkpoint_interval",
    "keep": "save_total_limit",
    "log_every": "logging_steps log_interval log_freq",
    "dtype": "mixed_precision precision amp torch_dtype",
    "dtype=bfloat16": "bf16",
    "dtype=float16": "fp16",
    "recompute=blocks": "gradient_checkpointing use_gradient_checkpointing activation_checkpointing"
    " activation_checkpoint_mode",
    "shard (optimizer, gradients, all: ZeRO 1, 2, 3)": "deepspeed fsdp fsdp_config zero_stage",
    "torchrun --nproc_per_node=N train.py, for N GPUs": "nproc_per_node devices num_gpus gpus"
    " world_size backend",
    "timeout_minutes": "ddp_timeout",
    "tracker=wandb": "wandb use_wandb wandb_log",
    "tracker=tensorboard": "tensorboard",
    "tracker": "report_to logger_name",
    "tracker, whose project is in WANDB_PROJECT": "wandb_project",
    "chosen automatically": "flash_attn flash_attention attn_implementation tf32",
    "not needed": "do_train dataloader_num_workers num_workers always_save_checkpoint",
    "not available": "lora lora_rank finetuning_type quantization_bit load_in_8bit load_in_4bit"
    " use_moe tensor_parallel_degree template stage",
}


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
    timeout_minutes: float = 30.0  # ranks that wait longer for another one in a step end the run
    peak_tflops: float = 0.0  # of one device, for MFU; 0: datasheet, or on a CPU a measured product
    follow: bool = True  # start follow.py beside the run: it draws loss.png, and feeds the tracker
    tracker: Literal["none", "wandb", "swanlab", "tensorboard"] = "none"  # gets the metrics too


@dataclass(frozen=True)
class Training:
    """What is trained, and how. Another value makes another model, if only by rounding."""

    # ---- Data: token files that prepare.py wrote ----
    dataset: str = ""  # in data_dir; wiki:0.7,code:0.3 mixes two; none: the one prepared last
    seed: int = 1337  # seed of the initial weights, the data order and dropout
    block_size: int = 1024  # T, tokens in a sequence
    documents: Documents = "stream"  # mask, pack: keep documents apart in a window (docs/data.md)
    loss_per: LossPer = "token"  # what counts as much as each other: a token, or a document
    # ---- Model ----
    preset: Literal["gpt2", "llama", "qwen3"] = "gpt2"  # sets the settings below that say preset
    n_layer: int = 12  # number of blocks
    n_head: int = 12  # number of query heads
    n_kv_head: int = 0  # number of key/value heads; 0: n_head
    n_embd: int = 768  # width of the residual stream
    head_dim: int = 0  # width of a head; 0: n_embd / n_head
    d_ff: int = 0  # width inside the MLP; 0: 4 n_embd, for swiglu 8/3 n_embd
    pos: Literal["preset", "learned", "rope"] = "preset"  # positions; gpt2: learned, else rope
    norm: Literal["preset", "layernorm", "rmsnorm"] = "preset"  # gpt2 has layernorm
    mlp: Literal[("preset", *ACTIVATIONS)] = "preset"  # activation; gpt2: gelu, else swiglu
    bias: bool | Literal["preset"] = "preset"  # in linear layers and LayerNorm; gpt2: true
    qkv_bias: bool = False  # biases in queries, keys and values, as Qwen2 has them
    qk_norm: bool | Literal["preset"] = "preset"  # RMSNorm on queries and keys; qwen3: true
    tie_embeddings: bool | Literal["preset"] = "preset"  # lm_head is wte; gpt2: true
    rope_theta: float = 10000.0  # base of the rotation frequencies
    rope_scaling: str = ""  # linear:2 and such, for longer sequences; Llama 3.2: llama3:32,1,4,8192
    dropout: float = 0.0  # 0 for pretraining; 0.1 or more if the data is read many times
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
    weight_decay: float = 0.1  # on matrices and embeddings, not on biases and norms
    beta1: float = 0.9  # decay rate of the running mean of the gradient
    beta2: float = 0.95  # decay rate of the running mean of the squared gradient
    momentum: float = 0.95  # muon: the same of its mean; it grows from 0.85 at the beginning
    grad_clip: float = 1.0  # a gradient with a larger norm is scaled down to it; 0: no clipping
    max_bad_steps: int = 10  # skip steps with NaN or infinity; end the run after so many in a row
    # ---- Schedule of the learning rate: a linear warm-up from 0, then one of these shapes ----
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"  # wsd: decays late
    warmup_steps: int = 0  # length of the warm-up in steps; 0: warmup_ratio decides
    warmup_ratio: float = 0.01  # length of the warm-up as a share of the run's steps
    decay_ratio: float = 0.2  # wsd: length of the linear decay, as a share of the run's steps
    min_lr_ratio: float = 0.1  # at the last step, as a share of lr; 0: that step changes nothing
    # ---- Averaging: a second model, evaluated and saved beside the one that is trained ----
    average: float = 0.0  # keep a running mean of the weights over this share of the run; 0: none
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
    eval_tokens: int = 1_000_000  # tokens of val.bin, in fixed, evenly spread windows; 0: all
    eval_train: bool = True  # also on as many windows of train.bin: takes twice as long
    sample_every: int = 250  # steps between two short texts that the model writes; 0: none
    sample_prompt: str = ""  # the text that it continues; empty: it begins a new document
    save_every: int = 1000  # steps between two checkpoints
    keep: int = 2  # newest checkpoints to keep, besides the one with the best validation loss
    log_every: int = 10  # steps between two log lines


@dataclass(frozen=True)
class TrainConfig(Report, Training, Place):
    elsewhere = ELSEWHERE

    def problems(self) -> list[str]:
        """Return one message for each setting that is out of its range."""
        positive = "block_size n_layer n_head n_embd batch_tokens lr rope_theta"
        positive += " eval_every save_every keep log_every max_bad_steps"
        not_negative = "n_kv_head head_dim d_ff max_steps max_epochs max_tokens weight_decay"
        not_negative += " grad_clip warmup_steps eval_tokens peak_tflops seed"
        not_negative += " embed_lr vector_lr sample_every"
        shares = "warmup_ratio decay_ratio min_lr_ratio average"
        rates = "beta1 beta2 momentum dropout"

        def values(names: str) -> list[tuple[str, float]]:
            return [(name, getattr(self, name)) for name in names.split()]

        problems = [f"{k} must be positive" for k, v in values(positive) if not v > 0]
        problems += [f"{k} must not be negative" for k, v in values(not_negative) if not v >= 0]
        problems += [f"{k} must be between 0 and 1" for k, v in values(shares) if not 0 <= v <= 1]
        problems += [
            f"{k} must be at least 0 and below 1" for k, v in values(rates) if not 0 <= v < 1
        ]
        if self.batch_size != "auto" and self.batch_size < 1:
            problems.append("batch_size must be positive")
        if not 0 < self.timeout_minutes <= 10_080:
            problems.append("timeout_minutes must be above 0, and at most 10080, a week")
        if self.seed >= 2**62:
            problems.append("seed must be below 2^62")
        control = any(ord(letter) < 32 or ord(letter) == 127 for letter in self.run_name)
        plain = self.run_name not in ("", ".", "..") and self.run_name == Path(self.run_name).name
        if control or not plain:
            problems.append(f"run_name {self.run_name!r} must be a plain folder name")
        if any("\ud800" <= letter <= "\udfff" for letter in self.sample_prompt):
            problems.append(f"sample_prompt {self.sample_prompt!r} must be UTF-8")
        has_end = self.max_steps or self.max_epochs or self.max_tokens
        if not has_end and self.init_from != "resume":  # a resumed run has an end already
            problems.append("the run has no end: set max_steps, max_epochs or max_tokens")
        if self.shard != "none" and self.optimizer == "adafactor":
            why = "Adafactor's rows and columns need whole matrices"
            problems.append(f"shard={self.shard} goes with adamw or muon: {why}")
        if self.shard != "none" and self.average:
            problems.append(f"shard={self.shard} keeps no average: set average=0")
        if self.follow and self.tracker != "none" and find_spec(self.tracker) is None:
            missing = f"needs the package {self.tracker}: pip install {self.tracker}"
            problems.append(f"tracker={self.tracker} {missing}")
        return problems


PLACE = [field.name for field in fields(Place)]
TRAINING = [field.name for field in fields(Training)]


def with_data(cfg: TrainConfig) -> TrainConfig:
    """Return the settings; if they name no data set, with the one that was prepared last."""
    if cfg.dataset:
        return cfg
    name = newest_dataset(cfg.data_dir)
    note(f"dataset={name} is taken, which was prepared last")
    return replace(cfg, dataset=name)


def model_config(cfg: TrainConfig, vocab_size: int) -> GPTConfig:
    """Return the shape of the model. A setting that says "preset" gets the preset's value.

    Raises UserError if the settings contradict each other.
    """
    names = [field.name for field in fields(GPTConfig) if field.name in TRAINING]
    shape = {name: getattr(cfg, name) for name in names}
    shape |= {k: PRESETS[cfg.preset][k] for k, value in shape.items() if value == "preset"}
    try:
        return GPTConfig(vocab_size=vocab_size, **shape)
    except ValueError as e:
        raise UserError(str(e)) from None


def wants_compile(cfg: TrainConfig, kind: str, flops: float) -> bool:
    """Return whether to use torch.compile. kind: type of the device; flops: of the whole run.

    With compile=auto, a run on cuda is always compiled. A run on a CPU is compiled if it needs more
    than 5e14 FLOPs, which take ten minutes or more: to compile takes half a minute.
    """
    if cfg.compile == "auto":
        return kind == "cuda" or (kind == "cpu" and flops > 5e14)
    return cfg.compile

"""A run before its first step: rank 0 describes it, and all ranks build it by that description.

describe() reads the disk on rank 0: what the run starts from, and which data it reads. Its result
is sent to all ranks. build() opens the data and the model there, plans the run, prints what it is,
and returns a Job: all that the training loop works with.
"""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from configurator import UserError, row
from hardware.disk import MANIFEST, Lock, file_sha256, json_bytes, sealed
from hardware.machine import Machine, memory_advice
from hardware.peak import peak_tflops
from model import GPT, GPTConfig
from text.dataset import (
    DataSet,
    load_tokenizer,
    newest_dataset,
    open_datasets,
    opened_files,
    tokenizer_files,
    verify_new,
)
from text.hf_tokenizer import read_json, to_hugging_face
from text.tokenizer import SentencePiece, Tiktoken
from text.windows import Loader, Windows, open_windows, train_loader
from training.average import Average
from training.banner import banner, slow_steps
from training.checkpoint import Earlier, Saver, read_training, tidy
from training.huggingface import save_pretrained, unverified
from training.memory import Step
from training.optimizer import make_optimizer
from training.parallel import fit_batch, shares, wrap
from training.plan import Plan, make_plan
from training.progress import Progress
from training.report import Metrics
from training.resume import (
    Origin,
    check_copy,
    check_fits,
    data_hashes,
    find_origin,
    load_model,
    model_to_tune,
    settings_changed,
)
from training.runs import replace_run
from training.settings import TrainConfig, model_config, wants_compile
from training.shards import placed_like


@dataclass(frozen=True)
class Description:
    """What rank 0 has found out about a run."""

    cfg: TrainConfig  # with the name of a data set
    origin: Origin
    hashes: dict[str, str]  # of the data and of the checkpoint, which each computer must have


@dataclass(frozen=True)
class Data:
    """The data of a run."""

    sets: list[DataSet]
    loader: Loader  # windows of every train.bin, mixed
    val_windows: list[Windows]  # one for each val.bin
    val_documents: list[Windows]  # the same tokens, packed: each document begins in its window
    train_windows: list[Windows]  # one for each train.bin, to evaluate on
    tokenizer: SentencePiece | Tiktoken
    files: dict[Path, os.stat_result]  # as opened_files() returns them


@dataclass(frozen=True)
class Job:
    """What the training loop works with."""

    cfg: TrainConfig
    machine: Machine
    plan: Plan
    data: Data
    model: GPT
    forward: Callable  # the model as it runs: compiled, in DDP or Shards, or as it is
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    average: Average | None  # None if the setting average is 0
    progress: Progress
    metrics: Metrics
    saver: Saver
    peak: float | None  # TFLOPS of all devices together; None if unknown


# --------------------------------------------------------------------------------------------------
# Rank 0 describes


def describe(cfg: TrainConfig, folder: Path, say: Callable[[str], None]) -> Description:
    """Return what the run in `folder` starts from and reads. The caller holds the folder's lock."""
    origin = find_origin(cfg, folder, say)
    if not cfg.dataset:
        cfg = replace(cfg, dataset=newest_dataset(cfg.data_dir))
        say(f"note: dataset={cfg.dataset} is taken, which was prepared last")
    sets = open_datasets(cfg.dataset, cfg.data_dir)
    return Description(cfg, origin, hashes_of(sets, origin))


def hashes_of(sets: list[DataSet], origin: Origin) -> dict[str, str]:
    """Return the hash of each .bin by meta.json, and of the manifest of the checkpoint."""
    hashes = data_hashes(sets)
    if origin.path and (origin.path / MANIFEST).exists():
        hashes["the checkpoint's manifest"] = file_sha256(origin.path / MANIFEST)
    return hashes


# --------------------------------------------------------------------------------------------------
# All ranks build


def build(
    described: Description, data_dir: str, machine: Machine, folder: Path, lock: Lock | None
) -> Job:
    """Make all that the training loop needs, and print the lines that describe the run.

    data_dir: of this computer. folder: of the run. lock: of this folder; None above rank 0.
    """
    cfg = replace(described.cfg, data_dir=data_dir)
    origin = described.origin
    say = machine.say
    kinds = {"dtype in use": str(machine.dtype), "kind of device": machine.device.type}
    machine.check_alike(kinds | {"torch": torch.__version__})
    data = machine.together(lambda: open_data(cfg))
    model, earlier = machine.together(lambda: open_model(cfg, machine, described, data.sets))
    progress = Progress()
    if earlier:
        progress = Progress.of_checkpoint(earlier.training, cfg.max_bad_steps)
        cfg = replace(cfg, init_from=earlier.settings.get("init_from", "scratch"))
    verify_data(machine, data.sets, progress)

    cfg, plan, one_step = plan_run(cfg, machine, model, data.loader, progress, earlier)
    peak, source = peak_tflops(machine.device, machine.dtype, cfg.peak_tflops)
    peak_of_all = peak * machine.world if peak else None
    if machine.local_rank == 0 and not machine.is_main:
        print(f"rank {machine.rank} of {machine.world}: rank 0 prints what there is to say")
    say(banner(cfg, data.sets, data.loader, machine, plan, model, one_step))
    say(row("       peak: ", source))
    flops = plan.step_tokens * model.flops_per_token(cfg.block_size)
    if slow := slow_steps(flops, peak_of_all):
        say(slow)
    if earlier:
        say_what_is_resumed(cfg, machine, plan, origin, earlier)
    advice = plan.smaller(cfg.block_size)
    example = data.loader if one_step.compiled else None  # to compile with; None: do not
    forward = wrap(cfg, model, machine, example, plan.batch_size, advice)
    optimizer, scaler = open_optimizer(cfg, machine, model, earlier)
    with memory_advice(advice):
        average = open_average(cfg, machine, model, plan, earlier)

    if cfg.overwrite and not origin.resume:
        moved = machine.decide(lambda: replace_run(folder, lock))
        if moved:
            say(f"the earlier run is now {moved}: delete it when you no longer need it")
    for line in machine.decide(lambda: tidy(folder / "ckpt", progress.step)):
        say(line)
    metrics = machine.together(
        lambda: Metrics(folder, cfg, machine, plan, data.sets, progress, lock)
    )
    files = machine.decide(lambda: files_of_data(data, model.config.block_size))
    writer = partial(write_model, files, data.tokenizer)
    saver = Saver(folder / "ckpt", asdict(cfg), writer, lock, say, metrics.log_save)
    return Job(
        cfg=cfg,
        machine=machine,
        plan=plan,
        data=data,
        model=model,
        forward=forward,
        optimizer=optimizer,
        scaler=scaler,
        average=average,
        progress=progress,
        metrics=metrics,
        saver=saver,
        peak=peak_of_all,
    )


def open_data(cfg: TrainConfig) -> Data:
    sets = open_datasets(cfg.dataset, cfg.data_dir)
    T = cfg.block_size
    return Data(
        sets=sets,
        loader=train_loader(sets, T, cfg.seed, cfg.documents, cfg.loss_per),
        val_windows=[open_windows(data, "val", T) for data in sets],
        val_documents=[open_windows(data, "val", T, documents="pack") for data in sets],
        train_windows=[open_windows(data, "train", T) for data in sets],
        tokenizer=load_tokenizer(sets[0].folder),
        files=opened_files(sets),
    )


@memory_advice("for the weights alone: make n_layer or n_embd smaller")
def open_model(
    cfg: TrainConfig, machine: Machine, described: Description, sets: list[DataSet]
) -> tuple[GPT, Earlier | None]:
    """Return the model on its device, and what the checkpoint of a resumed run says about the run.

    The weights are drawn at random, or come from the run's own checkpoint, or from another model.
    Raises UserError if this computer has other data or another checkpoint than that of rank 0.
    """
    path = described.origin.path
    if described.origin.resume and machine.local_rank == 0 and not machine.is_main:
        check_copy(path)  # on the computer of rank 0, find_origin() has checked it
    hashes = hashes_of(sets, described.origin)
    for name in sorted(hashes.keys() | described.hashes):
        if hashes.get(name) != described.hashes.get(name):
            raise UserError(f"{name} is not the one of rank 0: all must read the same files")
    earlier = None
    if path is None:
        model = GPT(model_config(cfg, sets[0].meta["vocab_size"]))
        torch.manual_seed(cfg.seed)  # the same weights on every rank
        model.init_weights(cfg.init)
    elif described.origin.resume:
        earlier = read_training(path)
        model = load_model(path, cfg)
        check_fits(path, earlier, model.config, cfg, sets)
    else:
        model = model_to_tune(path, cfg, sets, machine.say)
        if warning := unverified(path):
            machine.say(f"note: {path}: {warning}")
    for block in model.blocks:
        block.recompute = cfg.recompute == "blocks"
    # A model that is sharded stays on the CPU, until each device gets its part.
    return model if shares(cfg, machine) else model.to(machine.device), earlier


def verify_data(machine: Machine, sets: list[DataSet], progress: Progress) -> None:
    """Verify the hashes of the data files, except those that the run has already verified.

    On each computer one rank reads the files, and the others wait.
    """

    def verified_here() -> dict[str, list[int]]:
        if machine.local_rank != 0:
            return {}
        return verify_new(sets, progress.data_files, machine.say)

    # A stamp is [size, time of the last change] of a file. Computers may have different copies of a
    # file, so a path has a list of stamps.
    of_all_ranks = machine.gather(machine.together(verified_here))
    progress.data_files = {}
    for stamps in of_all_ranks:
        for path, stamp in stamps.items():
            progress.data_files.setdefault(path, []).append(stamp)


def plan_run(
    cfg: TrainConfig,
    machine: Machine,
    model: GPT,
    loader: Loader,
    progress: Progress,
    earlier: Earlier | None,
) -> tuple[TrainConfig, Plan, Step]:
    """Return the settings with a number for batch_size=auto, the plan, and the size of a step."""
    epoch_tokens = sum(windows.n_windows for windows in loader.splits) * cfg.block_size
    place = (progress.step, progress.samples)
    # compile=auto depends on the length of the run, which is known before batch_size=auto is.
    draft = make_plan(replace(cfg, batch_size=1), machine.world, epoch_tokens, *place)
    flops = model.flops_per_token(cfg.block_size) * draft.tokens_at(draft.steps)
    compiled = wants_compile(cfg, machine.device.type, flops)
    if cfg.batch_size == "auto":
        limit = earlier.settings["batch_size"] if earlier else None
        B = fit_batch(cfg, model, loader, machine, compiled, limit)
        cfg = replace(cfg, batch_size=B)
    plan = make_plan(cfg, machine.world, epoch_tokens, *place)
    shape = (plan.batch_size, cfg.block_size, plan.accum)
    kind = machine.device.type
    return cfg, plan, Step(*shape, machine.dtype, compiled, kind, machine.world).of(cfg)


def open_optimizer(
    cfg: TrainConfig, machine: Machine, model: GPT, earlier: Earlier | None
) -> tuple[torch.optim.Optimizer, torch.amp.GradScaler]:
    """Return the optimizer and the scaler of fp16 gradients, which does nothing in other dtypes.

    If the run is resumed, both continue in the state that the checkpoint holds.
    """
    optimizer = make_optimizer(cfg, machine, model)
    scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.dtype == torch.float16)
    if earlier:
        # Take only the moments from the checkpoint: betas and weight decay may have changed. pop()
        # frees the memory of what has been taken.
        # The file is mapped into memory: each tensor is read when it is copied to its place.
        saved = earlier.training.pop("optimizer")["state"]
        params = [p for group in optimizer.param_groups for p in group["params"]]
        moments = {
            i: {k: placed_like(params[i], x) for k, x in state.items()}
            for i, state in saved.items()
        }
        optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})
        if saved := earlier.training.pop("scaler"):  # empty if that process did not train in fp16
            scaler.load_state_dict(saved)
    return optimizer, scaler


def open_average(
    cfg: TrainConfig, machine: Machine, model: GPT, plan: Plan, earlier: Earlier | None
) -> Average | None:
    """Return the running mean of the weights, or None if the setting average is 0.

    If the run is resumed, it goes on with the mean that the checkpoint holds.
    """
    saved = earlier.training.pop("average", None) if earlier else None
    if not cfg.average:
        return None
    if earlier and not saved:
        machine.say("note: the checkpoint holds no average: it begins with the next step")
    return Average(model, cfg.average * plan.steps, saved)


def say_what_is_resumed(
    cfg: TrainConfig, machine: Machine, plan: Plan, origin: Origin, earlier: Earlier
) -> None:
    machine.say(f"resumed from {origin.path} at step {plan.begun_step}, with its settings")
    if changed := settings_changed(earlier, cfg):
        machine.say(f"changed since the checkpoint: {', '.join(changed)}")
    if plan.steps == plan.begun_step:
        limits = {k: getattr(cfg, k) for k in ("max_steps", "max_epochs", "max_tokens")}
        ends = ", ".join(f"{k}={value:,}" for k, value in limits.items() if value)
        machine.say(f"nothing is left to do: the run ends at {ends}; to train longer, raise that")


# --------------------------------------------------------------------------------------------------
# What a checkpoint holds beside the state of the training


def files_of_data(data: Data, block_size: int) -> dict[str, bytes]:
    """Return name -> content of meta.json and the tokenizer's files, for each checkpoint of a run.

    They are read now, since the data set may be gone when a checkpoint is written. meta.json is
    that of the first data set, with the hashes of all data sets, which a resumed run compares. The
    hashes of the tokenizer's files are left out, since manifest.json has them. If no tokenizer.json
    came with the tokenizer, it is made for sequences of block_size.
    """
    folder, meta = data.sets[0].folder, data.sets[0].meta
    changes = {
        "trained_on": {d.name: d.meta["splits"]["train"]["sha256"] for d in data.sets},
        "judged_by": {d.name: d.meta["splits"]["val"]["sha256"] for d in data.sets},
        "tokenizer": {k: v for k, v in meta["tokenizer"].items() if k != "files"},
    }
    files = {path.name: path.read_bytes() for path in tokenizer_files(folder, meta["tokenizer"])}
    if "tokenizer.json" not in files:
        came_with = read_json(folder / "tokenizer_config.json")
        for name, content in to_hugging_face(data.tokenizer, block_size, came_with).items():
            files[name] = json_bytes(content)
    return files | {"meta.json": json_bytes(sealed(meta | changes))}


def write_model(
    files: dict[str, bytes],
    tokenizer: SentencePiece | Tiktoken,
    folder: Path,
    c: GPTConfig,
    weights: dict[str, torch.Tensor],
) -> None:
    """Make a model folder: the weights, their shape, and the tokenizer."""
    folder.mkdir(parents=True)
    bos_id = tokenizer.prefix[0] if tokenizer.prefix else None
    save_pretrained(c, weights, folder, tokenizer.eos_id, bos_id)
    for name, content in files.items():
        (folder / name).write_bytes(content)

"""A run before its first step: rank 0 says what it is, and all ranks build it.

open_run() lets rank 0 read the disk: what the run starts from, and which data set it reads. build()
opens the data and the model on all ranks, compares what the ranks have found, plans the run, prints
what it is, and returns a Job: all that the training loop works with.
"""

import math
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from configurator import UserError, note, row
from hardware import kernels
from hardware.device import capacity, start
from hardware.disk import MANIFEST, Lock, check_changed, damage, file_sha256, json_bytes, sealed
from hardware.machine import Machine, is_sharded, memory_advice
from hardware.peak import peak_tflops
from model import GPT, GPTConfig
from text import dataset
from text.chat import question_ids
from text.hf_tokenizer import chat_files, only_ends, read_json, to_hugging_face
from text.landmarks import mixed_landmarks
from text.windows import DataSet
from training import huggingface, resume
from training.banner import banner, pace_note
from training.checkpoint import Saver
from training.job import Data, Job
from training.memory import Step
from training.metrics import records_until
from training.optimizer import make_optimizer
from training.parallel import check_room, compile_now, plan_of, shares, wrap
from training.plan import Plan, Progress
from training.report import Report
from training.runs import lock_run, replace_run, tidy
from training.settings import TrainConfig, model_config
from training.step import to_batch


@contextmanager
def open_run(options: dict[str, Any]) -> Iterator[Job]:
    """Make everything for a run that is trained in the block, and hold the lock of its folder.

    options: the settings of config files and command line, without defaults. Other processes cannot
    write to the folder: rank 0 has the lock.
    """
    kernels.install()
    cfg = resume.settings_of_run(options)
    machine = start(cfg.device, cfg.dtype, cfg.shard != "none")
    folder = Path(cfg.out_dir) / cfg.run_name
    lock = machine.together(lambda: lock_run(folder) if machine.is_main else None)
    with closing(lock) if lock else nullcontext():
        # Rank 0 reads the disk, and all ranks get what it has found.
        origin = machine.decide(lambda: resume.find_origin(cfg, folder, machine.say))
        of_rank_0 = machine.decide(lambda: resume.with_data(cfg))
        cfg = replace(of_rank_0, data_dir=cfg.data_dir)
        yield build(cfg, origin, machine, folder, lock)


# --------------------------------------------------------------------------------------------------
# All ranks build


def build(
    cfg: TrainConfig, origin: Path | None, machine: Machine, folder: Path, lock: Lock | None
) -> Job:
    """Make all that the training loop needs, and print the lines that describe the run.

    origin: of find_origin(). folder: of the run. lock: of this folder; None above rank 0.
    """
    say = machine.say
    data = machine.together(lambda: open_data(cfg))
    compare_ranks(data.sets, origin, machine)
    model, earlier = machine.together(lambda: open_model(cfg, machine, origin, data.sets))
    progress = Progress()
    if earlier:
        progress = Progress.of_checkpoint(earlier.training)
        cfg = replace(cfg, init_from=earlier.settings.get("init_from", "scratch"))
    # On each computer one rank reads the files, and the others wait.
    verify = partial(dataset.verify_all, data.sets, say)
    machine.together(lambda: verify() if machine.local_rank == 0 else None)
    epoch_tokens = sum(windows.n_windows for windows in data.loader.splits) * cfg.block_size
    kind = machine.device.type
    size = Step(1, cfg.block_size, dtype=machine.dtype, device=kind, world=machine.world)
    last = earlier.settings["batch_size"] if earlier else 0
    room = min(machine.gather(capacity(machine.device)))
    done = (progress.step, progress.samples)
    cfg, plan, one_step = plan_of(cfg, model, size, epoch_tokens, room, done, last)
    check_room(model, one_step, room)
    peak, source = peak_tflops(machine.device, machine.dtype, cfg.peak_tflops)
    if machine.local_rank == 0 and not machine.is_main:
        print(f"rank {machine.rank} of {machine.world}: rank 0 prints what there is to say")
    say(banner(cfg, data.sets, data.loader, machine, plan, model, one_step))
    say(row("       peak: ", source))
    flops = plan.batch_size * cfg.block_size * model.flops_per_token(cfg.block_size)
    if note := pace_note(flops, plan.accum, peak, machine.device.type == "cuda"):
        say(note)
    if earlier:
        say_what_is_resumed(cfg, machine, plan, origin, earlier)
    forward = wrap(cfg, model, machine, one_step.compiled)
    if one_step.compiled:
        with memory_advice(plan.smaller(cfg.block_size)):
            rows = data.loader.rows(data.loader.starts(0, plan.batch_size))
            compile_now(forward, to_batch(rows, machine.device), machine, data.tokenizer.eos_id)
    optimizer, scaler = open_optimizer(cfg, machine, model, earlier)

    def open_folder() -> list[dict]:
        if not machine.is_main:
            return []
        if cfg.overwrite and not earlier and (moved := replace_run(folder, lock)):
            say(f"the earlier run is now {moved}: delete it when you no longer need it")
        path = folder / "metrics.jsonl"
        records = first_records(path, cfg, plan, data.sets, model.config, progress)
        for line in tidy(folder, progress.step, records):
            say(line)
        return records

    records = machine.together(open_folder)
    report = machine.together(
        lambda: Report(cfg, machine, plan, data.sets, progress, folder, records)
    )
    files = machine.decide(lambda: fixed_files(data, model.config))
    files |= {"train_config.json": json_bytes(asdict(cfg))}
    c = model.config
    save = partial(huggingface.save_weights, huggingface.architecture_of(c), c)
    return Job(
        cfg=cfg,
        folder=folder,
        machine=machine,
        plan=plan,
        data=data,
        model=model,
        forward=forward,
        optimizer=optimizer,
        scaler=scaler,
        progress=progress,
        report=report,
        saver=Saver(folder / "ckpt", save, files, cfg.keep, lock, say, report.saved),
        peak=peak * machine.world if peak else None,
    )


def open_data(cfg: TrainConfig) -> Data:
    sets = dataset.open_datasets(cfg.dataset, cfg.data_dir)
    on = cfg.loss_on
    # A window that begins within an answer would ask for the rest of it without the question.
    windows = "pad" if on == "answers" else "stream"
    loader = dataset.train_loader(sets, cfg.block_size, cfg.seed, cfg.documents, cfg.loss_per, on)
    tokenizer = dataset.load_tokenizer(sets[0].folder)
    prompt = [*tokenizer.prefix, *tokenizer.encode(cfg.sample_prompt).tolist()]
    prompt = question_ids(cfg.sample_prompt, tokenizer) if on == "answers" else prompt
    opened = partial(dataset.open_windows, block_size=cfg.block_size, loss_on=on)
    verify = partial(dataset.verify_file, sets)
    data = Data(
        loader=loader,
        val_windows=[opened(d, "val", documents=windows) for d in sets],
        val_documents=[opened(d, "val", documents="pack") for d in sets],
        train_windows=[opened(d, "train", documents=windows) for d in sets],
        sets=sets,
        tokenizer=tokenizer,
        sample_prompt=prompt or [tokenizer.eos_id],
        check=partial(check_changed, dataset.opened_files(sets), verify),
    )
    for kind in (data.val_windows, data.val_documents):
        for of_set, evaluated in zip(sets, kind, strict=True):
            starts = evaluated.fixed_starts(cfg.eval_tokens)
            if not any(evaluated.weights(start).any() for start in starts):
                problem = f"no answer of {of_set.name} is in a window that is evaluated"
                raise UserError(f"loss_on=answers: {problem}: raise block_size, or --val_fraction")
    return data


def compare_ranks(sets: list[DataSet], origin: Path | None, machine: Machine) -> None:
    """Raise UserError, on all ranks, if they would not train with the same files and programs."""
    facts = machine.gather(machine.together(lambda: shared_facts(sets, origin, machine)))
    for rank, of_rank in enumerate(facts):
        for name in sorted(of_rank.keys() | facts[0]):
            here, there = of_rank.get(name), facts[0].get(name)
            if here != there:
                differ = f"rank {rank}: {name} is {here} on rank {rank}, {there} on rank 0"
                raise UserError(f"{differ}: all must read the same files with the same programs")


def shared_facts(sets: list[DataSet], origin: Path | None, machine: Machine) -> dict[str, str]:
    """Return what must be the same on all ranks, whichever computer they run on.

    This includes the hash of each .bin by meta.json, and of the manifest of the checkpoint.
    """
    facts = {"dtype": str(machine.dtype), "device": machine.device.type, "torch": torch.__version__}
    facts |= resume.data_hashes(sets)
    if origin and (origin / MANIFEST).exists():
        facts[f"{origin.name}/{MANIFEST}"] = file_sha256(origin / MANIFEST)
    return facts


@memory_advice("for the weights alone: make n_layer or n_embd smaller")
def open_model(
    cfg: TrainConfig, machine: Machine, origin: Path | None, sets: list[DataSet]
) -> tuple[GPT, resume.Earlier | None]:
    """Return the model on its device, and what the checkpoint of a resumed run says about the run.

    The weights are drawn at random, or come from the run's own checkpoint, or from another model.
    Raises UserError if the checkpoint is damaged on this computer.
    """
    resumes = origin is not None and cfg.init_from in ("resume", "auto")
    # On the computer of rank 0, find_origin() has checked the checkpoint.
    if resumes and machine.local_rank == 0 and not machine.is_main:
        if problem := damage(origin):
            raise UserError(f"{problem}: all computers must have the same checkpoint in out_dir")
    earlier = None
    if origin is None:
        model = GPT(model_config(cfg, sets[0].meta["vocab_size"]))
        torch.manual_seed(cfg.seed)  # the same weights on every rank
        model.init_weights(cfg.init)
    elif resumes:
        earlier = resume.read_training(origin)
        model = huggingface.from_pretrained(origin, dropout=cfg.dropout)
        resume.check_fits(origin, earlier, model.config, cfg, sets)
    else:
        model = resume.model_to_tune(origin, cfg, sets, machine.say)
        if warning := huggingface.unverified(origin):
            machine.say(f"note: {origin}: {warning}")
    # A model that is sharded stays on the CPU, until each device gets its part.
    return model if shares(cfg, machine) else model.to(machine.device), earlier


def open_optimizer(
    cfg: TrainConfig, machine: Machine, model: GPT, earlier: resume.Earlier | None
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


def placed_like(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a copy of the whole tensor x, sharded as p is, on the device of p.

    x may lie in a file that is mapped into memory: a rank reads only the rows that it holds.
    """
    if x.dim() == 0:
        return x.clone()  # a counter of steps: its optimizer knows where it belongs
    if not is_sharded(p):
        return x.to(p.device, copy=True)
    from torch.distributed.tensor import DTensor

    mesh = p.device_mesh
    n = math.ceil(x.size(0) / mesh.size())
    rows = x[n * mesh.get_local_rank() :][:n].to(p.device, p.dtype, copy=True)
    return DTensor.from_local(rows, mesh, p.placements, shape=p.shape, stride=p.stride())


def say_what_is_resumed(
    cfg: TrainConfig, machine: Machine, plan: Plan, origin: Path, earlier: resume.Earlier
) -> None:
    machine.say(f"resumed from {origin} at step {plan.begun_step}, with its settings")
    if changed := resume.settings_changed(earlier, cfg):
        machine.say(f"changed since the checkpoint: {', '.join(changed)}")
    if plan.steps == plan.begun_step:
        limits = {k: getattr(cfg, k) for k in ("max_steps", "max_epochs", "max_tokens")}
        ends = ", ".join(f"{k}={value:,}" for k, value in limits.items() if value)
        machine.say(f"nothing is left to do: the run ends at {ends}; to train longer, raise that")


def first_records(
    path: Path, cfg: TrainConfig, plan: Plan, sets: list[DataSet], c: GPTConfig, progress: Progress
) -> list[dict]:
    """Return the records that metrics.jsonl has when this process starts to train.

    These are the records of earlier processes, up to the step at which this one starts. One with
    the settings of this process follows if they differ from those recorded last.
    """
    step = progress.step
    records = records_until(path, step) if step else []
    if step and not any(r["step"] == step and "saved" in r for r in records):
        # The process that wrote the checkpoint was killed before it could record it.
        records.append({"step": step, "saved": f"step_{step:08d}"})

    settings = {k: v for k, v in asdict(cfg).items() if k != "overwrite"}
    if cfg.init_from in ("scratch", "auto"):
        settings["init_from"] = "scratch"
    else:  # the model that is fine-tuned has its own shape
        of_model = {k: v for k, v in asdict(c).items() if k in settings and k != "block_size"}
        settings |= of_model | {"preset": huggingface.architecture_of(c).name}
    # `prepare.py --inspect RUN --step N` reads this record to find a step's texts.
    run = {
        "settings": settings,
        "step_samples": plan.step_tokens // cfg.block_size,
        "steps": plan.steps,
        "data": {data.name: data.meta["splits"]["train"]["sha256"] for data in sets},
        "landmarks": mixed_landmarks(sets, cfg.loss_on),
    }
    recorded = next((r for r in reversed(records) if "settings" in r), {})
    if any(recorded.get(key) != value for key, value in run.items()):
        records.append({"step": step, "first_sample": progress.samples} | run)
    return records


# --------------------------------------------------------------------------------------------------
# What all checkpoints of a run share


def fixed_files(data: Data, c: GPTConfig) -> dict[str, bytes]:
    """Return name -> content of config.json, meta.json and the tokenizer's files.

    They are the same in each checkpoint of a run, and are read now, since the data set may be gone
    when one is written. meta.json is that of the first data set, with the hashes of all data sets,
    which a resumed run compares. The hashes of the tokenizer's files are left out, since
    manifest.json has them. If no tokenizer.json came with the tokenizer, it is made for sequences
    of block_size. If a data set has conversations, the files say how to chat. c: the shape of the
    model.
    """
    folder, meta = data.sets[0].folder, data.sets[0].meta
    changes = {
        "trained_on": {d.name: d.meta["splits"]["train"]["sha256"] for d in data.sets},
        "judged_by": {d.name: d.meta["splits"]["val"]["sha256"] for d in data.sets},
        "tokenizer": {k: v for k, v in meta["tokenizer"].items() if k != "files"},
    }
    files = {name: (folder / name).read_bytes() for name in dataset.files_of(meta["tokenizer"])}
    if "tokenizer.json" not in files:
        came_with = read_json(folder / "tokenizer_config.json")
        made = to_hugging_face(data.tokenizer, c.block_size, came_with)
        if not made:
            note("other programs may read this tokenizer differently: docs/interchange.md")
        files |= {name: json_bytes(content) for name, content in made.items()}
    if "generation_config.json" in files:
        files["generation_config.json"] = only_ends(data.tokenizer, files["generation_config.json"])
    if any("answers" in d.meta["splits"]["train"] for d in data.sets):
        files |= chat_files(data.tokenizer, files)
    bos_id = next(iter(data.tokenizer.prefix), None)
    files["config.json"] = json_bytes(huggingface.to_config(c, data.tokenizer.eos_id, bos_id))
    return files | {"meta.json": json_bytes(sealed(meta | changes))}

"""The start of a run: random weights, a model folder, or the newest checkpoint of the run.

In the order in which train.py calls them:

    settings_of_run    return the settings; a resumed run has those of its newest checkpoint
    find_start         find the checkpoint or model folder that the run starts from
    recorded_results   return what is known already of the weights that it starts from
    check_fits         compare a checkpoint with the settings and the data of today
    progress_of        return the counters of a checkpoint
    model_to_tune      open the model of another run or program, and adapt it
    facts_of_rank      return what must be the same on all ranks

They raise UserError if something is missing or does not fit.
"""

import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from configurator import UserError, changes, note, set_value, validated
from hardware.disk import MANIFEST, content_sha256, damage, file_sha256, read_object
from hardware.machine import Machine
from model import GPT, GPTConfig, rope_table
from text.dataset import (
    hashes_of,
    load_tokenizer,
    names_and_weights,
    tokenizer_id,
    validation_id,
    weights_of,
)
from text.hf_tokenizer import tokenizer_of_model
from text.tokenizer import same_ids
from text.windows import DataSet
from training.checkpoint import Saved, intact_checkpoint
from training.huggingface import NANOGPT, from_pretrained, read_shape
from training.metrics import read_metrics, records_until
from training.plan import Progress
from training.run_folder import (
    complete_checkpoints,
    holds_files,
    newest_checkpoint,
    newest_run,
    step_of,
    with_model,
)
from training.settings import (
    FIXED,
    FREE,
    ORDER,
    START,
    TrainConfig,
    extend_context,
    model_config,
    on_resume,
)

# --------------------------------------------------------------------------------------------------
# Its settings


def settings_of_run(options: dict[str, Any]) -> TrainConfig:
    """Return the settings of the run that a command line starts or resumes.

    A resumed run has the settings of its newest checkpoint. Settings given now override them. The
    block_size of a model to fine-tune is at most its context, unless one is given.

    options: the settings of config files and command line, without defaults. Raises UserError for a
    setting that is out of its range.
    """
    cfg = TrainConfig(**options)
    if cfg.resume == "no":
        if cfg.overwrite and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            problem = "a restart by --max_restarts would overwrite the training before it"
            raise UserError(f"overwrite: {problem}: give --init_from=auto and another --run_name")
        return validated(TrainConfig, with_model(options))
    # A command that starts a run gives its length. A command without a length and a run_name means
    # the run that was trained last.
    names_run = {"run_name", "max_steps", "max_epochs", "max_tokens"} & options.keys()
    resumes = cfg.resume == "yes" and not names_run
    if newest := newest_run(Path(cfg.out_dir)) if resumes else None:
        note(f"no run_name was given: the newest run is resumed, {newest}")
        options = options | {"run_name": newest.name}
    elif resumes and (runs := sorted(Path(cfg.out_dir).glob("*/metrics.jsonl"))):
        names = ", ".join(path.parent.name for path in runs)
        advice = "name one by --run_name; --overwrite has renamed those that end in .old"
        raise UserError(f"init_from=resume: which run of {cfg.out_dir}/: {names}? {advice}")
    run_name = options.get("run_name", cfg.run_name)
    saved = saved_settings(Path(cfg.out_dir) / run_name / "ckpt")
    options = options if saved else with_model(options)
    cfg = validated(TrainConfig, saved | options | {"run_name": run_name})
    kept = "data_dir" in saved and "data_dir" not in options
    if kept and not all(Path(cfg.data_dir, k).is_dir() for k in names_and_weights(cfg.dataset)[0]):
        problem = f"data_dir={cfg.data_dir}, from the checkpoint, does not contain {cfg.dataset}"
        raise UserError(f"{problem}: give the folder of the data sets by --data_dir=FOLDER")
    return cfg


def saved_settings(ckpt_dir: Path) -> dict[str, Any]:
    """Return the settings of the newest checkpoint in ckpt_dir, or {} if there is none.

    It leaves out those of a start alone, and settings that this version does not have.
    """
    file = "train_config.json"
    for path in complete_checkpoints(ckpt_dir):
        if damage(path, [file], required=[file]):
            continue
        values: dict[str, Any] = {}
        for key, value in read_object(path / file).items():
            if not hasattr(TrainConfig, key):
                note(f"{path / file}: this version has no setting {key}={value}")
            elif key not in on_resume(START):
                set_value(TrainConfig, values, key, value, f"{path / file}")
        return values
    return {}


# --------------------------------------------------------------------------------------------------
# What it starts from


def find_start(cfg: TrainConfig, folder: Path) -> Path | None:
    """Return the path that the run in `folder` starts from; the caller holds its lock.

    It is a checkpoint of this run, if cfg.resume asks for one and there is one; else the model
    folder of cfg.init_from, or None for random weights.
    Raises UserError if the run would overwrite files, or if a checkpoint that it needs is missing.
    """
    model = None if cfg.init_from == "scratch" else Path(cfg.init_from)
    if cfg.resume == "no":
        if holds_files(folder) and not cfg.overwrite:
            advice = "give another --run_name, or --overwrite to rename it"
            if newest_checkpoint(folder / "ckpt"):
                advice += f", or --run_name={cfg.run_name} --init_from=resume to continue it"
            raise UserError(f"{folder} exists: {advice}")
        if model and cfg.overwrite and folder.resolve() in model.resolve().parents:
            raise UserError(f"--overwrite would rename {model}: give the run another --run_name")
        return model

    ckpt_dir = folder / "ckpt"
    if checkpoint := intact_checkpoint(ckpt_dir):
        return checkpoint
    records = read_metrics(folder / "metrics.jsonl")
    if complete_checkpoints(ckpt_dir) or any("saved" in record for record in records):
        problem = f"this run has saved checkpoints, but none in {ckpt_dir} is intact"
        advice = "restore them, or start again with --init_from=scratch --overwrite"
        raise UserError(f"{problem}: {advice}")
    start = next((record["settings"] for record in records if "settings" in record), {})
    if not model and (began := start.get("init_from", "scratch")) not in ("scratch", "auto"):
        problem = f"{folder} started from {began} and saved nothing before it ended"
        raise UserError(f"{problem}: add --init_from=auto to the command that started it")
    if cfg.resume == "yes":
        advice = "--init_from=auto starts the run"
        if newest := newest_run(Path(cfg.out_dir)):
            advice += f"; with a length, name the run: --run_name={newest.name} is the newest"
        raise UserError(f"init_from=resume: there is no checkpoint in {ckpt_dir}; {advice}")
    note(f"there is no checkpoint in {folder}: the run starts from {model or 'random weights'}")
    return model


def recorded_results(init_path: Path | None, folder: Path) -> dict[str, Any]:
    """Return the recorded results of the weights that the run in `folder` starts from.

    They contain "saved" if the weights are a checkpoint of this run; "evaluates" if these weights
    must be evaluated now (True) or must not (False); and "sample" if they must write no text now.
    """
    if init_path is None or init_path.parent != folder / "ckpt":
        return {"evaluates": False, "sample": ""}
    step = step_of(init_path)
    records = records_until(read_metrics(folder / "metrics.jsonl"), step)
    items = {k: v for record in records if record["step"] == step for k, v in record.items()}
    return items | {"saved": init_path} | ({"evaluates": False} if "val_loss" in items else {})


def code_sha256() -> str:
    """Return the SHA-256 of the .py files of a training. Their folder does not matter."""
    root = Path(__file__).parents[1]
    patterns = ["train.py", "model.py", "configurator.py"]
    patterns += [f"{folder}/*.py" for folder in ("training", "text", "hardware")]
    files = [path for pattern in patterns for path in sorted(root.glob(pattern))]
    return content_sha256({str(path.relative_to(root)): file_sha256(path) for path in files})


def facts_of_rank(
    machine: Machine, code: str, sets: list[DataSet], init_path: Path | None
) -> dict[str, str]:
    """Return what must be the same on all ranks of a run: the programs and the files."""
    facts = {"dtype": str(machine.dtype), "device": machine.device.type, "torch": torch.__version__}
    facts |= {"code": code} | data_hashes(sets)
    if init_path and (init_path / MANIFEST).exists():
        facts["checkpoint"] = file_sha256(init_path / MANIFEST)
    return facts


# --------------------------------------------------------------------------------------------------
# A run that is resumed


def check_fits(
    folder: Path, saved: Saved, c: GPTConfig, cfg: TrainConfig, sets: list[DataSet]
) -> None:
    """Raise UserError unless a resumed run has the shape, optimizer and data of its checkpoint.

    c: the shape of the model. A fine-tuned model has its own shape, whatever the settings say: a
    setting may keep its old value or take the model's.
    """
    before = checkpoint_settings(saved, cfg)
    fixed, is_tuned = on_resume(FIXED), saved.settings["init_from"] != "scratch"
    then = {k: getattr(before, k) for k in fixed} | asdict(c)
    then["block_size"] = before.block_size  # windows are counted in its length
    now = then | {k: getattr(cfg, k) for k in fixed}
    now |= {} if is_tuned else asdict(model_config(cfg, c.vocab_size))
    # Of a model from scratch, rope_scaling may be written in several ways.
    may_stay = fixed if is_tuned else ["rope_scaling"]
    now |= {k: then[k] for k in may_stay if getattr(cfg, k) == getattr(before, k)}
    for side, meta in ((then, saved.meta), (now, sets[0].meta)):
        side["tokenizer"] = tokenizer_id(meta["tokenizer"])[:20]
    other = f"start a new run with --init_from={folder} --run_name=NAME"
    splits = (("trained_on", "train"), ("judged_by", "val"))
    old = {f"{k}/{split}.bin": v for key, split in splits for k, v in saved.meta[key].items()}
    new = data_hashes(sets)
    # A data set that has another name now is known by its hash.
    if not cfg.switch_data and sorted(old.values()) != sorted(new.values()):
        if then == now:
            other = f"--switch_data goes on with other data, or {other}"
        for side, hashes in ((then, old), (now, new)):
            side["data"] = ", ".join(f"{k} ({hashes[k]:.8})" for k in sorted(hashes))
    if differ := [k for k in sorted(now) if then[k] != now[k]]:
        # A model that is fine-tuned keeps its shape and its tokenizer.
        if (asdict(c).keys() - {"block_size"} | {"tokenizer"}) & set(differ):
            other = "start a new run with --run_name=NAME"
        changed = "; ".join(f"{k} was {then[k]}, is {now[k]}" for k in differ)
        advice = "give the same settings and data as before (prepare.py keeps the data that it"
        advice += f" replaces as NAME.old if no input file is the same), or {other}"
        raise UserError(f"checkpoint {folder} does not fit: {changed}: {advice}")


def with_origin(cfg: TrainConfig, saved: Saved) -> TrainConfig:
    """Return the settings with the init_from that a run was started with, whatever is given now."""
    began = saved.settings["init_from"]
    origin = Path(began).resolve()
    same = (origin, *origin.parents[:2])  # out/RUN means out/RUN/ckpt/step_N
    if cfg.init_from != "scratch" and Path(cfg.init_from).resolve() not in same:
        ignored = f"init_from={cfg.init_from} is ignored: this run began from {began}"
        note(f"{ignored}, and continues with its own weights; another --run_name starts from it")
    return replace(cfg, init_from=began)


def checkpoint_settings(saved: Saved, cfg: TrainConfig) -> TrainConfig:
    """Return the settings of a checkpoint. Those that are new since then come from cfg."""
    return replace(cfg, **{k: v for k, v in saved.settings.items() if hasattr(cfg, k)})


def data_hashes(sets: list[DataSet]) -> dict[str, str]:
    """Return the SHA-256 of each .bin, as meta.json has it."""
    splits = [(data.name, *split) for data in sets for split in data.meta["splits"].items()]
    return {f"{name}/{split}.bin": counts["sha256"] for name, split, counts in splits}


def progress_of(
    saved: Saved, cfg: TrainConfig, sets: list[DataSet], recorded: dict[str, Any]
) -> tuple[Progress, dict[str, Any]]:
    """Return the progress of a checkpoint, and its recorded_results().

    If other data are evaluated now, the best checkpoint is chosen again, from this one on. The
    checkpoint was written before its evaluation.
    """
    progress = Progress.from_state(saved.state)
    progress.add_evaluation(recorded.get("val_loss", math.inf))
    before = checkpoint_settings(saved, cfg)
    hashes, weights = saved.meta["judged_by"], saved.meta["weights"]
    then = validation_id(hashes, weights, before.eval_tokens)
    if then != validation_id(hashes_of(sets, "val"), weights_of(sets), cfg.eval_tokens):
        note("the evaluation has changed: the best checkpoint is chosen anew, from this one on")
        progress = replace(progress, best_step=-1, best_val_loss=math.inf)
        recorded = recorded | {"evaluates": True}
    trained_on = {data.sha256("train") for data in sets}
    if trained_on != set(saved.meta["trained_on"].values()):  # switch_data allows it
        note(f"the data change here: {cfg.dataset} is read from its first window on")
        progress = replace(progress, data_begun=progress.samples)
    return progress, recorded


def settings_changed(saved: Saved, cfg: TrainConfig, sets: list[DataSet]) -> list[str]:
    """Return `lr 0.001 -> 0.002` for each setting that changed since the checkpoint was written.

    Those that do not change what the model learns are left out.
    """
    old = saved.settings
    # The place of a data set in the mixture is part of its seed. Other data begin anew.
    now = {data.sha256("train"): str(data.weight) for data in sets}
    then = {sha256: saved.meta["weights"][k] for k, sha256 in saved.meta["trained_on"].items()}
    mixed_anew = now.keys() == then.keys() and [*now.items()] != [*then.items()]
    reorder = on_resume(ORDER) + ["dataset"] * mixed_anew
    order = " (the order of windows changes: some are read twice, others never)"
    return [
        f"{k} {old[k]} -> {value}{order if k in reorder else ''}"
        for k, value in asdict(cfg).items()
        if k not in on_resume(START, FREE) and old.get(k, value) != value
    ]


def summary(
    folder: Path,
    saved: Saved,
    cfg: TrainConfig,
    sets: list[DataSet],
    progress: Progress,
    code: str,
) -> str:
    """Return the lines that say from where a run continues, and what has changed since then.

    code: the code_sha256() of today.
    """
    lines = [f"resumed from {folder} at step {progress.step}, with its settings"]
    if changed := settings_changed(saved, cfg, sets):
        lines.append(f"changed since the checkpoint: {', '.join(changed)}")
    if progress.code not in ("", code):
        lines.append("note: the code has changed since the checkpoint: the steps may differ")
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------
# A model that is fine-tuned


def model_to_tune(folder: Path, cfg: TrainConfig, sets: list[DataSet], verify: bool) -> GPT:
    """Return a model to fine-tune on these data sets, on the CPU.

    It keeps its shape, whatever n_layer and the other settings say. But a model with RoPE is
    extended to longer sequences, if block_size and rope_scaling ask for them.

    Raises UserError if its vocabulary is too small, or if its token ids mean other tokens than
    those of the data. A model without a tokenizer is accepted, with a note.
    """
    vocab_size = sets[0].meta["vocab_size"]
    own = read_shape(folder).vocab_size
    # nanoGPT's models of characters have no eos. A .tiktoken file of them has one, the next id.
    grown = vocab_size if folder.suffix == NANOGPT and own + 1 == vocab_size else own
    model = from_pretrained(folder, verify, dropout=cfg.dropout, vocab_size=grown)
    c = model.config
    if c.vocab_size < vocab_size:
        problem = f"{folder}: a vocabulary of {c.vocab_size}, but the data has {vocab_size}"
        fits = f"a tokenizer of at most {c.vocab_size} tokens"
        raise UserError(f"{problem}: prepare the data with {fits}")
    extended = extend_context(c, cfg)
    if extended != c:
        before, after = asdict(c), asdict(extended)
        changed = [f"{k} {before[k]!r} -> {after[k]!r}" for k in after if after[k] != before[k]]
        note(f"{folder} was not trained with these positions: {', '.join(changed)}")
        model.config = extended
        model.rope = rope_table(extended)
    tokenizer = tokenizer_of_model(folder)
    if tokenizer is None:
        note(f"{folder} has no tokenizer: its ids are assumed to be those of {sets[0].name}")
    elif not same_ids(tokenizer, load_tokenizer(sets[0].folder)):
        problem = f"the tokenizer of {folder} is not that of {sets[0].folder}"
        raise UserError(f"{problem}: prepare the data with --tokenizer={folder}")
    shape = asdict(extended) | {"block_size": cfg.block_size}
    if others := [f"{k}={v}" for k, v in changes(cfg).items() if v != shape.get(k, v)]:
        note(f"{folder} keeps its own shape and ignores {' '.join(others)}")
    return model

"""Train a GPT. training/settings.py has the settings.

    # on a CPU, or on one GPU
    python train.py config/demo.py
    # on six GPUs
    torchrun --nproc_per_node=6 train.py config/train_100m.py
    # with other settings
    python train.py config/demo.py --n_layer=2 --max_steps=20
    # from the newest checkpoint
    python train.py --run_name=demo --init_from=resume
    # fine-tune a model
    python train.py config/demo.py --init_from=FOLDER --run_name=new

Without --dataset it trains on the data set that was prepared last. A resumed run keeps its data set
and all other settings, except those that are given now.

Terms: B = batch_size, T = block_size. A *step* is one update of the weights. It consists of `accum`
*micro-steps* on each of `world` processes (*ranks*); a micro-step reads B x T tokens. All intervals
are counted in steps. A *bad step* has a loss or gradient that is not finite; it leaves the weights
as they are. A *window* is T + 1 tokens: T inputs, each with the token that follows as its target.
"""

# Read loop() first: it trains. main() and train() above it lock the folder and set the run up.
# Below it stands what loop() calls, and then what train() calls. One update of the weights is
# take_step() in training/step.py.
#
# Several processes work on one run. They keep together by three methods of `machine`: together(f)
# runs f on every rank, and if one fails, all of them stop; decide(f) runs f on rank 0 and gives its
# result to all ranks; gather(x) gives all ranks the list of every rank's x.

import gc
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from configurator import UserError, given, row, run
from hardware.disk import MANIFEST, Lock, file_sha256
from hardware.machine import Machine, memory_advice, start, stop_signals
from hardware.peak import peak_tflops
from model import GPT
from text.dataset import (
    DataSet,
    check_files,
    load_tokenizer,
    newest_dataset,
    open_datasets,
    opened_files,
    verify_new,
)
from text.tokenizer import SentencePiece, Tiktoken
from text.windows import Loader, Rows, Windows, open_windows, train_loader
from training.average import Average
from training.banner import banner, last_lines, slow_steps
from training.checkpoint import Saver, small_files
from training.evaluate import evaluate, write_text
from training.huggingface import unverified
from training.memory import Step
from training.optimizer import make_optimizer
from training.parallel import fit_batch, shares, wrap
from training.plan import Plan, lr_at, make_plan, momentum_at
from training.progress import Progress
from training.report import Clock, Metrics
from training.resume import (
    Earlier,
    Origin,
    check_copy,
    check_data,
    check_optimizer,
    check_tokenizer,
    find_origin,
    load_model,
    read_training,
    settings_changed,
    settings_of_run,
)
from training.runs import newest_checkpoint, replace_run, run_folder, tidy
from training.settings import PLACE, TrainConfig, model_config, wants_compile
from training.shards import part, placed_like
from training.step import Batch, read_ahead, take_step, to_batch


def main() -> None:
    cfg = settings_of_run(given(TrainConfig, doc=__doc__))
    machine = start(cfg.device, cfg.dtype, cfg.shard != "none")
    folder = Path(cfg.out_dir) / cfg.run_name
    # Rank 0 locks the run's folder, so that no other process writes to it until the run is over.
    with ExitStack() as until_the_end:

        def lock_folder() -> Lock | None:
            return until_the_end.enter_context(run_folder(folder)) if machine.is_main else None

        lock = machine.together(lock_folder)
        train(cfg, machine, folder, lock)


# --------------------------------------------------------------------------------------------------
# Train


@dataclass(frozen=True)
class Data:
    """The data of a run."""

    sets: list[DataSet]
    loader: Loader  # windows of every train.bin, mixed
    val_windows: list[Windows]  # one for each val.bin
    val_documents: list[Windows]  # the same tokens, packed: each document begins in its window
    train_windows: list[Windows]  # one for each train.bin, to evaluate on
    tokenizer: SentencePiece | Tiktoken
    prompt: list[int]  # of the samples: the tokens that the model continues
    files: dict[Path, os.stat_result]  # as opened_files() returns them

    def epoch_tokens(self, block_size: int) -> int:
        return sum(windows.n_windows for windows in self.loader.splits) * block_size


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


def train(cfg: TrainConfig, machine: Machine, folder: Path, lock: Lock | None) -> None:
    """Train one run, from its beginning or from its newest checkpoint, to its end.

    folder: where the run writes its files. lock: the lock of this folder, which only rank 0 has.
    """
    say = machine.say
    origin = machine.decide(lambda: find_origin(cfg, folder, say))
    newest_data = not cfg.dataset
    named = machine.decide(lambda: cfg.dataset or newest_dataset(cfg.data_dir))
    cfg = replace(cfg, dataset=cfg.dataset or named)
    if newest_data:
        say(f"note: dataset={named} is taken, which was prepared last")
    data = machine.together(lambda: open_data(cfg))
    sets = data.sets
    model, earlier = machine.together(lambda: open_model(cfg, machine, origin, sets))
    progress = Progress()
    if earlier:
        progress = Progress.of_checkpoint(earlier.training, cfg.max_bad_steps)
        how_it_began = earlier.settings.get("init_from", "scratch")
        cfg = replace(cfg, init_from=how_it_began)
    check_ranks(cfg, machine, origin, sets, progress)
    verify_data(machine, sets, progress)

    cfg, plan, one_step = plan_run(cfg, machine, model, data, progress, earlier)
    peak, source = peak_tflops(machine.device, machine.dtype, cfg.peak_tflops)
    peak_of_all = peak * machine.world if peak else None
    if machine.local_rank == 0 and not machine.is_main:
        print(f"rank {machine.rank} of {machine.world}: rank 0 prints what there is to say")
    say(banner(cfg, sets, data.loader, machine, plan, model, one_step))
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

    ckpt_dir = folder / "ckpt"
    if cfg.overwrite and not origin.resume:
        moved = machine.decide(lambda: replace_run(folder, lock))
        if moved:
            say(f"the earlier run is now {moved}: delete it when you no longer need it")
    for line in machine.decide(lambda: tidy(ckpt_dir, progress.step)):
        say(line)
    reader = closing(read_ahead(data.loader, progress.samples, plan.batch_size, machine))
    with stop_signals() as signals, memory_advice(advice), reader as rows:
        average = open_average(cfg, machine, model, plan, earlier)
        metrics = machine.together(
            lambda: Metrics(folder, cfg, machine, plan, sets, progress, lock)
        )
        files = machine.decide(lambda: small_files(cfg, model.config, sets, data.tokenizer))
        saver = Saver(ckpt_dir, cfg.keep, files, machine, lock, metrics.log_save)
        state = (optimizer, scaler, average, progress)
        job = Job(cfg, machine, plan, data, model, forward, *state, metrics, saver)
        with metrics.running():
            gave_up, stopping = loop(job, rows, peak_of_all, signals)
        saver.wait()
        # This waits for all ranks, too: the last checkpoint is on the disk when one of them ends.
        broken = not_finite(model, machine)

    metrics.close()
    say(last_lines(folder, model.config, data.tokenizer))
    if dist.is_initialized():
        dist.destroy_process_group()
    end_run(job, folder, gave_up, broken, stopping, signals)


def loop(
    job: Job, rows: Iterator[Rows], peak: float | None, signals: list[int]
) -> tuple[bool, bool]:
    """Train to the end of the run. Return whether it gave up, and whether a signal stopped it.

    rows: this rank's batches of windows. peak: TFLOPS of all devices together;
    None if unknown. signals: the signals that have arrived; stop_signals() adds them.
    """
    cfg = job.cfg
    machine = job.machine
    plan = job.plan
    model = job.model
    optimizer = job.optimizer
    scaler = job.scaler
    progress = job.progress
    flops = model.flops_per_token(cfg.block_size)
    step_windows = plan.step_tokens // cfg.block_size  # of all ranks
    start_step = progress.step
    clock = Clock(machine, start_step)
    batches = on_device(rows, machine, clock, signals)
    stopping = False
    # At the top of an iteration, `step` steps are done: evaluate and save these weights. Then train
    # one step more. The last iteration ends after its first half.
    for step in range(start_step, plan.steps + 1):
        gave_up = progress.bad_in_a_row >= cfg.max_bad_steps
        last = step == plan.steps or stopping or gave_up
        if step > start_step and (step == plan.steps or step % cfg.eval_every == 0):
            with clock.paused():
                evaluate_all(job, step)
        if step > start_step and wants_sample(cfg, step, plan.steps):
            with clock.paused():
                show_sample(job, step)
        if step > start_step and wants_checkpoint(job, step, last):
            with clock.paused():
                last = not save(job, step) or last
        if last:
            return gave_up, stopping

        # Train one step.
        lr = lr_at(step, plan.steps, cfg)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["scale"]
            group["momentum"] = momentum_at(step, plan.steps, cfg)  # only Muon reads it
        # What dropout draws depends on seed, step and rank, but not on where the run was resumed.
        # 1,000,003 exceeds the number of ranks, so no two ranks share a seed in any two steps.
        torch.manual_seed(cfg.seed + 1_000_003 * (step + 1) + machine.rank)
        result = take_step(
            job.forward, optimizer, scaler, batches, plan.accum, machine, cfg.grad_clip
        )
        if result is None:  # a signal has come: save the weights from before the step, if need be
            if step > start_step and not wants_checkpoint(job, step, last=False):
                save(job, step)
            return gave_up, True
        told_to_stop = machine.any_rank(len(signals) > 0)
        if job.average:
            job.average.follow()
        # This waits for the device: with AdamW and Muon, for the only time in a step.
        loss, grad_norm = result.loss, result.grad_norm
        stopping = told_to_stop()
        outcome = progress.add_step(step_windows, loss, grad_norm, scaler)

        # Report it.
        job.metrics.move_bar(clock)
        job.metrics.log_outcome(outcome, loss, grad_norm, scaler)
        if step == start_step:
            gc.collect()
            gc.freeze()  # these objects will stay: the collector need not visit them again
        done = progress.step
        if outcome == "taken" and (done == 1 or done % cfg.log_every == 0 or done == plan.steps):
            job.metrics.log_step(loss, lr, grad_norm, flops, peak, clock)
        elif step == start_step:  # after a resume, the first step is a warm-up: do not time it
            clock.restart(done)


# --------------------------------------------------------------------------------------------------
# What the loop calls


def on_device(
    rows: Iterator[Rows], machine: Machine, clock: Clock, signals: list[int]
) -> Iterator[Batch]:
    """Yield the batches on the device, and count the time of waiting for them.

    A process that trains alone gets no more of them once a signal has come: the step is given up
    between two micro-steps. On a laptop, a step may take hours.
    """
    while not (signals and machine.world == 1):
        with clock.waiting_for_data():
            batch = to_batch(next(rows), machine.device)
        yield batch


def evaluate_all(job: Job, step: int) -> None:
    """Evaluate the model on the val.bin and the train.bin of every data set.

    The windows are the same for each value of the setting `documents`. Only the loss by document
    keeps documents apart. Evaluate the average of the weights on the val.bin.
    """
    T = job.cfg.block_size
    data = job.data
    most = job.cfg.eval_tokens
    tokens = [len(windows.fixed_starts(most)) * T for windows in data.val_windows]
    at_once = (job.plan.batch_size, job.machine)

    def losses(of_sets: list[Windows]) -> list[float]:
        pairs = zip(of_sets, tokens, strict=True)
        return [evaluate(job.forward, windows, count, *at_once) for windows, count in pairs]

    begun = time.perf_counter()
    val_losses = losses(data.val_windows)
    eos_id = data.tokenizer.eos_id
    packed = data.val_documents
    by_document = [evaluate(job.forward, windows, most, *at_once, eos_id) for windows in packed]
    of_train = losses(data.train_windows)
    averaged = None
    if job.average:
        with job.average.in_the_model():
            averaged = losses(data.val_windows)
    seconds = time.perf_counter() - begun
    val_loss = job.metrics.log_eval(step, val_losses, by_document, of_train, averaged, seconds)
    job.progress.add_evaluation(val_loss)


def wants_sample(cfg: TrainConfig, step: int, steps: int) -> bool:
    return cfg.sample_every > 0 and (step % cfg.sample_every == 0 or step == steps)


def show_sample(job: Job, step: int) -> None:
    """Let the model write about 200 bytes of text: three lines of English, two of Chinese."""
    val = job.data.sets[0].meta["splits"]["val"]
    length = math.ceil(200 * val["tokens"] / val["bytes"])
    try:
        with getattr(job.forward, "whole_weights", nullcontext)():  # Shards has it
            text = write_text(job.model, job.data.tokenizer, job.data.prompt, length, job.cfg.seed)
    except ArithmeticError:
        return  # the loss is not finite either, and has been reported
    job.metrics.log_sample(step, job.cfg.sample_prompt + text)


def wants_checkpoint(job: Job, step: int, last: bool) -> bool:
    """Return whether to save the weights as they are after `step` steps.

    last: the run ends here.
    """
    is_best = step == job.progress.best_step  # the evaluation of this step was the best so far
    if job.progress.bad_in_a_row:
        # A bad step was skipped: the weights are those from before it. They are worth saving at the
        # end, and if they are best.
        return is_best or last
    return last or is_best or step % job.cfg.save_every == 0


def save(job: Job, step: int) -> bool:
    """Save the run, unless a weight is NaN or infinite. Return whether the run may go on.

    It ends after the second save in a row that was skipped. Raises UserError on all ranks if a data
    file has been changed in place: the steps since the last checkpoint may have read anything.
    """
    data = job.data

    def check_data() -> None:
        if job.machine.local_rank == 0:
            check_files(data.sets, data.files)

    job.machine.together(check_data)
    if broken := not_finite(job.model, job.machine):
        job.saver.skipped += 1
        job.machine.say(f"warning: step {step} is not saved: {broken} holds NaN or infinity")
        return job.saver.skipped < 2
    # This copies the state to host memory, and a thread writes the copy.
    job.saver.save(job.model, job.optimizer, job.scaler, job.average, job.progress)
    return True


def not_finite(model: torch.nn.Module, machine: Machine) -> str:
    """Return the name of a weight that is NaN or infinite on some rank; "" if there is none."""
    names = (name for name, p in model.named_parameters() if not part(p).isfinite().all())
    return max(machine.gather(next(names, "")))


# --------------------------------------------------------------------------------------------------
# Open the data and the model


def open_data(cfg: TrainConfig) -> Data:
    sets = open_datasets(cfg.dataset, cfg.data_dir)
    T = cfg.block_size
    val_windows = [open_windows(data, "val", T) for data in sets]
    val_documents = [open_windows(data, "val", T, documents="pack") for data in sets]
    train_windows = [open_windows(data, "train", T) for data in sets]
    loader = train_loader(sets, T, cfg.seed, cfg.documents, cfg.loss_per)
    tokenizer = load_tokenizer(sets[0].folder)
    prompt = [*tokenizer.prefix, *tokenizer.encode(cfg.sample_prompt).tolist()]
    prompt = prompt or [tokenizer.eos_id]
    windows = (loader, val_windows, val_documents, train_windows)
    return Data(sets, *windows, tokenizer, prompt, opened_files(sets))


@memory_advice("for the weights alone: make n_layer or n_embd smaller")
def open_model(
    cfg: TrainConfig, machine: Machine, origin: Origin, sets: list[DataSet]
) -> tuple[GPT, Earlier | None]:
    """Return the model on its device, and what the checkpoint of a resumed run says about the run.

    The weights are drawn at random, or come from the run's own checkpoint, or from another model.
    """
    vocab_size = sets[0].meta["vocab_size"]
    earlier = None
    if origin.path is None:
        model = GPT(model_config(cfg, vocab_size))
        torch.manual_seed(cfg.seed)  # the same weights on every rank
        model.init_weights(cfg.init)
    elif origin.resume:
        if machine.local_rank == 0 and not machine.is_main:
            check_copy(origin.path)  # on the computer of rank 0, find_origin() has checked it
        earlier = read_training(origin.path)
        model = load_model(origin.path, cfg, vocab_size, earlier)
        check_data(earlier, sets, origin.path)
        check_optimizer(earlier, cfg, origin.path)
    else:
        model = load_model(origin.path, cfg, vocab_size)
        check_tokenizer(origin.path, sets, machine.say)
        if warning := unverified(origin.path):
            machine.say(f"note: {origin.path}: {warning}")
    for block in model.blocks:
        block.recompute = cfg.recompute == "blocks"
    # A model that is shared out stays on the CPU, until each device gets its part.
    return model if shares(cfg, machine) else model.to(machine.device), earlier


def check_ranks(
    cfg: TrainConfig, machine: Machine, origin: Origin, sets: list[DataSet], progress: Progress
) -> None:
    """Raise UserError on all ranks if one of them would train differently from the others."""
    # Each computer may have its own paths and devices.
    facts: dict[str, Any] = {k: v for k, v in asdict(cfg).items() if k not in PLACE}
    facts |= {"torch": torch.__version__, "dtype in use": str(machine.dtype)}
    facts |= {"kind of device": machine.device.type, "resuming": origin.resume}
    facts |= {"first step": progress.step, "first sample": progress.samples}
    if origin.path is not None:
        manifest = origin.path / MANIFEST
        facts["checkpoint"] = "without a manifest"
        if manifest.exists():
            facts["checkpoint"] = file_sha256(manifest)[:12]
    for data in sets:
        for split, about in data.meta["splits"].items():
            facts[f"{data.name}/{split}.bin"] = about["sha256"][:12]
    machine.check_alike(facts)


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
            known = progress.data_files.setdefault(path, [])
            if stamp not in known:
                known.append(stamp)


# --------------------------------------------------------------------------------------------------
# Plan the run, and make the optimizer


def plan_run(
    cfg: TrainConfig,
    machine: Machine,
    model: GPT,
    data: Data,
    progress: Progress,
    earlier: Earlier | None,
) -> tuple[TrainConfig, Plan, Step]:
    """Return the settings with a number for batch_size=auto, the plan, and the size of a step."""
    epoch_tokens = data.epoch_tokens(cfg.block_size)
    place = (progress.step, progress.samples)
    # compile=auto depends on the length of the run, which is known before batch_size=auto is.
    draft = make_plan(replace(cfg, batch_size=1), machine.world, epoch_tokens, *place)
    flops = model.flops_per_token(cfg.block_size) * draft.tokens_at(draft.steps)
    compiled = wants_compile(cfg, machine.device.type, flops)
    if cfg.batch_size == "auto":
        most = earlier.settings["batch_size"] if earlier else None
        B = fit_batch(cfg, model, data.loader, machine, compiled, most)
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


def end_run(
    job: Job, folder: Path, gave_up: bool, broken: str, stopping: bool, signals: list[int]
) -> None:
    """Do nothing if all went well. Else say what happened, and end with the exit code for it.

    broken: what not_finite() has returned; here the ranks no longer meet. Raises UserError if the
    last checkpoint could not be written, if the run gave up, or if its weights are not finite.
    """
    step = job.progress.step
    newest = newest_checkpoint(folder / "ckpt") if job.machine.is_main else None
    goes_on = f"--init_from=resume goes on from {newest}" if newest else "nothing was saved yet"
    if job.saver.failed:
        raise UserError(f"{job.saver.failed}: make room; {goes_on}")
    if gave_up:
        many = f"{job.progress.bad_in_a_row} steps in a row without a finite loss and gradient"
        ways = f"lower lr, or try dtype=float32, or read {folder}/bad_steps/"
        left = f"the newest checkpoint is {newest}" if newest else "no checkpoint was saved"
        raise UserError(f"{many}, the last at step {step}: {ways}; {left}")
    if broken:
        unsaved = f"NaN or infinity in {broken}, so it was not saved: lower lr; {goes_on}"
        raise UserError(f"the run has ended at step {step} with {unsaved}")
    if stopping:
        job.machine.say(f"stopped by a signal after step {step}: {goes_on}")
        # If the list is empty, another rank has caught the signal.
        sys.exit(128 + (signals[-1] if signals else signal.SIGTERM))


if __name__ == "__main__":
    run(main, needs_output=False)

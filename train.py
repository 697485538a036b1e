"""Train a GPT. The settings are in training/settings.py: `python train.py --help` prints them.

    python train.py config/demo.py                                       # a laptop's CPU, or one GPU
    torchrun --nproc_per_node=6 train.py config/train_100m.py            # six GPUs
    python train.py config/train_100m.py --n_layer=2 --max_steps=20      # any setting can be changed

Read it from main() down. Its last page is the loop; what comes before stands in the order in which it
happens: open what is trained, plan, wrap. One update of the weights is take_step() in training/step.py.

Words: B = batch_size, T = block_size. A *step* is one update of the weights, made of `accum`
*micro-steps* on each of `world` processes (ranks), each of B x T tokens. All intervals count steps.
"""

import gc
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from configurator import UserError, parse, run
from hardware.disk import MANIFEST, Lock, file_sha256
from hardware.machine import Machine, memory_advice, start, stop_signals, to_device
from hardware.peak import peak_tflops
from model import GPT
from text.dataset import DataSet, load_tokenizer, open_datasets, verify_new
from text.tokenizer import SentencePiece, Tiktoken
from text.windows import Loader, Windows, open_windows, train_loader
from training.checkpoint import Saver
from training.evaluate import evaluate
from training.huggingface import unverified
from training.parallel import fit_batch, wrap
from training.plan import Plan, lr_at, make_plan
from training.progress import Progress
from training.report import Clock, Metrics, banner
from training.resume import (
    Earlier,
    Origin,
    check_copy,
    check_data,
    check_tokenizer,
    find_origin,
    load_model,
    read_training,
    settings_changed,
)
from training.runs import newest_checkpoint, replace_run, run_folder, sweep
from training.settings import TrainConfig, model_config, wants_compile
from training.step import Batch, read_ahead, take_step


def main() -> None:
    cfg = parse(TrainConfig, doc=__doc__)
    machine = start(cfg.device, cfg.dtype)
    folder = Path(cfg.out_dir) / cfg.run_name
    with ExitStack() as held:

        def hold() -> Lock | None:
            return held.enter_context(run_folder(folder)) if machine.is_main else None

        # One process decides what becomes of the folder, and nobody disturbs it until the run is over.
        lock = machine.together(hold)
        train(cfg, machine, folder, lock)


# ---------------------------------------------------------------------------------------------------
# Open what is trained


@dataclass(frozen=True)
class Data:
    """What a run reads. All of it is open: the folders may be gone when a bad step asks for its texts."""

    sets: list[DataSet]
    loader: Loader
    val_windows: list[Windows]  # of each val.bin
    tokenizer: SentencePiece | Tiktoken

    def epoch_tokens(self, block_size: int) -> int:
        return sum(windows.n_windows for windows in self.loader.splits) * block_size


def open_data(cfg: TrainConfig) -> Data:
    sets = open_datasets(cfg.dataset, cfg.data_dir)
    val_windows = [open_windows(data, "val", cfg.block_size) for data in sets]
    tokenizer = load_tokenizer(sets[0].folder)
    return Data(sets, train_loader(sets, cfg.block_size, cfg.seed), val_windows, tokenizer)


@memory_advice("for the weights alone: make n_layer or n_embd smaller")
def open_model(cfg: TrainConfig, machine: Machine, origin: Origin, sets: list[DataSet]) -> tuple[GPT, Earlier | None]:
    """(the model on its device, what the checkpoint says of its run): new, resumed, or of another run."""
    wanted = model_config(cfg, sets[0].meta["vocab_size"])
    earlier = None
    if origin.path is None:
        model = GPT(wanted)
        torch.manual_seed(cfg.seed)  # the same weights on every rank
        model.init_weights(cfg.init)
    elif origin.resume:
        if machine.local_rank == 0 and not machine.is_main:
            check_copy(origin.path)  # rank 0 has done so for its own computer
        earlier = read_training(origin.path)
        # A run that began with somebody's model has that model's shape, whatever its settings say.
        # So the settings of now are compared with the settings of then, not with the model.
        known = {k: v for k, v in earlier.settings.items() if hasattr(cfg, k)}
        then = model_config(replace(cfg, **known), wanted.vocab_size)
        model = load_model(origin.path, cfg.dropout, wanted, then)
        check_data(earlier, sets, origin.path)
    else:
        model = load_model(origin.path, cfg.dropout, wanted)
        check_tokenizer(origin.path, sets, machine.say)
        if found := unverified(origin.path):
            machine.say(f"note: {origin.path}: {found}")
    return model.to(machine.device), earlier


def check_ranks(cfg: TrainConfig, machine: Machine, origin: Origin, sets: list[DataSet], progress: Progress) -> None:
    """UserError, on all ranks, if one of them would train something else without noticing."""
    may_differ = "out_dir data_dir init_from device progress wandb wandb_project peak_tflops".split()
    facts: dict[str, Any] = {name: value for name, value in asdict(cfg).items() if name not in may_differ}
    facts |= {"torch": torch.__version__, "dtype in use": str(machine.dtype)}
    facts |= {"kind of device": machine.device.type, "resuming": origin.resume}
    facts |= {"first step": progress.step, "first sample": progress.samples}
    if origin.path is not None:
        manifest = origin.path / MANIFEST
        facts["checkpoint"] = file_sha256(manifest)[:12] if manifest.exists() else "without a manifest"
    for data in sets:
        facts |= {f"{data.name}/{split}.bin": s["sha256"][:12] for split, s in data.meta["splits"].items()}
    machine.check_alike(facts)


def verify_data(machine: Machine, sets: list[DataSet], progress: Progress) -> None:
    """Read the data once, unless the run has: each computer its own files, while its other ranks wait."""

    def verified_here() -> dict[str, list[int]]:
        return verify_new(sets, progress.data_files, machine.say) if machine.local_rank == 0 else {}

    of_ranks = machine.gather(machine.together(verified_here))
    progress.data_files = {}
    for stamps in of_ranks:
        for path, stamp in stamps.items():
            known = progress.data_files.setdefault(path, [])
            if stamp not in known:
                known.append(stamp)


# ---------------------------------------------------------------------------------------------------
# Plan the run, and make what trains the model


def plan_run(
    cfg: TrainConfig, machine: Machine, model: GPT, data: Data, progress: Progress, earlier: Earlier | None
) -> tuple[TrainConfig, Plan, bool]:
    """(the settings, with a number for batch_size=auto, the plan, and whether the model is compiled)."""
    epoch_tokens = data.epoch_tokens(cfg.block_size)
    place = (progress.step, progress.samples)
    length = make_plan(replace(cfg, batch_size=1), machine.world, epoch_tokens, *place)
    flops = model.flops_per_token(cfg.block_size) * length.tokens_at(length.steps)
    compiled = wants_compile(cfg, machine.device.type, flops)
    if cfg.batch_size == "auto":
        most = earlier.settings["batch_size"] if earlier else None
        cfg = replace(cfg, batch_size=fit_batch(cfg, model, data.loader, machine, compiled, most))
    return cfg, make_plan(cfg, machine.world, epoch_tokens, *place), compiled


def make_optimizer(
    cfg: TrainConfig, machine: Machine, model: GPT, earlier: Earlier | None
) -> tuple[torch.optim.AdamW, torch.amp.GradScaler]:
    """AdamW, and the scaler of fp16's gradients, which does nothing in another dtype."""
    groups = model.param_groups(cfg.weight_decay)
    # The fused one of mps takes found_inf, but applies the step all the same (torch 2.13).
    fused = machine.device.type in ("cuda", "cpu")
    optimizer = torch.optim.AdamW(groups, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), fused=fused)
    scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.dtype == torch.float16)
    if earlier:
        # The moments are the checkpoint's; betas and weight decay are as they are set now.
        moments = earlier.training.pop("optimizer")["state"]
        optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})
        if saved := earlier.training.pop("scaler"):  # empty where that run was not in fp16
            scaler.load_state_dict(saved)
    return optimizer, scaler


def say_what_is_resumed(cfg: TrainConfig, machine: Machine, plan: Plan, origin: Origin, earlier: Earlier) -> None:
    machine.say(f"resumed from {origin.path} at step {plan.begun_step}")
    if changed := settings_changed(earlier, cfg):
        machine.say(f"settings that were changed since: {', '.join(changed)}")
    if plan.steps == plan.begun_step:
        machine.say("nothing is left to do: to train on, raise max_steps, max_epochs or max_tokens")


# ---------------------------------------------------------------------------------------------------
# The loop


def on_device(rows: Iterator[np.ndarray], machine: Machine, clock: Clock) -> Iterator[Batch]:
    while True:
        with clock.waiting_for_data():
            batch = to_device(next(rows), machine.device)
        yield batch


def train(cfg: TrainConfig, machine: Machine, folder: Path, lock: Lock | None) -> None:
    """One run, or what is left of it. folder: its own; lock: of it, on rank 0."""
    origin = machine.decide(lambda: find_origin(cfg, folder, machine.say))
    data = machine.together(lambda: open_data(cfg))
    model, earlier = machine.together(lambda: open_model(cfg, machine, origin, data.sets))
    progress = Progress.of_checkpoint(earlier.training, cfg.max_bad_steps) if earlier else Progress()
    check_ranks(cfg, machine, origin, data.sets, progress)
    verify_data(machine, data.sets, progress)
    cfg, plan, compiled = plan_run(cfg, machine, model, data, progress, earlier)
    optimizer, scaler = make_optimizer(cfg, machine, model, earlier)
    peak, peak_source = peak_tflops(machine.device, machine.dtype, cfg.peak_tflops)
    machine.say(banner(cfg, data.sets, machine, plan, model, compiled, peak_source, origin.path is None))
    if earlier:
        say_what_is_resumed(cfg, machine, plan, origin, earlier)
    advice = plan.smaller(cfg.block_size)
    forward = wrap(model, machine, data.loader if compiled else None, plan.batch_size, advice)

    ckpt_dir = folder / "ckpt"
    machine.decide(lambda: sweep(ckpt_dir))
    if not origin.resume and (replaced := machine.decide(lambda: replace_run(folder))):
        machine.say(f"the earlier run's checkpoints are in {replaced} until this one has a whole one")
    start_step = progress.step
    step_windows = plan.step_tokens // cfg.block_size  # of all ranks
    flops = model.flops_per_token(cfg.block_size)
    all_peaks = peak and peak * machine.world
    reader = closing(read_ahead(data.loader, progress.samples, plan.batch_size, machine))
    with stop_signals() as signals, memory_advice(advice), reader as rows:
        metrics = machine.together(
            lambda: Metrics(folder, cfg, machine, plan, data.sets, data.tokenizer, progress, lock)
        )
        progress.wandb_id = metrics.wandb_id
        saver = machine.together(
            lambda: Saver(ckpt_dir, cfg, data.sets, data.tokenizer, origin.damaged, lock, machine.say, metrics.log_save)
        )
        clock = Clock(machine, start_step)
        batches = on_device(rows, machine, clock)
        stopping = False
        for step in range(start_step, plan.steps + 1):  # the extra turn only evaluates and saves
            gave_up = progress.bad_in_a_row >= cfg.max_bad_steps
            last = step == plan.steps or stopping or gave_up
            if step > start_step and (step == plan.steps or step % cfg.eval_every == 0):
                with clock.paused():
                    begun = time.perf_counter()
                    val_losses = [
                        evaluate(forward, windows, cfg.eval_tokens, plan.batch_size, machine)
                        for windows in data.val_windows
                    ]
                    val_loss = metrics.log_eval(step, val_losses, time.perf_counter() - begun)
                progress.add_evaluation(val_loss)
            due = step % cfg.save_every == 0 or step == progress.best_step
            # After a bad step the weights are those from before it. They are good, unless it is they
            # that make the loss bad.
            good = not progress.bad_in_a_row or (last and all_finite(model))
            if step > start_step and (last or due) and good and machine.is_main:
                with clock.paused():  # for the copy; a thread writes it
                    saver.save(model, optimizer, scaler, progress)
            if last:
                break

            lr = lr_at(step, plan.steps, cfg)
            for group in optimizer.param_groups:
                group["lr"] = lr
            # What dropout draws depends on the step alone, and not on where the run was resumed.
            torch.manual_seed(cfg.seed + 1_000_003 * (step + 1) + machine.rank)
            result = take_step(forward, model, optimizer, scaler, batches, plan.accum, machine, cfg.grad_clip, signals)
            loss, stopping, grad_norm = result()  # the one wait of a step, while the optimizer runs
            samples = range(progress.samples, progress.samples + step_windows)
            outcome = progress.add_step(step_windows, loss, grad_norm, scaler)

            # ---- everything below only reports ----
            metrics.log_outcome(outcome, loss, grad_norm, scaler, samples)
            if step == start_step:
                gc.collect()
                gc.freeze()  # what lives now lives on: the collector need not look at it every time
            done = progress.step
            if outcome == "taken" and (done == 1 or done % cfg.log_every == 0 or done == plan.steps):
                metrics.log_step(done, loss, lr, grad_norm, flops, all_peaks, clock)
            elif step == start_step:  # the first step after a resume warms up: it is not timed
                clock.restart(done)
        saver.wait()
        machine.gather(None)  # no rank leaves before the checkpoint is on the disk

    metrics.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    say_how_it_ended(folder, cfg, machine, progress, saver, gave_up, stopping, signals)


def all_finite(model: torch.nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in model.parameters())


def say_how_it_ended(
    folder: Path,
    cfg: TrainConfig,
    machine: Machine,
    progress: Progress,
    saver: Saver,
    gave_up: bool,
    stopping: bool,
    signals: list[int],
) -> None:
    """Only of a run that did not come to its end. It leaves with the exit code that says so."""
    if saver.failed:
        raise UserError(f"{saver.failed}: make room, and --init_from=resume goes on from the one before")
    newest = newest_checkpoint(folder / "ckpt") if machine.is_main else None
    if gave_up:
        many = f"{progress.bad_in_a_row} steps in a row without a finite loss and gradient"
        ways = f"lower lr, or try dtype=float32, or read {folder}/bad_steps/"
        left = f"the newest checkpoint is {newest}" if newest else "no checkpoint was saved"
        raise UserError(f"{many}, the last at step {progress.step}: {ways}; {left}")
    if stopping:
        goes_on = f"--init_from=resume goes on from {newest}" if newest else "nothing was saved yet"
        machine.say(f"stopped by a signal after step {progress.step}: {goes_on}")
        sys.exit(128 + (signals[-1] if signals else signal.SIGTERM))  # none: another rank was told to


if __name__ == "__main__":
    run(main, needs_output=False)

"""eveningGPT: train a GPT. training/settings.py has the settings.

    # on a CPU, or on one GPU
    python train.py config/demo.py
    # on six GPUs
    torchrun --nproc_per_node=6 train.py config/train_100m.py
    # with other settings
    python train.py config/docs.py --n_layer=2 --max_steps=20
    # from the newest checkpoint
    python train.py --run_name=docs --init_from=resume
    # fine-tune a model
    python train.py config/docs.py --dataset=mine --init_from=FOLDER --run_name=new

Without --dataset it trains on the data set that was prepared last. A resumed run keeps its data set
and all other settings, except those that are given now.

Terms: B = batch_size, T = block_size. A *step* is one update of the weights. It consists of `accum`
*micro-steps* on each of `world` processes (*ranks*); a micro-step reads B x T tokens. All intervals
are counted in steps. A *bad step* has a loss or gradient that is not finite; it leaves the weights
as they are. A *window* is T + 1 tokens: T inputs, each with the token that follows as its target.
"""

# Read main() first: it is the whole run, in order. Then take_step(), one update of the weights.

import gc
import math
import signal
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while torch is loaded, until run()

import torch

from configurator import UserError, given_settings, row, run
from hardware.kernels import pick_kernels
from hardware.limits import memory_advice, memory_capacity
from hardware.machine import (
    Clock,
    HostCopy,
    Machine,
    Stopped,
    all_sum,
    autocast,
    start,
    stop_signals,
)
from hardware.peak import peak_tflops
from hardware.sharded import full_tensor, local_shard
from model import GPT
from text.dataset import load_tokenizer, open_datasets, train_loader
from training import startup
from training.banner import banner, pace_note
from training.batch_size import check_capacity, halve_batch, plan_run
from training.batches import Batch, first_batch, read_ahead
from training.checkpoint import Saver, load_optimizer, read_state, set_newer_aside, shared_files
from training.evaluate import (
    evaluate_all,
    evaluation_windows,
    prompt_ids,
    sample_length,
    write_text,
)
from training.huggingface import from_pretrained
from training.memory import Workload, optimizer_memory
from training.optimizer import make_optimizer
from training.parallel import (
    compile_now,
    full_weights,
    is_sharded_run,
    sync_gradients,
    trial_fits,
    wrap,
)
from training.plan import Progress
from training.report import Report, first_records
from training.run_folder import RunFolder
from training.schedule import lr_at, momentum_at
from training.settings import TrainConfig, model_config, with_data
from training.shutdown import end_run


def main() -> None:
    # ---- Settings. A resumed run has those of its checkpoint, except for what is given now.
    cfg = startup.settings_of_run(given_settings(TrainConfig, doc=__doc__))

    # ---- This process: its device and dtype, and the other ranks of the run.
    machine = start(cfg.device, cfg.dtype, trim_heap=cfg.shard != "none")

    # ---- Rank 0 locks the folder of the run, and decides what the run starts from (a checkpoint, a
    # model folder, or None: random weights) and which data it reads. Then it broadcasts this.
    # recorded: the results of these weights that are known, so that nothing is evaluated twice.
    folder = RunFolder(Path(cfg.out_dir) / cfg.run_name, locks=machine.is_main)
    init_path = None
    recorded = {}
    if machine.is_main:
        init_path = startup.find_start(cfg, folder.path)
        recorded = startup.recorded_results(init_path, folder.path)
        cfg = replace(with_data(cfg), resume="no")  # init_path is the decision
    cfg, init_path, recorded = machine.broadcast((cfg, init_path, recorded))
    resumes = "saved" in recorded  # init_path is a checkpoint of this run

    # ---- Data: memory maps of the token files, and the windows to read from them. One process on
    # each computer verifies the files.
    T = cfg.block_size
    sets = open_datasets(cfg.dataset, cfg.data_dir, hashes=machine.local_rank == 0)
    tokenizer = load_tokenizer(sets[0].folder)
    loader = train_loader(sets, T, cfg.seed, cfg.documents, cfg.loss_per, cfg.loss_on)
    evaluated = evaluation_windows(sets, cfg)
    cfg, prompt = prompt_ids(cfg, sets, tokenizer)
    length = sample_length(sets)

    # ---- Model: initialised, or read from a checkpoint of this run, or to be fine-tuned.
    saved = None
    progress = Progress()
    with memory_advice("for the weights alone: make n_layer or n_embd smaller"):
        if init_path is None:
            torch.manual_seed(cfg.seed)  # the same weights on every rank
            model = GPT(model_config(cfg, sets[0].meta["vocab_size"]), cfg.init)
        elif resumes:
            # Rank 0 has verified the files on its computer. The other computers do it here.
            elsewhere = machine.local_rank == 0 and not machine.is_main
            saved = read_state(init_path, verify=elsewhere)
            model = from_pretrained(init_path, verify=False, dropout=cfg.dropout)
            startup.check_fits(init_path, saved, model.config, cfg, sets)
            progress, recorded = startup.progress_of(saved, cfg, sets, recorded)
            cfg = startup.with_origin(cfg, saved)
        else:
            model = startup.model_to_tune(init_path, cfg, sets, verify=machine.local_rank == 0)
        # A model to be sharded stays on the CPU until each device gets its shard.
        if not is_sharded_run(cfg, machine):
            model.to(machine.device)

    # ---- All ranks must have the same files and programs. The smallest memory limits the batch.
    code = startup.code_sha256()
    machine.require_same(startup.facts_of_rank(machine, code, sets, init_path))
    capacity = min(machine.gather(memory_capacity(machine.device)))

    # ---- Plan: batch size, accumulation, steps, compilation; and the memory that they need.
    epoch_tokens = sum(windows.n_windows for windows in loader.splits) * T
    # batch_size=auto is tried below. There is no trial if weights are sharded: the other ranks
    # would wait for one that runs out of memory.
    tries = cfg.batch_size == "auto" and not is_sharded_run(cfg, machine)
    saved_B = saved.settings["batch_size"] if saved else 0
    cfg, plan = plan_run(cfg, model, machine, epoch_tokens, capacity, progress, saved_B)
    workload = Workload.of(cfg, plan, machine)
    check_capacity(model, workload, capacity)
    peak, source = peak_tflops(machine.device, machine.dtype, cfg.peak_tflops)
    machine.print0(banner(cfg, sets, loader, machine, plan, model))
    machine.print0(row("       peak: ", source))
    flops = model.flops_per_token(T)
    if note := pace_note(plan.step_tokens / machine.world * flops, peak):
        machine.print0(note)
    if saved:
        machine.print0(startup.summary(init_path, saved, cfg, sets, progress, code))
    if plan.steps == progress.step:
        machine.print0("nothing is left to do: raise max_steps, max_epochs or max_tokens")
    progress.code = code

    # ---- The model as it runs: faster kernels, compiled, in DDP or sharded over the ranks.
    model.use(pick_kernels(machine.device, plan.compiled))
    forward = wrap(cfg, model, machine, plan.compiled)
    # batch_size=auto: run two micro-steps as a trial, and halve the batch until they fit.
    state_bytes, _ = optimizer_memory(model, workload)
    batch = first_batch(loader, plan, machine)
    while tries and not trial_fits(forward, batch, machine, state_bytes):
        cfg, plan = halve_batch(cfg, plan, machine.world, progress)
        sizes = f"batch_size={plan.batch_size}, {plan.accum} micro-steps"
        machine.print0(f"note: out of memory: now {sizes}")
        batch = first_batch(loader, plan, machine)
    if plan.compiled:
        with memory_advice(plan.memory_hint(T)):
            compile_now(forward, batch, machine, tokenizer.eos_id)

    # ---- Optimizer, and the scaler of fp16 gradients, which does nothing in other dtypes.
    optimizer = make_optimizer(cfg, machine, model)
    scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.dtype == torch.float16)
    if saved:
        load_optimizer(optimizer, scaler, saved.state)

    # ---- The run's folder: its records so far, the reports, and the checkpoints.
    records = []
    if machine.is_main:
        if not folder.is_held():
            raise UserError(f"{folder.path} was moved before the first step: start again")
        if resumes:
            set_newer_aside(init_path)
        elif cfg.overwrite:
            folder = folder.with_earlier_renamed()
        records = first_records(folder.path, cfg, plan, sets, model.config, progress)
    report = Report(cfg, machine, plan, sets, progress, folder, records)
    files = shared_files(cfg, sets, tokenizer, model.config) if machine.is_main else {}
    saver = Saver(folder, model.config, files, cfg.keep, machine, report.saved, progress.step)

    # ---- The loop. At the top of an iteration, `step` steps are done: save, evaluate and sample
    # these weights, if that is due and was not done before. Then train one more step. The last
    # iteration, at the end of the run or after too many bad steps, stops before that. A signal ends
    # the loop at any point, and the weights of the last complete step are saved.
    clock = Clock(machine, progress.step)
    B = plan.batch_size
    stopped = False
    with (
        stop_signals(machine.signals),
        memory_advice(plan.memory_hint(T)),
        closing(report),
        closing(saver),
        closing(read_ahead(loader, progress.data_position, B, machine, clock)) as batches,
    ):
        try:
            for step in range(plan.start_step, plan.steps + 1):
                # ---- Saving, evaluating, sampling, with the clock stopped.
                at_end = step == plan.steps
                last = at_end or progress.gives_up()
                # A bad step was skipped: the weights are those from before it.
                saves = last or (step % cfg.save_every == 0 and not progress.bad_in_a_row)
                evaluates = recorded.get("evaluates", at_end or step % cfg.eval_every == 0)
                samples = cfg.sample_every and (at_end or step % cfg.sample_every == 0)
                if saves:
                    with clock.paused():
                        saver.save(model, optimizer, scaler, progress)
                if evaluates:
                    with clock.paused():
                        began = time.perf_counter()
                        losses = evaluate_all(forward, evaluated, cfg, B, machine)
                        val_loss = report.evaluation(step, losses, time.perf_counter() - began)
                        progress.add_evaluation(val_loss)
                        if step == progress.best_step:
                            saver.save(model, optimizer, scaler, progress)
                if samples and "sample" not in recorded:
                    # ArithmeticError: the logits are not finite. The loss shows that too.
                    with clock.paused(), full_weights(forward), suppress(ArithmeticError):
                        text = write_text(model, tokenizer, prompt, length, cfg.seed, machine)
                        report.sample(step, text)
                if saves or evaluates:
                    saver.prune(progress)
                recorded = {}
                if last:
                    break

                # ---- One step of training. Learning rate and momentum are functions of the
                # fraction of the run that is done.
                position, end = plan.position(step), plan.position(plan.steps)
                lr = lr_at(position, end, cfg)
                for group in optimizer.param_groups:
                    group["lr"] = lr * group["scale"]  # scale: embed_lr, vector_lr, or 1
                    group["muon_momentum"] = momentum_at(position, end, cfg)
                # The seed of dropout depends on the step and the rank, but not on the step at which
                # the run was resumed. No two ranks share a seed: 1,000,003 exceeds their number.
                torch.manual_seed(cfg.seed + 1_000_003 * (step + 1) + machine.rank)
                numbers = take_step(
                    forward, optimizer, scaler, batches, plan.accum, machine, cfg.grad_clip
                )
                # The only wait for the device, except where something is logged, evaluated or
                # saved: for these numbers, not for the update.
                loss, grad_norm, signalled = numbers.wait()

                # ---- Reporting it.
                outcome = progress.add_step(plan.step_tokens // T, loss, grad_norm, scaler)
                report.outcome(outcome, loss, grad_norm, scaler)
                to_log = progress.step in (1, plan.steps) or progress.step % cfg.log_every == 0
                if to_log and outcome in ("taken", "no target"):
                    report.step(loss, lr, grad_norm, flops, peak, clock)
                if step == plan.start_step:
                    gc.collect()
                    gc.freeze()  # these objects will stay: the collector can skip them
                    clock.restart(progress.step)  # after a resume, this step has warmed up
                if signalled:
                    raise Stopped
        except Stopped:
            stopped = True
            optimizer.zero_grad(set_to_none=True)  # the memory is needed to save
        saver.save(model, optimizer, scaler, progress)
        saver.prune(progress)
    end_run(machine, saver, progress, stopped)


def take_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    batches: Iterator[Batch],
    accum: int,
    machine: Machine,
    grad_clip: float = 0.0,
) -> HostCopy:
    """Update the weights once, with the gradients of `accum` batches on each rank.

    Return three numbers on their way to the host: the loss, a mean over all ranks; the norm of the
    gradient before clipping; and the number of signals that have arrived at all ranks. If one
    arrives before the last micro-step, raise Stopped and leave the weights unchanged: a step may
    take hours.

    On a GPU with AdamW or Muon the host runs ahead: it launches the forward and backward passes,
    the sum over the ranks and the update without waiting. Only then does the caller wait, for these
    three numbers alone, while the device still updates the weights.

    model: the result of wrap(): a GPT, which may be compiled, and wrapped in DDP or Shards. scaler:
    scales the gradients of fp16, see update(); else it does nothing. grad_clip: the largest norm of
    the gradient; 0: no clipping. A step whose loss or gradient is not finite leaves the weights
    unchanged, as does one without a target: its loss is NaN, its gradient 0.
    """
    # 1. Forward and backward: the gradients of all micro-steps add up.
    # Of this rank: its loss, and the weight of its targets, if they have weights.
    mean_loss, mean_weight = torch.zeros(2, device=machine.device)
    weighted = False
    for micro in range(accum):
        # With several ranks, the sum in send() also tells of signals: before the first micro-step,
        # no other communication is needed.
        if micro > 0 or machine.world == 1:
            machine.stop_if_asked()
        batch = next(batches)
        with sync_gradients(model, micro == accum - 1):
            with autocast(machine):
                loss = model(*batch) / accum  # batches have equal sizes: a mean of means is right
            scaler.scale(loss).backward()
        mean_loss += loss.detach()
        if weighted := batch.weights is not None:
            mean_weight += batch.weights.mean() / accum

    # 2. Clip the gradient, and start to send the loss and the norm to the host.
    scaler.unscale_(optimizer)
    if weighted:
        mean_loss *= weight_gradients(model, mean_weight, machine)
    grad_norm = clip_gradient(model, grad_clip or math.inf)
    numbers = send(mean_loss, grad_norm, machine)

    # 3. Update the weights, unless the loss or the gradient is not finite.
    update(optimizer, scaler, numbers)
    optimizer.zero_grad(set_to_none=True)
    return numbers


def weight_gradients(
    model: torch.nn.Module, mean_weight: torch.Tensor, machine: Machine
) -> torch.Tensor:
    """Make the gradients those of a weighted mean. Return the factor from the plain mean to it.

    The loss is sum(w l) / sum(w) over the n positions of all ranks: l is the loss of a position, w
    its weight. The gradient so far is that of sum(w l) / n, since DDP has averaged it over the
    ranks. Multiply it by n / sum(w), which is one over the mean of mean_weight. If no target counts
    in this step, the loss is 0 / 0, which is NaN, and the gradient is 0: update() skips the step.
    """
    factor = machine.world / all_sum(mean_weight)
    gradients = [local_shard(p.grad) for p in model.parameters() if p.grad is not None]
    torch._foreach_mul_(gradients, factor.clamp(max=1e12))
    return factor


def clip_gradient(model: torch.nn.Module, max_norm: float) -> torch.Tensor:
    """Scale the gradient down to max_norm if its norm is larger. Return the norm before that.

    This keeps no reference to a gradient: Muon frees them while it updates the weights.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = full_tensor(torch.nn.utils.get_total_norm(gradients))
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm


def send(mean_loss: torch.Tensor, grad_norm: torch.Tensor, machine: Machine) -> HostCopy:
    """Send loss, norm and the number of signals to the host, each of all ranks.

    The norm needs no sum: each rank has that of the full gradient.
    """
    signalled = torch.full_like(mean_loss, len(machine.signals))
    loss, signalled = all_sum(torch.stack([mean_loss / machine.world, signalled]))
    return HostCopy(torch.stack([loss, grad_norm, signalled]))


def update(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, numbers: HostCopy
) -> None:
    """Update the weights, unless one of the numbers, loss and norm among them, is not finite."""
    if optimizer.defaults.get("fused"):
        # A fused AdamW, and Muon, skip the step if this flag, which GradScaler also uses, is 1. The
        # device reads it, so the host does not have to wait for the loss.
        # pyrefly: ignore[missing-attribute]
        optimizer.found_inf = 1.0 - numbers.on_device.isfinite().all().float()
        optimizer.step()
    elif all(map(math.isfinite, numbers.wait())):
        optimizer.step()
    # fp16 cannot hold numbers below 6e-8. So the loss, and with it each gradient, was multiplied by
    # a large scale; unscale_() has divided the gradients by it again. Where they were not finite,
    # the scale is lowered here; after many good steps, it is raised. scaler.step() would wait.
    scaler.update()


if __name__ == "__main__":
    run(main, needs_output=False)

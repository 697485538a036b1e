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
    python train.py config/demo.py --dataset=mine --init_from=FOLDER --run_name=new

Without --dataset it trains on the data set that was prepared last. A resumed run keeps its data set
and all other settings, except those that are given now.

Terms: B = batch_size, T = block_size. A *step* is one update of the weights. It consists of `accum`
*micro-steps* on each of `world` processes (*ranks*); a micro-step reads B x T tokens. All intervals
are counted in steps. A *bad step* has a loss or gradient that is not finite; it leaves the weights
as they are. A *window* is T + 1 tokens: T inputs, each with the token that follows as its target.
"""

# Read loop() first: it trains. Above it stand main() and train(), below it what loop() calls. One
# update of the weights is take_step() in training/step.py. What is done once, before the first
# step, stands in training/start.py: what the run starts from, its data, its plan, its model.
#
# Several processes work on one run. They keep together by three methods of `machine`: together(f)
# runs f on every rank, and if one fails, all of them stop; decide(f) runs f on rank 0 and gives its
# result to all ranks; gather(x) gives all ranks the list of every rank's x.

import gc
import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from training.job import Job
from training.step import Batch, read_ahead, take_step

from configurator import UserError, given, run
from hardware.machine import Clock, Machine, memory_advice, part, stop_signals
from training.checkpoint import newest_checkpoint
from training.evaluate import evaluate, write_text
from training.plan import lr_at, momentum_at
from training.settings import TrainConfig


def main() -> None:
    options = given(TrainConfig, doc=__doc__)
    # This loads what a run needs once, to begin. The loop below does not need it.
    from training.start import open_run

    with open_run(options) as job:
        train(job)


def train(job: Job) -> None:
    """Train one run, from its beginning or from its newest checkpoint, to its end."""
    machine = job.machine
    B = job.plan.batch_size
    advice = job.plan.smaller(job.cfg.block_size)
    clock = Clock(machine, job.progress.step)
    with stop_signals() as signals, memory_advice(advice):
        reader = read_ahead(job.data.loader, job.progress.samples, B, machine, clock, signals)
        with closing(reader) as batches:
            with closing(job.report):
                stopped = loop(job, batches, clock, signals)
                job.saver.wait()
            machine.gather(None)  # when one rank ends, the last checkpoint is on the disk

    if newest := newest_checkpoint(job.folder / "ckpt"):
        machine.say(f"checkpoint: {newest}")
    if dist.is_initialized():
        dist.destroy_process_group()
    end_run(job, stopped, signals)


def loop(job: Job, batches: Iterator[Batch | None], clock: Clock, signals: list[int]) -> bool:
    """Train to the end of the run. Return whether a signal stopped it before.

    batches: of this rank. clock: measures the time between log lines; read_ahead() adds the waits
    for data to it. signals: those that have arrived; stop_signals() adds them. The run also ends
    after too many bad steps in a row.
    """
    cfg = job.cfg
    machine = job.machine
    plan = job.plan
    optimizer = job.optimizer
    scaler = job.scaler
    progress = job.progress
    flops = job.model.flops_per_token(cfg.block_size)
    step_windows = plan.step_tokens // cfg.block_size  # of all ranks
    start_step = progress.step
    clock.restart(start_step)
    stopping = False
    # At the top of an iteration, `step` steps are done: evaluate and save these weights. Then train
    # one step more. The last iteration ends after its first half.
    for step in range(start_step, plan.steps + 1):
        last = step == plan.steps or stopping or progress.gives_up()
        if step > start_step:
            with clock.paused():
                if step == plan.steps or step % cfg.eval_every == 0:
                    evaluate_all(job, step)
                if cfg.sample_every and (step == plan.steps or step % cfg.sample_every == 0):
                    show_sample(job, step)
                if wants_checkpoint(job, step, last):
                    save(job, step)
        if last:
            return stopping

        # Train one step. lr_at() and momentum_at() (training/plan.py) are functions of the step and
        # the settings alone. `scale` is embed_lr for embeddings, vector_lr for vectors, else 1.
        lr = lr_at(step, plan.steps, cfg)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["scale"]
            group["muon_momentum"] = momentum_at(step, plan.steps, cfg)
        # What dropout draws depends on seed, step and rank, but not on where the run was resumed.
        # 1,000,003 exceeds the number of ranks, so no two ranks share a seed in any two steps.
        torch.manual_seed(cfg.seed + 1_000_003 * (step + 1) + machine.rank)
        result = take_step(
            job.forward, optimizer, scaler, batches, plan.accum, machine, cfg.grad_clip
        )
        # A signal ends a process that trains alone in the middle of a step, which is given up. Of
        # several processes each ends its step, and any_rank() then tells all of them to stop.
        if result is None:
            # Save the weights from before it, unless the top of this iteration has saved them.
            if step > start_step and not wants_checkpoint(job, step, last=False):
                save(job, step)
            return True
        told_to_stop = machine.any_rank(len(signals) > 0)
        # To call these waits for the device: with AdamW and Muon, for the only time in a step.
        loss, grad_norm = result()
        stopping = told_to_stop()
        outcome = progress.add_step(step_windows, loss, grad_norm, scaler)

        # Report it.
        job.report.outcome(outcome, loss, grad_norm, scaler)
        if step == start_step:
            gc.collect()
            gc.freeze()  # these objects will stay: the collector need not visit them again
        steps_done = progress.step
        to_log = steps_done in (1, plan.steps) or steps_done % cfg.log_every == 0
        if outcome == "taken" and to_log:
            job.report.step(loss, lr, grad_norm, flops, job.peak, clock)
        elif step == start_step:  # after a resume, the first step is a warm-up: do not time it
            clock.restart(steps_done)


# --------------------------------------------------------------------------------------------------
# What the loop calls


def evaluate_all(job: Job, step: int) -> None:
    """Evaluate the model on the val.bin and the train.bin of every data set.

    The validation loss, and the loss on as many tokens of train, are those of `stream`, whatever
    the setting `documents` is: so runs can be compared. Only the loss by document, and that on
    answers, keep documents apart, as a run with mask or pack does in training.
    """
    T = job.cfg.block_size
    data = job.data
    limit = job.cfg.eval_tokens
    eos_id = data.tokenizer.eos_id
    loss_of = partial(evaluate, job.forward, B=job.plan.batch_size, machine=job.machine)
    started = time.perf_counter()
    on_val = [loss_of(windows, limit) for windows in data.val_windows]
    by_document = [loss_of(windows, limit, eos_id=eos_id) for windows in data.val_documents]
    sizes = [len(windows.fixed_starts(limit)) * T for windows in data.val_windows]
    on_train = list(map(loss_of, data.train_windows, sizes))
    losses = {"val_loss": on_val, "val_document_loss": by_document, "train_eval_loss": on_train}
    val_loss = job.report.evaluation(step, losses, time.perf_counter() - started)
    job.progress.add_evaluation(val_loss)


def show_sample(job: Job, step: int) -> None:
    """Let the model write about 200 bytes of text: three lines of English, two of Chinese."""
    val = job.data.sets[0].meta["splits"]["val"]
    length = math.ceil(200 * val["tokens"] / val["bytes"])
    try:
        with getattr(job.forward, "whole_weights", nullcontext)():  # Shards has it
            text = write_text(
                job.model, job.data.tokenizer, job.data.sample_prompt, length, job.cfg.seed
            )
    except ArithmeticError:
        return  # the loss is not finite either, and has been reported
    job.report.sample(step, text)


def wants_checkpoint(job: Job, step: int, last: bool) -> bool:
    """Return whether to save the weights as they are after `step` steps.

    last: the run ends here.
    """
    is_best = step == job.progress.best_step  # the evaluation of this step was the best so far
    # After a bad step, which was skipped, the weights are those from before it. They are worth
    # saving at the end, and if they are best.
    is_due = step % job.cfg.save_every == 0 and not job.progress.bad_in_a_row
    return last or is_best or is_due


def save(job: Job, step: int) -> None:
    """Save the run, or end it: raise UserError on all ranks.

    It ends if a data file has been changed in place, since the steps since the last checkpoint may
    have read anything, or if a weight is NaN or infinite: no step makes it finite again.
    """
    job.saver.wait()
    job.machine.together(lambda: job.data.check() if job.machine.local_rank == 0 else None)
    if broken := not_finite(job.model, job.machine):
        advice = "lower lr; --init_from=resume goes on from the checkpoint before, if there is one"
        raise UserError(f"step {step} is not saved: NaN or infinity in {broken}: {advice}")
    # This copies the state to host memory, and a thread writes the copy.
    job.saver.save(job.model, job.optimizer, job.scaler, job.progress)


def not_finite(model: torch.nn.Module, machine: Machine) -> str:
    """Return the name of a weight that is NaN or infinite on some rank; "" if there is none."""
    names = (name for name, p in model.named_parameters() if not part(p).isfinite().all())
    return max(machine.gather(next(names, "")))


def end_run(job: Job, stopped: bool, signals: list[int]) -> None:
    """Do nothing if all went well. Else say what happened, and end with the exit code for it.

    Here the ranks no longer meet. Raises UserError if the last checkpoint could not be written, or
    if the run gave up.
    """
    step = job.progress.step
    newest = newest_checkpoint(job.folder / "ckpt") if job.machine.is_main else None
    goes_on = f"--init_from=resume goes on from {newest}" if newest else "nothing was saved yet"
    if job.saver.failed:
        raise UserError(f"{job.saver.failed}; {goes_on}")
    if job.progress.gives_up():
        problem = f"{job.progress.bad_in_a_row} steps in a row without a finite loss and gradient"
        advice = "lower lr, or try dtype=float32, or look at the texts of these steps, and if the"
        advice += " weights are spoiled already, move the newest checkpoints away"
        raise UserError(f"{problem}, the last at step {step}: {advice}; {goes_on}")
    if stopped:
        job.machine.say(f"stopped by a signal after step {step}: {goes_on}")
        # If the list is empty, another rank has caught the signal.
        sys.exit(128 + (signals[-1] if signals else signal.SIGTERM))


if __name__ == "__main__":
    run(main, needs_output=False)

"""The batch size and the plan of a run, from its settings and the memory of the devices."""

from dataclasses import replace

from configurator import UserError
from hardware.machine import Machine
from model import GPT
from training.memory import Workload, bytes_needed, largest_batch
from training.plan import Plan, Progress, best_batch, make_plan
from training.settings import TrainConfig


def plan_run(
    cfg: TrainConfig,
    model: GPT,
    machine: Machine,
    epoch_tokens: int,
    capacity: float,
    progress: Progress | None = None,
    saved_batch_size: int = 0,
) -> tuple[TrainConfig, Plan]:
    """Return the settings with a number for batch_size=auto, and the plan.

    capacity: bytes of memory for a step on each device. progress: of a resumed run.
    saved_batch_size: of its checkpoint; auto keeps this value if it fits.
    """
    # compile=auto depends on the length of the run, which is known before the batch size.
    trial = make_plan(replace(cfg, batch_size=1), machine.world, epoch_tokens, progress)
    flops = model.flops_per_token(cfg.block_size) * trial.tokens_at(trial.steps)
    compiled = wants_compile(cfg, machine.device.type, flops)
    if cfg.batch_size == "auto":
        # Two micro-steps: accumulation needs more memory than one micro-step does.
        workload = Workload.of(cfg, replace(trial, accum=2, compiled=compiled), machine)
        most = largest_batch(model, workload, capacity)
        if machine.device.type == "cpu":  # more than 8,192 tokens are no faster (bench/LOG.md)
            most = min(most, max(1, 8192 // cfg.block_size))
        keeps = 0 < saved_batch_size <= most
        B = saved_batch_size if keeps else best_batch(most, cfg, machine.world)
        cfg = replace(cfg, batch_size=B)
    return cfg, replace(make_plan(cfg, machine.world, epoch_tokens, progress), compiled=compiled)


def check_capacity(model: GPT, workload: Workload, capacity: float) -> None:
    """Raise UserError if a step is predicted to need far more than `capacity` bytes."""
    size = bytes_needed(model, workload)
    if size > 1.25 * capacity:  # on a CPU a prediction may be 25 % too high (training/memory.py)
        gb = f"{size / 1e9:.1f} GB of memory, but only {capacity / 1e9:.1f} GB is available"
        largest = largest_batch(model, workload, capacity)
        advice = f"--batch_size={largest} fits" if largest else "plan.py compares other settings"
        raise UserError(f"batch_size={workload.B} needs {gb}: {advice}")


def wants_compile(cfg: TrainConfig, kind: str, flops: float) -> bool:
    """Return whether to use torch.compile. kind: type of the device; flops: of the whole run.

    With compile=auto, a run on cuda is always compiled. A run on a CPU is compiled if it needs more
    than 5e14 FLOPs, which take ten minutes or more: compiling takes half a minute.
    """
    if cfg.compile == "auto":
        return kind == "cuda" or (kind == "cpu" and flops > 5e14)
    return cfg.compile


def halve_batch(
    cfg: TrainConfig, plan: Plan, world: int, progress: Progress
) -> tuple[TrainConfig, Plan]:
    """Return the settings and the plan with half the batch_size or less.

    Raises UserError if it is 1 already.
    """
    if plan.batch_size == 1:
        raise UserError(f"out of memory {plan.memory_hint(cfg.block_size)}")
    cfg = replace(cfg, batch_size=best_batch(plan.batch_size // 2, cfg, world))
    halved = make_plan(cfg, world, plan.epoch_tokens, progress)
    return cfg, replace(halved, compiled=plan.compiled)

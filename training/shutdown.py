"""The end of a run: its folder is released, and the last lines say how to continue it."""

import signal
import sys

import torch.distributed as dist

from configurator import UserError
from hardware.machine import Machine
from training.checkpoint import Saver
from training.plan import Progress
from training.run_folder import newest_checkpoint


def end_run(machine: Machine, saver: Saver, progress: Progress, stopped: bool) -> None:
    """End the run after its last checkpoint: release its folder, and say how to continue it.

    Exits with 128 + number after a signal. Raises UserError if a checkpoint is missing, or if too
    many steps in a row were bad.
    """
    machine.gather(None)  # no rank ends before the last checkpoint is on the disk
    newest = newest_checkpoint(saver.folder) if machine.is_main else None
    if newest:
        machine.print0(f"checkpoint: {newest}")
    if dist.is_initialized():
        dist.destroy_process_group()
    saver.run.release()
    goes_on = "nothing was saved yet"
    if newest:
        name = saver.folder.parent.name
        goes_on = f"--run_name={name} --init_from=resume continues from {newest}"
    if problem := "; ".join(filter(None, (saver.lost, saver.failed))):
        raise UserError(f"{problem}; {goes_on}")
    if progress.gives_up():
        problem = f"{progress.bad_in_a_row} steps in a row without a finite loss and gradient"
        advice = "lower lr, try dtype=float32, or read the texts of these steps; if the weights are"
        advice += " already damaged, move the newest checkpoints away"
        raise UserError(f"{problem}, the last at step {progress.step}: {advice}; {goes_on}")
    if stopped:
        machine.print0(f"stopped by a signal after step {progress.step}: {goes_on}")
        # If the list is empty, another rank has caught the signal.
        sys.exit(128 + (machine.signals or [signal.SIGTERM])[-1])

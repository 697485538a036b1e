"""The run at wandb, SwanLab or TensorBoard. Rank 0 calls their packages itself, in no thread.

A failure of such a package is one warning, and never ends a run: metrics.jsonl has all numbers.
"""

import importlib
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Tracker:
    """Sends the numbers of a run until close(), or until the tracker's package fails."""

    def __init__(self, name: str, folder: Path, run: dict[str, Any], warn: Callable[[str], None]):
        """Start the run in a folder at a tracker, or continue it.

        run: the record of this start, by first_records(). warn: prints a warning.
        """
        self.name = name
        self.warn = warn
        self.step = run["step"]  # the last one sent
        self.failed = False
        self.log, self.finish = self.attempt(start, name, folder, run) or (None, None)

    def attempt(self, call: Any, *args: Any) -> Any:
        """Call the package and return its result, unless it fails now or has failed before."""
        if self.failed:
            return None
        try:
            return call(*args)
        except (Exception, SystemExit) as e:
            self.failed = True
            reason = " ".join(f"{type(e).__name__}: {e}".split())[:200]
            self.warn(f"warning: {self.name} failed ({reason}); metrics.jsonl has all numbers")

    def send(self, record: dict[str, Any]) -> None:
        """Send the numbers of a record, except those that are not finite."""
        # A save ends after later steps were sent. wandb ignores what goes back to its step.
        self.step = max(self.step, record["step"])
        numbers = {k: v for k, v in record.items() if type(v) in (int, float) and math.isfinite(v)}
        self.attempt(self.log, numbers, self.step)

    def close(self) -> None:
        """Wait until all numbers are sent."""
        self.attempt(self.finish)


def start(name: str, folder: Path, run: dict[str, Any]) -> tuple[Callable, Callable]:
    """Start the package. Return its functions that send numbers of a step, and that end the run."""
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        # purge_step: later steps of an earlier process are replaced.
        writer = SummaryWriter(folder / "tensorboard", purge_step=run["step"] + 1)

        def log(numbers: dict[str, float], step: int) -> None:
            for key, value in numbers.items():
                writer.add_scalar(key, value, step)

        return log, writer.close
    # wandb's lines would tear the progress bar, and it would wait for a network, for minutes.
    quiet = dict(SILENT="true", CONSOLE="off", INIT_TIMEOUT="15", FINISH_TIMEOUT="15")
    for key, value in quiet.items():
        os.environ.setdefault(f"WANDB_{key}", value)
    project = os.environ.get(f"{name.upper()}_PROJECT", "eveningGPT")
    options: dict[str, Any] = dict(project=project, name=folder.resolve().name)
    options |= dict(config=run["settings"], id=run["tracker_run"], resume="allow")
    options |= {"dir": folder} if name == "wandb" else {"logdir": str(folder / "swanlog")}
    service = importlib.import_module(name)
    service.init(**options)
    return service.log, service.finish

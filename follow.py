"""Follow a run by its files: draw its loss, and send its metrics to wandb, SwanLab or TensorBoard.

train.py starts this program beside each run (--tracker=off: it does not). It reads metrics.jsonl
and writes loss.png and follow.json. Whatever happens to it, the training goes on. By hand it
follows a run that is going on or over, also on another computer that sees the folder or a copy of
it, and its exit code is 2 if the tracker failed. It ends when the run does, or with Ctrl-C (of a
run that was killed nothing says that it is over), and waits while another follow.py follows it.

    python follow.py out/demo
    # on a computer with internet, for a run that was started without a tracker
    python follow.py out/demo --tracker=wandb

The project at wandb or SwanLab is gpt, unless WANDB_PROJECT or SWANLAB_PROJECT names another. What
was sent is not sent again after a resume, and the same wandb run goes on: steps that are trained
again, with other settings, stay at the tracker as they were.
"""

import fcntl
import importlib
import os
import select
import signal
import sys
import time
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from configurator import UserError, option, parse, run
from hardware.disk import json_bytes, read_object, write_whole
from hardware.terminal import in_a_terminal
from training.metrics import read_metrics
from training.plots import plot_loss

PAUSE = 10  # seconds from one look at the run to the next, at least


@dataclass(frozen=True)
class FollowConfig:
    runs: tuple[str, ...] = option((), "the folder of one run, out/RUN")
    tracker: Literal["auto", "none", "wandb", "swanlab", "tensorboard"] = option(
        "auto", "auto: the run's"
    )
    beside: bool = option(
        False, "train.py has started this program: the run ends where the input does"
    )

    def problems(self) -> list[str]:
        return [] if len(self.runs) == 1 else ["runs: name the folder of one run, as out/demo"]


def main() -> None:
    cfg = parse(FollowConfig, doc=__doc__, positional="runs")
    folder = Path(cfg.runs[0])
    path = folder / "metrics.jsonl"
    starts = [record for record in read_metrics(path) if "settings" in record]
    if not starts:
        raise UserError(f"{path}: no run has begun there: name the folder of one, as out/demo")
    handle = os.open(folder, os.O_RDONLY)  # it is open, and so locked, until this process ends
    with suppress(OSError):  # a network disk may have no locks
        fcntl.flock(handle, fcntl.LOCK_EX)
    if cfg.beside:
        os.nice(10)  # the training comes first
    settings = starts[-1]["settings"]
    name = settings.get("tracker", "none") if cfg.tracker == "auto" else cfg.tracker
    tracker = None
    inputs = [sys.stdin] if cfg.beside else []
    pause = 0.0
    over = False
    failed = False
    while not over:
        over = bool(select.select(inputs, [], [], pause)[0])
        if over:
            signal.alarm(60)  # a tracker that hangs must not stay behind for ever
        start = time.monotonic()
        records = read_metrics(path)
        # A run whose folder was moved makes it again. Another run has a follow.json of its own.
        if records and not os.path.samestat(os.fstat(handle), folder.stat()):
            if starts[0] not in records:
                raise UserError(f"{folder} is the folder of another run now")
        if not cfg.beside:
            over = any("ended" in record for record in records[-1:])
        picture = draw(folder, records)
        if over:
            say(picture)
        try:
            if name not in ("none", "off"):  # off: the run was started without this program
                tracker = tracker or Tracker(name, folder, settings)
                tracker.send(records, over)
        except (Exception, SystemExit) as e:
            later = f"`python follow.py {folder} --tracker={name}` sends the rest later"
            later = f"pip install {name}; then {later}" if isinstance(e, ImportError) else later
            say(f"warning: {name} failed ({reason(e)}); {later}")
            name = "none"
            failed = True
        pause = max(PAUSE, 49 * (time.monotonic() - start))  # so this takes 2 % of the time at most
    if failed and not cfg.beside:
        sys.exit(2)


def say(line: str) -> None:
    """Print a line. In a terminal, the bar of train.py may stand there: it is drawn again below."""
    print(f"\r\x1b[K{line}" if in_a_terminal() else line, flush=True)


def reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def draw(folder: Path, records: list[dict]) -> str:
    """Draw loss.png. Return where it is, or why there is none."""
    if not any("loss" in record for record in records):
        return "no loss plot: there is no loss yet"
    try:
        return f"loss plot: {plot_loss([folder], folder / 'loss.png')}"
    except Exception as e:  # no matplotlib, or a full disk
        return f"no loss plot: {reason(e)}"


class Tracker:
    """Sends the numbers of each record to wandb, SwanLab or TensorBoard, once.

    follow.json remembers the last record that was sent, and which wandb run it is. What the
    tracker's own package raises goes to the caller.
    """

    def __init__(self, name: str, folder: Path, settings: dict[str, Any]):
        self.path = folder / "follow.json"
        # sent: up to which step, and up to which of its records
        self.state: dict[str, Any] = {"tracker": name, "sent": [-1, 0], "id": uuid.uuid4().hex[:12]}
        with suppress(OSError, ValueError):
            earlier = read_object(self.path)
            if earlier.get("tracker") == name:
                self.state |= earlier
        self.service = begin(name, folder, settings, self.state["id"])

    def send(self, records: list[dict], over: bool) -> None:
        """Send those of the records that were not sent yet. over: no others will come."""
        of_step: Counter[int] = Counter()
        try:
            for record in records:
                of_step[record["step"]] += 1
                place = [record["step"], of_step[record["step"]]]
                if place > self.state["sent"] and "settings" not in record:
                    values = {k: v for k, v in record.items() if type(v) in (int, float)}
                    self.service.log(values, record["step"])
                    self.state["sent"] = place
        finally:
            with suppress(OSError):  # on a full disk, another process would send them again
                write_whole(self.path, json_bytes(self.state))
        if over:
            self.service.finish()


def begin(name: str, folder: Path, settings: dict, run_id: str) -> Any:
    """Begin a run at a tracker. Return what has the functions log(values, step) and finish().

    run_id: if wandb has a run of this id, that one goes on.
    """
    if name == "tensorboard":
        return TensorBoard(folder)
    title = folder.resolve().name
    options = {
        "wandb": dict(name=title, dir=folder, id=run_id, resume="allow"),
        "swanlab": dict(experiment_name=title, logdir=str(folder / "swanlog")),
    }
    os.environ.setdefault("WANDB_SILENT", "true")  # its lines would tear the bar of train.py
    project = os.environ.get(f"{name.upper()}_PROJECT", "gpt")
    package = importlib.import_module(name)
    package.init(project=project, config=settings, **options[name])
    return package


class TensorBoard:
    """TensorBoard, with the functions that wandb and SwanLab have."""

    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(folder / "tensorboard")
        self.finish = self.writer.close

    def log(self, values: dict, step: int) -> None:
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)


if __name__ == "__main__":
    run(main, needs_output=False)

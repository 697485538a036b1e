"""Follow a run by its files: draw its loss, and send its metrics to wandb, SwanLab or TensorBoard.

train.py starts this program beside each run (--follow=false: it does not). It reads metrics.jsonl
and writes loss.png, follow.json, and the texts of steps that were skipped (bad_steps/). Whatever
happens to it, the training goes on. By hand it follows a run that is going on or over, also on
another computer that sees the folder or a copy of it. It ends when the run does, or with Ctrl-C,
and waits while another follow.py follows the same run.

    python follow.py out/demo
    # on a computer with internet, for a run that was started without a tracker
    python follow.py out/demo --tracker=wandb

The project at wandb or SwanLab is gpt, unless WANDB_PROJECT or SWANLAB_PROJECT names another. What
was sent is not sent again after a resume, and the same wandb run goes on.
"""

import fcntl
import os
import select
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from configurator import UserError, parse, run
from hardware.disk import json_bytes, read_object, write_whole
from hardware.terminal import in_a_terminal
from text.dataset import load_tokenizer
from text.replay import run_loader, sample_texts
from training.metrics import read_metrics
from training.plots import plot_loss

PAUSE = 10  # seconds from one look at the run to the next, at least


@dataclass(frozen=True)
class FollowConfig:
    runs: tuple[str, ...] = ()  # the folder of one run, out/RUN
    tracker: Literal["auto", "none", "wandb", "swanlab", "tensorboard"] = "auto"  # auto: the run's
    beside: bool = False  # train.py has started this program: the run ends where the input does

    def problems(self) -> list[str]:
        return [] if len(self.runs) == 1 else ["runs: name the folder of one run, as out/demo"]


def main() -> None:
    cfg = parse(FollowConfig, doc=__doc__, positional="runs")
    folder = Path(cfg.runs[0])
    path = folder / "metrics.jsonl"
    begun = [record for record in read_metrics(path) if "settings" in record]
    if not begun:
        raise UserError(f"{path}: no run has begun there: name the folder of one, as out/demo")
    handle = os.open(folder, os.O_RDONLY)  # it is open, and so locked, until this process ends
    with suppress(OSError):  # a network disk may have no locks
        fcntl.flock(handle, fcntl.LOCK_EX)
    if cfg.beside:
        os.nice(10)  # the training comes first
    settings = begun[-1]["settings"]
    name = settings.get("tracker", "none") if cfg.tracker == "auto" else cfg.tracker
    tracker = Tracker(name, folder, settings) if name != "none" else None
    seen = drawn = 0  # records that were read in the round before, and for the last picture
    draw_at = time.monotonic()  # when the next picture may be drawn
    over = False
    while True:
        started = time.monotonic()
        records = read_metrics(path)
        read_s = time.monotonic() - started
        over = over or (not cfg.beside and any("ended" in last for last in records[-1:]))
        write_texts(folder, records, seen)
        if over:
            say(draw(folder))
        if tracker is not None and not tracker.works(records, over):
            tracker = None
        if over:
            return
        seen = len(records)
        if seen != drawn and time.monotonic() >= draw_at:
            started = time.monotonic()
            draw(folder)
            drawn = seen
            draw_at = started + 50 * (time.monotonic() - started)
        # Reading a long record takes a fiftieth of the time at most, and so does drawing.
        over = wait(max(PAUSE, 49 * read_s), cfg.beside)


def wait(seconds: float, beside: bool) -> bool:
    """Wait, at most until the process that trains has ended. Return whether it has."""
    if not beside:
        time.sleep(seconds)
        return False
    ended, _, _ = select.select([sys.stdin], [], [], seconds)
    if ended:
        signal.alarm(60)  # a tracker that hangs must not stay behind for ever
    return bool(ended)


def say(line: str) -> None:
    """Print a line. In a terminal, the bar of train.py may stand there: it is drawn again below."""
    print(f"\r\x1b[K{line}" if in_a_terminal() else line, flush=True)


def reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def draw(folder: Path) -> str:
    """Draw loss.png. Return where it is, or why there is none."""
    try:
        return f"loss plot: {plot_loss([folder], folder / 'loss.png')}"
    except ImportError:
        return "no loss plot: pip install matplotlib"
    except Exception as e:  # a full disk, an error in matplotlib, or no loss yet
        return f"no loss plot: {reason(e)}"


def write_texts(folder: Path, records: list[dict], seen: int) -> None:
    """Write what each skipped step has read to bad_steps/, so that people can look for the cause.

    seen: the number of records that were looked at before.
    """
    bad = {record["step"]: record["bad_step"] for record in records[seen:] if "bad_step" in record}
    for step, problem in bad.items():
        path = folder / "bad_steps" / f"step_{step:08d}.txt"
        if path.exists():
            continue  # an earlier process has read the same step
        try:
            sets, loader, samples = run_loader(folder / "metrics.jsonl", records, step)
            texts = sample_texts(sets, loader, samples, load_tokenizer(sets[0].folder))
            blocks = "".join(f"\n---- {place}\n{text}\n" for place, text in texts)
            content = f"step {step}: {problem}\n{blocks}"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, content.encode("utf-8", "backslashreplace"))
            say(f"the texts of the skipped step {step} are in {path}")
        except (OSError, UserError) as e:
            say(f"warning: no texts of the skipped step {step}: {reason(e)}")


class Tracker:
    """Sends the numbers of each record to wandb, SwanLab or TensorBoard, once.

    follow.json remembers the last record that was sent, and which wandb run it is.
    """

    def __init__(self, name: str, folder: Path, settings: dict[str, Any]):
        self.name = name
        self.folder = folder
        self.settings = settings
        self.log: Callable[[dict, int], Any] | None = None
        # sent: up to which step, and up to which of its records
        self.state: dict[str, Any] = {"tracker": name, "sent": [-1, 0], "id": uuid.uuid4().hex[:12]}
        with suppress(OSError, ValueError):
            earlier = read_object(folder / "follow.json")
            if earlier.get("tracker") == name:
                self.state |= earlier

    def works(self, records: list[dict], over: bool) -> bool:
        """Send what is new. Return whether the tracker took it; an error of it ends nothing else.

        over: nothing else will come.
        """
        try:
            if self.log is None:
                self.log, self.close = open_tracker(
                    self.name, self.folder, self.settings, self.state["id"]
                )
            self.send(records)
            if over:
                self.close()
            return True
        except (Exception, SystemExit) as e:
            why = f"pip install {self.name}" if isinstance(e, ModuleNotFoundError) else reason(e)
            later = f"python follow.py {self.folder} --tracker={self.name}"
            say(f"warning: {self.name} failed ({why}); `{later}` sends the rest later")
            return False

    def send(self, records: list[dict]) -> None:
        of_step: Counter[int] = Counter()
        try:
            for record in records:
                step = record["step"]
                of_step[step] += 1
                if [step, of_step[step]] > self.state["sent"] and "settings" not in record:
                    values = {k: v for k, v in record.items() if type(v) in (int, float)}
                    self.log(values, step)
                    self.state["sent"] = [step, of_step[step]]
        finally:
            with suppress(OSError):  # on a full disk, another process would send them again
                write_whole(self.folder / "follow.json", json_bytes(self.state))


def open_tracker(
    name: str, folder: Path, settings: dict[str, Any], run_id: str
) -> tuple[Callable[[dict, int], Any], Callable[[], Any]]:
    """Return the functions log(values, step) and close() of a tracker.

    Only its own package is imported. run_id: of a new wandb run, or of the one that goes on.
    """
    project = os.environ.get(f"{name.upper()}_PROJECT", "gpt")
    title = folder.resolve().name
    if name == "wandb":
        os.environ.setdefault("WANDB_SILENT", "true")  # its lines would tear the bar of train.py
        import wandb

        go_on = dict(id=run_id, resume="allow")
        tracked = wandb.init(project=project, name=title, dir=folder, config=settings, **go_on)
        return tracked.log, tracked.finish
    if name == "swanlab":
        import swanlab

        files = str(folder / "swanlog")
        swanlab.init(project=project, experiment_name=title, config=settings, logdir=files)
        return swanlab.log, swanlab.finish
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder / "tensorboard")

    def add_scalars(values: dict, step: int) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, step)

    return add_scalars, writer.close


if __name__ == "__main__":
    run(main, needs_output=False)

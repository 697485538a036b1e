"""metrics.jsonl, the record of a run: one JSON object a line, each with the step it is about.

The process that trains writes it. follow.py, plot.py and others read it, without torch.
"""

import json
import statistics
import threading
from collections.abc import Callable
from pathlib import Path

from configurator import UserError
from hardware.disk import Lock, only_plain, write_whole


class MetricsFile:
    """The metrics.jsonl that a run writes. Neither a full disk nor a lost file stops the training.

    records: what stands in it at the start. lock: of the run's folder. say: prints a warning.
    """

    def __init__(self, path: Path, records: list[dict], lock: Lock, say: Callable[[str], None]):
        self.path = path
        self.records = records
        self.lock = lock
        self.say = say
        self.content = bytearray(b"".join(map(line_of, records)))  # all that the file should hold
        self.is_whole = True  # whether it does
        self.mutex = threading.Lock()  # the thread that saves checkpoints appends lines, too
        write_whole(path, self.content)

    def append(self, record: dict) -> None:
        """Append a line. If that fails, a later line writes the file again, all of it."""
        line = line_of(record)
        with self.mutex:
            self.content += line
            was_whole = self.is_whole
            self.is_whole = False
            try:
                if not self.lock.is_held():
                    return  # the folder was moved or deleted: the next save makes it again
                if was_whole and self.path.exists():
                    with open(self.path, "ab") as file:
                        file.write(line)
                else:
                    write_whole(self.path, self.content)
                    self.say(f"warning: {self.path} was not whole: all of it is written again")
                self.is_whole = True
            except OSError as e:
                if was_whole:
                    self.say(f"warning: {self.path}: {e.strerror}: it is written again later")


def line_of(record: dict) -> bytes:
    return json.dumps(record).encode() + b"\n"


def read_metrics(path: Path) -> list[dict]:
    """Return the records of a metrics.jsonl, or [] if there is no file.

    If the last line is incomplete, because the process was killed while writing it, it is left out.
    Raises UserError for any other line that is not a record, and OSError if the path is not a file.
    """
    if not path.exists():
        return []
    only_plain(path)
    lines = path.read_bytes().splitlines(keepends=True)
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or type(record["step"]) is not int:
                raise ValueError
            records.append(record)
        except (ValueError, KeyError, RecursionError):
            if number < len(lines) or line.endswith(b"\n"):
                raise UserError(f"{path}:{number}: damaged: delete this line") from None
    return records


def spike(losses: list[float], loss: float) -> float:
    """Return how many deviations a loss lies above those before it: a robust z-score.

    A deviation is 1.4826 times the median distance from the median (Iglewicz and Hoaglin, 1993),
    which is the standard deviation if the losses have a normal distribution. The result is 0 for
    fewer than 30 losses.
    """
    if len(losses) < 30:
        return 0.0
    median = statistics.median(losses)
    deviation = 1.4826 * statistics.median(abs(x - median) for x in losses)
    return (loss - median) / max(deviation, 1e-3 * abs(median))

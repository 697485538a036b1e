"""metrics.jsonl, the record of a run: one JSON object a line, each with the step it is about.

The process that trains writes it. follow.py, plot.py and others read it, without torch.
Below stands what the log says of the losses: of landmarks that they pass, of spikes.
"""

import json
import math
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


# --------------------------------------------------------------------------------------------------
# Is my loss normal?

# Landmarks are the losses of the simplest models of the data (text/landmarks.py).
# name -> whose loss it is, and what a model whose loss is lower has learned
LANDMARKS = {
    "uniform": ("equal probabilities", "the model has begun to learn"),
    "unigram": ("single-token frequencies", "it makes use of what stands before a token"),
    "bigram": ("token pairs", "it makes use of more than the one token before"),
}


class Watch:
    """Says once when the running loss of a run goes below each landmark, or fails to.

    The running loss is the mean of the last 20 steps. What was said before a resume stands in the
    records, so a checkpoint need not store it.
    """

    def __init__(self, records: list[dict]):
        landmarks = next((r["landmarks"] for r in reversed(records) if "landmarks" in r), {})
        lowest = min((landmarks.get(r.get("below"), math.inf) for r in records), default=math.inf)
        self.ahead: dict[str, float] = {}  # the landmarks that are still to be passed, descending
        for name in LANDMARKS:
            # With little text, pairs of tokens predict worse than single tokens: then they are out.
            if landmarks.get(name, math.inf) < lowest:
                lowest = self.ahead[name] = landmarks[name]
        self.warned = any("not_below" in r for r in records)

    def look(self, losses: list[float], step: int, patience: float) -> tuple[dict, str] | None:
        """Return the record and the line of what is to be said after a step, or None.

        losses: of the steps up to this one. patience: from this step on, the loss should be below
        that of single-token frequencies.
        """
        if len(losses) < 20:
            return None
        loss = sum(losses[-20:]) / 20
        if passed := {name: landmark for name, landmark in self.ahead.items() if loss < landmark}:
            self.ahead = {name: x for name, x in self.ahead.items() if name not in passed}
            name, landmark = passed.popitem()  # the lowest
            line = f"the loss is below that of {LANDMARKS[name][0]} ({landmark:.2f})"
            return dict(step=step, below=name), f"{line}: {LANDMARKS[name][1]}"
        if "unigram" in self.ahead and step >= patience and not self.warned:
            self.warned = True
            line = f"warning: the loss ({loss:.2f}) is still not below that of single-token"
            line += f" frequencies ({self.ahead['unigram']:.2f}): is lr far too high or too low,"
            line += f" are the texts right (prepare.py --inspect RUN --step {step})?"
            return dict(step=step, not_below="unigram"), line
        return None


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

"""metrics.jsonl, the record of a run: one JSON object a line, each with the step it is about.

The process that trains writes it. follow.py, plot.py and others read it.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

from configurator import UserError
from hardware.disk import Lock, only_plain, write_whole


class MetricsFile:
    """The open metrics.jsonl of a run. Neither a full disk nor a lost file stops the training.

    records: what stands in it first. lock: of the run's folder. say: prints a warning.
    """

    def __init__(self, path: Path, records: list[dict], lock: Lock, say: Callable[[str], None]):
        self.path = path
        self.lock = lock
        self.say = say
        write_whole(path, b"".join(map(line_of, records)))
        self.handle = os.open(path, os.O_RDWR | os.O_APPEND)
        self.unwritten = b""  # lines that a full disk did not take

    def append(self, record: dict) -> None:
        """Append a line. If the disk is full, keep it in memory for later."""
        warned = bool(self.unwritten)
        self.unwritten += line_of(record)
        try:
            self.find()
            while self.unwritten:
                written = os.write(self.handle, self.unwritten)
                self.unwritten = self.unwritten[written:]
        except OSError as e:
            if not warned:
                later = "training goes on, the lines are kept for later"
                self.say(f"warning: {self.path}: {e.strerror}; {later}")

    def find(self) -> None:
        """Open the file again if the one at its path is not the one that is open.

        Somebody may have moved, deleted or replaced it since the last line. If it is missing, write
        it again in full: the open file can still be read.
        """
        if not self.lock.is_held():
            return  # the folder was moved, and the open file with it
        if self.path.exists() and os.path.samestat(self.path.stat(), os.fstat(self.handle)):
            return
        if not self.path.exists():
            write_whole(self.path, os.pread(self.handle, os.fstat(self.handle).st_size, 0))
            self.say(f"warning: {self.path} was moved or deleted: all of it is written again")
        os.close(self.handle)
        self.handle = os.open(self.path, os.O_RDWR | os.O_APPEND)

    def close(self) -> None:
        if self.unwritten:
            lines = self.unwritten.count(b"\n")
            self.say(f"warning: {self.path}: the last {lines} lines could not be written")
        os.close(self.handle)


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
            if abs(record["step"]) >= 2**53:  # no float, so no place in a picture
                raise ValueError
            records.append(record)
        except (ValueError, KeyError, RecursionError):
            if number < len(lines) or line.endswith(b"\n"):
                delete = "delete this line, then the rest can be read"
                raise UserError(f"{path}:{number}: damaged; {delete}") from None
    return records

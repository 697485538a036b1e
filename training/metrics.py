"""Read metrics.jsonl, the record of a run: one JSON object a line, each with the step it is about.

training/report.py writes it. follow.py, plot.py and others read it, without torch.
"""

import json
import sys
from pathlib import Path

from configurator import UserError
from hardware.disk import only_plain


def read_metrics(path: Path) -> list[dict]:
    """Return the records of a metrics.jsonl, or [] if there is no file.

    If the last line is incomplete, because the process was killed while writing it, it is left out.
    Raises UserError for any other line that is not a record, and OSError if the path is not a file.
    """
    if not path.exists():
        return []
    only_plain(path)
    lines = path.read_bytes().splitlines(keepends=True)  # at once: a run may be writing the next
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or type(record["step"]) is not int:
                raise ValueError
            # A long run has a million records: their keys are in memory once.
            records.append({sys.intern(key): value for key, value in record.items()})
        except (ValueError, KeyError, RecursionError):
            if number < len(lines) or line.endswith(b"\n"):
                raise UserError(f"{path}:{number}: damaged: delete this line") from None
    return records

"""metrics.jsonl, the record of a run: one JSON object per line, each with its step.

training/report.py appends to it. plot.py and others read it, without torch. Numbers that are not
finite are left out: strict JSON has none.
"""

import json
import math
import sys
from pathlib import Path
from typing import TextIO

from configurator import UserError
from hardware.disk import atomic_write, check_regular_file

# The kind of each value that is computed with. Every record has a step.
KINDS = {"step": int, "val_loss": int | float, "settings": dict, "landmarks": dict}
KINDS["judged_by"] = dict


def read_metrics(path: Path) -> list[dict]:
    """Return the records of a metrics.jsonl, or [] if there is no file.

    An incomplete last line, of a process that was killed while writing it, is left out. Raises
    UserError for any other line that is not a record, and OSError if the path is not a file.
    """
    if not path.exists():
        return []
    check_regular_file(path)
    lines = path.read_bytes().splitlines(keepends=True)  # at once: a run may be appending to it
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = {"step": None} | json.loads(line)
            if not all(isinstance(record[k], kind) for k, kind in KINDS.items() if k in record):
                raise ValueError
            # A long run has a million records: interned keys are in memory once.
            records.append({sys.intern(key): value for key, value in record.items()})
        except (ValueError, TypeError, RecursionError):
            if number < len(lines) or line.endswith(b"\n"):
                raise UserError(f"{path}:{number}: damaged: delete this line") from None
    return records


def evaluations(records: list[dict]) -> dict[int, float]:
    """Return step -> validation loss, for losses that were measured on the same data as the last.

    Only these can be compared. Losses that are not finite are left out.
    """
    last = next((r["judged_by"] for r in reversed(records) if "judged_by" in r), None)
    judged_by, losses = last, {}
    for record in records:
        judged_by = record.get("judged_by", judged_by)
        if judged_by == last and record.get("val_loss", math.inf) < math.inf:
            losses[record["step"]] = record["val_loss"]
    return losses


def records_until(records: list[dict], step: int) -> list[dict]:
    """Return the records of a run's first `step` steps and of the weights after them.

    A process that has resumed there has recorded its start, and may have evaluated these weights on
    other data. Both are left out.
    """
    records = [record for record in records if record["step"] <= step]
    starts = [i for i, r in enumerate(records) if r["step"] == step and "settings" in r]
    before = records[: min(starts, default=len(records))]
    left_out = {"settings"}
    if last_start(records).get("judged_by") != last_start(before).get("judged_by"):
        left_out |= {"val_loss", "sample"}
    return before + [r for r in records[len(before) :] if not left_out & r.keys()]


def last_start(records: list[dict]) -> dict:
    """Return the last record of a start of the run, which has its settings; or {}."""
    return next((record for record in reversed(records) if "settings" in record), {})


def json_line(record: dict) -> str:
    """Return a record as a line of the file, without numbers that are not finite."""
    finite = {k: v for k, v in record.items() if not isinstance(v, float) or math.isfinite(v)}
    return json.dumps(finite) + "\n"


def start_metrics(path: Path, records: list[dict]) -> TextIO:
    """Replace the file by these records, and return it open for appending.

    A kill leaves the old file or the new one. Raises OSError if it cannot be written.
    """
    atomic_write(path, "".join(map(json_line, records)).encode())
    return open(path, "a", encoding="utf-8")


def perplexity_and_bits(loss: float, token_bytes: float) -> tuple[float, float, str]:
    """Return the perplexity and the bits per byte of a loss in nats per token, and both as a text.

    token_bytes: mean number of bytes of text in a token.
    """
    ppl = math.exp(min(loss, 700.0))  # the largest float is about e^709
    bits_per_byte = loss / math.log(2) / token_bytes
    return ppl, bits_per_byte, f"perplexity {ppl:.2f} | {bits_per_byte:.4f} bits per byte"

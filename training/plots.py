"""metrics.jsonl, read and drawn."""

import json
from pathlib import Path

from configurator import UserError
from hardware.disk import only_plain

METRICS_VERSION = 2  # of metrics.jsonl; 1 had no records of what was saved


def read_metrics(path: Path) -> list[dict]:
    """The records of a metrics.jsonl; a last line that a kill cut off is left out. [] if there is no file.

    UserError for a line that is no record.
    """
    if path.exists():
        only_plain(path)
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or type(record["step"]) is not int:
                raise ValueError
            records.append(record)
        except (ValueError, KeyError, RecursionError):
            if number < len(lines) or line.endswith(b"\n"):
                delete = "delete this line, then the rest can be read"
                raise UserError(f"{path}:{number}: damaged; {delete}") from None
    return records


def plot_loss(runs: list[Path], png: str | Path = "") -> Path:
    """Draw the training and validation loss of each run over its steps; returns the file written."""
    import matplotlib

    matplotlib.use("Agg")  # no screen needed
    import matplotlib.pyplot as plt

    png = Path(png or runs[0] / "loss.png")
    fig, ax = plt.subplots(figsize=(8, 5))
    for number, folder in enumerate(runs):
        # A name may have bytes that are no text, and a $, between two of which matplotlib reads formulas.
        name = folder.name.encode(errors="backslashreplace").decode().replace("$", r"\$")
        records = read_metrics(folder / "metrics.jsonl")
        for key, style in (("loss", dict(lw=1, alpha=0.6)), ("val_loss", dict(marker="o", ms=4))):
            points = [(r["step"], r[key]) for r in records if key in r]
            if points:
                label = f"{'training' if key == 'loss' else 'validation'}: {name}"
                ax.plot(*zip(*points, strict=True), label=label, color=f"C{number}", **style)
    ax.set(xlabel="step", ylabel="loss (nats per token)")
    ax.grid(alpha=0.3)
    ax.legend()
    aside = png.with_name(f".{png.name}.tmp")
    fig.savefig(aside, format=png.suffix[1:] or "png", dpi=120, bbox_inches="tight")
    aside.replace(png)
    plt.close(fig)
    return png

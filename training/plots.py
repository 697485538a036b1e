"""metrics.jsonl: reading it, and drawing the loss."""

import json
from pathlib import Path

from configurator import UserError
from hardware.disk import only_plain

METRICS_VERSION = 2  # format of metrics.jsonl; format 1 had no records of saved checkpoints


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
                delete = "delete this line, then the rest can be read"
                raise UserError(f"{path}:{number}: damaged; {delete}") from None
    return records


def plot_loss(runs: list[Path], png: str | Path = "") -> Path:
    """Draw the training and validation loss of each run over its steps. Return the file written.

    runs: folders with a metrics.jsonl. png: the file to write; default: loss.png in the first run.
    """
    import matplotlib

    matplotlib.use("Agg")  # draws into a file, without a screen
    import matplotlib.pyplot as plt

    png = Path(png or runs[0] / "loss.png")
    fig, ax = plt.subplots(figsize=(8, 5))
    for number, folder in enumerate(runs):
        # The folder's name may hold bytes that are not UTF-8. And matplotlib would read the text
        # between two $ as a formula.
        name = folder.name.encode(errors="backslashreplace").decode().replace("$", r"\$")
        records = read_metrics(folder / "metrics.jsonl")
        curves = [
            ("loss", "training", dict(lw=1, alpha=0.6)),
            ("val_loss", "validation", dict(marker="o", ms=4)),
            ("val_loss_average", "validation of the average", dict(ls="--", marker="o", ms=3)),
        ]
        for key, kind, style in curves:
            points = [(r["step"], r[key]) for r in records if key in r]
            if points:
                steps, losses = zip(*points, strict=True)
                ax.plot(steps, losses, label=f"{kind}: {name}", color=f"C{number}", **style)
    ax.set(xlabel="step", ylabel="loss (nats per token)")
    ax.grid(alpha=0.3)
    ax.legend()
    aside = png.with_name(f".{png.name}.tmp")
    fig.savefig(aside, format=png.suffix[1:] or "png", dpi=120, bbox_inches="tight")
    aside.replace(png)
    plt.close(fig)
    return png

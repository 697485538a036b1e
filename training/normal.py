"""Is my loss normal? What a run's loss is compared with, in the log and in the picture.

Landmarks are the losses of the simplest models of the data (text/landmarks.py). A recorded curve is
what runs of a shipped config came to, with several seeds: bench/record_curve.py writes it to
config/curves/NAME.json, and it is drawn beneath each run with the same settings and data.
"""

import math
from pathlib import Path
from typing import Any

from configurator import note
from hardware.disk import read_object

# --------------------------------------------------------------------------------------------------
# Landmarks

# name -> whose loss it is, and what a model whose loss is lower has learned
LANDMARKS = {
    "uniform": ("equal probabilities", "the model has begun to learn"),
    "unigram": ("single-token frequencies", "it makes use of what stands before a token"),
    "bigram": ("token pairs", "it makes use of more than the one token before"),
}


class Watch:
    """Says once when the running loss of a run goes below each landmark, or fails to.

    The running loss is the mean of the last 20 steps. What was said before a resume is found in the
    records, so a checkpoint need not store it.
    """

    def __init__(self, landmarks: dict[str, float], records: list[dict]):
        # With little text, pairs of tokens predict worse than single tokens: they say nothing then.
        names = [n for n in ("uniform", "unigram", "bigram") if n in landmarks]
        lowest = math.inf
        self.landmarks: dict[str, float] = {}
        for name in names:
            if landmarks[name] < lowest:
                lowest = self.landmarks[name] = landmarks[name]
        said = {r["below"] for r in records if "below" in r}
        self.passed = min((landmarks.get(name, math.inf) for name in said), default=math.inf)
        self.warned = any("not_below" in r for r in records)

    def look(self, losses: list[float], step: int, patience: int) -> tuple[dict, str] | None:
        """Return the record and the line of what is to be said after a step, or None.

        losses: of the steps up to this one. patience: from this step on, the loss should be below
        that of single-token frequencies.
        """
        if len(losses) < 20:
            return None
        loss = sum(losses[-20:]) / 20
        below = {name: x for name, x in self.landmarks.items() if loss < x < self.passed}
        if below:
            name = min(below, key=below.__getitem__)  # it includes the landmarks above it
            self.passed = below[name]
            whose, meaning = LANDMARKS[name]
            line = f"the loss is below that of {whose} ({self.passed:.2f}): {meaning}"
            return dict(step=step, below=name), line
        unigram = self.landmarks.get("unigram", math.inf)
        if unigram < self.passed and step >= patience and not self.warned:
            self.warned = True
            whose = LANDMARKS["unigram"][0]
            line = f"warning: the loss ({loss:.2f}) is still not below that of {whose}"
            line += f" ({unigram:.2f}), as that of a healthy run is by now: is lr far too high or"
            line += " too low, are inputs and targets shifted by one token, are the texts right"
            line += f" (prepare.py --inspect RUN --step {step})?"
            return dict(step=step, not_below="unigram"), line
        return None


# --------------------------------------------------------------------------------------------------
# Recorded curves

CURVES = Path(__file__).resolve().parents[1] / "config" / "curves"

# Settings that do not matter for the comparison: names, places, reports, and what changes the loss
# by rounding only. `steps` and `step_samples` stand for the settings of length and batch, and the
# hash of train.bin for the name of the data set. Another seed is what the band is for.
ASIDE = """run_name out_dir data_dir dataset init_from overwrite seed batch_size batch_tokens
    max_steps max_epochs max_tokens max_bad_steps average eval_every save_every keep device dtype
    compile log_every eval_train sample_every sample_prompt progress peak_tflops wandb
    wandb_project tensorboard""".split()


def essence(begun: dict[str, Any]) -> dict[str, Any]:
    """Return what two runs must have in common to have the same curve, but for the seed.

    begun: a record of metrics.jsonl with the settings of a run.
    """
    settings = {k: v for k, v in begun["settings"].items() if k not in ASIDE}
    length = {"steps": begun["steps"], "step_samples": begun["step_samples"]}
    return {"settings": settings, "train_sha256": list(begun["data"].values()), **length}


def recorded_curve(begun: dict[str, Any]) -> dict[str, Any] | None:
    """Return the recorded curve of a run's config and data, or None. begun: as in essence()."""
    if "fine_tuned" in begun or not {"settings", "steps", "step_samples", "data"} <= begun.keys():
        return None
    mine = essence(begun)
    for path in sorted(CURVES.glob("*.json")):
        try:
            curve = read_object(path)
            theirs = curve["essence"]
            if all(mine[key] == theirs[key] for key in mine if key != "settings"):
                if same_settings(mine["settings"], theirs["settings"]):
                    return curve
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as e:
            note(f"{path} is no recorded curve ({type(e).__name__}: {e}): it is left out")
    return None


def same_settings(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Return whether the settings are equal. One that is missing has its default.

    It is missing if it did not exist yet when the run or the curve was made.
    """
    if mine.keys() != theirs.keys():
        # Only here: this imports torch, which takes longer than drawing a picture.
        from training.settings import TrainConfig

        defaults = {k: v for k, v in vars(TrainConfig()).items() if k not in ASIDE}
        mine, theirs = defaults | mine, defaults | theirs
    return mine == theirs

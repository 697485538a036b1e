"""Is my loss normal? What the log says of a run's losses: of landmarks that they pass, of spikes.

Landmarks are the losses of the simplest models of the data (text/landmarks.py).
"""

import math
import statistics

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

    def __init__(self, landmarks: dict[str, float], records: list[dict]):
        # With little text, pairs of tokens predict worse than single tokens: they say nothing then.
        names = [n for n in LANDMARKS if n in landmarks]
        lowest = math.inf
        self.landmarks: dict[str, float] = {}
        for name in names:
            if landmarks[name] < lowest:
                lowest = self.landmarks[name] = landmarks[name]
        passed = {r["below"] for r in records if "below" in r}
        self.passed = min((landmarks.get(name, math.inf) for name in passed), default=math.inf)
        self.warned = any("not_below" in r for r in records)

    def look(self, losses: list[float], step: int, patience: float) -> tuple[dict, str] | None:
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

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

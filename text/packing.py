"""Packing: windows that are filled with whole documents, and the loss weights of tokens.

A document of n tokens is followed by its eos, so it has n + 1 targets: its tokens and the eos. The
inputs of these targets are the eos before the document and its n tokens. So here an eos *starts* a
document, as it does when sample.py writes a new one. The first document of a file has no eos before
it: one is added.

Documents are packed into windows of T inputs by best-fit decreasing: from the longest to the
shortest, each document goes into the window with the least free space that holds it
(arXiv 2404.10830). A document with more than T inputs has windows of its own. Its tail, what is
left at the end, is packed like a document: an eos stands before it, which predicts nothing. After
the last document of a window there may be padding, which is not trained on.

The plan of the windows depends only on the tokens and T. Each process computes it when it opens the
data, for 250,000 documents at a time: about a second for a million documents.
"""

from functools import reduce

import numpy as np

from hardware.terminal import ProgressBar

GROUP_SIZE = 250_000  # documents that are packed together
CHUNK = 1 << 22  # tokens that are read at a time

# A window of the plan consists of spans of tokens. An eos precedes each span; it may be the last
# token of the span before. A span of T + 1 tokens is the middle of a long document: it fills a
# window, without that eos.
SPAN = np.dtype([("first", "<i8"), ("count", "<u4")])  # its first token in the split; its tokens


def best_fit(lengths: np.ndarray, T: int) -> tuple[np.ndarray, int]:
    """Return the bin (n,) of each of n items, of these lengths (n,), and the number of bins.

    A bin holds at most T. The items are placed from the longest to the shortest, each in the
    fullest bin that has enough space for it.
    """
    bins = np.empty(len(lengths), np.int64)
    count = 0
    bins_by_space: list[list[int]] = [[] for _ in range(T + 1)]  # free space -> bins with it
    spaces = 0  # bit s is set if there are bins with free space s
    order = np.argsort(-lengths, kind="stable")
    for item, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        enough = spaces >> length
        if enough:
            space = length + (enough & -enough).bit_length() - 1  # the lowest bit that is set
            bin = bins_by_space[space].pop()
            if not bins_by_space[space]:
                spaces ^= 1 << space
        else:
            space = T
            bin = count
            count += 1
        bins[item] = bin
        if space > length:
            bins_by_space[space - length].append(bin)
            spaces |= 1 << (space - length)
    return bins, count


def pack(ends: np.ndarray, start: int, T: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack documents into windows. Return all spans, and the number of spans in each window.

    ends: position of the eos of each document, (n,). start: of the first token of the first one.
    """
    starts = np.append(start, ends[:-1] + 1)
    inputs = ends - starts + 1
    # The windows of long documents.
    full = np.where(inputs > T, inputs // T, 0)  # (n,): windows of each
    document = np.repeat(np.arange(len(ends)), full)
    in_document = np.arange(len(document)) - (full.cumsum() - full)[document]  # 0, 1, 2, ...
    starts_document = in_document == 0  # then an eos precedes it, as any other span
    windows = np.empty(len(document), SPAN)
    windows["first"] = starts[document] - 1 + in_document * T + starts_document
    windows["count"] = T + 1 - starts_document
    # Everything else: documents and tails. A tail repeats the token before it as an input.
    left = inputs - full * T
    is_tail = full > 0
    spans = np.empty(len(ends), SPAN)
    spans["first"] = np.where(is_tail, starts - 1 + full * T, starts)
    spans["count"] = left + is_tail
    spans = spans[left > 0]
    bins, count = best_fit(spans["count"], T)
    spans = spans[np.argsort(bins, kind="stable")]
    per_window = np.append(np.ones(len(windows), int), np.bincount(bins, minlength=count))
    return np.append(windows, spans), per_window


def padded(ends: np.ndarray, T: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the plan, as packed() does, of windows with one document each.

    A document with more than T inputs is cut: the plan leaves out its end.
    """
    spans = np.empty(len(ends), SPAN)
    spans["first"] = np.append(0, ends[:-1] + 1)
    spans["count"] = np.minimum(ends + 1 - spans["first"], T)
    return spans, np.arange(len(ends) + 1)


class LossWeights:
    """The loss weight of each token of a split. The mean of the weights above 0 is 1.

    answers: start and end of each answer, in turn, (2 n,): only tokens of answers count; None: all
    tokens count. ends: position of the eos of each document, (documents,): all documents count
    alike; None: all tokens count alike. limit: the most tokens of a document that are learned.
    """

    def __init__(self, answers: np.ndarray | None, ends: np.ndarray | None, limit: float = np.inf):
        self.answers = answers
        self.ends = ends
        if ends is not None:
            bounds = np.append(-1, ends) + 1  # where documents start and end
            counted = bounds  # the number of tokens that count before each of these
            if answers is not None:
                before = np.append(0, (answers[1::2] - answers[::2]).cumsum())
                counted = before[np.searchsorted(answers[::2], bounds)]
            lengths = np.minimum(np.diff(counted), limit)  # (documents,), in tokens that count
            self.lengths = np.maximum(1, lengths)
            self.mean_length = float(lengths.sum() / np.count_nonzero(lengths))

    def at(self, targets: np.ndarray) -> np.ndarray:
        """Return the weights (T,) of the tokens at these positions of the split, (T,)."""
        weights = np.ones(len(targets), np.float32)
        if self.answers is not None:
            # A token is inside an answer if an odd number of bounds is at or before it.
            weights *= np.searchsorted(self.answers, targets, side="right") % 2
        if self.ends is not None:
            weights = weights * self.mean_length / self.lengths[np.searchsorted(self.ends, targets)]
        return weights


def find_tokens(ids: np.ndarray, tokens: list[int]) -> np.ndarray:
    """Return the positions of these tokens in a split, in order. This reads the whole split."""
    starts = ProgressBar("finding documents", range(0, len(ids), CHUNK))
    positions = []
    for start in starts:
        chunk = ids[start : start + CHUNK]
        is_one = reduce(np.logical_or, [chunk == token for token in tokens])  # isin() is slower
        positions.append(np.flatnonzero(is_one) + start)
    return np.concatenate(positions)


def packed(ends: np.ndarray, T: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the plan of a split: all spans (spans,), and the bounds of each window (windows + 1,).

    Window i has the spans bounds[i] to bounds[i + 1] - 1. ends: position of the eos of each
    document, (documents,).
    """
    spans = []
    per_window = [np.zeros(1, int)]
    start = 0
    for first in range(0, len(ends), GROUP_SIZE):
        group = ends[first : first + GROUP_SIZE]
        spans_of_group, counts = pack(group, start, T)
        spans.append(spans_of_group)
        per_window.append(counts)
        start = int(group[-1]) + 1
    return np.concatenate(spans), np.concatenate(per_window).cumsum()

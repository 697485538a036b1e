"""Windows that are filled with whole documents, and how much the tokens of a split count.

A document of n tokens is followed by its eos, and so gives n + 1 targets: each of its tokens, and
the eos. Their inputs are the eos before the document and its n tokens. So here an eos *begins* a
document, as it does when sample.py writes a new one. The eos before the first document of a file,
where there is none, is added.

Packing puts documents together so that they fill windows of T inputs, best fit first: from the
longest document to the shortest, each goes into the window with the least room that is enough for
it (arXiv 2404.10830). A document with more than T inputs has windows of its own. What is left of it
at the end, its tail, is packed like a document: an eos stands before it, which does not predict
anything. Behind the last document of a window there may be padding, which is not trained on.

The plan of the windows depends on the tokens and T only. Each process computes it when it opens the
data, for 250,000 documents at a time: about a second for a million documents.
"""

from functools import reduce

import numpy as np

from hardware.terminal import ProgressBar

TOGETHER = 250_000  # documents that are packed together
STRETCH = 1 << 22  # tokens that are read at a time

# A window of the plan consists of pieces. Before each piece there is an eos, which may be the last
# token of the piece before it. A piece with T + 1 tokens is the middle of a long document: a whole
# window, without that eos.
PIECE = np.dtype([("first", "<i8"), ("count", "<u4")])  # its first token in the split; its tokens


def best_fit(lengths: np.ndarray, T: int) -> tuple[np.ndarray, int]:
    """Return the bin (n,) of each of n items, of these lengths (n,), and the number of bins.

    No bin has more than T. The longest item goes first, and each into the fullest bin that has room
    for it.
    """
    bins = np.empty(len(lengths), np.int64)
    count = 0
    with_room: list[list[int]] = [[] for _ in range(T + 1)]  # room -> the bins that have it
    rooms = 0  # bit r is set if there are bins with room r
    order = np.argsort(-lengths, kind="stable")
    for item, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1  # the lowest bit that is set
            bin = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room = T
            bin = count
            count += 1
        bins[item] = bin
        if room > length:
            with_room[room - length].append(bin)
            rooms |= 1 << (room - length)
    return bins, count


def pack(ends: np.ndarray, start: int, T: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack documents into windows. Return all pieces, and how many of them each window has.

    ends: where the eos of each document is, (n,). start: the first token of the first of them.
    """
    starts = np.append(start, ends[:-1] + 1)
    inputs = ends - starts + 1
    # The windows of long documents.
    full = np.where(inputs > T, inputs // T, 0)  # (n,): how many each has
    document = np.repeat(np.arange(len(ends)), full)
    in_document = np.arange(len(document)) - (full.cumsum() - full)[document]  # 0, 1, 2, ...
    begins_it = in_document == 0  # then an eos stands before it, as before any other piece
    windows = np.empty(len(document), PIECE)
    windows["first"] = starts[document] - 1 + in_document * T + begins_it
    windows["count"] = T + 1 - begins_it
    # Everything else: documents, and tails. A tail repeats the last token before it as an input.
    left = inputs - full * T
    is_tail = full > 0
    pieces = np.empty(len(ends), PIECE)
    pieces["first"] = np.where(is_tail, starts - 1 + full * T, starts)
    pieces["count"] = left + is_tail
    pieces = pieces[left > 0]
    bins, count = best_fit(pieces["count"], T)
    pieces = pieces[np.argsort(bins, kind="stable")]
    per_window = np.append(np.ones(len(windows), int), np.bincount(bins, minlength=count))
    return np.append(windows, pieces), per_window


def padded(ends: np.ndarray, T: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the plan, as packed() does, of windows with one document each.

    A document with more than T inputs is cut: its end is not in the plan.
    """
    pieces = np.empty(len(ends), PIECE)
    pieces["first"] = np.append(0, ends[:-1] + 1)
    pieces["count"] = np.minimum(ends + 1 - pieces["first"], T)
    return pieces, np.arange(len(ends) + 1)


class Counting:
    """How much the loss of each token of a split counts. The mean of those that count is 1.

    answers: where each answer begins and where it ends, in turn, (2 n,), if only their tokens shall
    count; None: all do. ends: where the eos of each document is, (documents,), if each document
    shall count as much as the others; None: each token shall. limit: the most tokens of a document
    that its window has room for; what stands behind them is not learned.
    """

    def __init__(self, answers: np.ndarray | None, ends: np.ndarray | None, limit: float = np.inf):
        self.answers = answers
        self.ends = ends
        if ends is not None:
            bounds = np.append(-1, ends) + 1  # where documents begin and end
            counted = bounds  # how many tokens that count stand before each of these
            if answers is not None:
                before = np.append(0, (answers[1::2] - answers[::2]).cumsum())
                counted = before[np.searchsorted(answers[::2], bounds)]
            lengths = np.minimum(np.diff(counted), limit)  # (documents,), in tokens that count
            self.lengths = np.maximum(1, lengths)
            self.mean_length = float(lengths.sum() / np.count_nonzero(lengths))

    def weights(self, targets: np.ndarray) -> np.ndarray:
        """Return the weights (T,) of the tokens at these places of the split, (T,)."""
        weights = np.ones(len(targets), np.float32)
        if self.answers is not None:
            # Up to a token of an answer, there is an odd number of begins and ends.
            weights *= np.searchsorted(self.answers, targets, side="right") % 2
        if self.ends is not None:
            weights = weights * self.mean_length / self.lengths[np.searchsorted(self.ends, targets)]
        return weights


def places_of(ids: np.ndarray, tokens: list[int]) -> np.ndarray:
    """Return where these tokens are in a split, in their order. All of it is read."""
    starts = ProgressBar("finding documents", range(0, len(ids), STRETCH))
    places = []
    for start in starts:
        stretch = ids[start : start + STRETCH]
        is_one = reduce(np.logical_or, [stretch == token for token in tokens])  # isin() is slower
        places.append(np.flatnonzero(is_one) + start)
    return np.concatenate(places)


def packed(ends: np.ndarray, T: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the plan of a split: the pieces of all windows (pieces,), and the number of the first
    piece of each window, with the number of all pieces at the end, (windows + 1,).

    ends: where the eos of each document is, (documents,).
    """
    pieces = []
    per_window = [np.zeros(1, int)]
    start = 0
    for place in range(0, len(ends), TOGETHER):
        group = ends[place : place + TOGETHER]
        of_group, counts = pack(group, start, T)
        pieces.append(of_group)
        per_window.append(counts)
        start = int(group[-1]) + 1
    return np.concatenate(pieces), np.concatenate(per_window).cumsum()

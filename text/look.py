"""What there is to say of a data set, for people."""

import re
from collections import Counter
from pathlib import Path

import numpy as np

from text.records import Tally


def no_documents(tally: Tally) -> str:
    if tally.examples:
        return f"no documents: all {tally.records:,} records are bad or empty, as {tally.examples[0]}"
    why = "; ".join(f"{n:,} {reason}" for reason, n in tally.dropped.items())
    return f"no documents: {why or 'the input is empty'}"


def describe_lengths(lengths: Counter) -> dict:
    """Percentiles (the smallest length that so many percent of the documents do not exceed) and a histogram by powers
    of two: up to N tokens -> [documents, their tokens].
    """
    values = sorted(lengths)
    cumulative = np.cumsum([lengths[v] for v in values])
    percentiles = {
        f"p{p}": values[int(np.searchsorted(cumulative, cumulative[-1] * p / 100))] for p in (1, 10, 50, 90, 99)
    }
    histogram: dict[str, list[int]] = {}
    for value in values:
        bucket = histogram.setdefault(str(max(16, 1 << (value - 1).bit_length())), [0, 0])
        bucket[0] += lengths[value]
        bucket[1] += lengths[value] * value
    return percentiles | {"max": values[-1], "histogram": histogram}


def report(meta: dict, folder: Path) -> str:
    info, splits, lengths, records = meta["tokenizer"], meta["splits"], meta["lengths"], meta["records"]
    lines = [f"{folder}: {info['kind']} tokenizer, vocabulary {meta['vocab_size']:,}, {meta['dtype']}"]
    for split, s in splits.items():
        counts = f"{s['documents']:>12,} documents {s['tokens']:>15,} tokens {s['bytes']:>15,} bytes of text"
        lines.append(f"  {split:<6} {counts}")
    characters, tokens = (sum(s[key] for s in splits.values()) for key in ("characters", "tokens"))
    lines.append(f"  {characters / tokens:.2f} characters per token (eos counted)")
    shapes = ", ".join(f"{k}: {n:,}" for k, n in records["shapes"].items())
    lines.append(f"  {records['read']:,} records, read as {shapes}")
    for source in meta["sources"]:
        if "skipped" in source:
            counts = ", ".join(f"{n:,} x {what}" for what, n in source["skipped"].items())
            lines.append(f"  skipped in {source['path']}: {counts}")
    for what in ("bad", "dropped", "changed"):
        lines.append(f"  {what}: {sum(records[what].values()):,}")
        lines += [f"    {n:,} x {reason}" for reason, n in records[what].items()]
        lines += [f"    e.g. {example}" for example in records["examples"]] if what == "bad" else []
    if unread := records.get("unread"):  # sets of before 2026-11-22 have none
        lines.append("  not read (--fields= names what is): " + ", ".join(f"{n:,} x {k}" for k, n in unread.items()))
    percentiles = ", ".join(f"{k} {v:,}" for k, v in lengths.items() if k != "histogram")
    lines.append(f"  tokens per document: {percentiles}")
    lines.append(f"    {'up to':>9}  {'documents':<31} longer: documents, and tokens in them")
    counts = np.array(list(lengths["histogram"].values()))  # (rows, 2): documents, and tokens in them
    shares, longer = counts[:, 0] / counts[:, 0].sum(), 1 - counts.cumsum(axis=0) / counts.sum(axis=0)
    for edge, share, (beyond, inside) in zip(lengths["histogram"], shares, longer, strict=True):
        bar = "\u2588" * round(20 * share / shares.max())
        lines.append(f"    {int(edge):>9,}  {bar:<20} {share:>8.2%}  {beyond:>16.2%} {inside:>16.2%}")
    return "\n".join(lines)


def escaped(found: re.Match) -> str:
    """A control character as it is spelled: texts from the web must not steer the terminal."""
    return repr(found[0])[1:-1]

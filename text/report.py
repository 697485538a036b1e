"""Describe a data set: its meta.json, the report, and the texts that --inspect shows."""

import importlib.metadata
import math
import random
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from configurator import UserError
from hardware.terminal import plural
from text.chat import answer_bounds, chatml_ids
from text.dataset import (
    FORMAT_VERSION,
    id_type,
    load_tokenizer,
    open_datasets,
    open_split,
    train_loader,
    verify,
)
from text.encode import token_sizes
from text.formats import Source
from text.packing import find_tokens
from text.records import Tally
from text.settings import PrepareConfig
from text.tokenizer import Tokenizer


def describe_lengths(lengths: Counter) -> dict[str, int]:
    """Return percentiles of the lengths of documents, in tokens.

    lengths: length -> number of documents. pN is the smallest length that N percent of the
    documents do not exceed.
    """
    values, counts = np.array(sorted(lengths.items())).T
    percents = (1, 10, 50, 90, 99)
    percentiles = np.percentile(values, percents, weights=counts, method="inverted_cdf").tolist()
    return {f"p{p}": n for p, n in zip(percents, percentiles, strict=True)} | {"max": max(lengths)}


def describe_set(info: dict, splits: dict[str, dict], lengths: Counter, tally: Tally) -> dict:
    """Return meta.json without the sources and the settings."""
    counts = {key: value for key, value in vars(tally).items() if key != "records"}
    return {
        "format_version": FORMAT_VERSION,
        "dtype": id_type(info["vocab_size"]).name,
        "splits": splits,
        "vocab_size": info["vocab_size"],
        "eos_id": info["eos_id"],
        "tokenizer": {k: v for k, v in info.items() if k not in ("vocab_size", "eos_id")},
        "lengths": describe_lengths(lengths),
        "records": {"read": tally.records} | counts,
    }


def describe_sources(
    cfg: PrepareConfig, read: list[Source], passed_by: dict[str, Counter]
) -> list[dict]:
    """Return the entries of meta.json for the files that were read and those that were skipped."""
    if not cfg.input:
        versions = {package: importlib.metadata.version(package) for package in ("numpy", "torch")}
        return [{"path": "docstrings", "python": sys.version.split()[0], **versions}]
    files = [{"path": s.name, "bytes": s.bytes, "sha256": s.sha256} for s in read]
    return files + [{"path": name, "skipped": counts} for name, counts in passed_by.items()]


def count_answers(folder: Path, meta: dict, split: str, tokenizer: Tokenizer) -> dict[str, int]:
    """Return the number of tokens of a split that loss_on=answers learns, and their bytes."""
    ids = np.asarray(open_split(folder, meta, split))
    positions = find_tokens(ids, [meta["eos_id"], *chatml_ids(tokenizer)])
    answers = answer_bounds(ids, positions, tokenizer).reshape(-1, 2)  # begin, end
    sizes = token_sizes(tokenizer)
    size = sum(int(sizes[ids[start:end]].sum()) for start, end in answers)
    return {"tokens": int(np.diff(answers).sum()), "bytes": size}


def annotated_text(ids: np.ndarray, tokenizer: Tokenizer) -> str:
    """Return the text of a document (n,), with [[ ]] around what loss_on=answers learns."""
    positions = np.flatnonzero(np.isin(ids, chatml_ids(tokenizer)))
    parts = np.split(ids, answer_bounds(ids, positions, tokenizer))
    texts = [tokenizer.decode(part.tolist()) for part in parts]
    return "".join(f"[[{text}]]" if i % 2 else text for i, text in enumerate(texts))


def first_document(folder: Path, meta: dict) -> str:
    """Return the lines of the report that show how the first document was encoded."""
    ((_, text),) = document_texts(folder, meta, "first", 1)
    shown = text[:1000] + (" ..." if len(text) > 1000 else "")
    return "  the first document, decoded back from its ids:\n" + textwrap.indent(shown, "    ")


def summary(meta: dict, folder: Path) -> str:
    """Return the report of a data set, several lines, from its meta.json."""
    splits, records = meta["splits"], meta["records"]
    kind = meta["tokenizer"]["called"]
    lines = [f"{folder}: {kind} tokenizer, vocabulary {meta['vocab_size']:,}, {meta['dtype']}"]
    for split, s in splits.items():
        documents = plural(s["documents"], "document")
        tokens = f"{s['tokens']:>14,} tokens"
        lines.append(f"  {split:<6} {documents:>20} {tokens} {s['bytes']:>14,} bytes of text")
        if "answers" in s:
            n = s["answers"]["tokens"]
            fraction = f"{n / s['tokens']:.0%}{'; [[ ]] below' if split == 'train' else ''}"
            lines.append(f"         --loss_on=answers learns {n:,} tokens of them ({fraction})")
    if few := meta.get("few_documents"):
        lines.append(f"  {plural(few, 'document')}, split by tokens: the last tokens are val.bin")
    characters, tokens = (sum(s[k] for s in splits.values()) for k in ("characters", "tokens"))
    lines.append(f"  {characters / tokens:.2f} characters per token (eos counted)")
    percentiles = ", ".join(f"{name} {n:,}" for name, n in meta["lengths"].items())
    lines.append(f"  tokens per document: {percentiles}")
    lines.append(f"  {plural(records['read'], 'record')}, read as {counted(records['shapes'])}")
    for outcome in ("bad", "dropped", "changed"):
        lines.append(f"  {outcome}: {counted(records[outcome]) or 0}")
    if records["changed"] and records["checked"]:
        lines[-1] += f" (of {plural(records['checked'], 'document')} decoded for comparison)"
    lines += [f"  bad record, for example {example}" for example in records["examples"]]
    if records["unread"]:
        lines.append(f"  fields that are not read: {unread_fields(records)}")
    if names := records["names"]:
        advice = "--separators splits texts at them"
        lines.append(f"  special tokens encoded as ordinary text: {counted(names)} ({advice})")
    for source in meta["sources"]:
        if "skipped" in source:
            lines.append(f"  skipped in {source['path']}: {counted(source['skipped'])}")
    losses = {"uniform": math.log(meta["vocab_size"])} | meta["landmarks"]
    shown = [f"{name} {loss:.3f}" for name, loss in losses.items() if name != "bigram_tokens"]
    lines.append(f"  loss on val of the simplest models, nats per token: {', '.join(shown)}")
    return "\n".join(lines)


def unread_fields(records: dict) -> str:
    """Return `12 x summary, 4,567 characters; 3 x meta.note, 89 characters`, the largest first."""
    counts, sizes = records["unread"], Counter(records["unread_characters"]).most_common()
    shown = [f"{counts[path]:,} x {path}, {size:,} characters" for path, size in sizes[:12]]
    size = sum(size for _, size in sizes[12:])
    shown += [f"{len(sizes) - 12:,} others, {size:,} characters"] * (len(sizes) > 12)
    return "; ".join(shown)


def counted(counts: dict[str, int]) -> str:
    """Return `12 x not valid JSON, 1 x no field text`."""
    return ", ".join(f"{n:,} x {name}" for name, n in counts.items())


# --------------------------------------------------------------------------------------------------
# --inspect


def document_texts(folder: Path, meta: dict, show: str, count: int) -> Iterator[tuple[str, str]]:
    """Yield (location, text) of `count` documents of train.bin; a very long text is cut.

    show: first, random, or the number of a token: the document that contains it comes first.
    """
    limit = 20_000  # tokens of a document
    ids = np.asarray(open_split(folder, meta, "train"))
    tokenizer = load_tokenizer(folder)
    ends = find_tokens(ids, [meta["eos_id"]])
    if show == "random":
        numbers = random.sample(range(len(ends)), min(count, len(ends)))
    else:
        token = 0 if show == "first" else int(show)
        if token >= len(ids):
            raise UserError(f"--show={token}: train.bin has {len(ids):,} tokens")
        first = int(np.searchsorted(ends, token))
        numbers = range(first, min(first + count, len(ends)))
    for number in numbers:
        start = ends[number - 1] + 1 if number else 0
        end = ends[number]
        text = annotated_text(ids[start : min(end, start + limit)], tokenizer)
        if end - start > limit:
            text += f" ... and {end - start - limit:,} more tokens"
        yield f"train, tokens {start:,} to {end:,}, then eos", text


def texts_of_step(path: Path, records: list[dict], step: int) -> Iterator[tuple[str, str]]:
    """Yield (location, text) for each sample that a step of a run trained on.

    The location is followed by the first inputs, each with its target.

    path: its metrics.jsonl, for error messages. records: the content of that file, which includes
    the settings of the run. step: counted from 1, as in the log and metrics.jsonl.
    Raises UserError if the records have no such step, or if a data set was made again since then.
    """
    # A record with settings is written when a run starts, and when it resumes with other settings.
    # Its "step" is the number of steps before that, so it is smaller than the steps it describes.
    with_settings = [r for r in records if "settings" in r and r["step"] < step]
    if not with_settings or step > with_settings[-1]["steps"]:
        raise UserError(f"--step={step}: {path} has no run with that step")
    described = with_settings[-1]
    settings = described["settings"]
    samples = described["step_samples"]
    sets = open_datasets(settings["dataset"], settings["data_dir"])
    for data in sets:
        if data.sha256("train") != described["data"][data.name]:
            raise UserError(f"{data.folder}: it was prepared again after this step of the run")
        verify(data.folder, data.meta, "train")
    loader = train_loader(sets, settings["block_size"], settings["seed"], settings["documents"])
    first = described["first_sample"] + (step - 1 - described["step"]) * samples
    tokenizer = load_tokenizer(sets[0].folder)
    for number, (k, start) in enumerate(loader.starts(first, samples), first):
        targets = loader.splits[k].targets(start)
        location = f"{sets[k].name}/train.bin, first target: token {targets[targets >= 0][0]:,}"
        ids = loader.rows([(k, start)]).ids[0]
        ids = ids[ids >= 0]  # the others are padding
        documents = np.split(ids, np.flatnonzero(ids == tokenizer.eos_id))
        texts = [tokenizer.decode(d[d != tokenizer.eos_id].tolist()) for d in documents]
        shown = [repr(tokenizer.decode([token])) for token in ids[:7].tolist()]
        pairs = ", ".join(f"{x} -> {y}" for x, y in pairwise(shown))
        yield f"sample {number:,}: {location}\n---- input -> target: {pairs}", "<eos>".join(texts)

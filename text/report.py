"""What is said of a data set: its meta.json, the report, and the texts that --inspect shows."""

import importlib.metadata
import math
import random
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from configurator import UserError
from hardware.terminal import plural
from text.chat import answers_of, marks_of
from text.dataset import (
    FORMAT_VERSION,
    id_type,
    load_tokenizer,
    open_datasets,
    open_split,
    train_loader,
    verify,
)
from text.packing import STRETCH, places_of
from text.records import Tally
from text.settings import PrepareConfig
from text.sources import Source
from text.tokenizer import Tokenizer


def no_documents(tally: Tally) -> str:
    """Return the error message for an input that has no documents."""
    if tally.examples:
        return f"no documents: all records are bad or empty, for example {tally.examples[0]}"
    dropped = "; ".join(f"{n:,} {reason}" for reason, n in tally.dropped.items())
    return f"no documents: {dropped or 'the input is empty'}"


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
    """Return what meta.json says of the files that were read, and of those that were skipped."""
    if not cfg.input:
        versions = {package: importlib.metadata.version(package) for package in ("numpy", "torch")}
        return [{"path": "docstrings", "python": sys.version.split()[0], **versions}]
    files = [{"path": s.name, "bytes": s.bytes, "sha256": s.sha256} for s in read]
    return files + [{"path": name, "skipped": counts} for name, counts in passed_by.items()]


def count_answers(folder: Path, meta: dict, split: str, tokenizer: Tokenizer) -> dict[str, int]:
    """Return how many tokens loss_on=answers learns of a split, and the bytes of their text."""
    ids = np.asarray(open_split(folder, meta, split))
    places = places_of(ids, [meta["eos_id"], *marks_of(tokenizer)])
    answers = answers_of(ids, places, tokenizer).reshape(-1, 2)  # begin, end
    sizes = np.array([len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)])
    size = sum(int(sizes[ids[begin:end]].sum()) for begin, end in answers)
    return {"tokens": int(np.diff(answers).sum()), "bytes": size}


def marked(ids: np.ndarray, tokenizer: Tokenizer) -> str:
    """Return the text of a document (n,). What loss_on=answers learns of it stands in [[ ]]."""
    places = np.flatnonzero(np.isin(ids, marks_of(tokenizer)))
    parts = np.split(ids, answers_of(ids, places, tokenizer))
    texts = [tokenizer.decode(part.tolist()) for part in parts]
    return "".join(f"[[{text}]]" if i % 2 else text for i, text in enumerate(texts))


def first_document(folder: Path, meta: dict) -> str:
    """Return the lines of the report that show how the first document was encoded."""
    ((_, text),) = document_texts(folder, meta, "first", 1)
    heading = "  the first document, decoded back from its ids"
    if "answers" in meta["splits"]["train"]:
        heading += "; --loss_on=answers learns what is in [[ ]]"
    shown = text[:1000] + (" ..." if len(text) > 1000 else "")
    return f"{heading}:\n{textwrap.indent(shown, '    ')}"


def summary(meta: dict, folder: Path) -> str:
    """Return the report of a data set, several lines, from its meta.json."""
    vocabulary = f"vocabulary {meta['vocab_size']:,}, {meta['dtype']}"
    lines = [f"{folder}: {meta['tokenizer']['kind']} tokenizer, {vocabulary}"]
    lines += report_splits(meta["splits"], meta.get("few_documents", 0))
    lines += report_records(meta["records"], meta["sources"])
    # Data sets of earlier versions have a histogram beside the percentiles.
    lengths = [f"{k} {v:,}" for k, v in meta["lengths"].items() if k != "histogram"]
    lines.append(f"  tokens per document: {', '.join(lengths)}")
    return "\n".join(lines + report_landmarks(meta))


def warn_of_large_vocabulary(meta: dict) -> str:
    """Return a warning if the tokenizer that was trained has too large a vocabulary, or "".

    A tokenizer that was trained on little text has whole sentences of it as tokens, and these have
    hardly any places where they can be learned.
    """
    tokens = meta["splits"]["train"]["tokens"]
    if tokens >= 10 * meta["vocab_size"]:
        return ""
    problem = f"  warning: only {tokens:,} tokens to learn {meta['vocab_size']:,} tokens from"
    return f"{problem}: give more text, a smaller --vocab_size or, for texts, --tokenizer=char\n"


def report_splits(splits: dict[str, dict], few: int) -> list[str]:
    """Return the counts. few: the number of documents if they were split by tokens, else 0."""
    lines = []
    for split, s in splits.items():
        documents = plural(s["documents"], "document")
        tokens = f"{s['tokens']:>14,} tokens"
        lines.append(f"  {split:<6} {documents:>20} {tokens} {s['bytes']:>14,} bytes of text")
    if answers := {split: s["answers"]["tokens"] for split, s in splits.items() if "answers" in s}:
        counts = ", ".join(
            f"{n:,} tokens of {split} ({n / splits[split]['tokens']:.0%})"
            for split, n in answers.items()
        )
        lines.append(f"  --loss_on=answers learns {counts}")
    characters, tokens = (sum(s[k] for s in splits.values()) for k in ("characters", "tokens"))
    if few:
        last = f"the last {splits['val']['tokens']:,} of {tokens:,} tokens"
        lines.append(f"  {plural(few, 'document')}, split by tokens: {last} are val")
    if (n := splits["val"]["tokens"]) < 1000 < tokens / 10:
        lines.append(f"  warning: {plural(n, 'token')} of val tell little: raise --val_fraction")
    lines.append(f"  {characters / tokens:.2f} characters per token (eos counted)")
    if characters < 0.8 * tokens:
        lines.append("  warning: that is few: train a tokenizer on these texts, or a larger one")
    return lines


def report_records(records: dict, sources: list[dict]) -> list[str]:
    shapes = ", ".join(f"{shape}: {n:,}" for shape, n in records["shapes"].items())
    lines = [f"  {plural(records['read'], 'record')}, read as {shapes}"]
    for source in sources:
        if "skipped" in source:
            counts = ", ".join(f"{n:,} x {reason}" for reason, n in source["skipped"].items())
            lines.append(f"  skipped in {source['path']}: {counts}")
    for outcome in ("bad", "dropped", "changed"):
        lines.append(f"  {outcome}: {sum(records[outcome].values()):,}")
        lines += [f"    {n:,} x {reason}" for reason, n in records[outcome].items()]
        if outcome == "bad":
            lines += [f"    e.g. {example}" for example in records["examples"]]
    return lines


def report_landmarks(meta: dict) -> list[str]:
    """Return how well the simplest models predict val. A split of one token has no such counts."""
    if not (landmarks := meta["landmarks"]):
        return []
    V = meta["vocab_size"]
    counted = landmarks["bigram_tokens"]
    is_sample = counted < meta["splits"]["train"]["tokens"] - 1
    train = f"{counted:,} tokens of train" if is_sample else "train"
    return [
        "  loss on val of the simplest models, in nats per token, to compare a GPT with:",
        f"    {math.log(V):>9.3f}  all tokens are equally likely: ln {V:,}",
        f"    {landmarks['unigram']:>9.3f}  each token is as frequent as in {train}",
        f"    {landmarks['bigram']:>9.3f}  each pair of tokens is as frequent as in {train}",
    ]


# --------------------------------------------------------------------------------------------------
# --inspect


def document_texts(folder: Path, meta: dict, show: str, count: int) -> Iterator[tuple[str, str]]:
    """Yield (place, text) of `count` documents of train.bin; a very long text is cut.

    show: first, random, or the number of a token: the document that contains it comes first.
    """
    limit = 20_000  # tokens of a document
    ids = np.asarray(open_split(folder, meta, "train"))
    tokenizer = load_tokenizer(folder)
    eos_id = meta["eos_id"]
    end = int(show) if show.isdigit() else 0
    if end >= len(ids):
        raise UserError(f"--show={end}: train.bin has {len(ids):,} tokens")
    for _ in range(count):
        if show == "random":
            end = random.randrange(len(ids))
        elif end >= len(ids):
            return
        begin = end
        while begin > 0 and ids[begin - 1] != eos_id:
            begin -= 1
        while not len(places := np.flatnonzero(ids[end : end + STRETCH] == eos_id)):
            end += STRETCH
        end += int(places[0])
        text = marked(ids[begin : min(end, begin + limit)], tokenizer)
        if end - begin > limit:
            text += f" ... and {end - begin - limit:,} more tokens"
        yield f"train, tokens {begin:,} to {end:,}, then eos", text
        end += 1


def texts_of_step(path: Path, records: list[dict], step: int) -> Iterator[tuple[str, str]]:
    """Yield (where it comes from, its text) for each sample that a step of a run trained on.

    path: its metrics.jsonl, for error messages. records: the content of that file, which includes
    the settings of the run. step: counted from 1, as in the log and metrics.jsonl.
    Raises UserError if the records do not say what the step trained on, or if a data set was made
    again since then.
    """
    # A record with settings is written when a run begins, and when it resumes with other settings.
    # Its "step" is the number of steps before that, so it is smaller than the steps it describes.
    with_settings = [r for r in records if "settings" in r and r["step"] < step]
    if not with_settings:
        raise UserError(f"{path}: no run began there before --step={step}: --inspect out/RUN")
    described = with_settings[-1]
    try:
        if step > described["steps"]:
            raise UserError(f"--step={step}: the run ends with step {described['steps']}")
        settings = described["settings"]
        samples = described["step_samples"]
        sets = open_datasets(settings["dataset"], settings["data_dir"])
        for data in sets:
            if data.meta["splits"]["train"]["sha256"] != described["data"][data.name]:
                raise UserError(f"{data.folder}: made again since the step trained on it")
        loader = train_loader(sets, settings["block_size"], settings["seed"], settings["documents"])
        sample = described["first_sample"] + (step - 1 - described["step"]) * samples
        starts = loader.starts(sample, samples)
    except (KeyError, TypeError, ValueError) as e:
        problem = f"the settings of its run are damaged, or of an earlier version: {e!r}"
        raise UserError(f"{path}: {problem}") from None
    for data in sets:
        verify(data.folder, data.meta, "train")
    tokenizer = load_tokenizer(sets[0].folder)
    for number, (k, start) in enumerate(starts, sample):
        targets = loader.splits[k].targets(start)
        place = f"{sets[k].name}/train.bin, first target: token {targets[targets >= 0][0]:,}"
        ids = loader.rows([(k, start)]).ids[0]
        ids = ids[ids >= 0]  # the others are padding
        documents = np.split(ids, np.flatnonzero(ids == tokenizer.eos_id))
        texts = [tokenizer.decode(d[d != tokenizer.eos_id].tolist()) for d in documents]
        yield f"sample {number:,}: {place}", "<eos>".join(texts)

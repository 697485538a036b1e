"""What a step of an earlier run has read: its windows, found again from metrics.jsonl, as text."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from configurator import UserError
from text.dataset import DataSet, load_tokenizer, open_datasets, train_loader
from text.windows import Loader, PackedWindows, Windows


def run_loader(path: Path, records: list[dict], step: int) -> tuple[list[DataSet], Loader, range]:
    """Return (data sets, loader, samples of the step) of a run.

    path: its metrics.jsonl, for error messages. records: the content of that file, which includes
    the settings of the run. step: counted from 1, as in the log and metrics.jsonl.
    Raises UserError if the records do not say what the step trained on, or if a data set was made
    again since then.
    """
    # A record with settings is written when a run begins, and when it resumes with other settings.
    # Its "step" is the number of steps before that, so it is smaller than the steps it describes.
    with_settings = [r for r in records if "settings" in r and r["step"] < step]
    if not with_settings:
        raise UserError(f"{path}: it has no settings of a run that began before step {step}")
    start = with_settings[-1]
    try:
        if step > start["steps"]:
            raise UserError(f"--step={step}: the run ends with step {start['steps']}")
        settings = start["settings"]
        samples = start["step_samples"]
        sets = open_datasets(settings["dataset"], settings["data_dir"])
        for data in sets:
            if data.meta["splits"]["train"]["sha256"] != start["data"][data.name]:
                raise UserError(f"{data.folder}: made again since the step trained on it")
        loader = train_loader(sets, settings["block_size"], settings["seed"], settings["documents"])
        sample = start["first_sample"] + (step - 1 - start["step"]) * samples
        return sets, loader, range(sample, sample + samples)
    except (KeyError, TypeError, ValueError) as e:
        problem = f"the settings of its run are damaged, or of an earlier version: {e!r}"
        raise UserError(f"{path}: {problem}") from None


def sample_texts(sets: list[DataSet], loader: Loader, samples: range) -> Iterator[tuple[str, str]]:
    """Yield (where it comes from, its text) for each of these samples of a run."""
    tokenizer = load_tokenizer(sets[0].folder)
    eos_id = tokenizer.eos_id
    starts = loader.starts(samples.start, len(samples))
    for sample, (k, start) in zip(samples, starts, strict=True):
        ids = loader.rows([(k, start)]).ids[0]
        ids = ids[ids >= 0]  # the others are padding
        texts = []
        for part in np.split(ids, np.flatnonzero(ids == eos_id)):
            texts.append(tokenizer.decode([i for i in part.tolist() if i != eos_id]))
        place = f"{sets[k].name}/train.bin, {place_of(loader.splits[k], start)}"
        yield f"sample {sample:,}: {place}", "<eos>".join(texts)


def place_of(windows: Windows, start: int) -> str:
    """Return where the window that begins at `start` comes from, in words."""
    if not isinstance(windows, PackedWindows):
        return f"tokens {start:,} to {start + windows.block_size:,}"
    pieces = [f"{token:,} to {token + n - 1:,}" for token, n in windows.pieces_of(start)]
    return f"tokens {', '.join(pieces)}"

"""What a step of an earlier run has read: its windows, found again from metrics.jsonl, as text."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from configurator import UserError
from text.dataset import load_tokenizer, open_datasets, train_loader, verify


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

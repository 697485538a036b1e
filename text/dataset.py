"""Read a data set: the files in data/NAME/.

    train.bin, val.bin   one flat little-endian array of token ids each, with one eos after every
                         document; uint16 if vocab_size <= 65,536, else uint32
    tokenizer.*          the tokenizer: training and sampling need nothing outside the folder
    meta.json            counts, hashes, sources, and what was left out and why; it is written last,
                         so a data set that has it is complete
    .verified.json       which .bin was hashed last by a training, so that it is done once

prepare.py writes these files. train.py, sample.py and the workers of prepare.py read them with the
functions in this module, which does not need torch. text/windows.py decides the order in which the
tokens are read.
"""

import hashlib
import json
import os
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from configurator import UserError
from hardware.disk import atomic_write, file_sha256, json_bytes, read_object, unseal
from hardware.terminal import ProgressBar
from text.chat import answer_bounds, chatml_ids
from text.packing import LossWeights, find_tokens, packed, padded
from text.tokenizer import Tokenizer, open_tokenizer
from text.windows import DataSet, Documents, Loader, LossOn, LossPer, PackedWindows, Windows

FORMAT_VERSION = 2
VERIFIED = ".verified.json"  # see verify_once()
AGAIN = "run prepare.py again; if it belongs to a checkpoint, use another checkpoint"


# --------------------------------------------------------------------------------------------------
# Files


def read_meta(folder: Path) -> dict:
    """Return the meta.json of a data set or a checkpoint.

    Raises UserError if there is none, if it was changed, or if it has another format. Nothing else
    is checked: the hash says that prepare.py has written it.
    """
    path = folder / "meta.json"
    try:
        meta = unseal(path)
        version = meta["format_version"]
        if version != FORMAT_VERSION:
            raise ValueError(f"format {version}, expected {FORMAT_VERSION}")
        return meta
    except FileNotFoundError:
        others = sorted(path.parent.name for path in folder.parent.glob("*/meta.json"))
        usual = f"python prepare.py --input FILE --name {folder.name}"
        command = {"docs": "python prepare.py", "chat": "make chat"}.get(folder.name, usual)
        make = f"`{command}` makes one"
        if (elsewhere := Path("data") / folder / "meta.json").exists():
            make = f"did you mean {elsewhere.parent}?"
        prepared = f"; prepared are {', '.join(others)}" if others else ""
        raise UserError(f"no data set in {folder}/: {make}{prepared}") from None
    except OSError as e:
        raise UserError(f"{path}: {e.strerror}") from None
    except (ValueError, KeyError) as e:  # without a format, it is of another program
        raise UserError(f"{path}: unusable ({e}); {AGAIN}") from None


def id_type(vocab_size: int) -> np.dtype:
    """Return the type of a token id in the .bin files."""
    return np.dtype("<u2" if vocab_size <= 65536 else "<u4")


def open_dataset(folder: Path, hashes: bool = False) -> dict:
    """Return the meta.json of a data set.

    Raises UserError if the data set is not complete, or if a file is not the one that meta.json
    describes. The size of a .bin is always compared. hashes: whether to compare its hash as well,
    unless that was done before.
    """
    meta = read_meta(folder)
    check_tokenizer_files(folder, meta["tokenizer"])
    for split, counts in meta["splits"].items():
        path = folder / f"{split}.bin"
        size = counts["tokens"] * np.dtype(meta["dtype"]).itemsize
        actual = path.stat().st_size if path.exists() else 0
        if actual != size:
            problem = f"{actual} bytes where meta.json says {size}: missing, truncated or replaced"
            raise UserError(f"{path}: {problem}; run prepare.py again")
        if hashes:
            verify_once(folder, meta, split)
    return meta


def check_tokenizer_files(folder: Path, info: dict) -> None:
    """Raise UserError unless each file of the tokenizer has the hash in `info`, from meta.json."""
    for name, sha256 in files_of(info).items():
        path = folder / name
        if path.parent != folder:
            raise UserError(f"{folder}: meta.json names {name!r}, a file outside this folder")
        if not path.exists() or file_sha256(path) != sha256:
            raise UserError(f"{path}: missing, or changed: {AGAIN}")


def files_of(info: dict) -> dict[str, str]:
    """Return {name: SHA-256} of the tokenizer's own file, and of those for Hugging Face's tools.

    The latter are missing in the meta.json of a checkpoint, whose manifest has them.
    """
    return {info["file"]: info["sha256"]} | info.get("files", {})


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a data set or a checkpoint.

    Raises UserError if there is none, or if its file was changed.
    """
    info = read_meta(folder)["tokenizer"]
    check_tokenizer_files(folder, info)
    return open_tokenizer(folder / info["file"], info)


def tokenizer_id(info: dict) -> str:
    """Return a hash that is the same for two tokenizers that make the same ids.

    info: what meta.json says of the tokenizer. The hash of its file is not enough: a .tiktoken file
    does not contain the splitting pattern and the eos, a tokenizer.json all added tokens.
    """
    eos = info.get("eos") or None
    settings = [info.get("pattern"), info.get("special", {}).get(eos, eos), info.get("added") or {}]
    return hashlib.sha256(json.dumps([info["sha256"], settings]).encode()).hexdigest()


def open_split(folder: str | Path, meta: dict, split: str) -> np.memmap:
    """Return the token ids of a split, (tokens,): a memory map of the file on the disk."""
    dtype = np.dtype(meta["dtype"]).newbyteorder("<")
    return np.memmap(Path(folder) / f"{split}.bin", dtype=dtype, mode="r")


def verify_once(folder: Path, meta: dict, split: str) -> None:
    """Verify a split, unless .verified.json says that this very file was verified before.

    Each change of a file gives it another ctime, which cannot be set, and each copy another inode.
    If the folder is read-only, the split is verified each time.
    """
    info = os.stat(folder / f"{split}.bin")
    this = [meta["splits"][split]["sha256"], info.st_size, info.st_ctime_ns, info.st_ino]
    verified = {}
    with suppress(OSError, ValueError):
        verified = read_object(folder / VERIFIED)
    if verified.get(split) != this:
        verify(folder, meta, split)
        with suppress(OSError):
            atomic_write(folder / VERIFIED, json_bytes(verified | {split: this}))


def verify(folder: str | Path, meta: dict, split: str) -> None:
    """Read a split once, and raise UserError unless it has the hash that meta.json says."""
    ids = open_split(folder, meta, split)
    digest = hashlib.sha256()
    step = 1 << 22  # tokens
    for start in ProgressBar(f"verifying {split}.bin", range(0, len(ids), step)):
        digest.update(ids[start : start + step].data)
    if digest.hexdigest() != meta["splits"][split]["sha256"]:
        problem = "its hash differs from that in meta.json: it was changed"
        raise UserError(f"{folder}/{split}.bin: {problem}; run prepare.py again")


# --------------------------------------------------------------------------------------------------
# The data sets of a run


def newest_dataset(data_dir: str | Path) -> str:
    """Return the name of the data set in data_dir that was prepared last.

    The time is that of its meta.json, which prepare.py writes last. Raises UserError if there is
    none.
    """
    metas = [path for path in Path(data_dir).glob("[!.]*/meta.json") if path.is_file()]
    if not metas:
        make = "`python prepare.py --input FILE ...` makes one, and `make demo` another"
        raise UserError(f"no data set in {data_dir}/: {make}; --data_dir names another folder")
    return max(metas, key=os.path.getmtime).parent.name


def open_datasets(spec: str, data_dir: str | Path, hashes: bool = False) -> list[DataSet]:
    """Open the data sets that `spec` names: `wiki`, `wiki:0.7,code:0.3`, or `wiki,code`.

    Without weights, the weight of each data set is the size of its training split. hashes: see
    open_dataset(). Raises UserError if `spec` is wrong, a data set is damaged, or they do not all
    have the same tokenizer.
    """
    names, weights = names_and_weights(spec)
    if None in weights and any(weights):
        raise UserError(f"dataset={spec!r}: give every data set a weight, or none")
    metas = [open_dataset(Path(data_dir) / name, hashes) for name in names]
    for name, meta in zip(names, metas, strict=True):
        if tokenizer_id(meta["tokenizer"]) != tokenizer_id(metas[0]["tokenizer"]):
            problem = f"{name} was made with another tokenizer than {names[0]}"
            advice = f"prepare {name} with --tokenizer={data_dir}/{names[0]}"
            raise UserError(f"dataset={spec!r}: {problem}; {advice}")
    tokens = [Fraction(meta["splits"]["train"]["tokens"]) for meta in metas]
    parts = [weight or n for weight, n in zip(weights, tokens, strict=True)]
    return [
        DataSet(name, Path(data_dir) / name, meta, part / sum(parts))
        for name, meta, part in zip(names, metas, parts, strict=True)
    ]


def names_and_weights(spec: str) -> tuple[list[str], list[Fraction | None]]:
    """Split `wiki:0.7,code:0.3` into names and weights; a weight that is left out is None."""
    names: list[str] = []
    weights: list[Fraction | None] = []
    for part in spec.split(","):
        name, colon, text = part.strip().partition(":")
        try:
            weight = Fraction(text) if colon else None
            float(weight or 1)  # raises OverflowError
            if not name or name in names or (weight is not None and weight <= 0):
                raise ValueError
        except (ValueError, ZeroDivisionError, OverflowError):
            expected = "expected NAME, or NAME:WEIGHT,NAME:WEIGHT with weights above 0"
            raise UserError(f"dataset={spec!r}: {expected}") from None
        names.append(name)
        weights.append(weight)
    return names, weights


def hashes_of(sets: list[DataSet], split: str) -> dict[str, str]:
    """Return the SHA-256 of the split's .bin of each data set."""
    return {data.name: data.sha256(split) for data in sets}


def weights_of(sets: list[DataSet]) -> dict[str, str]:
    """Return the weight of each data set in the mixture, as a fraction: `2/3`."""
    return {data.name: str(data.weight) for data in sets}


def validation_id(
    hashes: dict[str, str], weights: dict[str, str], eval_tokens: int
) -> dict[str, Any]:
    """Return what a validation loss depends on, apart from the model.

    Two losses of a run can be compared if this was the same for both. A run keeps its block_size
    and its loss_on. hashes: of each val.bin. weights: see weights_of().
    """
    shares = sorted([sha256, weights[name]] for name, sha256 in hashes.items())
    return {"shares": shares, "eval_tokens": eval_tokens}


# --------------------------------------------------------------------------------------------------
# Their windows


def open_windows(
    data: DataSet,
    split: str,
    block_size: int,
    documents: Documents = "stream",
    loss_per: LossPer = "token",
    loss_on: LossOn = "all",
) -> Windows:
    """Open a split of a data set.

    The whole split is read if the positions of its documents or answers are needed. Raises
    UserError if the split is shorter than one window, or has no answers to learn.
    """
    ids = open_split(data.folder, data.meta, split)
    by_document = documents in ("pack", "pad")
    if not by_document and len(ids) < block_size + 1:
        size = f"{len(ids)} tokens, too few for block_size={block_size}"
        advice = "lower block_size, or prepare more text"
        advice += ", or a larger --val_fraction of it" if split == "val" else ""
        raise UserError(f"{data.name}/{split}.bin has {size}: {advice}")
    eos_id = data.meta["eos_id"]
    limits = eos_id if documents in ("mask", "pack") else None  # of attention: see Rows
    if not by_document and loss_per == "token" and loss_on == "all":
        return Windows(ids, block_size, eos_id=limits)

    tokenizer = load_tokenizer(data.folder) if loss_on == "answers" else None
    positions = find_tokens(ids, [eos_id, *(chatml_ids(tokenizer) if tokenizer else [])])
    ends = positions[ids[positions] == eos_id]
    answers = loss_weights = None
    if tokenizer:
        answers = answer_bounds(ids, positions, tokenizer)
        if not (answers[1::2] - answers[::2]).any():
            advice = "prepare conversations (docs/chat.md), or more, or a larger --val_fraction"
            raise UserError(f"{data.name}/{split}.bin has no answers for loss_on=answers: {advice}")
        if documents == "pad":  # tokens after the end of the window are not learned
            window_ends = (np.append(0, ends + 1) + block_size)[np.searchsorted(ends, answers)]
            answers = np.minimum(answers, window_ends)
    if loss_per == "document" or loss_on == "answers":
        limit = block_size if documents == "pad" else np.inf
        loss_weights = LossWeights(answers, ends if loss_per == "document" else None, limit)
    if not by_document:
        return Windows(ids, block_size, loss_weights, limits)
    plan = padded(ends, block_size) if documents == "pad" else packed(ends, block_size)
    windows = PackedWindows(ids, block_size, loss_weights, limits, plan=plan, start_id=eos_id)
    excess = np.diff(ends, prepend=-1) - block_size  # tokens of each document
    if n_longer := np.count_nonzero(excess > 0):
        tails = "start other windows"
        if documents == "pad":
            tails = f"are left out: {excess[excess > 0].sum():,} tokens"
        longer = f"{n_longer:,} of {len(ends):,} documents of {data.name} are longer"
        windows.cut = f"{longer}: their tails {tails}"
    return windows


def train_loader(
    sets: list[DataSet],
    block_size: int,
    seed: int,
    documents: Documents = "stream",
    loss_per: LossPer = "token",
    loss_on: LossOn = "all",
) -> Loader:
    """Return the Loader over the training splits of the data sets, mixed by their weights."""
    ways = (block_size, documents, loss_per, loss_on)
    splits = [open_windows(data, "train", *ways) for data in sets]
    return Loader(splits, [data.weight for data in sets], seed)

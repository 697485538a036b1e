"""nanoGPT's data sets: train.bin and val.bin of token ids, and a character model's meta.pkl."""

import pickle
from pathlib import Path

import numpy as np

from configurator import UserError
from text.encode import ROW, SPLITS, SplitWriter
from text.packing import find_tokens
from text.sources import Source
from text.tokenizer import Tiktoken

KIND = "bin"  # of these Sources
STEP = 1 << 24  # tokens that are copied at a time, about
EOS = "<|endoftext|>"


def files_of(folder: Path) -> list[Source]:
    """Return the files of a folder that nanoGPT's prepare.py wrote, or [] for another folder."""
    paths = [folder / f"{split}.bin" for split in SPLITS]
    if (folder / "meta.json").exists() or not all(path.is_file() for path in paths):
        return []
    paths += [path for path in [folder / "meta.pkl"] if path.is_file()]
    return [Source.from_path(path, KIND) for path in paths]


class NumbersOnly(pickle.Unpickler):
    """Reads dicts, texts and numbers. A pickle of anything else could execute code."""

    def find_class(self, module: str, name: str) -> type:
        raise pickle.UnpicklingError(f"it holds {module}.{name}")


def tokenizer_of(sources: list[Source]) -> Tiktoken:
    """Return the tokenizer of such files: the characters of meta.pkl, or else GPT-2's.

    The ids are those of nanoGPT. nanoGPT's character models have no eos: here it gets the next id.
    """
    for source in sources:
        source.finish()  # raises OSError for a pointer of Git LFS
    *_, last = sources
    if last.path.name != "meta.pkl":
        return Tiktoken.from_name("gpt2")
    try:
        with open(last.path, "rb") as f:
            characters = NumbersOnly(f).load()["itos"]
        ranks = {c.encode(): i for i, c in characters.items() if len(c) == 1 and type(i) is int}
        # The ids have 16 bits, and the eos needs one of them.
        if not 0 < len(ranks) == len(characters) or not {*ranks.values()} <= {*range(65_535)}:
            raise ValueError("not one id for each character, from 0 to 65,534")
    except Exception as e:  # a damaged pickle can raise any exception
        raise UserError(f"{last.path}: not nanoGPT's character table ({e})") from None
    return Tiktoken("characters", r"[\s\S]", ranks, {EOS: max(ranks.values()) + 1})


def copy_splits(sources: list[Source], tokenizer: Tiktoken, folder: Path) -> SplitWriter:
    """Write train.bin and val.bin with the ids of the sources, and an eos at the end of each."""
    texts = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    sizes = np.array([len(text) for text in texts])
    # In UTF-8, the bytes of a character after its first one are 10xxxxxx.
    starts = np.array([sum(byte & 0xC0 != 0x80 for byte in text) for text in texts])
    known = {i for i, text in enumerate(texts) if text or i == tokenizer.eos_id}
    writer = SplitWriter(folder, val_fraction=1)
    for val in (1, 0):
        if not sources[val].bytes or sources[val].bytes % 2:
            raise UserError(f"{sources[val].name}: empty, or not of uint16 token ids")
        ids = np.memmap(sources[val].path, "<u2", "r")
        ends = find_tokens(ids, [tokenizer.eos_id]) + 1  # (documents,)
        if not len(ends) or ends[-1] < len(ids):
            ends = np.append(ends, len(ids) + 1)
        start = 0
        for some in np.split(ends, np.flatnonzero(np.diff(ends // STEP)) + 1):
            part = ids[start : some[-1]]
            if some[-1] > len(ids):
                part = np.append(part, ids.dtype.type(tokenizer.eos_id))
            if unknown := {*np.flatnonzero(np.bincount(part)).tolist()} - known:
                problem = (
                    f"the tokenizer has no id {min(unknown)}: is meta.pkl missing, or another?"
                )
                raise UserError(f"{sources[val].name}: {problem}")
            first = np.append(start, some[:-1]) - start
            rows = np.zeros(len(some), ROW)
            rows["tokens"] = np.diff(np.append(first, len(part)))
            rows["bytes"] = np.add.reduceat(sizes[part], first)
            rows["characters"] = np.add.reduceat(starts[part], first)
            rows["val"] = val
            writer.write(rows, [b"", part.tobytes()] if val else [part.tobytes(), b""])
            start = some[-1]
        sources[val].finish()
    writer.close()
    return writer

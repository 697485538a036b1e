"""A data set as its readers see it: the files in data/NAME/, and the order they are read in.

    train.bin, val.bin   one flat little-endian array of token ids, every document followed by one eos;
                         uint16 when vocab_size <= 65,536, else uint32
    tokenizer.*          the tokenizer, so that the folder is all that training and sampling need
    meta.json            counts, hashes, sources, what was left out and why; written last: it says that the set is whole

prepare.py writes it; train.py, sample.py and prepare.py's own workers read it by way of this file, which needs no torch.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
from tqdm import tqdm

from configurator import UserError, note
from hardware.disk import MANIFEST, content_sha256, damage, file_sha256, inside, read_object
from text.tokenizer import (
    HF_FILES,
    SentencePiece,
    Tiktoken,
    from_hugging_face,
    hugging_face_files,
    open_tokenizer,
    tiktoken_names,
)

FORMAT_VERSION = 2  # 1: meta.json had no hash of its own, and named one file of the tokenizer


# ---------------------------------------------------------------------------------------------------------------------
# Files


def read_meta(folder: Path) -> dict:
    """meta.json of a data set or of a checkpoint; UserError if it is not as it was written."""
    path = folder / "meta.json"
    try:
        meta = read_object(path)
        version = meta["format_version"]
    except FileNotFoundError:
        make = f"make it with `python prepare.py --name {folder.name}`"
        raise UserError(f"no data set in {folder}: {make}") from None
    except OSError as e:
        raise UserError(f"{path}: {e.strerror}") from None
    except (ValueError, KeyError) as e:
        raise UserError(f"{path}: damaged ({e}); run prepare.py again") from None
    if version == 1:
        note(f"{path} is of an older version and has no hash of its own: it is taken as it is")
    elif version != FORMAT_VERSION:
        raise UserError(f"{folder}: format {version}, expected {FORMAT_VERSION}; run prepare.py again")
    elif meta.get("sha256") != content_sha256(meta):
        raise UserError(f"{path}: changed after it was made (by its SHA-256); run prepare.py again")
    return meta


def open_dataset(folder: str | Path) -> dict:
    """meta.json of a whole data set; UserError if there is none, or if a file is not the one it describes.

    Of the .bin files only the size is looked at: verify() reads them.
    """
    folder = Path(folder)
    meta = read_meta(folder)
    try:
        itemsize = np.dtype(meta["dtype"]).itemsize
        sizes = {split: meta["splits"][split]["tokens"] * itemsize for split in ("train", "val")}
        check_tokenizer_files(folder, meta["tokenizer"])
    except (KeyError, TypeError, AttributeError) as e:
        what = f"{type(e).__name__}: {e}"
        raise UserError(f"{folder}/meta.json: damaged ({what}); run prepare.py again") from None
    for split, size in sizes.items():
        path = folder / f"{split}.bin"
        found = path.stat().st_size if path.exists() else "no file"
        if found != size:
            wrong = f"{found} bytes where meta.json says {size}: truncated or replaced"
            raise UserError(f"{path}: {wrong}; run prepare.py again")
    return meta


def check_tokenizer_files(folder: Path, info: dict) -> None:
    """UserError unless each file of a data set's tokenizer is the one that meta.json describes."""
    for name, sha256 in info.get("files", {info["file"]: info["sha256"]}).items():
        path = inside(folder, name)
        if not path.exists() or file_sha256(path) != sha256:
            wrong = "missing, or not the tokenizer that the data was made with"
            raise UserError(f"{path}: {wrong}; run prepare.py again")


def tokenizer_files(folder: Path, info: dict) -> list[Path]:
    """The tokenizer's own file, and what came with it for Hugging Face's tools."""
    if "files" in info:
        return [inside(folder, name) for name in info["files"]]
    return [inside(folder, info["file"]), *hugging_face_files(folder)]


def load_tokenizer(folder: str | Path) -> SentencePiece | Tiktoken:
    """The tokenizer of a data set or checkpoint of ours, checked by its hash, or of any Hugging Face model directory."""
    folder = Path(folder)
    names = ("meta.json", SentencePiece.file, Tiktoken.file, *HF_FILES)
    if (folder / MANIFEST).exists() and (wrong := damage(folder, names)):
        raise UserError(f"{wrong}: it was changed after it was written")
    if not (folder / "meta.json").exists():
        return from_hugging_face(folder)
    try:
        info = read_meta(folder)["tokenizer"]
        check_tokenizer_files(folder, info)
        return open_tokenizer(inside(folder, info["file"]), info)
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as e:
        what = f"{type(e).__name__}: {e}"
        raise UserError(f"{folder}/meta.json: damaged, about the tokenizer ({what})") from None


def tokenizer_of_model(folder: Path) -> SentencePiece | Tiktoken | None:
    """The tokenizer that lies beside a model's weights; None if there is no file of one, as with nanoGPT's ckpt.pt."""
    files = ("meta.json", SentencePiece.file, "tokenizer.json", "vocab.json")
    return load_tokenizer(folder) if any((folder / name).exists() for name in files) else None


def tokenizer_folder(spec: str) -> Path | None:
    """The folder that --tokenizer names, if it is one: a name of tiktoken's is that, whatever lies here."""
    return Path(spec) if Path(spec).is_dir() and spec not in tiktoken_names() else None


def find_tokenizer(spec: str) -> SentencePiece | Tiktoken:
    """What --tokenizer names: a folder as above, a .model or .tiktoken file, or a name that tiktoken knows."""
    if folder := tokenizer_folder(spec):
        return load_tokenizer(folder)
    if spec.endswith(".model"):
        return SentencePiece(spec)
    return Tiktoken.from_file(spec) if spec.endswith(".tiktoken") else Tiktoken.by_name(spec)


def tokenizer_id(info: dict) -> str:
    """Of what meta.json says of a tokenizer: the same for two that make the same ids. A .tiktoken file is not all of one."""
    eos_id = info.get("special", {}).get(info.get("eos", "<|endoftext|>"))  # SentencePiece has it in its file
    settings = info.get("pattern"), eos_id, info.get("normalize", "")
    return hashlib.sha256(json.dumps([info["sha256"], settings]).encode()).hexdigest()


def open_split(folder: str | Path, meta: dict, split: str) -> np.memmap:
    """The token ids of a split, (tokens,), in place on the disk."""
    return np.memmap(Path(folder) / f"{split}.bin", dtype=np.dtype(meta["dtype"]).newbyteorder("<"), mode="r")


def verify(folder: str | Path, meta: dict, split: str) -> None:
    """Read a split once; UserError unless it is what meta.json says: its hash, an eos behind every document, and no id
    that the vocabulary does not have (on a GPU that would be an assert without a name).
    """
    ids, wanted, step = open_split(folder, meta, split), meta["splits"][split], 1 << 22
    digest, ends = hashlib.sha256(), 0
    for at in tqdm(range(0, len(ids), step), f"verifying {split}.bin", disable=None, leave=False):
        block = ids[at : at + step]
        if block.max() >= meta["vocab_size"]:
            first = int(np.argmax(block >= meta["vocab_size"]))
            raise UserError(
                f"{folder}/{split}.bin: token {at + first} has id {block[first]}, beyond the vocabulary of "
                f"{meta['vocab_size']}: the file was changed after it was made; run prepare.py again"
            )
        digest.update(block)
        ends += int((block == meta["eos_id"]).sum())
    problems = {
        f"{ends:,} eos where meta.json has {wanted['documents']:,} documents": ends != wanted["documents"],
        "its last token is no eos": int(ids[-1]) != meta["eos_id"],
        "its hash is not that of meta.json": digest.hexdigest() != wanted["sha256"],
    }
    if found := [problem for problem, wrong in problems.items() if wrong]:
        raise UserError(f"{folder}/{split}.bin: {'; '.join(found)}: it was changed; run prepare.py again")


def verify_new(sets: list["DataSet"], known: dict[str, list], say: Callable[[str], None]) -> dict[str, list[int]]:
    """verify() the files whose stamp is not among those `known`: a resumed run need not read its data again.

    A stamp is [bytes, time of the last change of anything about the file, in ns], which nobody can set
    back. Returns {path: stamp} of them all.
    """
    files = [(data, split, data.folder / f"{split}.bin") for data in sets for split in ("train", "val")]
    stamps = {str(path): stamp_of(path) for _, _, path in files}
    new = [file for file in files if stamps[str(file[2])] not in known.get(str(file[2]), [])]
    gigabytes = sum(stamps[str(path)][0] for _, _, path in new) / 1e9
    if gigabytes > 1:
        say(f"reading {gigabytes:.1f} GB of data once, to verify it, before the first step")
    for data, split, _ in new:
        verify(data.folder, data.meta, split)
    return stamps


def stamp_of(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_ctime_ns]


# ---------------------------------------------------------------------------------------------------------------------
# The order of reading: which windows a training step sees is a pure function of (seed, step). Nothing is saved with a
# checkpoint and nothing is fast-forwarded on resume; any rank finds its share by itself.


class Windows:
    """Windows of T + 1 tokens, T apart, over one split (tokens,), as an endless sequence of epochs. Each epoch visits
    every window once, in a permutation and from an offset of its own, both drawn from (seed, epoch).
    """

    def __init__(self, tokens: np.ndarray, block_size: int, seed: tuple[int, ...]):
        self.tokens, self.block_size, self.seed = tokens, block_size, seed
        self.n_windows = max(1, (len(tokens) - block_size) // block_size)  # as many as fit behind every offset
        self.epochs: dict[int, tuple[int, np.ndarray]] = {}  # the last two: a batch may lie across an epoch's edge

    def epoch(self, epoch: int) -> tuple[int, np.ndarray]:
        """(offset, permutation (n_windows,)) of an epoch."""
        if epoch not in self.epochs:
            rng = np.random.default_rng((*self.seed, epoch))
            slack = len(self.tokens) - 1 - self.n_windows * self.block_size
            offset = int(rng.integers(0, min(slack, self.block_size - 1) + 1))
            self.epochs = {e: v for e, v in self.epochs.items() if e == epoch - 1}
            self.epochs[epoch] = offset, rng.permutation(self.n_windows)
        return self.epochs[epoch]

    def start(self, sample: int) -> int:
        """Where window number `sample` of the endless sequence begins in the split."""
        epoch, i = divmod(sample, self.n_windows)
        offset, order = self.epoch(epoch)
        return offset + int(order[i]) * self.block_size

    def fixed_starts(self, tokens: int) -> list[int]:
        """Windows for evaluation: always the same, about `tokens` of them (0: all), spread evenly over the split."""
        n = (len(self.tokens) - 1) // self.block_size
        count = min(n, max(1, tokens // self.block_size)) if tokens else n
        return [int(i) * self.block_size for i in np.linspace(0, n - 1, count).round()]

    def row(self, start: int) -> np.ndarray:
        """The T + 1 ids (T + 1,) of the window that begins at `start`."""
        return self.tokens[start : start + self.block_size + 1].astype(np.int64)


class Loader:
    """The samples of a run: windows of one split, or of several, each with its share.

    Mixing happens here and not in prepare.py, so that other shares need no new tokens, every data set keeps its own
    counts and hashes, and every window of each is still visited once in an epoch of its own. The shares are kept like a
    straight line on a screen (Bresenham, 1965), in whole numbers: after n samples a set has had n x share, within 1 for
    two sets, and its own sample number is known without counting.
    """

    def __init__(self, splits: list[Windows], weights: list[Fraction]):
        self.splits = splits
        self.shares = [w / sum(weights[k:]) for k, w in enumerate(weights)]  # of what the sets before it leave

    def pick(self, sample: int) -> tuple[int, int]:
        """(split, its own sample number) of sample 0, 1, ... of the run."""
        k = 0
        while True:
            share = self.shares[k]
            before = sample * share.numerator // share.denominator  # of the samples that reach k, so many were k's
            if (sample + 1) * share.numerator // share.denominator > before:  # always so for the last: its share is 1
                return k, before
            k, sample = k + 1, sample - before

    def starts(self, first: int, count: int) -> list[tuple[int, int]]:
        """(split, start) of samples first ... first + count - 1 of the run."""
        picked = map(self.pick, range(first, first + count))
        return [(k, self.splits[k].start(sample)) for k, sample in picked]

    def rows(self, starts: list[tuple[int, int]]) -> np.ndarray:
        """The windows at `starts`, (B, T + 1)."""
        return np.stack([self.splits[k].row(start) for k, start in starts])


@dataclass(frozen=True)
class DataSet:
    """One of the data sets that a run reads."""

    name: str
    folder: Path
    meta: dict
    weight: Fraction  # its share of the run's windows; all of them make 1

    def windows(self, split: str, block_size: int, seed: tuple[int, ...] = (0,)) -> Windows:
        tokens = open_split(self.folder, self.meta, split)
        if len(tokens) < block_size + 1:
            needs = f"block_size={block_size} needs {block_size + 1}"
            raise UserError(
                f"{self.name}/{split}.bin has {len(tokens)} tokens, {needs}: lower it, or prepare more data"
            )
        return Windows(tokens, block_size, seed)


def open_datasets(spec: str, data_dir: str | Path) -> list[DataSet]:
    """The data sets of `wiki`, of `wiki:0.7,code:0.3`, or of `wiki,code`: there, each by its size."""
    names, weights = [], []
    for part in spec.split(","):
        name, colon, weight = part.strip().partition(":")
        names.append(name)
        try:
            weights.append(Fraction(weight) if colon else None)
            if not name or name in names[:-1] or (colon and weights[-1] <= 0):
                raise ValueError
        except (ValueError, ZeroDivisionError):
            raise UserError(
                f"dataset={spec!r}: expected NAME, or NAME:WEIGHT,NAME:WEIGHT with weights above 0"
            ) from None
    if None in weights and any(weights):
        raise UserError(f"dataset={spec!r}: give every data set a weight, or none")
    metas = [open_dataset(Path(data_dir) / name) for name in names]
    for name, meta in zip(names, metas, strict=True):
        if tokenizer_id(meta["tokenizer"]) != tokenizer_id(metas[0]["tokenizer"]):
            same = f"prepare both with one --tokenizer, {data_dir}/{names[0]} say"
            raise UserError(f"dataset={spec!r}: {name} was made with another tokenizer than {names[0]}; {same}")
    if None in weights:
        weights = [Fraction(meta["splits"]["train"]["tokens"]) for meta in metas]
    return [
        DataSet(name, Path(data_dir) / name, meta, weight / sum(weights))
        for name, meta, weight in zip(names, metas, weights, strict=True)
    ]


def train_loader(sets: list[DataSet], block_size: int, seed: int) -> Loader:
    windows = [data.windows("train", block_size, (seed, k)) for k, data in enumerate(sets)]
    return Loader(windows, [data.weight for data in sets])


def run_loader(path: Path, records: list[dict], step: int) -> tuple[list[DataSet], Loader, range]:
    """(data sets, loader, samples of the step) of a run, from the settings in the records of its metrics.jsonl.

    step: as the log, metrics.jsonl and bad_steps/ count, from 1. path: of that file, for what is wrong with it.
    """
    # What was trained from a step on is said behind that step, so that step N follows a record of an earlier one.
    begun = next((r for r in reversed(records) if "settings" in r and r["step"] < step), None)
    if begun is None:
        raise UserError(f"{path}: no settings of a run in it, or of a later step only")
    try:
        last = begun["steps"] if "steps" in begun else max(record["step"] for record in records)
        if step > last:
            raise UserError(f"--step={step}: the run ends with step {last}")
        settings, samples = begun["settings"], begun["step_samples"]
        sets = open_datasets(settings["dataset"], settings["data_dir"])
        for data in sets:
            if data.meta["splits"]["train"]["sha256"] != begun["data"][data.name]:
                raise UserError(f"{data.folder}: made again since the run: it no longer holds what the step trained on")
        loader = train_loader(sets, settings["block_size"], settings["seed"])
        first = begun["first_sample"] + (step - 1 - begun["step"]) * samples
        return sets, loader, range(first, first + samples)
    except (KeyError, TypeError, ValueError) as e:
        raise UserError(f"{path}: damaged, about the settings of its run ({type(e).__name__}: {e})") from None


def sample_texts(
    sets: list[DataSet], loader: Loader, samples: range, tokenizer: SentencePiece | Tiktoken
) -> Iterator[tuple[str, str]]:
    """(where it comes from, its text) of each of these samples of a run."""
    for sample, (k, start) in zip(samples, loader.starts(samples.start, len(samples)), strict=True):
        ids = loader.rows([(k, start)])[0]
        parts = np.split(ids, np.flatnonzero(ids == tokenizer.eos_id))
        text = "<eos>".join(tokenizer.decode([i for i in part.tolist() if i != tokenizer.eos_id]) for part in parts)
        yield f"sample {sample:,}: {sets[k].name}/train.bin, tokens {start:,} to {start + len(ids) - 1:,}", text


def document_texts(folder: Path, meta: dict, split: str, show: str, count: int) -> Iterator[tuple[str, str]]:
    """(where it is, its text) of `count` documents, not all of a very long one. show: first, random, or a token's number."""
    most = 20_000  # tokens
    ids, tokenizer, eos_id = open_split(folder, meta, split), load_tokenizer(folder), meta["eos_id"]
    at = int(show) if show.isdigit() else 0
    if at >= len(ids):
        raise UserError(f"--show={at}: {split}.bin has {len(ids):,} tokens")
    for _ in range(count):
        if show == "random":
            at = random.randrange(len(ids))
        begin, end = document_at(ids, eos_id, at)
        shown = ids[begin : min(end, begin + most)]
        more = f" ... and {end - begin - most:,} tokens more" if end - begin > most else ""
        yield f"{split}, tokens {begin:,} to {end:,}, then eos", tokenizer.decode(shown.tolist()) + more
        at = end + 1
        if at >= len(ids):
            return


def document_at(ids: np.ndarray, eos_id: int, at: int) -> tuple[int, int]:
    """Where the document that holds token `at` begins, and where its eos stands."""
    begin, end, step = at, at, 1 << 16
    while begin > 0 and not len(found := np.flatnonzero(ids[max(0, begin - step) : begin] == eos_id)):
        begin = max(0, begin - step)
    begin = max(0, begin - step) + int(found[-1]) + 1 if begin > 0 else 0
    while not len(found := np.flatnonzero(ids[end : end + step] == eos_id)):
        end += step
    return begin, end + int(found[0])

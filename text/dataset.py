"""A data set as its readers see it: the files in data/NAME/.

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
from text.hf_tokenizer import HF_FILES, from_hugging_face, hugging_face_files
from text.tokenizer import SentencePiece, Tiktoken, open_tokenizer, tiktoken_names

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
# The data sets of a run, and documents to look at


@dataclass(frozen=True)
class DataSet:
    """One of the data sets that a run reads."""

    name: str
    folder: Path
    meta: dict
    weight: Fraction  # its share of the run's windows; all of them make 1


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

"""Read a data set: the files in data/NAME/.

    train.bin, val.bin   one flat little-endian array of token ids each, with one eos after every
                         document; uint16 if vocab_size <= 65,536, else uint32
    tokenizer.*          the tokenizer: training and sampling need nothing outside the folder
    meta.json            counts, hashes, sources, and what was left out and why; it is written last,
                         so if it is there, the data set is complete

prepare.py writes these files. train.py, sample.py and the workers of prepare.py read them with the
functions in this file, which does not need torch.
"""

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from configurator import UserError, note
from hardware.disk import MANIFEST, content_sha256, damage, file_sha256, inside, read_object
from hardware.terminal import ProgressBar
from text.hf_tokenizer import HF_FILES, from_hugging_face
from text.tokenizer import SentencePiece, Tiktoken, open_tokenizer, tiktoken_names

FORMAT_VERSION = 2


# --------------------------------------------------------------------------------------------------
# Files


def read_meta(folder: Path) -> dict:
    """Return the meta.json of a data set or a checkpoint.

    Raises UserError if it was changed, or if prepare.py cannot have written it.
    """
    path = folder / "meta.json"
    try:
        meta = read_object(path)
        version = meta["format_version"]
        if version != FORMAT_VERSION:
            problem = f"format {version}, expected {FORMAT_VERSION}"
            raise UserError(f"{folder}: {problem}; run prepare.py again")
        if meta.get("sha256") != content_sha256(meta):
            problem = "changed after it was made: its SHA-256 does not match"
            raise UserError(f"{path}: {problem}; run prepare.py again")
        check_content(meta)
    except FileNotFoundError:
        source = "" if folder.name == "demo" else " --input FILE"
        make = f"make it with `python prepare.py{source} --name {folder.name}`"
        others = sorted(path.parent.name for path in folder.parent.glob("*/meta.json"))
        there = f"; prepared are {', '.join(others)}" if others else ""
        raise UserError(f"no data set in {folder}: {make}{there}") from None
    except OSError as e:
        raise UserError(f"{path}: {e.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as e:
        reason = f"{type(e).__name__}: {e}"
        raise UserError(f"{path}: damaged ({reason}); run prepare.py again") from None
    return meta


def check_content(meta: dict) -> None:
    """Raise an error unless all that is used of a meta.json is there and has its type and size.

    Its hash may be right although prepare.py has not written it.
    """
    splits = [meta["splits"][split] for split in ("train", "val")]
    counts = [meta["vocab_size"], meta["eos_id"] + 1, meta.get("few_documents", 1)]
    counts += [s[key] for s in splits for key in ("tokens", "documents", "bytes", "characters")]
    lengths = dict(meta["lengths"])
    histogram = lengths.pop("histogram")
    for edge, (documents, tokens) in histogram.items():
        counts += [int(edge), documents, tokens]
    records = meta["records"]
    tallies = [records[key] for key in ("bad", "dropped", "changed", "unread", "shapes")]
    tallies += [source.get("skipped", {}) for source in meta["sources"]]
    for tally in (lengths, *tallies):
        counts += tally.values()
    # A split of one token has no landmarks.
    landmarks = meta["landmarks"] or {"unigram": 0, "bigram": 0, "bigram_tokens": 1}
    counts += [records["read"], landmarks["bigram_tokens"]]
    texts = [*records["examples"], meta["tokenizer"]["kind"], *files_of(meta["tokenizer"]).values()]
    texts += [s["sha256"] for s in splits] + [tokenizer_id(meta["tokenizer"])]
    right = [type(n) is int and 0 < n < 2**63 for n in counts]
    right += [isinstance(text, str) for text in texts]
    right += [0 <= landmarks[name] < 1e9 for name in ("unigram", "bigram")]
    right += [meta["dtype"] == id_type(meta["vocab_size"]).name]
    right += [len(meta["splits"]) == 2, len(histogram) > 0]
    if not all(right):
        raise ValueError("a value has another type or size")


def id_type(vocab_size: int) -> np.dtype:
    """Return the type of a token id in the .bin files."""
    return np.dtype("<u2" if vocab_size <= 65536 else "<u4")


def open_dataset(folder: str | Path) -> dict:
    """Return the meta.json of a data set.

    Raises UserError if the data set is not complete, or if a file is not the one that meta.json
    describes. Of the .bin files only the size is compared: verify() reads their content.
    """
    folder = Path(folder)
    meta = read_meta(folder)
    check_tokenizer_files(folder, meta["tokenizer"])
    for split, counts in meta["splits"].items():
        path = folder / f"{split}.bin"
        size = counts["tokens"] * np.dtype(meta["dtype"]).itemsize
        actual = path.stat().st_size if path.exists() else "no file"
        if actual != size:
            problem = f"{actual} bytes where meta.json says {size}: truncated or replaced"
            raise UserError(f"{path}: {problem}; run prepare.py again")
    return meta


def check_tokenizer_files(folder: Path, info: dict) -> None:
    """Raise UserError unless each file of the tokenizer has the hash in `info`, from meta.json."""
    for name, sha256 in files_of(info).items():
        path = inside(folder, name)
        if not path.exists() or file_sha256(path) != sha256:
            problem = "missing, or not the tokenizer that the data was made with"
            raise UserError(f"{path}: {problem}; run prepare.py again")


def files_of(info: dict) -> dict[str, str]:
    """Return {name: SHA-256} of the tokenizer's own file, and of those for Hugging Face's tools.

    The latter are missing in the meta.json of a checkpoint, whose manifest has them.
    """
    return info.get("files", {info["file"]: info["sha256"]})


def tokenizer_files(folder: Path, info: dict) -> list[Path]:
    """Return the paths of the tokenizer's files in a data set."""
    return [inside(folder, name) for name in files_of(info)]


def load_tokenizer(folder: str | Path) -> SentencePiece | Tiktoken:
    """Return the tokenizer of a data set, a checkpoint, or any Hugging Face model directory.

    Raises UserError if there is none, if a file of a data set or checkpoint was changed, or if this
    program cannot use the tokenizer.
    """
    folder = Path(folder)
    names = ("meta.json", SentencePiece.file, Tiktoken.file, *HF_FILES)
    if (folder / MANIFEST).exists():
        problem = damage(folder, names)
        if problem:
            raise UserError(f"{problem}: it was changed after it was written")
    if not (folder / "meta.json").exists():
        return from_hugging_face(folder)
    try:
        info = read_meta(folder)["tokenizer"]
        check_tokenizer_files(folder, info)
        return open_tokenizer(inside(folder, info["file"]), info)
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as e:
        reason = f"{type(e).__name__}: {e}"
        raise UserError(f"{folder}/meta.json: its tokenizer entry is damaged ({reason})") from None


def tokenizer_of_model(folder: Path) -> SentencePiece | Tiktoken | None:
    """Return the tokenizer in a model's folder, or None if the folder has no file of a tokenizer.

    The folder of nanoGPT's ckpt.pt, for example, has none.
    """
    files = ("meta.json", SentencePiece.file, "tokenizer.json", "vocab.json")
    if any((folder / name).exists() for name in files):
        return load_tokenizer(folder)
    return None


def tokenizer_folder(spec: str) -> Path | None:
    """Return the folder that --tokenizer names, or None if it names something else.

    A name that tiktoken knows always means the encoding of tiktoken, even if a folder is called so.
    """
    if Path(spec).is_dir() and spec not in tiktoken_names():
        return Path(spec)
    return None


def find_tokenizer(spec: str) -> SentencePiece | Tiktoken:
    """Return the tokenizer that --tokenizer names.

    This is a folder for load_tokenizer(), a .model or .tiktoken file, or a name known to tiktoken.
    """
    folder = tokenizer_folder(spec)
    if folder:
        return load_tokenizer(folder)
    if spec.endswith(".model"):
        return SentencePiece(spec)
    if spec.endswith(".tiktoken"):
        return Tiktoken.from_file(spec)
    return Tiktoken.by_name(spec)


def tokenizer_id(info: dict) -> str:
    """Return a hash that is the same for two tokenizers that make the same ids.

    info: what meta.json says of the tokenizer. The hash of its file is not enough: a .tiktoken file
    does not contain the splitting pattern, the eos and the normalization.
    """
    # None for SentencePiece, whose file contains the eos.
    eos_id = info.get("special", {}).get(info.get("eos", "<|endoftext|>"))
    settings = [info.get("pattern"), eos_id, info.get("normalize", "")]
    return hashlib.sha256(json.dumps([info["sha256"], settings]).encode()).hexdigest()


def open_split(folder: str | Path, meta: dict, split: str) -> np.memmap:
    """Return the token ids of a split, (tokens,): a memory map of the file on the disk."""
    dtype = np.dtype(meta["dtype"]).newbyteorder("<")
    return np.memmap(Path(folder) / f"{split}.bin", dtype=dtype, mode="r")


def verify(folder: str | Path, meta: dict, split: str) -> None:
    """Read a split once, and raise UserError unless it is what meta.json says.

    Its hash must be right, every document must end with an eos, and every id must be in the
    vocabulary. (On a GPU another id would end the program with an assertion that names no cause.)
    """
    path = f"{folder}/{split}.bin"
    ids = open_split(folder, meta, split)
    wanted = meta["splits"][split]
    vocab_size = meta["vocab_size"]
    digest = hashlib.sha256()
    ends = 0
    step = 1 << 22  # tokens
    for at in ProgressBar(f"verifying {split}.bin", range(0, len(ids), step)):
        block = ids[at : at + step]
        if block.max() >= vocab_size:
            first = int(np.argmax(block >= vocab_size))
            bad = f"token {at + first} has id {block[first]}, beyond the vocabulary of {vocab_size}"
            why = "the file was changed after it was made; run prepare.py again"
            raise UserError(f"{path}: {bad}: {why}")
        digest.update(block)
        ends += int((block == meta["eos_id"]).sum())
    problems = []
    documents = wanted["documents"]
    if ends != documents:
        problems.append(f"{ends:,} eos where meta.json has {documents:,} documents")
    if int(ids[-1]) != meta["eos_id"]:
        problems.append("its last token is no eos")
    if digest.hexdigest() != wanted["sha256"]:
        problems.append("its hash is not that of meta.json")
    if problems:
        raise UserError(f"{path}: {'; '.join(problems)}: it was changed; run prepare.py again")


def verify_new(
    sets: list["DataSet"], verified: dict[str, list], say: Callable[[str], None]
) -> dict[str, list[int]]:
    """Verify the files whose stamp is not among the `verified` ones; return {path: stamp} of all.

    So a resumed run does not have to read all its data again. A stamp is [bytes, ctime in ns]. The
    ctime is the time of the last change of the file or of anything recorded about it, and it cannot
    be set back. verified: path -> the stamps with which the file was verified before.
    """
    stamps = {}
    new = []
    size = 0  # bytes of the new files
    for data in sets:
        for split in ("train", "val"):
            path = data.folder / f"{split}.bin"
            stamp = stamp_of(path)
            stamps[str(path)] = stamp
            if stamp not in verified.get(str(path), []):
                new.append((data, split))
                size += stamp[0]
    if size > 1e9:
        say(f"reading {size / 1e9:.1f} GB of data once, to verify it, before the first step")
    for data, split in new:
        verify(data.folder, data.meta, split)
    return stamps


def opened_files(sets: list["DataSet"]) -> dict[Path, os.stat_result]:
    """Return path -> what the system says of each .bin, just after it was mapped into memory."""
    paths = [data.folder / f"{split}.bin" for data in sets for split in ("train", "val")]
    return {path: path.stat() for path in paths}


def check_files(sets: list["DataSet"], opened: dict[Path, os.stat_result]) -> None:
    """Raise UserError if a .bin is no longer what meta.json says, since it was changed in place.

    If it was deleted, or another file has its name now, then the file that is mapped stays as it
    was. opened: the result of opened_files().
    """
    for data in sets:
        for split in ("train", "val"):
            path = data.folder / f"{split}.bin"
            then = opened[path]
            now = path.stat() if path.exists() else then
            same = (now.st_size, now.st_mtime_ns) == (then.st_size, then.st_mtime_ns)
            if now.st_ino == then.st_ino and not same:
                open_dataset(data.folder)  # compares the size
                verify(data.folder, data.meta, split)
                opened[path] = now  # it was only touched


def stamp_of(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_ctime_ns]


# --------------------------------------------------------------------------------------------------
# The data sets of a run, and documents to show


@dataclass(frozen=True)
class DataSet:
    """One of the data sets that a run reads."""

    name: str
    folder: Path
    meta: dict
    weight: Fraction  # its share of the run's windows; all weights add up to 1

    def epochs(self, tokens: int) -> float:
        """Return how often train.bin is read in a run of `tokens` tokens, of all data sets."""
        return float(self.weight) * tokens / self.meta["splits"]["train"]["tokens"]


def newest_dataset(data_dir: str | Path) -> str:
    """Return the name of the data set in data_dir that was prepared last.

    The time is that of its meta.json, which prepare.py writes last. A folder without one is not
    finished, or is none of ours. A copy of a data set is as old as the set, if that is still there.
    A damaged data set is passed over, with a note. Raises UserError if there is none.
    """
    dates: dict[bytes, tuple[int, str]] = {}  # content of a meta.json -> its time, and the name
    for path in Path(data_dir).glob("[!.]*/meta.json"):
        if not path.is_file():  # a pipe would be read for ever
            continue
        try:
            content = path.read_bytes()
            dated = (path.stat().st_mtime_ns, path.parent.name)
        except OSError as e:
            note(f"{path.parent} is passed over: {e.strerror}")
            continue
        if b'"format_version"' not in content:
            continue  # another program wrote it
        dates[content] = min(dated, dates.get(content, dated))
    for _, name in sorted(dates.values(), reverse=True):
        try:
            open_datasets(name, data_dir)
            return name
        except UserError as e:
            note(f"{Path(data_dir) / name} is passed over: {e}")
    make = "`python prepare.py --input FILE ...` makes one, and without --input a demo"
    raise UserError(f"no data set in {data_dir}/: {make}; --data_dir names another folder")


def open_datasets(spec: str, data_dir: str | Path) -> list[DataSet]:
    """Open the data sets that `spec` names: `wiki`, `wiki:0.7,code:0.3`, or `wiki,code`.

    Without weights, the weight of each data set is the size of its training split. Raises UserError
    if `spec` is wrong, a data set is damaged, or they do not all have the same tokenizer.
    """
    names, weights = names_and_weights(spec)
    if None in weights and any(weights):
        raise UserError(f"dataset={spec!r}: give every data set a weight, or none")
    metas = [open_dataset(Path(data_dir) / name) for name in names]
    for name, meta in zip(names, metas, strict=True):
        if tokenizer_id(meta["tokenizer"]) != tokenizer_id(metas[0]["tokenizer"]):
            problem = f"{name} was made with another tokenizer than {names[0]}"
            same = f"prepare {name} with --tokenizer={data_dir}/{names[0]}"
            raise UserError(f"dataset={spec!r}: {problem}; {same}")
    if None in weights:
        weights = [Fraction(meta["splits"]["train"]["tokens"]) for meta in metas]
    total = sum(weights)
    sets = []
    for name, meta, weight in zip(names, metas, weights, strict=True):
        sets.append(DataSet(name, Path(data_dir) / name, meta, weight / total))
    return sets


def names_and_weights(spec: str) -> tuple[list[str], list[Fraction | None]]:
    """Split `wiki:0.7,code:0.3` into names and weights; a weight that is left out is None."""
    names: list[str] = []
    weights: list[Fraction | None] = []
    for part in spec.split(","):
        name, colon, text = part.strip().partition(":")
        try:
            weight = Fraction(text) if colon else None
            float(weight or 1)  # raises OverflowError
            if not name or name in names or (colon and weight <= 0):
                raise ValueError
        except (ValueError, ZeroDivisionError, OverflowError):
            expected = "expected NAME, or NAME:WEIGHT,NAME:WEIGHT with weights above 0"
            raise UserError(f"dataset={spec!r}: {expected}") from None
        names.append(name)
        weights.append(weight)
    return names, weights


def document_texts(
    folder: Path, meta: dict, split: str, show: str, count: int
) -> Iterator[tuple[str, str]]:
    """Yield (place, text) of `count` documents of a split; a very long text is cut.

    show: first, random, or the number of a token: the document that contains it is the first one.
    """
    most = 20_000  # tokens of a document
    ids = open_split(folder, meta, split)
    tokenizer = load_tokenizer(folder)
    eos_id = meta["eos_id"]
    at = int(show) if show.isdigit() else 0
    if at >= len(ids):
        raise UserError(f"--show={at}: {split}.bin has {len(ids):,} tokens")
    for _ in range(count):
        if show == "random":
            at = random.randrange(len(ids))
        begin, end = document_at(ids, eos_id, at)
        text = tokenizer.decode(ids[begin : min(end, begin + most)].tolist())
        if end - begin > most:
            text += f" ... and {end - begin - most:,} more tokens"
        yield f"{split}, tokens {begin:,} to {end:,}, then eos", text
        at = end + 1
        if at >= len(ids):
            return


def document_at(ids: np.ndarray, eos_id: int, at: int) -> tuple[int, int]:
    """Return where the document that contains token `at` begins, and where its eos is."""
    step = 1 << 16  # tokens that are searched at a time
    begin = 0
    high = at
    while high > 0:  # backwards, for the last eos before `at`
        low = max(0, high - step)
        before = np.flatnonzero(ids[low:high] == eos_id)
        if len(before):
            begin = low + int(before[-1]) + 1
            break
        high = low
    low = at
    while True:  # forwards, for the first eos from `at` on
        behind = np.flatnonzero(ids[low : low + step] == eos_id)
        if len(behind):
            return begin, low + int(behind[0])
        low += step

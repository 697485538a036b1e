"""Turn documents into token ids, on all cores, and write them to train.bin and val.bin."""

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from configurator import UserError
from hardware.terminal import plural
from text.chat import SPECIAL, chatml_ids
from text.dataset import id_type
from text.formats import Chunk, Source
from text.pool import map_chunks
from text.records import Document, Tally, documents
from text.settings import PrepareConfig
from text.tokenizer import IM_END, IM_START, Tokenizer, open_tokenizer

# One row for each document, in the order of the input: its tokens with the eos, the bytes of its
# UTF-8, its characters, and whether it is in val.bin and not in train.bin.
ROW = np.dtype([("tokens", "<u8"), ("bytes", "<u8"), ("characters", "<u8"), ("val", "?")])
SPLITS = ("train", "val")
# The result of an Encoder for a chunk: (documents,) of ROW; the ids of train.bin and of val.bin.
Encoded = tuple[np.ndarray, list[bytes]]
# How a document may change.
LOST = "lost characters that the tokenizer has no token for"
OTHER = "its tokens decode to another text"
# Names that tokenizers give their special tokens. There are two patterns, since a pattern that
# starts with a single character is found several times as fast.
SPECIAL_NAMES = [
    re.compile(r"<(?:[|｜][^<>|｜\s]{1,40}[|｜]|/?s|bos|eos|pad|unk|start_of_turn|end_of_turn)>"),
    re.compile(r"\[(?:CLS|SEP|PAD|UNK|MASK|BOS|EOS)\]"),
]


@dataclass
class Encoder:
    """A Task that encodes the documents of a chunk, each followed by one eos."""

    cfg: PrepareConfig
    file: Path  # of the tokenizer
    info: dict  # its description, with vocab_size and eos_id

    def __post_init__(self):
        self.dtype = id_type(self.info["vocab_size"])
        self.eos = np.array([self.info["eos_id"]], self.dtype)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Open the tokenizer at its first use, in the worker, which was sent only its path."""
        return open_tokenizer(self.file, self.info)

    def __call__(self, chunk: Chunk) -> tuple[Encoded, Tally]:
        tally = Tally()
        rows: list[tuple] = []
        ids: tuple[list, list] = [], []  # arrays of train.bin, of val.bin
        read = list(documents(chunk, self.cfg, tally))
        every = self.encode_all([text for document in read for text in document.texts])
        for document in read:
            results = list(itertools.islice(every, len(document.texts)))
            if problems := [e for e in results if isinstance(e, ValueError)]:
                tally.reject(document.location, str(problems[0]))
                tally.characters["bad"] += document.characters
                continue
            encoded = [ids for ids in results if not isinstance(ids, ValueError)]
            tokens = self.document_ids(encoded, document)
            if len(tokens) < (least := max(1, self.cfg.min_tokens)):
                tally.dropped[f"fewer than {plural(least, 'token')}"] += 1
                continue
            digest = hashlib.sha256(document.utf8).digest()
            lacks = self.tokenizer.lacks
            is_lossy = lacks != b"" and document.utf8.translate(None, lacks) != document.utf8
            # One document in 64, and each book: it may be all there is. Longer ones take memory.
            is_checked = is_lossy or digest[0] < 4 or 1 << 16 < len(document.utf8) < 1 << 20
            if self.tokenizer.unk_id in tokens:
                tally.changed[LOST] += 1
            elif is_checked:
                tally.checked += 1
                if [self.tokenizer.decode(part.tolist()) for part in encoded] != document.texts:
                    tally.changed[LOST if is_lossy else OTHER] += 1
            # Only the hash of its text decides the split of a document: if files are added or
            # reordered, it stays there.
            val = int.from_bytes(digest[:8], "big") < self.cfg.val_fraction * 2**64
            ids[val].extend([tokens, self.eos])
            size = len(document.utf8) - document.utf8.count(b"\xff")  # for special tokens
            rows.append((len(tokens) + 1, size, sum(map(len, document.texts)), val))
            tally.names.update(self.names_in(document))
        return (np.array(rows, ROW), [b"".join(arrays) for arrays in ids]), tally

    def encode_all(self, texts: list[str]) -> Iterator[np.ndarray | ValueError]:
        """Yield the ids (n,) of each text, or a ValueError that says why it cannot be encoded."""
        every = self.tokenizer.encode_all(texts)
        for _ in texts:
            try:
                yield next(every)
            except ValueError as e:
                yield e

    def names_in(self, document: Document) -> list[str]:
        """Return the names of special tokens that a document contains as ordinary text."""
        found = [p.findall(text) for text in document.texts for p in self.names]
        names = itertools.chain.from_iterable(found)
        return [name for name in names if name not in self.tokenizer.added]

    @cached_property
    def names(self) -> list[re.Pattern]:
        """The patterns of the names of special tokens: usual ones, and the tokenizer's own."""
        own = [n for n in self.tokenizer.special if not any(p.fullmatch(n) for p in SPECIAL_NAMES)]
        longest_first = sorted(map(re.escape, own), key=len, reverse=True)
        return SPECIAL_NAMES + [re.compile("|".join(longest_first))] * bool(own)

    def document_ids(self, encoded: list[np.ndarray], document: Document) -> np.ndarray:
        """Return the ids (n,) of a document: of its texts, and of its special tokens."""
        if SPECIAL not in document.parts:
            return encoded[0].astype(self.dtype)
        ids = chatml_ids(self.tokenizer)
        if not ids or self.eos[0] in ids or self.tokenizer.adds_space:
            spaces = f"it adds spaces to texts, or its eos is {IM_END}"
            problem = spaces if ids else f"it lacks {IM_START} and {IM_END}, or they strip spaces"
            raise UserError(f"--tokenizer={self.cfg.tokenizer}: {problem}: use --tokenizer=train")
        specials, texts = itertools.cycle(ids), iter(encoded)
        joined = [[next(specials)] if part is SPECIAL else next(texts) for part in document.parts]
        return np.concatenate(joined).astype(self.dtype)


# --------------------------------------------------------------------------------------------------
# From the documents of all chunks to train.bin and val.bin


class SplitWriter:
    """Writes and counts the two splits of a data set. The files must not exist yet.

    few: the number of documents, if they are too few to be chosen by their hash.
    """

    def __init__(self, folder: Path, val_fraction: float, few: int = 0):
        self.val_fraction = val_fraction
        self.few = few
        self.files = {split: open(folder / f"{split}.bin", "xb") for split in SPLITS}
        self.hashes = {split: hashlib.sha256() for split in SPLITS}
        zeros = dict(tokens=0, documents=0, bytes=0, characters=0)
        self.counts: dict[str, dict] = {split: zeros.copy() for split in SPLITS}
        self.lengths: Counter = Counter()  # length of a document in tokens -> documents
        self.rows: list[np.ndarray] = []  # of all documents, for as long as they are few

    @property
    def has_few(self) -> bool:
        """Whether there are too few documents to choose some of them for val.bin.

        Fewer than 1 / val_fraction are too few. So are more, if the hash puts all into one split.
        """
        numbers = [counts["documents"] for counts in self.counts.values()]
        return sum(numbers) * self.val_fraction < 1 or 0 in numbers

    def write(self, rows: np.ndarray, ids: Sequence[bytes]) -> None:
        """Write some documents. rows: (documents,) of ROW. ids: of train.bin and of val.bin."""
        for val, split in enumerate(SPLITS):
            self.files[split].write(ids[val])
            self.hashes[split].update(ids[val])
            written = rows[rows["val"] == val]
            counts = self.counts[split]
            counts["documents"] += len(written)
            for name in ("tokens", "bytes", "characters"):
                counts[name] += int(written[name].sum())
        self.lengths.update(rows["tokens"].tolist())
        self.rows = [*self.rows, rows] if self.has_few else []

    def close(self) -> None:
        """Close the files, and add the hash of each to its counts."""
        for split, file in self.files.items():
            file.close()
            self.counts[split]["sha256"] = self.hashes[split].hexdigest()


def write_splits(
    cfg: PrepareConfig, sources: list[Source], encoder: Encoder, workers: int, folder: Path
) -> tuple[SplitWriter, Tally]:
    """Encode all files into train.bin and val.bin. Return the counts of tokens, and of records."""
    tally = Tally()
    writer = SplitWriter(folder, cfg.val_fraction)
    with closing(writer):
        for encoded in map_chunks("encoding", encoder, cfg, sources, workers, tally):
            writer.write(*encoded)
    if writer.has_few and writer.lengths:
        rows = np.concatenate(writer.rows)
        writer = split_by_tokens(rows, encoder, tally.has_conversations, folder)
    return writer, tally


def split_by_tokens(
    rows: np.ndarray, encoder: Encoder, keep_whole: bool, folder: Path
) -> SplitWriter:
    """Split few documents by tokens: the last val_fraction of them, eos not counted, are val.bin.

    The cut lies between two documents if that makes val.bin at most a quarter smaller or larger,
    and always with keep_whole, for conversations. Else the document at the cut becomes two.
    rows: (documents,) of ROW, in the order of the input.
    """
    ends = np.cumsum(rows["tokens"].astype(np.int64) - 1)  # (documents,): tokens up to its end
    total = ends[-1]
    cut = int(total * (1 - encoder.cfg.val_fraction))
    between = ends[: max(1, len(ends) - 1)]  # not the end of all
    nearest = between[np.abs(between - cut).argmin()]
    if keep_whole or abs(nearest - cut) <= (total - cut) / 4:
        cut = nearest
    token_bytes = encoder.tokenizer.token_bytes
    sizes = np.maximum(1, token_sizes(encoder.tokenizer))
    paths = [folder / f"{split}.bin" for split in SPLITS]
    with open(paths[0], "rb") as train, open(paths[1], "rb") as val:
        for path in paths:
            path.unlink()
        writer = SplitWriter(folder, encoder.cfg.val_fraction, few=len(rows))
        with closing(writer):
            for row, end in zip(rows, ends, strict=True):
                file = val if row["val"] else train
                ids = np.fromfile(file, encoder.dtype, int(row["tokens"]))[:-1]
                i = max(0, cut - (end - len(ids)))  # the first token of val.bin
                while 0 < i < len(ids) and b"\x80" <= token_bytes(int(ids[i]))[:1] < b"\xc0":
                    i -= 1  # it would start inside the UTF-8 of a character
                for is_val, part in enumerate((ids[:i], ids[i:])):
                    if not len(part):
                        continue
                    # A fraction of the counts: some tokenizers do not decode a text to itself.
                    fraction = sizes[part].sum() / sizes[ids].sum()
                    counts = [round(int(row[name]) * fraction) for name in ("bytes", "characters")]
                    data = part.tobytes() + encoder.eos.tobytes()
                    written = np.array([(len(part) + 1, *counts, is_val)], ROW)
                    writer.write(written, (b"", data) if is_val else (data, b""))
    return writer


def token_sizes(tokenizer: Tokenizer) -> np.ndarray:
    """Return the bytes of each token, (vocab_size,)."""
    return np.array([len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)])

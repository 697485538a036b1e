"""Tokenizers: SentencePiece, and byte-level BPE by tiktoken.

Both classes have the same attributes and methods:

    vocab_size, eos_id
    unk_id                replaces a text that the vocabulary has no token for; -1: there is none
    prefix                ids that come before a prompt; by default the eos, which in the training
                          data ends a document and so comes before the next one
    added                 name -> id of a token such as <think>, which is text, but is found before
                          all other tokens
    encode(text)          -> ids (n,), without the prefix
    encode_all(texts)     -> an iterator of the ids of each text; faster for many texts
    decode(ids)           -> their text, for people, with the names of <|im_start|> and <|im_end|>
    token_bytes(id)       -> the bytes that a token adds to a text: none if it is special
    special_id(name)      -> the id of the special token of this name; -1: there is none
    save(folder)          -> the tokenizer's description for meta.json

hf_tokenizer.py converts both to and from Hugging Face's files. This module needs no torch.
"""

import base64
import re
import unicodedata
from collections.abc import Collection, Iterator
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path
from typing import Literal

import numpy as np

from configurator import UserError
from hardware.disk import check_regular_file

# The special tokens of ChatML: text/chat.py.
IM_START, IM_END = "<|im_start|>", "<|im_end|>"
MAX_ID = (1 << 24) - 1  # the largest id of a token that is accepted


def check_ids(ids: Collection[int]) -> None:
    """Raise ValueError unless these are distinct numbers from 0 to MAX_ID, and at least one."""
    if not (len(set(ids)) == len(ids) > 0 and min(ids) >= 0 and max(ids) <= MAX_ID):
        raise ValueError(f"its ids are not distinct numbers from 0 to {MAX_ID:,}")


# Positions in a text that the tokens of a BPE seldom cross: before a space, and between a Chinese
# character and punctuation. SentencePiece.may_cut says whether a token of the model does.
EDGE = r"(?:(?<=\S)(?= )|(?<=[\u4e00-\u9fff])(?=[，。、；：！？．（《“\n]))"
SLICE = 500  # characters, at least; SentencePiece is slower on longer texts (bench/LOG.md)


class SentencePiece:
    kind = "sentencepiece"
    file = "tokenizer.model"
    normalize = ""
    added: dict[str, int] = {}  # SentencePiece finds its user-defined symbols itself

    def __init__(self, path: str | Path, prefix: list[int] | None = None):
        import sentencepiece

        try:
            check_regular_file(path)
            self.sp = sentencepiece.SentencePieceProcessor(model_proto=Path(path).read_bytes())
        except (OSError, RuntimeError, ValueError) as e:
            reason = getattr(e, "strerror", None) or str(e).strip()
            raise UserError(f"tokenizer {path}: not a SentencePiece model ({reason})") from None
        self.vocab_size = self.sp.vocab_size()
        self.eos_id = self.sp.eos_id()
        self.unk_id = self.sp.unk_id()
        space_sign = [self.sp.piece_to_id(f"<0x{byte:02X}>") for byte in "\u2581".encode()]
        self.space_sign = np.array(space_sign, np.int32)
        if self.eos_id < 0:
            raise UserError(f"tokenizer {path}: no eos token, but every document must end with one")
        self.prefix = [self.eos_id] if prefix is None else prefix

    def encode(self, text: str) -> np.ndarray:
        """Return the ids (n,) of a text."""
        return next(self.encode_all([text]))

    def encode_all(self, texts: list[str]) -> Iterator[np.ndarray]:
        """Yield the ids (n,) of each text. One call of the library encodes all of them.

        SentencePiece uses U+2581 for a space, and would decode a U+2581 of the text to a space.
        Here it is encoded as its three bytes, and so decodes to itself.
        """
        cut = [[self.slices(part) for part in text.split("\u2581")] for text in texts]
        slices = [s for parts in cut for part in parts for s in part]
        encoded = iter(self.sp.encode_as_numpy(slices, num_threads=1))
        for parts in cut:
            ids = []  # arrays
            for part in parts:
                ids += [self.space_sign, *islice(encoded, len(part))]
            yield np.concatenate(ids[1:]).view(np.uint32)

    def slices(self, text: str) -> list[str]:
        """Cut a text into slices that give the same ids as the whole text, but faster.

        A BPE only merges neighbours that form a token. So if no token can cross a position, the
        text before it and the text after it are encoded independently.
        """
        if len(text) <= SLICE or not self.may_cut:
            return [text]
        # Up to the first EDGE after SLICE characters, or to the end.
        return re.findall(rf"(?s).{{{SLICE}}}(?:.*?{EDGE}|.*)|.+", text)

    @cached_property
    def may_cut(self) -> bool:
        """Whether no token crosses an EDGE, so that a slice is encoded as in the whole text."""
        pieces = map(self.sp.id_to_piece, range(self.vocab_size))
        crosses = any(re.search(EDGE, piece.replace("\u2581", " ")) for piece in pieces)
        return self.keeps_text and self.is_byte_bpe and not crosses

    @property
    def keeps_text(self) -> bool:
        """Whether the model neither changes characters, nor adds or removes spaces."""
        return self.sp.normalize("  a １ ") == "▁▁a▁１▁"

    @property
    def adds_space(self) -> bool:
        """Whether the model puts a space before a text."""
        return self.sp.normalize("a") != "a"

    @property
    def is_byte_bpe(self) -> bool:
        """Whether the model is a BPE that encodes a character without a token as its bytes."""
        # In a BPE, the scores of the pieces are the order of the merges.
        scores = [self.sp.get_score(i) for i in self.ordinary]
        return scores == [-i for i in range(len(scores))] and self.has_all_bytes

    @property
    def has_all_bytes(self) -> bool:
        return sum(map(self.sp.is_byte, range(self.vocab_size))) >= 256

    @property
    def ordinary(self) -> list[int]:
        """The ids of pieces of text: all but bytes, unk and control symbols such as eos."""
        sp = self.sp
        kinds = (sp.is_control, sp.is_unknown, sp.is_byte)
        return [i for i in range(self.vocab_size) if not any(is_kind(i) for is_kind in kinds)]

    def decode(self, ids: list[int]) -> str:
        """Return the text of these ids, with the names of <|im_start|> and <|im_end|>."""
        names = {self.special_id(name): name for name in (IM_START, IM_END)}
        runs = [(name, list(run)) for name, run in groupby(ids, names.get)]
        return "".join(name * len(run) if name else self.sp.decode(run) for name, run in runs)

    def special_id(self, name: str) -> int:
        token = self.sp.piece_to_id(name)
        return token if self.sp.is_control(token) else -1

    def token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 that a token adds to a text: a part of a character, if it is a byte."""
        if token >= self.vocab_size:  # a model may have a larger vocabulary than its tokenizer
            return b""
        piece = self.sp.id_to_piece(token)
        if self.sp.is_byte(token):
            return bytes([int(piece[1:-1], 16)])  # piece is <0xE4>, for example
        if self.sp.is_control(token) or self.sp.is_unknown(token):
            return b""
        return piece.replace("\u2581", " ").encode()

    def save(self, folder: Path) -> dict:
        (folder / self.file).write_bytes(self.sp.serialized_model_proto())
        return {"kind": self.kind, "file": self.file, "prefix": self.prefix}


# How GPT-2 and cl100k cut a text into words before they merge bytes, as tiktoken defines them.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)


def faster(pattern: str) -> str:
    """Return a pattern that finds the same words, for these two in 0.6 of the time (bench/LOG.md).

    Only one branch looks ahead. If the branches before it form one group, tiktoken's engine runs
    them as a single automaton. A possessive ++ would prevent that; here + matches the same.
    """
    if pattern not in (GPT2_PATTERN, CL100K_PATTERN):
        return pattern
    greedy = re.sub(r"([+?*}])\+", r"\1", pattern)
    return "(?:" + greedy.replace(r"|\s+(?!\S)", r")|\s+(?!\S)")


class Tiktoken:
    kind = "tiktoken"
    file = "tokenizer.tiktoken"
    unk_id = -1
    adds_space = False

    def __init__(
        self,
        name: str,
        pattern: str,  # cuts a text into words; bytes are merged only within a word
        ranks: dict[bytes, int],  # token -> id; tokens with smaller ids are merged first
        special: dict[str, int],
        eos: str = "<|endoftext|>",
        # A Unicode normal form that every text is brought to: NFC for Qwen.
        normalize: Literal["", "NFC", "NFD", "NFKC", "NFKD"] = "",
        prefix: list[int] | None = None,
        added: dict[str, int] | None = None,
    ):
        import tiktoken

        self.added = added or {}
        self.encoding = tiktoken.Encoding(
            name,
            pat_str=faster(pattern),
            mergeable_ranks=ranks,
            special_tokens=special | self.added,
        )
        self.pattern = pattern
        self.ranks = ranks
        self.special = special
        self.normalize = normalize
        self.eos = eos
        self.vocab_size = self.encoding.n_vocab
        self.eos_id = special[eos]
        self.token_of = {i: token for token, i in ranks.items()}  # id -> its bytes
        self.token_of |= {i: name.encode() for name, i in self.added.items()}
        longest_first = sorted(self.added, key=len, reverse=True)
        self.added_names = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self.prefix = [self.eos_id] if prefix is None else prefix

    @classmethod
    def from_name(cls, name: str) -> "Tiktoken":
        """Return an encoding of tiktoken, such as gpt2. Raises UserError if there is none."""
        import tiktoken

        if name not in tiktoken.list_encoding_names():
            names = f"known names: train, char, byte, {', '.join(tiktoken.list_encoding_names())}"
            raise UserError(f"--tokenizer {name}: no such file or name; {names}")
        try:
            e = tiktoken.get_encoding(name)
        except (OSError, ValueError) as error:  # of requests, or a file with another hash
            problem = f"--tokenizer {name}: the download failed ({type(error).__name__})"
            raise UserError(f"{problem}; set TIKTOKEN_CACHE_DIR to a folder that has it") from None
        return cls(name, e._pat_str, e._mergeable_ranks, e._special_tokens)

    @classmethod
    def from_file(
        cls, path: str | Path, pattern: str = CL100K_PATTERN, special: dict | None = None, **options
    ) -> "Tiktoken":
        """Return the tokenizer of a .tiktoken file, whose lines are the base64 and id of a token.

        The file does not contain the splitting pattern. The default is that of cl100k, Qwen and
        Llama 3. Raises UserError if the file cannot be read or is damaged.
        """
        try:
            check_regular_file(path)
            lines = [line.split() for line in Path(path).read_bytes().splitlines() if line]
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
            check_ids(ranks.values())
        except (OSError, ValueError) as e:
            reason = getattr(e, "strerror", None) or e
            raise UserError(f"tokenizer {path}: not a .tiktoken file ({reason})") from None
        special = special or {"<|endoftext|>": max(ranks.values()) + 1}
        return cls(Path(path).stem, pattern, ranks, special, **options)

    def encode(self, text: str) -> np.ndarray:
        """Return the ids (n,) of a text. The name of a special token in it is ordinary text.

        Raises ValueError if tiktoken fails, on a million spaces for example.
        """
        if not self.added:
            return self.encode_words(text)
        parts = self.added_names.split(text)  # every second one is the name of an added token
        ids = [[self.added[p]] if i % 2 else self.encode_words(p) for i, p in enumerate(parts)]
        return np.concatenate(ids).astype(np.uint32)

    def encode_words(self, text: str) -> np.ndarray:
        try:
            return self.encoding.encode_to_numpy(self.normalized(text), disallowed_special=())
        except BaseException as e:  # a panic in tiktoken's Rust code is not an Exception
            if type(e).__name__ != "PanicException":
                raise
            raise ValueError(f"tiktoken failed: {str(e).splitlines()[0][:80]}") from None

    def normalized(self, text: str) -> str:
        return unicodedata.normalize(self.normalize, text) if self.normalize else text

    def encode_all(self, texts: list[str]) -> Iterator[np.ndarray]:
        """Yield the ids (n,) of each text; next() raises ValueError where tiktoken fails."""
        return map(self.encode, texts)

    def decode(self, ids: list[int]) -> str:
        return self.encoding.decode(ids)

    def special_id(self, name: str) -> int:
        return self.special.get(name, -1)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text: none, if it is special or unknown."""
        return self.token_of.get(token, b"")

    def save(self, folder: Path) -> dict:
        tokens = sorted((rank, token) for token, rank in self.ranks.items())
        lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in tokens]
        (folder / self.file).write_bytes(b"".join(lines))
        info = {"kind": self.kind, "file": self.file, "name": self.encoding.name}
        info |= {"prefix": self.prefix, "pattern": self.pattern, "special": self.special}
        return info | {"eos": self.eos, "normalize": self.normalize, "added": self.added}


Tokenizer = SentencePiece | Tiktoken


def meaning_of_ids(t: Tokenizer) -> list:
    """Return all that decides the meaning of the ids of a tokenizer."""
    special_ids = [t.special_id(IM_START), t.special_id(IM_END)]
    texts = [t.token_bytes(i) for i in range(t.vocab_size)]
    return [t.eos_id, t.normalize, special_ids, t.added, texts]


def same_ids(a: Tokenizer, b: Tokenizer) -> bool:
    """Return whether every id means the same in both tokenizers."""
    return meaning_of_ids(a) == meaning_of_ids(b)


def open_tokenizer(path: str | Path, info: dict) -> Tokenizer:
    """Return the tokenizer in a file. info: the result of the save() that wrote the file.

    Raises UserError if the file is damaged.
    """
    if info["kind"] == SentencePiece.kind:
        return SentencePiece(path, info["prefix"])
    options = {key: info.get(key) for key in ("eos", "normalize", "prefix", "added")}
    return Tiktoken.from_file(path, info["pattern"], info["special"], **options)

"""Tokenizers: SentencePiece, byte-level BPE by tiktoken, and any tokenizer.json of Hugging Face.

The three classes have the same attributes and methods:

    vocab_size, eos_id
    unk_id                replaces a text that the vocabulary has no token for; -1: there is none
    prefix                ids that come before a prompt; by default the eos, which in the training
                          data ends a document and so comes before the next one
    added                 name -> id of a token such as <think>, which is text, but is found before
                          all other tokens
    encode(text)          -> a list of ids, without the prefix
    encode_all(texts)     -> an iterator of arrays, the ids of each text; faster for many texts
    decode(ids)           -> their text, for people, with the names of <|im_start|> and <|im_end|>
    token_bytes(id)       -> the bytes that a token adds to a text: none if it is special
    special_id(name)      -> the id of the special token of this name; -1: there is none
    save(folder)          -> the tokenizer's description for meta.json

hf_tokenizer.py reads the files of Hugging Face, and writes those of the other two. This module
needs no torch.
"""

import base64
import itertools
import json
import os
import re
import unicodedata
from array import array
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from configurator import UserError, note
from hardware.disk import check_regular_file, file_sha256, read_object

# The special tokens of ChatML: text/chat.py.
IM_START, IM_END = "<|im_start|>", "<|im_end|>"
MAX_ID = (1 << 24) - 1  # the largest id of a token that is accepted
Added = Sequence[dict]  # added tokens: content, special, ... as in tokenizer.json


def check_ids(ids: Collection[int]) -> None:
    """Raise ValueError unless these are distinct numbers from 0 to MAX_ID, and at least one."""
    if not (len(set(ids)) == len(ids) > 0 and min(ids) >= 0 and max(ids) <= MAX_ID):
        raise ValueError(f"its ids are not distinct numbers from 0 to {MAX_ID:,}")


# Positions in a text: the first is one that tokens do not cross. SentencePiece.may_cut says whether
# those of a model cross the second.
SPACE = r"(?<=\S)(?= )"
PHRASE = r"(?:(?<=\S)(?= )|(?<=[\u4e00-\u9fff])(?=[，。、；：！？．（《“\n]))"
SLICE = 1 << 20  # characters, at least: a longer text would take much memory
SHORT_SLICE = 500  # SentencePiece is slower on longer texts (bench/LOG.md)
SPACE_SIGN = "\u2581"  # a space in SentencePiece's tokens


def slices(text: str, edge: str, size: int = SLICE) -> list[str]:
    """Cut a text at the first edge after `size` characters, and so on.

    A BPE only merges neighbours that form a token. So if no token crosses an edge, the text before
    it and the text after it are encoded independently, to the ids of the whole text.
    """
    if len(text) <= size:
        return [text]
    return re.findall(rf"(?s).{{{size}}}(?:.*?{edge}|.*)|.+", text)


class Shared:
    """What the tokenizers have in common."""

    unk_id = -1
    adds_space = False  # before a text
    lacks = b""  # bytes of UTF-8 that it has no token for, and leaves out
    special: dict[str, int]
    added: dict[str, int] = {}

    def special_id(self, name: str) -> int:
        return self.special.get(name, -1)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. The name of a special token in it is ordinary text."""
        return next(self.encode_all([text])).tolist()

    def encode_all(self, texts: list[str]) -> Iterator[np.ndarray]:
        """Yield the ids (n,) of each text; next() raises ValueError for one without ids."""
        return map(self.encode_array, texts)

    def encode_array(self, text: str) -> np.ndarray:
        if len(text) <= SLICE:
            return self.encode_slice(text)
        first, *rest = slices(text, SPACE)
        # A later slice starts with a space already.
        rest = [part.removeprefix(" " * self.adds_space) for part in rest]
        return np.concatenate([self.encode_slice(part) for part in (first, *rest)])

    def encode_slice(self, text: str) -> np.ndarray:
        raise NotImplementedError


NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"  # of protobuf: field 3, normalizer_spec, {field 3: false}


def piece_field(token: dict) -> bytes:
    """Return an added token as protobuf writes a piece: field 1 of the model, {1: name, 3: type}.

    The type is CONTROL, or USER_DEFINED: the latter is found in a text before all other pieces.
    """
    name = token["content"].encode()
    piece = b"\x0a%c%b\x18%c" % (len(name), name, 3 if token["special"] else 4)
    return b"\x0a%c%b" % (len(piece), piece)


class SentencePiece(Shared):
    """A model of SentencePiece, computed by its library.

    eos: the name of its eos, by default the model's own. added: tokens of a Hugging Face folder,
    which the file may lack. Raises UserError for a file that is no such model, or has no eos.
    """

    kind = "sentencepiece"
    file = "tokenizer.model"

    def __init__(
        self, path: str | Path, prefix: list[int] | None = None, eos: str = "", added: Added = ()
    ):
        from sentencepiece import SentencePieceProcessor

        try:
            check_regular_file(path)
            model = Path(path).read_bytes()
            sp = SentencePieceProcessor(model_proto=model)
            known = {sp.id_to_piece(i) for i in range(sp.vocab_size())}
            # What is appended to a protobuf adds to a list, and replaces any other value.
            model += b"".join(piece_field(t) for t in added if t["content"] not in known)
            self.sp = self.inner = SentencePieceProcessor(model_proto=model)
            # The space that a model puts before a text is put there by parts() alone.
            if self.sp.normalize("  a") == "▁▁▁a":
                self.inner = SentencePieceProcessor(model_proto=model + NO_DUMMY_PREFIX)
        except (OSError, RuntimeError, ValueError) as e:
            reason = getattr(e, "strerror", None) or str(e).strip()
            raise UserError(f"tokenizer {path}: not a SentencePiece model ({reason})") from None
        self.adds_space = self.sp.normalize("a") != "a"
        self.vocab_size = self.sp.vocab_size()
        control = filter(self.sp.is_control, range(self.vocab_size))
        self.special = {self.sp.id_to_piece(i): i for i in control}
        self.named = list(added)
        texts = [token["content"] for token in added if not token["special"]]
        self.added = {text: self.sp.piece_to_id(text) for text in texts}
        self.eos = eos
        self.eos_id = self.special.get(eos, -1) if eos else self.sp.eos_id()
        self.unk_id = self.sp.unk_id()
        space_sign = [self.sp.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_SIGN.encode()]
        self.has_bytes = self.sp.is_byte(space_sign[0])
        self.space_sign = np.array(space_sign, np.int32)
        if self.eos_id < 0:
            problem = f"no eos token {eos}".rstrip()
            raise UserError(f"tokenizer {path}: {problem}, but every document must end with one")
        self.prefix = [self.eos_id] if prefix is None else prefix

    def encode_all(self, texts: list[str]) -> Iterator[np.ndarray]:
        """Yield the ids (n,) of each text. One call of the library encodes all of them.

        SentencePiece uses U+2581 for a space, and would decode a U+2581 of the text to a space.
        Here it is encoded as its three bytes, and so decodes to itself.
        """
        cut = [self.parts(text) for text in texts]
        others = [part for parts in cut for part in parts if part != SPACE_SIGN]
        encoded = iter(self.inner.encode_as_numpy(others, num_threads=1))
        for parts in cut:
            ids = [self.space_sign if part == SPACE_SIGN else next(encoded) for part in parts]
            yield np.concatenate(ids).view(np.uint32)

    def parts(self, text: str) -> list[str]:
        """Cut a text into slices, and at each U+2581, which is a part of its own."""
        # As in transformers, no space comes before an added token.
        if self.inner is not self.sp and text and not text.startswith(tuple(self.added)):
            text = f" {text}"
        cut = (PHRASE, SHORT_SLICE) if len(text) > SHORT_SLICE and self.may_cut else (SPACE, SLICE)
        parts = []
        for part in text.split(SPACE_SIGN):
            parts += [*slices(part, *cut), SPACE_SIGN]
        return parts[:-1]

    @cached_property
    def may_cut(self) -> bool:
        """Whether no token crosses a PHRASE, so that a slice is encoded as in the whole text."""
        pieces = (self.sp.id_to_piece(i).replace(SPACE_SIGN, " ") for i in range(self.vocab_size))
        return (
            self.keeps_text and self.is_byte_bpe and not any(re.search(PHRASE, p) for p in pieces)
        )

    @property
    def keeps_text(self) -> bool:
        """Whether the model neither changes characters, nor adds or removes spaces."""
        return self.sp.normalize("  a １ ") == "▁▁a▁１▁"

    @property
    def is_byte_bpe(self) -> bool:
        """Whether the model is a BPE that encodes a character without a token as its bytes."""
        # In a BPE, the scores of the pieces are the order of the merges.
        scores = [self.sp.get_score(i) for i in self.ordinary]
        return scores == [-i for i in range(len(scores))] and self.has_bytes

    @property
    def ordinary(self) -> list[int]:
        """The ids of pieces of text: all but bytes, unk and control symbols such as eos."""
        sp = self.sp
        kinds = (sp.is_control, sp.is_unknown, sp.is_byte)
        return [i for i in range(self.vocab_size) if not any(is_kind(i) for is_kind in kinds)]

    def decode(self, ids: list[int]) -> str:
        """Return the text of these ids, with the names of <|im_start|> and <|im_end|>."""
        names = {self.special_id(name): name for name in (IM_START, IM_END)}
        runs = [(name, list(run)) for name, run in itertools.groupby(ids, names.get)]
        return "".join(name * len(run) if name else self.sp.decode(run) for name, run in runs)

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
        info = {"kind": self.kind, "file": self.file, "prefix": self.prefix}
        return info | {"eos": self.eos, "added": self.named}


# How GPT-2 and cl100k cut a text into words before they merge bytes, as tiktoken defines them.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)

# Qwen's, and that of Qwen 3.5, before which texts are brought to NFC.
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN3_5_PATTERN = QWEN_PATTERN.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(
    r"\s\p{L}", r"\s\p{L}\p{M}"
)
CASED = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"  # upper, lower
O200K_PATTERN = "".join(
    rf"[^\r\n\p{{L}}\p{{N}}]?{CASED[0]}{some}{CASED[1]}{more}(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    for some, more in ("*+", "+*")
)
O200K_PATTERN += r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The first letters of the SHA-256 of a .tiktoken file -> its pattern.
PATTERNS = dict.fromkeys(("306cd27f03c1", "94b5ca7dff4d"), GPT2_PATTERN)  # r50k is GPT-2's, p50k
PATTERNS |= dict.fromkeys(("446a9538cb6c", "d0bdbaf59b07"), O200K_PATTERN)  # o200k, Llama 4
PATTERNS |= dict.fromkeys(("223921b76ee9", "82e9d31979e9"), CL100K_PATTERN)  # cl100k, Llama 3
PATTERNS |= {"b2b1b8dfb5cc": QWEN_PATTERN, "8dde380a6405": QWEN3_5_PATTERN}


def faster(pattern: str) -> str:
    """Return a pattern that finds the same words, for these two in 0.6 of the time (bench/LOG.md).

    Only one branch looks ahead. If the branches before it form one group, tiktoken's engine runs
    them as a single automaton. A possessive ++ would prevent that; here + matches the same.
    """
    if pattern not in (GPT2_PATTERN, CL100K_PATTERN):
        return pattern
    greedy = re.sub(r"([+?*}])\+", r"\1", pattern)
    return "(?:" + greedy.replace(r"|\s+(?!\S)", r")|\s+(?!\S)")


class Tiktoken(Shared):
    """A byte-level BPE, computed by tiktoken.

    pattern: cuts a text into words; bytes are merged only within a word. ranks: token -> id; tokens
    with smaller ids are merged first.
    """

    kind = "tiktoken"
    file = "tokenizer.tiktoken"

    def __init__(
        self,
        name: str,
        pattern: str,
        ranks: dict[bytes, int],
        special: dict[str, int],
        eos: str = "<|endoftext|>",
        prefix: list[int] | None = None,
    ):
        import tiktoken

        options = dict(mergeable_ranks=ranks, special_tokens=special)
        self.encoding = tiktoken.Encoding(name, pat_str=faster(pattern), **options)
        self.pattern = pattern
        self.is_nfc = pattern in (QWEN_PATTERN, QWEN3_5_PATTERN)
        self.ranks = ranks
        self.special = special
        self.eos = eos
        self.vocab_size = self.encoding.n_vocab
        self.eos_id = special[eos]
        self.token_of = {i: token for token, i in ranks.items()}  # id -> its bytes
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
        cls, path: str | Path, pattern: str = "", special: dict | None = None, **options
    ) -> "Tiktoken":
        """Return the tokenizer of a .tiktoken file, whose lines are the base64 and id of a token.

        The file does not contain the splitting pattern. The default is that of the known file with
        this hash, or else cl100k's, with a note. Raises UserError if the file cannot be read or is
        damaged.
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
        if not (pattern := pattern or PATTERNS.get(file_sha256(path)[:12], "")):
            note(f"{path} does not say how it splits texts into words: as cl100k is assumed")
            pattern = CL100K_PATTERN
        return cls(Path(path).stem, pattern, ranks, special, **options)

    def encode_slice(self, text: str) -> np.ndarray:
        if self.is_nfc:
            text = unicodedata.normalize("NFC", text)
        try:
            return self.encoding.encode_to_numpy(text, disallowed_special=())
        except BaseException as e:  # a panic in tiktoken's Rust code is not an Exception
            if type(e).__name__ != "PanicException":
                raise
            raise ValueError(f"tiktoken failed: {str(e).splitlines()[0][:80]}") from None

    def decode(self, ids: list[int]) -> str:
        return self.encoding.decode(ids)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text: none, if it is special or unknown."""
        return self.token_of.get(token, b"")

    def save(self, folder: Path) -> dict:
        tokens = sorted((rank, token) for token, rank in self.ranks.items())
        lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in tokens]
        (folder / self.file).write_bytes(b"".join(lines))
        info = {"kind": self.kind, "file": self.file, "name": self.encoding.name}
        info |= {"prefix": self.prefix, "pattern": self.pattern, "special": self.special}
        return info | {"eos": self.eos}


# A byte-level BPE has one printable character for each byte: the byte's own in Latin-1 if that is
# printable, and else a character from U+0100 on.
UNPRINTABLE = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
BYTE_TO_CHAR = {b: chr(b) for b in range(256)}
BYTE_TO_CHAR |= {b: chr(0x100 + i) for i, b in enumerate(UNPRINTABLE)}
CHAR_TO_BYTE = {c: b for b, c in BYTE_TO_CHAR.items()}


class HuggingFace(Shared):
    """Any tokenizer.json, computed by Hugging Face's package `tokenizers`.

    content: of the file. eos: is added, if the file lacks it. added: tokens that other files of its
    folder name. Raises whatever `tokenizers` raises for a damaged file.
    """

    kind = "huggingface"
    file = "tokenizer.json"

    def __init__(self, content: dict, eos: str, prefix: list[int] | None = None, added: Added = ()):
        # prepare.py has a process for each core.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import tokenizers

        model = content["model"]
        model.pop("dropout", None)  # would give a text other ids each time
        self.library = library = tokenizers.Tokenizer.from_str(json.dumps(content))
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = True  # their names in a text are text
        size = library.get_vocab_size()
        library.add_tokens([tokenizers.AddedToken(**token) for token in added])
        tokens = library.get_added_tokens_decoder().values()
        if library.token_to_id(eos) is None:
            note(f"the tokenizer has no token {eos}: it is added")
        ends = [name for name in (IM_START, IM_END) if library.token_to_id(name) is not None]
        library.add_special_tokens([eos, *ends])
        vocab = library.get_vocab()
        check_ids(set(vocab.values()))
        self.has_grown = len(vocab) > size
        self.vocab_size = 1 + max(vocab.values())
        self.eos, self.eos_id = eos, vocab[eos]
        special = {t.content for t in tokens if t.special} | {eos, *ends}
        self.added = {t.content: vocab[t.content] for t in tokens if t.content not in special}
        # A conversation has line ends beside its special tokens, which these would take in.
        special -= {t.content for t in tokens if t.lstrip or t.rstrip} - {eos}
        self.special = {name: vocab[name] for name in special}
        unk_id = vocab.get(model.get("unk_token"), model.get("unk_id"))
        self.unk_id = -1 if unk_id is None else unk_id
        # A WordLevel or Unigram model may have the name of a special token as a word.
        self.never_in_text = {*self.special.values()} - {self.unk_id} | {self.eos_id}
        steps = json.dumps([content.get("pre_tokenizer"), content.get("decoder")])
        self.is_byte_level = '"ByteLevel"' in steps
        if self.is_byte_level:
            library.decoder = tokenizers.decoders.ByteLevel()
        if self.unk_id < 0 and not model.get("byte_fallback"):
            known = vocab.keys() if self.is_byte_level else ()
            # No UTF-8 has 0xFF, which stands for the special tokens of a document.
            self.lacks = bytes(b for c, b in CHAR_TO_BYTE.items() if c not in known and b < 0xFF)
        first = library.encode("a \u0378")  # raises, if nothing is there for unknown characters
        size = [*first.special_tokens_mask, 0].index(0)
        self.prefix = first.ids[:size] if prefix is None else prefix
        text = "".join(first.tokens[size:])
        self.adds_space = text.startswith((SPACE_SIGN, BYTE_TO_CHAR[0x20]))

    def encode_slice(self, text: str) -> np.ndarray:
        [encoding] = self.library.encode_batch_fast([text], add_special_tokens=False)
        ids = encoding.ids  # a new list each time
        if found := self.never_in_text.intersection(ids):
            raise ValueError(f"{self.library.id_to_token(min(found))} in it is a special token")
        return np.frombuffer(array("I", ids), np.uint32)  # a third of the time of np.array(ids)

    def decode(self, ids: list[int]) -> str:
        return self.library.decode(ids, skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text: none, if it is special or unknown."""
        piece = self.library.id_to_token(token)
        if piece is None or piece in self.special or token == self.unk_id:
            return b""
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", piece):
            return bytes.fromhex(byte[1])
        if self.is_byte_level and piece not in self.added and CHAR_TO_BYTE.keys() >= set(piece):
            return bytes(CHAR_TO_BYTE[c] for c in piece)
        # As it is decoded after another token, here an eos.
        return self.decode([self.eos_id, token])[len(self.eos) :].encode()

    def save(self, folder: Path) -> dict:
        """Write the file, unless prepare.py has copied it with the others of its folder."""
        path = folder / self.file
        if self.has_grown or not path.exists():
            path.write_text(self.library.to_str(), encoding="utf-8")
        return {"kind": self.kind, "file": self.file, "prefix": self.prefix, "eos": self.eos}


Tokenizer = SentencePiece | Tiktoken | HuggingFace


def meaning_of_ids(t: Tokenizer) -> list:
    """Return all that decides the meaning of the ids of a tokenizer."""
    special_ids = [t.special_id(IM_START), t.special_id(IM_END)]
    texts = [t.token_bytes(i) for i in range(t.vocab_size)]
    return [t.eos_id, special_ids, t.added, texts]


def same_ids(a: Tokenizer, b: Tokenizer) -> bool:
    """Return whether every id means the same in both tokenizers."""
    return meaning_of_ids(a) == meaning_of_ids(b)


def open_tokenizer(path: str | Path, info: dict) -> Tokenizer:
    """Return the tokenizer in a file. info: the result of the save() that wrote the file.

    Raises UserError if the file is damaged.
    """
    prefix, eos = info["prefix"], info.get("eos", "")
    if info["kind"] == SentencePiece.kind:
        return SentencePiece(path, prefix, eos, info.get("added", ()))
    if info["kind"] == HuggingFace.kind:
        return HuggingFace(read_object(Path(path)), eos, prefix)
    if info["name"] == "hf":  # earlier versions read a tokenizer.json for tiktoken to compute
        return HuggingFace(read_object(Path(path).with_name(HuggingFace.file)), eos, prefix)
    return Tiktoken.from_file(path, info["pattern"], info["special"], eos=eos, prefix=prefix)

"""Tokenizers: SentencePiece, and byte-level BPE by tiktoken; and either of them as Hugging Face writes it, out and in.

Both kinds have

    vocab_size, eos_id
    prefix                ids that stand before a text that a model is to continue: here an eos, since a document begins
    encode(text)          -> ids (n,), without the prefix
    decode(ids), token_bytes(id)
    save(folder)          -> what meta.json says of it

This file needs no torch.
"""

import array
import base64
import unicodedata
from pathlib import Path

import numpy as np

from configurator import UserError


def checked_prefix(prefix: list[int] | None, eos_id: int, vocab_size: int) -> list[int]:
    found = [eos_id] if prefix is None else prefix
    if not isinstance(found, list) or not all(type(i) is int and 0 <= i < vocab_size for i in found):
        raise ValueError(f"the prefix {found!r} is no list of its ids")
    return found


class SentencePiece:
    kind, file = "sentencepiece", "tokenizer.model"

    def __init__(self, path: str | Path, prefix: list[int] | None = None):
        import sentencepiece

        self.path = Path(path)
        try:
            self.sp = sentencepiece.SentencePieceProcessor(model_proto=self.path.read_bytes())
            for token in range(self.sp.vocab_size()):
                self.sp.id_to_piece(token)  # of a damaged file, not all pieces are text
        except (OSError, RuntimeError, ValueError) as e:
            raise UserError(f"tokenizer {path}: not a SentencePiece model ({str(e).strip()})") from None
        self.vocab_size, self.eos_id = self.sp.vocab_size(), self.sp.eos_id()
        self.space_sign = [self.sp.piece_to_id(f"<0x{byte:02X}>") for byte in "\u2581".encode()]
        if self.eos_id < 0:
            raise UserError(f"tokenizer {path}: it has no eos token, which ends every document")
        self.prefix = checked_prefix(prefix, self.eos_id, self.vocab_size)

    def encode(self, text: str) -> np.ndarray:
        """SentencePiece writes a space as U+2581; a text's own U+2581 goes in as its three bytes, so as to come back."""
        first, *rest = text.split("\u2581")
        ids = array.array("I", self.sp.encode(first))  # three times as fast as numpy at taking in a list
        for part in rest:
            ids.extend(self.space_sign + self.sp.encode(part))
        return np.frombuffer(ids, np.uint32)

    def decode(self, ids: list[int]) -> str:
        return self.sp.decode(ids)

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 that a token adds to a text; one Chinese character can take three tokens."""
        if token >= self.vocab_size:  # a model may have a larger vocabulary than its tokenizer
            return b""
        piece = self.sp.id_to_piece(token)
        if self.sp.is_byte(token):
            return bytes([int(piece[1:-1], 16)])  # <0xE4>
        return b"" if self.sp.is_control(token) or self.sp.is_unknown(token) else piece.replace("\u2581", " ").encode()

    def save(self, folder: Path) -> dict:
        (folder / self.file).write_bytes(self.sp.serialized_model_proto())
        return {"kind": self.kind, "file": self.file, "prefix": self.prefix}


def tiktoken_names() -> list[str]:
    import tiktoken

    return tiktoken.list_encoding_names()


class Tiktoken:
    kind, file = "tiktoken", "tokenizer.tiktoken"

    def __init__(
        self,
        name: str,
        pattern: str,  # cuts a text into words, in which bytes are merged
        ranks: dict[bytes, int],  # a token's id; the smaller it is, the earlier its two halves are merged
        special: dict[str, int],
        eos: str = "<|endoftext|>",
        normalize: str = "",  # a Unicode normal form of all texts: NFC in Qwen's
        prefix: list[int] | None = None,
    ):
        import tiktoken

        self.encoding = tiktoken.Encoding(
            name, pat_str=SAME_BUT_FASTER.get(pattern, pattern), mergeable_ranks=ranks, special_tokens=special
        )
        self.pattern, self.normalize, self.eos = pattern, normalize, eos
        self.vocab_size, self.eos_id = self.encoding.n_vocab, special[eos]
        self.special = set(special.values())
        self.prefix = checked_prefix(prefix, self.eos_id, self.vocab_size)

    @classmethod
    def by_name(cls, name: str) -> "Tiktoken":
        import tiktoken

        if name not in tiktoken_names():
            known = ", ".join(tiktoken_names())
            raise UserError(f"--tokenizer {name}: no such file, and no tiktoken encoding; it knows {known}")
        try:
            e = tiktoken.get_encoding(name)
        except OSError as e:  # requests' errors are OSErrors
            where = "set TIKTOKEN_CACHE_DIR to a folder that has it"
            raise UserError(f"--tokenizer {name}: cannot be downloaded ({type(e).__name__}); {where}") from None
        return cls(name, e._pat_str, e._mergeable_ranks, e._special_tokens)

    @classmethod
    def from_file(cls, path: str | Path, pattern: str | None = None, special: dict | None = None, **more) -> "Tiktoken":
        """A .tiktoken file (a line a token: base64 and rank) with its splitting pattern; default: cl100k's, Qwen's, Llama 3's."""
        try:
            lines = [line.split() for line in Path(path).read_bytes().splitlines() if line]
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
            if (
                not ranks
                or len(set(ranks.values())) < len(ranks)
                or not 0 <= min(ranks.values()) <= max(ranks.values()) < 1 << 24
            ):
                raise ValueError("its ranks are no numbering")
        except (OSError, ValueError) as e:
            raise UserError(f"tokenizer {path}: not a .tiktoken file ({e})") from None
        special = special or {"<|endoftext|>": max(ranks.values()) + 1}
        return cls(Path(path).stem, pattern or CL100K_PATTERN, ranks, special, **more)

    def encode(self, text: str) -> np.ndarray:
        if self.normalize:
            text = unicodedata.normalize(self.normalize, text)
        try:
            return self.encoding.encode_to_numpy(text, disallowed_special=())  # "<|endoftext|>" in a text is text
        except BaseException as e:  # a panic in tiktoken's Rust, on a million spaces say, is no Exception
            if type(e).__name__ != "PanicException":
                raise
            why = str(e).splitlines()[0][:80]
            why = "the vocabulary lacks a byte of it" if why.startswith("no entry found") else why
            raise ValueError(f"tiktoken fails on it: {why}") from None

    def decode(self, ids: list[int]) -> str:
        return self.encoding.decode(ids)

    def token_bytes(self, token: int) -> bytes:
        try:
            return self.encoding.decode_single_token_bytes(token) if token not in self.special else b""
        except KeyError:  # a hole in the numbering
            return b""

    def save(self, folder: Path) -> dict:
        e = self.encoding
        ranks = sorted(e._mergeable_ranks.items(), key=lambda item: item[1])
        (folder / self.file).write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % rank for t, rank in ranks))
        settings = {"pattern": self.pattern, "special": e._special_tokens, "eos": self.eos, "normalize": self.normalize}
        return {"kind": self.kind, "file": self.file, "name": e.name, "prefix": self.prefix} | settings


# How GPT-2 and cl100k cut a text into words before they merge bytes, as tiktoken has them. Only the branch with (?!\S)
# looks ahead; with the branches before it in one group, tiktoken's engine runs these as a single automaton: the same
# words, in 0.6 of the time (bench/LOG.md). Possessive ++ would undo that, and here + finds the same.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
CL100K_PATTERN = r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
SAME_BUT_FASTER = {
    GPT2_PATTERN: r"""(?:'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+$)|\s+(?!\S)|\s""",
    CL100K_PATTERN: r"""(?:'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+$|\s*[\r\n])|\s+(?!\S)|\s""",
}


def same_ids(a: SentencePiece | Tiktoken, b: SentencePiece | Tiktoken) -> bool:
    """Do both mean the same by every id?"""
    alike = a.vocab_size == b.vocab_size and a.eos_id == b.eos_id
    return alike and all(a.token_bytes(i) == b.token_bytes(i) for i in range(a.vocab_size))


def open_tokenizer(path: str | Path, info: dict) -> SentencePiece | Tiktoken:
    """A tokenizer file, and what `save` returned when it was written."""
    if info["kind"] == SentencePiece.kind:
        return SentencePiece(path, info.get("prefix"))
    if info["kind"] != Tiktoken.kind:
        raise ValueError(f"tokenizer kind {info['kind']!r}")
    more = {k: info[k] for k in ("eos", "normalize", "prefix") if k in info}
    return Tiktoken.from_file(path, info["pattern"], info["special"], **more)

"""The tokenizer of a data set: the one that --tokenizer names, or a SentencePiece made here."""

import random
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from configurator import UserError
from hardware.disk import file_sha256, json_bytes, remove_only, sealed, unseal, write_whole
from hardware.terminal import ProgressBar
from text.encode import texts_of
from text.folders import WORK, fingerprint
from text.formats import Chunk
from text.hf_tokenizer import find_tokenizer, hugging_face_files, tokenizer_folder
from text.look import no_documents
from text.pool import Task, in_order
from text.records import Cleaning, Tally
from text.settings import (
    MADE_HERE,
    PrepareConfig,
    check_bad,
    cleaning,
    foreseen,
    reader_of,
    what_is_read,
)
from text.sources import Source
from text.tokenizer import SentencePiece

SAMPLE_LENGTH = 4000  # characters of each excerpt in the sample that a tokenizer is trained on

# What all tokenizers that are made here have in common: no text is changed, and all spaces stay.
AS_IT_IS = dict(
    normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False
)
# The model file records the number of threads, so it is fixed.
QUIETLY = dict(num_threads=16, minloglevel=2)

# SentencePiece uses these four characters itself: there cannot be a token for one of them.
RESERVED = set("\0\x1f\u2581\u2585")


def make_tokenizer(cfg: PrepareConfig, sources: list[Source], workers: int, folder: Path) -> dict:
    """Save the tokenizer that --tokenizer names in `folder`; return its description for meta.json.

    If an interrupted run has already made this tokenizer, it is used again.
    """
    key = None  # identifies the input and the settings of a tokenizer that is made here
    ready = None
    came_with = {}  # the files for Hugging Face's tools that lie beside the tokenizer
    if cfg.tokenizer in MADE_HERE:
        files = [s.same_file() for s in sources]
        settings = [cfg.tokenizer, cfg.vocab_size, cfg.train_mb, what_is_read(cfg)]
        key = fingerprint([settings, files])
        info = tokenizer_of_interrupted_run(folder, key)
        if info is not None:
            return info
    else:
        ready = find_tokenizer(cfg.tokenizer)
        beside = tokenizer_folder(cfg.tokenizer)
        if beside:
            came_with = {f.name: f.read_bytes() for f in hugging_face_files(beside)}

    remove_only(folder, WORK["tokenizer"])
    folder.mkdir()
    for file, content in came_with.items():
        (folder / file).write_bytes(content)
    tokenizer = ready or SentencePiece(make_sentencepiece(cfg, sources, workers, folder))
    info = tokenizer.save(folder)
    info |= {"sha256": file_sha256(folder / info["file"])}
    info |= {"vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id}
    write_whole(folder / "info.json", json_bytes(sealed({"key": key, "tokenizer": info})))
    return info


def tokenizer_of_interrupted_run(folder: Path, key: str) -> dict | None:
    """Return the description of the tokenizer in `folder`, or None if it must be trained again.

    It is used again only if it was trained with the same `key` and its file is undamaged.
    """
    path = folder / "info.json"
    if not path.exists():
        return None
    try:
        kept = unseal(path)
        info = kept["tokenizer"]
        if kept["key"] == key and file_sha256(folder / info["file"]) == info["sha256"]:
            print("the tokenizer of the interrupted run is undamaged: it is used again")
            return info
        why = "it is damaged, or the input or the settings changed"
    except (OSError, ValueError, LookupError, TypeError) as e:
        why = f"{path}: {e}"
    print(f"the tokenizer of the interrupted run is trained again: {why}")
    return None


def make_sentencepiece(
    cfg: PrepareConfig, sources: list[Source], workers: int, folder: Path
) -> Path:
    """Make the tokenizer that --tokenizer=train, char or byte asks for; return its file."""
    path = folder / SentencePiece.file
    if cfg.tokenizer == "train":
        train_sentencepiece(path, sample_excerpts(cfg, sources, workers), cfg.vocab_size)
    elif cfg.tokenizer == "char":
        characters = alphabet(cfg, sources, workers)
        write_alphabet(path, characters, with_bytes=bool(characters & RESERVED))
    else:
        write_alphabet(path, set(), with_bytes=True)
    return path


def train_sentencepiece(path: Path, sample: list[str], vocab_size: int) -> None:
    """Train a BPE tokenizer that can reproduce every text.

    It writes a character outside the vocabulary as the bytes of its UTF-8.
    """
    import sentencepiece

    try:
        with open(path, "wb") as f:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(sample),
                model_writer=f,
                model_type="bpe",
                vocab_size=vocab_size,
                byte_fallback=True,
                character_coverage=0.9995,
                allow_whitespace_only_pieces=True,  # indentation can be one token
                split_digits=True,
                max_sentence_length=8 * SAMPLE_LENGTH,  # bytes
                **AS_IT_IS,
                **QUIETLY,
            )
    except (RuntimeError, ValueError) as e:
        reason = str(e).split("] ")[-1]  # its text is "Internal: file(line) [condition] reason"
        raise UserError(f"--vocab_size={vocab_size}: {in_our_words(reason)}") from None


def in_our_words(reason: str) -> str:
    """Return why SentencePiece cannot train. Its own advice names settings that we do not have."""
    least = re.search(r"smaller than required_chars. \d+ vs (\d+)", reason)
    most = re.search(r"set it to a value <= (\d+)", reason)
    if least:
        problem = f"too small for the characters of this input: it takes at least {least[1]}"
        return f"{problem}, or --tokenizer=byte"
    if most:
        return f"too large for this input: give --vocab_size={most[1]}, or --tokenizer=char"
    return f"SentencePiece cannot train on this input: {reason}"


def write_alphabet(path: Path, characters: set[str], with_bytes: bool) -> None:
    """Make a tokenizer with one token for each of these characters, an unk and an eos.

    with_bytes: it also has a token for each byte, and writes all other characters as the bytes of
    their UTF-8. Otherwise, they are unk.
    """
    import sentencepiece

    tokens = characters - RESERVED
    if with_bytes:
        tokens |= {" "}  # SentencePiece writes a space as U+2581, and would find the bytes of that
    size = len(tokens) + 2 + 256 * with_bytes
    with open(path, "wb") as f:
        sentencepiece.SentencePieceTrainer.train(
            # All in one sentence: SentencePiece drops line ends at the end of a sentence.
            sentence_iterator=iter(["".join(sorted(tokens))]),
            model_writer=f,
            model_type="char",
            vocab_size=size,
            byte_fallback=with_bytes,
            character_coverage=1.0,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            max_sentence_length=8 * size,  # bytes
            **AS_IT_IS,
            **QUIETLY,
        )


def over_input(cfg: PrepareConfig, sources: list[Source], workers: int, task: Task) -> Iterator:
    """Read the whole input, and yield what the task makes of each chunk.

    The task returns that and the counts. Raises UserError if there are no documents, or if too many
    records are bad.
    """
    tally = Tally()
    total = sum(s.bytes for s in sources)
    chunks = reader_of(sources, cfg).chunks()
    empty = True
    with ProgressBar("reading for the tokenizer", total=total, unit_scale=True) as bar:
        for chunk, (made, counts) in in_order(task, chunks, workers):
            tally.add(counts)
            check_bad(tally, cfg, foreseen(tally, chunk, total))
            yield made
            empty = empty and not made
            bar.update(chunk.bytes_read - bar.n)
    if empty:
        raise UserError(no_documents(tally))
    check_bad(tally, cfg, tally.records)


def alphabet(cfg: PrepareConfig, sources: list[Source], workers: int) -> set[str]:
    """Read the whole input and return its characters."""
    return set().union(*over_input(cfg, sources, workers, partial(characters_of, cleaning(cfg))))


def characters_of(cleaning: Cleaning, chunk: Chunk) -> tuple[set[str], Tally]:
    """Return the characters of a chunk, and the counts. With `cleaning` given, this is a Task."""
    texts, tally = texts_of(cleaning, chunk)
    return set().union(*texts), tally


def sample_excerpts(cfg: PrepareConfig, sources: list[Source], workers: int) -> list[str]:
    """Read the whole input and return a uniform random sample of it, train_mb million characters.

    The sample consists of excerpts of SAMPLE_LENGTH characters, and only the sample is in memory:
    reservoir sampling, Vitter's algorithm R.
    """
    rng = random.Random(0)
    capacity = cfg.train_mb * 1_000_000 // SAMPLE_LENGTH
    sample: list[str] = []
    seen = 0  # excerpts so far
    for texts in over_input(cfg, sources, workers, partial(texts_of, cleaning(cfg))):
        for excerpt in excerpts_of(texts):
            if len(sample) < capacity:
                sample.append(excerpt)
            else:
                slot = rng.randrange(seen + 1)
                if slot < capacity:
                    sample[slot] = excerpt
            seen += 1
    return sample


def excerpts_of(texts: list[str]) -> Iterator[str]:
    for text in texts:
        for begin in range(0, len(text), SAMPLE_LENGTH):
            yield text[begin : begin + SAMPLE_LENGTH]

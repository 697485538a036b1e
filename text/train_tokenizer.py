"""The tokenizer of a data set: the one that --tokenizer names, or a SentencePiece made here."""

import itertools
import random
import re
import shutil
from functools import partial
from pathlib import Path

from configurator import UserError, changes, note
from hardware.disk import file_sha256
from text.formats import Chunk, Source
from text.hf_tokenizer import find_tokenizer, hugging_face_files, read_json
from text.pool import map_chunks
from text.records import Tally, documents
from text.settings import MADE_HERE, PrepareConfig
from text.tokenizer import IM_END, IM_START, SentencePiece

READING = "reading for the tokenizer"
SAMPLE_LENGTH = 4000  # characters of each excerpt in the sample that a tokenizer is trained on

# SentencePiece uses these four characters itself: no token can contain one of them.
RESERVED = set("\0\x1f\u2581\u2585")
BOUNDARY = "\0"  # in the texts that a tokenizer is trained on: no token crosses it


def make_tokenizer(cfg: PrepareConfig, sources: list[Source], workers: int, folder: Path) -> dict:
    """Save the tokenizer that --tokenizer names in `folder`; return its description for meta.json.

    A trained tokenizer depends on the input and the settings alone.
    """
    path = folder / SentencePiece.file
    if cfg.tokenizer != "train" and (given := changes(cfg).keys() & {"vocab_size", "train_mb"}):
        note(f"--tokenizer={cfg.tokenizer} ignores {', '.join(sorted(given))}")
    if cfg.tokenizer == "train":
        train_sentencepiece(path, sample_excerpts(cfg, sources, workers), cfg.vocab_size)
    elif cfg.tokenizer == "char":
        task = partial(characters_of, cfg)
        parts = map_chunks(READING, task, cfg, sources, workers, Tally())
        characters = set(itertools.chain.from_iterable(parts))
        write_alphabet(path, characters, with_bytes=bool(characters & RESERVED))
    elif cfg.tokenizer == "byte":
        write_alphabet(path, set(), with_bytes=True)
    elif Path(cfg.tokenizer).is_dir():
        for file in hugging_face_files(Path(cfg.tokenizer)):
            if file.suffix == ".json":
                read_json(file)  # raises UserError if it is damaged
            shutil.copyfile(file, folder / file.name)
    spec = str(path) if cfg.tokenizer in MADE_HERE else cfg.tokenizer
    tokenizer = find_tokenizer(spec, cfg.eos)
    info = tokenizer.save(folder)
    paths = (folder / info["file"], *hugging_face_files(folder))
    hashes = {path.name: file_sha256(path) for path in paths}
    info |= {"sha256": hashes[info["file"]], "vocab_size": tokenizer.vocab_size}
    name = "trained" if cfg.tokenizer == "train" else Path(cfg.tokenizer).name or cfg.tokenizer
    return info | {"eos_id": tokenizer.eos_id, "files": hashes, "called": name}


def make_model(path: Path, sentences: list[str], **options) -> None:
    """Let SentencePiece train a model that changes no text and keeps all spaces."""
    import sentencepiece

    with open(path, "wb") as f:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=f,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            num_threads=16,  # the model file records it, so it is fixed
            minloglevel=2,
            **options,
        )


def train_sentencepiece(path: Path, sample: list[str], vocab_size: int) -> None:
    """Train a BPE tokenizer that can reproduce every text.

    A character outside the vocabulary is encoded as the bytes of its UTF-8. In a token, only line
    ends follow a line end. So a prompt of <|im_start|>assistant and a line end has the same tokens
    as before an answer. (It costs 0.3 to 0.5 % more tokens: bench/LOG.md.)
    """
    # SentencePiece would leave out all of a sentence with a U+2585, and take a U+2581 for a space.
    sentences = (re.sub("[\x1f\u2581\u2585]", BOUNDARY, text) for text in sample)
    try:
        make_model(
            path,
            [re.sub(r"\n(?=[^\n])", f"\n{BOUNDARY}", text) for text in sentences],
            pretokenization_delimiter=BOUNDARY,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            control_symbols=[IM_START, IM_END],  # no text is encoded to them
            character_coverage=0.9995,
            required_chars="\u2581",  # a space: its bytes would decode to a U+2581
            allow_whitespace_only_pieces=True,  # indentation can be one token
            split_digits=True,
            max_sentence_length=8 * SAMPLE_LENGTH,  # bytes
        )
    except (RuntimeError, ValueError) as e:
        # Its text is "Internal: file(line) [condition] reason". The reason may be empty.
        reason = str(e).split("] ")[-1] or str(e)
        # SentencePiece's advice names settings that prepare.py does not have.
        if fits := re.search(r"(required_chars. \d+ vs|set it to a value <=) (\d+)", reason):
            bound = "more" if "required_chars" in reason else "less"
            reason = f"for this input give --vocab_size={fits[2]} or {bound}"
        raise UserError(f"--vocab_size={vocab_size}: {reason}") from None


def write_alphabet(path: Path, characters: set[str], with_bytes: bool) -> None:
    """Make a tokenizer with one token for each of these characters, an unk and an eos.

    with_bytes: it also has a token for each byte, and encodes all other characters as the bytes of
    their UTF-8. Otherwise, they are unk.
    """
    tokens = characters - RESERVED
    if with_bytes:
        tokens |= {" "}  # as in train_sentencepiece()
    size = len(tokens) + 2 + 256 * with_bytes
    make_model(
        path,
        # All in one sentence: SentencePiece drops line ends at the end of a sentence.
        ["".join(sorted(tokens))],
        model_type="char",
        vocab_size=size,
        byte_fallback=with_bytes,
        character_coverage=1.0,
        unk_id=0,
        eos_id=1,
        bos_id=-1,
        max_sentence_length=8 * size,  # bytes
    )


def texts_of(cfg: PrepareConfig, chunk: Chunk) -> tuple[list[str], Tally]:
    """Return the documents of a chunk, and the counts."""
    tally = Tally()
    return ["".join(document.texts) for document in documents(chunk, cfg, tally)], tally


def characters_of(cfg: PrepareConfig, chunk: Chunk) -> tuple[set[str], Tally]:
    """Return the characters of a chunk, and the counts."""
    texts, tally = texts_of(cfg, chunk)
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
    for texts in map_chunks(READING, partial(texts_of, cfg), cfg, sources, workers, Tally()):
        for text in texts:
            for start in range(0, len(text), SAMPLE_LENGTH):
                excerpt = text[start : start + SAMPLE_LENGTH]
                if seen < capacity:
                    sample.append(excerpt)
                elif (slot := rng.randrange(seen + 1)) < capacity:
                    sample[slot] = excerpt
                seen += 1
    return sample

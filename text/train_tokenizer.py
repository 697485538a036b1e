"""The tokenizer of a data set: the one that --tokenizer names, or a SentencePiece trained here."""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from configurator import UserError
from hardware.disk import file_sha256, json_bytes, remove_only, sealed, unseal, write_whole
from text.dataset import find_tokenizer, tokenizer_folder
from text.encode import in_order, progress_bar, texts_of
from text.folders import WORK, fingerprint
from text.hf_tokenizer import hugging_face_files
from text.look import no_documents
from text.records import Tally
from text.settings import PrepareConfig, check_bad, cleaning, foreseen, reader_of, what_is_read
from text.sources import Source
from text.tokenizer import SentencePiece

SAMPLE_LENGTH = 4000  # characters of one piece of the sample that a tokenizer is trained on


def make_tokenizer(cfg: PrepareConfig, sources: list[Source], workers: int, folder: Path) -> dict:
    """Save the tokenizer that --tokenizer names in `folder`; return its description for meta.json.

    If an interrupted run has already trained this tokenizer, it is used again.
    """
    key = None  # identifies the input and the settings of a tokenizer that is trained here
    ready = None
    came_with = {}  # the files for Hugging Face's tools that lie beside the tokenizer
    if cfg.tokenizer == "train":
        files = [s.same_file() for s in sources]
        key = fingerprint([cfg.vocab_size, cfg.train_mb, what_is_read(cfg), files])
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
    tokenizer = ready or SentencePiece(train_sentencepiece(cfg, sources, workers, folder))
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


def train_sentencepiece(
    cfg: PrepareConfig, sources: list[Source], workers: int, folder: Path
) -> Path:
    """Train a BPE tokenizer that can reproduce every text; return its file.

    It does not normalise texts, it keeps spaces, and it writes a character outside the vocabulary
    as the bytes of its UTF-8.
    """
    import sentencepiece

    sample = sample_pieces(cfg, sources, workers)
    path = folder / SentencePiece.file
    try:
        with open(path, "wb") as f:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(sample),
                model_writer=f,
                model_type="bpe",
                vocab_size=cfg.vocab_size,
                byte_fallback=True,
                character_coverage=0.9995,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=False,
                allow_whitespace_only_pieces=True,  # indentation can be one token
                split_digits=True,
                max_sentence_length=8 * SAMPLE_LENGTH,  # bytes
                num_threads=16,  # a fixed number: the model file records it
                minloglevel=2,
            )
    except (RuntimeError, ValueError) as e:
        reason = str(e).split("] ")[-1]  # its text is "Internal: file(line) [condition] reason"
        what = f"--vocab_size={cfg.vocab_size}: SentencePiece cannot train on this input"
        raise UserError(f"{what}: {reason}") from None
    return path


def sample_pieces(cfg: PrepareConfig, sources: list[Source], workers: int) -> list[str]:
    """Read the whole input and return a uniform random sample of it, train_mb million characters.

    The sample consists of pieces of SAMPLE_LENGTH characters, and only the sample is in memory:
    reservoir sampling, Vitter's algorithm R.
    """
    rng = random.Random(0)
    capacity = cfg.train_mb * 1_000_000 // SAMPLE_LENGTH
    sample: list[str] = []
    seen = 0  # pieces so far
    tally = Tally()
    total = sum(s.bytes for s in sources)
    chunks = reader_of(sources, cfg).chunks()
    with progress_bar("reading for the tokenizer", total) as bar:
        for chunk, (texts, counts) in in_order(partial(texts_of, cleaning(cfg)), chunks, workers):
            tally.add(counts)
            check_bad(tally, cfg, foreseen(tally, chunk, total))
            for piece in pieces_of(texts):
                if len(sample) < capacity:
                    sample.append(piece)
                else:
                    slot = rng.randrange(seen + 1)
                    if slot < capacity:
                        sample[slot] = piece
                seen += 1
            bar.update(chunk.bytes_read - bar.n)
    if not sample:
        raise UserError(no_documents(tally))
    check_bad(tally, cfg, tally.records)
    return sample


def pieces_of(texts: list[str]) -> Iterator[str]:
    for text in texts:
        for begin in range(0, len(text), SAMPLE_LENGTH):
            yield text[begin : begin + SAMPLE_LENGTH]

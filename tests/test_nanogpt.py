"""prepare.py takes over data sets of nanoGPT."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from conftest import call
from test_prepare import all_texts

import prepare
from text import nanogpt
from text.dataset import load_tokenizer, open_dataset, open_split

TEXT = "First Citizen:\n我们走吧。 Speak, speak.\n" * 30
CHARACTERS = {i: c for i, c in enumerate(sorted(set(TEXT)))}


def nanogpt_set(folder: Path) -> Path:
    """Write the three files as nanoGPT's data/shakespeare_char/prepare.py does."""
    folder.mkdir()
    number = {c: i for i, c in CHARACTERS.items()}
    ids = np.array([number[c] for c in TEXT], np.uint16)
    cut = int(0.9 * len(ids))
    ids[:cut].tofile(folder / "train.bin")
    ids[cut:].tofile(folder / "val.bin")
    content = dict(vocab_size=len(number), itos=CHARACTERS, stoi=number)
    (folder / "meta.pkl").write_bytes(pickle.dumps(content))
    return folder


def take_over(folder: Path) -> Path:
    call(prepare.main, "--input", folder, "--name=taken", f"--data_dir={folder.parent}")
    return folder.parent / "taken"


def test_a_character_set_keeps_its_ids_and_texts(tmp_path):
    source = nanogpt_set(tmp_path / "chars")
    taken = take_over(source)
    meta, tokenizer = open_dataset(taken), load_tokenizer(taken)
    eos = len(CHARACTERS)
    assert (meta["vocab_size"], meta["eos_id"]) == (eos + 1, eos)
    for split in ("train", "val"):
        theirs = np.fromfile(source / f"{split}.bin", "<u2").tolist()
        assert open_split(taken, meta, split).tolist() == [*theirs, eos]
    assert "".join(all_texts(taken)) == TEXT
    assert "".join(map(CHARACTERS.get, tokenizer.encode(TEXT).tolist())) == TEXT
    counts = meta["splits"]["train"]
    part = TEXT[: int(0.9 * len(TEXT))]
    assert (counts["characters"], counts["bytes"]) == (len(part), len(part.encode()))


@pytest.mark.parametrize("step", [1, 50, 1 << 24])
def test_documents_between_eos_are_counted_in_any_steps(tmp_path, monkeypatch, step):
    monkeypatch.setattr(nanogpt, "STEP", step)
    source = nanogpt_set(tmp_path / "chars")
    eos = len(CHARACTERS)
    ids = np.array(([1, 2, 3, eos] * 40 + [eos, 4]) * 3, np.uint16)
    ids.tofile(source / "train.bin")
    taken = take_over(source)
    meta = open_dataset(taken)
    assert open_split(taken, meta, "train").tolist() == [*ids.tolist(), eos]
    counts = meta["splits"]["train"]
    assert (counts["documents"], counts["characters"]) == (124, 3 * 121)
    assert meta["lengths"]["max"] == meta["splits"]["val"]["tokens"]


class Executes:
    def __reduce__(self):
        return print, ("executed",)


def test_damaged_files_are_refused_and_nothing_is_executed(tmp_path, refuses, capsys):
    source = nanogpt_set(tmp_path / "chars")
    for name, content in (
        ("meta.pkl", pickle.dumps({"itos": Executes()})),
        ("meta.pkl", b"\x80"),
        ("meta.pkl", pickle.dumps({"itos": {0: "a", 1: "b"}})),
        ("val.bin", b""),
        ("train.bin", b"abc"),
    ):
        kept = (source / name).read_bytes()
        (source / name).write_bytes(content)
        assert str(source) in refuses(lambda: take_over(source))
        (source / name).write_bytes(kept)
    assert "executed" not in capsys.readouterr().out

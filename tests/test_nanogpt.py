"""prepare.py takes over data sets of nanoGPT."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import POINTERS, call
from test_prepare import all_texts

import prepare
import sample
import train
from model import GPT, PRESETS, GPTConfig
from text import nanogpt
from text.dataset import load_tokenizer, open_dataset, open_split
from training.checkpoint import newest_checkpoint
from training.huggingface import GPT2, from_pretrained, to_state

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


def test_options_without_effect_are_named(tmp_path, capsys):
    options = ["--name=taken", f"--data_dir={tmp_path}", "--tokenizer=char", "--val_fraction=0.5"]
    call(prepare.main, "--input", nanogpt_set(tmp_path / "chars"), *options)
    assert "tokenizer, val_fraction has no effect" in capsys.readouterr().err


def test_an_alphabet_without_latin_letters_is_taken_over(tmp_path, refuses):
    source = nanogpt_set(tmp_path / "chars")
    (source / "meta.pkl").write_bytes(pickle.dumps({"itos": dict(enumerate("一二三四五"))}))
    for split in ("train", "val"):
        np.array([0, 1, 2, 3, 4] * 100, np.uint16).tofile(source / f"{split}.bin")
    assert "".join(all_texts(take_over(source))) == "一二三四五" * 200
    options = [
        "--dataset=taken",
        f"--data_dir={tmp_path}",
        "--max_steps=1",
        "--sample_prompt=Z",
        "--block_size=32",
    ]
    assert "sample_prompt" in refuses(train.main, *options, f"--out_dir={tmp_path / 'out'}")


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


def test_a_character_checkpoint_of_nanogpt_continues(tmp_path, prints):
    """Its vocabulary grows by the eos; all else is as it was. It writes text as it is."""
    taken = take_over(nanogpt_set(tmp_path / "chars"))
    shape = dict(n_layer=1, n_head=2, n_embd=16, block_size=32, vocab_size=len(CHARACTERS))
    model = GPT(GPTConfig(**PRESETS["gpt2"], **shape, d_ff=64))
    model.init_weights("gpt2")
    stored = {
        name: w.t() if w.dim() == 2 and ".h." in name else w
        for name, w in to_state(GPT2, model.config, dict(model.named_parameters())).items()
    }
    path = tmp_path / "ckpt.pt"
    torch.save({"model": stored, "model_args": shape | {"bias": True, "dropout": 0.0}}, path)
    sampled = ["--prompt=我们走吧", "--max_new_tokens=9", f"--tokenizer={taken}"]
    text = prints(sample.main, f"--ckpt={path}", *sampled)
    assert "我们走吧" in text and set(text.split("我们走吧")[1].strip()) <= set(TEXT)
    options = [f"--data_dir={tmp_path}", f"--out_dir={tmp_path / 'out'}", f"--init_from={path}"]
    options += ["--dataset=taken", "--lr=1e-30", "--max_steps=2", "--batch_size=2"]
    options += ["--peak_tflops=1"]
    call(train.main, *options, "--batch_tokens=64", "--eval_tokens=64", "--compile=false")
    tuned = from_pretrained(newest_checkpoint(tmp_path / "out" / "run" / "ckpt"))
    assert tuned.config.vocab_size == len(CHARACTERS) + 1
    n = len(CHARACTERS)  # of an embedding, the rows after them are padding
    ours = {k: w[:n] if w.size(0) == 128 else w for k, w in model.state_dict().items()}
    for name, w in tuned.state_dict().items():
        assert torch.allclose(w[: len(ours[name])], ours[name]), name
    assert load_tokenizer(taken).vocab_size == tuned.config.vocab_size


class Executes:
    def __reduce__(self):
        return print, ("executed",)


def test_damaged_files_are_refused_and_nothing_is_executed(tmp_path, refuses, capsys):
    source = nanogpt_set(tmp_path / "chars")
    for name, content in (
        ("meta.pkl", pickle.dumps({"itos": Executes()})),
        ("meta.pkl", b"\x80"),
        ("meta.pkl", pickle.dumps({"itos": {0: "a", 1: "b"}})),
        ("meta.pkl", pickle.dumps({"itos": CHARACTERS | {0: "a", 1: "a"}})),
        ("meta.pkl", pickle.dumps({"itos": {n + n // 5: c for n, c in CHARACTERS.items()}})),
        ("meta.pkl", pickle.dumps({"itos": {float(n): c for n, c in CHARACTERS.items()}})),
        ("meta.pkl", pickle.dumps({"itos": {n: chr(n + 0x10000) for n in range(65_535 + 1)}})),
        ("meta.pkl", pickle.dumps({"itos": CHARACTERS | {0: ""}})),
        ("meta.pkl", pickle.dumps({"itos": CHARACTERS | {0: "ab"}})),
        ("meta.pkl", pickle.dumps({"itos": CHARACTERS | {-1: "Z"}})),
        ("meta.pkl", pickle.dumps({"itos": {}})),
        ("meta.pkl", pickle.dumps({"itos": list(CHARACTERS.values())})),
        ("meta.pkl", POINTERS[0][0].encode()),
        ("val.bin", POINTERS[0][0].encode()),
        ("train.bin", POINTERS[1][0].encode()),
        ("val.bin", b""),
        ("train.bin", b"abc"),
    ):
        kept = (source / name).read_bytes()
        (source / name).write_bytes(content)
        assert str(source) in refuses(lambda: take_over(source))
        (source / name).write_bytes(kept)
    assert "executed" not in capsys.readouterr().out

"""nanoGPT's files: a checkpoint of characters goes on; a data set is prepared from its text."""

import base64
from pathlib import Path

import pytest
import torch
from conftest import call
from test_huggingface import as_nanogpt

import prepare
import sample
import train
from model import GPT, PRESETS, GPTConfig
from text.dataset import load_tokenizer
from training.huggingface import from_pretrained
from training.run_folder import newest_checkpoint

TEXT = "First Citizen:\nSpeak, speak.\n" * 30
CHARACTERS = sorted(set(TEXT))


@pytest.mark.parametrize("others", [[], ["meta.pkl"], ["meta.pkl", "input.txt", "readme.md"]])
def test_token_ids_of_nanogpt_are_refused_and_its_text_is_named(others, tmp_path, refuses):
    source = tmp_path / "shakespeare_char"
    source.mkdir()
    for name in ("train.bin", "val.bin", *others):
        Path(source, name).write_text(TEXT)
    for folder in (source, tmp_path):
        options = ["--input", folder, "--name=a", f"--data_dir={tmp_path / 'data'}"]
        assert "input.txt" in refuses(prepare.main, *options)


def test_a_character_checkpoint_of_nanogpt_continues(tmp_path, prints, refuses):
    """Its vocabulary grows by the eos; all else is as it was. It writes text as it is."""
    tokenizer = tmp_path / "chars.tiktoken"  # as docs/interchange.md makes it
    lines = [f"{base64.b64encode(c.encode()).decode()} {i}\n" for i, c in enumerate(CHARACTERS)]
    tokenizer.write_text("".join(lines))
    (tmp_path / "input.txt").write_text(TEXT)
    options = ["--input", tmp_path / "input.txt", f"--tokenizer={tokenizer}"]
    call(prepare.main, *options, "--name=chars", "--val_fraction=0.1", f"--data_dir={tmp_path}")
    n = len(CHARACTERS)
    shape = dict(n_layer=1, n_head=2, n_embd=16, block_size=32, vocab_size=n)
    model = GPT(GPTConfig(**PRESETS["gpt2"], **shape, d_ff=64))
    path = tmp_path / "ckpt.pt"
    content = {"model": as_nanogpt(model), "model_args": shape | {"bias": True, "dropout": 0.0}}
    torch.save(content, path)
    sampled = ["--prompt=Speak", "--max_new_tokens=9", f"--tokenizer={tokenizer}"]
    text = prints(sample.main, f"--ckpt={path}", *sampled)
    assert "Speak" in text and set(text.split("Speak", 1)[1].strip()) <= set(TEXT)
    options = [f"--data_dir={tmp_path}", f"--out_dir={tmp_path / 'out'}", f"--init_from={path}"]
    options += ["--dataset=chars", "--lr=1e-30", "--max_steps=2", "--batch_size=2"]
    options += ["--peak_tflops=1", "--batch_tokens=64", "--eval_tokens=64", "--compile=false"]
    assert "sample_prompt" in refuses(train.main, *options, "--sample_prompt=Z")
    call(train.main, *options)
    tuned = from_pretrained(newest_checkpoint(tmp_path / "out" / "run" / "ckpt"))
    assert load_tokenizer(tmp_path / "chars").vocab_size == tuned.config.vocab_size == n + 1
    # Of an embedding, the rows after the first n are padding.
    ours = {k: w[:n] if w.size(0) == 128 else w for k, w in model.state_dict().items()}
    for name, w in tuned.state_dict().items():
        assert torch.allclose(w[: len(ours[name])], ours[name]), name

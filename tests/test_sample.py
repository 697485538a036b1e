"""sample.py as a user calls it: which checkpoint, which prompt, where a text ends."""

import io
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import call, forge, prepared, saved, train_tiny
from safetensors.torch import load_file
from safetensors.torch import save as save_bytes

import configurator
import sample
from model import GPT
from text.dataset import load_tokenizer
from training.huggingface import from_pretrained


def run(out: Path, *options: str) -> None:
    """Run sample.py on the newest checkpoint under `out`."""
    call(sample.main, f"--out_dir={out}", "--device=cpu", *options)


def test_the_newest_or_the_best_checkpoint_is_taken_and_named(copied, tmp_path, capsys):
    with open(copied / "metrics.jsonl", "a") as f:  # as if the model had become worse
        f.write('{"step": 8, "val_loss": 99.5}\n')

    def taken(*options: str) -> str:
        run(tmp_path, "--max_new_tokens=1", *options)
        return capsys.readouterr().err.splitlines()[0]

    newest = f"step_00000008, the newest of {copied}"
    assert f"{newest}, validation loss 99.5000" in taken()
    best = f"step_00000004, the best of {copied}, validation loss "
    assert best in taken("--which=best") and best in taken("--which=best", f"--ckpt={copied}")
    (copied / "metrics.jsonl").unlink()
    assert newest in taken()
    with pytest.raises(configurator.UserError, match="--which=best"):
        taken("--which=best")


@pytest.mark.parametrize("lost", ["config.json", "tokenizer.model", "model.safetensors"])
def test_a_checkpoint_that_the_run_deletes_meanwhile_is_passed_over(
    copied, tmp_path, monkeypatch, capsys, refuses, lost
):
    def pruned(folder: Path) -> GPT:
        """The run deletes the files of step 8 in turn."""
        if folder.name == "step_00000008":
            for name in ("manifest.json", lost):
                (folder / name).unlink(missing_ok=True)
        return from_pretrained(folder)

    monkeypatch.setattr(sample, "from_pretrained", pruned)
    run(tmp_path, "--max_new_tokens=1")
    assert "step_00000004" in capsys.readouterr().err
    folder = copied / "ckpt" / "step_00000008"  # it was asked for by its name
    refuses(lambda: run(tmp_path, f"--ckpt={folder}"))


def test_too_many_at_once_is_one_line(finished, tiny_data, capsys):
    with pytest.raises(configurator.UserError, match="lower --num_samples"):
        run(finished.parent, f"--num_samples={10**11}")
    run(finished.parent, f"--eval={tiny_data / 'tiny'}", f"--batch_size={10**17}")
    assert "bits per byte" in capsys.readouterr().out


def test_streaming_never_splits_a_chinese_character(finished, monkeypatch):
    """The model answers in byte tokens of a Chinese text, but only whole characters are written."""
    text = "龘龙舞九天😀。"  # characters outside the tiny vocabulary
    ids = load_tokenizer(saved(finished)).encode(text)
    assert len(ids) > len(text)
    monkeypatch.setattr(sample, "generate", lambda *_, **how: (torch.tensor([i]) for i in ids))
    writes = []
    stdout = io.StringIO()
    stdout.write = writes.append
    monkeypatch.setattr("sys.stdout", stdout)
    run(finished.parent, "--prompt", "")
    assert "".join(writes) == text + "\n" and len(writes) > 5
    assert not any("\ufffd" in piece for piece in writes)


def test_a_seed_gives_one_text_whatever_else_is_made(finished, capsys, monkeypatch):
    """The logits are given: products of other shapes may be rounded in another way."""
    table = torch.randn(400, 400, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(GPT, "forward", lambda self, idx, cache: table[idx[:, -1]])

    def texts(*options: str) -> list[str]:
        run(finished.parent, "--max_new_tokens=30", "--temperature=1", "--top_p=1", *options)
        return re.split("-{16}.*\n", capsys.readouterr().out)

    [alone] = texts("--prompt", "the loop")
    assert texts("--prompt", "模型", "the loop")[1] == alone
    three = texts("--num_samples=3", "--prompt", "the loop")
    assert three[0] == alone and three[:2] == texts("--num_samples=2", "--prompt", "the loop")
    assert len({text.strip() for text in three}) == 3
    assert texts("--seed=2", "--prompt", "the loop") != [alone]


def test_each_prompt_is_continued_and_without_any_the_run_s_own(finished, tmp_path, capsys):
    run(finished.parent, "--prompt", "the loop", "模型", "--max_new_tokens=5")
    first, second = capsys.readouterr().out.split("----------------\n")
    assert first.startswith("the loop") and second.startswith("模型")
    folder = shutil.copytree(saved(finished), tmp_path / "ckpt")
    forge(folder, "train_config.json", b'{"sample_prompt": "the loop"}')
    for prompt in ([], ["--prompt", ""]):
        call(sample.main, f"--ckpt={folder}", "--device=cpu", *prompt)
        assert capsys.readouterr().out.startswith("the loop") == (prompt == [])


def test_characters_without_a_token_are_named(tmp_path, capsys):
    """Of a prompt of sample.py, and of sample_prompt in a run."""
    prepared(tmp_path, [{"text": "the loop reads"}] * 30, "--tokenizer=char")
    train_tiny(tmp_path, tmp_path, "--max_steps=1", "--sample_every=1", "--sample_prompt=the 日é")
    assert "'é', '日'" in capsys.readouterr().err
    configurator.note.cache_clear()  # it prints the same text once
    run(tmp_path, "--prompt", "the 日é", "--max_new_tokens=1")
    assert "'é', '日'" in capsys.readouterr().err


def test_a_prompt_beyond_the_window_is_refused_by_its_name(finished, tmp_path, trains, refuses):
    long = "loop " * 100
    assert "sample_prompt" in refuses(lambda: trains(f"--sample_prompt={long}", "--sample_every=4"))
    trains(f"--sample_prompt={long}", "--max_steps=1")  # without a sample, it does no harm
    folder = shutil.copytree(saved(finished), tmp_path / "ckpt")
    forge(folder, "train_config.json", json.dumps({"sample_prompt": long}).encode())
    assert "sample_prompt" in refuses(sample.main, f"--ckpt={folder}", "--device=cpu")


def test_interactive_answers_every_line_until_the_end_of_input(finished, capsys, monkeypatch):
    """One line is too long, and one was pasted in another encoding than the terminal's."""
    typed = f"the\n{'the loop ' * 300}\n".encode() + "模型\n".encode("gbk")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8"))
    with pytest.raises(SystemExit) as ended:
        configurator.run(lambda: run(finished.parent, "--interactive", "--max_new_tokens=5"))
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.count("tok/s") == 2 and said.count("error: the prompt has") == 1


@pytest.mark.parametrize("how", ["--temperature=0", "--top_k=5", "--top_p=0.9", "--top_p=1"])
def test_damaged_weights_are_one_line_and_never_a_made_up_token(finished, tmp_path, capsys, how):
    folder = Path(shutil.copytree(saved(finished), tmp_path / "damaged"))
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= 3e38
    forge(folder, "model.safetensors", save_bytes(weights))
    with pytest.raises(configurator.UserError, match="--dtype"):
        call(sample.main, f"--ckpt={folder}", "--device=cpu", how, "--prompt", "")
    assert capsys.readouterr().out == ""

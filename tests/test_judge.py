"""Multiple choice and perplexity, as EleutherAI's lm-evaluation-harness counts them."""

import json
import math
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import call, make_records, saved, write_jsonl

from bench import judge
from text.dataset import load_tokenizer
from text.shapes import record_text
from training.huggingface import from_pretrained

TASK = dict(output_type="multiple_choice", doc_to_text="question", doc_to_target="answer")
TASK |= dict(doc_to_choice="choices", metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}])


@pytest.fixture(scope="module")
def model(finished) -> Path:
    return saved(finished)


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    """A file of questions whose right answer is how a text goes on."""
    texts = [record_text(record)[0] for record in make_records(40, seed=5)]
    questions = []
    for i, text in enumerate(texts[:30]):
        words = text.split()
        choices = [" ".join(words[8:11]), " ".join(texts[-i - 1].split()[3:6]), "训练 the", "🙂 "]
        choices = choices[i % 4 :] + choices[: i % 4]
        question = " ".join(words[: 8 if i else 0]) + " " * (i % 3)  # the first one is empty
        questions.append(dict(question=question, choices=choices, answer=-i % 4))
    questions[1]["question"] *= 9  # longer than the model can see
    return write_jsonl(tmp_path_factory.mktemp("files") / "choices.jsonl", questions)


def ours(model: Path, file: Path, capsys) -> list[float]:
    capsys.readouterr()
    call(judge.main, str(file), f"--ckpt={model}", "--device=cpu")
    said = capsys.readouterr().out.removeprefix(f"{file}: ").removesuffix(f"{model}\n")
    return [float(number) for number in re.findall(r"\d+\.\d+", said)]


@pytest.mark.slow
def test_equals_lm_eval(model, questions, tmp_path, capsys, monkeypatch):
    lm_eval = pytest.importorskip("lm_eval", reason="needs the package lm-eval[hf]")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    data = dict(dataset_path="json", dataset_kwargs={"data_files": {"test": str(questions)}})
    content = json.dumps(TASK | data | dict(task="mine", test_split="test"))
    (tmp_path / "mine.yaml").write_text(content)  # JSON is YAML
    from lm_eval.tasks import TaskManager

    results = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={model},cache_dir={tmp_path}",
        tasks=["mine"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        device="cpu",
        batch_size=1,
    )["results"]["mine"]
    keys = ("acc_norm,none", "acc_norm_stderr,none", "acc,none", "acc_stderr,none")
    expected = [results[key] for key in keys]
    assert ours(model, questions, capsys) == pytest.approx(expected, abs=5.1e-5)


def test_accuracies_count_the_likeliest_answers(model, tmp_path, capsys, monkeypatch):
    """And by letter: acc_norm. Given are the number of the right choice, and ln p of both."""
    rows = [(0, -1, -2), (0, -1, -2), (1, -1, -2), (1, -3, -2), (0, -1, -9)]
    likelihoods = Mock(side_effect=[float(x) for _, *both in rows for x in both])
    monkeypatch.setattr(judge, "log_likelihood", likelihoods)
    asked = [dict(question="?", choices=["a", "bbbb"], answer=right) for right, *_ in rows]
    found = ours(model, write_jsonl(tmp_path / "q.jsonl", asked), capsys)
    expected = [0.6, math.sqrt(0.6 * 0.4 / 4), 0.8, math.sqrt(0.8 * 0.2 / 4)]
    assert found == pytest.approx(expected, abs=5.1e-5)


@pytest.mark.parametrize("text", ["the loop 模型", "the loop 模型 " * 30], ids=["short", "windows"])
def test_bits_per_byte_of_a_text(text, model, tmp_path, capsys):
    [bits] = ours(model, write_jsonl(tmp_path / "one.jsonl", [{"text": text}]), capsys)
    tokenizer = load_tokenizer(model)
    ids = [tokenizer.eos_id, *tokenizer.prefix, *tokenizer.encode(text)]
    gpt = from_pretrained(model).eval()
    T = gpt.config.block_size
    nats = 0.0
    for i in range(1, len(ids)):  # windows of T targets; the last one reaches back as far as T
        end = min(len(ids), 1 + ((i - 1) // T + 1) * T)
        logits = gpt(torch.tensor([ids[max(0, end - T - 1) : i]]))
        nats -= logits.log_softmax(-1)[0, ids[i]].item()
    assert bits == pytest.approx(nats / math.log(2) / len(text.encode()), abs=5.1e-5)

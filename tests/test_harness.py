"""Multiple choice and perplexity, as EleutherAI's lm-evaluation-harness counts them."""

import json
import os
import re
from pathlib import Path

import pytest
from conftest import call, make_records, train_tiny, write_jsonl

import sample
from text.records import record_text
from training.runs import newest_checkpoint

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
"""
CHOICES = """
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
TEXTS = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""
CPU = ["--device=cpu", "--dtype=float32"]


@pytest.fixture(scope="module")
def model(tiny_data, tmp_path_factory) -> Path:
    run = train_tiny(tiny_data, tmp_path_factory.mktemp("model"), "--max_steps=30")
    return newest_checkpoint(run / "ckpt")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """Questions whose right answer is how a text goes on, and texts longer than a window."""
    folder = tmp_path_factory.mktemp("files")
    texts = [record_text(record)[0] for record in make_records(40, seed=5)]
    questions = []
    for i, text in enumerate(texts[:30]):
        words = text.split()
        other = texts[-i - 1].split()
        choices = [" ".join(words[8:11]), " ".join(other[3:6]), "训练 the loop", "🙂 "]
        choices = choices[i % 4 :] + choices[: i % 4]
        question = " ".join(words[:8]) + " " * (i % 3)
        questions.append(dict(question=question, choices=choices, answer=-i % 4))
    questions[0]["question"] *= 9  # longer than the model can see
    questions[1]["question"] = ""
    of_texts = [{"text": text} for text in (*texts, "  a text in space \n")]
    return {
        "choices": write_jsonl(folder / "choices.jsonl", questions),
        "texts": write_jsonl(folder / "texts.jsonl", of_texts),
    }


def ours(model: Path, what: str, file: Path, capsys) -> list[float]:
    capsys.readouterr()
    call(sample.main, f"--ckpt={model}", "--eval", f"--{what}={file}", *CPU)
    said = capsys.readouterr().out.removeprefix(f"{file}: ").removesuffix(f"{model}\n")
    return [float(number) for number in re.findall(r"\d+\.\d+", said)]


@pytest.mark.slow
def test_the_harness_says_the_same_to_four_digits(model, files, tmp_path, capsys, monkeypatch):
    lm_eval = pytest.importorskip("lm_eval", reason="needs the packages lm-eval and accelerate")
    pytest.importorskip("accelerate", reason="needs the packages lm-eval and accelerate")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setitem(os.environ, name, "1")
    for name, task in (("choices", CHOICES), ("texts", TEXTS)):
        content = TASK.format(name=f"my_{name}", file=files[name]) + task
        (tmp_path / f"{name}.yaml").write_text(content)
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={model},cache_dir={tmp_path}",
        tasks=["my_choices", "my_texts"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        device="cpu",
        batch_size=1,
    )["results"]
    keys = ("acc_norm,none", "acc_norm_stderr,none", "acc,none", "acc_stderr,none")
    choices = [found["my_choices"][key] for key in keys]
    assert ours(model, "choices", files["choices"], capsys) == pytest.approx(choices, abs=5.1e-5)
    keys = ("bits_per_byte,none", "byte_perplexity,none", "word_perplexity,none")
    texts = [found["my_texts"][key] for key in keys]
    said = ours(model, "texts", files["texts"], capsys)
    assert said == pytest.approx(texts, rel=1e-5, abs=5.1e-5)


def test_a_model_that_knows_the_texts_answers_more_than_chance(model, files, capsys):
    accuracy, error, *_ = ours(model, "choices", files["choices"], capsys)
    assert accuracy > 0.25 and 0 < error < 0.1


WRONG = {
    '{"question": "a"}': "line 2: expected {",
    '{"question": "a", "choices": ["b", ""], "answer": 0}': "none of them empty",
    '{"question": "a", "choices": ["b"], "answer": 0}': "two choices or more",
    '{"question": "a", "choices": ["b", "c"], "answer": 2}': "answer=2 is not the number of a",
    '{"question": "a", "choices": ["b", "c"], "answer": true}': "answer=True is not the number",
    '{"question": "\\ud83d", "choices": ["b", "c"], "answer": 0}': "line 2: it has no tokens",
    '["a"]': "line 2: expected an object",
    "{": "line 2: not JSON",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_line_is_named(line, model, tmp_path, refuses):
    good = json.dumps({"question": "a", "choices": ["b", "c"], "answer": 1})
    path = tmp_path / "q.jsonl"
    path.write_text(f"{good}\n{line}\n")
    assert WRONG[line] in refuses(sample.main, f"--ckpt={model}", f"--choices={path}", *CPU)


def test_a_choice_that_the_model_cannot_see_whole_and_files_without_content_are_refused(
    model, tmp_path, refuses
):
    path = tmp_path / "q.jsonl"
    long = json.dumps({"question": "a", "choices": ["b", "loop " * 99], "answer": 1})
    path.write_text(long)
    options = [f"--ckpt={model}", *CPU]
    assert "the model sees 32" in refuses(sample.main, *options, f"--choices={path}")
    path.write_text("\n")
    assert "it has no questions" in refuses(sample.main, *options, f"--choices={path}")
    assert "it has no texts" in refuses(sample.main, *options, f"--texts={path}")
    assert "No such file" in refuses(sample.main, *options, f"--texts={tmp_path / 'none'}")
    assert "--eval=data/NAME" in refuses(sample.main, *options, "--eval")
    both = [f"--texts={path}", f"--choices={path}"]
    assert "give one of" in refuses(sample.main, *options, *both)

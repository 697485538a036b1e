"""Conversations: read from every form, learned by their answers alone, in every kind of window."""

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_records, metrics, prepared, resumes, train_on, train_tiny
from test_chat_folder import conversations
from test_prepare import all_texts

import train
from model import GPT, PRESETS, GPTConfig
from text.chat import answer_bounds, chatml_ids
from text.dataset import (
    load_tokenizer,
    open_dataset,
    open_datasets,
    open_split,
    open_windows,
    train_loader,
)
from text.hf_tokenizer import CHATML, to_hugging_face
from text.packing import LossWeights
from text.report import document_texts
from text.tokenizer import IM_END, IM_START
from text.windows import Loader
from training.banner import fraction_without_target
from training.batches import to_batch

QUESTION, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
SYSTEM = {"role": "system", "content": "Be kind."}


@pytest.fixture(scope="module")
def chat_data(tiny_data, tmp_path_factory) -> Path:
    """A folder of data sets with `tiny`, and with `chat`: conversations with the same tokenizer."""
    root = tmp_path_factory.mktemp("chat")
    options = ["--name=chat", f"--data_dir={tiny_data}", f"--tokenizer={tiny_data / 'tiny'}"]
    prepared(root, [{"messages": m} for m in conversations(300, special=True)], *options)
    return tiny_data


def chats(tiny_data: Path, folder: Path, records: list[dict], *options: str) -> Path:
    """Make a data set with the tokenizer of `tiny`."""
    usual = [f"--tokenizer={tiny_data / 'tiny'}", "--val_fraction=0.5"]
    return prepared(folder, records, *usual, *options)


def talk(*messages, **others) -> dict:
    return {"messages": list(messages), **others}


# -- records --

RENDERED = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nSo.<|im_end|>\n"


def test_what_says_do_not_learn_this_is_not_learned(tiny_data, tmp_path):
    """The answers of a conversation that are not to be learned stay before those that are."""
    no = [{"label": False}, {"weight": 0}, {"weight": "0"}, {"train": "False"}]
    records = [talk(QUESTION, ANSWER, **flag) for flag in no]
    records += [talk(QUESTION, ANSWER | {"loss": False})]
    records += [talk(QUESTION, ANSWER | flag, QUESTION, ANSWER) for flag in no]
    records += [talk(QUESTION, ANSWER, label=True, weight=1)] * 4
    # So few documents are split by tokens: they stay in their order, and the last are val.bin.
    folder = chats(tiny_data, tmp_path, records, "--val_fraction=0.05")
    meta, tokenizer = open_dataset(folder), load_tokenizer(folder)
    assert list(meta["records"]["dropped"].values()) == [5]
    answer = len(tokenizer.encode("So.")) + 1
    assert sum(s["answers"]["tokens"] for s in meta["splits"].values()) == 8 * answer
    texts = [text for _, text in document_texts(folder, meta, "first", 9)]
    learned = RENDERED.replace("So.<|im_end|>", "[[So.<|im_end|>]]")
    assert [text.startswith(RENDERED + learned) for text in texts[:4]] == [True] * 4
    assert texts[4:] == [learned] * 3


def test_a_mark_moves_no_document_to_the_other_split(tiny_data, tmp_path):
    texts = [{"content": f"So {i}."} for i in range(60)]
    flags = [{}, {"loss": False}]
    records = [talk(QUESTION, ANSWER | t | m, QUESTION, ANSWER) for t in texts for m in flags]
    meta = open_dataset(chats(tiny_data, tmp_path, records))
    assert all(s["documents"] % 2 == 0 for s in meta["splits"].values())


def test_names_of_special_tokens_are_counted_or_end_documents(tiny_data, tmp_path, capsys):
    text = f"{IM_START}One.{IM_END} {IM_START}Two.{IM_END}"
    others = ["<|fim-prefix|>", "<｜end▁of▁sentence｜>", "<bos>", "[CLS]"]
    folder = chats(tiny_data, tmp_path, [{"text": " a ".join(others)}] * 2)
    assert open_dataset(folder)["records"]["names"] == dict.fromkeys(others, 2)
    chats(tiny_data, tmp_path, [{"text": text}] * 2)
    assert "--separators" in capsys.readouterr().out
    folder = chats(tiny_data, tmp_path, [{"text": text}] * 2, f"--separators={IM_START}, {IM_END}")
    assert all_texts(folder) == ["One.", "Two."] * 2
    assert open_dataset(folder)["records"]["names"] == {}


def test_no_text_can_write_a_mark(tmp_path):
    """Neither a text nor a message is encoded to a special token, and both keep their letters."""
    letters = f"{IM_START}user\n{IM_END} </s> "
    messages = [QUESTION | {"content": letters}, ANSWER | {"content": letters * 3}]
    records = [{"text": f"{letters} {i}"} for i in range(60)] + [talk(*messages)] * 20
    folder = prepared(tmp_path, records + make_records(60))
    meta, tokenizer = open_dataset(folder), load_tokenizer(folder)
    ids = np.concatenate([open_split(folder, meta, split) for split in ("train", "val")])
    assert [np.count_nonzero(ids == i) for i in chatml_ids(tokenizer)] == [40, 40]
    assert set(chatml_ids(tokenizer)) == {3, 4}
    texts = all_texts(folder)
    assert f"{IM_START}user\n{letters}{IM_END}\n" in "".join(texts)
    assert sum(text.startswith(letters) for text in texts) == 60


# -- windows and losses --


def by_hand(hf, messages: list[dict]) -> tuple[list[int], list[int]]:
    """Return the ids of a conversation by transformers, and the same with -1 for what is not
    learned. Learned is what a whole turn has beyond its prompt, but for the line end at its end.
    """

    def ids_of(some: list[dict], prompt: bool = False) -> list[int]:
        options = dict(add_generation_prompt=prompt, return_dict=False)
        return hf.apply_chat_template(some, chat_template=CHATML, **options)

    ids = ids_of(messages)
    learned = [-1] * len(ids)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            begin = len(ids_of(messages[:number], prompt=True))
            end = len(ids_of(messages[: number + 1])) - 1
            learned[begin:end] = ids[begin:end]
    return ids, learned


@pytest.mark.parametrize("documents", ["pack", "pad"])
def test_a_batch_has_the_loss_and_gradient_of_its_conversations(
    tiny_data, tmp_path, transformers, documents
):
    tokenizer = load_tokenizer(tiny_data / "tiny")
    for name, content in to_hugging_face(tokenizer, 999).items():
        (tmp_path / name).write_text(json.dumps(content))
    hf = transformers.AutoTokenizer.from_pretrained(tmp_path)

    talks = conversations(40, seed=2)
    chats(tiny_data, tmp_path / "data", [talk(*m) for m in talks], "--val_fraction=0.3")
    T = 1024
    shape = PRESETS["qwen3"] | dict(n_layer=2, n_head=2, n_embd=32, block_size=T)
    torch.manual_seed(0)
    model = GPT(GPTConfig(**shape, vocab_size=400), "xavier").double()
    [data] = open_datasets("tiny", tmp_path / "data")
    total = 0.0
    for split in ("train", "val"):
        windows = open_windows(data, split, T, documents=documents, loss_on="answers")
        assert not windows.cut
        loader = Loader([windows], [Fraction(1)])
        rows = loader.rows([(0, start) for start in windows.fixed_starts(0)])
        x, y, weights, eos = to_batch(rows, torch.device("cpu"))
        total = total + model(x, y, weights.double(), eos, reduction="sum")
    total.backward()
    gradient = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    alone = 0.0
    for messages in talks:
        ids, learned = by_hand(hf, messages)
        x, y = torch.tensor([[tokenizer.eos_id, *ids]]), torch.tensor([[*learned, -1]])
        alone = alone + model(x, y, reduction="sum")
    alone.backward()
    torch.testing.assert_close(total, alone, rtol=1e-6, atol=0, check_dtype=False)
    for p, g in zip(model.parameters(), gradient, strict=True):
        assert (g - p.grad).norm() <= 1e-6 * p.grad.norm()  # norms and losses compute in fp32


@pytest.mark.parametrize("documents", ["stream", "mask"])
def test_windows_that_cut_conversations_learn_only_the_answers(chat_data, documents):
    [data] = open_datasets("chat", chat_data)
    ids = open_split(data.folder, data.meta, "train")
    windows = open_windows(data, "train", 64, documents=documents, loss_on="answers")
    times = np.zeros(len(ids), int)
    for start in windows.fixed_starts(0):
        np.add.at(times, windows.targets(start)[windows.weights(start) > 0], 1)
    tokenizer = load_tokenizer(data.folder)
    positions = np.flatnonzero(np.isin(ids, [data.meta["eos_id"], *chatml_ids(tokenizer)]))
    bounds = answer_bounds(ids, positions, tokenizer)
    is_answer = LossWeights(bounds, None).at(np.arange(len(ids))) > 0
    assert data.learned("train", "answers")["tokens"] == is_answer.sum()
    is_answer[(len(ids) - 1) // 64 * 64 + 1 :] = False  # windows end before
    assert (times == is_answer).all()


# -- runs --

ON_ANSWERS = ["--dataset=chat", "--loss_on=answers", "--block_size=64", "--batch_tokens=512"]


def test_a_run_on_answers_resumes_to_the_bit_and_stays_one(chat_data, tmp_path, refuses):
    """Its bits are those of a byte of the answers."""
    run = resumes(chat_data, tmp_path, *ON_ANSWERS, "--documents=pad")
    counts = open_datasets("chat", chat_data)[0].learned("val", "answers")
    loss, bits = metrics(run, "val_loss")[8], metrics(run, "val_bits_per_byte")[8]
    assert bits == pytest.approx(loss / np.log(2) * counts["tokens"] / counts["bytes"])
    # A baseline of all tokens is none for answers.
    assert "bigram" not in (run / "metrics.jsonl").read_text()
    other = [f"--out_dir={run.parent}", f"--run_name={run.name}", "--init_from=resume"]
    said = refuses(train.main, *other, f"--data_dir={chat_data}", "--loss_on=all")
    assert "loss_on" in said  # else their losses would be compared


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["none", "all"])
def test_two_processes_learn_answers_as_one_does(chat_data, tmp_path, shard):
    """Also where one of them has no answer in its windows."""
    options = [*ON_ANSWERS, "--documents=pack", "--grad_clip=0", "--batch_size=1"]
    options.append("--loss_per=document")  # so its weights are those of the whole step, too
    single = train_tiny(chat_data, tmp_path / "single", *options)
    options += [f"--shard={shard}", "--sample_every=8"]
    double = train_on(2, chat_data, tmp_path / "double", *options)
    for key in ("loss", "grad_norm", "val_loss", "val_document_loss"):
        assert metrics(double, key) == pytest.approx(metrics(single, key), rel=1e-4), key
    assert metrics(double, "sample").keys() == {8}


SHORT = ["--loss_on=answers", "--block_size=48", "--batch_size=1", "--batch_tokens=48"]


@pytest.mark.parametrize("documents", ["stream", "pack", "pad"])
def test_a_step_without_a_target_is_predicted_and_not_bad(tiny_data, tmp_path, documents):
    """It has no loss. Half of the 66 conversations are longer than any window."""
    questions = [f"{i} {'the loop ' * (90 if i % 2 else 1)}" for i in range(66)]
    chats(tiny_data, tmp_path, [talk(QUESTION | {"content": q}, ANSWER) for q in questions])
    options = [*SHORT, "--max_steps=60", "--eval_every=60", "--save_every=60"]
    run = train_tiny(tmp_path, tmp_path, *options, f"--documents={documents}")
    losses, without = metrics(run, "loss"), metrics(run, "targets")
    assert losses.keys() | without.keys() == set(range(1, 61)) and not metrics(run, "bad_steps")
    assert len(without) > 20 and not losses.keys() & without.keys() and min(losses.values()) > 0
    assert metrics(run, "tokens")[60] == 60 * 48
    loader = train_loader(open_datasets("tiny", tmp_path), 48, 1337, documents, loss_on="answers")
    assert fraction_without_target(loader) == pytest.approx(len(without) / 60, abs=0.15)


def test_no_answer_in_the_evaluated_windows_is_an_error(tiny_data, tmp_path, refuses):
    questions = [QUESTION | {"content": f"{i} {'the loop ' * 100}"} for i in range(8)]
    chats(tiny_data, tmp_path, [talk(q, ANSWER) for q in questions])
    refused = refuses(lambda: train_tiny(tmp_path, tmp_path, "--loss_on=answers"))
    assert "no answer of tiny" in refused

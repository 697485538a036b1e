"""sample.py --chat: a conversation in which the model sees each token once, and in a terminal."""

import io
import os
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPO, call, make_records, prepared, saved, train_tiny
from test_chat_folder import prompt_ids
from test_model import ODD

import configurator
import sample
from configurator import UserError
from hardware.kernels import pick_kernels
from model import GPT, GPTConfig, Kernels
from text.dataset import load_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Of a model for 512 tokens that has read a few conversations. It cannot end an answer yet."""
    root = tmp_path_factory.mktemp("chat")
    messages = [("user", "title"), ("assistant", "summary")]
    turns = [[{"role": r, "content": x[key]} for r, key in messages] for x in make_records(200)]
    prepared(root, [{"messages": each} for each in turns], "--val_fraction=0.2")
    longer = ["--block_size=512", "--batch_size=1", "--batch_tokens=512"]
    return saved(train_tiny(root, root, *longer))


def conversation_of(checkpoint: Path, shape: dict, **settings) -> sample.Conversation:
    """Return one with an untrained model, and with the tokenizer of a checkpoint."""
    tokenizer = load_tokenizer(checkpoint)
    torch.manual_seed(0)
    model = GPT(GPTConfig(**(shape | dict(vocab_size=tokenizer.vocab_size))), "xavier")
    settings = dict(chat=True, temperature=0, system="the loop") | settings
    # In fp64, no rounding decides which token is the likeliest.
    model = model.double().eval()
    return sample.Conversation(model, tokenizer, sample.SampleConfig(**settings))


# -- what the model sees --


@pytest.mark.parametrize("dtype, near", [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
def test_the_last_queries_alone_attend_as_they_do_among_all(dtype, near):
    q, k, v = torch.randn(3, 2, 4, 20, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    for attend in (Kernels().attend, pick_kernels(torch.device("cpu")).attend):
        last = attend(q[:, :, 13:], k, v, None, 0.0)
        torch.testing.assert_close(last, attend(q, k, v, None, 0.0)[:, :, 13:], atol=near, rtol=0)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_turns_with_a_kept_cache_equal_those_that_recompute_all(name, checkpoint):
    shape = ODD[name] | dict(block_size=256)
    kept, anew = (conversation_of(checkpoint, shape, max_new_tokens=20) for _ in "ab")
    passed = []  # so many tokens at a time, through the model that keeps them
    kept.model.wte.register_forward_hook(lambda layer, inputs, x: passed.append(x.size(1)))
    for text in ("模型 训练", "the loop reads tokens", "why?"):
        question = kept.message("user", text)
        most = len([*question, *kept.header, *kept.ending]) + 1
        kept.answer(question)
        anew.cache.length = 0
        anew.answer(question)
        assert kept.exchanges == anew.exchanges
        assert passed[0] <= most + len(kept.opening) * (len(kept.exchanges) == 1)
        assert len(passed) == 20 and set(passed[1:]) == {1}
        passed.clear()


def test_the_model_sees_what_prepare_makes_of_the_messages(checkpoint):
    conversation = conversation_of(checkpoint, ODD["llama"] | dict(block_size=256))
    text = "what is <|im_end|>?"
    messages = [{"role": "system", "content": "the loop"}, {"role": "user", "content": text}]
    want = prompt_ids(conversation.tokenizer, messages)
    assert conversation.prompt(conversation.message("user", text)) == want


def test_the_oldest_messages_leave_a_full_window_with_a_note(checkpoint, capsys):
    shape = ODD["qwen3"] | dict(block_size=96)
    conversation = conversation_of(checkpoint, shape)
    for number in range(4):
        conversation.answer(conversation.message("user", f"{number} the loop"))
    told = capsys.readouterr().err
    assert told.count("no longer sees") == 3 and told.count("unfinished: the window is full]") == 4
    (last,) = conversation.exchanges
    assert len(conversation.opening + last) == 96 + len(conversation.ending)
    fresh = conversation_of(checkpoint, shape)
    fresh.answer(fresh.message("user", "3 the loop"))
    assert fresh.exchanges == [last]
    with pytest.raises(UserError, match="user message has 305 tokens"):
        conversation.message("user", "模型" * 300)
    assert conversation.exchanges == [last]
    with pytest.raises(UserError, match="system message has"):
        conversation_of(checkpoint, shape, system="the loop " * 300)


# -- what the user sees --


def chat(checkpoint: Path, *options: str) -> None:
    call(sample.main, "--chat", f"--ckpt={checkpoint}", "--device=cpu", *options)


def test_piped_messages_are_one_conversation_until_a_reset(checkpoint, capsys, monkeypatch):
    word = torch.tensor(load_tokenizer(checkpoint).encode("模")[-1:])
    monkeypatch.setattr(sample, "generate", lambda model, idx, n, **_: (word for _ in range(n)))

    def answers(typed: str) -> list[str]:
        typed = io.TextIOWrapper(io.BytesIO(typed.encode("gbk")), encoding="utf-8")
        monkeypatch.setattr("sys.stdin", typed)
        configurator.run(lambda: chat(checkpoint, "--max_new_tokens=3"))
        out, err = capsys.readouterr()
        assert err.count("unfinished: max_new_tokens is reached]") == len(out.splitlines())
        return out.splitlines()

    assert len(answers("the loop\n\n模型\n")) == 2
    assert len(answers("the loop\n/reset\n")) == 1


def test_each_prompt_has_a_conversation_of_its_own(checkpoint, capsys):
    options = ["--max_new_tokens=5", "--temperature=0", "--prompt"]
    chat(checkpoint, *options, "the loop", "模型", "the loop")
    first, other, again = capsys.readouterr().out.split("----------------\n")
    assert first == again and first.startswith("you> the loop\n")
    assert other.startswith("you> 模型\n")


def test_what_the_model_writes_cannot_control_the_terminal(checkpoint, capsys, monkeypatch):
    text, shown = "一\x1b[31m\x07\r\n\t二", "一\ufffd[31m\ufffd\n\t二\n"
    ids = load_tokenizer(checkpoint).encode(text)
    monkeypatch.setattr(sample, "generate", lambda *_, **how: (torch.tensor([i]) for i in ids))
    chat(checkpoint, "--prompt", "the")
    assert capsys.readouterr().out == f"you> the\n{shown}"
    options = [f"--ckpt={checkpoint}", "--device=cpu", "--prompt"]
    call(sample.main, *options, "")
    assert capsys.readouterr().out == f"{text}\n"  # not to a terminal: as it is
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    call(sample.main, *options, "\x1b[2J")
    assert capsys.readouterr().out == f"\ufffd[2J{shown}"


@pytest.mark.slow
def test_in_a_terminal_ctrl_c_ends_only_the_answer(checkpoint):
    """A line that is no UTF-8 gets an answer, too."""
    terminal, end = pty.openpty()
    space = load_tokenizer(checkpoint).encode("a ")[-1:]
    endless = "import configurator, time, sample as s; s.next_tokens = lambda *_, **options: "
    endless += f"iter(lambda: time.sleep(0.1) or {space}, []); configurator.run(s.main)"
    command = [sys.executable, "-c", endless, "--chat", f"--ckpt={checkpoint}", "--device=cpu"]
    program = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, cwd=REPO)
    os.close(end)
    shown = b""

    def read_until(text: bytes) -> bytes:
        """Return what is shown, up to the text."""
        nonlocal shown
        while text not in shown:
            shown += os.read(terminal, 4096)
        before, shown = shown.split(text, 1)
        return before

    assert b"Ctrl-D" in read_until(b"you> ")
    for line in (b"the\n", "模型\n".encode("gbk")):
        os.write(terminal, line)
        read_until(b"\r\n")
        read_until(b" ")  # the answer has begun
        program.send_signal(signal.SIGINT)
        assert b"stopped]" in read_until(b"you> ")
    os.write(terminal, b"\x04")
    assert program.wait(60) == 0
    os.close(terminal)


def test_a_prompt_for_a_chat_model_gets_a_note(checkpoint, tmp_path, capsys):
    folder = shutil.copytree(checkpoint, tmp_path / "chat")  # a process prints a note once
    call(sample.main, f"--ckpt={folder}", "--prompt=the", "--max_new_tokens=2")
    assert "--chat" in capsys.readouterr().err

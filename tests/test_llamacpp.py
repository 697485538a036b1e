"""llama.cpp reads a checkpoint with what docs/interchange.md says.

These tests need llama.cpp: a folder with its sources and with three tools built by cmake:

    cd llama.cpp && cmake -B build
    cmake --build build --target llama-tokenize llama-completion llama-server
    LLAMA_CPP=/path/to/llama.cpp python -m pytest tests/test_llamacpp.py

The models are small and have random weights; the vocabularies are real.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import test_chat_folder as chats
import torch
from conftest import prepared, save_model
from test_hf_tokenizer import take_out_post_processor, write_files

from configurator import UserError
from model import GPT, PRESETS, GPTConfig
from text.dataset import load_tokenizer
from text.hf_tokenizer import to_hugging_face
from text.tokenizer import SentencePiece, Tiktoken
from text.train_tokenizer import write_alphabet

NO_SPACE = "--override-kv tokenizer.ggml.add_space_prefix=bool:false"
REFUSED = "the converter refuses it"
NO_POST = "a tokenizer.json without its post_processor"

TEXTS = [
    "", " ", "   ", "\n", "\n\n", "a", " a", "  a", "a  ", " a  b ", "end ", "end\n", "a\r\nb\r\n",
    "Hello, world", "the  loop\n\n\nreads", "I'm 'S don't'LL", "x\x01\x7f", "<x>",
    "从前有一座山，山里有座庙。", "（１２３）　全角", "中文English混合 text 文本", "a😀 👨‍👩‍👧‍👦",
    "\u00a0\u200b\ufeff", "0 12 345 6789 3.14159 2026-01-02", "naïve cafe\u0301 Привет こんにちは",
    "def f(x):\n\tif x:\n\t\treturn x\n\n    return None", "a->b::c(d)[e] += f;  // g\n",
]  # fmt: skip
PROMPTS = ["the loop", "从前", "x = 1;\n    y", " a", "😀"]


@pytest.fixture
def tokenizer(kind, tiny_data, tmp_path):
    """prepare.py's own tokenizers, or GPT-2's."""
    if kind == "sentencepiece":
        return load_tokenizer(tiny_data / "tiny")
    if kind in ("char", "byte"):
        path = tmp_path / "alphabet.model"
        write_alphabet(path, set("".join([*TEXTS, *PROMPTS])), with_bytes=kind == "byte")
        return SentencePiece(path)
    try:
        return Tiktoken.from_name("gpt2")
    except UserError as e:
        pytest.skip(str(e))


SHAPES = {
    "gpt2": PRESETS["gpt2"] | dict(mlp="gelu_tanh"),
    "llama": PRESETS["llama"] | dict(n_kv_head=2),
    "qwen3": PRESETS["qwen3"] | dict(n_kv_head=2),
    "qwen2": PRESETS["llama"] | dict(n_kv_head=2, qkv_bias=True),
    "llama, RoPE as llama3": PRESETS["llama"] | dict(rope_scaling="llama3:8,1,4,16"),
    "qwen2, RoPE as linear": PRESETS["llama"] | dict(qkv_bias=True, rope_scaling="linear:4"),
}


def make(preset: str, vocab_size: int) -> GPT:
    """Return a model with random weights, norms and biases, which predicts various tokens."""
    shape = dict(n_layer=2, n_head=4, n_embd=64, block_size=64, vocab_size=vocab_size)
    model = GPT(GPTConfig(**SHAPES[preset] | shape)).eval()
    rng = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        p.data = torch.randn(p.shape, generator=rng) * 0.12 + ("norm" in name and p.dim() == 1)
    return model


def save(model: GPT, tokenizer, folder: Path) -> Path:
    """Write those files of a checkpoint that llama.cpp reads."""
    folder.mkdir()
    save_model(model, folder, eos_id=tokenizer.eos_id, bos_id=tokenizer.prefix[0])
    tokenizer.save(folder)
    return write_files(folder, to_hugging_face(tokenizer, model.config.block_size))


def need(tokenizer, preset: str) -> str:
    """Return what docs/interchange.md says that a preset needs with this tokenizer."""
    preset = preset.partition(",")[0]
    if tokenizer.kind == Tiktoken.kind:
        return REFUSED if preset == "qwen2" else NO_POST
    return {"gpt2": REFUSED, "llama": ""}.get(preset, NO_SPACE)


# -- what llama.cpp does --

needs_llama_cpp = pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="needs llama.cpp")


def convert(folder: Path) -> Path | None:
    """Convert a checkpoint to GGUF. Return None if the converter does not know the tokenizer."""
    script = Path(os.environ["LLAMA_CPP"]) / "convert_hf_to_gguf.py"
    out = folder / "model.gguf"
    command = [sys.executable, script, folder, "--outfile", out, "--outtype", "f32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    if done.returncode and "BPE pre-tokenizer was not recognized" in done.stderr:
        return None
    assert done.returncode == 0, done.stderr[-2000:]
    return out


def tool(name: str, gguf: Path, *options) -> subprocess.CompletedProcess:
    command = [Path(os.environ["LLAMA_CPP"]) / "build" / "bin" / name, "-m", gguf, *options]
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def ids_of(gguf: Path, text: str) -> list[int]:
    prompt = gguf.with_name("prompt.txt")
    prompt.write_bytes(text.encode())
    done = tool("llama-tokenize", gguf, "-f", prompt, "--no-escape", "--ids", "--log-disable")
    return json.loads(done.stdout.splitlines()[-1])


def completes(text: bytes, gguf: Path, prompt: str, *options) -> bool:
    """Return whether one of five runs of llama-completion prints this text. On a busy machine, its
    output may lack the end although the exit code is 0.
    """
    exact = "-n 40 --temp 0 -no-cnv -t 1 -fa off -ctk f32 -ctv f32 --no-escape".split()
    runs = (tool("llama-completion", gguf, "-p", prompt, *exact, *options) for _ in range(5))
    return any(text in done.stdout + done.stderr for done in runs)


def greedy(model: GPT, tokenizer, prompt: str) -> bytes:
    """Return the prompt and its greedy continuation, until two tokens are about equally likely."""
    ids = [*tokenizer.prefix, *tokenizer.encode(prompt)]
    text = prompt.encode()
    while len(ids) < 40:
        with torch.no_grad():
            best = model(torch.tensor([ids]))[0].topk(2)
        token = int(best.indices[0])
        if token == tokenizer.eos_id or best.values[0] - best.values[1] < 0.01:
            break
        ids.append(token)
        text += tokenizer.token_bytes(token)
    return text.replace(b"\0", b"")  # printf in C does not print them


def continues_alike(gguf: Path, model: GPT, tokenizer, options: list[str]) -> list[bool]:
    texts = {prompt: greedy(model, tokenizer, prompt) for prompt in PROMPTS}
    return [completes(text, gguf, prompt, *options) for prompt, text in texts.items()]


@needs_llama_cpp
@pytest.mark.parametrize("kind", ["sentencepiece", "char", "byte", "gpt2"])
@pytest.mark.parametrize("preset", SHAPES)
def test_llama_cpp_reads_and_continues_texts_as_we_do(preset, kind, tokenizer, tmp_path):
    model = make(preset, tokenizer.vocab_size)
    folder = save(model, tokenizer, tmp_path / "ckpt")
    note = need(tokenizer, preset)
    gguf = convert(folder)
    if note == REFUSED:
        assert gguf is None
        return
    if note == NO_POST:
        assert gguf is None
        take_out_post_processor(folder)
        gguf = convert(folder)
    # llama-tokenize has no --override-kv. Where one is needed, it tokenizes as if without it.
    read = [" " + text if NO_SPACE in note and text else text for text in TEXTS]
    ours = [[*tokenizer.prefix, *tokenizer.encode(text)] for text in read]
    assert [ids_of(gguf, text) for text in TEXTS] == ours
    options = re.findall(r"--override-kv|tokenizer\.ggml\S+", note)
    assert all(continues_alike(gguf, model, tokenizer, options))
    if options:
        assert not any(continues_alike(gguf, model, tokenizer, []))


@contextmanager
def server(gguf: Path, *options: str) -> Iterator[Callable[..., dict]]:
    """Run llama-server; yield a function that sends it a request and returns the answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    exact = "-np 1 -t 1 -fa off -ctk f32 -ctv f32 --host 127.0.0.1 --port".split()
    program = Path(os.environ["LLAMA_CPP"]) / "build" / "bin" / "llama-server"

    def ask(path: str, **content) -> dict:
        url = f"http://127.0.0.1:{port}{path}"
        with urllib.request.urlopen(url, json.dumps(content).encode(), timeout=60) as reply:
            return json.load(reply)

    with open(gguf.with_name("server.log"), "wb") as log:
        command = [program, "-m", gguf, *exact, str(port), *options]
        running = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            for _ in range(300):
                try:
                    ask("/tokenize", content="a")
                    break
                except OSError:  # it does not listen yet, or loads the model
                    assert running.poll() is None, log.name
                    time.sleep(0.2)
            yield ask
        finally:
            running.terminate()
            running.wait()


@needs_llama_cpp
@pytest.mark.parametrize("preset", ["llama", "qwen3"])
def test_llama_cpp_chats_by_our_ids(preset, tmp_path, capsys):
    """The template is that of the GGUF file. llama.cpp takes the bos from it, and adds its own."""
    words = prepared(tmp_path / "words", chats.records(chats.conversations(300)))
    folder = chats.learn_answers(tmp_path, preset, f"--tokenizer={words}")
    tokenizer = load_tokenizer(folder)
    with server(convert(folder), *need(tokenizer, preset).split()) as ask:
        for messages in (chat[:-1] for chat in chats.conversations(1000)):
            prompt = ask("/apply-template", messages=messages)["prompt"]
            # ollama's template for ChatML makes this text, too.
            texts = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
            assert prompt == "".join(texts) + "<|im_start|>assistant\n"
            ids = ask("/tokenize", content=prompt, add_special=True, parse_special=True)["tokens"]
            assert ids == chats.prompt_ids(tokenizer, messages)
        for text, answer in zip(chats.ANSWERS, chats.our_answers(folder, capsys), strict=True):
            reply = ask("/v1/chat/completions", messages=chats.question(text), temperature=0)
            choice = reply["choices"][0]
            assert choice["message"]["content"] == answer
            assert choice["finish_reason"] == "stop"

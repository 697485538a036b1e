import gzip
import importlib
import math
import re
import shlex
import statistics
from pathlib import Path

import pytest
import torch
from conftest import REPO, TINY, call, facts_of, make_records, write_jsonl
from test_huggingface import as_nanogpt

from bench import compare
from bench import prepare as bench_prepare
from configurator import given_settings
from model import GPT, PRESETS, GPTConfig


def test_prepare_is_compared_with_the_library(tmp_path, tiny_data, capsys):
    corpus = tmp_path / "c.jsonl.gz"
    text = write_jsonl(tmp_path / "c.jsonl", make_records(200))
    corpus.write_bytes(gzip.compress(text.read_bytes()))
    options = [f"--tokenizer={tiny_data / 'tiny' / 'tokenizer.model'}"]
    call(bench_prepare.main, corpus, *options, "--mb=1", "--rounds=1", "--workers=1")
    rates = re.findall(r"(?m)^  (?:library|ours) +(\S+)$", capsys.readouterr().out)
    assert len(rates) == 2 and min(map(float, rates)) > 0


# A script that stands for nanoGPT. A step takes 50 ms, and it says 20 ms. It saves what is in
# saved/ckpt.pt.
PEER = """
import pickle, shutil, sys, time
seed_offset = 0
seed = 1337 + seed_offset
settings = dict(option[2:].split("=") for option in sys.argv[1:])
assert open("data/ours/train.bin", "rb").read(2)
assert pickle.load(open("data/ours/meta.pkl", "rb")) == {"vocab_size": 400}
print("step 0: train loss 1")
for i in range(int(settings["max_iters"]) + 1):
    time.sleep(0.05)
    print(f"iter {i}: loss 1, time 20.00ms, mfu 1%", flush=True)
shutil.copytree("saved", "out")
"""
SHAPE = dict(n_layer=1, n_head=2, n_embd=32, block_size=32, bias=False, vocab_size=400)


@pytest.fixture(scope="module")
def peer(tmp_path_factory) -> str:
    """The option that names a peer, whose weights were saved after 8 steps."""
    folder = tmp_path_factory.mktemp("peer")
    model = GPT(GPTConfig(**PRESETS["gpt2"] | SHAPE))
    (folder / "saved").mkdir()
    content = {"model": as_nanogpt(model), "model_args": SHAPE, "iter_num": 8}
    torch.save(content, folder / "saved" / "ckpt.pt")
    (folder / "train.py").write_text(PEER)
    return f"--nanogpt={folder}"


def compared(data: Path, folder: Path, *options: str) -> dict:
    """Return the figures of a comparison."""
    return facts_of(compare.main, folder, *TINY, f"--data_dir={data}", *options)


@pytest.mark.slow
def test_training_is_compared_by_one_clock(tiny_data, tmp_path, peer):
    facts = compared(tiny_data, tmp_path, peer, "--steps=9", "--warmup=2", "--rounds=1")
    ours, nanogpt = (facts["seconds"][name] for name in ("ours", "nanoGPT"))
    assert len(ours) == len(nanogpt) == 1 and min(nanogpt) > 0.03
    assert facts["tokens_per_s"]["ours"] == pytest.approx(256 / statistics.median(ours))


@pytest.mark.slow
def test_recipe_evaluates_the_final_weights_of_both(tiny_data, tmp_path, peer):
    facts = compared(tiny_data, tmp_path, "--recipe=--max_iters=8", "--seeds", "3", peer)
    [nanogpt], [ours] = (facts["finishes"][name] for name in ("nanoGPT", "ours"))
    assert facts["seeds"] == [3] and nanogpt["training"] == pytest.approx(8 * 0.02)
    assert nanogpt["loss"] == pytest.approx(math.log(400), abs=0.05)
    assert ours["steps"] == 8 and ours["loss"] < 5.7


@pytest.mark.slow
def test_sampling_is_timed(tiny_data, tmp_path):
    options = ["--sampling", "--max_new_tokens=8", "--num_samples=2", "--rounds=1"]
    facts = compared(tiny_data, tmp_path, *options, f"--others={REPO}")
    assert facts["tokens_per_s"]["ours"] == pytest.approx(16 / facts["seconds"]["ours"][0])
    assert facts["seconds"].keys() == {"ours", f"ours, {REPO.name}"}


def test_the_hf_trainer_trains_the_same_model(tiny_data, tmp_path):
    pytest.importorskip("accelerate", reason="needs the packages transformers and accelerate")
    facts = compared(tiny_data, tmp_path, "--hf", "--steps=6", "--warmup=2", "--rounds=1")
    assert facts["tokens_per_s"].keys() == {"ours", "HF Trainer"}


@pytest.mark.parametrize("page", ["results.md", "extending.md"])
def test_published_commands_give_known_options(page, monkeypatch):
    monkeypatch.chdir(REPO)
    # A command continues after a backslash, and until its quotes are closed.
    quoted = r'(?:"[^"]*"|\\\n|[^"\n])*'
    text = (REPO / "docs" / page).read_text()
    commands = re.findall(rf"^    python -m (bench\.\w+)({quoted})$", text, re.MULTILINE)
    assert commands
    positional = {"bench.prepare": "corpus", "bench.judge": "files"}
    for module, options in commands:
        names = vars(importlib.import_module(module)).items()
        [settings] = [v for k, v in names if k.endswith("Config") and v.__module__ == module]
        argv = shlex.split(options.replace("\\\n", " "), comments=True)
        argv = [a for a in argv if a not in ("--help", "bench/questions/dropout.py")]
        given_settings(settings, argv, positional=positional.get(module, ""))

import gzip
import json
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import tiktoken
import torch
from conftest import REPO, TINY, call, make_records, write_jsonl

from bench import compare, init_scales, judge, lab, roof, shards, sweep
from bench import prepare as bench_prepare
from configurator import given
from hardware.peak import datasheet_peak, datasheet_tflops
from model import GPT, PRESETS, GPTConfig
from training.huggingface import to_state


@pytest.mark.parametrize(
    "name, bf16",
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA L40S", 362),
        ("AMD Instinct MI300X", 1307.4),
        ("Tesla V100-SXM2-16GB", None),  # it has no bf16
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),  # not the desktop's chip
        ("NVIDIA A1000", None),
        ("Some New GPU", None),
    ],
)
def test_a_gpu_gets_its_own_datasheet_peak_or_none_at_all(name, bf16):
    assert datasheet_tflops(name, "bf16") == bf16


@pytest.mark.parametrize(
    "name, dtype, peak, words",
    [
        ("Tesla V100-SXM2-16GB", torch.float16, 125, "fp16"),
        ("Tesla V100-SXM2-16GB", torch.float32, 15.7, "fp32"),  # it has no TF32
        ("NVIDIA H200", torch.float32, 494, "tf32"),
        ("Some New GPU", torch.bfloat16, None, "n/a"),
    ],
)
def test_the_peak_says_where_it_comes_from(name, dtype, peak, words):
    tflops, source = datasheet_peak(name, dtype)
    assert tflops == peak and words in source


def test_prepare_is_compared_with_the_library_and_a_plain_loop(tmp_path, tiny_data, capsys):
    corpus = tmp_path / "c.jsonl.gz"
    out = tmp_path / "out.json"
    plain = write_jsonl(tmp_path / "c.jsonl", make_records(200))
    corpus.write_bytes(gzip.compress(plain.read_bytes()))
    options = [f"--tokenizer={tiny_data / 'tiny' / 'tokenizer.model'}", f"--json={out}"]
    call(bench_prepare.main, corpus, *options, "--mb=1", "--rounds=1", "--workers=1")
    facts = json.loads(out.read_text())
    rates = facts["mb_per_s"]
    assert set(rates) == {"library", "plain", "ours"} and min(rates.values()) > 0
    assert facts["share"] == pytest.approx(rates["ours"] / rates["library"])
    assert 30e6 < facts["peak_bytes"] < 500e6
    assert "ours / (cores x library)" in capsys.readouterr().out


WHOLE = gzip.compress(b'{"text": "one"}\n{"text": "two"}\n')


def test_a_tokenizer_that_cannot_be_downloaded_is_one_line(tmp_path, refuses, monkeypatch):
    def offline(name):  # requests raises an OSError, too
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    corpus = tmp_path / "c.jsonl.gz"
    corpus.write_bytes(WHOLE)
    assert "gpt2" in refuses(bench_prepare.main, corpus, "--tokenizer=gpt2")


@pytest.mark.parametrize(
    "content, place",
    [
        pytest.param(None, "c.jsonl.gz", id="none"),
        pytest.param(b"no gzip", "c.jsonl.gz", id="no gzip"),
        pytest.param(WHOLE[:-10], "c.jsonl.gz", id="cut off"),
        pytest.param(WHOLE[:14] + b"\xff" + WHOLE[15:], "c.jsonl.gz", id="changed"),
        pytest.param(gzip.compress(b""), "c.jsonl.gz", id="empty"),
        pytest.param(gzip.compress(b'{"text": "a"}\n{"text":'), "line 2", id="half a record"),
        pytest.param(gzip.compress(b'{"text": "a"}\n[1, 2]\n'), "line 2", id="list"),
        pytest.param(gzip.compress(b'{"text": "a"}\n\xff\n'), "line 2", id="no text"),
    ],
)
def test_a_damaged_corpus_is_one_line(tiny_data, tmp_path, refuses, content, place):
    corpus = tmp_path / "c.jsonl.gz"
    if content is not None:
        corpus.write_bytes(content)
    tokenizer = tiny_data / "tiny" / "tokenizer.model"
    assert place in refuses(bench_prepare.main, corpus, f"--tokenizer={tokenizer}")


def test_a_vocabulary_beyond_16_bits_is_counted_in_32(tmp_path):
    corpus = tmp_path / "c.jsonl.gz"
    corpus.write_bytes(WHOLE)
    bench_prepare.plain(corpus, lambda text: [100_000], tmp_path / "ids", 100_277)
    assert (tmp_path / "ids").stat().st_size == 2 * 2 * 4  # two documents of one token and an eos


@pytest.mark.parametrize("option", ["--block_size=0", "--n_embd=-1", "--lr=0", "--batch_size=0"])
def test_a_comparison_refuses_what_training_refuses(tiny_data, refuses, option):
    error = refuses(compare.main, *TINY, f"--data_dir={tiny_data}", option)
    assert option[2:].split("=")[0] in error


@pytest.mark.parametrize("damaged", ["meta.json", "train.bin", "tokenizer.model"])
def test_a_damaged_data_set_is_one_line_in_a_comparison(tiny_data, tmp_path, refuses, damaged):
    shutil.copytree(tiny_data / "tiny", tmp_path / "tiny")
    (tmp_path / "tiny" / damaged).write_bytes(b"{")
    for options in ([], ["--sampling"]):
        assert damaged in refuses(compare.main, *TINY, f"--data_dir={tmp_path}", *options)


@pytest.mark.slow
def test_training_is_compared_by_one_clock(tiny_data, tmp_path, capsys):
    """A script stands for nanoGPT. It takes the same settings and files, and 50 ms for a step."""
    peer = tmp_path / "peer"
    peer.mkdir()
    parse = "import sys; settings = dict(a[2:].split('=') for a in sys.argv[1:])"
    (peer / "configurator.py").write_text(parse)
    (peer / "train.py").write_text(
        "import time, pickle\n"
        "seed_offset = 0\n"
        "assert 1337 + seed_offset == 1337\n"
        "exec(open('configurator.py').read())\n"
        "assert settings['n_layer'] == '2' and settings['dtype'] == 'float32'\n"
        "assert open('data/ours/train.bin', 'rb').read(2)\n"
        "assert pickle.load(open('data/ours/meta.pkl', 'rb')) == {'vocab_size': 400}\n"
        "print('step 0: train loss 1')\n"
        "for i in range(int(settings['max_iters']) + 1):\n"
        "    time.sleep(0.05)\n"
        "    print(f'iter {i}: loss 1, time 9ms', flush=True)\n"
    )
    options = [*TINY, f"--data_dir={tiny_data}", f"--json={tmp_path / 'out.json'}"]
    call(compare.main, *options, f"--nanogpt={peer}", "--steps=9", "--warmup=2", "--rounds=2")
    facts = json.loads((tmp_path / "out.json").read_text())
    seconds = facts["seconds"]
    rates = facts["tokens_per_s"]
    assert [len(seconds[name]) for name in ("ours", "nanoGPT")] == [2, 2]
    assert min(seconds["nanoGPT"]) >= 0.05 and 0 < rates["nanoGPT"] <= 256 / 0.05
    assert rates["ours"] == pytest.approx(256 / statistics.median(seconds["ours"]))
    assert torch.__version__ in facts["versions"]
    assert "ours / it" in capsys.readouterr().out


# A script that stands for nanoGPT. It says that a step takes 20 ms, and saves what is in given.pt.
PEER = """
import shutil, sys
seed_offset = 0
assert open("data/ours/val.bin", "rb").read(2)
print("step 0: train loss 1")
for i in range(5):
    print(f"iter {i}: loss {1337 + seed_offset}, time 20.00ms, mfu 1%")
shutil.copytree("given", "out")
"""


def peer_of(folder: Path, iter_num: int) -> Path:
    """Write a peer whose weights were saved after iter_num steps."""
    c = GPTConfig(**PRESETS["gpt2"] | NANO)
    model = GPT(c)
    model.init_weights()
    state = to_state(c, dict(model.named_parameters()))
    state = {k: w.t() if ".h." in k and w.dim() == 2 else w for k, w in state.items()}
    (folder / "given").mkdir(parents=True)
    state["lm_head.weight"] = state["transformer.wte.weight"]
    content = {"model": state, "model_args": NANO, "iter_num": iter_num}
    torch.save(content, folder / "given" / "ckpt.pt")
    (folder / "train.py").write_text(PEER)
    return folder


NANO = dict(n_layer=1, n_head=2, n_embd=32, block_size=32, bias=False, vocab_size=400)


@pytest.mark.slow
def test_a_race_evaluates_the_final_weights_of_both_alike(tiny_data, tmp_path, capsys):
    options = [*TINY, f"--data_dir={tiny_data}", "--recipe=--max_iters=4", "--seeds", "3"]
    file = tmp_path / "race.json"
    peer = peer_of(tmp_path / "peer", 4)
    call(compare.main, *options, f"--nanogpt={peer}", f"--json={file}")
    facts = json.loads(file.read_text())
    [nanogpt], [ours] = (facts["finishes"][name] for name in ("nanoGPT", "ours"))
    assert facts["seeds"] == [3] and nanogpt["training"] == pytest.approx(4 * 0.02)
    assert nanogpt["loss"] == pytest.approx(math.log(400), abs=0.05)
    assert ours["steps"] == 8 and ours["loss"] < 5.7
    assert "times as long in training" in capsys.readouterr().out


def test_a_race_against_weights_that_are_not_final_is_refused(tiny_data, tmp_path, refuses):
    options = [*TINY, f"--data_dir={tiny_data}", "--recipe=--max_iters=4"]
    peer = peer_of(tmp_path / "peer", 2)
    assert "--eval_interval=4" in refuses(compare.main, *options, f"--nanogpt={peer}")


@pytest.mark.slow
def test_sampling_is_measured_against_the_speed_of_memory(tiny_data, tmp_path, capsys):
    options = [*TINY, f"--data_dir={tiny_data}", f"--json={tmp_path / 'out.json'}"]
    options += ["--sampling", "--max_new_tokens=8", "--num_samples=2", "--rounds=1"]
    call(compare.main, *options, "--dtype=float32")
    facts = json.loads((tmp_path / "out.json").read_text())
    shape = dict(vocab_size=400, block_size=32, n_layer=2, n_head=4, n_kv_head=2, n_embd=32)
    with torch.device("meta"):
        weights = GPT(GPTConfig(**PRESETS["llama"], **shape)).num_params()["matmul"]
    # The two texts share one reading of all weights. Each text also reads its own cache:
    # 2 layers, k and v, 2 heads of size 8, 4 tokens on average. A number has 4 bytes.
    assert facts["bytes_per_token"] == {"ours": weights * 4 / 2 + 4 * 2 * 2 * 2 * 8 * 4}
    gb_per_s = facts["tokens_per_s"]["ours"] * facts["bytes_per_token"]["ours"] / 1e9
    share = gb_per_s / facts["peak_gb_per_s"]
    assert 0 < share and f"{share:.1%}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_gpu_suite_runs_at_toy_size_on_a_cpu(tmp_path):
    environment = os.environ | {"TOY": "1", "OUT": str(tmp_path / "out"), "PYTHON": sys.executable}
    command = ["bash", str(REPO / "bench" / "gpu_suite.sh")]
    two = [*command, "roof", "sweep"]
    done = subprocess.run(two, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    files = {p.name: p.read_text() for p in (tmp_path / "out").iterdir()}
    assert files.keys() == {"suite.log", "roof.json", "sweep.json", "sweep.md"}
    assert json.loads(files["roof.json"]) and "MFU" in files["sweep.md"]
    assert subprocess.run([*command, "roofs"], env=environment, capture_output=True).returncode == 2


SETTINGS_OF = {
    "bench.compare": compare.CompareConfig,
    "bench.init_scales": init_scales.ScalesConfig,
    "bench.judge": judge.JudgeConfig,
    "bench.lab": lab.LabConfig,
    "bench.prepare": bench_prepare.BenchConfig,
    "bench.roof": roof.RoofConfig,
    "bench.shards": shards.ShardsConfig,
    "bench.sweep": sweep.SweepConfig,
}
POSITIONAL = {"bench.prepare": "corpus", "bench.judge": "files"}


@pytest.mark.parametrize("toy", ["1", ""])
def test_every_command_of_the_gpu_suite_has_settings_that_its_script_knows(toy, tmp_path):
    """So that no time on a lent GPU is lost to a wrong option: this reads, and runs nothing."""
    recorder = tmp_path / "python"
    recorder.write_text(f"#!/bin/bash\nprintf '%s\\0' \"$@\" $'\\n' >> {tmp_path}/commands\n")
    recorder.chmod(0o755)
    environment = {"TOY": toy, "OUT": str(tmp_path / "out"), "PYTHON": str(recorder)}
    suite = ["bash", str(REPO / "bench" / "gpu_suite.sh")]
    subprocess.run(suite, env=os.environ | environment, capture_output=True, check=True)
    seen = set()
    for line in (tmp_path / "commands").read_text().split("\n\0"):
        how, *argv = line.rstrip("\0").split("\0")
        if how == "-m" and argv[0] != "pytest":
            assert given(SETTINGS_OF[argv[0]], argv[1:]), line
            seen.add(argv[0])
    assert seen == {"bench.compare", "bench.roof", "bench.sweep"}


@pytest.mark.parametrize("page", ["results.md", "extending.md"])
def test_every_published_command_has_settings_that_its_script_knows(page, monkeypatch):
    monkeypatch.chdir(REPO)
    # A command goes on behind a backslash, and until its quotes are closed.
    quoted = r'(?:"[^"]*"|\\\n|[^"\n])*'
    text = (REPO / "docs" / page).read_text()
    commands = re.findall(rf"^    python -m (bench\.\w+)({quoted})$", text, re.MULTILINE)
    assert commands
    for module, options in commands:
        argv = shlex.split(options.replace("\\\n", " "), comments=True)
        argv = [a for a in argv if a not in ("--help", "bench/questions/dropout.py")]
        positional = POSITIONAL.get(module, "")
        assert given(SETTINGS_OF[module], argv, positional=positional) or not argv, argv


def test_the_hf_trainer_trains_the_same_model(tiny_data, tmp_path):
    pytest.importorskip("accelerate", reason="needs the packages transformers and accelerate")
    options = [*TINY, f"--data_dir={tiny_data}", "--hf", "--steps=6", "--warmup=2", "--rounds=1"]
    call(compare.main, *options, f"--json={tmp_path / 'out.json'}")
    facts = json.loads((tmp_path / "out.json").read_text())
    assert facts["tokens_per_s"].keys() == {"ours", "HF Trainer"}

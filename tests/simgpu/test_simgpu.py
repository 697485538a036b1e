"""Every command runs to its end on simulated GPUs, which compute nothing.

    SIMGPU=FOLDER make simgpu

simulation.py says what is simulated. These tests show that the host's side of each line runs and
that each kernel compiles. They say nothing of numbers, of speed, or of races.
"""

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import REPO, make_records, write_jsonl
from tests.simgpu import simulation
from tests.simgpu.simulation import SIMGPU

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SIMGPU, reason="SIMGPU names no folder of simulated GPUs"),
]

# A model that has all that a real one has, and compiles in a minute.
SMALL = "--dataset=small --n_layer=2 --n_head=4 --n_embd=128 --block_size=64 --batch_size=2"
SMALL += " --batch_tokens=256 --max_steps=4 --eval_every=2 --sample_every=2 --save_every=2"
SMALL += " --log_every=1 --device=cuda"
EAGER = "--compile=false"


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A folder with data/small, and conversations in data/chat, made on the CPU."""
    folder = tmp_path_factory.mktemp("simgpu")
    talks = [{"prompt": f"loop {i}?", "completion": f"reads {i}"} for i in range(300)]
    for name, records, tokenizer in (
        ("small", make_records(300), "--vocab_size=400"),
        ("chat", talks, "--tokenizer=data/small"),
    ):
        corpus = write_jsonl(folder / f"{name}.jsonl", records)
        command = [sys.executable, REPO / "prepare.py", "--chat", "--input", corpus, tokenizer]
        subprocess.run([*command, "--val_fraction=0.1"], cwd=folder, check=True)
    return folder


def simulated(gpu: str, processes: int, command: str, folder: Path) -> str:
    """Run a command of this project on so many simulated GPUs. Return its output."""
    script, *options = command.split()
    argv = [script if script == "-m" else str(REPO / script), *options]
    ended = simulation.simulated(gpu, processes, argv, folder, timeout=900)
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def trains(gpu: str, processes: int, options: str, folder: Path, run: str) -> str:
    """Train SMALL with these options, and check what the run left. Return the output."""
    more = f"--run_name={run} --tracker=off {options}"  # the last picture may wait for a busy CPU
    output = simulated(gpu, processes, f"train.py {SMALL} {more}", folder)
    assert "\nwarning: " not in output, output
    lines = (folder / "out" / run / "metrics.jsonl").read_text().splitlines()
    steps = [r["step"] for r in map(json.loads, lines) if "loss" in r]
    last = int(re.findall(r"--max_steps=(\d+)", f"{SMALL} {options}")[-1])
    assert steps == list(range(1, last + 1)), output
    assert (folder / f"out/{run}/ckpt/step_{last:08d}/manifest.json").exists()
    return output


LLAMA = "--preset=llama --n_kv_head=2"
MASK = "--documents=mask"
ANSWERS = "--dataset=chat --loss_on=answers"
IN_BOTH = [  # compiled, and not
    "",
    "--dropout=0.1",
    f"{LLAMA} --dtype=float16",
    "--preset=qwen2 --n_kv_head=2 --rope_scaling=llama3:8,1,4,32 --dtype=float32",
    f"--preset=qwen3 {MASK}",
    f"{LLAMA} --documents=pack --loss_per=document",
    f"{LLAMA} --recompute=blocks {MASK}",
    "--preset=qwen3 --optimizer=muon",
    f"{LLAMA} --optimizer=adafactor --lr=0.03",
    f"{LLAMA} --batch_size=auto",
    f"{LLAMA} {ANSWERS} --documents=pack",
]
ON_ONE = [f"{mode} {options}" for mode in (EAGER, "--compile=true") for options in IN_BOTH]
ON_ONE += [f"{EAGER} {LLAMA} {ANSWERS} --documents=pad --sample_prompt=loop"]
ON_ONE += [f"{LLAMA} --n_embd=32 {MASK}"]  # too narrow for FlexAttention
SHARDS = [f"--shard={shard}" for shard in ("none", "optimizer", "gradients", "all")]
ON_SEVERAL = [
    *[(2, f"{LLAMA} {mode} {shard} {MASK}") for mode in (EAGER, "") for shard in SHARDS],
    (2, f"{LLAMA} {EAGER} --shard=all --recompute=blocks"),
    (2, f"{LLAMA} {EAGER} --shard=all {ANSWERS} --documents=pack"),
    (2, f"{LLAMA} {EAGER} --shard=all --optimizer=muon"),
    (6, f"{LLAMA} {EAGER} --batch_tokens=768"),
    (6, f"{LLAMA} {EAGER} --batch_tokens=768 --shard=all"),
]
RUNS = [("a100", 1, options) for options in ON_ONE]
RUNS += [("h100", processes, options) for processes, options in ON_SEVERAL]
RUNS += [("h100", 1, f"{LLAMA} {MASK}"), ("rtx4090", 1, EAGER), ("rtx4090", 1, f"{LLAMA} {MASK}")]


@pytest.mark.parametrize("gpu, processes, options", RUNS, ids=lambda x: str(x).replace("--", ""))
def test_simulated_gpus_train(gpu, processes, options, folder):
    run = re.sub(r"\W+", "_", f"{gpu} {processes} {options}")
    output = trains(gpu, processes, options, folder, run)
    assert ("\ncompiled in " in output) == (EAGER not in options)


# Runs train.py, and counts whenever the host waits for the device, or reads a number from it.
COUNT = """
from collections import Counter
import torch, train
calls = Counter()
def count(owner, name):
    real = getattr(owner, name)
    def call(*args, **options):
        of_host = args and isinstance(args[0], torch.Tensor) and not args[0].is_cuda
        calls[f"{owner.__name__}.{name}"] += not of_host
        return real(*args, **options)
    setattr(owner, name, call)
for owner in (torch.cuda, torch.accelerator, torch.cuda.Event, torch.cuda.Stream):
    count(owner, "synchronize")
for name in ("item", "tolist", "cpu", "__bool__", "__float__", "__int__"):
    count(torch.Tensor, name)
train.main()
print("waits:", dict(calls))
"""


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_waits_for_a_simulated_gpu_once(optimizer, folder):
    """In ten steps more, in which nothing is logged, evaluated or saved."""
    counts = []
    for steps in (5, 15):
        rare = f"--eval_every=99 --sample_every=0 --save_every=99 --log_every=99 {EAGER}"
        more = f"--optimizer={optimizer} --max_steps={steps} --run_name=waits{steps} --overwrite"
        argv = ["-c", COUNT, *f"{SMALL} {rare} {more} --tracker=off".split()]
        ended = simulation.simulated("a100", 1, argv, folder, timeout=900)
        counts.append(Counter(eval(ended.stdout.rpartition("waits: ")[2])))
    assert counts[1] - counts[0] == {"Event.synchronize": 10}, counts


@pytest.mark.parametrize("before, after", [(1, 2), (2, 1)])
def test_a_run_goes_on_with_another_number_of_simulated_gpus(before, after, folder):
    run = f"from_{before}_to_{after}"
    trains("a100", before, EAGER, folder, run)
    trains("a100", after, f"{EAGER} --init_from=resume --max_steps=6", folder, run)


@pytest.mark.parametrize("config", sorted(path.name for path in (REPO / "config").glob("*.py")))
def test_each_config_trains(config, folder):
    """A config's own width, with two layers, one short sequence in a step, and not compiled."""
    own = "--dataset=small --device=cuda --compile=false --batch_size=1 --block_size=64"
    brief = "--batch_tokens=64 --max_tokens=0 --max_epochs=0 --max_steps=1 --n_layer=2 --overwrite"
    brief += " --init_from=scratch --loss_on=all"
    command = f"train.py {REPO}/config/{config} {own} {brief} --run_name=config"
    simulated("h100", 1, f"{command} --out_dir=configs", folder)
    shutil.rmtree(folder / "configs")  # the checkpoint of a large one


WAYS = ["--num_samples=1", "--num_samples=32", "--eval=data/small"]
WAYS += ["--chat --system=x --prompt a b"]


@pytest.mark.parametrize("options", WAYS)
def test_a_model_writes_on_a_simulated_gpu(options, folder):
    if not (folder / "out/writer").exists():
        trains("a100", 1, f"{LLAMA} {EAGER}", folder, "writer")
    which = "--ckpt=out/writer/ckpt/step_00000004 --max_new_tokens=40"
    output = simulated("a100", 1, f"sample.py {which} --device=cuda {options}", folder)
    assert "\nwarning: " not in output, output


TOOLS = [
    f"plan.py {SMALL} {LLAMA}",
    f"-m bench.sweep {SMALL} --block_sizes 64 --batch_sizes 1 2 --accums 1 --seconds=0.1",
    f"-m bench.sweep {SMALL} {EAGER} --vary=optimizer,documents --rounds=1",
    f"-m bench.roof {SMALL} --compile=false --seconds=0.001",
    "-m bench.roof --squares 64 128 --seconds=0.001",
    f"-m bench.compare {SMALL} {EAGER} --steps=4 --warmup=1 --rounds=1",
    f"-m bench.compare {SMALL} --sampling --max_new_tokens=8 --rounds=1",
]


@pytest.mark.parametrize("command", TOOLS, ids=lambda command: command.replace("--", "")[:30])
def test_measuring_runs_on_a_simulated_gpu(command, folder):
    simulated("h100", 1, command, folder)


PEAKS = ["--eager --configs minimind_26m --only bfloat16"]
PEAKS += ["--compiled --configs demo --only float16"]


@pytest.mark.parametrize("options", PEAKS)
def test_predicted_peaks_are_those_of_the_allocator(options):
    command = [sys.executable, REPO / "tests/simgpu/memory.py", *options.split()]
    ended = subprocess.run(command, text=True, capture_output=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


# Those that compare numbers, or whose run depends on them.
NUMBERS = """
compiled_equals_eager bf16_computes_the_loss masked_documents greedy_tokens the_defaults_train
resume_is_bit_identical fp16_trains do_not_disturb_each_other a_step_waits
""".split()


def test_the_tests_for_gpus_that_compare_no_numbers_pass():
    tests = ["-m", "pytest", "-q", "-m", "gpu", "tests/test_gpu.py", "-k"]
    argv = [*tests, f"not ({' or '.join(NUMBERS)})"]
    ended = simulation.simulated("h100", 1, argv, REPO, timeout=900)
    assert ended.returncode == 0, ended.stdout
    assert "passed" in ended.stdout and "skipped" not in ended.stdout

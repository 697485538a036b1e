"""Every command runs to its end on simulated GPUs, which compute nothing.

    SIMGPU=FOLDER make simgpu

FOLDER/venv has torch's CUDA build; FOLDER/lib has libraries that take the place of NVIDIA's:
libcudart, libcuda, libcublas, libnvidia-ml, libnccl, and shim.so, which adds to them. All the rest
is real: the choice of kernels, streams, pinned copies, the caching allocator, Inductor and Triton
down to machine code, graphs, and the calls of NCCL. So these tests show that the host's side of
each line runs and that each kernel compiles. They say nothing of numbers, of speed, or of races.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import REPO, make_records, write_jsonl
from tests.simgpu.memory import ALLOCATED

SIMGPU = os.environ.get("SIMGPU", "")
LIBRARIES = ["shim.so", "libcudart.so.13", "libcuda.so.1", "libcublas.so.13", "libnvidia-ml.so.1"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SIMGPU, reason="SIMGPU names no folder of simulated GPUs"),
]


@cache
def nothing() -> Path:
    """Compile nothing.c, and return the library."""
    library = Path(tempfile.mkdtemp()) / "nothing.so"
    source = Path(__file__).with_name("nothing.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def simulated(gpu: str, processes: int, argv: list, folder: Path) -> str:
    """Run a script with its arguments on so many simulated GPUs. Return its output.

    gpu: a100, h100 or rtx4090.
    """
    lib = Path(SIMGPU).resolve() / "lib"
    libraries = [nothing(), *(lib / name for name in LIBRARIES)]
    env = os.environ | {
        "PATH": f"{lib.parent / 'venv/bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{Path(__file__).parent}:{REPO}",
        "TRITON_LIBCUDA_PATH": str(lib),
        "OMP_NUM_THREADS": "1",
        "FAKEGPU_PROFILE": gpu,
        "FAKEGPU_DEVICE_COUNT": str(processes),
        "FAKEGPU_TERMINAL_REPORT": "0",
        "FAKEGPU_REPORT_PATH": os.devnull,
    }
    python, meeting = ["python"], None
    if processes > 1:
        libraries.append(lib / "libnccl.so.2")
        python = ["torchrun", f"--nproc_per_node={processes}"]
        address = tempfile.mktemp()
        env |= {"FAKEGPU_MODE": "simulate", "FAKEGPU_DIST_MODE": "simulate"}
        env |= {"FAKEGPU_COORDINATOR_TRANSPORT": "unix", "FAKEGPU_COORDINATOR_ADDR": address}
        env |= {"FAKEGPU_COORDINATOR_TIMEOUT_MS": "600000"}  # one rank may compile for long
        coordinator = [lib.parent / "fakegpu-coordinator", "--transport", "unix"]
        meeting = subprocess.Popen([*coordinator, "--address", address], stdout=subprocess.DEVNULL)
        while not os.path.exists(address):
            time.sleep(0.1)
    env["LD_PRELOAD"] = ":".join(map(str, libraries))
    streams = dict(text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    command = ["env", *python, *argv]  # env finds python in the new PATH
    try:
        ended = subprocess.run(command, env=env, cwd=folder, timeout=900, **streams)
    finally:
        if meeting:
            meeting.kill()
            meeting.wait()
    assert ended.returncode == 0 and "\nwarning: " not in ended.stdout, ended.stdout
    return ended.stdout


# A model that has all that a real one has, and compiles in a minute.
# SMALL and BRIEF are words of the commands below, so that names of tests are short.
SMALL = "--dataset=small --n_layer=2 --n_head=4 --n_embd=128 --block_size=64 --batch_size=2"
SMALL += " --batch_tokens=256 --max_steps=4 --eval_every=2 --sample_every=2 --save_every=2"
SMALL += " --log_every=1 --device=cuda --tracker=off --overwrite"
EAGER = "--compile=false"
LLAMA = "--preset=llama --n_kv_head=2"


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A folder with data/small, conversations in data/chat, made on the CPU, and out/writer."""
    folder = tmp_path_factory.mktemp("simgpu")
    talks = [{"prompt": f"loop {i}?", "completion": f"reads {i}"} for i in range(300)]
    for name, records, tokenizer in (
        ("small", make_records(300), "--vocab_size=400"),
        ("chat", talks, "--tokenizer=data/small"),
    ):
        corpus = write_jsonl(folder / f"{name}.jsonl", records)
        command = [sys.executable, REPO / "prepare.py", "--chat", "--input", corpus, tokenizer]
        subprocess.run([*command, "--val_fraction=0.1"], cwd=folder, check=True)
    written = f"{SMALL} {LLAMA} {EAGER} --run_name=writer"
    simulated("a100", 1, [REPO / "train.py", *written.split()], folder)
    return folder


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
SHARDS = [f"--shard={shard} {MASK}" for shard in ("none", "optimizer", "gradients", "all")]
OF_TRAIN = [("a100", 1, f"{how} {more}") for how in (EAGER, "--compile=true") for more in IN_BOTH]
OF_TRAIN += [("h100", 2, f"{LLAMA} {how} {shard}") for how in (EAGER, "") for shard in SHARDS]
OF_TRAIN += [
    ("a100", 1, f"{EAGER} {LLAMA} {ANSWERS} --documents=pad --sample_prompt=loop"),
    ("a100", 1, f"{LLAMA} --n_embd=32 {MASK}"),  # too narrow for FlexAttention
    ("rtx4090", 1, EAGER),
    ("rtx4090", 1, f"{LLAMA} {MASK}"),
    ("h100", 2, f"{LLAMA} {EAGER} --shard=all --recompute=blocks"),
    ("h100", 2, f"{LLAMA} {EAGER} --shard=all {ANSWERS} --documents=pack"),
    ("h100", 2, f"{LLAMA} {EAGER} --shard=all --optimizer=muon"),
    ("h100", 6, f"{LLAMA} {EAGER} --batch_tokens=768"),
    ("h100", 6, f"{LLAMA} {EAGER} --batch_tokens=768 --shard=all"),
    ("a100", 2, f"{LLAMA} {EAGER} --run_name=writer --init_from=auto --max_steps=6"),
]
# A config's own width, with two layers, one short sequence in a step, and not compiled.
BRIEF = "--dataset=small --device=cuda --compile=false --batch_size=1 --block_size=64 --n_layer=2"
BRIEF += " --batch_tokens=64 --max_tokens=0 --max_epochs=0 --max_steps=1 --overwrite"
BRIEF += " --init_from=scratch --loss_on=all --run_name=config"
OF_ONE = [f"train.py config/{path.name} BRIEF" for path in (REPO / "config").glob("*.py")]
WAYS = ["--num_samples=1", "--num_samples=32", "--eval=data/small", "--chat --prompt a b"]
OF_ONE += [f"sample.py --ckpt=out/writer --device=cuda --max_new_tokens=40 {way}" for way in WAYS]
OF_ONE += [
    f"plan.py SMALL {LLAMA}",
    "-m bench.sweep SMALL --block_sizes 64 --batch_sizes 1 2 --accums 1 --seconds=0.1",
    f"-m bench.sweep SMALL {EAGER} --vary optimizer documents --rounds=1",
    "-m bench.roof SMALL --compile=false --seconds=0.001",
    "-m bench.roof --squares 64 128 --seconds=0.001",
    f"-m bench.compare SMALL {EAGER} --steps=4 --warmup=1 --rounds=1",
    "-m bench.compare SMALL --sampling --max_new_tokens=8 --rounds=1",
]
COMMANDS = [(gpu, n, f"train.py SMALL {options}") for gpu, n, options in OF_TRAIN]
COMMANDS += [("h100", 1, command) for command in OF_ONE]


@pytest.mark.parametrize("gpu, processes, command", COMMANDS)
def test_a_command_ends_without_a_warning(gpu, processes, command, folder):
    command = command.replace("SMALL", SMALL).replace("BRIEF", BRIEF)
    argv = [REPO / word if word.endswith(".py") else word for word in command.split()]
    simulated(gpu, processes, argv, folder)


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
        more = f"--optimizer={optimizer} --max_steps={steps}"
        argv = ["-c", COUNT, *f"{SMALL} {rare} {more}".split()]
        output = simulated("a100", 1, argv, folder)
        counts.append(Counter(eval(output.rpartition("waits: ")[2])))
    assert counts[1] - counts[0] == {"Event.synchronize": 10}, counts


@pytest.mark.parametrize("number", range(len(ALLOCATED)))
def test_the_recorded_memory_is_that_of_the_allocator(number):
    output = simulated("a100", 1, ["-m", "tests.simgpu.memory", str(number)], REPO)
    assert int(output.split("peak: ")[1]) == pytest.approx(ALLOCATED[number][-1], rel=0.01)

"""Compare the memory that training/memory.py predicts with the memory that torch allocates."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import NEEDS_BF16, REPO
from peak import measured_peak
from test_model import ODD, make

from hardware import limits, machine
from hardware.limits import available_memory, cpu_quota
from model import GPT, PRESETS, GPTConfig
from tests.simgpu.memory import ALLOCATED, case
from training.memory import Workload, block_memory, bytes_needed, largest_batch, step_memory

BF16 = torch.bfloat16
FP32 = torch.float32
GQA = dict(n_kv_head=2)


def shape(preset: str, V: int, T: int, **more) -> GPTConfig:
    usual = dict(vocab_size=V, n_layer=4, n_head=8, n_embd=256, block_size=T)
    return GPTConfig(**(PRESETS[preset] | usual | more))


def on_meta(c: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(c)


def predicted(c: GPTConfig, workload: Workload) -> float:
    return sum(step_memory(on_meta(c), workload)[1].values())


def too_high(c: GPTConfig, workload: Workload) -> float:
    """Return by which fraction a prediction may be too high: a CPU's T x T matrix counts fully."""
    return 0.25 if c.dropout or (workload.dtype == BF16 and workload.T <= 512) else 0.1


def check(c: GPTConfig, workload: Workload) -> None:
    error = predicted(c, workload) / measured_peak(c, workload) - 1
    assert -0.05 < error < too_high(c, workload), (c, workload)


TIED = GQA | dict(tie_embeddings=True)
NARROW = dict(n_embd=128)  # with few tokens and a large vocabulary, wte's gradients are the peak
SHALLOW = dict(n_layer=2)
PEAKS = [  # preset, what differs from shape(), V, B, T, dtype, what differs from Step()
    ("llama", GQA, 8000, 4, 256, FP32, {}),
    ("gpt2", NARROW, 151936, 1, 64, FP32, {}),
    ("qwen3", {}, 4000, 2, 512, FP32, dict(recompute=True)),
    # With few tokens, the optimizer's step holds the most.
    ("llama", GQA, 8000, 4, 256, FP32, dict(optimizer="muon")),
    ("llama", GQA, 8000, 4, 256, FP32, dict(optimizer="adafactor")),
]
SLOW_PEAKS = [
    ("llama", TIED, 30000, 1, 64, BF16, dict(accum=2)),
    ("llama", GQA, 2000, 1, 64, BF16, dict(optimizer="muon")),
    ("gpt2", dict(dropout=0.1), 2000, 2, 1024, BF16, {}),  # a CPU's fused attention drops nothing
    ("llama", dict(n_embd=512, tie_embeddings=True) | SHALLOW, 50257, 1, 128, BF16, {}),
    ("llama", GQA | SHALLOW, 8000, 2, 1024, BF16, dict(compiled=True)),
    ("gpt2", NARROW | SHALLOW, 151936, 1, 64, BF16, dict(compiled=True)),
]
PEAKS += [pytest.param(*row, marks=[pytest.mark.slow, NEEDS_BF16]) for row in SLOW_PEAKS]


@pytest.mark.parametrize("preset, more, V, B, T, dtype, options", PEAKS)
def test_the_predicted_peak_is_the_measured_one(preset, more, V, B, T, dtype, options):
    options = dict(compiled=False, device="cpu") | options
    check(shape(preset, V, T, **more), Workload(B, T, dtype=dtype, **options))


@pytest.mark.parametrize("name", ODD)
def test_activations_are_what_autograd_keeps(name):
    """Saved-tensor hooks count what one layer keeps, in bf16, at a T where attention is fused."""
    saved: dict[int, int] = {}  # number of layers -> bytes
    for n_layer in (1, 2):
        model = make(name, n_layer=n_layer, block_size=1024).train()
        weights = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
        storages: dict[int, int] = {}

        def note(t: torch.Tensor, weights=weights, storages=storages) -> torch.Tensor:
            storage = t.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage.nbytes()
            return t

        x = torch.zeros(1, 1024, dtype=torch.long)
        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda t: t)
        with hooks, torch.autocast("cpu", BF16):
            model(x, x)
        saved[n_layer] = sum(storages.values())
    kept = 1024 * block_memory(model.config, Workload(1, 1024, 1, BF16, False, "cpu"))[1]
    linear = [m for m in model.blocks[0].modules() if isinstance(m, torch.nn.Linear)]
    copies = 2 * sum(m.weight.numel() for m in linear)  # of the weights, in bf16
    assert kept + copies == pytest.approx(saved[2] - saved[1], rel=0.05)


RESIDENT = [  # V, T, B, accum, n_layer, n_embd, more -> GB of a process that trains eagerly in fp32
    (50257, 512, 16, 2, 2, 128, {}, 4.21),
    (50257, 512, 16, 1, 2, 128, {}, 3.89),
    (50257, 256, 16, 2, 2, 128, {}, 2.32),
    (50257, 256, 16, 2, 2, 128, PRESETS["gpt2"], 2.20),
    (50257, 256, 8, 2, 2, 128, {}, 1.45),
    (50257, 256, 16, 2, 2, 32, {}, 2.10),
    (8000, 256, 32, 2, 4, 128, {}, 1.28),
    (8000, 256, 32, 1, 4, 128, {}, 1.28),
    (4096, 256, 16, 2, 4, 256, {}, 1.04),
    (4096, 256, 16, 1, 4, 256, {}, 0.97),
]


@pytest.mark.parametrize("V, T, B, accum, n_layer, n_embd, more, gb", RESIDENT)
def test_a_cpu_needs_what_its_process_held(V, T, B, accum, n_layer, n_embd, more, gb):
    sizes = dict(n_layer=n_layer, n_head=2, n_embd=n_embd)
    model = on_meta(shape("llama", V, T, **more | sizes))
    size = bytes_needed(model, Workload(B, T, accum, FP32, compiled=False, device="cpu"))
    assert -0.05 < size / (gb * 1e9) - 1 < 0.1


def test_the_largest_batch_fits_and_the_next_does_not():
    model = on_meta(GPTConfig(**PRESETS["gpt2"]))
    on_cpu = Workload(1, 512, compiled=False, device="cpu")
    for workload in (Workload(1, 1024), Workload(1, 1024, world=6, shard="gradients"), on_cpu):
        B = largest_batch(model, workload, 16e9)
        this, next_one = (bytes_needed(model, replace(workload, B=n)) for n in (B, B + 1))
        assert B > 1 and this <= 16e9 < next_one
    assert largest_batch(model, Workload(1, 1024), 1e9) == 0


@pytest.mark.parametrize("config, V, B, dtype, more, allocated", ALLOCATED)
def test_predictions_agree_with_the_cuda_allocator(config, V, B, dtype, more, allocated):
    assert -0.05 < predicted(*case(config, V, B, dtype, more)) / allocated - 1 < 0.1


def test_capacity_includes_what_the_process_holds():
    """In a process of its own, which has freed nothing yet. What the system still gives is left
    out, since other programs change it.
    """
    script = """
import torch
from hardware import limits
limits.available_memory = lambda: 0
held, amounts = [], []
for _ in range(4):
    amounts.append(limits.memory_capacity(torch.device("cpu")))
    held.append(torch.ones(1 << 27))
print(*(b - a for a, b in zip(amounts, amounts[1:])))
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    assert [round(float(more) / 2**27) for more in done.stdout.split()] == [4, 4, 4], done.stdout


@pytest.mark.slow
def test_capacity_ends_at_the_address_space_of_a_login_node():
    script = """
import resource, torch
from hardware import limits
size = 1024 * int(open("/proc/self/status").read().split("VmSize:")[1].split()[0])
resource.setrlimit(resource.RLIMIT_AS, (size + 10**9, size + 10**9))
print(limits.memory_capacity(torch.device("cpu")) - limits.own_memory())
"""
    command = [sys.executable, "-c", script]
    left = float(subprocess.run(command, cwd=REPO, capture_output=True, check=True).stdout)
    assert 0.5e9 < left <= 0.7e9


def put(root: Path, files: dict[str, str]) -> str:
    """Write what the system tells of itself into a folder; return its path."""
    listed = "7:cpu,cpuacct:/job/step\n4:memory:/job/step\n0::/job/step\n"
    memory = {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {64_000_000_000 // 1024} kB\n"}
    for name, text in (memory | {"proc/self/cgroup": listed} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


# version -> the folder of the groups, a limit, none, and what says that 400 MB are used
VERSIONS = {
    1: (
        "sys/fs/cgroup/memory", "memory.limit_in_bytes", "9223372036854771712\n",
        "rss 7\nshmem 7\ntotal_rss 300000000\ntotal_cache 999\ntotal_shmem 100000000\n",
    ),
    2: (
        "sys/fs/cgroup", "memory.max", "max\n",
        "anon 300000000\nfile 999\nshmem 100000000\n",
    ),
}  # fmt: skip
LIMITS = [  # of the control groups in MB, None where there is none; what is left
    ({"job/step": 2400, "job": 9000}, 2000),
    ({"job/step": None, "job": 1600}, 1200),
    ({".": 1000}, 600),  # inside a container: the path is the one outside
]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("limits, expected", LIMITS)
def test_capacity_obeys_each_control_group(tmp_path, version, limits, expected):
    folder, name, none, used = VERSIONS[version]
    files = {f"{folder}/{group}/memory.stat": used for group in limits}
    for group, mb in limits.items():
        files[f"{folder}/{group}/{name}"] = f"{mb * 10**6}\n" if mb else none
    assert available_memory(put(tmp_path, files)) == expected * 10**6


QUOTAS = [  # files of the control groups, CPUs
    ({"cpu.max": "max 100000"}, 64),
    ({"cpu.max": "max 100000", "job/cpu.max": "250000 100000"}, 2.5),
    ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
    ({"cpu/job/cpu.cfs_quota_us": "200000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 2),
]


@pytest.mark.parametrize("files, cpus", QUOTAS)
def test_threads_obey_the_cpu_quota_of_the_container(tmp_path, files, cpus, monkeypatch):
    root = put(tmp_path, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    threads = []
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(limits, "cpu_quota", lambda: cpu_quota(root))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    limits.obey_cpu_quota()
    monkeypatch.delenv("OMP_NUM_THREADS")
    limits.obey_cpu_quota()
    assert cpu_quota(root) == cpus and threads == [int(cpus)]


PLACES = [  # variables, GPUs that the process sees -> its local rank, its GPU
    (dict(LOCAL_RANK="3", SLURM_LOCALID="0"), 8, (3, 3)),
    (dict(SLURM_LOCALID="3"), 8, (3, 3)),
    (dict(SLURM_LOCALID="3"), 1, (3, 0)),  # srun --gpus-per-task=1
    ({}, 1, (0, 0)),
    ({}, 8, None),
]


@pytest.mark.parametrize("variables, gpus, place", PLACES)
def test_each_rank_of_srun_takes_its_own_gpu(variables, gpus, place, monkeypatch, refuses):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if place:
        assert machine.local_rank_and_gpu("auto", 16) == place
    else:
        assert "LOCAL_RANK" in refuses(lambda: machine.local_rank_and_gpu("auto", 16))
        assert machine.local_rank_and_gpu("cpu", 16) == (0, 0)

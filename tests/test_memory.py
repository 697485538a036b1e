"""Compare the memory that training/memory.py predicts with the memory that torch allocates."""

import math
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

import prepare
from hardware import limits, machine
from hardware.containers import available_memory, cpu_quota
from model import GPT, PRESETS, GPTConfig
from tests.simgpu.memory import ALLOCATED, case
from text.settings import PrepareConfig
from training.memory import Workload, bytes_needed, largest_batch, step_memory

BF16 = torch.bfloat16
FP32 = torch.float32
GQA = dict(n_kv_head=2)
SHALLOW = dict(n_layer=2)


def shape(preset: str, V: int, T: int, **more) -> GPTConfig:
    usual = dict(vocab_size=V, n_layer=4, n_head=8, n_embd=256, block_size=T)
    return GPTConfig(**(PRESETS[preset] | usual | more))


def on_meta(c: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(c)


def error(c: GPTConfig, workload: Workload, measured: float) -> float:
    """Return by which fraction the prediction is too high."""
    return sum(step_memory(on_meta(c), workload)[1].values()) / measured - 1


slow = [pytest.mark.slow, NEEDS_BF16]
IN_BF16 = dict(dtype=BF16)
MUON = dict(dtype=BF16, optimizer="muon")
COMPILED = dict(dtype=BF16, compiled=True)
NARROW = dict(n_embd=128)  # with few tokens and a large vocabulary, wte's gradients are the peak


@pytest.mark.parametrize("preset, more, V, B, T, options", [
    pytest.param("gpt2", NARROW, 151936, 1, 64, {}, id="a large vocabulary"),
    # With few tokens, the optimizer's step holds the most.
    pytest.param("llama", GQA, 8000, 1, 64, dict(optimizer="adafactor"), id="Adafactor"),
    pytest.param("llama", GQA, 2000, 1, 64, MUON, marks=slow, id="Muon"),
    # A CPU's fused attention drops nothing, so it makes a T x T matrix, of which all is counted.
    pytest.param("gpt2", dict(dropout=0.1), 2000, 2, 1024, IN_BF16, marks=slow, id="dropout"),
    pytest.param("llama", GQA | SHALLOW, 8000, 2, 1024, COMPILED, marks=slow, id="compiled"),
    pytest.param(
        "gpt2", NARROW | SHALLOW, 151936, 1, 64, COMPILED, marks=slow, id="compiled, tied"
    ),
])  # fmt: skip
def test_the_predicted_peak_is_the_measured_one(preset, more, V, B, T, options):
    c = shape(preset, V, T, **more)
    workload = Workload(B, T, **dict(dtype=FP32, compiled=False, device="cpu") | options)
    assert -0.05 < error(c, workload, measured_peak(c, workload)) < (0.25 if c.dropout else 0.1)


@NEEDS_BF16
@pytest.mark.parametrize("name", ODD)
def test_the_predicted_peak_is_right_for_every_shape(name):
    """Activations are most of it, and T is so large that attention is fused."""
    c = make(name, n_layer=8, block_size=1024).config
    workload = Workload(2, 1024, compiled=False, device="cpu")
    assert abs(error(c, workload, measured_peak(c, workload))) < 0.04


@pytest.mark.parametrize("V, T, B, accum, more, gb", [
    pytest.param(50257, 512, 16, 2, dict(n_layer=2, n_embd=128), 4.21, id="accumulated"),
    pytest.param(50257, 256, 16, 2, PRESETS["gpt2"] | SHALLOW | NARROW, 2.20, id="tied head"),
    pytest.param(4096, 256, 16, 2, {}, 1.04, id="a small vocabulary"),
])  # fmt: skip
def test_a_cpu_needs_what_its_process_held(V, T, B, accum, more, gb):
    """Measured are the GB of a process that trained in fp32, not compiled."""
    model = on_meta(shape("llama", V, T, **more | dict(n_head=2)))
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
    assert -0.05 < error(*case(config, V, B, dtype, more), allocated) < 0.1


def printed(script: str) -> float:
    """Return the number that a script prints, in a process which has freed nothing yet."""
    script = f"import resource, torch\nfrom hardware import limits\n{script}"
    command = [sys.executable, "-c", script]
    return float(subprocess.run(command, cwd=REPO, capture_output=True, check=True).stdout)


def test_capacity_includes_what_the_process_holds():
    more = printed("""
limits.available_memory = lambda: 0  # other programs change it
before = limits.memory_capacity(torch.device("cpu"))
held = torch.ones(1 << 27)
print(limits.memory_capacity(torch.device("cpu")) - before)
""")
    assert more == pytest.approx(2**29, rel=0.1)


@pytest.mark.slow
def test_capacity_ends_at_the_address_space_of_a_login_node():
    left = printed("""
size = 1024 * int(open("/proc/self/status").read().split("VmSize:")[1].split()[0])
resource.setrlimit(resource.RLIMIT_AS, (size + 10**9, size + 10**9))
print(limits.memory_capacity(torch.device("cpu")) - limits.own_memory())
""")
    assert 0.5e9 < left <= 0.7e9


def put(root: Path, files: dict[str, str]) -> str:
    """Write what the system tells of itself into a folder; return its path."""
    listed = "7:cpu,cpuacct:/job/step\n4:memory:/job/step\n0::/job/step\n"
    memory = {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {64_000_000_000 // 1024} kB\n"}
    for name, text in (memory | {"proc/self/cgroup": listed} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


USED_V1 = "rss 7\nshmem 7\ntotal_rss 300000000\ntotal_cache 999\ntotal_shmem 100000000\n"
USED_V2 = "anon 300000000\nfile 999\nshmem 100000000\n"
NONE_V1 = "9223372036854771712\n"


@pytest.mark.parametrize("tree, limit, used", [
    pytest.param("memory/", "memory.limit_in_bytes", USED_V1, id="version 1"),
    pytest.param("", "memory.max", USED_V2, id="version 2"),
])  # fmt: skip
@pytest.mark.parametrize("limits, left", [
    pytest.param({"job/step": 2.4e9, "job": 9e9}, 2e9, id="the lowest counts"),
    pytest.param({"job/step": math.inf, "job": 1.6e9}, 1.2e9, id="none, in a group with one"),
    pytest.param({".": 1e9}, 0.6e9, id="in a container: the path is the one outside"),
])  # fmt: skip
def test_capacity_obeys_each_control_group(tmp_path, tree, limit, used, limits, left):
    none = "max\n" if limit == "memory.max" else NONE_V1
    files = {f"{group}/memory.stat": used for group in limits}
    for group, size in limits.items():
        files[f"{group}/{limit}"] = none if size == math.inf else f"{size:.0f}\n"
    root = put(tmp_path, {f"sys/fs/cgroup/{tree}{name}": text for name, text in files.items()})
    assert available_memory(root) == left


@pytest.mark.parametrize("files, cpus", [
    ({"cpu.max": "max 100000"}, 64),
    ({"cpu.max": "max 100000", "job/cpu.max": "250000 100000"}, 2.5),
    ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
    ({"cpu/job/cpu.cfs_quota_us": "200000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 2),
])  # fmt: skip
def test_threads_and_workers_obey_the_cpu_quota(tmp_path, files, cpus, monkeypatch):
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
    monkeypatch.setattr(prepare, "cpu_quota", lambda: cpu_quota(root))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    assert prepare.number_of_workers(PrepareConfig(), total=10**9) == int(cpus)


@pytest.mark.parametrize("variables, gpus, place", [
    (dict(LOCAL_RANK="3", SLURM_LOCALID="0"), 8, (3, 3)),
    (dict(SLURM_LOCALID="3"), 8, (3, 3)),
    pytest.param(dict(SLURM_LOCALID="3"), 1, (3, 0), id="srun --gpus-per-task=1"),
    ({}, 1, (0, 0)),
    ({}, 8, None),
])  # fmt: skip
def test_each_rank_of_srun_takes_its_own_gpu(variables, gpus, place, monkeypatch, refuses):
    """`place`: its local rank, and the number of its GPU among those that it sees."""
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

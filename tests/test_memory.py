"""Compare the memory that training/memory.py predicts with the memory that torch allocates."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import NEEDS_BF16, REPO
from peak import measured_peak
from test_model import ODD, make

from hardware.machine import available
from model import GPT, PRESETS, GPTConfig
from tests.simgpu.memory import shipped
from training.memory import Step, block_memory, largest_batch, needed, step_memory

BF16 = torch.bfloat16
FP32 = torch.float32
GQA = dict(n_kv_head=2)


def shape(preset: str, V: int, T: int, **more) -> GPTConfig:
    usual = dict(vocab_size=V, n_layer=4, n_head=8, n_embd=256, block_size=T)
    return GPTConfig(**(PRESETS[preset] | usual | more))


def on_meta(c: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(c)


def predicted(c: GPTConfig, step: Step) -> float:
    return sum(step_memory(on_meta(c), step)[1].values())


def too_high(c: GPTConfig, step: Step) -> float:
    """Return by which fraction a prediction may be too high: a CPU's T x T matrix counts fully."""
    return 0.25 if c.dropout or (step.dtype == BF16 and step.T <= 512) else 0.1


def check(c: GPTConfig, step: Step) -> None:
    error = predicted(c, step) / measured_peak(c, step) - 1
    assert -0.05 < error < too_high(c, step), (c, step)


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
    check(shape(preset, V, T, **more), Step(B, T, dtype=dtype, **options))


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
    kept = 1024 * block_memory(model.config, Step(1, 1024, 1, BF16, False, "cpu"))[1]
    linear = [m for m in model.blocks[0].modules() if isinstance(m, torch.nn.Linear)]
    copies = 2 * sum(m.weight.numel() for m in linear)  # of the weights, in bf16
    assert kept + copies == pytest.approx(saved[2] - saved[1], rel=0.05)


def test_the_largest_batch_fits_and_the_next_does_not():
    model = on_meta(GPTConfig(**PRESETS["gpt2"]))
    on_cpu = Step(1, 512, compiled=False, device="cpu")
    for step in (Step(1, 1024), Step(1, 1024, world=6, shard="gradients"), on_cpu):
        B = largest_batch(model, step, 16e9)
        this, next_one = (needed(model, replace(step, B=n)) for n in (B, B + 1))
        assert B > 1 and this <= 16e9 < next_one
    assert largest_batch(model, Step(1, 1024), 1e9) == 0


# Bytes that torch allocated on a simulated A100: tests/simgpu/memory.py
ALLOCATED = {
    "demo bfloat16 B16 eager stream 1 x none": 375_534_080,
    "demo float32 B16 compiled stream 1 x none": 396_705_792,
    "gpt2_124m bfloat16 B16 eager stream recompute 1 x none": 4_342_460_928,
    "gpt2_124m float16 B16 eager mask 1 x none": 17_366_742_528,
    "train_1b bfloat16 B8 eager stream 6 x none": 53_670_870_016,
    "train_1b bfloat16 B8 compiled stream 6 x none": 53_283_516_928,
    "train_1b bfloat16 B8 eager stream recompute 6 x all": 7_072_435_712,
    "minimind_26m float16 B32 compiled stream 6 x optimizer": 2_912_234_496,
    "train_100m bfloat16 B8 compiled mask recompute 6 x all": 837_536_256,
    "train_100m bfloat16 B8 eager stream 6 x gradients": 4_784_190_464,
    "chat float32 B4 eager stream recompute 6 x all": 540_865_536,
}


@pytest.mark.parametrize("case", ALLOCATED)
def test_predictions_agree_with_the_cuda_allocator(case):
    found = next(c for c in shipped([case.split()[0]], "compiled" in case) if c.key == case)
    assert -0.05 < found.total() / ALLOCATED[case] - 1 < 0.1


def test_capacity_includes_what_the_process_holds():
    """In a process of its own, which has freed nothing yet. What the system still gives is left
    out, since other programs change it.
    """
    script = """
import torch
from hardware import machine
machine.available = lambda: 0
held, amounts = [], []
for _ in range(4):
    amounts.append(machine.memory_capacity(torch.device("cpu")))
    held.append(torch.ones(1 << 27))
print(*(b - a for a, b in zip(amounts, amounts[1:])))
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    assert [round(float(more) / 2**27) for more in done.stdout.split()] == [4, 4, 4], done.stdout


MB = 10**6


def groups(root: Path, **limits: int) -> None:
    """Write what the system tells of its memory, 64 GB, and of two control groups, job/step.

    limits: of a group, in MB; 0: none. Each group uses 400 MB.
    """
    files = {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {64_000 * MB // 1024} kB\n"}
    files["proc/self/cgroup"] = "7:cpu,cpuacct:/other\n0::/job/step\n"
    for group, size in limits.items():
        folder = f"sys/fs/cgroup/{'' if group == 'top' else group.replace('_', '/')}"
        files[f"{folder}/memory.max"] = f"{size * MB}\n" if size else "max\n"
        files[f"{folder}/memory.stat"] = f"anon {300 * MB}\nfile 999\nshmem {100 * MB}\n"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


LIMITS = [
    (dict(job_step=2400, job=9000), 2000),
    (dict(job_step=0, job=1600), 1200),
    (dict(top=1000), 600),  # inside a container: the path is the one outside
]


@pytest.mark.parametrize("limits, expected", LIMITS)
def test_capacity_obeys_each_control_group(tmp_path, limits, expected):
    groups(tmp_path, **limits)
    assert available(str(tmp_path)) == expected * MB

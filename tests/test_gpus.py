import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch
from conftest import REPO

import hardware.machine
from configurator import UserError
from hardware.gpus import GPUS, datasheet_tflops, find_gpu
from hardware.machine import pick_device, start


@pytest.mark.parametrize(
    "spec, name, memory_gb, bandwidth",
    [
        ("a100-80g", "A100", 80, 2039),
        ("A100 80GB", "A100", 80, 2039),
        ("a10080gb", "A100", 80, 2039),  # not an A10
        ("a100", "A100", 40, 1555),  # the smaller
        ("NVIDIA A100-SXM4-80GB", "A100", 80, 2039),
        ("NVIDIA A100 80GB PCIe", "A100", 80, 2039),
        ("NVIDIA A100-PCIE-40GB", "A100", 40, 1555),
        ("a800_80g", "A800", 80, 2039),
        ("v100", "V100", 16, 900),
        ("v100-16g", "V100", 16, 900),
        ("Tesla V100-SXM2-32GB", "V100", 32, 900),
        ("Tesla V100-PCIE-32GB", "V100 PCIE", 32, 900),
        ("Tesla V100S-PCIE-32GB", "V100S PCIE", 32, 1134),
        ("Tesla T4", "T4", 16, 320),
        ("rtx4090", "RTX 4090", 24, 1008),
        ("4090", "RTX 4090", 24, 1008),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 24, 1008),
        ("geforce-rtx-5090-32-gb", "RTX 5090", 32, 1792),
        ("h100", "H100", 80, 3350),
        ("h100-sxm", "H100", 80, 3350),
        ("NVIDIA H100 80GB HBM3", "H100", 80, 3350),
        ("h100-pcie", "H100 PCIe", 80, 2000),
        ("H100 NVL", "H100 NVL", 94, 3900),
        ("NVIDIA H200", "H200", 141, 4800),
        ("h20", "H20", 96, 4000),
        ("b200", "B200", 180, 7700),
        ("mi300x", "MI300X", 192, 5300),
        ("AMD Instinct MI300X OAM", "MI300X", 192, 5300),
    ],
)
def test_a_gpu_is_found_by_what_people_and_drivers_call_it(spec, name, memory_gb, bandwidth):
    card = find_gpu(spec)
    tflops, _, watts, source = GPUS[name]
    assert (card.name, card.memory_gb, card.bandwidth) == (name, memory_gb, bandwidth)
    assert (card.tflops, card.watts, card.source) == (tflops, watts, source)


@pytest.mark.parametrize(
    "spec, words",
    [
        ("a1000", "the nearest is A100"),
        ("rtx 4080", "the nearest is RTX 4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "the nearest is RTX 4090"),
        ("L40", "the nearest is L40S"),
        ("", ", ".join(GPUS)),
        ("a100-64g", "A100 comes with 40 or 80 GB"),
        ("NVIDIA A100-SXM-64GB", "A100 comes with 40 or 80 GB"),
        ("h200-80gb", "H200 comes with 141 GB"),
    ],
)
def test_an_unknown_gpu_or_size_is_refused_in_one_line_that_helps(spec, words):
    with pytest.raises(ValueError) as e:
        find_gpu(spec)
    assert repr(spec) in str(e.value) and words in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("name", GPUS)
def test_an_entry_is_whole_sane_and_found_by_its_name_in_every_size(name):
    tflops, memory, watts, source = GPUS[name]
    assert source and memory and 70 <= watts <= 1000
    assert {"fp16", "fp32"} <= tflops.keys() <= {"bf16", "fp16", "tf32", "fp32"}
    assert tflops.get("bf16", tflops["fp16"]) == tflops["fp16"] > tflops["fp32"]
    assert tflops["fp16"] >= 1.9 * tflops.get("tf32", 0)
    assert find_gpu(name).memory_gb == min(memory)
    for gb, bandwidth in memory.items():
        assert 16 <= gb <= 192 and 300 <= bandwidth <= 8000
        for spec in (f"{name} {gb}GB", f"{name}-{gb}g".lower(), f"{name}{gb}G".replace(" ", "_")):
            card = find_gpu(spec)
            assert (card.name, card.memory_gb, card.bandwidth) == (name, gb, bandwidth)


def test_a_peak_is_of_exactly_this_product():
    assert datasheet_tflops("NVIDIA A100-SXM4-80GB", "tf32") == 156
    for other in ("NVIDIA A1000", "NVIDIA A10G", "NVIDIA H100 PCIe 2", "AMD EPYC 7B12, 2 threads"):
        assert datasheet_tflops(other, "fp16") is None


@pytest.mark.parametrize(
    "capability, dtype, computed_as_tf32",
    [((8, 0), "float32", True), ((7, 0), "float32", False), ((8, 0), "bfloat16", False)],
)
def test_float32_is_called_tf32_on_the_gpus_that_compute_it_so(
    monkeypatch, capability, dtype, computed_as_tf32
):
    monkeypatch.setattr(hardware.machine, "pick_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    before = torch.get_float32_matmul_precision()
    machine = start("cuda", dtype)
    torch.set_float32_matmul_precision(before)
    assert ("TF32" in machine.why) == computed_as_tf32


def test_the_table_needs_no_torch():
    code = "import sys, hardware.gpus; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=REPO, check=True)


def test_a_gpu_for_which_torch_has_no_kernels_gets_the_build_that_has_them(monkeypatch):
    error = torch.AcceleratorError("CUDA error: no kernel image is available for execution")
    monkeypatch.setattr(torch, "ones", Mock(side_effect=error))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "compute_120"])
    with pytest.raises(UserError, match="--device=cuda.* sm_75 compute_120 .*CUDA 12.6"):
        pick_device("cuda")

"""The table of GPUs, and a GPU that this torch does not serve."""

from unittest.mock import Mock

import pytest
import torch

from configurator import UserError
from hardware.machine import pick_device
from hardware.peak import GPUS, find_gpu


@pytest.mark.parametrize(
    "spec, name, memory_gb, bandwidth",
    [
        ("a100-80g", "A100", 80, 2039),
        ("a100", "A100", 40, 1555),  # the smaller
        ("NVIDIA A100-SXM4-80GB", "A100", 80, 2039),
        ("NVIDIA A100 80GB PCIe", "A100 PCIE", 80, 1935),
        ("a800_80g", "A800", 80, 2039),
        ("v100-16g", "V100", 16, 900),
        ("Tesla V100-PCIE-32GB", "V100 PCIE", 32, 900),
        ("Tesla V100S-PCIE-32GB", "V100S PCIE", 32, 1134),
        ("Tesla T4", "T4", 16, 320),
        ("4090", "RTX 4090", 24, 1008),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 24, 1008),
        ("h100-sxm", "H100", 80, 3350),
        ("NVIDIA H100 80GB HBM3", "H100", 80, 3350),
        ("AMD Instinct MI300X OAM", "MI300X", 192, 5300),
    ],
)
def test_a_gpu_is_found_by_what_people_and_drivers_call_it(spec, name, memory_gb, bandwidth):
    card = find_gpu(spec)
    assert (card.name, card.memory_gb, card.bandwidth) == (name, memory_gb, bandwidth)


@pytest.mark.parametrize("spec", ["a1000", "RTX 4090 Laptop GPU", "L40", "", "a100-64g", "A10G"])
def test_an_unknown_gpu_or_size_is_refused_in_one_line_with_the_table(spec):
    with pytest.raises(ValueError) as e:
        find_gpu(spec)
    assert repr(spec) in str(e.value) and "A100 80GB" in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("name", GPUS)
def test_an_entry_is_whole_sane_and_found_by_its_name_in_every_size(name):
    tflops, memory, watts, source = GPUS[name]
    assert source and memory and 70 <= watts <= 1000
    assert {"fp16", "fp32"} <= tflops.keys() <= {"bf16", "fp16", "tf32", "fp32"}
    assert tflops.get("bf16", tflops["fp16"]) == tflops["fp16"] > tflops["fp32"]
    assert tflops["fp16"] >= 1.9 * tflops.get("tf32", 0)
    for gb, bandwidth in memory.items():
        assert 16 <= gb <= 192 and 300 <= bandwidth <= 8000
        for spec in (f"{name} {gb}GB", f"{name}-{gb}g".lower(), f"{name}_{gb}G".replace(" ", "")):
            card = find_gpu(spec)
            assert (card.name, card.memory_gb, card.bandwidth) == (name, gb, bandwidth)


def test_a_gpu_for_which_torch_has_no_kernels_gets_the_build_that_has_them(monkeypatch):
    error = torch.AcceleratorError("CUDA error: no kernel image is available for execution")
    monkeypatch.setattr(torch, "ones", Mock(side_effect=error))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "compute_120"])
    with pytest.raises(UserError, match="--device=cuda.* sm_75 compute_120.*CUDA 12.6"):
        pick_device("cuda")

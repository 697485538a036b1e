"""The table of GPUs, and a GPU that this torch does not serve."""

from unittest.mock import Mock

import pytest
import torch

from configurator import UserError
from hardware.machine import pick_device
from hardware.peak import GPUS, find_gpu

CALLED = [
    ("a100", "A100", 40),  # the smaller
    ("NVIDIA A100-SXM4-80GB", "A100", 80),
    ("Tesla V100S-PCIE-32GB", "V100S PCIE", 32),
    ("NVIDIA GeForce RTX 4090", "RTX 4090", 24),
    ("NVIDIA H100 80GB HBM3", "H100", 80),
    ("AMD Instinct MI300X OAM", "MI300X", 192),
]


@pytest.mark.parametrize("spec, name, memory_gb", CALLED)
def test_a_gpu_is_found_by_what_people_and_drivers_call_it(spec, name, memory_gb):
    card = find_gpu(spec)
    assert (card.name, card.memory_gb) == (name, memory_gb)


@pytest.mark.parametrize("spec", ["RTX 4090 Laptop GPU", "L40", "", "a100-64g"])
def test_an_unknown_gpu_or_size_is_not_taken_for_another(spec):
    assert find_gpu(spec) is None


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_is_found_in_every_size(name):
    for gb in GPUS[name][1]:
        for spec in (f"{name} {gb}GB", f"{name}-{gb}g".lower(), f"{name}_{gb}G".replace(" ", "")):
            card = find_gpu(spec)
            assert (card.name, card.memory_gb) == (name, gb)


def test_a_gpu_that_torch_does_not_serve_is_refused(monkeypatch):
    error = torch.AcceleratorError("CUDA error: no kernel image is available for execution")
    monkeypatch.setattr(torch, "ones", Mock(side_effect=error))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "compute_120"])
    with pytest.raises(UserError, match="--device=cuda.* sm_75 compute_120.*CUDA 12.6"):
        pick_device("cuda")

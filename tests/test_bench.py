import json

import pytest
import torch
from conftest import call

from bench import matmul


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
    assert matmul.datasheet_tflops(name, "bf16") == bf16


def test_v100_has_an_fp16_peak():
    assert matmul.datasheet_tflops("Tesla V100-SXM2-16GB", "fp16") == 125


def test_matmul_prints_a_figure_for_every_size_and_type(tmp_path, capsys):
    out = tmp_path / "roof.json"
    call(
        matmul.main,
        "--sizes",
        "64",
        "128",
        "--dtypes",
        "fp32",
        "tf32",
        "bf16",
        "--seconds=0.01",
        "--device=cpu",
        f"--json={out}",
    )
    table = json.loads(out.read_text())["tflops"]
    assert all(table[d][n] > 0 for d in ("fp32", "bf16") for n in ("64", "128"))
    assert table["tf32"]["64"] == "n/a"
    assert "datasheet" in capsys.readouterr().out


def test_measuring_leaves_the_matmul_precision_as_it_was():
    before = torch.get_float32_matmul_precision()
    matmul.measure_tflops(32, "fp32", torch.device("cpu"), seconds=0.01)
    assert torch.get_float32_matmul_precision() == before

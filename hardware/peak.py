"""Peak speed, memory and power of GPUs from their datasheets, and the measured peak of this CPU.

MFU is relative to the peak speed. plan.py uses the table to plan runs on other GPUs.
"""

import platform
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from hardware.terminal import plural

# Names of a dtype in datasheets, the faster one first.
KINDS = {torch.float32: ["tf32", "fp32"], torch.bfloat16: ["bf16"], torch.float16: ["fp16"]}


@dataclass(frozen=True)
class Card:
    """A GPU with one of the memory sizes in which it is sold."""

    name: str
    # Dense peaks in TFLOPS, by dtype: half of the sparse figure, if a datasheet gives only that.
    # fp16 and bf16 are with fp32 accumulation, as in training. On GeForce cards this is half the
    # speed of fp16 with fp16 accumulation.
    tflops: dict[str, float]
    memory_gb: int  # as sold
    watts: int  # power limit of the board
    source: str

    @property
    def bytes(self) -> float:
        """The bytes of its memory that PyTorch sees, or somewhat fewer.

        GPUs that store the check bits of ECC in their own GDDR6 memory have 1 to 3 % less than is
        sold: 15.6e9 bytes of a T4's 16 GB, 47.7e9 of 48. GPUs with HBM and GeForce cards have
        somewhat more than the GB (10^9 bytes) that they are sold with.
        """
        return self.memory_gb * 1e9 * (0.97 if self.name in ("T4", "A10", "L4", "L40S") else 1)


A100 = dict(bf16=312, fp16=312, tf32=156, fp32=19.5)
H100 = dict(bf16=989, fp16=989, tf32=494, fp32=67)
H100_NVL = dict(bf16=835, fp16=835, tf32=417, fp32=60)

# name -> dense TFLOPS, GB of memory, watts, source. A name without a form factor means SXM.
# fmt: off
GPUS = {
    "V100": (dict(fp16=125, fp32=15.7), (16, 32), 300, "NVIDIA V100 datasheet 2020, SXM2"),
    "V100 PCIE": (dict(fp16=112, fp32=14), (16, 32), 250, "NVIDIA V100 datasheet 2020, PCIe"),
    "V100S PCIE": (dict(fp16=130, fp32=16.4), (32,), 250, "NVIDIA V100 datasheet 2020, V100S"),
    "T4": (dict(fp16=65, fp32=8.1), (16,), 70, "NVIDIA T4 datasheet"),
    "A10": (dict(bf16=125, fp16=125, tf32=62.5, fp32=31.2), (24,), 150, "NVIDIA A10 datasheet"),
    "A100": (A100, (40, 80), 400, "NVIDIA A100 datasheet, SXM4"),
    # The watts are those of 80 GB; 40 GB has 250 W.
    "A100 PCIE": (A100, (40, 80), 300, "NVIDIA A100 datasheet, PCIe, 80 GB"),
    # There is no datasheet of the A800's SXM4 form, which differs from the A100's in NVLink only.
    # NVIDIA A800 40GB Active datasheet: 240 W.
    "A800": (A100, (40, 80), 400, "the A100's figures"),
    "A800 PCIE": (A100, (40, 80), 300, "the A100's figures, PCIe"),
    "RTX 3090": (dict(bf16=71, fp16=71, tf32=35.6, fp32=35.6), (24,), 350,
                 "NVIDIA GA102 whitepaper, table 9"),
    "RTX 4090": (dict(bf16=165.2, fp16=165.2, tf32=82.6, fp32=82.6), (24,), 450,
                 "NVIDIA Ada whitepaper, appendix A"),
    "RTX 5090": (dict(bf16=209.5, fp16=209.5, tf32=104.8, fp32=104.8), (32,), 575,
                 "NVIDIA RTX Blackwell whitepaper"),
    "L4": (dict(bf16=121, fp16=121, tf32=60, fp32=30.3), (24,), 72, "NVIDIA L4 datasheet"),
    "L40S": (dict(bf16=362, fp16=362, tf32=183, fp32=91.6), (48,), 350, "NVIDIA L40S datasheet"),
    "H100": (H100, (80,), 700, "NVIDIA H100 datasheet, SXM5"),
    "H100 PCIe": (dict(bf16=756, fp16=756, tf32=378, fp32=51), (80,), 350,
                  "NVIDIA H100 PCIe product brief PB-11133"),
    "H100 NVL": (H100_NVL, (94,), 400, "NVIDIA H100 datasheet, NVL, one GPU of the pair"),
    # The H800's datasheet as published by a reseller (chaoqing-i.com, 2023-11-28).
    "H800": (H100, (80,), 700, "NVIDIA H800 datasheet by a reseller; power of the H100"),
    "H200": (H100, (141,), 700, "NVIDIA H200 datasheet, SXM5"),
    "H200 NVL": (H100_NVL, (141,), 600, "NVIDIA H200 datasheet, NVL"),
    # NVIDIA has published no document on the H20.
    "H20": (dict(bf16=148, fp16=148, tf32=74, fp32=44), (96,), 400,
            "its datasheet as reported by the press"),
    "B200": (dict(bf16=2250, fp16=2250, tf32=1125, fp32=75), (180,), 1000,
             "NVIDIA Blackwell datasheet, HGX B200, one GPU of eight"),
    "MI300X": (dict(bf16=1307.4, fp16=1307.4, tf32=653.7, fp32=163.4), (192,), 750,
               "AMD MI300X datasheet"),
}
# fmt: on
CARDS = [
    Card(name, dict(tflops), gb, watts, source)
    for name, (tflops, sizes, watts, source) in GPUS.items()
    for gb in sizes
]
BRANDS = re.compile(r"NVIDIA|GEFORCE|TESLA|AMD|INSTINCT|OAM|HBM\w+|SXM\d?")
SIZE = re.compile(r"\d+GB?")


def find_gpu(spec: str) -> Card | None:
    """Return the card that `spec` names; None if the table has no such GPU or size.

    spec: as people write it ("a100-80g", "4090") or as a driver does ("NVIDIA H100 80GB HBM3").
    Without a memory size, it means the smallest that is sold. The brand, the socket, upper and
    lower case and separators are ignored. All other words must match: a laptop's RTX 4090 is not
    the desktop's.
    """
    words = [word for word in re.split(r"[\s_-]+", spec.upper()) if not BRANDS.fullmatch(word)]
    size = "".join(filter(SIZE.fullmatch, words)).rstrip("GB")
    product = "".join(word for word in words if not SIZE.fullmatch(word)).removeprefix("RTX")
    for card in CARDS:
        name = card.name.upper().replace(" ", "").removeprefix("RTX")
        if product == name and size in ("", str(card.memory_gb)):
            return card
    return None


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or the name of the CPU and its number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    model = cpuinfo.exists() and re.search(r"model name\s*: (.+)", cpuinfo.read_text())
    name = model[1] if model else platform.processor() or platform.machine()
    return f"{name}, {plural(torch.get_num_threads(), 'thread')}"


def repeat(statement: str, names: dict[str, object]):
    """Run a statement of Python for half a second; return torch's Measurement of its times."""
    from torch.utils.benchmark import Timer  # takes 0.15 s to import

    timer = Timer(statement, globals=names, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=0.5)


def peak_tflops(device: torch.device, dtype: torch.dtype, given: float) -> tuple[float | None, str]:
    """Return the peak TFLOPS that MFU is relative to, and a line that says where it comes from.

    The peak is `given`, unless that is 0. Otherwise it is measured on a CPU, and taken from the
    datasheet on a GPU; it is None for a GPU that the table does not have.
    """
    if given:
        return given, f"{given:g} TFLOPS a device, from peak_tflops"
    if device.type != "cpu":
        return datasheet_peak(device_name(device), dtype)
    n = 2048
    a, b = (torch.randn(n, n).to(dtype) for _ in range(2))
    names: dict[str, object] = {"torch": torch, "a": a, "b": b, "c": torch.empty_like(a)}
    # The fastest of several repetitions: other programs may have slowed down the rest.
    peak = 2 * n**3 / min(repeat("torch.mm(a, b, out=c)", names).times) / 1e12
    product = f"measured now by a {n} x {n} {KINDS[dtype][-1]} product"
    return peak, f"{peak:.2f} TFLOPS, {product} ({device_name(device)})"


def datasheet_peak(name: str, dtype: torch.dtype) -> tuple[float | None, str]:
    """Return the dense peak TFLOPS of GPU `name` in this dtype, and a line that names the source.

    For fp32 it is the peak of TF32, if the GPU has that. The peak is None if the table has none.
    """
    card = find_gpu(name)  # None if the table has no GPU of exactly this name
    for kind in KINDS[dtype]:
        if card and (peak := card.tflops.get(kind)):
            return peak, f"{peak:g} dense {kind} TFLOPS a device, {card.source}"
    return None, f"unknown for {name} in {kind}, so MFU is n/a: give --peak_tflops"

"""Peak speed, memory and power of GPUs, as their vendors state them.

They are used to compute MFU, and to plan a run on a GPU that is not at hand (bench/plan.py).
"""

import difflib
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """A product. It is the SXM form, if there are several forms and the name does not say which."""

    # Dense peaks in TFLOPS, by dtype. Where a datasheet gives the sparse figure, half of that.
    # fp16 and bf16 are with fp32 accumulation, as training needs it. On GeForce cards this is half
    # the speed of fp16 with fp16 accumulation.
    tflops: dict[str, float]
    # Memory in GB as sold -> bandwidth in GB/s. See also ECC_IN_MEMORY.
    memory: dict[int, int]
    watts: int  # power limit of the board
    source: str


@dataclass(frozen=True)
class Card:
    """A GPU with one of the memory sizes in which it is sold."""

    name: str
    tflops: dict[str, float]
    memory_gb: int
    bandwidth: int  # GB/s
    watts: int
    source: str


# These GPUs store the check bits of ECC in their own GDDR6 memory. PyTorch therefore sees 1 to 3 %
# less than is sold: 15.6e9 bytes of a T4's 16 GB, 47.7e9 of 48. GPUs with HBM and GeForce cards
# have somewhat more than the GB (10^9 bytes) that they are sold with.
ECC_IN_MEMORY = {"T4", "A10", "L4", "L40S"}

A100 = dict(bf16=312, fp16=312, tf32=156, fp32=19.5, fp64=19.5)
H100 = dict(bf16=989, fp16=989, tf32=494, fp32=67, fp64=67)
H100_NVL = dict(bf16=835, fp16=835, tf32=417, fp32=60, fp64=60)

# fmt: off
GPUS = {
    "V100": GPU(dict(fp16=125, fp32=15.7, fp64=7.8), {16: 900, 32: 900}, 300,
                "NVIDIA V100 datasheet 2020, SXM2"),
    "V100 PCIE": GPU(dict(fp16=112, fp32=14, fp64=7), {16: 900, 32: 900}, 250,
                     "NVIDIA V100 datasheet 2020, PCIe"),
    "V100S PCIE": GPU(dict(fp16=130, fp32=16.4, fp64=8.2), {32: 1134}, 250,
                      "NVIDIA V100 datasheet 2020, V100S"),
    "T4": GPU(dict(fp16=65, fp32=8.1), {16: 320}, 70,
              "NVIDIA T4 datasheet"),
    "A10": GPU(dict(bf16=125, fp16=125, tf32=62.5, fp32=31.2), {24: 600}, 150,
               "NVIDIA A10 datasheet"),
    "A100": GPU(A100, {40: 1555, 80: 2039}, 400,
                "NVIDIA A100 datasheet, SXM4; PCIe has the same peaks, 1935 GB/s at 80 GB, "
                "and 250 W or 300 W"),
    "A800": GPU(A100, {40: 1555, 80: 2039}, 400,
                "the A100's figures: there is no datasheet of the A800's SXM4 form, which differs "
                "in NVLink only; NVIDIA A800 40GB Active datasheet: 1555 GB/s, 240 W"),
    "RTX 3090": GPU(dict(bf16=71, fp16=71, tf32=35.6, fp32=35.6), {24: 936}, 350,
                    "NVIDIA GA102 whitepaper, table 9"),
    "RTX 4090": GPU(dict(bf16=165.2, fp16=165.2, tf32=82.6, fp32=82.6), {24: 1008}, 450,
                    "NVIDIA Ada whitepaper, appendix A"),
    "RTX 5090": GPU(dict(bf16=209.5, fp16=209.5, tf32=104.8, fp32=104.8), {32: 1792}, 575,
                    "NVIDIA RTX Blackwell whitepaper"),
    "L4": GPU(dict(bf16=121, fp16=121, tf32=60, fp32=30.3), {24: 300}, 72,
              "NVIDIA L4 datasheet"),
    "L40S": GPU(dict(bf16=362, fp16=362, tf32=183, fp32=91.6), {48: 864}, 350,
                "NVIDIA L40S datasheet"),
    "H100": GPU(H100, {80: 3350}, 700,
                "NVIDIA H100 datasheet, SXM5"),
    "H100 PCIe": GPU(dict(bf16=756, fp16=756, tf32=378, fp32=51, fp64=51), {80: 2000}, 350,
                     "NVIDIA H100 PCIe product brief PB-11133"),
    "H100 NVL": GPU(H100_NVL, {94: 3900}, 400,
                    "NVIDIA H100 datasheet, NVL, one GPU of the pair"),
    "H800": GPU(H100 | dict(fp64=1), {80: 3350}, 700,
                "NVIDIA H800 datasheet, SXM5, as published by a reseller (chaoqing-i.com, "
                "2023-11-28); power of the H100"),
    "H200": GPU(H100, {141: 4800}, 700,
                "NVIDIA H200 datasheet, SXM5"),
    "H200 NVL": GPU(H100_NVL, {141: 4800}, 600,
                    "NVIDIA H200 datasheet, NVL"),
    "H20": GPU(dict(bf16=148, fp16=148, tf32=74, fp32=44, fp64=1), {96: 4000}, 400,
               "NVIDIA has published no document; its datasheet as reported by the press"),
    "B200": GPU(dict(bf16=2250, fp16=2250, tf32=1125, fp32=75, fp64=37), {180: 7700}, 1000,
                "NVIDIA Blackwell datasheet, HGX B200, one GPU of eight; the DGX B200's rounds the "
                "bandwidth up to 8000 GB/s"),
    "MI300X": GPU(dict(bf16=1307.4, fp16=1307.4, tf32=653.7, fp32=163.4, fp64=163.4), {192: 5300},
                  750, "AMD MI300X datasheet"),
}
# fmt: on


def word(pattern: str) -> re.Pattern:
    """Return a regular expression for a whole word. Spaces, hyphens and underscores end a word."""
    return re.compile(rf"(?<![^\s_-])(?:{pattern})(?![^\s_-])")


BRAND = word(r"NVIDIA|GEFORCE|TESLA|AMD|INSTINCT|OAM|HBM\w+|SXM\d?")
SIZE = word(r"(\d+)[\s_-]*GB?")


def spellings() -> dict[str, Card]:
    """Return the card for each way to write its name, in capitals and without separators.

    The memory size may follow the name. A name without it means the smallest size.
    """
    found = {}
    for name, gpu in GPUS.items():
        joined = name.upper().replace(" ", "")
        variants = [joined, joined.removeprefix("RTX")]
        if name in ("A100", "A800"):  # of these alone, the PCIe form has the peaks of the SXM form
            variants.append(joined + "PCIE")
        for variant in variants:
            for gb, bandwidth in sorted(gpu.memory.items()):
                card = Card(name, gpu.tflops, gb, bandwidth, gpu.watts, gpu.source)
                found[f"{variant}{gb}G"] = card
                found[f"{variant}{gb}GB"] = card
                found.setdefault(variant, card)
    return found


SPELLINGS = spellings()


def find_gpu(spec: str) -> Card:
    """Return the card that `spec` names.

    spec: as people write it ("a100-80g", "4090") or as a driver does ("NVIDIA H100 80GB HBM3").
    Without a memory size, it means the smallest that is sold. The brand, the socket, upper and
    lower case and separators are ignored. Every other word must agree: a laptop's RTX 4090 is not
    the desktop's. Raises ValueError if the table has no such GPU or size.
    """
    words = BRAND.sub("", spec.upper())
    size = SIZE.search(words)
    product = re.sub(r"[\s_-]+", "", SIZE.sub("", words))
    spelling = f"{product}{int(size[1])}G" if size else product
    if spelling in SPELLINGS:
        return SPELLINGS[spelling]
    if product in SPELLINGS:
        name = SPELLINGS[product].name
        sizes = " or ".join(map(str, GPUS[name].memory))
        raise ValueError(f"{spec!r}: {name} comes with {sizes} GB")
    [closest] = difflib.get_close_matches(product, SPELLINGS, n=1, cutoff=0)
    nearest = f"the nearest is {SPELLINGS[closest].name}"
    raise ValueError(f"{spec!r} is not in the table of GPUs; {nearest}; it has {', '.join(GPUS)}")


def datasheet_tflops(name: str, dtype: str) -> float | None:
    """Return the dense peak in TFLOPS of the GPU that its driver calls `name`.

    None if the table has no GPU of exactly this name, or no figure for the dtype.
    """
    try:
        return find_gpu(name).tflops.get(dtype)
    except ValueError:
        return None

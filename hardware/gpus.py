"""What the vendors say of their GPUs, in one table: peaks, memory and power. For MFU, and for planning a run on a GPU one has not got."""

import difflib
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """A product; SXM where it comes in several forms and the name does not say."""

    # Dense peaks in TFLOPS by dtype (where the datasheet gives the sparse figure: half of it). fp16 and bf16 with fp32
    # accumulation, as training needs it; on GeForce that is half of fp16 with fp16 accumulation.
    tflops: dict[str, float]
    # GB as sold -> bandwidth in GB/s. HBM and GeForce have these 10^9 bytes and some more; where GDDR6 pays for its own
    # ECC (T4, A10, L4, L40S), PyTorch sees 1 to 3 % less than that: 15.6e9 bytes of a T4's 16 GB, 47.7e9 of 48.
    memory: dict[int, int]
    watts: int  # the board's limit
    source: str


@dataclass(frozen=True)
class Card:
    """One GPU of a certain memory size."""

    name: str
    tflops: dict[str, float]
    memory_gb: int
    bandwidth: int  # GB/s
    watts: int
    source: str


ECC_IN_MEMORY = {"T4", "A10", "L4", "L40S"}  # 1 to 3 % less than what is sold

A100 = dict(bf16=312, fp16=312, tf32=156, fp32=19.5, fp64=19.5)
H100 = dict(bf16=989, fp16=989, tf32=494, fp32=67, fp64=67)
H100_NVL = dict(bf16=835, fp16=835, tf32=417, fp32=60, fp64=60)

# fmt: off
GPUS = {
    "V100": GPU(dict(fp16=125, fp32=15.7, fp64=7.8), {16: 900, 32: 900}, 300, "NVIDIA V100 datasheet 2020, SXM2"),
    "V100 PCIE": GPU(dict(fp16=112, fp32=14, fp64=7), {16: 900, 32: 900}, 250, "NVIDIA V100 datasheet 2020, PCIe"),
    "V100S PCIE": GPU(dict(fp16=130, fp32=16.4, fp64=8.2), {32: 1134}, 250, "NVIDIA V100 datasheet 2020, V100S"),
    "T4": GPU(dict(fp16=65, fp32=8.1), {16: 320}, 70, "NVIDIA T4 datasheet"),
    "A10": GPU(dict(bf16=125, fp16=125, tf32=62.5, fp32=31.2), {24: 600}, 150, "NVIDIA A10 datasheet"),
    "A100": GPU(A100, {40: 1555, 80: 2039}, 400,
                "NVIDIA A100 datasheet, SXM4; PCIe has the same peaks, 1935 GB/s at 80 GB, 250 W and 300 W"),
    "A800": GPU(A100, {40: 1555, 80: 2039}, 400,
                "NVIDIA A800 40GB Active datasheet (1555 GB/s, 240 W); none for SXM4, A100 but for NVLink: its figures"),
    "RTX 3090": GPU(dict(bf16=71, fp16=71, tf32=35.6, fp32=35.6), {24: 936}, 350, "NVIDIA GA102 whitepaper, table 9"),
    "RTX 4090": GPU(dict(bf16=165.2, fp16=165.2, tf32=82.6, fp32=82.6), {24: 1008}, 450,
                    "NVIDIA Ada whitepaper, appendix A"),
    "RTX 5090": GPU(dict(bf16=209.5, fp16=209.5, tf32=104.8, fp32=104.8), {32: 1792}, 575,
                    "NVIDIA RTX Blackwell whitepaper"),
    "L4": GPU(dict(bf16=121, fp16=121, tf32=60, fp32=30.3), {24: 300}, 72, "NVIDIA L4 datasheet"),
    "L40S": GPU(dict(bf16=362, fp16=362, tf32=183, fp32=91.6), {48: 864}, 350, "NVIDIA L40S datasheet"),
    "H100": GPU(H100, {80: 3350}, 700, "NVIDIA H100 datasheet, SXM5"),
    "H100 PCIe": GPU(dict(bf16=756, fp16=756, tf32=378, fp32=51, fp64=51), {80: 2000}, 350,
                     "NVIDIA H100 PCIe product brief PB-11133"),
    "H100 NVL": GPU(H100_NVL, {94: 3900}, 400, "NVIDIA H100 datasheet, NVL, one of its two"),
    "H800": GPU(H100 | dict(fp64=1), {80: 3350}, 700,
                "NVIDIA H800 datasheet, SXM5, as a reseller has it (chaoqing-i.com, 2023-11-28); power: H100's"),
    "H200": GPU(H100, {141: 4800}, 700, "NVIDIA H200 datasheet, SXM5"),
    "H200 NVL": GPU(H100_NVL, {141: 4800}, 600, "NVIDIA H200 datasheet, NVL"),
    "H20": GPU(dict(bf16=148, fp16=148, tf32=74, fp32=44, fp64=1), {96: 4000}, 400,
               "no NVIDIA document is public; its datasheet as the press reports it"),
    "B200": GPU(dict(bf16=2250, fp16=2250, tf32=1125, fp32=75, fp64=37), {180: 7700}, 1000,
                "NVIDIA Blackwell datasheet, HGX B200, one GPU of eight; DGX B200's rounds up to 8000 GB/s"),
    "MI300X": GPU(dict(bf16=1307.4, fp16=1307.4, tf32=653.7, fp32=163.4, fp64=163.4), {192: 5300}, 750,
                  "AMD MI300X datasheet"),
}
# fmt: on


def word(pattern: str) -> re.Pattern:
    return re.compile(rf"(?<![^\s_-])(?:{pattern})(?![^\s_-])")


BRAND = word(r"NVIDIA|GEFORCE|TESLA|AMD|INSTINCT|OAM|HBM\w+|SXM\d?")
SIZE = word(r"(\d+)[\s_-]*GB?")


def spellings() -> dict[str, Card]:
    """Every name, in capitals and without spaces, with its size and without: then it is the smaller one."""
    found = {}
    for name, gpu in GPUS.items():
        joined = name.upper().replace(" ", "")
        also = [joined + "PCIE"] if name in ("A100", "A800") else []  # these alone have one peak in both forms
        for spelling in [joined, joined.removeprefix("RTX"), *also]:
            for gb, bandwidth in sorted(gpu.memory.items()):
                card = Card(name, gpu.tflops, gb, bandwidth, gpu.watts, gpu.source)
                found |= {f"{spelling}{gb}G": card, f"{spelling}{gb}GB": card}
                found.setdefault(spelling, card)
    return found


SPELLINGS = spellings()


def find_gpu(spec: str) -> Card:
    """The GPU that a person ("a100-80g", "4090") or a driver ("NVIDIA H100 80GB HBM3") names; of two sizes the smaller.

    Brand, socket, case and separators say nothing and are dropped; every other word must agree, so that a laptop's
    RTX 4090 is not taken for the desktop's. ValueError if there is none such.
    """
    words = BRAND.sub("", spec.upper())
    size = SIZE.search(words)
    product = re.sub(r"[\s_-]+", "", SIZE.sub("", words))
    if card := SPELLINGS.get(product + (f"{int(size[1])}G" if size else "")):
        return card
    if card := SPELLINGS.get(product):
        raise ValueError(f"{spec!r}: {card.name} comes with {' or '.join(map(str, GPUS[card.name].memory))} GB")
    nearest = SPELLINGS[difflib.get_close_matches(product, SPELLINGS, n=1, cutoff=0)[0]].name
    raise ValueError(f"{spec!r} is no GPU of the table; the nearest is {nearest}, of {', '.join(GPUS)}")


def datasheet_tflops(name: str, dtype: str) -> float | None:
    """The dense peak of a GPU by the name that its driver gives; None if the table lacks it, never a near miss."""
    try:
        return find_gpu(name).tflops.get(dtype)
    except ValueError:
        return None

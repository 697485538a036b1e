"""Measure what an initialisation is for: the scale of activations and gradients, block by block.

    # every scheme of the table INIT in model.py, in a model of 8 layers x 128
    python -m bench.init_scales --dataset=mine
    # some of them, in another model: every setting of train.py is accepted too
    python -m bench.init_scales config/docs_large.py --inits gpt2 kaiming

A scheme draws the weights of a model, which makes one forward and one backward pass in fp32, over
the first validation windows. The table has the root mean square (RMS) in the first and in the last
block: of the residual stream after the block, and of the gradient of the block's matrices.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bench.measure import StepConfig, facts_of, table
from configurator import option, parse, run
from hardware.machine import pick_device
from model import GPT, INIT
from text.dataset import open_datasets, open_windows
from training.settings import model_config, with_data


@dataclass(frozen=True)
class ScalesConfig(StepConfig):
    inits: tuple[str, ...] = option(
        tuple(INIT), "schemes of model.py", choices=tuple(INIT), group="What to measure"
    )
    n_layer: int = 8
    n_head: int = 4
    n_embd: int = 128
    block_size: int = 128


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def measure(model: GPT, x: Tensor, y: Tensor) -> dict[str, float | str]:
    """Return the loss of a batch x, y (B, T) in nats, and the RMS of what its passes compute.

    stream: the residual stream after the first and the last block, (B, T, C). gradient: of all
    matrices of these blocks. logits std: over the vocabulary, as a mean over the positions.
    """
    outputs: list[Tensor] = []  # of the blocks, (B, T, C)
    for block in model.blocks:
        block.register_forward_hook(lambda *of: outputs.append(of[-1]))
    loss = model(x, y)
    loss.backward()
    ends = (0, -1)
    matrices = [[p for p in model.blocks[i].parameters() if p.dim() == 2] for i in ends]
    gradients = [rms(torch.cat([p.grad.flatten() for p in of_block])) for of_block in matrices]
    with torch.no_grad():
        logits = model.logits(outputs[-1])[..., : model.config.vocab_size]
    streams = [rms(outputs[i]) for i in ends]
    scales = {"stream": streams, "gradient": gradients}
    texts = {f"{key} RMS": f"{first:.2g} -> {last:.2g}" for key, (first, last) in scales.items()}
    return {"loss": loss.item()} | texts | {"logits std": logits.std(-1).mean().item()}


def main() -> None:
    cfg = with_data(parse(ScalesConfig, doc=__doc__))
    device = pick_device(cfg.device)
    data = open_datasets(cfg.dataset, cfg.data_dir)[0]
    V = data.meta["vocab_size"]
    val = open_windows(data, "val", cfg.block_size)
    rows = np.stack([val.row(start) for start in val.fixed_starts(cfg.batch_size * cfg.block_size)])
    ids = torch.from_numpy(rows).to(device)  # (B, T + 1)
    figures = []
    for scheme in cfg.inits:
        model = GPT(model_config(cfg, V)).eval()  # without dropout
        torch.manual_seed(cfg.seed)
        model.init_weights(scheme)
        x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        figures.append({"init": scheme} | measure(model.to(device), x, y))
    where = facts_of(device)["machine"]
    table(f"{where}; ln V = {math.log(V):.2f}; RMS of block 1 -> block {cfg.n_layer}", figures)


if __name__ == "__main__":
    run(main)

"""Measure what an initialisation is for: the scale of activations and gradients, block by block.

    # every scheme of the table INIT in model.py, in a model of 8 layers x 128
    python -m bench.init_scales --dataset=mine
    # some of them, in another model: every setting of train.py is accepted too
    python -m bench.init_scales config/docs_large.py --inits gpt2 kaiming --png=scales.png

A scheme draws the weights of a model. The script measures this model, trains it for `steps` steps
and measures it again: one forward and one backward pass in fp32, over the same validation windows.
All schemes train from the same seed on the same windows. A step is train.py's own, but without a
schedule: the learning rate stays at `lr`.

The table has the root mean square (RMS) in the first and in the last block: of the residual stream
after the block, and of the gradient of the block's matrices. The picture has those of all blocks.
"""

import math
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from bench.measure import StepConfig, batches_of, facts_of, new_training, padded
from configurator import option, parse, run
from hardware.machine import Machine, start
from hardware.terminal import ProgressBar
from model import GPT, INIT
from text.dataset import DataSet, open_datasets, open_windows, train_loader
from training.plan import make_plan
from training.settings import model_config, with_data


@dataclass(frozen=True)
class ScalesConfig(StepConfig):
    inits: tuple[str, ...] = option(
        tuple(INIT), "schemes of model.py", choices=tuple(INIT), group="What to measure"
    )
    steps: int = option(50, "training steps between the two measurements", minimum=1)
    n_layer: int = 8
    n_head: int = 4
    n_embd: int = 128
    block_size: int = 128
    batch_tokens: int = 2048
    lr: float = 1e-3
    compile: bool = False
    png: str = option("init_scales.png", "the picture", group="Output")


# --------------------------------------------------------------------------------------------------
# Measure, train, measure again

PICTURED = ("stream", "gradient")
Scales = dict[str, float | list[float]]  # what was measured -> one number, or one for each block


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def measure(model: GPT, x: Tensor, y: Tensor) -> Scales:
    """Return the loss of a batch x, y (B, T) in nats, and the RMS of what its passes compute.

    stream: the residual stream after each block, (B, T, C). gradient: of all matrices of a block.
    logits std: over the vocabulary, as a mean over the positions.
    """
    outputs: list[Tensor] = []  # of the blocks, (B, T, C)
    hooks = [b.register_forward_hook(lambda *of: outputs.append(of[-1])) for b in model.blocks]
    model.eval()  # without dropout
    loss = model(x, y)
    loss.backward()
    for hook in hooks:
        hook.remove()
    matrices = [[p for p in block.parameters() if p.dim() == 2] for block in model.blocks]
    gradient = [rms(torch.cat([p.grad.flatten() for p in parameters])) for parameters in matrices]
    model.zero_grad()
    model.train()
    with torch.no_grad():
        logits = model.logits(outputs[-1])[..., : model.config.vocab_size]
    scales = {"loss": loss.item(), "logits std": logits.std(-1).mean().item()}
    return scales | {"stream": [rms(output) for output in outputs], "gradient": gradient}


def before_and_after(
    scheme: str, cfg: ScalesConfig, machine: Machine, sets: list[DataSet]
) -> tuple[Scales, Scales]:
    """Return what measure() returns for a new model, and what it returns after cfg.steps steps."""
    val = open_windows(sets[0], "val", cfg.block_size)
    rows = np.stack([val.row(start) for start in val.fixed_starts(cfg.batch_tokens)])
    ids = torch.from_numpy(rows).to(machine.device)  # (B, T + 1)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    cfg = replace(cfg, init=scheme)
    training = new_training(cfg, model_config(cfg, sets[0].meta["vocab_size"]), machine)
    initial = measure(training.model, x, y)

    plan = make_plan(cfg, 1, 1)
    loader = train_loader(sets, cfg.block_size, cfg.seed, cfg.documents, cfg.loss_per)
    reader = batches_of(loader, plan.batch_size, machine)
    with closing(reader) as batches:
        training = replace(training, batches=batches, accum=plan.accum)
        for _ in range(cfg.steps):
            training.step()
    return initial, measure(training.model, x, y)


# --------------------------------------------------------------------------------------------------
# The table and the picture


def draw(scales_of: dict[str, tuple[Scales, Scales]], cfg: ScalesConfig) -> None:
    """Draw the stream and the gradients over the blocks, before and after: a line per scheme."""
    from matplotlib.figure import Figure  # unlike pyplot, it needs no screen

    fig = Figure(figsize=(9, 6.5), layout="constrained")
    axes = fig.subplots(2, 2, sharex=True, sharey="row")
    for key, panels in zip(PICTURED, axes, strict=True):
        panels[0].set_ylabel(f"RMS of the {key}")
        for moment, ax in enumerate(panels):
            ax.set_yscale("log")
            ax.grid(alpha=0.3)
            for number, (scheme, scales) in enumerate(scales_of.items()):
                style = dict(color=f"C{number}", ls="-" if number % 2 else "--", marker="o", ms=3)
                ax.plot(range(1, cfg.n_layer + 1), scales[moment][key], label=scheme, **style)
    axes[0, 0].set_title("step 0")
    axes[0, 1].set_title(f"after {cfg.steps} steps")
    fig.supxlabel("block")
    lines, schemes = axes[0, 0].get_legend_handles_labels()
    fig.legend(lines, schemes, loc="outside right center")  # next to the panels: it covers nothing
    fig.savefig(cfg.png, format="png", dpi=100)


def main() -> None:
    cfg = with_data(parse(ScalesConfig, doc=__doc__))
    machine = start(cfg.device, cfg.dtype)
    sets = open_datasets(cfg.dataset, cfg.data_dir)
    uniform = math.log(sets[0].meta["vocab_size"])  # the loss of equal probabilities
    facts = facts_of(machine.device)
    print(f"{facts['machine']}, {facts['versions']}, {machine.dtype}")
    print(f"ln V = {uniform:.2f}; RMS at step 0, block 1 -> block {cfg.n_layer}\n")
    schemes = ProgressBar("schemes", cfg.inits)
    scales_of = {scheme: before_and_after(scheme, cfg, machine, sets) for scheme in schemes}
    heads = ["init", "loss", f"{cfg.steps} steps", "stream RMS", "gradient RMS", "logits std"]
    rows = [heads]
    for scheme, (initial, trained) in scales_of.items():
        ends = [f"{initial[key][0]:.2g} -> {initial[key][-1]:.2g}" for key in PICTURED]
        losses = [f"{initial['loss']:.2f}", f"{trained['loss']:.2f}"]
        rows.append([scheme, *losses, *ends, f"{initial['logits std']:.2g}"])
    for row in padded(rows):
        print("  ".join(row))
    draw(scales_of, cfg)
    print(f"the picture is in {cfg.png}")


if __name__ == "__main__":
    run(main)

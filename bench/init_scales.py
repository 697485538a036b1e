"""Measure what an initialisation is for: the scale of activations and gradients, block by block.

    # every scheme of the table INIT in model.py, in a model of 8 layers x 128
    python -m bench.init_scales --dataset=mine
    # some of them, in another model: every setting of train.py is accepted too
    python -m bench.init_scales config/demo.py --inits gpt2 kaiming --png=scales.png

A scheme draws the weights of a model. The script measures this model, trains it for `steps` steps
and measures it again: one forward and one backward pass in fp32, over the same validation windows.
All schemes train from the same seed on the same windows. A step is train.py's own, but without a
schedule: the learning rate stays at `lr`.

The table has the root mean square (RMS) in the first and in the last block: of the residual stream
behind the block, and of the gradient of the block's matrices. The picture and --json have those of
all blocks.
"""

import math
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from bench.measure import (
    facts_of,
    new_training,
    no_folder,
    not_positive,
    step_problems,
    write_json,
)
from configurator import changes, parse, run
from hardware import kernels
from hardware.machine import Machine, start
from hardware.terminal import ProgressBar
from model import GPT, INIT
from text.dataset import DataSet, open_datasets, open_windows, train_loader
from text.windows import Rows
from training.plan import make_plan
from training.settings import TrainConfig, model_config
from training.start import with_data
from training.step import read_ahead, to_batch


@dataclass(frozen=True)
class ScalesConfig(TrainConfig):
    # ---- What to measure ----
    inits: tuple[str, ...] = ()  # schemes of the table INIT in model.py; none: all of them
    steps: int = 50  # training steps between the two measurements
    # ---- The model and its training ----
    n_layer: int = 8  # number of blocks
    n_head: int = 4  # number of query heads
    n_embd: int = 128  # width of the residual stream
    block_size: int = 128  # T, tokens in a sequence
    batch_tokens: int = 2048  # tokens per step, and of the batch that is measured
    lr: float = 1e-3  # learning rate of every step
    compile: bool | Literal["auto"] = False  # torch.compile of the training steps
    # ---- Output ----
    png: str = "init_scales.png"  # the picture
    json: str = ""  # also write the figures to this file

    def problems(self) -> list[str]:
        problems = step_problems(self) + not_positive(self, "steps")
        problems += no_folder(self, "png", "json")
        for name in self.inits:
            if name not in INIT:
                problems.append(f"inits: {name!r} is none of {', '.join(INIT)}")
        return problems


# --------------------------------------------------------------------------------------------------
# Measure, train, measure again

Scales = dict[str, float | list[float]]  # what was measured -> one number, or one for each block


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def measure(model: GPT, x: Tensor, y: Tensor) -> Scales:
    """Return the loss of a batch x, y (B, T) in nats, and the RMS of what its passes compute.

    stream: the residual stream behind each block, (B, T, C). gradient: of all matrices of a block
    together. logits std: over the vocabulary, as a mean over the positions.
    """
    V = model.config.vocab_size
    stream: list[float] = []
    logits_std: list[float] = []

    def keep_stream(module: nn.Module, inputs: tuple, output: Tensor) -> None:
        stream.append(rms(output))

    def keep_logits(module: nn.Module, inputs: tuple, logits: Tensor) -> None:
        # This cannot wait for the end of the pass: the loss writes its gradient over the logits.
        logits_std.append(logits[..., :V].std(-1).mean().item())

    hooks = [block.register_forward_hook(keep_stream) for block in model.blocks]
    hooks.append(model.lm_head.register_forward_hook(keep_logits))
    model.eval()  # without dropout
    loss = model(x, y)
    loss.backward()
    for hook in hooks:
        hook.remove()
    matrices = [[p for p in block.parameters() if p.dim() == 2] for block in model.blocks]
    gradient = [rms(torch.cat([p.grad.flatten() for p in of_block])) for of_block in matrices]
    model.zero_grad()
    model.train()
    scales = {"loss": loss.item(), "stream": stream, "gradient": gradient}
    return scales | {"logits std": logits_std[0]}


def before_and_after(
    scheme: str, cfg: ScalesConfig, machine: Machine, sets: list[DataSet], bar: ProgressBar
) -> tuple[Scales, Scales]:
    """Return what measure() returns for a new model, and what it returns after cfg.steps steps."""
    val = open_windows(sets[0], "val", cfg.block_size)
    rows = np.stack([val.row(start) for start in val.fixed_starts(cfg.batch_tokens)])
    x, y, _, _ = to_batch(Rows(rows, None, None), machine.device)  # (B, T) each
    c = model_config(cfg, sets[0].meta["vocab_size"])
    training = new_training(replace(cfg, init=scheme), c, machine)
    initial = measure(training.model, x, y)

    plan = make_plan(replace(cfg, max_steps=cfg.steps), 1, 1)
    loader = train_loader(sets, cfg.block_size, cfg.seed, cfg.documents, cfg.loss_per)
    with closing(read_ahead(loader, 0, plan.batch_size, machine)) as batches:
        training = replace(training, batches=batches, accum=plan.accum)
        for _ in range(cfg.steps):
            training.step()
            bar.update()
    return initial, measure(training.model, x, y)


# --------------------------------------------------------------------------------------------------
# The table and the picture

ROW = "{:<12} {:>6} {:>9} {:>16} {:>18} {:>11}"


def ends(of_blocks: list[float]) -> str:
    return f"{of_blocks[0]:.2g} -> {of_blocks[-1]:.2g}"


def draw(scales_of: dict[str, tuple[Scales, Scales]], cfg: ScalesConfig) -> None:
    """Draw the stream and the gradients over the blocks, before and after: a line per scheme."""
    from matplotlib.figure import Figure  # unlike pyplot, it needs no screen

    kinds = {"stream": "RMS of the residual stream", "gradient": "RMS of the gradient"}
    fig = Figure(figsize=(9, 6.5), layout="constrained")
    axes = fig.subplots(2, 2, sharex=True, sharey="row")
    for (key, label), panels in zip(kinds.items(), axes, strict=True):
        panels[0].set_ylabel(label)
        for column, ax in enumerate(panels):
            ax.set_yscale("log")
            ax.grid(alpha=0.3)
            for number, (scheme, scales) in enumerate(scales_of.items()):
                style = dict(color=f"C{number}", ls="-" if number % 2 else "--", marker="o", ms=3)
                ax.plot(range(1, cfg.n_layer + 1), scales[column][key], label=scheme, **style)
    axes[0, 0].set_title("step 0")
    axes[0, 1].set_title(f"after {cfg.steps} steps")
    fig.supxlabel("block")
    lines, schemes = axes[0, 0].get_legend_handles_labels()
    fig.legend(lines, schemes, loc="outside right center")  # beside the panels: it covers nothing
    fig.savefig(cfg.png, format="png", dpi=100)


def main() -> None:
    cfg = with_data(parse(ScalesConfig, doc=__doc__))
    kernels.install()
    machine = start(cfg.device, cfg.dtype)
    sets = open_datasets(cfg.dataset, cfg.data_dir)
    schemes = cfg.inits or tuple(INIT)
    uniform = math.log(sets[0].meta["vocab_size"])  # the loss of equal probabilities
    facts = facts_of(machine.device)
    machine.say(f"{facts['machine']}, {facts['versions']}, {machine.dtype}")
    machine.say(f"ln V = {uniform:.2f}; RMS at step 0, block 1 -> block {cfg.n_layer}\n")
    later = f"{cfg.steps} steps"
    machine.say(ROW.format("init", "loss", later, "stream RMS", "gradient RMS", "logits std"))
    scales_of: dict[str, tuple[Scales, Scales]] = {}
    with ProgressBar("steps", total=cfg.steps * len(schemes)) as bar:
        for scheme in schemes:
            initial, trained = before_and_after(scheme, cfg, machine, sets, bar)
            scales_of[scheme] = (initial, trained)
            cells = [scheme, f"{initial['loss']:.2f}", f"{trained['loss']:.2f}"]
            cells += [ends(initial["stream"]), ends(initial["gradient"])]
            machine.say(ROW.format(*cells, f"{initial['logits std']:.2g}"))
    draw(scales_of, cfg)
    machine.say(f"the picture is in {cfg.png}")
    write_json(cfg.json, facts | {"settings": changes(cfg), "scales": scales_of})


if __name__ == "__main__":
    run(main)

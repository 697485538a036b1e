"""Measure what an initialisation is for: the scale of activations and gradients, block by block.

    # every scheme of the table INIT in model.py, in a model of 8 layers x 128
    python bench/init_scales.py --dataset=mine
    # some of them, in another model: every setting of train.py is accepted too
    python bench/init_scales.py config/demo.py --inits gpt2 kaiming t5 --png=scales.png

A scheme draws the weights of a model. The script measures this model, trains it for `steps` steps
and measures it again: one forward and one backward pass in fp32, over the same validation windows.
All schemes train from the same seed on the same windows. A step is train.py's own, but without a
schedule: the learning rate stays at `lr`.

The table has the root mean square (RMS) in the first and in the last block: of the residual stream
behind the block, and of the gradient of the block's matrices. The picture shows all blocks, and
--json writes what else was measured.
"""

import json
import math
import os
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # so that `python bench/init_scales.py` finds the modules below
from configurator import UserError, changes, parse, run  # noqa: E402
from hardware.machine import Machine, start  # noqa: E402
from hardware.peak import device_name  # noqa: E402
from hardware.terminal import ProgressBar  # noqa: E402
from model import GPT, INIT  # noqa: E402
from text.windows import Rows  # noqa: E402
from train import Data, open_data, open_optimizer  # noqa: E402
from training.plan import make_plan  # noqa: E402
from training.settings import TrainConfig, model_config, with_data  # noqa: E402
from training.step import read_ahead, take_step, to_batch  # noqa: E402


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
    # ---- Output ----
    png: str = "init_scales.png"  # the picture
    json: str = ""  # also write the figures to this file

    def problems(self) -> list[str]:
        if self.batch_size == "auto":
            return ["batch_size=auto is for train.py and plan.py: give a number here"]
        wrong = TrainConfig.problems(replace(self, max_steps=1))  # `steps` sets the length here
        known = ", ".join(INIT)
        wrong += [f"inits: {name!r} is none of {known}" for name in self.inits if name not in INIT]
        if self.steps < 1:
            wrong.append("steps must be positive")
        if not self.png.endswith(".png"):
            wrong.append(f"png={self.png} must end in .png")
        for name in ("png", "json"):
            path = getattr(self, name)
            if not Path(path).parent.is_dir():
                wrong.append(f"{name}={path}: no such folder")
        return wrong


# --------------------------------------------------------------------------------------------------
# Measure, train, measure again

Scales = dict[str, float | list[float]]  # what was measured -> one number, or one for each block


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def measure(model: GPT, x: Tensor, y: Tensor) -> Scales:
    """Return the loss of a batch x, y (B, T) in nats, and the RMS of what its passes compute.

    stream, attention, mlp: the residual stream behind each block and what its two parts add to it,
    (B, T, C); their gradients too. matrices gradient: of all matrices of a block together.
    logits std: over the vocabulary, as a mean over the positions.
    """
    V = model.config.vocab_size
    found: Scales = {}
    outputs: dict[str, list[Tensor]] = {"stream": [], "attention": [], "mlp": []}

    def keep(name: str) -> Callable:
        def hook(module: nn.Module, inputs: tuple, output: Tensor) -> None:
            output.retain_grad()  # otherwise only weights keep their gradient
            outputs[name].append(output)

        return hook

    def spread(module: nn.Module, inputs: tuple, logits: Tensor) -> None:
        # This cannot wait for the end of the pass: the loss writes its gradient over the logits.
        found["logits std"] = logits[..., :V].std(-1).mean().item()

    hooks = [model.lm_head.register_forward_hook(spread)]
    for block in model.blocks:
        hooks.append(block.register_forward_hook(keep("stream")))
        hooks.append(block.attn.register_forward_hook(keep("attention")))
        hooks.append(block.mlp.register_forward_hook(keep("mlp")))
    model.eval()  # without dropout
    loss = model(x, y)
    loss.backward()
    for hook in hooks:
        hook.remove()

    found["loss"] = loss.item()
    for name, of_blocks in outputs.items():
        found[name] = [rms(output) for output in of_blocks]
        found[f"{name} gradient"] = [rms(output.grad) for output in of_blocks]
    matrices = [[p for p in block.parameters() if p.dim() == 2] for block in model.blocks]
    grads = [torch.cat([p.grad.flatten() for p in of_block]) for of_block in matrices]
    found["matrices gradient"] = [rms(grad) for grad in grads]
    model.zero_grad()
    model.train()
    return found


def before_and_after(
    scheme: str, cfg: ScalesConfig, machine: Machine, data: Data, bar: ProgressBar
) -> tuple[Scales, Scales]:
    """Return what measure() finds in a new model, and what it finds after cfg.steps steps."""
    val = data.val_windows[0]
    ids = np.stack([val.row(start) for start in val.fixed_starts(cfg.batch_tokens)])
    x, y, _, _ = to_batch(Rows(ids, None, None), machine.device)  # (B, T) each
    model = GPT(model_config(cfg, data.sets[0].meta["vocab_size"]))
    torch.manual_seed(cfg.seed)
    model.init_weights(scheme)
    model.to(machine.device)
    before = measure(model, x, y)

    plan = make_plan(replace(cfg, max_steps=cfg.steps), 1, 1)
    optimizer, scaler = open_optimizer(cfg, machine, model, None)
    for group in optimizer.param_groups:
        group["lr"] = cfg.lr * group["scale"]
    with closing(read_ahead(data.loader, 0, plan.batch_size, machine)) as reader:
        batches = (to_batch(windows, machine.device) for windows in reader)
        for _ in range(cfg.steps):
            take_step(
                model, model, optimizer, scaler, batches, plan.accum, machine, cfg.grad_clip
            )()
            bar.update()
    return before, measure(model, x, y)


# --------------------------------------------------------------------------------------------------
# The table and the picture

ROW = "{:<12} {:>6} {:>9} {:>16} {:>18} {:>11}"


def ends(of_blocks: list[float]) -> str:
    return f"{of_blocks[0]:.2g} -> {of_blocks[-1]:.2g}"


def draw(found: dict[str, tuple[Scales, Scales]], cfg: ScalesConfig) -> None:
    """Draw the stream and the gradients over the blocks, before and after: a line per scheme."""
    import matplotlib

    matplotlib.use("Agg")  # draws into a file, without a screen
    import matplotlib.pyplot as plt

    kinds = {"stream": "RMS of the residual stream", "matrices gradient": "RMS of the gradient"}
    fig, axes = plt.subplots(2, 2, figsize=(9, 6.5), sharex=True, sharey="row")
    fig.set_layout_engine("constrained")
    for (key, label), panels in zip(kinds.items(), axes, strict=True):
        panels[0].set_ylabel(label)
        for when, ax in enumerate(panels):
            ax.set_yscale("log")
            ax.grid(alpha=0.3)
            for number, (scheme, scales) in enumerate(found.items()):
                style = dict(color=f"C{number}", ls="-" if number % 2 else "--", marker="o", ms=3)
                ax.plot(range(1, cfg.n_layer + 1), scales[when][key], label=scheme, **style)
    axes[0, 0].set_title("step 0")
    axes[0, 1].set_title(f"after {cfg.steps} steps")
    fig.supxlabel("block")
    lines, schemes = axes[0, 0].get_legend_handles_labels()
    fig.legend(lines, schemes, loc="outside right center")  # beside the panels: it covers nothing
    fig.savefig(cfg.png, dpi=100)
    plt.close(fig)


def main() -> None:
    cfg = with_data(parse(ScalesConfig, doc=__doc__))
    if "RANK" in os.environ:
        raise UserError("one device is measured: start it without torchrun")
    machine = start(cfg.device, cfg.dtype)
    data = open_data(cfg)
    schemes = cfg.inits or tuple(INIT)
    uniform = math.log(data.sets[0].meta["vocab_size"])  # the loss of equal probabilities
    machine.say(f"{device_name(machine.device)}, torch {torch.__version__}, {machine.dtype}")
    machine.say(f"ln V = {uniform:.2f}; RMS at step 0, block 1 -> block {cfg.n_layer}\n")
    later = f"{cfg.steps} steps"
    machine.say(ROW.format("init", "loss", later, "stream RMS", "gradient RMS", "logits std"))
    found: dict[str, tuple[Scales, Scales]] = {}
    with ProgressBar("steps", total=cfg.steps * len(schemes)) as bar:
        for scheme in schemes:
            before, after = before_and_after(scheme, cfg, machine, data, bar)
            found[scheme] = (before, after)
            cells = [scheme, f"{before['loss']:.2f}", f"{after['loss']:.2f}"]
            cells += [ends(before["stream"]), ends(before["matrices gradient"])]
            machine.say(ROW.format(*cells, f"{before['logits std']:.2g}"))
    draw(found, cfg)
    machine.say(f"the picture is in {cfg.png}")
    if cfg.json:
        facts = {"command": " ".join(sys.argv), "settings": changes(cfg), "scales": found}
        Path(cfg.json).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    run(main)

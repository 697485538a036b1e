"""bench/init_scales.py on a CPU: its figures are what they are called, and it can be repeated."""

import pytest
import torch
import torch.nn.functional as F
from conftest import call

from bench import init_scales
from model import GPT, PRESETS, GPTConfig

SMALL = ["--dataset=tiny", "--n_layer=3", "--n_head=4", "--n_embd=32", "--block_size=32"]
SMALL += ["--batch_tokens=128", "--steps=5", "--device=cpu", "--dtype=float32"]


def test_scales_equal_a_pass_by_hand():
    torch.manual_seed(0)
    shape = dict(vocab_size=200, block_size=16, n_layer=3, n_head=4, n_embd=32)
    model = GPT(GPTConfig(**(PRESETS["gpt2"] | shape)))
    model.init_weights("xavier")
    x, y = torch.randint(200, (2, 3, 16))
    scales = init_scales.measure(model, x, y)
    assert all(p.grad is None for p in model.parameters())

    streams = [model.wte(x) + model.wpe.weight[:16]]
    for block in model.blocks:
        streams.append(block(streams[-1], None, None, None))
    logits = model.logits(streams[-1])[..., :200]
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    block = model.blocks[1]
    matrices = [block.attn.qkv, block.attn.proj, block.mlp.up_proj, block.mlp.down_proj]
    gradients = torch.autograd.grad(loss, [module.weight for module in matrices])

    def rms(x: torch.Tensor) -> float:
        return x.pow(2).mean().item() ** 0.5

    assert scales["loss"] == pytest.approx(loss.item())
    assert scales["logits std"] == pytest.approx(logits.std(-1).mean().item())
    assert scales["stream"] == pytest.approx([rms(s) for s in streams[1:]])
    flat = torch.cat([g.flatten() for g in gradients])
    assert scales["gradient"][1] == pytest.approx(rms(flat))


@pytest.mark.slow
def test_each_scheme_has_a_row_and_a_line(tiny_data, tmp_path, capsys):
    options = [*SMALL, f"--data_dir={tiny_data}", "--inits", "zero_proj", "xavier"]
    call(init_scales.main, *options, f"--png={tmp_path / 'scales.png'}")
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {line[0]: line[1:] for line in printed if line and line[0] in ("zero_proj", "xavier")}
    assert [*rows] == ["zero_proj", "xavier"]
    assert all(float(trained) < float(initial) for initial, trained, *_ in rows.values())
    assert rows["zero_proj"][2] == rows["zero_proj"][4]  # every block is the identity
    assert (tmp_path / "scales.png").read_bytes().startswith(b"\x89PNG")

"""The whole of training. train.py is this loop, made fast, resumable and safe.

Run it from the root of the repository, after prepare.py: python -m docs.evening.bare_loop
"""

from pathlib import Path

import numpy as np
import torch

from hardware.generation import generate
from model import GPT, PRESETS, GPTConfig
from text.dataset import load_tokenizer

tokens = np.fromfile("data/shakespeare/train.bin", dtype=np.uint16).astype(np.int64)
tokenizer = load_tokenizer(Path("data/shakespeare"))
B, T, steps, peak_lr = 16, 64, 280, 3e-3

shape = dict(n_layer=4, n_head=4, n_embd=128, d_ff=352, block_size=T)
torch.manual_seed(1)
model = GPT(GPTConfig(**PRESETS["qwen3"], **shape, vocab_size=tokenizer.vocab_size))
optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
rng = np.random.default_rng(1)

for step in range(1, steps + 1):
    starts = rng.integers(len(tokens) - T, size=B)
    windows = torch.from_numpy(np.stack([tokens[s : s + T + 1] for s in starts]))  # (B, T + 1)
    x, y = windows[:, :-1], windows[:, 1:]  # (B, T) each: the inputs, and the token after each

    loss = model(x, y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.param_groups[0]["lr"] = peak_lr * min(step / 20, (steps - step) / (steps - 20))
    optimizer.step()
    optimizer.zero_grad()

    if step == 1 or step % 40 == 0:
        print(f"step {step:>3} | loss {loss.item():.3f}")

prompt = torch.tensor([tokenizer.encode("ROMEO:")])  # (1, 6)
print("ROMEO:" + tokenizer.decode([int(token) for token in generate(model, prompt, 200)]))

"""Where the heads of a trained model look: python -m docs.evening.attention_look out/demo

The table has, for each head, the mean attention to the token itself and to the tokens 1, 2 and 3
before it, and to all that are further back. With a layer and a head, such as 0 3, the text is
printed with a column of shades for each token that is looked at, and a row for each that looks.
"""

import math
import sys
from pathlib import Path

import torch

from model import Kernels
from text.dataset import load_tokenizer
from training.huggingface import from_pretrained
from training.run_folder import newest_checkpoint

TEXT = "ROMEO:\nWhat is love?\n\nJULIET:\nIt is a fire, my lord."
SHADES = " .:-=+*#%@"

attention = []  # of each layer: (nh, T, T)


class Look(Kernels):
    """The same computation, which also keeps the attention."""

    def attend(self, q, k, v, mask, dropout):
        """See Kernels.attend()."""
        T, hs = q.shape[2:]
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(hs)).masked_fill(future, -math.inf)
        attention.append(scores.softmax(-1)[0])
        return super().attend(q, k, v, mask, dropout)


run, *chosen = sys.argv[1:]
folder = newest_checkpoint(Path(run) / "ckpt")
if folder is None:
    sys.exit(f"error: {run} has no checkpoint: run stop 3 of docs/evening.md first")
model = from_pretrained(folder).eval().use(Look())
ids = load_tokenizer(folder).encode(TEXT)[: model.config.block_size]
with torch.no_grad():
    model(torch.tensor([ids]))

if not chosen:
    print("layer head   itself  1 before  2 before  3 before   further")
    for layer, heads in enumerate(attention):
        for head, weights in enumerate(heads):
            near = [weights[3:].diagonal(3 - back).mean().item() for back in range(4)]
            print(f"{layer:>5} {head:>4}", *(f"{w:>9.2f}" for w in [*near, 1 - sum(near)]))
else:
    layer, head = map(int, chosen)
    print("  " + TEXT[: len(ids)].replace("\n", "/"))
    for letter, weights in zip(TEXT, attention[layer][head].tolist(), strict=False):
        shades = "".join(SHADES[min(int(10 * w), 9)] for w in weights)
        print(letter.replace("\n", "/"), shades.rstrip())

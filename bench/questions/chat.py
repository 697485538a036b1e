# How should the model of config/docs_large.py learn its answers? First: make docs chat
# CONFIG=config/docs_large.py, and --init_from=out/docs_large. The runs are
# judged by the answers of val, which are in other wordings than those of train.
# With AdamW the embeddings and vectors have the rate of the matrices.
question = (
    "Which optimizer, rate and number of epochs teach the model of config/docs_large.py to answer?"
)
config = "config/chat.py"
batch_size = 8
batch_tokens = 8 * 256
max_epochs = 6.0
eval_every = 60
_adamw = {"optimizer": "adamw", "embed_lr": 1.0, "vector_lr": 1.0}
_half = {"batch_size": 4, "batch_tokens": 4 * 256}
variants = {f"muon {lr}": {"lr": lr} for lr in (4e-3, 2e-3, 8e-3, 16e-3)}
variants |= {f"adamw {lr}": _adamw | {"lr": lr} for lr in (5e-4, 1e-3, 3e-3, 6e-3)}
variants |= {f"{n} epochs": {"max_epochs": n} for n in (3.0, 12.0)}
variants |= {f"{n} epochs, half the batch": _half | {"max_epochs": n} for n in (3.0, 4.0)}

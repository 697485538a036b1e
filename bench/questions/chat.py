# How should the demo learn its answers? First: make demo chat. bench/answers.py asks in other
# wordings, which are in neither split, so it can judge what is chosen here.
# With AdamW the embeddings and vectors have the rate of the matrices.
question = "Which optimizer, rate and number of epochs teach the demo to answer?"
config = "config/chat.py"
batch_size = 8
batch_tokens = 8 * 256
max_epochs = 6.0
eval_every = 60
baseline = "muon 4e-3"
_adamw = {"optimizer": "adamw", "embed_lr": 1.0, "vector_lr": 1.0}
_half_batch = {"batch_size": 4, "batch_tokens": 4 * 256}
variants = {
    "muon 4e-3": {},
    "muon 2e-3": {"lr": 2e-3},
    "muon 8e-3": {"lr": 8e-3},
    "adamw 1e-3": _adamw | {"lr": 1e-3},
    "adamw 3e-3": _adamw | {"lr": 3e-3},
    "adamw 5e-4": _adamw | {"lr": 5e-4},
    "3 epochs": {"max_epochs": 3.0},
    "12 epochs": {"max_epochs": 12.0},
    "3 epochs, half the batch": _half_batch | {"max_epochs": 3.0},
    "4 epochs, half the batch": _half_batch | {"max_epochs": 4.0},
    "8e-3, 4 epochs, half the batch": _half_batch | {"max_epochs": 4.0, "lr": 8e-3},
    "muon 16e-3": {"lr": 16e-3},
    "adamw 6e-3": _adamw | {"lr": 6e-3},
}

# The learning rates are a first guess, not tuned yet.
question = "Which optimizer reaches the lowest loss on the same tokens?"
config = "config/laptop.py"
variants = {
    "adamw": {"optimizer": "adamw", "lr": 1e-3},
    "adafactor": {"optimizer": "adafactor", "lr": 1e-3},
    "muon": {"optimizer": "muon", "lr": 1e-3},
}
lengths = (0.5, 1, 2, 4)

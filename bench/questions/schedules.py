question = "Which schedule of the learning rate ends with the lowest loss?"
config = "bench/laptop.py"
variants = {
    "cosine to 10 %": {"schedule": "cosine", "min_lr_ratio": 0.1},
    "cosine to 0": {"schedule": "cosine", "min_lr_ratio": 0.0},
    "linear to 0": {"schedule": "linear", "min_lr_ratio": 0.0},
    "wsd, last 20 % to 10 %": {"schedule": "wsd", "decay_ratio": 0.2, "min_lr_ratio": 0.1},
    "wsd, last 70 % to 0": {"schedule": "wsd", "decay_ratio": 0.7, "min_lr_ratio": 0.0},
    "constant": {"schedule": "constant"},
}
lengths = (0.5, 1, 2)

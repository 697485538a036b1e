question = "Does a running mean of the weights replace the decay of the learning rate?"
config = "bench/laptop.py"
variants = {
    "wsd to 0": {"schedule": "wsd", "min_lr_ratio": 0.0},
    "wsd to 0, average 0.05": {"schedule": "wsd", "min_lr_ratio": 0.0, "average": 0.05},
    "constant, average 0.05": {"schedule": "constant", "average": 0.05},
    "constant, average 0.1": {"schedule": "constant", "average": 0.1},
    "constant, average 0.2": {"schedule": "constant", "average": 0.2},
}
lengths = (0.5, 1, 2)

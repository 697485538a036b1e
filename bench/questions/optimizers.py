# Each optimizer with several rates, because the best one differs. Adafactor's rate is a share of
# the size of the weights, whose standard deviation begins at 0.02; torch takes at most
# 1 / sqrt(step).
question = "Which optimizer ends with the lowest loss on the same tokens?"
config = "bench/laptop.py"
variants = {
    "adamw 1e-3": {"lr": 1e-3},
    "adamw 5e-4": {"lr": 5e-4},
    "adamw 3e-3": {"lr": 3e-3},
    "adamw 6e-3": {"lr": 6e-3},
    "adafactor 0.01": {"optimizer": "adafactor", "lr": 0.01},
    "adafactor 0.03": {"optimizer": "adafactor", "lr": 0.03},
    "adafactor 0.1": {"optimizer": "adafactor", "lr": 0.1},
    "adafactor 0.3": {"optimizer": "adafactor", "lr": 0.3},
    "muon 2e-3": {"optimizer": "muon", "lr": 2e-3},
    "muon 4e-3": {"optimizer": "muon", "lr": 4e-3},
    "muon 8e-3": {"optimizer": "muon", "lr": 8e-3},
}
lengths = (0.5, 1, 2, 4)

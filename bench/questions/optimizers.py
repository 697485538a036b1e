# The rates are a first guess, not tuned yet: with each of them a weight moves by about 1e-3.
# Adafactor's rate is a share of the size of the weights, whose standard deviation begins at 0.02.
question = "Which optimizer ends with the lowest loss on the same tokens?"
config = "config/laptop.py"
variants = {
    "adamw": {"optimizer": "adamw", "lr": 1e-3},
    "adafactor": {"optimizer": "adafactor", "lr": 0.05},
    "muon": {"optimizer": "muon", "lr": 1e-3},
}
lengths = (0.5, 1, 2, 4)

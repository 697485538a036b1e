# Each optimizer with several rates, because the best one differs. Adafactor's rate is relative to
# the size of the weights, whose standard deviation starts at 0.02; torch takes at most
# 1 / sqrt(step).
question = "Which optimizer ends with the lowest loss on the same tokens?"
config = "bench/laptop.py"
_rates = {
    "adamw": ["1e-3", "5e-4", "3e-3", "6e-3"],
    "adafactor": ["0.01", "0.03", "0.1", "0.3"],
    "muon": ["2e-3", "4e-3", "8e-3"],
}
variants = {
    f"{name} {lr}": {"optimizer": name, "lr": float(lr)} for name in _rates for lr in _rates[name]
}
lengths = (0.5, 1, 2, 4)

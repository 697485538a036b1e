import model

question = "Which initialisation of the weights leads to the lowest loss?"
config = "bench/laptop.py"
baseline = "gpt2"
variants = {name: {"init": name} for name in model.INIT}  # also those that will be added
lengths = (0.5, 1, 2)

# Two data sets with the same tokenizer. The loss is the mean of the losses on both, each counted
# once, and the table shows either.
_one = "wiki"
_other = "code"

question = f"How much {_one} and how much {_other} gives the lowest loss on both?"
config = "bench/laptop.py"
baseline = "half"
variants = {
    "one tenth": {"dataset": f"{_one}:0.1,{_other}:0.9"},
    "a quarter": {"dataset": f"{_one}:0.25,{_other}:0.75"},
    "half": {"dataset": f"{_one}:0.5,{_other}:0.5"},
    "three quarters": {"dataset": f"{_one}:0.75,{_other}:0.25"},
    "nine tenths": {"dataset": f"{_one}:0.9,{_other}:0.1"},
}
lengths = (0.5, 1, 2, 4)

# A question for bench.lab: relu2 is added to model.py in docs/evening.md, stop 14.
question = "Does relu2 end lower than SwiGLU, with as many parameters?"
config = "config/demo.py"
max_steps = 60
n_layer = 2
variants = {"swiglu": {"d_ff": 352}, "relu2": {"mlp": "relu2", "d_ff": 528}}

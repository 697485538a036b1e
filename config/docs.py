# Documentation as tokens of a BPE: the corpus that `python prepare.py` makes.
# 0.7M parameters; 1,000 steps of 2,048 tokens are 0.8 epochs and 10 TFLOP.
run_name = "docs"
dataset = "docs"
preset = "qwen3"
n_layer = 3
n_head = 3
n_embd = 96
block_size = 128
init = "llama"

batch_size = 16
batch_tokens = 16 * 128
max_steps = 1000

optimizer = "muon"
lr = 8e-3
embed_lr = 3.0
vector_lr = 3.0
schedule = "wsd"
decay_ratio = 0.7
min_lr_ratio = 0.0
eval_every = 500
sample_every = 500
sample_prompt = "Robot.is_happy: Return True if"
log_every = 20

# The documentation of config/docs.py for a larger model and more tokens: 3.3M parameters, 800 steps
# of 4,096 tokens, 1.4 epochs. 1.365 bits per byte on the validation documents.
run_name = "docs_large"
dataset = "docs"
preset = "qwen3"
n_layer = 4
n_head = 3
n_embd = 192
block_size = 256
init = "llama"

batch_size = 16
batch_tokens = 16 * 256
max_steps = 800

optimizer = "muon"
lr = 6e-3
embed_lr = 3.0
vector_lr = 3.0
schedule = "wsd"
decay_ratio = 0.7
min_lr_ratio = 0.0
eval_every = 160
sample_every = 160
sample_prompt = "Robot.is_happy: Return True if"
save_every = 400
log_every = 20

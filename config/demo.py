# A first run on the demo corpus (python prepare.py): about three minutes on a 2-core CPU, seconds on a GPU.
# 3.3M parameters; 600 steps of 4,096 tokens = 0.9 epochs.
run = "demo"
dataset = "demo"
preset = "llama"
tie_embeddings = True
n_layer = 4
n_head = 4
n_embd = 256
block_size = 256

batch_size = 16
batch_tokens = 16 * 256
max_steps = 600

lr = 2e-3
warmup_ratio = 0.05
schedule = "wsd"
decay_ratio = 0.4
min_lr_ratio = 0.05
eval_every = 200
save_every = 200
log_every = 20

# A first run, on the corpus that `python prepare.py` makes. It takes two to three minutes on a
# 2-core CPU, and seconds on a GPU.
# 4.3M parameters. 700 steps of 2,048 tokens are half an epoch.
run_name = "demo"
dataset = "demo"
preset = "llama"
tie_embeddings = True
n_layer = 4
n_head = 4
n_embd = 256
block_size = 256

batch_size = 8
batch_tokens = 8 * 256
max_steps = 700

lr = 1.2e-3
warmup_ratio = 0.05
schedule = "wsd"
decay_ratio = 0.4
min_lr_ratio = 0.05
eval_every = 175
save_every = 350
log_every = 25

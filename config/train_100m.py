# The run that this project is made for: about 100M parameters on one to eight GPUs.
#   torchrun --nproc_per_node=6 train.py config/train_100m.py --dataset=NAME
# 97.5M parameters with a vocabulary of 16,384 tokens, 110M with 32,000.
# 2G tokens are 20 per parameter.
# On six GPUs, a step is 8 x 1024 tokens x 6 GPUs x 11 micro-steps = 540,672 tokens. This is the
# multiple of 8 x 1024 x 6 that is nearest to batch_tokens.
run_name = "train_100m"
preset = "llama"
tie_embeddings = True
n_layer = 12
n_head = 6
n_kv_head = 6
head_dim = 128
n_embd = 768
block_size = 1024

batch_size = 8
batch_tokens = 524_288
max_tokens = 2_000_000_000
lr = 8e-4
warmup_ratio = 0.02
schedule = "wsd"
eval_every = 250

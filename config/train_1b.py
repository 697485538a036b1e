# About a billion parameters: 22 layers x 2048, for GPUs with 80 GB or more.
#   torchrun --nproc_per_node=8 train.py config/train_1b.py --dataset=NAME
# Chinchilla's 20 tokens a parameter are 22G tokens.
run = "train_1b"
preset = "llama"
n_layer = 22
n_head = 16
n_kv_head = 8
head_dim = 128
n_embd = 2048
block_size = 2048

batch_size = 8
batch_tokens = 1_048_576
max_tokens = 22_000_000_000
lr = 3e-4
warmup_ratio = 0.01
schedule = "wsd"
eval_every = 500

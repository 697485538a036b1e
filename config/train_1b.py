# 1.15G parameters with a vocabulary of 32,000 tokens: 22 layers of width 2048. It is meant for GPUs
# with 80 GB or more.
#   torchrun --nproc_per_node=8 train.py config/train_1b.py --dataset=NAME
# 23G tokens are 20 per parameter (Chinchilla, arXiv 2203.15556).
run_name = "train_1b"
preset = "llama"
n_layer = 22
n_head = 16
n_kv_head = 8
head_dim = 128
n_embd = 2048
block_size = 2048

batch_size = 8
batch_tokens = 1_048_576
max_tokens = 23_000_000_000
lr = 3e-4
warmup_ratio = 0.01
schedule = "wsd"
eval_every = 500

# 1.15G parameters with a vocabulary of 32,000 tokens: 22 layers of width 2048. It is meant for GPUs
# with 80 GB or more. On six V100 with 16 GB: --shard=gradients --recompute=blocks (docs/cost.md).
#   torchrun --nproc_per_node=8 train.py config/train_1b.py
# 23G tokens are 20 per parameter (Chinchilla, arXiv 2203.15556).
run_name = "train_1b"
preset = "qwen3"
n_layer = 22
n_head = 16
n_kv_head = 8
n_embd = 2048
block_size = 2048

batch_size = 8
batch_tokens = 1_048_576
max_tokens = 23_000_000_000
# From train_100m by three rules: the best lr falls to a third from 0.1G to 1G parameters, as in
# GPT-3's table; it grows with the root of the tokens per step, here twice as many; and the best
# weight decay falls with the square of the width. Not yet confirmed on a GPU: try lr 8e-4 and 3e-3.
optimizer = "muon"
lr = 1.6e-3
vector_lr = 4.0
weight_decay = 0.05
schedule = "wsd"
decay_ratio = 0.7
min_lr_ratio = 0.0
eval_every = 500

# The run that this project was made for: about 100M parameters on one to eight GPUs.
#   torchrun --nproc_per_node=6 train.py config/train_100m.py
# 97.5M parameters with a vocabulary of 16,384 tokens, 110M with 32,000.
# 2G tokens are 20 per parameter.
# On six GPUs, a step is 8 x 1024 tokens x 6 GPUs x 11 micro-steps = 540,672 tokens. This is the
# multiple of 8 x 1024 x 6 that is nearest to batch_tokens.
run_name = "train_100m"
preset = "qwen3"
tie_embeddings = True
n_layer = 12
n_head = 6
n_embd = 768
block_size = 1024

# 8 sequences suit a V100 with 16 GB. On an H100, 8 gave 25 % MFU, 16 gave 38 % and 32 gave 42 %
# (docs/results.md): use more if there is free memory, or --batch_size=auto.
batch_size = 8
batch_tokens = 524_288
max_tokens = 2_000_000_000
# Muon was best in docs/results.md. The values are those of the fastest published runs of 124M, with
# 0.5M tokens per step: lr 3.6e-3, lr x weight_decay of 1.25e-3, four times the lr for vectors, a
# decay to 0 over 70 % of the run. They are not yet confirmed on a GPU for this model. In small
# models the best lr fell with width, depth and steps (docs/results.md): try lr 1.8e-3 first, and
# 7.2e-3 too.
optimizer = "muon"
lr = 3.6e-3
vector_lr = 4.0
weight_decay = 0.35
schedule = "wsd"
decay_ratio = 0.7
min_lr_ratio = 0.0

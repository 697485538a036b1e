# GPT-2's smallest model. Prepare the data with
#   python prepare.py --input CORPUS --name NAME --tokenizer gpt2
# 124M parameters with the gpt2 vocabulary. 2.5G tokens are 20 per parameter.
# On one GPU, a step is 16 x 1024 tokens x 30 micro-steps = 491,520 tokens.
run_name = "gpt2_124m"
preset = "gpt2"
n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024

batch_size = 16
batch_tokens = 491_520
max_tokens = 2_500_000_000
# The architecture is GPT-2's. The rest is that of train_100m, which has the same width and nearly
# as many tokens per step. Without QK-norm a high lr is less stable: it is halved, and with it the
# weight decay per step. Not yet confirmed on a GPU: try lr 0.9e-3 and 3.6e-3 too.
optimizer = "muon"
lr = 1.8e-3
vector_lr = 4.0
weight_decay = 0.35
schedule = "wsd"
decay_ratio = 0.7
min_lr_ratio = 0.0

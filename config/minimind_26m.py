# The size of MiniMind's 26M model: 8 layers of width 512, 8 query heads that share 2 key/value
# heads, sequences of 512 tokens. Prepare the data with
#   python prepare.py --input pretrain.jsonl --name zh --vocab_size 6400
# 25.8M parameters with this vocabulary. 500M tokens are 20 per parameter.
# On six GPUs, a step is 21 x 512 tokens x 6 GPUs x 2 micro-steps = 129,024 tokens.
run_name = "minimind_26m"
preset = "llama"
tie_embeddings = True
rope_theta = 1e6
n_layer = 8
n_head = 8
n_kv_head = 2
n_embd = 512
block_size = 512

# On an H100, 32 sequences gave 26 % MFU, 64 gave 33 % and 128 gave 34 % (docs/results.md): use more
# if there is free memory.
batch_size = 32
batch_tokens = 131_072
max_tokens = 500_000_000
# The recipe of train_100m with a quarter of the tokens per step: the best lr falls with their root,
# and is somewhat higher for a smaller model. Not yet confirmed on a GPU: try lr 1.2e-3 and 4.8e-3.
optimizer = "muon"
lr = 2.4e-3
vector_lr = 4.0
weight_decay = 0.2
schedule = "wsd"
decay_ratio = 0.7
min_lr_ratio = 0.0
eval_every = 500

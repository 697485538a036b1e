# The size of MiniMind's present model, minimind-3: Qwen3, 8 layers of width 768, 8 query heads that
# share 4 key/value heads. Prepare the data with
#   python prepare.py --input pretrain_t2t_mini.jsonl --name zh --vocab_size 6400
# 63.9M parameters with this vocabulary. 1.28G tokens are 20 per parameter.
# On six GPUs, a step is 21 x 512 tokens x 6 GPUs x 2 micro-steps = 129,024 tokens.
run_name = "minimind_64m"
preset = "qwen3"
tie_embeddings = True
rope_theta = 1e6
n_layer = 8
n_head = 8
n_kv_head = 4
n_embd = 768
d_ff = 2432
block_size = 512

# 64 sequences need 11 GB; use more if there is free memory.
batch_size = 64
batch_tokens = 131_072
max_tokens = 1_280_000_000
# Between the recipes of minimind_26m and train_100m. Not yet confirmed on a GPU: try lr 1e-3 and
# 4e-3 too.
optimizer = "muon"
lr = 2e-3
vector_lr = 4.0
weight_decay = 0.2
schedule = "wsd"
decay_ratio = 0.7
min_lr_ratio = 0.0
eval_every = 500

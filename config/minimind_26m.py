# The size of MiniMind's 26M model: 8 layers of width 512, 8 query heads that share 2 key/value
# heads, sequences of 512 tokens. Prepare the data with
#   python prepare.py --input pretrain.jsonl --name zh --vocab_size 6400
# 25.8M parameters with this vocabulary. 500M tokens are 20 per parameter.
run_name = "minimind_26m"
preset = "llama"
tie_embeddings = True
rope_theta = 1e6
n_layer = 8
n_head = 8
n_kv_head = 2
n_embd = 512
block_size = 512

batch_size = 32
batch_tokens = 131_072
max_tokens = 500_000_000
lr = 1e-3
weight_decay = 0.1
schedule = "wsd"
eval_every = 500

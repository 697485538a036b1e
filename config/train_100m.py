# The run this project is made for: about 100M parameters on one to eight GPUs,
#   torchrun --nproc_per_node=6 train.py config/train_100m.py --dataset=NAME
# 97.5M parameters at a vocabulary of 16,384, 110M at 32,000; 2G tokens = 20 a parameter.
# A step is 8 x 1024 tokens x 6 GPUs x 11 micro-steps = 540,672, the nearest to batch_tokens on six.
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

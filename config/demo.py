# Shakespeare, character by character: a first run for any machine. The size and the context are
# those of nanoGPT's recipe for a laptop; --dataset=NAME takes any data set of characters.
#   python prepare.py --input data/shakespeare.txt.gz --tokenizer char --val_fraction 0.1
# 0.8M parameters; 280 steps of 1,024 tokens are 0.3 epochs.
run_name = "demo"
dataset = "shakespeare"
preset = "qwen3"
n_layer = 4
n_head = 4
n_embd = 128
d_ff = 352
block_size = 64
init = "llama"

dtype = "float32"  # bf16 makes such a small model no faster
batch_size = 16
batch_tokens = 16 * 64
max_steps = 280

# Chosen with seeds 1 to 3 (bench/LOG.md). Such a short run needs a high lr, a low momentum and an
# early decay.
optimizer = "muon"
lr = 8e-3
embed_lr = 3.0
vector_lr = 3.0
momentum = 0.9
beta1 = 0.8
schedule = "wsd"
decay_ratio = 0.7
min_lr_ratio = 0.0
eval_tokens = 20_000
eval_every = 70
sample_every = 140
sample_prompt = "ROMEO:"
log_every = 10

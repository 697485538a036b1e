# What the questions in bench/questions/ start from: the model of config/demo.py, with
# nanoGPT's recipe for a laptop (AdamW, cosine to a tenth), for a quarter of its 2,000 steps.
# --dataset=NAME asks them of any data set.
#   python prepare.py --input FILE --name shakespeare --tokenizer char --val_fraction 0.1
dataset = "shakespeare"
preset = "qwen3"
n_layer = 4
n_head = 4
n_embd = 128
d_ff = 352
block_size = 64

batch_size = 12
batch_tokens = 12 * 64
max_steps = 500
lr = 1e-3
beta2 = 0.99
warmup_ratio = 0.05
eval_every = 250
save_every = 500

# nanoGPT's recipe for a laptop: a small model of Shakespeare, letter by letter. The questions in
# bench/questions/ start from it. With --dataset=NAME it trains on any data set.
#   python prepare.py --input shakespeare.txt --tokenizer char --name shakespeare_char
run_name = "laptop"
dataset = "shakespeare_char"
preset = "gpt2"
bias = False
n_layer = 4
n_head = 4
n_embd = 128
block_size = 64

batch_size = 12
batch_tokens = 12 * 64
max_steps = 2000
lr = 1e-3
beta2 = 0.99
warmup_ratio = 0.05
eval_every = 200
save_every = 500
keep = 1
log_every = 50

# nanoGPT's recipe on a BPE corpus, as this trainer runs it: what its lr and its batch should be.
# docs/results.md uses it for the comparison with a tuned nanoGPT.
#   python prepare.py --input cpp_docs_en.jsonl.gz --name cpp8k --vocab_size 8000
question = "Which lr and batch are best for nanoGPT's recipe on 1.25M tokens?"
run_name = "nanogpt_bpe"
dataset = "cpp8k"
preset = "gpt2"
bias = False
n_layer = 4
n_head = 6
n_embd = 384
block_size = 256

batch_size = 16
batch_tokens = 8_192
max_tokens = 1_250_000
beta2 = 0.99
warmup_ratio = 0.1
compile = False
save_every = 100_000
eval_every = 100_000
keep = 1

baseline = "8k 1e-3"
variants = {
    "8k 1e-3": {},
    "8k 5e-4": {"lr": 5e-4},
    "8k 2e-3": {"lr": 2e-3},
    "8k 4e-3": {"lr": 4e-3},
    "8k 8e-3": {"lr": 8e-3},
    "4k 1e-3": {"batch_tokens": 4_096, "lr": 1e-3},
    "4k 2e-3": {"batch_tokens": 4_096, "lr": 2e-3},
    "4k 4e-3": {"batch_tokens": 4_096, "lr": 4e-3},
    "16k 2e-3": {"batch_tokens": 16_384, "lr": 2e-3},
    "16k 4e-3": {"batch_tokens": 16_384, "lr": 4e-3},
}
lr = 1e-3

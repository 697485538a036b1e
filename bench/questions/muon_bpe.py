# The same model size and data as in nanogpt_bpe.py, with this project's recipe.
question = "Which lr and batch are best for Muon on 1.25M tokens?"
run_name = "muon_bpe"
dataset = "cpp8k"
preset = "qwen3"
n_layer = 4
n_head = 6
n_embd = 384
block_size = 256
tie_embeddings = True
init = "llama"

batch_size = 16
batch_tokens = 8_192
max_tokens = 1_250_000
optimizer = "muon"
vector_lr = 3.0
schedule = "wsd"
decay_ratio = 0.7
min_lr_ratio = 0.0
compile = False
save_every = 100_000
eval_every = 100_000
keep = 1

baseline = "8k 6e-3"
variants = {
    "8k 6e-3": {},
    "8k 3e-3": {"lr": 3e-3},
    "8k 1.2e-2": {"lr": 1.2e-2},
    "4k 4e-3": {"batch_tokens": 4_096, "lr": 4e-3},
    "4k 6e-3": {"batch_tokens": 4_096, "lr": 6e-3},
    "4k 8e-3": {"batch_tokens": 4_096, "lr": 8e-3},
    "4k 6e-3, embeddings 2x": {"batch_tokens": 4_096, "lr": 6e-3, "embed_lr": 2.0},
    "4k 6e-3, untied": {"batch_tokens": 4_096, "tie_embeddings": False, "embed_lr": 3.0},
    "16k 8e-3": {"batch_tokens": 16_384, "lr": 8e-3},
    "2k 4e-3": {"batch_tokens": 2_048, "batch_size": 8, "lr": 4e-3},
}
lr = 6e-3

# Teaches the model of config/docs.py to answer: make docs, then make chat. It takes a minute and a
# half on 2 cores.
# The model keeps its shape. 4 epochs are 238 steps of 1,024 tokens.
run_name = "chat"
init_from = "out/docs"
dataset = "chat"
block_size = 256
documents = "pack"
loss_on = "answers"

batch_size = 4
batch_tokens = 4 * 256
max_epochs = 4

optimizer = "muon"
lr = 4e-3
embed_lr = 3.0
vector_lr = 3.0
schedule = "wsd"
decay_ratio = 0.7
min_lr_ratio = 0.0
eval_every = 80
sample_every = 80
sample_prompt = "Explain os.path.join."
log_every = 20

# The demo learns to answer: make demo, then make chat. It takes two minutes on 2 cores in fp32.
# The shape is that of its model. 6 epochs are 180 steps of 2,048 tokens.
run_name = "chat"
init_from = "out/demo"
dataset = "chat"
block_size = 256
documents = "pack"
loss_on = "answers"

batch_size = 8
batch_tokens = 8 * 256
max_epochs = 6

optimizer = "muon"
lr = 4e-3
embed_lr = 3.0
vector_lr = 3.0
schedule = "wsd"
decay_ratio = 0.7
min_lr_ratio = 0.0
eval_every = 60
sample_every = 60
sample_prompt = "Explain os.path.join."
save_every = 1000
log_every = 20

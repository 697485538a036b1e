# How should conversations fill the windows, if a model learns to answer? Each run is judged by the
# answers of val alone, each conversation from its own beginning.
#   python -m bench.lab bench/questions/conversations.py --dataset=NAME --init_from=out/BASE
# A window of pad has one conversation, and much padding: with 46 tokens in one, 44 windows have as
# many tokens as 16 of pack.
question = "One conversation in a window, or as many as fit, and may they see each other?"
config = "config/chat.py"
judge = "val_document_loss"
block_size = 128
batch_size = 16
batch_tokens = 16 * 128
max_steps = 36
max_epochs = 0
lr = 2e-3
eval_every = 12
save_every = 1000
baseline = "pack"
variants = {
    "pack": {"documents": "pack"},
    "stream": {"documents": "stream"},
    "pad, same time": {"documents": "pad"},
    "pad, same tokens": {"documents": "pad", "batch_tokens": 44 * 128, "batch_size": 22},
}

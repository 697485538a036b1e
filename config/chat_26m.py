# The 26M model of config/minimind_26m.py learns to answer:
#   python prepare.py --input sft.jsonl --name talks --tokenizer data/zh
#   python train.py config/chat_26m.py --dataset=talks
# The shape is that of its model. --max_epochs=1 is enough for some 100,000 conversations and more.
run_name = "chat_26m"
init_from = "out/minimind_26m"
block_size = 512
documents = "pack"
loss_on = "answers"

# A quarter of the tokens in a step of its pretraining, and two thirds of the rate: so they are in
# config/chat.py, where the laboratory chose them. Nobody has tried this on a GPU: try lr 8e-4, too.
batch_size = 32
batch_tokens = 32_768
max_epochs = 2

optimizer = "muon"
lr = 1.6e-3
vector_lr = 4.0
schedule = "wsd"
decay_ratio = 0.7
min_lr_ratio = 0.0
eval_every = 200
sample_every = 200
sample_prompt = "你好"

# Teaches the 26M model of config/minimind_26m.py to answer:
#   python prepare.py --input sft.jsonl --name talks --tokenizer data/zh
#   python train.py config/chat_26m.py --dataset=talks
# The model keeps its shape. With 100,000 conversations or more, --max_epochs=1 is enough.
run_name = "chat_26m"
init_from = "out/minimind_26m"
block_size = 512
documents = "pack"
loss_on = "answers"

# A quarter of the tokens per step of pretraining, and two thirds of its lr: the same ratios as in
# config/chat.py, where they were measured (bench/lab.py). Not yet tried on a GPU: try lr 8e-4 too.
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

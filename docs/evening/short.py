# A short run for docs/evening.md: python train.py config/demo.py docs/evening/short.py
max_steps = 100
log_every = 20
sample_every = 0
eval_every = 1000
eval_tokens = 20_000

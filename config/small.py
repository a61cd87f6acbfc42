# The default: a GPT that learns to write Python from Python's own standard library in about three
# minutes on two CPU cores. docs/LOG.md has the trials behind these numbers.

dataset = "stdlib"  # 12 MB, prepared on first use with a vocabulary of 4,096 tokens

n_layer = 2  # small and often: two layers see twice the text that four would in the same time
n_head = 4
n_embd = 128
block_size = 128  # about 400 characters

batch_size = 16
gradient_accumulation_steps = 1
max_iters = 2500  # 5.1 M tokens, one and a half epochs
eval_interval = 625

optimizer = "muon"
muon_lr = 0.012
muon_momentum = 0.85
learning_rate = 2e-2  # AdamW's share: embeddings and norms
schedule = "linear"  # flat, then down over the last 60 %
warmup_iters = 100
min_lr = 0.0
weight_decay = 0.0  # one and a half epochs leave little to regularise

# Tiny Shakespeare by characters in the shape of nanoGPT's CPU example: comparable loss for loss.

dataset = "shakespeare_char"

n_layer = 4
n_head = 4
n_embd = 128
block_size = 64

batch_size = 12
gradient_accumulation_steps = 1
max_iters = 2000  # as many as nanoGPT's example
eval_interval = 500

optimizer = "muon"
muon_lr = 0.02
learning_rate = 3e-3  # AdamW's share: embeddings and norms
min_lr = 0.0
schedule = "linear"
warmup_iters = 50
weight_decay = 0.0  # 0.8 M parameters see 1.5 M characters: too few to overfit

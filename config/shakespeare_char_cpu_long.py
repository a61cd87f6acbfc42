# The same model as shakespeare_char_cpu, given the time that nanoGPT's example takes.

dataset = "shakespeare_char"

n_layer = 4
n_head = 4
n_embd = 128
block_size = 64
init_std = 0.05  # as 0.02 is to width 768

batch_size = 12
gradient_accumulation_steps = 1
max_iters = 1800  # nanoGPT's example takes 2,000, about as long each
eval_interval = 225

optimizer = "muon"
muon_lr = 0.02
muon_momentum = 0.8
learning_rate = 1.2e-2  # AdamW's share: embeddings and norms
min_lr = 0.0
schedule = "linear"
cooldown = 0.5
warmup_iters = 20
weight_decay = 0.0  # 0.8 M parameters see 1.4 M characters: too few to overfit

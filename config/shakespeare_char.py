# Tiny Shakespeare by characters in the shape of nanoGPT's GPU example: about an hour on two CPU
# cores. A first guess, not yet run to its end; docs/LOG.md has what was tried.

dataset = "shakespeare_char"

n_layer = 6
n_head = 6
n_embd = 384
block_size = 256  # characters
dropout = 0.2  # 10.7 M parameters read 1 M characters twelve times

batch_size = 32
gradient_accumulation_steps = 1
max_iters = 1500
eval_interval = 150
always_save_checkpoint = False

optimizer = "muon"
muon_lr = 0.015
muon_momentum = 0.85
learning_rate = 1e-2  # AdamW's share: embeddings and norms
min_lr = 0.0
schedule = "linear"
warmup_iters = 30
weight_decay = 0.1

# Tiny Shakespeare by characters in the shape of nanoGPT's GPU example: an hour on two CPU cores,
# validation 1.465 (nanoGPT: 1.4697 on an A100). docs/LOG.md has what else was tried.

dataset = "shakespeare_char"

n_layer = 6
n_head = 6
n_embd = 384
block_size = 256  # characters
dropout = 0.2  # 10.7 M parameters read 1 M characters nine times
init_std = 0.03  # 0.02 * sqrt(768 / 384)

batch_size = 8  # many small updates: 16 came to 1.73 in the time that 8 came to 1.57
gradient_accumulation_steps = 1
max_iters = 4300
eval_interval = 430
always_save_checkpoint = False

optimizer = "muon"
muon_lr = 0.015
muon_momentum = 0.85
learning_rate = 1.2e-2  # AdamW's share: embeddings and norms
min_lr = 0.0
schedule = "linear"
warmup_iters = 100
weight_decay = 0.1

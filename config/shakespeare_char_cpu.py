# Tiny Shakespeare by characters in the shape of nanoGPT's CPU example, below its loss in a fifth of
# its time. docs/LOG.md has the trials behind these numbers.

dataset = "shakespeare_char"

n_layer = 4
n_head = 4
n_embd = 128
block_size = 64
init_std = 0.05  # as 0.02 is to width 768

batch_size = 12
gradient_accumulation_steps = 1
max_iters = 380  # nanoGPT's example takes 2,000
eval_interval = 95

optimizer = "muon"
muon_lr = 0.028
muon_momentum = 0.8  # a short run has no time for a long memory
learning_rate = 2.4e-2  # AdamW's share: embeddings and norms
min_lr = 0.0
schedule = "linear"
cooldown = 0.45
warmup_iters = 10
weight_decay = 0.0  # each character is seen once at most: nothing to overfit

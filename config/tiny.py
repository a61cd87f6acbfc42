# For tests and first steps: learns next to nothing in a few seconds.

dataset = "stdlib"

n_layer = 2
n_head = 2
n_embd = 32
block_size = 16

batch_size = 8
gradient_accumulation_steps = 1
max_iters = 20
warmup_iters = 2
learning_rate = 1e-2
min_lr = 1e-3
eval_interval = 10
eval_iters = 4  # a few batches of the validation split are enough here

# Tiny Shakespeare by characters in the shape of nanoGPT's GPU example. For a GPU.

dataset = "shakespeare_char"

n_layer = 6
n_head = 6
n_embd = 384
block_size = 256  # characters
dropout = 0.2  # 10.7 M parameters read 1 M characters about 80 times

batch_size = 64
gradient_accumulation_steps = 1
max_iters = 5000
eval_interval = 250  # often, for the best comes before the end
always_save_checkpoint = False

learning_rate = 1e-3  # a small model bears a high rate
min_lr = 1e-4
warmup_iters = 100
beta2 = 0.99  # few tokens an update make a noisy second moment

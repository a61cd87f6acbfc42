# GPT-2's smallest model on OpenWebText: about four days on 8 A100 by nanoGPT's account.
# The shape is the default of train.py: 12 layers, 12 heads, width 768, context 1024.

# Downloaded and prepared when missing: 40 GB of text, kept in data/.cache, and 18 GB of shards.
dataset = "openwebtext"

batch_size = 12
gradient_accumulation_steps = 5 * 8  # x 12 x 1024 tokens: about half a million an update
max_iters = 600000
lr_decay_iters = 600000
eval_interval = 1000
eval_iters = 200
log_interval = 10

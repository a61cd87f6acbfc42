# Given weights learn a text of your own:
#     python train.py config/finetune.py --dataset=my.txt                      from GPT-2
#     python train.py config/finetune.py --dataset=my.txt --init_from=out/small --learning_rate=1e-2
# The architecture and, for a text, the tokenizer come with the weights.

init_from = "gpt2"  # fetched from the Hugging Face hub once; or a run, or a folder of weights
dataset = "shakespeare"

batch_size = 2  # two rows of 1,024 tokens of GPT-2 124M train in 4 GB
gradient_accumulation_steps = 4
max_iters = 200
eval_interval = 20
patience = 3  # a small text is soon known by heart: stop once validation has risen three times
always_save_checkpoint = False  # the best stays

# What was learned shall not be swept away: small steps, and slowly into them. Small models want
# larger ones; docs/LOG.md has trials.
learning_rate = 1e-4
min_lr = 0.0
warmup_iters = 10
schedule = "linear"
cooldown = 1.0
dropout = 0.0  # 0.1 cost a small model 0.19 nats in 300 updates; many epochs may want it
weight_decay = 0.1

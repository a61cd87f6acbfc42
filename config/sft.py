# Given weights learn to answer: prompts with completions, or chats, as lines of JSON. Only answers
# are learned; reasoning that shall be written before an answer is part of the completion.
#     python train.py config/sft.py --dataset=chats.jsonl
#     python train.py config/sft.py --dataset=chats.jsonl --init_from=gpt2 --optimizer=adamw \
#         --learning_rate=1e-4

init_from = "out/small"  # a run, a folder of weights, or gpt2
dataset = "chats.jsonl"  # {"messages": [...]} or {"prompt": ..., "completion": ...} a line

batch_size = 16  # samples, padded to the longest of a batch
gradient_accumulation_steps = 1
max_iters = 600
eval_interval = 100
patience = 3  # stop once validation has risen three times
always_save_checkpoint = False  # the best stays

optimizer = "muon"  # with AdamW alone six times the loss, docs/LOG.md has the trials
muon_lr = 0.012
learning_rate = 5e-3  # AdamW's share: embeddings and norms
min_lr = 0.0
warmup_iters = 20
schedule = "linear"
cooldown = 1.0
weight_decay = 0.1

"""Text in, token shards out: the room that prepares what the model reads.

`sources` finds documents, `tokenizer` and `bpe` turn text into ids and back, `split` says what is
held out, `build` writes a dataset folder, `prepare` is its command and resolves `--dataset=`;
`shards` and `dataset` open what was written, `order` says which row comes when. Nothing in here
knows torch, the model or the trainer.
"""


class DataError(ValueError):
    """A person's mistake or a broken file, in one clear line.

    It says what was given, what was expected and what to do. Whoever catches it prints that line,
    without a traceback, and exits with code 2.
    """

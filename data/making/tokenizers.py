"""Tokenizers by the name that a user gives: made, learned from texts, or fetched."""

import re
from collections.abc import Iterable
from importlib import import_module
from itertools import chain
from pathlib import Path

from data import read_json
from data.making.vocabulary import GPT2_PATTERN, fetch, learn
from data.tokenizer import (
    EOT,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    from_json,
    plugins,
)
from kit.errors import UserError, did_you_mean


def make_tokenizer(spec: str, texts: Iterable[str] = ()) -> Tokenizer:
    """The tokenizer a user names.

    spec: byte, char, bpe:N, a tiktoken encoding (gpt2, or gpt2:FOLDER with its vocabulary files),
    a path to a tokenizer.json, or NAME:ARGUMENT for extras/NAME.py.
    texts are read once, by `char` for its alphabet and by `bpe:N` for its merges.
    """
    import tiktoken

    name, colon, argument = spec.partition(":")
    if spec == "byte":
        return ByteTokenizer()
    if spec == "char":
        return CharTokenizer(chain.from_iterable(texts))
    if size := re.fullmatch(r"bpe:([0-9]{1,9})", spec):
        tokens = learn(int(size[1]), texts)
        return BPETokenizer(spec, GPT2_PATTERN, [*tokens, None], {EOT: len(tokens)})
    encodings = tiktoken.list_encoding_names()
    if name in encodings:
        return BPETokenizer(name, *fetch(name, argument))
    if colon and name in plugins():
        return import_module(f"extras.{name}").make(argument)
    if spec.endswith(".json"):
        return from_json(read_json(Path(spec), "give --tokenizer= that of a dataset or checkpoint"))
    names = [*encodings, *(f"{name}:..." for name in plugins())]
    hint = did_you_mean(spec, ["byte", "char", "bpe:2048", *names])
    raise UserError(f"--tokenizer={spec} is none of byte, char, bpe:N, {', '.join(names)} and "
                    f"paths to a tokenizer.json{hint}")


def identity(spec: str) -> str:
    """What is recorded of a tokenizer that is named so: its `spec`, or its `hash` if of a file."""
    import tiktoken

    name, colon, _ = spec.partition(":")
    if name in tiktoken.list_encoding_names():
        return name
    of_a_file = spec.endswith(".json") or (colon and name in plugins())
    return make_tokenizer(spec).hash if of_a_file else spec

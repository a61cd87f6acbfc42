"""Vocabularies for byte pair encoding, learned from text or OpenAI's, and where their words end."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from pathlib import Path

import numpy as np

from data.making.bytelevel import BYTES, unspell
from kit.errors import UserError

MAX_SIZE = 1_000_000  # of a learned one: beyond lies a typing error
LESSON = 1 << 20  # characters; the trainer makes an object of each word in what it gets at once
# Where words begin (GPT-2's rule, in tiktoken's possessive spelling): no token straddles two words.
GPT2_PATTERN = (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++"
                r"|\s++$|\s+(?!\S)|\s")
GPT2_SPLIT = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
              r"|\s+(?!\S)|\s+")  # the same words, as GPT-2's own code has it
CL100K_PATTERN = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
                  r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s")
O200K_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
SPACES = re.compile(r"[^\S\x1c-\x1f]+")  # what `\s` is to tiktoken; Python's has four more
LONG_WORD = re.compile(r"\S{1000}|\s{1000}")
LONG_RUN = 50_000  # of spaces: tiktoken gives up before a word at some multiple of that


def learn(size: int, texts: Iterable[str]) -> list[bytes]:
    """At most size - 1 tokens, as one id is for eot, learned with Hugging Face `tokenizers`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    if not 257 <= size <= MAX_SIZE:
        raise UserError(f"bpe:{size}: expected a size of 257 (bytes, end-of-text) to {MAX_SIZE:,}")
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1, min_frequency=2, show_progress=False, initial_alphabet=list(BYTES))
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    slices = (text[i:i + LESSON] for text in texts for i in range(0, len(text), LESSON))
    learner.train_from_iterator(chain.from_iterable(map(_short, slices)), trainer)
    vocabulary = learner.get_vocab()
    return [unspell(token) for token in sorted(vocabulary, key=vocabulary.get)]


def _short(text: str) -> Iterator[str]:
    """A text in parts that have no very long word: the trainer's time grows with its square."""
    space = np.frombuffer(text.encode("utf-8"), np.uint8) <= 32
    ends = np.flatnonzero(space[1:] != space[:-1])
    start = 0
    if np.diff(ends, prepend=-1, append=space.size - 1).max() >= 1000:
        for word in LONG_WORD.finditer(text):
            yield text[start:word.end()]
            start = word.end()
    yield text[start:]


def fetch(name: str, place: str = "") -> tuple[str, list[bytes | None], dict[str, int]]:
    """Pattern, tokens and special ids of a tiktoken encoding; place: its files' folder, or one."""
    from tiktoken.load import check_hash
    from tiktoken.registry import ENCODING_CONSTRUCTORS

    describe, urls = ENCODING_CONSTRUCTORS[name], []
    folder = Path(place).parent if Path(place).is_file() else Path(place)

    def look(url: str, sha256: str | None = None) -> bytes:
        file = folder / url.rpartition("/")[2]
        if not file.is_file():
            raise UserError(f"{file} is missing; fetch {url} on another machine and put it there")
        content = file.read_bytes()
        if sha256 and not check_hash(content, sha256):
            got = hashlib.sha256(content).hexdigest()
            raise UserError(f"{file} ({len(content):,} bytes) has SHA-256 {got}, expected "
                            f"{sha256}; fetch {url} again")
        return content

    try:
        with _reading(look) if place else nullcontext():
            made = describe()
    except (OSError, ValueError, ImportError) as error:
        with _reading(lambda url, sha256=None: urls.append(url) or b""), suppress(ValueError):
            describe()
        raise UserError(
            f"the vocabulary of {name} is missing or damaged in tiktoken's cache and could not be "
            f"fetched ({type(error).__name__}); fetch {' and '.join(urls)} on another machine and "
            f"give their folder, as --tokenizer={name}:FOLDER, or set TIKTOKEN_CACHE_DIR") from None
    ranks, special = made["mergeable_ranks"], made["special_tokens"]
    tokens = [None] * (1 + max(*ranks.values(), *special.values()))
    for token, id in ranks.items():
        tokens[id] = token
    return made["pat_str"], tokens, dict(special)


@contextmanager
def _reading(read: Callable[..., bytes]) -> Iterator[None]:
    """Have tiktoken's loader get its files from `read(url, sha256)` for a while."""
    from tiktoken import load

    original, load.read_file_cached = load.read_file_cached, read
    try:
        yield
    finally:
        load.read_file_cached = original


def cut(text: str, pattern: str) -> Iterator[str]:
    """Parts of a text that yield the ids of the whole, cut at the ends of its long runs of spaces.

    The last space before a word is the word's, all others are one piece, as at the end of a text.
    Some patterns end a piece after the last line end too; o200k_base has no place to cut.
    """
    start = 0
    for run in SPACES.finditer(text) if r"|\s++$|" in pattern else ():
        if len(run[0]) >= LONG_RUN and run.end() < len(text):
            lines = 1 + max(map(run[0].rfind, "\r\n")) if r"\s*[\r\n]" in pattern else 0
            begin = run.start() + lines
            for end in (begin, max(begin, run.end() - 1)):
                yield text[start:end]
                start = end
    yield text[start:]

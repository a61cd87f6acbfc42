"""A tokenizer as llama.cpp reads it, and what a model needs for it.

llama.cpp's "gpt2" tokenizer is a byte-level BPE. Tokens and merges are spelled as in GPT-2's files;
where words end is known to llama.cpp by the name of a pre-tokenizer, never by a pattern.
"""

from typing import NamedTuple

import numpy as np

from data.making.bytelevel import merges, spell
from data.making.vocabulary import CL100K_PATTERN, GPT2_PATTERN, GPT2_SPLIT, O200K_PATTERN
from data.tokenizer import EOT, Tokenizer
from kit.errors import UserError

PRE = {  # pattern -> the pre-tokenizer of llama.cpp that splits as it does
    GPT2_PATTERN: "gpt-2", GPT2_SPLIT: "gpt-2",
    CL100K_PATTERN: "dbrx",  # but a text's last spaces are cut behind a line end among them
    O200K_PATTERN: "gpt-4o"}  # but of letters beyond ASCII it does not know which are capital
ALMOST = {"dbrx": "spaces at the end of a prompt, behind a line end, are split in another way",
          "gpt-4o": "letters beyond ASCII count as capital and as small ones, which moves the end "
                    "of some words"}
NEVER = -1000.0  # the logit of a token that no text has


class Vocabulary(NamedTuple):
    """A tokenizer as llama.cpp reads it."""

    tokens: list[str]  # spelled, by id
    types: list[str]  # NORMAL, CONTROL or UNUSED
    merges: list[str]  # "Ġt he", the first first
    pre: str
    end: int  # the id that ends a text


def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """UserError for a tokenizer that llama.cpp has no like of."""
    about = tokenizer.to_json()
    kind, pre, pairs = about["kind"], "gpt-2", []
    ids, special = range(tokenizer.vocab_size), {id: n for n, id in tokenizer.special.items()}
    tokens = [special.get(id) or spell(tokenizer.token_bytes(id)) for id in ids]
    types = ["CONTROL" if id in special else "NORMAL" if tokens[id] else "UNUSED" for id in ids]
    tokens = [token or f"[unused{id}]" for id, token in enumerate(tokens)]
    if kind == "bpe":
        if about["pattern"] not in PRE:
            raise UserError(f"{tokenizer.spec} splits words by a pattern of its own, which is "
                            f"none of llama.cpp's: {about['pattern']:.60}")
        pre = PRE[about["pattern"]]
        try:
            pairs = merges([tokenizer.token_bytes(id) for id in ids if types[id] == "NORMAL"])
        except ValueError as e:
            raise UserError(f"{tokenizer.spec} is not made of merges of pairs: {e}") from None
    elif kind == "char":  # the bytes of a character join, from its first on, and no others do
        many = [c.encode() for c in about["alphabet"] if ord(c) > 127]
        pairs = dict.fromkeys((c[:n], c[n:n + 1]) for n in (1, 2, 3) for c in many if n < len(c))
    elif kind != "byte":
        raise UserError(f"a {kind} tokenizer is of extras/ and nothing that llama.cpp knows")
    if not special:
        tokens, types = [*tokens, EOT], [*types, "CONTROL"]  # see with_end
    if len({*tokens}) < len(tokens):
        raise UserError(f"{tokenizer.spec} has two tokens that are spelled alike")
    end = tokens.index(EOT) if EOT in tokens else max(special)
    # It wants at least one merge; no text holds the two tokens of this one.
    written = [f"{spell(a)} {spell(b)}" for a, b in pairs] or [f"{EOT} {EOT}"]
    return Vocabulary(tokens, types, written, pre, end)


def with_end(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights of a model with one token more, at the end, whose logit is always NEVER.

    llama.cpp stops at an end token and takes token 11 for it where none is named, but char has no
    end. The head reads x = g * n + b, the last norm, where n has a mean of 0: so the row u = 1 / g
    times x is u @ b, a constant. To make that 1, b moves along u, and each row of the head moves
    along u as far as it takes for its own logit to stay.
    """
    g, W = (weights[name].astype(np.float64) for name in ("ln_f.weight", "wte.weight"))
    b = weights.get("ln_f.bias", np.zeros(len(g), np.float32)).astype(np.float64)
    W = weights.get("lm_head.weight", W).astype(np.float64)
    if np.abs(g).min() <= 1e-4 * np.abs(g).max():
        raise UserError("ln_f.weight has gains of almost 0: such a model cannot be given the end "
                        "token that llama.cpp needs")
    u = 1 / g
    t = (1 - u @ b) / (u @ u)
    W = np.vstack([W - np.outer(t * (W @ u), u), NEVER * u])
    wte = weights["wte.weight"]
    return weights | {"wte.weight": np.vstack([wte, np.zeros_like(wte[:1])]),
                      "lm_head.weight": W.astype(np.float32),
                      "ln_f.bias": (b + t * u).astype(np.float32)}

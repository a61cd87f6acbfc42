"""Our tokenizers as Hugging Face's tokenizer.json, and those of such files that ours can be.

Byte pairs are BPE over GPT-2's byte letters; bytes are the same without merges; characters are
words of one letter (WordLevel), so that an unknown one is an error there as it is here. What
remains different: in a text, `<|endoftext|>` is the special token there, and never here.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data import read_json
from data.making import bytelevel
from data.making.vocabulary import CL100K_PATTERN, GPT2_PATTERN, GPT2_SPLIT, O200K_PATTERN
from data.tokenizer import EOT, BPETokenizer, ByteTokenizer, CharTokenizer, Tokenizer
from kit.errors import UserError
from kit.files import LARGEST_JSON, size_of
from kit.settings import Say

# Where words end, tiktoken's text of it -> Oniguruma's, in which `$` is the end of any line and
# `{1,3}+` repeats. None: ByteLevel's own, GPT-2's. OLD_CL100K is what others publish of cl100k.
OLD_CL100K = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
              r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
PATTERNS = {
    GPT2_PATTERN: None,
    CL100K_PATTERN: CL100K_PATTERN.replace("$", r"\z").replace("}+", "}"),
    O200K_PATTERN: O200K_PATTERN,
    OLD_CL100K: OLD_CL100K}
GPT2_HASH = "7bb6fbbdf755a09709a037814b8a1a6e022d4a69f090c046cbaf67f4c749b9c8"
LONGEST = 256  # bytes of a token that is read; the longest of OpenAI's have 128
BONSAI_FORMAT = 1  # of bonsai.json, in which an export tells of itself
MOST_BYTES = 4 << 20  # of all tokens together; so that no file takes minutes to check
MOST_UNUSED = 4096  # ids; so that no file makes a list of any length
CHARACTERS = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated",
              "invert": False}


def to_hf(tokenizer: Tokenizer) -> dict[str, Any]:
    """A tokenizer -> its tokenizer.json; UserError where Hugging Face's library has no such."""
    special = {id: name for name, id in tokenizer.special.items()}
    if isinstance(tokenizer, CharTokenizer):
        model = {"type": "WordLevel", "unk_token": "<unk>",  # none, so an unknown one is an error
                 "vocab": {c: id for id, c in enumerate(tokenizer.alphabet)}}
        words, decoder = CHARACTERS, {"type": "Fuse"}
    elif isinstance(tokenizer, ByteTokenizer | BPETokenizer):
        tokens = [None if id in special else tokenizer.token_bytes(id) or None
                  for id in range(tokenizer.vocab_size)]
        pattern = tokenizer.to_json().get("pattern", GPT2_PATTERN)  # bytes are cut anywhere
        words, decoder = pre_tokenizer(pattern), byte_level(True)
        model = bpe(tokens, special, isinstance(tokenizer, ByteTokenizer))
    else:
        raise UserError(f"the tokenizer {tokenizer.spec} has no form in Hugging Face's library; "
                        "byte, char, bpe:N and tiktoken's have")
    added = [{"id": id, "content": special[id], "single_word": False, "lstrip": False,
              "rstrip": False, "normalized": False, "special": True} for id in sorted(special)]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
            "normalizer": None, "pre_tokenizer": words, "post_processor": None,
            "decoder": decoder, "model": model}


def bpe(tokens: list[bytes | None], special: dict[int, str], alone: bool) -> dict[str, Any]:
    """The BPE model; alone: no bytes are ever merged."""
    vocab = {bytelevel.spell(t): id for id, t in enumerate(tokens) if t is not None}
    if clash := vocab.keys() & {*special.values()}:
        raise UserError(f"the tokenizer has {min(clash)!r} both as text and as a special token, "
                        "which Hugging Face's library cannot tell apart")
    vocab |= {name: id for id, name in special.items()}
    try:
        pairs = [] if alone else bytelevel.merges([t for t in tokens if t is not None])
    except ValueError as e:
        raise UserError(f"the tokenizer cannot be written as merges: {e}") from None
    return {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": False, "vocab": dict(sorted(vocab.items(), key=lambda v: v[1])),
            "merges": [[*map(bytelevel.spell, pair)] for pair in pairs]}


def pre_tokenizer(pattern: str) -> dict[str, Any]:
    if pattern not in PATTERNS:
        raise UserError(f"the tokenizer's pattern {pattern:.40}... is none whose form in Hugging "
                        "Face's library is known; gpt2's, cl100k_base's and o200k_base's are")
    if PATTERNS[pattern] is None:
        return byte_level(True)
    split = CHARACTERS | {"pattern": {"Regex": PATTERNS[pattern]}}
    return {"type": "Sequence", "pretokenizers": [split, byte_level(False)]}


def byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
            "use_regex": use_regex}


# ------------------------------------------------------------------------------------------ import


def from_hf(find: Callable[[str], Path], eos: int | None,
            say: Say) -> Tokenizer:
    """The tokenizer of a folder with tokenizer.json, or with vocab.json and merges.txt.

    find: a file's name -> its path. eos: the model's id of end-of-text, or None. UserError for what
    ours cannot be.
    """
    path = find("tokenizer.json")
    value = read_json(path, "fetch it again") if path.exists() else gpt2_files(find)
    try:
        model, added = value["model"], value.get("added_tokens") or []
        if model["type"] == "WordLevel":
            return characters(value)
        special = {str(token["content"]): token["id"] for token in added}
        require(model, "type", "BPE")
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
            require(model, key, None, "", 0.0, False)
        require(value, "normalizer", None)
        require(value["decoder"], "type", "ByteLevel")
        pattern = pattern_of(value["pre_tokenizer"])
        tokens = tokens_of(model["vocab"], special)
        pairs = [tuple(map(bytelevel.unspell, m.split(" ") if isinstance(m, str) else m))
                 for m in model["merges"]]
        check_merges([t for t in tokens if t is not None], pairs)
    except (LookupError, TypeError, AttributeError, ValueError) as e:
        why = f"{e} is missing or unknown" if isinstance(e, KeyError) else str(e)
        raise UserError(f"{path}: not a tokenizer that ours can be: {why:.200}; byte-level BPE "
                        "such as GPT-2's is; --tokenizer=SPEC names one by hand") from None
    plain = [str(token["content"]) for token in added if not token.get("special")]
    if plain:
        say(f"tokenizer: {len(plain)} added tokens such as {plain[0]!r:.40} come from no text here")
    rename_end(special, eos, say)
    if not pairs and tokens == [bytes([b]) for b in range(256)] + [None] and special == {EOT: 256}:
        return ByteTokenizer()
    return named(find("bonsai.json"), pattern, tokens, special)


def gpt2_files(find: Callable[[str], Path]) -> dict[str, Any]:
    """vocab.json and merges.txt, in the shape of a tokenizer.json."""
    way = "give the folder tokenizer.json, or vocab.json and merges.txt, or name a --tokenizer=SPEC"
    vocab, path = read_json(find("vocab.json"), way), find("merges.txt")
    if not path.exists():
        raise UserError(f"{path} is missing; {way}")
    if size_of(path) > LARGEST_JSON:
        raise UserError(f"{path}: larger than {LARGEST_JSON >> 20} MiB, so no list of merges")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as e:
        raise UserError(f"{path}: not UTF-8 text at byte {e.start}") from None
    merges = [line for line in lines[lines[0].startswith("#version"):] if line]
    made = {line.replace(" ", "") for line in merges} | bytelevel.BYTES.keys()
    return {"added_tokens": [{"id": id, "content": name, "special": True}
                             for name, id in vocab.items() if name not in made],
            "pre_tokenizer": byte_level(True), "decoder": byte_level(True),
            "model": {"type": "BPE", "vocab": vocab, "merges": merges}}


def require(value: dict[str, Any], key: str, *allowed: Any) -> None:
    if (got := value.get(key)) not in allowed:
        got = got.get("type") if isinstance(got, dict) else got
        raise ValueError(f"its {key} is {got!r:.60}")


def pattern_of(value: dict[str, Any]) -> str:
    """Our pattern for a pre_tokenizer; ValueError for one that is not known."""
    *before, level = value["pretokenizers"] if value["type"] == "Sequence" else [value]
    require(level, "type", "ByteLevel")
    require(level, "add_prefix_space", False)
    if [bool(before), level.get("use_regex", True)] not in ([False, True], [True, False]):
        raise ValueError("its pre_tokenizer is another combination")
    if not before:
        return GPT2_PATTERN
    (split,) = before
    for key in ("type", "behavior", "invert"):
        require(split, key, CHARACTERS[key])
    known = {theirs: ours for ours, theirs in PATTERNS.items()} | {GPT2_SPLIT: GPT2_PATTERN}
    if (regex := split["pattern"].get("Regex")) not in known:
        raise ValueError(f"its pattern {regex!r:.60} is unknown")
    return known[regex]


def tokens_of(vocab: dict[str, int], special: dict[str, int]) -> list[bytes | None]:
    """The bytes of each id, None for special ones and gaps; ValueError for ids that cannot be."""
    ids = {**vocab, **special}
    if any(type(id) is not int or id < 0 for id in ids.values()) or len(
            {*ids.values()}) < len(ids) or any(vocab.get(n, id) != id for n, id in special.items()):
        raise ValueError("its ids are not whole numbers, each of one token")
    if (last := max(ids.values(), default=-1)) >= len(ids) + MOST_UNUSED:
        raise ValueError(f"it has an id {last}, but only {len(ids)} tokens")
    if not all(name.encode("utf-8") for name in special):  # an error for half a surrogate
        raise ValueError("it has a special token without a name")
    tokens: list[bytes | None] = [None] * (last + 1)
    for name in vocab.keys() - special.keys():
        tokens[vocab[name]] = bytelevel.unspell(name)
    texts = [t for t in tokens if t is not None]
    if sum(len(t) == 1 for t in texts) != 256 or not all(0 < len(t) <= LONGEST for t in texts):
        raise ValueError(f"its vocabulary lacks bytes, or has a token of none or over {LONGEST}")
    if (size := sum(map(len, texts))) > MOST_BYTES:
        raise ValueError(f"its tokens have {size:,} bytes together, over {MOST_BYTES:,}")
    return tokens


def rename_end(special: dict[str, int], eos: int | None, say: Say) -> None:
    """Our name for the end of a text is EOT, whatever the model calls it."""
    name = next((name for name, id in special.items() if id == eos), None)
    if EOT not in special and name is not None:
        special[EOT] = special.pop(name)
        say(f"tokenizer: {name!r:.60}, which ends a text (id {eos}), is called {EOT} here")
    elif EOT not in special:
        say("tokenizer: no special token ends a text, so there is no separator")


def check_merges(tokens: list[bytes], pairs: list[tuple[bytes, ...]]) -> None:
    """ValueError unless merging by ids, tiktoken's way, is merging by this list of pairs."""
    if [b"".join(pair) for pair in pairs] != [t for t in tokens if len(t) > 1]:
        raise ValueError("its merges are not in the order of ids, or some token has none; "
                         "tiktoken, which encodes here, knows no other order")
    for got, expected in zip(pairs, bytelevel.merges(tokens), strict=True):
        if got != expected:
            raise ValueError(f"{b''.join(got)!r} is merged from {got}, which tiktoken, that "
                             f"encodes here, makes from {expected}")


def characters(value: dict[str, Any]) -> CharTokenizer:
    """Our own export of a char tokenizer; ValueError for any other WordLevel."""
    made = CharTokenizer(value["model"]["vocab"])
    written = to_hf(made)
    for key in ("added_tokens", "normalizer", "pre_tokenizer", "decoder"):
        require(value, key, written[key])
    if value["model"]["vocab"] != written["model"]["vocab"]:
        raise ValueError("its words are not the characters of an alphabet in their order")
    return made


def named(claim: Path, pattern: str, tokens: list[bytes | None],
          special: dict[str, int]) -> BPETokenizer:
    """The tokenizer under the name that our export tells or gpt2, if its hash is that one's."""
    claims = [("gpt2", GPT2_HASH)]
    if claim.exists():
        value = read_json(claim, "remove it")
        known = value.get("tokenizer") if value.get("format") == BONSAI_FORMAT else None
        if isinstance(known, dict) and re.fullmatch(r"[\w:.-]{1,40}", str(known.get("spec"))):
            claims.append((known["spec"], known.get("hash")))
    for spec, expected in claims:
        made = BPETokenizer(spec, pattern, tokens, special)
        if made.hash == expected:
            return made
    return BPETokenizer("hf:bpe", pattern, tokens, special)

"""OpenAI's requests: what they may say, what is refused, and what the engine is asked for.

A parameter that is not known here is refused: nothing is accepted and then ignored, but for `user`
and for those whose value changes nothing (best_of=1, presence_penalty=0 and the like).
"""

import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple, get_type_hints

from torch import Tensor

from data.instruct import canonical, encode
from data.tokenizer import Tokenizer
from extras.serve.batch import read_of
from extras.serve.engine import Request
from kit.errors import UserError, did_you_mean, plain
from kit.settings import fits, options
from kit.writing.text import start_ids
from model import GPTConfig

WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false",
         list: "a list", dict: "an object", type(None): "null"}
STOPS, ALTERNATIVES = 16, 20  # most texts to stop at, most alternatives of a token
VALUES = 10**6  # most tokens and alternatives of a request: 100 MB while nobody takes them
RANGES = {"max_tokens": (1, 2**31), "max_completion_tokens": (1, 2**31), "temperature": (0, 100),
          "top_p": (0, 1), "top_k": (0, 2**31), "min_p": (0, 1), "repetition_penalty": (0.01, 100),
          "n": (1, 2**31), "seed": (0, 2**63 - 1), "logprobs": (0, ALTERNATIVES)}
NEUTRAL = {"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "best_of": 1,
           "suffix": "", "tools": [], "top_logprobs": 0}


class ApiError(Exception):
    """An answer that is an error: a status of HTTP and OpenAI's object, its message a line."""

    def __init__(self, message: str, status: int = 400, param: str | None = None,
                 code: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers or {}

    def to_json(self) -> dict[str, Any]:
        message = plain("\\n".join(str(self).splitlines()))
        kind = {429: "rate_limit_error"}.get(self.status, "invalid_request_error")
        return {"error": {"message": message, "param": self.param, "code": self.code,
                          "type": "server_error" if self.status >= 500 else kind}}


# ------------------------------------------------------------------------------------ the requests


@dataclass
class Body:
    """What both kinds of requests have; null in JSON means the default."""

    model: str = ""
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = 1
    seed: int | None = None  # of the first text, the next ones take the seeds after it
    stop: str | list = ()
    stream: bool = False
    stream_options: dict = field(default_factory=dict)
    user: str = ""
    top_k: int = 0  # this and the next two are not OpenAI's; 0: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict = field(default_factory=dict)

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def usage_wanted(self) -> bool:
        return self.stream_options.get("include_usage", False)


@dataclass
class Completion(Body):
    """POST /v1/completions"""

    prompt: str | list = ""
    logprobs: int | None = None
    echo: bool = False
    best_of: int = 1
    suffix: str = ""


@dataclass
class Chat(Body):
    """POST /v1/chat/completions"""

    messages: list = field(default_factory=list)
    max_tokens: int | None = None  # None: as long as it may be, the answer ends by itself
    max_completion_tokens: int | None = None  # the newer name
    logprobs: bool = False
    top_logprobs: int = 0
    tools: list = field(default_factory=list)


def read(kind: type[Body], data: bytes, most: int) -> Body:
    """A request of a kind, from JSON; ApiError for whatever is wrong. most: its max_tokens."""
    try:
        return check(kind, json.loads(data, parse_constant=refuse_constant), most)
    except RecursionError:
        raise ApiError("the body is nested too deep") from None
    except ValueError as e:
        raise ApiError(f"the body is no JSON in UTF-8: {e}") from None


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


hints_of = cache(get_type_hints)


def check(kind: type[Body], value: Any, most: int) -> Body:
    hints = hints_of(kind)
    if not isinstance(value, dict):
        raise ApiError(f"the body is {WORDS.get(type(value), 'a value')}, expected an object")
    for name in value:
        if name not in hints:
            raise ApiError(f"unknown parameter {name[:60]!r}{did_you_mean(name[:60], hints)}",
                           param=name[:60])
    given = {name: v for name, v in value.items() if v is not None}
    for name, v in given.items():
        low, high = RANGES.get(name, (-math.inf, math.inf))
        if not fits(v, hints[name]):
            kinds = " or ".join(WORDS[o] for o in options(hints[name]))
            raise ApiError(f"{name} is {shown(v)}, expected {kinds}", param=name)
        if type(v) in (int, float) and not low <= v <= high:
            raise ApiError(f"{name} is {shown(v)}, expected {low} to {high}", param=name)
        if name in NEUTRAL and v != NEUTRAL[name]:
            raise ApiError(f"{name} is not supported here, leave it out", param=name)
    body = kind(**given)
    if isinstance(body, Chat):
        if body.logprobs:
            raise ApiError("logprobs are not supported for chats, leave it out", param="logprobs")
        body.max_tokens = body.max_completion_tokens or body.max_tokens or most
    if body.max_tokens > most:
        raise ApiError(f"max_tokens is {body.max_tokens}, at most {most} here", param="max_tokens")
    if len(body.stops) > STOPS or not all(isinstance(s, str) and 0 < len(s) <= 1000
                                          for s in body.stops):
        raise ApiError(f"stop is {shown(body.stop)}, expected a text or up to {STOPS}, of 1 to "
                       "1000 characters", param="stop")
    wrong = {**body.stream_options, "include_usage": False}.keys() - {"include_usage"}
    if wrong or type(body.usage_wanted) is not bool:
        raise ApiError(f"stream_options is {shown(body.stream_options)}, expected "
                       '{"include_usage": true or false}', param="stream_options")
    return body


def shown(value: Any) -> str:
    return f"{value!r:.60}"


# ------------------------------------------------------------------------------------- the prompts


class Prompt(NamedTuple):
    """What n texts go on from. They share it: it may be long."""

    ids: list[int]  # the newest, as many as the model sees
    read: Tensor | None  # (V,): all that are in it, for a repetition_penalty
    echo: str  # its text, where it shall be repeated


def prompts_of(body: Body, tokenizer: Tokenizer, config: GPTConfig, most: int) -> list[Prompt]:
    """All that takes long for long prompts, once for each; ApiError for what is no text of the
    model's, and for more than `most` texts."""
    try:
        if isinstance(body, Chat):
            check_amount(body, 1, most)
            return [prompt_of(chat_ids(body.messages, tokenizer), body, tokenizer, config)]
        value = body.prompt
        if value == [] or isinstance(value, list) and not (
                all(type(v) is int for v in value) or all(type(v) is str for v in value)
                or all(type(v) is list and all(type(id) is int for id in v) for v in value)):
            raise ApiError(f"prompt is {shown(value)}, expected a text, a list of ids, or a list "
                           "of either", param="prompt")
        several = value if isinstance(value, list) and type(value[0]) is not int else [value]
        check_amount(body, len(several), most)
        return [prompt_of(prompt_ids(v, tokenizer), body, tokenizer, config) for v in several]
    except UserError as e:
        raise ApiError(str(e), param="messages" if isinstance(body, Chat) else "prompt") from None


def check_amount(body: Body, prompts: int, most: int) -> None:
    """ApiError where a request asks for too many texts or tokens."""
    if (total := prompts * body.n) > most:
        raise ApiError(f"the request asks for {total} texts, at most {most} here", param="n")
    values = total * body.max_tokens * (1 + (getattr(body, "logprobs", None) or 0))
    if values > VALUES:
        raise ApiError(f"the request asks for {values} tokens and alternatives, at most {VALUES} "
                       "here", param="n")


def prompt_of(ids: list[int], body: Body, tokenizer: Tokenizer, config: GPTConfig) -> Prompt:
    echo = tokenizer.decode(ids) if getattr(body, "echo", False) else ""
    if (letters := len(echo) * body.n) > VALUES:
        raise ApiError(f"echo is of {letters} characters, at most {VALUES} here", param="echo")
    read = None if body.repetition_penalty == 1 else read_of(ids, config.vocab_size)
    return Prompt(ids[-config.block_size :], read, echo)


def prompt_ids(prompt: str | list[int], tokenizer: Tokenizer) -> list[int]:
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    if wrong := [id for id in ids if not 0 <= id < tokenizer.vocab_size]:
        raise ApiError(f"prompt has the id {shown(wrong[0])}, expected 0 to "
                       f"{tokenizer.vocab_size - 1}", param="prompt")
    return ids or start_ids(tokenizer)


def chat_ids(messages: list, tokenizer: Tokenizer) -> list[int]:
    """Ids of the messages, up to where the assistant's answer begins, see data.instruct."""
    if tokenizer.eot is None:
        raise ApiError(f"this model knows no chats: its tokenizer ({tokenizer.spec}) has no "
                       "separator; use /v1/completions", param="messages")
    for message in messages:
        if isinstance(message, dict) and (more := message.keys() - {"role", "content"}):
            raise ApiError(f"a message has {shown(min(more))}, expected role and content alone",
                           param="messages")
    try:
        canonical({"messages": messages})  # for its checks
    except (UserError, ValueError) as e:
        raise ApiError(str(e), param="messages") from None
    sample = json.dumps({"messages": [*messages, {"role": "assistant", "content": ""}]})
    return encode(sample, tokenizer)[0][:-1].tolist()


def requests_of(body: Body, prompts: Sequence[Prompt], end: int | None) -> list[Request]:
    """A request of the engine for each text, which ends with `end`: n of each prompt, in order."""
    seed = secrets.randbits(32) if body.seed is None else body.seed
    make = partial(Request, max_tokens=body.max_tokens, temperature=float(body.temperature),
                   top_k=body.top_k, top_p=float(body.top_p), min_p=float(body.min_p),
                   repetition_penalty=float(body.repetition_penalty), stop=body.stops,
                   logprobs=body.logprobs if isinstance(body, Completion) else None, end=end)
    return [make(prompt.ids, seed=seed + i * body.n + j, read=prompt.read)
            for i, prompt in enumerate(prompts) for j in range(body.n)]

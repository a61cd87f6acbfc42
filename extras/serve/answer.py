"""OpenAI's answers: the texts of a request while they are written, as one object or as events."""

import asyncio
import codecs
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from data.tokenizer import Tokenizer
from extras.serve.api import ApiError, Body, Chat, Prompt
from extras.serve.engine import Engine, Full, Job, Request, Token

FINISH = {"stop": "stop", "length": "length", "timeout": "length"}
PAUSE, EVENTS = 0.02, 320  # seconds between two events of a stream; events a second of them all
News = list[tuple[int, list[Token], str | None]]  # number of a text, its new tokens, how it ended

class Logprobs:
    """OpenAI's older form of what the model thought, for the tokens of one text."""

    def __init__(self, tokenizer: Tokenizer, offset: int):
        self.tokenizer, self.offset = tokenizer, offset
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def spell(self, id: int) -> str:
        """The text of a token or, where it is only a part of a character, its bytes."""
        data = self.tokenizer.token_bytes(id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def of(self, tokens: list[Token]) -> dict[str, list]:
        """text_offset: where a token's first whole character begins, counted in characters."""
        offsets = []
        for token in tokens:
            offsets.append(self.offset)
            self.offset += len(self.decoder.decode(self.tokenizer.token_bytes(token.id)))
        return {"tokens": [self.spell(t.id) for t in tokens], "text_offset": offsets,
                "token_logprobs": [finite(t.choice.logprob) for t in tokens],
                "top_logprobs": [{self.spell(id): finite(p) for id, p in t.choice.top}
                                 for t in tokens]}


def finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # JSON has no -inf


class Answer:
    """The answer to a request, whole or in pieces: one object of JSON each."""

    def __init__(self, body: Body, model: str, prompts: Sequence[Prompt], tokenizer: Tokenizer):
        self.body, self.chat = body, isinstance(body, Chat)
        name = "chat.completion" if self.chat else "text_completion"
        self.head = {"id": ("chatcmpl-" if self.chat else "cmpl-") + secrets.token_hex(12),
                     "object": name + ".chunk" if self.chat and body.stream else name,
                     "created": int(time.time()), "model": model}
        self.begins = [prompt.echo for prompt in prompts for _ in range(body.n)]
        self.told = None if self.chat or body.logprobs is None else [
            Logprobs(tokenizer, len(begin)) for begin in self.begins]
        self.read = sum(len(prompt.ids) for prompt in prompts)  # of a long one the newest tokens
        self.written = [0] * len(self.begins)

    def choice(self, index: int, tokens: list[Token], ended: str | None) -> dict[str, Any]:
        """A text, or what is new of it."""
        text = "".join(token.text for token in tokens)
        finish = ended and FINISH[ended]
        first = self.written[index] == 0
        self.written[index] += len(tokens)
        if self.chat:
            message = {"role": "assistant"} if first else {}
            return {"index": index, "delta" if self.body.stream else "message":
                    {**message, "content": text}, "logprobs": None, "finish_reason": finish}
        text, self.begins[index] = self.begins[index] + text, ""
        return {"index": index, "text": text, "finish_reason": finish,
                "logprobs": self.told and self.told[index].of(tokens)}

    def usage(self) -> dict[str, int]:
        new = sum(self.written)
        return {"prompt_tokens": self.read, "completion_tokens": new,
                "total_tokens": self.read + new}

    def object(self, choices: list[dict[str, Any]], usage: dict[str, int] | None) -> bytes:
        there = {"usage": usage} if usage or self.body.usage_wanted else {}
        return json.dumps({**self.head, "choices": choices, **there},
                          separators=(",", ":")).encode()


class Writing:
    """The texts of a request in the engine; leaving the `with` cancels what is not done.

    The engine writes thousands of tokens a second, in a thread that shares Python with this one.
    So it wakes us for the first of them and when a text ends; for the rest we look at every tick,
    all requests at the same one.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request], seconds: float):
        self.engine, self.loop = engine, asyncio.get_running_loop()
        self.news, self.hurry, self.woken = asyncio.Event(), True, False
        self.jobs: list[Job] = []
        self.going: dict[int, Job] = {}  # those that have not ended, by the number of their text
        wake = self.wake  # one object, which the engine calls once for all: each self.wake is new
        if engine.closed:
            raise stopping()
        try:
            for request in requests:
                self.jobs.append(engine.submit(request, wake))
        except Full as e:
            self.cancel()
            raise ApiError(f"the server is busy: {e}", 429, code="busy",
                           headers={"Retry-After": "1"}) from None
        self.going = dict(enumerate(self.jobs))  # never changed, as another thread looks at it
        self.timer = self.loop.call_later(seconds, self.cancel, "timeout")

    def wake(self) -> None:
        """Called in the engine's thread, after each of its steps."""
        if not self.woken and (self.hurry or any(job.ended for job in self.going.values())):
            self.woken = True
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self.loop.call_soon_threadsafe(self.news.set)

    def tick(self) -> None:
        self.hurry = True  # should nothing have come since
        self.news.set()

    def cancel(self, why: str = "cancelled") -> None:
        for job in self.jobs:
            job.cancel(why)

    def __enter__(self) -> "Writing":
        return self

    def __exit__(self, *error: Any) -> None:
        self.timer.cancel()
        self.cancel()

    async def __aiter__(self) -> AsyncIterator[News]:
        """What is new, the first of it at once."""
        while self.going:
            await self.news.wait()
            self.news.clear()
            self.woken = False  # before anything is taken, so that nothing is missed
            found = [(i, job.ended, job.take()) for i, job in self.going.items()]  # in this order
            if news := [(i, tokens, ended) for i, ended, tokens in found if tokens or ended]:
                over = {i for i, _, ended in news if ended}
                self.going = {i: job for i, job in self.going.items() if i not in over}
                yield news
                if self.hurry:  # no tick is to come
                    self.hurry = False
                    pause = max(PAUSE, self.engine.running / EVENTS)
                    self.loop.call_at((self.loop.time() // pause + 1) * pause, self.tick)


def refuse_failed(news: News) -> None:
    """ApiError where a text has not come to its end by itself or by its limits."""
    for _, _, ended in news:
        if ended == "cancelled":
            raise stopping()
        if ended is not None and ended not in FINISH:
            raise ApiError(ended, 500)


class Reply(Response):
    """An answer as it is sent. A client that leaves cancels its texts."""

    def __init__(self, answer: Answer, writing: Writing):
        self.answer, self.writing, self.background = answer, writing, None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.writing as writing:
            watch = asyncio.create_task(self.watch(receive))
            try:
                if self.answer.body.stream:
                    await self.stream(writing, send)
                else:
                    data = await self.whole(writing)
                    await Response(data, media_type="application/json")(scope, receive, send)
            finally:
                watch.cancel()

    async def watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.writing.cancel()

    async def whole(self, writing: Writing) -> bytes:
        answer, texts = self.answer, [[] for _ in writing.jobs]
        ends: list[str | None] = [None] * len(texts)
        async for news in writing:
            refuse_failed(news)
            for i, tokens, ended in news:
                texts[i] += tokens
                ends[i] = ended
        if "timeout" in ends and not any(texts):
            raise busy()
        choices = [answer.choice(i, *text) for i, text in enumerate(zip(texts, ends, strict=True))]
        return answer.object(choices, answer.usage())

    async def stream(self, writing: Writing, send: Send) -> None:
        """Server-sent events. Headers go out with the first token, so what fails before it is an
        error of HTTP; later an event says so, and the stream ends."""
        answer, begun = self.answer, False
        try:
            async for news in writing:
                refuse_failed(news)
                if not begun:
                    if all(ended == "timeout" for _, _, ended in news):
                        raise busy()
                    await send({"type": "http.response.start", "status": 200, "headers": [
                        (b"content-type", b"text/event-stream; charset=utf-8"),
                        (b"cache-control", b"no-store")]})
                    begun = True
                await send({"type": "http.response.body", "more_body": True, "body": b"".join(
                    event(answer.object([answer.choice(*text)], None)) for text in news)})
            last = event(answer.object([], answer.usage())) if answer.body.usage_wanted else b""
            last += event(b"[DONE]")
        except ApiError as e:
            if not begun:
                raise
            last = event(json.dumps(e.to_json()).encode())
        await send({"type": "http.response.body", "body": last})


def stopping() -> ApiError:
    return ApiError("the server is stopping", 503, headers={"Retry-After": "5"})


def busy() -> ApiError:
    return ApiError("the server was too busy to begin in time", 503, headers={"Retry-After": "5"})


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"

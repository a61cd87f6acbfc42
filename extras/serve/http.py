"""The server's HTTP: paths, limits, and an end to clients that are too slow.

What breaks HTTP itself (400) and connections beyond the limit (503) are answered by uvicorn, in a
line of plain text; all else that goes wrong is told in OpenAI's form.
"""

import asyncio
import logging
import os
import socket
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from data.tokenizer import Tokenizer
from extras.serve.answer import Answer, Reply, Writing
from extras.serve.api import (
    ApiError,
    Body,
    Chat,
    Completion,
    Prompt,
    prompts_of,
    read,
    requests_of,
)
from extras.serve.engine import Engine
from extras.serve.guard import Guard, error, names_of

if TYPE_CHECKING:
    from extras.serve.server import ServeSettings

SLOW = 10  # seconds for the head of a request, for its body, and for what nobody waits for
STUCK = 30  # seconds for a client that reads nothing
CONNECTIONS = 500  # that may be open beside those whose texts are written or wait
LONG = 20_000  # bytes of a request from which on another thread reads it
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}  # of page.*
HEADERS = [("X-Content-Type-Options", "nosniff"), ("Referrer-Policy", "no-referrer"),
           ("Cross-Origin-Resource-Policy", "same-origin"),
           ("Content-Security-Policy",
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
            "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'")]


def make_app(s: "ServeSettings", name: str, engine: Engine, tokenizer: Tokenizer, local: bool
             ) -> ASGIApp:
    """The application for a model of this name. local: it is bound to loopback."""
    app = FastAPI(openapi_url=None)
    config, limit = engine.model.config, s.max_concurrent + s.max_waiting

    def understand(kind: type[Body], data: bytes) -> tuple[Body, list[Prompt]]:
        body = read(kind, data, s.max_tokens)
        if body.model not in ("", name):
            raise no_model(body.model, name)
        return body, prompts_of(body, tokenizer, config, limit)

    async def answer(kind: type[Body], request: Request) -> Response:
        data = await body_of(request, s.max_body)
        body, prompts = await asyncio.to_thread(understand, kind, data) if len(data) > LONG else \
            understand(kind, data)
        requests = requests_of(body, prompts, tokenizer.eot)
        return Reply(Answer(body, name, prompts, tokenizer),
                     Writing(engine, requests, s.max_seconds))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(Completion, request)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer(Chat, request)

    model = {"id": name, "object": "model", "created": 0, "owned_by": "bonsaigpt"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{id:path}")
    async def one(id: str) -> dict[str, Any]:
        if id != name:
            raise no_model(id, name)
        return model

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "running": engine.running, "waiting": engine.waiting,
                "tokens": engine.tokens}

    add_page(app)
    add_errors(app)
    app.add_middleware(Guard, names=names_of(s.host, local), local=local,
                       key=s.api_key and s.api_key.encode())
    return app


def add_page(app: FastAPI) -> None:
    """The files page.* beside this one, as they are now; page.html is /."""
    for file in sorted(Path(__file__).parent.glob("page.*")):
        if kind := KINDS.get(file.suffix):
            page = Response(file.read_bytes(), media_type=kind)
            path = "/" if file.suffix == ".html" else f"/{file.name}"
            app.add_route(path, lambda _, page=page: page)


def add_errors(app: FastAPI) -> None:
    """Whatever goes wrong is told in OpenAI's form."""
    @app.exception_handler(ApiError)
    async def told(_: Request, e: ApiError) -> Response:
        return error(e)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, e: HTTPException) -> Response:
        where = f"{request.method} {request.url.path[:200]}"
        paths = "POST /v1/completions, POST /v1/chat/completions, GET /v1/models, GET /health"
        return error(ApiError(f"{where}: {e.detail}; there are {paths}", e.status_code,
                              headers=dict(e.headers or {})))

    @app.exception_handler(Exception)
    async def fault(_: Request, e: Exception) -> Response:  # uvicorn writes down its traceback
        return error(ApiError("a fault of the server; its terminal says more", 500))


def no_model(asked: str, name: str) -> ApiError:
    return ApiError(f"no model {asked[:60]!r} here, this is {name!r}", 404, "model",
                    "model_not_found")


async def body_of(request: Request, most: int) -> bytes:
    """The body of a request; ApiError once it is larger than `most` bytes, or comes too slowly."""
    too_large = ApiError(f"the body has more than {most} bytes", 413)

    async def all_of_it() -> bytes:
        data = bytearray()
        async for part in request.stream():
            data += part
            if len(data) > most:
                raise too_large
        return bytes(data)

    if int(request.headers.get("content-length", 0)) > most:  # h11 has seen that it is a number
        raise too_large
    try:
        return await asyncio.wait_for(all_of_it(), SLOW)
    except ClientDisconnect:
        raise ApiError("the client has left") from None
    except asyncio.TimeoutError:
        raise ApiError(f"the body did not come within {SLOW} s", 408,
                       headers={"Connection": "close"}) from None


class Protocol(H11Protocol):
    """uvicorn's connection, cut where a client sends or reads too slowly."""

    slow = stuck = None  # timers

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.slow = self.loop.call_later(SLOW, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        late = self.conn.their_state.__name__ == "IDLE" or (  # no whole head yet, or a body that
            self.conn.their_state.__name__ == "SEND_BODY"  # nobody reads as it was answered
            and self.conn.our_state.__name__ == "DONE")
        if late and not self.slow:
            self.slow = self.loop.call_later(SLOW, self.transport.abort)
        elif not late:
            self.slow = stop(self.slow)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state.__name__ in ("IDLE", "SEND_RESPONSE"):
            super().send_400_response(msg)
        else:  # the rest of a body that was answered already
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.stuck = self.stuck or self.loop.call_later(STUCK, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stuck = stop(self.stuck)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.stuck = self.stuck or self.loop.call_later(STUCK, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self.slow, self.stuck = stop(self.slow), stop(self.stuck)
        super().connection_lost(exc)


def stop(timer: asyncio.TimerHandle | None) -> None:
    if timer:
        timer.cancel()


class Server(uvicorn.Server):
    """uvicorn's, which ends its streams when it is told to stop, and at once when told twice."""

    def __init__(self, app: ASGIApp, engine: Engine, most: int):
        super().__init__(uvicorn.Config(
            app, http=Protocol, loop="asyncio", ws="none", lifespan="off", log_level="error",
            access_log=False, proxy_headers=False, server_header=False, headers=HEADERS,
            timeout_keep_alive=30,
            h11_max_incomplete_event_size=1 << 14, limit_concurrency=CONNECTIONS + most,
            timeout_graceful_shutdown=3))
        self.engine, self.stopped_by = engine, 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit, self.stopped_by = True, sig

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.to_thread(self.engine.close)  # all texts end, and with them their streams
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # who is cut now is cut
        await super().shutdown(sockets)

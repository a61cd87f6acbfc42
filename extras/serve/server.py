"""Serve a trained model: OpenAI's completions API, and a page to play with it in the browser.

    pip install -r extras/requirements.txt
    python -m extras.serve                              the newest run, on http://127.0.0.1:8000
    python -m extras.serve --out_dir=out/mine --port=9000

    curl http://127.0.0.1:8000/v1/completions -H "Content-Type: application/json" \\
         -d '{"prompt": "Once", "max_tokens": 50, "stream": true}'
"""

import ipaddress
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from data.tokenizer import Tokenizer, from_json
from kit.checkpoint import load_model
from kit.device import choose_device
from kit.errors import UserError, plain
from kit.inference import install, kernels_of, prepare
from kit.progress import describe
from kit.run.locate import find_checkpoint, find_run, same_tokenizer
from kit.settings import at_least, load
from model import GPT


@dataclass
class ServeSettings:
    """Serve a trained model to OpenAI's clients and to a browser; see extras/serve/server.py."""

    out_dir: str | None = None  # a run or checkpoint folder; None: the newest run
    step: int | None = None  # which checkpoint; None: the best
    host: str = "127.0.0.1"  # where to listen: this machine alone; 0.0.0.0: all who reach it
    port: int = 8000  # 0: a free one
    api_key: str | None = None  # clients must have it; $BONSAI_API_KEY is seen by fewer eyes
    max_concurrent: int = 32  # texts that are written side by side
    max_waiting: int = 64  # texts that may wait for their turn; those beyond are told to come again
    max_tokens: int = 4096  # the most that a request may ask for, for each text
    max_seconds: float = 120.0  # after so long a text ends as it is
    max_body: int = 1 << 20  # bytes of a request
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: 16 bits if that pays
    quantize: Literal["none", "int8", "int4"] = "none"  # fewer bits for the weights, on the CPU
    kernels: Literal["auto", "torch"] = "auto"  # torch: none of our own on the CPU, PyTorch's alone
    compile: Literal["auto"] | bool = "auto"  # False: as --kernels=torch; True: as auto
    debug: bool = False  # show tracebacks of mistakes

    def check(self) -> None:
        at_least(self, 1, "max_concurrent max_tokens max_body")
        at_least(self, 0, "max_waiting port")
        if not 0 < self.max_seconds <= 86400:
            raise UserError(f"max_seconds={self.max_seconds}: must be above 0, at most 86400")
        if self.port > 65535:
            raise UserError(f"port={self.port}: there are 65535")
        if self.quantize != "none" and self.dtype != "auto":
            raise UserError(f"quantize={self.quantize} and dtype={self.dtype}: give one of them")
        self.api_key = self.api_key or os.environ.get("BONSAI_API_KEY")
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise UserError("api_key: expected printable ASCII, which is what HTTP carries")


def note(text: str) -> None:
    print(plain(text), file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    s = load(ServeSettings, argv).settings
    try:
        from extras.serve.engine import Engine
        from extras.serve.http import Server, make_app
    except ModuleNotFoundError as e:
        raise UserError(f"{e.name} is not installed: pip install -r extras/requirements.txt"
                        ) from None
    device = choose_device(s.device)
    with (install(s, device, note),
          listen(s.host, s.port) as sock):  # before the model: a mistake here is told at once
        model, tokenizer, name = open_model(s, device)
        engine = Engine(model, tokenizer, s.max_concurrent, s.max_waiting)
        local = ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback
        app = make_app(s, name, engine, tokenizer, local)
        tell(s, sock, name, local)
        server = Server(app, engine, s.max_concurrent + s.max_waiting)
        server.run([sock])
    note("stopped")
    return 128 + server.stopped_by if server.stopped_by else 0


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; UserError where that cannot be."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=512)
    except (OSError, UnicodeError) as e:
        why = getattr(e, "strerror", None) or str(e)
        raise UserError(f"cannot listen on --host={host} --port={port}: {why}") from None


def open_model(s: ServeSettings, device: torch.device) -> tuple[GPT, Tokenizer, str]:
    """The model that is meant, in its precision, its tokenizer, and the name of its run."""
    folder = find_checkpoint(find_run(s.out_dir), s.step)
    model, tokenizer_json, state = load_model(folder)
    tokenizer = from_json(tokenizer_json)
    same_tokenizer(folder, tokenizer)
    if device.type == "cpu" and kernels_of(s) == "auto":
        from kit.kernels import native

        native.library()  # a server has the 3 s to compile it, so that `prepare` finds it
    how = prepare(model, device, s, note)
    note(f"{folder}: {describe(state)}{model.num_params():,} parameters, {how} on {device}")
    return model, tokenizer, name_of(folder)


def name_of(folder: Path) -> str:
    """The name of a checkpoint's run, or of a folder of weights."""
    folder = folder.resolve()
    name = folder.parent.parent.name if folder.parent.name == "ckpt" else folder.name
    return name.encode("utf-8", "replace").decode()


def tell(s: ServeSettings, sock: socket.socket, name: str, local: bool) -> None:
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    if not local:
        who = "has the api key" if s.api_key else "reaches this port"
        note(f"anybody who {who} may use it, and what is sent is not encrypted")
    note(f"{name} on http://{shown}:{port} (a page), http://{shown}:{port}/v1 (OpenAI's API); "
         "Ctrl-C stops it")

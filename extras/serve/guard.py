"""Who may ask the server: its names, its page, and those who have the key."""

import contextlib
import hmac
import ipaddress
import json
import re
import socket

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from extras.serve.api import ApiError


def error(e: ApiError) -> Response:
    return Response(json.dumps(e.to_json()), e.status, e.headers, "application/json")


def names_of(host: str, local: bool) -> set[str]:
    """What this machine is called, in lower case. host: --host. local: it is bound to loopback."""
    names = {"localhost", host}
    if not local:
        name = socket.gethostname()
        names |= {name, socket.getfqdn(), name.partition(".")[0] + ".local"}
    return {name.lower().rstrip(".") for name in names} - {""}


class Guard:
    """Refuses what comes from other sites, or without the key, before anything else looks at it.

    A page of any site may send requests to this machine. To read the answer it needs a name of its
    own that leads here (DNS rebinding): then the Host is not ours. To write without reading is
    refused by the Origin, which every browser sends, and by the type, which a form cannot have.

    An address is never somebody's name: each is ours, unless the server is bound to loopback.
    Where there is a key any name is, as a proxy has: who lacks the key learns how busy we are.
    """

    def __init__(self, app: ASGIApp, names: set[str], local: bool, key: bytes | None):
        self.app, self.names, self.local, self.key = app, names, local, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] == "http" and (refusal := self.refusal(scope)):
            app = error(refusal)
        await app(scope, receive, send)

    def refusal(self, scope: Scope) -> ApiError | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        if not self.key and not self.is_ours(host):
            return ApiError(f"host {host[:60]!r} is no name of this machine; with an --api_key the "
                            "server takes any", 421)
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            return ApiError(f"a page of {origin[:60]!r} may not use this server", 403)
        if self.key and scope["path"].startswith("/v1"):
            given = headers.get(b"authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, b"Bearer " + self.key):
                return ApiError("no api key, or a wrong one", 401, code="invalid_api_key",
                                headers={"WWW-Authenticate": "Bearer"})
        kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json":
            return ApiError(f"content type {kind[:60]!r}, expected application/json", 415)
        return None

    def is_ours(self, host: str) -> bool:
        """Whether a Host, perhaps with a port, is this machine."""
        found = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]+))(?::\d+)?", host, re.IGNORECASE)
        if not found:
            return False
        name = (found[1] or found[2]).lower()
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(name).is_loopback or not self.local
        return name.rstrip(".") in self.names

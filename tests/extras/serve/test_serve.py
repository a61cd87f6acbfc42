"""The server: what it refuses in a line, what OpenAI's client gets of it, who cannot disturb it."""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sample
from data.making.tokenizers import make_tokenizer
from kit.errors import UserError
from kit.sampling import Choice
from model import GPTConfig
from tests.extras.serve.serving import ALPHABET, CLONE, make_run, serving

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
from extras.serve import answer as serve_answer
from extras.serve import api
from extras.serve import http as serve_http
from extras.serve import server as serve
from extras.serve.api import ApiError, Chat, Completion
from extras.serve.engine import Engine, Job, Token

CHAR, BYTE = make_tokenizer("char", [ALPHABET]), make_tokenizer("byte")
CONFIG = GPTConfig(vocab_size=BYTE.vocab_size, block_size=64)
LIMITS = dict(host="127.0.0.1", max_tokens=500, max_body=20_000, max_seconds=60.0,
              max_concurrent=4, max_waiting=8)
JSON = {"Content-Type": "application/json"}


def body(**given) -> bytes:
    return json.dumps(given).encode()


def prompts_of(asked: api.Body, tokenizer=BYTE, most: int = 12) -> list[api.Prompt]:
    return api.prompts_of(asked, tokenizer, CONFIG, most)


# ------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("data, told", [
    (b"", "no JSON"),
    (b"{", "no JSON"),
    (b"\xff\xfe{", "no JSON"),
    (b"[" * 100_000, "nested too deep"),
    (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", "expected a text"),
    (b'"text"', "text, expected an object"),
    (b'{"temperature": NaN}', "NaN is no number of JSON"),
    (b'{"temperature": 1e999}', "temperature is inf, expected 0 to 100"),
    (b'{"seed": ' + b"9" * 4000 + b"}", "seed is 999"),
    (b'{"seed": ' + b"9" * 9000 + b"}", "no JSON"),
    (body(tempratur=1), "unknown parameter 'tempratur'; did you mean temperature?"),
    (body(**{"\x1b[31m\n": 1}), "unknown parameter '\\x1b[31m\\n'"),
    (body(temperature=-0.1), "temperature is -0.1, expected 0 to 100"),
    (body(temperature="1"), "temperature is '1', expected a number"),
    (body(temperature=True), "temperature is True, expected a number"),
    (body(top_p=1.5), "top_p is 1.5, expected 0 to 1"),
    (body(top_k=-1), "top_k is -1"),
    (body(min_p=2), "min_p is 2"),
    (body(repetition_penalty=0), "repetition_penalty is 0"),
    (body(max_tokens=0), "max_tokens is 0, expected 1"),
    (body(max_tokens=5001), "max_tokens is 5001, at most 5000 here"),
    (body(max_tokens=1.5), "max_tokens is 1.5, expected a whole number"),
    (body(n=0), "n is 0"),
    (body(n=2**40), "n is 1099511627776"),
    (body(seed=-1), "seed is -1"),
    (body(logprobs=21), "logprobs is 21, expected 0 to 20"),
    (body(logprobs=True), "logprobs is True, expected a whole number"),
    (body(stop=""), "stop is ''"),
    (body(stop=["a"] * 17), "up to 16"),
    (body(stop=["a", 1]), "stop is ['a', 1]"),
    (body(stop="a" * 1001), "1 to 1000"),
    (body(stream="yes"), "stream is 'yes', expected true or false"),
    (body(stream_options={"include_usage": 1}), "stream_options is"),
    (body(stream_options={"usage": True}), "stream_options is"),
    (body(presence_penalty=0.5), "presence_penalty is not supported here"),
    (body(frequency_penalty=1), "frequency_penalty is not supported here"),
    (body(logit_bias={"5": 1}), "logit_bias is not supported here"),
    (body(best_of=2), "best_of is not supported here"),
    (body(suffix="x"), "suffix is not supported here"),
    (body(prompt=[]), "prompt is [], expected a text, a list of ids, or a list of either"),
    (body(prompt=[1, "a"]), "prompt is [1, 'a']"),
    (body(prompt=[True]), "prompt is [True]"),
    (body(prompt=[[1], ["a"]]), "prompt is"),
    (body(prompt=7), "prompt is 7, expected text or a list"),
    (body(prompt=[98]), "prompt has the id 98, expected 0 to 97"),
    (body(prompt=[[5], [-1]]), "prompt has the id -1"),
    (body(prompt="a\u0416"), "the character '\u0416' at position 1"),
    (b'{"prompt": "\\ud800"}', "lone surrogate"),
    (body(prompt=["a"] * 7, n=2), "asks for 14 texts, at most 12 here"),
    (body(n=12, max_tokens=5000, logprobs=20), "asks for 1260000 tokens and alternatives"),
])
def test_a_wrong_request_is_a_line(data, told):
    with pytest.raises(ApiError) as e:
        prompts_of(api.read(Completion, data, 5000), CHAR)
    error = e.value.to_json()["error"]
    assert told in error["message"] and e.value.status == 400
    assert len(error["message"]) < 250 and error["message"].isprintable()
    assert error.keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize("messages, told", [
    ([], "at least"),
    (["hi"], "message 1: no object with role and content"),
    ([{"role": "user"}], "message 1: content is missing"),
    ([{"role": "user", "content": [{"type": "text"}]}], "content is of type list"),
    ([{"role": "a\nb", "content": ""}], "is no short word"),
    ([{"role": "user", "content": "", "name": "x"}], "a message has 'name'"),
])
def test_a_wrong_chat_is_a_line(messages, told):
    with pytest.raises(ApiError) as e:
        prompts_of(api.read(Chat, body(messages=messages), 500))
    assert told in str(e.value)


def test_a_chat_is_read_as_the_model_learned_it_and_needs_a_separator():
    from data.instruct import question

    asked = api.read(Chat, body(messages=[{"role": "user", "content": "a?"}]), 500)
    assert prompts_of(asked)[0].ids == question("a?", BYTE) and asked.max_tokens == 500
    with pytest.raises(ApiError, match="knows no chats"):
        prompts_of(asked, CHAR)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner,
                                                                max_size=2), max_leaves=6)
names = st.sampled_from([*api.get_type_hints(Completion), "messages", "x"])


@given(st.dictionaries(names, values, max_size=3), st.sampled_from([Completion, Chat]))
def test_any_json_is_a_request_or_a_line(value, kind):
    with contextlib.suppress(ApiError):
        asked = api.read(kind, json.dumps(value).encode(), 500)
        assert api.requests_of(asked, prompts_of(asked), BYTE.eot)


@given(st.binary(max_size=40))
def test_any_bytes_are_a_request_or_a_line(data):
    with contextlib.suppress(ApiError):
        api.read(Completion, data, 500)


def test_null_is_the_default_and_seeds_go_up():
    asked = api.read(Completion, body(temperature=None, prompt=["a", "b"], n=2, seed=5), 500)
    requests = api.requests_of(asked, prompts_of(asked, CHAR), CHAR.eot)
    assert [(r.seed, CHAR.decode(r.ids)) for r in requests] == [(5, "a"), (6, "a"), (7, "b"),
                                                              (8, "b")]
    assert {r.temperature for r in requests} == {1.0} and {r.max_tokens for r in requests} == {16}
    assert requests[0].ids and api.prompt_ids("", BYTE) == [BYTE.eot]


def test_texts_share_their_prompt_and_a_long_one_is_cut():
    """But for what a repetition_penalty has to know, which is all of it, as for sample.py."""
    ids = [*range(100, 200), *[5] * 80]
    asked = api.read(Completion, body(prompt=[ids, [7]], n=3, repetition_penalty=1.1), 500)
    requests = api.requests_of(asked, prompts_of(asked), None)
    for request in requests[:3]:
        assert request.ids is requests[0].ids and request.read is requests[0].read
    assert requests[0].ids == ids[-64:]
    assert requests[0].read.nonzero().flatten().tolist() == [5, *range(100, 200)]
    assert requests[5].ids == [7] and requests[5].read.sum() == 1
    asked = api.read(Completion, body(prompt=ids, echo=True), 500)
    assert prompts_of(asked)[0].read is None
    assert prompts_of(asked)[0].echo == BYTE.decode(ids)


def test_who_asks_for_too_much_is_told_before_anything_is_encoded():
    unused = SimpleNamespace(vocab_size=257)  # it cannot encode
    for wrong, told in ((dict(prompt=["a"] * 13), "13 texts"), (dict(n=13), "13 texts"),
                        (dict(n=12, max_tokens=5000, logprobs=20), "1260000 tokens")):
        with pytest.raises(ApiError, match=told):
            prompts_of(api.read(Completion, body(**wrong), 5000), unused)
    asked = api.read(Chat, body(n=13, messages=[{"role": "user", "content": "a"}]), 500)
    with pytest.raises(ApiError, match="13 texts"):
        prompts_of(asked, unused)
    asked = api.read(Completion, body(prompt="a" * 100_001, n=10, echo=True), 500)
    with pytest.raises(ApiError, match="echo is of 1000010 characters, at most 1000000"):
        prompts_of(asked)


def test_logprobs_say_where_a_token_stands_and_spell_parts_of_characters():
    told = serve_answer.Logprobs(BYTE, 3)
    ids = [*"aé".encode(), ord("b"), 256]
    got = told.of([Token(id, "", Choice(-1.0, [(id, float("-inf"))])) for id in ids])
    assert got["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "b", "<|endoftext|>"]
    assert got["text_offset"] == [3, 4, 4, 5, 6]
    assert got["token_logprobs"] == [-1.0] * 5 and got["top_logprobs"][0] == {"a": -9999.0}


# ---------------------------------------------------------------------- the application by itself


@pytest.fixture(scope="module")
def app_run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("app") / "tiny", "byte", n_layer=1)


@pytest.fixture
def client(app_run):
    """Calls the application without a network; `client.engine` is its engine."""
    from starlette.testclient import TestClient

    settings = serve.ServeSettings(out_dir=str(app_run), kernels="torch")
    model, tokenizer, name = serve.open_model(settings, torch.device("cpu"))
    clients, engines = [], []

    def make(local=True, api_key=None, rows=4, waiting=8, writes_with=tokenizer, **limits):
        engines.append(Engine(model, writes_with, rows, waiting))
        s = SimpleNamespace(**LIMITS | limits, api_key=api_key)
        app = serve_http.make_app(s, name, engines[-1], tokenizer, local)
        client = TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False)
        client.engine = engines[-1]
        clients.append(client)
        return client

    yield make
    for engine in engines:
        engine.close()


def line(answer, status: int) -> str:
    """The message of an error, which is a line in OpenAI's form."""
    assert answer.status_code == status, answer.text
    message = answer.json()["error"]["message"]
    assert message.isprintable() and "Traceback" not in message
    return message


def test_who_may_ask(client):
    c = client()
    ask = lambda **headers: c.post("/v1/completions", content=body(max_tokens=1),  # noqa: E731
                                   headers=JSON | {k.replace("_", "-"): v
                                                   for k, v in headers.items()})
    assert ask().status_code == 200
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:8000", "127.1.2.3", "[::1]:8000"):
        assert ask(host=host).status_code == 200
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8000", "",
                 "localhost:8000:1", "10.0.0.1", "localhost@evil.example"):
        assert "no name of this machine" in line(ask(host=host), 421)
    assert ask(origin="http://127.0.0.1:8000").status_code == 200
    for origin in ("null", "http://evil.example", "http://127.0.0.1:9000", "http://localhost:8000",
                   "file://", ""):
        assert "may not use this server" in line(ask(origin=origin), 403)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/jsonx"):
        assert "expected application/json" in line(ask(content_type=kind), 415)
    assert ask(content_type="Application/JSON; charset=utf-8").status_code == 200
    assert not [name for name in ask().headers if name.startswith("access-control")]


def test_which_names_are_this_machines(client, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "Bonsai")
    monkeypatch.setattr(socket, "getfqdn", lambda: "bonsai.garden.example")
    ask = lambda c, host: c.get("/v1/models", headers={  # noqa: E731
        "host": host, "authorization": "Bearer secret"})
    open_to_all = client(local=False, host="tree.lan")
    for host in ("10.0.0.1", "10.0.0.1:8000", "[fe80::1]:8000", "[2001:db8::7]", "localhost:8000",
                 "127.0.0.1", "bonsai", "BONSAI:8000", "bonsai.local", "bonsai.local.:80",
                 "bonsai.garden.example", "tree.lan"):
        assert ask(open_to_all, host).status_code == 200, host
    for host in ("evil.example", "evil.example:8000", "bonsai.evil.example", "10.0.0.256", "",
                 "10.0.0.1.evil.example", ":80", "[]", "[evil.example]", "10.0.0.1@evil.example",
                 "2001:db8::7"):
        told = line(ask(open_to_all, host), 421)
        assert "no name of this machine" in told and "--api_key" in told
    for local in (True, False):
        protected = client(local=local, api_key="secret")
        assert ask(protected, "proxy.example").status_code == 200
        assert protected.get("/", headers={"host": "proxy.example"}).status_code == 200
        assert line(protected.get("/v1/models", headers={"host": "proxy.example"}), 401)
    assert ask(client(), "bonsai").status_code == 421  # nothing but loopback is meant
    assert ask(client(host="tree"), "tree:80").status_code == 200


def test_an_api_key(client):
    c = client(api_key="secret")
    assert c.get("/health").status_code == 200 and c.get("/").status_code == 200
    for path in ("/v1/models", "/v1/models/tiny", "/v1/nothing"):
        for key in ("", "secret", "Bearer", "Bearer ", "Bearer wrong", "Bearer secret2",
                    "Bearer secre", "bearer secret", "Basic secret"):
            assert "api key" in line(c.get(path, headers={"authorization": key}), 401)
    assert c.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200


def test_paths_and_models(client):
    c = client()
    odd = c.post("/v1/completions", content=b'{"\\ud800": 1}', headers=JSON)
    assert "unknown parameter '\\ud800'" in line(odd, 400)
    assert "there are POST /v1/completions" in line(c.get("/nothing"), 404)
    assert "GET /v1/completions" in line(c.get("/v1/completions"), 405)
    assert line(c.post("/v1/models", headers=JSON), 405)
    assert "no model 'gpt-4' here, this is 'tiny'" in line(c.get("/v1/models/gpt-4"), 404)
    wrong = c.post("/v1/completions", content=body(model="gpt-4"), headers=JSON)
    assert line(wrong, 404) and wrong.json()["error"]["code"] == "model_not_found"
    assert c.get("/v1/models").json()["data"] == [c.get("/v1/models/tiny").json()]
    page = c.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    for name in ("page.js", "page.css"):
        here = CLONE / "extras" / "serve" / name
        assert c.get(f"/{name}").text == here.read_text(encoding="utf-8")
    for path in ("/page.html", "/extras/serve/server.py", "/docs", "/openapi.json", "/../serve.py"):
        assert line(c.get(path), 404)


def test_a_body_that_is_too_large(client):
    c = client()
    assert "more than 20000 bytes" in line(
        c.post("/v1/completions", content=b" " * 20_001, headers=JSON), 413)


def test_too_many_at_once_are_told_to_come_again(client):
    c = client(rows=1, waiting=2)
    answer = c.post("/v1/completions", content=body(n=4), headers=JSON)
    assert "busy" in line(answer, 429) and answer.headers["retry-after"] == "1"
    for _ in range(100):  # what was taken of it is given back
        if not c.engine.running and not c.engine.waiting:
            break
        time.sleep(0.05)
    assert c.post("/v1/completions", content=body(n=3), headers=JSON).status_code == 200


def test_a_long_prompt_of_many_texts_holds_up_nobody(client):
    """A megabyte of ids, 96 times, penalised: meanwhile the loop goes round all the time."""
    import httpx

    c = client(max_body=1 << 20, rows=32, waiting=64, max_waiting=100)
    data = body(prompt=[i % 10 for i in range(340_000)], n=96, repetition_penalty=1.1,
                max_tokens=1)
    assert len(data) > 1_000_000
    gaps = []

    async def tick() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            gaps.append(time.perf_counter() - last)
            last = time.perf_counter()

    async def ask() -> httpx.Response:
        ticking = asyncio.create_task(tick())
        try:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(c.app)) as http:
                return await http.post("http://127.0.0.1:8000/v1/completions", content=data,
                                       headers=JSON, timeout=60)
        finally:
            ticking.cancel()

    answer = asyncio.run(ask())
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 96
    assert answer.json()["usage"]["prompt_tokens"] == 64
    assert max(gaps) < 0.6


def test_a_text_ends_in_time_and_one_that_never_began_is_an_error(client):
    c = client(max_seconds=0.3, max_tokens=10**6, rows=1)
    long = dict(max_tokens=400_000, top_k=1, logit_bias={}, prompt="a", seed=1)
    got = c.post("/v1/completions", content=body(n=2, **long), headers=JSON)
    assert got.status_code == 200
    assert {choice["finish_reason"] for choice in got.json()["choices"]} == {"length"}

    class Stuck(Job):
        def cancel(self, why="cancelled"):
            self.ended = self.ended or why
            self.wake()

    c.engine.submit = lambda request, wake: Stuck(request, None, wake)  # none ever begins
    for stream in (False, True):
        answer = c.post("/v1/completions", content=body(stream=stream, **long), headers=JSON)
        assert "too busy" in line(answer, 503) and answer.headers["retry-after"]


def test_the_first_token_and_the_end_come_at_once_and_what_is_between_together(client, monkeypatch):
    monkeypatch.setattr(serve_answer, "PAUSE", 30)
    began = time.monotonic()
    answer = client().post("/v1/completions", headers=JSON, content=body(
        prompt="a", seed=1, max_tokens=400, top_k=1, stream=True, logprobs=0))
    events = [json.loads(part[6:]) for part in answer.text.split("\n\n")[:-2]]
    counts = [len(event["choices"][0]["logprobs"]["tokens"]) for event in events]
    assert time.monotonic() - began < 10 and sum(counts) == 400
    assert len(counts) <= 3 and counts[0] < 100


def test_a_fault_is_an_error_of_the_server_and_tells_nothing(client, monkeypatch):
    c = client()
    monkeypatch.setattr(serve_http, "prompts_of", lambda *a: 1 / 0)
    answer = c.post("/v1/completions", content=body(prompt="secret"), headers=JSON)
    assert "a fault of the server" in line(answer, 500) and "secret" not in answer.text
    assert answer.json()["error"]["type"] == "server_error"


def test_a_fault_of_the_engine_ends_the_text_with_an_error(client):
    class Broken:
        left = 0

        def token_bytes(self, id):
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("broken")
            return b"a"

    broken = Broken()
    c = client(writes_with=broken)
    long = dict(prompt="a", seed=1, max_tokens=400, top_k=1)
    assert "error: broken" in line(c.post("/v1/completions", content=body(**long), headers=JSON),
                                   500)
    broken.left = 300
    answer = c.post("/v1/completions", content=body(stream=True, **long), headers=JSON)
    events = answer.text.strip().split("\n\n")
    assert answer.status_code == 200 and "[DONE]" not in events[-1]
    assert "broken" in json.loads(events[-1].removeprefix("data: "))["error"]["message"]


def test_where_it_cannot_listen():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--port={port}: Address already in use"):
            serve.listen("127.0.0.1", port)
    for host in ("no.such.host.invalid", "256.1.1.1", "a" * 300, "\udc80"):
        with pytest.raises(UserError, match="cannot listen on --host="):
            serve.listen(host, 0)


def test_settings_that_cannot_be(monkeypatch):
    for flag in ("--port=65536", "--max_tokens=0", "--max_seconds=nan", "--max_concurrent=0",
                 "--max_waiting=-1", "--api_key=ä", "--quantize=int8 --dtype=float32"):
        with pytest.raises(UserError):
            serve.main(flag.split())
    monkeypatch.setenv("BONSAI_API_KEY", "from the environment")
    settings = serve.ServeSettings()
    settings.check()
    assert settings.api_key == "from the environment"
    monkeypatch.setitem(sys.modules, "extras.serve.http", None)  # as where FastAPI is missing
    with pytest.raises(UserError, match="pip install -r extras/requirements.txt"):
        serve.main([])


# ------------------------------------------------------------------------- the server, for real


@pytest.fixture(scope="module")
def char_run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("char") / "tiny")


@pytest.fixture(scope="module")
def server(char_run):
    with serving(char_run, "--max_concurrent=32", "--max_body=200000") as server:
        yield server
        assert not [line for line in server.lines if "Traceback" in line], server.lines


@pytest.fixture(scope="module")
def byte_server(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("byte") / "tiny", "byte")
    with serving(run, "--host=0.0.0.0", BONSAI_API_KEY="secret") as server:
        yield server
        assert not [line for line in server.lines if "Traceback" in line], server.lines


def openai_client(server, key: str = "any", **options):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, **options)


def idle(server) -> bool:
    """Whether the server comes to rest by itself, soon."""
    for _ in range(100):
        health = server.get("/health")
        if health["running"] == health["waiting"] == 0:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
def test_openais_client_completes(server):
    create = openai_client(server).completions.create
    settings = dict(model="tiny", prompt="The ", max_tokens=40, temperature=0.9)
    one = create(**settings, seed=7)
    assert one.object == "text_completion" and one.model == "tiny" and one.id.startswith("cmpl-")
    assert len(one.choices[0].text) == 40 and one.choices[0].finish_reason == "length"
    assert one.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 4, "completion_tokens": 40, "total_tokens": 44}
    assert create(**settings, seed=7).choices[0].text == one.choices[0].text
    assert create(**settings).choices[0].text != create(**settings).choices[0].text
    ids = create(**settings | {"prompt": CHAR.encode("The ")}, seed=7)
    assert ids.choices[0].text == one.choices[0].text
    echoed = create(**settings, seed=7, echo=True)
    assert echoed.choices[0].text == "The " + one.choices[0].text
    several = create(**settings | {"prompt": ["The ", "A "]}, n=2, seed=6)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[1].text == one.choices[0].text  # the seeds go up
    assert len({choice.text for choice in several.choices}) == 4
    assert several.usage.prompt_tokens == 6 and several.usage.completion_tokens == 160
    long = create(**settings | {"prompt": "long " * 50, "max_tokens": 1})
    assert long.usage.prompt_tokens == 64  # the newest that the model sees
    assert [model.id for model in openai_client(server).models.list()] == ["tiny"]
    assert openai_client(server).models.retrieve("tiny").id == "tiny"


@pytest.mark.slow
def test_openais_client_streams(server):
    create = openai_client(server).completions.create
    settings = dict(model="tiny", prompt=["The ", "A "], max_tokens=900, seed=3, n=2, logprobs=1,
                    stop=["e q", "zz", "Q", "m"])
    whole = create(**settings)
    chunks = list(create(**settings, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for i, choice in enumerate(whole.choices):
        mine = [c for chunk in chunks for c in chunk.choices if c.index == i]
        assert "".join(c.text for c in mine) == choice.text
        assert [c.finish_reason for c in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == choice.finish_reason
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            told = [value for c in mine for value in getattr(c.logprobs, name)]
            assert told == getattr(choice.logprobs, name)
    assert {choice.finish_reason for choice in whole.choices} == {"stop"}
    assert not any(stop in choice.text for choice in whole.choices for stop in settings["stop"])
    assert len(chunks) < 4 * 900  # an event may carry several tokens


@pytest.mark.slow
def test_a_seed_is_that_of_the_sampler(server, char_run, tmp_path, capfd):
    settings = {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "min_p": 0.01,
                "repetition_penalty": 1.2, "seed": 11}
    prompts = ["The ", "é", ALPHABET[1:] + "a" * 70]  # the last one is longer than the window
    answer = server.post("/v1/completions", {**settings, "prompt": prompts, "n": 2,
                                             "max_tokens": 150, "logprobs": 3, "stop": ["~x", "Z"]})
    (tmp_path / "prompts.txt").write_text("\n".join(prompts), encoding="utf-8")
    sample.main([f"--out_dir={char_run}", f"--prompts_file={tmp_path / 'prompts.txt'}",
                 "--num_samples=2", "--max_new_tokens=150", "--logprobs=3", "--stop=~x", "--stop=Z",
                 *(f"--{name}={value}" for name, value in settings.items())])
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [row["text"] for row in rows] == [choice["text"] for choice in answer["choices"]]
    for row, choice in zip(rows, answer["choices"], strict=True):
        told = choice["logprobs"]
        assert [token["text"] for token in row["logprobs"]] == told["tokens"]
        assert [token["logprob"] for token in row["logprobs"]] == pytest.approx(
            told["token_logprobs"], abs=1e-4)
        assert [[other["text"] for other in token["top"]] for token in row["logprobs"]] == [
            list(top) for top in told["top_logprobs"]]


@pytest.mark.slow
def test_openais_client_hears_of_mistakes(server, byte_server):
    openai = pytest.importorskip("openai")
    create = openai_client(server).completions.create
    for wrong, told in (({"temperature": -1}, "temperature is -1"), ({"best_of": 3}, "best_of"),
                        ({"prompt": "\u0416"}, "none of the alphabet"), ({"n": 1000}, "at most"),
                        ({"extra_body": {"topk": 5}}, "did you mean top_k?")):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match=told.replace("?", r"\?")) as e:
                create(**{"model": "tiny", "prompt": "a", "stream": stream} | wrong)
            assert e.value.body["message"].isprintable()
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-9' here"):
        create(model="gpt-9", prompt="a")
    with pytest.raises(openai.AuthenticationError, match="no api key, or a wrong one"):
        openai_client(byte_server, "wrong").completions.create(model="tiny", prompt="a")
    with pytest.raises(openai.BadRequestError, match="knows no chats"):
        openai_client(server).chat.completions.create(model="tiny", messages=[])
    data = body(max_tokens=4096, n=32, stream=True)
    with contextlib.ExitStack() as stack:
        for _ in range(3):  # as many as may run, and as many as may wait
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            sock.sendall(head(len(data)) + data)
        while (health := server.get("/health"))["running"] + health["waiting"] < 96:
            time.sleep(0.01)
        with pytest.raises(openai.RateLimitError, match="busy") as e:
            create(model="tiny", prompt="a")
        assert e.value.response.headers["retry-after"] == "1"
    assert idle(server)
    assert openai_client(server).completions.create(model="tiny", prompt="a").choices


@pytest.mark.slow
def test_openais_client_chats_until_the_model_ends(byte_server):
    client = openai_client(byte_server, "secret")
    settings = dict(model="tiny", messages=[{"role": "user", "content": "a?"}], seed=2)
    whole = client.chat.completions.create(**settings)
    assert whole.object == "chat.completion" and whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "stop" and whole.usage.prompt_tokens == 19
    assert whole.usage.completion_tokens < 4000
    chunks = list(client.chat.completions.create(**settings, stream=True))
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content for chunk in chunks)
    assert text == whole.choices[0].message.content and "<|endoftext|>" not in text
    again = client.chat.completions.create(**settings, max_completion_tokens=3)
    assert again.usage.completion_tokens == 3 and again.choices[0].finish_reason == "length"


@pytest.mark.slow
def test_streams_at_once_are_each_as_alone(server):
    """32 texts of different seeds, settings and prompts, many of them cancelled on the way."""
    asked = [{"prompt": "The one " * (i % 9), "max_tokens": 150 + 5 * i, "seed": i, "stream": True,
              "temperature": 0.5 + i % 4 / 4, "top_k": 5 * (i % 3)} for i in range(32)]

    def text(given) -> str:
        request = urllib.request.Request(f"{server.url}/v1/completions", body(**given), JSON)
        with urllib.request.urlopen(request, timeout=60) as answer:
            events = answer.read().decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-2])

    alone = [text(given) for given in asked[::4]]
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        leaving = [pool.submit(leave, server, body(max_tokens=4000, stream=i % 2 == 0))
                   for i in range(8)]
        together = list(pool.map(text, asked * 2))
        [future.result() for future in leaving]
    assert together[:32] == together[32:] and together[:32:4] == alone
    assert len(set(together)) == 32 and [len(t) for t in alone] == [
        given["max_tokens"] for given in asked[::4]]
    assert idle(server)


def head(length: object, extra: str = "") -> bytes:
    return (f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{extra}"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n").encode()


def leave(server, data: bytes, after: float = 0.05) -> None:
    """Ask, read a little, and go away without a word."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
        sock.sendall(head(len(data)) + data)
        sock.settimeout(after)
        with contextlib.suppress(TimeoutError):
            sock.recv(100)
        if after < 0.02:  # by a reset
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_is_not_written_for(server, stream):
    before = server.get("/health")["tokens"]
    for after in (0.01, 0.3):
        leave(server, body(prompt="The ", max_tokens=4096, n=32, stream=stream), after)
        assert idle(server)
    assert server.get("/health")["tokens"] - before < 2 * 32 * 4000


def raw(server, data: bytes) -> bytes:
    """What comes back for some bytes, until the server ends or has said a whole answer."""
    got = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(data)
        with contextlib.suppress(ConnectionError):
            while part := sock.recv(65536):
                got += part
                if re_length(got) is not None and len(got) >= re_length(got):
                    break
    return got


def re_length(answer: bytes) -> int | None:
    start, found, _ = answer.partition(b"\r\n\r\n")
    lengths = [int(line[15:]) for line in start.lower().split(b"\r\n")
               if line.startswith(b"content-length:")]
    return len(start) + 4 + lengths[0] if found and lengths else None


@pytest.mark.slow
def test_hostile_bytes(server):
    get = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    chunked = head(5).replace(b"Content-Length: 5", b"Transfer-Encoding: chunked")
    for data, status in (
            (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(300), 400),  # TLS
            (b"\0" * 5000, 400), (b"GET\r\n\r\n", 400),
            (get + b"A: " + b"x" * 10**6 + b"\r\n\r\n", 400),
            (get + b"A: b\r\n" * 10**5 + b"\r\n", 400),
            (get + b"Host: evil.example\r\n\r\n", 400),  # a second one
            (get + b"Content-Length: -5\r\n\r\n", 400),
            (get + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
            (get + b"A : b\r\n\r\n", 400), (get + b"A: b\0\r\n\r\n", 400),
            (b"GET /health HTTP/1.0\r\n\r\n", 421), (get + b"Upgrade: websocket\r\nConnection: "
                                                     b"upgrade\r\n\r\n", 200),
            (get.replace(b"/health", b"/%00%ff%0a/../\x7f") + b"\r\n", 400),
            (get.replace(b"/health", b"/%00%ff%0a%1b[31m") + b"\r\n", 404),
            (b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
            (head(10**18), 413), (head(200_001) + b" " * 200_001, 413), (head("9" * 30), 400),
            (chunked + (b"186a0\r\n" + b" " * 10**5 + b"\r\n") * 3, 413),
            (chunked + b"zz\r\n", 400), (chunked + b"1\r\n{\r\n0\r\n\r\n", 400),
            (head(20) + b'{"max_tokens": 1   }', 200)):
        got = raw(server, data)
        assert got.startswith(b"HTTP/1.1 %d " % status), (data[:80], got[:200])
        start, _, rest = got.partition(b"\r\n\r\n")
        rest = re.sub(rb"^1e\r\n|\r\n0\r\n\r\n$", b"", rest)  # uvicorn's own 400 comes in a chunk
        assert b"\n" not in rest and b"Traceback" not in rest and rest.isascii()
        assert b"server:" not in start.lower()
    late = raw(server, chunked + (b"186a0\r\n" + b" " * 10**5 + b"\r\n") * 30 + b"zz\r\n")
    assert late[9:12] in (b"413", b"400")  # as it comes, in one piece or in several
    got = raw(server, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    for header in (b"content-security-policy: default-src 'none'; script-src 'self'",
                   b"x-content-type-options: nosniff", b"referrer-policy: no-referrer"):
        assert header in got.partition(b"\r\n\r\n")[0].lower()
    assert idle(server)


@pytest.mark.slow
def test_who_is_slow_is_cut_and_holds_up_nobody(server):
    """A head, a body and a reader that never come to an end, and somebody who says nothing."""
    data = body(prompt="The ", max_tokens=4096, n=8, logprobs=20, stream=True)
    starts = {"silent": b"", "head": b"GET /health HTTP/1.1\r\n", "body": head(1000) + b"{",
              "refused": head(10**9) + b" ", "reader": head(len(data)) + data}
    socks = {}
    for name, start in starts.items():
        socks[name] = sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(start)
    ended, began = {}, time.monotonic()
    while time.monotonic() < began + 20 and len(ended) < 4:
        for name in socks.keys() - ended.keys() - {"reader"}:
            with contextlib.suppress(OSError):
                socks[name].send(b"x")
            try:
                got = socks[name].recv(65536, socket.MSG_DONTWAIT)
                if not got or b" 408 " in got:
                    ended[name] = time.monotonic() - began
            except BlockingIOError:
                pass
            except ConnectionError:
                ended[name] = time.monotonic() - began
        asked = time.monotonic()
        server.post("/v1/completions", {"max_tokens": 1})
        assert time.monotonic() - asked < 3
        time.sleep(0.3)
    assert ended.keys() == starts.keys() - {"reader"}, ended
    assert min(ended.values()) > 5 and server.memory() < 1500
    socks["reader"].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    for sock in socks.values():
        sock.close()
    assert idle(server)


@pytest.mark.slow
def test_memory_is_flat(server):
    good = body(prompt="The ", max_tokens=40, n=4, logprobs=5, stream=True)
    long = body(prompt="The ", max_tokens=4000, n=8, stream=True)

    def some(i: int) -> None:
        kind = i % 5
        if kind == 0:
            raw(server, head(len(good), "Connection: close\r\n") + good)
        elif kind == 1:
            leave(server, long, 0.01 + i % 3 / 50)
        elif kind == 2:
            raw(server, head(200_001) + b" " * 200_001)
        elif kind == 3:
            raw(server, head(100_000) + b"[" * 100_000)
        else:
            raw(server, os.urandom(20_000))

    held = []
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            list(pool.map(some, range(200)))
            assert idle(server)
            held.append(server.memory())
    assert held[2] < held[0] + 15, held


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_it_ends_its_streams_and_asked_twice_it_leaves_at_once(char_run, how):
    twice = how == signal.SIGINT
    with serving(char_run, "--max_tokens=1000000") as server, contextlib.ExitStack() as stack:
        streaming, silent, unfinished = (stack.enter_context(socket.create_connection(
            ("127.0.0.1", server.port), timeout=20)) for _ in range(3))
        data = body(max_tokens=10**6, stream=True)
        streaming.sendall(head(len(data)) + data)
        unfinished.sendall(head(100) + b"{" if twice else b"")  # would be waited for
        assert b"data: " in streaming.recv(65536) + streaming.recv(65536)
        began = time.monotonic()
        server.process.send_signal(how)
        got = b""
        while part := streaming.recv(65536):
            got += part
        assert got.endswith(b"\r\n0\r\n\r\n") and b"the server is stopping" in got
        if twice:
            assert server.process.poll() is None
            server.process.send_signal(how)
        assert server.process.wait(20) == 128 + how
        assert time.monotonic() - began < (2.5 if twice else 6)
        server.reader.join(5)
        assert "Traceback" not in "\n".join(server.lines)
        assert twice or server.lines[-1] == "stopped"


@pytest.mark.slow
def test_mistakes_are_a_line_and_exit_code_2(char_run, server, byte_server):
    done = subprocess.run([sys.executable, "-m", "extras.serve", f"--port={server.port}"],
                          cwd=CLONE, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"--port={server.port}: Address already in use" in done.stderr
    for flags, told in (("--host=no.such.host.invalid", "cannot listen on --host=no.such"),
                        ("--prot=80", "unknown setting --prot; did you mean port?"),
                        (f"--out_dir={char_run} --step=7 --port=0", "no checkpoint for --step=7")):
        with pytest.raises(UserError, match=re.escape(told)):
            serve.main(flags.split())
    assert any("anybody who has the api key may use it" in line for line in byte_server.lines)


@pytest.mark.slow
def test_the_bench_measures_and_compares(char_run, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "bench.serve", f"--out_dir={char_run}", "--seconds=2", "--alone=1",
         "--streams=4", "--max_tokens=50", "--json", f"--out={tmp_path}"], cwd=CLONE,
        capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["mixed"] == 0 and [r["errors"] for r in row["rows"]] == [0, 0]
    assert all(r["tokens"] == 50 * r["answers"] > 0 for r in row["rows"]) and row["ratio"] > 0

"""rows.py: prompts from files, rows that get in a batch what they get alone, JSON lines."""

import json
import math
import types

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.tokenizer import ByteTokenizer
from kit.errors import UserError
from kit.sampling import Choice
from kit.writing.prompts import Prompt, parse_prompt, read_prompts
from kit.writing.rows import Row, batches, to_json, write
from kit.writing.text import start_ids
from model import GPT, GPTConfig
from sample import SampleSettings

BYTES = ByteTokenizer()
MANY = settings(max_examples=60, deadline=None, derandomize=True,
                suppress_health_check=[HealthCheck.too_slow])


def make_model(block_size: int = 16) -> GPT:
    """Untrained, with weights so large that its choices are firm."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(vocab_size=257, block_size=block_size, n_layer=1, n_head=2, n_embd=32))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4)
    return model.eval()


MODEL = make_model()


def lines(prompts: list[Prompt], s: SampleSettings, end: int | None = None, model: GPT = MODEL
          ) -> list[dict]:
    """What write() prints as JSON."""
    s.prompts_file, out = "some.jsonl", []
    for p in prompts:
        p.ids = BYTES.encode(p.text) or start_ids(BYTES)
    write(model, BYTES, prompts, s, end, out.append, pytest.fail)
    return [json.loads(line) for line in out]


# ---------------------------------------------------------------------------------------- prompts


def test_a_line_is_a_prompt():
    data = "\ufeffone\r\n\n two \nä\u2028\x0c\x85b\nlast".encode()
    prompts = read_prompts(data, "some.txt")
    assert [p.text for p in prompts] == ["one", "", " two ", "ä\u2028\x0c\x85b", "last"]
    assert [p.where for p in prompts] == [f"some.txt:{n}" for n in range(1, 6)]
    assert [p.text for p in read_prompts(b"one\n", "-")] == ["one"]
    assert [p.text for p in read_prompts(b"\n", "-")] == [""]
    assert read_prompts(b"one\n", "-")[0].where == "standard input:1"


def test_objects_with_their_own_seed_length_and_stops():
    data = (b'{"prompt": "a", "seed": 7, "max_new_tokens": 3, "stop": "x", "id": [1, null]}\n\n'
            b'  {"prompt": "", "stop": ["x", "yz"]}\r\n{"stop": null, "prompt": "\\u00e9"}')
    for name in ("some.jsonl", "-"):
        a, b, c = read_prompts(data, name)
        assert (a.text, a.seed, a.max_new_tokens, a.stop) == ("a", 7, 3, ("x",))
        assert a.others == {"id": [1, None]}
        assert (b.text, b.seed, b.max_new_tokens, b.stop, b.others) == ("", None, None,
                                                                      ("x", "yz"), {})
        assert (c.text, c.stop) == ("é", None)
    assert c.where == "standard input:4"


def test_the_name_or_the_first_line_decide_what_a_file_is():
    assert read_prompts(b'{"prompt": "a"}', "some.txt")[0].text == '{"prompt": "a"}'
    assert read_prompts(b'{"prompt": "a"}', "-")[0].text == "a"
    assert [p.text for p in read_prompts(b'7\n{"prompt": "a"}', "-")] == ["7", '{"prompt": "a"}']
    with pytest.raises(UserError, match=r"some\.jsonl:1: "):
        read_prompts(b"plain text", "some.jsonl")


@pytest.mark.parametrize("line, words", [
    ("", "no prompt in it"), (" ", "no prompt in it"), ("{", "not a line of JSON"),
    ('{"prompt": "a"} x', "not a line of JSON"), ("[" * 100_000, "not a line of JSON"),
    ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", "not a line of JSON"),
    ('{"prompt": "a", "x": NaN}', "NaN is no JSON"), ('{"prompt": "a", "x": -Infinity}', "no JSON"),
    ('["a"]', "expected an object"), ("3", "expected an object"), ('"a"', "expected an object"),
    ("{}", "expected an object"), ('{"prompt": 3}', "expected an object"),
    ('{"prompt": null}', "expected an object"), ('{"prompts": "a"}', "expected an object"),
    ('{"prompt": "a", "seed": -1}', "seed is -1"), ('{"prompt": "a", "seed": 1.0}', "seed is 1.0"),
    ('{"prompt": "a", "seed": true}', "seed is True"), ('{"prompt": "a", "seed": "1"}', "seed is"),
    ('{"prompt": "a", "seed": 9223372036854775808}', "seed is 9223372036854775808"),
    ('{"prompt": "a", "seed": 1e400}', "seed is inf"),
    ('{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens is 0"),
    ('{"prompt": "a", "max_new_tokens": 1e3}', "max_new_tokens is 1000.0"),
    ('{"prompt": "a", "stop": 3}', "stop is 3"), ('{"prompt": "a", "stop": ""}', "stop is ''"),
    ('{"prompt": "a", "stop": ["b", ""]}', "stop is"), ('{"prompt": "a", "stop": [1]}', "stop is"),
    ('{"prompt": "a", "stop": {"b": 1}}', "stop is"),
    ('{"prompt": "a", "text": "b"}', "'text' is one of the output's own"),
])
def test_a_line_that_cannot_be_right_is_named(line, words):
    with pytest.raises(UserError) as error:
        read_prompts((line + "\n").encode(), "some.jsonl")
    message = str(error.value)
    assert words in message and message.startswith("some.jsonl:") and len(message) < 200
    if line.strip():
        assert message.startswith("some.jsonl:1: ") and "\n" not in message
        with pytest.raises(UserError, match="some.jsonl:3: "):
            read_prompts(('{"prompt": "a"}\n\n' + line).encode(), "some.jsonl")


@MANY
@given(st.text(max_size=30) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda x: st.dictionaries(st.sampled_from(["prompt", "seed", "stop", "max_new_tokens", "x"]), x)
    | st.lists(x), max_leaves=8).map(json.dumps))
def test_whatever_a_line_holds_it_is_a_prompt_or_a_mistake(line):
    try:
        assert isinstance(parse_prompt(line, "here").text, str)
    except UserError as e:
        assert str(e).startswith("here: ")


@pytest.mark.parametrize("name", ["some.txt", "some.jsonl", "-"])
def test_bytes_that_are_no_utf_8_are_named_by_their_offset(name):
    with pytest.raises(UserError, match="not UTF-8 text at byte 4"):
        read_prompts(b"one\n\xff\xfe", name)


# ------------------------------------------------------------------------------------------- rows


@st.composite
def somewhat_different_prompts(draw) -> list[Prompt]:
    text = st.text("ab é🌳", max_size=30)
    return draw(st.lists(st.builds(
        Prompt, text, seed=st.none() | st.integers(0, 3),
        max_new_tokens=st.none() | st.integers(1, 40),
        stop=st.none() | st.lists(st.text("abcdefgh\x00", min_size=1, max_size=2)).map(tuple)),
        min_size=1, max_size=6))


@MANY
@given(somewhat_different_prompts(), st.integers(1, 7), st.integers(1, 3),
       st.sampled_from([0.0, 1.0, 3.0]), st.sampled_from([1.0, 1.5]))
def test_each_row_gets_in_a_batch_what_it_gets_alone(prompts, size, n, temperature, penalty):
    s = SampleSettings(num_samples=n, batch_size=size, temperature=temperature, top_k=0, seed=5,
                       repetition_penalty=penalty, max_new_tokens=20, stop=("e",))
    together = lines(prompts, s, end=256)
    assert [(x["index"], x["sample"]) for x in together] == [
        (i, j) for i in range(len(prompts)) for j in range(n)]
    for x in together:
        own = prompts[x["index"]]
        assert x["prompt"] == own.text
        assert x["seed"] == (5 + n * x["index"] if own.seed is None else own.seed) + x["sample"]
        one = SampleSettings(temperature=temperature, top_k=0, seed=x["seed"], max_new_tokens=20,
                             repetition_penalty=penalty, stop=("e",), batch_size=1)
        alone = Prompt(own.text, max_new_tokens=own.max_new_tokens, stop=own.stop)
        assert lines([alone], one, end=256) == [{**x, "index": 0, "sample": 0}]


def sizes(monkeypatch) -> list[tuple[int, int]]:
    """(rows, tokens) of everything that goes through the model from here on."""
    fed, real = [], GPT.hidden
    monkeypatch.setattr(GPT, "hidden", lambda self, x, cache=None:
                        (fed.append(tuple(x.shape)), real(self, x, cache))[1])
    return fed


def test_a_row_that_has_ended_costs_nothing_more(monkeypatch):
    fed = sizes(monkeypatch)
    prompts = [Prompt("abcd", max_new_tokens=n) for n in (2, 5, 1, 2)]
    assert [x["tokens"] for x in lines(prompts, SampleSettings())] == [2, 5, 1, 2]
    assert fed == [(1, 4)] * 4 + [(3, 1), (1, 1), (1, 1), (1, 1)]  # a CPU reads one by one


@pytest.mark.parametrize("n, size, readings, steps", [
    (1, 2, 5, [2, 2, 1]),  # three batches of different prompts
    (2, 4, 5, [4, 4, 2]),  # samples of a prompt share one reading of it
    (3, 2, 10, [2, 1] * 5),  # two samples, then the third, of each prompt
])
def test_no_more_than_a_batch_at_once(monkeypatch, n, size, readings, steps):
    fed = sizes(monkeypatch)
    s = SampleSettings(num_samples=n, batch_size=size, max_new_tokens=2)
    assert len(lines([Prompt(t) for t in ("abc", "abd", "abe", "abf", "abg")], s)) == 5 * n
    assert [shape for shape in fed if shape[1] == 3] == [(1, 3)] * readings
    assert [rows for rows, T in fed if T == 1] == steps


def test_a_batch_is_made_when_its_turn_comes():
    many = [Prompt("a")] * 10**6
    assert len(next(batches(many, SampleSettings(num_samples=4), None))) == 32


def test_what_ended_a_row():
    torch.manual_seed(0)
    model = make_model()
    with torch.no_grad():  # a, b, end, a, b, end, ...
        for p in model.parameters():
            p.zero_() if p.ndim == 2 else p.fill_(1)
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(257, 32))
        for i, (now, then) in enumerate([(97, 98), (98, 256), (256, 97)]):
            model.wte.weight[now, i] = model.lm_head.weight[then, i] = 1
    s = SampleSettings(temperature=0, max_new_tokens=4)
    [x] = lines([Prompt("a")], s, end=256, model=model)
    assert (x["text"], x["tokens"], x["ended"]) == ("b", 2, "end")
    [x] = lines([Prompt("a")], s, model=model)
    assert (x["text"], x["tokens"], x["ended"]) == ("b<|endoftext|>ab", 4, "length")
    x, y, z = lines([Prompt("a", stop=("<|endoftext|>",)), Prompt("a", stop=("tex", "dof")),
                     Prompt("a", stop=("ba", "ab"))], s, model=model)
    assert (x["text"], x["tokens"], x["ended"]) == ("b", 2, "stop")
    assert (y["text"], y["ended"]) == ("b<|en", "stop")
    assert (z["text"], z["tokens"], z["ended"]) == ("b<|endoftext|>", 4, "stop")  # and the length


# ----------------------------------------------------------------------------------------- output


def test_logprobs_are_those_of_the_model_for_every_token():
    s = SampleSettings(logprobs=3, temperature=2.0, max_new_tokens=6, top_k=0)
    short, long = lines([Prompt("ab", max_new_tokens=2), Prompt("cde")], s)
    for x in (short, long):
        assert len(x["logprobs"]) == x["tokens"]
        ids = BYTES.encode(x["prompt"])
        for token in x["logprobs"]:
            logp = MODEL(torch.tensor([ids]))[0, -1].log_softmax(-1)
            ids.append(token["id"])
            assert token["logprob"] == pytest.approx(logp[token["id"]].item(), abs=1e-4)
            assert [t["id"] for t in token["top"]] == logp.topk(3).indices.tolist()
            assert token["bytes"] == list(BYTES.token_bytes(token["id"]))
            assert token["text"] == bytes(token["bytes"]).decode(errors="replace")
        written = b"".join(bytes(token["bytes"]) for token in x["logprobs"])
        assert written.decode(errors="replace") == x["text"]


def finished(text: str, others: dict | None = None) -> Row:
    row = Row(Prompt(text, others=others or {}), 0, 0, 1, 100, (), None)
    for id in BYTES.encode(text, "skip"):
        row.take(id, BYTES)
    return row


@MANY
@given(st.text(max_size=20), st.dictionaries(st.text("abc", min_size=1).map("_".__add__),
                                  st.text(st.characters())))
def test_a_row_is_one_line_of_json_for_whoever_reads_it(text, others):
    row = finished("x" + text, others)
    row.limit, row.ended = 0, "length"
    row.pieces.append(row.stream.feed(b"", final=True))
    line = to_json(row, BYTES, False)
    assert line.splitlines() == [line]
    assert not any(c < " " or "\x7f" <= c < "\xa0" for c in line)
    value = json.loads(line)
    assert value["prompt"] == value["text"] == "x" + text
    assert {k: value[k] for k in others} == others


def test_letters_stay_readable_and_odd_ones_do_not_break_a_line():
    line = to_json(finished("é🌳\x9b\u2028", {"k": "\ud800"}), BYTES, False)
    assert "é🌳\\u009b\\u2028" in line and "\\ud800" in line
    line.encode("utf-8")


def test_a_probability_of_nothing_is_null():
    row = finished("a")
    row.choices = [Choice(-0.5, [(97, -0.5), (98, -math.inf)])]
    value = json.loads(to_json(row, BYTES, True), parse_constant=pytest.fail)
    assert [t["logprob"] for t in value["logprobs"][0]["top"]] == [-0.5, None]


def test_a_model_that_holds_more_than_a_tokenizer_writes_to_the_end():
    """A row takes bytes from any tokenizer that has token_bytes, special and unused ids too."""
    tokens = types.SimpleNamespace(token_bytes=lambda id: [b"", "é".encode()[:1], b"x"][id])
    row = Row(Prompt("p"), 0, 0, 1, 3, (), None)
    for id in (0, 1, 2):
        row.take(id, tokens)
    assert (row.fresh(), row.ended) == ("\ufffdx", "length")

"""engine.py, batch.py: each text is what it is alone, whoever comes and goes."""

import copy
import gc
import mmap
import random
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.tokenizer import ByteTokenizer
from extras.serve import batch as turns
from extras.serve.batch import Batch, Row
from extras.serve.engine import Engine, Full, Job, Request
from kit.kernels import fast, native
from kit.sampling import Sampler
from kit.writing import window
from kit.writing.prompts import Prompt
from kit.writing.rows import Row as Alone
from kit.writing.rows import write_batch
from model import GPT, GPTConfig

CODE, WHY = native.library()
KINDS = [pytest.param((kind, True), id=kind, marks=pytest.mark.skipif(CODE is None, reason=WHY))
         for kind in native.KINDS]
WAYS = [*KINDS, pytest.param(("float32", False), id="library"), pytest.param(None, id="plain")]
SIZE, V = 24, 257
TOKENIZER = ByteTokenizer()
MODELS: dict = {}  # each is made once


def make(way=None, **options) -> GPT:
    torch.manual_seed(1)
    config = dict(vocab_size=V, block_size=SIZE, n_layer=2, n_head=2, n_embd=32) | options
    model = GPT(GPTConfig(**config)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    if way:
        fast(model, *way)
    return model


def get(way=None) -> GPT:
    if way not in MODELS:
        MODELS[way] = make(way)
    return MODELS[way]


def alone(model: GPT, r: Request) -> tuple[list[int], str, str, list]:
    """ids, text, how it ended, choices: as sample.py would write it."""
    s = SimpleNamespace(temperature=r.temperature, top_k=r.top_k, top_p=r.top_p, min_p=r.min_p,
                        repetition_penalty=r.repetition_penalty, logprobs=r.logprobs, lookup=0,
                        context_keep=None)
    row = Alone(Prompt("", ids=list(r.ids)), 0, 0, r.seed, r.max_tokens, r.stop, r.end)
    for _ in write_batch(model, TOKENIZER, [row], s):
        pass
    return row.ids, row.fresh(), "length" if row.ended == "length" else "stop", row.choices


def check(model: GPT, job: Job, exact: bool = True) -> None:
    """A job that was not disturbed is what it is alone; of a cancelled one, the beginning."""
    ids, text, ended, choices = alone(model, job.request)
    tokens = job.take()
    if job.ended not in ("stop", "length"):
        assert job.ended == "cancelled" and len(tokens) < len(ids)
        ids, text = ids[: len(tokens)], text[: sum(len(t.text) for t in tokens)]
    else:
        assert job.ended == ended
    assert [t.id for t in tokens] == ids
    assert "".join(t.text for t in tokens) == text
    if job.request.logprobs is not None:
        for token, choice in zip(tokens, choices, strict=False):
            if exact:
                assert token.choice == choice
            else:
                assert token.choice.logprob == pytest.approx(choice.logprob, abs=1e-4)
    else:
        assert not any(t.choice for t in tokens)


def wait_for(*jobs: Job) -> None:
    end = time.monotonic() + 60
    while any(job.ended is None for job in jobs):
        assert time.monotonic() < end, "it hangs"
        time.sleep(0.001)


@pytest.fixture
def start():
    """start(model, ...) makes an engine, which is closed after the test."""
    engines = []

    def make_engine(model=None, *args, **options) -> Engine:
        engines.append(Engine(model or get(), TOKENIZER, *args, **options))
        return engines[-1]

    yield make_engine
    for engine in engines:
        engine.close()


def drive(model: GPT, requests: list[Request], begin: list[int], cancel: dict[int, int],
          most: int) -> list[Job]:
    """Let a batch write, without a thread: request i comes in turn begin[i], goes in cancel[i]."""
    jobs, queue, news = [], [], []
    for r in requests:
        jobs.append(Job(r, news.append, lambda: None))
    batch = Batch(model, TOKENIZER, most, 1, lambda: queue.pop(0) if queue else None)
    with torch.inference_mode():
        for turn in range(10000):
            queue += [Row(job, model) for job, at in zip(jobs, begin, strict=True) if at == turn]
            for i, at in cancel.items():
                if at == turn:
                    jobs[i].cancel()
            batch.turn()
            assert len(batch) <= most
            if turn >= max(begin) and not queue and not batch:
                return jobs
    raise AssertionError("it hangs")


# ---------------------------------------------------------------------------- the same as alone

requests = st.builds(
    Request, st.lists(st.integers(0, 255), min_size=1, max_size=40), st.integers(1, 50),
    temperature=st.sampled_from([0, 0.7, 1.5]), top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1, 0.9]), min_p=st.sampled_from([0, 0.05]),
    repetition_penalty=st.sampled_from([1, 1, 1.4]), seed=st.integers(0, 2**63),
    stop=st.sampled_from([(), ("e",), ("ab", "\ufffd\ufffd")]),
    logprobs=st.sampled_from([None, None, 0, 3]), end=st.sampled_from([None, 256, 65]))


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=8)
@given(data=st.data(), some=st.lists(requests, min_size=1, max_size=12), most=st.integers(1, 9))
def test_each_text_is_what_it_is_alone(way, data, some, most):
    begin = data.draw(st.lists(st.integers(0, 60), min_size=len(some), max_size=len(some)))
    cancel = data.draw(st.dictionaries(st.integers(0, len(some) - 1), st.integers(0, 80)))
    model = get(way)
    for job in drive(model, some, begin, cancel, most):
        check(model, job, exact=way is not None and way[1])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_smallest_windows(size):
    model = make(("float32", CODE is not None), block_size=size)
    some = [Request([i] * n, 7, seed=i) for i, n in enumerate((1, 2, 5))]
    for job in drive(model, some, [0, 0, 3], {}, 2):
        check(model, job)


@pytest.mark.parametrize("way", KINDS[:3:2])
def test_in_a_thread_too(way, start):
    """With clients that come, take and cancel in threads of their own."""
    model, rng = get(way), random.Random(2)
    engine, done = start(model, rows=7), []

    def client(seed: int) -> None:
        rng = random.Random(seed)
        for i in range(6):
            r = Request([rng.randrange(256) for _ in range(rng.choice([1, 9, 23, 24, 30]))],
                        rng.choice([1, 4, 40]), rng.choice([0.0, 1.0]), rng.choice([0, 7]),
                        repetition_penalty=rng.choice([1, 1.3]), seed=i)
            job, tokens = engine.submit(r), []
            if rng.random() < 0.3:
                time.sleep(rng.random() / 200)
                job.cancel()
            while job.ended is None:
                tokens += job.take()
                time.sleep(0.0005)
            done.append((job, tokens + job.take()))

    clients = [threading.Thread(target=client, args=(rng.random(),)) for _ in range(10)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(60)
    assert len(done) == 60
    for job, tokens in done:
        ids = alone(model, job.request)[0]
        got = [t.id for t in tokens]
        assert got == (ids[: len(got)] if job.ended == "cancelled" else ids)
    assert engine.tokens == sum(len(tokens) for _, tokens in done)
    assert engine.running == engine.waiting == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_in_pieces_is_the_prompt(way, monkeypatch):
    """Layer by layer, in parts of CHUNK: to the last bit what GPT.hidden makes of it."""
    model = make(way, block_size=120)
    monkeypatch.setattr(turns, "CHUNK", 50)
    alone = Batch(model, TOKENIZER, 1, 1, lambda: None)
    monkeypatch.setattr(window, "CHUNK", 50)
    for T in (1, 32, 33, 50, 120):
        idx = torch.randint(V, (1, T))
        whole, cut, pieces = model.new_cache(), model.new_cache(), 0
        with torch.inference_mode():
            expected, reading = window.read(model, idx, whole)[:, -1], alone.hidden(idx, cut)
            try:
                while True:
                    next(reading)
                    pieces += 1
            except StopIteration as e:
                assert torch.equal(e.value, expected)
        assert all(map(torch.equal, whole.k + whole.v, cut.k + cut.v))
        assert cut.pos == cut.longest == T
        layers = 3  # and the final norm
        assert pieces == {1: 0, 32: 0, 33: layers, 50: layers, 120: 2 * layers}[T]


# --------------------------------------------------------------------------- who gets what, when


def test_texts_are_written_side_by_side():
    model, steps = copy.copy(get()), []
    plain = model.hidden
    model.hidden = lambda idx, cache=None: steps.append(idx.shape) or plain(idx, cache)
    drive(model, [Request([i], 20, seed=i) for i in range(32)], [0] * 32, {}, 32)
    steps = [B for B, T in steps if B > 1]
    assert len(steps) < 60 and max(steps) == 32  # one by one: 32 * 19


def test_running_texts_do_not_wait_for_a_long_prompt(monkeypatch):
    """By a clock that shows a second more each time: half of the time is theirs."""
    clock = iter(range(10**6))
    monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    model, events = make(n_layer=20, block_size=200), []
    job, long = (Job(Request([1] * n, m), lambda j: None, None) for n, m in ((1, 60), (150, 1)))
    queue = [Row(job, model)]
    batch = Batch(model, TOKENIZER, 4, 1, lambda: queue.pop() if queue else None)
    step, read_on = batch.step, batch.read_on
    batch.step = lambda: events.append("s") or step()
    batch.read_on = lambda: read_on() and not events.append("r")
    with torch.inference_mode():
        batch.turn()
        queue.append(Row(long, model))
        events.clear()
        while long.ended is None:
            batch.turn()
    assert events.count("r") == 22 and "rrr" not in "".join(events)
    assert len(job.take()) > 10


def test_requests_share_what_was_read():
    """The newest ids with a mask of all are the whole prompt, for each of several texts."""
    ids, read = list(range(60, 140)), torch.zeros(V, dtype=torch.bool)
    read[60:140] = True
    settings = dict(max_tokens=30, repetition_penalty=5)
    some = [Request(ids[-SIZE:], seed=i, read=read, **settings) for i in range(3)]
    for i, job in enumerate(drive(get(), some, [0, 0, 2], {}, 3)):
        assert [t.id for t in job.take()] == alone(get(), Request(ids, seed=i, **settings))[0]
    assert read.sum() == 80  # nobody has noted there what it wrote


def test_several_texts_of_one_prompt_read_it_once():
    model, read = copy.copy(get()), []
    new_cache = model.new_cache
    model.new_cache = lambda *args: read.append(args) or new_cache(*args)
    ids = list(range(20))
    jobs = drive(model, [Request(ids, 3, seed=i) for i in range(5)] + [Request(ids[1:], 3)],
                 [0] * 6, {}, 6)
    assert [args for args in read if args[0] == 1 and len(args) == 2] == [(1, 20), (1, 19)]
    for job in jobs:
        check(model, job, exact=False)


def test_first_come_first_served(start):
    engine, order = start(rows=2, waiting=20), []
    jobs = [engine.submit(Request([1], 5), lambda i=i: order.append(i)) for i in range(12)]
    wait_for(*jobs)
    first = sorted(range(12), key=order.index)
    assert first == list(range(12))


def test_no_more_than_may_wait(start):
    engine, go, at_work = start(rows=1, waiting=2), threading.Event(), threading.Event()

    def block() -> None:
        at_work.set()
        go.wait()

    first = engine.submit(Request([1], 4000), block)
    assert at_work.wait(60)
    second, third = (engine.submit(Request([1], 3)) for _ in range(2))
    assert engine.running == 1 and engine.waiting == 2
    with pytest.raises(Full, match="2 requests are waiting"):
        engine.submit(Request([1], 3))
    ended = threading.Event()
    third.wake = ended.set
    third.cancel("timeout")
    go.set()
    assert ended.wait(60) and third.ended == "timeout" and not third.take()
    engine.submit(Request([1], 3)).cancel()
    assert first.ended is None and second.ended is None  # still the first one's turn
    first.cancel()
    wait_for(first, second)
    assert first.ended == "cancelled" and second.ended == "length" and len(second.take()) == 3


def test_one_wake_for_all_that_share_it(start):
    engine, woken, go = start(rows=8), [], threading.Event()
    engine.submit(Request([1], 1), go.wait)
    jobs = []

    def wake() -> None:
        woken.append(sum(len(job.take()) for job in jobs))

    jobs += [engine.submit(Request([2], 30), wake) for _ in range(8)]
    go.set()
    wait_for(*jobs)
    wait_for(engine.submit(Request([1], 1)))  # so that the last wake was called
    assert sum(woken) == 240 and len(woken) < 60


# ------------------------------------------------------------------------------ what goes wrong


def test_a_step_that_fails_ends_its_texts_and_the_engine_goes_on(start):
    model = copy.copy(get())
    plain, broken = model.hidden, threading.Event()

    def hidden(idx, cache=None):
        if broken.is_set() and len(idx) > 1:
            broken.clear()
            raise RuntimeError("out of order")
        return plain(idx, cache)

    model.hidden = hidden
    engine = start(model, rows=3)
    jobs = [engine.submit(Request([1], 10**6), broken.set) for _ in range(3)]
    wait_for(*jobs)
    assert {job.ended for job in jobs} == {"error: out of order"}
    later = engine.submit(Request([3, 4], 30, seed=5))
    wait_for(later)
    check(model, later, exact=False)


def test_a_row_whose_logits_are_damaged_goes_alone():
    model = make()
    with torch.no_grad():
        model.wpe.weight[20] = torch.nan
    bad, good, worse = drive(model, [Request([1], 40, 0.5), Request([2], 15, 0.5),
                                     Request([3] * 21, 3)], [0, 0, 5], {}, 3)
    assert bad.ended == worse.ended == \
        "error: the model's logits are not finite: its weights are damaged"
    assert len(bad.take()) == 20 and not worse.take()
    check(model, good, exact=False)


def test_what_is_drawn_in_vain_is_drawn_for_nobody():
    """Of a row with damaged logits and others that share its sampler, only that one is lost."""
    seeds, logits = [3, 4, 5], torch.randn(3, V)
    expected, sampler = Sampler(seeds), Sampler(seeds)
    for damaged in (None, 1, 0, None):
        given = logits.clone()
        if damaged is not None:
            given[damaged, 7] = torch.nan
        ids, errors = turns.choose(sampler, given)
        wanted = expected(logits).tolist()
        assert [i for i in range(3) if errors[i]] == ([] if damaged is None else [damaged])
        assert [ids[i] for i in range(3) if i != damaged] == [
            wanted[i] for i in range(3) if i != damaged]


def test_logits_are_looked_through_once(monkeypatch):
    calls, chosen, plain, choose = [], [], torch.Tensor.isfinite, Sampler.choose
    monkeypatch.setattr(torch.Tensor, "isfinite", lambda x: calls.append(1) or plain(x))
    monkeypatch.setattr(Sampler, "choose", lambda *args: chosen.append(1) or choose(*args))
    drive(get(), [Request([i], 9, seed=i) for i in range(3)], [0] * 3, {}, 3)
    assert len(calls) == len(chosen) > 9


@pytest.mark.parametrize("where", ["its own cache", "the store"])
def test_no_memory_for_one_is_not_the_others_fault(where, monkeypatch):
    model = copy.copy(get())
    new_cache, calls = model.new_cache, []

    def scarce(rows, length=None):
        if where == "its own cache" and length == 7:
            raise MemoryError
        return new_cache(rows, length)

    def scarcer(*args):
        calls.append(args)
        if where == "the store" and len(calls) > 4:  # keys and values of one row are there
            raise OSError(12, "Cannot allocate memory")
        return mmap.mmap(*args)

    model.new_cache = scarce
    monkeypatch.setattr(turns, "mmap", SimpleNamespace(mmap=scarcer))
    first, second = drive(model, [Request([1], 30), Request([2] * 7, 30)], [0, 2], {}, 4)
    assert first.ended == "length" and second.ended == "error: out of memory"
    check(model, first, exact=False)


def test_a_token_that_cannot_be_told_is_not_the_others_fault(monkeypatch):
    first, second = Request([1], 20, 0), Request([2] * 7, 20, seed=1)
    ids = [alone(get(), r)[0] for r in (first, second)]
    strange = next(id for id in ids[1] if id not in ids[0])
    plain = TOKENIZER.token_bytes
    with monkeypatch.context() as m:
        m.setattr(TOKENIZER, "token_bytes", lambda id: plain(id if id != strange else -1))
        jobs = drive(get(), [first, second], [0, 0], {}, 4)
    check(get(), jobs[0], exact=False)
    assert jobs[1].ended.startswith("error: token id -1")
    assert [t.id for t in jobs[1].take()] == ids[1][: ids[1].index(strange)]


def test_a_wake_that_raises_disturbs_nobody(start):
    engine = start()
    jobs = [engine.submit(Request([1], 9), lambda: 1 / 0), engine.submit(Request([2], 9))]
    wait_for(*jobs)
    assert [len(job.take()) for job in jobs] == [9, 9]


def test_close_ends_all_jobs(start):
    engine, woken = start(rows=3), []
    jobs = [engine.submit(Request([i], 10**6), lambda i=i: woken.append(i)) for i in range(9)]
    while not jobs[0].take():
        time.sleep(0.001)
    engine.close()
    assert not engine.thread.is_alive() and engine.closed
    assert {job.ended for job in jobs} == {"cancelled"} and set(woken) == set(range(9))
    assert engine.running == engine.waiting == 0
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(Request([1], 1))
    engine.close()  # nothing happens


def test_an_idle_engine_is_small(start):
    engine = start(rows=6)
    jobs = [engine.submit(Request([i], 10**6, repetition_penalty=1.1)) for i in range(5)]
    while engine.batch.rows[4:] == []:
        time.sleep(0.001)
    assert engine.batch.store.batch_size == 6  # 1, 2, 4, 6
    for job in jobs:
        job.cancel()
    wait_for(*jobs)
    end = time.monotonic() + 60
    while engine.batch.store is not None:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_what_has_ended_leaves_nothing_behind(start):
    engine, sizes = start(get(), 8, 2000), []
    go = threading.Event()
    for n in (300, 1200):
        job = engine.submit(Request([1], 10**6))
        for i in range(n):
            engine.submit(Request([i % 256], 1 + i % 2, seed=i, repetition_penalty=1 + i % 2 / 9))
        while engine.running + engine.waiting > 1:
            time.sleep(0.001)
        job.cancel()
        wait_for(job)
        wait_for(engine.submit(Request([1], 1), go.set))
        go.wait(60)
        gc.collect()
        sizes.append(len(gc.get_objects()))
    assert sizes[1] - sizes[0] < 200
    assert not [o for o in gc.get_objects() if type(o) is Row and o.job is not job]

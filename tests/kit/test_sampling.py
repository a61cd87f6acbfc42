"""kit/sampling.py: filters, draws that follow the softmax, text that appears at once and whole."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.tokenizer import ByteTokenizer, CharTokenizer
from kit.sampling import Sampler, TextStream, filter_logits, start_ids

MANY = settings(max_examples=150, deadline=None, derandomize=True,
                suppress_health_check=[HealthCheck.too_slow])
LOGITS = st.lists(st.floats(-50, 50, width=32) | st.sampled_from([0.0, 1.0]), min_size=1,
                  max_size=12)


def kept(logits: torch.Tensor) -> list[int]:
    """How many tokens of each row can still be drawn."""
    return (logits > -math.inf).sum(-1).tolist()


# ---------------------------------------------------------------------------------------- filters


@MANY
@given(LOGITS, st.sampled_from([0.01, 0.5, 1.0, 3.0]))
def test_without_filters_it_is_the_softmax_at_a_temperature(values, temperature):
    logits = torch.tensor([values])
    for top_k in (None, 0, len(values), len(values) + 5):
        p = filter_logits(logits, temperature, top_k, 1.0).softmax(-1)
        expected = (logits.double() / temperature).softmax(-1)
        assert torch.allclose(p.double(), expected, atol=1e-5)


@MANY
@given(LOGITS, st.integers(1, 12))
def test_top_k_keeps_exactly_the_k_likeliest(values, k):
    logits = torch.tensor([values, values[::-1]])
    out = filter_logits(logits, 1.0, k, 1.0)
    assert kept(out) == [min(k, len(values))] * 2  # ties too
    for row, result in zip(logits, out, strict=True):
        chosen, row = result > -math.inf, row - row.max()  # where what is almost 0 is 0
        assert (~chosen).sum() == 0 or row[chosen].min() >= row[~chosen].max()


@MANY
@given(LOGITS, st.sampled_from([0.0, 1e-9, 0.1, 0.3, 0.5, 0.9, 0.999]) | st.floats(0, 0.999))
def test_top_p_keeps_the_fewest_that_reach_p(values, p):
    logits = torch.tensor([values])
    out = filter_logits(logits, 1.0, None, p)[0]
    chosen, probabilities = out > -math.inf, logits[0].double().softmax(-1)
    share = probabilities[chosen].sum().item()
    assert chosen.any()
    assert share >= p - 1e-5  # reached
    assert share - probabilities[chosen].min().item() < p + 1e-5 or chosen.sum() == 1  # not before
    assert chosen.all() or probabilities[chosen].min() >= probabilities[~chosen].max()


def test_filters_by_hand():
    logits = torch.tensor([[0.4, 0.1, 0.3, 0.2]]).log()
    assert kept(filter_logits(logits, 1.0, None, 0.39)) == [1]
    assert kept(filter_logits(logits, 1.0, None, 0.69)) == [2]
    assert kept(filter_logits(logits, 1.0, None, 0.71)) == [3]
    assert kept(filter_logits(logits, 1.0, None, 1.0)) == [4]
    both = filter_logits(logits, 1.0, 2, 0.5)[0]  # of 4/7 and 3/7 the first is enough
    assert (both > -math.inf).tolist() == [True, False, False, False]
    assert kept(filter_logits(torch.zeros(1, 9), 1.0, 4, 1.0)) == [4]
    assert kept(filter_logits(torch.zeros(1, 10), 1.0, None, 0.25)) == [3]
    assert torch.equal(logits, torch.tensor([[0.4, 0.1, 0.3, 0.2]]).log())  # not changed in place


# -------------------------------------------------------------------------------------- sampler


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-38, 1e-45, 1e-46, 5e-324])
def test_cold_is_greedy(temperature):
    logits = torch.tensor([[1.0, 3.0, 2.0], [-1e38, 1e37, 1e38], [0.0, 0.0, 1e-6],
                           [-2e-3, -1e-3, -5.0]])
    for top_k, top_p in ((None, 1.0), (2, 0.9), (3, 0.1)):
        choose = Sampler(4, temperature, top_k, top_p)
        for _ in range(5):
            assert choose(logits).tolist() == [1, 2, 2, 1]


def test_greedy_does_not_depend_on_the_seed_even_where_tokens_tie():
    assert {Sampler(1, 0.0, seed=s)(torch.zeros(1, 9)).item() for s in range(20)} == {0}


@pytest.mark.parametrize("temperature", [1e6, 1e38, 1e39, 1.7e308])
def test_hot_is_uniform(temperature):
    choose = Sampler(1, temperature, top_k=3)
    logits = torch.tensor([[-9.0, 9.0, 8.0, 7.0]])
    counts = torch.bincount(torch.cat([choose(logits) for _ in range(600)]), minlength=4).tolist()
    assert counts[0] == 0 and all(140 < n < 260 for n in counts[1:])


def test_one_token_is_all_that_top_k_1_or_a_tiny_top_p_leaves():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    for choose in (Sampler(3, 5.0, top_k=1), Sampler(3, 5.0, top_p=0.0),
                   Sampler(3, 5.0, top_p=1e-9), Sampler(3, 0.0, top_k=7, top_p=0.5)):
        assert all(torch.equal(choose(logits), logits.argmax(-1)) for _ in range(20))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(bad, temperature):
    logits = torch.zeros(2, 5)
    logits[1, 3] = bad
    with pytest.raises(FloatingPointError, match="not finite"):
        Sampler(2, temperature)(logits)


@pytest.mark.parametrize("settings", [dict(), dict(temperature=0.5), dict(temperature=2.0, top_k=5),
                                      dict(top_p=0.7), dict(top_k=6, top_p=0.9)], ids=str)
def test_draws_follow_the_softmax(settings):
    """Chi-square: 4000 draws against the probabilities of the filtered logits."""
    logits = torch.randn(1, 8, generator=torch.Generator().manual_seed(3)) * 1.5
    choose = Sampler(4000, **settings, seed=10_000)
    counts = torch.bincount(choose(logits.expand(4000, 8)), minlength=8).double()
    p = filter_logits(logits, settings.get("temperature", 1.0), settings.get("top_k"),
                      settings.get("top_p", 1.0)).double().softmax(-1)[0]
    assert (counts[p == 0] == 0).all()
    expected = 4000 * p[p > 0]
    chi_square = ((counts[p > 0] - expected) ** 2 / expected).sum().item()
    assert chi_square < 26  # 7 degrees of freedom: 1 in 2000, and the seed is fixed


def test_draws_of_one_row_follow_the_softmax_over_time():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    choose = Sampler(1, seed=4)
    counts = torch.bincount(torch.cat([choose(logits) for _ in range(3000)]), minlength=3)
    assert torch.allclose(counts / 3000, torch.tensor([0.5, 0.3, 0.2]), atol=0.03)


def test_a_row_draws_from_its_own_seed_whatever_the_batch():
    logits = torch.randn(9, 3, 40, generator=torch.Generator().manual_seed(2))  # (steps, B, V)
    together = Sampler(3, seed=70)
    ids = torch.stack([together(step) for step in logits])  # (steps, B)
    for row in range(3):
        alone = Sampler(1, seed=70 + row)
        assert [alone(step[row : row + 1]).item() for step in logits] == ids[:, row].tolist()
    again = Sampler(3, seed=70)
    assert torch.equal(ids, torch.stack([again(step) for step in logits]))
    assert not torch.equal(ids, torch.stack([Sampler(3, seed=71)(step) for step in logits]))


def test_rows_and_seeds_must_be_equally_many():
    """Else one row's noise would be broadcast over all."""
    for rows in (1, 2, 4):
        with pytest.raises(ValueError):
            Sampler(rows)(torch.zeros(3, 9))


def test_sampling_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    Sampler(2, seed=5)(torch.zeros(2, 9))
    assert torch.equal(before, torch.get_rng_state())


def test_no_id_beyond_the_vocabulary_and_no_filtered_one_is_drawn(tiny):
    model = tiny().eval()
    choose = Sampler(5, temperature=100.0, top_k=3, seed=1)
    for ids in model.generate(torch.tensor([[1, 2, 3]]), 30, choose, num_samples=5):
        assert ids.shape == (5,) and ids.min() >= 0 and ids.max() < 11


def test_start_ids():
    assert start_ids(ByteTokenizer()) == [256]
    assert start_ids(CharTokenizer("ab\n")) == [0]
    assert start_ids(CharTokenizer("\tab\n")) == [1]
    assert start_ids(CharTokenizer("ab")) == [0]  # no newline: any token will do


# ------------------------------------------------------------------------------------- the stream


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted(i % (len(data) + 1) for i in at), len(data)]
    return [data[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def shown(parts: list[bytes], stop: str | None = None) -> tuple[list[str], TextStream]:
    stream = TextStream(stop)
    return [stream.feed(p, final=i == len(parts) - 1) for i, p in enumerate(parts)], stream


BYTES = st.binary(max_size=16) | st.text("aé€🎉\u200d\ud7ff", max_size=8).map(str.encode)
CUTS = st.lists(st.integers(0, 40), max_size=12)


@MANY
@given(BYTES, CUTS)
def test_the_pieces_are_the_decoded_whole(data, cuts):
    pieces, stream = shown(cut(data, cuts))
    assert "".join(pieces) == data.decode("utf-8", "replace")
    assert not stream.stopped


@pytest.mark.parametrize("text", ["naïve €5 🎉👩\u200d👧", "日本語", "\ud7ff\ue000\U0010ffff", ""])
def test_a_character_waits_until_it_is_whole(text):
    pieces, _ = shown([bytes([b]) for b in text.encode()] + [b""])
    assert [p for p in pieces if p] == list(text)  # each at once and none twice


@pytest.mark.parametrize("data", [b"\xf0\x9f\x8e", b"a\xff", b"\xe2\x82", b"\xc3", b"\x80\x80"])
def test_half_a_character_at_the_end_is_replaced(data):
    stream = TextStream()
    held = stream.feed(data)
    assert held + stream.feed(b"", final=True) == data.decode("utf-8", "replace")


@MANY
@given(st.text("ab\né", max_size=14), st.text("ab\né", min_size=1, max_size=4), CUTS)
def test_text_is_cut_before_the_stop_wherever_it_was_split(text, stop, cuts):
    data = text.encode()
    pieces, stream = shown(cut(data, cuts), stop)
    assert "".join(pieces) == text.partition(stop)[0]
    assert stream.stopped == (stop in text)


@MANY
@given(BYTES, st.text("a€\ufffd", min_size=1, max_size=3), CUTS)
def test_a_stop_among_broken_bytes(data, stop, cuts):
    pieces, stream = shown(cut(data, cuts), stop)
    assert "".join(pieces) == data.decode("utf-8", "replace").partition(stop)[0]


@MANY
@given(st.lists(st.text("ab", max_size=3), max_size=8), st.text("ab", min_size=1, max_size=4))
def test_nothing_is_held_back_without_need(pieces, stop):
    """What is shown is all but the longest end that could still become the stop."""
    stream, so_far, seen = TextStream(stop), "", ""
    for piece in pieces:
        so_far, seen = so_far + piece, seen + stream.feed(piece.encode())
        if stop in so_far:
            assert seen == so_far.partition(stop)[0]
            break
        could = [n for n in range(len(stop)) if so_far.endswith(stop[:n])]
        assert seen == so_far[: len(so_far) - max(could)]


def test_after_the_stop_nothing_more_is_shown():
    stream = TextStream("<|end|>")
    assert [stream.feed(p) for p in (b"hi <", b"|e", b"nd|> more", b"x")] == ["hi ", "", "", ""]
    assert stream.stopped and stream.feed(b"y", final=True) == ""


def test_a_stop_that_never_comes_is_shown_in_the_end():
    stream = TextStream("<|end|>")
    assert stream.feed(b"hi <|en") == "hi " and stream.feed(b"", final=True) == "<|en"
    assert not stream.stopped

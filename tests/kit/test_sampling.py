"""kit/sampling.py: filters, draws that follow the softmax, text that appears at once and whole."""

import math

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from data.tokenizer import ByteTokenizer, CharTokenizer
from kit.sampling import Sampler
from kit.topk import BLOCK, likeliest
from kit.writing import window
from kit.writing.text import TextStream, start_ids

MANY = settings(max_examples=150, deadline=None, derandomize=True,
                suppress_health_check=[HealthCheck.too_slow])
LOGITS = st.lists(st.floats(-50, 50, width=32) | st.sampled_from([0.0, -0.0, 1.0, -math.inf]),
                  min_size=1, max_size=12).filter(lambda row: max(row) > -math.inf)
TOP_P = st.sampled_from([0.0, 1e-9, 0.1, 0.3, 0.5, 0.9, 0.999, 1.0]) | st.floats(0, 1)
SETTINGS = [dict(), dict(temperature=0.5), dict(temperature=2.0, top_k=5), dict(top_p=0.7),
            dict(min_p=0.2), dict(top_k=6, top_p=0.9), dict(top_k=7, top_p=0.95, min_p=0.1)]

FEW = [dict(), dict(temperature=0), dict(top_k=2), dict(top_p=0.5)]


def random_logits(*shape: int, seed: int = 0, scale: float = 1.5) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def probabilities(logits: torch.Tensor, **settings) -> torch.Tensor:
    """What a sampler with these settings draws from, (B, V)."""
    weights, ids = Sampler(range(len(logits)), **settings).weigh(logits)
    p = torch.zeros(logits.shape, dtype=torch.float64).scatter(1, ids, weights)
    return p / p.sum(-1, keepdim=True)


def by_hand(row: list[float], temperature: float = 1.0, top_k: int | None = None,
            top_p: float = 1.0, min_p: float = 0.0) -> list[float]:
    """The same as plain loops."""
    order = sorted(range(len(row)), key=lambda id: (-row[id], id))[: top_k or None]
    weights = {id: math.exp((row[id] - row[order[0]]) / temperature) for id in order}
    total, before, kept = sum(weights.values()), 0.0, {}
    for id in order:
        if (top_p == 1 or before < top_p * total or not kept) and weights[id] >= min_p:
            kept[id] = weights[id]
        before += weights[id]
    return [kept.get(id, 0.0) / sum(kept.values()) for id in range(len(row))]


# ------------------------------------------------------------------------------------ likeliest


@MANY
@given(st.integers(1, 8), st.integers(1, 24 * BLOCK), st.integers(1, 4), st.integers(0, 99),
       st.sampled_from([0, 1, 2, 8, 1000]))
def test_likeliest_is_a_stable_sort(k, V, B, seed, levels):
    """Few levels make many ties: inside a block, between blocks and on the border of the k."""
    logits = (random_logits(B, V, seed=seed) * levels).round()  # -0.0 too
    logits[random_logits(B, V, seed=seed + 100) > 2.5] = -math.inf
    expected = logits.sort(dim=-1, descending=True, stable=True).indices
    for n in {0, min(k, V), V}:
        assert torch.equal(likeliest(logits, n), expected[:, :n])


@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, 40 * BLOCK - 1, 40 * BLOCK + 2])
def test_likeliest_finds_an_id_wherever_it_is(place):
    logits = torch.full((2, 40 * BLOCK + 3), -math.inf)
    logits[1, place] = -3e38
    assert likeliest(logits, 3).tolist() == [[0, 1, 2], [place, *[i for i in range(3)
                                                                 if i != place][:2]]]


def test_largest_and_smallest_floats_are_in_order():
    values = [3.4e38, 1.0, 1e-45, 0.0, -0.0, 0.0, -1e-45, -1.0, -3.4e38, -math.inf]
    assert likeliest(torch.tensor([values]), 10).tolist() == [list(range(10))]
    assert likeliest(torch.tensor([values[::-1]]), 4).tolist() == [[9, 8, 7, 4]]


# ---------------------------------------------------------------------------------------- filters


@MANY
@given(LOGITS, st.sampled_from([0.01, 0.5, 1.0, 3.0]))
def test_without_filters_it_is_the_softmax_at_a_temperature(row, temperature):
    expected = (torch.tensor([row]).double() / temperature).softmax(-1)
    for top_k in (None, 0, len(row), len(row) + 5):
        p = probabilities(torch.tensor([row]), temperature=temperature, top_k=top_k)
        assert torch.allclose(p, expected, rtol=1e-9, atol=0)


@MANY
@given(LOGITS, st.integers(1, 12))
def test_top_k_keeps_exactly_the_k_likeliest(row, k):
    row = [max(x, -600.0) for x in row]  # what weighs 0 cannot be counted
    logits = torch.tensor([row, row[::-1]])
    for values, p in zip(logits.tolist(), probabilities(logits, top_k=k), strict=True):
        kept = p.nonzero()[:, 0].tolist()  # ties too: the lower id stays
        assert kept == sorted(sorted(range(len(row)), key=lambda id: (-values[id], id))[:k])


@MANY
@given(LOGITS, TOP_P.filter(lambda p: p < 1))
def test_top_p_keeps_the_fewest_that_reach_p(row, top_p):
    logits = torch.tensor([row])
    kept, p = probabilities(logits, top_p=top_p)[0] > 0, logits[0].double().softmax(-1)
    share = p[kept].sum().item()
    assert kept.any()
    assert share >= top_p - 1e-9  # reached
    assert share - p[kept].min().item() < top_p + 1e-9 or kept.sum() == 1  # not before
    assert kept.all() or p[kept].min() >= p[~kept].max()


@MANY
@given(LOGITS, st.floats(0, 1), st.sampled_from([0.3, 1.0, 2.0]))
def test_min_p_keeps_what_has_that_share_of_the_likeliest(row, min_p, temperature):
    logits = torch.tensor([row])
    kept = probabilities(logits, min_p=min_p, temperature=temperature)[0] > 0
    p = (logits[0].double() / temperature).softmax(-1)
    assert kept[p.argmax()]
    assert (p[kept] >= min_p * p.max() * (1 - 1e-9)).all()
    assert (p[~kept] <= min_p * p.max() * (1 + 1e-9)).all()


@MANY
@given(LOGITS, st.sampled_from([0.1, 0.7, 1.0, 2.5]), st.none() | st.integers(1, 14), TOP_P,
       st.sampled_from([0.0, 0.01, 0.2, 1.0]))
def test_all_filters_together_are_those_of_plain_loops(row, temperature, top_k, top_p, min_p):
    filters = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    row = torch.tensor(row).tolist()
    likelier = torch.tensor(sorted(by_hand(row, temperature, top_k), reverse=True)).cumsum(0)
    assume(top_p == 1 or (likelier - top_p).abs().min() > 1e-6)  # where rounding does not decide
    expected = torch.tensor([by_hand(row, **filters)], dtype=torch.float64)
    p = probabilities(torch.tensor([row]), **filters)
    assert torch.equal(p > 0, expected > 0)
    assert torch.allclose(p, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("V", [100, 1000, 6000])
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 4.0])
def test_a_nucleus_of_any_size_in_any_company(V, scale):
    """Whether few or all are sorted, the rows come out as alone."""
    logits = random_logits(3, V, scale=scale)
    logits[1] *= 3
    for top_p in (0.1, 0.5, 0.99):
        together = probabilities(logits, top_p=top_p)
        for row, p in zip(logits, together, strict=True):
            assert torch.allclose(p, torch.tensor(by_hand(row.tolist(), top_p=top_p)).double(),
                                  rtol=1e-6, atol=1e-12)
            assert torch.equal(p, probabilities(row[None], top_p=top_p)[0])


def test_filters_by_numbers():
    logits = torch.tensor([[0.4, 0.1, 0.3, 0.2]]).log()

    def kept(**filters) -> list[int]:
        return probabilities(logits, **filters)[0].nonzero()[:, 0].tolist()

    assert kept(top_p=0.39) == [0] and kept(top_p=0.69) == [0, 2] == kept(top_k=2)
    assert kept(top_p=0.71) == [0, 2, 3] and kept(top_p=1.0) == [0, 1, 2, 3] == kept()
    assert kept(top_k=2, top_p=0.5) == [0]  # of 4/7 and 3/7 the first is enough
    assert kept(min_p=0.6) == [0, 2] and kept(min_p=1.0) == [0] == kept(min_p=1.5)
    assert kept(min_p=0.6, temperature=2) == [0, 2, 3]  # sqrt(0.2 / 0.4) > 0.6
    assert kept(top_k=3, min_p=0.1) == [0, 2, 3]
    logits = torch.zeros(1, 10)
    assert kept(top_k=4) == [0, 1, 2, 3] and kept(top_p=0.25) == [0, 1, 2]
    assert kept(top_p=0.3) == [0, 1, 2] and kept(min_p=1.0) == list(range(10))


@pytest.mark.parametrize("filters", [
    dict(top_k=20), dict(top_p=0.8), dict(min_p=0.05), dict(temperature=0.7, top_k=20, top_p=0.9),
    dict(temperature=1.6, top_p=0.97, min_p=0.02), dict(temperature=3.0, top_k=90, min_p=0.3)],
    ids=str)
def test_filters_are_those_of_transformers(filters):
    theirs = pytest.importorskip("transformers.generation.logits_process")
    logits = random_logits(20, 300, seed=5, scale=2.0)
    warped = logits.double()
    for name, warper in (("temperature", theirs.TemperatureLogitsWarper),
                         ("top_k", theirs.TopKLogitsWarper), ("top_p", theirs.TopPLogitsWarper),
                         ("min_p", theirs.MinPLogitsWarper)):
        if name in filters:
            warped = warper(filters[name])(None, warped)
    p = probabilities(logits, **filters)
    assert torch.equal(p > 0, warped > -math.inf)
    assert torch.allclose(p, warped.softmax(-1), rtol=1e-9, atol=0)


# ------------------------------------------------------------------------- the repetition penalty


@pytest.mark.parametrize("penalty", [0.5, 1.3, 5.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty):
    """Over ten tokens, prompts of different lengths, ids that come twice."""
    theirs = pytest.importorskip("transformers.generation.logits_process")
    processor = theirs.RepetitionPenaltyLogitsProcessor(penalty)
    texts = [[3, 3, 5], [7], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]
    choose = Sampler([1, 2, 3], repetition_penalty=penalty, prompts=[list(t) for t in texts])
    for step in range(10):
        logits = random_logits(3, 12, seed=step)
        expected = torch.cat([processor(torch.tensor([t]), row[None].clone())
                              for t, row in zip(texts, logits, strict=True)])
        before = logits.clone()
        assert torch.allclose(choose.penalised(logits), expected)
        for text, id in zip(texts, choose(logits).tolist(), strict=True):
            text.append(id)
        assert torch.equal(logits, before)  # not changed in place


def test_greedy_with_a_penalty_does_not_repeat():
    logits = torch.tensor([[5.0, 4.0, 3.0, -1.0]])
    choose = Sampler([0], temperature=0, repetition_penalty=2.0, prompts=[[3]])
    assert [choose(logits).item() for _ in range(5)] == [0, 1, 2, 0, 0]  # 2.5, 2.0, 1.5, -2.0
    assert all(Sampler([0], temperature=0)(logits) == 0 for _ in range(5))


def test_a_penalty_keeps_finite_what_is_finite():
    huge = torch.tensor([[-3e38, -math.inf, -math.inf], [3e38, 1.0, -math.inf]])
    for penalty in (0.01, 10.0):
        choose = Sampler([1, 2], repetition_penalty=penalty, prompts=[[0, 1, 2]] * 2)
        assert choose.penalised(huge).isinf().tolist() == [[False, True, True],
                                                           [False, False, True]]
        assert choose(huge)[0] == 0


@pytest.mark.parametrize("prompts", [[], [[1]], [[1], []], [[1], [2], [3]]])
def test_a_penalty_needs_what_was_read(prompts):
    with pytest.raises(ValueError, match="2 prompts, none empty"):
        Sampler([1, 2], repetition_penalty=1.1, prompts=prompts)
    Sampler([1, 2], prompts=prompts)


# -------------------------------------------------------------------------------------- sampler


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-38, 1e-45, 1e-46, 5e-324])
def test_cold_is_greedy(temperature):
    logits = torch.tensor([[1.0, 3.0, 2.0], [-1e38, 1e37, 1e38], [0.0, 0.0, 1e-6],
                           [-2e-3, -1e-3, -5.0], [-3.4e38, 3.4e38, -math.inf]])
    for top_k, top_p in ((None, 1.0), (2, 0.9), (3, 0.1)):
        choose = Sampler(range(5), temperature=temperature, top_k=top_k, top_p=top_p)
        for _ in range(5):
            assert choose(logits).tolist() == [1, 2, 2, 1, 1]


def test_greedy_takes_the_lower_id_where_tokens_tie():
    for V in (9, 5000):
        logits = torch.zeros(20, V)
        logits[10:, 3:] = 1
        assert Sampler(range(20), temperature=0)(logits).tolist() == [0] * 10 + [3] * 10


@pytest.mark.parametrize("temperature", [1e6, 1e38, 1e39, 1.7e308])
def test_hot_is_uniform(temperature):
    choose = Sampler(range(600), temperature=temperature, top_k=3)
    logits = torch.tensor([[-9.0, 9.0, 8.0, 7.0]])
    counts = torch.bincount(choose(logits.expand(600, 4)), minlength=4).tolist()
    assert counts[0] == 0 and all(140 < n < 260 for n in counts[1:])


def test_one_token_is_all_that_top_k_1_or_a_tiny_top_p_leaves():
    logits = random_logits(3, 50, seed=1)
    for kw in (dict(temperature=5.0, top_k=1), dict(temperature=5.0, top_p=0.0),
               dict(temperature=5.0, top_p=1e-9), dict(temperature=5.0, min_p=1.0),
               dict(temperature=0, top_k=7, top_p=0.5)):
        choose = Sampler(range(3), **kw)
        assert all(torch.equal(choose(logits), logits.argmax(-1)) for _ in range(20))


@pytest.mark.parametrize("kw", FEW, ids=str)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused_wherever_they_are(bad, kw):
    for V in (5, 3 * BLOCK + 1):
        for row, place in [(r, c) for r in range(2) for c in {*range(5), V // 2, V - 1}]:
            logits = random_logits(2, V)
            logits[row, 1] = -math.inf
            logits[row, place] = bad
            with pytest.raises(FloatingPointError, match="not finite: its weights are damaged"):
                Sampler([1, 2], **kw)(logits)


@pytest.mark.parametrize("kw", FEW, ids=str)
def test_minus_infinity_is_never_drawn_but_a_row_of_nothing_else_is_refused(kw):
    logits = torch.full((2, 9), -math.inf)
    logits[:, 4] = -7.0
    logits[1, 6:8] = -8.0
    choose = Sampler([1, 2], **kw)
    ids = torch.stack([choose(logits) for _ in range(40)])
    assert set(ids[:, 0].tolist()) == {4} and set(ids[:, 1].tolist()) <= {4, 6, 7}
    logits[0, 4] = -math.inf
    with pytest.raises(FloatingPointError, match="not finite"):
        choose(logits)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_draws_follow_the_softmax(settings):
    """Chi-square: 4000 draws against the probabilities of the filtered logits."""
    logits = random_logits(1, 8, seed=3)
    choose = Sampler(range(10_000, 14_000), **settings)
    counts = torch.bincount(choose(logits.expand(4000, 8)), minlength=8).double()
    p = torch.tensor(by_hand(logits[0].tolist(), **settings), dtype=torch.float64)
    assert (counts[p == 0] == 0).all()
    expected = 4000 * p[p > 0]
    chi_square = ((counts[p > 0] - expected) ** 2 / expected).sum().item()
    assert chi_square < 26  # 7 degrees of freedom: 1 in 2000, and the seed is fixed


def test_draws_of_one_row_follow_the_softmax_over_time():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    choose = Sampler([4])
    counts = torch.bincount(torch.cat([choose(logits) for _ in range(3000)]), minlength=3)
    assert torch.allclose(counts / 3000, torch.tensor([0.5, 0.3, 0.2]), atol=0.03)


class Fixed:
    """Instead of a random number."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(torch, "rand", lambda n, generator, **kw: torch.tensor([self.u], **kw))


@pytest.mark.parametrize("kw", [dict(), dict(top_k=4), dict(top_p=0.6), dict(min_p=0.9)], ids=str)
def test_what_cannot_come_is_not_drawn_by_the_lowest_and_highest_number(kw, monkeypatch):
    """The first and last in order are impossible; u is 0 or the largest number below 1."""
    number = Fixed(monkeypatch)
    logits = torch.tensor([[-math.inf, 0.0, 0.1, -math.inf, -1000.0, -math.inf]])
    for number.u in (0.0, 0.5, 1 - 2**-53):
        assert Sampler([1], **kw)(logits).item() in (1, 2)


def test_a_draw_is_the_first_whose_cumulative_mass_exceeds_it(monkeypatch):
    number = Fixed(monkeypatch)
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log()
    for u, by_id, by_rank in ((0.1, 0, 1), (0.3, 1, 1), (0.6, 1, 2), (0.75, 2, 2), (0.9, 2, 0)):
        number.u = u
        assert Sampler([1])(logits).item() == by_id
        assert Sampler([1], top_p=0.999)(logits).item() == by_rank


@pytest.mark.parametrize("settings", [*SETTINGS, dict(repetition_penalty=1.5)], ids=str)
@pytest.mark.parametrize("V", [40, 50 * BLOCK + 7])
def test_a_row_draws_from_its_own_seed_whatever_the_batch(settings, V):
    steps = random_logits(9, 4, V, seed=2).bfloat16().float()  # (steps, B, V), with ties
    seeds, prompts = [70, 3, 2**40, 70], [[1], [2, 3], [9, 9, 9], [1, 2]]

    def texts(rows: list[int]) -> list[list[int]]:
        choose = Sampler([seeds[r] for r in rows], prompts=[prompts[r] for r in rows], **settings)
        return torch.stack([choose(step[rows]) for step in steps], dim=1).tolist()

    together = texts([0, 1, 2, 3])
    assert together == texts([0, 1, 2, 3]) and len({tuple(t) for t in together}) == 4
    assert [texts([row])[0] for row in range(4)] == together
    assert texts([2, 0]) == [together[2], together[0]]


@pytest.mark.parametrize("settings", [dict(), dict(top_k=5), dict(repetition_penalty=3.0)], ids=str)
def test_rows_that_leave_change_nothing_for_the_others(settings):
    steps, seeds, prompts = random_logits(9, 4, 40), [5, 6, 7, 8], [[1], [2, 3], [9, 9, 9], [4]]
    all_rows = Sampler(seeds, prompts=prompts, **settings)
    together = torch.stack([all_rows(step) for step in steps])  # (steps, B)
    choose, rows = Sampler(seeds, prompts=prompts, **settings), torch.arange(4)
    for i, step in enumerate(steps):
        leave = {0: [3, 0, 1], 2: [0, 2], 5: [1]}.get(i)  # indices among those still there
        if leave:
            choose.select(torch.tensor(leave))
            rows = rows[leave]
        assert torch.equal(choose(step[rows]), together[i, rows])


def test_the_thread_count_and_the_memory_layout_do_not_matter():
    logits = random_logits(4, 70_001)
    for kw in (dict(), dict(top_k=50), dict(top_p=0.5), dict(min_p=0.01)):
        one = Sampler(range(4), **kw)(logits)
        torch.set_num_threads(2)
        two = Sampler(range(4), **kw)(logits)
        torch.set_num_threads(1)
        assert torch.equal(one, two)
        assert torch.equal(one, Sampler(range(4), **kw)(logits.t().contiguous().t()))


def test_rows_and_seeds_must_be_equally_many():
    """Else one row's number would be used for all."""
    for rows in (1, 2, 4):
        with pytest.raises(ValueError, match=f"3 rows of logits for {rows} seeds"):
            Sampler(range(rows))(torch.zeros(3, 9))


def test_sampling_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    for kw in SETTINGS:
        Sampler([5, 6], **kw)(torch.zeros(2, 9))
    assert torch.equal(before, torch.get_rng_state())


def test_no_id_beyond_the_vocabulary_and_no_filtered_one_is_drawn(tiny):
    model = tiny().eval()
    choose = Sampler(range(5), temperature=100.0, top_k=3)
    for ids in window.steps(model, torch.tensor([[1, 2, 3]]), 30, choose, num_samples=5):
        assert ids.shape == (5,) and ids.min() >= 0 and ids.max() < 11


def test_it_goes_on_outside_of_inference_mode():
    """The interactive session selects and reads where it likes."""
    choose = Sampler([1, 2], repetition_penalty=1.5, prompts=[[1], [2]], logprobs=1)
    with torch.inference_mode():
        choose(torch.zeros(2, 9))
    choose.select(torch.tensor([1]))
    assert choose(torch.zeros(1, 9)).shape == (1,)


# ------------------------------------------------------------------------------------- logprobs


@pytest.mark.parametrize("settings", [*FEW, dict(temperature=3.0, top_k=4),
                                      dict(repetition_penalty=4.0, prompts=[[1, 2]] * 3)], ids=str)
@pytest.mark.parametrize("n", [0, 1, 5, 99])
def test_logprobs_are_the_log_softmax_of_what_the_model_said(settings, n):
    logits = random_logits(3, 50, seed=8).round()  # with ties
    logits[0, 7] = -math.inf
    choose = Sampler([1, 2, 3], logprobs=n, **settings)
    for _ in range(4):
        ids = choose(logits).tolist()
        assert len(choose.chosen) == 3
        for row, id, choice in zip(logits.double().log_softmax(-1), ids, choose.chosen,
                                   strict=True):
            order = row.sort(descending=True, stable=True).indices[:n].tolist()
            assert choice.logprob == pytest.approx(row[id].item(), abs=1e-5)
            assert [id for id, _ in choice.top] == order
            assert [p for _, p in choice.top] == pytest.approx(row[order].tolist(), abs=1e-5)


def test_logprobs_do_not_change_what_is_drawn_and_are_off_by_default():
    steps = random_logits(20, 2, 30)
    plain, noting = Sampler([1, 2]), Sampler([1, 2], logprobs=2)
    for step in steps:
        assert torch.equal(plain(step), noting(step))
    assert plain.chosen == []
    last = noting.chosen
    noting.select(torch.tensor([1]))
    assert noting.chosen is last  # of the last call, not of the next
    noting(steps[0, :1])
    assert len(noting.chosen) == 1


def test_start_ids():
    assert start_ids(ByteTokenizer()) == [256]
    assert start_ids(CharTokenizer("ab\n")) == [0]
    assert start_ids(CharTokenizer("\tab\n")) == [1]
    assert start_ids(CharTokenizer("ab")) == [0]  # no newline: any token will do


# ------------------------------------------------------------------------------------- the stream


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted(i % (len(data) + 1) for i in at), len(data)]
    return [data[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def shown(parts: list[bytes], stop=None) -> tuple[list[str], TextStream]:
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


def first(text: str, stops: list[str]) -> str:
    """The text before the stop that is complete first, the longest of these; all without one."""
    for end in range(len(text) + 1):
        if found := [s for s in stops if text[:end].endswith(s)]:
            return text[: end - len(max(found, key=len))]
    return text


STOPS = st.lists(st.text("ab\né", min_size=1, max_size=4), max_size=4)


@MANY
@given(st.text("ab\né", max_size=14), STOPS, CUTS)
def test_text_is_cut_before_the_first_of_several_stops_wherever_it_was_split(text, stops, cuts):
    expected = first(text, stops)
    for parts in (cut(text.encode(), cuts), [text.encode()], [c.encode() for c in text] + [b""]):
        pieces, stream = shown(parts, stops)
        assert "".join(pieces) == expected
        assert stream.stopped == any(s in text for s in stops)


def test_of_several_stops_the_first_in_the_text_counts():
    for stops in (["<|end|>", "\n\n", "User:"], ("User:", "\n\n", "<|end|>")):
        for text, rest in (("a\n\nUser: b", "a"), ("aUser:\n\n", "a"), ("a\nb<|end|>User:", "a\nb"),
                           ("User:", ""), ("a <|end| User", "a <|end| User")):
            for i in range(len(text) + 1):
                assert "".join(shown([text[:i].encode(), text[i:].encode()], stops)[0]) == rest


@MANY
@given(st.lists(st.text("ab", max_size=3), max_size=8),
       st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_with_several_stops_nothing_is_held_back_without_need(pieces, stops):
    stream, so_far, seen = TextStream(stops), "", ""
    for piece in pieces:
        so_far, seen = so_far + piece, seen + stream.feed(piece.encode())
        if stream.stopped:
            assert seen == first(so_far, stops)
            break
        could = max(n for s in stops for n in range(len(s)) if so_far.endswith(s[:n]))
        assert seen == so_far[: len(so_far) - could]


@pytest.mark.parametrize("nothing", [None, "", [], (), [""]])
def test_without_a_stop_nothing_is_held_back(nothing):
    stream = TextStream(nothing)
    assert stream.feed(b"ab<|") == "ab<|" and not stream.stopped


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

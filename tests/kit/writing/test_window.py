"""kit/writing/window.py: rows of text that go on past the context, with and without a cache."""

import pytest
import torch

from kit.writing.window import Window, read, steps
from model import GPT, GPTConfig

LOGN = ["off", "fixed", "clipped", "learned"]
T = 16


def make(attn_logn="off", **changes) -> GPT:
    torch.manual_seed(0)
    values = dict(vocab_size=61, block_size=T, n_layer=2, n_head=2, n_embd=32, attn_logn=attn_logn)
    if attn_logn == "clipped":
        values["logn_base"] = 4  # so that it does something inside the context
    return GPT(GPTConfig(**values | changes)).eval()


def tokens(rows: int, n: int = T, seed: int = 1) -> torch.Tensor:
    return torch.randint(61, (rows, n), generator=torch.Generator().manual_seed(seed))


def greedy(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def listed(ids) -> list[list[int]]:
    """Rows of ids from what `steps` yields."""
    return [list(row) for row in zip(*(step.tolist() for step in ids), strict=True)]


@pytest.mark.parametrize("logn", LOGN)
@pytest.mark.parametrize("keep", [None, 1, 3, T - 1])
def test_with_and_without_cache_far_past_the_window(logn, keep):
    model, idx = make(logn), tokens(2, 5)
    a = listed(steps(model, idx, 5 * T, greedy, context_keep=keep))
    b = listed(steps(model, idx, 5 * T, greedy, context_keep=keep, use_cache=False))
    assert a == b == [by_the_rule(model, row.tolist(), 5 * T, keep) for row in idx]


def by_the_rule(model, seen: list[int], n: int, keep: int | None) -> list[int]:
    """Greedy text without cache or Window: a full window is cut to its newest `keep` tokens."""
    new = []
    for _ in range(n):
        new.append(int(model(torch.tensor([seen]))[0, -1].argmax()))
        seen = [*seen, new[-1]]
        if len(seen) > T:
            seen = seen[-(keep or T // 2) :]
    return new


def test_a_row_that_ends_leaves_and_the_others_go_on_as_alone():
    model, idx, lengths = make(), tokens(4, 9), torch.tensor([1, 5, 9, 4])
    alone = [listed(steps(model, idx[i : i + 1, :n], 3 * T, greedy))[0]
             for i, n in enumerate(lengths)]
    ends, rows, got = [2 * T, 3, 3 * T, 3], [0, 1, 2, 3], [[], [], [], []]
    writing = steps(model, idx, 3 * T, greedy, lengths=lengths)
    ids = next(writing)
    while rows:
        for row, id in zip(rows, ids.tolist(), strict=True):
            got[row].append(id)
        left = [i for i, row in enumerate(rows) if len(got[row]) < ends[row]]
        rows = [rows[i] for i in left]
        try:
            ids = writing.send(torch.tensor(left, dtype=torch.int64))
        except StopIteration:
            break
    assert not rows and got == [row[:n] for row, n in zip(alone, ends, strict=True)]


@pytest.mark.parametrize("pieces", [[3, 4], [1, 1, 9, 2], [T], [2, T - 1, 5], [5, 3 * T, 1]])
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_window_reads_on_in_pieces(pieces, use_cache):
    """What is too much for the window goes by the rule: the newest context_keep, or what came."""
    model, ids, keep = make(), tokens(1, sum(pieces)), T // 2
    first, *others = ids.split(pieces, dim=1)
    window = Window(model, first, use_cache=use_cache)
    seen = first[:, -T:]
    for new in others:
        window.append(new)
        fits = seen.size(1) + new.size(1) <= T
        seen = torch.cat([seen, new], 1)[:, -(T if fits else max(keep, min(new.size(1), T))) :]
        assert torch.allclose(model.logits(window.x), model(seen)[:, -1], atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, T])
def test_a_long_prompt_is_read_in_chunks(chunk, monkeypatch):
    monkeypatch.setattr("kit.writing.window.CHUNK", chunk)
    model, idx, lengths = make(), tokens(3, T), torch.tensor([1, 5, T])
    assert torch.allclose(read(model, idx, model.new_cache(3)), model.hidden(idx), atol=1e-5)
    x = Window(model, idx, lengths).x
    for i, n in enumerate(lengths):
        assert torch.allclose(x[i], model.hidden(idx[i : i + 1, :n])[0, -1], atol=1e-5)


def test_ragged_prompts_give_each_row_what_it_gets_alone():
    model, idx, lengths = make(), tokens(3, 9), torch.tensor([1, 5, 9])
    together = listed(steps(model, idx, 3 * T, greedy, lengths=lengths))
    alone = [listed(steps(model, idx[i : i + 1, :n], 3 * T, greedy))[0]
             for i, n in enumerate(lengths)]
    assert together == alone


def test_a_long_prompt_keeps_its_newest_tokens():
    model, idx = make(), tokens(1, 3 * T)
    assert listed(steps(model, idx, 4, greedy)) == listed(
        steps(model, idx[:, -T:], 4, greedy))


def test_samples_share_one_prefill(monkeypatch):
    model, idx, fed = make(), tokens(2, 6), []
    real = GPT.hidden
    monkeypatch.setattr(GPT, "hidden", lambda self, x, cache=None:
                        (fed.append(tuple(x.shape)), real(self, x, cache))[1])
    rows = listed(steps(model, idx, 3, greedy, num_samples=2))
    assert fed == [(1, 6), (1, 6), (4, 1), (4, 1)]  # a CPU reads each by itself
    assert rows[0] == rows[1] and rows[2] == rows[3]


def test_full_windows_are_cut_to_the_newest_and_read_again(monkeypatch):
    """The rule itself: with keep=3, the token after a full window sees 2 old tokens."""
    model, seen = make(), []
    real = GPT.hidden
    monkeypatch.setattr(GPT, "hidden", lambda self, x, cache=None:
                        (seen.append(x[0].tolist()), real(self, x, cache))[1])
    idx = tokens(1, T)
    new = listed(steps(model, idx, 3, greedy, context_keep=3, use_cache=False))[0]
    assert seen == [idx[0].tolist(), idx[0, -2:].tolist() + new[:1],
                    idx[0, -2:].tolist() + new[:2]]


@pytest.mark.parametrize("keep", [0, T, -1])
def test_context_keep_out_of_range(keep):
    with pytest.raises(ValueError, match="context_keep"):
        next(steps(make(), tokens(1), 1, greedy, context_keep=keep))


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        next(steps(make(), tokens(1, 0), 1, greedy))
    for lengths in ([0, 5], [9, 5]):
        with pytest.raises(ValueError, match="in 5 columns"):
            next(steps(make(), tokens(2, 5), 1, greedy, lengths=torch.tensor(lengths)))


def test_a_context_of_one_token_still_writes():
    model = make(block_size=1)
    assert listed(steps(model, tokens(1, 1), 5, greedy)) == listed(
        steps(model, tokens(1, 1), 5, greedy, use_cache=False))

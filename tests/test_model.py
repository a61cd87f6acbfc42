"""The model against its contracts: causality, the cache, the loss, GPT-2's numbers."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.device import flops_per_token
from model import GPT, ChunkedCrossEntropy, GPTConfig, KVCache, Window, attend, dropout

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


def run_in_chunks(model: GPT, idx: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """Logits of idx, fed to a cache in chunks of these lengths."""
    cache, logits, at = model.new_cache(len(idx)), [], 0
    for n in cuts:
        logits.append(model(idx[:, at : at + n], cache=cache))
        at += n
    return torch.cat(logits, 1)


# ------------------------------------------------------------------------------------ numbers


def test_gpt2_has_its_parameter_count():
    with torch.device("meta"):
        model = GPT(GPTConfig(bias=True))
    assert model.num_params() == 124_439_808


def test_untied_head_is_a_matrix_of_its_own():
    tied, untied = make(), make(tie_embeddings=False)
    assert untied.num_params() - tied.num_params() == 61 * 32
    assert tied.lm_head.weight is tied.wte.weight
    assert untied.lm_head.weight is not untied.wte.weight


@pytest.mark.parametrize("bias", [True, False])
def test_bias_is_everywhere_or_nowhere(bias):
    names = [n for n, _ in make(bias=bias).named_parameters()]
    assert any(n.endswith("bias") for n in names) == bias
    assert ("h.0.attn.c_attn.bias" in names) == bias and ("ln_f.bias" in names) == bias


def test_flops_of_gpt2_by_hand():
    """6 x (matrix parameters: 12 L C^2 + V C, norms and biases along) + 12 L C T."""
    with torch.device("meta"):
        model = GPT(GPTConfig())  # no biases
    params = 12 * (12 * 768**2 + 2 * 768) + 768 + 50257 * 768
    assert flops_per_token(model) == 6 * params + 12 * 12 * 768 * 1024


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("width, vocab", [(64, 257), (256, 2048), (768, 5000)])
def test_first_loss_is_that_of_guessing(tie, width, vocab):
    config = GPTConfig(vocab_size=vocab, block_size=32, n_layer=2, n_head=2, n_embd=width,
                       tie_embeddings=tie)
    model, idx = GPT(config), torch.randint(vocab, (4, 33))
    loss, n = model(idx[:, :-1], idx[:, 1:])
    assert n == 128
    assert (loss / n).item() == pytest.approx(math.log(vocab), rel=0.04)


def test_initial_scales():
    model = make(n_layer=8, n_embd=256, vocab_size=500, block_size=300)
    std = {n: p.std().item() for n, p in model.named_parameters() if p.ndim == 2}
    assert std["wte.weight"] == pytest.approx(0.02, rel=0.03)
    assert std["wpe.weight"] == pytest.approx(0.01, rel=0.03)
    assert std["h.3.attn.c_attn.weight"] == pytest.approx(0.02, rel=0.03)
    for name in ("h.3.attn.c_proj.weight", "h.3.mlp.c_proj.weight"):
        assert std[name] == pytest.approx(0.02 / 4, rel=0.03)


def test_init_std_scales_the_blocks_alone():
    """The same draws, larger: so a run with the default is what it always was."""
    weights = []
    for std in (0.02, 0.05):
        torch.manual_seed(0)
        weights.append(dict(GPT(GPTConfig(65, 16, 2, 2, 32), std).named_parameters()))
    for name, p in weights[0].items():
        scale = 2.5 if name.startswith("h.") and p.ndim == 2 else 1
        torch.testing.assert_close(weights[1][name], p * scale)


def test_logits_are_those_of_transformers():
    """The forward pass is GPT-2's: the same weights give the same logits there."""
    transformers = pytest.importorskip("transformers")
    model = make(bias=True, n_embd=48, n_head=3)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=61, n_positions=T, n_embd=48, n_layer=2, n_head=3)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.3)
        for name, p in theirs.transformer.named_parameters():
            ours = model.get_parameter(name)
            conv1d = p.ndim == 2 and not name.startswith("w")  # stored (in, out)
            p.copy_(ours.T if conv1d else ours)
        idx = tokens(3)
        torch.testing.assert_close(model(idx), theirs(idx).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrong", [
    dict(n_embd=30, n_head=4), dict(n_layer=0), dict(dropout=1.0), dict(block_size=-1),
    dict(attn_logn="on"), dict(logn_base=9), dict(attn_logn="fixed", logn_base=1)])
def test_impossible_shapes_are_refused_in_a_line(wrong):
    with pytest.raises(ValueError) as error:
        GPTConfig(**wrong)
    assert "\n" not in str(error.value) and str(next(iter(wrong.values()))) in str(error.value)


# ---------------------------------------------------------------------------------- causality


@pytest.mark.parametrize("logn", LOGN)
@pytest.mark.parametrize("path", ["plain", "cache", "chunks", "tokens"])
@pytest.mark.parametrize("at", [0, 7, 15])
def test_a_token_changes_nothing_before_it(logn, path, at):
    model, idx = make(logn), tokens(2)
    changed = idx.clone()
    changed[:, at] = (changed[:, at] + 1) % 61
    cuts = {"cache": [T], "chunks": [5, 6, 5], "tokens": [1] * T}.get(path)
    run = (lambda x: run_in_chunks(model, x, cuts)) if cuts else model
    with torch.no_grad():
        a, b = run(idx), run(changed)
    assert torch.equal(a[:, :at], b[:, :at])
    assert not torch.equal(a[:, at:], b[:, at:])


@pytest.mark.parametrize("T, S, masked", [(16, 16, False), (5, 16, True), (1, 16, False),
                                          (256, 256, False), (600, 600, False)])
def test_attention_by_products_is_that_of_the_fused_kernel(T, S, masked):
    """The bf16 path of a CPU against fp32: same values within bf16, same gradients."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 8).bfloat16() for n in (T, S, S))
    mask = torch.ones(T, S, dtype=torch.bool).tril(S - T) if masked else None
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        y = attend(*leaves, mask, 0.0)
        assert y.dtype == dtype
        results.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("at", [0, 7, 15])
def test_causality_in_bf16(at):
    model, idx = make(), tokens(2)
    changed = idx.clone()
    changed[:, at] = (changed[:, at] + 1) % 61
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        a, b = model(idx), model(changed)
    assert torch.equal(a[:, :at], b[:, :at]) and not torch.equal(a[:, at:], b[:, at:])


def test_attention_dropout_acts_on_each_path():
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = (torch.randn(1, 2, 16, 8, dtype=dtype) for _ in range(3))
        assert not torch.equal(attend(q, k, v, None, 0.5), attend(q, k, v, None, 0.0))


def test_positions_beyond_the_context_are_refused():
    model = make()
    with pytest.raises(ValueError, match="17.*16"):
        model(tokens(1, 17))
    cache = model.new_cache()
    model(tokens(1, 10), cache=cache)
    with pytest.raises(ValueError, match="17.*16"):
        model(tokens(1, 7), cache=cache)


# -------------------------------------------------------------------------------------- cache


@pytest.mark.parametrize("logn", LOGN)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_cut_into_chunks_gives_the_same_logits(logn, data):
    model, idx = make(logn), tokens(2)
    cuts, left = [], T
    while left:
        cuts.append(data.draw(st.integers(1, left)))
        left -= cuts[-1]
    with torch.no_grad():
        torch.testing.assert_close(run_in_chunks(model, idx, cuts), model(idx),
                                   rtol=0, atol=1e-5)


@pytest.mark.parametrize("logn", LOGN)
def test_rows_of_different_lengths_get_what_they_get_alone(logn):
    """Right padding, one prefill, trim, then tokens and a chunk at each row's own position."""
    model, idx, lengths = make(logn), tokens(3), torch.tensor([1, 5, 9])
    cache = model.new_cache(3)
    with torch.no_grad():
        model(idx[:, :9], cache=cache)
        cache.trim(lengths)
        rows = torch.arange(3)[:, None]
        for step in (1, 1, 3):
            here = cache.positions(step)
            logits = model(idx[rows, here], cache=cache)
            torch.testing.assert_close(logits, model(idx)[rows, here], rtol=0, atol=1e-5)


def test_cache_expand_select_and_put():
    model, idx = make(), tokens(4)
    with torch.no_grad():
        full = model(idx)
        cache = model.new_cache(2)
        model(idx[:2, :9], cache=cache)
        cache.trim(torch.tensor([6, 9]))
        cache.expand(2)  # rows 0 0 1 1
        assert cache.positions(1)[:, 0].tolist() == [6, 6, 9, 9]
        cache.select(torch.tensor([3, 0]))  # rows 1 0
        other = model.new_cache(1, length=3)
        model(idx[3:, :3], cache=other)
        cache.put(torch.tensor([1]), other)  # rows 1 3
        assert cache.positions(1)[:, 0].tolist() == [9, 3]
        logits = model(torch.stack([idx[1, 9], idx[3, 3]])[:, None], cache=cache)
    torch.testing.assert_close(logits[0, 0], full[1, 9], rtol=0, atol=1e-5)
    torch.testing.assert_close(logits[1, 0], full[3, 3], rtol=0, atol=1e-5)


def test_cache_is_a_plain_number_while_rows_agree():
    cache = KVCache(make().config, batch_size=3)
    cache.advance(6)
    cache.trim(torch.tensor([4, 4, 4]))
    assert cache.pos == 4 and cache.positions(2).tolist() == [4, 5]
    assert cache.mask(1) is None
    assert cache.mask(2).squeeze().tolist() == [[True] * 5 + [False], [True] * 6]


def test_cache_that_is_too_short_says_so():
    model = make()
    with pytest.raises(ValueError, match="room for 4.*5"):
        model(tokens(1, 5), cache=KVCache(model.config, length=4))


# -------------------------------------------------------------------------------------- log n


def test_query_scales_by_hand():
    pos = torch.tensor([0, 1, 63])
    logs = [0, math.log(2), math.log(64)]
    fixed = make("fixed").h[0].attn.query_scale(pos).flatten().tolist()
    assert fixed == pytest.approx([x / math.log(512) for x in logs])
    clipped = make("clipped", logn_base=16).h[0].attn.query_scale(pos).flatten().tolist()
    assert clipped == pytest.approx([1, 1, math.log(64) / math.log(16)])
    learned = make("learned").h[0].attn.query_scale(pos)
    assert learned.shape == (1, 2, 3, 1)
    assert learned[0, 1, :, 0].tolist() == pytest.approx([x / math.log(T) for x in logs])


def test_clipped_changes_nothing_inside_the_trained_context():
    torch.testing.assert_close(make("clipped", logn_base=T)(tokens(2)), make("off")(tokens(2)))


@pytest.mark.parametrize("logn", ["fixed", "clipped", "learned"])
def test_each_form_does_something(logn):
    assert not torch.allclose(make(logn)(tokens(2)), make("off")(tokens(2)), atol=1e-6)


def test_learned_scale_is_trained():
    model = make("learned")
    model(tokens(2), tokens(2, seed=2))[0].backward()
    assert model.h[1].attn.logn_scale.grad.abs().sum() > 0


# --------------------------------------------------------------------------------------- loss


@pytest.mark.parametrize("rows", [1, 7, 1024])
def test_chunked_loss_and_its_gradients_are_those_of_the_library(rows, monkeypatch):
    monkeypatch.setattr(ChunkedCrossEntropy, "rows", lambda *_: rows)
    torch.manual_seed(0)
    x, w = torch.randn(40, 8, requires_grad=True), torch.randn(13, 8, requires_grad=True)
    y = torch.randint(-1, 13, (40,))
    ours = ChunkedCrossEntropy.apply(x, w, y, True)
    got = torch.autograd.grad(ours * 0.3, (x, w))
    theirs = F.cross_entropy(x @ w.T, y, ignore_index=-1, reduction="sum")
    want = torch.autograd.grad(theirs * 0.3, (x, w))
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(got, want)
    with torch.no_grad():
        torch.testing.assert_close(ChunkedCrossEntropy.apply(x, w, y, False), theirs)


def test_full_logits_never_exist(monkeypatch):
    monkeypatch.setattr(ChunkedCrossEntropy, "rows", lambda *_: 8)
    largest = 0
    real = F.log_softmax

    def spy(logits, **kwargs):
        nonlocal largest
        largest = max(largest, len(logits))
        return real(logits, **kwargs)

    monkeypatch.setattr(F, "log_softmax", spy)
    make()(tokens(2), tokens(2, seed=2))[0].backward()
    assert largest == 8


def test_a_batch_without_targets_adds_nothing():
    model = make()
    loss, n = model(tokens(2), torch.full((2, T), -1))
    loss.backward()
    assert (loss.item(), n.item()) == (0.0, 0)
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_masked_targets_and_their_sum():
    """Sums over parts are the sum over the whole, however unequal the parts."""
    model, idx, y = make(), tokens(4), tokens(4, seed=2)
    y[0, 2:] = y[3, :14] = -1
    whole, n = model(idx, y)
    parts = [model(idx[i : i + 1], y[i : i + 1]) for i in range(4)]
    assert n == sum(p[1] for p in parts) == 2 + T + T + 2
    torch.testing.assert_close(whole, sum(p[0] for p in parts))
    nan_elsewhere = F.cross_entropy(model(idx).view(-1, 61), y.view(-1), ignore_index=-1,
                                    reduction="sum")
    torch.testing.assert_close(whole, nan_elsewhere)


def test_bf16_autocast_stays_near_fp32():
    model, idx, y = make(n_embd=64), tokens(4), tokens(4, seed=2)
    want = model(idx, y)[0]
    with torch.autocast("cpu", torch.bfloat16):
        got = model(idx, y)[0]
    got.backward()
    assert got.item() == pytest.approx(want.item(), rel=2e-3) and got.item() != want.item()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_chunks_keep_the_logits_small_and_fp32_as_it_was():
    """Bits of an fp32 run depend on its chunks, so they never change on a CPU."""
    for V in (65, 4096, 50257):
        assert ChunkedCrossEntropy.rows("cpu", torch.float32, V) == 256
        assert ChunkedCrossEntropy.rows("cpu", torch.bfloat16, V) * V <= max(2**20, 256 * V)
        assert ChunkedCrossEntropy.rows("cuda", torch.bfloat16, V) == 2048


@pytest.mark.parametrize("shape", [(7,), (3, 5, 11), (64, 129)])
@pytest.mark.parametrize("p", [1e-4, 0.2, 0.5, 0.999])
def test_dropout_from_random_bytes(shape, p):
    """Kept values are scaled so that the mean stays, as often as asked, and gradients follow."""
    torch.manual_seed(3)
    x = torch.ones(400, *shape, dtype=torch.bfloat16, requires_grad=True)
    y = dropout(x, p, True)
    y.sum().backward()
    assert y.shape == x.shape and y.dtype == x.dtype and torch.equal(x.grad, y)
    share = (y == 0).float().mean().item()
    n, want = y.numel(), min(max(round(256 * p), 1), 255) / 256
    assert abs(want - p) <= 1 / 256 and abs(share - want) < 5 * math.sqrt(want * (1 - want) / n)
    kept = y[y != 0].float()
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - want)), rtol=4e-3, atol=0)
    torch.manual_seed(3)
    assert torch.equal(dropout(x, p, True), y) and not torch.equal(dropout(x, p, True), y)
    assert dropout(x, p, False) is x and dropout(x, 0.0, True) is x


def test_dropout_of_neighbours_is_independent():
    torch.manual_seed(0)
    kept = (dropout(torch.ones(2**20, dtype=torch.bfloat16), 0.25, True) != 0).double()
    for lag in (1, 2, 7, 8, 9, 64):
        both = (kept[lag:] * kept[:-lag]).mean().item()
        assert abs(both - 0.75**2) < 5e-3, lag


def test_dropout_in_fp32_is_the_librarys():
    x = torch.randn(50, 7)
    torch.manual_seed(1)
    want = F.dropout(x, 0.3, True)
    torch.manual_seed(1)
    assert torch.equal(dropout(x, 0.3, True), want)


def test_dropout_is_off_when_evaluating_and_on_when_training():
    model, idx = make(dropout=0.5), tokens(2)
    assert torch.equal(model(idx), model(idx))
    model.train()
    assert not torch.equal(model(idx), model(idx))


# ----------------------------------------------------------------------------------- generate


def listed(steps) -> list[list[int]]:
    """Rows of ids from the steps that generate yields."""
    return [list(row) for row in zip(*(s.tolist() for s in steps), strict=True)]


@pytest.mark.parametrize("logn", LOGN)
@pytest.mark.parametrize("keep", [None, 1, 3, T - 1])
def test_with_and_without_cache_far_past_the_window(logn, keep):
    model, idx = make(logn), tokens(2, 5)
    a = listed(model.generate(idx, 5 * T, greedy, context_keep=keep))
    b = listed(model.generate(idx, 5 * T, greedy, context_keep=keep, use_cache=False))
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
    alone = [listed(model.generate(idx[i : i + 1, :n], 3 * T, greedy))[0]
             for i, n in enumerate(lengths)]
    ends, rows, got = [2 * T, 3, 3 * T, 3], [0, 1, 2, 3], [[], [], [], []]
    steps = model.generate(idx, 3 * T, greedy, lengths=lengths)
    ids = next(steps)
    while rows:
        for row, id in zip(rows, ids.tolist(), strict=True):
            got[row].append(id)
        left = [i for i, row in enumerate(rows) if len(got[row]) < ends[row]]
        rows = [rows[i] for i in left]
        try:
            ids = steps.send(torch.tensor(left, dtype=torch.int64))
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
        assert torch.allclose(model.lm_head(window.x), model(seen)[:, -1], atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, T])
def test_a_long_prompt_is_read_in_chunks(chunk, monkeypatch):
    monkeypatch.setattr(GPT, "CHUNK", chunk)
    model, idx, lengths = make(), tokens(3, T), torch.tensor([1, 5, T])
    assert torch.allclose(model(idx, cache=model.new_cache(3)), model(idx), atol=1e-5)
    x = Window(model, idx, lengths).x
    for i, n in enumerate(lengths):
        assert torch.allclose(x[i], model.hidden(idx[i : i + 1, :n])[0, -1], atol=1e-5)


def test_ragged_prompts_give_each_row_what_it_gets_alone():
    model, idx, lengths = make(), tokens(3, 9), torch.tensor([1, 5, 9])
    together = listed(model.generate(idx, 3 * T, greedy, lengths=lengths))
    alone = [listed(model.generate(idx[i : i + 1, :n], 3 * T, greedy))[0]
             for i, n in enumerate(lengths)]
    assert together == alone


def test_a_long_prompt_keeps_its_newest_tokens():
    model, idx = make(), tokens(1, 3 * T)
    assert listed(model.generate(idx, 4, greedy)) == listed(
        model.generate(idx[:, -T:], 4, greedy))


def test_samples_share_one_prefill(monkeypatch):
    model, idx, fed = make(), tokens(2, 6), []
    real = GPT.hidden
    monkeypatch.setattr(GPT, "hidden", lambda self, x, cache=None:
                        (fed.append(tuple(x.shape)), real(self, x, cache))[1])
    rows = listed(model.generate(idx, 3, greedy, num_samples=2))
    assert fed == [(1, 6), (1, 6), (4, 1), (4, 1)]  # a CPU reads each by itself
    assert rows[0] == rows[1] and rows[2] == rows[3]


def test_full_windows_are_cut_to_the_newest_and_read_again(monkeypatch):
    """The rule itself: with keep=3, the token after a full window sees 2 old tokens."""
    model, seen = make(), []
    real = GPT.hidden
    monkeypatch.setattr(GPT, "hidden", lambda self, x, cache=None:
                        (seen.append(x[0].tolist()), real(self, x, cache))[1])
    idx = tokens(1, T)
    new = listed(model.generate(idx, 3, greedy, context_keep=3, use_cache=False))[0]
    assert seen == [idx[0].tolist(), idx[0, -2:].tolist() + new[:1],
                    idx[0, -2:].tolist() + new[:2]]


@pytest.mark.parametrize("keep", [0, T, -1])
def test_context_keep_out_of_range(keep):
    with pytest.raises(ValueError, match="context_keep"):
        next(make().generate(tokens(1), 1, greedy, context_keep=keep))


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        next(make().generate(tokens(1, 0), 1, greedy))
    for lengths in ([0, 5], [9, 5]):
        with pytest.raises(ValueError, match="in 5 columns"):
            next(make().generate(tokens(2, 5), 1, greedy, lengths=torch.tensor(lengths)))


def test_trim_keeps_its_own_numbers_and_refuses_what_is_not_there():
    model = make()
    cache, lengths = model.new_cache(2), torch.tensor([3, 5])
    model(tokens(2, 6), cache=cache)
    cache.trim(lengths)
    lengths += 1
    assert cache.positions(1)[:, 0].tolist() == [3, 5]
    with pytest.raises(ValueError, match="holds 5 positions and cannot keep 9"):
        cache.trim(9)


def test_a_context_of_one_token_still_writes():
    model = make(block_size=1)
    assert listed(model.generate(tokens(1, 1), 5, greedy)) == listed(
        model.generate(tokens(1, 1), 5, greedy, use_cache=False))

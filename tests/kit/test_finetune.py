"""kit/positions.py: a longer table of positions out of a trained one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.errors import UserError
from kit.finetune import resize

WAYS = ["interpolate", "hierarchical", "copy"]
sizes = settings(max_examples=60, deadline=None, derandomize=True)


def table(T: int, C: int = 3) -> torch.Tensor:
    return torch.randn(T, C, generator=torch.Generator().manual_seed(T))


@sizes
@given(st.integers(2, 30), st.integers(1, 200), st.sampled_from([None, *WAYS]))
def test_shape_and_the_positions_that_stay(T, size, how):
    wpe = table(T)
    if size > T and (how is None or how == "hierarchical" and size > T * T):
        with pytest.raises(UserError, match=f"block_size={size}"):
            resize(wpe, size, how)
        return
    longer = resize(wpe, size, how)
    assert longer.shape == (size, 3) and longer.isfinite().all()
    if how != "interpolate" or size <= T:
        torch.testing.assert_close(longer[:T], wpe[:size], rtol=1e-5, atol=1e-6)


@sizes
@given(st.integers(2, 30), st.integers(2, 200))
def test_interpolated_positions_lie_on_the_lines_between_the_old_ones(T, size):
    if size <= T:
        return
    wpe = table(T)
    longer = resize(wpe, size, "interpolate")
    for p in {0, size // 3, size // 2, size - 1}:
        at = p * (T - 1) / (size - 1)
        low, share = min(int(at), T - 2), at - min(int(at), T - 2)
        expected = (1 - share) * wpe[low] + share * wpe[low + 1]
        torch.testing.assert_close(longer[p], expected, rtol=1e-4, atol=1e-4)


def test_hierarchical_positions_by_hand():
    """The formula of kexue.fm 7947 in its own terms, 1-based: q_{(i-1)n+j} = a u_i + (1-a) u_j."""
    a, n, p = 0.4, 4, table(4)
    u = [(p[i] - a * p[0]) / (1 - a) for i in range(n)]
    longer = resize(p, n * n, "hierarchical")
    for i in range(n):
        for j in range(n):
            torch.testing.assert_close(longer[i * n + j], a * u[i] + (1 - a) * u[j])
    assert len({tuple(row) for row in longer.tolist()}) == n * n  # all different


def test_copied_positions_repeat():
    p = table(4)
    assert torch.equal(resize(p, 10, "copy"), torch.cat([p, p, p[:2]]))


def test_the_result_is_its_own_memory():
    p = table(4)
    for size, how in [(3, None), (4, None), *((9, how) for how in WAYS)]:
        before = p.clone()
        resize(p, size, how).zero_()
        assert torch.equal(p, before)

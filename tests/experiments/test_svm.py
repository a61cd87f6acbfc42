"""experiments/svm.py: the gradient, the convex problems, the project's attention in it."""

import importlib.util

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from experiments import svm
from experiments.common import Lab
from kit.errors import UserError

with_cvxpy = pytest.mark.skipif(importlib.util.find_spec("cvxpy") is None,
                                reason="experiments/requirements.txt is not installed")
seeds = st.integers(0, 2**31)


def cosine(a, b) -> float:
    a, b = np.asarray(a).ravel(), np.asarray(b).ravel()
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_problem_is_as_the_paper_has_it():
    p, starts = svm.draw_problem(3)
    for rows in (p.X, p.Z, p.v):
        assert torch.allclose(rows.norm(dim=-1), torch.ones(rows.shape[:-1]).double())
    assert set(p.y.tolist()) <= {1.0, -1.0} and starts.shape == (3, svm.D, svm.D)
    assert starts.abs().max() <= svm.D**-0.5
    assert all(torch.equal(a, b) for a, b in zip(p, svm.draw_problem(3)[0], strict=True))


@settings(max_examples=15, deadline=None)
@given(seed=seeds, scale=st.floats(0.1, 10))
def test_direction_is_that_of_the_gradient(seed, scale):
    """Against autograd, where autograd can be trusted, for W alone and for K and Q."""
    p, (W, K, Q) = svm.draw_problem(seed)
    for params in ([W * scale], [K * scale, Q]):
        params = [a.requires_grad_() for a in params]
        loss = F.softplus(-p.y * p.answers(svm.product(*params))).sum()
        gradient = torch.autograd.grad(loss, params)
        ours = svm.direction(p, *(a.detach() for a in params))
        ratios = [(g.norm() / a.norm()).item() for g, a in zip(gradient, ours, strict=True)]
        assert all(cosine(g, a) > 1 - 1e-9 for g, a in zip(gradient, ours, strict=True))
        assert ratios == pytest.approx([ratios[0]] * len(ratios))  # one factor for K and Q


@pytest.mark.parametrize("scale", [30, 300, 3000])
def test_direction_far_out_is_that_of_longer_numbers(scale):
    """p of the other tokens is down to 1e-4000: float64 has nothing left, 80 bits have."""
    p, (W, *_) = svm.draw_problem(1)
    X, Z, worth = (a.numpy().astype(np.longdouble) for a in (p.X, p.Z, p.worth()))
    if np.finfo(np.longdouble).maxexp < 16384:
        pytest.skip("this machine has no longer numbers")
    s = np.einsum("ntd,de,ne->nt", X, scale * W.numpy().astype(np.longdouble), Z)
    e = np.exp(s - s.max(1, keepdims=True))
    share = e / e.sum(1, keepdims=True)
    slope = 1 / (1 + np.exp((share * worth).sum(1)))
    gaps = worth[:, :, None] - worth[:, None, :]
    by_score = -(slope[:, None, None] * share[:, :, None] * share[:, None, :] * gaps).sum(-1)
    expected = np.einsum("nt,ntd,ne->de", by_score, X, Z)
    expected /= np.abs(expected).max()
    ours, = svm.direction(p, scale * W)
    assert ours.isfinite().all()
    assert cosine(expected.astype(float), ours) > 1 - 1e-9


def test_steps_have_one_length():
    p, (W, K, Q) = svm.draw_problem(2)
    path = svm.descend([W], lambda a: svm.direction(p, a), [0, 1, 2, 5])
    assert torch.equal(path[0], W)
    assert [(b - a).norm().item() for a, b in zip(path, path[1:3], strict=False)] == pytest.approx(
        [svm.RATE] * 2)
    assert len(path) == 4
    start, one = svm.descend([K, Q], lambda *kq: svm.direction(p, *kq), [0, 1])
    gK, gQ = svm.direction(p, K, Q)
    moved = (K - 0.1 * gK / gK.norm()) @ (Q - 0.1 * gQ / gQ.norm()).T
    assert torch.allclose(start, K @ Q.T) and torch.allclose(one, moved)


def test_penalty_is_what_is_left_without_a_gradient():
    _, (_, K, Q) = svm.draw_problem(2)

    def blind(K: Tensor, Q: Tensor) -> Tensor:
        return torch.ones(svm.N) + 0 * (K.sum() + Q.sum())

    for got, a in zip(svm.penalised(blind, torch.ones(svm.N), K, Q), (K, Q), strict=True):
        assert torch.allclose(got, 2 * torch.finfo(torch.float32).eps * a, atol=0)


@settings(max_examples=10, deadline=None)
@given(seed=seeds)
def test_the_projects_attention_is_the_same_layer(seed):
    p, (_, K, Q) = svm.draw_problem(seed)
    own = p._replace(Z=p.X[:, -1])
    attention = svm.one_head()
    single = svm.Problem(*(a.float() for a in own))
    got = svm.project(single, attention, 5 * K.float(), 5 * Q.float())
    assert torch.allclose(got.double(), own.answers(25 * K @ Q.T / svm.D**0.5), atol=1e-5)


def one(ahead: list[int], query: list[int]) -> np.ndarray:
    """Constraints W[i, j] >= 1 of these pairs."""
    A = np.zeros((len(ahead), svm.D, svm.D))
    A[range(len(ahead)), ahead, query] = 1
    return A.reshape(len(ahead), -1)


@with_cvxpy
@pytest.mark.parametrize("norm", ["frobenius", "nuclear"])
def test_two_tokens_by_hand(norm):
    """One sample of two tokens: W = a z^T / (|a|^2 |z|^2), a their difference, in either norm."""
    rng = np.random.default_rng(0)
    a, z = rng.normal(size=(2, svm.D))
    W = svm.solve(np.outer(a, z).reshape(1, -1), norm)
    assert W == pytest.approx(np.outer(a, z) / (a @ a) / (z @ z), abs=1e-5)


@with_cvxpy
def test_where_the_norms_differ():
    """W_00, W_01, W_10 >= 1: nothing more for Frobenius; a 1 at W_11 makes rank 1 of it.

    So the nuclear norm falls from sqrt(5) to 2 while Frobenius' rises from sqrt(3) to 2.
    """
    A = one([0, 0, 1], [0, 1, 0])
    frobenius, nuclear = (svm.solve(A, norm)[:2, :2] for norm in ("frobenius", "nuclear"))
    assert frobenius == pytest.approx(np.array([[1, 1], [1, 0]]), abs=1e-4)
    assert nuclear == pytest.approx(np.ones((2, 2)), abs=1e-4)


def chosen_and_rows(seed: int) -> tuple[svm.Problem, Tensor, np.ndarray]:
    p, _ = svm.draw_problem(seed)
    chosen = torch.randint(0, svm.T, (svm.N,), generator=torch.Generator().manual_seed(seed))
    return p, chosen, svm.constraints(p, chosen)


@given(seed=seeds)
@settings(max_examples=10, deadline=None)
def test_constraints_are_differences_of_scores(seed):
    p, chosen, A = chosen_and_rows(seed)
    W = torch.randn(svm.D, svm.D, dtype=torch.float64)
    scores = p.scores(W)
    expected = [(scores[i, s] - scores[i, t]).item() for i, s in enumerate(chosen.tolist())
                for t in range(svm.T) if t != s]
    assert A @ W.numpy().ravel() == pytest.approx(np.array(expected), abs=1e-12)


@with_cvxpy
@pytest.mark.parametrize("seed", range(3))
def test_solutions_are_feasible_and_no_smaller_ones_exist(seed):
    """Duality: the least norm is the largest sum of multipliers l >= 0 with |sum l A|_dual <= 1."""
    import cvxpy as cp

    *_, A = chosen_and_rows(seed)
    sizes = []
    for norm, dual, size in (("frobenius", "fro", "fro"), ("nuclear", 2, "nuc")):
        W = svm.solve(A, norm)
        assert (A @ W.ravel()).min() > 1 - 1e-5
        l = cp.Variable(len(A), nonneg=True)  # noqa: E741
        S = cp.reshape(A.T @ l, (svm.D, svm.D), order="C")
        size_S = cp.sigma_max(S) if dual == 2 else cp.norm(S, "fro")
        bound = cp.Problem(cp.Maximize(cp.sum(l)), [size_S <= 1]).solve(solver=cp.CLARABEL)
        assert np.linalg.norm(W, size) == pytest.approx(bound, rel=1e-4)
        sizes.append([np.linalg.norm(W, "fro"), np.linalg.norm(W, "nuc")])
    (least, more), (larger, smallest) = sizes
    assert least < larger and smallest < more


@with_cvxpy
def test_compare_knows_the_solution_itself():
    """A path that ends at the solution of its tokens correlates by 1 there, and selects them."""
    p, _ = svm.draw_problem(4)
    best = p.worth().argmax(-1)
    W = torch.from_numpy(svm.solve(svm.constraints(p, best), "nuclear"))
    found = svm.compare(p, [-W, 100 * W], "nuclear")
    assert found["nuclear"] == pytest.approx([-1, 1], abs=1e-4) and found["frobenius"][1] < 0.99
    assert found["samples_with_best"] == svm.N and found["for_best"] == pytest.approx(1, abs=1e-4)
    assert found["probability"][0] < 0.2 and found["probability"][1] > 0.999


def test_table_says_which_solution_is_nearer():
    def way(own, other, norms):
        return dict(zip(norms, ([0.1, own], [0.1, other]), strict=True))

    problems = [{key: way(own, 0.8, norms) for key, (_, *norms) in svm.WAYS.items()}
                for own in (0.7, 0.9, 1.0)]
    heads, first, authors, *rows = svm.table({"steps": [0, 500], "problems": problems})
    assert heads[1:] == ["500 steps"] and first == ["W: Frobenius", "0.900 (0.800 to 0.950)"]
    assert authors[1] == "0.867 / 0.97" and len(rows) == 7
    assert {row[1] for row in rows[::2]} == {"2 of 3, +0.067 (± 0.379)"}  # 4.303 sd / sqrt(3)
    assert rows[0][0].startswith("more than with Nuclear") and rows[1][0] == "K Qᵀ: Nuclear"


def test_without_the_library_it_is_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install -r experiments/requirements.txt"):
        svm.measure(Lab(quick=True))


@with_cvxpy
@pytest.mark.slow
def test_quick_form(quick):
    result = quick("svm")
    assert len(result["problems"]) == 4 and result["steps"][-1] == 500
    for problem in result["problems"]:
        w, kq, model = problem["w"], problem["kq"], problem["model"]
        assert w["frobenius"][-1] > max(0.8, w["nuclear"][-1] + 0.04)
        for way in (kq, problem["paper"], model):
            assert way["nuclear"][-1] > max(0.9, way["frobenius"][-1] + 0.04)
        assert min(way["probability"][-1] for way in (w, kq, model)) > 0.9

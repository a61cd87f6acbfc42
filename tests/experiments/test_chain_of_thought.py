"""Claim 7: the two problems are what they say, and a model that reasons answers more."""

import random
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments import chain_of_thought as thought
from experiments.chain_of_thought import BLOCK, FULL, PROBLEMS, Example
from model import GPT, GPTConfig


def read_spread(prompt: str) -> tuple[list[int], int]:
    numbers, _, a = prompt.rstrip("?").partition("<")
    return list(map(int, numbers.split())), int(a)


@given(st.integers(0, 2**32), st.integers(2, 10))
def test_spread_is_answered_rightly(seed, n):
    example = thought.spread(random.Random(seed), n)
    numbers, a = read_spread(example.prompt)
    assert len(numbers) == n and all(0 <= x <= 9 for x in numbers)
    assert example.answer == "ny"[all(abs(x - y) < a for x, y in combinations(numbers, 2))]
    steps = example.reasoning.split()
    assert steps[0][:3] == f"{numbers[0]}{numbers[0]}0" and len(steps) == n
    assert steps[-1] == f"{min(numbers)}{max(numbers)}{max(numbers) - min(numbers)}{example.answer}"


def test_yes_and_no_are_hard_to_tell_apart():
    """Yes is half of all for each a, and by one step only; the extremes are there once each."""
    rng, yes = random.Random(0), {}
    for _ in range(6000):
        example = thought.spread(rng, 6)
        numbers, a = read_spread(example.prompt)
        low, *_, high = sorted(numbers)
        assert high - low == a - (example.answer == "y")
        assert numbers.count(low) == numbers.count(high) == 1
        yes.setdefault(a, []).append(example.answer == "y")
    assert len(yes) == 6 and all(abs(np.mean(of_a) - 0.5) < 0.08 for of_a in yes.values())


@given(st.integers(0, 2**32), st.integers(2, 6))
def test_the_reasoning_of_a_sum_is_its_columns(seed, n):
    example = thought.addition(random.Random(seed), n)
    a, b = example.prompt.rstrip("=").split("+")
    assert int(a) + int(b) == int(example.answer) and len(a.strip()) == len(b.strip()) == n
    steps = example.reasoning.split()
    ones = "".join(step[1] for step in reversed(steps))  # what is written down, not carried
    assert len(steps) == n and int(steps[-1][0] + ones) == int(example.answer)


def test_dots_are_as_long_as_reasoning_and_say_nothing():
    example = Example("12+19=", "11 03", "31")
    assert example.completion("reasoning") == "11 03:31"
    assert example.completion("dots") == ".....:31"
    assert example.completion("direct") == example.completion("twice") == "31"


@pytest.mark.parametrize("problem", PROBLEMS)
def test_all_arms_learn_the_same_and_are_asked_what_is_new(problem):
    trained, tested = FULL[problem]["trained"], FULL[problem]["tested"]
    lessons, tests = thought.examples(problem, trained, 500, tested, 50, seed=3)
    again, same_tests = thought.examples(problem, trained, 1000, tested, 50, seed=3)
    assert again[:500] == lessons and tests == same_tests  # twice as many begin with the same
    asked = {e.prompt for of_size in tests.values() for e in of_size}
    assert not asked & {e.prompt for e in again} and list(tests) == tested
    longest = max(again + tests[max(tested)], key=lambda e: len(e.prompt + e.reasoning))
    assert len(longest.prompt + longest.completion("reasoning")) + 2 <= BLOCK


def test_only_the_completion_is_learned(tmp_path):
    rng = random.Random(0)
    lessons = [thought.addition(rng, 2) for _ in range(8)]
    data = thought.prepared(lessons, "reasoning", tmp_path)
    x, y = data.train.batch(0, 8, BLOCK, seed=0)
    want = {(e.prompt, e.completion("reasoning")) for e in lessons}
    for row, targets in zip(x, y, strict=True):
        said = targets[targets >= 0]
        assert said[-1] == data.separator == row[0]
        answer, first = data.tokenizer.decode(said[:-1]), int(np.argmax(targets >= 0))
        assert (data.tokenizer.decode(row[1:first + 1]), answer) in want


def test_what_is_written_ends_at_the_separator(tmp_path, monkeypatch):
    data = thought.prepared([thought.addition(random.Random(0), 2)] * 2, "direct", tmp_path)
    torch.manual_seed(0)
    model = GPT(GPTConfig(data.vocab_size, 32, n_layer=1, n_head=1, n_embd=16)).eval()
    script = [ord("4"), ord("2"), data.separator, ord("7")]
    said = iter(script)

    def speak(model, idx, room, choose):
        for _ in range(room):
            yield torch.full((len(idx),), next(said))

    monkeypatch.setattr(thought, "steps", speak)
    assert thought.written(model, data, ["12+30=", "20+22="], 4) == ["42", "42"]


@pytest.mark.slow
def test_reasoning_learns_what_answers_at_once_do_not(quick):
    trials = {(t["problem"], t["arm"]): t for t in quick("chain_of_thought")["trials"]}
    assert trials["spread", "reasoning"]["right"]["3"] > 0.8
    assert trials["spread", "direct"]["right"]["3"] < 0.7
    assert trials["spread", "reasoning"]["tokens"]["3"] == len("443y 143y 187n:n")
    assert trials["sum", "direct"]["right"]["2"] < 0.5

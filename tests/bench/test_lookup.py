"""bench.lookup: drafts of a text that is known, and a run that writes with and without them."""

import argparse

import pytest

from bench import lookup
from bench.decode.start import make_run


def test_a_text_that_repeats_itself_takes_fewer_steps():
    same, new = [1, 2, 3, 4, 5] * 20, list(range(100))
    widths = lookup.replay(same, 50, 7, (4, 3, 2))
    assert sum(n for n in widths.values()) < 15 and max(widths) == 8
    assert lookup.replay(new, 50, 7, (4, 3, 2)) == {1: 50}


def test_a_run_writes_the_same_with_drafts(tmp_path, capsys):
    pytest.importorskip("torch")
    from data.tokenizer import from_json
    from kit.checkpoint import load_model

    make_run(tmp_path / "run")
    [folder] = (tmp_path / "run" / "ckpt").glob("step_*")
    model, tokenizer, _ = load_model(folder)
    args = argparse.Namespace(prompt="First", prompts=2, new=12, rounds=1)
    lookup.show_run(folder, model, from_json(tokenizer), args)
    lines = capsys.readouterr().out.splitlines()
    assert "2 texts of 12 tokens" in lines[2] and "differ" not in "".join(lines)
    plain = next(line for line in lines if "plain" in line)
    assert plain.split()[-1] == "1.00"  # tokens a step
    assert len(lines) == 5 + 2 * (1 + len(lookup.MOSTS))

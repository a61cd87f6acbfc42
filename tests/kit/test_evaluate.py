"""kit/evaluate.py: sums by hand, separators and masks, a model left as it was; the command."""

import json
import math
import re
import shutil
import subprocess
import sys
import tracemalloc
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tqdm import tqdm

from data.dataset import Dataset
from data.making.build import prepare
from data.prepare import resolve
from data.tokenizer import ByteTokenizer
from kit.errors import UserError
from kit.errors import run as cli
from kit.evaluate import eval_batches, evaluate, spell_loss
from kit.measure import added_in_double, evaluate_split, main, spread
from kit.run import store
from kit.run.locate import remember
from model import GPT, GPTConfig

CLONE = Path(__file__).parents[2]
LENGTHS = np.array([1, 2, 3, 1, 1, 4, 1, 1, 1, 2, 13])  # bytes of the 11 tokens; 10 separates


def some_batches(n: int = 3, masked: bool = True, seed: int = 0) -> list:
    """n batches of (x, y), int64 (2, 8), with separators and, if masked, missing targets."""
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(n):
        tokens = rng.integers(0, 11, (2, 9))
        tokens[0, 4] = 10
        x, y = tokens[:, :-1].copy(), tokens[:, 1:].copy()
        if masked:
            y[1, 5:] = -1
        batches.append((x, y))
    return batches


def by_hand(model, batches, separator: int | None) -> dict[str, float]:
    """The same from full logits, token by token, in double precision."""
    nats = text_nats = n = n_bytes = 0
    with torch.no_grad():
        for x, y in batches:
            logp = F.log_softmax(model(torch.from_numpy(x)).double(), -1)
            for row in range(y.shape[0]):
                for t, target in enumerate(y[row]):
                    if target == -1:
                        continue
                    nats, n = nats - logp[row, t, target].item(), n + 1
                    if target != separator:
                        text_nats -= logp[row, t, target].item()
                        n_bytes += LENGTHS[target]
    return {"loss": nats / n, "perplexity": math.exp(nats / n),
            "bpb": text_nats / math.log(2) / n_bytes, "tokens": n, "bytes": n_bytes}


@pytest.mark.parametrize("separator", [10, None])
@pytest.mark.parametrize("tie", [True, False])
def test_loss_perplexity_and_bits_per_byte_by_hand(tiny, separator, tie):
    model = tiny(tie_embeddings=tie, dropout=0.5)
    with torch.no_grad():
        model.wte.weight.mul_(30)  # far from a uniform guess
    batches = some_batches()
    assert any((y == 10).any() for _, y in batches) and any((y == -1).any() for _, y in batches)
    result = evaluate(model, batches, LENGTHS, separator, nullcontext)
    assert result == pytest.approx(by_hand(model.eval(), batches, separator), rel=1e-5)


def test_a_separator_counts_in_the_loss_but_not_in_bits_per_byte(tiny):
    model = tiny()
    x, y = some_batches(1, masked=False)[0]
    with_it = evaluate(model, [(x, y)], LENGTHS, 10, nullcontext)
    without = evaluate(model, [(x, np.where(y == 10, -1, y))], LENGTHS, 10, nullcontext)
    assert with_it["bpb"] == pytest.approx(without["bpb"], rel=1e-5)
    assert with_it["loss"] != pytest.approx(without["loss"], rel=1e-4)


def test_a_uniform_model_needs_log2_of_the_vocabulary(tiny):
    model = tiny()
    torch.nn.init.zeros_(model.ln_f.weight)  # all logits are 0
    result = evaluate(model, some_batches(), np.ones(11, dtype=np.int64), None, nullcontext)
    assert result["loss"] == pytest.approx(math.log(11))
    assert result["perplexity"] == pytest.approx(11, rel=1e-5)
    assert result["bpb"] == pytest.approx(math.log2(11))


def test_masked_rows_and_batches_add_nothing(tiny):
    model, batches = tiny(), some_batches()
    empty = (batches[0][0], np.full_like(batches[0][1], -1))
    assert evaluate(model, [empty, *batches, empty], LENGTHS, 10, nullcontext) == evaluate(
        model, batches, LENGTHS, 10, nullcontext)


def test_only_separators_are_no_division_by_zero(tiny):
    x = np.full((1, 8), 10)
    result = evaluate(tiny(), [(x, x)], LENGTHS, 10, nullcontext)
    assert math.isfinite(result["loss"]) and result["bpb"] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_the_batch_size_makes_no_difference(tiny, batch_size):
    model = tiny()
    x, y = (np.concatenate(a) for a in zip(*some_batches(4), strict=True))
    parts = [(x[i : i + batch_size], y[i : i + batch_size]) for i in range(0, 8, batch_size)]
    assert evaluate(model, parts, LENGTHS, 10, nullcontext) == pytest.approx(
        evaluate(model, [(x, y)], LENGTHS, 10, nullcontext), rel=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was_and_dropout_is_off(tiny, training):
    model = tiny(dropout=0.5).train(training)
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    modes = {n: m.training for n, m in model.named_modules()}
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    results = [evaluate(model, some_batches(), LENGTHS, 10, nullcontext) for _ in range(2)]
    assert results[0] == results[1]
    assert {n: m.training for n, m in model.named_modules()} == modes
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (np.random.get_state()[1] == state[1]).all()
    for name, p in model.named_parameters():
        assert torch.equal(p, weights[name]) and p.grad is None


def test_no_graph_is_built(tiny):
    seen = []
    evaluate(tiny(), some_batches(), LENGTHS, 10,
             lambda: seen.append(torch.is_grad_enabled()) or nullcontext())
    assert seen == [False] * 3 and torch.is_grad_enabled()


def test_it_stops_when_told_and_restores_the_mode(tiny):
    model, seen = tiny().train(), []

    def batches():
        for batch in some_batches(5):
            seen.append(batch)
            yield batch

    asked = iter([False, False, True])
    assert evaluate(model, batches(), LENGTHS, 10, nullcontext, lambda: next(asked)) is None
    assert len(seen) == 3 and model.training


def test_the_mode_is_restored_when_a_batch_fails(tiny):
    model = tiny().train()
    with pytest.raises(ValueError, match="block_size=8"):
        evaluate(model, [(np.zeros((1, 9), np.int64),) * 2], LENGTHS, 10, nullcontext)
    assert model.training


def test_the_precision_is_the_callers(tiny):
    model, batches = tiny(), some_batches()
    exact = evaluate(model, batches, LENGTHS, 10, nullcontext)
    rough = evaluate(model, batches, LENGTHS, 10, partial(torch.autocast, "cpu", torch.bfloat16))
    assert rough != exact and rough["loss"] == pytest.approx(exact["loss"], rel=0.02)


def test_a_hopeless_loss_has_a_perplexity(tiny):
    model = tiny()
    with torch.no_grad():
        model.ln_f.weight.fill_(1e6)
        model.wte.weight.mul_(1e3)
    result = evaluate(model, some_batches(), LENGTHS, 10, nullcontext)
    assert result["loss"] > 1000 and math.isfinite(result["perplexity"])


def test_spell_loss():
    assert spell_loss({"loss": 1.23456, "perplexity": 3.4369, "bpb": 0.98765}) == (
        "validation loss 1.2346, perplexity 3.44, 0.9877 bits per byte")


# --------------------------------------------------------------------------------------- batches


class Windows:
    """A split of n tokens 0, 1, 2, ... that tells which windows were read."""

    def __init__(self, n: int):
        self.n, self.read = n, []

    def fixed_windows(self, block_size: int) -> int:
        return -(-(self.n - 1) // block_size)

    def window(self, i: int, n: int, block_size: int) -> tuple[np.ndarray, np.ndarray]:
        self.read += range(i, i + n)
        y = np.arange(i * block_size + 1, (i + n) * block_size + 1).reshape(n, block_size)
        return y - 1, np.where(y < self.n, y, -1)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(2, 400), st.sampled_from([1, 3, 8]), st.integers(1, 7))
def test_the_whole_split_is_read_each_token_a_target_once(n, block_size, batch_size):
    targets = [t for _, y in eval_batches(Windows(n), block_size, batch_size) for t in y.flat]
    assert sorted(t for t in targets if t != -1) == list(range(1, n))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(2, 400), st.integers(1, 7), st.integers(1, 30))
def test_some_batches_are_spread_evenly(n, batch_size, eval_iters):
    split = Windows(n)
    batches = list(eval_batches(split, 3, batch_size, eval_iters))
    there = -(-split.fixed_windows(3) // batch_size)
    assert len(batches) == min(eval_iters, there)
    assert all(1 <= len(x) <= batch_size and x.shape == y.shape for x, y in batches)
    assert len(set(split.read)) == len(split.read) and max(split.read) < split.fixed_windows(3)
    firsts = [x[0, 0] // 3 // batch_size for x, _ in batches]  # their places among all batches
    gaps = {b - a for a, b in zip(firsts, firsts[1:] + [there], strict=True)}
    assert firsts[0] == 0 and max(gaps) - min(gaps) <= 1


def test_few_batches_are_the_same_every_time():
    firsts = [[x[0, 0] for x, _ in eval_batches(Windows(500), 3, 4, 5)] for _ in range(2)]
    assert firsts[0] == firsts[1]


# ------------------------------------------------------------------------------------ the command


@pytest.fixture
def about(tmp_path, text_file, monkeypatch):
    """about(*arguments) runs the command on a tiny model of bytes -> what it said as JSON.

    Its run is tmp_path/out/tiny, trained (so it says) on the text; `chats` is a set of samples.
    """
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=257, block_size=16, n_layer=2, n_head=2, n_embd=16))
    with torch.no_grad():
        model.wte.weight.mul_(30)  # far from a uniform guess
    run, byte = tmp_path / "out" / "tiny", ByteTokenizer().to_json()
    run.mkdir(parents=True)
    settings_of_run = {"dataset": str(text_file), "tokenizer": "byte", "init_from": "auto"}
    data = Dataset(resolve(str(text_file), "byte", say=lambda line: None))
    samples = [{"prompt": "ab" * (i % 5) + "?", "completion": "é" * (i * 7 % 11)}
               for i in range(150)]
    chats = tmp_path / "chats.jsonl"
    chats.write_text("\n".join(map(json.dumps, samples)))
    with monkeypatch.context() as quiet:
        quiet.setattr("builtins.print", lambda *args, **kwargs: None)
        prepare([str(chats)], "chats", "byte")
    weights = {n: p.detach() for n, p in model.named_parameters()}
    store.save(run, model.config, weights, {}, byte, {
        "step": 30, "best_step": 30,
        "run": {"settings": settings_of_run, "dataset_hash": data.hash}}, keep=2)
    store.save_weights(tmp_path / "imported", model.config, weights, byte, {})
    remember(run)
    monkeypatch.chdir(tmp_path)
    return model


def told(capsys, *argv: str) -> dict:
    capsys.readouterr()
    assert main([*argv, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def refused(capsys, *argv: str) -> str:
    """The one line of a mistake, through the exit that the command has."""
    with pytest.raises(SystemExit) as stop, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["evaluate.py", *argv])
        cli(main, (UserError,))
    lines = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and "Traceback" not in "".join(lines)
    return lines[-1]


def test_the_newest_run_on_its_own_data(about, capsys, tmp_path, text_file):
    """What is told is what the split gives by hand, each byte of it a token."""
    said = told(capsys)
    ids = np.frombuffer(text_file.read_bytes(), np.uint8).astype(np.int64)
    val = ids[int(0.9 * len(ids)):]
    assert said["tokens"] == len(val) and said["bytes"] == len(val)  # the separator stands first
    batches = [(x[None], y[None]) for x, y in windows_by_hand(np.append(256, val), 16)]
    exact = evaluate(about, batches, np.append(np.ones(256, np.int64), 0), 256, nullcontext)
    for name in ("loss", "perplexity", "bpb"):
        assert said[name] == pytest.approx(exact[name], rel=1e-5), name
    assert said["checkpoint"] == str(tmp_path / "out" / "tiny" / "ckpt" / "step_000030")
    assert {k: said[k] for k in ("step", "dataset", "split", "dtype", "block_size", "rows")} == {
        "step": 30, "dataset": str(text_file), "split": "val", "dtype": "float32",
        "block_size": 16, "rows": -(-len(val) // 16)}


def test_its_own_data_is_what_was_prepared_of_a_text_that_is_gone(about, capsys, text_file):
    before = told(capsys)
    text_file.unlink()
    assert told(capsys) == before


def windows_by_hand(ids: np.ndarray, size: int):
    for i in range(0, len(ids) - 1, size):
        x, y = ids[i : i + size], ids[i + 1 : i + size + 1]
        x = x[: len(y)]
        yield (np.pad(x, (0, size - len(x))), np.pad(y, (0, size - len(y)), constant_values=-1))


@pytest.mark.parametrize("dataset", ["my text.txt", "chats"])
@pytest.mark.parametrize("split", ["val", "train"])
def test_any_batch_size_prints_the_same(about, capsys, dataset, split):
    printed = set()
    for size in (2, 7, 64, 5000):
        argv = [f"--dataset={dataset}", f"--split={split}", f"--batch_size={size}"]
        assert main(argv) == 0
        printed.add(capsys.readouterr().out)
        printed.add(json.dumps(told(capsys, *argv)))
    assert len(printed) == 2


def test_the_sum_of_a_large_batch_is_as_exact_as_that_of_small_ones(tiny):
    """In fp32, 300,000 addends of about 2.4 would lose the last digits."""
    model, n = tiny(), 300_000
    x = torch.randn(n, 16, generator=torch.Generator().manual_seed(0))
    y = torch.arange(n) % 12 - 1
    with torch.no_grad():
        total, count = added_in_double(model.loss, x, y)
        logp = F.log_softmax(x.double() @ model.lm_head.weight.double().T, -1)
        exact = -logp.gather(1, y.clamp(min=0)[:, None])[:, 0][y >= 0].sum()
        plain = model.loss(x, y)[0].double()
    assert count == (y >= 0).sum() and total.dtype == torch.float64
    assert abs(total - exact) / exact < 1e-8 < abs(plain - exact) / exact


def test_samples_are_measured_on_their_answers_alone(about, capsys):
    said = told(capsys, "--dataset=chats", "--split=train")
    data = Dataset(resolve("chats"))
    windows = data.train.window(0, data.train.fixed_windows(16), 16)
    assert said["tokens"] == (windows[1] >= 0).sum()
    assert said["bytes"] == ((windows[1] >= 0) & (windows[1] < 256)).sum()
    assert said["rows"] == data.train.fixed_windows(16) < 150
    main(["--dataset=chats"])
    assert "dropped" in capsys.readouterr().err  # nobody shall take it for all of the samples


def test_a_smaller_context_is_that_of_shorter_rows(about, capsys):
    said = told(capsys, "--block_size=4")
    whole = told(capsys)
    assert said["block_size"] == 4 and said["rows"] == -(-said["tokens"] // 4)
    assert said["tokens"] == whole["tokens"] and said["loss"] != whole["loss"]


def test_another_text_is_prepared_with_the_tokenizer_of_the_checkpoint(about, capsys, tmp_path):
    (tmp_path / "other.txt").write_text("A text of its own, é. " * 40)
    said = told(capsys, "imported", "--dataset=other.txt")
    n = len(("A text of its own, é. " * 40).encode())
    assert said["step"] == 0 and abs(said["bytes"] - n / 10) <= 2  # cut at a character
    assert "preparing other-" not in capsys.readouterr().err  # only once
    told(capsys, str(tmp_path / "out/tiny/ckpt/step_000030"), "--dataset=other.txt")
    assert len([*(tmp_path / "data").glob("other-*")]) == 1


def test_a_text_that_changed_since_is_said(about, capsys, text_file, tmp_path):
    before = told(capsys)
    text_file.write_text("Another text. " * 300)
    assert told(capsys) == before  # what was prepared is still there
    for folder in (tmp_path / "data").glob("my-text-*"):
        shutil.rmtree(folder)
    main([])
    assert "has changed since the run began" in capsys.readouterr().err


def test_a_person_reads_what_was_measured(about, capsys, text_file):
    assert main([]) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.endswith("step_000030, step 30")
    assert second.startswith(f"{text_file}, val: ") and "bytes of text" in second
    assert re.fullmatch(r"loss \d+\.\d{4}, perplexity \S+, \d+\.\d{4} bits per byte", third)


@pytest.mark.parametrize("argv, words", [
    (["nowhere"], "nowhere: no such folder"), (["my text.txt"], "no such folder"),
    (["--step=7"], "steps there: 30"), (["imported"], "does not say what it was trained on"),
    (["--block_size=17"], "block_size=17: the model of .* takes 1 to 16"),
    (["--batch_size=0"], "batch_size=0: must be at least 1"),
    (["--batch_size=many"], "invalid int"), (["--datset=x"], "did you mean --dataset"),
    (["--dataset=nope"], "--dataset=nope is no file"), (["--device=gpu"], "device=gpu"),
    (["--dataset=other"], "trained with tokenizer byte.*another"),
    (["--dataset=long"], "none of the val split's .* samples")])
def test_a_mistake_is_one_line(about, capsys, tmp_path, argv, words):
    (tmp_path / "other.txt").write_text("Text. " * 100)
    (tmp_path / "long.jsonl").write_text("\n".join(
        json.dumps({"prompt": str(i), "completion": "long " * 9}) for i in range(30)))
    if argv[0] in ("--dataset=other", "--dataset=long"):
        name, spec = argv[0][10:], "char" if argv[0].endswith("other") else "byte"
        prepare([str(next(tmp_path.glob(f"{name}.*")))], name, spec)
    assert re.search(words, refused(capsys, *argv))


def test_ctrl_c_leaves_with_130(about, capsys, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(GPT, "hidden", interrupted)
    monkeypatch.setattr("sys.argv", ["evaluate.py"])
    with pytest.raises(SystemExit) as stop:
        cli(main, (UserError,))
    assert stop.value.code == 130


def test_weights_that_are_no_numbers_have_no_loss(about, capsys, tmp_path):
    weights = {n: torch.full_like(p, math.nan) for n, p in about.named_parameters()}
    store.save_weights(tmp_path / "nan", about.config, weights, ByteTokenizer().to_json(), {})
    for more in ((), ("--json",)):
        said = refused(capsys, "nan", "--dataset=my text.txt", *more)
        assert "nan: loss nan: its weights are damaged, or overflow" in said


def test_progress_has_the_time_left_on_a_terminal_alone(about, capsys, monkeypatch):
    main([])
    assert "row" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("kit.measure.tqdm", partial(tqdm, mininterval=0))
    main(["--batch_size=8", "--json"])
    captured = capsys.readouterr()
    assert re.search(r"\d+/\d+ \[00:00<00:00, +[\d.]+row/s\]", captured.err)
    json.loads(captured.out)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 500))
def test_batches_come_each_once_and_far_apart(n):
    order = list(spread(n))
    assert sorted(order) == list(range(n))
    if n > 20:  # any tenth of the way has seen all of the lengths, about
        some = sorted(order[: n // 10 + 5])
        assert max(b - a for a, b in zip(some, some[1:], strict=False)) < 0.35 * n


def test_memory_does_not_grow_with_the_split(tiny):
    """The peak of numpy's and Python's memory; tensors are made from the same arrays."""
    peaks = []
    model, data = tiny(), SimpleNamespace(
        token_byte_lengths=lambda: np.ones(11, np.int64), separator=None)
    for n in (20_000, 200_000):
        split = SimpleNamespace(
            fixed_windows=lambda T, n=n: n // T,
            window=lambda i, rows, T: (np.zeros((rows, T), np.int64),) * 2)
        tracemalloc.start()
        told = evaluate_split(model, data, split, 8, 64, nullcontext)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert told["tokens"] == n
    assert peaks[1] < peaks[0] + 400_000  # bytes; all rows together take 3.2 million


def test_the_model_is_as_it_was_after_a_split(about, capsys):
    before = set(vars(about))
    split = SimpleNamespace(fixed_windows=lambda T: 3,
                            window=lambda i, n, T: (np.zeros((n, T), np.int64),) * 2)
    data = SimpleNamespace(token_byte_lengths=lambda: np.ones(257, np.int64), separator=None)
    evaluate_split(about, data, split, 16, 2, nullcontext)
    assert set(vars(about)) == before


@pytest.mark.slow
def test_it_is_a_command(tmp_path):
    done = subprocess.run([sys.executable, "-m", "kit.evaluate", "nowhere"], cwd=CLONE,
                          capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("evaluate.py: nowhere: no such folder")

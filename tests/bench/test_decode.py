"""bench.decode: the same model for every side, the arithmetic of its ratios, the real command."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.decode import rounds
from bench.decode import worker as decode_worker
from bench.decode.model import GGUF_TYPES, make_model, ours, write_gguf
from bench.decode.report import draw, keys, lines, show
from bench.decode.rounds import SIDES, TASKS, check_out, common, missing, rates, takes
from bench.decode.start import spans
from bench.decode.worker import Worker, choose, measure
from bench.peer import NEEDED
from bench.trial import TrialFailed, commit

CLONE = Path(__file__).parents[2]
TINY = {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 320, "block_size": 1024}
NANOGPT = """
import torch
class GPTConfig:
    def __init__(self, **shape):
        self.__dict__ |= shape
class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config.n_layer == 2 and config.bias and config.dropout == 0
        print("this is no answer")
    def load_state_dict(self, weights):
        assert weights["lm_head.weight"] is weights["transformer.wte.weight"]
        assert weights["transformer.h.1.mlp.c_fc.bias"].shape == (256,)
    def generate(self, idx, max_new_tokens, top_k=None):
        assert top_k == 1
        return torch.cat((idx, idx.new_zeros(len(idx), max_new_tokens)), 1)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    counted = make_model(folder, TINY)
    every_block = 4 * 64 + 3 * 64 * 64 + 3 * 64 + 64 * 64 + 64 + 2 * 4 * 64 * 64 + 5 * 64
    assert counted == 320 * 64 + 2 * every_block + 2 * 64  # the token embedding once, not wpe
    return folder


def command(*flags: object, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "bench.decode", *map(str, flags)], cwd=CLONE,
                          capture_output=True, text=True, env=os.environ | env)


def sample(side: str, bits: str, task: str, tok_s: float, way: str = "w", number: int = 1) -> dict:
    return {"round": number, "side": side, "bits": bits, "task": task, "way": way, "tok_s": tok_s,
            "steady_tok_s": 1.1 * tok_s, "first_s": 0.5}


@pytest.fixture
def row() -> dict:
    """A made-up run."""
    samples = [sample(side, bits, task, 100.0) for side, bits in SIDES
               for task in ("128", "512", "first", "prefill")]
    samples += [sample("ours", "16", "512", f, number=n) for n, f in ((2, 210.0), (3, 200.0))]
    samples += [sample("llama.cpp", "16", "512", 80.0, number=n) for n in (2, 3)]
    samples += [sample("ours", "16", "prefill", 300.0, number=n) for n in (2, 3)]
    samples += [sample("ours", bits, f"batch {n}", f) for bits, n, f in (
        ("16", 1, 100.0), ("16", 8, 500.0), ("16", 32, 600.0), ("4", 1, 200.0), ("4", 32, 900.0))]
    samples += [sample("nanoGPT", "32", "512", 2.5) | {"steady_tok_s": None, "first_s": None}]
    return {"samples": samples, "bandwidth_gb_s": 50.0, "gb_per_token_16bit": 0.2,
            "first_token_s": 1.5, "import_torch_s": 1.25}


def test_ratios_are_of_medians_and_none_where_a_side_did_not_run(row):
    found = keys(row)
    assert found["over_llama_cpp_16bit"] == 200 / 80
    assert found["over_hugging_face_16bit"] == 2 and found["over_hugging_face_32bit"] == 1
    assert found["over_llama_cpp_8bit"] == found["over_llama_cpp_4bit"] == 1
    assert found["over_older_16bit"] == 2 and found["edited_over_ours_16bit"] == 0.5
    assert found["over_older_4bit"] == found["edited_over_ours_4bit"] == 1
    assert found["prefill_over_llama_cpp_16bit"] == 3
    assert found["batch32_over_batch1"] == 9 and found["batch32_over_batch1_16bit"] == 6
    assert found["batch32_over_best_batch1"] == 4.5 and found["batch32_best_bits"] == "4"
    assert found["bandwidth_share_16bit"] == pytest.approx(1.1 * 200 * 0.2 / 50)
    assert found["over_nanogpt"] == 80 and found["over_nanogpt_32bit"] == 40
    assert (found["first_token_s"], found["import_torch_s"]) == (1.5, 1.25)
    alone = [s for s in row["samples"] if s["side"] == "ours" and "batch" not in s["task"]]
    assert keys(row | {"samples": alone})["bandwidth_share_16bit"]
    nothing = {"batch32_over_batch1", "batch32_best_bits", "over_nanogpt", "over_llama_cpp_16bit",
               "over_hugging_face_16bit", "prefill_over_llama_cpp_16bit", "over_older_32bit",
               "edited_over_ours_8bit"}
    left = keys({"samples": alone})
    assert all(left[name] is None for name in nothing | {"bandwidth_share_16bit", "first_token_s"})
    assert set(left) == set(found) == set(keys({"samples": []}))


def test_tables_have_a_row_for_each_side_that_ran(row, capsys):
    show(row | keys(row))
    out = capsys.readouterr().out
    assert "ours at 16 bits, 0.200 GB a token, takes 88% of it" in out
    assert "1.50 s; `import torch` alone: 1.25 s, difference +0.25 s" in out
    first = lines(row["samples"], ["128", "512"])
    assert [(r["bits"], r["side"]) for r in first][:5] == [
        ("32", side) for side in ("ours", "older", "edited", "llama.cpp", "Hugging Face")]
    assert len(first) == len(SIDES) + 1 and first[5]["side"] == "nanoGPT"
    theirs = next(r for r in first if (r["side"], r["bits"]) == ("llama.cpp", "16"))
    assert theirs["512"] == 80 and theirs["512 high"] == 100 and theirs["512 ours"] == 2.5
    assert "32 over 1" in out and "6.00" in out
    show(row | keys(row) | {"against": "1234abc"})
    out = capsys.readouterr().out
    assert "Ours, tokens/s over 1234abc's, 512 new: 1.00 at 32 bits, 2.00 at 16 bits" in out
    show({"samples": []})
    assert not capsys.readouterr().out


def test_the_picture_has_the_parts_that_ran(row, tmp_path):
    row |= {"shape": TINY, "threads": 2, "cpu": "a processor"}
    assert draw(row, tmp_path / "new" / "decode.png") == "decode.png"
    assert (tmp_path / "new" / "decode.png").read_bytes().startswith(b"\x89PNG")
    assert draw({"samples": []}, tmp_path / "none.png") is None


def test_tokens_a_second():
    got = {"seconds": 2.0, "first_s": 0.5, "later_s": 1.0}
    assert rates(TASKS["512"], got) == {"tok_s": 256, "steady_tok_s": 511, "first_s": 0.5}
    assert rates(TASKS["prefill"], got | {"later_s": 0.0})["tok_s"] == 2000
    assert rates(TASKS["batch 32"], got)["tok_s"] == 32 * 64
    unseen = rates(TASKS["128"], {"seconds": 2.0, "first_s": None, "later_s": None})
    assert unseen == {"tok_s": 64, "steady_tok_s": None, "first_s": None}
    assert all(t.prompt + t.new <= 513 for t in TASKS.values() if t.part == "batch")


def test_who_takes_part(monkeypatch):
    assert takes("llama.cpp", "16", "batch 8") and takes("llama.cpp", "8", "prefill")
    assert not takes("llama.cpp", "8", "batch 1")
    assert takes("ours", "4", "batch 32") and not takes("ours", "32", "batch 32")
    assert all(takes("older", bits, name) == takes("ours", bits, name)
               for bits in ("32", "16", "8", "4") for name in TASKS)
    assert [name for name in TASKS if takes("edited", "16", name)] == ["128", "512"]
    assert common([1, 2, 3], [1, 2, 4]) == 2 and common([1, 2], [1, 2]) == 2
    monkeypatch.setattr(rounds.importlib.util, "find_spec", lambda name: None)
    assert missing() == {"Hugging Face": "pip install transformers",
                         "llama.cpp": "pip install llama-cpp-python gguf"}


class Slow:
    """A side with two ways, by a clock of its own."""

    vocab, streams = 10, True

    def __init__(self, monkeypatch):
        self.now, self.calls = 0.0, []
        monkeypatch.setattr(decode_worker.time, "perf_counter", lambda: self.now)

    def variants(self, kind: str) -> list[str]:
        return ["slow", "quick"]

    def generate(self, prompts, new, variant, tick):
        self.calls.append((variant, prompts.shape, new))
        self.now += 4 if len(self.calls) == 1 else 1  # the first call is not counted
        for _ in range(new):
            tick([1])
            self.now += 2 if variant == "slow" else 1


def test_the_best_way_is_taken_and_first_calls_do_not_count(monkeypatch):
    side = Slow(monkeypatch)
    task = {"kind": "decode", "rows": 3, "prompt": 5, "new": 4, "repeat": 2, "ids": True}
    found = choose(side, task)
    assert found == {"variant": "quick", "tried": {"slow": 9, "quick": 5}}
    monkeypatch.setattr(decode_worker, "HOPELESS", 1.5)
    assert choose(side, task)["tried"] == {"slow": None, "quick": 5}
    side.variants = lambda kind: ["slow"]
    assert choose(side, task) == {"variant": "slow", "tried": {"slow": None}}
    got = measure(side, "quick", task)
    assert got["ids"] == [[1]] * 4 and side.calls[-1] == ("quick", (3, 5), 4)
    assert (got["seconds"], got["first_s"], got["later_s"]) == (5, 1, 3)
    side.generate = lambda *a: None
    with pytest.raises(TrialFailed, match="4 tokens were asked for and 0 came"):
        measure(side, "quick", task)


def test_a_worker_that_dies_tells_its_last_words(tmp_path):
    with pytest.raises(TrialFailed, match=r"ours, 16 bits ended with 1:(.|\n)*FileNotFoundError"):
        Worker("ours", "16", tmp_path / "nowhere", 1)


def test_the_parent_holds_no_torch():
    code = ("import bench.decode.command, sys; "
            "assert not {'torch', 'transformers'} & set(sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], cwd=CLONE).returncode == 0


@pytest.mark.parametrize("flag,word", [
    ("--parts=batch1,sound", "--parts=sound: the parts are batch1, prefill, batch, start, nanogpt"),
    ("--parts=nanogpt", "needs --nanogpt=PATH"), ("--rounds=0", "expected 1 or more"),
    ("--against=nothing", "--against=nothing: not a commit of this clone"),
    ("--nanogpt={0}", "no nanoGPT clone")])
def test_a_wrong_use_is_one_line(flag, word, tmp_path):
    done = command(flag.format(tmp_path), f"--out={tmp_path / 'out'}")
    assert done.returncode == 2 and not done.stdout and not (tmp_path / "out").exists()
    assert len(done.stderr.splitlines()) == 1 and word in done.stderr


def test_the_time_of_the_first_byte_after_the_prompt():
    code = "import time\nprint('ab', end='', flush=True); time.sleep(0.4); print('c', flush=True)\n"
    early, late = (spans([sys.executable, "-c", code], after, {}) for after in (1, 2))
    assert late[0] - early[0] > 0.2 and late[0] <= late[1]
    with pytest.raises(TrialFailed, match="after 0 bytes"):
        spans([sys.executable, "-c", "pass"], 0, {})
    with pytest.raises(TrialFailed, match="ended with 1 after 0 bytes(.|\n)*ZeroDivisionError"):
        spans([sys.executable, "-c", "1 / 0"], 0, {})


@pytest.mark.parametrize("bits,error", [("32", 0), ("16", 1e-3), ("8", 0.01), ("4", 0.126)])
def test_a_gguf_file_holds_the_model(model, bits, error):
    gguf = pytest.importorskip("gguf")
    from extras.weights.gguf import gguf_name

    tensors = {t.name: t for t in gguf.GGUFReader(write_gguf(model, bits)).tensors}
    weights = {gguf_name(name): p.detach().numpy() for name, p in ours(model).named_parameters()}
    assert tensors.keys() == weights.keys()
    for name, w in weights.items():
        held = tensors[name]
        got = gguf.quants.dequantize(held.data, held.tensor_type)
        whole = w.ndim == 1 or name == "position_embd.weight"
        assert held.tensor_type.name == ("F32" if whole else GGUF_TYPES[bits])
        assert np.abs(got - w).max() <= (0 if whole else error * np.abs(w).max()), name


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
def test_llama_cpp_computes_our_logits(model, exact):
    """A prompt of two batches and single steps; its GELU is a table of fp16, its cache fp16 too."""
    llama_cpp = pytest.importorskip("llama_cpp")
    torch = pytest.importorskip("torch")
    from bench.decode.llama import LlamaCpp

    write_gguf(model, "32")
    side, reference, seen = LlamaCpp(model, "32", 1), ours(model), []
    side.cache_type = llama_cpp.GGML_TYPE_F32 if exact else None
    logits = side.logits
    side.logits = lambda *args: (seen.append(logits(*args).copy()), logits(*args))[1]
    prompts = np.random.default_rng(3).integers(320, size=(1, 600))
    for variant in side.variants("decode"):
        seen.clear()
        ids = []
        side.generate(prompts, 20, variant, ids.append)
        text = torch.from_numpy(np.concatenate([prompts, np.array(ids).T], 1))
        with torch.no_grad():
            theirs, mine = np.concatenate(seen), reference(text)[0, 599:-1].numpy()
        whole = exact and "plain" in variant  # flash attention rounds on its own
        assert np.abs(theirs - mine).max() < (1e-3 if whole else 5e-3), variant
        assert not whole or [i[0] for i in ids] == mine.argmax(-1).tolist()


@pytest.mark.slow
def test_all_sides_write_the_same_ids_in_rows_of_their_own(model):
    """Greedy at 32 bits: ours, transformers, llama.cpp; one row alone and three at once."""
    pytest.importorskip("transformers")
    from bench.decode.sides import HuggingFace, Ours

    sides = [Ours(model, "32", 1), HuggingFace(model, "32", 1)]
    try:
        import llama_cpp  # noqa: F401

        from bench.decode.llama import LlamaCpp

        write_gguf(model, "32")
        sides.append(LlamaCpp(model, "32", 1))
    except ImportError:
        pass
    for rows, kind in ((1, "decode"), (3, "batch")):
        task = {"kind": kind, "rows": rows, "prompt": 40, "new": 24, "ids": True}
        found = [measure(side, variant, task)["ids"] for side in sides
                 for variant in side.variants(kind)]
        assert all(ids == found[0] for ids in found) and len(found) >= 3
        assert len(set(map(str, found[0]))) > 8  # the text wanders
        assert rows == 1 or len(set(found[0][0])) > 1  # and the rows differ


ASK = {"kind": "decode", "rows": 1, "prompt": 9, "new": 12, "ids": True}


def written(side: str, bits: str, model: Path, *clone: Path) -> tuple[str, list]:
    """What a side says it is, and the ids that it writes."""
    worker = Worker(side, bits, model, 1, *clone)
    try:
        return worker.note, worker.ask(**ASK)["ids"]
    finally:
        worker.close()


@pytest.mark.parametrize("bits,kind", [("32", "float32"), ("16", "bfloat16"), ("8", "int8"),
                                       ("4", "int4")])
def test_the_edited_model_writes_by_its_own_forward(model, bits, kind):
    pytest.importorskip("torch")
    from bench.decode.sides import Edited

    side = Edited(model, bits, 1)
    assert side.note.startswith(f"squared ReLU, weights in {kind}")
    ids = measure(side, side.note, ASK)["ids"]
    if bits == "32":
        import torch

        plain = ours(model)
        for block in plain.h:
            block.mlp.forward = lambda x, mlp=block.mlp: mlp.c_proj(mlp.c_fc(x).relu() ** 2)
        prompt = torch.from_numpy(np.random.default_rng(0).integers(320, size=(1, 9)))
        text = plain.generate(prompt, 12, temperature=0)
        assert text[0, 9:].tolist() == [i for [i] in ids]
    assert len(ids) == 12


OLD_MODEL = """
from model_now import GPT as Now, GPTConfig  # the model as it is, in the layout of old
class GPT(Now):
    def generate(self, idx, max_new_tokens, choose):
        for _ in range(max_new_tokens):
            ids = choose(self(idx)[:, -1].float())
            yield ids
            idx = __import__("torch").cat([idx, ids[:, None]], 1)
"""

OLD_SAMPLER = """
class Sampler:
    def __init__(self, seeds, temperature):
        assert temperature == 0
    def __call__(self, logits):
        return logits.argmax(-1)
"""


def test_an_older_clone_takes_the_place_of_ours(model, tmp_path):
    """One of the old layout: kit/fast.py, and a model whose generate gives ids one by one."""
    old = tmp_path / "1234abc"
    later = shutil.ignore_patterns("kernels", "window.py", "__pycache__")
    shutil.copytree(CLONE / "kit", old / "kit", ignore=later)
    (old / "kit" / "fast.py").write_text("def fast(model, weights):\n    return f'old {weights}'\n")
    (old / "kit" / "sampling.py").write_text(OLD_SAMPLER)
    shutil.copy(CLONE / "model.py", old / "model_now.py")
    (old / "model.py").write_text(OLD_MODEL)
    note, ids = written("older", "32", model, old)
    assert note == "1234abc, old float32"
    assert ids == written("ours", "32", model)[1]


def test_a_commit_is_checked_out_as_files(tmp_path):
    head = commit(CLONE)
    if not head:
        pytest.skip("a copy without git")
    folder = check_out(head.removesuffix("-dirty"), tmp_path)
    assert folder.name in head and (folder / "bench" / "decode.py").is_file()
    assert not (folder / ".git").exists()


@pytest.mark.slow
def test_this_commit_against_itself(tmp_path):
    if not commit(CLONE):
        pytest.skip("a copy without git")
    shape = ",".join(map(str, list(TINY.values())[:4]))
    done = command(f"--shape={shape}", "--rounds=1", "--json", "--against=HEAD", "--parts=batch1",
                   f"--out={tmp_path / 'figures'}")
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["alike"]["older 32"] == row["alike_of"] and "edited 32" not in row["alike"]
    assert all(row[f"over_older_{bits}bit"] > 0 for bits in ("32", "16", "8", "4"))
    assert any(s["way"].startswith(f"{row['against']}, weights in") for s in row["samples"])


@pytest.mark.slow
def test_the_command_runs_every_part(tmp_path):
    for name in NEEDED:
        (tmp_path / "nano" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "nano" / name).write_text(NANOGPT if name == "model.py" else "")
    before = sorted((tmp_path / "nano").rglob("*"))
    shape = ",".join(map(str, list(TINY.values())[:4]))
    done = command(f"--shape={shape}", "--rounds=1", "--json", f"--nanogpt={tmp_path / 'nano'}",
                   f"--out={tmp_path / 'figures'}")
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "figures" / "decode.jsonl").read_text()) == row
    assert (tmp_path / "figures" / row["png"]).read_bytes().startswith(b"\x89PNG")
    assert row["alike"]["ours 32"] == row["alike_of"]
    run = {s for s in SIDES if s[0] not in {*row["missing"], "older"}}
    assert {(s["side"], s["bits"]) for s in row["samples"]} == run | {("nanoGPT", "32")}
    for side, bits in run:
        tasks = {s["task"] for s in row["samples"] if (s["side"], s["bits"]) == (side, bits)}
        assert tasks == {name for name in TASKS if takes(side, bits, name)}
    always = ("over_nanogpt", "edited_over_ours_16bit", "batch32_over_batch1",
              "bandwidth_share_16bit", "first_token_s")
    assert all(row[name] > 0 for name in always)
    assert sorted((tmp_path / "nano").rglob("*")) == before  # the user's clone is as it was
    assert str(tmp_path) not in done.stdout


@pytest.mark.slow
def test_other_ids_than_hugging_face_end_the_run(tmp_path, monkeypatch):
    from bench.decode import command as decode

    pytest.importorskip("transformers")
    real = rounds.Bench.ask

    def lie(self, side, bits, task, **more):
        got = real(self, side, bits, task, **more)
        if side == "ours" and more.get("ids"):
            got["ids"][5] = [-1]
        return got

    monkeypatch.setattr(rounds.Bench, "ask", lie)
    monkeypatch.setattr(rounds, "SIDES", [("ours", "32"), ("Hugging Face", "32")])
    assert decode.main(["--shape=1,1,32,64", "--parts=batch1", f"--out={tmp_path}"]) == 1
    assert not (tmp_path / "decode.jsonl").exists()

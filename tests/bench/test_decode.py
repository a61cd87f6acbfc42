"""bench.decode: the same model for every side, the arithmetic of its figures, the real command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.common import ProcessFailed, git_commit
from bench.decode import __main__ as decode
from bench.decode import worker
from bench.decode.report import medians, ratios
from bench.decode.sides import (
    GGUF_TYPES,
    Edited,
    HuggingFace,
    LlamaCpp,
    Ours,
    make_files,
    write_gguf,
)
from bench.decode.start import seconds_to_byte
from bench.decode.worker import ask, check_out, choose, measure
from bench.nanogpt import NEEDED
from kit.errors import UserError

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
    _, read = make_files(folder, TINY, gguf=False)
    every_block = 4 * 64 + 3 * 64 * 64 + 3 * 64 + 64 * 64 + 64 + 2 * 4 * 64 * 64 + 5 * 64
    assert read == 320 * 64 + 2 * every_block + 2 * 64  # the token embedding once, not wpe
    return folder


def command(*flags: object, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "bench.decode", *map(str, flags)], cwd=CLONE,
                          capture_output=True, text=True, env=os.environ | env)


def sample(side: str, bits: str, task: str, *tok_s: float) -> list[dict]:
    return [{"round": n, "side": side, "bits": bits, "task": task, "way": "w", "tok_s": f,
             "steady_tok_s": 1.1 * f} for n, f in enumerate(tok_s, 1)]


def test_figures_are_of_medians_and_only_of_what_ran():
    samples = [row for some in (
        sample("ours", "16", "512", 100, 210, 200), sample("llama.cpp", "16", "512", 100, 80, 80),
        sample("edited", "16", "512", 50), sample("nanoGPT", "32", "512", 2.5),
        sample("llama.cpp", "4", "512", 70), sample("ours", "16", "batch 1", 100),
        sample("ours", "4", "batch 1", 200), sample("ours", "16", "batch 32", 600),
        sample("ours", "4", "batch 32", 900)) for row in some]
    rows = {(m["task"], m["side"], m["bits"]): m for m in medians(samples)}
    assert len(rows) == 9 and list(rows)[0] == ("512", "nanoGPT", "32")
    theirs = rows["512", "llama.cpp", "16"]
    assert (theirs["tok_s"], theirs["low"], theirs["high"]) == (80, 80, 100)
    assert theirs["ours"] == 200 / 80 and rows["512", "edited", "16"]["ours"] == 4
    assert rows["512", "llama.cpp", "4"]["ours"] is None  # ours did not run there
    speed = {"bandwidth_gb_s": 50.0, "gb_per_token_16bit": 0.2, "first_token_s": 1.5}
    found = ratios({"samples": samples} | speed)
    assert found["over_nanogpt"] == 80 and found["first_token_s"] == 1.5
    assert found["batch32_over_batch1"] == 9 and found["batch32_over_best_batch1"] == 4.5
    assert found["bandwidth_share_16bit"] == pytest.approx(1.1 * 200 * 0.2 / 50)
    assert ratios({"samples": []}) == {} and medians([]) == []


def test_tokens_a_second():
    got, tasks = {"seconds": 2.0, "first_s": 0.5, "later_s": 1.0}, {}
    for part in decode.PARTS.values():
        tasks |= part
    assert decode.rates("512", tasks["512"], got) == {"tok_s": 256, "steady_tok_s": 511}
    assert decode.rates("prefill", tasks["prefill"], got | {"later_s": 0.0})["tok_s"] == 2000
    assert decode.rates("batch 32", tasks["batch 32"], got)["tok_s"] == 32 * 64


def test_who_takes_part():
    assert decode.takes_part("llama.cpp", "16", "batch 8")
    assert not decode.takes_part("llama.cpp", "8", "batch 1")
    assert decode.takes_part("older", "4", "batch 32")
    assert not decode.takes_part("ours", "32", "batch 32")
    assert not decode.takes_part("edited", "16", "prefill")
    assert decode.common_start([1, 2, 3], [1, 2, 4]) == 2 == decode.common_start([1, 2], [1, 2])


class Slow:
    """A side with two ways, by a clock of its own."""

    vocab = 10

    def __init__(self, monkeypatch):
        self.now, self.calls = 0.0, []
        monkeypatch.setattr(worker.time, "perf_counter", lambda: self.now)

    def ways(self, kind: str) -> list[str]:
        return ["slow", "quick"]

    def generate(self, prompts, new, way, on_token):
        self.calls.append((way, prompts.shape, new))
        self.now += 4 if way == "quick" and len(self.calls) < 3 else 1  # not counted: a warm-up
        for _ in range(new):
            on_token([1])
            self.now += 2 if way == "slow" else 1


def test_the_fastest_way_is_taken_and_first_calls_do_not_count(monkeypatch):
    side = Slow(monkeypatch)
    task = {"kind": "decode", "rows": 3, "prompt": 5, "new": 4, "ids": True}
    assert choose(side, task) == "quick"
    got = measure(side, "quick", task)
    assert got["ids"] == [[1]] * 4 and side.calls[-1] == ("quick", (3, 5), 4)
    assert (got["seconds"], got["first_s"], got["later_s"]) == (5, 1, 3)
    side.generate = lambda *a: None
    with pytest.raises(ProcessFailed, match="4 tokens were asked for and 0 came"):
        measure(side, "quick", task)


def test_a_side_that_dies_shows_the_end_of_its_stderr(tmp_path):
    with pytest.raises(ProcessFailed, match="16 bits, ended with 1:(.|\n)*FileNotFoundError"):
        ask("ours", "16", tmp_path / "nowhere", 1, [])


def test_the_parent_holds_no_torch():
    code = ("import bench.decode.__main__, bench.train, sys; "
            "assert not {'torch', 'transformers'} & set(sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], cwd=CLONE).returncode == 0


@pytest.mark.parametrize("flag,word", [
    ("--parts=batch1,sound", "--parts=sound: the parts are batch1, prefill, batch, start"),
    ("--rounds=0", "expected more than 0"),
    ("--against=nothing", "--against=nothing: not a commit of this clone"),
    ("--nanogpt={0}", "no nanoGPT clone")])
def test_a_wrong_use_is_one_line(flag, word, tmp_path):
    done = command(flag.format(tmp_path), f"--out={tmp_path / 'out'}")
    assert done.returncode == 2 and not done.stdout and not (tmp_path / "out").exists()
    assert len(done.stderr.splitlines()) == 1 and word in done.stderr


def test_the_time_of_the_first_byte_after_the_prompt():
    code = "import time\nprint('ab', end='', flush=True); time.sleep(0.4); print('c', flush=True)\n"
    early, late = (seconds_to_byte(number, ["-c", code], {}) for number in (2, 3))
    assert late - early > 0.2
    with pytest.raises(ProcessFailed, match="after 0 bytes"):
        seconds_to_byte(1, ["-c", "pass"], {})
    with pytest.raises(ProcessFailed, match="ended with 1 after 0 bytes(.|\n)*ZeroDivisionError"):
        seconds_to_byte(1, ["-c", "1 / 0"], {})


@pytest.mark.parametrize("bits,error", [("32", 0), ("16", 1e-3), ("8", 0.01), ("4", 0.126)])
def test_a_gguf_file_holds_the_model(model, bits, error):
    gguf = pytest.importorskip("gguf")
    from tests.extras.weights.test_gguf import gguf_name

    ours = Ours.load(None, model)
    tensors = {t.name: t for t in gguf.GGUFReader(write_gguf(model, bits)).tensors}
    weights = {gguf_name(name): p.detach().numpy() for name, p in ours.named_parameters()}
    assert tensors.keys() == weights.keys()
    for name, w in weights.items():
        held = tensors[name]
        got = gguf.quants.dequantize(held.data, held.tensor_type)
        exact = w.ndim == 1 or name == "position_embd.weight"
        assert held.tensor_type.name == ("F32" if exact else GGUF_TYPES[bits])
        assert np.abs(got - w).max() <= (0 if exact else error * np.abs(w).max()), name


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
def test_llama_cpp_computes_our_logits(model, exact):
    """A prompt of two batches and single steps; its GELU is a table of fp16, its cache fp16 too."""
    llama_cpp = pytest.importorskip("llama_cpp")
    write_gguf(model, "32")
    side, reference, seen = LlamaCpp(model, "32"), Ours.load(None, model), []
    side.cache_type = llama_cpp.GGML_TYPE_F32 if exact else None
    logits = side.logits
    side.logits = lambda *args: (seen.append(logits(*args).copy()), logits(*args))[1]
    prompts = np.random.default_rng(3).integers(320, size=(1, 600))
    for way in side.ways("decode"):
        seen.clear()
        ids = []
        side.generate(prompts, 20, way, ids.append)
        text = torch.from_numpy(np.concatenate([prompts, np.array(ids).T], 1))
        with torch.no_grad():
            theirs, mine = np.concatenate(seen), reference(text)[0, 599:-1].numpy()
        equal = exact and "plain" in way  # flash attention rounds on its own
        assert np.abs(theirs - mine).max() < (1e-3 if equal else 5e-3), way
        assert not equal or [i[0] for i in ids] == mine.argmax(-1).tolist()


@pytest.mark.slow
def test_all_sides_write_the_same_ids_in_rows_of_their_own(model):
    """Greedy at 32 bits: ours, transformers, llama.cpp; one row alone and three at once."""
    pytest.importorskip("transformers")
    sides = [Ours(model, "32"), HuggingFace(model, "32")]
    try:
        import llama_cpp  # noqa: F401

        write_gguf(model, "32")
        sides.append(LlamaCpp(model, "32"))
    except ImportError:
        pass
    for rows, kind in ((1, "decode"), (3, "batch")):
        task = {"kind": kind, "rows": rows, "prompt": 40, "new": 24, "ids": True}
        found = [measure(side, way, task)["ids"] for side in sides for way in side.ways(kind)]
        assert all(ids == found[0] for ids in found) and len(found) >= 3
        assert len(set(map(str, found[0]))) > 8  # the text wanders
        assert rows == 1 or len(set(found[0][0])) > 1  # and the rows differ


@pytest.mark.parametrize("bits,kind", [("32", "float32"), ("16", "bfloat16"), ("8", "int8"),
                                       ("4", "int4")])
def test_the_edited_model_writes_by_its_own_forward(model, bits, kind):
    side = Edited(model, bits)
    assert side.note.startswith(f"squared ReLU, weights in {kind}")
    task = {"kind": "decode", "rows": 1, "prompt": 9, "new": 12, "ids": True}
    ids = measure(side, side.note, task)["ids"]
    if bits == "32":
        plain = Ours.load(None, model)
        for block in plain.h:
            block.mlp.forward = lambda x, mlp=block.mlp: mlp.c_proj(mlp.c_fc(x).relu() ** 2)
        prompt = torch.from_numpy(np.random.default_rng(0).integers(320, size=(1, 9)))
        text = plain.generate(prompt, 12, temperature=0)
        assert text[0, 9:].tolist() == [i for [i] in ids]
    assert len(ids) == 12


@pytest.mark.parametrize("file", worker.MODULES)
def test_older_is_the_worker_of_another_commit(file, tmp_path):
    """It is run in its own folder, as ours, by the name that it has there."""
    path = tmp_path / "1234abc" / file
    path.parent.mkdir(parents=True)
    path.write_text("import json, os, sys\nfor line in sys.stdin:\n"
                    "    print(json.dumps([os.getcwd(), sys.argv[1:], json.loads(line)]))\n")
    [[folder, words, question]] = ask("older", "4", tmp_path, 1, [{"kind": "decode"}],
                                      tmp_path / "1234abc")
    assert Path(folder) == tmp_path / "1234abc" and words == ["ours", "4", str(tmp_path), "1"]
    assert question == {"kind": "decode"}


@pytest.mark.slow
def test_the_command_runs_every_part(tmp_path, monkeypatch, capsys):
    """Against itself at HEAD, what only looks like nanoGPT, and Hugging Face."""
    for name in NEEDED:
        (tmp_path / "nano" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "nano" / name).write_text(NANOGPT if name == "model.py" else "")
    before = sorted((tmp_path / "nano").rglob("*"))
    head = git_commit(CLONE)
    shape = ",".join(map(str, list(TINY.values())[:4]))
    monkeypatch.setattr(decode, "BITS", ("32", "16"))
    for tasks in (decode.TRIAL, *decode.PARTS.values()):  # the same in little
        for name, task in tasks.items():
            monkeypatch.setitem(tasks, name, task._replace(
                rows=min(task.rows, 3), prompt=min(task.prompt, 40), new=min(task.new, 9)))
    monkeypatch.setattr(decode, "AGREE", 20)
    assert decode.main([
        f"--shape={shape}", "--rounds=1", "--json", f"--nanogpt={tmp_path / 'nano'}",
        f"--out={tmp_path / 'figures'}", *(["--against=HEAD"] if head else [])]) == 0
    out = capsys.readouterr().out
    row = json.loads(out.splitlines()[-1])
    assert json.loads((tmp_path / "figures" / "decode.jsonl").read_text()) == row
    assert (tmp_path / "figures" / "decode.png").read_bytes().startswith(b"\x89PNG")
    assert row["alike"]["ours 32"] == row["alike_of"] and "edited 32" not in row["alike"]
    tasks = [name for part in decode.PARTS.values() for name in part]
    sides = [*(["older"] if head else []), "ours", *(
        side for side in decode.NEEDS if side not in row["missing"])]
    assert {(s["side"], s["bits"], s["task"]) for s in row["samples"]} == {
        (side, bits, task) for side in (*sides, "edited") for bits in ("32", "16")
        for task in tasks if decode.takes_part(side, bits, task)} | {("nanoGPT", "32", "512")}
    if head:
        assert row["alike"]["older 32"] == row["alike_of"] and row["against"] in head
    assert all(row[name] > 0 for name in (
        "over_nanogpt", "batch32_over_batch1", "bandwidth_share_16bit", "first_token_s"))
    assert "ours is x" in out and "over_nanogpt" in out
    assert sorted((tmp_path / "nano").rglob("*")) == before  # the user's clone is as it was
    assert str(tmp_path) not in out


def test_other_ids_than_hugging_face_end_the_run(tmp_path, monkeypatch):
    pytest.importorskip("transformers")

    def answers(side, bits, folder, threads, questions, clone):
        got = {"variant": "w", "seconds": 1.0, "first_s": 0.5, "later_s": 0.5}
        return [{"note": side}, *(got | {"ids": [[1], [len(side)]]} for _ in questions)]

    monkeypatch.setattr(decode, "ask", answers)
    monkeypatch.setattr(decode.common, "in_new_process", lambda *args: (1, 1))
    with pytest.raises(UserError, match="the same 1 ids and then different ones"):
        decode.main(["--shape=1,1,32,64", "--parts=batch1", f"--out={tmp_path}"])
    assert not list(tmp_path.iterdir())


def test_a_commit_is_checked_out_as_files(tmp_path):
    head = git_commit(CLONE)
    if not head:
        pytest.skip("a copy without git")
    folder = check_out("HEAD", tmp_path)
    assert folder.name in head and (folder / "train.py").is_file()
    assert not (folder / ".git").exists()

"""An edited model.py is refused by whatever needs GPT-2 itself, and the unedited one is not."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

from data.making.tokenizers import make_tokenizer
from extras.weights import gguf, llmc, nanogpt_ckpt
from kit import errors
from kit.checkpoint import load_model
from kit.errors import UserError
from kit.hf import __main__ as command_line
from kit.hf import gpt2, importing
from kit.hf.exporting import config_json, export_run, stored
from kit.hf.gpt2 import refuse_edited, refuse_unlike, shapes_with_biases
from kit.hf.tokenizer import to_hf
from kit.run.store import save_weights
from model import GPT, MLP, Block, CausalSelfAttention, GPTConfig
from tests.conftest import make_text

CLONE = Path(__file__).parents[3]
BYTE = make_tokenizer("byte")  # 257 ids
CONFIG = GPTConfig(257, 256, 1, 2, 32, bias=True)
Patch = pytest.MonkeyPatch


# ------------------------------------------------------------------------------------------ edits


def at_the_end_of_init(patch: Patch, part: type, change: Callable) -> None:
    """As if these lines stood at the end of the __init__ of a part of model.py."""
    init = part.__init__

    def edited(self, config, *args):
        init(self, config, *args)
        change(self, config)

    patch.setattr(part, "__init__", edited)


def wider_mlp(patch: Patch) -> None:
    def wider(mlp, config):
        mlp.c_fc = nn.Linear(config.n_embd, 6 * config.n_embd, bias=config.bias)
        mlp.c_proj = nn.Linear(6 * config.n_embd, config.n_embd, bias=config.bias)

    at_the_end_of_init(patch, MLP, wider)


def relu_squared(patch: Patch) -> None:
    patch.setattr(MLP, "forward", lambda mlp, x: mlp.c_proj(F.relu(mlp.c_fc(x)).square()))


def attend(patch: Patch, change: Callable = lambda q, k, scores: (q, k, scores)) -> None:
    """Attention written out, with a change of queries, keys and a mask that is added to scores."""
    def forward(attn, x, pos, mask, store):
        T, D = x.size(1), x.size(2) // attn.n_head
        q, k, v = (a.unflatten(2, (-1, D)).transpose(1, 2) for a in attn.c_attn(x).chunk(3, 2))
        q, k, added = change(q, k, torch.full((T, T), -math.inf).triu(1))
        y = ((q @ k.mT / D**0.5 + added).softmax(3) @ v).transpose(1, 2).flatten(2)
        return attn.c_proj(y)

    patch.setattr(CausalSelfAttention, "forward", forward)


def qk_norm(patch: Patch) -> None:
    attend(patch, lambda q, k, added: (
        F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:]), added))


def window(patch: Patch) -> None:
    attend(patch, lambda q, k, added: (q, k, added + torch.full_like(added, -math.inf).tril(-128)))


def distance_bias(patch: Patch) -> None:
    attend(patch, lambda q, k, added: (
        q, k, added - 0.01 * (torch.arange(len(added))[:, None] - torch.arange(len(added)))))


def rms_norms(patch: Patch) -> None:
    def replaced(part, config):
        for name in [name for name, m in part.named_children() if isinstance(m, nn.LayerNorm)]:
            setattr(part, name, nn.RMSNorm(config.n_embd))

    at_the_end_of_init(patch, Block, replaced)
    at_the_end_of_init(patch, GPT, replaced)


def scaled_embedding(patch: Patch) -> None:
    at_the_end_of_init(patch, GPT, lambda model, config: model.wte.register_forward_hook(
        lambda module, args, y: y * config.n_embd**0.5))


def softcap(patch: Patch) -> None:
    patch.setattr(GPT, "logits", lambda model, x: 30 * torch.tanh(model.lm_head(x) / 30))


def extra_parameter(patch: Patch) -> None:
    at_the_end_of_init(patch, GPT, lambda model, config: setattr(
        model, "gate", nn.Parameter(torch.ones(3))))


def norm_of_queries(patch: Patch) -> None:
    at_the_end_of_init(patch, CausalSelfAttention, lambda attn, config: setattr(
        attn, "q_norm", nn.RMSNorm(config.n_embd)))


class Nowhere(nn.Module):
    def forward(self, pos):
        return torch.zeros(1)


def no_wpe(patch: Patch) -> None:
    at_the_end_of_init(patch, GPT, lambda model, config: setattr(model, "wpe", Nowhere()))


def no_final_norm(patch: Patch) -> None:
    at_the_end_of_init(patch, GPT, lambda model, config: setattr(model, "ln_f", nn.Identity()))


def more_logits(patch: Patch) -> None:
    patch.setattr(GPT, "logits", lambda model, x: F.pad(model.lm_head(x), (0, 7)))


def padded_vocabulary(patch: Patch) -> None:
    def padded(model, config):
        model.wte = nn.Embedding(-(-config.vocab_size // 64) * 64, config.n_embd)
        model.lm_head.weight = model.wte.weight

    at_the_end_of_init(patch, GPT, padded)


def a_late_layer(patch: Patch) -> None:
    at_the_end_of_init(patch, GPT, lambda model, config: model.h[-1].register_forward_hook(
        lambda module, args, y: y + args[0]))


def another_epsilon(patch: Patch) -> None:
    at_the_end_of_init(patch, GPT, lambda model, config: [
        setattr(m, "eps", 1e-4) for m in model.modules() if isinstance(m, nn.LayerNorm)])


def a_clamp(patch: Patch) -> None:
    at_the_end_of_init(patch, MLP, lambda mlp, config: mlp.c_fc.register_forward_hook(
        lambda module, args, y: y.clamp(-5, 5)))


def zero_at_first(patch: Patch) -> None:
    """What computes the same until it is trained."""
    patch.setattr(MLP, "forward", lambda mlp, x: mlp.c_proj(F.relu(mlp.c_fc(x)).square()))
    at_the_end_of_init(patch, GPT, lambda model, config: [
        nn.init.zeros_(p) for name, p in model.named_parameters() if "c_proj" in name])


OTHER_WEIGHTS = {  # edit -> the first parameter that differs
    wider_mlp: r"h\.0\.mlp\.c_fc\.weight is \(192, 32\) in model\.py and \(128, 32\) in a GPT-2",
    extra_parameter: r"gate is \(3,\) in model\.py and absent in a GPT-2",
    norm_of_queries: r"h\.0\.attn\.q_norm\.weight is \(32,\) in model\.py and absent in a GPT-2",
    no_wpe: r"wpe\.weight is absent in model\.py and \(256, 32\) in a GPT-2",
    no_final_norm: r"ln_f\.weight is absent in model\.py and \(32,\) in a GPT-2",
    padded_vocabulary: r"wte\.weight is \(320, 32\) in model\.py and \(257, 32\) in a GPT-2"}
OTHER_LOGITS = [relu_squared, qk_norm, window, distance_bias, rms_norms, scaled_embedding, softcap,
                more_logits, a_late_layer, another_epsilon, a_clamp, zero_at_first]
EDITS = [*OTHER_WEIGHTS, *OTHER_LOGITS]


# --------------------------------------------------------------------------------------- commands


def random_weights(config: GPTConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) * 0.3
            for name, shape in shapes_with_biases(config).items()}


def save(folder: Path, model: GPT) -> Path:
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    save_weights(folder, model.config, weights, BYTE.to_json(), {"from": "a test"})
    return folder


@pytest.fixture
def given(tmp_path) -> SimpleNamespace:
    """Weights of a GPT-2 as others store them: llm.c, nanoGPT, transformers."""
    weights, theirs = random_weights(CONFIG), tmp_path / "theirs"
    with (tmp_path / "model.bin").open("wb") as f:
        f.write(np.array([20240326, 3, 256, 257, 1, 2, 32, 257] + [0] * 248, "<i4").tobytes())
        for w in weights.values():  # in this order, as there is one layer
            f.write(w.numpy().tobytes())
    args = {"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 256, "vocab_size": 257,
            "bias": True}
    torch.save({"model": {f"transformer.{name}": w for name, w in weights.items()},
                "model_args": args}, tmp_path / "ckpt.pt")
    theirs.mkdir()
    with torch.device("meta"):
        model = GPT(CONFIG)
    model.load_state_dict(weights, strict=False, assign=True)  # no lm_head: it is tied
    save_file(stored(model, Path()), theirs / "model.safetensors")
    (theirs / "config.json").write_text(json.dumps(config_json(CONFIG, 256)))
    (theirs / "tokenizer.json").write_text(json.dumps(to_hf(BYTE)))
    return SimpleNamespace(path=tmp_path, weights=weights)


COMMANDS = {  # name -> main, arguments; run is the checkpoint, new is what would be written
    "transformers": (command_line.main, ("export", "run", "new")),
    "llama.cpp": (gguf.main, ("run", "new", "--type=f32")),
    "hf": (command_line.main, ("import", "theirs", "--out_dir=new")),
    "nanogpt": (nanogpt_ckpt.main, ("ckpt.pt", "--out_dir=new", "--tokenizer=byte")),
    "llmc": (llmc.main, ("model.bin", "--out_dir=new", "--tokenizer=byte"))}


def command(name: str, folder: Path, patch: Patch, capsys) -> tuple[int, str]:
    """Run a command as a process would: its exit code and what it said of a mistake."""
    main, arguments = COMMANDS[name]
    patch.chdir(folder)
    patch.setattr(sys, "argv", [name, *arguments])
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        errors.run(main)
    return end.value.code, capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_the_unedited_model_passes(given, monkeypatch, capsys, name):
    if name == "llama.cpp":
        pytest.importorskip("gguf")
    torch.manual_seed(7)
    save(given.path / "run", GPT(CONFIG))
    before = torch.random.get_rng_state()
    code, said = command(name, given.path, monkeypatch, capsys)
    assert code == 0 and "model.py" not in said and (given.path / "new").exists()
    if name not in ("transformers", "llama.cpp"):
        model, _, _ = load_model(given.path / "new")
        assert all(torch.equal(p, given.weights[n]) for n, p in model.named_parameters())
        refuse_edited(CONFIG, Path(), "")
        torch.random.set_rng_state(before)
        refuse_edited(CONFIG, Path(), "")
        assert torch.equal(torch.random.get_rng_state(), before)  # training draws what it drew


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("name", COMMANDS)
def test_an_edited_model_is_refused_in_a_line(given, monkeypatch, capsys, name, edit):
    edit(monkeypatch)
    exports = name in ("transformers", "llama.cpp")
    if exports:
        save(given.path / "run", GPT(CONFIG))
    before = sorted(given.path.rglob("*"))
    code, said = command(name, given.path, monkeypatch, capsys)
    assert code == 2 and said.count("\n") == 1
    source = COMMANDS[name][1][1 if COMMANDS[name][0] == command_line.main else 0]
    assert said.startswith(f"{name}: {source}") or f"/{source}: " in said
    assert "so model.py is not GPT-2 any more; " in said
    assert (f"{name} cannot run it; sample.py and extras.serve can" if exports else
            "weights of GPT-2 would compute something else in it: undo the edit") in said
    assert sorted(given.path.rglob("*")) == before


@pytest.mark.parametrize("edit, message", OTHER_WEIGHTS.items(),
                         ids=lambda value: getattr(value, "__name__", ""))
def test_the_first_parameter_that_differs_is_named(monkeypatch, edit, message):
    edit(monkeypatch)
    with pytest.raises(UserError, match=f"^run: {message} of the same size, so .*; it cannot"):
        refuse_unlike(GPT(CONFIG), Path("run"), "it cannot")


@pytest.mark.parametrize("shape", [
    {}, {"n_layer": 12}, {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024},
    {"bias": False, "tie_embeddings": False, "gelu": "erf", "n_layer": 3},
    {"block_size": 1, "n_head": 1, "n_embd": 1, "vocab_size": 1}], ids=str)
def test_sizes_and_switches_are_no_edit(shape, monkeypatch):
    config = replace(CONFIG, **shape)
    refuse_edited(config, Path(), "")
    attend(monkeypatch)  # another way to write the same
    refuse_edited(config, Path(), "")


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("shape", [
    {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257},
    {"bias": False, "tie_embeddings": False, "gelu": "erf", "n_layer": 3}], ids=("124M", "other"))
def test_it_is_noticed_at_any_size(monkeypatch, edit, shape):
    if edit is padded_vocabulary:
        shape = shape | {"tie_embeddings": True}
    edit(monkeypatch)
    with pytest.raises(UserError, match="not GPT-2 any more"):
        refuse_edited(replace(CONFIG, **shape), Path(), "")


def test_an_edit_that_only_a_long_text_shows(monkeypatch):
    """A window as wide as the context changes nothing, so it is no edit of such a model."""
    window(monkeypatch)
    refuse_edited(replace(CONFIG, block_size=128), Path(), "")
    with pytest.raises(UserError, match="differ by"):
        refuse_edited(replace(CONFIG, block_size=129), Path(), "")


def test_sizes_that_nobody_has_checked_cost_nothing():
    most = 2**31 - 1
    refuse_edited(replace(CONFIG, vocab_size=most, block_size=16, n_layer=most, n_head=most,
                          n_embd=most), Path(), "")
    for small, _, n_tokens in gpt2.trials(replace(CONFIG, block_size=most, n_embd=2**30)):
        assert small.n_embd <= 512 and n_tokens <= small.block_size <= 1024


def test_logits_that_are_no_numbers_differ(monkeypatch):
    monkeypatch.setattr(GPT, "logits", lambda model, x: model.lm_head(x) * math.nan)
    with pytest.raises(UserError, match="not GPT-2 any more"):
        refuse_edited(CONFIG, Path(), "")


@pytest.mark.parametrize("logn", ("fixed", "learned"))
def test_log_n_attention_by_default_is_an_edit(logn):
    """Imported weights would get it untrained; "clipped" changes nothing up to their context."""
    with pytest.raises(UserError, match="not GPT-2 any more"):
        refuse_edited(replace(CONFIG, attn_logn=logn, logn_base=None), Path(), "")


def test_biases_in_some_layers_alone_are_a_gpt2(tmp_path, monkeypatch):
    at_the_end_of_init(monkeypatch, CausalSelfAttention, lambda attn, config: setattr(
        attn, "c_attn", nn.Linear(config.n_embd, 3 * config.n_embd)))
    ours = GPT(replace(CONFIG, bias=False)).eval()
    folder = export_run(str(save(tmp_path / "run", ours)), tmp_path / "e", None, False, print)
    ids = torch.randint(257, (2, 9))
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-5, rtol=1e-5)


def test_init_from_gpt2_goes_the_same_way(given, monkeypatch):
    monkeypatch.setattr(
        importing, "locate", lambda name: (given.path / "theirs", "openai-community/gpt2"))
    monkeypatch.setattr(importing, "fetch", lambda *args: pytest.fail("weights were fetched"))
    with monkeypatch.context() as edited:
        softcap(edited)
        with pytest.raises(UserError, match="theirs: .* would compute something else in it"):
            importing.pretrained("gpt2", print)
        assert not (given.path / "out" / "gpt2").exists()
    monkeypatch.setattr(importing, "fetch", lambda *args: given.path / "theirs")
    folder = importing.pretrained("gpt2", print)
    assert folder == importing.pretrained("gpt2", print)  # it is there already
    softcap(monkeypatch)
    with pytest.raises(UserError, match="out/gpt2: .* would compute something else in it"):
        importing.pretrained("gpt2", print)


@pytest.mark.slow
@pytest.mark.parametrize("old, new", [
    ("F.gelu(self.c_fc(x), approximate=self.approximate)", "F.relu(self.c_fc(x)).square()")])
def test_an_edited_clone(given, old, new):
    folder = given.path / "clone"
    shutil.copytree(CLONE, folder, ignore=shutil.ignore_patterns(
        ".*", "__pycache__", "out", "tests", "bench", "docs", "experiments", "*.bin"))
    text = (folder / "model.py").read_text(encoding="utf-8")
    assert old in text
    (folder / "model.py").write_text(text.replace(old, new), encoding="utf-8")
    (folder / "my.txt").write_text(make_text(2000))

    def run(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, *words], cwd=folder, env=os.environ,
                              capture_output=True, text=True, timeout=300)

    done = run("train.py", "config/tiny.py", "--dataset=my.txt", "--max_iters=3", "--out_dir=run")
    assert done.returncode == 0, done.stderr
    before = sorted(p for p in folder.rglob("*") if "__pycache__" not in p.parts)
    for module, *words in (("kit.hf", "export", "run", "new"),
                           ("extras.to_gguf", "run", "new"),
                           ("kit.hf", "import", "../theirs", "--out_dir=new")):
        done = run("-m", module, *words)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert "model.py is not GPT-2 any more" in done.stderr
    assert sorted(p for p in folder.rglob("*") if "__pycache__" not in p.parts) == before

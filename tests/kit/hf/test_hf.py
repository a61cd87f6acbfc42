"""Weights to Hugging Face's library and back: the same logits there, the same bits here."""

import ast
import errno
import json
import math
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    pipeline,
)

from data.dataset import Dataset
from data.instruct import encode as encode_chat
from data.making.build import prepare
from data.making.tokenizers import make_tokenizer
from data.tokenizer import from_json
from kit.checkpoint import load_model
from kit.errors import UserError, spell_os_error
from kit.hf import exporting, importing
from kit.hf import tokenizer as hf_tokenizer
from kit.hf.__main__ import main
from kit.hf.exporting import export_run
from kit.hf.gpt2 import stored_shapes
from kit.hf.importing import import_model, pretrained
from kit.hf.tokenizer import to_hf
from kit.run import store
from kit.run.locate import find_source, remember
from model import GPT, GPTConfig

CLONE = Path(__file__).parents[3]
BYTE = make_tokenizer("byte")  # 257 ids
SHAPES = [  # n_layer, n_head, n_embd, block_size, bias, tied, gelu
    (1, 1, 8, 1, False, True, "tanh"), (2, 2, 16, 12, True, False, "erf"),
    (3, 4, 12, 33, True, True, "tanh"), (1, 3, 24, 7, False, False, "erf")]


def quiet(line: str) -> None:
    """What is said, to nobody."""


def scramble(model: torch.nn.Module) -> None:
    """Numbers large enough that no part of the model could be left out unnoticed."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.3)


def our_model(n_layer=2, n_head=2, n_embd=16, block_size=12, bias=True, tied=True, gelu="tanh",
              **changes) -> GPT:
    torch.manual_seed(1)
    model = GPT(GPTConfig(257, block_size, n_layer, n_head, n_embd, 0.1, bias, tied, gelu=gelu,
                          **changes))
    scramble(model)
    return model.eval()


def their_model(n_layer=2, n_head=2, n_embd=16, block_size=12, bias=True, tied=True,
                gelu="gelu_new", rows=257) -> GPT2LMHeadModel:
    torch.manual_seed(2)
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=rows, n_positions=block_size, n_embd=n_embd, n_layer=n_layer, n_head=n_head,
        activation_function=gelu, tie_word_embeddings=tied, bos_token_id=256, eos_token_id=256))
    scramble(model)
    if not bias:
        for name, p in model.named_parameters():
            p.data.mul_(not name.endswith("bias"))
    return model.eval()


def ours_saved(folder: Path, model: GPT, tokenizer=BYTE, **state) -> Path:
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    store.save_weights(folder, model.config, weights, tokenizer.to_json(), {"from": "a test"})
    if state:
        store.write(folder, model.config, weights, None, tokenizer.to_json(), state)
    return folder


def theirs_saved(folder: Path, model: GPT2LMHeadModel | None = None, **options) -> Path:
    (model or their_model()).save_pretrained(folder, **options)
    (folder / "tokenizer.json").write_text(json.dumps(to_hf(BYTE)))
    return folder


def some_ids(block_size: int, rows: int = 257) -> torch.Tensor:
    return torch.randint(rows, (3, block_size), generator=torch.Generator().manual_seed(3))


def edit_config(folder: Path, **changes) -> Path:
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v != "left out"}))
    return folder


def edit_weights(folder: Path, change) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


# --------------------------------------------------------------------------------- the same logits


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_their_weights_give_their_logits_here(tmp_path, shape):
    *sizes, bias, tied, gelu = shape
    theirs = their_model(*sizes, bias, tied, {"tanh": "gelu_new", "erf": "gelu"}[gelu])
    folder = import_model(str(theirs_saved(tmp_path / "theirs", theirs)), tmp_path / "o", say=quiet)
    ours, tokenizer, state = load_model(folder)
    ids = some_ids(sizes[3])
    torch.testing.assert_close(ours.eval()(ids), theirs(ids).logits, atol=1e-5, rtol=1e-5)
    assert ours.config == GPTConfig(257, sizes[3], *sizes[:3], 0.1, bias, tied, gelu=gelu)
    assert tokenizer["hash"] == BYTE.hash and state["imported"]["from"] == "theirs"
    assert all(p.dtype == torch.float32 for p in ours.parameters())


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_our_weights_give_our_logits_there_and_come_back_bit_for_bit(tmp_path, shape):
    ours = our_model(*shape)
    saved = ours_saved(tmp_path / "ours", ours)
    export = export_run(str(saved), tmp_path / "e", None, False, quiet)
    theirs, ids = AutoModelForCausalLM.from_pretrained(export).eval(), some_ids(shape[3])
    assert isinstance(theirs, GPT2LMHeadModel) and theirs.dtype == torch.float32
    torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-5, rtol=1e-5)
    biases = [p for n, p in theirs.named_parameters() if n.endswith("bias")]
    assert biases and any(bool(p.any()) for p in biases) == shape[4]
    back, tokenizer, _ = load_model(import_model(str(export), tmp_path / "back", say=quiet))
    assert back.config == ours.config and tokenizer == BYTE.to_json()
    before = dict(ours.named_parameters())
    assert before.keys() == dict(back.named_parameters()).keys()
    assert all(torch.equal(p, before[n]) for n, p in back.named_parameters())


@torch.no_grad()
@pytest.mark.parametrize("gelu", ("gelu_new", "gelu_pytorch_tanh", "gelu"))
def test_each_gelu_is_its_own(tmp_path, gelu):
    theirs = their_model(gelu=gelu)
    ours, _, _ = load_model(import_model(str(theirs_saved(tmp_path / "theirs", theirs)),
                                         tmp_path / "ours", say=quiet))
    ids = some_ids(12)
    torch.testing.assert_close(ours.eval()(ids), theirs(ids).logits, atol=1e-5, rtol=1e-5)
    assert ours.config.gelu == ("erf" if gelu == "gelu" else "tanh")


def test_what_they_write_of_an_export_comes_back_too(tmp_path):
    """As after fine-tuning there: their own files, without ours."""
    export = export_run(str(ours_saved(tmp_path / "ours", our_model())), tmp_path / "e", None,
                        False, quiet)
    AutoModelForCausalLM.from_pretrained(export).save_pretrained(tmp_path / "again")
    AutoTokenizer.from_pretrained(export).save_pretrained(tmp_path / "again")
    a, b = (load_file(import_model(str(tmp_path / name), tmp_path / f"{name}2", say=quiet)
                      / "model.safetensors") for name in ("e", "again"))
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


# ----------------------------------------------------------------------------------- their ways


def rename(tensors: dict, old: str, new: str) -> None:
    for name in [n for n in tensors if n.startswith(old)]:
        tensors[new + name.removeprefix(old)] = tensors.pop(name)


@pytest.mark.parametrize("change", (
    lambda t: rename(t, "transformer.", ""),
    lambda t: t.update({"transformer.h.0.attn.bias": torch.ones(1, 1, 12, 12, dtype=torch.bool),
                        "transformer.h.1.attn.masked_bias": torch.tensor(-1e4)}),
    lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"].clone()}),
), ids=("no prefix", "mask buffers", "tied head stored"))
def test_other_ways_to_store_the_same(tmp_path, change):
    plain = import_model(str(theirs_saved(tmp_path / "plain")), tmp_path / "a", say=quiet)
    other = edit_weights(theirs_saved(tmp_path / "other"), change)
    other = import_model(str(other), tmp_path / "b", say=quiet)
    assert store.digest(plain / "model.safetensors") == store.digest(
        other / "model.safetensors")


def test_weights_in_several_files(tmp_path):
    theirs_saved(tmp_path / "theirs", max_shard_size="10KB")
    assert len([*(tmp_path / "theirs").glob("*.safetensors")]) > 1
    plain = import_model(str(theirs_saved(tmp_path / "plain")), tmp_path / "a", say=quiet)
    parts = import_model(str(tmp_path / "theirs"), tmp_path / "b", say=quiet)
    assert load_model(parts)[0].config == load_model(plain)[0].config
    (tmp_path / "theirs" / "model-00002-of-00002.safetensors").unlink(missing_ok=True)
    next((tmp_path / "theirs").glob("model-00001*")).unlink()
    with pytest.raises(UserError, match="missing, so the weights are not complete"):
        import_model(str(tmp_path / "theirs"), tmp_path / "c", say=quiet)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float64))
def test_other_precisions_become_fp32(tmp_path, dtype):
    theirs = their_model().to(dtype)
    ours = load_file(import_model(str(theirs_saved(tmp_path / "theirs", theirs)), tmp_path / "ours",
                                  say=quiet) / "model.safetensors")
    assert {w.dtype for w in ours.values()} == {torch.float32}
    assert torch.equal(ours["wte.weight"], theirs.transformer.wte.weight.float())


def test_padded_rows_are_cut(tmp_path):
    said: list[str] = []
    for tied in (True, False):
        theirs = their_model(rows=320, tied=tied)
        folder = theirs_saved(tmp_path / f"{tied}", theirs)
        ours, _, _ = load_model(import_model(str(folder), tmp_path / f"o{tied}", say=said.append))
        assert ours.config.vocab_size == 257 == ours.lm_head.weight.size(0)
        logits = theirs(some_ids(12)).logits[..., :257]
        torch.testing.assert_close(ours.eval()(some_ids(12)), logits, atol=1e-5, rtol=1e-5)
    assert "vocabulary: 320 rows, cut to the 257 ids of the tokenizer byte" in said


def test_what_is_left_out_takes_their_defaults(tmp_path):
    folder, said = theirs_saved(tmp_path / "theirs"), []
    values = json.loads((folder / "config.json").read_text())
    defaults = GPT2Config().to_dict()
    small = {k: v for k, v in values.items() if k == "model_type" or v != defaults.get(k)}
    (folder / "config.json").write_text(json.dumps(small | {"attn_pdrop": 0.3}))
    ours, _, _ = load_model(import_model(str(folder), tmp_path / "ours", say=said.append))
    assert ours.config.dropout == 0.1
    assert "dropout: 0.1, that of resid_pdrop; embd_pdrop and attn_pdrop are [0.1, 0.3]" in said
    config = importing.architecture(Path("c"), {"model_type": "gpt2"}, quiet)
    assert config == replace(GPTConfig(), dropout=0.1, bias=True)
    assert sum(torch.Size(s).numel() for s in stored_shapes(config).values()) == 124_439_808


def test_a_tokenizer_by_hand(tmp_path):
    folder = theirs_saved(tmp_path / "theirs")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"vocab\.json is missing; .*--tokenizer=SPEC"):
        import_model(str(folder), tmp_path / "ours", say=quiet)
    assert main(["import", str(folder), f"--out_dir={tmp_path / 'ours'}", "--tokenizer=byte"]) == 0
    assert load_model(tmp_path / "ours")[1]["hash"] == BYTE.hash
    for spec in ("char", "bpe:300"):
        with pytest.raises(UserError, match=f"--tokenizer={spec} is learned from a text"):
            main(["import", str(folder), f"--tokenizer={spec}"])


# ------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize("changes, message", (
    ({"model_type": "llama"}, "model_type is 'llama'"),
    ({"model_type": "left out"}, "model_type is None"),
    ({"activation_function": "relu"}, "activation_function is 'relu'"),
    ({"activation_function": []}, r"activation_function is \[\]"),
    ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06"),
    ({"n_inner": 63}, "n_inner is 63"),
    ({"scale_attn_weights": False}, "scale_attn_weights is False"),
    ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    ({"add_cross_attention": True}, "add_cross_attention is True"),
    ({"n_head": 3}, "n_embd=16 is not a multiple of n_head=3"),
    ({"n_embd": "16"}, "n_embd is '16'; this model has a whole number"),
    ({"n_layer": True}, "n_layer is True"),
    ({"n_layer": 10**9}, "n_layer is 1000000000, but there are weights of 2"),
    ({"n_layer": 10**30}, "n_layer is 10000000000"),
    ({"n_embd": 2**30, "n_head": 1}, r"is \(48,\), in the model of config.json \(3221225472,\)"),
    ({"n_positions": -1}, "n_positions is -1"),
    ({"n_positions": 13}, r"wpe.weight is \(12, 16\), in the model of config.json \(13, 16\)"),
    ({"vocab_size": 258}, r"wte.weight is \(257, 16\), in the model of config.json \(258, 16\)"),
    ({"resid_pdrop": 1.0}, "dropout=1.0"),
    ({"resid_pdrop": None}, "resid_pdrop is None; this model has a number"),
    ({"resid_pdrop": float("nan")}, "dropout=nan"),
    ({"tie_word_embeddings": False}, "lm_head.weight is absent"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
), ids=range(23))
def test_a_configuration_that_ours_cannot_be(tmp_path, changes, message):
    folder = edit_config(theirs_saved(tmp_path / "theirs"), **changes)
    with pytest.raises(UserError, match=message) as caught:
        import_model(str(folder), tmp_path / "ours", say=quiet)
    assert "\n" not in str(caught.value) and not (tmp_path / "ours").exists()


@pytest.mark.parametrize("change, message", (
    (lambda t: t.pop("transformer.h.1.ln_2.bias"), r"h.1.ln_2.bias is absent, .* \(16,\)"),
    (lambda t: t.update({"transformer.h.0.odd": torch.ones(3)}), r"h.0.odd is \(3,\), .* absent"),
    (lambda t: t.update({"transformer.h.7.odd": torch.ones(3)}), "n_layer is 2, .* weights of 3"),
    (lambda t: t.update({"score.weight": torch.ones(3)}), r"score.weight is \(3,\), .* absent"),
    (lambda t: t.update({"ln_f.bias": torch.ones(16)}), "ln_f.bias is there twice"),
    (lambda t: t.update({"transformer.ln_f.bias": torch.ones(16, dtype=torch.int32)}),
     "holds tensors of type I32, which no model has"),
    (lambda t: t.update({"transformer.h.0.mlp.c_fc.weight": torch.ones(64, 16)}),
     r"h.0.mlp.c_fc.weight is \(64, 16\), in the model of config.json \(16, 64\)"),
    (lambda t: t.update({"lm_head.weight": torch.ones(257, 16)}), "lm_head.weight is not wte"),
), ids=range(8))
def test_tensors_that_do_not_fit(tmp_path, change, message):
    folder = edit_weights(theirs_saved(tmp_path / "theirs"), change)
    with pytest.raises(UserError, match=message) as caught:
        import_model(str(folder), tmp_path / "ours", say=quiet)
    assert "\n" not in str(caught.value) and not (tmp_path / "ours").exists()


def test_fewer_rows_than_ids(tmp_path):
    folder = theirs_saved(tmp_path / "theirs", their_model(rows=256))
    with pytest.raises(UserError, match="256 rows of vocabulary are fewer than the 257 ids"):
        import_model(str(folder), tmp_path / "ours", say=quiet)


def test_a_pickle_is_not_opened(tmp_path):
    folder = theirs_saved(tmp_path / "theirs")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no model\.safetensors in it"):
        import_model(str(folder), tmp_path / "ours", say=quiet)
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch PWNED'\ntR.")
    with pytest.raises(UserError, match="is a pickle, and opening one can run code; .*convert it"):
        import_model(str(folder), tmp_path / "ours", say=quiet)


def links(folder: Path, name: str) -> None:
    outside = folder.parent / f"outside-{name}"
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)


def write_index(folder: Path, name: object) -> None:
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"wte": name}}))


def cut_weights(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 5000)


@pytest.mark.parametrize("attack, message", (
    (lambda f: links(f, "model.safetensors"), "a link out of"),
    (lambda f: links(f, "config.json"), "a link out of"),
    (lambda f: links(f, "tokenizer.json"), "a link out of"),
    (lambda f: write_index(f, "../theirs/other.safetensors"), "no map of tensors to files of its"),
    (lambda f: write_index(f, "/etc/passwd"), "no map of tensors"),
    (lambda f: write_index(f, 7), "no map of tensors"),
    (lambda f: write_index(f, ".."), "no map of tensors|a link out of|plain file"),
    (lambda f: write_index(f, "gone.safetensors"), "missing, so the weights are not complete"),
    (cut_weights, "damaged"),
    (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64), "damaged"),
    (lambda f: (f / "config.json").write_text("[" * 100_000), "is not JSON"),
    (lambda f: (f / "config.json").write_text("[]"), "no object"),
    (lambda f: os.truncate(f / "config.json", 65 << 20), "no plain file of at most 64 MiB"),
    (lambda f: os.truncate(f / "tokenizer.json", 65 << 20), "no plain file of at most 64 MiB"),
    (lambda f: (f / "config.json").unlink() or os.mkfifo(f / "config.json"), "a plain file"),
    (lambda f: (f / "config.json").unlink(), "no config.json; expected a folder of Hugging Face's"),
    (lambda f: (f / "config.json").unlink() or (f / "config.json").symlink_to("config.json"),
     "leads nowhere, its links go round|no config.json"),
    (lambda f: write_index(f, "a\0b.safetensors"), "no map of tensors"),
    (lambda f: write_index(f, "\ud800.safetensors"), "no map of tensors"),
    (lambda f: write_index(f, "x" * 5000 + ".safetensors"), "no map of tensors"),
), ids=range(20))
def test_hostile_folders(tmp_path, attack, message):
    folder = theirs_saved(tmp_path / "theirs")
    attack(folder)
    with pytest.raises(UserError, match=message) as caught:  # one line and no OSError
        import_model(str(folder), tmp_path / "ours", say=quiet)
    assert "\n" not in str(caught.value) and not (tmp_path / "ours").exists()


def test_only_imported_weights_are_replaced(tmp_path):
    folder, out = theirs_saved(tmp_path / "theirs"), tmp_path / "ours"
    import_model(str(folder), out, say=quiet)
    with pytest.raises(UserError, match="has imported weights already; --overwrite replaces them"):
        import_model(str(folder), out, say=quiet)
    import_model(str(folder), out, overwrite=True, say=quiet)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="holds something else"):
        import_model(str(folder), tmp_path / "mine", overwrite=True, say=quiet)
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


# ------------------------------------------------------------------------------------------ the hub


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """cache(repo) lays a small model into a hub cache, as huggingface_hub does; no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def lay(repo: str) -> Path:
        root, revision = tmp_path / "hub" / f"models--{repo.replace('/', '--')}", "5a" * 20
        plain = theirs_saved(tmp_path / "plain")
        snapshot = root / "snapshots" / revision
        for folder in (root / "blobs", root / "refs", snapshot):
            folder.mkdir(parents=True)
        (root / "refs" / "main").write_text(revision)
        for file in plain.iterdir():
            blob = root / "blobs" / store.digest(file)
            file.rename(blob)
            (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
        return tmp_path / "hub"

    return lay


@pytest.mark.parametrize("repo, name", (
    ("openai-community/gpt2", "gpt2"), ("gpt2", "gpt2"), ("gpt2-medium", "gpt2-medium"),
    ("some-one/a.model", "some-one/a.model")))
def test_a_name_of_the_hub_from_its_cache(tmp_path, cache, monkeypatch, capsys, repo, name):
    cache(repo)
    monkeypatch.chdir(tmp_path)
    Path("gpt2").mkdir()  # a folder is ./gpt2
    assert main(["import", name]) == 0
    folder = tmp_path / "out" / name.rpartition("/")[2]
    _, _, state = load_model(folder)
    assert state["imported"] == {"from": name, "revision": "5a" * 20}
    assert f"next: python sample.py --out_dir={folder}" in capsys.readouterr().out


def test_a_link_of_the_cache_may_not_leave_it(tmp_path, cache):
    cache("gpt2")
    config = next(tmp_path.glob("hub/*/snapshots/*/config.json"))
    config.resolve().rename(tmp_path / "config.json")
    config.unlink()
    config.symlink_to(tmp_path / "config.json")
    with pytest.raises(UserError, match="a link out of"):
        import_model("gpt2", tmp_path / "ours", say=quiet)


def test_init_from_gpt2_imports_once(tmp_path, cache, monkeypatch):
    said: list[str] = []
    cache("openai-community/gpt2")
    folder = pretrained("gpt2", said.append)
    assert folder == tmp_path / "out" / "gpt2" and len(said) == 1 and load_model(folder)
    monkeypatch.setattr(importing, "locate", None)
    assert pretrained("gpt2", said.append) == folder and len(said) == 1
    assert find_source("gpt2", said.append) == folder and find_source("scratch") is None


@pytest.mark.parametrize("name, about, what", (
    ("gpt2", {"from": "nanoGPT's ckpt.pt"}, "weights of nanoGPT's ckpt.pt"),
    ("gpt2", {"from": "gpt2", "revision": None}, "weights of gpt2"),  # of a folder of that name
    ("gpt2-xl", {"from": "openai-community/gpt2", "revision": "5a"}, "weights of openai-commun"),
    ("gpt2-medium", None, "something else")))
def test_other_weights_are_not_taken_for_gpt2(tmp_path, name, about, what):
    folder = ours_saved(tmp_path / "out" / name, our_model())
    state = {"step": 0, "rows": 0, "tokens": 0} | ({"imported": about} if about else {})
    ours_saved(folder, our_model(), **state)
    with pytest.raises(UserError, match=f"takes {folder}, but that holds {what}.* and not open"
                       f".*move it away, or .*--init_from={folder}") as caught:
        pretrained(name, quiet)
    assert "\n" not in str(caught.value)


def test_gpt2_that_is_damaged_is_named(tmp_path, cache):
    cache("openai-community/gpt2")
    path = pretrained("gpt2", quiet) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors: damaged"):
        pretrained("gpt2", quiet)


def test_gpt2_by_its_long_name_is_gpt2(tmp_path, cache):
    cache("openai-community/gpt2")
    folder = import_model("openai-community/gpt2", tmp_path / "out" / "gpt2", say=quiet)
    before = folder.stat().st_ino
    (folder / "ckpt").mkdir()  # of a run in it
    assert pretrained("gpt2", quiet) == folder and folder.stat().st_ino == before


def test_two_that_start_at_once_import_once(tmp_path, cache, monkeypatch):
    cache("openai-community/gpt2")
    calls, said, locate = [], [], importing.locate

    def slow(name: str):
        calls.append(name)
        time.sleep(0.3)
        return locate(name)

    monkeypatch.setattr(importing, "locate", slow)
    with ThreadPoolExecutor() as pool:
        made = [*pool.map(lambda _: pretrained("gpt2", said.append), range(3))]
    assert made == [tmp_path / "out" / "gpt2"] * 3 and calls == ["gpt2"] and load_model(made[0])
    assert said.count("waiting for another process that is importing gpt2") == 2
    assert {p.name for p in (tmp_path / "out").iterdir()} <= {"gpt2", ".gpt2.lock"}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A repository of the hub, by its files, and what was asked of it; no network."""
    there, asked = theirs_saved(tmp_path / "repo"), []

    def download(repo: str, revision: str | None = None, allow_patterns=()) -> str:
        asked.append((repo, revision, [*allow_patterns]))
        to = tmp_path / "hub" / "models--some--one" / "snapshots" / "ab"
        for path in [p for p in there.rglob("*") if p.is_file()]:
            name = path.relative_to(there).as_posix()
            if any(fnmatch(name, pattern) for pattern in allow_patterns):
                (to / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, to / name)
        return str(to)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return there, asked, tmp_path / "hub"


@pytest.mark.parametrize("parts", (1, 2))
def test_of_the_hub_the_weights_come_last_and_alone(tmp_path, hub, parts):
    there, asked, cached = hub
    if parts == 2:
        (there / "model.safetensors").unlink()
        theirs_saved(there, max_shard_size="10KB")
    wanted = {p.name for p in there.glob("*.safetensors")}
    (there / "onnx").mkdir()
    for extra in ("onnx/model.safetensors", "other.safetensors", "pytorch_model.bin"):
        (there / extra).write_bytes(b"x")
    import_model("some/one", tmp_path / "ours", say=quiet)
    (_, first, texts), (_, revision, files) = asked
    assert first is None and revision == "ab" and {*files} == wanted
    assert not any("*" in name or "safetensors" in name.replace(".index.json", "").replace(
        "model.safetensors", "") for name in texts) and {"config.json", "merges.txt"} <= {*texts}
    assert {p.name for p in cached.rglob("*.safetensors")} == wanted
    assert load_model(tmp_path / "ours")[2]["imported"] == {"from": "some/one", "revision": "ab"}


def test_of_a_model_that_is_none_no_weights_are_fetched(tmp_path, hub):
    there, asked, cached = hub
    edit_config(there, model_type="llama")
    with pytest.raises(UserError, match="model_type is 'llama'"):
        import_model("some/one", tmp_path / "ours", say=quiet)
    assert len(asked) == 1 and not [*cached.rglob("*.safetensors")]


def test_an_index_of_the_hub_cannot_ask_for_more(tmp_path, hub):
    there, asked, _ = hub
    for name in ("*", "../x.safetensors", "*.safetensors", "pytorch_model.bin"):
        (there / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(UserError, match="no map of tensors to files of its folder"):
            import_model("some/one", tmp_path / "ours", say=quiet)
    assert all("*" not in "".join(names) for _, _, names in asked)


@pytest.mark.parametrize("name", (".", "../theirs", "./", "sub/.."))
def test_a_folder_has_a_name_of_its_own(tmp_path, monkeypatch, capsys, name):
    """`.` is none: out/ itself, with all runs in it, would become a checkpoint."""
    folder = theirs_saved(tmp_path / "theirs")
    (folder / "sub").mkdir()
    monkeypatch.chdir(folder)
    assert main(["import", name]) == 0
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["theirs"]
    assert load_model(tmp_path / "out" / "theirs")[2]["imported"]["from"] == "theirs"


@pytest.mark.parametrize("name", ("gpt2", "nobody/nothing", "nothing"))
def test_a_name_that_is_not_to_be_had(tmp_path, cache, name):
    with pytest.raises(UserError, match=f"{name}: neither a folder nor to be had from huggingf"):
        import_model(name, tmp_path / "ours", say=quiet)


@pytest.mark.parametrize("name", ("no/such/folder", "./gone", "..", "/gone", "-x", "a b", ""))
def test_what_is_no_name_at_all(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no such folder, and no name of the hub|no config.json"):
        import_model(name, tmp_path / "ours", say=quiet)


# ------------------------------------------------------------------------------------------- export


def test_what_an_export_holds(tmp_path):
    ours = our_model(tied=False, gelu="erf")
    said: list[str] = []
    export = export_run(str(ours_saved(tmp_path / "ours", ours)), tmp_path / "a" / "b", None, False,
                        said.append)
    assert {p.name for p in export.iterdir()} == exporting.WRITTEN
    assert [p.name for p in export.parent.iterdir()] == ["b"]
    config = json.loads((export / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"], config["bos_token_id"]) == (257, 256, 256)
    assert config["activation_function"] == "gelu" and not config["tie_word_embeddings"]
    assert "read back by transformers, its logits differ by" in said[0]
    assert float(said[0].split("differ by ")[1].split()[0]) < 1e-5
    tokenizer = AutoTokenizer.from_pretrained(export)
    ids = tokenizer("héllo", return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(export)
    out = model.generate(**ids, max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(out[0]).startswith("héllo") and out.shape == (1, 10)


def test_the_card_tells_of_the_training(tmp_path):
    settings = {"dataset": "/home/somebody/secret/my|text.txt", "learning_rate": 3e-4, "seed": 7,
                "batch_size": 12, "optimizer": "adamw", "max_iters": 2000}
    ours_saved(tmp_path / "run", our_model(), step=1500, tokens=1_234_567, val_loss=1.23456,
               val_bpb=2.5, run={"settings": settings, "dataset_hash": "0" * 64})
    text = (export_run(str(tmp_path / "run"), tmp_path / "e", None, False, quiet)
            / "README.md").read_text()
    for row in ("| dataset | my&#124;text.txt |", "| updates | 1,500 |", "| batch_size | 12 |",
                "| tokens seen | 1,234,567 |", "| validation loss | 1.2346 |",
                "| validation bits per byte | 2.5 |", "| learning_rate | 0.0003 |",
                "| optimizer | adamw |", "| tokenizer | byte |", "AutoModelForCausalLM",
                "take these characters in a text for the special token"):
        assert row in text, row
    assert "somebody" not in text and text.startswith("---\nlibrary_name: transformers\n")


@pytest.mark.parametrize("run", ({"settings": 7}, [], None, {"settings": {"dataset": {}}}))
def test_a_card_of_a_state_from_elsewhere(tmp_path, run):
    ours_saved(tmp_path / "run", our_model(), step=1, tokens="<b>many\n\n# x", val_loss=[1],
               run=run)
    text = (export_run(str(tmp_path / "run"), tmp_path / "e", None, False, quiet)
            / "README.md").read_text()
    assert "| tokens seen | &#60;b&#62;many&#10;&#10;&#35; x |" in text


def test_a_model_of_chats_gets_their_template(tmp_path):
    chats = [{"messages": [{"role": "user", "content": f"What is {i}?"},
                           {"role": "assistant", "content": f"It is {i}, {{{{ x }}}}."}]}
             for i in range(40)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    data = Dataset(prepare([str(tmp_path / "chats.jsonl")], "chats", "byte", say=quiet))
    ours_saved(tmp_path / "run", our_model(), step=1, tokens=1,
               run={"settings": {"dataset": "chats"}, "dataset_hash": data.hash})
    export = export_run(str(tmp_path / "run"), tmp_path / "e", None, False, quiet)
    ids = AutoTokenizer.from_pretrained(export).apply_chat_template(
        chats[7]["messages"], return_dict=False)
    assert ids == encode_chat(json.dumps(chats[7]), BYTE)[0].tolist()
    card = (export / "README.md").read_text()
    assert "apply_chat_template" in card and "| training documents |" in card
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"user\n{i}", "completion": f"{i}"}) + "\n"
                            for i in range(40)))
    data = Dataset(prepare([str(path)], "pairs", "byte", say=quiet))
    ours_saved(tmp_path / "q", our_model(), step=1, tokens=1,
               run={"settings": {"dataset": str(path)}, "dataset_hash": data.hash})
    pairs = export_run(str(tmp_path / "q"), tmp_path / "g", None, False, quiet)
    assert AutoTokenizer.from_pretrained(pairs).chat_template is None
    card = (pairs / "README.md").read_text()
    assert "apply_chat_template" not in card and "| training documents |" in card
    plain = export_run(str(ours_saved(tmp_path / "p", our_model())), tmp_path / "f", None, False,
                       quiet)
    assert AutoTokenizer.from_pretrained(plain).chat_template is None


@pytest.mark.parametrize("logn", ("fixed", "clipped", "learned"))
def test_log_n_attention_has_no_word_there(tmp_path, logn):
    ours_saved(tmp_path / "run", our_model(attn_logn=logn))
    with pytest.raises(UserError, match=f"multiplies its queries by log n .attn_logn={logn}") as e:
        export_run(str(tmp_path / "run"), tmp_path / "e", None, False, quiet)
    assert "\n" not in str(e.value) and not (tmp_path / "e").exists()


def test_only_an_export_is_replaced(tmp_path):
    run = str(ours_saved(tmp_path / "run", our_model()))
    export = tmp_path / "e"
    export_run(run, export, None, False, quiet)
    before = store.digest(export / "model.safetensors")
    with pytest.raises(UserError, match="is there already; --overwrite replaces an export"):
        export_run(run, export, None, False, quiet)
    run = str(ours_saved(tmp_path / "run", our_model(n_layer=1)))
    replaced = partial(export_run, run, step=None, overwrite=True, say=quiet)
    replaced(export)
    assert store.digest(export / "model.safetensors") != before
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".tmp")) == []
    (export / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds thesis\.txt, which is of no export"):
        replaced(export)
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "run"):
        with pytest.raises(UserError, match="is there already|is of no export"):
            replaced(place)
    assert (tmp_path / "file").read_text() == "mine" and load_model(tmp_path / "run")


def test_a_folder_of_another_with_the_same_names_is_no_export(tmp_path):
    """As after fine-tuning there: all its names are ours, but not its weights."""
    run = str(ours_saved(tmp_path / "run", our_model()))
    theirs = theirs_saved(tmp_path / "theirs")
    (theirs / "README.md").write_text("days of work")
    assert {p.name for p in theirs.iterdir()} <= exporting.WRITTEN
    for content in (None, "{}", '{"format": 7}', "[]"):
        if content:
            (theirs / "bonsai.json").write_text(content)
        with pytest.raises(UserError, match="has no bonsai.json of an export"):
            export_run(run, theirs, None, True, quiet)
    assert (theirs / "README.md").read_text() == "days of work"


def test_without_a_run_the_newest_is_exported_and_said(tmp_path, capsys):
    run = ours_saved(tmp_path / "run", our_model())
    remember(run)
    assert main(["export", str(tmp_path / "e")]) == 0
    assert f"of the newest run: {run}" in capsys.readouterr().out
    assert json.loads((tmp_path / "e" / "bonsai.json").read_text())["format"] == 1
    with pytest.raises(UserError, match="run holds .*of no export|run is there already"):
        main(["export", str(run)])  # a run, and no DIR


def test_a_wrong_export_is_noticed_and_nothing_is_left(tmp_path, monkeypatch):
    run = ours_saved(tmp_path / "run", our_model())
    export_run(str(run), tmp_path / "e", None, False, quiet)
    before = store.digest(tmp_path / "e" / "model.safetensors")
    there = sorted(p.name for p in tmp_path.iterdir())
    stored = exporting.stored

    def broken(model: GPT, source: Path) -> dict:
        tensors = stored(model, source)
        name = "transformer.h.1.attn.c_proj.weight"  # square, so its shape tells nothing
        return tensors | {name: tensors[name].T.contiguous()}

    monkeypatch.setattr(exporting, "stored", broken)
    for transformers in (True, False):
        if not transformers:
            monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(RuntimeError, match="the logits of .* differ by"):
            export_run(str(run), tmp_path / "e", None, True, quiet)
        assert sorted(p.name for p in tmp_path.iterdir()) == there
        assert store.digest(tmp_path / "e" / "model.safetensors") == before


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_without_transformers_a_gpt2_of_ours_reads_it_back(tmp_path, monkeypatch, shape):
    monkeypatch.setitem(sys.modules, "transformers", None)
    said: list[str] = []
    export_run(str(ours_saved(tmp_path / "run", our_model(*shape))), tmp_path / "e", None, False,
               said.append)
    assert "transformers is not installed" in said[0]
    assert float(said[0].split("differ by ")[1].split()[0]) < 1e-5


@pytest.mark.parametrize("value", (math.nan, math.inf))
def test_weights_that_are_no_numbers_go_neither_in_nor_out(tmp_path, value):
    theirs = theirs_saved(tmp_path / "theirs")
    edit_weights(theirs, lambda t: t["transformer.wte.weight"].__setitem__((0, 3), value))
    with pytest.raises(UserError, match="transformer.wte.weight holds NaN or infinity"):
        import_model(str(theirs), tmp_path / "w", say=quiet)
    model = our_model()
    with torch.no_grad():
        model.h[1].ln_2.weight[2] = value
    ours_saved(tmp_path / "run", model)
    with pytest.raises(UserError, match="run: h.1.ln_2.weight holds NaN or infinity"):
        export_run(str(tmp_path / "run"), tmp_path / "e", None, False, quiet)
    assert not (tmp_path / "w").exists() and not (tmp_path / "e").exists()
    assert not [*tmp_path.glob(".tmp*")]


def test_numbers_beyond_fp32_are_no_numbers(tmp_path):
    theirs = theirs_saved(tmp_path / "theirs")
    edit_weights(theirs, lambda t: t.update({"transformer.ln_f.bias": torch.full(
        (16,), 1e300, dtype=torch.float64)}))
    with pytest.raises(UserError, match="ln_f.bias holds NaN or infinity"):
        import_model(str(theirs), tmp_path / "w", say=quiet)


def test_the_folder_one_is_in_is_not_replaced(tmp_path, monkeypatch):
    run = ours_saved(tmp_path / "run", our_model())
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for place in (Path("."), Path(""), tmp_path / "here"):
        with pytest.raises(UserError, match="is the folder that you are in; give the name of a n"):
            export_run(str(run), place, None, True, quiet)
    assert [p.name for p in tmp_path.iterdir() if p.name[0] == "."] == []


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    run = ours_saved(tmp_path / "run", our_model())

    def full(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(exporting, "write_tensors", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        export_run(str(run), tmp_path / "e", None, False, quiet)
    assert spell_os_error(caught.value) == f"No space left on device: {tmp_path / 'e'}"


@pytest.mark.slow
def test_three_that_import_into_one_folder(tmp_path):
    """One of them does; what is there is whole, and nothing is left beside it."""
    theirs = theirs_saved(tmp_path / "theirs")
    (tmp_path / "place").mkdir()
    command = [sys.executable, "-m", "kit.hf", "import", str(theirs)]
    for more in ((), ("--overwrite",)):
        running = [subprocess.Popen([*command, f"--out_dir={tmp_path / 'place' / 'w'}", *more],
                                    cwd=CLONE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                    text=True) for _ in range(3)]
        told = [(*p.communicate(), p.returncode) for p in running]
        assert all(code == 0 or (code == 2 and err.count("\n") == 1) for _, err, code in told), told
        done = sum(code == 0 for *_, code in told)
        assert done >= 1 if more else done == 1
        assert load_model(tmp_path / "place" / "w")
        assert [p.name for p in (tmp_path / "place").iterdir()] == ["w"]


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    from safetensors import SafetensorError

    def full(*args, **options):
        raise SafetensorError("No space left on device (os error 28)")

    ours_saved(tmp_path / "run", our_model())
    monkeypatch.setattr(store, "save_file", full)
    with pytest.raises(OSError, match="No space left on device"):
        export_run(str(tmp_path / "run"), tmp_path / "e", None, False, quiet)
    assert not [p for p in tmp_path.iterdir() if "e" in p.name.removeprefix(".tmp-")[:1]]


def test_of_a_run_the_best_or_a_step(tmp_path, save):
    run = tmp_path / "run"
    models = {step: our_model(n_layer=1, n_embd=8 * step) for step in (1, 2)}
    for step, model in models.items():
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        run.mkdir(exist_ok=True)
        store.save(run, model.config, weights, {"a": torch.ones(1)}, BYTE.to_json(),
                        {"step": step, "best_step": 1, "tokens": step}, 9)
    for step, width in ((None, 8), (2, 16)):
        export = export_run(str(run), tmp_path / f"e{step}", step, False, quiet)
        assert json.loads((export / "config.json").read_text())["n_embd"] == width
    with pytest.raises(UserError, match="no checkpoint for --step=3; steps there: 1, 2"):
        export_run(str(run), tmp_path / "e", 3, False, quiet)
    with pytest.raises(UserError, match="no such folder"):
        export_run(str(tmp_path / "gone"), tmp_path / "e", None, False, quiet)


# ------------------------------------------------------------------------------ as others call it


def export_of(tmp_path: Path, block_size: int, tokenizer=BYTE) -> Path:
    model = GPT(replace(our_model(block_size=block_size).config, vocab_size=tokenizer.vocab_size))
    scramble(model)
    return export_run(str(ours_saved(tmp_path / "run", model.eval(), tokenizer)), tmp_path / "e",
                      None, False, quiet)


@pytest.mark.parametrize("block_size, length", ((1, 1), (8, 8), (20, 19), (64, 64)))
def test_the_files_that_decide_what_a_call_computes(tmp_path, block_size, length):
    """In transformers 4 a tokenizer that names no inputs gives token_type_ids, which GPT-2 adds to
    its embeddings; a pipeline without a length writes 256 tokens, and in transformers 4 one whose
    max_length is 20, that version's default, does too."""
    export = export_of(tmp_path, block_size)
    assert json.loads((export / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": block_size,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False, "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    assert json.loads((export / "generation_config.json").read_text()) == {
        "do_sample": True, "temperature": 0.8, "top_k": 50, "max_length": length,
        "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}


def test_the_same_files_of_characters(tmp_path):
    export = export_of(tmp_path, 12, make_tokenizer("char", ["To be, or not\n"]))
    assert json.loads((export / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 12,
        "model_input_names": ["input_ids", "attention_mask"], "clean_up_tokenization_spaces": False}
    assert json.loads((export / "generation_config.json").read_text()) == {
        "do_sample": True, "temperature": 0.8, "top_k": 50, "max_length": 12,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@torch.no_grad()
@pytest.mark.parametrize("block_size", (8, 20, 64))
def test_no_call_runs_past_the_positions(tmp_path, block_size):
    export = export_of(tmp_path, block_size)
    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForCausalLM.from_pretrained(export).eval()
    batch = tokenizer("The", return_tensors="pt")
    assert batch.keys() == {"input_ids", "attention_mask"}
    assert torch.equal(model(**batch).logits, model(batch["input_ids"]).logits)
    write = pipeline("text-generation", model=str(export), tokenizer=str(export))
    for _ in range(4):  # a text may end early
        assert 3 < model.generate(**batch).size(1) <= block_size
        assert write("The")[0]["generated_text"].startswith("The")
    with pytest.raises(ValueError, match="`max_length` is set to"):  # and no IndexError
        write("T" * block_size)


@torch.no_grad()
def test_prompts_of_different_lengths_are_padded_on_the_left(tmp_path):
    """And texts that are only read on the right: GPT-2's own positions count the padding."""
    export = export_of(tmp_path, 12)
    model = AutoModelForCausalLM.from_pretrained(export).eval()
    tokenizer = AutoTokenizer.from_pretrained(export)
    left = AutoTokenizer.from_pretrained(export, padding_side="left")
    out = model.generate(**left(["To be", "To"], return_tensors="pt", padding=True), top_k=1)
    alone = model.generate(**tokenizer("To", return_tensors="pt"), top_k=1)
    new = alone[0, 2:9]
    assert torch.equal(out[1, 5 : 5 + len(new)], new)
    batch = tokenizer(["To be", "To"], return_tensors="pt", padding=True)
    one = model(**tokenizer("To", return_tensors="pt")).logits[0]
    torch.testing.assert_close(model(**batch).logits[1, :2], one, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block_size, text", ((1, None), (2, None), (12, None), (200, None),
                                              (12, "7'\"\\\n"), (12, "{}"), (2, "Tim Once")))
def test_the_call_on_the_card_works(tmp_path, monkeypatch, capsys, block_size, text):
    tokenizer = make_tokenizer("char", [text]) if text else BYTE
    export = export_of(tmp_path, block_size, tokenizer)
    _, code, *_ = (export / "README.md").read_text().split("```")
    monkeypatch.chdir(export)
    exec(code.removeprefix("python\n"), {})
    assert capsys.readouterr().out


def give_token_types(monkeypatch) -> None:
    make = exporting.tokenizer_config
    monkeypatch.setattr(exporting, "tokenizer_config", lambda *args: make(*args) | {
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"]})


def swap_two_ids(monkeypatch) -> None:
    def swapped(tokenizer) -> dict:
        value = to_hf(tokenizer)
        vocab = value["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
        return value

    monkeypatch.setattr(hf_tokenizer, "to_hf", swapped)


@pytest.mark.parametrize("fault, message", (
    (give_token_types, "the logits of .* differ by"), (swap_two_ids, "other ids than byte")))
def test_what_only_a_call_through_the_tokenizer_shows(tmp_path, monkeypatch, fault, message):
    fault(monkeypatch)
    with pytest.raises(RuntimeError, match=message):
        export_of(tmp_path, 64)
    assert not (tmp_path / "e").exists() and not [*tmp_path.glob(".tmp*")]


# ------------------------------------------------------------------------------------- the commands


@pytest.mark.parametrize("arguments, hint", (
    ([], "command"), (["imprt", "gpt2"], "imprt"), (["import"], "NAME"), (["export"], "DIR"),
    (["import", "gpt2", "--outdir=x"], "did you mean --out_dir"),
    (["export", "a", "b", "--step=x"], "--step")))
def test_a_mistake_is_one_line(capsys, arguments, hint):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.count("\n") == 1 and hint in error


def test_nothing_heavy_is_imported_before_it_is_needed():
    heavy = {"huggingface_hub", "tokenizers", "transformers", "lm_eval", "tiktoken", "datasets"}
    for path in (CLONE / "kit" / "hf").glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [
                node.module] if isinstance(node, ast.ImportFrom) else []
            assert not heavy & {n.split(".")[0] for n in names}, path.name


@pytest.mark.slow
def test_the_commands_in_processes_of_their_own(tmp_path, cache):
    hub = cache("openai-community/gpt2")
    env = os.environ | {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1",
                        "BONSAI_OUT": str(tmp_path / "out")}

    def run(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, "-m", "kit.hf", *words], cwd=CLONE, env=env,
                              capture_output=True, text=True)

    done = run("import", "gpt2")
    assert done.returncode == 0 and "written to" in done.stdout, done.stderr
    done = run("export", str(tmp_path / "out" / "gpt2"), str(tmp_path / "e"))
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert from_json(json.loads((tmp_path / "out/gpt2/tokenizer.json").read_text())).eot == 256


@pytest.mark.slow
def test_lm_eval_measures_the_same_bits_per_byte(tmp_path):
    """EleutherAI's harness on an export and a local text, offline."""
    pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    text = "To be, or not to be: thát is the question.\n" * 11
    text = text.encode()[: 12 * 40].decode()  # whole windows; lm_eval gives a last one more context
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": text}))
    (tmp_path / "task.yaml").write_text(
        f"task: my_text\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: "
        f"{tmp_path / 'text.jsonl'}\ntest_split: test\noutput_type: loglikelihood_rolling\n"
        'doc_to_text: ""\ndoc_to_target: "{{text}}"\nmetric_list:\n  - metric: bits_per_byte\n')
    ours = our_model()
    export = export_run(str(ours_saved(tmp_path / "run", ours)), tmp_path / "e", None, False, quiet)
    env = os.environ | {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1",
                        "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args",
         f"pretrained={export},dtype=float32", "--tasks", "my_text", "--include_path",
         str(tmp_path), "--device", "cpu", "--batch_size", "8", "--output_path",
         str(tmp_path / "results")],
        env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(next((tmp_path / "results").rglob("*.json")).read_text())["results"]
    ids = torch.tensor([BYTE.eot, *BYTE.encode(text)])
    with torch.no_grad():
        loss, n = ours(ids[:-1].view(-1, 12), ids[1:].view(-1, 12))
    expected = loss.item() / n.item() / math.log(2)  # a byte is a token
    assert results["my_text"]["bits_per_byte,none"] == pytest.approx(expected, abs=1e-4)

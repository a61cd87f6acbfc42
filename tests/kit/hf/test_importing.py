"""What importers share: where they may write, whose tokenizer it is, what becomes of weights."""

import os
from pathlib import Path

import pytest
import torch

from data.making.tokenizers import make_tokenizer
from extras.weights import llmc, nanogpt_ckpt
from kit.checkpoint import load_model
from kit.errors import UserError
from kit.hf import importing
from kit.hf.gpt2 import layers_in, shapes_with_biases
from kit.run import store
from model import GPT, GPTConfig

BYTE = make_tokenizer("byte")
CONFIG = GPTConfig(257, 8, 2, 2, 16, bias=True)
IMPORTERS = {
    "hf": lambda out, overwrite: importing.import_model("no/such/folder", out, "byte", overwrite),
    "nanogpt": lambda out, overwrite: nanogpt_ckpt.convert(Path("gone.pt"), out, "byte", "erf",
                                                           overwrite),
    "llmc": lambda out, overwrite: llmc.convert(Path("gone.bin"), out, "byte", overwrite)}


def weights_of(config: GPTConfig = CONFIG, rows: int = 257) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = shapes_with_biases(config) | {"wte.weight": (rows, config.n_embd)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("convert", IMPORTERS.values(), ids=IMPORTERS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_the_place_is_looked_at_before_the_source(tmp_path, convert, overwrite):
    """There is no source here: what is said is about the place alone."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for place in ("mine", "file", "dangling"):
        with pytest.raises(UserError, match=f"{place} holds something else than imported weights"):
            convert(tmp_path / place, overwrite)
    (tmp_path / "out").mkdir()
    for place in (tmp_path / "out", tmp_path, Path("/"), tmp_path / "out" / "x" / ".."):
        with pytest.raises(UserError, match=f"{place} holds all runs; give --out_dir a folder of"):
            convert(place, overwrite)
    assert not [*(tmp_path / "out").iterdir()]


@pytest.mark.parametrize("convert", IMPORTERS.values(), ids=IMPORTERS)
def test_a_run_inside_imported_weights_is_not_replaced(tmp_path, convert):
    out = tmp_path / "w"
    importing.save(out, CONFIG, weights_of(), BYTE, {"from": "a test"}, print)
    with pytest.raises(UserError, match="w has imported weights already; --overwrite replaces"):
        convert(out, False)
    (out / "ckpt").mkdir()  # as train.py --init_from=w --out_dir=w makes it
    (out / "ckpt" / "days of work").write_text("")
    with pytest.raises(UserError, match="w holds something else than imported weights"):
        convert(out, True)
    with pytest.raises(UserError, match="w holds something else than imported weights"):
        importing.save(out, CONFIG, weights_of(), BYTE, {"from": "a test"}, print)
    assert (out / "ckpt" / "days of work").exists() and load_model(out)


@pytest.mark.parametrize("convert", IMPORTERS.values(), ids=IMPORTERS)
@pytest.mark.parametrize("place", [".", "", "../here"])
def test_the_folder_one_is_in_is_not_replaced(tmp_path, monkeypatch, convert, place):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match="is the folder that you are in; give one of its own"):
        convert(Path(place), True)


def test_a_place_whose_links_go_round(tmp_path):
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(UserError, match="round"):
        importing.refuse_out_dir(tmp_path / "round", True)


def test_weights_put_there_meanwhile_stay(tmp_path, monkeypatch):
    """As if another process were the faster one, while the weights are being written."""
    out, write_tensors = tmp_path / "w", store.write_tensors

    def slowly(*args, **options):
        monkeypatch.setattr(store, "write_tensors", write_tensors)
        with monkeypatch.context() as patch:
            patch.setattr("os.getpid", os.getppid)
            importing.save(out, CONFIG, weights_of(), BYTE, {"from": "the first"}, print)
        write_tensors(*args, **options)

    monkeypatch.setattr(store, "write_tensors", slowly)
    with pytest.raises(UserError, match="has imported weights already"):
        importing.save(out, CONFIG, weights_of(), BYTE, {"from": "the second"}, print)
    assert load_model(out)[2]["imported"] == {"from": "the first"}
    assert [*tmp_path.glob(".tmp*")] == []


def test_what_a_terminal_would_obey_is_spelled_out(tmp_path):
    said: list[str] = []
    out = tmp_path / "w\x1b[2J\n"
    importing.save(out, CONFIG, weights_of(), BYTE, {"from": "a test"}, said.append)
    told = "".join([*said, importing.next_step(out)])
    assert "\x1b" not in told and r"w\x1b[2J" in told


@pytest.mark.parametrize("changes", [{}, {"n_layer": 1, "tie_embeddings": False}], ids=str)
def test_the_shapes_are_the_models(changes):
    config = GPTConfig(**vars(CONFIG) | changes)
    model = GPT(config)
    expected = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert sorted(shapes_with_biases(config).items()) == sorted(expected)
    assert layers_in(shapes_with_biases(config)) == config.n_layer


def test_rows_and_zero_biases_are_left_out_and_said(tmp_path):
    said: list[str] = []
    weights = weights_of(rows=320)
    zeros = {name: torch.zeros_like(w) for name, w in weights.items() if name.endswith(".bias")}
    for folder, given, bias in (("a", weights, True), ("b", weights | zeros, False)):
        importing.save(tmp_path / folder, CONFIG, {n: w.double() for n, w in given.items()}, BYTE,
                       {"from": "a test"}, said.append)
        model, _, state = load_model(tmp_path / folder)
        assert model.config.bias == bias and state["imported"] == {"from": "a test"}
        for name, p in model.named_parameters():
            assert torch.equal(p, weights[name][:257] if name == "wte.weight" else weights[name])
    assert said[0] == said[2] == "vocabulary: 320 rows, cut to the 257 ids of the tokenizer byte"
    assert said[3] == "all biases are zero: left out" and len(said) == 5
    assert CONFIG.bias and CONFIG.vocab_size == 257  # what is handed in is left alone


@pytest.mark.parametrize("spec", ["char", "bpe:300"])
def test_no_tokenizer_is_learned_without_text(spec):
    for ask in (importing.tokenizer_of, lambda spec: importing.guess_tokenizer(spec, 9, Path("x"))):
        with pytest.raises(UserError, match=f"--tokenizer={spec} is learned from a text"):
            ask(spec)


@pytest.mark.parametrize("run, expected", [
    ({"settings": {"dataset": "x", "seed": 1}, "dataset_hash": "ab"},
     ({"dataset": "x", "seed": 1}, "x", "ab")),
    ({"settings": {"dataset": {}}, "dataset_hash": 7}, ({"dataset": {}}, None, None)),
    ({"settings": 7}, ({}, None, None)), ([], ({}, None, None)), (None, ({}, None, None))],
    ids=range(5))
def test_what_a_state_says_of_its_run(run, expected):
    assert store.trained_with({"run": run}) == expected
    assert store.trained_with({}) == ({}, None, None)

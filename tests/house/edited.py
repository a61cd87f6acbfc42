"""Does jobs for tests/test_edits.py: a line of JSON in, a line of JSON out, a fork for each.

torch is imported once; the clone's modules by each fork, with the edited model.py in place.
    {"edited": FOLDER, "same": bool, "kinds": [...]}     compare what FOLDER/model.py writes
    {"argv": [...], "cwd": ..., "env": ..., "out": ...}  run a script or -m module, as Python would
    {"checkpoint": ..., "clone": ..., "kind": ..., "texts": [...]}  compare texts with a plain loop
"""

import json
import os
import runpy
import signal
import sys
import tempfile
import traceback
import zlib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot  # noqa: F401
import safetensors.torch
import tokenizers  # noqa: F401
import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.nn.utils.parametrizations
import tqdm  # noqa: F401
import tyro  # noqa: F401

CLONE = Path(__file__).parents[2]
SHAPE = {"vocab_size": 61, "block_size": 36, "n_layer": 2, "n_head": 4, "n_embd": 32}
LENGTHS, NEW = (12, 34, 47), 28  # of the prompts, the last of which is longer than the context
TIE = 1e-3  # two logits that are closer than this may change places


def compare(edited: str, same: bool, kinds: list[str]) -> dict[str, Any]:
    """Write with the edited model in every way and compare with a plain loop over it.

    kinds: of weights. Returns for each kind what is wrong, and what was said of the model.
    """
    sys.path[:0] = [edited, str(CLONE)]
    import model

    assert Path(model.__file__).parent == Path(edited)
    from kit.errors import UserError
    from kit.inference import prepare
    from kit.kernels import native

    native.library()  # compiled now, if it is not yet
    torch.manual_seed(0)
    prompts = [torch.randint(SHAPE["vocab_size"], (n,)).tolist() for n in LENGTHS]
    failed, said = {}, {}
    for kind in kinds:
        wrong = failed[kind] = []
        plain = plain_texts(build(model, kind), prompts)
        if kind == "float32":
            wrong += [look_at_difference(model, same), other_logits(model, prompts[0])]
            wrong += [f"a dull text: {ids}" for ids, _ in plain if len(set(ids)) < 4]
        quick = build(model)
        try:
            said[kind] = prepare(quick, torch.device("cpu"), settings_for(kind), print)
        except UserError as e:
            said[kind], failed[kind] = str(e), [f"refused: {e}"]
            continue
        for way, write in ("steps", by_steps), ("engine", by_engine):
            try:
                texts = write(quick, prompts)
            except Exception:
                wrong.append(f"{way}: {traceback.format_exc()}")
                continue
            wrong += [why and f"{way}, prompt {i}: {why}" for i, why in enumerate(
                first_difference(ids, *wanted) for ids, wanted in zip(texts, plain, strict=True))]
        failed[kind] = [text for text in wrong if text]
    return {"failed": failed, "said": said}


def settings_for(kind: str) -> SimpleNamespace:
    """The settings of sample.py that ask for a kind of weights."""
    quantize = kind if kind.startswith("int") else "none"
    dtype = "auto" if quantize != "none" else kind
    return SimpleNamespace(dtype=dtype, quantize=quantize, kernels="auto", compile="auto")


def build(model: Any, kind: str = "float32") -> torch.nn.Module:
    """The model with weights large enough for texts that do not repeat one token."""
    torch.manual_seed(0)
    gpt = model.GPT(model.GPTConfig(**SHAPE)).eval().requires_grad_(False)
    for name, p in sorted(gpt.named_parameters()):
        random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(p.shape, generator=random)
        p.copy_(2 * noise / noise.norm(dim=-1, keepdim=True) if p.ndim > 1 else p + 0.2 * noise)
    if kind != "float32":
        from kit.kernels.leaves import round_linears
        round_linears(gpt, kind)
    return gpt


@torch.inference_mode()
def look_at_difference(model: Any, same: bool) -> str:
    """Whether the edit changed the logits, with the weights that both models have; "" if right."""
    spec = spec_from_file_location("model_as_it_was", CLONE / "model.py")
    sys.modules[spec.name] = before = module_from_spec(spec)
    spec.loader.exec_module(before)
    gpt, old = build(model), build(before)
    theirs = dict(gpt.named_parameters())
    for ours, p in zip(theirs.values(), old.parameters(), strict=False) if same else ():
        p.copy_(ours)
    for name, p in old.named_parameters() if not same else ():
        if name in theirs and theirs[name].shape == p.shape:
            p.copy_(theirs[name])
    idx = torch.randint(SHAPE["vocab_size"], (2, 20))
    apart = (gpt(idx) - old(idx)).abs().max()
    if same:
        return "" if apart < 1e-4 else f"the logits differ by {apart}"
    return "" if apart > 1e-4 else f"the logits are the same to {apart}"


@torch.inference_mode()
def plain_texts(gpt: torch.nn.Module, prompts: list[list[int]], new_tokens: int = NEW
                ) -> list[tuple[list[int], list[float]]]:
    """The likeliest token again and again, each text with the gap between its two likeliest.

    Rows are padded on the right, which no position before them sees.
    """
    size = gpt.config.block_size
    windows, texts = [prompt[-size:] for prompt in prompts], [([], []) for _ in prompts]
    for _ in range(new_tokens):
        longest = max(map(len, windows))
        logits = gpt(torch.tensor([w + [0] * (longest - len(w)) for w in windows])).float()
        for row, (window, (new, gaps)) in enumerate(zip(windows, texts, strict=True)):
            (best, second), ids = logits[row, len(window) - 1].topk(2)
            new.append(int(ids[0]))
            gaps.append(float(best - second))
            if len(window) == size:  # the newest half stays, with the new one
                del window[: size - size // 2 + 1]
            window.append(new[-1])
    return texts


def first_difference(ids: list[int], wanted: list[int], gaps: list[float]) -> str:
    """Where a text leaves the wanted one, in words; "" if nowhere before two tokens are as likely.
    """
    if len(ids) != len(wanted):
        return f"{len(ids)} tokens, not {len(wanted)}"
    for at, (id, other, gap) in enumerate(zip(ids, wanted, gaps, strict=True)):
        if gap < TIE:
            return ""
        if id != other:
            return f"token {at} is {id}, not {other}, whose logit is larger by {gap:.3g}"
    return ""


def by_steps(gpt: torch.nn.Module, prompts: list[list[int]]) -> list[list[int]]:
    """All prompts side by side, with kit.writing.window."""
    from kit.writing.window import steps

    lengths = torch.tensor([min(len(p), gpt.config.block_size) for p in prompts])
    idx = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
    for row, prompt, n in zip(idx, prompts, lengths, strict=True):
        row[:n] = torch.tensor(prompt[-n:])
    rows = steps(gpt, idx, NEW, lambda logits: logits.argmax(-1), lengths=lengths)
    return torch.stack(list(rows), dim=1).tolist()


def by_engine(gpt: torch.nn.Module, prompts: list[list[int]]) -> list[list[int]]:
    """All prompts at once, with the engine of the server."""
    from extras.serve.engine import Engine, Request

    class Letters:
        def token_bytes(self, id: int) -> bytes:
            return b"%c" % (33 + id)

    engine = Engine(gpt, Letters(), rows=len(prompts))
    try:
        jobs = [engine.submit(Request(p, NEW, temperature=0)) for p in prompts]
        while not all(job.ended for job in jobs):
            engine.thread.join(0.001)
    finally:
        engine.close()
    errors = [job.ended for job in jobs if job.ended != "length"]
    if errors:
        raise RuntimeError(errors[0])
    return [[token.id for token in job.take()] for job in jobs]


@torch.inference_mode()
def other_logits(model: Any, prompt: list[int]) -> str:
    """Where what is written is drawn from other logits than those of model(idx); "" if nowhere."""
    from kit.writing.recompute import settle
    from kit.writing.window import Window

    gpt = build(model)
    wanted = gpt(torch.tensor([prompt]))[0, -1]
    settle(gpt)
    logits = gpt.logits(Window(gpt, torch.tensor([prompt])).x)[0]
    apart = float((logits - wanted).abs().max())
    return "" if apart < 1e-3 else f"logits that are drawn from differ from model(idx) by {apart}"


def compare_with_plain(checkpoint: str, clone: str, kind: str, texts: list[tuple[str, str]]
                       ) -> dict[str, list[str]]:
    """Compare texts, each a prompt and what was written, with a plain loop over a checkpoint."""
    sys.path.insert(0, clone)
    import model
    from data.tokenizer import from_json

    folder = Path(checkpoint)
    config = json.loads((folder / "model.json").read_text())
    fields = {key: config[key] for key in config.keys() - {"format", "seal"}}
    gpt = model.GPT(model.GPTConfig(**fields)).eval().requires_grad_(False)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    named = dict(gpt.named_parameters()) | dict(gpt.named_buffers())
    assert named.keys() == weights.keys()
    for name, p in named.items():
        p.copy_(weights[name])
    if kind != "float32":
        from kit.kernels.leaves import round_linears
        round_linears(gpt, kind)
    tokenizer = from_json(json.loads((folder / "tokenizer.json").read_text()))
    written = [tokenizer.encode(text) for _, text in texts]
    plain = plain_texts(gpt, [tokenizer.encode(prompt) for prompt, _ in texts], len(written[0]))
    failed = [first_difference(ids, *wanted) for ids, wanted in zip(written, plain, strict=True)]
    return {"failed": [text for text in failed if text]}


def run_script(argv: list[str], cwd: str, env: dict[str, str], out: str) -> dict[str, int]:
    """Run argv as `python *argv` would, with stdout and stderr in `out`.stdout and .stderr."""
    os.chdir(cwd)
    os.environ.update(env)
    for fd, name in (1, "stdout"), (2, "stderr"):
        file = os.open(f"{out}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, fd)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    sys.path[0] = cwd
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        return {"code": end.code or 0}
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return {"code": 0}


def forked(job: dict[str, Any]) -> dict[str, Any]:
    """Do a job in a process of its own."""
    with tempfile.NamedTemporaryFile() as answer:
        if child := os.fork():
            os.waitpid(child, 0)
            return json.loads(answer.read() or b'{"error": "it ended", "code": -1}')
        signal.alarm(120)
        try:
            task = run_script if "argv" in job else compare if "edited" in job else \
                compare_with_plain
            result = task(**job)
        except BaseException:
            result = {"error": traceback.format_exc(), "code": 1}
        Path(answer.name).write_text(json.dumps(result))
        os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(forked(json.loads(line))), flush=True)

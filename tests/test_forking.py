"""docs/FORKING.md: its blocks, applied to a copy of the clone and run, do what the page says."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

CLONE = Path(__file__).parents[1]
PAGE = (CLONE / "docs" / "FORKING.md").read_text(encoding="utf-8")
RUN = """
import json, os, runpy, shlex, sys
from contextlib import nullcontext, redirect_stdout

sys.path.insert(0, os.getcwd())
for line in json.load(sys.stdin):
    words, into = shlex.split(line), nullcontext()
    assert words.pop(0) == "python", line
    if ">" in words:
        into, words = redirect_stdout(open(words[-1], "w")), words[:-2]
    print(f"$ {line}", flush=True)
    try:
        with into:
            if words[0] == "-m":
                sys.argv = words[1:]
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            elif words[0] == "-c":
                exec(words[1], {})
            else:
                sys.argv = words
                runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
"""  # commands one after the other in one process: to import torch takes longer than to run them


class Recipe(NamedTuple):
    files: dict[str, str]  # name -> text of a new file
    changes: list[tuple[str, str, str]]  # file, lines that are there, lines that take their place
    commands: list[str]


def recipes() -> dict[str, Recipe]:
    """The page by its headings; what stands before the first is called ''."""
    found = {}
    for section in re.split(r"^## ", "\n" + PAGE, flags=re.MULTILINE):
        title = section.partition("\n")[0]
        recipe = found[title] = Recipe({}, [], [])
        for kind, text in re.findall(r"^```(\w+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
            if kind == "bash":
                recipe.commands.extend(text.splitlines())
            elif kind == "diff":
                recipe.changes.extend(changes(text))
            else:
                first = text.partition("\n")[0]
                recipe.files[first.removeprefix("# ")] = text
    return found


def changes(text: str) -> list[tuple[str, str, str]]:
    """The changes of a block: lines that follow one another, and what they become."""
    found = []
    for part in re.split(r"^--- ", text, flags=re.MULTILINE)[1:]:
        file, _, body = part.partition("\n")
        for hunk in re.split(r"^@@\n", body, flags=re.MULTILINE):
            lines = [(line[:1] or " ", line[1:]) for line in hunk.splitlines()]
            assert {sign for sign, _ in lines} <= {" ", "-", "+"}, hunk
            found.append((file, *("".join(f"{line}\n" for sign, line in lines if sign != other)
                                  for other in "+-")))
    return found


@pytest.mark.parametrize("name", recipes())
def test_every_change_fits_one_place_of_the_clone(name):
    recipe = recipes()[name]
    assert recipe.commands
    for file, old, new in recipe.changes:
        assert old != new and (CLONE / file).read_text(encoding="utf-8").count(old) == 1, old
    for file in recipe.files:
        assert re.fullmatch(r"(kit|extras)/\w+\.py", file) and not (CLONE / file).exists()


def test_the_page_is_short_and_names_what_there_is():
    assert len([line for line in PAGE.splitlines() if line.strip()]) <= 220
    for path in re.findall(r"`((?:kit|extras|config|tests|data|docs)/[\w/]+\.\w+)`", PAGE):
        made = any(path in recipe.files for recipe in recipes().values())
        assert made or (CLONE / path).exists(), path
    tests = "".join(p.read_text(encoding="utf-8") for p in (CLONE / "tests").rglob("test_*.py"))
    for test in re.findall(r"`(test_\w+)`", PAGE):
        assert f"def {test}(" in tests, test


# ------------------------------------------------------------------------------------ in a copy


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """copy(name) -> a copy of the clone with the changes of a recipe, two texts and out/base."""
    root = tmp_path_factory.mktemp("forks")

    def make(name: str) -> Path:
        folder = root / re.sub(r"\W+", "_", name)
        shutil.copytree(CLONE, folder, ignore=shutil.ignore_patterns(
            ".*", "__pycache__", "out", "tests", "bench", "docs", "*.bin", "*.egg-info"))
        for file, words in ("my.txt", "the of and to in that it"), ("other.txt", "it was his her"):
            rng = random.Random(file)
            (folder / file).write_text(" ".join(rng.choices(words.split(), k=4000)))
        if (root / "base" / "out").exists():
            shutil.copytree(root / "base" / "out", folder / "out")
        recipe = recipes().get(name, Recipe({}, [], []))
        for file, text in recipe.files.items():
            (folder / file).write_text(text)
        for file, old, new in recipe.changes:
            text = (folder / file).read_text(encoding="utf-8")
            (folder / file).write_text(text.replace(old, new), encoding="utf-8")
        return folder

    run(make("base"), recipes()[""])
    return make


def run(folder: Path, recipe: Recipe, check: str = "") -> str:
    """Run the commands of a recipe, and then Python of our own -> all that was printed."""
    script = f"from pathlib import Path\nimport torch\n{check}"
    (folder / "check_it.py").write_text(script)
    env = os.environ | {"BONSAI_DATA": str(folder / "sets"), "BONSAI_OUT": str(folder / "out"),
                        "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    done = subprocess.run([sys.executable, "-c", RUN], cwd=folder, env=env, text=True,
                          input=json.dumps([*recipe.commands, "python check_it.py"]),
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def speaks(folder: Path, *tests: str) -> set[str]:
    """The names of the tests, of those given by file::name, that fail in a copy."""
    shutil.copytree(CLONE / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
                           *(f"tests/{test}" for test in tests)], cwd=folder,
                          env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr[-2000:]
    return set(re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE))


LORA = """
from kit import checkpoint, lora
from kit.measure import main as evaluate
from kit.run.locate import find_checkpoint
from model import GPT

base, tuned = (find_checkpoint(Path("out") / name) for name in ("base", "lora"))
before, after = (checkpoint.load_tensors(f / "model.safetensors") for f in (base, tuned))
assert {n for n in after if "lora_" not in n} == before.keys()
assert all(torch.equal(before[n], after[n]) for n in before)  # only A and B were trained
assert all(after[n].abs().max() > 0 for n in after if n.endswith("lora_b"))
assert sum("lora_" in n for n in after) == 2 * 4 * 2

x = torch.randint(0, checkpoint.load_config(base).vocab_size, (4, 16))
plain, _, _ = checkpoint.load_model(base)
model = GPT(plain.config)
checkpoint.load_weights(model, base / "model.safetensors")
lora.add(model, 4, 8.0)
trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
with torch.no_grad():
    assert torch.equal(model(x), plain(x))  # before the first update
    checkpoint.load_weights(model, tuned / "model.safetensors")
    merged, _, _ = checkpoint.load_model(Path("out/merged"))
    assert torch.allclose(merged(x), model(x), atol=1e-5, rtol=0)
    assert (merged(x) - plain(x)).abs().max() > 0.01
print(f"{trained:,} of {model.num_params():,} parameters, told twice")
evaluate(["out/merged", "--dataset=other.txt"])
try:
    checkpoint.load_model(tuned)
except Exception as e:
    print("refused:", e)
import train
train.main(["--out_dir=out/lora", "--init_from=resume", "--max_iters=22"])  # it can go on
"""


@pytest.mark.slow
def test_lora(copy):
    folder = copy("LoRA")
    said = run(folder, recipes()["LoRA"], LORA)
    trained = re.search(r"rank 4: ([\d,]+ of [\d,]+ parameters) are trained", said)[1]
    assert f"{trained}, told twice" in said and "from step 20" in said
    assert "lora/ckpt/step_000020/model.safetensors: does not fit the model" in said
    losses = [float(n) for n in re.findall(r": validation loss ([\d.]+)", said)]
    assert losses[1] < losses[0]  # it learns, too


ACTIVATION = """
import copy
from kit.kernels import fast
from kit.run.locate import find_checkpoint
from kit.checkpoint import load_model

model, _, _ = load_model(find_checkpoint(Path("out/relu2")))
x = torch.randn(3, model.config.n_embd)
mlp = model.h[0].mlp
assert torch.allclose(mlp(x), mlp.c_proj(mlp.c_fc(x).clamp(min=0) ** 2))
ids = torch.randint(0, model.config.vocab_size, (1, 12))
quick = copy.deepcopy(model)
print(fast(quick))
with torch.no_grad():
    cache = quick.new_cache()
    steps = [quick.lm_head(quick.hidden(ids[:, i : i + 1], cache)) for i in range(12)]
    assert torch.allclose(torch.cat(steps, 1), model(ids), atol=1e-4)
"""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "c++")), reason="no C++ compiler")
def test_another_activation(copy):
    folder = copy(name := "Another activation, another norm")
    loud = {"test_golden_loss_curve", "test_logits_are_those_of_transformers"}
    assert speaks(folder, "test_train.py::test_golden_loss_curve",
                  "test_model.py::test_logits_are_those_of_transformers",
                  "test_model.py::test_gpt2_has_its_parameter_count") == loud
    said = run(folder, recipes()[name], ACTIVATION)
    assert "best: step 20" in said and "by model.py alone" in said


SUMS = """
import json
from data.dataset import Dataset

rows = [json.loads(line) for line in open("sums.jsonl")]
assert len(rows) == 3000
for row in rows:
    a, b = map(int, row["prompt"].split("+"))
    *steps, total = row["completion"].split()
    assert int(total) == a + b and all(eval(s.replace("=", "==")) for s in steps)
data = Dataset(Path("sets/sums"))
assert data.kind == "instruct"
x, y = data.val.window(0, 1, 64)
assert bytes(y[0][(y[0] >= 0) & (y[0] < 256)].tolist()).decode() in {
    row["completion"] for row in rows}  # the reasoning is part of the target
"""


@pytest.mark.slow
def test_data_of_ones_own_and_a_tokenizer(copy):
    """Both in one copy: the second prepares what the first has made."""
    folder, name = copy("Data of your own making"), "A tokenizer"
    assert "best: step 20" in run(folder, recipes()["Data of your own making"], SUMS)
    for file, text in recipes()[name].files.items():
        (folder / file).write_text(text)
    assert "numbers:3" in run(folder, recipes()[name], """
from data.dataset import Dataset
from data.tokenizer import from_json

tokenizer = Dataset(Path("sets/pieces")).tokenizer
for text in ("007 + 1234567 = \\u00e9\\r\\n9", "", "0" * 50):
    assert tokenizer.decode(tokenizer.encode(text)) == text
assert len(tokenizer.encode("1234567")) == 3
assert from_json(tokenizer.to_json()).hash == tokenizer.hash
""")


@pytest.mark.slow
def test_a_setting_and_an_optimizer(copy):
    """Both in one copy: they do not meet."""
    folder, name = copy("A setting"), "An optimizer"
    for file, old, new in recipes()[name].changes:
        text = (folder / file).read_text(encoding="utf-8")
        assert text.count(old) == 1
        (folder / file).write_text(text.replace(old, new), encoding="utf-8")
    commands = recipes()["A setting"].commands + recipes()[name].commands
    said = run(folder, Recipe({}, [], commands), """
import train
from kit.run import store
from kit import checkpoint
from kit.optimizer import Lion

assert store.newest_first(Path("out/enough"))[0].name == "step_000010"  # of 20
state = checkpoint.load_tensors(Path("out/lion/ckpt/step_000020/optimizer.safetensors"))
assert state.keys() == {f"{n}.exp_avg" for n in checkpoint.load_tensors(
    Path("out/lion/ckpt/step_000020/model.safetensors"))}
train.main(["--out_dir=out/lion", "--init_from=resume", "--max_iters=22"])  # it can go on

p = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
lion = Lion([p], dict(lr=0.1, betas=(0.9, 0.99), weight_decay=0.5))
p.grad = torch.tensor([3.0, -1e-3])
lion.step()
assert torch.allclose(p, torch.tensor([0.95 - 0.1, -1.9 + 0.1]))
assert torch.allclose(lion.state[p]["exp_avg"], 0.01 * p.grad)
""")
    losses = [float(n) for n in re.findall(r": validation loss ([\d.]+)", said)]
    assert losses[2] < losses[1] and "from step 20" in said

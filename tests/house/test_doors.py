"""The plan of the house as a test: who may import whom, how long a line and a function may be."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

CLONE = Path(__file__).parents[2]
ROOMS = {"data", "kit", "model", "train", "sample", "extras", "experiments", "bench"}
DOORS = {  # room -> what of ours it may import
    "model": (),
    "data": ("kit.errors", "kit.files"),
    "kit": ("model",),
    "train": ("kit", "data", "model"),
    "sample": ("kit", "data", "model"),
    "extras": ("kit", "data", "model"),
    "bench": ("kit", "data", "model", "extras"),
    "experiments": ("kit", "data", "model"),
}
COMMANDS = {"measure.py", "plot.py", "hf"}  # parts of kit/ that may import data
FOLDERS = {  # folder of kit/ -> the folders of kit/ that it may import, beside the files of kit/
    "kernels": set(), "parallel": set(), "writing": set(), "hf": {"run"},
    "run": {"hf", "parallel", "writing"},  # hf: where --init_from=gpt2 asks for it
}


def sources(*rooms: str) -> list[Path]:
    files = [CLONE / f"{room}.py" for room in rooms] + [
        p for room in rooms for p in sorted((CLONE / room).rglob("*.py"))]
    return [f for f in files if f.exists()]


def imports(path: Path) -> set[str]:
    """Dotted names of all that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{a.name}" for a in node.names} if node.module else set()
    return names


def within(name: str, allowed: tuple[str, ...]) -> bool:
    return any(f"{name}.".startswith(f"{a}.") for a in allowed)


@pytest.mark.parametrize("room", DOORS)
def test_doors(room):
    for path in sources(room):
        command = room == "kit" and path.relative_to(CLONE / "kit").parts[0] in COMMANDS
        allowed = (*DOORS[room], room, *(["data"] if command else []))
        for name in imports(path):
            if name.split(".")[0] in ROOMS:
                assert within(name, allowed), f"{path.relative_to(CLONE)} imports {name}"


def test_what_is_imported_by_a_name_is_extras_alone():
    """Else the imports above would not tell: `--tokenizer=NAME:ARG` and the named experiments."""
    for path in sources(*ROOMS):
        for line in path.read_text(encoding="utf-8").splitlines():
            if "import_module(" in line or "__import__(" in line:
                known = path.parent.name in ("experiments", "bench")  # their own, or to be patched
                assert known or "(f\"extras.{" in line, (path, line)


def test_model_imports_torch_and_the_standard_library_only():
    roots = {name.split(".")[0] for name in imports(CLONE / "model.py")}
    assert roots - {"torch"} <= set(sys.stdlib_module_names)


def test_data_knows_no_torch():
    for path in sources("data"):
        assert "torch" not in {name.split(".")[0] for name in imports(path)}, path.name


def test_folders_of_kit_stand_alone():
    for folder, others in FOLDERS.items():
        for path in (CLONE / "kit" / folder).rglob("*.py"):
            for name in imports(path):
                part = name.split(".")[1] if name.startswith("kit.") else folder
                assert part not in FOLDERS or part in others | {folder}, f"{path.name}: {name}"


def test_a_door_says_what_is_lost_without_it():
    for path in [p for room in ROOMS for p in (CLONE / room).glob("*/__init__.py")]:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 40 and ast.get_docstring(ast.parse(text)), path


def test_three_scripts_at_the_root():
    assert {p.name for p in CLONE.glob("*.py")} == {"model.py", "train.py", "sample.py"}


def test_lines_fit_a_screen():
    for path in [*sources(*ROOMS), *(CLONE / "kit").rglob("*.cpp"), *(CLONE / "kit").rglob("*.h")]:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert max(map(len, lines), default=0) <= 100, path


def test_functions_fit_a_screen():
    for path in sources(*ROOMS):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                limit = 90 if node.name == "loop" else 60
                assert node.end_lineno - node.lineno < limit, f"{path.name}: {node.name}"


def test_model_prints_nothing_and_opens_no_file():
    names = {n.id for n in ast.walk(ast.parse((CLONE / "model.py").read_text(encoding="utf-8")))
             if isinstance(n, ast.Name)}
    assert not names & {"print", "open", "exec", "eval", "input"}


def test_nothing_is_unpickled_or_executed():
    foreign = CLONE / "extras" / "weights" / "nanogpt_ckpt.py"
    for path in sources(*ROOMS):
        assert not {n.split(".")[0] for n in imports(path)} & {"pickle", "dill", "joblib", "shelve"}
        text = path.read_text(encoding="utf-8")
        if path == foreign:  # the one importer of a foreign pickle
            calls = re.findall(r"torch\.load\([^)]*\)", text)
            assert len(calls) == 1 and "weights_only=True" in calls[0]
            text = text.replace("torch.load(", "")
        for call in ("torch.load(", " eval(", "exec(", "os.system(", "shell=True"):
            assert call not in text.replace(".eval(", ""), f"{path.name} calls {call}"


@pytest.mark.parametrize("script", ["train.py", "sample.py"])
def test_help_is_quick_and_tells_all(script):
    """No heavy optional library is imported for --help, and every setting has its line."""
    code = ("import sys, runpy; sys.argv = [sys.argv[1], '--help']\n"
            "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
            "except SystemExit as e: assert not e.code\n"
            "heavy = {'matplotlib', 'wandb', 'datasets', 'transformers'} & set(sys.modules)\n"
            "assert not heavy, heavy")
    done = subprocess.run([sys.executable, "-c", code, str(CLONE / script)], cwd=CLONE,
                          capture_output=True, text=True, env=None)
    assert done.returncode == 0, done.stderr
    tree = ast.parse((CLONE / script).read_text(encoding="utf-8"))
    block = next(n for n in tree.body if isinstance(n, ast.ClassDef) and "Settings" in n.name)
    for field in (n.target.id for n in block.body if isinstance(n, ast.AnnAssign)):
        assert f"--{field} " in done.stdout, field
    undocumented = [line for line in ast.get_source_segment(
        (CLONE / script).read_text(encoding="utf-8"), block).splitlines()
        if ": " in line and " = " in line and "#" not in line and "self" not in line
        and line.startswith("    ") and not line.startswith("     ")]
    assert not undocumented


def test_the_oldest_python_can_read_it():
    """Python 3.10 is promised: no newer syntax, and nothing newer that we were tempted by."""
    for path in sources(*ROOMS):
        text = path.read_text(encoding="utf-8")
        ast.parse(text, feature_version=(3, 10))
        for newer in ("tomllib", "hashlib.file_digest", "typing.Self", "ExceptionGroup",
                      "itertools.batched", "StrEnum"):
            assert newer not in text, f"{path.name} uses {newer}"


def test_no_blank_was_left_to_fill_in():
    for path in [CLONE / "README.md", *(CLONE / "docs").glob("*.md")]:
        for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert not re.search(r"@[A-Z]+@|TODO|FIXME", line), f"{path.name}:{n}: {line}"

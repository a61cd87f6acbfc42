"""kit/settings.py: config files that are read and never run, flags, and mistakes of one line."""

import dataclasses
import errno
import io
import math
import os
import re
import subprocess
import sys
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tqdm import tqdm

from kit.errors import UserError, did_you_mean, run
from kit.settings import CLONE, at_least, fits, in_range, load, read_config, spell
from sample import SampleSettings
from train import TrainSettings

FEW = settings(max_examples=60, deadline=None, derandomize=True,
               suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass
class Small:
    """One field of each kind."""

    whole: int = 1
    number: float = 0.5
    text: str = "t"
    switch: bool = False
    maybe: int | None = None
    path: str | None = None
    choice: Literal["a", "b"] = "a"
    mixed: Literal["auto"] | bool = "auto"
    several: tuple[str, ...] = ()


@pytest.fixture
def config(tmp_path):
    """config(text) writes a config file and returns its path as text."""
    def write(text: str | bytes, name: str = "c.py") -> str:
        data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        (tmp_path / name).write_bytes(data)
        return str(tmp_path / name)

    return write


@pytest.fixture
def refusal(capfd):
    """refusal(*argv) -> the message: one line, and nothing is printed beside it."""
    def refuse(*argv: str, cls: type = TrainSettings) -> str:
        capfd.readouterr()
        with pytest.raises(UserError) as error:
            load(cls, list(argv))
        printed = capfd.readouterr()
        assert (printed.out, printed.err) == ("", "")
        message = str(error.value)
        assert message and len(message.splitlines()) == 1 and len(message) < 400
        return message

    return refuse


# ----------------------------------------------------------------------------------------- order


def test_defaults_then_files_left_to_right_then_flags(config):
    one = config("whole = 2\nnumber = 2.5\ntext = 'one'\n", "one.py")
    two = config("number = 3.5\ntext = 'two'\n", "two.py")
    loaded = load(Small, [one, "--text=flag", two])
    assert loaded.settings == Small(whole=2, number=3.5, text="flag")
    assert [p.name for p in loaded.files] == ["one.py", "two.py"]
    assert loaded.flags == ["--text=flag"]
    assert loaded.given == {"whole", "number", "text"}
    assert load(Small, [two, one]).settings.text == "one"
    assert load(Small, []).settings == Small() and load(Small, []).given == set()


def test_the_last_of_two_equal_flags_or_lines_counts(config):
    assert load(Small, ["--whole=2", "--whole=3"]).settings.whole == 3
    assert load(Small, [config("whole = 2\nwhole = 3")]).settings.whole == 3


def test_default_config_is_taken_and_said_only_without_another(config, capfd):
    path = config("whole = 7")
    assert load(Small, [], default_config=path).settings.whole == 7
    assert path in capfd.readouterr().err
    assert load(Small, [config("", "empty.py")], default_config=path).settings.whole == 1
    assert capfd.readouterr().err == ""


def test_without_a_config_a_run_that_is_there_gives_the_settings(config, capfd):
    """Flags count before them; what only another version knows is left out."""
    saved = {"whole": 9, "text": "saved", "number": 2, "switch": "yes", "gone": 1, "mixed": False}
    asked = []

    def before(flags: Small) -> dict:
        asked.append(flags)
        return saved

    loaded = load(Small, ["--text=flag"], "not/there.py", before)
    assert loaded.settings == Small(whole=9, text="flag", number=2, mixed=False)
    assert asked == [Small(text="flag")]
    assert (loaded.files, loaded.flags) == ([], ["--text=flag"])
    assert loaded.given == {"text", "whole", "number", "mixed"}  # the run's are wishes too
    assert "the settings that the run had" in capfd.readouterr().err
    path = config("whole = 7")
    for nothing in (None, {}, {"gone": 1}, {"whole": "9"}):
        assert load(Small, [], path, lambda _, n=nothing: n).settings == Small(whole=7)
        assert f"taking {path}" in capfd.readouterr().err
    assert load(Small, [path], "not/there.py", before).settings == Small(whole=7)
    assert len(asked) == 1


def test_a_config_is_found_from_where_the_user_stands_then_from_the_clone(
        config, tmp_path, monkeypatch):
    config("whole = 5", "mine.py")
    monkeypatch.chdir(tmp_path)
    assert load(Small, ["mine.py"]).settings.whole == 5
    assert load(TrainSettings, ["config/tiny.py"]).files == [CLONE / "config" / "tiny.py"]


def test_check_is_called_at_the_end(config):
    path = config("n_head = 5")
    with pytest.raises(UserError, match="n_embd=768.*n_head=5"):
        load(TrainSettings, [path])
    assert load(TrainSettings, [path, "--n_embd=10"]).settings.n_head == 5


# ---------------------------------------------------------------- every setting of both scripts


def another(hint: typing.Any, value: typing.Any) -> typing.Any:
    """A value of a setting's type that is not its default."""
    if type(None) in typing.get_args(hint) and value is None:
        return another(typing.get_args(hint)[0], None)
    if typing.get_origin(hint) is tuple:
        return ("one",)
    if typing.get_origin(hint) is Literal:
        return next(a for a in typing.get_args(hint) if a != value)
    if value == "auto" and bool in typing.get_args(hint):
        return False
    if hint is bool:
        return not value
    if hint is int:
        return 2 * value if value else 5000
    return value / 2 if hint is float and value else 0.25 if hint is float else f"{value}-x"


EVERY = [(cls, f) for cls in (TrainSettings, SampleSettings) for f in dataclasses.fields(cls)
         if f.name != "debug"]  # a flag only, see below
NEEDS = {"logn_base": ("attn_logn", "fixed")}  # a setting that is refused without another one
SPECIAL = {"skip_spikes": 7.5, "logprobs": 7, "lookup": 7}  # of settings that are not free


@pytest.mark.parametrize("cls, field", EVERY, ids=lambda x: getattr(x, "name", None))
def test_every_setting_can_be_set_by_file_and_flag(cls, field, config):
    value = SPECIAL.get(field.name) or another(typing.get_type_hints(cls)[field.name],
                                              field.default)
    pairs = {field.name: value, **dict([NEEDS[field.name]] if field.name in NEEDS else [])}
    assert value != field.default
    written = {n: v[0] if isinstance(v, tuple) else v for n, v in pairs.items()}
    lines = config("\n".join(f"{n} = {v!r}" for n, v in written.items()))
    flags = [f"--{n}={v}" for n, v in written.items()]
    for argv in ([lines], flags, [a for f in flags for a in f.split("=", 1)]):
        loaded = load(cls, argv)
        expected = dataclasses.replace(cls(), **pairs)
        assert loaded.settings == expected and loaded.given == set(pairs)
        assert type(getattr(loaded.settings, field.name)) is type(value)
    if field.default is None:  # and back again
        assert getattr(load(cls, [lines, f"--{field.name}=None"]).settings, field.name) is None
        assert getattr(load(cls, [lines, config(f"{field.name} = None", "none.py")]).settings,
                       field.name) is None


def test_every_setting_says_what_it_is():
    source = {cls: (CLONE / f"{cls.__module__}.py").read_text() for cls, _ in EVERY}
    for cls, field in EVERY:
        line = next(x for x in source[cls].splitlines() if x.startswith(f"    {field.name}: "))
        assert "  # " in line, f"{cls.__name__}.{field.name} is not documented where it stands"


def test_help_lists_every_setting_and_takes_no_config(capfd):
    with pytest.raises(SystemExit) as stop:
        load(TrainSettings, ["--help"], default_config="not/there.py")
    text = capfd.readouterr().out
    assert not stop.value.code
    assert all(f"--{f.name}" in text for f in dataclasses.fields(TrainSettings))


# ----------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize("argv, words", [
    (["--batch_size"], "--batch_size needs a value: --batch_size=a whole number"),
    (["--batch_size", "--n_layer=2"], "--batch_size needs a value"),
    (["--batch_size="], "--batch_size=: expected a whole number"),
    (["--batch_size=8.0"], "--batch_size=8.0: expected a whole number"),
    (["--batch_size=eight"], "--batch_size=eight: expected a whole number"),
    (["--batch_size", "eight"], "--batch_size=eight: expected a whole number"),
    (["--batch_size=True"], "expected a whole number"),
    (["--lr_decay_iters=many"], "expected a whole number or None"),
    (["--learning_rate=fast"], "expected a number"),
    (["batch_size=8"], "two dashes: --batch_size=8"),
    (["-batch_size=8"], "two dashes: --batch_size=8"),
    (["batch-size=8"], "two dashes: --batch-size=8"),
    (["batch_size", "8"], "batch_size: no such config file"),
    (["--batchsize=8"], "unknown setting --batchsize; did you mean batch_size?"),
    (["--lerning_rate=1"], r"did you mean learning_rate\?"),
    (["--qqqq=1"], "--help lists all"),
    (["--bias"], "--bias=True or False"),
    (["--bias=yes"], "--bias=yes: expected True or False"),
    (["--no-bias"], r"did you mean bias\?"),
    (["--compile=1"], "--compile=1: expected auto or True or False"),
    (["--dtype=float8"], "expected auto or float32 or bfloat16 or float16"),
    (["--dtype"], "--dtype=auto or float32"),
    (["-x"], "-x: expected --name=value"),
    (["--"], "--: expected --name=value"),
    (["--=3"], "expected --name=value"),
    (["---seed=3"], r"did you mean seed\?"),
    (["--a.b=3"], "expected --name=value"),
    (["config"], "config: no such config file; there are config/"),
    (["nowhere.py"], "nowhere.py: no such config file"),
    (["two\nlines.py"], "no such config file"),
    (["dataset=two\nlines"], "two dashes"),
    (["--seed=1\n2"], "expected a whole number"),
    (["--learning_rate=nan"], "learning_rate=nan"),
    (["--learning_rate=inf"], "learning_rate=inf: must be above 0 and below inf"),
    (["--learning_rate=0"], "learning_rate=0.0: must be above 0"),
    (["--weight_decay=inf"], "weight_decay=inf"),
    (["--dropout=nan"], "dropout=nan"),
    (["--batch_size=0"], "batch_size=0: must be at least 1"),
    (["--seed=-1"], "seed=-1: must be at least 0"),
    (["--seed=18446744073709551616"], r"seed=18446744073709551616: must be .*below 2\*\*63"),
    (["--warmup_iters=9", "--max_iters=9"], "warmup_iters=9.*lr_decay_iters=9"),
    (["--min_lr=1", "--learning_rate=0.5"], "min_lr=1.*learning_rate=0.5"),
])
def test_a_wrong_flag_is_one_line(argv, words, refusal):
    message = refusal(*argv)
    assert re.search(words, message), message


@pytest.mark.parametrize("argv, words", [
    (["--temperature=nan"], "temperature=nan"), (["--temperature=-1"], "temperature=-1"),
    (["--temperature=inf"], "temperature=inf"), (["--top_k=-1"], "top_k=-1"),
    (["--top_p=1.5"], "top_p=1.5"), (["--top_p=nan"], "top_p=nan"), (["--stop="], "stop"),
    (["--prompt"], "--prompt=text"), (["--prompt", "--help"], "--prompt=text"),
    (["--num_samples=0"], "num_samples=0"), (["--unknown=maybe"], "error or skip"),
    (["--batch_size=0"], "batch_size=0"), (["--min_p=-0.1"], "min_p=-0.1"),
    (["--min_p=nan"], "min_p=nan"), (["--min_p=1.5"], "min_p=1.5"),
    (["--repetition_penalty=0"], "repetition_penalty=0"),
    (["--repetition_penalty=inf"], "repetition_penalty=inf"),
    (["--logprobs=-1"], "logprobs=-1"), (["--logprobs=1001"], "0 to 1000"),
    (["--logprobs=some"], "a whole number or None"), (["--stop=a", "--stop="], "stop"),
    (["--prompt=a", "--ask=b"], "prompt=('a',) and ask='b'"),
    (["--ask=", "--prompts_file=x"], "ask='' and prompts_file='x'"),
    (["--prompt=", "--prompts_file=-"], "prompt=('',) and prompts_file='-'"),
    (["--prompt=" + "a" * 999, "--prompts_file=-"], "give one of them"),
])
def test_a_wrong_flag_of_sample_is_one_line(argv, words, refusal):
    assert words in refusal(*argv, cls=SampleSettings)


def test_a_flag_that_may_be_given_several_times(config):
    def several(*argv: str) -> tuple[str, ...]:
        loaded = load(Small, list(argv))
        assert loaded.given == ({"several"} if argv else set())
        return loaded.settings.several

    assert several() == ()
    assert several("--several=b") == ("b",) and several("--several=") == ("",)
    assert several("--several=b", "--several", "-a", "--several=b") == ("b", "-a", "b")
    assert several("--several=None", "--several=['x']") == ("None", "['x']")  # text as it is
    file = config("several = 'from a file'")
    assert several(file) == ("from a file",)
    assert several(file, "--several=b", "--several=c") == ("b", "c")  # flags stand in its place
    with pytest.raises(UserError, match="c.py:1: .*expected text"):
        load(Small, [config("several = 3")])
    with pytest.raises(UserError, match="--several needs a value: --several=text"):
        load(Small, ["--several"])


def test_forms_of_a_flag():
    for argv in (["--whole=8"], ["--whole", "8"], ["--whole", "-8"], ["--mixed=False"],
                 ["--mixed", "True"], ["--mixed=auto"], ["--switch=True"]):
        name, value = argv[0].lstrip("-").split("=") if "=" in argv[0] else (argv[0][2:], argv[1])
        assert str(getattr(load(Small, argv).settings, name)) == value
    assert load(TrainSettings, ["--batch-size=8"]).settings.batch_size == 8  # dashes are fine
    assert load(TrainSettings, ["--batch-size=8"]).given == {"batch_size"}
    assert load(TrainSettings, ["--compile=False"]).settings.compile is False


@FEW
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda s: s != "None"))
def test_any_text_survives_as_a_flag(value):
    """Also with `=`, dashes, quotes, newlines and brackets, and when it is empty."""
    assert load(Small, [f"--text={value}"]).settings.text == value
    assert load(Small, [f"--path={value}"]).settings.path == value


@pytest.mark.parametrize("value", ["", "a=b", "--x=3", "--help", "-h", "-", "@file", "None", " ",
                                   "a_b-c", "\udcff", "'q'", "[1]", "{}", "$HOME", "*"])
def test_odd_texts_survive_as_a_flag(value):
    assert load(Small, [f"--text={value}"]).settings.text == value
    if not value.startswith("--"):
        assert load(Small, ["--text", value]).settings.text == value


def test_numbers_read_like_pythons(config):
    assert load(Small, ["--whole=1_000"]).settings.whole == 1000
    assert load(Small, ["--number=3"]).settings.number == 3.0
    for argv in (["--number=3"], [config("number = 3")]):  # a whole number is a number, too
        assert type(load(Small, argv).settings.number) is float
    assert load(Small, ["--number=1e-3"]).settings.number == 1e-3
    assert math.isnan(load(Small, ["--number=nan"]).settings.number)  # a range is check()'s matter


# ---------------------------------------------------------------------------------- config files


def test_nanogpts_config_lines_read_as_they_are(config):
    """The kinds of lines that its files have: comments, quotes, no spaces, products, powers."""
    path = config('''"""a small model of letters"""
# good for a laptop

out_dir = 'out-letters'
eval_interval=250 # often
wandb_log = False # override via command line if you like
wandb_run_name = "mini-gpt"

dataset = 'shakespeare_char'
gradient_accumulation_steps = 5 * 8
block_size = 256
dropout = 0.2
weight_decay = 1e-1
learning_rate = 1e-3 # with baby networks can afford to go a bit higher
min_lr = (1e-3) / 10
beta2 = 1 - 0.01
max_iters = 2**4 * 100 + 7 // 2 - 10 % 4
warmup_iters = +100
lr_decay_iters = None
device = 'cpu'  # run on cpu only
compile = False # do not torch compile the model
always_save_checkpoint = True
''')
    s = load(TrainSettings, [path]).settings
    assert (s.out_dir, s.eval_interval, s.wandb_log) == ("out-letters", 250, False)
    assert (s.gradient_accumulation_steps, s.min_lr, s.beta2) == (40, 1e-4, 0.99)
    assert (s.max_iters, s.warmup_iters, s.lr_decay_iters) == (1601, 100, None)
    assert s.compile is False


def test_a_config_that_imports_is_refused_with_its_line(config, refusal):
    path = config("# fine-tuning\nimport time\n\nwandb_run_name = 'ft-' + str(time.time())\n")
    message = refusal(path)
    assert message.startswith(f"{path}:2: ") and "'import time'" in message
    assert "never executed" in message
    path = config("wandb_run_name = 'ft-' + str(3)")
    assert refusal(path).startswith(f"{path}:1: ")


EVIL = ["import os", "from os import system", "__import__('os').mkdir(MARK)",
        "dataset = __import__('os').mkdir(MARK)", "dataset = f'{__import__(\"os\").mkdir(MARK)}'",
        "dataset = [__import__('os').mkdir(MARK) for _ in (1,)]", "exec('import os')",
        "dataset = (lambda: __import__('os').mkdir(MARK))()", "dataset = open(MARK, 'w')",
        "import os; os.system('touch ' + MARK)", "def f(x=open(MARK, 'w')): pass",
        "class A(metaclass=open(MARK, 'w')): pass", "@open(MARK, 'w')\ndef f(): pass",
        "dataset = (x := open(MARK, 'w'))", "if open(MARK, 'w'): dataset = 'x'",
        "dataset = 'a' if open(MARK, 'w') else 'b'", "dataset: open(MARK, 'w') = 'x'",
        "open(MARK, 'w').x = 1", "dataset = print", "dataset = ''.join", "seed += 1", "del seed",
        "seed, batch_size = 1, 2", "seed = batch_size = 3", "seed", "3", "...", "seed = {1: 2}[1]",
        "seed = 1 if True else 2", "seed = not 1", "seed = 1 < 2", "seed = 1 and 2", "assert 0",
        "dataset = 'a' + 'b'", "dataset = 'a' * 3", "dataset = 'a' % ()", "seed = -True",
        "seed = True + 1", "dataset = b'a'", "seed = 1j", "seed = ...", "seed = 1 << 3",
        "seed = ~1", "seed = [1]", "seed = (1,)", "seed = {}", "seed = {1}", "while 1: pass"]


@pytest.mark.parametrize("line", EVIL)
def test_nothing_in_a_config_is_ever_executed(line, config, refusal, tmp_path):
    mark = tmp_path / "mark"
    path = config("batch_size = 3\n" + line.replace("MARK", repr(str(mark))))
    assert refusal(path).startswith(f"{path}:")
    assert not mark.exists()


@pytest.mark.parametrize("text, words", [
    ('batch_size = "8"', "expected a whole number"), ("batch_size = 8.0", "a whole number"),
    ("batch_size = True", "a whole number"), ("batch_size = None", "a whole number"),
    ("lerning_rate = 1", "did you mean learning_rate?"), ("Batch_Size = 1", "mean batch_size?"),
    ("qqqq = 1", "--help lists all"), ("bias = 1", "True or False"),
    ('bias = "True"', "True or False"), ("dtype = 'float8'", "auto or float32"),
    ("compile = 1", "auto or True or False"), ("dataset = 3", "expected text"),
    ("learning_rate = '1'", "a number"), ("learning_rate = True", "a number"),
    ("learning_rate = (-8)**0.5", "a number"), ("lr_decay_iters = 1.5", "a whole number or None"),
    ("seed = 1 / 0", "by zero"), ("seed = 1 % 0", "by zero"), ("seed = 0**-1", "negative"),
    ("seed = 9**9**9", "too large"), ("seed = 9**99999999999", "too large"),
    ("seed = 10**64 * 10**64", "too large"), ("seed = 2**63", "too large"),
    ("learning_rate = 10**64*10**64*10**64*10**64*10**64*10**64", "too large"),
    ("learning_rate = 10.0**60**60", "too large"), ("seed = 0x" + "f" * 5000, "too large"),
    ("dataset = 0x" + "f" * 5000, "too large"), ("seed = " + "9" * 5000, "name = value"),
    ("learning_rate = 1e999", "learning_rate=inf"), ("learning_rate = 1e999 - 1e999", "=nan"),
    ("seed = ", "name = value"), ("seed == 3", "name = value"), ("seed = 'a", "name = value"),
    ("  seed = 3", "name = value"), ("seed: 3", "name = value"), ("seed = 3 4", "name = value"),
    ("dataset = '\\N{NO SUCH}'", "name = value"), ("--seed=3", "name = value"),
    ("dataset = f'''a\nb{1}'''", "literals and arithmetic"),
    ("dataset = [\n1,\n2]", "literals and arithmetic"),
    ("seed = " + "x" * 5000, "literals and arithmetic"),
])
def test_a_wrong_line_is_one_line_with_its_place(text, words, config, refusal):
    path = config("# first\n" + text)
    message = refusal(path)
    assert words in message
    assert message.startswith(f"{path}:2: ") or message.partition("=")[0] == "learning_rate"


@pytest.mark.parametrize("n", [100, 400, 1020, 3000, 100_000])
@pytest.mark.parametrize("nest", [lambda n: "-" * n + "1", lambda n: "+".join("1" * n),
                                  lambda n: "(" * n + "1" + ")" * n, lambda n: "a" + ".b" * n,
                                  lambda n: "f" + "()" * n, lambda n: "[" * n + "]" * n,
                                  lambda n: "not " * n + "1"])
def test_deep_nesting_is_no_fault(nest, n, config):
    path = Path(config("seed = " + nest(n)))
    try:
        assert abs(read_config(path, {"seed": int})["seed"]) in (1, n)
    except UserError as error:
        assert str(error).startswith(f"{path}:1: ") and "\n" not in str(error)
        assert not str(error).endswith(": ") and len(str(error)) < 400


@pytest.mark.parametrize("data, words", [
    (b"seed = 3\ndataset = '\xff'", "not UTF-8 text at byte 20"),
    ("seed = 3".encode("utf-16"), "not UTF-8 text at byte 0"),
    (b"seed = 3\0", "null bytes"), (b"\0" * 100, "null bytes"),
    (b"\x80\x04\x95\x05\x00", "not UTF-8"),
])
def test_a_file_that_is_no_text_is_one_line(data, words, config, refusal):
    path = config(data)
    assert refusal(path).startswith(path) and words in refusal(path)


def test_the_line_shown_is_the_line_meant(config, refusal):
    """Form feeds and the like end a line for str.splitlines, but not for Python."""
    assert "'seed += 1'" in refusal(config("n_layer = 2 \x0c\n# \x1c \u2028 \x85\nseed += 1"))
    assert ":3: 'seed += 1'" in refusal(config("n_layer = 2\r\n\r\nseed += 1\r\n"))


def test_windows_files_are_read(config):
    assert load(Small, [config("\ufeffwhole = 3\r\ntext = 'ü'\r\n")]).settings.text == "ü"


def test_a_config_without_lines_sets_nothing(config):
    for text in ("", "\n\n", "# only a comment", '"""only a docstring"""'):
        assert load(Small, [config(text)]).given == set()


VALUES = {"whole": st.integers(-(2**63) + 1, 2**63 - 1), "text": st.text(max_size=20),
          "number": st.floats(allow_nan=False, allow_infinity=False), "switch": st.booleans(),
          "maybe": st.none() | st.integers(-9, 9), "path": st.none() | st.text(max_size=5),
          "choice": st.sampled_from("ab"), "mixed": st.booleans() | st.just("auto")}


@FEW
@given(st.fixed_dictionaries({}, optional=VALUES))
def test_whatever_repr_writes_is_read_back(config, values):
    path = config("".join(f"{n} = {v!r}\n" for n, v in values.items()))
    assert load(Small, [path]).settings == Small(**values)


@st.composite
def arithmetic(draw, depth: int = 3) -> str:
    if depth == 0 or draw(st.booleans()):
        return draw(st.integers(0, 99).map(str) | st.sampled_from(["0.5", "1e-3", "2.", "1e3"]))
    left, right = draw(arithmetic(depth - 1)), draw(arithmetic(depth - 1))
    return draw(st.sampled_from(["({} + {})", "({} - {})", "{} * {}", "({} / {})", "({} // {})",
                                 "({} % {})", "-{}", "(+{})", "({} ** 2 + {})"])
                ).format(left, right)


@FEW
@given(arithmetic())
def test_arithmetic_is_pythons(config, expression):
    try:
        expected = float(eval(expression))
    except ZeroDivisionError:
        expected = None
    path = config(f"number = {expression}")
    if expected is None:
        with pytest.raises(UserError, match="zero"):
            load(Small, [path])
    else:
        try:
            assert load(Small, [path]).settings.number == expected
        except UserError as error:
            assert "too large" in str(error)


@FEW
@given(st.binary(max_size=40) | st.text("seed=12.+-*/%(){}[]'\"\n #:;\\x0\x0c", max_size=40))
def test_any_bytes_are_read_or_refused_in_one_line(config, data):
    try:
        load(Small, [config(data)])
    except UserError as error:
        assert len(str(error).splitlines()) == 1


def test_an_unreadable_file_is_the_systems_error(config, monkeypatch, capsys):
    path = config("whole = 3")
    monkeypatch.setattr("pathlib.Path.read_text", lambda *a, **k: (_ for _ in ()).throw(
        PermissionError(errno.EACCES, "Permission denied", path)))
    monkeypatch.setattr(sys, "argv", ["train.py", path])
    with pytest.raises(SystemExit) as stop:
        run(lambda argv: load(Small, argv) and None, ())
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"train.py: Permission denied: {path}\n"


# ----------------------------------------------------------------------------------------- types


def test_fits_and_spell():
    assert fits(3, int) and not fits(True, int) and not fits(3.0, int)
    assert fits(3, float) and fits(3.0, float) and not fits(True, float)
    assert fits(None, int | None) and fits(3, int | None) and not fits("3", int | None)
    assert fits("a", Literal["a"]) and not fits("b", Literal["a"])
    assert fits(True, Literal["auto"] | bool) and not fits(1, Literal["auto"] | bool)
    assert spell(int | None) == "a whole number or None"
    assert spell(Literal["auto"] | bool) == "auto or True or False"
    assert did_you_mean("n_layers", ["n_layer", "n_head"]) == "; did you mean n_layer?"


def test_ranges_name_setting_and_value():
    for low, value in ((1, 0), (0, -1), (0, math.nan), (0, math.inf), (1, 2**63)):
        with pytest.raises(UserError, match=f"whole={value}: must be"):
            at_least(Small(whole=value), low, "whole")
    at_least(Small(whole=1, number=1.0), 1, "whole number")
    for value in (0, 1, -1, math.nan, math.inf):
        with pytest.raises(UserError, match=f"number={value}: must be above 0 and below 1"):
            in_range(Small(number=value), 0, 1, "number")
    in_range(Small(number=0.5), 0, 1, "number")


# ------------------------------------------------------------------------------------------- run


def ends(monkeypatch, capsys, main, *argv: str) -> tuple[int, str]:
    """(exit code, stderr) of run(main)."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/tool.py", *argv])
    with pytest.raises(SystemExit) as stop:
        run(main, (KeyError,))
    return stop.value.code, capsys.readouterr().err


def raising(error: BaseException):
    def main(argv: list[str]) -> int:
        raise error

    return main


def test_run_turns_mistakes_into_a_line_and_two(monkeypatch, capsys):
    def end(error: BaseException) -> tuple[int, str]:
        return ends(monkeypatch, capsys, raising(error))

    assert end(UserError("wrong")) == (2, "tool.py: wrong\n")
    assert end(UserError("two\nlines\r\n")) == (2, "tool.py: two\\nlines\n")
    assert end(KeyError("other")) == (2, "tool.py: 'other'\n")
    assert end(OSError(errno.ENOSPC, "No space left on device")) == (
        2, "tool.py: No space left on device\n")
    assert end(FileNotFoundError(errno.ENOENT, "No such file or directory", "f.txt")) == (
        2, "tool.py: No such file or directory: f.txt\n")
    assert end(OSError("odd")) == (2, "tool.py: odd\n")
    assert end(KeyboardInterrupt()) == (130, "tool.py: interrupted\n")
    with pytest.raises(ZeroDivisionError):  # a fault of ours keeps its traceback
        run(raising(ZeroDivisionError()), ())


@pytest.mark.parametrize("error", [
    MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\n2 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: "
                 "can't allocate memory: you tried to allocate 8 bytes.")])
def test_too_little_memory_is_a_line_that_says_what_to_turn(error, monkeypatch, capsys):
    code, text = ends(monkeypatch, capsys, raising(error))
    assert code == 2 and len(text.splitlines()) == 1
    assert "batch_size" in text and "gradient_accumulation_steps" in text
    monkeypatch.setattr(sys, "argv", ["tool.py", "--debug"])
    with pytest.raises(type(error)):
        run(raising(error), ())
    with pytest.raises(RuntimeError, match="another"):
        run(raising(RuntimeError("another")), ())


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_console_without_the_letters_gets_their_codes(monkeypatch, errors):
    """As Windows', which is strict, and that of LC_ALL=C."""
    written = {}
    for name in ("stdout", "stderr"):
        written[name] = io.BytesIO()
        monkeypatch.setattr(sys, name, io.TextIOWrapper(written[name], "ascii", errors))

    def main(argv: list[str]) -> None:
        print("naïve €")
        raise UserError("ü")

    monkeypatch.setattr(sys, "argv", ["tool.py"])
    with pytest.raises(SystemExit):
        run(main)
    sys.stdout.flush()
    sys.stderr.flush()
    assert written["stdout"].getvalue().strip() == b"na\\xefve \\u20ac"
    assert written["stderr"].getvalue().strip() == b"tool.py: \\xfc"


def test_run_passes_exit_codes_and_arguments_on(monkeypatch, capsys):
    seen = []
    assert ends(monkeypatch, capsys, seen.extend, "--a=1", "b") == (0, "")
    assert seen == ["--a=1", "b"]
    assert ends(monkeypatch, capsys, lambda argv: 143) == (143, "")


def test_debug_is_a_flag_and_no_line_of_a_config(tmp_path):
    (tmp_path / "debug.py").write_text("debug = True")
    with pytest.raises(UserError, match="unknown setting debug"):
        load(TrainSettings, [str(tmp_path / "debug.py")])


@pytest.mark.parametrize("flag", ["--debug", "--debug=True"])
def test_debug_shows_the_traceback(flag, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tool.py", "--whole=1", flag])

    def main(argv: list[str]) -> int:
        raise UserError(f"wrong, {argv}")

    with pytest.raises(UserError, match="wrong.*--whole=1") as error:
        run(main)
    assert "'--debug'" not in str(error.value)  # which is no `--name=value`


@pytest.mark.slow
def test_a_closed_pipe_ends_quietly(tmp_path):
    code = ("import sys; sys.path.insert(0, sys.argv.pop(1)); from kit.errors import run\n"
            "run(lambda argv: print('x\\n' * 100000), ())")
    process = subprocess.Popen([sys.executable, "-c", code, str(CLONE)], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, env={**os.environ, "PYTHONUTF8": "1"})
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(30) == 1 and process.stderr.read() == b""
    process.stderr.close()


def test_a_line_is_in_the_file_when_it_is_said(monkeypatch, tmp_path):
    """And not in a buffer until the end, which may be kill -9."""
    seen = []

    def main(argv: list[str]) -> None:
        print("first")
        seen.append((tmp_path / "log").read_text())
        tqdm.write("second")
        seen.append((tmp_path / "log").read_text())

    with open(tmp_path / "log", "w") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        patch.setattr(sys, "argv", ["tool.py"])
        with pytest.raises(SystemExit):
            run(main)
    assert seen == ["first\n", "first\nsecond\n"]


@pytest.mark.parametrize("error, code", [(None, 129), (UserError("wrong"), 2),
                                         (KeyboardInterrupt(), 130)])
def test_the_exit_code_stays_where_nobody_reads(tmp_path, error, code):
    """Python itself makes it 120 where a stream cannot be flushed in the end."""
    script = tmp_path / "tool.py"
    script.write_text(f"""
import signal, sys
from kit.job import say
from kit.errors import UserError, run
def main(argv):
    sys.stdin.read()  # until the readers are gone
    print("held back", end="", file=sys.stderr)
    for word in "abc":
        say(word)
    if error := {error!r}:
        raise error
    return 129
run(main)
""")
    process = subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=os.environ | {"PYTHONPATH": str(CLONE), "PYTHONUNBUFFERED": ""})
    process.stdout.close()
    process.stderr.close()
    process.stdin.close()
    assert process.wait(60) == code


@pytest.mark.skipif(os.name == "nt", reason="a shell's way to close a stream")
@pytest.mark.parametrize("streams", ["1>&-", "2>&-", "1>&- 2>&-", "1>/dev/full"])
def test_streams_that_were_closed_change_no_exit_code(tmp_path, streams):
    script = tmp_path / "tool.py"
    script.write_text("from kit.job import say\nfrom kit.errors import run\n"
                      "run(lambda argv: say('a line') or len(argv), ())\n")
    for flags, code in (("", 0), ("--one --two", 2)):
        done = subprocess.run(["bash", "-c", f"{sys.executable} {script} {flags} {streams}"],
                              capture_output=True, text=True,
                              env=os.environ | {"PYTHONPATH": str(CLONE)})
        assert (done.returncode, done.stderr) == (code, "")

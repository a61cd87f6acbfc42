"""sample.py as its user meets it: text on stdout, all else on stderr, the same words every time."""

import io
import json
import os
import re
import subprocess
import sys

import pytest
import torch

import sample
from kit import checkpoint
from kit.errors import UserError
from kit.kernels import native
from kit.run import store
from kit.run.locate import find_checkpoint, remember
from kit.writing import window
from kit.writing.text import TextStream
from model import GPT, GPTConfig


def save(path, model, tokenizer_json, state):
    weights = {name: p.detach() for name, p in model.named_parameters()}
    path.mkdir(parents=True, exist_ok=True)
    store.save(path, model.config, weights, {}, tokenizer_json, state, 5)


def make_run(path, tokenizer_json, vocab_size, *, steps=(10, 20), best=10, favourite=None,
             block_size=16, **more):
    """A run folder with untrained checkpoints; `favourite`: ids it writes one after the other."""
    for step in steps:
        torch.manual_seed(step)
        model = GPT(GPTConfig(vocab_size=vocab_size, block_size=block_size, n_layer=1, n_head=2,
                              n_embd=32, tie_embeddings=not favourite))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(4)
            if favourite:  # the next token depends on the last one alone
                for p in model.parameters():
                    p.zero_() if p.ndim == 2 else p.fill_(1)
                following = zip(favourite, [*favourite[1:], favourite[0]], strict=True)
                for i, (a, b) in enumerate(following):
                    model.wte.weight[a, i] = model.lm_head.weight[b, i] = 1
        state = {"step": step, "rows": 0, "tokens": 0, "val_loss": 1.0, "val_bpb": 1.25,
                 "finished": True, "best_step": best} | more
        save(path, model, tokenizer_json, state)
    remember(path)
    return path


@pytest.fixture
def byte_tokenizer():
    from data.making.tokenizers import make_tokenizer

    return make_tokenizer("byte", [])


@pytest.fixture
def run(tmp_path, byte_tokenizer):
    return make_run(tmp_path / "run", byte_tokenizer.to_json(), 257)


def write(capfd, *flags: str) -> tuple[str, str]:
    sample.main(["--max_new_tokens=40", *flags])
    return capfd.readouterr()


def test_prompt_and_text_on_stdout_the_rest_on_stderr(run, capfd):
    out, err = write(capfd, "--prompt=def f(")
    assert out.startswith("def f(") and out.endswith("\n") and len(out) > 10
    assert "step_000010" in err and "step 10" in err  # the best, and it says so


def test_the_newest_run_the_best_step_or_the_one_asked_for(run, tmp_path, byte_tokenizer, capfd):
    other = make_run(tmp_path / "other", byte_tokenizer.to_json(), 257, steps=(3,), best=3)
    assert str(other) in write(capfd)[1]
    assert "step 10" in write(capfd, f"--out_dir={run}")[1]
    assert "step 20" in write(capfd, f"--out_dir={run}", "--step=20")[1]
    assert "step 20" in write(capfd, f"--out_dir={run / 'ckpt' / 'step_000020'}")[1]


def test_same_seed_same_text(run, capfd):
    a, b, c = (write(capfd, f"--seed={s}")[0] for s in (1, 1, 2))
    assert a == b != c


def test_temperature_zero_is_greedy_whatever_the_seed(run, capfd):
    texts = {write(capfd, "--temperature=0", f"--seed={s}", "--prompt=x")[0] for s in (1, 2)}
    assert texts == {write(capfd, "--top_k=1", "--prompt=x")[0]}
    assert texts == {write(capfd, "--top_p=0", "--prompt=x")[0]}


def test_samples_come_in_order_and_are_those_of_their_seeds(run, capfd):
    together = write(capfd, "--num_samples=3", "--seed=7", "--prompt=ab")[0]
    alone = "".join(write(capfd, f"--seed={7 + i}", "--prompt=ab")[0] for i in range(3))
    assert together == alone


def test_an_empty_prompt_starts_a_document(run, capfd, monkeypatch, byte_tokenizer):
    fed = []
    real = window.steps
    monkeypatch.setattr(window, "steps", lambda model, idx, *a, **k:
                        (fed.append(idx.tolist()), real(model, idx, *a, **k))[1])
    write(capfd)
    write(capfd, "--prompt=ab")
    assert fed == [[[byte_tokenizer.eot]], [[97, 98]]]  # and no separator before a given prompt


def test_a_prompt_beyond_the_context_is_noticed(run, capfd):
    out, err = write(capfd, "--prompt=" + "long " * 9)
    assert out.startswith("long " * 9) and "45 tokens" in err and "16" in err


def test_characters_of_several_bytes_never_break(tmp_path, byte_tokenizer, capfd, monkeypatch):
    """The model writes a four-byte character over and over, one byte a token."""
    make_run(tmp_path / "emoji", byte_tokenizer.to_json(), 257, favourite=list("🌳".encode()))
    pieces = []
    real = TextStream.feed
    monkeypatch.setattr(TextStream, "feed", lambda self, *a, **k:
                        (pieces.append(real(self, *a, **k)), pieces[-1])[1])
    out = write(capfd, "--prompt=🌳", "--temperature=0", "--max_new_tokens=40")[0]
    assert out == "🌳" * 11 + "\n"
    assert set(pieces) == {"", "🌳"}


def test_stop_text_is_never_shown(tmp_path, byte_tokenizer, capfd):
    make_run(tmp_path / "abc", byte_tokenizer.to_json(), 257, favourite=list(b"abcdef"))
    flags = ("--prompt=a", "--temperature=0")
    assert write(capfd, *flags, "--max_new_tokens=7")[0] == "abcdefab\n"
    assert write(capfd, *flags, "--stop=ef")[0] == "abcd\n"
    assert write(capfd, *flags, "--stop=fabz", "--max_new_tokens=7")[0] == "abcdefab\n"


def test_stop_at_end_of_text(tmp_path, byte_tokenizer, capfd):
    make_run(tmp_path / "eot", byte_tokenizer.to_json(), 257, favourite=[97, 98, 256])
    assert write(capfd, "--prompt=a", "--temperature=0", "--stop=<|endoftext|>")[0] == "ab\n"


def test_a_char_model_names_what_it_cannot_read(tmp_path, capfd):
    from data.making.tokenizers import make_tokenizer

    tokenizer = make_tokenizer("char", ["abc\n"])
    make_run(tmp_path / "char", tokenizer.to_json(), 4)
    with pytest.raises(sample.UserError, match="z"):
        write(capfd, "--prompt=abz")
    assert write(capfd, "--prompt=abz", "--unknown=skip")[0].startswith("abz")
    assert write(capfd)[0]  # an empty prompt starts at the newline


def test_the_tokenizer_comes_from_the_checkpoint(run, capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("BONSAI_DATA", str(tmp_path / "nothing"))
    assert write(capfd, "--prompt=é🌳", "--max_new_tokens=2")[0].startswith("é🌳")
    (find_checkpoint(run) / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="tokenizer.json: missing"):
        write(capfd, "--prompt=é🌳")


@pytest.mark.parametrize("flag, words", [
    ("--temperature=-1", "temperature=-1"), ("--temperature=nan", "temperature=nan"),
    ("--top_p=2", "top_p=2"), ("--top_p=-0.5", "top_p=-0.5"), ("--top_k=-3", "top_k=-3"),
    ("--max_new_tokens=0", "max_new_tokens=0"), ("--num_samples=0", "num_samples=0"),
    ("--step=15", "10, 20"), ("--out_dir=nowhere", "nowhere"), ("--context_keep=16", "15"),
    ("--stop=", "stop"), ("--device=tpu", "tpu"), ("--min_p=2", "min_p=2"),
    ("--repetition_penalty=0", "repetition_penalty=0"), ("--logprobs=2000", "logprobs=2000"),
    ("--batch_size=0", "batch_size=0"), ("--chat=True", "terminal")])
def test_mistakes_are_one_line(run, capfd, flag, words):
    with pytest.raises(UserError) as error:
        write(capfd, flag)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_without_any_run_it_says_how_to_make_one(capfd):
    with pytest.raises(UserError, match=r"python train.py config/small.py"):
        write(capfd)


def test_a_model_with_broken_weights_says_so(tmp_path, byte_tokenizer, capfd):
    path = make_run(tmp_path / "nan", byte_tokenizer.to_json(), 257, steps=(1,), best=1)
    model = GPT(checkpoint.load_config(find_checkpoint(path)))
    with torch.no_grad():
        model.wte.weight.fill_(float("nan"))
    save(path, model, byte_tokenizer.to_json(),
         {"step": 2, "rows": 0, "tokens": 0, "best_step": 2, "val_loss": None, "finished": False})
    with pytest.raises(FloatingPointError, match="not finite"):
        write(capfd)
    done = subprocess.run([sys.executable, sample.__file__, f"--out_dir={path}"],
                          capture_output=True, text=True)
    assert done.returncode == 2 and "not finite" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_question_is_put_as_a_user_s_message_and_the_answer_ends(tmp_path, byte_tokenizer,
                                                                   capfd, monkeypatch):
    """This model says "yes" and ends after the line end that an assistant's turn begins with."""
    favourite = [*b"\nyes", 256]
    path = make_run(tmp_path / "chat", byte_tokenizer.to_json(), 257, favourite=favourite,
                    block_size=32)
    prompts = []
    real = window.steps
    monkeypatch.setattr(window, "steps", lambda model, idx, *a, **k:
                        (prompts.append(idx[0].tolist()), real(model, idx, *a, **k))[1])
    out, _ = write(capfd, f"--out_dir={path}", "--ask=well?", "--temperature=0")
    assert out == "yes\n"
    assert prompts[0] == [256, *b"user\nwell?", 256, *b"assistant\n"]
    out, _ = write(capfd, f"--out_dir={path}", "--ask=well?", "--temperature=0", "--stop=!")
    assert out == "yes\n"
    out, _ = write(capfd, f"--out_dir={path}", "--ask=well?", "--temperature=0", "--stop=s")
    assert out == "ye\n"
    with pytest.raises(UserError, match="give one of them"):
        sample.main(["--ask=a", "--prompt=b"])


# ------------------------------------------------------------------------ many prompts, JSON lines


@pytest.fixture
def stdin(tmp_path):
    """stdin(data): what a program reads from its standard input."""
    before = os.dup(0)

    def give(data: bytes) -> None:
        path = tmp_path / "stdin"
        path.write_bytes(data)
        with path.open("rb") as f:
            os.dup2(f.fileno(), 0)

    yield give
    os.dup2(before, 0)
    os.close(before)


def test_several_prompts_come_in_order_and_as_alone(run, capfd):
    texts = ["def", "", "class A:", "def"]
    flags = [f"--prompt={t}" for t in texts]
    out, err = write(capfd, *flags, "--seed=4", "--num_samples=2")
    alone = [write(capfd, f"--prompt={t}", f"--seed={4 + 2 * i + j}")[0]
             for i, t in enumerate(texts) for j in range(2)]
    assert out == "".join(alone)
    assert err.count("-" * 40) == len(alone) - 1
    assert write(capfd, *flags, "--seed=4", "--num_samples=2", "--batch_size=3")[0] == out


def test_a_file_of_prompts_gives_json_lines(run, capfd, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("one\r\n\nthrée".encode())
    out, err = write(capfd, f"--prompts_file={path}", "--num_samples=2", "--seed=3")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(r["index"], r["sample"], r["seed"], r["prompt"]) for r in rows] == [
        (0, 0, 3, "one"), (0, 1, 4, "one"), (1, 0, 5, ""), (1, 1, 6, ""), (2, 0, 7, "thrée"),
        (2, 1, 8, "thrée")]
    for r in rows:
        text = write(capfd, f"--prompt={r['prompt']}", f"--seed={r['seed']}")[0]
        assert r["prompt"] + r["text"] + "\n" == text
        assert list(r)[4:] == ["text", "tokens", "ended"]
        assert (r["tokens"], r["ended"]) == (40, "length")
    assert len(err.splitlines()) == 1  # the model; no bar where nobody sees it


def test_progress_where_somebody_sees_it(run, monkeypatch, capfd, tmp_path):
    (tmp_path / "p").write_text("a\nb\nc\n")
    monkeypatch.setattr(sys, "stderr", Terminal())
    out, _ = write(capfd, f"--prompts_file={tmp_path / 'p'}", "--batch_size=2")
    assert "3/3" in sys.stderr.getvalue() and "120 tokens" in sys.stderr.getvalue()
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["a", "b", "c"]


def test_lines_with_settings_of_their_own(tmp_path, byte_tokenizer, capfd, stdin):
    make_run(tmp_path / "abc", byte_tokenizer.to_json(), 257, favourite=list(b"abcdef"))
    stdin(b'{"prompt": "a", "stop": "e", "id": 7}\n{"prompt": "b", "max_new_tokens": 3}\n'
          b'\n{"prompt": "c", "seed": 9, "stop": ["z", "b"], "note": {"x": [null]}}')
    out, _ = write(capfd, "--prompts_file=-", "--temperature=0", "--stop=f")
    assert [json.loads(line) for line in out.splitlines()] == [
        {"index": 0, "sample": 0, "seed": 1337, "prompt": "a", "text": "bcd", "tokens": 4,
         "ended": "stop", "id": 7},
        {"index": 1, "sample": 0, "seed": 1338, "prompt": "b", "text": "cde", "tokens": 3,
         "ended": "length"},
        {"index": 2, "sample": 0, "seed": 9, "prompt": "c", "text": "defa", "tokens": 5,
         "ended": "stop", "note": {"x": [None]}}]


def test_several_stops(tmp_path, byte_tokenizer, capfd):
    make_run(tmp_path / "abc", byte_tokenizer.to_json(), 257, favourite=list(b"abcdef"))
    flags = "--prompt=a", "--temperature=0"
    assert write(capfd, *flags, "--stop=f", "--stop=de", "--stop=x")[0] == "abc\n"


def test_lookup_changes_the_number_of_steps_and_nothing_else(tmp_path, byte_tokenizer, capfd,
                                                             monkeypatch):
    from kit.writing import drafts as lookup

    make_run(tmp_path / "abc", byte_tokenizer.to_json(), 257, favourite=list(b"abcdef"),
             block_size=32)
    drafts, real = [], lookup.Draft.learn
    monkeypatch.setattr(lookup.Draft, "learn", lambda self, guessed, right:
                        (drafts.append((guessed, right)), real(self, guessed, right)))
    for flags in (["--prompt=abcdefa"], ["--prompt=abcdefa", "--logprobs=1", "--stop=g"],
                  ["--prompt=abcdefa", "--prompt=bcd", "--num_samples=2", "--batch_size=1"]):
        flags += ["--temperature=0", "--max_new_tokens=60"]
        plain = write(capfd, *flags)[0]
        assert not drafts
        assert write(capfd, *flags, "--lookup=4")[0] == plain
        assert (3, 3) in drafts
        drafts.clear()


@pytest.mark.parametrize("flags, words", [
    (["--lookup=-1"], "lookup=-1"), (["--lookup=32"], "lookup=32"),
    (["--lookup=4", "--num_samples=2"], "lookup=4: writes one row at a time; add --batch_size=1"),
    (["--lookup=4", "--prompt=a", "--prompt=b"], "--batch_size=1"),
    (["--lookup=4", "--prompts_file=some.txt"], "--batch_size=1"),
])
def test_lookup_is_refused_where_it_would_do_nothing(run, flags, words):
    with pytest.raises(UserError) as error:
        sample.main(flags)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_logprobs(run, capfd):
    out, _ = write(capfd, "--prompt=ab", "--logprobs=2", "--temperature=0", "--num_samples=2")
    a, b = (json.loads(line) for line in out.splitlines())
    assert a["logprobs"] == b["logprobs"] and len(a["logprobs"]) == a["tokens"] == 40
    for token in a["logprobs"]:
        assert set(token) == {"id", "text", "bytes", "logprob", "top"}
        assert [set(t) for t in token["top"]] == [{"id", "text", "logprob"}] * 2
        assert token["top"][0] == {k: token[k] for k in ("id", "text", "logprob")}  # greedy
        assert token["top"][0]["logprob"] >= token["top"][1]["logprob"]
    assert "top" in json.loads(write(capfd, "--prompt=ab", "--logprobs=0")[0])["logprobs"][0]


def test_mistakes_are_told_before_the_first_token(tmp_path, capfd, monkeypatch):
    from data.making.tokenizers import make_tokenizer

    make_run(tmp_path / "char", make_tokenizer("char", ["abc\n"]).to_json(), 4)
    monkeypatch.setattr(window, "steps", pytest.fail)
    (tmp_path / "p.txt").write_text("a\nb\nab?c\n")
    with pytest.raises(sample.UserError, match=r"p\.txt:3: .*'\?'"):
        write(capfd, f"--prompts_file={tmp_path / 'p.txt'}")
    with pytest.raises(sample.UserError, match=r"prompt 1: .*'\?'"):
        write(capfd, "--prompt=a", "--prompt=?")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(UserError, match=r"p\.jsonl:2: not a line of JSON"):
        write(capfd, f"--prompts_file={tmp_path / 'p.jsonl'}")
    (tmp_path / "empty").touch()
    with pytest.raises(UserError, match="empty: no prompt in it"):
        write(capfd, f"--prompts_file={tmp_path / 'empty'}")
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(OSError):  # kit.errors.run makes a line of it
            write(capfd, f"--prompts_file={path}")


def test_long_prompts_of_a_file_are_noticed_once(run, capfd, tmp_path):
    (tmp_path / "p").write_text("a\n" + "long " * 9 + "\n" + "longer " * 9)
    err = write(capfd, f"--prompts_file={tmp_path / 'p'}")[1]
    assert f"{tmp_path / 'p'}:2 has 45 tokens" in err and "2 such prompts" in err
    assert len(err.splitlines()) == 2


# ------------------------------------------------------------------------------------ as a filter


@pytest.mark.parametrize("data, prompt", [
    (b"ab", [97, 98]), (b"ab\n", [97, 98]), (b"ab\r\n", [97, 98]), (b"ab\n\n", [97, 98, 10]),
    (b"\nab\r", [10, 97, 98, 13]), (b"\xef\xbb\xbfab", [97, 98]), (b"", [256]), (b"\n", [256]),
    ("é\x00".encode(), [0xC3, 0xA9, 0])])
def test_the_prompt_is_all_of_standard_input(run, capfd, monkeypatch, stdin, data, prompt):
    fed, real = [], window.steps
    monkeypatch.setattr(window, "steps", lambda model, idx, *a, **k:
                        (fed.append(idx.tolist()), real(model, idx, *a, **k))[1])
    stdin(data)
    out = write(capfd)[0]
    assert fed == [[prompt]]
    if prompt != [256]:
        assert out.encode().startswith(bytes(prompt))


def test_a_closed_standard_input_is_an_empty_one(run, capfd, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert write(capfd)[0]


def test_standard_input_that_is_no_text(run, capfd, stdin):
    stdin(b"abc\xff")
    with pytest.raises(UserError, match="standard input: not UTF-8 text at byte 3"):
        write(capfd)
    stdin(b"a\nb\xff")
    with pytest.raises(UserError, match="standard input: not UTF-8 text at byte 3"):
        write(capfd, "--prompts_file=-")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("flags", [[], ["--seed=5"], ["--stop=a", "--temperature=0"]])
def test_on_a_terminal_without_a_prompt_it_is_a_session(run, monkeypatch, flags):
    monkeypatch.setattr(sys, "stdin", Terminal("abc\n/tokens 3\nd\n"))
    monkeypatch.setattr(sys, "stdout", Terminal())
    sample.main(["--max_new_tokens=9", *flags])
    assert sys.stdout.getvalue().count("> ") == 4


def test_lookup_is_not_for_a_session(run, monkeypatch):
    monkeypatch.setattr(sample, "is_terminal", lambda stream: True)
    with pytest.raises(UserError, match="lookup=4: not when you write in turns"):
        sample.main(["--lookup=4"])


@pytest.mark.parametrize("flags", [["--prompt="], ["--num_samples=2"], ["--logprobs=0"],
                                   ["--ask=a"]])
def test_who_asks_for_samples_gets_them_on_a_terminal_too(run, monkeypatch, flags):
    monkeypatch.setattr(sys, "stdin", Terminal("never read"))
    monkeypatch.setattr(sys, "stdout", Terminal())
    sample.main(["--max_new_tokens=9", *flags])
    assert sys.stdout.getvalue() and "> " not in sys.stdout.getvalue()[:2]
    assert sys.stdin.read() == "never read"


def test_a_terminal_is_not_disturbed_by_what_a_model_writes(tmp_path, byte_tokenizer, monkeypatch):
    cycle = list(dict.fromkeys([*b"\x1b[2J\x9b\r", *"é\x9b🌳".encode()]))
    make_run(tmp_path / "codes", byte_tokenizer.to_json(), 257, favourite=cycle)
    monkeypatch.setattr(sys, "stdout", Terminal())
    sample.main(["--prompt=\x1b", "--temperature=0", "--max_new_tokens=80"])
    text = sys.stdout.getvalue()
    assert "\\x1b[2J" in text and not set(text) & {"\x1b", "\r", "\x9b"}


# ---------------------------------------------------------------------------------- real processes


@pytest.mark.slow
def test_a_filter_in_a_pipe_ends_quietly(run):
    command = (f"printf 'def f(' | '{sys.executable}' '{sample.__file__}' "
               "--max_new_tokens=100000000 2> errors | head -c 20")
    done = subprocess.run(["bash", "-c", command], cwd=run, capture_output=True, timeout=60)
    assert done.stdout.startswith(b"def f(") and len(done.stdout) == 20
    assert len((run / "errors").read_text().splitlines()) == 1
    lines = (f"for i in $(seq 1000); do echo $i; done | '{sys.executable}' '{sample.__file__}' "
             "--prompts_file=- 2> errors | head -n 3")
    done = subprocess.run(["bash", "-c", lines], cwd=run, capture_output=True, timeout=60)
    assert [json.loads(line)["prompt"] for line in done.stdout.splitlines()] == ["1", "2", "3"]
    assert len((run / "errors").read_text().splitlines()) == 1


@pytest.mark.slow
def test_who_waits_for_standard_input_says_so(run):
    with subprocess.Popen([sys.executable, sample.__file__, "--max_new_tokens=1"],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:
        assert b"waiting for standard input" in process.stderr.readline()
        assert process.communicate(b"ab\n")[0].startswith(b"ab")


@pytest.mark.slow
def test_nothing_heavy_is_imported_before_the_first_token(run):
    """Of the libraries that take long to import only torch and tyro are there."""
    code = (f"import sys; sys.path.insert(0, {str(sample.__file__)[:-9]!r}); import sample\n"
            "sample.main(['--max_new_tokens=1', '--prompt=a'])\n"
            "heavy = {'matplotlib', 'wandb', 'datasets', 'transformers', 'tokenizers', 'requests',"
            " 'pandas', 'scipy', 'torch._dynamo', 'torch._inductor', 'readline', 'tqdm.auto'}\n"
            "assert not heavy & set(sys.modules), heavy & set(sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_pipes_of_the_readme(run):
    readme = (run / sample.__file__).with_name("README.md").read_text(encoding="utf-8")
    pipes = re.findall(r"^printf .*\| python sample\.py.*$", readme, re.MULTILINE)
    assert len(pipes) >= 2
    for line in pipes:
        line = line.replace("python sample.py", f"'{sys.executable}' '{sample.__file__}'")
        done = subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True,
                              text=True)
        assert done.returncode == 0 and done.stdout, f"{line}\n{done.stderr}"


# ------------------------------------------------------------------------------- fewer bits, faster


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_quantize_tells_the_loss_where_the_data_is_at_hand(
        run, text_file, bits, byte_tokenizer, capfd):
    """Of the data that a checkpoint saw, also where the run was started with the text itself."""
    from data.dataset import Dataset
    from data.prepare import resolve

    data = Dataset(resolve(str(text_file), "byte", print))
    make_run(run, byte_tokenizer.to_json(), 257, run={
        "settings": {"dataset": str(text_file)}, "dataset_hash": data.hash})
    err = write(capfd, f"--quantize={bits}", "--prompt=a")[1]
    assert f"weights in {bits}" in err
    told = re.search(rf"{bits}: loss ([\d.]+) on .* float32 ([\d.]+): [+-]", err)
    after, before = map(float, told.groups())
    assert abs(after / before - 1) < (0.01 if bits == "int8" else 0.2)


def test_quantize_without_the_data_just_writes(run, capfd):
    out, err = write(capfd, "--quantize=int4", "--prompt=ab")
    assert out.startswith("ab") and "weights in int4" in err and "loss" not in err.split("step")[0]


def test_with_and_without_native_code_the_text_is_the_same(run, capfd):
    texts = {write(capfd, f"--compile={c}", "--prompt=ab", "--seed=3")[0] for c in (True, False)}
    assert len(texts) == 1
    assert "PyTorch's kernels" in write(capfd, "--compile=False")[1]


def test_the_first_text_of_a_small_model_does_not_wait_for_a_compiler(run, capfd, monkeypatch):
    asked = []
    monkeypatch.setattr(native, "build_aside", lambda: not asked.append(1))
    monkeypatch.setattr(native, "library", lambda: pytest.fail("compiles"))
    assert "PyTorch's kernels on cpu" in write(capfd)[1] and asked == [1]


@pytest.mark.parametrize("flags, words", [
    (["--quantize=int8", "--dtype=bfloat16"], "give one of them"),
    (["--compile=True", "--dtype=float16"], "compile=True"),
    (["--quantize=int3"], "int3")])
def test_fewer_bits_that_cannot_be(run, capfd, flags, words):
    with pytest.raises(UserError, match=words):
        write(capfd, *flags)

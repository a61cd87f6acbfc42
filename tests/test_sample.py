"""sample.py as its user meets it: text on stdout, all else on stderr, the same words every time."""

import subprocess
import sys

import pytest
import torch

import sample
from data.tokenizer import from_json
from kit import checkpoint, loading
from kit.errors import UserError
from kit.files import read_json
from kit.finding import find_checkpoint, remember
from model import GPT, GPTConfig


def save(path, model, tokenizer_json, state):
    weights = {name: p.detach() for name, p in model.named_parameters()}
    path.mkdir(parents=True, exist_ok=True)
    checkpoint.save(path, model.config, weights, {}, tokenizer_json, state, 5)


def make_run(path, tokenizer_json, vocab_size, *, steps=(10, 20), best=10, favourite=None):
    """A run folder with untrained checkpoints; `favourite`: ids it writes one after the other."""
    for step in steps:
        torch.manual_seed(step)
        model = GPT(GPTConfig(vocab_size=vocab_size, block_size=16, n_layer=1, n_head=2, n_embd=32,
                              tie_embeddings=not favourite))
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
                 "finished": True, "best_step": best}
        save(path, model, tokenizer_json, state)
    remember(path)
    return path


@pytest.fixture
def byte_tokenizer():
    from data.tokenizer import make_tokenizer

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
    real = GPT.generate
    monkeypatch.setattr(GPT, "generate", lambda self, idx, *a, **k:
                        (fed.append(idx.tolist()), real(self, idx, *a, **k))[1])
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
    real = sample.TextStream.feed
    monkeypatch.setattr(sample.TextStream, "feed", lambda self, *a, **k:
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
    from data.tokenizer import make_tokenizer

    tokenizer = make_tokenizer("char", ["abc\n"])
    make_run(tmp_path / "char", tokenizer.to_json(), 4)
    with pytest.raises(sample.DataError, match="z"):
        write(capfd, "--prompt=abz")
    assert write(capfd, "--prompt=abz", "--unknown=skip")[0].startswith("abz")
    assert write(capfd)[0]  # an empty prompt starts at the newline


def test_the_tokenizer_comes_from_the_checkpoint(run, capfd):
    folder = find_checkpoint(run)
    tokenizer = from_json(read_json(folder / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode("é🌳")) == "é🌳"


@pytest.mark.parametrize("flag, words", [
    ("--temperature=-1", "temperature=-1"), ("--temperature=nan", "temperature=nan"),
    ("--top_p=2", "top_p=2"), ("--top_p=-0.5", "top_p=-0.5"), ("--top_k=-3", "top_k=-3"),
    ("--max_new_tokens=0", "max_new_tokens=0"), ("--num_samples=0", "num_samples=0"),
    ("--step=15", "10, 20"), ("--out_dir=nowhere", "nowhere"), ("--context_keep=16", "15"),
    ("--stop=", "stop"), ("--device=tpu", "tpu")])
def test_mistakes_are_one_line(run, capfd, flag, words):
    with pytest.raises(UserError) as error:
        write(capfd, flag)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_without_any_run_it_says_how_to_make_one(capfd):
    with pytest.raises(UserError, match=r"python train.py config/small.py"):
        write(capfd)


def test_a_model_with_broken_weights_says_so(tmp_path, byte_tokenizer, capfd):
    path = make_run(tmp_path / "nan", byte_tokenizer.to_json(), 257, steps=(1,), best=1)
    model = GPT(loading.load_config(find_checkpoint(path)))
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
    path = make_run(tmp_path / "chat", byte_tokenizer.to_json(), 257, favourite=favourite)
    prompts = []
    real = GPT.generate
    monkeypatch.setattr(GPT, "generate", lambda self, idx, *a, **k:
                        (prompts.append(idx[0].tolist()), real(self, idx, *a, **k))[1])
    out, _ = write(capfd, f"--out_dir={path}", "--ask=well?", "--temperature=0")
    assert out == "yes\n"
    assert prompts[0] == [256, *b"user\nwell?", 256, *b"assistant\n"]
    out, _ = write(capfd, f"--out_dir={path}", "--ask=well?", "--temperature=0", "--stop=!")
    assert out == "yes\n"
    out, _ = write(capfd, f"--out_dir={path}", "--ask=well?", "--temperature=0", "--stop=s")
    assert out == "ye\n"
    with pytest.raises(UserError, match="give one of them"):
        sample.main(["--ask=a", "--prompt=b"])

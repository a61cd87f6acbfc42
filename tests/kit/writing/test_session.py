"""session.py: turns on a terminal. What the model has read is what was typed and shown."""

import codecs
import json
import os
import select
import signal
import sys
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data import instruct
from data.making.tokenizers import make_tokenizer
from data.tokenizer import ByteTokenizer, CharTokenizer
from kit.errors import UserError
from kit.run import store
from kit.settings import CLONE
from kit.writing import window
from kit.writing.session import Session, Unsettled, talk
from kit.writing.text import start_ids
from model import GPT, GPTConfig
from sample import SampleSettings

BYTES = ByteTokenizer()
BPE = make_tokenizer("bpe:300", ["the other then there them this that with within without " * 20])
SIZE = 24  # the context
MANY = settings(max_examples=60, deadline=None, derandomize=True,
                suppress_health_check=[HealthCheck.too_slow])


def make_model(vocab_size: int = 257, block_size: int = SIZE) -> GPT:
    torch.manual_seed(1)
    model = GPT(GPTConfig(vocab_size=vocab_size, block_size=block_size, n_layer=1, n_head=2,
                          n_embd=32))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4)
    return model.eval()


def follower(cycle: list[int], vocab_size: int = 257) -> GPT:
    """A model that writes these ids one after the other, over and over."""
    model = GPT(GPTConfig(vocab_size=vocab_size, block_size=SIZE, n_layer=1, n_head=2, n_embd=32,
                          tie_embeddings=False))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_() if p.ndim == 2 else p.fill_(1)
        for i, (a, b) in enumerate(zip(cycle, [*cycle[1:], cycle[0]], strict=True)):
            model.wte.weight[a, i] = model.lm_head.weight[b, i] = 1
    return model.eval()


MODEL, BPE_MODEL = make_model(), make_model(BPE.vocab_size)


class Talk:
    """A session, and what came of it."""

    def __init__(self, model: GPT = MODEL, tokenizer=BYTES, question=None, **flags):
        self.pieces, self.notices = [], []
        flags = {"max_new_tokens": 5, "temperature": 0.0, **flags}
        self.session = Session(SampleSettings(**flags), model, tokenizer, self.pieces.append,
                               self.notices.append, question)

    def type(self, *lines: str) -> str:
        """What these lines bring onto the screen."""
        self.pieces.clear()
        for line in lines:
            self.session.interrupted = False  # as `talk` does
            assert self.session.line(line)
        return "".join(self.pieces)

    def context(self) -> list[int]:
        """The ids that the model sees, and that its cache agrees."""
        s = self.session
        held = [] if s.window is None else s.window.tokens[0, : s.window.n].tolist()
        if held and not s.pending:  # what it will choose from next
            assert torch.allclose(s.window.x, s.model.hidden(torch.tensor([held]))[:, -1],
                                  atol=1e-4)
        assert s.window is None or s.window.cache.longest == len(held)
        return [*held, *s.pending]


# ------------------------------------------------------------------------------------ the context


def test_the_model_goes_on_from_what_was_typed_and_shown():
    """Three turns write what plain decoding writes from the text on the screen."""
    letters = CharTokenizer("abcdefghijklmnop")
    screen, talk = "", Talk(make_model(16, block_size=64), letters)
    for line in ("deaf", "b", "cab"):
        screen += line
        steps = window.steps(talk.session.model, torch.tensor([letters.encode(screen)]), 5,
                                            lambda logits: logits.argmax(-1))
        shown = talk.type(line)
        assert shown == letters.decode(int(id) for id in steps)
        screen += shown
        assert talk.context() == letters.encode(screen)


def test_each_token_is_read_once(monkeypatch):
    fed, real = [], GPT.hidden
    monkeypatch.setattr(GPT, "hidden", lambda self, x, cache=None:
                        (fed.append(x.numel()), real(self, x, cache))[1])
    talk = Talk(follower([97, 98, 99]), max_new_tokens=4)
    talk.type("aa")
    assert fed == [2, 1, 1, 1]  # the fourth is on the screen and not read yet
    fed.clear()
    talk.type("xyz")
    assert fed == [1 + 3, 1, 1, 1]
    fed.clear()
    talk.type("")
    assert fed == [1, 1, 1, 1]


def test_an_empty_line_starts_a_document_and_then_goes_on():
    talk = Talk(follower([256, 97, 98]), max_new_tokens=2)
    assert talk.type("") == "ab"
    assert talk.context() == [*start_ids(BYTES), 97, 98]
    once = Talk(max_new_tokens=12, temperature=1.0, top_k=3)
    halves = Talk(max_new_tokens=6, temperature=1.0, top_k=3)
    assert halves.type("/seed 1", "q") and halves.type("") and once.type("/seed 1", "q")
    assert Talk(max_new_tokens=12).type("q") == Talk(max_new_tokens=6).type("q", "")


def test_reset_forgets_everything():
    talk = Talk()
    first = talk.type("hello")
    talk.type("more", "/reset")
    assert talk.context() == [] and talk.notices == []
    assert talk.type("/reset", "hello") == first
    talk.type("/reset", "")
    assert talk.context()[0] == BYTES.eot


def test_a_line_beyond_the_context_keeps_its_newest_tokens_and_is_noticed():
    talk = Talk(follower([97, 98]), max_new_tokens=1)
    talk.type("a" * (SIZE + 5))
    assert "29 tokens" in talk.notices[0] and "24" in talk.notices[0] and len(talk.notices) == 1
    talk.type("a" * (2 * SIZE))
    assert talk.context()[-SIZE - 1:] == [97] * SIZE + [98]


@pytest.mark.parametrize("keep", [None, 1, SIZE - 1])
def test_a_text_longer_than_the_context_is_the_one_that_generate_writes(keep):
    letters = CharTokenizer("abcdefghijklmnop")
    model = make_model(16)
    steps = window.steps(model, torch.tensor([letters.encode("deaf")]), 3 * SIZE,
                           lambda logits: logits.argmax(-1), context_keep=keep)
    written = letters.decode(int(id) for id in steps)
    assert Talk(model, letters, max_new_tokens=3 * SIZE, context_keep=keep).type("deaf") == written
    thirds = Talk(model, letters, max_new_tokens=SIZE, context_keep=keep)
    assert thirds.type("deaf") + thirds.type("") + thirds.type("") == written


@MANY
@given(st.lists(st.tuples(st.text("the ór🌳", max_size=9), st.integers(1, 60),
                          st.lists(st.text(min_size=1, max_size=2)
                                   | st.sampled_from(["e", "th", "he", " t", "ther"]), max_size=2)),
                min_size=1, max_size=5),
       st.sampled_from([None, 1, SIZE - 1]), st.integers(0, 9), st.sampled_from([BYTES, BPE]))
def test_the_context_is_the_screen_whatever_ended_a_text(turns, keep, seed, tokenizer):
    talk = Talk(MODEL if tokenizer is BYTES else BPE_MODEL, tokenizer, context_keep=keep,
                temperature=1.0, top_k=0, seed=seed)
    screen, s = "", talk.session
    for line, tokens, stops in turns:
        talk.type(f"/tokens {tokens}")
        s.s.stop = tuple(stops)
        screen += line + talk.type(line)
        ids, context = s.seen, talk.context()
        n = min(len(ids), len(context))
        assert n and ids[-n:] == context[-n:] and len(ids) <= SIZE
        if len(screen) < 20 and tokenizer.decode(ids).startswith("<|"):  # all is still there
            assert tokenizer.decode(ids) == "<|endoftext|>" + screen
        assert tokenizer.decode(ids).endswith(screen[-5:]) or "\ufffd" in screen[-15:]


@MANY
@given(st.lists(st.binary(min_size=1, max_size=4) | st.sampled_from(
    ["é".encode(), "🌳".encode()[:2], "🌳".encode()[2:], b"ab", b"bc", b"\xff"]), max_size=12),
       st.lists(st.text("abcé", min_size=1, max_size=3), max_size=3))
def test_what_is_not_wholly_shown_is_told(pieces, stops):
    text, shown, fed = Unsettled(tuple(stops)), "", []
    for data in pieces:
        fed.append(data)
        shown += text.feed(data)
        if text.stream.stopped:
            break
    shown += text.end()
    n, rest = text.left()
    whole = b"".join(fed[: len(fed) - n])
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    assert decoder.decode(whole) + rest == shown and not decoder.getstate()[0]
    if not text.stream.stopped:
        everything = codecs.getincrementaldecoder("utf-8")(errors="replace")
        assert everything.decode(b"".join(pieces)) == shown  # all but half a character
    if n:  # one token more would be too much
        more = codecs.getincrementaldecoder("utf-8")(errors="replace")
        longer = more.decode(whole + fed[len(fed) - n])
        assert more.getstate()[0] or not shown.startswith(longer)


def test_a_stop_in_the_middle_of_a_token_leaves_its_beginning_in_the_context():
    whole = BPE.encode("within")
    assert len(whole) < 4  # tokens of several characters
    talk = Talk(follower(whole * 2 if len(whole) == 1 else whole, BPE.vocab_size), BPE,
                max_new_tokens=20)
    talk.type("/stop n")
    talk.session.seen = []
    shown = talk.type("within")
    assert shown == "withi" and BPE.decode(talk.context()) == "withinwithi"


def test_a_stop_longer_than_the_context_is_taken_back():
    cycle = list(range(97, 123))
    stop = bytes(cycle[1:] + cycle[:1]).decode()
    for keep in (1, 12, SIZE - 1):
        talk = Talk(follower(cycle), max_new_tokens=100, context_keep=keep, stop=(stop,))
        assert talk.type("xyza") == ""
        assert talk.context() == [*b"xyza"]


def test_half_a_character_at_the_end_is_not_read():
    tree = list("🌳".encode())
    talk = Talk(follower(tree), max_new_tokens=6)
    assert talk.type("🌳") == "🌳"
    assert talk.context() == tree * 2
    assert talk.type("") == "🌳" and talk.context() == tree * 3


# ------------------------------------------------------------------------------------------ lines


def test_lines_that_go_on_and_lines_that_begin_with_a_slash():
    talk = Talk(follower([97, 98]), max_new_tokens=1)
    talk.type("one\\", "\\", "/two\\", "")
    assert talk.context()[:-1] == [*b"one\n\n/two\n"]
    talk.type("/reset", "//quit")
    assert talk.context()[:-1] == [*b"/quit"]
    talk.type("/reset", "///")
    assert talk.context()[:-1] == [*b"//"]


@pytest.mark.parametrize("line, setting, value", [
    ("/temp 0.7", "temperature", 0.7), ("/temp 0", "temperature", 0), ("/top_k 7", "top_k", 7),
    ("/top_p .5", "top_p", 0.5), ("/min_p 0.1", "min_p", 0.1),
    ("/penalty 1.3", "repetition_penalty", 1.3), ("/seed 3", "seed", 3),
    ("/tokens 200", "max_new_tokens", 200), ("/stop def f", "stop", ("def f",)),
    ("/stop  x ", "stop", (" x ",)), ("/stop \\n\\n", "stop", ("\n\n",)), ("/stop", "stop", ()),
])
def test_settings_change_on_the_way(line, setting, value):
    talk = Talk(stop=("before",))
    assert talk.type(line) == "" and talk.notices == []
    assert getattr(talk.session.s, setting) == value


@pytest.mark.parametrize("line, words", [
    ("/temp", "expected a number"), ("/temp hot", "'hot'; it is 0.0"), ("/temp -1", "must be"),
    ("/temp nan", "nan"), ("/temp inf", "inf"), ("/top_k 1.5", "expected a whole number"),
    ("/top_k -1", "must be"), ("/top_p 2", "below"), ("/min_p 2", "below"), ("/penalty 0", "above"),
    ("/penalty nan", "nan"), ("/seed -3", "must be"), ("/seed x", "'x'"), ("/tokens 0", "must be"),
    ("/tokens 9999999999999999999999", "must be"), ("/top_k " + "9" * 5000, "expected a whole"),
    ("/", "there are /temp"), ("/tmp 3", "/tmp: no such command"), ("/ temp 3", "no such command"),
    ("/Temp 3", "no such"), ("/etc/passwd", "// begins a text with /"), ("/\x1b[2J", "no such"),
])
def test_a_command_that_cannot_be_right_is_one_line_and_the_session_goes_on(line, words):
    talk = Talk()
    before = talk.session.s
    assert talk.type(line) == "" and talk.session.s == before
    assert len(talk.notices) == 1 and words in talk.notices[0] and len(talk.notices[0]) < 200
    assert talk.type("x")


@MANY
@given(st.text(max_size=20), st.sampled_from(["/", "/temp ", "/stop ", "/seed ", "/tokens ", ""]))
def test_whatever_is_typed_the_session_goes_on(text, begin):
    talk = Talk(make_model(4), CharTokenizer("abc\n"), max_new_tokens=2)
    line = begin + text
    if line.startswith("/tokens"):
        line = "/tokens x" + text
    assert talk.session.line(line) is (line.split(" ")[0] not in ("/quit", "/exit"))
    assert talk.session.line("a") and talk.session.line("a") and talk.pieces


def test_help_and_quit():
    talk = Talk()
    talk.type("/help")
    text = "\n".join(talk.notices)
    assert all(f"/{name}" in text for name in (
        "temp", "top_k", "top_p", "min_p", "penalty", "seed", "tokens", "stop", "reset", "help",
        "quit"))
    assert "/temp 0," in text and "Ctrl-C" in text and "{" not in text
    assert talk.session.line("/quit") is False


def test_a_seed_makes_the_next_text_reproducible():
    flags = dict(temperature=1.0, top_k=0, max_new_tokens=9)
    a, b = Talk(**flags), Talk(**flags)
    assert a.type("x") == b.type("x")
    assert a.type("y") == b.type("y")  # the seeds go on alike
    one = Talk(**flags).type("/seed 3", "one")
    assert one == Talk(**{**flags, "seed": 3}).type("one")
    talk = Talk(**flags)
    assert talk.type("one", "/reset", "/seed 3") != one == talk.type("one")
    assert talk.type("/reset", "one") != one  # and the text after it takes the next seed
    assert talk.type("/reset", "/seed 3", "one") == one


def test_the_penalty_knows_what_was_typed_and_shown():
    talk = Talk(repetition_penalty=1e9)
    talk.type("abc", "xyz")
    assert len(set(talk.context())) == len(talk.context()) > 11


def test_an_unknown_character_is_one_line():
    talk = Talk(make_model(4), CharTokenizer("abc\n"))
    assert talk.type("abz") == "" and "z" in talk.notices[0]
    assert talk.context() == [] and talk.type("ab")
    skip = Talk(make_model(4), CharTokenizer("abc\n"), unknown="skip")
    skip.type("abz")
    assert skip.context()[:2] == [1, 2]


# ------------------------------------------------------------------------------------------- chat


def ask(text: str) -> list[int]:
    return instruct.question(text, BYTES)


def chat_ids(*said: str) -> list[int]:
    """Training data of a chat, up to the separator that ends its last message."""
    messages = [{"role": role, "content": text}
                for role, text in zip(["user", "assistant"] * 9, said, strict=False)]
    return instruct.encode(json.dumps({"messages": messages}), BYTES)[0].tolist()[:-1]


def test_a_chat_looks_like_training_data(monkeypatch):
    model = follower([*b"\nyes", 256])
    model.config.block_size = 200
    model.wpe = torch.nn.Embedding(200, 32)
    torch.nn.init.zeros_(model.wpe.weight)
    talk = Talk(model, question=ask, max_new_tokens=50)
    assert talk.type("well?") == "yes"
    assert talk.context() == chat_ids("well?", "yes")
    assert talk.type("and\\", "//now?") == "yes"
    assert talk.context() == chat_ids("well?", "yes", "and\n//now?", "yes")
    talk.type("/tokens 2")
    assert talk.type("so?") == "ye"  # cut short, and gone on with
    assert talk.type("") == "s"
    talk.type("/stop es", "/tokens 50")
    assert talk.type("it?") == "y"  # a stop, and the next message after it
    talk.type("fine", "/stop", "/seed 1")
    said = "well?", "yes", "and\n//now?", "yes", "so?", "yes", "it?", "y", "fine", "y"
    assert talk.context() == chat_ids(*said)


def test_in_a_chat_an_empty_line_needs_an_answer_that_has_not_ended():
    talk = Talk(follower([*b"\nyes", 256]), question=ask, max_new_tokens=50)
    assert talk.type("") == "" and talk.notices == ["type a message"]
    talk.type("well?")
    assert talk.type("") == "" and talk.notices[1:] == ["the answer has ended; type a message"]
    talk.type("/reset")
    assert talk.type("") == "" and talk.notices[2:] == ["type a message"]


def test_a_tokenizer_without_a_separator_cannot_chat():
    char = CharTokenizer("abc\nuserantm:")
    with pytest.raises(UserError, match="separator"):
        Talk(make_model(9), char, question=lambda text: instruct.question(text, char))


# ----------------------------------------------------------------------------------------- Ctrl-C


def test_an_interrupt_ends_a_text_between_two_tokens():
    talk = Talk(follower([97, 98, 99]), max_new_tokens=10**9)
    s = talk.session
    s.out = lambda piece: (talk.pieces.append(piece),
                           setattr(s, "interrupted", len("".join(talk.pieces)) == 7))
    assert talk.type("c") == "abcabca"
    assert talk.context() == [*b"cabcabca"]
    assert talk.type("") == "bcabcab"  # and goes on where it was


def script(talk: Talk, *lines):
    """A terminal where somebody types these lines; an exception is raised instead."""
    given = iter([*lines, EOFError()])

    def read(sign: str) -> str:
        talk.signs = [*getattr(talk, "signs", []), sign]
        line = next(given)
        if isinstance(line, BaseException):
            raise line
        return line

    return read


def test_ctrl_c_stops_the_text_and_not_the_program():
    before, screen = signal.getsignal(signal.SIGINT), Talk(follower([97, 98]), max_new_tokens=10**9)
    s = screen.session
    s.out = lambda piece: (screen.pieces.append(piece),
                           len(screen.pieces) % 5 or signal.raise_signal(signal.SIGINT))
    talk(s, script(screen, "a", KeyboardInterrupt(), "/temp x", "b\\", KeyboardInterrupt(), "b"))
    assert "".join(screen.pieces).replace("\n", "").startswith("babab")
    assert [n for n in screen.notices if "Ctrl-D or /quit leaves" in n] and \
        any("'x'" in n for n in screen.notices)
    assert screen.signs == ["> ", "> ", "> ", "> ", "... ", "> ", "> "]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_while_busy_leaves():
    before, screen = signal.getsignal(signal.SIGINT), Talk(follower([97, 98]), max_new_tokens=10**9)
    screen.session.out = lambda piece: (signal.raise_signal(signal.SIGINT),
                                        signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        talk(screen.session, script(screen, "a"))
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("moment", ["take_back", "read", "show"])
def test_ctrl_c_at_any_moment_between_two_prompts_only_ends_the_text(moment, monkeypatch):
    """Also while a line is being read in, and when the text has just ended by itself."""
    screen = Talk(follower([97, 98]), max_new_tokens=3)
    real, hits = getattr(type(screen.session), moment), []

    def hit(*args):
        if not hits:
            hits.append(signal.raise_signal(signal.SIGINT))
        return real(*args)

    monkeypatch.setattr(type(screen.session), moment, hit)
    talk(screen.session, script(screen, "a", "b"))
    assert hits and screen.signs.count("> ") == 3  # the second line was asked for, and the end


def test_a_line_that_is_no_text_and_one_that_ends_the_session():
    screen = Talk()
    bad = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    talk(screen.session, script(screen, bad, "a\udcff", "x", "/quit", "never typed"))
    assert "that line is not UTF-8 text" in screen.notices
    assert any("surrogate" in n for n in screen.notices)
    assert len(screen.signs) == 4


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
@pytest.mark.slow
def test_on_a_real_terminal(tmp_path):
    """Type a text, Ctrl-C during an endless one, a command and a short text, then leave."""
    import pty

    model = follower([97, 98, 99])
    weights = {name: p.detach() for name, p in model.named_parameters()}
    state = {"step": 1, "rows": 0, "tokens": 0, "best_step": 1, "val_loss": None, "finished": True}
    store.save(tmp_path, model.config, weights, {}, BYTES.to_json(), state, 5)
    command = [sys.executable, str(CLONE / "sample.py"), f"--out_dir={tmp_path}", "--device=cpu",
               "--temperature=0", "--max_new_tokens=1000000000"]
    pid, terminal = pty.fork()
    if not pid:
        os.execve(sys.executable, command, {**os.environ, "TERM": "dumb"})
    seen = b""

    def wait_for(text: bytes, after: int = 0, again: bytes = b"") -> None:
        nonlocal seen
        until = time.monotonic() + 30
        while text not in seen[after:]:
            assert time.monotonic() < until, seen[-2000:]
            if select.select([terminal], [], [], 1)[0]:
                seen += os.read(terminal, 1 << 16)
            elif again:
                os.write(terminal, again)

    def press(keys: bytes, answer: bytes, again: bytes = b"") -> None:
        begin = len(seen)
        os.write(terminal, keys)
        wait_for(answer, begin, again)

    try:
        wait_for(b"> ")
        press(b"a\n", b"bcabcabcabc")
        press(b"\x03", b"\n> ")
        # Python loses a signal between printing the sign and waiting for keys: pressed again
        press(b"\x03", b"/quit leaves", again=b"\x03")
        press(b"/temp hot\n", b"expected a number")
        press(b"/tokens 4\n", b"> ")
        press(b"/reset\n", b"> ")
        press(b"xa\n", b"bcab")
        press(b"/quit\n", b"/quit")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        pid = 0
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(terminal)

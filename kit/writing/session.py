"""A conversation with a model on a terminal: a line goes in, the text goes on from there.

The context is what was typed, without its Enter, and what was shown. A model reads each token
once. Where less is shown than it wrote (a stop text, half a character at the end), the tokens
that are not wholly on the screen are taken back out of its cache, and what is there of them is
read anew.
"""

import codecs
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kit.device import device_of
from kit.errors import UserError
from kit.writing.rows import make_sampler
from kit.writing.text import TextStream, start_ids
from kit.writing.window import Window

HELP = """\
a line            is added to the text, and the model goes on from there
an empty line     the model goes on
a line ending in \\ is continued on the next; one that begins with // begins with /
/temp {temperature:g}, /top_k {top_k}, /top_p {top_p:g}, /min_p {min_p:g}, \
/penalty {repetition_penalty:g}   how tokens are chosen
/seed {seed:<12}of the next text; those after it take the seeds that follow
/tokens {max_new_tokens:<10}length of a text
/stop TEXT        end before this text (\\n: a line end), now {stop}; /stop alone: do not
/reset            forget all that was said;  /help;  /quit or Ctrl-D leaves
Ctrl-C            ends a text"""
SETTINGS = {  # command -> the setting, and what its text is turned into
    "temp": ("temperature", float), "top_k": ("top_k", int), "top_p": ("top_p", float),
    "min_p": ("min_p", float), "penalty": ("repetition_penalty", float), "seed": ("seed", int),
    "tokens": ("max_new_tokens", int),
    "stop": ("stop", lambda text: (text.replace("\\n", "\n"),) if text else ()),
}


class Session:
    """A text that a person and a model write in turns.

    settings: as of sample.py; its check() refuses bad values. out takes the text as it comes, say
    a line of notice. question: the ids of a user's message, from the separator before it to where
    the answer begins; with it, lines are messages and answers end at the separator.
    """

    def __init__(self, settings: Any, model: Any, tokenizer: Any, out: Callable[[str], None],
                 say: Callable[[str], None], question: Callable[[str], list[int]] | None = None):
        self.s, self.model, self.tokenizer = settings, model, tokenizer
        self.out, self.say, self.question = out, say, question
        if question is not None:
            question("")  # raises where the tokenizer has no separator
        self.interrupted = False  # asked to end the text, between two tokens
        self.last = "\n"  # the last character that was shown
        self.reset()

    def reset(self) -> None:
        self.window: Window | None = None
        self.seen: list[int] = []  # the context, of a long one the newest tokens
        self.pending: list[int] = []  # those of them that the window has not read yet
        self.lines: list[str] = []  # typed, and to be continued
        self.answered = self.question is not None  # nothing to go on with before a message

    def line(self, text: str) -> bool:
        """Take a line that was typed; False: the session is over."""
        if not self.lines and text.startswith("/") and not text.startswith("//"):
            return self.command(*text[1:].partition(" ")[::2])
        if not self.lines and text.startswith("/"):
            text = text[1:]
        if text.endswith("\\"):
            self.lines.append(text[:-1])
            return True
        text, self.lines = "\n".join([*self.lines, text]), []
        try:
            ids = self.encode(text)
        except UserError as e:  # of the tokenizer: a character that it does not know
            self.say(str(e))
            return True
        if self.answered and not text:
            self.say("the answer has ended; type a message" if self.seen else "type a message")
            return True
        self.write(ids)
        return True

    def encode(self, text: str) -> list[int]:
        if text and self.question is not None:
            return self.question(text)
        ids = self.tokenizer.encode(text, unknown=self.s.unknown)
        return ids if ids or self.seen else start_ids(self.tokenizer)

    def command(self, name: str, value: str) -> bool:
        if name in ("quit", "exit"):
            return False
        if name == "reset":
            self.reset()
        elif name == "help":
            for line in HELP.format(**vars(self.s)).splitlines():
                self.say(line)
        elif name in SETTINGS:
            self.change(name, value)
        else:
            known = " /".join([*SETTINGS, "reset", "help", "quit"])
            self.say(f"/{name:.40}: no such command; there are /{known}; // begins a text with /")
        return True

    def change(self, name: str, value: str) -> None:
        setting, parse = SETTINGS[name]
        try:
            changed = replace(self.s, **{setting: parse(value)})
            changed.check()
        except UserError as e:
            self.say(f"/{name}: {e}")
        except ValueError:
            kind, now = "a whole number" if parse is int else "a number", getattr(self.s, setting)
            self.say(f"/{name}: expected {kind}, got {value!r:.60}; it is {now}")
        else:
            self.s = changed

    @torch.inference_mode()
    def write(self, ids: list[int]) -> None:
        """Read the ids and go on from there: until the length, a stop, an end or an interrupt."""
        size = self.model.config.block_size
        if len(ids) > size:
            self.say(f"{len(ids)} tokens, but the context is {size}: the model sees the newest")
        self.seen += ids
        self.pending += ids
        sampler = make_sampler(self.s, [self.s.seed], [self.seen[-size:]])
        self.s = replace(self.s, seed=(self.s.seed + 1) % 2**63)
        text, self.answered = Unsettled(self.s.stop), False
        for _ in range(self.s.max_new_tokens):
            if self.interrupted or text.stream.stopped:
                break
            self.read()
            id = int(sampler(self.model.logits(self.window.x).float()))
            if self.question is not None and id == self.tokenizer.eot:
                self.answered = True
                break
            self.seen.append(id)
            self.pending = [id]
            self.show(text.feed(self.tokenizer.token_bytes(id)))
        self.show(text.end())
        self.take_back(*text.left())
        self.seen = self.seen[-size:]

    def show(self, text: str) -> None:
        self.out(text)
        self.last = text[-1:] or self.last

    def read(self) -> None:
        """What is pending goes through the model."""
        new = torch.tensor([self.pending], dtype=torch.int64, device=device_of(self.model))
        if self.window is None:
            self.window = Window(self.model, new, context_keep=self.s.context_keep)
        elif self.pending:
            self.window.append(new)
        self.pending = []

    def take_back(self, n: int, rest: str) -> None:
        """Forget the newest n tokens of the context; the text `rest` takes their place."""
        self.seen = self.seen[: len(self.seen) - n]
        unread = min(n, len(self.pending))
        self.pending = self.pending[: len(self.pending) - unread]
        if n > unread:
            left = int(self.window.n) - (n - unread) - 1  # and the token before them is read again
            if left >= 0:
                self.window.forget(left)
                self.pending = [self.seen[-1]]
            else:  # the window was cut in between and has no older ones
                self.window, self.pending = None, list(self.seen)
        ids = self.tokenizer.encode(rest, unknown="skip") if rest else []
        self.seen += ids
        self.pending += ids


class Unsettled:
    """A text as it is written, and the newest tokens that are not wholly shown yet."""

    def __init__(self, stop: tuple[str, ...]):
        self.stream = TextStream(stop)
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.text, self.shown = "", 0  # what these tokens say; how many characters of it are shown
        self.ends: list[int | None] = []  # where each of them ends there; None: within a character

    def feed(self, data: bytes) -> str:
        """What can be shown after one more token of these bytes."""
        piece = self.stream.feed(data)
        self.text += self.decoder.decode(data)
        self.shown += len(piece)
        self.ends.append(None if self.decoder.getstate()[0] else len(self.text))
        if self.ends[-1] == self.shown:
            self.text, self.shown, self.ends = "", 0, []
        return piece

    def end(self) -> str:
        """Nothing follows: what was held back, as far as it is whole characters."""
        held = "" if self.stream.stopped else self.text[self.shown :]
        self.shown += len(held)
        return held

    def left(self) -> tuple[int, str]:
        """How many of the newest tokens are not wholly shown, and what is shown of them."""
        whole = [(i, end) for i, end in enumerate(self.ends, 1)
                 if end is not None and end <= self.shown]
        i, end = whole[-1] if whole else (0, 0)
        return len(self.ends) - i, self.text[end : self.shown]


def talk(session: Session, read: Callable[[str], str] = input) -> None:
    """Take lines from the terminal until Ctrl-D or /quit.

    Ctrl-C ends a text between two tokens; a second one that comes before that is over, the program.
    """
    try:
        import readline  # noqa: F401  gives input() its line editing and history
    except ImportError:  # Windows
        pass

    reading = False

    def interrupt(*_: Any) -> None:
        if reading or session.interrupted:
            raise KeyboardInterrupt
        session.interrupted = True

    session.say("type a text and the model goes on, or answers; /help tells more, Ctrl-D leaves")
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        while True:
            try:
                reading, session.interrupted = True, False
                line = read("... " if session.lines else "> ")
            except KeyboardInterrupt:
                session.lines = []
                session.say("\nCtrl-D or /quit leaves")
                continue
            except UnicodeDecodeError:
                session.say("that line is not UTF-8 text")
                continue
            finally:
                reading = False
            if not session.line(line):
                return
            if session.last != "\n":
                session.show("\n")  # only on the screen
    except EOFError:
        session.say("")
    finally:
        signal.signal(signal.SIGINT, before)

"""How much more does `extras.serve` write for many at once than for one?

    python -m bench.serve --out_dir=RUN
    python -m bench.serve --out_dir=RUN --seconds=20 --streams=8 --server="--quantize=int8"

The server is a process of its own, the clients are one other: plain sockets that keep what comes
and look at it afterwards. First one streaming request follows another, then --streams at once go
on for --seconds, each with a seed of its own, again and again. Tokens are those that a finished
answer counts, seconds go on until the last has finished. A text must be that of its seed, alone
or among others, every time; an error or a text that is not counts, and the exit code is 1.

First token: from the request to the first event. Memory: what the system says of the server.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.trial import CLONE, Row, TrialFailed, keep, machine, print_table, tell
from data import DataError
from data.prepare import Parser
from kit.errors import run


class Done(NamedTuple):
    """An answer: its text by the end, or what went wrong."""

    seed: int
    tokens: int
    first: float  # seconds
    text: str
    error: str | None


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="bench.serve", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out_dir", required=True, metavar="RUN", help="a run or checkpoint folder")
    add("--seconds", type=float, default=60, help="of the streams (default: %(default)s)")
    add("--alone", type=float, default=20, help="seconds of one at a time (default: %(default)s)")
    add("--streams", type=int, default=32, help="at once (default: %(default)s)")
    add("--max_tokens", type=int, default=256, help="of each text (default: %(default)s)")
    add("--prompt", default="", help="what all go on with (default: a new document)")
    add("--server", default="", metavar="FLAGS", help="flags of extras.serve, in one text")
    add("--json", action="store_true", help="end with a line of JSON, the row of serve.jsonl")
    add("--out", type=Path, default=Path("out/bench"), metavar="FOLDER",
        help="where serve.jsonl goes (default: %(default)s)")
    args = parser.parse_args(argv)
    for name in ("streams", "max_tokens", "seconds", "alone"):
        if not 0 < getattr(args, name) < 1e6:
            parser.error(f"--{name}={getattr(args, name)}: expected more than 0")
    return args


# ------------------------------------------------------------------------------------- the server


@contextlib.contextmanager
def server(out_dir: str, flags: list[str]) -> Iterator[tuple[subprocess.Popen, int]]:
    """The process and its port; TrialFailed with its last words where it does not start."""
    command = [sys.executable, "-m", "extras.serve", f"--out_dir={Path(out_dir).resolve()}",
               "--port=0", *flags]
    process = subprocess.Popen(command, cwd=CLONE, stdin=subprocess.DEVNULL, text=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        lines = []
        for line in process.stderr:
            lines.append(line.rstrip())
            tell(f"server: {lines[-1]}")
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                yield process, int(found[1])
                return
        raise TrialFailed("\n".join(lines[-8:]) or "the server ended without a word")
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stderr.close()


def memory(process: subprocess.Popen) -> float | None:
    """MiB that a process holds, where the system tells."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024
    return None


# ------------------------------------------------------------------------------------ the clients


async def ask(port: int, args: argparse.Namespace, seed: int) -> tuple[int, float, bytes]:
    """One streaming request on a connection of its own -> seed, time to the first event, all."""
    body = json.dumps({"prompt": args.prompt, "max_tokens": args.max_tokens, "seed": seed,
                       "stream": True, "stream_options": {"include_usage": True}}).encode()
    began, first, parts = time.perf_counter(), 0.0, []
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
                     b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
                     + body)
        while part := await reader.read(1 << 16):
            parts.append(part)
            if not first and b"data: " in part:
                first = time.perf_counter() - began
    finally:
        writer.close()
    return seed, first, b"".join(parts)


def judge(seed: int, first: float, answer: bytes) -> Done:
    """What an answer says, once there is time to read it."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        return Done(seed, 0, first, "", f"{head[:30]!r} {rest[:200]!r}")
    data = b""
    while rest:  # chunks: their length in hexadecimal, a line end, so many bytes, a line end
        length, _, rest = rest.partition(b"\r\n")
        data, rest = data + rest[: int(length, 16)], rest[int(length, 16) + 2 :]
    events = [part.removeprefix(b"data: ") for part in data.split(b"\n\n") if part]
    if not events or events[-1] != b"[DONE]":
        return Done(seed, 0, first, "", f"the stream ended with {events[-1:]!r:.200}")
    values = [json.loads(part) for part in events[:-1]]
    text = "".join(choice["text"] for value in values for choice in value["choices"])
    return Done(seed, values[-1]["usage"]["completion_tokens"], first, text, None)


async def one_by_one(port: int, args: argparse.Namespace, until: float) -> AsyncIterator[Any]:
    seed = 0
    while time.perf_counter() < until:
        yield await ask(port, args, seed % args.streams)
        seed += 1


async def measure(process: subprocess.Popen, port: int, args: argparse.Namespace
                  ) -> tuple[list[Any], float, list[Any], float, list[float | None]]:
    """Answers alone and their seconds, answers among others and theirs, memory each second."""
    await ask(port, args, 0)  # what is slow the first time
    start = time.perf_counter()
    alone = [answer async for answer in one_by_one(port, args, start + args.alone)]
    alone_s = time.perf_counter() - start
    tell(f"{len(alone)} answers one by one")
    start, held, together = time.perf_counter(), [memory(process)], []

    async def stream(seed: int) -> None:
        while time.perf_counter() < start + args.seconds:
            together.append(await ask(port, args, seed))

    async def watch() -> None:
        while True:
            await asyncio.sleep(1)
            held.append(memory(process))

    watching = asyncio.create_task(watch())
    await asyncio.gather(*map(stream, range(args.streams)))
    together_s = time.perf_counter() - start
    watching.cancel()
    tell(f"{len(together)} answers, {args.streams} at once")
    return alone, alone_s, together, together_s, held


# ----------------------------------------------------------------------------------------- results


def summary(name: str, answers: list[Done], seconds: float) -> Row:
    first = sorted(done.first for done in answers if not done.error)
    pick = [first[int(share * (len(first) - 1))] * 1000 if first else None for share in (0.5, 0.95)]
    tokens = sum(done.tokens for done in answers)
    return {"requests": name, "answers": len(answers), "tokens": tokens, "seconds": seconds,
            "tokens_s": tokens / seconds, "first_p50_ms": pick[0], "first_p95_ms": pick[1],
            "errors": sum(done.error is not None for done in answers)}


def differing(answers: list[Done]) -> int:
    """Answers whose text is not the first one of their seed."""
    texts: dict[int, str] = {}
    return sum(texts.setdefault(done.seed, done.text) != done.text
               for done in answers if not done.error)


def main(argv: list[str]) -> int:
    args = parse(argv)
    flags = shlex.split(args.server)
    with server(args.out_dir, flags) as (process, port):
        alone, alone_s, together, together_s, held = asyncio.run(measure(process, port, args))
    alone, together = ([judge(*answer) for answer in some] for some in (alone, together))
    rows = [summary("one by one", alone, alone_s),
            summary(f"{args.streams} at once", together, together_s)]
    print_table(rows, [("requests", "requests", ""), ("answers", "answers", ","),
                       ("tokens_s", "tokens/s", ",.0f"), ("first_p50_ms", "first token ms", ".0f"),
                       ("first_p95_ms", "95 %", ".0f"), ("errors", "errors", "d")])
    ratio, mixed = rows[1]["tokens_s"] / max(rows[0]["tokens_s"], 1e-9), differing(alone + together)
    print(f"{ratio:.1f} x the tokens of one; {mixed} texts that are not those of their seed")
    if None not in held:
        print(f"memory of the server: {held[0]:.0f} MiB before, {held[len(held) // 10]:.0f} after "
              f"a tenth of the time, {held[-1]:.0f} in the end, {max(held):.0f} at most")
    errors = [done.error for done in alone + together if done.error]
    for error in errors[:3]:
        tell(f"error: {error}")
    keep(machine() | {"rows": rows, "ratio": ratio, "mixed": mixed, "memory_mib": held[::10],
                      "flags": flags, "max_tokens": args.max_tokens, "cores": os.cpu_count()},
         args.out, "serve.jsonl", args.json)
    return 1 if errors or mixed else 0


if __name__ == "__main__":
    run(main, mistakes=(DataError, TrialFailed))

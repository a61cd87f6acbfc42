"""How much more does `extras.serve` write for many at once than for one?

    python -m bench.serve --out_dir=RUN
    python -m bench.serve --out_dir=RUN --seconds=20 --streams=8 --server="--quantize=int8"

The server is a process of its own, the clients are threads of this one. First one streaming
request follows another, then --streams at once go on for --seconds, each with a seed of its own,
again and again. Tokens are those that a finished answer counts, seconds go on until the last has
finished. A text must be that of its seed, alone or among others, every time; an error or a text
that is not counts, and the exit code is 1.

First token: from the request to the first event. Memory: what the system says of the server.
"""

import argparse
import contextlib
import http.client
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from bench import common
from bench.common import CLONE, ProcessFailed, Row, log
from kit.errors import run


class Answer(NamedTuple):
    """An answer as it came."""

    seed: int
    first: float  # seconds from the request to the first event
    status: int
    body: bytes  # server-sent events

    def events(self) -> list[Row]:
        """Its events; ProcessFailed where it is not a whole answer."""
        parts = [part.removeprefix(b"data: ") for part in self.body.split(b"\n\n") if part]
        if self.status != 200 or not parts or parts[-1] != b"[DONE]":
            raise ProcessFailed(f"status {self.status}, ends with {self.body[-200:]!r}")
        return [json.loads(part) for part in parts[:-1]]


def parse(argv: list[str]) -> argparse.Namespace:
    parser = common.command_line("bench.serve", __doc__)
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
    common.require_positive(parser, args, "streams", "max_tokens", "seconds", "alone")
    return args


@contextlib.contextmanager
def server(out_dir: str, flags: list[str]) -> Iterator[tuple[subprocess.Popen, int]]:
    """The process and its port; ProcessFailed with the end of its stderr if it does not start."""
    command = [sys.executable, "-m", "extras.serve", f"--out_dir={Path(out_dir).resolve()}",
               "--port=0", *flags]
    process = subprocess.Popen(command, cwd=CLONE, stdin=subprocess.DEVNULL, text=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        lines = []
        for line in process.stderr:
            lines.append(line.rstrip())
            log(f"server: {lines[-1]}")
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                yield process, int(found[1])
                return
        raise ProcessFailed("\n".join(lines[-8:]) or "the server ended without a word")
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


class Clients:
    """What asks a server, one at a time or many at once."""

    def __init__(self, args: argparse.Namespace, process: subprocess.Popen, port: int):
        self.args, self.process, self.port = args, process, port
        self.memory = [memory(process)]  # MiB, once a second

    def ask(self, seed: int) -> Answer:
        """One streaming request on a connection of its own."""
        body = json.dumps({"prompt": self.args.prompt, "max_tokens": self.args.max_tokens,
                           "seed": seed, "stream": True, "stream_options": {"include_usage": True}})
        start = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        try:
            connection.request("POST", "/v1/completions", body,
                               {"Content-Type": "application/json"})
            response = connection.getresponse()
            line = response.readline()
            first = time.perf_counter() - start
            return Answer(seed, first, response.status, line + response.read())
        except (OSError, http.client.HTTPException) as e:
            return Answer(seed, 0.0, 0, repr(e).encode())
        finally:
            connection.close()

    def stream(self, seeds: range, seconds: float) -> list[Answer]:
        """One request after another, as long as the time lasts."""
        start, answers = time.perf_counter(), []
        while time.perf_counter() < start + seconds:
            answers.append(self.ask(seeds[len(answers) % len(seeds)]))
        return answers

    def streams(self, number: int, seconds: float) -> list[Answer]:
        """Several streams at once, which share the seeds."""
        seeds = range(self.args.streams)
        with ThreadPoolExecutor(number) as pool:
            running = [pool.submit(self.stream, seeds[i::number], seconds) for i in range(number)]
            while wait(running, timeout=1).not_done:
                self.memory.append(memory(self.process))
        return [answer for stream in running for answer in stream.result()]


def figures(number: int, answers: list[Answer], seconds: float, texts: dict[int, str]) -> Row:
    """A row of the table. texts: the first text of each seed, which all others must be."""
    row = {"at once": number, "answers": len(answers), "tokens": 0, "errors": 0, "mixed": 0}
    for answer in answers:
        try:
            events = answer.events()
        except ProcessFailed as failure:
            row["errors"] += 1
            log(f"error: {failure}")
            continue
        row["tokens"] += events[-1]["usage"]["completion_tokens"]
        text = "".join(choice["text"] for event in events for choice in event["choices"])
        row["mixed"] += texts.setdefault(answer.seed, text) != text
    first = sorted(answer.first for answer in answers)
    return row | {"seconds": seconds, "tokens_s": row["tokens"] / seconds,
                  "first_p50_ms": 1000 * first[len(first) // 2],
                  "first_p95_ms": 1000 * first[int(0.95 * (len(first) - 1))]}


def main(argv: list[str]) -> int:
    args = parse(argv)
    flags, rows, texts = shlex.split(args.server), [], {}
    with server(args.out_dir, flags) as (process, port):
        clients = Clients(args, process, port)
        clients.ask(0)  # what is slow the first time
        for number, seconds in ((1, args.alone), (args.streams, args.seconds)):
            start = time.perf_counter()
            answers = clients.streams(number, seconds)
            rows.append(figures(number, answers, time.perf_counter() - start, texts))
    common.print_table(rows, [
        ("at once", "at once", "d"), ("answers", "answers", ","), ("tokens_s", "tokens/s", ",.0f"),
        ("first_p50_ms", "first token ms", ".0f"), ("first_p95_ms", "95 %", ".0f"),
        ("errors", "errors", "d")])
    ratio = rows[1]["tokens_s"] / max(rows[0]["tokens_s"], 1e-9)
    mixed, held = sum(row["mixed"] for row in rows), clients.memory
    print(f"{ratio:.1f} x the tokens of one; {mixed} texts that are not those of their seed")
    if None not in held:
        print(f"memory of the server: {held[0]:.0f} MiB before, {held[-1]:.0f} in the end, "
              f"{max(held):.0f} at most")
    common.append_row(common.machine() | {"rows": rows, "ratio": ratio, "mixed": mixed,
                                          "memory_mib": held[::10], "flags": flags,
                                          "max_tokens": args.max_tokens},
                      args.out / "serve.jsonl", args.json)
    return int(mixed > 0 or any(row["errors"] for row in rows))


if __name__ == "__main__":
    run(main, mistakes=(ProcessFailed,))

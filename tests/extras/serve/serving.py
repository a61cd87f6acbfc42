"""The real server in a process of its own, on a small untrained model. Used by several tests."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from data.making.tokenizers import make_tokenizer
from kit.run import store
from model import GPT, GPTConfig

CLONE = Path(__file__).parents[3]
ALPHABET = "\n" + "".join(map(chr, range(32, 127))) + "é🌳"


def make_run(folder: Path, tokenizer: str = "char", **shape: Any) -> Path:
    """A run folder with an untrained checkpoint that writes varied nonsense.

    tokenizer: char (of ALPHABET; no end-of-text, so texts are as long as asked) or byte (with
    it, so that texts end by themselves, and with bytes that are no character).
    """
    made = make_tokenizer(tokenizer, [ALPHABET])
    config = GPTConfig(**{"vocab_size": made.vocab_size, "block_size": 64, "n_layer": 2,
                          "n_head": 2, "n_embd": 32, "tie_embeddings": False} | shape)
    torch.manual_seed(1)
    model = GPT(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.mul_(6)  # some tokens are likelier than others
    weights = {name: p.detach() for name, p in model.named_parameters()}
    folder.mkdir(parents=True)
    store.save(folder, config, weights, {}, made.to_json(), {
        "step": 10, "rows": 0, "tokens": 0, "val_loss": 1.0, "val_bpb": 1.25, "finished": True,
        "best_step": 10}, 1)
    return folder


class Server:
    """A running server: where it listens, and all that it has said so far."""

    def __init__(self, process: subprocess.Popen):
        self.process, self.lines, self.url = process, [], ""
        self.listens = threading.Event()
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if found := re.search(r"http://\S+:\d+", line):
                self.url = self.url or found[0]
                self.listens.set()
        self.listens.set()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def memory(self) -> float:
        """MiB that the process holds."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=20) as answer:
            return json.load(answer)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to end, and wait for that; the exit code."""
        self.process.send_signal(how)
        code = self.process.wait(20)
        self.reader.join(5)
        return code


@contextlib.contextmanager
def serving(out_dir: Path, *flags: str, **env: str) -> Iterator[Server]:
    """`python -m extras.serve` of a run on a free port of this machine; killed in the end."""
    command = [sys.executable, "-m", "extras.serve", f"--out_dir={out_dir}", "--port=0", *flags]
    process = subprocess.Popen(command, cwd=CLONE, env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
                               stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, text=True, errors="replace")
    server = Server(process)
    try:
        assert server.listens.wait(120) and server.url, "\n".join(server.lines)
        yield server
    finally:
        process.kill()
        process.wait()
        server.reader.join(5)
        process.stderr.close()

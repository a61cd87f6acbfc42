"""How fast is preparing text? `data.prepare` as a whole against the tokenizer alone.

    python bench/prepare.py                    documents from below Python's own folders
    python bench/prepare.py ~/notes --mb=50    from anywhere else

Both get the same distinct documents, in turns, each in a process of its own. tiktoken has them in
memory and encodes them (`encode_ordinary_batch`, with its own number of threads and with one a
core); `prepare` reads JSON lines, hashes, splits, encodes, writes and syncs shards.
"""

import argparse
import hashlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from kit.errors import run

CLONE = Path(__file__).parent.parent
TEXT = {".py", ".pyi", ".txt", ".md", ".rst", ".h", ".hpp", ".c", ".cpp", ".js", ".html", ".json"}


def distinct(folders: list[str], wanted: int) -> Iterator[str]:
    """Texts of 2 MB at most below some folders, none twice, `wanted` bytes in all."""
    seen = set()
    for path in (p for folder in folders for p in sorted(Path(folder).rglob("*"))):
        if path.suffix not in TEXT or not path.is_file() or path.stat().st_size > 2_000_000:
            continue
        raw = path.read_bytes()
        digest = hashlib.sha256(raw).digest()
        if digest in seen:
            continue
        try:
            yield raw.decode("utf-8")
        except UnicodeDecodeError:
            continue
        seen.add(digest)
        wanted -= len(raw)
        if wanted <= 0:
            return


def work(what: str, source: str) -> None:
    """One measurement, in this process; prints seconds and peak memory in MiB."""
    name, _, option = what.partition(" ")
    if name == "tiktoken":
        import tiktoken

        with open(source, encoding="utf-8") as file:
            texts = [json.loads(line)["text"] for line in file]
        encoding = tiktoken.get_encoding("gpt2")
        encoding.encode_ordinary("warm")
        start = time.perf_counter()
        encoding.encode_ordinary_batch(texts, num_threads=int(option))
    else:
        from data.making.build import prepare

        start = time.perf_counter()
        prepare([source], "bench", option, say=lambda line: None)
    seconds = time.perf_counter() - start
    print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", default=[
        sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")])
    parser.add_argument("--mb", type=int, default=200, help="of text (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.work:
        return work(args.work, args.folders[0])
    from data.making.build import cores

    variants = [f"tiktoken {n}" for n in sorted({8, cores()})] + ["prepare gpt2", "prepare byte"]
    with tempfile.TemporaryDirectory() as folder:
        source, size, count = Path(folder) / "bench.jsonl", 0, 0
        with open(source, "w", encoding="utf-8") as file:
            for text in distinct(args.folders, args.mb * 1_000_000):
                file.write(json.dumps({"text": text}) + "\n")
                size, count = size + len(text.encode()), count + 1
        print(f"{count:,} distinct documents, {size / 1e6:.1f} MB, {cores()} cores")
        found = {variant: [] for variant in variants}
        for _ in range(args.rounds):
            for variant in variants:
                command = [sys.executable, __file__, str(source), f"--work={variant}"]
                done = subprocess.run(command, capture_output=True, text=True, check=True,
                                      env={**os.environ, "BONSAI_DATA": folder})
                found[variant].append(tuple(map(float, done.stdout.split())))
                shutil.rmtree(Path(folder) / "bench", ignore_errors=True)  # or it would be replaced
    best = min(statistics.median(s for s, _ in found[v]) for v in variants if "tik" in v)
    print(f"{'':14} {'MB/s':>7} {'lowest':>7} {'highest':>7} {'ratio':>6} {'peak MiB':>9}")
    for variant, runs in found.items():
        seconds = [s for s, _ in runs]
        speeds = [size / 1e6 / s for s in (statistics.median(seconds), max(seconds), min(seconds))]
        print(f"{variant:14} {speeds[0]:7.1f} {speeds[1]:7.1f} {speeds[2]:7.1f} "
              f"{best / statistics.median(seconds):6.2f} {max(m for _, m in runs):9.0f}")


if __name__ == "__main__":
    run(main, mistakes=())

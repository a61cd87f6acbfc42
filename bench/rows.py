"""How long does a batch take? Our rows against nanoGPT's way, in turns, on the same shard.

    python bench/rows.py [--mb=200]

nanoGPT opens a memory map for each batch and stacks a slice for each row; its rows are drawn with
replacement. Ours come from a computed permutation and every id is checked. Peak memory is that of
20,000 batches, apart from the map's own process: pages touched through a map count as resident.
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from data.shards import HEADER_BYTES, ShardWriter, Split
from kit.errors import run


def ours(path: Path, batch: int, block: int) -> Callable[[int], object]:
    split = Split("train", [path], 50257)
    return lambda step: split.batch(step * batch, batch, block, 1337)


def nanogpt(path: Path, batch: int, block: int) -> Callable[[int], object]:
    rng = np.random.default_rng(1337)

    def get_batch(step: int) -> object:
        tokens = np.memmap(path, np.uint16, mode="r", offset=HEADER_BYTES)
        starts = rng.integers(len(tokens) - block, size=batch)
        x = np.stack([tokens[i:i + block].astype(np.int64) for i in starts])
        return x, np.stack([tokens[i + 1:i + 1 + block].astype(np.int64) for i in starts])

    return get_batch


WAYS = {"ours": ours, "nanoGPT's way": nanogpt}


def peak(path: Path, way: str) -> None:
    """Prints this process's memory in MiB before and after many batches."""
    get, seen = WAYS[way](path, 16, 1024), []
    for _ in range(2):
        status = Path("/proc/self/status").read_text()
        seen.append(int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024)
        for step in range(20_000 if len(seen) == 1 else 0):
            get(step)
    print(*seen)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=200, help="size of the shard")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.peak:
        return peak(Path(args.peak[0]), args.peak[1])
    with tempfile.TemporaryDirectory() as folder:
        writer, rng = ShardWriter(Path(folder), "train", 50257, 10**12), np.random.default_rng(1)
        for _ in range(args.mb):
            writer.write(rng.integers(50257, size=500_000))
        writer.finish()
        path = Path(folder) / "train_000000.bin"
        print(f"{'rows x tokens':>14} " + " ".join(f"{name:>20}" for name in WAYS) + "   ratio")
        for batch, block in ((12, 64), (16, 128), (16, 1024), (64, 256)):
            gets = [way(path, batch, block) for way in WAYS.values()]
            times = [[] for _ in gets]
            for step in range(2000):
                for get, found in zip(gets, times, strict=True):
                    start = time.perf_counter()
                    get(step)
                    found.append(time.perf_counter() - start)
            micros = [1e6 * statistics.median(found) for found in times]
            print(f"{batch:>7} x {block:<4} " + " ".join(f"{m:>17.0f} us" for m in micros)
                  + f"   {micros[0] / micros[1]:.2f}")
        if Path("/proc/self/status").exists():
            for way in WAYS:
                done = subprocess.run([sys.executable, __file__, "--peak", str(path), way],
                                      capture_output=True, text=True, check=True)
                before, after = map(float, done.stdout.split())
                print(f"{way}: {before:,.0f} MiB, after 20,000 batches {after:,.0f} MiB")


if __name__ == "__main__":
    run(main, mistakes=())

"""What all tests share: no run ever touches the clone's data/ and out/, and a text to train on."""

import random
from pathlib import Path

import pytest
import torch
from hypothesis import settings

WORDS = ("the of and to in that it was his her with as had for not but at be on they by all which "
         "said one so when who no my if there what would up out about into them then").split()


settings.register_profile("the same each time", derandomize=True, deadline=None)
settings.load_profile("the same each time")
torch.set_num_threads(1)  # tiny models: more threads only wait for one another


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("BONSAI_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("BONSAI_OUT", str(tmp_path / "out"))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # of processes that a test starts
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of processes that a test starts
    torch.manual_seed(0)


def make_text(n_words: int = 8000, seed: int = 0) -> str:
    """English-like sentences, the same on every machine and every Python."""
    rng = random.Random(seed)
    words = [WORDS[int(rng.random() ** 2 * len(WORDS))] for _ in range(n_words)]
    lines = [" ".join(words[i : i + 9]).capitalize() + "." for i in range(0, n_words, 9)]
    return "\n".join(lines)


@pytest.fixture
def text_file(tmp_path) -> Path:
    path = tmp_path / "my text.txt"
    path.write_bytes(make_text().encode())
    return path

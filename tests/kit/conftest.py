"""A tiny model for the tests of the parts, and checkpoints of it."""

from pathlib import Path

import pytest
import torch

from kit.run import store
from model import GPT, GPTConfig


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Tiny matrices are slower on several threads, and no test pulls the plug of the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr("os.fsync", lambda fd: None)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny():
    """tiny(**changes) makes a GPT of 2 layers, width 16, context 8 and 11 tokens, seed 0."""
    def make(seed: int = 0, **changes) -> GPT:
        torch.manual_seed(seed)
        config = dict(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=16) | changes
        return GPT(GPTConfig(**config))

    return make


@pytest.fixture
def save(tiny):
    """save(run, step, ...) writes a checkpoint of a tiny model with something as its optimizer."""
    def write(run: Path, /, step: int = 10, keep: int = 9, is_best: bool = False, seed: int = 0,
              model: GPT | None = None, **changes) -> Path:
        run.mkdir(parents=True, exist_ok=True)
        model = model or tiny(seed)
        tensors = {f"{n}.exp_avg": p.detach() / 3 for n, p in model.named_parameters()}
        tensors["wte.weight.step"] = torch.tensor(float(step))
        tokenizer = {"format": 1, "kind": "byte", "hash": "abc", "spec": "byte"}
        state = {"step": step, "finished": False, "val_loss": 1.5, "tiny": 1e-7, "name": "é",
                 "threads": torch.get_num_threads()} | ({"best_step": step} if is_best else {})
        state |= changes
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        if is_best:
            state["best_step"] = step
        return store.save(run, model.config, weights, tensors, tokenizer, state, keep)

    return write

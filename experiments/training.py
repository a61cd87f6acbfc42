"""How experiments train: the project's model, optimizers and data in a loop of a screen."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import utils

from data.dataset import Dataset
from data.prepare import resolve
from experiments.lab import tick
from kit.device import muon_dtype, prepare_device
from kit.evaluate import Batch, eval_batches, evaluate
from kit.optimizer import build_optimizers, set_lr
from model import GPT, KVCache

Weights = dict[str, np.ndarray]
Batches = Callable[[int], tuple[np.ndarray, np.ndarray]]  # update -> x, y (B, T), y = -1: no target


@dataclass
class Recipe:
    """What kit.optimizer asks for, with the rates of config/small.py; see TrainSettings."""

    max_iters: int = 600
    warmup_iters: int = 30
    optimizer: str = "muon"
    learning_rate: float = 2e-2
    muon_lr: float = 0.012
    muon_momentum: float = 0.85
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0
    layer_lr_decay: float = 1.0
    decay_lr: bool = True
    schedule: str = "linear"
    cooldown: float = 0.6
    lr_decay_iters: int | None = None
    min_lr: float = 0.0


def train(model: GPT, batches: Batches, recipe: Recipe, share: float = 1.0,
          each: Callable[[int], None] = lambda step: None) -> list[float]:
    """Train in place in fp32 -> the loss of each update, nats per target.

    share: of a trial's way that this training is (see `tick`). each: called before update 0, 1, ...
    and after the last.
    """
    cpu = torch.device("cpu")
    prepare_device(cpu)
    optimizers, losses = build_optimizers(model, recipe, muon_dtype(cpu)), []
    model.train()
    for step in range(recipe.max_iters):
        each(step)
        set_lr(optimizers, step, recipe)
        x, y = (torch.from_numpy(a) for a in batches(step))
        loss_sum, n = model(x, y)
        loss = loss_sum / n.clamp(min=1)
        loss.backward()
        utils.clip_grad_norm_(model.parameters(), recipe.grad_clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        tick(share / recipe.max_iters)
    each(recipe.max_iters)
    model.eval()
    return losses


def text(tokenizer: str = "byte") -> Path:
    """Folder of the text that experiments learn: Python's standard library, prepared once."""
    return resolve("stdlib", tokenizer, lambda line: None)


def windows(data: Dataset, rows: int, block_size: int, seed: int) -> Batches:
    """Update `step` takes the next `rows` windows of the training split, each once an epoch."""
    return lambda step: data.train.batch(step * rows, rows, block_size, seed)


def denoising(batches: Batches, mask_id: int, seed: int, share: float = 0.2) -> Batches:
    """Hide a share of the input bytes, other ones at each update; these are the targets."""

    def hidden(step: int) -> tuple[np.ndarray, np.ndarray]:
        x, _ = batches(step)
        hide = np.random.default_rng((seed, step)).random(x.shape) < share
        return np.where(hide, mask_id, x), np.where(hide, x, -1)

    return hidden


def target_only(y: np.ndarray, prefix: int) -> np.ndarray:
    """y (B, T) with -1 where the next token is still of the input; its last position counts."""
    y = y.copy()
    y[:, : prefix - 1] = -1
    return y


def validate(model: GPT, data: Dataset, block_size: int | None = None,
             tokens: int = 0) -> dict[str, float]:
    """Loss and bits per byte on fixed windows of the validation split; see kit.evaluate.

    tokens: about so many of them, spread evenly over the split; 0: all.
    """
    size = block_size or model.config.block_size
    rows = max(1, 4096 // size)
    batches = eval_batches(data.val, size, rows, -(-tokens // (rows * size)))
    return evaluate(model, batches, data.token_byte_lengths(), data.separator,
                    torch.inference_mode)


def weights_of(model: GPT) -> Weights:
    """A copy that can go to another process."""
    return {name: p.detach().numpy().copy() for name, p in model.state_dict().items()}


def sample(data: Dataset, size: int, tokens: int) -> Iterable[Batch]:
    """Windows of about so many tokens, spread evenly over the validation split."""
    return eval_batches(data.val, size, max(1, 4096 // size), max(1, tokens // 4096))


@torch.inference_mode()
def by_position(model: GPT, batches: Iterable[Batch]) -> Tensor:
    """Mean loss of each position, nats (size,), over batches of whole windows."""
    total, n = torch.zeros(()), 0
    for x, y in batches:
        logits, targets = model(torch.from_numpy(x)), torch.from_numpy(y)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        total, n = total + loss.view(targets.shape).sum(0, dtype=torch.float64), n + len(x)
    return total / n


class MaskedGPT(GPT):
    """A GPT whose positions see what a mask says, not only what is before them.

    mask: (T, T) or (B, 1, T, T), True where a query (row) may see a key (column).
    """

    mask: Tensor

    def hidden(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        if cache is not None:
            raise ValueError("a mask of one's own has no cache")
        T = idx.size(1)
        pos = torch.arange(T, device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = block(x, pos, self.mask[..., :T, :T], None)
        return self.ln_f(x)


def prefix_mask(T: int, prefix: int) -> Tensor:
    """(T, T): the first `prefix` positions see each other, all see what is before them.

    prefix 0 or 1 is causal attention, prefix T full attention (UniLM, arXiv 1905.03197).
    """
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    mask[:prefix, :prefix] = True
    return mask

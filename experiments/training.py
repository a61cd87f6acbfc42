"""How experiments train: the project's model, optimizers and data in a loop of a screen."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import utils
from torch.overrides import TorchFunctionMode

from data.dataset import Dataset
from data.prepare import resolve
from kit.device import muon_dtype, prepare_device
from kit.errors import UserError
from kit.evaluate import Batch, eval_batches, evaluate
from kit.finetune import resize
from kit.optimizer import build_optimizers, set_lr
from model import GPT, GPTConfig, KVCache

Batches = Callable[[int], tuple[np.ndarray, np.ndarray]]  # update -> x, y (B, T), y = -1: no target


@dataclass
class Recipe:
    """The settings of train.py that kit.optimizer reads, with the rates of config/small.py."""

    max_iters: int = 600
    warmup_iters: int = 30
    optimizer: Literal["adamw", "muon"] = "muon"
    learning_rate: float = 2e-2
    muon_lr: float = 0.012
    muon_momentum: float = 0.85
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    layer_lr_decay: float = 1.0
    decay_lr: bool = True
    schedule: Literal["cosine", "linear"] = "linear"
    cooldown: float = 0.6
    lr_decay_iters: int | None = None
    min_lr: float = 0.0


def train(model: GPT, batches: Batches, recipe: Recipe,
          each: Callable[[int], None] = lambda step: None) -> list[float]:
    """Train in place in fp32 -> the loss of each update, nats per target.

    each: called before update 0, 1, ... and after the last.
    """
    cpu = torch.device("cpu")
    prepare_device(cpu)
    optimizers, losses = build_optimizers(model, recipe, muon_dtype(cpu)), []
    model.train()
    with faster(model):
        for step in range(recipe.max_iters):
            each(step)
            set_lr(optimizers, step, recipe)
            x, y = (torch.from_numpy(a) for a in batches(step))
            loss_sum, n = model(x, y)
            loss = loss_sum / n.clamp(min=1)
            loss.backward()
            utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
        each(recipe.max_iters)
    model.eval()
    return losses


@contextmanager
def faster(model: GPT) -> Iterator[None]:
    """Inside, PyTorch's operators use the project's kernels, and the model its hand-written loss.

    The model keeps that loss, if it agrees with its own. Without kit/kernels nothing changes.
    """
    try:
        from kit.kernels import install
    except ImportError:
        yield
        return
    with install() as kernels:
        kernels.take_loss(model)
        yield


def stdlib(tokenizer: str = "byte") -> Dataset:
    """The text that experiments learn: Python's standard library, prepared on the first call."""
    return Dataset(resolve("stdlib", tokenizer, lambda line: None))


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


def after_prefix(batches: Batches, prefix: int) -> Batches:
    """The same batches, but only what follows the first `prefix` tokens of a row is a target."""

    def rest(step: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = batches(step)
        y = y.copy()
        y[:, : prefix - 1] = -1  # the last token of the prefix predicts the first target
        return x, y

    return rest


def sample(data: Dataset, size: int, tokens: int) -> Iterator[Batch]:
    """Windows of about so many tokens, spread evenly over the validation split."""
    return eval_batches(data.val, size, max(1, 4096 // size), max(1, tokens // 4096))


def validate(model: GPT, data: Dataset, tokens: int) -> dict[str, float]:
    """Loss and bits per byte of such a sample; see kit.evaluate."""
    with faster(model):
        return evaluate(model, sample(data, model.config.block_size, tokens),
                        data.token_byte_lengths(), data.separator, torch.inference_mode)


@torch.inference_mode()
def by_position(model: GPT, batches: Iterable[Batch]) -> Tensor:
    """Mean loss of each position, nats (size,), over batches of whole windows."""
    total, n = torch.zeros(()), 0
    for x, y in batches:
        logits, targets = model(torch.from_numpy(x)), torch.from_numpy(y)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        total, n = total + loss.view(targets.shape).sum(0, dtype=torch.float64), n + len(x)
    return total / n


def widened(model: GPT, config: GPTConfig, way: str = "interpolate") -> GPT:
    """A copy of the model for the windows of `config`; way: see `kit.positions.resize`."""
    tensors = model.state_dict()
    tensors["wpe.weight"] = resize(tensors["wpe.weight"], config.block_size, way)
    wide = GPT(config)
    wide.load_state_dict(tensors)
    return wide.eval()


class Sight(KVCache):
    """Passed as a cache, it stores nothing and decides which positions see each other."""

    def __init__(self, seen: Tensor):
        super().__init__(n_layer=0)
        self.seen = seen

    def mask(self, T: int) -> Tensor:
        return self.seen[..., :T, :T]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v

    def advance(self, T: int) -> None:
        pass


class MaskedGPT(GPT):
    """A GPT whose positions see what a mask allows, not only what is before them.

    mask: (T, T) or (B, 1, T, T), True where a query (row) may see a key (column).
    """

    mask: Tensor

    def layers(self, idx: Tensor, cache: KVCache | None = None) -> Iterator[Tensor]:
        if cache is not None:
            raise ValueError("a model with a mask of its own takes no cache")
        return super().layers(idx, Sight(self.mask))


def prefix_mask(T: int, prefix: int) -> Tensor:
    """(T, T): the first `prefix` positions see each other, all see what is before them.

    prefix 0 or 1 is causal attention, prefix T full attention (UniLM, arXiv 1905.03197).
    """
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    mask[:prefix, :prefix] = True
    return mask


class Watch(TorchFunctionMode):
    """Inside, `seen` collects what PyTorch's attention is given: see `queries_and_keys`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.record(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def record(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None,
             dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
             enable_gqa: bool = False) -> None:
        if scale is not None:
            q = q * (scale * math.sqrt(q.size(-1)))
        if attn_mask is None:
            attn_mask = torch.ones(q.size(2), k.size(2), dtype=torch.bool)
            attn_mask = attn_mask.tril() if is_causal else attn_mask
        self.seen.append((q, k, attn_mask))


@torch.no_grad()
def queries_and_keys(model: GPT, idx: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """What each layer gives to PyTorch's attention for idx (B, T): q, k (B, H, T, D) and the mask.

    Scores are q k^T / sqrt(D). UserError if the model computes its attention in another way.
    """
    with Watch() as watch:
        model.hidden(idx)
    if len(watch.seen) != len(model.h) or any(q.shape != k.shape for q, k, _ in watch.seen):
        raise UserError("this experiment needs a model that calls F.scaled_dot_product_attention "
                        "once in each layer, with a key for each query; that of model.py calls it "
                        f"{len(watch.seen)} times in {len(model.h)} layers")
    return watch.seen


def attention_scores(model: GPT, idx: Tensor, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """What the softmax of each layer is taken of for idx (B, T): (B, H, T, T), -inf where masked.

    They are computed in dtype from the queries and keys of the model.
    """
    found = []
    for q, k, mask in queries_and_keys(model, idx):
        scores = q.to(dtype) @ k.to(dtype).mT / math.sqrt(q.size(-1))
        seen = mask.dtype == torch.bool  # else it is added
        found.append(scores.masked_fill(~mask, -math.inf) if seen else scores + mask.to(dtype))
    return found


TINY = {"vocab_size": 3, "block_size": 4, "n_layer": 2, "n_head": 2, "n_embd": 8}


def needs(*names: str) -> None:
    """UserError, in one line, if model.py lacks what an experiment uses by one of these names.

    A name is an attribute of a GPT with two layers, as "h.0.attn.c_attn" or "config.attn_logn".
    """
    model = GPT(GPTConfig(**TINY))
    for name in names:
        try:
            attrgetter(name)(model)
        except AttributeError:
            raise UserError(f"this experiment needs a GPT with {name}, and that of model.py has no "
                            "such part; it runs with the model as published") from None


def needs_scores() -> None:
    """UserError if the attention of model.py cannot be read; see `attention_scores`."""
    attention_scores(GPT(GPTConfig(**TINY)), torch.zeros(1, 4, dtype=torch.int64))


@torch.no_grad()
def needs_masks() -> None:
    """UserError if the attention of model.py does not heed a mask that shows what is ahead."""
    model = MaskedGPT(GPTConfig(**TINY), init_std=0.5)
    model.mask = prefix_mask(4, 4)
    first = [model.hidden(torch.tensor([[0, 0, 0, last]]))[0, 0] for last in (0, 1)]
    if torch.equal(*first):
        raise UserError("this experiment lets positions see what is ahead, and the attention of "
                        "model.py does not heed its mask")

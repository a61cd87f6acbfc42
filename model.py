"""The GPT: a decoder-only transformer in the shape of GPT-2.

Read it top to bottom: configuration, attention, MLP, block, GPT. What stands below the rule "skip
at first" saves time and memory and changes nothing that is computed: the cache, and the loss in
chunks. Everything here may be edited: what trains, writes and evaluates is this file.
Shapes in comments: B rows, T positions, C = n_embd, H heads, D = C / H, V = vocab_size, S = keys.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Store = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None  # new k, v -> all k, v so far


@dataclass
class GPTConfig:
    """The architecture: with the weights, all that is needed to run the model."""

    vocab_size: int = 50257  # the true size; no id beyond it can be produced
    block_size: int = 1024  # the context: positions that the model has embeddings for
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = False  # biases in Linear and LayerNorm; GPT-2 has them
    tie_embeddings: bool = True  # the output head is the token embedding
    attn_logn: Literal["off", "fixed", "clipped", "learned"] = "off"  # see CausalSelfAttention
    logn_base: int | None = None  # None: 512 for "fixed", block_size for "clipped"
    gelu: Literal["tanh", "erf"] = "tanh"  # tanh is GPT-2's; erf, the exact one, is nanoGPT's

    def __post_init__(self):
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}: must be at least 0 and below 1")
        if self.attn_logn not in ("off", "fixed", "clipped", "learned"):
            raise ValueError(f"attn_logn={self.attn_logn}: must be off, fixed, clipped or learned")
        if self.gelu not in ("tanh", "erf"):
            raise ValueError(f"gelu={self.gelu}: must be tanh or erf")
        based = self.attn_logn in ("fixed", "clipped") and (self.logn_base or 0) >= 2
        if self.logn_base is not None and not based:
            raise ValueError(f"logn_base={self.logn_base}: must be at least 2, and needs "
                             f"attn_logn=fixed or clipped, not {self.attn_logn}")


class CausalSelfAttention(nn.Module):
    """Every position looks at itself and at those before it.

    Softmax over n keys grows flatter as n grows. `attn_logn` sharpens the query to make up for it:
    fixed    q * log(n) / log(base)           base 512 (kexue.fm 8823)
    clipped  q * max(1, log(n) / log(base))   base block_size: acts once the context is widened
    learned  q * s * log(n), s per head       starts as 1 / log(block_size) (arXiv 2501.19399)
    where n = position + 1 is the number of keys that the query may see.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head, self.dropout, self.logn = config.n_head, config.dropout, config.attn_logn
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)  # q, k, v
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        base = config.logn_base or (512 if self.logn == "fixed" else max(config.block_size, 2))
        self.log_base = math.log(base)
        if self.logn == "learned":
            self.logn_scale = nn.Parameter(torch.full((config.n_head,), 1 / self.log_base))

    def forward(self, x: Tensor, pos: Tensor, mask: Tensor | None, store: Store) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)  # each (B, T, C)
        q, k, v = (a.view(B, T, self.n_head, -1).transpose(1, 2) for a in (q, k, v))  # (B, H, T, D)
        if self.logn != "off":
            q = q * self.query_scale(pos).to(q.dtype)
        if store is not None:
            k, v = store(k, v)  # (B, H, S, D), of all positions so far
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, mask, p, is_causal=mask is None and T > 1)
        y = y.transpose(1, 2).reshape(B, T, C)  # the heads side by side
        return F.dropout(self.c_proj(y), self.dropout, self.training)

    def query_scale(self, pos: Tensor) -> Tensor:
        """pos (T,) or (B, T) -> the factor of each query, (1 or B, 1 or H, T, 1)."""
        log_n = (pos + 1).float().log().view(-1, 1, pos.size(-1), 1)
        if self.logn == "learned":
            return log_n * self.logn_scale.view(1, -1, 1, 1)
        ratio = log_n / self.log_base
        return ratio.clamp(min=1) if self.logn == "clipped" else ratio


class MLP(nn.Module):
    """Two layers with a GELU between them (arXiv 1606.08415), four times as wide inside."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout, self.approximate = config.dropout, "none" if config.gelu == "erf" else "tanh"

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.c_fc(x), approximate=self.approximate)  # (B, T, 4C)
        return F.dropout(self.c_proj(x), self.dropout, self.training)


class Block(nn.Module):
    """Attention moves information between positions, the MLP works on each; both add to x."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, pos: Tensor, mask: Tensor | None, store: Store) -> Tensor:
        x = x + self.attn(self.ln_1(x), pos, mask, store)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Token and position embeddings, n_layer blocks, a final norm and the output head."""

    def __init__(self, config: GPTConfig, init_std: float = 0.02):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        self.init_weights(init_std)

    @torch.no_grad()
    def init_weights(self, std: float) -> None:
        """GPT-2's initialisation: small normals, smaller at the end of each residual branch.

        Matrices and stacks of them are drawn, biases are zero; any other vector keeps the value
        that its module gave it, as the ones of a norm. What is not trained stays as it is.
        """
        embeddings = {"wte.weight": 0.02, "wpe.weight": 0.01, "lm_head.weight": 0.02}
        for name, p in self.named_parameters():
            if not p.requires_grad or p.is_meta:
                continue
            if name.endswith("c_proj.weight"):
                p.normal_(std=std / math.sqrt(2 * self.config.n_layer))
            elif p.ndim >= 2:
                p.normal_(std=embeddings.get(name, std))
            elif name.endswith("bias"):
                p.zero_()
            elif not p.isfinite().all():  # of torch.empty, say
                raise ValueError(f"{name}: not initialised; give it a rule in GPT.init_weights")

    def layers(self, idx: Tensor, cache: "KVCache | None" = None) -> Iterator[Tensor]:
        """Token ids (B, T) -> the states (B, T, C) after each block and, last, after the norm."""
        T, held = idx.size(1), 0 if cache is None else cache.longest
        if held + T > self.config.block_size:
            raise ValueError(f"{held + T} positions, but block_size={self.config.block_size}")
        pos = torch.arange(T, device=idx.device) if cache is None else cache.positions(T)
        mask = None if cache is None else cache.mask(T)
        x = F.dropout(self.wte(idx) + self.wpe(pos), self.config.dropout, self.training)
        for layer, block in enumerate(self.h):
            x = block(x, pos, mask, None if cache is None else partial(cache.append, layer))
            yield x
        if cache is not None:
            cache.advance(T)
        yield self.ln_f(x)

    def hidden(self, idx: Tensor, cache: "KVCache | None" = None) -> Tensor:
        """Token ids (B, T) -> the final states (B, T, C), which `logits` takes."""
        for x in self.layers(idx, cache):  # noqa: B007
            pass
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Final states (..., C) -> logits (..., V): the one way out, for training and writing."""
        return self.lm_head(x)

    def forward(self, idx: Tensor, targets: Tensor | None = None, cache: "KVCache | None" = None):
        """Token ids (B, T) -> logits (B, T, V); with targets (B, T): (loss_sum, n_targets).

        A target of -1 is ignored. With a cache, idx continues what the cache holds.
        """
        x = self.hidden(idx, cache)
        return self.logits(x) if targets is None else self.loss(x, targets)

    @torch.inference_mode()
    def generate(self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0,
                 top_k: int | None = None) -> Tensor:
        """Continue the prompts idx (B, T) -> (B, T + max_new_tokens); temperature 0: the likeliest.

        Learned positions cannot slide: a full window goes on with its newer half.
        """
        size, training = self.config.block_size, self.training
        self.eval()
        cache, new = self.new_cache(len(idx)), idx[:, -size:]
        for _ in range(max_new_tokens):
            if cache.longest + new.size(1) > size:
                cache, new = self.new_cache(len(idx)), idx[:, -max(1, size // 2) :]
            logits = self.logits(self.hidden(new, cache)[:, -1]).float()  # (B, V)
            if top_k:
                least = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                logits = logits.masked_fill(logits < least, -torch.inf)
            if temperature == 0:
                new = logits.argmax(-1, keepdim=True)
            else:
                new = torch.multinomial((logits / temperature).softmax(-1), 1)
            idx = torch.cat([idx, new], dim=1)
        self.train(training)
        return idx

    def num_params(self) -> int:
        """All parameters, each counted once: 124,439,808 for GPT-2's smallest."""
        return sum(p.numel() for p in self.parameters())

    # ------------------------------------------------------------------------------ skip at first

    CHUNK = 512  # tokens whose logits exist at once: the largest tensor of a small GPT by far

    def loss(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Final states (..., C), targets (...) -> sum of cross entropies in nats, their number.

        In chunks whose logits are computed again for the gradient instead of being kept.
        """
        x, targets = x.reshape(-1, x.size(-1)), targets.reshape(-1)
        total = torch.zeros((), device=x.device)
        for some, wanted in zip(x.split(self.CHUNK), targets.split(self.CHUNK), strict=True):
            total = total + checkpoint(self.loss_of, some, wanted, use_reentrant=False)
        return total, (targets >= 0).sum()

    def loss_of(self, x: Tensor, targets: Tensor) -> Tensor:
        """States (N, C), targets (N,) -> sum of cross entropies in nats."""
        return F.cross_entropy(self.logits(x).float(), targets, ignore_index=-1, reduction="sum")

    def new_cache(self, batch_size: int = 1, length: int | None = None) -> "KVCache":
        """A cache where the model is, of block_size positions unless told otherwise."""
        return KVCache(len(self.h), batch_size, length or self.config.block_size,
                       self.wte.weight.device)


class KVCache:
    """Keys and values of the positions already seen; made, kept and passed in by the caller.

    `pos` is the number of positions held: a plain number while all rows agree, else a (B,) tensor.
    Prompts of different lengths: pad them on the right, run them at once, `trim` to the true ones.
    No real token ever sees the padding, and the next tokens overwrite it.
    Heads and width of a layer are those of the first keys and values that it is given.
    """

    def __init__(self, n_layer: int, batch_size: int = 1, length: int = 1024,
                 device: torch.device | str = "cpu", dtype: torch.dtype | None = None):
        self.batch_size, self.length, self.device, self.dtype = batch_size, length, device, dtype
        self.k: list[Tensor | None] = [None] * n_layer  # of each layer (B, H, S, D)
        self.v: list[Tensor | None] = [None] * n_layer
        self.pos: int | Tensor = 0
        self.longest = 0  # the largest pos, known without asking the device

    def positions(self, T: int) -> Tensor:
        """The positions of the next T tokens: (T,), or (B, T) where rows differ."""
        ahead = torch.arange(T, device=self.device)
        return ahead + (self.pos if isinstance(self.pos, int) else self.pos[:, None])

    def mask(self, T: int) -> Tensor | None:
        """Which keys the next T queries may see, (1 or B, 1, T, S); None: all, or all before."""
        if isinstance(self.pos, int) and (T == 1 or self.pos == 0):
            return None
        keys = torch.arange(self.longest + T, device=self.device)
        return keys <= self.positions(T).view(-1, 1, T, 1)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new (B, H, T, D) of a layer; returns all that it holds, each (B, H, S, D)."""
        T, end = k.size(2), self.longest + k.size(2)
        if end > self.length:
            raise ValueError(f"the cache has room for {self.length} positions, {end} are needed")
        for all_layers, new in ((self.k, k), (self.v, v)):
            held = self.room(all_layers, layer, new)
            if isinstance(self.pos, int):
                held[:, :, self.pos : end] = new
            else:
                rows = torch.arange(len(new), device=new.device)[:, None]
                held[rows, :, self.positions(T)] = new.transpose(1, 2).to(held.dtype)
        return self.k[layer][:, :, :end].to(k.dtype), self.v[layer][:, :, :end].to(v.dtype)

    def room(self, held: list[Tensor | None], layer: int, like: Tensor) -> Tensor:
        """What a layer holds, (B, H, S, D), made with the heads and width of `like` if need be."""
        if held[layer] is None:
            shape = self.batch_size, like.size(1), self.length, like.size(3)
            held[layer] = like.new_zeros(shape, dtype=self.dtype)
        return held[layer]

    def advance(self, T: int) -> None:
        """All layers have stored T more positions."""
        self.pos, self.longest = self.pos + T, self.longest + T

    def trim(self, lengths: int | Tensor) -> None:
        """Forget all but the first `lengths` positions, one number or one a row (B,)."""
        held, self.longest = self.longest, int(torch.as_tensor(lengths).max())
        if self.longest > held:
            raise ValueError(f"the cache holds {held} positions and cannot keep {self.longest}")
        alike = isinstance(lengths, int) or bool((lengths == self.longest).all())
        self.pos = self.longest if alike else lengths.clone()

    def expand(self, n: int) -> None:
        """Every row becomes n, side by side: n samples pay for one prompt."""
        self.select(torch.arange(self.batch_size, device=self.device).repeat_interleave(n))

    def select(self, rows: Tensor) -> None:
        """Keep these rows (indices), in this order; one may come several times."""
        self.k, self.v = ([x if x is None else x[rows] for x in held] for held in (self.k, self.v))
        self.batch_size = len(rows)
        if isinstance(self.pos, Tensor):
            self.trim(self.pos[rows])

    def put(self, rows: Tensor, other: "KVCache") -> None:
        """Replace these rows by those of another cache."""
        n = other.longest
        for mine, theirs in ((self.k, other.k), (self.v, other.v)):
            for layer, new in enumerate(theirs if n else ()):
                self.room(mine, layer, new)[rows, :, :n] = new[:, :, :n].to(self.dtype or new.dtype)
        pos = torch.zeros(self.batch_size, dtype=torch.int64, device=self.device) + self.pos
        pos[rows], self.longest = other.pos, max(n, self.longest)
        self.trim(pos)

"""The GPT: a decoder-only transformer in the shape of GPT-2, and the cache that lets it write fast.

Read it top to bottom: configuration, the parts of a block, the loss, the cache, the model.
Shapes in comments: B rows, T positions, C = n_embd, H heads, D = C / H, V = vocab_size, S = keys.
"""

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

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


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """F.dropout; in 16 bits on a CPU from random bytes: nine times faster, p in steps of 1/256."""
    in_bytes = x.device.type == "cpu" and x.itemsize == 2 and not torch.compiler.is_compiling()
    if not (p and training and in_bytes):
        return F.dropout(x, p, training)
    drop = min(max(round(256 * p), 1), 255)
    noise = torch.empty(x.numel() // 8 + 1, dtype=torch.int64).random_(-(2**63), None)
    keep = noise.view(torch.uint8)[: x.numel()].view(x.shape).ge_(drop)  # 0 or 1, still uint8
    return x * keep.to(x.dtype).mul_(256 / (256 - drop))


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
        y = attend(q, k, v, mask, self.dropout if self.training else 0.0)  # (B, H, T, D)
        y = y.transpose(1, 2).reshape(B, T, C)
        return dropout(self.c_proj(y), self.dropout, self.training)

    def query_scale(self, pos: Tensor) -> Tensor:
        """pos (T,) or (B, T) -> the factor of each query, (1 or B, 1 or H, T, 1)."""
        log_n = (pos + 1).float().log().view(-1, 1, pos.size(-1), 1)
        if self.logn == "learned":
            return log_n * self.logn_scale.view(1, -1, 1, 1)
        ratio = log_n / self.log_base
        return ratio.clamp(min=1) if self.logn == "clipped" else ratio


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float) -> Tensor:
    """Scaled dot-product attention of q (B, H, T, D) over k, v (B, H, S, D) -> (B, H, T, D).

    mask: True where a query may see a key; without one a single query sees all, T queries 0..T-1.
    """
    causal = mask is None and q.size(2) > 1
    if q.device.type != "cpu":
        k, v = k.to(q.dtype), v.to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, mask, p, causal)
    with torch.autocast("cpu", enabled=False):
        if causal and q.dtype == k.dtype == torch.bfloat16:  # faster than the fused kernels
            T, D = q.shape[-2:]
            future = k.new_full((T, T), -torch.inf).triu(1)
            rows, keys, values = (a.flatten(0, 1) for a in (q, k, v))  # (B * H, T, D)
            y, step = [], 256  # rows whose scores stay in the processor's cache
            for i in range(0, T, step):
                hide, past = future[i : i + step, : i + step], slice(i + step)
                scores = torch.baddbmm(hide, rows[:, i : i + step], keys[:, past].mT,
                                       alpha=1 / math.sqrt(D))
                y.append(dropout(scores.softmax(-1), p, p > 0) @ values[:, past])
            return torch.cat(y, dim=1).view_as(v)
        a = (x.float() for x in (q, k, v))  # one query over a 16-bit cache is ten times slower
        return F.scaled_dot_product_attention(*a, mask, p, causal).to(q.dtype)


class MLP(nn.Module):
    """Two layers with a GELU between them (arXiv 1606.08415), four times as wide inside."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout, self.approximate = config.dropout, "none" if config.gelu == "erf" else "tanh"

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.c_fc(x), approximate=self.approximate)  # (B, T, 4C)
        return dropout(self.c_proj(x), self.dropout, self.training)


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


class ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of the cross entropies of x @ weight.T against targets, in chunks of rows.

    The logits (rows, V) are the largest tensor of a small GPT by far. Here one chunk exists at a
    time, and its gradient is taken on the spot, so that nothing is computed twice. A target of -1
    adds nothing. (The idea: Liger Kernel's fused linear cross entropy.)
    """

    @staticmethod
    def rows(device: str, dtype: torch.dtype, V: int) -> int:
        """Rows of a chunk: what fills a GPU, or keeps the logits in the cache of a CPU."""
        return 2048 if device != "cpu" else 256 if dtype == torch.float32 else max(256, 2**20 // V)

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, need_grad: bool) -> Tensor:
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
        w, total = weight.to(dtype), torch.zeros((), device=x.device)
        step = ChunkedCrossEntropy.rows(device, dtype, len(weight))
        dx, dw = (torch.empty_like(x), torch.zeros_like(weight)) if need_grad else (None, None)
        with torch.autocast(device, enabled=False):
            for rows in (slice(i, i + step) for i in range(0, len(x), step)):
                chunk, target = x[rows].to(dtype), targets[rows, None]
                real, target = target >= 0, target.clamp(min=0)
                logp = F.log_softmax(chunk @ w.T, dim=-1, dtype=torch.float32)  # (rows, V)
                total -= logp.gather(1, target).masked_fill(~real, 0).sum()
                if need_grad:  # d loss / d logits = p - onehot(target)
                    p = logp.exp_()
                    p.scatter_add_(1, target, -torch.ones_like(target, dtype=p.dtype))
                    p = p.mul_(real).to(dtype)
                    dx[rows] = p @ w
                    dw += p.T @ chunk
        ctx.save_for_backward(dx, dw)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        dx, dw = ctx.saved_tensors
        return dx * grad, dw * grad, None, None


class KVCache:
    """Keys and values of the positions already seen; made, kept and passed in by the caller.

    `pos` is the number of positions held: a plain number while all rows agree, else a (B,) tensor.
    Prompts of different lengths: pad them on the right, run them at once, `trim` to the true ones.
    No real token ever sees the padding, and the next tokens overwrite it.
    """

    def __init__(self, config: GPTConfig, batch_size: int = 1, length: int | None = None,
                 device: torch.device | str | None = None, dtype: torch.dtype | None = None):
        D, S = config.n_embd // config.n_head, length or config.block_size
        shape = (config.n_layer, batch_size, config.n_head, S, D)
        self.k = torch.zeros(shape, device=device, dtype=dtype)  # (L, B, H, S, D)
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self.pos: int | Tensor = 0
        self.longest = 0  # the largest pos, known without asking the device

    def positions(self, T: int) -> Tensor:
        """The positions of the next T tokens: (T,), or (B, T) where rows differ."""
        ahead = torch.arange(T, device=self.k.device)
        return ahead + (self.pos if isinstance(self.pos, int) else self.pos[:, None])

    def mask(self, T: int) -> Tensor | None:
        """Which keys the next T queries may see, (1 or B, 1, T, S); None where `attend` knows."""
        if isinstance(self.pos, int) and (T == 1 or self.pos == 0):
            return None
        keys = torch.arange(self.longest + T, device=self.k.device)
        return keys <= self.positions(T).view(-1, 1, T, 1)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new (B, H, T, D) of a layer; returns all that it holds, each (B, H, S, D)."""
        T, end = k.size(2), self.longest + k.size(2)
        if end > self.k.size(3):
            raise ValueError(f"the cache has room for {self.k.size(3)} positions, {end} are needed")
        for cache, new in ((self.k[layer], k), (self.v[layer], v)):
            if isinstance(self.pos, int):
                cache[:, :, self.pos : end] = new
            else:
                rows = torch.arange(len(new), device=new.device)[:, None]
                cache[rows, :, self.positions(T)] = new.transpose(1, 2).to(cache.dtype)
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]

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
        self.select(torch.arange(self.k.size(1), device=self.k.device).repeat_interleave(n))

    def select(self, rows: Tensor) -> None:
        """Keep these rows (indices), in this order; one may come several times."""
        self.k, self.v = self.k[:, rows], self.v[:, rows]
        if isinstance(self.pos, Tensor):
            self.trim(self.pos[rows])

    def put(self, rows: Tensor, other: "KVCache") -> None:
        """Replace these rows by those of another cache."""
        n = other.longest
        self.k[:, rows, :, :n], self.v[:, rows, :, :n] = other.k[..., :n, :], other.v[..., :n, :]
        pos = torch.zeros(self.k.size(1), dtype=torch.int64, device=self.k.device) + self.pos
        pos[rows], self.longest = other.pos, max(n, self.longest)
        self.trim(pos)


class Window:
    """The tokens that each row sees, at most block_size of them, with their cache.

    idx: prompts (B, T), padded on the right where `lengths` (B,) are shorter; of a long one the
    newest block_size. Learned positions cannot slide: a full window is cut to its newest
    context_keep tokens (default: half) and read again; block_size - 1 is the classic slide.
    use_cache: False computes every step from scratch, to the same result. After an exception inside
    it is of no use.
    """

    def __init__(self, model: "GPT", idx: Tensor, lengths: Tensor | None = None,
                 context_keep: int | None = None, use_cache: bool = True):
        (B, T), size = idx.shape, model.config.block_size
        self.model, self.keep = model, max(1, size // 2) if context_keep is None else context_keep
        if not 1 <= self.keep <= max(1, size - 1):
            raise ValueError(f"context_keep={self.keep}: must be from 1 to block_size-1={size - 1}")
        n = torch.full((B,), T, device=idx.device) if lengths is None else lengths
        if not ((n >= 1) & (n <= T)).all():
            raise ValueError(f"prompts of {n.tolist()} tokens in {T} columns: give at least one")
        newest = (n - size).clamp(min=0)[:, None] + torch.arange(size, device=idx.device)
        self.tokens = idx.gather(1, newest.clamp(max=T - 1))  # (B, size), n of a row are real
        self.n = n.clamp(max=size)
        self.use_cache = use_cache
        self.x = self.read_all()  # (B, C): hidden state of the newest token, what the head needs

    def read_all(self) -> Tensor:
        if len(self.n) > 1:  # else `read` makes it
            self.cache = self.model.new_cache(len(self.n))
        return self.read(torch.arange(len(self.n), device=self.n.device))

    def read(self, rows: Tensor) -> Tensor:
        """Read these rows from their first token on -> the state of the last of each (rows, C).

        On a CPU one by one: prompts are not faster together, and so each gets what it gets alone.
        """
        x = []
        for some in rows.split(1 if rows.device.type == "cpu" else len(rows)):
            n, whole = self.n[some], len(some) == len(self.n)
            cache = self.model.new_cache(len(some), None if whole else max(1, int(n.max())))
            if n.max() > 0:
                states = self.model.hidden(self.tokens[some, : n.max()], cache)
                cache.trim(n)
                x.append(states[torch.arange(len(some), device=n.device), n - 1])
            if whole:
                self.cache = cache
            else:
                self.cache.put(some, cache)
        return torch.cat(x) if x else self.x

    def append(self, ids: Tensor) -> Tensor:
        """Each row goes on with ids (B, T) -> their hidden states (B, T or 1, C)."""
        size = self.tokens.size(1)
        ids, T = ids[:, -size:], min(ids.size(1), size)
        if self.cache.longest + T > size:
            full = (self.n + T > size).nonzero()[:, 0]
            keep = max(0, self.keep - T)  # the new ones make it context_keep
            kept = (self.n[full] - keep)[:, None] + torch.arange(keep, device=ids.device)
            self.tokens[full, :keep] = self.tokens[full].gather(1, kept)
            self.n[full] = keep
            if self.use_cache:
                self.read(full)
        self.tokens.scatter_(1, self.n[:, None] + torch.arange(T, device=ids.device), ids)
        self.n = self.n + T
        x = self.model.hidden(ids, self.cache) if self.use_cache else self.read_all()[:, None]
        self.x = x[:, -1]
        return x

    def forget(self, n: int) -> None:
        """Keep the first n tokens of all rows; x is not set before the next `append`."""
        self.n = torch.full_like(self.n, n)
        self.cache.trim(n)

    def select(self, rows: Tensor) -> None:
        """Go on with these rows (indices), in this order; one may come several times."""
        self.tokens, self.n, self.x = self.tokens[rows], self.n[rows], self.x[rows]
        self.cache.select(rows)


class GPT(nn.Module):
    """Token and position embeddings, n_layer blocks, a final norm and the output head."""

    CHUNK = 2048  # tokens that enter a cache at once: long prompts take no more memory than that

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
        """GPT-2's initialisation: small normals, smaller at the end of each residual branch."""
        embeddings = {"wte.weight": 0.02, "wpe.weight": 0.01, "lm_head.weight": 0.02}
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                p.normal_(std=std / math.sqrt(2 * self.config.n_layer))
            elif p.ndim == 2:
                p.normal_(std=embeddings.get(name, std))
            elif name.endswith("bias"):
                p.zero_()

    def hidden(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        """Token ids (B, T) -> the final hidden states (B, T, C), before the head."""
        B, T = idx.shape
        held = 0 if cache is None else cache.longest
        if held + T > self.config.block_size:
            raise ValueError(f"{held + T} positions, but block_size={self.config.block_size}")
        if cache is not None and B * T > self.CHUNK and T > 1:
            parts = idx.split(max(1, self.CHUNK // B), dim=1)
            return torch.cat([self.hidden(part, cache) for part in parts], dim=1)
        pos = torch.arange(T, device=idx.device) if cache is None else cache.positions(T)
        mask = None if cache is None else cache.mask(T)
        x = dropout(self.wte(idx) + self.wpe(pos), self.config.dropout, self.training)
        for layer, block in enumerate(self.h):
            x = block(x, pos, mask, None if cache is None else partial(cache.append, layer))
        if cache is not None:
            cache.advance(T)
        return self.ln_f(x)

    def loss(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states (..., C), targets (...) -> sum of cross entropies in nats, their number."""
        x, targets = x.reshape(-1, x.size(-1)), targets.reshape(-1)
        args = x, self.lm_head.weight, targets, torch.is_grad_enabled()
        return ChunkedCrossEntropy.apply(*args), (targets >= 0).sum()

    def forward(self, idx: Tensor, targets: Tensor | None = None, cache: KVCache | None = None):
        """Token ids (B, T) -> logits (B, T, V); with targets (B, T): (loss_sum, n_targets).

        A target of -1 is ignored. With a cache, idx continues what the cache holds.
        """
        x = self.hidden(idx, cache)
        return self.lm_head(x) if targets is None else self.loss(x, targets)

    @torch.inference_mode()
    def generate(self, idx: Tensor, max_new_tokens: int, choose: Callable[[Tensor], Tensor], *,
                 num_samples: int = 1, **window) -> Generator[Tensor, Tensor | None, None]:
        """Continue the prompts idx (B, T) token by token: yields ids (B * num_samples,).

        choose: next-token logits (B, V) in fp32 -> ids (B,); called once a step.
        num_samples: continuations of each prompt, side by side, for one prefill.
        window: lengths, context_keep and use_cache, see Window.
        Send indices of rows back to go on with these alone.
        """
        window = Window(self, idx, **window)
        if num_samples > 1:
            window.select(torch.arange(len(idx), device=idx.device).repeat_interleave(num_samples))
        for left in reversed(range(max_new_tokens)):
            ids = choose(self.lm_head(window.x).float())
            rows = yield ids
            if not left or (rows is not None and not len(rows)):
                return
            if rows is not None:
                window.select(rows)
                ids = ids[rows]
            window.append(ids[:, None])

    def new_cache(self, batch_size: int = 1, length: int | None = None) -> KVCache:
        """A cache where the model is; in fp32 on a CPU (see `attend`)."""
        w = self.wte.weight
        dtype = torch.float32 if w.device.type == "cpu" else w.dtype
        return KVCache(self.config, batch_size, length, w.device, dtype)

    def num_params(self) -> int:
        """All parameters, each counted once: 124,439,808 for GPT-2's smallest."""
        return sum(p.numel() for p in self.parameters())

"""What costs time in sampling from a large vocabulary: its k likeliest ids, and a draw from all.

Exact: of equal logits the lower id comes first, and what weighs nothing is never drawn.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 32  # ids that `likeliest` judges by their largest logit
WIDE = 64  # ids of a block that `draw_from_all` adds up


def largest(values: Tensor, ids: Tensor, k: int) -> Tensor:
    """Values (B, N) in fp32 of ids (N,) or (B, N) -> the ids (B, k) of the k largest, in order.

    Of equal values the lower id comes first. topk alone breaks ties as it likes, so it gets
    integers that are all different: the value in the upper 32 bits, minus the id in the lower.
    """
    bits = (values + 0.0).view(torch.int32)  # + 0.0 makes -0.0 the same as 0.0
    rank = bits ^ (bits >> 31 & 0x7FFFFFFF)  # integers in the order of the values
    keys = (rank.long() << 32) - ids
    return -keys.topk(k).values & 0xFFFFFFFF


def likeliest(logits: Tensor, k: int) -> Tensor:
    """Logits (B, V) in fp32 -> the ids (B, k) of the k largest, the largest and lowest id first.

    Blocks of neighbouring ids compare like the first of their best ids do. So the k best ids lie
    in the k best blocks, or behind the last whole one, and nothing else has to be looked through.
    """
    V, device = logits.size(-1), logits.device
    if 2 * k * BLOCK > V:  # nothing gained
        return largest(logits, torch.arange(V, device=device), k)
    rest = torch.arange(V // BLOCK * BLOCK, V, device=device).expand(len(logits), -1)
    best = logits[:, : V - rest.size(1)].unflatten(-1, (-1, BLOCK)).amax(-1)  # (B, blocks)
    blocks = largest(best, torch.arange(best.size(1), device=device), k)
    ids = blocks[:, :, None] * BLOCK + torch.arange(BLOCK, device=device)  # (B, k, BLOCK)
    ids = torch.cat([ids.flatten(1), rest], dim=1)
    return largest(logits.gather(1, ids), ids, k)


def draw_from_all(logits: Tensor, temperature: float, u: Tensor) -> Tensor:
    """Logits (B, V) in fp32 on the CPU, uniform numbers u (B, 1) in [0, 1) -> ids (B,).

    By the inverse of the cumulative distribution: first the block of neighbours, then the id in it.
    Probabilities are in fp32, as all of them in double precision take longer than a small model;
    their sums are in double precision.
    """
    if temperature < 0.01:  # dividing large numbers would make close ones equal
        logits = logits - logits.amax(-1, keepdim=True)
    colder = logits if temperature == 1 else logits / temperature
    p, tail = torch.softmax(colder, -1), -logits.size(-1) % WIDE
    p = F.pad(p, (0, tail)) if tail else p
    p = p.view(len(p), -1, WIDE)  # (B, blocks, WIDE)
    mass = p.sum(-1, dtype=torch.float64).cumsum(-1)
    target = u * mass[:, -1:]
    block = first_above(mass, target)
    before = torch.where(block > 0, mass.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = p[torch.arange(len(p)), block[:, 0]].double().cumsum(-1)  # (B, WIDE)
    return (block * WIDE + first_above(inside, target - before))[:, 0]


def first_above(mass: Tensor, target: Tensor) -> Tensor:
    """Cumulative mass (B, N), targets (B, 1) -> the first index (B, 1) whose mass exceeds it.

    At most the last one that adds to it, whatever was rounded: what weighs nothing is never drawn.
    """
    last = (mass < mass[:, -1:]).sum(-1, keepdim=True)
    return torch.searchsorted(mass, target, right=True).minimum(last)

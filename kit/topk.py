"""The largest logits in order, exactly: of equal ones the lower id comes first."""

import torch
from torch import Tensor

BLOCK = 32  # ids that `likeliest` judges by their largest logit


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

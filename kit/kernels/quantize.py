"""Weights as integers of 8 or 4 bits, a scale for each 32 of a row: round to nearest, no data.

The layout is what products.h multiplies: tiles of 16 rows, in them groups of 32 columns, in
them the 16 rows with four columns side by side. Two of 4 bits share a byte.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

TILE, GROUP = 16, 32


def integers(w: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Groups (..., 32) of fp32 -> (integers as fp32, the scale of each group as bf16).

    8 bits: the largest becomes 127. 4 bits: of several scales the one with the least squared error
    (the largest need not reach -8 or 7).
    """
    most, at = w.abs().max(dim=-1, keepdim=True)
    if bits == 8:
        scale = (most / 127).bfloat16()
        return round_to(w, scale, -127, 127), scale
    w = w / most.clamp(min=1e-38)  # or squares of what is tiny or huge would say nothing
    signed = w.gather(-1, at)  # the one of largest magnitude, with its sign
    best, error = signed / -8, torch.full_like(most, torch.inf)
    for steps in (-9.5, -9, -8.5, -8, -7.5, -7, 6.5, 7, 7.5, 8):
        scale = (signed / steps * most).bfloat16() / most.clamp(min=1e-38)
        wrong = (round_to(w, scale, -8, 7) * scale - w).square_().sum(-1, keepdim=True)
        best = torch.where(wrong < error, scale, best)
        error = torch.minimum(wrong, error)
    return round_to(w, best, -8, 7), (best * most).bfloat16()


def round_to(w: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    return (w / scale.float()).nan_to_num_(0, 0, 0).round_().clamp_(low, high)


def pack(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """weight (out, in) -> (bytes, scales (tiles, groups, 16) in bf16), both on the CPU."""
    n_out, n_in = weight.shape
    w = F.pad(weight.detach().float(), (0, -n_in % GROUP, 0, -n_out % TILE))
    q, scale = [], []
    for part in w.view(-1, TILE, w.size(1) // GROUP, GROUP).split(256):  # bounds the memory
        ints, s = integers(part, bits)
        ints = ints.view(len(part), TILE, -1, GROUP // 4, 4).permute(0, 2, 3, 1, 4)
        ints = (ints + (128 if bits == 8 else 8)).to(torch.uint8)  # (tiles, groups, 8, 16, 4)
        q.append(ints if bits == 8 else ints[:, :, 0::2] + ints[:, :, 1::2] * 16)
        scale.append(s[..., 0].transpose(1, 2))
    return torch.cat(q).contiguous(), torch.cat(scale).contiguous()


def unpack(packed: Tensor, scale: Tensor, bits: int, shape: tuple[int, int]) -> Tensor:
    """What `pack` made -> the weights (out, in) that it stands for, in fp32."""
    if bits == 4:
        packed = torch.stack([packed & 15, packed >> 4], dim=3).flatten(2, 3)
    q = packed.float() - (128 if bits == 8 else 8)  # (tiles, groups, 8, 16, 4)
    w = (q * scale.float()[:, :, None, :, None]).permute(0, 3, 1, 2, 4)
    return w.reshape(len(w) * TILE, -1)[: shape[0], : shape[1]].contiguous()


def rounded(w: Tensor, weights: str) -> Tensor:
    """What weights (out, in) become when they are held in one of native.KINDS, in fp32."""
    if not weights.startswith("int"):
        return w.to(getattr(torch, weights)).float()
    bits = int(weights[3:])
    return unpack(*pack(w, bits), bits, tuple(w.shape))

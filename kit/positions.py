"""More positions than a model was trained with: a longer table made of its learned ones."""

import torch.nn.functional as F
from torch import Tensor

from kit.errors import UserError

ALPHA = 0.4  # of the hierarchical way, as its author has it


def resize(wpe: Tensor, size: int, how: str | None) -> Tensor:
    """Position embeddings (T, C) -> (size, C): the first ones, or made longer in one of three ways.

    interpolate   the T trained ones, spread over all: position p stands at p (T - 1) / (size - 1)
    hierarchical  position i T + j is 0.4 u_i + 0.6 u_j, with u so that the first T stay as they are
                  (Su Jianlin, kexue.fm 7947); up to T * T positions
    copy          the T trained ones again and again (Longformer, arXiv 2004.05150)
    UserError where the wish cannot be met.
    """
    T = len(wpe)
    if size <= T:
        return wpe[:size].clone()
    if how == "interpolate":
        return F.interpolate(wpe.T[None], size, mode="linear", align_corners=True)[0].T.contiguous()
    if how == "copy":
        return wpe.repeat(-(-size // T), 1)[:size]
    if how != "hierarchical":
        raise UserError(
            f"block_size={size}, but the weights have {T} positions: give {T} or less, or say how "
            "to make more of them: --extend_positions=interpolate, hierarchical or copy")
    if size > T * T:
        raise UserError(f"block_size={size}: hierarchical makes at most {T} x {T} = {T * T} "
                        "positions; take interpolate or copy")
    u = (wpe - ALPHA * wpe[:1]) / (1 - ALPHA)
    coarse, fine = u[: -(-size // T), None], u[None]  # (i, 1, C), (1, j, C)
    return (ALPHA * coarse + (1 - ALPHA) * fine).flatten(0, 1)[:size].contiguous()

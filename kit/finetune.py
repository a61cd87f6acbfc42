"""What fine-tuning changes: frozen parameters, slower lower blocks, a longer context."""

import torch.nn.functional as F
from torch import Tensor, nn

from kit.errors import UserError
from model import GPT

ALPHA = 0.4  # of hierarchical positions, as their author has it


def freeze(model: GPT, names: str) -> None:
    """Stop training the parameters that are called one of `names`, or begin with it and a dot.

    names: apart by spaces, as "wte wpe h.0". UserError for one that is none, or if none is left.
    """
    named = dict(model.named_parameters())  # a tied head is wte
    for name in names.split():
        for p in called(name, named):
            p.requires_grad_(False)
    if not any(p.requires_grad for p in named.values()):
        raise UserError(f"freeze={names}: leaves nothing to train")


def called(name: str, named: dict[str, nn.Parameter]) -> list[nn.Parameter]:
    """The parameters that a name means; UserError if there are none."""
    found = [p for n, p in named.items() if f"{n}.".startswith(f"{name}.")]
    if not found:
        known = sorted({".".join(n.split(".")[: 2 if n[0] == "h" else 1]) for n in named})
        raise UserError(f"freeze={name}: no parameter is called so; there are "
                        f"{', '.join(known)} and their parts, such as {max(named)}")
    return found


def depth_factors(model: GPT, blocks: list[nn.Module], decay: float) -> dict[nn.Parameter, float]:
    """The share of the learning rate that each parameter gets: `decay` a block below the top.

    The final norm and an untied head have all of it, the last block decay, the embeddings decay **
    (n_layer + 1) (ULMFiT, arXiv 1801.06146; in this form BEiT's). blocks: from the lowest up.
    """
    depth = {p: i for i, block in enumerate(blocks, 1) for p in block.parameters()}
    for table in (m for m in model.modules() if isinstance(m, nn.Embedding)):
        depth = dict.fromkeys(table.parameters(), 0) | depth  # those of no block
    top = len(blocks) + 1
    return {p: decay ** (top - depth.get(p, top)) for p in model.parameters()}


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

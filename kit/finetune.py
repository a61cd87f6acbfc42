"""What fine-tuning changes: parameters that are frozen, lower blocks that learn more slowly."""

from torch import nn

from kit.errors import UserError
from model import GPT


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

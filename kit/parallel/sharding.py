"""What FSDP shards: a model's layers; of a tensor the whole, a rank's share, one like it."""

from torch import Tensor, nn


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model: what its lists of modules hold, in order, wherever it keeps them."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    inside = {m for some in lists for block in some for m in block.modules()}
    return [block for some in lists if some not in inside for block in some]


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be sharded over ranks, put together; a call of all ranks."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's share of a tensor that may be sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def gathered(share: Tensor, pattern: Tensor) -> Tensor:
    """The whole of a tensor that is sharded as `pattern` is, from all ranks' shares."""
    if not hasattr(pattern, "full_tensor"):
        return share
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(share, pattern.device_mesh, pattern.placements, shape=pattern.shape,
                              stride=pattern.stride()).full_tensor()


def like(value: Tensor, pattern: Tensor) -> Tensor:
    """A whole tensor, sharded as `pattern` is, if it is."""
    if not hasattr(pattern, "full_tensor"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, pattern.device_mesh, pattern.placements, src_data_rank=None)

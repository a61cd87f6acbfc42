"""Tensors that FSDP shards over ranks: gathered, or sharded like another one."""

from torch import Tensor

from kit.optimizer import Muon


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be sharded over ranks, gathered; a call of all ranks."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def like(value: Tensor, pattern: Tensor) -> Tensor:
    """A whole tensor, sharded as `pattern` is, if it is."""
    if not hasattr(pattern, "full_tensor"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, pattern.device_mesh, pattern.placements, src_data_rank=None)


class ShardedMuon(Muon):
    """Muon where FSDP shards matrices: each rank gathers them and takes its share of the result."""

    def local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    def gathered(self, share: Tensor, p: Tensor) -> Tensor:
        if not hasattr(p, "full_tensor"):
            return share
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(share, p.device_mesh, p.placements, shape=p.shape,
                                  stride=p.stride()).full_tensor()

    def share(self, value: Tensor, p: Tensor) -> Tensor:
        return self.local(like(value, p))

"""Several processes on one draft: replicas (DistributedDataParallel), or each keeps a part of it (FSDP2).

Sharded, a process holds its rows of each float32 weight and of its moments, and gets its rows of the gradients'
mean. A step gathers the weights once and computes on whole ones, so that its numbers and its compiled graph are those
of a replica; it sends what all-reduced gradients do: each way is one gathering and one reduction of all weights.

The whole module is one group: its layers lie in one graph, which cannot stop for one of them to be gathered. So
during a step weights and gradients are whole once; what shrinks is all that is kept between steps (12 of a trained
weight's 16 bytes), and the buckets are gone. Weights travel as float32: as bfloat16 (MixedPrecisionPolicy) it would be
half of the traffic and of the whole weights, but norms, which compute in float32, would lose bits of theirs.

AdamW goes by elements: its steps are a replica's to the bit. Muon multiplies whole matrices: PyTorch gathers what of
them a product needs, in bfloat16, and the steps are a replica's to that one's rounding.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel


def is_sharded(sharding: str, processes: int, replica_fits: Callable[[], bool]) -> bool:
    """Whether train.sharding shards; asks whether a replica fits the memory only where that decides."""
    return processes > 1 and (sharding == "full" or (sharding == "auto" and not replica_fits()))


def distributed(module: nn.Module, processes: int, device: torch.device, *, sharded: bool) -> nn.Module:
    """What to call in place of the module. Sharding puts other parameters into it: make the optimiser after this.

    All processes begin with equal weights. Gradients become the mean over processes either way.
    """
    if processes == 1:
        return module
    if sharded:
        fully_shard(module, mesh=init_device_mesh(device.type, (processes,)))
        return module
    # buffers (the target's embedding: 4.7 GB for Kimi) do not change: they are not sent round at every step
    return DistributedDataParallel(module, broadcast_buffers=False)


@contextmanager
def gathered_weights(module: nn.Module) -> Iterator[None]:
    """Weights are whole in the block, however often the module is called, and in parts after it.

    Gathered before the first call, not by it: FSDP would keep the buffer until that call's end.
    """
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


def exchange(module: nn.Module, *, now: bool) -> AbstractContextManager[None]:
    """For one forward and backward pass: exchange gradients at its end, with those of passes before, or `now` not."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(now)
        module.set_reshard_after_backward(now)
    return module.no_sync() if isinstance(module, DistributedDataParallel) and not now else nullcontext()


def full(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded: all processes call it together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(values: Tensor, like: Tensor) -> Tensor:
    """Of whole values, which every process has, what it keeps: sharded as `like` is, on its device, a copy."""
    if isinstance(like, DTensor):
        values = distribute_tensor(values, like.device_mesh, like.placements, src_data_rank=None)
    return torch.empty_like(like).copy_(values)

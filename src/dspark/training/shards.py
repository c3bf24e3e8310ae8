"""A parameter that FSDP2 has cut into one shard a rank, and its whole. Plain tensors pass through.

It knows no optimiser and no model.
"""

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process holds a part of it only."""
    return isinstance(tensor, DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """What this process holds, detached; it shares its memory with the parameter."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    local: Tensor = tensor.to_local()
    return local.detach()


def whole_of(local: Tensor, *, like: Tensor) -> Tensor:
    """The whole tensor from the shards of all ranks, which must all ask."""
    if not isinstance(like, DTensor):
        return local
    whole: Tensor = DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    ).full_tensor()
    return whole


def shard_of(whole: Tensor, *, like: Tensor) -> Tensor:
    """This process's shard of a tensor that every rank has whole."""
    if not isinstance(like, DTensor):
        return whole
    sharded = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    local: Tensor = sharded.to_local()
    return local


def shard(module: nn.Module, *, device: torch.device, group: distributed.ProcessGroup) -> None:
    """Cut the module's parameters over a group as one unit; gradients are added in float32.

    A drafter is small beside its target: one gather a pass costs less than one for each layer.
    """
    fully_shard(
        module,
        mesh=DeviceMesh.from_group(group, device.type),
        reshard_after_forward=False,
        mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32),
    )
    assert isinstance(module, FSDPModule)
    # losses are divided by the sum of weights over all ranks, so gradients are summed
    module.set_force_sum_reduction_for_comms(enable=True)
    module.set_gradient_divide_factor(1.0)

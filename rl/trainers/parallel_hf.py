"""A policy of `transformers` trained by several processes: each layer a sharded unit (FSDP2), one loss."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from model.hf.policy import HFPolicy
from rl.trainers.parallel_config import ParallelConfig, ParallelError


def spread_hf(policy: HFPolicy, config: ParallelConfig) -> None:
    """Divides a policy, equal on all ranks, over them; in place. Its layers are gathered one at a time.

    With adapters these are divided and the frozen weights too.

    Raises:
        ParallelError: Experts were to be spread, or the parameters are of several dtypes.
    """
    if config.expert > 1:
        raise ParallelError(
            f"parallel.expert={config.expert}: policy=hf spreads no experts; set trainer.parallel.expert=1"
        )
    kinds = {parameter.dtype for parameter in policy.model.parameters()}
    if len(kinds) > 1:
        names = ", ".join(sorted(map(str, kinds)))
        raise ParallelError(f"the parameters are {names}, which cannot be sharded together: set policy.dtype")
    mesh = init_device_mesh(policy.device.type, (dist.get_world_size(),), mesh_dim_names=("data",))
    for layer in layers(policy):
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh, reshard_after_forward=False)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def layers(policy: HFPolicy) -> list[nn.Module]:
    """The layers of the stack.

    Raises:
        ParallelError: The model keeps them somewhere else than usual.
    """
    decoder = policy.model.get_decoder()
    stacks = [m for m in decoder.children() if isinstance(m, nn.ModuleList)]
    if len(stacks) != 1 or len(stacks[0]) != policy.config.num_hidden_layers:
        raise ParallelError(
            f"{type(decoder).__name__} has no single list of layers to divide: set trainer.parallel.data=1"
        )
    return list(stacks[0])

"""One policy trained by several processes: parameters sharded (FSDP2), experts spread, one global loss.

Every process takes its micro-batches of the same step. Losses are divided by counts over the whole step, so
gradients are added up and never averaged. Experts are units of their own; all other parameters are one, which
stays gathered from the forward pass to the end of the backward pass. N-gram tables and the drafter are held
whole: of a table a step touches a few rows, and the drafter is small.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from model.hf.policy import HFPolicy
from model.policies import AnyPolicy
from model.policy import Policy
from rl.trainers import shards
from rl.trainers.experts import ROUTED, SpreadExperts, stacked_name
from rl.trainers.parallel_config import ParallelConfig, ParallelError
from rl.trainers.parallel_hf import spread_hf


def spread(policy: AnyPolicy, config: ParallelConfig) -> None:
    """Divides a policy, equal on all ranks, over them; in place. The default process group is all of them.

    Raises:
        ParallelError: It does not divide, its dtypes are mixed, or there is another number of processes.
    """
    if isinstance(policy, Policy):
        config.check(policy.config)
    if dist.get_world_size() != config.data:
        raise ParallelError(f"parallel.data={config.data}, but {dist.get_world_size()} processes train")
    if isinstance(policy, HFPolicy):
        return spread_hf(policy, config)
    replicas = config.data // config.expert
    mesh = init_device_mesh(
        policy.device.type, (replicas, config.expert), mesh_dim_names=("replica", shards.EXPERT_AXIS)
    )
    for block in policy.blocks:
        block.ffn.spread = SpreadExperts(block.ffn, mesh[shards.EXPERT_AXIS])
        fully_shard(block.ffn.spread.routed, mesh=mesh["replica"], shard_placement_fn=lambda _: Shard(1))
    whole = {p for n, p in policy.named_parameters() if n.startswith("mtp.") or "engram.embed." in n}
    own = [p for n, p in policy.named_parameters() if p not in whole and ROUTED not in n]
    kinds = {p.dtype for p in own if p.requires_grad}
    if len(kinds) > 1:
        names = ", ".join(sorted(str(kind) for kind in kinds))
        raise ParallelError(
            f"the parameters of this policy are {names}, which cannot be sharded together: load it in one "
            "dtype (float32 has room for small updates)"
        )
    fully_shard(
        policy,
        mesh=mesh["replica", shards.EXPERT_AXIS]._flatten("data"),
        reshard_after_forward=False,
        ignored_params=whole,
    )
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def full_state(policy: AnyPolicy) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor of a policy whole, one at a time, named as in one process (collective)."""
    waiting: dict[str, Tensor] = {}
    for name, tensor in policy.state_dict().items():
        stack, second = stacked_name(name)
        if stack == name:
            yield name, shards.whole(tensor)
        elif second:
            yield stack, torch.cat([waiting.pop(stack), shards.whole(tensor)])
        else:
            waiting[stack] = shards.whole(tensor)
    assert not waiting


@torch.no_grad()
def load_parts(policy: AnyPolicy, state: Mapping[str, Tensor]) -> None:
    """Loads tensors named as `policy` names them, whole or laid out as its own are."""
    own = policy.state_dict()
    if own.keys() != state.keys():
        raise ParallelError("the stored policy has other parameters; resume with the model it was trained as")
    for name, tensor in own.items():
        shards.part(tensor).copy_(shards.part_of_stored(tensor, state[name]))


def host_policy(like: AnyPolicy, tensors: dict[str, Tensor]) -> AnyPolicy:
    """A policy made of these tensors, not copied, to be written to disk."""
    if isinstance(like, HFPolicy):
        return like.on_host(tensors)
    with torch.device("meta"):
        policy = Policy(like.config)
    policy.load_state_dict(tensors, assign=True)
    return policy

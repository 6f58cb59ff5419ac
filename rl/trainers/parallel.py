"""One policy trained by several processes: parameters sharded (FSDP2), experts spread, one global loss.

Every process takes its micro-batches of the same step. Losses are divided by counts over the whole step, so
gradients are added up and never averaged. Experts are units of their own; all other parameters are one, which
stays gathered from the forward pass to the end of the backward pass. N-gram tables and the drafter are held
whole: of a table a step touches a few rows, and the drafter is small.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from model.config import PolicyConfig
from model.policy import Policy
from rl.trainers import shards
from rl.trainers.experts import ROUTED, SpreadExperts, split_stacks, stacked_name
from rl.trainers.ranks import Ranks


class ParallelError(ValueError):
    """A division over processes that a policy or a batch does not allow: what, why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How many processes train one policy.

    Attributes:
        data: processes, among which a step's samples and the parameters are divided.
        expert: over how many of them the experts of a layer are spread; divides `data`.
    """

    data: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        if self.data < 1 or self.expert < 1:
            raise ParallelError(
                f"parallel.data={self.data}, parallel.expert={self.expert}: both are at least 1"
            )
        if self.data % self.expert:
            raise ParallelError(
                f"parallel.expert={self.expert} does not divide parallel.data={self.data}: experts are spread "
                "over some of the processes, in groups of one size; choose a divisor"
            )

    def check(self, policy: PolicyConfig) -> None:
        """Refuses a policy whose experts cannot be divided so.

        Raises:
            ParallelError: The number of experts, or the width of one, does not divide.
        """
        experts, replicas = policy.n_routed_experts, self.data // self.expert
        if experts % self.expert:
            raise ParallelError(
                f"parallel.expert={self.expert} does not divide the {experts} experts of this policy; choose "
                f"one of {', '.join(str(n) for n in range(1, experts + 1) if experts % n == 0)}"
            )
        for name, width in (
            ("moe_intermediate_size", 2 * policy.moe_intermediate_size),
            ("hidden_size", policy.hidden_size),
        ):
            if width % replicas:
                raise ParallelError(
                    f"parallel.data={self.data} with parallel.expert={self.expert} shards every expert over "
                    f"{replicas} processes, which does not divide {width} ({name}); choose other numbers"
                )


def spread(policy: Policy, config: ParallelConfig) -> None:
    """Divides a policy, equal on all ranks, over them; in place. The default process group is all of them.

    Raises:
        ParallelError: It does not divide, its dtypes are mixed, or there is another number of processes.
    """
    config.check(policy.config)
    if dist.get_world_size() != config.data:
        raise ParallelError(f"parallel.data={config.data}, but {dist.get_world_size()} processes train")
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


def full_state(policy: Policy) -> Iterator[tuple[str, Tensor]]:
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
def load_full_state(policy: Policy, state: dict[str, Tensor]) -> None:
    """Loads tensors named as in one process into a policy, spread or not."""
    if not isinstance(policy, FSDPModule):
        policy.load_state_dict(state)
        return
    parts = split_stacks(state, policy.config.n_routed_experts)
    own = policy.state_dict()
    assert own.keys() == parts.keys(), "the same policy"
    for name, tensor in own.items():
        shards.part(tensor).copy_(shards.part_of_stored(tensor, parts[name]))


def finish_forward(policy: Policy) -> None:
    """Gives the gathered parameters back after a forward pass that no backward pass follows."""
    if isinstance(policy, FSDPModule):
        policy.reshard()


@contextmanager
def gathered(policy: Policy) -> Iterator[None]:
    """Lets what is no part of a forward pass read the embedding and the head."""
    if isinstance(policy, FSDPModule):
        policy.unshard()
    try:
        yield
    finally:
        finish_forward(policy)


def ranks_of(config: ParallelConfig) -> Ranks:
    """This process among those of the default process group."""
    return Ranks(dist.get_rank(), config.data)

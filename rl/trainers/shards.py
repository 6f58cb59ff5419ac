"""Parameters spread over processes, seen as the part that this process holds.

Optimisers work on local parts: element by element where they can (a moment needs no neighbour), and on whole
matrices, gathered for the purpose, where a rule needs them. A parameter that is not spread is its own part.
Torch's distributed tensors take half a second to import, so only processes that have some do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor

from model.policies import AnyPolicy

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

EXPERT_AXIS = "expert"
"""The mesh dimension over which experts are spread: their matrices are whole without their neighbours."""


def is_spread(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether other processes hold other parts of it."""
    return hasattr(tensor, "device_mesh")


def is_sharded(policy: Any) -> TypeGuard[FSDPModule]:
    """Whether other processes hold other parts of the policy."""
    return hasattr(policy, "reshard")


def finish_forward(policy: AnyPolicy) -> None:
    """Gives gathered parameters back after a forward pass that no backward pass follows."""
    if is_sharded(policy):
        policy.reshard()


@contextmanager
def gathered(policy: AnyPolicy) -> Iterator[None]:
    """Lets what is no part of a forward pass read the embedding and the head."""
    if not is_sharded(policy):
        yield
        return
    policy.unshard()
    try:
        yield
    finally:
        policy.reshard()


def part(tensor: Tensor) -> Tensor:
    """The values that this process holds, sharing their memory."""
    return tensor.to_local().detach() if is_spread(tensor) else tensor.detach()


def laid_out_as(parameter: Tensor, own: Tensor) -> Tensor:
    """`own`, this process's part of something shaped like `parameter`, as a tensor of the whole."""
    if not is_spread(parameter):
        return own
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        own,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def with_whole_matrices(parameter: Tensor, own: Tensor) -> Tensor:
    """Gathers `own` over the ranks that hold parts of the same matrices (collective)."""
    spread = laid_out_as(parameter, own)
    if not is_spread(spread):
        return own
    return spread.redistribute(placements=_whole(spread)).to_local()


def own_part(parameter: Tensor, whole: Tensor) -> Tensor:
    """Undoes `with_whole_matrices`: this process's part of `whole`."""
    if not is_spread(parameter):
        return whole
    from torch.distributed.tensor import DTensor

    spread = DTensor.from_local(whole, parameter.device_mesh, _whole(parameter), run_check=False)
    return spread.redistribute(placements=parameter.placements).to_local()


def whole(tensor: Tensor) -> Tensor:
    """All values, on every rank (collective)."""
    return tensor.full_tensor().detach() if is_spread(tensor) else tensor.detach()


def part_of_stored(parameter: Tensor, stored: Tensor) -> Tensor:
    """The part of a stored tensor (whole, or spread like `parameter`) that this process holds."""
    if is_spread(stored):
        return stored.to_local()
    if not is_spread(parameter):
        return stored
    from torch.distributed.tensor import DTensor, Replicate

    mesh, own = parameter.device_mesh, stored.to(parameter.device)
    spread = DTensor.from_local(own, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return spread.redistribute(placements=parameter.placements).to_local()


def _whole(tensor: DTensor) -> list[Any]:
    """Placements that keep experts where they are and gather everything else."""
    from torch.distributed.tensor import Replicate

    names = tensor.device_mesh.mesh_dim_names or ("",) * tensor.device_mesh.ndim
    return [
        placement if name == EXPERT_AXIS else Replicate()
        for name, placement in zip(names, tensor.placements, strict=True)
    ]

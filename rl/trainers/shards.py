"""Parameters spread over processes, seen as the part that this process holds.

Optimisers work on local parts: element by element where they can (a moment needs no neighbour), and on whole
matrices, gathered for the purpose, where a rule needs them. A parameter that is not spread is its own part.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

EXPERT_AXIS = "expert"
"""The mesh dimension over which experts are spread: their matrices are whole without their neighbours."""


def is_spread(tensor: Tensor) -> bool:
    """Whether other processes hold other parts of it."""
    return isinstance(tensor, DTensor)


def part(tensor: Tensor) -> Tensor:
    """The values that this process holds, sharing their memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def laid_out_as(parameter: Tensor, own: Tensor) -> Tensor:
    """`own`, this process's part of something shaped like `parameter`, as a tensor of the whole."""
    if not isinstance(parameter, DTensor):
        return own
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
    if not isinstance(spread, DTensor):
        return own
    return spread.redistribute(placements=_whole(spread)).to_local()


def own_part(parameter: Tensor, whole: Tensor) -> Tensor:
    """Undoes `with_whole_matrices`: this process's part of `whole`."""
    if not isinstance(parameter, DTensor):
        return whole
    spread = DTensor.from_local(whole, parameter.device_mesh, _whole(parameter), run_check=False)
    return spread.redistribute(placements=parameter.placements).to_local()


def whole(tensor: Tensor) -> Tensor:
    """All values, on every rank (collective)."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def part_of_stored(parameter: Tensor, stored: Tensor) -> Tensor:
    """The part of a stored tensor (whole, or spread like `parameter`) that this process holds."""
    if isinstance(stored, DTensor):
        return stored.to_local()
    if not isinstance(parameter, DTensor):
        return stored
    mesh, own = parameter.device_mesh, stored.to(parameter.device)
    spread = DTensor.from_local(own, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return spread.redistribute(placements=parameter.placements).to_local()


def _whole(tensor: DTensor) -> list[Replicate]:
    names = tensor.device_mesh.mesh_dim_names or ("",) * tensor.device_mesh.ndim
    kept = [
        placement if name == EXPERT_AXIS else Replicate()
        for name, placement in zip(names, tensor.placements, strict=True)
    ]
    return cast("list[Replicate]", kept)

"""What the calls that a front passes on ask of a node, and for whom they are."""

from __future__ import annotations

from sandbox.channel import Header
from sandbox.errors import PolicyError
from sandbox.load import room_of
from sandbox.placement import Demand
from sandbox.shapes import MAX_LEASE_S, check_owner, check_time
from sandbox.tokens import Principal
from sandbox.types import SandboxSpec

_LABEL = "node."


def owner_of(header: Header) -> str:
    """Returns the owner that a call is for.

    Raises:
        PolicyError: It is not the name of one.
    """
    owner = str(header["client"]["owner"])
    if not owner or ":" in owner or len(owner) > 200:
        raise PolicyError(f"an owner's name has 1 to 200 characters and no colon: not {owner[:200]!r}")
    return check_owner(owner)


def signed(who: Principal, header: Header) -> Header:
    """Returns a call for a node: on behalf of the owner within the caller's project, and no other."""
    lease_s = check_time(header["client"]["lease_s"], "lease_s", 0.0, MAX_LEASE_S)
    client = {"owner": f"{who.project}:{owner_of(header)}", "lease_s": lease_s}
    return {**{name: value for name, value in header.items() if name != "flight"}, "client": client}


def operate(who: Principal) -> None:
    """Returns when the caller operates the fleet.

    Raises:
        PolicyError: It does not.
    """
    if not who.operator:
        raise PolicyError(f"{who.name} does not operate this fleet")


def demand_of(spec: SandboxSpec, backend: str) -> Demand:
    """Returns what a specification needs of a node."""
    labels = {
        name.removeprefix(_LABEL): value for name, value in spec.labels.items() if name.startswith(_LABEL)
    }
    needs = frozenset({"images"}) if spec.image else frozenset[str]()
    return Demand(room_of(spec), backend, needs, labels)

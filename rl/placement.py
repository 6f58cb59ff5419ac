"""Where processes run: bundles of resources, checked against the cluster before anything waits for them.

A placement group that does not fit hangs without a word. So a preflight places the bundles on paper first,
and what cannot be placed is an error that names the bundle, what it needs, and what every node has free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray
import ray.exceptions
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

Strategy = Literal["pack", "spread", "strict_pack", "strict_spread"]


class PlacementError(RuntimeError):
    """A process for which the cluster has no room: its bundle, what the nodes have, and what to change."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """What one process reserves, by Ray's names of resources; `role` names the process."""

    role: str
    resources: Mapping[str, float]

    def __str__(self) -> str:
        needs = ", ".join(f"{amount:g} {name}" for name, amount in sorted(self.resources.items()))
        return f"{self.role} ({needs})"


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster and what it has free."""

    name: str
    free: Mapping[str, float]

    def __str__(self) -> str:
        kept = {k: v for k, v in self.free.items() if k in ("CPU", "GPU") or not k.startswith(_INTERNAL)}
        return f"{self.name}: " + (", ".join(f"{v:g} {k}" for k, v in sorted(kept.items())) or "nothing")


_INTERNAL = ("node:", "memory", "object_store_memory", "accelerator_type", "bundle", "CPU_group", "GPU_group")


@dataclass(frozen=True, slots=True)
class Placement:
    """Bundles that the cluster has reserved."""

    bundles: tuple[Bundle, ...]
    group: PlacementGroup

    def options(self, bundle: Bundle) -> dict[str, Any]:
        """Options that put an actor into its bundle; a successor goes there too."""
        strategy = PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=self.bundles.index(bundle)
        )
        other = {k: v for k, v in bundle.resources.items() if k not in ("CPU", "GPU")}
        return {
            "num_cpus": bundle.resources.get("CPU", 0),
            "num_gpus": bundle.resources.get("GPU", 0),
            "resources": other or None,
            "scheduling_strategy": strategy,
        }

    def release(self) -> None:
        """Gives the reservation back."""
        remove_placement_group(self.group)


def preflight(bundles: Sequence[Bundle], nodes: Sequence[Node], strategy: Strategy) -> list[str]:
    """Places bundles on paper, largest first, and returns the node of each.

    Raises:
        PlacementError: A bundle does not fit beside the others.
    """
    free = [dict(node.free) for node in nodes]
    taken: dict[int, int] = {}
    order = sorted(range(len(bundles)), key=lambda i: -sum(bundles[i].resources.values()))
    if strategy == "strict_pack":
        return _together(bundles, nodes)
    for i in order:
        fitting = [
            n
            for n in range(len(nodes))
            if _fits(bundles[i].resources, free[n])
            and not (strategy == "strict_spread" and n in taken.values())
        ]
        if not fitting:
            raise PlacementError(_unplaced(bundles, i, taken, nodes, free, strategy))
        used = list(taken.values())
        best = min(fitting, key=lambda n: (used.count(n) if strategy == "spread" else -used.count(n), n))
        taken[i] = best
        for name, amount in bundles[i].resources.items():
            free[best][name] -= amount
    return [nodes[taken[i]].name for i in range(len(bundles))]


def _together(bundles: Sequence[Bundle], nodes: Sequence[Node]) -> list[str]:
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.resources.items():
            total[name] = total.get(name, 0.0) + amount
    for node in nodes:
        if _fits(total, node.free):
            return [node.name] * len(bundles)
    whole = Bundle(" + ".join(bundle.role for bundle in bundles), total)
    raise PlacementError(
        f"no node has room for all processes together: {whole}. Nodes: {'; '.join(map(str, nodes))}. Set "
        "launcher.strategy=pack, or ask for fewer resources (launcher.*_cpus, launcher.*_gpus)"
    )


def _fits(needed: Mapping[str, float], free: Mapping[str, float]) -> bool:
    return all(free.get(name, 0.0) >= amount for name, amount in needed.items())


def _unplaced(
    bundles: Sequence[Bundle],
    i: int,
    taken: Mapping[int, int],
    nodes: Sequence[Node],
    free: Sequence[Mapping[str, float]],
    strategy: str,
) -> str:
    placed = ", ".join(f"{bundles[j]} on {nodes[n].name}" for j, n in taken.items()) or "nothing"
    left = "; ".join(str(Node(node.name, rest)) for node, rest in zip(nodes, free, strict=True)) or "none"
    apart = " on a node of its own (launcher.strategy=strict_spread)" if strategy == "strict_spread" else ""
    return (
        f"the cluster has no room for bundle {i}: {bundles[i]}{apart}. Placed before it: {placed}. Left on "
        f"the nodes: {left}. Add nodes, or ask for less: launcher.replicas, launcher.learner_cpus, "
        "launcher.replica_cpus, launcher.learner_gpus, launcher.replica_gpus"
    )


def cluster_nodes() -> list[Node]:
    """Returns the living nodes of the cluster and what each has free now."""
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [
        Node(node["NodeManagerHostname"] + "/" + node["NodeID"][:6], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]


async def reserve(bundles: Sequence[Bundle], strategy: Strategy, deadline_s: float) -> Placement:
    """Reserves all bundles, or none.

    Raises:
        PlacementError: They do not fit, or somebody else took the room meanwhile.
    """
    preflight(bundles, cluster_nodes(), strategy)
    group = placement_group([dict(bundle.resources) for bundle in bundles], strategy=strategy.upper())
    try:
        async with asyncio.timeout(deadline_s):
            await group.ready()
    except TimeoutError:
        remove_placement_group(group)
        preflight(bundles, cluster_nodes(), strategy)
        raise PlacementError(
            f"the cluster did not reserve {', '.join(map(str, bundles))} within {deadline_s:g} s although "
            "there seems to be room: see `ray status`, or raise launcher.placement_deadline_s"
        ) from None
    return Placement(tuple(bundles), group)

"""Settings of training with several processes; light to import, unlike what does it."""

from __future__ import annotations

from dataclasses import dataclass

from model.config import PolicyConfig


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
                f"parallel.expert={self.expert} does not divide parallel.data={self.data}: experts are "
                "spread over some of the processes, in groups of one size; choose a divisor"
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

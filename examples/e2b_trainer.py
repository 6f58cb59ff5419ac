"""Another trainer's loop on this fleet: it knows the E2B SDK and nothing of Tempering.

    temper sandbox serve --local --e2b 127.0.0.1:7340
    export E2B_API_URL=http://127.0.0.1:7340 E2B_SANDBOX_URL=http://127.0.0.1:7340
    export E2B_API_KEY=$(cat ~/.tempering/client.token)
    python examples/e2b_trainer.py

The policy is a choice between three programs, learned by policy gradient with the group's mean as baseline.
Each sample has a sandbox of its own; one that fails for the fleet's sake is left out of its group.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import sys

from e2b import AsyncSandbox, CommandExitException, RateLimitException, TimeoutException

PROGRAMS = (
    "def add(a, b): return a - b",
    "def add(a, b): return a + b",
    "def add(a, b): return abs(a) + abs(b)",
)
TEST = "from solution import add; assert add(2, 3) == 5 and add(-2, 3) == 1"
STEPS, GROUP, RATE = int(os.environ.get("STEPS", "8")), 4, 1.5


async def reward(program: str) -> float | None:
    """Runs the test against a program; None says that nothing is known."""
    try:
        async with await AsyncSandbox.create(timeout=60, metadata={"run": "example"}) as sandbox:
            await sandbox.files.write("solution.py", program)
            await sandbox.commands.run(f"python3 -c '{TEST}'", timeout=20)
    except CommandExitException:
        return 0.0
    except (RateLimitException, TimeoutException) as error:
        print(f"left out: {error}")
        return None
    return 1.0


async def main() -> None:
    draw, logits = random.Random(7), [0.0] * len(PROGRAMS)
    for step in range(STEPS):
        weights = [math.exp(logit) for logit in logits]
        policy = [weight / sum(weights) for weight in weights]
        group = draw.choices(range(len(PROGRAMS)), policy, k=GROUP)
        rewards = await asyncio.gather(*(reward(PROGRAMS[choice]) for choice in group))
        known = [(choice, r) for choice, r in zip(group, rewards, strict=True) if r is not None]
        baseline = sum(r for _, r in known) / max(len(known), 1)
        for choice, r in known:
            for index in range(len(logits)):
                grad = (index == choice) - policy[index]
                logits[index] += RATE * (r - baseline) * grad / len(known)
        print(f"step {step}: mean reward {baseline:.2f}, p(right) {policy[1]:.2f}")
    print(f"p(right) {policy[1]:.2f} after {STEPS} steps")


if __name__ == "__main__":
    asyncio.run(main())
    sys.stdout.flush()
    os._exit(0)  # threads of the SDK go on for a moment, and can abort an interpreter that ends beside them

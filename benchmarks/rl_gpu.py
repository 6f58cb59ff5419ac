"""One step of reinforcement learning on one GPU, engine and trainer in one process: where its time goes.

    python -m benchmarks.rl_gpu [--rollouts 64] [--prompt 96] [--tokens 256]

The policy of `benchmarks.model_gpu_setup` samples completions of random prompts through the engine, a rule on
the host scores them, the trainer computes their log-probabilities, and a policy gradient updates the weights.
In exact mode the trainer's log-probabilities have to equal the engine's bit for bit. The last line is
`rl rollout A% reward B% logprob C% update D% seconds S exact E x maxdiff M`; the exit status is 1 when M
is not 0.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import Tensor

from benchmarks.model_gpu_setup import policy_on_gpu
from model.engine.engine import Engine
from model.engine.requests import Request
from model.engine.sampler import SamplingParams
from model.ops.linear_logprob import linear_logprob
from model.policy import PackedTokens, Policy

PHASES = ("rollout", "reward", "logprob", "update")


def rollout(engine: Engine, prompts: list[list[int]], tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Token ids [N, prompt + tokens] and the engine's log-probabilities [N, tokens], on the host."""
    nothing = frozenset({engine.policy.config.vocab_size})
    ids = {
        engine.submit(
            Request(f"{seed}-{i}", prompt, SamplingParams(max_tokens=tokens, seed=seed + i, stop_ids=nothing))
        ): i
        for i, prompt in enumerate(prompts)
    }
    drawn = [list(prompt) for prompt in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    while engine.has_work:
        output = engine.step()
        for request, token, logprob in zip(
            output.request_ids.tolist(), output.token_ids.tolist(), output.logprobs.tolist(), strict=True
        ):
            drawn[ids[request]].append(token)
            logprobs[ids[request]].append(logprob)
    for i in range(len(prompts)):
        engine.release(f"{seed}-{i}")
    return torch.tensor(drawn), torch.tensor(logprobs, dtype=torch.float32)


def reward(sequences: Tensor, prompt: int) -> Tensor:
    """[N]: the share of even tokens of a completion."""
    return torch.tensor([sum(t % 2 == 0 for t in s[prompt:]) / len(s[prompt:]) for s in sequences.tolist()])


def packed(sequences: Tensor) -> PackedTokens:
    """The sequences as documents on the device."""
    count, length = sequences.shape
    bounds = torch.arange(count + 1, device="cuda") * length
    return PackedTokens(sequences.flatten().to("cuda"), bounds)


def trained_logprobs(policy: Policy, sequences: Tensor, prompt: int) -> Tensor:
    """[N, tokens] log-probabilities by a training pass, with gradient where that is on, as a trainer's."""
    count, length = sequences.shape
    tokens = packed(sequences)
    hidden = policy(tokens).hidden.view(count, length, -1)[:, prompt - 1 : -1].flatten(0, 1)
    labels = tokens.token_ids.view(count, length)[:, prompt:].flatten()
    head: Tensor = policy.head.weight  # pyright: ignore[reportAssignmentType]
    logprob, _, _ = linear_logprob(hidden, head, labels, exact=policy.exact)
    return logprob.view(count, -1)


class Learner:
    """Policy and optimizer of a policy gradient with the group's mean as baseline."""

    def __init__(self, policy: Policy, engine: Engine, prompts: list[list[int]], tokens: int) -> None:
        self.policy, self.engine, self.prompts, self.tokens = policy, engine, prompts, tokens
        tables = {id(block.engram.embed.weight) for block in policy.blocks if block.engram is not None}
        dense = [p for p in policy.parameters() if id(p) not in tables]
        self.optimizer = torch.optim.AdamW(dense, lr=1e-6, fused=True)

    def step(self, seed: int) -> tuple[dict[str, float], float]:
        """Seconds by phase, and the largest difference between trainer and engine before the update."""
        seconds, begin, prompt = dict.fromkeys(PHASES, 0.0), time.perf_counter(), len(self.prompts[0])

        def end(phase: str) -> None:
            nonlocal begin
            torch.cuda.synchronize()
            seconds[phase], begin = time.perf_counter() - begin, time.perf_counter()

        sequences, sampled = rollout(self.engine, self.prompts, self.tokens, seed)
        end("rollout")
        rewards = reward(sequences, prompt)
        advantages = (rewards - rewards.mean()).to("cuda")
        end("reward")
        with torch.no_grad():
            before = trained_logprobs(self.policy, sequences, prompt)
        end("logprob")
        ratio = (trained_logprobs(self.policy, sequences, prompt) - before).exp()
        (-(ratio * advantages[:, None]).mean()).backward()
        self.optimizer.step()
        self.policy.zero_grad(set_to_none=True)
        end("update")
        return seconds, (before.cpu() - sampled).abs().max().item()


def main() -> int:
    """Run steps in both modes and print the line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=96, help="at most the window, else replays differ")
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark measures a CUDA device and there is none")
    policy = policy_on_gpu()
    torch.manual_seed(0)
    prompts = torch.randint(3, policy.config.vocab_size, (options.rollouts, options.prompt)).tolist()
    results = {}
    for exact in (False, True):
        policy.exact = exact
        engine = Engine(
            policy,
            max_requests=options.rollouts,
            max_tokens=options.prompt + options.tokens + 8,
            idle_sessions=0,
            prefill_tokens=8192,
            storage="packed",
        )
        learner = Learner(policy, engine, prompts, options.tokens)
        learner.step(1)
        results[exact] = learner.step(1000)
        seconds, difference = results[exact]
        speed = options.rollouts * options.tokens / seconds["rollout"]
        mode = "exact" if exact else "fast"
        print(f"{mode}: {seconds}, {speed:.0f} tokens/s sampled, largest difference {difference:.3g}")
    fast, (slow, difference) = results[False][0], results[True]
    total = sum(fast.values())
    shares = " ".join(f"{name} {100 * fast[name] / total:.1f}%" for name in PHASES)
    cost = sum(slow.values()) / total
    print(f"rl {shares} seconds {total:.2f} exact {cost:.2f}x maxdiff {difference:g}")
    return int(difference != 0)


if __name__ == "__main__":
    sys.exit(main())

"""What the drafter is worth on the demo policy: `python -m benchmarks.draft [--checkpoint FOLDER]`.

The demo policy (preset nano_draft) imitates and then learns to use the calculator, as `experiment=calc` does
in more steps; its drafter is untrained. The drafter then learns from turns that this policy samples. Measured
on held-out tasks, with five drafts checked a step: accepted drafts a step under both rules at temperature 1
and greedily, and the speed of decoding with drafts over that without, in the same run and in turns. The last
line holds the accepted drafts of rejection sampling at temperature 1 and the speed ratio of one request; exit
status 1 when fewer than 1.8 are accepted.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

import envs.registry
from model.chat import ChatFormat, load_chat
from model.checkpoint import load_policy
from model.engine.engine import Engine
from model.engine.requests import Request
from model.engine.sampler import SamplingParams
from model.engine.speculative import Speculation
from model.policy import Policy
from rl.trainers.data import Sample, message_dict, tool_dict
from rl.trainers.draft import DraftConfig, DraftTrainer

_LEAST = 1.8
_CONTEXT, _TURN, _BATCH, _EFFORT = 64, 12, 64, 50
_CALL = re.compile(r"(\d{1,3})\*(\d{1,3})")


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn to sample, and what was sampled."""

    prompt: list[int]
    completion: list[int]
    seed: int


@dataclass(slots=True)
class Pace:
    """Decoding of many turns: tokens, seconds and steps of requests without those that prefill."""

    tokens: int = 0
    seconds: float = 0.0


class Player:
    """Lets a policy solve tasks; the calculator's answer is worked out here, as the tool would."""

    def __init__(self, policy: Policy, chat: ChatFormat) -> None:
        self.policy, self.chat = policy, chat
        self._tools = [tool_dict(tool) for tool in envs.registry.load("calc").tools]

    def play(
        self,
        prompts: list[list[int]],
        seed: int,
        temperature: float,
        speculate: Speculation | None = None,
        requests: int = _BATCH,
    ) -> tuple[list[Turn], Engine, Pace]:
        """Samples the turns of all tasks, the second ones after the tool's answer."""
        engine = Engine(
            self.policy,
            max_requests=requests,
            max_tokens=_CONTEXT,
            idle_sessions=0,
            prefill_tokens=8192,
            storage="dense",
            replay="off",
            speculate=speculate,
        )
        pace, turns = Pace(), []
        for number in range(2):
            played = self._sample(engine, prompts, seed + 100_000 * number, temperature, pace)
            turns += played
            prompts = [[*t.prompt, *t.completion, *answer] for t in played if (answer := self._answer(t))]
        return turns, engine, pace

    def _sample(
        self, engine: Engine, prompts: list[list[int]], seed: int, temperature: float, pace: Pace
    ) -> list[Turn]:
        turns: list[Turn] = []
        size = engine.scheduler.max_running
        for begin in range(0, len(prompts), size):
            wave = prompts[begin : begin + size]
            ids = {}
            for place, prompt in enumerate(wave):
                own = seed + begin + place
                params = SamplingParams(
                    temperature=temperature, seed=own, max_tokens=_TURN, stop_ids=self.chat.stop_ids
                )
                ids[engine.submit(Request(f"{own}", prompt, params))] = (prompt, own)
            while engine.has_work:
                prefilled, start = engine.counters.prefilled_tokens, time.perf_counter()
                output = engine.step()
                if engine.counters.prefilled_tokens == prefilled:
                    pace.seconds += time.perf_counter() - start
                    pace.tokens += output.token_ids.size
                for end in output.finished:
                    prompt, own = ids[end.request_id]
                    turns.append(Turn(prompt, end.turn.token_ids.tolist(), own))
        return turns

    def _answer(self, turn: Turn) -> list[int] | None:
        """What the tool says to a turn's call; None where the turn calls nothing."""
        calls = self.chat.parse(turn.completion, tools=self._tools).message.get("tool_calls")
        if not calls:
            return None
        found = _CALL.search(calls[0]["function"]["arguments"])
        text = str(int(found[1]) * int(found[2])) if found else "err"
        return self.chat.render_observation([{"role": "tool", "content": text}])


def main() -> int:
    """Trains and measures; prints a line a figure, the main ones last."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.draft", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, help="folder of a policy that has a drafter")
    parser.add_argument("--policy-steps", type=int, default=30, help="of the demo policy's reinforcement")
    parser.add_argument("--steps", type=int, default=100, help="steps of the drafter's training")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = arguments.checkpoint or _demo_policy(Path(folder), arguments.policy_steps)
        policy, chat = load_policy(checkpoint), load_chat(checkpoint)
    policy.fake_quant = True
    player = Player(policy, chat)
    _teach(player, arguments.steps)
    prompts = list(islice(_prompts(chat, "eval", 1), 256))
    accepted = _accepted(player, prompts)
    ratios = _speeds(player, prompts)
    print(f"draft accepted {accepted:.2f} speedup {ratios:.2f}x")
    return 0 if accepted >= _LEAST else 1


def _demo_policy(root: Path, steps: int) -> Path:
    """Runs the main job for fewer steps and returns its last checkpoint's policy."""
    command = [sys.executable, "-m", "rl.launch.cli", "train", "experiment=calc", "model=nano_draft"]
    settings = [f"run.root={root}", "run.name=demo", "logger.wandb=disabled", f"trainer.steps={steps}"]
    settings += ["eval.tasks=20", "eval.samples=1", "launcher.sft_threads=1"]
    settings += [f"checkpoint.every={max(steps, 1)}"]
    start = time.monotonic()
    subprocess.run([*command, *settings], check=True, stdout=subprocess.DEVNULL)
    print(f"demo policy: {steps} steps of reinforcement, {time.monotonic() - start:.0f} s", flush=True)
    return max((root / "demo" / "checkpoints").glob("step-*"), key=_step) / "policy"


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _prompts(chat: ChatFormat, split: str, seed: int) -> Iterator[list[int]]:
    env = envs.registry.load("calc")
    for task in env.tasks(split, seed):
        messages: list[dict[str, Any]] = [message_dict(message) for message in task.prompt]
        yield chat.render_prompt(messages, tools=[tool_dict(t) for t in env.tools], effort=_EFFORT)


def _teach(player: Player, steps: int) -> None:
    """Trains the drafter on turns that the policy samples."""
    config = DraftConfig(anchors=512)
    config = replace(config, optimizer=replace(config.optimizer, decay="cosine"))
    trainer = DraftTrainer(player.policy, config, total_steps=steps)
    start = time.monotonic()
    prompts = list(islice(_prompts(player.chat, "train", 0), 2000))
    turns, _, _ = player.play(prompts, 0, 1.0)
    draw = np.random.default_rng(0)
    for step in range(1, steps + 1):
        chosen = draw.choice(len(turns), size=min(128, len(turns)), replace=False)
        metrics = trainer.step([_sample(turns[i]) for i in chosen])
        if step % 50 == 0 or step == steps:
            print(
                f"drafter, step {step}: loss {metrics['draft/loss']:.3f}, "
                f"distance {metrics['draft/tv']:.3f}, expected to be accepted "
                f"{metrics['draft/accepted']:.2f}, {time.monotonic() - start:.0f} s",
                flush=True,
            )


def _sample(turn: Turn) -> Sample:
    ids = np.array([*turn.prompt, *turn.completion], np.int32)
    mask = np.arange(len(ids)) >= len(turn.prompt)
    zeros = np.zeros(len(ids), np.float32)
    return Sample(
        token_ids=ids, loss_mask=mask, logprobs=zeros, advantages=zeros, policy_version=np.zeros_like(ids)
    )


def _accepted(player: Player, prompts: list[list[int]]) -> float:
    """Prints accepted drafts a step; returns those of rejection sampling at temperature 1."""
    figures = []
    for name, temperature, options in (
        ("temperature 1, rejection", 1.0, Speculation(length=5)),
        ("temperature 1, coupled", 1.0, Speculation(rule="coupled", length=5)),
        ("greedy", 0.0, Speculation(length=5)),
    ):
        turns, engine, _ = player.play(prompts, 7, temperature, options)
        assert engine.speculator is not None
        counters = engine.speculator.counters
        figures.append(counters.accepted / counters.rows)
        print(
            f"{name}: {figures[-1]:.2f} accepted a step, {counters.accepted / counters.checked:.0%} of what "
            f"was checked, {len(turns)} turns",
            flush=True,
        )
    return figures[0]


def _speeds(player: Player, prompts: list[list[int]]) -> float:
    """Prints decode speed with drafts over that without; returns that of five drafts for one request."""
    ways = {"five drafts": Speculation(length=5), "as many as pay": Speculation()}
    found = {}
    for requests, tasks in ((1, 24), (8, 96), (64, 256)):
        paces = {name: Pace() for name in ("plain", *ways)}
        for repeat in range(3):
            for name, pace in paces.items():
                _, _, new = player.play(prompts[:tasks], repeat, 1.0, ways.get(name), requests)
                pace.tokens, pace.seconds = pace.tokens + new.tokens, pace.seconds + new.seconds
        speeds = {name: pace.tokens / pace.seconds for name, pace in paces.items()}
        ratios = {name: speeds[name] / speeds["plain"] for name in ways}
        print(
            f"batch {requests}: plain {speeds['plain']:.0f} tokens/s; "
            + ", ".join(f"{name} {speeds[name]:.0f} ({ratio:.2f}x)" for name, ratio in ratios.items()),
            flush=True,
        )
        found[requests] = ratios["five drafts"]
    return found[1]


if __name__ == "__main__":
    sys.exit(main())

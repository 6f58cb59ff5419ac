"""A real instruct model learns a reasoning-gym mixture on a GPU: `python -m benchmarks.hf_gpu FOLDER`.

FOLDER is a model of transformers with its tokenizer and chat template (SmolLM2-135M-Instruct, say). All runs
in this process: our engine samples, a policy gradient follows, and both use the same weights. It needs no Ray
and no sandbox. Prints the mean reward of the first and the last steps, and exits 1 when it has not risen.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

from model.batch import PackedTokens
from model.chat import ChatFormat, load_chat
from model.engine.engine import Engine
from model.engine.requests import Request
from model.engine.sampler import SamplingParams
from model.hf.folder import open_hf
from model.hf.policy import HFPolicy

_SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
SETTINGS = {
    "chain_sum": _SMALL,
    "basic_arithmetic": _SMALL,
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 20},
}
"""Tasks that so small a model gets right now and then: where every answer is wrong nothing can be learned."""
_EXAMPLES = (
    ("What is 3 + 4?", 7),
    ("What is 12 - 5?", 7),
    ("What is the greatest common divisor of 4 and 6?", 2),
    ("Calculate 2 * 3.", 6),
)


def questions(names: list[str], seed: int, count: int) -> list[tuple[object, dict]]:
    """So many tasks of each generator, with the generator that judges them."""
    import reasoning_gym

    found = []
    for name in names:
        data = reasoning_gym.create_dataset(name, size=count, seed=seed, **SETTINGS.get(name, {}))
        found += [(data, data[i]) for i in range(count)]
    return found


def messages(question: str) -> list[dict]:
    """A chat in which a few questions were answered in tags, and then this one is asked."""
    turns = []
    for asked, answer in _EXAMPLES:
        turns += [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": f"<answer>{answer}</answer>"},
        ]
    return [*turns, {"role": "user", "content": question}]


def reward(data: object, task: dict, text: str) -> float:
    """The generator's own verdict on what stands in the tags, and a little for using them."""
    inside = text.partition("<answer>")[2].partition("</answer>")[0].strip()
    if not inside:
        return 0.0
    score = data.score_answer(answer=inside, entry=task)  # pyright: ignore[reportAttributeAccessIssue]
    return 0.1 + 0.9 * float(score)


def rollout(engine: Engine, chat: ChatFormat, prompts: list[list[int]], seed: int, limit: int) -> list:
    """Samples one turn for each prompt."""
    ids = {}
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=limit, stop_ids=chat.stop_ids, seed=seed * 100_003 + number)
        ids[engine.submit(Request(f"{seed}.{number}", prompt, sampling))] = number
    done: dict[int, object] = {}
    while len(done) < len(prompts):
        for finished in engine.step().finished:
            done[ids[finished.request_id]] = finished
            engine.release(finished.session)
    return [done[i] for i in range(len(prompts))]


def learn(policy: HFPolicy, optimizer: torch.optim.Optimizer, rows: list, advantages: np.ndarray) -> float:
    """One policy-gradient step over packed samples, ratios clipped at 2; returns the mean mismatch."""
    gaps, trained = [], sum(len(completion) for _, completion, _ in rows)
    for begin in range(0, len(rows), 64):
        part, gain = rows[begin : begin + 64], advantages[begin : begin + 64]
        ids = torch.tensor([t for prompt, done, _ in part for t in (*prompt, *done)], device=policy.device)
        lengths = torch.tensor([len(prompt) + len(done) for prompt, done, _ in part])
        cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(policy.device)
        places = [
            np.arange(int(start) + len(prompt), int(start) + len(prompt) + len(done))
            for (prompt, done, _), start in zip(part, cu[:-1].tolist(), strict=True)
        ]
        at = torch.from_numpy(np.concatenate(places)).to(policy.device)
        logits = policy.logits(policy(PackedTokens(ids, cu)).hidden[at - 1])
        own = logits.log_softmax(-1).gather(-1, ids[at][:, None])[:, 0]
        old = torch.tensor([p for _, _, logprobs in part for p in logprobs], device=policy.device)
        weight = torch.tensor(np.repeat(gain, [len(d) for _, d, _ in part]), device=policy.device).float()
        ratio = (own - old).exp().clamp(max=2.0)
        (-(ratio * weight).sum() / trained).backward()
        gaps.append((own.detach() - old).abs().mean().item())
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(np.mean(gaps))


def main() -> int:
    """Trains until the time is over and prints the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hf_gpu", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--limit", type=int, default=24, help="most tokens of an answer")
    parser.add_argument("--rate", type=float, default=1e-5)
    parser.add_argument("--tasks", nargs="+", default=["chain_sum", "basic_arithmetic", "gcd"])
    given = parser.parse_args()
    policy, chat = open_hf(given.folder, dtype="float32").to(given.device), load_chat(given.folder)
    count = given.prompts * given.group
    engine = Engine(policy, max_requests=count, max_tokens=512, idle_sessions=0)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=given.rate, weight_decay=0.0)
    ended, rewards, step = time.monotonic() + given.seconds, [], 0
    while time.monotonic() < ended:
        picked = questions(given.tasks, step, -(-given.prompts // len(given.tasks)))[: given.prompts]
        asked = [chat.render_prompt(messages(task["question"])) for _, task in picked]
        prompts = [prompt for prompt in asked for _ in range(given.group)]
        turns = rollout(engine, chat, prompts, step, given.limit)
        done = [turn.turn for turn in turns]
        texts = [chat.tokenizer.decode(columns.token_ids) for columns in done]
        told = [reward(*picked[i // given.group], text) for i, text in enumerate(texts)]
        groups = np.array(told).reshape(-1, given.group)
        gain = ((groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-4)).ravel()
        rows = [(p, list(c.token_ids), list(c.logprobs)) for p, c in zip(prompts, done, strict=True)]
        gap, step = learn(policy, optimizer, rows, gain), step + 1
        engine.set_version(step, caches="recompute")
        rewards.append(float(np.mean(told)))
        right = float(np.mean([value > 0.5 for value in told]))
        print(f"step {step} reward {rewards[-1]:.3f} right {right:.3f} mismatch {gap:.2e}", flush=True)
    quarter = max(len(rewards) // 4, 1)
    first, last = float(np.mean(rewards[:quarter])), float(np.mean(rewards[-quarter:]))
    print(f"hf_gpu: reward {first:.3f} -> {last:.3f} in {step} steps of {count} samples")
    return 0 if last > first + 0.05 else 1


if __name__ == "__main__":
    sys.exit(main())

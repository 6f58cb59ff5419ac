"""The path that every operation of a policy takes on a device, found by running a tiny one."""

from __future__ import annotations

from dataclasses import replace

import torch

from model.engine.engine import Engine
from model.engine.requests import Request
from model.engine.sampler import SamplingParams
from model.ops import dispatch
from model.ops.linear_logprob import linear_logprob
from model.policy import PackedTokens, Policy
from model.presets import NANO

_SHAPE = replace(NANO, num_attention_heads=16, head_dim=64, index_head_dim=64, hc_sinkhorn_iters=20)
"""The smallest policy that the kernels serve."""


def probe(device: str) -> dict[str, str]:
    """The path of every operation ("triton" or "reference...") in a training step and in serving.

    Takes a second or two; on a card that has never run the kernels half a minute, for they are compiled.

    Args:
        device: "cpu" or "cuda".
    """
    on_card = device != "cpu"
    policy = Policy(replace(_SHAPE, dtype="bfloat16" if on_card else "float32")).to(device)
    policy.reset_parameters(0)
    policy.fake_quant = True
    with dispatch.recorded() as taken:
        _train(policy, device)
        _serve(policy)
    return taken


def _train(policy: Policy, device: str) -> None:
    ids = torch.arange(96, device=device) % 61 + 3
    tokens = PackedTokens(ids, torch.tensor([0, 40, 96], device=device))
    output = policy(tokens, indexer_loss=True)
    weight: torch.Tensor = policy.head.weight  # pyright: ignore[reportAssignmentType]
    logprob, entropy, _ = linear_logprob(output.hidden[:-1], weight, ids[1:])
    loss = output.aux.indexer_loss
    assert loss is not None
    (logprob.mean() + entropy.mean() + loss).backward()
    policy.zero_grad(set_to_none=True)


def _serve(policy: Policy) -> None:
    engine = Engine(policy, max_requests=2, max_tokens=128, prefill_tokens=64)
    for number, top_p in enumerate((1.0, 0.9)):
        sampling = SamplingParams(max_tokens=4, seed=1, top_p=top_p, stop_ids=frozenset())
        engine.submit(Request(f"probe {number}", list(range(3, 60)), sampling))
    while engine.has_work:
        engine.step()

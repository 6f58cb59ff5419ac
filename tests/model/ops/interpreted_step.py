"""A policy in exact mode, all of it on interpreted kernels: training, prefill and decode steps, bit by bit.

Products are those of `interpreted_products`; all else is what the kernels say. Prints where a result differs
from that of training.
"""

import sys
from dataclasses import replace

import torch

from model.ops import dispatch
from tests.model.ops import interpreted_products, kernels_everywhere


def main(tokens: int, prompt: int) -> None:
    """`tokens` of a document, the first `prompt` of them as a prompt and the others one at a time."""
    interpreted_products.put()
    kernels_everywhere.put()
    from model.diagnostics.exactness import differences
    from model.policy import Policy
    from model.presets import NANO

    shape = replace(NANO, num_attention_heads=16, head_dim=64, index_head_dim=64, hc_sinkhorn_iters=20)
    policy = Policy(
        replace(shape, dtype="bfloat16", index_topk=4, sliding_window=8, candidate_topk_blocks=64)
    )
    policy.reset_parameters(3)
    policy.fake_quant = policy.exact = True
    ids = torch.randint(0, 64, (tokens,), generator=torch.Generator().manual_seed(0))
    with dispatch.fused_everywhere():
        found = differences(policy, ids, [prompt])
    print("differing", [str(difference) for difference in found])
    print("kernels", " ".join(sorted(op for op, path in dispatch.paths().items() if path == "triton")))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

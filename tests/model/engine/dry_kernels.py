"""An engine whose kernels are chosen but neither compiled nor run: which variants serving needs.

Every launch is taken as far as the key of its variant; all it would write stays zero. Prints the variants
that came up after the engine had started.
"""

import random
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from model.ops import dispatch
from tests.model.ops import kernels_everywhere
from tests.model.ops.conftest import _Hopper

_KERNEL = SimpleNamespace()


def _compile(self, key, signature, device, constexprs, options, attrs, warmup):
    from triton import knobs

    caches, _, target, *_ = self.device_caches[device]
    caches[key] = _KERNEL
    hook = knobs.runtime.jit_post_compile_hook
    self._call_hook(hook, key, signature, target, device, constexprs, options, [attrs], warmup)
    return _KERNEL


_run = JITFunction.run


def _choose(self, *args, grid, warmup, **options):
    return _run(self, *args, grid=grid, warmup=True, **options)


def _zeros(make):
    def zeros(*args, **options):
        return make(*args, **options).zero_()

    return zeros


def _sampled(real):
    """What was drawn, with tokens for the zeros that a kernel left."""

    def sample(logits, columns, positions, **options):
        drawn = real(logits, columns, positions, **options)
        tokens = (positions * 7 + 3) % logits.shape[1]
        ones = np.ones(len(tokens), bool)
        return replace(drawn, token_ids=tokens, finite=ones, kept=None)

    return sample


def main(exact: bool, most: int, drafts: int, room: int, pages: int | None = None) -> None:
    """Serve up to `most` requests of up to `room` tokens after the start, with so many drafts a step."""
    driver._active = _Hopper()  # pyright: ignore
    JITFunction.run, JITFunction._do_compile = _choose, _compile
    kernels_everywhere.put()
    for name in ("empty", "empty_like"):
        setattr(torch, name, _zeros(getattr(torch, name)))
    torch.Tensor.new_empty = _zeros(torch.Tensor.new_empty)  # pyright: ignore
    torch.set_num_threads(1)
    from model.engine import engine as serving
    from model.engine import warm_up
    from model.engine.requests import Request
    from model.engine.sampler import SamplingParams
    from model.engine.speculative import Speculation
    from model.policy import Policy
    from model.presets import NANO, NANO_DRAFT

    warm_up.serves = lambda policy, cache: True
    serving.sample = _sampled(serving.sample)
    preset = NANO_DRAFT if drafts else NANO
    shape = replace(preset, num_attention_heads=16, head_dim=64, index_head_dim=64, hc_sinkhorn_iters=20)
    policy = Policy(replace(shape, dtype="bfloat16", index_topk=64, sliding_window=32))
    policy.fake_quant = True
    with dispatch.fused_everywhere():
        speculate = Speculation(length=drafts) if drafts else None
        options = {"idle_sessions": 2, "prefill_tokens": 1000, "exact": exact, "speculate": speculate}
        engine = serving.Engine(policy, max_requests=most, max_tokens=room, pages=pages, **options)
        before, draw = warm_up.compiled(), random.Random(0)
        print("kernels", sum(before.values()), flush=True)
        for wave in range(8):
            for i in range(draw.randint(1, most)):
                length = min(draw.choice([1, 2, 16, 33, 500, 3000, 8000, draw.randint(1, 4000)]), room - 9)
                ids = [draw.randrange(3, 60) for _ in range(length)]
                truncated = {"top_p": 0.9, "top_k": 5} if draw.random() < 0.2 else {}
                count = draw.randint(1, 5)
                sampling = SamplingParams(max_tokens=count, seed=wave, stop_ids=frozenset(), **truncated)
                engine.submit(Request(f"{wave}-{i}", ids, sampling))
            while engine.has_work:
                engine.step()
        now = warm_up.compiled()
    late = {name: count - before.get(name, 0) for name, count in now.items()}
    print("late", {name: count for name, count in late.items() if count})


if __name__ == "__main__":
    main(sys.argv[1] == "exact", *map(int, sys.argv[2:]))

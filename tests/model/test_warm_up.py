"""What serving needs is compiled at the start, and what compiles later is told."""

import logging
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from model import warm_up as module
from model.config import PolicyConfig
from model.engine.engine import Engine
from model.engine.requests import Request
from model.engine.sampler import SamplingParams
from model.policy import Policy
from model.presets import NANO
from model.warm_up import compiled, contexts, sizes


def test_sizes_stand_on_both_sides_of_every_threshold():
    assert sizes(100) == [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 99, 100]
    assert sizes(1) == [1]
    assert all(size <= 512 for size in sizes(512)) and 512 in sizes(512)


def test_contexts_are_the_ends_of_the_buckets():
    assert contexts(100) == [0, 100]
    assert contexts(70000) == [0, 4096, 16384, 65536, 70000]


def test_a_kernel_that_compiles_late_is_told_by_name(caplog, monkeypatch):
    monkeypatch.setattr(module, "_compiled", type(module._compiled)())
    function = SimpleNamespace(module="model.ops.topk.triton", name="_select")
    with caplog.at_level(logging.WARNING):
        module._count(fn=function, key="", repr="")
        assert not caplog.records
        monkeypatch.setattr(module, "_steady", True)
        module._count(fn=function, key="", repr="")
    assert compiled() == {"topk.triton._select": 2}
    assert "topk.triton._select was compiled for another shape" in caplog.text


def test_an_engine_without_kernels_starts_at_once():
    policy = Policy(PolicyConfig.preset("pico"))
    before = compiled()
    Engine(policy, max_requests=2, max_tokens=64)
    assert compiled() == before


@pytest.mark.gpu
def test_nothing_compiles_once_an_engine_has_started():
    shape = replace(NANO, num_attention_heads=16, head_dim=64, index_head_dim=64, hc_sinkhorn_iters=20)
    policy = Policy(replace(shape, dtype="bfloat16", index_topk=64, sliding_window=32)).cuda()
    policy.fake_quant = True
    engine = Engine(policy, max_requests=5, max_tokens=9000, idle_sessions=2, prefill_tokens=1000)
    before, draw = compiled(), random.Random(0)
    assert before
    for wave in range(20):
        for i in range(draw.randint(1, 5)):
            ids = [draw.randrange(3, 60) for _ in range(draw.choice([1, 2, 16, 33, 500, 3000, 8000]))]
            sampling = SamplingParams(max_tokens=draw.randint(1, 9), seed=wave, stop_ids=frozenset())
            engine.submit(Request(f"{wave}-{i}", ids, sampling))
        while engine.has_work:
            engine.step()
    torch.cuda.synchronize()
    assert compiled() == before

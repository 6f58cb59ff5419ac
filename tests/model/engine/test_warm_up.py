"""What serving needs is compiled at the start, and what compiles later is told."""

import logging
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from model import decode_graphs
from model.config import PolicyConfig
from model.engine import warm_up as module
from model.engine.engine import Engine
from model.engine.requests import Request
from model.engine.sampler import SamplingParams
from model.engine.warm_up import compiled, contexts, sizes
from model.layers.exact import is_exact
from model.ops import dispatch
from model.policy import Policy
from model.presets import NANO
from tests.model.engine.scripted import ScriptedPolicy

WIDTHS = {"num_attention_heads": 16, "head_dim": 64, "index_head_dim": 64, "hc_sinkhorn_iters": 20}
SHAPE = replace(NANO, dtype="bfloat16", **WIDTHS)


def test_sizes_stand_on_both_sides_of_every_threshold():
    assert sizes(100) == [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 99, 100]
    assert sizes(1) == [1]
    assert all(size <= 512 for size in sizes(512)) and 512 in sizes(512)


def test_contexts_are_the_ends_of_the_buckets():
    assert contexts(100) == [0, 100]
    assert contexts(70000) == [0, 4096, 16384, 65536, 70000]


class CompilingPolicy(ScriptedPolicy):
    """Its second pass needs a kernel that is not there yet."""

    def extend(self, *args, **options):
        if len(self.calls) == 1:
            compile_kernel("_select")
        return super().extend(*args, **options)


def compile_kernel(name):
    """What Triton reports of a kernel that it has compiled."""
    module._count(fn=SimpleNamespace(module="model.ops.topk.triton", name=name), key="", repr="")


def test_a_kernel_that_a_step_waits_for_is_told_by_name_and_others_are_not(caplog):
    before = compiled()
    with caplog.at_level(logging.WARNING):
        engine = Engine(CompilingPolicy(), max_requests=1, max_tokens=64)
        engine.submit(Request("s", [5, 9], SamplingParams(max_tokens=3, stop_ids=frozenset())))
        engine.step()
        compile_kernel("_scores")  # a trainer's in the same process, say
        assert not caplog.records
        engine.step()
        told = [record.getMessage() for record in caplog.records]
        assert told == ["topk.triton._select was compiled for another shape while requests waited"]
        engine.step()
    assert not engine.has_work and len(caplog.records) == 1
    new = {name: count - before.get(name, 0) for name, count in compiled().items()}
    assert {name for name, count in new.items() if count} == {"topk.triton._select", "topk.triton._scores"}


def test_an_engine_without_kernels_starts_at_once():
    policy = Policy(PolicyConfig.preset("pico"))
    before = compiled()
    Engine(policy, max_requests=2, max_tokens=64)
    assert compiled() == before


CASES = (
    *("fast 18 0 9000", "exact 5 0 9000", "exact 33 0 9000", "fast 5 3 9000", "exact 9 5 9000"),
    *("exact 33 0 250", "exact 33 0 250 9"),
)


@pytest.mark.parametrize("case", CASES)
def test_no_variant_of_a_kernel_comes_up_after_the_start(case):
    """On any machine: kernels are chosen as on a card, neither compiled nor run.

    A case is the mode, requests at a time, drafts, tokens that a sequence has room for (with little room a
    prefill is of several), and pages (with few no prefill is as long as it may be).
    """
    pytest.importorskip("triton", reason="no Triton on this platform")
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    command = [sys.executable, "-W", "ignore", "-m", "tests.model.engine.dry_kernels", *case.split()]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (ready, late) = done.stdout.splitlines()[-2:]
    assert int(ready.split()[1]) > 100
    assert late == "late {}"


@pytest.mark.parametrize("exact", [False, True])
def test_steps_are_captured_in_the_mode_that_the_engine_serves_in(monkeypatch, exact):
    """An engine captures them at its start, outside of all methods of the policy."""
    seen = []

    class Noting(decode_graphs.Step):
        def run(self):
            seen.append(is_exact())
            return super().run()

    monkeypatch.setattr(decode_graphs, "Step", Noting)
    policy = Policy(SHAPE)
    policy.fake_quant, policy.exact = True, exact
    with dispatch.fused_everywhere():
        cache = policy.new_cache(3, 64, storage="packed")
        decode_graphs.graphs_of(policy, cache).warm_up(3)
    assert seen == [exact] * 3 and not is_exact()


@pytest.mark.gpu
def test_nothing_compiles_once_an_engine_has_started():
    policy = Policy(replace(SHAPE, index_topk=64, sliding_window=32)).cuda()
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

"""Weights that were made ready are exchanged without copying a byte, and are the same as copied ones."""

import pytest
import torch

from model.config import PolicyConfig
from model.engine.engine import Engine
from model.engine.errors import StateError
from model.engine.requests import Request
from model.engine.sampler import SamplingParams
from model.engine.staging import StagedWeights
from model.policy import Policy


def policy(seed: int) -> Policy:
    made = Policy(PolicyConfig.preset("nano"))
    made.reset_parameters(seed)
    return made


def turn_under(engine: Engine) -> tuple[list[int], list[float]]:
    engine.submit(Request("s", [1, 2, 3], SamplingParams(max_tokens=12, stop_ids=frozenset(), seed=5)))
    ended = []
    while engine.has_work:
        ended += engine.step().finished
    return ended[0].turn.token_ids.tolist(), ended[0].turn.logprobs.tolist()


def test_staged_weights_sample_what_copied_ones_do() -> None:
    new = policy(9)
    copied, staged = Engine(policy(3), max_requests=1, max_tokens=32), policy(3)
    copied.load_state(new.state_dict(), 1)
    engine = Engine(staged, max_requests=1, max_tokens=32)
    engine.load_state(StagedWeights(staged, new.state_dict()), 1)
    assert engine.version == 1
    assert turn_under(engine) == turn_under(copied)


def test_a_swap_exchanges_memory_and_keeps_every_parameter_object() -> None:
    net, new = policy(3), policy(9)
    before = dict(net.named_parameters())
    places = {name: parameter.data_ptr() for name, parameter in before.items()}
    staged = StagedWeights(net, {name: t.double() for name, t in new.state_dict().items()})
    assert {name: p.data_ptr() for name, p in net.named_parameters()} == places
    staged.swap()
    for name, parameter in net.named_parameters():
        assert parameter is before[name] and parameter.data_ptr() != places[name]
        assert parameter.dtype == torch.float32 and torch.equal(parameter, new.state_dict()[name])
    staged.swap()
    assert {name: p.data_ptr() for name, p in net.named_parameters()} == places


def test_what_is_staged_does_not_change_with_its_source() -> None:
    net, source = policy(3), {name: t.clone() for name, t in policy(9).state_dict().items()}
    staged = StagedWeights(net, source)
    for tensor in source.values():
        tensor.zero_()
    staged.swap()
    assert all(torch.equal(t, policy(9).state_dict()[name]) for name, t in net.state_dict().items())


def test_weights_that_do_not_fit_are_refused_before_anything_changes() -> None:
    net = policy(3)
    with pytest.raises(StateError, match="do not fit"):
        StagedWeights(net, {})
    assert all(torch.equal(t, policy(3).state_dict()[name]) for name, t in net.state_dict().items())

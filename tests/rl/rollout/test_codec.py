import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.types import (
    Boundary,
    ErrorInfo,
    FinishReason,
    Group,
    Message,
    Missing,
    Role,
    Score,
    Status,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
    TrajectoryKey,
    Turn,
)
from model.engine.sampler import SamplingParams
from rl.rollout import codec
from rl.rollout.assignment import Assignment, Purpose, request_seed

text = st.text(max_size=8)
real = st.floats(allow_nan=False, width=32) | st.floats(allow_nan=False)
scalar = st.none() | st.booleans() | st.integers() | real | text | st.binary(max_size=8)
value = st.recursive(
    scalar,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.sets(st.integers(), max_size=3)
        | st.frozensets(text, max_size=3)
        | st.dictionaries(text | st.integers() | st.sampled_from(["$tuple", "$map"]), inner, max_size=3)
    ),
    max_leaves=8,
)
mapping = st.dictionaries(text, value, max_size=3)
numbers = st.lists(st.integers(0, 200_000), max_size=4).map(tuple)
calls = st.builds(ToolCall, text, mapping, text, st.none() | st.integers(0, 9))
messages = st.builds(
    Message,
    st.sampled_from(Role) | st.just("critic"),
    text,
    st.lists(calls, max_size=2).map(tuple),
    text,
    text,
)
several = st.lists(messages, max_size=2).map(tuple)
tasks = st.builds(Task, text, several, mapping, st.none() | text, mapping)
turns = st.builds(
    Turn,
    numbers,
    numbers,
    st.lists(real, max_size=4).map(tuple),
    numbers,
    st.sampled_from(FinishReason),
    messages,
    several,
    text,
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=2).map(tuple),
)
keys = st.builds(TrajectoryKey, text, st.integers(1, 100), text, *[st.integers(0, 99)] * 3)
scores = st.builds(Score, real, st.dictionaries(text, real, max_size=2)) | st.builds(
    Missing, text, st.sampled_from(Boundary)
)
trajectories = st.builds(
    Trajectory,
    keys,
    st.lists(st.lists(turns, max_size=2).map(tuple), max_size=2).map(tuple),
    st.sampled_from(Status),
    st.sampled_from(StopReason),
    scores,
    st.none() | st.builds(ErrorInfo, st.sampled_from(Boundary), text, text),
    st.dictionaries(text, real, max_size=2),
)
groups = st.builds(
    Group, st.integers(0), tasks, st.integers(1, 100), text, st.lists(trajectories, max_size=2).map(tuple)
)
sampling = st.builds(
    SamplingParams,
    real,
    real,
    st.integers(0),
    st.integers(1),
    st.frozensets(st.integers(0), max_size=3),
    st.integers(0),
)
assignments = st.builds(
    Assignment,
    key=keys,
    task=tasks,
    environment=text,
    sampling=sampling,
    seed=st.integers(),
    purpose=st.sampled_from(Purpose),
)


def through_json(data: Any) -> Any:
    return json.loads(json.dumps(data))


@settings(max_examples=60, deadline=None)
@given(value)
def test_values_come_back_with_their_types(given_value: Any) -> None:
    back = codec.decode_value(through_json(codec.encode_value(given_value)))
    assert repr(back) == repr(given_value) or back == given_value
    assert type(back) is type(given_value)


@settings(max_examples=60, deadline=None)
@given(groups)
def test_a_group_comes_back_exactly(group: Group) -> None:
    assert codec.group_from_json(through_json(codec.group_to_json(group))) == group


@settings(max_examples=40, deadline=None)
@given(assignments)
def test_an_assignment_comes_back_exactly(assignment: Assignment) -> None:
    assert codec.assignment_from_json(through_json(codec.assignment_to_json(assignment))) == assignment


def test_enums_come_back_as_enums() -> None:
    back = codec.message_from_json(through_json(codec.message_to_json(Message(Role.TOOL, "4042"))))
    assert isinstance(back.role, Role)


def test_a_value_without_exact_form_is_refused() -> None:
    with pytest.raises(codec.CodecError, match="type object cannot be written"):
        codec.task_to_json(Task("t", (), {"x": object()}))


def test_request_seeds_are_stable_and_distinct() -> None:
    seeds = [
        request_seed(7, group, index, turn) for group in range(9) for index in range(9) for turn in range(9)
    ]
    assert len(set(seeds)) == 729
    assert request_seed(7, 1, 2, 3) == 5068024039568520343

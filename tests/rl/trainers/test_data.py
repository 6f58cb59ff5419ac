from dataclasses import replace

import numpy as np
import pytest

from envs.types import Message, Role, Task, ToolCall
from model.chat.nano import nano_chat
from rl.trainers.data import demonstration_sample, trajectory_samples


def test_a_branch_is_one_sample_masked_by_provenance(make_turn, make_trajectory):
    branch = [
        make_turn([1, 2, 3, 4, 5], [10, 11, 12]),
        make_turn([20, 21], [30, 31]),
        make_turn([40], [50, 51, 52], version=3),
    ]
    (sample,) = trajectory_samples(make_trajectory([branch]), 0.5)
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5, 10, 11, 12, 20, 21, 30, 31, 40, 50, 51, 52]
    assert sample.loss_mask[1:].tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1]
    assert sample.trained_tokens == 8
    assert (sample.advantages == np.where(sample.loss_mask, 0.5, 0)).all()
    assert sample.policy_version.tolist() == [-1] * 5 + [0] * 3 + [-1] * 2 + [0] * 2 + [-1] + [3] * 3


def test_a_fork_does_not_train_its_shared_history_twice(make_turn, make_trajectory):
    first = [make_turn([1, 2], [10, 11]), make_turn([3], [12])]
    fork = [make_turn([1, 2, 10, 4], [13, 14])]
    samples = trajectory_samples(make_trajectory([first, fork]), 1.0)
    assert [s.trained_tokens for s in samples] == [3, 2]
    assert len({s.response for s in samples}) == 1 and len({s.id for s in samples}) == 2


def test_cutting_keeps_what_fits(make_turn, make_trajectory):
    trajectory = make_trajectory([[make_turn([10, 20], [30, 40, 50], logprobs=[-0.5, -0.6, -0.7])]])
    (sample,) = trajectory_samples(trajectory, 1.0, max_tokens=4)
    assert sample.token_ids.tolist() == [10, 20, 30, 40] and sample.truncated
    assert sample.logprobs[sample.loss_mask].tolist() == pytest.approx([-0.5, -0.6])
    assert trajectory_samples(trajectory, 1.0, max_tokens=2) == []


def test_empty_completions_give_no_sample(make_turn, make_trajectory):
    assert trajectory_samples(make_trajectory([[make_turn([1, 2], [])], []]), 1.0) == []


def test_columns_that_do_not_fit_are_refused_by_name(make_turn, make_trajectory, make_sample):
    with pytest.raises(ValueError, match=r"task7.*2 sampled tokens, 1 log-prob"):
        trajectory_samples(make_trajectory([[make_turn([1], [2, 3], logprobs=[-1.0])]], group=7), 1.0)
    with pytest.raises(ValueError, match="shapes"):
        make_sample([1, 2], [0, 1], logprobs=[0.0])
    with pytest.raises(ValueError, match="first token"):
        make_sample([1, 2], [1, 1])


def calc_turns(*, rounds=1):
    turns = []
    for _ in range(rounds):
        call = ToolCall("calculate", {"expression": "47*86"}, id="c")
        turns += [Message(Role.ASSISTANT, tool_calls=(call,)), Message(Role.TOOL, "4042", tool_call_id="c")]
    return [*turns, Message(Role.ASSISTANT, "4042")]


def trained_spans(mask):
    return int((np.diff(np.concatenate([[0], mask.astype(int)])) == 1).sum())


def test_a_demonstration_trains_its_assistant_only():
    chat = nano_chat()
    task = Task("t", (Message(Role.USER, "47*86="),))
    sample = demonstration_sample(task, calc_turns(), chat, effort=50)
    trained = chat.tokenizer.decode(sample.token_ids[sample.loss_mask].tolist())
    rest = chat.tokenizer.decode(sample.token_ids[~sample.loss_mask].tolist())
    assert trained == "<call>47*86</call><answer>4042<end>" and rest == "<effort>5047*86=<obs>4042</obs>"
    assert trained_spans(sample.loss_mask) == 2 and len(sample) <= 32


def test_every_tool_round_is_a_span_of_its_own():
    sample = demonstration_sample(
        Task("t", (Message(Role.USER, "47*86="),)), calc_turns(rounds=2), nano_chat()
    )
    assert trained_spans(sample.loss_mask) == 3


def test_a_demonstration_without_an_assistant_is_refused():
    with pytest.raises(ValueError, match="no assistant turn"):
        demonstration_sample(Task("t", (Message(Role.USER, "hi"),)), [], nano_chat())


def test_where_windows_started_anew_is_kept_over_the_turns_of_a_branch(make_turn, make_trajectory):
    turns = [
        replace(make_turn([1, 2, 3], [4, 5]), replay_starts=((0, 1),)),
        replace(make_turn([6], [7]), replay_starts=((0, 4), (2, 5))),
        make_turn([8], [9]),
    ]
    (sample,) = trajectory_samples(make_trajectory([turns]), 1.0)
    assert sample.replay_starts == ((0, 1), (0, 4), (2, 5))

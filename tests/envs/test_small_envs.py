import itertools
import math
import sys
import textwrap
from collections import Counter

import pytest

import envs
from envs.check import check_environment
from envs.play import play, say, script
from envs.plugins import PluginError
from envs.probe import QUESTIONS, optimum, reading
from envs.recall import CHANCE
from envs.types import Message, Missing, Score, StopReason, Task, ToolCall
from rewards import load as load_reward
from rewards.length import LengthPenaltyConfig


def take(iterator, n):
    return list(itertools.islice(iterator, n))


@pytest.mark.parametrize("name", ["recall", "sort", "probe"])
def test_held_out_tasks_are_never_training_tasks(name):
    env = envs.load(name)
    train, held_out = ({task.id for task in take(env.tasks(split, 0), 2000)} for split in ("train", "eval"))
    assert not train & held_out


@pytest.mark.parametrize("name", ["recall", "sort", "probe"])
def test_the_same_seed_gives_the_same_tasks_and_another_seed_others(name):
    env = envs.load(name)
    assert take(env.tasks("train", 1), 20) == take(env.tasks("train", 1), 20)
    assert take(env.tasks("train", 1), 20) != take(env.tasks("train", 2), 20)


@pytest.mark.parametrize(("length", "window"), [(16, 16), (9, 16), (26, 16), (12, 5), (4, 1)])
def test_the_pair_that_recall_asks_for_stands_beyond_the_window(length, window):
    distances = set()
    for task in take(envs.load("recall", length=length, window=window).tasks("train", 0), 300):
        prompt = task.prompt[0].content
        pairs, letter = prompt.split("?")
        assert len(pairs) == 2 * length and len(set(pairs[::2])) == length
        place = pairs.index(letter) + 1
        assert pairs[place] == task.gold
        distances.add(len(prompt) - 1 - place)
    assert min(distances) >= window and max(distances) == 2 * length


def test_recall_cannot_be_answered_better_than_by_chance_from_the_window():
    """The best guess from the last 16 tokens is a digit seen there; it is right as often as any other."""
    tasks = take(envs.load("recall").tasks("train", 0), 4000)
    right = [Counter(task.prompt[0].content[-16:-2:2]).most_common(1)[0][0] == task.gold for task in tasks]
    right += [task.prompt[0].content[-3] == task.gold for task in tasks]
    assert sum(right) / len(right) <= CHANCE + 0.01


def test_a_recall_that_cannot_look_far_enough_is_refused():
    for options in ({"length": 7}, {"length": 27}, {"length": 4, "window": 0}):
        with pytest.raises(ValueError, match="recall needs"):
            next(envs.load("recall", **options).tasks("train", 0))


def test_demonstrations_of_recall_are_right():
    for task, (answer,) in take(envs.load("recall").demonstrations("train", 0), 50):
        assert answer.content == task.gold


def test_sort_asks_for_sorted_letters_and_shows_some_wrong_answers():
    shown = take(envs.load("sort").demonstrations("train", 0), 3000)
    wrong = 0
    for task, (answer,) in shown:
        word = task.prompt[0].content.removeprefix("sort:").removesuffix("=")
        assert 4 <= len(word) <= 9 and task.gold == "".join(sorted(word))
        wrong += answer.content != task.gold
        assert sum(a != b for a, b in zip(answer.content, task.gold, strict=True)) <= 1
    assert 0.25 < wrong / len(shown) < 0.35


PROBE = envs.load("probe")


async def ask(task, number):
    return await PROBE.call_tool(ToolCall("ask", {"question": "?"}, number=number), task, None)


async def test_a_reading_is_right_seven_times_in_ten_and_depends_on_task_and_number_only():
    tasks = take(envs.load("probe").tasks("train", 0), 1000)
    right = [await ask(task, number) == task.gold for task in tasks for number in range(5)]
    assert sum(right) / len(right) == pytest.approx(0.7, abs=0.02)
    assert [await ask(tasks[0], n) for n in range(11)] == [reading(tasks[0], n) for n in range(11)]
    assert len({"".join(reading(task, n) for n in range(11)) for task in tasks}) > 500


async def test_the_sensor_wears_out():
    task = next(envs.load("probe").tasks("train", 0))
    with pytest.raises(envs.ToolError, match=r"^x$"):
        await ask(task, 11)


def test_the_hidden_sign_is_fair_and_not_in_the_prompt():
    tasks = take(envs.load("probe").tasks("eval", 0), 2000)
    assert len({task.prompt for task in tasks}) == 1
    assert sum(task.gold == "+" for task in tasks) / len(tasks) == pytest.approx(0.5, abs=0.04)


def test_demonstrations_of_probe_show_true_readings_and_mostly_follow_them():
    followed = []
    for task, messages in take(envs.load("probe").demonstrations("train", 0), 2000):
        values = [m.content for m in messages if m.role == "tool"]
        assert values == [reading(task, n) for n in range(len(values))]
        lead = values.count("+") - values.count("-")
        if lead:
            followed.append(messages[-1].content == ("+" if lead > 0 else "-"))
    assert sum(followed) / len(followed) == pytest.approx(1 - 0.15 / 2, abs=0.02)


def test_demonstrations_of_probe_ask_until_a_lead_that_is_drawn_anew():
    stopped = Counter()
    for _, messages in take(envs.load("probe").demonstrations("train", 0), 2000):
        values = [m.content for m in messages if m.role == "tool"]
        leads = [abs(2 * values[:n].count("+") - n) for n in range(len(values) + 1)]
        assert len(values) == QUESTIONS or leads[-1] > max(leads[:-1], default=-1)
        stopped[leads[-1] if len(values) < QUESTIONS else "worn out"] += 1
    shares = [stopped[lead] / 2000 for lead in range(5)]
    assert shares[0] == pytest.approx(1 / 8, abs=0.03) and min(shares[1:3]) > 0.2 and min(shares[3:]) > 0.05


async def test_an_episode_of_probe_reads_a_new_value_every_time():
    env = envs.load("probe")
    task = next(env.tasks("train", 3))
    call = Message("assistant", tool_calls=(ToolCall("ask", {"question": "?"}),))
    played = await play(env, task, script(call, call, call, say(task.gold)), judge=load_reward("exact"))
    assert [turn.observations[0].content for turn in played.turns[:3]] == [reading(task, n) for n in range(3)]
    assert played.stop is StopReason.ANSWER and played.score == Score(1.0, {"exact": 1.0})


@pytest.mark.parametrize(
    ("effort", "reward", "accuracy", "tokens"),
    [
        (1, 0.200, 0.70, 4.0),
        (25, 0.536, 0.84, 6.4),
        (50, 0.750, 0.90, 8.8),
        (75, 0.853, 0.92, 10.3),
        (100, 0.895, 0.92, 10.7),
    ],
)
def test_the_optimum_of_probe_is_the_known_one(effort, reward, accuracy, tokens):
    def penalty(length):
        return -min(0.9, 2.0 * math.exp(-(effort - 1) / 25) * length / 16)

    best = optimum(penalty, question_tokens=1, answer_tokens=3)
    assert best.reward == pytest.approx(reward, abs=6e-4)
    assert best.accuracy == pytest.approx(accuracy, abs=6e-3)
    assert best.tokens == pytest.approx(tokens, abs=0.06)


def test_a_free_question_is_always_asked_and_a_dear_one_never():
    assert optimum(lambda tokens: 0.0, question_tokens=3, answer_tokens=3).accuracy > 0.9
    assert optimum(lambda tokens: -float(tokens), question_tokens=3, answer_tokens=3).tokens == 3


def test_the_optimum_grows_with_effort_under_the_penalty_of_the_library():
    config = LengthPenaltyConfig(k0=2.0, max_penalty=0.9, length_scale=40, efforts=(1, 25, 50, 75, 100))
    bests = [
        optimum(lambda n, b=effort: config.penalty(b, n), question_tokens=3, answer_tokens=3)
        for effort in config.efforts
    ]
    assert [best.tokens for best in bests] == sorted(best.tokens for best in bests)
    assert bests[-1].tokens > 2 * bests[0].tokens


def test_reasoning_gym_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(envs.registry.BrokenPluginError, match="pip install reasoning-gym"):
        envs.load("reasoning_gym", generator="chain_sum")


STAND_IN = """
    class Doubling:
        def __init__(self, size=10, seed=0, highest=9):
            self.size, self.seed, self.highest = size, seed, highest
        def __getitem__(self, index):
            if index >= self.size:
                raise IndexError
            value = (self.seed + index) % self.highest
            return {"question": f"2*{value}", "answer": 2 * value}
        def score_answer(self, answer, entry):
            while answer == "hang":
                pass
            return 1.0 if answer == str(entry["answer"]) else 0.1

    def create_dataset(name, **options):
        if name != "doubling":
            raise ValueError(f"Dataset {name!r} not registered")
        return Doubling(**options)
"""


async def test_reasoning_gym_is_read_and_judged_through_its_own_interface(monkeypatch, tmp_path):
    """The package's interface (create_dataset, indexing, score_answer) in a file of its own."""
    (tmp_path / "reasoning_gym.py").write_text(textwrap.dedent(STAND_IN))
    monkeypatch.syspath_prepend(tmp_path)
    env = envs.load("reasoning_gym", generator="doubling", size=5, highest=7)
    train, held_out = list(env.tasks("train", 3)), list(env.tasks("eval", 3))
    assert [task.gold for task in train] == ["12", "0", "2", "4", "6"]
    assert not {task.id for task in train} & {task.id for task in held_out}
    report = await check_environment(env, 5, consolation=0.1)
    assert report.passed, str(report)
    monkeypatch.setattr("envs.adapters.reasoning_gym.TIMEOUT_S", 0.3)
    assert (await play(env, train[0], script(say("hang")))).score == Missing("timeout after 0.3 s")
    for options, message in (
        ({"generator": "dubling"}, "'dubling' not registered"),
        ({"generator": "doubling", "lowest": 3}, "lowest"),
        ({}, "needs the option generator"),
    ):
        with pytest.raises(PluginError, match=message):
            envs.load("reasoning_gym", **options)
    monkeypatch.delitem(sys.modules, "reasoning_gym")


def test_a_task_of_one_question_keeps_what_is_private_apart():
    task = Task.ask("id", "question", gold="4", answer="four")
    assert task.prompt == (Message("user", "question"),) and task.private == {"answer": "four"}

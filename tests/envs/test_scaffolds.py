import pytest

import envs
from envs.base import Sampled
from envs.play import PlayedEpisode, play, say, script
from envs.plugins import UnknownNameError, UnknownOptionError
from envs.scaffolds import load
from envs.types import FinishReason, Message, StopReason, ToolCall

CALL = Message("assistant", tool_calls=(ToolCall("note", {"text": "hi"}, "call_0"),))


@pytest.fixture
def notes():
    return []


@pytest.fixture
def env(notes):
    registered = envs.registry.ENVIRONMENTS.registered

    @envs.env("test/notes", max_turns=4)
    def notebook(split, seed):
        yield envs.Task.ask("notes", "take notes", gold="done")

    @notebook.tool
    def note(text: str) -> str:
        """Takes a note."""
        if text == "bad":
            raise envs.ToolError("no such word")
        notes.append(text)
        return f"note {len(notes)}"

    @notebook.reward
    async def done(task, trajectory):
        return float(trajectory.answer == task.gold) + 10 * len(notes)

    yield notebook()
    registered.pop("test/notes")


def speaker(*sampled):
    turns = iter(sampled)

    async def speak(conversation):
        return next(turns)

    return speak


def stopped(message, parse_error=""):
    return Sampled(message, FinishReason.STOP, parse_error)


async def run(env, speak, scaffold="tools", **options):
    episode = PlayedEpisode(env, next(env.tasks("train", 0)), speak, sandbox=None, effort=50)
    return await load(scaffold, **options).run(episode), episode


async def test_the_loop_executes_calls_until_the_answer(env, notes):
    stop, episode = await run(env, script(CALL, CALL, say("done")))
    assert stop is StopReason.ANSWER and notes == ["hi", "hi"]
    assert [m.content for m in episode.conversation if m.role == "tool"] == ["note 1", "note 2"]


async def test_a_policy_that_never_answers_is_judged_on_the_state_it_left(env, notes):
    played = await play(env, next(env.tasks("train", 0)), script(CALL))
    assert played.stop is StopReason.MAX_TURNS and len(played.turns) == 4 and notes == ["hi"] * 4
    assert played.answer == "" and played.score.value == 40


async def test_a_call_cut_by_the_token_limit_is_never_executed(env, notes):
    stop, _ = await run(env, speaker(Sampled(CALL, FinishReason.LENGTH)))
    assert stop is StopReason.MAX_TOKENS and notes == []


async def test_an_aborted_turn_ends_the_episode(env, notes):
    stop, _ = await run(env, speaker(Sampled(CALL, FinishReason.ABORT)))
    assert stop is StopReason.ABORTED and notes == []


async def test_an_unreadable_turn_is_answered_by_its_error(env, notes):
    stop, episode = await run(env, speaker(stopped(say(""), "call not closed"), stopped(say("done"))))
    assert stop is StopReason.ANSWER and notes == []
    assert episode.conversation[-2] == Message("tool", "call not closed")


async def test_unreadable_turns_in_a_row_end_the_episode_after_a_bound(env):
    bad = stopped(say(""), "empty call")
    assert (await run(env, speaker(bad, bad, bad)))[0] is StopReason.PARSE_ERROR
    assert (await run(env, speaker(bad), max_parse_errors=0))[0] is StopReason.PARSE_ERROR
    stop, _ = await run(env, speaker(bad, stopped(CALL), bad, bad), max_parse_errors=2)
    assert stop is StopReason.MAX_TURNS


async def test_a_call_at_fault_is_answered_by_its_error(env, notes):
    bad = Message("assistant", tool_calls=(ToolCall("note", {"text": "bad"}), ToolCall("none", {})))
    stop, episode = await run(env, script(bad, say("done")))
    assert stop is StopReason.ANSWER and notes == []
    assert [m.content for m in episode.turns[0].observations] == ["no such word", "unknown tool none"]


async def test_chat_is_one_turn_without_tools(env, notes):
    assert (await run(env, script(say("done")), "chat"))[0] is StopReason.ANSWER
    assert (await run(env, script(CALL), "chat"))[0] is StopReason.PARSE_ERROR
    assert (await run(env, speaker(stopped(say(""), "bad")), "chat"))[0] is StopReason.PARSE_ERROR
    cut = speaker(Sampled(say("do"), FinishReason.LENGTH))
    assert (await run(env, cut, "chat"))[0] is StopReason.MAX_TOKENS
    assert notes == []


async def test_cleanup_runs_after_an_error(env):
    ended = []
    env.definition.cleanup(lambda task, sandbox: ended.append(task.id))

    async def speak(conversation):
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        await play(env, next(env.tasks("train", 0)), speak)
    assert ended == ["notes"]


async def test_play_says_what_is_missing():
    calc = envs.load("calc")
    task = next(calc.tasks("train", 0))
    with pytest.raises(ValueError, match=r"rewards\.load"):
        await play(calc, task, script(say("1")))
    with pytest.raises(ValueError, match="needs a sandbox"):
        await play(calc, task, script(say("1")), judge=calc.score)


def test_unknown_scaffolds_and_options_give_the_nearest():
    with pytest.raises(UnknownNameError, match="Did you mean 'tools'"):
        load("tool")
    with pytest.raises(UnknownOptionError, match="Did you mean 'max_parse_errors'"):
        load("tools", max_parse_error=1)
    with pytest.raises(ValueError, match="0 or more"):
        load("tools", max_parse_errors=-1)

"""The control: nothing that the policy reads depends on the effort."""

from pathlib import Path

import pytest

from model.chat import load_chat, nano_chat
from rl import build
from rl.environments import demonstrations
from rl.hidden_effort import HiddenEffort
from rl.launch.compose import load_config

ASKED = [{"role": "user", "content": "?"}]


def test_the_prompt_is_the_same_at_every_effort() -> None:
    shown, hidden = nano_chat(), HiddenEffort(nano_chat())
    assert shown.render_prompt(ASKED, effort=1) != shown.render_prompt(ASKED, effort=100)
    assert hidden.render_prompt(ASKED, effort=1) == hidden.render_prompt(ASKED, effort=100)
    assert (
        hidden.prompt(ASKED, effort=1).token_ids == hidden.render_prompt(ASKED) == shown.render_prompt(ASKED)
    )


def test_everything_else_is_the_format_that_is_hidden(tmp_path: Path) -> None:
    shown, hidden = nano_chat(), HiddenEffort(nano_chat())
    answer = {"role": "assistant", "content": "1"}
    ids = shown.render_assistant(answer)
    assert hidden.render_assistant(answer) == ids
    assert hidden.parse(ids) == shown.parse(ids)
    assert hidden.stop_ids == shown.stop_ids
    result = [{"role": "tool", "content": "1", "tool_call_id": "c"}]
    assert hidden.render_observation(result) == shown.render_observation(result)
    hidden.save(tmp_path)
    assert load_chat(tmp_path).to_dict() == shown.to_dict()


@pytest.mark.parametrize("in_prompt", [True, False])
def test_a_run_hides_the_effort_from_demonstrations_and_prompts_alike(in_prompt: bool) -> None:
    config = load_config(["experiment=effort", f"effort.in_prompt={str(in_prompt).lower()}"])
    chat = build.chat_format(config)
    stream = demonstrations(config, chat)
    heads = {tuple(next(stream).token_ids[:2].tolist()) for _ in range(40)}
    assert (len(heads) > 5) == in_prompt
    assert isinstance(chat, HiddenEffort) != in_prompt

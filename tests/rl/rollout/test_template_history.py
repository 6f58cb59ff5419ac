"""Samples under a chat template that drops earlier reasoning: an error, a new branch, or what was sampled."""

import pytest
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from envs.base import Episode
from envs.types import Message, Role, Status, StopReason
from model.chat import TemplateChat
from model.chat.template_text import Template
from model.tokenizer import Tokenizer
from rl.rollout.worker import Worker
from tests.rl.rollout.scripted import Boxes, ScriptedEngine, calc_assignment
from tests.rl.rollout.workers import Shop, config, flat

TAGS = ["<s>", "<e>", "<unk>"]
FORGETFUL = """{%- for m in messages %}{{ '<s>' + m.role + ':' }}
{%- if loop.last %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1].lstrip() }}{% endif %}
{{- '<e>' }}{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant:' }}{% endif %}"""


def make_chat(history):
    symbols = [*TAGS, *map(chr, range(32, 127)), "\n"]
    backend = Backend(models.WordLevel({s: i for i, s in enumerate(symbols)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(tag, special=True, normalized=False) for tag in TAGS])
    return TemplateChat(Tokenizer(backend), Template(FORGETFUL), history=history)


class Talk(Shop):
    tools = ()
    sandbox = None


class Asking:
    """Asks three times."""

    name = "asking"

    async def run(self, episode: Episode) -> StopReason:
        for _ in range(2):
            await episode.sample()
            episode.observe(Message(Role.USER, "sure?"))
        await episode.sample()
        return StopReason.ANSWER


async def run(history, *texts):
    chat = make_chat(history)

    def plan(request):
        return [*chat.tokenizer.encode(texts[request.turn]), chat.tokenizer.tag_id("<e>")]

    worker = Worker(
        Talk(), Asking(), ScriptedEngine(plan), chat, Boxes(), None, None, config(max_total_tokens=900)
    )
    return chat, await worker.run(calc_assignment())


THOUGHTS = ("<think>hm</think>4", "yes", "<think>again</think>4")


async def test_a_branch_begins_where_the_template_rewrites():
    chat, trajectory = await run("fork", *THOUGHTS)
    assert [len(branch) for branch in trajectory.branches] == [1, 2]
    second = chat.tokenizer.decode(flat(trajectory.branches[1]))
    assert second.startswith("<s>user:47*86=<e><s>assistant:4<e><s>user:sure?<e><s>assistant:yes<e>")
    assert second.endswith("<s>user:sure?<e><s>assistant:<think>again</think>4<e>")
    assert "hm" not in second


async def test_what_was_sampled_is_kept_when_told_to():
    chat, trajectory = await run("keep", *THOUGHTS)
    assert [len(branch) for branch in trajectory.branches] == [3]
    assert "<think>hm</think>4<e><s>user:sure?" in chat.tokenizer.decode(flat(trajectory.turns))


async def test_otherwise_the_sample_fails_and_says_what_to_set():
    _, trajectory = await run("error", *THOUGHTS)
    assert trajectory.status is not Status.FINISHED
    assert "policy.history=fork" in str(trajectory.error)


@pytest.mark.parametrize("history", ["error", "fork", "keep"])
async def test_without_reasoning_there_is_nothing_to_rewrite(history):
    _, trajectory = await run(history, "4", "yes", "4")
    assert trajectory.status is Status.FINISHED
    assert [len(branch) for branch in trajectory.branches] == [3]

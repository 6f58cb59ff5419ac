"""The tokens of one trajectory in the making: appended to, never rendered again.

The ids of a branch are its prompts and completions in order, exactly as the engine saw and sampled them. A
scaffold that rewrites the conversation starts a new branch, whose first prompt is rendered anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from envs.types import Images, Message, Turn
from rl.engines.base import Completion, HistoryImages
from rl.rollout.pictures import history_images
from rl.rollout.recorded import replay_of


@dataclass(slots=True)
class Draft:
    """A turn whose observations may still come in. `results` counts the tool calls that have one."""

    prompt_ids: tuple[int, ...]
    completion: Completion
    message: Message
    parse_error: str
    observations: list[Message] = field(default_factory=list)
    results: int = 0
    flushed: bool = False
    images: Images | None = None

    def turn(self) -> Turn:
        """The finished record."""
        done = self.completion
        return Turn(
            self.prompt_ids,
            done.token_ids,
            done.logprobs,
            done.policy_versions,
            done.finish,
            self.message,
            tuple(self.observations),
            self.parse_error,
            done.replay_starts,
            replay_of(done),
            self.images,
        )


@dataclass(slots=True)
class History:
    """Branches of turns, and the token ids of the newest branch."""

    branches: list[list[Draft]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    turns: int = 0
    asked: tuple[int, Images | None] = 0, None
    """Of the prompt that waits for its answer: tokens and images."""

    @property
    def last(self) -> Draft | None:
        """The newest turn of the newest branch."""
        return self.branches[-1][-1] if self.branches and self.branches[-1] else None

    def fork(self) -> None:
        """Starts a new, empty branch."""
        self.branches.append([])
        self.ids = []

    def prompt(self, prompt_ids: tuple[int, ...], images: Images | None = None) -> None:
        """Appends what the policy is to answer."""
        self.ids += prompt_ids
        self.asked = len(prompt_ids), images

    def images(self) -> HistoryImages | None:
        """All images of the newest branch, as the engine takes them."""
        turns = [(len(d.prompt_ids), d.images, len(d.completion.token_ids)) for d in self.branches[-1]]
        return history_images([*turns, (*self.asked, 0)])

    def take_back(self, ids: list[int], *, new_branch: bool) -> None:
        """Undoes `prompt`, and the `fork` before it: `ids` are those of the branch before."""
        self.ids = ids
        if new_branch:
            self.branches.pop()

    def sampled(self, draft: Draft) -> None:
        """Appends what it answered."""
        self.ids += draft.completion.token_ids
        self.branches[-1].append(draft)
        self.turns += 1

    def record(self) -> tuple[tuple[Turn, ...], ...]:
        """The branches as records, without empty ones."""
        return tuple(tuple(draft.turn() for draft in branch) for branch in self.branches if branch)

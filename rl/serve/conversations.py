"""What was said, as the ids that were sampled: a tree of turns, found by the messages that led to them.

A history that begins with messages of a turn that is known goes on from the ids of that turn, never from its
text. One that does not (it was rewritten, summarised, or begins anew) starts from ids that are rendered.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model.chat import Prompt
from model.vision import TokenType
from rl.engines.base import Completion
from rl.serve.messages import Message, Messages, identity, reasoning_of


@dataclass(slots=True, eq=False)
class Node:
    """One sampled turn: what was new before it, its ids, and where it may be continued.

    Attributes:
        parent: The turn before it in the same conversation.
        prompt: New tokens since the parent's turn; the whole prompt without a parent.
        completion: The sampled tokens.
        message: How it was read, with what made it unreadable as `parse_error`.
        branch: Names the run of turns that it ends.
        open: Whether its ids end a turn, so that something can be appended.
        calls: Ids of its tool calls, in order.
        reasonings: What was thought in each turn up to this one.
        number: Counts the turns of a session.
        continued: Whether its branch went on after it; whoever continues it again begins another.
    """

    parent: Node | None
    prompt: Prompt
    completion: Completion
    message: Message
    branch: str
    open: bool
    calls: tuple[str, ...]
    reasonings: tuple[str, ...]
    number: int = 0
    continued: bool = False

    @property
    def size(self) -> int:
        """Tokens that it holds by itself."""
        return len(self.prompt.token_ids) + len(self.completion.token_ids)

    def before(self) -> Prompt:
        """All ids before its own sampled ones."""
        return self.prompt if self.parent is None else join(self.parent.history(), self.prompt)

    def history(self) -> Prompt:
        """All ids up to its end, with the images among them."""
        line: list[Node] = []
        node: Node | None = self
        while node is not None:
            line.append(node)
            node = node.parent
        result = Prompt([], [])
        for one in reversed(line):
            result = join(result, one.prompt)
            ids = list(one.completion.token_ids)
            result = join(result, Prompt(ids, [int(TokenType.TEXT)] * len(ids)))
        return result


def join(first: Prompt, second: Prompt) -> Prompt:
    """One prompt after the other."""
    images = (*first.images, *second.images)
    return Prompt(first.token_ids + second.token_ids, first.types + second.types, images)


@dataclass(frozen=True, slots=True)
class Found:
    """Where a history goes on: after `node`, with `rest`, the messages that are new."""

    node: Node
    rest: Messages


class Conversations:
    """Turns of one caller by their messages. The least recently used go beyond `most_tokens` (0: none go)."""

    def __init__(self, most_tokens: int = 0) -> None:
        self._most, self._tokens = most_tokens, 0
        self._nodes: OrderedDict[Node, list[bytes]] = OrderedDict()
        self._by_key: defaultdict[bytes, list[Node]] = defaultdict(list)

    def __iter__(self) -> Iterator[Node]:
        """Yields the turns, the one used longest ago first."""
        return iter(list(self._nodes))

    def __len__(self) -> int:
        return len(self._nodes)

    def find(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]], effort: int | None
    ) -> Found | None:
        """Returns the longest known beginning that can be continued with the rest of the messages."""
        keys = list(_keys(messages, tools, effort))
        for length in range(len(messages) - 1, 0, -1):
            if messages[length]["role"] == "assistant":
                return None
            if messages[length - 1]["role"] != "assistant":
                continue
            for node in reversed(self._by_key.get(keys[length], ())):
                if node.open and _same_reasoning(node, messages[:length]):
                    self._touch(node)
                    return Found(node, messages[length:])
            return None
        return None

    def add(
        self,
        node: Node,
        messages: Messages,
        spoken: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        effort: int | None,
    ) -> None:
        """Keeps a turn that answered `messages`; `spoken` are the shapes in which the caller saw it."""
        before = list(_keys(messages, tools, effort))[-1]
        keys = sorted({_next(before, message) for message in spoken})
        self._nodes[node] = keys
        for key in keys:
            self._by_key[key].append(node)
        self._tokens += node.size
        self._touch(node)
        while self._most and self._tokens > self._most and len(self._nodes) > 1:
            self._drop(next(iter(self._nodes)))

    def _touch(self, node: Node) -> None:
        """Marks a turn as used now, and those before it after it: they go last."""
        line: Node | None = node
        while line is not None:
            if line in self._nodes:
                self._nodes.move_to_end(line)
            line = line.parent

    def _drop(self, node: Node) -> None:
        for key in self._nodes.pop(node):
            self._by_key[key].remove(node)
            if not self._by_key[key]:
                del self._by_key[key]
        self._tokens -= node.size


def _keys(messages: Messages, tools: Sequence[Mapping[str, Any]], effort: int | None) -> Iterator[bytes]:
    """Yields a key for each beginning of the messages, the empty one first."""
    start = json.dumps([list(tools), effort], sort_keys=True).encode(errors="surrogatepass")
    key = hashlib.blake2b(start, digest_size=16).digest()
    yield key
    for message in messages:
        key = _next(key, message)
        yield key


def _next(key: bytes, message: Message) -> bytes:
    return hashlib.blake2b(key + identity(message), digest_size=16).digest()


def _same_reasoning(node: Node, messages: Messages) -> bool:
    """Whether the reasoning that came with the messages, where any came, is what was thought."""
    given = [reasoning_of(message) for message in messages if message["role"] == "assistant"]
    known = node.reasonings[-len(given) :]
    return all(one in (None, other) for one, other in zip(given[-len(known) :], known, strict=True))

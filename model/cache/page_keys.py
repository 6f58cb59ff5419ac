"""What an entry of the prefix store is called: a hash of everything its content depends on.

Compressed keys of a page depend on all tokens up to its end, so the name of a page is chained to that of the
page before it, and the chain starts with the fingerprint of the policy. Two histories share names exactly as
far as they agree, and policies that differ in anything share none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from model.config import PolicyConfig

_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Everything besides the tokens that cached keys depend on."""

    model: str
    """Which weights: unique to a checkpoint or a training run, for example its path and creation time."""
    version: int
    """Which update of them."""
    configuration: str
    """Digest of the configuration and of how it is computed."""
    tokenizer: str
    """Digest of the tokenizer, which decides what an id means."""

    def __post_init__(self) -> None:
        """Refuse names that cannot tell two policies apart."""
        if not self.model or not self.tokenizer:
            raise ValueError(
                "a fingerprint without a model or tokenizer name would match other policies' keys: "
                "name the run or checkpoint, and pass Tokenizer.digest() or the hash of tokenizer.json"
            )
        if self.version < 0:
            raise ValueError(f"a policy version counts updates from 0: got {self.version}")

    @staticmethod
    def of(
        config: PolicyConfig, *, model: str, version: int, tokenizer: str, numerics: Mapping[str, str | bool]
    ) -> Fingerprint:
        """The fingerprint of a policy of `config`; `numerics` is what else changes its keys (replay, ...)."""
        described = json.dumps([config.to_published(), dict(numerics)], sort_keys=True)
        return Fingerprint(model, version, _digest(described.encode()).hex(), tokenizer)

    def at(self, version: int) -> Fingerprint:
        """The same policy after `version` updates."""
        return replace(self, version=version)

    @property
    def family(self) -> str:
        """Hex name that all versions share."""
        return _digest(json.dumps([self.model, self.configuration, self.tokenizer]).encode()).hex()[:32]

    def digest(self) -> bytes:
        """32 bytes, the start of a chain of names."""
        fields = [self.model, self.version, self.configuration, self.tokenizer]
        return _digest(json.dumps(fields).encode())


@dataclass(frozen=True, slots=True)
class ImageMark:
    """An image in a history: its first position, and a digest of its pixels and grid."""

    position: int
    digest: bytes


class KeyChain:
    """Names of the pages of a history, and of the session that ends at any of its tokens."""

    def __init__(
        self,
        seed: bytes,
        token_ids: Sequence[int] | np.ndarray,
        images: Sequence[ImageMark],
        page_tokens: int,
    ) -> None:
        """Name the whole pages of `token_ids`.

        Args:
            seed: digest of the policy's fingerprint.
            token_ids: the history.
            images: the images whose tokens begin in it.
            page_tokens: tokens of a page.

        Raises:
            ValueError: an image begins outside the history.
        """
        self._ids = np.ascontiguousarray(token_ids, np.int64)
        self._page_tokens = page_tokens
        if any(not 0 <= mark.position < self._ids.size for mark in images):
            raise ValueError(
                f"images begin at {[mark.position for mark in images]}, the history has {self._ids.size} "
                "tokens: pass the images of these tokens alone"
            )
        ordered = sorted(images, key=lambda mark: mark.position)
        self._images = {
            page: list(marks)
            for page, marks in groupby(ordered, key=lambda mark: mark.position // page_tokens)
        }
        self._links = [_digest(b"pages", seed, page_tokens.to_bytes(8, "little"))]
        for page in range(self._ids.size // page_tokens):
            begin = page * page_tokens
            self._links.append(self._link(b"page", page, begin + page_tokens))

    @property
    def tokens(self) -> int:
        """Tokens of the history."""
        return self._ids.size

    @property
    def pages(self) -> list[bytes]:
        """Names of the whole pages, in order."""
        return self._links[1:]

    def parent(self, length: int) -> bytes:
        """Name of the last whole page within the first `length` tokens."""
        return self._links[length // self._page_tokens]

    def tail(self, length: int) -> bytes:
        """Name of the state after exactly the first `length` tokens."""
        return self._link(b"tail", length // self._page_tokens, length)

    def _link(self, kind: bytes, page: int, end: int) -> bytes:
        begin = page * self._page_tokens
        return _digest(kind, self._links[page], self._ids[begin:end].tobytes(), *self._marks(page, end))

    def _marks(self, page: int, end: int) -> Iterator[bytes]:
        for mark in self._images.get(page, ()):
            if mark.position < end:
                yield mark.position.to_bytes(8, "little")
                yield _digest(mark.digest)


def _digest(*parts: bytes) -> bytes:
    """BLAKE2b-256 of parts that cannot be mistaken for one another."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()

"""Text to token ids and back, on the `tokenizers` library.

A tag of the chat format (a call's opening, the end of a turn, ...) is always one token, and text that merely
spells a tag never becomes one: what an environment or a user writes cannot open a call or end a turn. That is
why `encode` takes plain text only, and tags are looked up with `tag_id`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

FILE_NAME = "tokenizer.json"
NANO_TAGS = (
    "<pad>",
    "<bos>",
    "<end>",
    "<unk>",
    "<effort>",
    "<call>",
    "</call>",
    "<obs>",
    "</obs>",
    "<answer>",
)
NANO_CHARACTERS = '0123456789+-*/=()?!:, \nabcdefghijklmnopqrstuvwxyz{}"._'
NANO_VOCAB_SIZE = 64


class TokenizerError(ValueError):
    """A tokenizer that cannot be read, or a tag it does not have: what was found and what is needed."""


class Tokenizer:
    """Maps text to ids and ids to text.

    `vocab_size` is the number of ids, tags included. Ids outside it are skipped by `decode`.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._plain = Backend.from_str(backend.to_str())
        self._plain.encode_special_tokens = True
        added = backend.get_added_tokens_decoder()
        self._tags = {token.content: index for index, token in added.items() if token.special}
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    @property
    def tags(self) -> dict[str, int]:
        """The special tokens by their text."""
        return dict(self._tags)

    def tag_id(self, tag: str) -> int:
        """Returns the id of a special token.

        Raises:
            TokenizerError: The tokenizer has no such token.
        """
        if tag not in self._tags:
            raise TokenizerError(
                f"the tokenizer has no special token {tag!r} (it has {sorted(self._tags)}); "
                "the chat format and the tokenizer must come from the same checkpoint"
            )
        return self._tags[tag]

    def encode(self, text: str) -> list[int]:
        """Encodes plain text; a tag spelt out in it stays text."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def encode_tagged(self, text: str) -> list[int]:
        """Encodes text of our own making, in which special tokens are spelt out and meant."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids, tags included; ids outside the vocabulary are skipped."""
        known = [int(index) for index in ids if 0 <= index < self.vocab_size]
        return self._backend.decode(known, skip_special_tokens=False)

    def digest(self) -> str:
        """Hex SHA-256 of everything that decides what an id means."""
        return hashlib.sha256(self._backend.to_str(pretty=False).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Writes `tokenizer.json` into `folder`, which is made when it is missing."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE_NAME).write_text(self._backend.to_str(pretty=False), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads `tokenizer.json` from a checkpoint folder.

        Raises:
            TokenizerError: The file is missing or is not a tokenizer.
        """
        path = folder / FILE_NAME
        if not path.is_file():
            raise TokenizerError(f"{path} is missing; copy the checkpoint's {FILE_NAME} into {folder}")
        try:
            return cls(Backend.from_str(path.read_text(encoding="utf-8")))
        except Exception as error:  # the library raises nothing narrower
            raise TokenizerError(f"{path} is not a tokenizer file ({error}); copy it again") from error


def nano_tokenizer() -> Tokenizer:
    """Returns the tokenizer of the small presets: one token a tag, one token a character, 64 ids.

    Capital letters are read as small ones; any other unknown character becomes `<unk>`.
    """
    symbols = [*NANO_TAGS, *NANO_CHARACTERS]
    assert len(symbols) == len(set(symbols)) <= NANO_VOCAB_SIZE
    backend = Backend(models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk_token="<unk>"))
    backend.normalizer = normalizers.Lowercase()  # pyright: ignore[reportAttributeAccessIssue]
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # pyright: ignore
    backend.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens([AddedToken(tag, special=True, normalized=False) for tag in NANO_TAGS])
    return Tokenizer(backend)

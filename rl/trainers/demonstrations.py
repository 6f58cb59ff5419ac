"""What a run imitates: an environment's demonstrations, or those of data files, at an exact position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from model.chat import ChatFormat
from model.config import PolicyConfig
from model.hf.settings import HFShape
from model.images import ImageReader
from rl.environments import demonstrations
from rl.launch.config import RunConfig
from rl.trainers.conversations import Renderer
from rl.trainers.data import Sample
from rl.trainers.data_files import DataError
from rl.trainers.sft_data import FileSamples


class Demonstrations:
    """The stream of a run's demonstrations, and the ones it validates on."""

    def __init__(self, config: RunConfig, chat: ChatFormat, policy: PolicyConfig | HFShape) -> None:
        self._sft, sft = config.sft, config.sft
        self._files: FileSamples | None = None
        self.validation: list[Sample] = []
        self._stream: Iterator[Sample] = iter(())
        renderer = Renderer(
            chat,
            ImageReader.of(policy) if isinstance(policy, PolicyConfig) and policy.vision else None,
            sft.effort,
            sft.max_tokens,
            sft.cut,
            sft.min_score,
        )
        if not sft.steps:
            return
        if sft.data:
            self._stream = self._files = FileSamples(sft.data, renderer, config.run.seed)
        else:
            self._stream = demonstrations(config, chat)
        if sft.validation:
            held_out = FileSamples(sft.validation, renderer, config.run.seed)
            self.validation = held_out.in_order(sft.validation_samples)
            if not self.validation:
                raise DataError("no row of sft.validation gives a sample: all are below sft.min_score")

    def take(self, count: int) -> list[Sample]:
        """The next samples.

        Raises:
            DataError: A row of a data file cannot be used.
        """
        return list(islice(self._stream, count))

    def validates_at(self, step: int) -> bool:
        """Whether there is a validation after `step`: every so many, and after the last."""
        return bool(self.validation) and (step % self._sft.validate_every == 0 or step == self._sft.steps)

    def metrics(self) -> dict[str, float]:
        """How far the files have been read."""
        return {} if self._files is None else {"sft/epoch": self._files.epoch}

    def state_dict(self) -> dict[str, Any]:
        """The exact position in the files; an environment's demonstrations are counted by the steps."""
        return {} if self._files is None else self._files.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], seen: int) -> None:
        """Goes on at a position, after `seen` samples.

        Raises:
            DataError: The files are others than those of the checkpoint.
        """
        if self._files is not None and state:
            self._files.load_state_dict(state)
        else:
            self._stream = islice(self._stream, seen, None)

"""What a sample does, whoever schedules it: a pure function of seed, group, index and draw.

Samples are drawn in blocks by a counter-based seed, so every rule meets the same samples, and only the blocks
in use are in memory however many samples a run takes.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.rollout_sim.costs import InputError, read_json

BLOCK = 256
_BLOCKS_KEPT = 8
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Work:
    """One sample: appended input and sampled output tokens of each turn, tool seconds between turns."""

    inputs: array[int]
    outputs: array[int]
    tools: array[float]


@dataclass(frozen=True, slots=True)
class Block:
    """Samples as columns: the turns of sample i are the rows `first[i]` to `first[i + 1]`."""

    first: list[int]
    inputs: array[int]
    outputs: array[int]
    tools: array[float]

    def work(self, i: int) -> Work:
        """Returns sample i; the tool call after its last turn does not exist."""
        low, high = self.first[i], self.first[i + 1]
        return Work(self.inputs[low:high], self.outputs[low:high], self.tools[low : high - 1])

    def lengths(self) -> np.ndarray:
        """Returns the sampled tokens of every sample, `[samples]`."""
        return np.add.reduceat(np.asarray(self.outputs, dtype=np.int64), self.first[:-1])


class Trace(Protocol):
    """A source of samples."""

    def work(self, sample: int, draw: int) -> Work:
        """Returns sample number `sample`; `draw` counts how often it was begun anew from nothing."""
        ...

    def source_lengths(self) -> np.ndarray:
        """Returns lengths (sampled tokens) that stand for the distribution samples are drawn from."""
        ...


class SyntheticTrace:
    """Samples by formula. Subclasses draw a block of `BLOCK` samples."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._kept: OrderedDict[tuple[int, int], Block] = OrderedDict()

    def work(self, sample: int, draw: int) -> Work:
        """Returns one sample."""
        number, i = divmod(sample, BLOCK)
        block = self._kept.get((number, draw))
        if block is None:
            block = self._kept[number, draw] = self._draw(np.random.default_rng((self._seed, draw, number)))
            if len(self._kept) > _BLOCKS_KEPT:
                self._kept.popitem(last=False)
        return block.work(i)

    def source_lengths(self) -> np.ndarray:
        """Returns the lengths of samples that no run uses: a seed of their own."""
        blocks = (self._draw(np.random.default_rng((self._seed, 1 << 31, k))) for k in range(400))
        return np.concatenate([block.lengths() for block in blocks])

    def _draw(self, rng: np.random.Generator) -> Block:
        raise NotImplementedError


class LongTailTrace(SyntheticTrace):
    """Reasoning with tools: log-normal lengths (median 2k, sigma 1), 2 % of them a Pareto tail above 8k.

    Lengths end at 64k tokens. A tool is called after every `turn_tokens` tokens: exponential, of a mean that
    a sample draws from 0.2 to 5 s, and 1 % of the calls take 60 s more.
    """

    def __init__(self, seed: int, *, alpha: float = 2.0, turn_tokens: int = 2048) -> None:
        super().__init__(seed)
        self._alpha, self._turn_tokens = alpha, turn_tokens

    def _draw(self, rng: np.random.Generator) -> Block:
        body = np.exp(rng.normal(np.log(2000.0), 1.0, BLOCK))
        tail = 8000.0 * (1.0 - rng.random(BLOCK)) ** (-1.0 / self._alpha)
        lengths = np.where(rng.random(BLOCK) < 0.02, tail, body)
        lengths = np.clip(lengths, 16, 64_000).astype(np.int64)
        turns = 1 + lengths // self._turn_tokens
        inputs = np.full(turns.sum(), 200)
        inputs[np.cumsum(turns) - turns] = 500
        return _with_tools(rng, turns, inputs, split(lengths, turns), rng.uniform(0.2, 5.0, BLOCK))


class AgentTrace(SyntheticTrace):
    """A software agent: 50 to 200 turns of about 100 sampled tokens, 30 appended tokens for each of them."""

    def _draw(self, rng: np.random.Generator) -> Block:
        turns = rng.integers(50, 201, BLOCK)
        outputs = np.maximum(8, rng.lognormal(np.log(70.0), 0.8, turns.sum())).astype(np.int64)
        share = rng.lognormal(-0.5, 1.0, turns.sum())
        inputs = np.maximum(1, 30.0 * outputs.mean() * share / share.mean()).astype(np.int64)
        return _with_tools(rng, turns, inputs, outputs, rng.uniform(0.2, 5.0, BLOCK))


def split(lengths: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """Splits each length into its number of turns as evenly as whole tokens allow."""
    rows = np.arange(turns.sum()) - np.repeat(np.cumsum(turns) - turns, turns)
    base, rest = lengths // turns, lengths % turns
    return np.repeat(base, turns) + (rows < np.repeat(rest, turns))


def _with_tools(
    rng: np.random.Generator, turns: np.ndarray, inputs: np.ndarray, outputs: np.ndarray, mean_s: np.ndarray
) -> Block:
    tools = rng.exponential(np.repeat(mean_s, turns)) + 60.0 * (rng.random(len(outputs)) < 0.01)
    return block(turns, inputs, outputs, tools)


def block(turns: np.ndarray, inputs: np.ndarray, outputs: np.ndarray, tools: np.ndarray) -> Block:
    """Returns samples as columns: `turns` [samples], the rest one entry a turn."""
    first = [0, *np.cumsum(turns).tolist()]
    return Block(first, array("q", inputs.tolist()), array("q", outputs.tolist()), array("d", tools.tolist()))


class FileTrace:
    """Samples of a file, in its order and again from the start; a restarted sample draws another of them."""

    def __init__(self, samples: list[Work], seed: int) -> None:
        self._samples, self._seed = samples, seed

    def work(self, sample: int, draw: int) -> Work:
        """Returns one sample; seeds shift where in the file a run begins."""
        at = sample + self._seed * 7919
        if draw:
            at = int(np.random.default_rng((self._seed, draw, sample)).integers(len(self._samples)))
        return self._samples[at % len(self._samples)]

    def source_lengths(self) -> np.ndarray:
        """Returns the length of every sample of the file."""
        return np.array([sum(work.outputs) for work in self._samples])


def load_trace(path: Path) -> list[Work]:
    """Reads a trace file (the format stands in the docstring of `benchmarks.rollout_sim.__main__`).

    Raises:
        InputError: The file is not such a trace; the message names the sample.
    """
    table = read_json(path, "trace")
    if not isinstance(table, dict) or table.get("format") != _FORMAT or set(table) != {"format", "samples"}:
        raise InputError(f'{path}: write {{"format": {_FORMAT}, "samples": [...]}} and nothing else')
    if not isinstance(table["samples"], list) or not table["samples"]:
        raise InputError(f"{path}: samples must be a list of at least one sample")
    return [_sample(path, number, sample) for number, sample in enumerate(table["samples"])]


def _sample(path: Path, number: int, sample: object) -> Work:
    where = f"{path}: sample {number}"
    if not isinstance(sample, dict) or set(sample) != {"input", "output", "tool_s"}:
        raise InputError(f"{where} must be an object with the lists input, output and tool_s")
    inputs = _numbers(where, "input", sample["input"], int, 0)
    outputs = _numbers(where, "output", sample["output"], int, 1)
    tools = _numbers(where, "tool_s", sample["tool_s"], float, 0)
    if not outputs or len(inputs) != len(outputs) or len(tools) != len(outputs) - 1:
        raise InputError(
            f"{where} has {len(inputs)} input, {len(outputs)} output and {len(tools)} tool_s entries; it "
            "needs n, n and n - 1 for its n >= 1 turns"
        )
    return Work(array("q", inputs), array("q", outputs), array("d", tools))


def _numbers(where: str, name: str, values: object, kind: type, least: int) -> list:
    kinds = (int,) if kind is int else (int, float)
    if not isinstance(values, list):
        raise InputError(f"{where}: {name} must be a list")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value < 1e12:
            what = "whole numbers" if kind is int else "numbers"
            raise InputError(f"{where}: {name} holds {value!r}; write {what} from {least} to 1e12")
    return values

"""What things cost and how large they are: one table for every rule, so that only the rules differ."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


class InputError(ValueError):
    """A trace or cost file that cannot be used: where, why, and what to write instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Sizes of engines, steps and trainer, and their times in seconds.

    A decode step of b requests takes `decode_base_s + decode_per_request_s * b`. Prefill stops decoding on
    its replica; it takes `prefill_base_s`, once for all turns that wait for the same step, and their tokens
    over `prefill_tokens_per_s`. An engine may gather turns in their slots for up to `prefill_gather_steps`
    steps, unless so many times their number is at least that of the requests that decode. `kv_tokens` bounds
    a replica's cached tokens: running turns are reserved, waiting samples' caches are evicted, oldest first.
    `in_flight` bounds live samples (each holds a sandbox and a cache) for every rule; a rule that counts
    groups holds `group_size` places for an open group. `staleness` counts optimiser steps. `sandbox_failure`
    is the share of created sandboxes that fail; their samples are tried again.
    """

    replicas: int = 4
    slots: int = 64
    groups_per_step: int = 32
    group_size: int = 8
    in_flight: int = 512
    staleness: int = 8
    decode_base_s: float = 0.020
    decode_per_request_s: float = 0.00015
    prefill_base_s: float = 0.0
    prefill_tokens_per_s: float = 40_000.0
    prefill_gather_steps: int = 1
    kv_tokens: int = 2_000_000
    trainer_s: float = 60.0
    trainer_s_per_token: float = 0.0
    update_pause_s: float = 0.5
    kv_on_update: str = "keep"
    sandbox_create_s: float = 0.4
    sandbox_failure: float = 0.01

    def __post_init__(self) -> None:
        """Checks every field.

        Raises:
            InputError: A field has the wrong type or range.
        """
        for field in fields(self):
            self._check_number(field.name, str(field.type))
        for name in (
            "replicas",
            "slots",
            "groups_per_step",
            "group_size",
            "kv_tokens",
            "prefill_gather_steps",
        ):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("decode_base_s", "prefill_tokens_per_s"):
            self._require(name, getattr(self, name) > 0, "greater than 0")
        self._require(
            "in_flight", self.in_flight >= self.group_size, f"at least group_size={self.group_size}"
        )
        self._require("sandbox_failure", self.sandbox_failure < 1, "a share below 1")
        self._require("kv_on_update", self.kv_on_update in ("keep", "recompute"), "'keep' or 'recompute'")

    @property
    def total_slots(self) -> int:
        """Requests that all replicas together can run at once."""
        return self.replicas * self.slots

    @property
    def samples_per_step(self) -> int:
        """Samples of one optimiser step."""
        return self.groups_per_step * self.group_size

    @property
    def ideal_tokens_per_s(self) -> float:
        """What no rule exceeds: every slot decodes all the time, without prefill, pauses or masked tokens."""
        return self.total_slots / (self.decode_base_s + self.decode_per_request_s * self.slots)

    def _check_number(self, name: str, kind: str) -> None:
        value: Any = getattr(self, name)
        if kind == "str":
            return
        number = isinstance(value, int) or (kind == "float" and isinstance(value, float))
        what = "a whole number" if kind == "int" else "a number"
        self._require(name, number and not isinstance(value, bool), what)
        self._require(name, 0 <= value < float("inf"), "finite and 0 or more")

    def _require(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise InputError(f"cost {name}={getattr(self, name)!r}: set it to {what}")


def read_json(path: Path, what: str) -> Any:
    """Returns the JSON value in a file.

    Raises:
        InputError: The file cannot be read or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read the {what} file {path}: {error.strerror}; check the path") from error
    except ValueError as error:
        raise InputError(f"the {what} file {path} is not JSON: {error}") from error


def load_costs(path: Path) -> Costs:
    """Returns the cost table of a JSON file; keys that it leaves out keep their documented values.

    Raises:
        InputError: The file is not an object of known keys with usable values.
    """
    table = read_json(path, "cost")
    known = [field.name for field in fields(Costs)]
    if not isinstance(table, dict):
        raise InputError(f"{path}: write one JSON object with some of the keys {', '.join(known)}")
    if unknown := sorted(set(table) - set(known)):
        raise InputError(f"{path}: unknown key {unknown[0]!r}; known keys are {', '.join(known)}")
    return Costs(**table)

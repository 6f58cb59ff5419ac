"""What an evaluation cost, from a price file of the user's own; without one, nothing is guessed.

The file is YAML with these keys, all optional but at least one price::

    currency: USD                # a name, for the table
    input_tokens: 0.30           # a million prompt tokens, observations of tools included
    output_tokens: 1.20          # a million sampled tokens
    sandbox_second: 0.00002      # a second of one sandbox
    device_second: 0.0011        # a second in which the engine's device was busy

Prices are added up: who pays for the device gives `device_second` and no price of tokens, and who pays for
tokens does the opposite.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError


class PriceError(ValueError):
    """A price file that cannot be used: which, why, and what it may hold."""


class Prices(BaseModel):
    """Prices by unit; see the module for the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    currency: str = "USD"
    input_tokens: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    output_tokens: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    sandbox_second: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    device_second: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    def cost(self, usage: Usage) -> float:
        """What `usage` costs."""
        tokens = usage.input_tokens * self.input_tokens + usage.output_tokens * self.output_tokens
        return tokens / 1e6 + usage.sandbox_s * self.sandbox_second + usage.device_s * self.device_second


@dataclass(frozen=True, slots=True)
class Usage:
    """What samples used: tokens, seconds of sandboxes, busy seconds of the engine's device."""

    input_tokens: float
    output_tokens: float
    sandbox_s: float
    device_s: float

    def per(self, count: int) -> Usage:
        """The usage for each of `count`."""
        return Usage(
            self.input_tokens / count,
            self.output_tokens / count,
            self.sandbox_s / count,
            self.device_s / count,
        )


def load_prices(path: Path) -> Prices:
    """Reads a price file.

    Raises:
        PriceError: It is not there, not YAML, has unknown keys, or no price at all.
    """
    valid = ", ".join(Prices.model_fields)
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PriceError(f"prices={path} cannot be read ({error}); it is a YAML file with {valid}") from error
    if not isinstance(data, dict):
        raise PriceError(f"prices={path} holds no keys; it may have {valid}")
    try:
        prices = Prices.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PriceError(f"prices={path}: {where}: {first['msg']}; it may have {valid}") from error
    if not any(prices.model_dump(exclude={"currency"}).values()):
        raise PriceError(f"prices={path} names no price above 0; it may have {valid}")
    return prices

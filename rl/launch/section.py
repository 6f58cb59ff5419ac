"""What every section of a run's configuration is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of the configuration: frozen, and without room for unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

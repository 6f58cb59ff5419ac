"""Errors of the inference engine.

A `RequestError` concerns one request; the engine goes on serving the others.

- `EngineFault`: anything below
    - `RequestError` (a ValueError): what one request asks for cannot be served
        - `EmptyPromptError`, `TokenRangeError`, `ContextOverflowError`, `SamplingError`, `BusySessionError`,
          `ImageError`, `RoleError`
        - `NonFiniteLogitsError`: the policy gave NaN or infinite logits for this sequence
    - `StateError` (a ValueError): weights, or the exported state of a request, that do not fit; nothing was
      changed
"""

from __future__ import annotations


class EngineFault(Exception):
    """Base of the engine's errors."""


class RequestError(EngineFault, ValueError):
    """A request that cannot be served: what is wrong, and what to change."""


class EmptyPromptError(RequestError):
    """A request without a token."""


class TokenRangeError(RequestError):
    """A token id outside the policy's vocabulary."""


class ContextOverflowError(RequestError):
    """A history that leaves no room for another token."""


class SamplingError(RequestError):
    """Sampling parameters outside their range."""


class BusySessionError(RequestError):
    """A second request for a session that is being served."""


class NonFiniteLogitsError(RequestError):
    """NaN or infinite logits."""


class ImageError(RequestError):
    """Images that do not fit the tokens, or the policy."""


class RoleError(RequestError):
    """Work that an engine of this role does not do."""


class StateError(EngineFault, ValueError):
    """Weights that do not fit the policy, or a request's state that does not fit the engine."""

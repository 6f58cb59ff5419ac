"""Errors as OpenAI's clients read them: a status, and an object with message, type, param and code."""

from __future__ import annotations

from typing import Any

from model.engine.errors import ContextOverflowError, RequestError
from rl.engines.base import EngineError


class ApiError(Exception):
    """A refusal: what is wrong and what to change.

    Args:
        status: Of HTTP.
        message: For the reader.
        param: Which part of the request is at fault, as in `messages[2].content`.
        code: For programs.
        kind: `invalid_request_error`, `authentication_error` or `server_error`.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.param, self.code, self.kind = param, code, kind

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def overflow(tokens: int, context: int) -> ApiError:
    """A conversation that leaves no room for an answer."""
    return ApiError(
        f"the conversation has {tokens} tokens and this model's context is {context}: shorten it",
        param="messages",
        code="context_length_exceeded",
    )


def of_engine(error: EngineError) -> ApiError:
    """What the engine refused."""
    cause = error.__cause__
    code = "context_length_exceeded" if isinstance(cause, ContextOverflowError) else None
    if isinstance(cause, RequestError):
        return ApiError(str(error), code=code)
    return ApiError(str(error), status=500, kind="server_error")

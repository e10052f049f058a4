"""From an error to what a client is told: a status, and OpenAI's or Anthropic's error object.

Invariant: what went wrong inside is told as "internal" with an id for the log, never with a traceback.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from agentrt.errors import (
    AbortedError,
    AgentrtError,
    ConstraintError,
    EngineError,
    GrammarError,
    QueueFullError,
    RequestError,
    TooLongError,
    UserError,
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a client is told.

    Attributes:
        status: HTTP status.
        message: For people.
        kind: OpenAI's error type.
        param: The offending field.
        code: A short word for programs.
        headers: Further headers, such as Retry-After.
    """

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def openai(self) -> dict[str, Any]:
        """As OpenAI tells it."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """As Anthropic tells it."""
        return {"type": "error", "error": {"type": _ANTHROPIC_KINDS.get(self.status, "api_error"), "message": self.message}}


_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


class Refused(Exception):
    """Carries a refusal out of a route."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def not_found(message: str, *, param: str | None = None, code: str = "not_found") -> Refused:
    """What is asked for is not there."""
    return Refused(Refusal(404, message, param=param, code=code))


def refusal_of(error: BaseException) -> Refusal:
    """What the client is told of `error`."""
    if isinstance(error, Refused):
        return error.refusal
    if isinstance(error, UserError):
        return _of_user(error)
    if isinstance(error, QueueFullError):
        wait = {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
        return Refusal(503, str(error), "overloaded_error", code="queue_full", headers=wait)
    if isinstance(error, EngineError):
        return Refusal(503, f"the engine is down: {_first_line(error)}", "server_error", code="engine_down", headers={"Retry-After": "10"})
    if isinstance(error, ConstraintError):
        return Refusal(422, str(error), "constraint_error", code="constraint_not_met")
    if isinstance(error, AbortedError):
        return Refusal(499, str(error), "request_aborted", code="aborted")
    if isinstance(error, RequestError | AgentrtError):
        return Refusal(500, str(error), "server_error", code=type(error).__name__)
    return Refusal(500, "something went wrong inside; the server's log says what", "server_error", code="internal")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _of_user(error: UserError) -> Refusal:
    if isinstance(error, TooLongError):
        return Refusal(400, str(error), param=error.param, code="context_length_exceeded")
    if isinstance(error, GrammarError):
        place = f" (at {error.pointer})" if error.pointer and error.pointer not in str(error) else ""
        return Refusal(400, f"{error}{place}", param=error.param, code="invalid_constraint")
    return Refusal(400, str(error), param=error.param, code="invalid_value" if error.param else None)

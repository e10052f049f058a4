"""The error tree: what can go wrong, and whose turn it is to act.

    AgentrtError
    |-- UserError              the call is wrong; nothing was started (HTTP 4xx)
    |   |-- PromptError            an empty prompt, ids outside the vocabulary, a bad chat
    |   |-- TooLongError           does not fit the context or the KV pool; carries both numbers
    |   |-- GrammarError           a schema, regex or grammar that cannot be enforced; names pointer and keyword
    |   `-- ModelError             a model that cannot be found, fetched, read or run
    |-- RequestError           this request failed; the engine and its neighbours go on
    |   |-- QueueFullError         too many waiting; carries ``retry_after`` seconds (HTTP 503)
    |   |-- AbortedError           cancelled by its caller, or its deadline passed
    |   |-- NumericalError         NaN or infinite logits
    |   `-- ConstraintError        the output could not be made to satisfy its constraint
    `-- EngineError            the engine is down; every pending request gets this one

Every error pickles, since it crosses from the engine's process to its caller. This module imports nothing.
"""

from __future__ import annotations


class AgentrtError(Exception):
    """Base of every error that agentrt raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        # Errors with keyword-only fields would otherwise lose them, or fail, when unpickled.
        return (_rebuild, (type(self), self.args, dict(self.__dict__)))


def _rebuild(kind: type[AgentrtError], args: tuple[object, ...], fields: dict[str, object]) -> AgentrtError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(fields)
    return error


class UserError(AgentrtError, ValueError):
    """The call is wrong: says what, where, the value, the limit, and what to do.

    Attributes:
        param: Name of the offending parameter, or None.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptError(UserError):
    """The prompt itself cannot be used."""


class TooLongError(UserError):
    """The request can never fit.

    Attributes:
        needed: Tokens that the request needs.
        limit: Tokens that there are.
    """

    def __init__(self, message: str, *, needed: int, limit: int, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.needed = needed
        self.limit = limit


class GrammarError(UserError):
    """A constraint that cannot be enforced.

    Attributes:
        pointer: JSON pointer (or offset in a pattern, as text) of the offending place, "" for the root.
        keyword: The keyword or construct that cannot be enforced, or "".
    """

    def __init__(self, message: str, *, pointer: str = "", keyword: str = "", param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.pointer = pointer
        self.keyword = keyword


class ModelError(UserError):
    """A model that cannot be found, fetched, read or run."""


class RequestError(AgentrtError, RuntimeError):
    """One request failed; the engine and the other requests go on."""


class QueueFullError(RequestError):
    """The queue is full.

    Attributes:
        retry_after: Seconds after which a new try is sensible.
    """

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class AbortedError(RequestError):
    """The request was cancelled by its caller, or its deadline passed."""


class NumericalError(RequestError):
    """The model gave NaN or infinite logits for this request."""


class ConstraintError(RequestError):
    """The output could not be made to satisfy its constraint.

    Attributes:
        violations: What the last document failed, one line each.
    """

    def __init__(self, message: str, *, violations: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.violations = violations


class EngineError(AgentrtError, RuntimeError):
    """The engine is down; nothing that was pending will be answered."""


def as_request_error(error: BaseException) -> AgentrtError:
    """An error that ends one request: `error` itself if it is ours, else a RequestError that says what it was."""
    return error if isinstance(error, AgentrtError) else RequestError(f"the request failed: {error!r}")

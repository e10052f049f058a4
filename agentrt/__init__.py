"""agentrt: a runtime for LLM agent programs.

Public names load on first use, so that ``import agentrt`` costs nothing and never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from agentrt import backend as _backend

__version__ = "0.1.0"

#: Public name -> the module that defines it.
_HOME: dict[str, str] = {
    "Engine": "agentrt.runtime",
    "AbortedError": "agentrt.errors",
    "AgentrtError": "agentrt.errors",
    "ConstraintError": "agentrt.errors",
    "EngineError": "agentrt.errors",
    "GrammarError": "agentrt.errors",
    "ModelError": "agentrt.errors",
    "NumericalError": "agentrt.errors",
    "PromptError": "agentrt.errors",
    "QueueFullError": "agentrt.errors",
    "RequestError": "agentrt.errors",
    "TooLongError": "agentrt.errors",
    "UserError": "agentrt.errors",
    "Completion": "agentrt.request",
    "FinishReason": "agentrt.request",
    "GrammarSpec": "agentrt.request",
    "ProgramTag": "agentrt.request",
    "Request": "agentrt.request",
    "Sample": "agentrt.request",
    "SamplingParams": "agentrt.request",
    "TokenDelta": "agentrt.request",
    "TokenLogprob": "agentrt.request",
    "Usage": "agentrt.request",
    "EngineConfig": "agentrt.config",
    "set_default_backend": "agentrt.backend",
}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'agentrt' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


def _default_engine() -> _backend.Backend:
    engine: _backend.Backend = __getattr__("Engine")()
    return engine


_backend.set_default_factory(_default_engine)

if TYPE_CHECKING:
    from agentrt.backend import set_default_backend as set_default_backend
    from agentrt.config import EngineConfig as EngineConfig
    from agentrt.errors import AbortedError as AbortedError
    from agentrt.errors import AgentrtError as AgentrtError
    from agentrt.errors import ConstraintError as ConstraintError
    from agentrt.errors import EngineError as EngineError
    from agentrt.errors import GrammarError as GrammarError
    from agentrt.errors import ModelError as ModelError
    from agentrt.errors import NumericalError as NumericalError
    from agentrt.errors import PromptError as PromptError
    from agentrt.errors import QueueFullError as QueueFullError
    from agentrt.errors import RequestError as RequestError
    from agentrt.errors import TooLongError as TooLongError
    from agentrt.errors import UserError as UserError
    from agentrt.request import Completion as Completion
    from agentrt.request import FinishReason as FinishReason
    from agentrt.request import GrammarSpec as GrammarSpec
    from agentrt.request import ProgramTag as ProgramTag
    from agentrt.request import Request as Request
    from agentrt.request import Sample as Sample
    from agentrt.request import SamplingParams as SamplingParams
    from agentrt.request import TokenDelta as TokenDelta
    from agentrt.request import TokenLogprob as TokenLogprob
    from agentrt.request import Usage as Usage
    from agentrt.runtime import Engine as Engine

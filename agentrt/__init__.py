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
    "function": "agentrt.lang.program",
    "gen": "agentrt.lang.expressions",
    "gen_int": "agentrt.lang.expressions",
    "gen_string": "agentrt.lang.expressions",
    "select": "agentrt.lang.expressions",
    "system": "agentrt.lang.expressions",
    "user": "agentrt.lang.expressions",
    "assistant": "agentrt.lang.expressions",
    "system_begin": "agentrt.lang.expressions",
    "system_end": "agentrt.lang.expressions",
    "user_begin": "agentrt.lang.expressions",
    "user_end": "agentrt.lang.expressions",
    "assistant_begin": "agentrt.lang.expressions",
    "assistant_end": "agentrt.lang.expressions",
    "token_length_normalized": "agentrt.lang.expressions",
    "greedy_token_selection": "agentrt.lang.expressions",
    "unconditional_likelihood_normalized": "agentrt.lang.expressions",
    "special": "agentrt.lang.expressions",
    "separate_reasoning": "agentrt.lang.expressions",
    "image": "agentrt.lang.expressions",
    "video": "agentrt.lang.expressions",
    "State": "agentrt.lang.state",
    "AsyncState": "agentrt.lang.state",
    "Recording": "agentrt.lang.recording",
    "agent_loop": "agentrt.lang.agent",
    "tool_call": "agentrt.lang.agent",
    "AgentEvent": "agentrt.lang.agent",
    "StepsError": "agentrt.lang.agent",
    "tool": "agentrt.lang.tools",
    "Tool": "agentrt.lang.tools",
    "Call": "agentrt.lang.tools",
    "ToolRetry": "agentrt.lang.tools",
    "ToolError": "agentrt.lang.tools",
    "ToolContext": "agentrt.lang.tools",
    "mcp_tools": "agentrt.lang.tools",
    "CutValueError": "agentrt.lang.values",
    "InvalidValueError": "agentrt.lang.values",
    "BudgetError": "agentrt.lang.budget",
    "resume": "agentrt.lang.saving",
    "flush_cache": "agentrt.lang.default_engine",
    "get_server_info": "agentrt.lang.default_engine",
    "Runtime": "agentrt.runtime",
    "RuntimeEndpoint": "agentrt.backends.remote",
    "OpenAI": "agentrt.backends.remote",
    "Anthropic": "agentrt.backends.remote",
    "ScriptedBackend": "agentrt.backends.scripted",
    "Answer": "agentrt.backends.scripted",
}

__all__ = ["__version__", *sorted(_HOME)]

#: Names that programs written elsewhere look for, and what stands in their place.
_INSTEAD = {
    "LiteLLM": "OpenAI(model, base_url=...), with the address of LiteLLM's proxy",
    "VertexAI": "OpenAI(model, base_url=...), with the address of Vertex AI's OpenAI-compatible endpoint",
    "global_config": "EngineConfig, or the keywords of Engine(...)",
    "ServerArgs": "EngineConfig, or the keywords of Engine(...)",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        hint = f"; use {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise AttributeError(f"module 'agentrt' has no attribute {name!r}{hint}")
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
    from agentrt.backends.remote import Anthropic as Anthropic
    from agentrt.backends.remote import OpenAI as OpenAI
    from agentrt.backends.remote import RuntimeEndpoint as RuntimeEndpoint
    from agentrt.backends.scripted import Answer as Answer
    from agentrt.backends.scripted import ScriptedBackend as ScriptedBackend
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
    from agentrt.lang.agent import AgentEvent as AgentEvent
    from agentrt.lang.agent import StepsError as StepsError
    from agentrt.lang.agent import agent_loop as agent_loop
    from agentrt.lang.agent import tool_call as tool_call
    from agentrt.lang.budget import BudgetError as BudgetError
    from agentrt.lang.default_engine import flush_cache as flush_cache
    from agentrt.lang.default_engine import get_server_info as get_server_info
    from agentrt.lang.expressions import assistant as assistant
    from agentrt.lang.expressions import assistant_begin as assistant_begin
    from agentrt.lang.expressions import assistant_end as assistant_end
    from agentrt.lang.expressions import gen as gen
    from agentrt.lang.expressions import gen_int as gen_int
    from agentrt.lang.expressions import gen_string as gen_string
    from agentrt.lang.expressions import greedy_token_selection as greedy_token_selection
    from agentrt.lang.expressions import image as image
    from agentrt.lang.expressions import select as select
    from agentrt.lang.expressions import separate_reasoning as separate_reasoning
    from agentrt.lang.expressions import special as special
    from agentrt.lang.expressions import system as system
    from agentrt.lang.expressions import system_begin as system_begin
    from agentrt.lang.expressions import system_end as system_end
    from agentrt.lang.expressions import token_length_normalized as token_length_normalized
    from agentrt.lang.expressions import unconditional_likelihood_normalized as unconditional_likelihood_normalized
    from agentrt.lang.expressions import user as user
    from agentrt.lang.expressions import user_begin as user_begin
    from agentrt.lang.expressions import user_end as user_end
    from agentrt.lang.expressions import video as video
    from agentrt.lang.program import function as function
    from agentrt.lang.recording import Recording as Recording
    from agentrt.lang.saving import resume as resume
    from agentrt.lang.state import AsyncState as AsyncState
    from agentrt.lang.state import State as State
    from agentrt.lang.tools import Call as Call
    from agentrt.lang.tools import Tool as Tool
    from agentrt.lang.tools import ToolContext as ToolContext
    from agentrt.lang.tools import ToolError as ToolError
    from agentrt.lang.tools import ToolRetry as ToolRetry
    from agentrt.lang.tools import mcp_tools as mcp_tools
    from agentrt.lang.tools import tool as tool
    from agentrt.lang.values import CutValueError as CutValueError
    from agentrt.lang.values import InvalidValueError as InvalidValueError
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
    from agentrt.runtime import Runtime as Runtime

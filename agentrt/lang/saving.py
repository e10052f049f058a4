"""Suspend and resume: a state as plain values, in another process or days later; and trajectories for training.

What is saved is what the model has seen (ids, and what of them was fed, sampled or forced), the variables, and, if the program waits for
the approval of tool calls, where it stands. The body is not saved: whoever resumes appends what follows. Invariant: no text
is tokenised again; the resumed state's ids are the saved ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrt import backend as backends
from agentrt.backend import Backend
from agentrt.errors import UserError
from agentrt.lang import ir
from agentrt.lang.agent import Turns
from agentrt.lang.conversation import Message
from agentrt.lang.interpreter import Branch
from agentrt.lang.items import Item
from agentrt.lang.options import Sampling
from agentrt.lang.roles import chat_roles
from agentrt.lang.run import Run
from agentrt.lang.tools import Call, as_tools, plain
from agentrt.lang.transcript import CUT, FORCED, Overhang, Transcript
from agentrt.lang.values import document_type
from agentrt.lang.variables import Variable
from agentrt.lang.waiting import wait

if TYPE_CHECKING:
    from agentrt.lang.state import State

FORMAT = 1

_NODES: dict[str, type] = {"tool_call": ir.ToolCall, "agent_loop": ir.AgentLoop}


def snapshot(branch: Branch) -> dict[str, Any]:
    """The branch as plain values; it must be idle, or wait for an approval.

    Raises:
        UserError: It is one of a fork's branches.
    """
    if branch.path:
        raise UserError("only the state of a whole program can be saved, not one branch of a fork; join first")
    run, transcript = branch.run, branch.transcript
    return {
        "format": FORMAT,
        "program": run.name,
        "model": run.backend.capabilities.model,
        "seed": run.seed,
        "sampling": run.sampling.to_json(),
        "number": branch.number,
        "forks": branch.forks,
        "transcript": _transcript_values(transcript),
        "text": branch.feed.text,
        "messages": [
            {
                "role": m.role,
                "content": m.content(branch.feed.pieces),
                "open": m.end is None,
                "trims": m.trims,
                "suffix": list(m.suffix),
            }
            for m in branch.messages
        ],
        "tools": None if branch.roles.tools is None else list(branch.roles.tools),
        "offered": None if branch.offered is None else list(branch.offered),
        "variables": {name: _variable_values(v) for name, v in _settled(branch)},
        "turns": _turns_values(branch.item),
        "recording": run.recording.to_json(),
    }


def _settled(branch: Branch) -> list[tuple[str, Variable]]:
    return [(n, v) for n, v in branch.variables.items() if v.closed and v.error is None]


def _variable_values(variable: Variable) -> dict[str, Any]:
    value = variable.value
    calls = isinstance(value, list) and bool(value) and all(isinstance(part, Call) for part in value)
    return {"value": plain(value), "meta": plain(variable.meta), "calls": calls}


def _transcript_values(transcript: Transcript) -> dict[str, Any]:
    over = transcript.overhang
    return {
        "ids": list(transcript.ids),
        "kinds": list(transcript.kinds),
        "logprobs": {str(place): value for place, value in transcript.logprobs.items()},
        "pending": list(transcript.pending),
        "overhang": None if over is None else [over.text, over.keep, over.straddles],
        "ended": transcript.ended,
    }


def _turns_values(item: Item | None) -> dict[str, Any] | None:
    if item is None or not isinstance(item.state, Turns):
        return None
    node, turns = item.node, item.state
    kind = "agent_loop" if isinstance(node, ir.AgentLoop) else "tool_call"
    return {
        "kind": kind,
        "name": node.name,
        "tools": [tool.name for tool in node.tools],
        "choice": node.choice,
        "parallel": node.parallel,
        "sampling": plain(dict(node.sampling)),
        "max_steps": getattr(node, "max_steps", 1),
        "typed": getattr(node, "value", None) is not None,
        "number": item.number,
        "where": list(item.where),
        "step": turns.step,
        "calls": [plain(call) for call in turns.calls],
        "made": [plain(call) for call in turns.made],
    }


def resume(
    saved: Mapping[str, Any] | str | Path,
    *,
    backend: Backend | None = None,
    tools: Sequence[Any] = (),
    output_type: Any = None,
    on_event: Any = None,
) -> State:
    """Goes on from a saved state.

    Args:
        saved: What ``state.save()`` gave, or the file that it wrote.
        backend: Where to run; None for the default backend. It must have the same model: ids mean nothing to another.
        tools: The tools of a call or loop that was under way.
        output_type: The answer's type of a loop that was under way.
        on_event: As for `agent_loop`.

    Returns:
        The state; append to it and read it as in a program's body. If calls wait for approval, ``approve`` or ``deny`` them.

    Raises:
        UserError: It is no saved state, the model is another, or tools are missing.
    """
    from agentrt.lang.state import State

    values = _loaded(saved)
    backend = backend or backends.default_backend()
    if values["model"] != backend.capabilities.model:
        raise UserError(
            f"this state was saved with model {values['model']!r}; the backend has {backend.capabilities.model!r}",
            param="backend",
        )
    branch = _restored(values, backend)
    if values["turns"] is not None:
        branch.enqueue_item(_waiting_item(values["turns"], tools, output_type, on_event))
    return State(branch)


def _loaded(saved: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    values = json.loads(Path(saved).read_text(encoding="utf-8")) if isinstance(saved, str | Path) else saved
    if not isinstance(values, Mapping) or values.get("format") != FORMAT or "transcript" not in values:
        raise UserError(f"this is no state saved by this version (format {FORMAT})", param="saved")
    return values


def _restored(values: Mapping[str, Any], backend: Backend) -> Branch:
    from agentrt.lang.recording import Recording

    run = Run(backend, Sampling.from_json(values["sampling"], values["seed"]), name=values["program"])
    run.recording = Recording.from_json(dict(values["recording"]))
    branch = Branch(run)
    _fill(branch.transcript, values["transcript"])
    branch.feed.push(values["text"])
    seen = len(branch.feed.pieces)
    for m in values["messages"]:
        branch.messages.append(
            Message(m["role"], seen, None if m["open"] else seen, m["content"], m["trims"], tuple(m["suffix"]))
        )
    if values["tools"] is not None:
        branch.roles = chat_roles(backend.tokenizer).with_tools(values["tools"])
    branch.offered = None if values["offered"] is None else tuple(values["offered"])
    for name, kept in values["variables"].items():
        value = [Call(**call) for call in kept["value"]] if kept["calls"] else kept["value"]
        branch.assign(name, value, kept["meta"])
    branch.number, branch.forks = values["number"], values["forks"]
    return branch


def _fill(transcript: Transcript, values: Mapping[str, Any]) -> None:
    transcript.ids, transcript.kinds = values["ids"], bytearray(values["kinds"])
    transcript.logprobs = {int(place): value for place, value in values["logprobs"].items()}
    transcript.pending, transcript.ended = list(values["pending"]), values["ended"]
    transcript.overhang = None if values["overhang"] is None else Overhang(*values["overhang"])


def _waiting_item(values: Mapping[str, Any], tools: Sequence[Any], output_type: Any, on_event: Any) -> Item:
    given = {tool.name: tool for tool in as_tools(tools)} if tools else {}
    missing = [name for name in values["tools"] if name not in given]
    if missing:
        raise UserError(
            f"the saved state waits in a call with tools {missing}; pass them: resume(saved, tools=[...])",
            param="tools",
        )
    if values["typed"] and output_type is None:
        raise UserError(
            "the saved state waits in an agent_loop with an output_type; pass it: resume(saved, output_type=...)",
            param="output_type",
        )
    own: dict[str, Any] = {
        "name": values["name"],
        "tools": tuple(given[name] for name in values["tools"]),
        "choice": values["choice"],
        "parallel": values["parallel"],
        "sampling": values["sampling"],
    }
    if values["kind"] == "agent_loop":
        value = None if output_type is None else document_type(output_type)
        own |= {"max_steps": values["max_steps"], "value": value, "on_event": on_event}
    turns = Turns(values["step"], [Call(**call) for call in values["calls"]], [Call(**call) for call in values["made"]])
    variable = Variable(values["name"])
    return Item(_NODES[values["kind"]](**own), (variable,), tuple(values["where"]), values["number"], turns)


def trajectory(run: Run) -> list[dict[str, Any]]:
    """What a trainer needs of a run: per branch the ids as they were fed, where each came from, and a slot for a reward.

    Each record has ``program``, ``seed``, ``branch``, ``ids``, ``mask`` ("fed", "sampled" or "forced" for each id), ``cut`` (places of ids
    whose text a stop string hides in part), ``logprobs`` (None where they were not asked for), ``shared`` (leading ids that are the
    parent's) and ``reward`` (None).
    """
    names = ("fed", "sampled", "forced")
    records = []
    for branch in list(run.branches):
        if branch.error is None:
            wait(branch.look(lambda b: b.transcript.settle(b.run.tokenizer)))
        transcript = branch.transcript
        records.append(
            {
                "program": run.name,
                "seed": run.seed,
                "branch": branch.path,
                "ids": list(transcript.ids),
                "mask": [names[kind & (FORCED | 1)] for kind in transcript.kinds],
                "cut": [place for place, kind in enumerate(transcript.kinds) if kind & CUT],
                "logprobs": [transcript.logprobs.get(place) for place in range(len(transcript))],
                "shared": branch.shared_ids,
                "reward": None,
            }
        )
    return records

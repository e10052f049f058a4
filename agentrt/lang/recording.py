"""What a run remembers of itself: one `Call` per request, and what it takes to run it again (`Recording`).

It only remembers; `agentrt.observe.report` draws the picture, and it never changes what a program does,
except that a replay serves tool results and winners from a recording. Invariant: everything in here is plain values
that serialise to JSON.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from agentrt.backend import Tokenizer
from agentrt.errors import UserError
from agentrt.lang import ir
from agentrt.observe.report import Report, build_report, cost
from agentrt.request import Usage

if TYPE_CHECKING:
    from agentrt.lang.run import Run

FORMAT = 1


def report_of(run: Run) -> Report:
    """The report of a run, as far as it has come."""
    calls = [call.values(run.tokenizer) for call in list(run.calls)]
    branches = [
        {
            "path": branch.path,
            "tokens": len(branch.transcript),
            "shared_tokens": min(branch.shared_ids, len(branch.transcript)),
            "error": None if branch.error is None or branch.inherited else f"{type(branch.error).__name__}: {branch.error}",
        }
        for branch in list(run.branches)
    ]
    failed = run.branches[0].error
    return build_report(
        program=run.name,
        model=run.backend.capabilities.model,
        seed=run.seed,
        wall_seconds=run.clock() if run.ended is None else run.ended,
        calls=calls,
        tools=[asdict(tool) for tool in run.tool_runs],
        branches=branches,
        error=None if failed is None else f"{type(failed).__name__}: {failed}",
    )


class Call(NamedTuple):
    """One request that a program made, as little as there is to note; `values` has it in full.

    Attributes:
        branch: Path of the branch; "" is the trunk.
        number: Which node of the branch made it.
        name: Variable, or "".
        kind: "gen", "select", "tool_call" or "agent_loop".
        where: File and line of the statement.
        prompt_tokens: Length of its prompt.
        known_tokens: Leading part of the prompt that the program had computed before.
        first_new: Id of the first prompt token that the program had not computed before, or None.
        usage: What the backend says that it cost.
        began, ended: Seconds since the run began.
        finish_reason: Why it ended.
    """

    branch: str
    number: int
    name: str
    kind: str
    where: ir.Where
    prompt_tokens: int
    known_tokens: int
    first_new: int | None
    usage: Usage
    began: float
    ended: float
    finish_reason: str

    def values(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """The call as a report has it."""
        usage, first = self.usage, self.first_new
        return {
            "branch": self.branch,
            "number": self.number,
            "name": self.name,
            "kind": self.kind,
            "where": f"{self.where[0]}:{self.where[1]}",
            **cost(usage),
            "prompt_tokens": usage.prompt_tokens or self.prompt_tokens,
            "known_tokens": self.known_tokens,
            "first_new": None if first is None else tokenizer.decode([first], skip_special=False),
            "began": self.began,
            "ended": self.ended,
            "finish_reason": str(self.finish_reason),
        }


@dataclass(slots=True)
class ToolRun:
    """One tool call that a program made: its branch, tool name, begin and end in seconds since the run began, and error."""

    branch: str
    name: str
    began: float
    ended: float
    error: str | None = None


@dataclass(slots=True)
class Recording:
    """What it takes to run a program again with the same tokens.

    Attributes:
        program: Name of the @function.
        seed: The run's seed, from which every gen's is derived.
        results: "branch#number#call" -> outcome of a tool call.
        winners: "branch#fork" -> the order in which branches won (`first`, `as_completed`).
    """

    program: str
    seed: int
    results: dict[str, Any] = field(default_factory=dict)
    winners: dict[str, list[int]] = field(default_factory=dict)
    format: int = FORMAT

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Recording:
        """Reads what `to_json` wrote.

        Raises:
            UserError: It is of another format.
        """
        if values.get("format") != FORMAT:
            raise UserError(f"this recording has format {values.get('format')!r}; this version reads {FORMAT}")
        return cls(**values)

"""What a run remembers of itself: one `Call` per request, and what it takes to run it again (`Recording`).

It only remembers; `agentrt.observe.report` draws the picture, and it never changes what a program does,
except that a replay serves tool results and winners from a recording. Invariant: everything in here is plain values
that serialise to JSON.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from agentrt.errors import UserError
from agentrt.observe.report import Report, build_report

if TYPE_CHECKING:
    from agentrt.lang.run import Run

FORMAT = 1


def report_of(run: Run) -> Report:
    """The report of a run, as far as it has come."""
    tokenizer = run.tokenizer
    calls = []
    for call in list(run.calls):
        first = None if call.first_new is None else tokenizer.decode([call.first_new], skip_special=False)
        calls.append(asdict(call) | {"first_new": first})
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


@dataclass(slots=True)
class Call:
    """One request that a program made.

    Attributes:
        branch: Path of the branch; "" is the trunk.
        number: Which node of the branch made it.
        name: Variable, or "".
        kind: "gen", "select", "tool_call" or "agent_loop".
        where: "file:line" of the statement.
        prompt_tokens: Length of its prompt.
        known_tokens: Leading part of the prompt that the program had computed before.
        cached_tokens: Leading part of the prompt that the backend reused.
        first_new: Id of the first prompt token that the program had not computed before, or None.
        completion_tokens, forced_tokens, forward_passes, passes_saved: As in `Usage`.
        queue_seconds, run_seconds: As in `Usage`.
        began, ended: Seconds since the run began.
        finish_reason: Why it ended.
    """

    branch: str
    number: int
    name: str
    kind: str
    where: str
    prompt_tokens: int = 0
    known_tokens: int = 0
    cached_tokens: int = 0
    first_new: int | None = None
    completion_tokens: int = 0
    forced_tokens: int = 0
    forward_passes: int = 0
    passes_saved: int = 0
    queue_seconds: float = 0.0
    run_seconds: float = 0.0
    began: float = 0.0
    ended: float = 0.0
    finish_reason: str = ""


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

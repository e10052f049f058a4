"""The gen step: one request to the model, streamed into a variable, read as its type, asked again if it is not valid.

It runs inside a branch (see `agentrt.lang.interpreter`) and says only what a gen means; queues, forks and errors are
the branch's. Invariant: a variable gets either a whole value of its type or the error that the branch ends with.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from agentrt.lang import ir
from agentrt.lang.budget import Budget
from agentrt.lang.options import seeded
from agentrt.lang.reasoning import ReasoningSplitter
from agentrt.lang.run import ROOM, check_complete
from agentrt.lang.values import CutValueError, InvalidValueError, ValueType
from agentrt.request import Completion, FinishReason, Sample, SamplingParams

if TYPE_CHECKING:
    from agentrt.lang.interpreter import Branch
    from agentrt.lang.items import Item

Ask = Generator[Future[Any], Any, Completion]


def generate(branch: Branch, item: Item) -> Generator[Future[Any], Any, None]:
    """Runs a gen node."""
    node: ir.Gen = item.node
    attempt = 0
    while True:
        completion = yield from ask(
            branch, item, sampling_of(branch, item, attempt), _shows(branch, item), healing=_heals(branch, node)
        )
        try:
            values = [read_value(node.value, sample) for sample in completion.samples]
        except (InvalidValueError, CutValueError) as error:
            if attempt >= node.retries or not _has_room(branch):
                raise
            attempt += 1
            ask_again(branch, item, error)
            continue
        _settle(branch, item, completion, values)
        return


def sampling_of(branch: Branch, item: Item, attempt: int = 0) -> SamplingParams:
    """The parameters of a gen's request: its own, the run's defaults, the seed."""
    node: ir.Gen = item.node
    made, drawing = branch.run.sampling.of_gen(node)
    return made if drawing is None else seeded(drawing, branch.seed(item, attempt))


def ask(
    branch: Branch,
    item: Item,
    sampling: SamplingParams,
    show: Callable[[str], None] | None,
    *,
    healing: bool = False,
    kind: str = "gen",
) -> Ask:
    """Makes one request on the branch's prompt and appends its answer to the transcript; returns the completion.

    Raises:
        AgentrtError: The request's error.
        AbortedError: It was aborted.
    """
    reserved = 0
    if branch.budget.bounded:
        sampling, reserved = yield from _within_budget(branch.budget, sampling)
    try:
        ids, tail = branch.prompt(heal=healing)
        if branch.run.must_compact(len(ids), sampling.max_tokens):
            branch.compact(branch.run.compact)
            ids, tail = branch.prompt(heal=healing)
        request = branch.request(ids, sampling, tail=tail, seconds=getattr(item.node, "deadline", None))
        began = branch.run.clock()
        asking = branch.submit(request, show)
        completion: Completion = asking.result() if asking.done() else (yield asking)
        branch.record(item, kind, request, completion.usage, began, completion.finish_reason)
    finally:
        if reserved:
            branch.budget.release(reserved)
    check_complete(completion)
    branch.answered(completion, tail)
    return completion


def _within_budget(budget: Budget, sampling: SamplingParams) -> Generator[Future[Any], Any, tuple[SamplingParams, int]]:
    """Reserves what the answer may have; returns the parameters with their length cut to it, and what was reserved."""
    samples, limit = sampling.n, sampling.max_tokens
    if limit == 0:
        return sampling, 0
    reserved = yield from budget.reserve(None if limit is None else limit * samples, least=samples)
    each = reserved // samples
    if limit is None or each < limit:
        sampling = sampling.replace(max_tokens=each, min_tokens=min(sampling.min_tokens, each))
    return sampling, reserved


def _heals(branch: Branch, node: ir.Gen) -> bool:
    wanted = branch.run.healing if node.healing is None else node.healing
    return wanted and not branch.in_chat and branch.run.backend.capabilities.healing


def _shows(branch: Branch, item: Item) -> Callable[[str], None]:
    """What happens to text as it comes: readers of the variable and of the whole branch see it."""
    variable, feed = item.variable, branch.feed
    if variable is None or item.node.retries:  # an answer that may be asked for again is shown when it has passed
        return feed.push
    if item.node.reasoning is not None:
        splitter = ReasoningSplitter(item.node.reasoning, item.variables[0].push, variable.push)
        item.state = splitter

        def show_both(text: str) -> None:
            feed.push(text)
            splitter.push(text)

        return show_both

    def show(text: str) -> None:
        variable.push(text)
        feed.push(text)

    return show


def read_value(value: ValueType | None, sample: Sample) -> Any:
    """Reads a sample as its type; text stays text.

    Raises:
        CutValueError: It was cut before the value was complete; carries what there is.
        InvalidValueError: It is complete and not valid.
    """
    if value is None:
        return sample.text
    if sample.finish_reason is not FinishReason.STOP:
        raise CutValueError(
            f"the answer was cut ({sample.finish_reason}) after {len(sample.token_ids)} tokens, before its {value.label} was complete: "
            f"{sample.text[-80:]!r}; bound what may grow for ever (a string or list: Field(max_length=...)), or raise max_tokens if it was small",
            text=sample.text,
            partial=value.partial(sample.text),
            violations=(f"it was cut after {len(sample.token_ids)} tokens, before its end: write less",),
        )
    return value.parse(sample.text)


def _has_room(branch: Branch) -> bool:
    """Whether the context has room for being asked again; after an answer that ran to its end it has not."""
    return len(branch.transcript) + ROOM <= branch.run.backend.capabilities.max_context


def ask_again(branch: Branch, item: Item, error: InvalidValueError | CutValueError) -> None:
    """Appends what was wrong, in the model's own chat form if a message is open, so that the next answer can be better."""
    lines = "\n".join(f"- {line}" for line in error.violations)
    complaint = f"That is not a valid answer:\n{lines}\nAnswer again, with a valid one."
    if branch.in_chat:
        role = branch.messages[-1].role
        branch.end_message(role)
        branch.begin_message("user")
        branch.write(complaint)
        branch.end_message("user")
        branch.begin_message(role)
    else:
        branch.write(f"\n{complaint}\n")


def _settle(branch: Branch, item: Item, completion: Completion, values: list[Any]) -> None:
    variable = item.variable
    if variable is None:
        return
    value = values[0] if len(values) == 1 else values
    splitter = item.state
    if item.node.retries:
        variable.push(completion.text)
    if isinstance(splitter, ReasoningSplitter):
        splitter.finish()
        item.variables[0].settle(splitter.reasoning, completion, _metas)
        value = splitter.answer
    variable.settle(value, completion, _metas)


def _metas(completion: Completion) -> Any:
    metas = [meta_of(completion, sample) for sample in completion.samples]
    return metas[0] if len(metas) == 1 else metas


def meta_of(completion: Completion, sample: Sample) -> dict[str, Any]:
    """What a program may ask about an answer; the keys are SGLang's where it has one."""
    usage = completion.usage
    meta: dict[str, Any] = {
        "id": completion.request_id,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": len(sample.token_ids),
        "forced_tokens": sum(sample.forced),
        "finish_reason": {"type": str(sample.finish_reason), "matched": sample.stop_match},
        "output_ids": list(sample.token_ids),
    }
    if sample.logprobs is not None:
        meta["output_token_logprobs"] = [(t.logprob, t.token_id, None) for t in sample.logprobs]
        meta["output_top_logprobs"] = [[(p, i, None) for i, p in t.top] for t in sample.logprobs]
    if completion.prompt_logprobs is not None:
        meta["input_token_logprobs"] = [(t.logprob, t.token_id, None) for t in completion.prompt_logprobs]
        meta["input_top_logprobs"] = [[(p, i, None) for i, p in t.top] for t in completion.prompt_logprobs]
    return meta

"""Programs: what ``@function`` makes of a Python function, and how it is run.

A `Function` starts a `Run`, gives its body a state, and sees to the end: every branch has ended, every error is raised, the
backend is told. A synchronous body runs in the caller's thread, or parked on a worker when many run at once or the
caller wants a stream; an asynchronous one is a task. Invariant: `run` returns the state of a program that succeeded or
raises what it failed with; nothing is swallowed, and nothing it started is left running.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, overload

from agentrt import backend as backends
from agentrt.backend import Backend
from agentrt.errors import UserError
from agentrt.lang import batch, expressions, tracer
from agentrt.lang.budget import Budget
from agentrt.lang.interpreter import Branch
from agentrt.lang.options import ALIASES, RUN_FIELDS, Sampling, meant, sampling_fields
from agentrt.lang.recording import Recording
from agentrt.lang.run import Compact, Gate, Run
from agentrt.lang.state import AsyncState, Face, State
from agentrt.lang.waiting import await_future, in_background, on_loop, wait
from agentrt.observe import spans

P = ParamSpec("P")
R = TypeVar("R")

RUN_OPTIONS = frozenset(
    {"sampling", "backend", "stream", "deadline", "token_budget", "token_healing", "replay", "compact"}
)


@dataclass(slots=True)
class Plan:
    """One run that has not begun: the arguments for the body, the options for the run, and whose spans its own belong under.

    The runs of a batch share one `sampling`, and with it what was checked once.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    sampling: Sampling | None = None
    caller: Any = field(default_factory=spans.caller_context)


class Function(Generic[P, R]):
    """A program: a function whose first parameter is the state.

    Attributes:
        func: The Python function.
        bound: Arguments that `bind` has fixed.
    """

    def __init__(self, func: Callable[..., Any], bound: Mapping[str, Any] | None = None) -> None:
        functools.update_wrapper(self, func)
        self.func = func
        self.bound = dict(bound or {})
        self._signature = inspect.signature(func)
        parameters = list(self._signature.parameters.values())
        if not parameters or parameters[0].kind not in (
            parameters[0].POSITIONAL_ONLY,
            parameters[0].POSITIONAL_OR_KEYWORD,
        ):
            raise UserError(
                f"the program {func.__name__!r} needs a first parameter, which is its state: def {func.__name__}(s, ...)"
            )
        self._own = frozenset(p.name for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        self._open = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.is_async = inspect.iscoroutinefunction(func)

    def __repr__(self) -> str:
        return f"<agentrt program {self.name}{self._signature}>"

    @property
    def name(self) -> str:
        """The function's name."""
        return self.func.__name__

    # -------------------------------------------------------------------- running

    @overload
    def run(self, *args: P.args, **kwargs: P.kwargs) -> State: ...

    @overload
    def run(
        self,
        *args: Any,
        max_new_tokens: int = 128,
        n: int = 1,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        stop_regex: str | Sequence[str] | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        min_p: float = 0.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        ignore_eos: bool = False,
        return_logprob: bool | None = None,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        return_text_in_logprobs: bool | None = None,
        seed: int | None = None,
        sampling: Any = None,
        stream: bool = False,
        backend: Backend | None = None,
        deadline: float | None = None,
        token_budget: int | None = None,
        token_healing: bool | None = None,
        replay: Recording | None = None,
        compact: Compact | None = None,
        **kwargs: Any,
    ) -> State: ...

    def run(self, *args: Any, **kwargs: Any) -> State:
        """Runs the program and returns its state.

        Keywords that are the program's own parameters go to the program. The others are:

        Args:
            *args: The program's arguments, after the state.
            max_new_tokens, n, stop, temperature, ...: Defaults for every gen: fields of `SamplingParams`, and SGLang's names.
            seed: From which every gen's seed derives; the same seed gives the same output, whatever else runs.
            sampling: A `SamplingParams` that holds the defaults instead.
            backend: Where to run; None for the default backend.
            stream: Return the state at once; read it with ``text_iter``; errors are raised by whatever is read.
            deadline: Seconds that the whole run may take.
            token_budget: Tokens that the whole run may generate.
            token_healing: Let a gen complete the last bytes of plain text before it, in whichever tokens the model likes. On by default,
                but off inside chat messages, and off for programs whose module imports agentrt as ``sgl``.
            compact: Called when the context is nearly full, with the chat's messages in groups that belong together (a turn's tool
                calls and their results are one); returns the groups to keep. The chat is then written anew from them.
            replay: A recording of an earlier run: its seed, tool results and winners are used again.
            **kwargs: The program's keyword arguments.

        Raises:
            UserError: An option is unknown or wrong.
            Exception: Whatever the program failed with: its own exceptions, the backend's, with the program's source line as a note.
        """
        plan = self.plan(args, kwargs)
        stream = plan.options.pop("stream", False)
        trunk = self.begin(plan)
        if stream:
            self.in_background(trunk, plan)
        elif self.is_async:
            wait(on_loop(self.aperform(trunk, plan)))
        else:
            self.perform(trunk, plan)
        return State(trunk, inside=False)

    async def arun(self, *args: Any, **kwargs: Any) -> State:
        """Runs the program from asynchronous code; see `run`. Cancelling the task cancels the program."""
        plan = self.plan(args, kwargs)
        stream = plan.options.pop("stream", False)
        trunk = self.begin(plan)
        if stream:
            self.in_background(trunk, plan)
        elif self.is_async:
            await self.aperform(trunk, plan)
        else:
            try:
                await await_future(in_background(lambda: self.perform(trunk, plan)))
            except BaseException:
                trunk.run.cancel("the task that awaited the program was cancelled")
                raise
        return State(trunk, inside=False)

    @overload
    def run_batch(
        self,
        batch_arguments: Sequence[Mapping[str, Any] | Sequence[Any]],
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: Literal[False] = False,
        *,
        return_exceptions: Literal[False] = False,
        **options: Any,
    ) -> list[State]: ...

    @overload
    def run_batch(
        self,
        batch_arguments: Sequence[Mapping[str, Any] | Sequence[Any]],
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        *,
        generator_style: Literal[True],
        return_exceptions: Literal[False] = False,
        **options: Any,
    ) -> Iterator[State]: ...

    @overload
    def run_batch(
        self,
        batch_arguments: Sequence[Mapping[str, Any] | Sequence[Any]],
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        *,
        return_exceptions: bool = False,
        **options: Any,
    ) -> Any: ...

    def run_batch(
        self,
        batch_arguments: Sequence[Mapping[str, Any] | Sequence[Any]],
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        *,
        return_exceptions: bool = False,
        **options: Any,
    ) -> Any:
        """Runs the program for each set of arguments, all at once, and returns the states in order.

        What the programs' first prompts have in common is computed once, before any of them goes on.

        Args:
            batch_arguments: One mapping of keyword arguments, or sequence of positional ones, for each run.
            num_threads: Most programs under way at one time; "auto" for all of them. (None of them has a thread of its own.)
            progress_bar: Show how many are done.
            generator_style: Return an iterator over the states, in order, each as soon as it and those before it are done.
            return_exceptions: Put the error of a program that failed in place of its state; without it, the first error is raised
                when all have ended.
            **options: As for `run`.

        Raises:
            UserError: The arguments are no such list, or an option is wrong.
        """
        shared = self.plan_options(options)
        shared.pop("stream", None)
        sampling = _sampling_of(shared)
        plans = [self._batch_plan(arguments, shared, sampling) for arguments in _listed(batch_arguments)]
        done = batch.run_plans(self, plans, num_threads, progress_bar)
        if generator_style:
            return batch.in_order(done, return_exceptions)
        return batch.all_of(done, return_exceptions)

    def _batch_plan(
        self, arguments: Mapping[str, Any] | Sequence[Any], shared: dict[str, Any], sampling: Sampling
    ) -> Plan:
        if isinstance(arguments, Mapping):
            plan = self.plan((), {**arguments})
        elif isinstance(arguments, tuple | list):
            plan = self.plan(tuple(arguments), {})
        else:
            raise UserError(
                f"run_batch takes dicts or tuples of arguments; one of them is {arguments!r:.60}",
                param="batch_arguments",
            )
        if plan.options:
            plan.options = shared | plan.options
            plan.options.pop("stream", None)
        else:
            plan.options, plan.sampling = shared, sampling
        return plan

    @overload
    def __call__(self, state: State, /, *args: P.args, **kwargs: P.kwargs) -> R: ...

    @overload
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[misc]  # it takes whatever P may be
        """With a state as first argument: runs the body on that state, as a part of the caller's program, and returns what it returns.

        Without one, the same as `run`.
        """
        if not args or not isinstance(args[0], Face | tracer.TraceState):
            return self.run(*args, **kwargs)
        state, rest, named = args[0], args[1:], {**self.bound, **kwargs}
        if isinstance(state, AsyncState) and not self.is_async:
            body = State(state._branch)
            return await_future(in_background(lambda: self.func(body, *rest, **named)))
        if isinstance(state, State) and self.is_async:
            return wait(on_loop(self.func(AsyncState(state._branch), *rest, **named)))
        return self.func(state, *rest, **named)

    def bind(self, **arguments: Any) -> Function[..., R]:
        """Returns the program with some of its arguments fixed.

        Raises:
            UserError: It has no such parameter.
        """
        for name in arguments:
            if name not in self._own and not self._open:
                raise UserError(
                    f"{self.name} has no parameter {name!r}; it has {', '.join(sorted(self._own)) or 'none'}",
                    param=name,
                )
        return Function(self.func, {**self.bound, **arguments})

    def replay(self, recording: Recording, *args: Any, **kwargs: Any) -> State:
        """Runs the program again with a recording's seed, tool results and winners: the same tokens, and no tool is called."""
        return self.run(*args, replay=recording, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> tracer.Trace:
        """Runs the body once without a model and returns the nodes it appends. The body's side effects happen.

        Variables read as placeholders; where the body decides by one, the trace ends and says so.
        """
        return tracer.trace(self.func, args, {**self.bound, **kwargs}, self.is_async)

    def cache(self, *args: Any, backend: Backend | None = None, **kwargs: Any) -> int:
        """Computes the constant text before the program's first gen, so that later runs find it in the cache.

        The body is run once without a model (see `trace`); arguments that are not given stand for unknown text, which ends the prefix.

        Returns:
            Tokens of the prefix.
        """
        given = self._with_unknowns(args, {**self.bound, **kwargs})
        traced = tracer.trace(self.func, given.args, given.kwargs, self.is_async)
        return tracer.cache_prefix(traced, backend or backends.default_backend(), self.name)

    def _with_unknowns(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        bound = self._signature.bind_partial(None, *args, **kwargs)
        for name, parameter in list(self._signature.parameters.items())[1:]:
            if name not in bound.arguments and parameter.default is parameter.empty and name in self._own:
                bound.arguments[name] = tracer.unknown(name)
        return Plan(bound.args[1:], bound.kwargs)

    # ----------------------------------------------------------------- one run

    def plan(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan:
        """Tells the program's arguments from the run's options, and checks both before anything starts.

        Raises:
            UserError: A keyword is neither.
            TypeError: The arguments do not fit the program's parameters.
        """
        own = {name: value for name, value in kwargs.items() if name in self._own}
        rest = {name: value for name, value in kwargs.items() if name not in self._own}
        if self._open:
            own |= {name: value for name, value in rest.items() if not _is_option(name)}
            rest = {name: value for name, value in rest.items() if _is_option(name)}
        named = {**self.bound, **own}
        try:
            self._signature.bind(None, *args, **named)
        except TypeError as error:
            raise TypeError(f"{self.name}{self._signature}: {error}") from None
        return Plan(args, named, self.plan_options(rest))

    def plan_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Checks a run's options.

        Raises:
            UserError: One is unknown.
        """
        for name in options:
            if not _is_option(name):
                known = (*self._own, *RUN_FIELDS, *ALIASES, *RUN_OPTIONS)
                raise UserError(
                    f"{name!r} is neither a parameter of {self.name}{self._signature} nor an option of a run{meant(name, known)}",
                    param=name,
                )
        return dict(options)

    def begin(self, plan: Plan, gate: Gate | None = None) -> Branch:
        """Starts a run and returns its trunk; the body has not begun."""
        options = plan.options
        backend = _checked(options.get("backend") or backends.default_backend())
        run_options = {name: options[name] for name in RUN_OPTIONS if options.get(name) is not None}
        run = Run(
            backend,
            plan.sampling or _sampling_of(options),
            name=self.name,
            budget=Budget(None, run_options.get("token_budget"), run_options.get("deadline")),
            gate=gate,
            replay=run_options.get("replay"),
            compact=run_options.get("compact"),
            healing=run_options.get("token_healing", not self._written_for_sgl()),
            caller=plan.caller,
        )
        return Branch(run)

    def _written_for_sgl(self) -> bool:
        """Whether the program's module knows agentrt as ``sgl``: it then expects text before a gen to stay as it is."""
        known_as = getattr(self.func, "__globals__", {}).get("sgl")
        return known_as is not None and known_as is sys.modules.get("agentrt")

    def perform(self, trunk: Branch, plan: Plan) -> None:
        """Runs a synchronous body to the end of everything that it started.

        Raises:
            BaseException: What it failed with.
        """
        run = trunk.run
        try:
            run.ret_value = self.func(State(trunk), *plan.args, **plan.kwargs)
            for branch in _unfinished(run):
                _ended(branch, wait)
        except BaseException as error:
            _fail(run, error)
            raise
        run.close()

    async def aperform(self, trunk: Branch, plan: Plan) -> None:
        """The asynchronous twin of `perform`."""
        run = trunk.run
        try:
            run.ret_value = await self.func(AsyncState(trunk), *plan.args, **plan.kwargs)
            for branch in _unfinished(run):
                try:
                    await await_future(branch.mark())
                except Exception as error:
                    _raise_unless_known(branch, error)
        except BaseException as error:
            _fail(run, error)
            raise
        run.close()

    def in_background(self, trunk: Branch, plan: Plan) -> Any:
        """Runs the body on a worker or on the loop; returns the future of its end."""
        if self.is_async:
            return on_loop(self.aperform(trunk, plan))
        return in_background(lambda: self.perform(trunk, plan))


def _sampling_of(options: Mapping[str, Any]) -> Sampling:
    own = {name: value for name, value in options.items() if name not in RUN_OPTIONS}
    return Sampling(sampling_fields(own), options.get("sampling"))


def _checked(backend: Any) -> Backend:
    if not hasattr(backend, "submit"):
        raise UserError(
            f"backend is {backend!r:.80}; it must be one: Engine(), RuntimeEndpoint(url), OpenAI(model, base_url), ScriptedBackend(...)",
            param="backend",
        )
    made: Backend = backend
    return made


def _is_option(name: str) -> bool:
    return name in RUN_FIELDS or name in ALIASES or name in RUN_OPTIONS


def _listed(arguments: Any) -> list[Any]:
    if isinstance(arguments, Mapping | str) or not hasattr(arguments, "__iter__"):
        raise UserError("run_batch takes a list of dicts (or tuples), one for each run", param="batch_arguments")
    return list(arguments)


def _unfinished(run: Run) -> Iterator[Branch]:
    """The branches, also those that appear meanwhile."""
    place = 0
    while place < len(run.branches):
        yield run.branches[place]
        place += 1


def _ended(branch: Branch, waiting: Callable[[Any], Any]) -> None:
    try:
        waiting(branch.mark())
    except Exception as error:
        _raise_unless_known(branch, error)


def _raise_unless_known(branch: Branch, error: Exception) -> None:
    """Raises a branch's error, unless the body was shown it, it is the parent's, or the branch was cancelled on purpose."""
    if not branch.path or not (branch.seen or branch.inherited or branch.cancelled):
        raise error


def _fail(run: Run, error: BaseException) -> None:
    for branch in run.branches:
        if branch.error is None:
            branch.inherited = bool(branch.path)
            branch.fail(error)
    run.close(error)


@overload
def function(func: Callable[Concatenate[Any, P], R], num_api_spec_tokens: int | None = None) -> Function[P, R]: ...


@overload
def function(
    func: None = None, num_api_spec_tokens: int | None = None
) -> Callable[[Callable[Concatenate[Any, P], R]], Function[P, R]]: ...


def function(func: Any = None, num_api_spec_tokens: int | None = None) -> Any:
    """Makes a program of a function whose first parameter is the state.

    Args:
        func: A function, ``def`` or ``async def``.
        num_api_spec_tokens: Accepted for SGLang's sake; changes nothing here.

    Raises:
        UserError: The function has no first parameter.
    """
    if num_api_spec_tokens is not None:
        expressions.warn_unused(
            "num_api_spec_tokens", "it saves calls to paid endpoints; the engine reuses prefixes by itself"
        )
    return Function if func is None else Function(func)

"""``agentrt`` on the command line: each command is in a file of its own and loaded when it is called, so that help is instant."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from agentrt.errors import AgentrtError

app = typer.Typer(
    name="agentrt",
    help="A runtime for LLM agent programs: one radix tree of KV, programs the engine can see, JSON that always parses.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(help="What models there are, where, and how large.", invoke_without_command=True)
schema_app = typer.Typer(help="What a JSON Schema would do to a request.", no_args_is_help=True)
app.add_typer(models_app, name="models")
app.add_typer(schema_app, name="schema")

ANSWER, BATCH, ENGINE, WHERE, REQUESTS = "Answer", "Batch", "Engine", "Where", "Requests"

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Short name, folder, .gguf file or hf:org/name.", show_default="smollm2-135m", rich_help_panel=ENGINE),
]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16, int8 or int4.", rich_help_panel=ENGINE)]
KvTokens = Annotated[int | None, typer.Option(min=1, help="Token slots of the KV store.", show_default="what fits", rich_help_panel=ENGINE)]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of torch.", show_default="torch's own", rich_help_panel=ENGINE)]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", "-n", min=0, help="Most tokens of an answer.", rich_help_panel=ANSWER)]
Temperature = Annotated[
    float | None, typer.Option("--temperature", "-t", min=0.0, help="0 is greedy.", show_default="the model's", rich_help_panel=ANSWER)
]
Seed = Annotated[int | None, typer.Option(help="Same seed, same answer.", rich_help_panel=ANSWER)]
System = Annotated[str | None, typer.Option("--system", "-s", help="A system message to begin with.", rich_help_panel=ANSWER)]


@app.command()
def demo() -> None:
    """Runs a ReAct agent with real tools, and the same without cache and jump-forward beside it."""
    from agentrt.cli.demo import run

    run()


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The question; '-' reads it from standard input.")] = None,
    system: System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.", rich_help_panel=ANSWER)] = False,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = None,
    seed: Seed = None,
    schema: Annotated[Path | None, typer.Option(help="A JSON Schema that the answer must satisfy.", rich_help_panel=ANSWER)] = None,
    regex: Annotated[str | None, typer.Option(help="A pattern that the answer must match.", rich_help_panel=ANSWER)] = None,
    file: Annotated[Path | None, typer.Option(help="One JSON object a line, with prompt or messages.", rich_help_panel=BATCH)] = None,
    out: Annotated[Path | None, typer.Option(help="Where the answers go; a second run goes on where it stopped.", rich_help_panel=BATCH)] = None,
    model: Model = None,
    dtype: Dtype = "auto",
    kv_tokens: KvTokens = None,
    threads: Threads = None,
    record_trace: Annotated[Path | None, typer.Option(help="Record a trace, for `agentrt simulate`.", rich_help_panel=ENGINE)] = None,
) -> None:
    """Answers a prompt as it is generated, or a file of prompts. The exit status is 1 if one of them failed."""
    from agentrt.cli.generate import Options, one

    options = Options(
        model=model,
        system=system,
        raw=raw,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        schema=schema,
        regex=regex,
        dtype=dtype,
        kv_tokens=kv_tokens,
        threads=threads,
        record_trace=record_trace,
    )
    if file is None:
        one(prompt, options)
        return
    from agentrt.cli.batch import run

    raise typer.Exit(int(run(file, out, options) > 0))


@app.command()
def chat(
    system: System = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    seed: Seed = None,
    model: Model = None,
    dtype: Dtype = "auto",
    kv_tokens: KvTokens = None,
    threads: Threads = None,
) -> None:
    """Talks with the model; every turn reuses the ones before it."""
    from agentrt.cli.chat import run
    from agentrt.cli.generate import Options

    run(
        Options(
            model=model,
            system=system,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            dtype=dtype,
            kv_tokens=kv_tokens,
            threads=threads,
        )
    )


@app.command()
def doctor() -> None:
    """Looks at the machine, torch and the model cache; says what is wrong and how to mend it."""
    from agentrt.cli.doctor import run

    raise typer.Exit(run())


@models_app.callback()
def models(context: typer.Context) -> None:
    """What models there are, where, and how large."""
    if context.invoked_subcommand is None:
        from agentrt.cli.models import show

        show()


@models_app.command()
def fetch(
    names: Annotated[list[str], typer.Argument(help="Short names, or hf:org/name.")],
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Fetches models into the cache, and makes them ready to run."""
    from agentrt.cli.models import fetch as command

    for name in names:
        command(name, quiet=quiet)


@models_app.command()
def remove(name: Annotated[str, typer.Argument(help="Short name.")]) -> None:
    """Deletes a model from the cache."""
    from agentrt.cli.models import remove as command

    command(name)


@schema_app.command()
def check(file: Annotated[str, typer.Argument(help="A file; '-' reads standard input.")]) -> None:
    """Prints what is enforced, checked or refused, keyword by keyword."""
    from agentrt.cli.schema import check as command

    raise typer.Exit(command(file))


@schema_app.command(name="compile")
def compile_schemas(files: Annotated[list[str], typer.Argument(help="Files; '-' reads standard input.")]) -> None:
    """Compiles schemas ahead of time to automata, where requests with engine="fsm" find them."""
    from agentrt.cli.schema import compile_files

    compile_files(files)


def _serving(metavar: str, text: str, panel: str, *names: str, **more: Any) -> Any:
    """An option of `serve`, on one line of a screen of 80 columns, its default in its text: there are many."""
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=panel, show_default=False, show_envvar=False, **more)


@app.command()
def serve(
    model: Annotated[str | None, _serving("NAME", "smollm2-135m, a name, folder, .gguf.", ENGINE, "--model", "-m")] = None,
    dtype: Annotated[str, _serving("NAME", "auto, float32, bfloat16, int8 or int4.", ENGINE)] = "auto",
    max_total_tokens: Annotated[int | None, _serving("N", "Slots of the KV store; what fits.", ENGINE, min=1)] = None,
    kv_tokens: Annotated[int | None, _serving("N", "The same, as elsewhere.", ENGINE, min=1)] = None,
    threads: Annotated[int | None, _serving("N", "Threads of torch; its own choice.", ENGINE, min=1)] = None,
    max_running: Annotated[int | None, _serving("N", "Most sequences in one step.", ENGINE)] = None,
    chunk_size: Annotated[int | None, _serving("N", "Most new tokens in one step.", ENGINE)] = None,
    schedule_policy: Annotated[str | None, _serving("NAME", "fcfs, lpm, dfs or program.", ENGINE)] = None,
    no_radix_cache: Annotated[bool, typer.Option("--no-radix-cache", help="Keep no prefixes.", rich_help_panel=ENGINE)] = False,
    record_trace: Annotated[str | None, _serving("FILE", "For `agentrt simulate`.", ENGINE)] = None,
    host: Annotated[str, _serving("NAME", "Address to bind; 127.0.0.1.", WHERE)] = "127.0.0.1",
    port: Annotated[int, _serving("N", "8000; 0 takes a free one.", WHERE)] = 8000,
    api_key: Annotated[str | None, _serving("KEY", "What clients send; AGENTRT_API_KEY.", WHERE, envvar="AGENTRT_API_KEY")] = None,
    served_model_name: Annotated[list[str] | None, _serving("NAME", "What requests call it; repeatable.", WHERE)] = None,
    max_queued: Annotated[int, _serving("N", "Waiting before a 503; 1024.", REQUESTS)] = 1024,
    drain_timeout: Annotated[float, _serving("SECONDS", "For what runs, after SIGTERM; 30.", REQUESTS)] = 30.0,
    tool_format: Annotated[str, _serving("NAME", "How it writes calls; auto.", REQUESTS)] = "auto",
    named_tool_finish: Annotated[str, _serving("WORD", "stop (as OpenAI) or tool_calls.", REQUESTS)] = "stop",
    log_format: Annotated[str, _serving("WORD", "text or json.", REQUESTS)] = "text",
) -> None:
    """Serves a model in OpenAI's protocol, with tools, schemas and an inspector."""
    from agentrt.cli.serve import run
    from agentrt.config import ServerConfig

    config = ServerConfig(
        host=host,
        port=port,
        api_key=api_key,
        model_names=tuple(served_model_name or ()),
        tool_format=tool_format,
        named_tool_finish=named_tool_finish,  # type: ignore[arg-type]
        queued=max_queued,
        drain_seconds=drain_timeout,
        log_format=log_format,  # type: ignore[arg-type]
    )
    status = run(
        model,
        config,
        dtype=dtype,
        kv_tokens=max_total_tokens or kv_tokens,
        threads=threads,
        max_running=max_running,
        step_tokens=chunk_size,
        policy=schedule_policy,
        prefix_cache=not no_radix_cache,
        record_trace=record_trace,
    )
    raise typer.Exit(status)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="A Python file with agent programs; what follows it is its own.")],
    model: Model = None,
    report: Annotated[Path | None, typer.Option(help="Write the programs' report as a page.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the programs' report as JSON.")] = None,
) -> None:
    """Runs a file of agent programs, and reports what was reused, recomputed and why."""
    from agentrt.cli.run import run as command

    command(file, tuple(context.args), model=model, report=report, trace=trace)


@app.command()
def simulate(
    trace: Annotated[str, typer.Argument(help="A file in agentrt's or Mooncake's form, or a generated workload's name.")],
    policy: Annotated[str | None, typer.Option(help="fcfs, lpm, dfs or program.", show_default="program")] = None,
    eviction: Annotated[str | None, typer.Option(help="lru, lfu, slru, adaptive or program.", show_default="program")] = None,
    pool: Annotated[int | None, typer.Option(help="Token slots of the KV store.", show_default="131072")] = None,
    cost_model: Annotated[str | None, typer.Option(help="A preset, a JSON file of prices, or a recorded trace to fit.", show_default="gpu-8b")] = None,
    page_size: Annotated[int | None, typer.Option(help="Tokens a page.", show_default="what suits the trace")] = None,
    step_tokens: Annotated[int | None, typer.Option(help="Most new tokens in one step.")] = None,
    max_running: Annotated[int | None, typer.Option(help="Most sequences in one step.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of a generated workload.")] = None,
    rate: Annotated[float | None, typer.Option(help="Programs a second of a generated workload.")] = None,
    programs: Annotated[int | None, typer.Option(help="How many programs of a generated workload.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the report as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as a page.")] = None,
) -> None:
    """Runs the real scheduler, tree and pool on a trace, without a model, in virtual time."""
    from agentrt.cli.simulate import run

    run(
        trace,
        out=out,
        html=html,
        policy=policy,
        eviction=eviction,
        pool=pool,
        cost=cost_model,
        page_size=page_size,
        step_tokens=step_tokens,
        max_running=max_running,
        seed=seed,
        rate=rate,
        programs=programs,
    )


def main() -> None:
    """The console script: errors of ours are a message, not a traceback."""
    raise SystemExit(guarded(app))


def guarded(command: Callable[[], Any]) -> int:
    """Runs a command; returns its exit status."""
    try:
        command()
    except AgentrtError as error:
        from agentrt.cli.console import complain

        complain(error)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0
    return 0

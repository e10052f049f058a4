"""What a user may set, as frozen dataclasses that compose; resolved once, by the composition root, and never changed.

``None`` means "a sensible choice for this machine and model"; the room that uses the value says which. Every bound on
per-request memory stands here (`Limits`), with the reason for its default.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from agentrt.errors import UserError

Dtype = Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"]
AttentionChoice = Literal["auto", "torch", "triton"]
Policy = Literal["fcfs", "lpm", "dfs", "program"]
Eviction = Literal["lru", "lfu", "slru", "adaptive", "program"]


def _at_least(name: str, value: float | None, low: float) -> None:
    if value is not None and not value >= low:
        raise UserError(f"{name} is {value!r}; it must be at least {low:g}", param=name)


def _whole(name: str, value: int | None, low: int) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise UserError(f"{name} is {value!r}; it must be a whole number", param=name)
    _at_least(name, value, low)


def _one_of(name: str, value: str, kind: object) -> None:
    if value not in get_args(kind):
        raise UserError(f"{name} is {value!r}; it must be one of {', '.join(get_args(kind))}", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The page pool and the radix tree.

    Attributes:
        kv_tokens: Token slots in the KV store; None: what a share of the free memory holds.
        page_size: Tokens a page; None: 1 on a CPU, 16 on a GPU.
        prefix_cache: Keep computed prefixes for later requests.
        eviction: Which cached prefixes go first when memory is needed.
        hold_share: Largest share of the pool that holds of waiting programs may keep from eviction.
        hold_seconds: How long such a hold lasts at most.
        check: Check the slot equation after every step, not only when idle (tests).
    """

    kv_tokens: int | None = None
    page_size: int | None = None
    prefix_cache: bool = True
    eviction: Eviction = "program"
    hold_share: float = 0.5
    hold_seconds: float = 60.0
    check: bool = False

    def __post_init__(self) -> None:
        _whole("kv_tokens", self.kv_tokens, 1)
        _whole("page_size", self.page_size, 1)
        _one_of("eviction", self.eviction, Eviction)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The order and the size of steps.

    Attributes:
        policy: In which order waiting requests are admitted.
        step_tokens: Most new tokens in one step, over all sequences; None: 512 on a CPU, 2,048 on a GPU.
        prefill_tokens: Most of those that prefill chunks may take while other sequences decode, so that a long
            prompt does not stall them; None: half of `step_tokens`.
        max_running: Most sequences in one step; None: 64 on a CPU, 256 on a GPU.
        max_wait: Seconds of waiting after which the oldest request gets one of every 16 admissions, whatever the policy says.
    """

    policy: Policy = "program"
    step_tokens: int | None = None
    prefill_tokens: int | None = None
    max_running: int | None = None
    max_wait: float = 5.0

    def __post_init__(self) -> None:
        _whole("step_tokens", self.step_tokens, 1)
        _whole("prefill_tokens", self.prefill_tokens, 1)
        _whole("max_running", self.max_running, 1)
        _one_of("policy", self.policy, Policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on what one request may hold; each is refused at the door with both numbers.

    Attributes:
        queued: Requests waiting, all together (a request holds its prompt: 8 bytes a token).
        n: Samples a request.
        logprobs: Alternatives a token.
        stops: Stop strings, patterns and stop tokens a request.
        stop_length: Characters of one stop string or pattern.
        logit_bias: Entries a request.
        prompt_tail: Bytes of text that an answer may have to complete.
        resamples: Times that an answer which fails its final check may be generated anew.
        grammar_bytes: Size of a constraint's source.
        grammar_seconds: Time to compile one constraint.
        grammar_cache_bytes: Source size of all compiled constraints that are kept.
        grammar_cache_count: How many compiled constraints are kept.
    """

    queued: int = 100_000
    n: int = 1024
    logprobs: int = 64
    stops: int = 64
    stop_length: int = 1024
    logit_bias: int = 4096
    prompt_tail: int = 1024
    resamples: int = 100
    grammar_bytes: int = 2_000_000
    grammar_seconds: float = 5.0
    grammar_cache_bytes: int = 64_000_000
    grammar_cache_count: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine is made from.

    Attributes:
        model: Short name, folder, .gguf file or "hf:org/name"; None: the default model.
        dtype: Arithmetic of weights and activations. "int8" and "int4": bits of the matrices' weights; on a CPU activations have 8
            bits in the products and the rest is in float32, on a GPU they have 16 (this needs Triton). "auto": "int4" for a model
            whose file holds it in few bits, as they are (CPU), else bfloat16 where the processor multiplies it natively, else float32.
        device: "auto", "cpu" or "cuda".
        attention: "torch": operators, anywhere. "triton": kernels, on a GPU. "auto": kernels
            where they can be had, Triton's on a GPU and native ones on a CPU.
        threads: Threads of torch; None: torch's own choice.
        max_context: Shortens the model's context; None: the model's own.
        record_trace: File to record a trace to, for `agentrt simulate`; it holds every prompt's token ids. None: none.
        cache, scheduler, limits: See there.
    """

    model: str | None = None
    dtype: Dtype = "auto"
    device: str = "auto"
    attention: AttentionChoice = "auto"
    threads: int | None = None
    max_context: int | None = None
    record_trace: str | None = None
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, Dtype)
        _one_of("attention", self.attention, AttentionChoice)
        _whole("threads", self.threads, 1)
        _whole("max_context", self.max_context, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How an engine is served over HTTP, and every bound on what a client may make the server hold.

    Attributes:
        host: Address to bind; this machine alone unless told otherwise.
        port: 0 takes a free one.
        api_key: What clients must send as a bearer token or as x-api-key; None: anyone may ask.
        model_names: Names that requests may use; the first one is shown. Empty: the engine's own.
        tool_format: How the model writes calls of tools; "auto": guessed from its chat template.
        reasoning: "auto": a model whose template thinks has its thinking told apart; "off": it is plain text.
        named_tool_finish: finish_reason of an answer to a named tool_choice; "stop" is what OpenAI says.
        queued: Requests that wait, beyond those that run, before more are refused with 503.
        body_bytes: Size of a body (a long chat is a few megabytes).
        bodies_bytes: Size of all bodies together that are being read or wait for their answer to begin.
        json_values, json_depth: Values in one body, and how deep they nest: a small body can parse to a large heap.
        header_bytes: Size of the request line and all headers.
        connections: Open at a time; one more is told to come back.
        read_seconds: How long a client may take to send its headers, and its body; a second more for every 64 kB that came.
        n: Samples and prompts of one call, multiplied.
        messages: Messages of one chat.
        tools: Tools of one chat (tools' size is bounded as a constraint's is, see `Limits`).
        stored_responses: Answers of /v1/responses that are kept; the oldest go first.
        stored_bytes: Their size, all together.
        remembered_tokens: Tokens of answers that are remembered as they were fed, so that a history sent back as text
            is found in the cache; 0 for none.
        programs: Programs whose report is kept.
        drain_seconds: How long running requests may take after SIGTERM.
        silence_seconds: How long the engine may leave a question unanswered before /health says so; longer than a step.
        keep_alive_seconds: After this long without an event a stream gets a comment, so that proxies keep it open.
        stall_seconds: After this long without reading anything, a client is taken for lost.
        log_format: Of the access log.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    model_names: tuple[str, ...] = ()
    tool_format: str = "auto"
    reasoning: Literal["auto", "off"] = "auto"
    named_tool_finish: Literal["stop", "tool_calls"] = "stop"
    queued: int = 1024
    body_bytes: int = 32_000_000
    bodies_bytes: int = 512_000_000
    json_values: int = 2_000_000
    json_depth: int = 128
    header_bytes: int = 65_536
    connections: int = 4096
    read_seconds: float = 30.0
    n: int = 128
    messages: int = 16_384
    tools: int = 1024
    stored_responses: int = 1024
    stored_bytes: int = 64_000_000
    remembered_tokens: int = 1_000_000
    programs: int = 1024
    drain_seconds: float = 30.0
    silence_seconds: float = 60.0
    keep_alive_seconds: float = 15.0
    stall_seconds: float = 60.0
    log_format: Literal["text", "json"] = "text"

    def __post_init__(self) -> None:
        for name in ("queued", "port", "remembered_tokens"):
            _at_least(name, getattr(self, name), 0)
        for name in ("body_bytes", "bodies_bytes", "json_values", "json_depth", "header_bytes", "connections", "n", "messages", "tools", "stored_responses", "stored_bytes", "programs"):
            _at_least(name, getattr(self, name), 1)
        for name in ("read_seconds", "stall_seconds", "keep_alive_seconds"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} is {getattr(self, name)}; it must be above 0", param=name)
        if self.api_key is not None and not self.api_key.strip():
            raise UserError("api_key is empty; leave it out, or give one", param="api_key")

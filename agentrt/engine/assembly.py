"""Builds an engine from a config and a model folder: what "a sensible choice for this machine" means is decided here."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch

from agentrt.attention.native_cpu import NativeAttention, cpu_attention, takes_integers
from agentrt.backend import EngineFacts
from agentrt.cache.eviction import eviction_policy
from agentrt.cache.page_pool import PagePool
from agentrt.cache.prefix_cache import PrefixCache
from agentrt.config import AttentionChoice, EngineConfig, SchedulerConfig
from agentrt.engine.engine import EngineCore
from agentrt.engine.executor import LocalExecutor
from agentrt.engine.kv_store import KVStore, bytes_per_token
from agentrt.engine.model_runner import ModelRunner
from agentrt.engine.step_parts import step_parts
from agentrt.errors import UserError
from agentrt.kernels.cpu.build import prepare
from agentrt.kernels.quantized_linear import is_fast
from agentrt.models.loader import GenerationDefaults, LoadedModel, holds_few_bits, load_model
from agentrt.observe.trace import TraceRecorder
from agentrt.request import SamplingParams
from agentrt.scheduling.policy import POLICIES
from agentrt.scheduling.scheduler import Budget, Scheduler
from agentrt.text.tokenizer import Tokenizer

#: Share of the free memory that the KV store may take, and the most tokens that it is given without being asked.
KV_SHARE = 0.3
KV_TOKENS = 1 << 17


def build_engine(config: EngineConfig, folder: Path, tokenizer: Tokenizer) -> tuple[EngineCore, EngineFacts]:
    """Loads the model and wires an engine around it.

    Args:
        config: As the user gave it.
        folder: The model's, in Hugging Face's layout.
        tokenizer: The model's.

    Raises:
        UserError: The config does not fit the machine or the model.
    """
    device = _device(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if device.type == "cpu":
        prepare()
    elif device.index is not None:
        torch.cuda.set_device(device)  # this thread's, which will also run the steps: Triton launches on the current device, whatever its tensors say
    chosen = _chosen(config.dtype, device, folder)
    bits = _bits(chosen)
    triton = _on_triton(config, bits, device)
    dtype = _dtype(chosen, device)
    model = load_model(folder, dtype, device, bits=bits, triton=triton)
    max_context = min(model.config.max_context, config.max_context or model.config.max_context)
    page_size = config.cache.page_size or (1 if device.type == "cpu" else 16)
    kv_dtype = _kv_dtype(config.attention, model, dtype, bits, device)
    pages = max(_kv_tokens(config.cache.kv_tokens, model, kv_dtype, device) // page_size, 1)
    cache = PrefixCache(
        PagePool(pages, page_size),
        eviction_policy(config.cache.eviction),
        enabled=config.cache.prefix_cache,
        hold_share=config.cache.hold_share,
    )
    budget = _budget(config.scheduler, device)
    policy = POLICIES[config.scheduler.policy]
    scheduler = Scheduler(cache, budget, policy, clock=time.monotonic, max_wait=config.scheduler.max_wait, hold_seconds=config.cache.hold_seconds)
    store = KVStore(model.config, pages * page_size, kv_dtype, device)
    parts = step_parts(config.attention, model, store, page_size, device, budget.max_running)
    runner = ModelRunner(model, store, parts.attention, device, parts.graphs)
    sampler = parts.sampler(_allowed(model, tokenizer), model.generation.eos_ids)
    executor = LocalExecutor(runner, sampler, model.config.vocab_size)
    core = EngineCore(
        scheduler,
        executor,
        cache,
        tokenizer,
        eos_ids=model.generation.eos_ids,
        max_length=min(max_context, pages * page_size),
        check=config.cache.check,
        recorder=_recorder(config.record_trace, folder.name, page_size, pages * page_size),
    )
    facts = EngineFacts(
        max_context=max_context,
        kv_tokens=pages * page_size,
        page_size=page_size,
        vocab_size=model.config.vocab_size,
        max_running=budget.max_running,
        dtype=chosen,
        device=str(device),
        threads=torch.get_num_threads(),
        sampling=_sampling(model.generation),
    )
    return core, facts


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device is {name!r}; it must be auto, cpu or cuda", param="device") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device is {name!r}, but torch sees no GPU here; use device='cpu'", param="device")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        raise UserError(f"device is {name!r}, but torch sees {torch.cuda.device_count()} GPUs here, numbered from 0", param="device")
    return device


def _chosen(name: str, device: torch.device, folder: Path) -> str:
    """What "auto" means here.

    On a CPU, weights that lie quantised in the folder run in their own bits, since a step's time is reading them.
    bfloat16 pays only where the processor multiplies it; elsewhere it is emulated, slower than float32.
    """
    if name != "auto":
        return name
    if device.type == "cuda":
        return _half()
    if is_fast() and holds_few_bits(folder):
        return "int4"
    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() else "float32"


def _dtype(chosen: str, device: torch.device) -> torch.dtype:
    """Of activations. A CPU's kernels of few bits take float32 and give it."""
    if chosen in ("int8", "int4"):
        chosen = _half() if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, chosen)
    return dtype


def _half() -> str:
    """The better of 16 bits that a GPU multiplies."""
    return "bfloat16" if torch.cuda.is_bf16_supported() else "float16"


def _kv_dtype(attention: AttentionChoice, model: LoadedModel, dtype: torch.dtype, bits: int | None, device: torch.device) -> torch.dtype:
    """Of keys and values: under a CPU's matrices of few bits whole numbers, in bytes; where no kernel takes those, float16."""
    if bits is None or attention == "triton" or device.type != "cpu":
        return dtype
    native = attention == "auto" and isinstance(cpu_attention(), NativeAttention)
    return torch.int8 if native and takes_integers(model.config.head_dim) else torch.float16


def _bits(name: str) -> int | None:
    """Of a weight, where matrices are held quantised."""
    return int(name.removeprefix("int")) if name in ("int8", "int4") else None


def _on_triton(config: EngineConfig, bits: int | None, device: torch.device) -> bool:
    """Whether matrices of few bits are multiplied by Triton's kernels: on a GPU, or in the interpreter if that is asked for."""
    if bits is None or (device.type != "cuda" and config.attention != "triton"):
        return False
    if find_spec("triton") is None:
        raise UserError(
            f"dtype is {config.dtype!r}, whose products on a GPU are Triton's kernels, and Triton is not installed;"
            " pip install 'agentrt[triton]', or give bfloat16 or float16",
            param="dtype",
        )
    return True


def _kv_tokens(asked: int | None, model: LoadedModel, dtype: torch.dtype, device: torch.device) -> int:
    if asked is not None:
        return asked
    free = psutil.virtual_memory().available if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    return min(int(free * KV_SHARE) // bytes_per_token(model.config, dtype), KV_TOKENS)


def _recorder(path: str | None, model: str, page_size: int, kv_tokens: int) -> TraceRecorder | None:
    if path is None:
        return None
    try:
        return TraceRecorder(Path(path), model=model, page_size=page_size, kv_tokens=kv_tokens)
    except OSError as error:
        raise UserError(f"record_trace is {path!r}, which cannot be written: {error}", param="record_trace") from error


def _budget(config: SchedulerConfig, device: torch.device) -> Budget:
    cpu = device.type == "cpu"
    step_tokens = config.step_tokens or (512 if cpu else 2048)
    return Budget(
        step_tokens=step_tokens,
        prefill_tokens=config.prefill_tokens or max(step_tokens // 2, 1),
        max_running=config.max_running or (64 if cpu else 256),
    )


def _allowed(model: LoadedModel, tokenizer: Tokenizer) -> torch.Tensor:
    ids = [token_id for token_id in range(min(tokenizer.vocab_size, model.config.vocab_size)) if tokenizer.token_exists(token_id)]
    allowed = model.allowed_tokens(ids)
    return torch.ones(model.config.vocab_size, dtype=torch.bool) if allowed is None else allowed


def _sampling(defaults: GenerationDefaults) -> SamplingParams:
    """What the model's makers recommend, as SamplingParams."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    given = {name: getattr(defaults, name) for name in names if getattr(defaults, name) is not None}
    return SamplingParams(**given)

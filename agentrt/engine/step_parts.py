"""Which attention, sampler and graphs a step is made of, by the device: native kernels on a CPU, Triton's on a GPU, torch's operators anywhere.

Triton is imported only where it is used. On a GPU without it the engine runs on torch's operators, slower, and says so.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from agentrt.attention.base import Attention
from agentrt.attention.native_cpu import cpu_attention
from agentrt.attention.torch_cpu import TorchAttention
from agentrt.config import AttentionChoice
from agentrt.engine.kv_store import KVStore
from agentrt.engine.sampler import Sampler
from agentrt.engine.step_graphs import StepGraphs
from agentrt.errors import UserError
from agentrt.models.decoder import Decoder
from agentrt.models.loader import LoadedModel


@dataclass(frozen=True, slots=True)
class StepParts:
    """What the model runner and the executor are made of.

    Attributes:
        attention: Over the paged store.
        sampler: The class of the sampler.
        graphs: Captured steps, on a GPU.
    """

    attention: Attention
    sampler: type[Sampler]
    graphs: StepGraphs | None = None


def step_parts(choice: AttentionChoice, model: LoadedModel, store: KVStore, page_size: int, device: torch.device, max_running: int) -> StepParts:
    """Chooses.

    Args:
        choice: As configured.
        model, store: What steps run on.
        page_size: Slots a page.
        device: Where.
        max_running: Most sequences of a step.

    Raises:
        UserError: Triton is asked for and cannot be had.
    """
    if choice == "torch":
        return StepParts(TorchAttention(), Sampler)
    if choice == "auto" and device.type != "cuda":
        return StepParts(cpu_attention(), Sampler)
    if find_spec("triton") is None:
        if choice == "triton":
            raise UserError("attention is 'triton', which is not installed; pip install 'agentrt[triton]'", param="attention")
        warnings.warn("Triton is not installed: the GPU runs torch's operators, several times slower; pip install 'agentrt[triton]'", stacklevel=2)
        return StepParts(TorchAttention(), Sampler)
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError(
            f"attention is 'triton' and device is {str(device)!r}: the kernels need a GPU, or TRITON_INTERPRET=1 to run in Triton's"
            " interpreter, a thousand times slower",
            param="attention",
        )
    return _on_triton(model, store, page_size, device, max_running)


def _on_triton(model: LoadedModel, store: KVStore, page_size: int, device: torch.device, max_running: int) -> StepParts:
    from agentrt.attention.triton_paged import TritonAttention
    from agentrt.engine.device_sampler import DeviceSampler

    config = model.config
    attention = TritonAttention(config.heads, config.kv_heads, config.head_dim, page_size, device)
    graphs = None
    if device.type == "cuda" and isinstance(model.decoder, Decoder):
        graphs = StepGraphs(model.decoder.forward, store, attention, config.windows, most_new=max_running, device=device)
    return StepParts(attention, DeviceSampler, graphs)

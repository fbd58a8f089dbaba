"""Whether a GPU is new enough for the kernels, and large enough for a model and its KV pool. Pure, but for `current_gpu` and
`uuid_of`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from configs.facts import KvCacheDtype, ModelFacts
from engine.gpu_memory import CONTEXT_BYTES, memory_now, pool_bytes
from engine.memory.kv_pool import token_bytes
from engine.models.parameters import layer_parameters, model_parameters
from protocol.errors import ConfigError

OLDEST = (8, 0)
"""The lowest compute capability that the kernels are compiled for: Ampere, the first with bfloat16 in its matrix units."""
OLDEST_FP8 = (8, 9)
"""The same for KV in fp8: Ada, the first that converts such numbers."""
NO_GPU = "there is no GPU that torch can use here"
_ROW_BYTES = 16
"""A row of a product's factors takes whole multiples of them."""
_STEP_TOKENS = 1000
"""What is proposed to an operator is a multiple of this, rounded down."""


@dataclass(frozen=True)
class Gpu:
    """Properties of a GPU that CUDA reports."""

    name: str
    capability: tuple[int, int]
    """Compute capability: (9, 0) is a Hopper."""
    total_bytes: int


def current_gpu() -> Gpu:
    """Return what torch says of the current GPU."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Gpu(properties.name, (properties.major, properties.minor), properties.total_memory)


def uuid_of(device: torch.device) -> str:
    """Return the UUID of a CUDA device, as NVML and `nvidia-smi -L` write it; empty for a processor."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else ""


def check_gpu(
    gpu: Gpu,
    facts: ModelFacts,
    dtype: torch.dtype,
    num_kv_tokens: int,
    memory_share: float,
    kv_cache_dtype: KvCacheDtype = "auto",
) -> None:
    """Raise ConfigError, with what would do, if a worker can't run on this GPU.

    `memory_share` is the part of the GPU's memory that weights and a KV pool of `num_kv_tokens` may take.
    """
    if gpu.capability < OLDEST:
        has, needed = (".".join(map(str, version)) for version in (gpu.capability, OLDEST))
        problem = f"this GPU ({gpu.name}, compute capability {has}) is too old: {needed} or newer is needed"
        raise ConfigError(f"{problem}; device: cpu computes on the processor", param="device")
    if kv_cache_dtype == "fp8" and gpu.capability < OLDEST_FP8:
        has, needed = (".".join(map(str, version)) for version in (gpu.capability, OLDEST_FP8))
        problem = f"fp8 needs a GPU of compute capability {needed} or newer, and this one ({gpu.name}) has {has}: use auto"
        raise ConfigError(problem, param="kv_cache_dtype")
    weights, token = weight_bytes(facts, dtype), token_bytes(facts, dtype, kv_cache_dtype)
    room = int(memory_share * gpu.total_bytes) - CONTEXT_BYTES
    if weights + num_kv_tokens * token <= room:
        return
    share = f"{memory_share:.4g} of this GPU's {_gib(gpu.total_bytes)}"
    most = (room - weights) // token
    if most < 1:
        raise ConfigError(f"{_gib(weights)} of weights do not fit into {share}; {_more(weights, gpu)}", param="model")
    rounded = most // _STEP_TOKENS * _STEP_TOKENS or most
    kv = f"{_gib(num_kv_tokens * token)} of KV ({num_kv_tokens:,} tokens)"
    problem = f"{_gib(weights)} of weights and {kv} do not fit into {share}"
    raise ConfigError(f"{problem}; kv_cache_tokens of at most {rounded:,} would", param="kv_cache_tokens")


def tokens_that_fit(token: int, memory_share: float, step_bytes: int, num_kv_tokens: int) -> int:
    """Return how many tokens of KV, of `token` bytes each, the current GPU holds: within this share of it, beside what is there
    and steps of so many bytes.

    Raises ConfigError, with what would do, if they are fewer than `num_kv_tokens`.
    """
    room = pool_bytes(memory_now(), memory_share, step_bytes)
    check_pool(room, num_kv_tokens, token)
    return room // token


def check_pool(room: int, num_kv_tokens: int, token: int) -> None:
    """Raise ConfigError, with what would do, if `room` bytes do not hold a pool of so many tokens of `token` bytes."""
    if num_kv_tokens * token <= room:
        return
    kv = f"{_gib(num_kv_tokens * token)} of KV ({num_kv_tokens:,} tokens)"
    problem = f"{kv} do not fit into the {_gib(room)} that weights and steps leave of the worker's share"
    would = f"kv_cache_tokens of at most {room // token:,}, smaller steps, or a larger share of the GPU would"
    raise ConfigError(f"{problem}; {would}", param="kv_cache_tokens")


def check_shapes(facts: ModelFacts, dtype: torch.dtype) -> None:
    """Raise ConfigError if there is no GPU that torch can use here, or no kernel for the shapes of these facts, a rank's."""
    if not torch.cuda.is_available():
        raise ConfigError(NO_GPU, param="device")
    from engine.kernels.triton.online_softmax import HEAD_DIMS  # Triton is imported only where there is a GPU
    from engine.kernels.triton.prefill_attention import tile_rows

    if facts.head_dim not in HEAD_DIMS:
        raise ConfigError(f"{facts.name}: a head size of {facts.head_dim} has no kernel for GPUs", param="model")
    group, most = facts.num_heads // facts.num_kv_heads, tile_rows(dtype)
    if group > most:
        problem = f"{facts.name}: {group} query heads for each key/value head have no kernel for GPUs"
        raise ConfigError(f"{problem}; there may be at most {most}", param="model")
    multiple = _ROW_BYTES // dtype.itemsize
    for width in (facts.hidden_size, facts.num_heads * facts.head_dim, facts.intermediate_size):
        if width % multiple:
            problem = f"{facts.name}: a rank's products of {width} inputs have no kernel for GPUs"
            raise ConfigError(f"{problem}; they must be a multiple of {multiple}", param="model")


def weight_bytes(facts: ModelFacts, dtype: torch.dtype) -> int:
    """Bytes of a model's weights in a GPU's memory, where quantized ones are unpacked to `dtype`."""
    layers = (layer_parameters(facts, layer) for layer in range(facts.num_layers))
    parameters = [*model_parameters(facts), *(parameter for layer in layers for parameter in layer)]
    return sum(math.prod(parameter.shape) for parameter in parameters) * dtype.itemsize


def _more(weights: int, gpu: Gpu) -> str:
    """What an operator can do about a worker that has too little memory for the weights."""
    if weights >= gpu.total_bytes:
        return f"this model needs a GPU with more than {_gib(weights)}"
    needed = math.ceil(100 * weights / gpu.total_bytes) / 100
    return f"give the worker more than {needed:g} of it: fewer workers on a GPU, or a higher gpu_memory_utilization"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"

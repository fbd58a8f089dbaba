"""The header of a safetensors file (https://github.com/huggingface/safetensors): is the file whole and of a known kind?

header length u64 little-endian | JSON header {name: {dtype, shape, data_offsets: [begin, end]}} | tensor data
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from configs.fields import model_error

_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""Weight types that the engine computes with; others mark quantized checkpoints."""
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""


def check_safetensors(path: Path) -> None:
    """Raise ConfigError, naming file and fault, unless every tensor is of a known type and lies inside the file."""
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if num_bytes < 8 or header_bytes > _MAX_HEADER_BYTES:
                raise model_error(f"{path}: not a safetensors file")
            raw = file.read(header_bytes)
    except OSError as error:
        raise model_error(f"{path}: can't be read: {error.strerror}") from None
    if len(raw) < header_bytes:
        raise model_error(f"{path}: truncated: the header runs past the end of the file ({num_bytes:,} bytes)")
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        raise model_error(f"{path}: not a safetensors file: the header is not JSON") from None
    if not isinstance(header, dict):
        raise model_error(f"{path}: not a safetensors file: the header is not an object")
    data_bytes = num_bytes - 8 - header_bytes
    for name, entry in header.items():
        if name != "__metadata__":
            _check_tensor(path, name, entry, data_bytes)


def _check_tensor(path: Path, name: str, entry: Any, data_bytes: int) -> None:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise model_error(f"{path}: damaged: tensor {name} has no dtype, shape and data_offsets")
    if dtype not in _ITEM_BYTES:
        raise model_error(f"{path}: tensor {name} is of type {dtype}; {', '.join(_ITEM_BYTES)} are supported")
    if not all(type(size) is int and size >= 0 for size in shape) or not 0 <= begin <= end:
        raise model_error(f"{path}: damaged: tensor {name} has an impossible shape or place")
    if end - begin != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise model_error(f"{path}: damaged: tensor {name} of shape {shape} can't have {end - begin} bytes")
    if end > data_bytes:
        raise model_error(f"{path}: truncated: {end - data_bytes:,} bytes are missing at the end (tensor {name})")

"""The functions that every compiled library of operators has, with the types of their arguments, as ctypes calls them."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from engine.native.recording import REPLAY_SIGNATURE

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES = {
    "add_rms_norm": (*[_POINTER] * 4, _INT, _INT, _FLOAT, _INT),
    "rotate_and_store": (*[_POINTER] * 6, *[_INT] * 5),
    "decode_attention": (*[_POINTER] * 4, _INT, *[_POINTER] * 3, *[_INT] * 6, _FLOAT, _INT),
    "prefill_attention": (*[_POINTER] * 5, *[_INT] * 7, _FLOAT, _INT),
    "rotate_and_store_int8": (*[_POINTER] * 6, *[_INT] * 5),
    "decode_attention_int8": (*[_POINTER] * 4, _INT, *[_POINTER] * 3, *[_INT] * 6, _FLOAT, _INT),
    "prefill_attention_int8": (*[_POINTER] * 5, *[_INT] * 7, _FLOAT, _INT),
    "swiglu": (*[_POINTER] * 2, *[_INT] * 3),
    "quantized_linear": (*[_POINTER] * 3, *[_INT] * 5),
    "dense_linear": (*[_POINTER] * 3, *[_INT] * 4),
}
"""Functions for every type: `suffix_of` is behind their names."""
LOOKUP_SIGNATURES = {"quantized_embedding": (*[_POINTER] * 3, *[_INT] * 5), "dense_embedding": (*[_POINTER] * 3, *[_INT] * 4)}
"""Functions for every type, too, that return whether they could look up what was asked for."""
LOGITS_SIGNATURES = {"quantized_logits": (*[_POINTER] * 3, *[_INT] * 5), "dense_logits": (*[_POINTER] * 3, *[_INT] * 4)}
"""Further functions for bfloat16: products with results in float32."""


def suffix_of(dtype: torch.dtype) -> str:
    """What is behind the names of the functions for this type, bfloat16 or float32."""
    return "_float32" if dtype == torch.float32 else ""


def declare(functions: Any, dtype: torch.dtype) -> None:
    """Tell ctypes the types of a library's functions for `dtype`."""
    suffix = suffix_of(dtype)
    for name, arguments in (SIGNATURES | ({} if suffix else LOGITS_SIGNATURES)).items():
        function = getattr(functions, name + suffix)
        function.argtypes, function.restype = arguments, None
    for name, arguments in LOOKUP_SIGNATURES.items():
        function = getattr(functions, name + suffix)
        function.argtypes, function.restype = arguments, ctypes.c_bool
    functions.replay.argtypes, functions.replay.restype = REPLAY_SIGNATURE, None

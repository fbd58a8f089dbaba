"""`engine.sampler.sample` as one native call for all rows: the same tokens, without NumPy's many passes over each row.

Masses are a polynomial, summed in one order, so that all sets of one arithmetic agree on a token. NumPy's masses are others in
a float32's last bit: a token may fall on the other side of top-p if that much decides.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from engine.batch import SampledToken
from engine.kernels.noise import NOISE_RANGE
from engine.native.library import NativeLibrary
from engine.sampler import SampleRequest, adjusted, logprobs

_REQUEST = np.dtype(
    [
        ("top_p", "f8"),
        ("seed", "u8"),
        ("top_k", "i4"),
        ("temperature", "f4"),
        ("min_gap", "f4"),
        ("choice", "u4"),
        ("position", "u4"),
    ],
    align=True,
)
"""What a row is sampled for: `Request` in scalar/sampling.cpp."""


class NativeSampler:
    """Draws tokens by a library's operator. A call takes and gives what `engine.sampler.sample` does."""

    def __init__(self, library: NativeLibrary) -> None:
        self._threads = library.threads
        self._sample = library.functions.sample
        self._sample.argtypes = (*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 2, ctypes.c_float, ctypes.c_int64)
        self._sample.restype = None

    def __call__(self, logits_SV: Tensor, requests: Sequence[SampleRequest]) -> list[SampledToken]:
        """One token per row of the float32 logits. Equal best tokens of a greedy row: the lowest id."""
        rows = list(logits_SV.contiguous().numpy())
        drawn_from = [adjusted(row_V, asked) if asked.adjusts else row_V for row_V, asked in zip(rows, requests, strict=True)]
        assert all(row_V.dtype == np.float32 and row_V.flags.c_contiguous for row_V in drawn_from)
        addresses = np.array([row_V.ctypes.data for row_V in drawn_from])
        packed = np.array([_request(asked) for asked in requests], _REQUEST)
        picks = np.empty(len(rows), np.int64)
        pointers = (addresses.ctypes.data, packed.ctypes.data, picks.ctypes.data)
        self._sample(*pointers, *logits_SV.shape, -NOISE_RANGE, self._threads)
        wanted = [asked.sampling.num_logprobs for asked in requests]
        return [
            SampledToken(token_id, None if num_top is None else logprobs(row_V, token_id, num_top))
            for row_V, token_id, num_top in zip(rows, picks.tolist(), wanted, strict=True)
        ]


def _request(asked: SampleRequest) -> tuple[float, int, int, float, float, int, int]:
    """The fields of `_REQUEST`."""
    sampling = asked.sampling
    min_gap = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
    return sampling.top_p, sampling.seed, sampling.top_k, sampling.temperature, min_gap, sampling.choice, asked.position

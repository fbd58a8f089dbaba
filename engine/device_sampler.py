"""`engine.sampler` for logits on a GPU: what is asked for goes there in one copy, one token per row comes back.

Logprobs, where asked for, are computed from the rows themselves, which are then fetched.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from configs.arithmetic import ceil_div
from engine.batch import SampledToken
from engine.kernels.pinned import sent
from engine.kernels.triton.sampling import SamplingRows, max_gap
from engine.kernels.triton.sampling import sample as sampling_launches
from engine.sampler import SampleRequest, adjusted, logprobs

_ALIGNED = 4
"""32-bit numbers in 16 bytes."""


def sample_on_device(logits_SV: Tensor, requests: Sequence[SampleRequest]) -> list[SampledToken]:
    """One token per row of the float32 logits, those that `engine.sampler.sample` takes (`engine.kernels.triton.sampling`)."""
    adjusted_SV = _adjusted(logits_SV, requests)
    picks_S = torch.empty(len(requests), dtype=torch.int32, device=logits_SV.device)
    gaps_SV = torch.empty_like(logits_SV, dtype=torch.int32)
    for launch in sampling_launches(adjusted_SV, _sampling_rows(requests, logits_SV.device), gaps_SV, picks_S):
        launch.run()
    wanted = [request.sampling.num_logprobs for request in requests]
    return [
        SampledToken(token_id, None if num_top is None else logprobs(logits_SV[row].cpu().numpy(), token_id, num_top))
        for row, (token_id, num_top) in enumerate(zip(picks_S.tolist(), wanted, strict=True))
    ]


def _adjusted(logits_SV: Tensor, requests: Sequence[SampleRequest]) -> Tensor:
    """With masks, biases and penalties. Rows that have any are computed on the host; few requests ask for it."""
    rows = [row for row, request in enumerate(requests) if request.adjusts]
    if not rows:
        return logits_SV.contiguous()
    fetched = logits_SV[rows].cpu().numpy()
    changed = torch.from_numpy(np.stack([adjusted(row_V, requests[row]) for row_V, row in zip(fetched, rows, strict=True)]))
    return logits_SV.index_copy(0, torch.tensor(rows, device=logits_SV.device), changed.to(logits_SV.device))


def _sampling_rows(requests: Sequence[SampleRequest], device: torch.device) -> SamplingRows:
    count = len(requests)
    aligned = ceil_div(count, _ALIGNED) * _ALIGNED
    packed = np.zeros((8, aligned), dtype=np.int32)
    asked = [request.sampling for request in requests]
    packed[0, :count] = _bits([sampling.temperature for sampling in asked])
    packed[1, :count] = [sampling.top_k for sampling in asked]
    packed[2, :count] = _bits([sampling.top_p for sampling in asked])
    packed[3, :count] = _bits([max_gap(sampling.min_p) for sampling in asked])
    packed[4, :count] = [sampling.choice for sampling in asked]
    packed[5, :count] = [request.position for request in requests]
    packed[6:].reshape(-1).view(np.int64)[:count] = [sampling.seed for sampling in asked]
    asked_S = sent(torch.from_numpy(packed), device)
    return SamplingRows(
        temperatures_S=asked_S[0].view(torch.float32),
        top_ks_S=asked_S[1],
        top_ps_S=asked_S[2].view(torch.float32),
        max_gaps_S=asked_S[3].view(torch.float32),
        seeds_S=asked_S[6:].reshape(-1).view(torch.int64),
        choices_S=asked_S[4],
        positions_S=asked_S[5],
    )


def _bits(values: Sequence[float]) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.float32).view(np.int32)

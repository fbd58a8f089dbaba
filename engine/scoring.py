"""Logprobs of a prompt's own tokens, for whoever wants to know how likely a text is.

Filled chunk by chunk by the engine's thread, read by the worker between steps. Of a chunk's logits [T, V] nothing outlives
its step but the logprobs that were asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from protocol.sampling import PromptLogprobs

_ROWS_AT_ONCE = 64
"""Rows are normalized so many at a time: that takes a few MB beside the logits."""


class PromptScores:
    """For each token of the prompt but the first: its logprob, and the `num_top` likeliest tokens in its place (N)."""

    def __init__(self, token_ids: Sequence[int], num_top: int) -> None:
        self._token_ids = token_ids
        self._num_top = num_top
        self._chosen: npt.NDArray[np.float32] | None = None

    def add(self, logits_SV: Tensor, rows: Sequence[int], positions: Sequence[int]) -> None:
        """These rows of the float32 logits follow the prompt's tokens at these positions. The last one's are the answer's."""
        if self._chosen is None:
            count = max(0, len(self._token_ids) - 1)
            self._chosen = np.zeros(count, dtype=np.float32)
            self._top_ids_TN = np.zeros((count, self._num_top), dtype=np.int32)
            self._top_TN = np.zeros((count, self._num_top), dtype=np.float32)
        inside = [(row, position) for row, position in zip(rows, positions, strict=True) if position < len(self._chosen)]
        for start in range(0, len(inside), _ROWS_AT_ONCE):
            part = inside[start : start + _ROWS_AT_ONCE]
            places = [position for _, position in part]
            wanted = torch.tensor([self._token_ids[place + 1] for place in places], device=logits_SV.device)
            part_PV = logits_SV[[row for row, _ in part]]
            totals_P1 = torch.logsumexp(part_PV, dim=-1, keepdim=True)
            self._chosen[places] = (part_PV.gather(1, wanted[:, None]) - totals_P1)[:, 0].cpu().numpy()
            top_PN, ids_PN = torch.topk(part_PV, min(self._num_top, part_PV.shape[1]), dim=-1)
            self._top_TN[places] = (top_PN - totals_P1).cpu().numpy()
            self._top_ids_TN[places] = ids_PN.cpu().numpy()

    def packed(self) -> PromptLogprobs:
        """Return the logprobs of the whole prompt. Call it when the last chunk is computed."""
        assert self._chosen is not None, "every chunk was computed"
        return PromptLogprobs(self._chosen.tobytes(), self._top_ids_TN.tobytes(), self._top_TN.tobytes())

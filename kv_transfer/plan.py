"""Where a transfer's tokens lie: pure arithmetic on block tables."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def slot_ids(block_table: Sequence[int], block_size: int, start: int, num_tokens: int) -> Tensor:
    """int64 [num_tokens]: the pool slot of each token at positions start, start + 1, ... of a sequence."""
    positions = torch.arange(start, start + num_tokens)
    blocks = torch.tensor(block_table, dtype=torch.int64)
    return blocks[positions // block_size] * block_size + positions % block_size

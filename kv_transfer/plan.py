"""Where a transfer's tokens lie, and in which portions they travel: pure arithmetic, the same on both sides."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def slot_ids(block_table: Sequence[int], block_size: int, start: int, num_tokens: int) -> Tensor:
    """int64 [num_tokens]: the pool slot of each token at positions start, start + 1, ... of a sequence."""
    positions = torch.arange(start, start + num_tokens)
    blocks = torch.tensor(block_table, dtype=torch.int64)
    return blocks[positions // block_size] * block_size + positions % block_size


MIN_MESSAGE_BYTES = 1024 * 1024
"""A message costs thread switches on both sides, which take time from the engine."""


def layer_groups(num_layers: int, layer_bytes: int) -> list[range]:
    """Consecutive layers that travel in one message, each of at least MIN_MESSAGE_BYTES but the last.

    `layer_bytes` is what one layer of the push takes. Long pushes go layer by layer, beside the computation of the next
    ones; short ones in a message or two.
    """
    size = -(-MIN_MESSAGE_BYTES // layer_bytes)
    return [range(start, min(start + size, num_layers)) for start in range(0, num_layers, size)]

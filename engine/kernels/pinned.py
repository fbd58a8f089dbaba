"""Copies to a device that the host need not wait for."""

from __future__ import annotations

import torch
from torch import Tensor


def sendable(values: Tensor, device: torch.device) -> Tensor:
    """Return `values` where a copy to `device` need not be waited for: in pinned memory, for a GPU.

    torch uses pinned memory again only after such a copy.
    """
    return values.pin_memory() if device.type == "cuda" else values


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Return `values` on `device`, for what the calling thread launches there."""
    return sendable(values, device).to(device, non_blocking=True)

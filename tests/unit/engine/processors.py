"""What is known of processors, so that a test can tell a broken kernel from a processor that promises less."""

from __future__ import annotations

import torch


def products_are_known_to_keep_bits() -> bool:
    """Whether torch's matrix products were measured to give a row the same bits in any company on processors like this one.

    That is so with AVX-512 and without AMX. With AMX they do not; of other processors nothing is known.
    """
    return "AVX512" in torch.backends.cpu.get_cpu_capability() and not torch.cpu._is_amx_tile_supported()

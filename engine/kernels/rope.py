"""Rotary position embedding in the Hugging Face layout: dimension i of a head is paired with i + H/2.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021. The stretching of low frequencies is
that of Llama 3.1, as in transformers' `_compute_llama3_parameters`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """Cosines and signed sines of every token of a step, shared by all layers and heads: [T, 1, 2, H/2]."""

    cos: Tensor
    sin: Tensor


def inverse_frequencies(head_dim: int, theta: float) -> Tensor:
    """Radians per position of each pair of dimensions: [H/2], float32."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def stretch_llama3(
    inv_freq: Tensor, *, factor: float, low_freq_factor: float, high_freq_factor: float, original_max_position: int
) -> Tensor:
    """Slow rotations by `factor`, keep fast ones, and blend between the two wavelengths given by the other factors."""
    wavelength = 2 * math.pi / inv_freq
    blend = (original_max_position / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blended = (1 - blend) * inv_freq / factor + blend * inv_freq
    stretched = torch.where(wavelength > original_max_position / low_freq_factor, inv_freq / factor, blended)
    return torch.where(wavelength < original_max_position / high_freq_factor, inv_freq, stretched)


def angles(inv_freq: Tensor, positions_T: Tensor) -> Tensor:
    """What each pair of dimensions is turned by: float32 [T, H/2]."""
    return positions_T.to(torch.float32)[:, None] * inv_freq


def rotation(inv_freq: Tensor, positions_T: Tensor, dtype: torch.dtype) -> Rotation:
    """Cosines and sines of the angles, rounded to `dtype`."""
    angles_TF = angles(inv_freq, positions_T)
    cos, sin = angles_TF.cos(), angles_TF.sin()
    return Rotation(
        cos=torch.stack((cos, cos), dim=1)[:, None].to(dtype),
        sin=torch.stack((-sin, sin), dim=1)[:, None].to(dtype),
    )


def rotate(x_TNH: Tensor, by: Rotation) -> Tensor:
    """Every head of every token turned to its position: a new tensor [T, N, H]."""
    num_tokens, num_heads, head_dim = x_TNH.shape
    halves = x_TNH.view(num_tokens, num_heads, 2, head_dim // 2)
    return torch.addcmul(halves * by.cos, halves.flip(2), by.sin).view(num_tokens, num_heads, head_dim)

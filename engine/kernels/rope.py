"""Rotary position embedding in the Hugging Face layout: dimension i of a head is paired with i + H/2.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021. How positions are stretched to longer contexts
is that of transformers' `modeling_rope_utils`; `configs.model_files.rope` reads what models declare.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.facts import DynamicScaling, LinearScaling, Llama3Scaling, ModelFacts, YarnScaling


@dataclass(frozen=True)
class Rotation:
    """Cosines and signed sines of every token of a step, shared by all layers and heads: [T, 1, 2, H/2]."""

    cos: Tensor
    sin: Tensor


def rope_frequencies(facts: ModelFacts) -> Tensor:
    """Radians per position of each pair of dimensions, scaling included: [H/2], float32."""
    frequencies = inverse_frequencies(facts.head_dim, facts.rope_theta)
    match facts.rope_scaling:
        case LinearScaling() as scaling:
            return frequencies / scaling.factor
        case DynamicScaling() as scaling:
            return inverse_frequencies(facts.head_dim, _dynamic_base(facts, scaling))
        case YarnScaling() as scaling:
            return _stretch_yarn(facts.head_dim, facts.rope_theta, scaling)
        case Llama3Scaling() as scaling:
            return _stretch_llama3(frequencies, scaling)
        case None:
            return frequencies


def inverse_frequencies(head_dim: int, theta: float) -> Tensor:
    """Radians per position of each pair of dimensions: [H/2], float32."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def angles(inv_freq: Tensor, positions_T: Tensor) -> Tensor:
    """What each pair of dimensions is turned by: float32 [T, H/2]."""
    return positions_T.to(torch.float32)[:, None] * inv_freq


def rotation(inv_freq: Tensor, positions_T: Tensor, dtype: torch.dtype, attention_factor: float = 1.0) -> Rotation:
    """Cosines and sines of the angles, times the factor of YaRN, rounded to `dtype`."""
    angles_TF = angles(inv_freq, positions_T)
    cos, sin = scaled(angles_TF.cos(), angles_TF.sin(), attention_factor)
    return Rotation(
        cos=torch.stack((cos, cos), dim=1)[:, None].to(dtype),
        sin=torch.stack((-sin, sin), dim=1)[:, None].to(dtype),
    )


def scaled(cos: Tensor, sin: Tensor, attention_factor: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines times the factor, which is 1 but with YaRN."""
    return (cos, sin) if attention_factor == 1.0 else (cos * attention_factor, sin * attention_factor)


def rotate(x_TNH: Tensor, by: Rotation) -> Tensor:
    """Every head of every token turned to its position: a new tensor [T, N, H]."""
    num_tokens, num_heads, head_dim = x_TNH.shape
    halves = x_TNH.view(num_tokens, num_heads, 2, head_dim // 2)
    return torch.addcmul(halves * by.cos, halves.flip(2), by.sin).view(num_tokens, num_heads, head_dim)


def _dynamic_base(facts: ModelFacts, scaling: DynamicScaling) -> float:
    """The base at which a sequence of the served context arrives; a shorter one than the first context leaves it as it is."""
    served = max(facts.max_model_len, scaling.original_max_position)
    grown = scaling.factor * served / scaling.original_max_position - (scaling.factor - 1)
    return float(facts.rope_theta * grown ** (facts.head_dim / (facts.head_dim - 2)))


def _stretch_yarn(head_dim: int, theta: float, scaling: YarnScaling) -> Tensor:
    """Keep rotations of more than `beta_fast` turns over the original context, divide those of fewer than `beta_slow` by the
    factor, and blend between."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = theta ** (torch.arange(0, head_dim, 2).to(torch.float32) / head_dim)
    return 1.0 / (scaling.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _stretch_llama3(inv_freq: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Slow rotations by the factor, keep fast ones, and blend between the two wavelengths given by the other factors."""
    original, low, high = scaling.original_max_position, scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * inv_freq / scaling.factor + blend * inv_freq
    stretched = torch.where(wavelength > original / low, inv_freq / scaling.factor, blended)
    return torch.where(wavelength < original / high, inv_freq, stretched)

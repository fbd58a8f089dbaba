"""What a model is, without its weights: the facts that router and engine must agree on.

`configs.models.resolve` makes them from a GGUF file or a Hugging Face directory.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal


class Architecture(Enum):
    """Dense decoder families; the differences between them are fields of ModelFacts."""

    LLAMA = "llama"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


class WeightFormat(Enum):
    """The kind of files that hold a model's weights."""

    GGUF = "gguf"
    SAFETENSORS = "safetensors"


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by a factor ("rope_type": "linear")."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """A larger base of the frequencies, by the served context ("rope_type": "dynamic").

    Elsewhere the base grows with each sequence. Here it is that of a sequence of `ModelFacts.max_model_len` tokens from the
    first token on, since a token's KV may not depend on what follows it.
    """

    factor: float
    original_max_position: int


@dataclass(frozen=True)
class YarnScaling:
    """Slow rotations stretched, fast ones kept, and larger scores ("rope_type": "yarn"). Peng et al., "YaRN", 2023."""

    factor: float
    original_max_position: int
    attention_factor: float
    """Cosines and sines are multiplied by it, so that scores are by its square."""
    beta_fast: float = 32.0
    """Turns over the original context from which on a rotation is kept."""
    beta_slow: float = 1.0
    """Turns up to which a rotation is stretched by the whole factor."""
    truncate: bool = True
    """Whether the range between the two is rounded to whole dimensions."""


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's frequency-dependent stretching of rotary positions ("rope_type": "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


RopeScaling = LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling
"""How a model's rotary positions are stretched to a longer context."""


@dataclass(frozen=True)
class ModelFacts:
    """The shapes of a model and what identifies it. `num_heads * head_dim` may differ from `hidden_size` (Qwen3)."""

    name: str
    """The name that clients use."""
    architecture: Architecture
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    """Most tokens of prompt and answer together."""
    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    """Whether the q, k and v projections have a bias (Qwen2)."""
    qk_norm: bool
    """Whether RMSNorm is applied to each head of q and k (Qwen3)."""
    eos_token_ids: tuple[int, ...]
    model_hash: str
    """sha256 over the model's files: two workers with equal hashes have equal weights."""
    weight_format: WeightFormat
    weight_files: tuple[Path, ...]
    sliding_windows: tuple[int, ...] = ()
    """For each layer, how many tokens a token sees, itself and those before it; 0 is all. Empty if all layers see all."""
    positions: str = ""
    """What its rotary positions are, where the files alone do not say it: they were overridden, or follow from the served
    context. A name such as `rope=yarn-4.0-1f2e3d4c`, with some digits of a hash over all parameters."""

    @property
    def identity(self) -> str:
        """Hash over everything that decides a token's KV and logits, apart from the arithmetic."""
        if not self.positions:
            return self.model_hash
        return hashlib.sha256(f"{self.model_hash} {self.positions}".encode()).hexdigest()

    def window(self, layer: int) -> int:
        """How many tokens a token sees in this layer, itself and those before it; 0 is all."""
        return self.sliding_windows[layer] if self.sliding_windows else 0

    @property
    def attention_factor(self) -> float:
        """What cosines and sines of rotary positions are multiplied by: 1 but with YaRN."""
        return self.rope_scaling.attention_factor if isinstance(self.rope_scaling, YarnScaling) else 1.0


KvCacheDtype = Literal["auto", "int8", "fp8"]
"""How keys and values lie in the pools (`configs.schema.ClusterConfig.kv_cache_dtype`)."""
KV_SCALE_BYTES = 2
"""Bytes of the scale of one token's K or V in one head, in int8."""


def kv_head_bytes(head_dim: int, number_bytes: int, kv_cache_dtype: KvCacheDtype) -> int:
    """Return the bytes that one token's K, or V, takes of the pool in one head.

    With `auto` these are numbers of `number_bytes`; else a byte for each number, in int8 with a scale.
    """
    if kv_cache_dtype == "auto":
        return head_dim * number_bytes
    return head_dim + (KV_SCALE_BYTES if kv_cache_dtype == "int8" else 0)


@dataclass(frozen=True)
class TokenizerFacts:
    """What builds the model's tokenizer. Exactly one of `byte_level_bpe` and `tokenizer_json` is set."""

    byte_level_bpe: ByteLevelBpe | None
    tokenizer_json: Path | None
    """The file that the `tokenizers` package reads, for models that are not byte-level BPE."""
    chat_template: str | None
    """The model's own Jinja template for chats; None if it has none."""
    special_tokens: dict[str, int]
    """Text to id of every control token; these are never the result of ordinary text merging and not part of answers."""
    user_tokens: dict[str, int]
    """Text to id of tokens that are found whole in text like control tokens, but are shown (Qwen3's `<think>`)."""
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    prompt_bos: str | None
    """The token that the tokenizer puts in front of a plain prompt: mostly `bos_token`. None if there is none."""


@dataclass(frozen=True)
class ByteLevelBpe:
    """A byte-level BPE vocabulary. Tokens and merges are in GPT-2's printable-byte alphabet."""

    tokens: tuple[str, ...]
    """The tokens by id, with the special tokens at their ids."""
    merges: tuple[str, ...]
    """The merges, each written `left right`, the most important first."""
    pattern: str
    """The regular expression that splits text before merging, in tiktoken's dialect."""
    ignore_merges: bool
    """Whether a piece that is in the vocabulary is taken whole (Llama 3)."""
    nfc: bool
    """Whether text is normalised to NFC first (Qwen2)."""


@dataclass(frozen=True)
class Model:
    """A model that was found: its facts and its tokenizer."""

    facts: ModelFacts
    tokenizer: TokenizerFacts

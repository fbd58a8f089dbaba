"""What a GGUF file says about its model and tokenizer.

Key names are GGUF's (docs/gguf.md of ggml-org/ggml): `<architecture>.block_count`, `tokenizer.ggml.tokens` and so on.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

from configs.cache import file_sha256
from configs.facts import (
    Architecture,
    ByteLevelBpe,
    Llama3Scaling,
    Model,
    ModelFacts,
    RopeScaling,
    TokenizerFacts,
    WeightFormat,
)
from configs.fields import Fields, model_error
from configs.model_files.bpe_patterns import BY_GGUF_NAME
from configs.model_files.gguf_file import GgufIndex, read_gguf_index
from configs.model_files.rope import longest_context, read_rope
from protocol.errors import ConfigError

_CONTROL, _USER_DEFINED = 3, 4
"""Kinds in tokenizer.ggml.token_type that text never merges into."""
_UNUSED = 5
"""The kind of ids without a token, which converters name `[PAD151665]` and so on."""
_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>")
"""Control tokens that end an answer whether or not the file says so, as in llama.cpp: files often name one of several."""
_EMBEDDING, _HEAD, _ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"


def model_from_gguf(path: Path, name: str, scaling_overridden: bool = False) -> Model:
    """Return the model in a GGUF file, under the name that clients use.

    Raises ConfigError if Tandem can't serve it. Where the scaling of its positions is overridden, its own may be any.
    """
    index = read_gguf_index(path)
    fields = Fields(str(path), index.metadata)
    if fields.integer("split.count", 0) > 1:  # 0 once llama-gguf-split has joined them
        raise model_error(f"{path}: is one part of several; join them with `llama-gguf-split --merge`")
    tokenizer = _tokenizer(fields)
    return Model(_facts(index, fields, tokenizer, name, scaling_overridden), tokenizer)


def _facts(index: GgufIndex, fields: Fields, tokenizer: TokenizerFacts, name: str, scaling_overridden: bool) -> ModelFacts:
    architecture = _architecture(fields)
    prefix = architecture.value
    _refuse_unsupported(fields, prefix)
    num_heads = fields.count(f"{prefix}.attention.head_count")
    hidden_size = fields.count(f"{prefix}.embedding_length")
    head_dim = fields.count(f"{prefix}.attention.key_length", hidden_size // num_heads)
    rope_theta = fields.positive(f"{prefix}.rope.freq_base", 10_000.0)
    for key in (f"{prefix}.attention.value_length", f"{prefix}.rope.dimension_count"):
        if fields.count(key, head_dim) != head_dim:
            raise fields.wrong(key, f"the head's size, {head_dim}")
    num_kv_heads = fields.count(f"{prefix}.attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise fields.wrong(f"{prefix}.attention.head_count_kv", f"a divisor of the {num_heads} heads")
    embedding = index.tensors.get(_EMBEDDING)
    if embedding is None:
        raise model_error(f"{index.path}: the tensor {_EMBEDDING} is missing")
    assert tokenizer.byte_level_bpe is not None, "GGUF tokenizers are byte-level BPE or refused"
    if len(tokenizer.byte_level_bpe.tokens) > embedding.shape[0]:
        raise fields.wrong("tokenizer.ggml.tokens", f"at most the {embedding.shape[0]} rows of the embedding")
    first_context = fields.count(f"{prefix}.context_length")
    try:
        rope_scaling = _declared_scaling(fields, prefix, first_context) or _llama3_scaling(index, head_dim, rope_theta)
    except ConfigError:
        if not scaling_overridden:
            raise
        original, rope_scaling = f"{prefix}.rope.scaling.original_context_length", None
        first_context = fields.count(original, first_context)
    return ModelFacts(
        name=name,
        architecture=architecture,
        num_layers=fields.count(f"{prefix}.block_count"),
        hidden_size=hidden_size,
        intermediate_size=fields.count(f"{prefix}.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
        max_model_len=longest_context(first_context, rope_scaling),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        rms_norm_eps=fields.positive(f"{prefix}.attention.layer_norm_rms_epsilon"),
        tie_word_embeddings=_HEAD not in index.tensors,
        attention_bias=architecture is Architecture.QWEN2,
        qk_norm=architecture is Architecture.QWEN3,
        eos_token_ids=_eos_token_ids(fields, tokenizer, embedding.shape[0]),
        model_hash=file_sha256(index.path),
        weight_format=WeightFormat.GGUF,
        weight_files=(index.path,),
    )


def _architecture(fields: Fields) -> Architecture:
    try:
        return Architecture(fields.text("general.architecture"))
    except ValueError:
        raise fields.wrong("general.architecture", f"one of {', '.join(a.value for a in Architecture)}") from None


def _refuse_unsupported(fields: Fields, prefix: str) -> None:
    if fields.integer(f"{prefix}.expert_count", 0) > 0:
        raise fields.wrong(f"{prefix}.expert_count", "absent: mixture-of-experts models are not supported")
    if fields.integer(f"{prefix}.attention.sliding_window", 0) > 0:
        raise fields.wrong(f"{prefix}.attention.sliding_window", "absent: sliding windows are not supported")


def _eos_token_ids(fields: Fields, tokenizer: TokenizerFacts, vocab_size: int) -> tuple[int, ...]:
    """Those that the file names, then those known by their text. One that stands for unknown text (SmolLM2) ends nothing."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    for key in keys:
        if key in fields and fields.integer(key) >= vocab_size:
            raise fields.wrong(key, f"below the vocabulary's size, {vocab_size}")
    known = [
        tokenizer.special_tokens[text] for text in _ENDS if text in tokenizer.special_tokens and text != tokenizer.unk_token
    ]
    return tuple(dict.fromkeys([*(fields.integer(key) for key in keys if key in fields), *known]))


def _declared_scaling(fields: Fields, prefix: str, first_context: int) -> RopeScaling | None:
    """Linear scaling and YaRN, whose parameters a GGUF file names. A factor without a type is linear, as in llama.cpp."""
    scaling = f"{prefix}.rope.scaling."
    for key in ("yarn_log_multiplier", "alpha"):
        if fields.number(scaling + key, 0.0):
            raise fields.wrong(scaling + key, "absent: it is not supported")
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if fields.number(scaling + key, 1.0) != 1.0:
            raise fields.wrong(scaling + key, "1: others are not supported")
    factor = scaling + "factor" if scaling + "factor" in fields else f"{prefix}.rope.scale_linear"
    implied = "none" if fields.number(factor, 0.0) in (0.0, 1.0) else "linear"
    kind = fields.text(scaling + "type", implied)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise fields.wrong(scaling + "type", "none, linear or yarn")
    used = {"rope_type": kind, "factor": fields.raw(factor)}
    if kind == "yarn":
        names = {
            "original_context_length": "original_max_position_embeddings",
            "yarn_beta_fast": "beta_fast",
            "yarn_beta_slow": "beta_slow",
        }
        used |= {theirs: fields.raw(scaling + key) for key, theirs in names.items()}
    return read_rope(Fields(f"{fields.source}: {prefix}.rope.scaling", {"rope_scaling": used}), first_context, 10_000.0)[1]


def _llama3_scaling(index: GgufIndex, head_dim: int, rope_theta: float) -> Llama3Scaling | None:
    """Llama 3.1's scaling, which a GGUF holds as the resulting divisor of each frequency and not as its parameters.

    All models released with it share every parameter but the factor, which is the largest divisor. Whether that is what
    the file means is checked against all its divisors.
    """
    tensor = index.tensors.get(_ROPE_FACTORS)
    if tensor is None:
        return None
    if tensor.type_name != "F32" or tensor.shape != (head_dim // 2,):
        raise model_error(f"{index.path}: the tensor {_ROPE_FACTORS} should hold {head_dim // 2} floats of type F32")
    with index.path.open("rb") as file:
        file.seek(tensor.offset)
        divisors = struct.unpack(f"<{head_dim // 2}f", file.read(tensor.num_bytes))
    scaling = Llama3Scaling(factor=max(divisors), low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
    for pair, divisor in enumerate(divisors):
        expected = _llama3_divisor(scaling, rope_theta ** (-2 * pair / head_dim))
        if not math.isclose(divisor, expected, rel_tol=1e-3):
            raise model_error(f"{index.path}: the tensor {_ROPE_FACTORS} is not Llama 3.1's scaling, the only one supported")
    return scaling


def _llama3_divisor(scaling: Llama3Scaling, frequency: float) -> float:
    """By how much Llama 3.1 divides a rotary frequency (radians per token)."""
    turns = scaling.original_max_position * frequency / (2 * math.pi)
    if turns < scaling.low_freq_factor:
        return scaling.factor
    if turns > scaling.high_freq_factor:
        return 1.0
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return 1 / ((1 - smooth) / scaling.factor + smooth)


def _tokenizer(fields: Fields) -> TokenizerFacts:
    if fields.text("tokenizer.ggml.model") != "gpt2":
        raise fields.wrong("tokenizer.ggml.model", "gpt2 (byte-level BPE); serve the model's Hugging Face directory instead")
    if fields.text("tokenizer.ggml.pre") not in BY_GGUF_NAME:
        raise fields.wrong("tokenizer.ggml.pre", f"one of {', '.join(BY_GGUF_NAME)}")
    before = BY_GGUF_NAME[fields.text("tokenizer.ggml.pre")]
    tokens = fields.texts("tokenizer.ggml.tokens")
    kinds = fields.integers("tokenizer.ggml.token_type", (1,) * len(tokens))
    if len(kinds) != len(tokens):
        raise fields.wrong("tokenizer.ggml.token_type", f"a list of {len(tokens)} kinds, one for each token")
    tokens = tuple("" if kind == _UNUSED else token for token, kind in zip(tokens, kinds, strict=True))

    def found_whole(kind: int) -> dict[str, int]:
        # Some converters pad with tokens without a text, which would be found everywhere.
        return {token: token_id for token_id, token in enumerate(tokens) if token and kinds[token_id] == kind}

    def named(key: str) -> str | None:
        if key not in fields:
            return None
        if fields.integer(key) >= len(tokens):
            raise fields.wrong(key, f"below the number of tokens, {len(tokens)}")
        return tokens[fields.integer(key)]

    bos_token = named("tokenizer.ggml.bos_token_id")
    return TokenizerFacts(
        byte_level_bpe=ByteLevelBpe(
            tokens=tokens,
            merges=fields.texts("tokenizer.ggml.merges"),
            pattern=before.pattern,
            ignore_merges=before.ignore_merges,
            nfc=before.nfc,
        ),
        tokenizer_json=None,
        chat_template=fields.text("tokenizer.chat_template") if "tokenizer.chat_template" in fields else None,
        special_tokens=found_whole(_CONTROL),
        user_tokens=found_whole(_USER_DEFINED),
        bos_token=bos_token,
        eos_token=named("tokenizer.ggml.eos_token_id"),
        unk_token=named("tokenizer.ggml.unknown_token_id"),
        prompt_bos=bos_token if fields.flag("tokenizer.ggml.add_bos_token", before.add_bos) else None,
    )

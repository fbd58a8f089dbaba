"""The table of a decoder's parameters: what each is called, how large it is, and which stored tensors make it up.

Canonical tensor names are GGUF's (`blk.0.attn_q.weight`); a weight source translates them to its own. A parameter
that the decoder uses fused (q, k and v; gate and up) lists its parts in order of their output rows: each part keeps
its own name and shape, so that a rule that splits parameters over ranks can be stated per part.
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.facts import ModelFacts

TOKEN_EMBEDDING = "token_embd.weight"
OUTPUT_HEAD = "output.weight"


@dataclass(frozen=True)
class Part:
    """One stored tensor."""

    name: str
    shape: tuple[int, ...]
    """[out, in] of a matrix, [out] of a vector."""
    rope_heads: int | None = None
    """Number of heads if the rows are those of rotated heads, whose order differs between file formats."""


@dataclass(frozen=True)
class Parameter:
    """Parts stacked along their first dimension."""

    name: str
    """Field of `decoder.Layer` or `decoder.DecoderWeights`; unique within the layer."""
    parts: tuple[Part, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])


def model_parameters(facts: ModelFacts) -> tuple[Parameter, ...]:
    """Those outside the layers."""
    embedding = (facts.vocab_size, facts.hidden_size)
    parameters = [
        _whole("embedding", TOKEN_EMBEDDING, *embedding),
        _whole("final_norm", "output_norm.weight", facts.hidden_size),
    ]
    if not facts.tie_word_embeddings:
        parameters.append(_whole("head", OUTPUT_HEAD, *embedding))
    return tuple(parameters)


def layer_parameters(facts: ModelFacts, layer: int) -> tuple[Parameter, ...]:
    """Those of one layer."""
    hidden, inner, head_dim = facts.hidden_size, facts.intermediate_size, facts.head_dim
    heads, kv_heads = facts.num_heads, facts.num_kv_heads
    blk = f"blk.{layer}"

    def qkv(kind: str, *columns: int) -> Parameter:
        return Parameter(
            f"qkv_{kind}",
            (
                Part(f"{blk}.attn_q.{kind}", (heads * head_dim, *columns), rope_heads=heads),
                Part(f"{blk}.attn_k.{kind}", (kv_heads * head_dim, *columns), rope_heads=kv_heads),
                Part(f"{blk}.attn_v.{kind}", (kv_heads * head_dim, *columns)),
            ),
        )

    parameters = [
        _whole("attention_norm", f"{blk}.attn_norm.weight", hidden),
        qkv("weight", hidden),
        _whole("output_weight", f"{blk}.attn_output.weight", hidden, heads * head_dim),
        _whole("ffn_norm", f"{blk}.ffn_norm.weight", hidden),
        Parameter(
            "gate_up_weight",
            (Part(f"{blk}.ffn_gate.weight", (inner, hidden)), Part(f"{blk}.ffn_up.weight", (inner, hidden))),
        ),
        _whole("down_weight", f"{blk}.ffn_down.weight", hidden, inner),
    ]
    if facts.attention_bias:
        parameters.append(qkv("bias"))
    if facts.qk_norm:
        parameters += [
            _whole("q_norm", f"{blk}.attn_q_norm.weight", head_dim),
            _whole("k_norm", f"{blk}.attn_k_norm.weight", head_dim),
        ]
    return tuple(parameters)


def _whole(name: str, tensor: str, *shape: int) -> Parameter:
    return Parameter(name, (Part(tensor, shape),))

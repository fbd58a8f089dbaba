"""The table of a decoder's parameters: what each is called, how large it is, which stored tensors make it up, and how these
are shared out to the ranks of a tensor-parallel worker.

Canonical tensor names are GGUF's (`blk.0.attn_q.weight`); a weight source translates them to its own. A parameter
that the decoder uses fused (q, k and v; gate and up) lists its parts in order of their output rows: each part keeps
its own name, shape and split.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from configs.facts import ModelFacts
from configs.sharding import even_share, heads_of, vocabulary_of

TOKEN_EMBEDDING = "token_embd.weight"
OUTPUT_HEAD = "output.weight"


class Split(Enum):
    """Which part of a tensor a rank holds. The arithmetic is that of `configs.sharding`."""

    WHOLE = "all of it, the same on every rank"
    OUTPUTS = "a share of the rows; of heads, whole ones, repeated if there are fewer than ranks"
    INPUTS = "a share of the columns: what the ranks compute is added up"
    VOCABULARY = "the rows of its tokens"


@dataclass(frozen=True)
class Part:
    """One tensor of the model's files, and how ranks share it."""

    name: str
    shape: tuple[int, ...]
    """[out, in] of a matrix, [out] of a vector."""
    split: Split = Split.WHOLE
    heads: int | None = None
    """Number of heads if the rows are those of heads."""
    rotary: bool = False
    """The rows of a head are rotated; their order differs between file formats."""

    def shard(self, rank: int, size: int) -> Shard:
        """Return the rows and columns that one of `size` ranks holds."""
        rows, columns = range(self.shape[0]), range(self.shape[1]) if len(self.shape) > 1 else None
        if self.split is Split.OUTPUTS and self.heads is not None:
            held, head_rows = heads_of(rank, size, self.heads), self.shape[0] // self.heads
            rows = range(held.start * head_rows, held.stop * head_rows)
        elif self.split is Split.OUTPUTS:
            rows = even_share(rank, size, self.shape[0])
        elif self.split is Split.INPUTS:
            columns = even_share(rank, size, self.shape[1])
        elif self.split is Split.VOCABULARY:
            rows = vocabulary_of(rank, size, self.shape[0])
        return Shard(self, rows, columns)


@dataclass(frozen=True)
class Shard:
    """A rectangle of a stored tensor."""

    part: Part
    rows: range
    columns: range | None
    """Columns that the rank holds; None if the tensor is a vector."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows),) if self.columns is None else (len(self.rows), len(self.columns))


@dataclass(frozen=True)
class Parameter:
    """Parts stacked along their first dimension."""

    name: str
    """Field of `decoder.Layer` or `decoder.DecoderWeights`; unique within the layer."""
    parts: tuple[Part, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter, before ranks share it."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @property
    def is_matrix(self) -> bool:
        """Whether the parameter is a matrix that rows are multiplied with. All others are vectors."""
        return len(self.shape) == 2

    def shard_shape(self, rank: int, size: int) -> tuple[int, ...]:
        """Shape of the share that one of `size` ranks holds."""
        shards = self.shards(rank, size)
        return (sum(len(shard.rows) for shard in shards), *shards[0].shape[1:])

    def shards(self, rank: int, size: int) -> tuple[Shard, ...]:
        return tuple(part.shard(rank, size) for part in self.parts)


def model_parameters(facts: ModelFacts) -> tuple[Parameter, ...]:
    """Return the parameters outside the layers: embedding, final norm and output head."""
    embedding = (facts.vocab_size, facts.hidden_size)
    parameters = [
        _single("embedding", Part(TOKEN_EMBEDDING, embedding, Split.VOCABULARY)),
        _single("final_norm", Part("output_norm.weight", (facts.hidden_size,))),
    ]
    if not facts.tie_word_embeddings:
        parameters.append(_single("head", Part(OUTPUT_HEAD, embedding, Split.VOCABULARY)))
    return tuple(parameters)


def layer_parameters(facts: ModelFacts, layer: int) -> tuple[Parameter, ...]:
    """Return the parameters of one layer."""
    hidden, inner, head_dim = facts.hidden_size, facts.intermediate_size, facts.head_dim
    heads, kv_heads = facts.num_heads, facts.num_kv_heads
    blk = f"blk.{layer}"

    def qkv(kind: str, *columns: int) -> Parameter:
        kv_shape = (kv_heads * head_dim, *columns)
        return Parameter(
            f"qkv_{kind}",
            (
                Part(f"{blk}.attn_q.{kind}", (heads * head_dim, *columns), Split.OUTPUTS, heads, rotary=True),
                Part(f"{blk}.attn_k.{kind}", kv_shape, Split.OUTPUTS, kv_heads, rotary=True),
                Part(f"{blk}.attn_v.{kind}", kv_shape, Split.OUTPUTS, kv_heads),
            ),
        )

    def norm(name: str, stored: str, width: int) -> Parameter:
        return _single(name, Part(f"{blk}.{stored}.weight", (width,)))

    parameters = [
        norm("attention_norm", "attn_norm", hidden),
        qkv("weight", hidden),
        _single("output_weight", Part(f"{blk}.attn_output.weight", (hidden, heads * head_dim), Split.INPUTS)),
        norm("ffn_norm", "ffn_norm", hidden),
        Parameter(
            "gate_up_weight",
            (
                Part(f"{blk}.ffn_gate.weight", (inner, hidden), Split.OUTPUTS),
                Part(f"{blk}.ffn_up.weight", (inner, hidden), Split.OUTPUTS),
            ),
        ),
        _single("down_weight", Part(f"{blk}.ffn_down.weight", (hidden, inner), Split.INPUTS)),
    ]
    if facts.attention_bias:
        parameters.append(qkv("bias"))
    if facts.qk_norm:
        parameters += [norm("q_norm", "attn_q_norm", head_dim), norm("k_norm", "attn_k_norm", head_dim)]
    return tuple(parameters)


def _single(name: str, part: Part) -> Parameter:
    return Parameter(name, (part,))

"""What a file format has to offer so that weights can be read from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from engine.kernels.quantized import QuantizedWeight
from engine.models.parameters import Shard


class WeightSource(Protocol):
    """Stored tensors under canonical names (`engine.models.parameters`); names it can't translate stay as they are."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def stored_name(self, name: str) -> str:
        """What the tensor is called in the file, for messages."""
        ...

    def read(self, shard: Shard, out: Tensor) -> None:
        """Copy one tensor's shard into `out` (of its shape, any float type), rotary rows in the Hugging Face order."""
        ...

    def read_quantized(self, shard: Shard) -> QuantizedWeight | None:
        """A matrix's shard as it is stored, rows ordered as `read` does; None if it is not of a kind that can be used so."""
        ...

"""The header of a GGUF file: metadata and where each tensor lies. Tensor data is not touched.

GGUF (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little-endian:

    "GGUF" | version u32 | tensor count u64 | metadata count u64
    metadata: key, type u32, value            string: length u64, UTF-8;  array: type u32, count u64, items
    tensors:  name, dimension count u32, dimensions u64 (innermost first), ggml type u32, offset u64
    padding to general.alignment | tensor data, to which the offsets refer

The reader of the `gguf` package makes numpy views of every vocabulary entry, which takes 2 s for 49,152 tokens; workers
restart under a deadline and take 0.04 s here. The types and their block sizes are that package's. Nothing in the file is
trusted: every length is checked against the file's size before it is used.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType

from configs.arithmetic import ceil_div
from configs.fields import model_error

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_MIN_ALIGNMENT = 8
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF value type to `struct` format."""
_MIN_ENTRY_BYTES = 13
"""A metadata entry or tensor is at least this long, which bounds their counts by the file's size."""
_U64 = struct.Struct("<Q")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a GGUF file: its shape, its type, and where its data lie."""

    name: str
    shape: tuple[int, ...]
    """Sizes of the dimensions, the outermost first, as torch and numpy have it: `[out, in]` for a linear layer."""
    type_name: str
    """Name of the ggml type, such as `F32` or `Q4_1`: a `gguf.GGMLQuantizationType`."""
    offset: int
    """Position of the first byte, counted from the start of the file."""
    num_bytes: int


@dataclass(frozen=True)
class GgufIndex:
    """The header of a GGUF file."""

    path: Path
    metadata: dict[str, Any]
    """The values by key: int, float, bool, str, or a list of one of them."""
    tensors: dict[str, GgufTensor]
    """The tensors by name, in the file's order."""


def read_gguf_index(path: Path) -> GgufIndex:
    """Read and check the header of a GGUF file.

    Raises ConfigError, with the file and what is wrong with it, for a file that is unreadable, foreign or truncated;
    every tensor of a returned index lies inside the file.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise model_error(f"{path}: not a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Header(path, data).read()
    except OSError as error:
        raise model_error(f"{path}: can't be read: {error.strerror}") from None


class _Header:
    """A cursor over the file. `_position` is the next byte."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._position = len(_MAGIC)

    def read(self) -> GgufIndex:
        version = self._scalar("I")
        if version & 0xFFFF == 0:
            raise model_error(f"{self._path}: big-endian GGUF is not supported; convert the model to little-endian")
        if version not in _VERSIONS:
            raise model_error(f"{self._path}: GGUF version {version} is not supported; use version 3")
        num_tensors, num_entries = self._count("Q"), self._count("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            if key in metadata:
                raise model_error(f"{self._path}: the key {key} is there twice")
            metadata[key] = self._value(self._scalar("I"))
        raw_tensors = [self._raw_tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < _MIN_ALIGNMENT or alignment & (alignment - 1):
            wanted = f"a power of two from {_MIN_ALIGNMENT} on"
            raise model_error(f"{self._path}: general.alignment should be {wanted}, not {alignment!r:.40}")
        data_start = ceil_div(self._position, alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, dimensions, type_id, offset in raw_tensors:
            if name in tensors:
                raise model_error(f"{self._path}: the tensor {name} is there twice")
            if offset % alignment:
                raise model_error(f"{self._path}: damaged: tensor {name} lies at no multiple of general.alignment, {alignment}")
            tensors[name] = self._tensor(name, dimensions, type_id, data_start + offset)
        return GgufIndex(self._path, metadata, tensors)

    def _tensor(self, name: str, dimensions: tuple[int, ...], type_id: int, offset: int) -> GgufTensor:
        try:
            ggml_type = GGMLQuantizationType(type_id)
        except ValueError:
            raise model_error(f"{self._path}: tensor {name} has the unknown ggml type {type_id}") from None
        block_elements, block_bytes = GGML_QUANT_SIZES[ggml_type]
        if not all(dimensions) or dimensions[0] % block_elements:
            raise model_error(f"{self._path}: tensor {name} of type {ggml_type.name} can't have rows of {dimensions[0]}")
        num_bytes = math.prod(dimensions) // block_elements * block_bytes
        if offset + num_bytes > self._size:
            missing = offset + num_bytes - self._size
            raise model_error(f"{self._path}: truncated: {missing:,} bytes are missing at the end (tensor {name})")
        return GgufTensor(name=name, shape=dimensions[::-1], type_name=ggml_type.name, offset=offset, num_bytes=num_bytes)

    def _raw_tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dimensions = self._scalar("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise model_error(f"{self._path}: tensor {name} has {num_dimensions} dimensions where 1 to {_MAX_DIMENSIONS} go")
        dimensions = self._unpack(struct.Struct(f"<{num_dimensions}Q"))
        return name, dimensions, self._scalar("I"), self._scalar("Q")

    def _value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self._string()
        if type_id == _ARRAY:
            return self._array()
        return self._scalar(self._format(type_id))

    def _array(self) -> list[Any]:
        type_id = self._scalar("I")
        if type_id == _STRING:
            return self._strings(self._count("Q", item_bytes=_U64.size))
        item = self._format(type_id)
        count = self._count("Q", item_bytes=struct.calcsize(f"<{item}"))
        return list(self._unpack(struct.Struct(f"<{count}{item}")))

    def _strings(self, count: int) -> list[str]:
        """The hot loop: a vocabulary has 50,000 to 300,000 entries."""
        data, position, size, length_at = self._data, self._position, self._size, _U64.unpack_from
        strings = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + length_at(data, position)[0]
                if position > size:
                    raise self._truncated()
                strings.append(data[start:position].decode())
        except struct.error:
            raise self._truncated() from None
        except UnicodeDecodeError:
            raise self._not_utf8() from None
        self._position = position
        return strings

    def _string(self) -> str:
        start = self._position + _U64.size
        end = start + self._scalar("Q")
        if end > self._size:
            raise self._truncated()
        self._position = end
        try:
            return self._data[start:end].decode()
        except UnicodeDecodeError:
            raise self._not_utf8() from None

    def _format(self, type_id: int) -> str:
        if type_id not in _SCALARS:
            raise model_error(f"{self._path}: metadata of the unknown type {type_id}")
        return _SCALARS[type_id]

    def _count(self, item: str, item_bytes: int = _MIN_ENTRY_BYTES) -> int:
        """A number of things that follow, each at least `item_bytes` long."""
        count: int = self._scalar(item)
        if count * item_bytes > self._size - self._position:
            raise self._truncated()
        return count

    def _scalar(self, item: str) -> Any:
        return self._unpack(struct.Struct(f"<{item}"))[0]

    def _unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        if self._position + layout.size > self._size:
            raise self._truncated()
        values = layout.unpack_from(self._data, self._position)
        self._position += layout.size
        return values

    def _truncated(self) -> Exception:
        return model_error(f"{self._path}: truncated: the header runs past the end of the file ({self._size:,} bytes)")

    def _not_utf8(self) -> Exception:
        return model_error(f"{self._path}: damaged: a string in the header is not UTF-8")

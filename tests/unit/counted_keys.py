"""Keys of a prompt that count how often one of them is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class CountedKeys(list[bytes]):
    """A list that notes in `reads` how many of its items were looked at, one by one, in slices or in a walk."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.reads += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Iterator[bytes]:
        self.reads += len(self)
        return super().__iter__()

"""Calls of native operators, noted and made again: a decode step without the Python around its operators.

    with library.recording(recording):   what is computed is noted, too
    recording.replay()                   the same calls, which read and write the same memory

Python takes about 6 microseconds for an operator, checks included, of which the call itself is one. A call is noted with the
addresses that it was made with. So whoever records keeps the memory that it gave, and fills it before each replay; and what is
not computed by a call of `Calls.make` is not computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Calls:
    """Makes calls, and the memory for what they compute."""

    def make(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function that writes what it computes into memory that it is given."""
        function(*arguments)

    def result(self, rows: int, outputs: int, dtype: torch.dtype) -> Tensor:
        """Memory for a product's result, [rows, outputs]."""
        return torch.empty((rows, outputs), dtype=dtype)


class Recording(Calls):
    """Notes the calls that it makes. Results are good until the next one of their shape."""

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._results: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def make(self, function: Callable[..., Any], *arguments: Any) -> None:
        function(*arguments)
        self._calls.append((function, arguments))

    def result(self, rows: int, outputs: int, dtype: torch.dtype) -> Tensor:
        key = rows, outputs, dtype
        if key not in self._results:
            self._results[key] = super().result(*key)
        return self._results[key]

    def replay(self) -> None:
        """Make all calls again, in their order."""
        for function, arguments in self._calls:
            function(*arguments)

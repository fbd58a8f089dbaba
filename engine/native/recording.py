"""Calls of native operators, noted and made again: a decode step without the Python around its operators.

    with library.recording() as recording:   what is computed is noted, too
    recording.replay()                       the same calls, which read and write the same memory

Python takes about 6 microseconds for an operator, checks included, of which the call itself is one or two; and each call takes
the interpreter's lock again, for which other threads may keep it waiting. Operators that follow each other are made again by
one call of C++ (scalar/replay.cpp) instead.

A call is noted with the addresses that it was made with. So whoever records keeps the memory that it gave, and fills it before
each replay; and what is not computed by a call of `Calls.make` is not computed again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

_MAX_WORDS = 15
"""Whole numbers and pointers that an operator takes at most: `kWords` of scalar/replay.cpp."""


class _Call(ctypes.Structure):
    """`Call` of scalar/replay.cpp."""

    _fields_ = (("function", ctypes.c_void_p), ("words", ctypes.c_int64 * _MAX_WORDS), ("number", ctypes.c_float))


REPLAY_SIGNATURE = (ctypes.POINTER(_Call), ctypes.c_int64)
"""Types of the arguments of scalar/replay.cpp."""


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

    def __init__(self, replay: Callable[..., None]) -> None:
        """`replay` is the compiled function of scalar/replay.cpp."""
        self._replay = replay
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._parts: list[Callable[[], Any]] = []
        """Functions that make the noted calls again, in their order: operators that follow each other share one."""
        self._results: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def make(self, function: Callable[..., Any], *arguments: Any) -> None:
        function(*arguments)
        self._calls.append((function, arguments))

    def result(self, rows: int, outputs: int, dtype: torch.dtype) -> Tensor:
        key = rows, outputs, dtype
        if key not in self._results:
            self._results[key] = super().result(*key)
        return self._results[key]

    def end(self) -> None:
        """Prepare `replay` from the calls that were noted. The recording takes no further ones."""
        for are_operators, together in groupby(self._calls, lambda call: hasattr(call[0], "argtypes")):
            calls = list(together)
            if are_operators:
                noted = (_Call * len(calls))(*(_noted(*call) for call in calls))
                self._parts.append(partial(self._replay, noted, len(calls)))
            else:
                self._parts += [partial(function, *arguments) for function, arguments in calls]
        self._calls.clear()

    def replay(self) -> None:
        """Make all calls again, in their order."""
        for part in self._parts:
            part()


def _noted(function: Any, arguments: tuple[Any, ...]) -> _Call:
    """A call of an operator, whose types are declared."""
    words: list[int] = []
    numbers = [0.0]
    for kind, argument in zip(function.argtypes, arguments, strict=True):
        (numbers if kind is ctypes.c_float else words).append(argument)
    assert len(words) <= _MAX_WORDS
    assert len(numbers) <= 2
    return _Call(ctypes.cast(function, ctypes.c_void_p), (ctypes.c_int64 * _MAX_WORDS)(*words), numbers[-1])

"""Wakes an asyncio loop at a moment, to a few microseconds: Linux's timerfd. The loop's own timers are good to a millisecond,
and a thread that sleeps has to get the interpreter back from all others before it can say so.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from contextlib import suppress

_LIBC = ctypes.CDLL(None, use_errno=True)
_ABSOLUTE = 1
"""TFD_TIMER_ABSTIME."""


class _Seconds(ctypes.Structure):
    _fields_ = (("whole", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Seconds), ("first", _Seconds))


class Alarm:
    """One moment at a time. Made on a running event loop."""

    def __init__(self) -> None:
        self._fd = _checked(_LIBC.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._ring)
        self._waiting: asyncio.Future[None] | None = None

    async def until(self, moment: float) -> None:
        """Return at this moment of `time.monotonic()`, or at once if it is over."""
        if moment <= time.monotonic():
            return
        whole, nanoseconds = divmod(int(moment * 1e9), 1_000_000_000)
        setting = _Setting(_Seconds(0, 0), _Seconds(whole, nanoseconds))
        self._waiting = self._loop.create_future()
        _checked(_LIBC.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(setting), None))
        await self._waiting

    def close(self) -> None:
        """Give the timer back. Nobody waits any more."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _ring(self) -> None:
        with suppress(BlockingIOError):  # it was set again since
            os.read(self._fd, 8)
            if self._waiting is not None and not self._waiting.done():
                self._waiting.set_result(None)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

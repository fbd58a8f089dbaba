"""Asks a process of its own what is wrong with a grammar: llguidance never reads one within a router.

    no process ──a grammar──► starting ──► asked ──► idle ──another grammar──► asked ...
                                 └───────────┴── no answer: it is ended, and the client may try again

Some grammars keep llguidance busy until memory is out, and a chain of some thousand names uses up its stack. Which ones do so
can't be told from their text. The process (`router.text.grammar_process`) has a copy of itself check each grammar, within
bounds of time and memory. There are as many processes as threads that ask at a time. They end with the router.
"""

from __future__ import annotations

import atexit
import os
import socket
import struct
import subprocess
import sys
from collections import deque
from enum import IntEnum

from protocol.errors import OverloadedError

REQUEST_HEAD = struct.Struct(">II")
"""llguidance's fuel, and bytes of the grammar, which follows."""
ANSWER_HEAD = struct.Struct(">BI")
"""A verdict, and bytes of what llguidance says, which follows."""
_WAIT_S = 10.0
_COMMAND = (sys.executable, "-P", "-m", "router.text.grammar_process")


class Verdict(IntEnum):
    """How the check of a grammar ended."""

    SAID = 0
    """llguidance says what is wrong with it, or that nothing is."""
    TOO_MUCH = 1
    """It takes too much time or memory."""
    UNKNOWN = 2
    """The machine had no time or memory for the check."""


def problem_of(grammar: str, fuel: int) -> str:
    """Return what is wrong with a grammar; empty if nothing is. `fuel` is how much work llguidance may have with it.

    Blocks: to be called in a thread. Raises OverloadedError if it can't be found out now.
    """
    data = grammar.encode(errors="surrogatepass")
    try:
        verdict, said = _asked(data, fuel)
    except (OSError, EOFError, subprocess.SubprocessError):
        verdict, said = Verdict.UNKNOWN, ""
    if verdict is Verdict.UNKNOWN:
        raise OverloadedError("there is no time or memory to check the answer's form now; try again", retry_after_s=1.0)
    return "it takes too much time or memory to follow" if verdict is Verdict.TOO_MUCH else said


def _asked(grammar: bytes, fuel: int) -> tuple[Verdict, str]:
    if _IDLE:
        try:
            return _answer(_IDLE.pop(), grammar, fuel)
        except (ConnectionError, EOFError, IndexError):
            pass  # it has ended meanwhile, or another thread has it
    return _answer(_Process(), grammar, fuel)


def _answer(process: _Process, grammar: bytes, fuel: int) -> tuple[Verdict, str]:
    try:
        answer = process.ask(grammar, fuel)
    except BaseException:
        process.end()
        raise
    _IDLE.append(process)
    return answer


class _Process:
    """A process that checks one grammar after the other."""

    def __init__(self) -> None:
        """Raises OSError if there can be none now."""
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_WAIT_S)
        path = os.pathsep.join(filter(None, sys.path))
        try:
            with theirs:
                its = theirs.fileno()
                self._process = subprocess.Popen(_COMMAND, stdin=its, stdout=its, env={"PYTHONPATH": path})
        except BaseException:
            self._socket.close()
            raise

    def ask(self, grammar: bytes, fuel: int) -> tuple[Verdict, str]:
        """Raises OSError or EOFError if there is no answer: after that it can't be asked again."""
        self._socket.sendall(REQUEST_HEAD.pack(fuel, len(grammar)) + grammar)
        verdict, size = ANSWER_HEAD.unpack(self._receive(ANSWER_HEAD.size))
        return Verdict(verdict), self._receive(size).decode(errors="replace")

    def end(self) -> None:
        """Return when it has ended."""
        self._socket.close()
        self._process.kill()
        self._process.wait(_WAIT_S)

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self._socket.recv(size - len(data))
            if not more:
                raise EOFError("it has ended")
            data += more
        return data


_IDLE: deque[_Process] = deque()
"""Processes that nobody asks now. Threads share it."""


@atexit.register
def _end_all() -> None:
    while _IDLE:
        _IDLE.pop().end()

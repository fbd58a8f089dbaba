"""The process that checks grammars: `python -m router.text.grammar_process`, the child of one router.

    request: fuel, grammar ──► a copy of the process checks it, and ends ──► answer: verdict, what is wrong ──► request ...

A copy that takes more than CHECK_S, or more memory or stack than it may have, dies of it, also in the middle of foreign code.
The process ends when its input does: whatever ends the router (`router.text.grammar_checks`) ends it.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import BinaryIO, NoReturn

from llguidance import LLMatcher, LLParserLimits

from router.text.grammar_checks import ANSWER_HEAD, REQUEST_HEAD, Verdict

CHECK_S = 1.2
"""Seconds of a processor's time that a check may take."""
_WALL_S = 5.0
"""Seconds that it may take where others keep the processors busy."""
_MAX_MEMORY = 2**29
_MAX_STACK = 2**21
"""A quarter of what a worker's thread has, which compiles what has passed."""
_MAX_SAID = 4096
_MACHINES = (-signal.SIGKILL, -signal.SIGALRM)
"""Ends of a copy that the grammar is not to blame for: it was killed for others' memory, or got no processor."""


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer one request after the other, until there are no more."""
    while len(head := requests.read(REQUEST_HEAD.size)) == REQUEST_HEAD.size:
        fuel, size = REQUEST_HEAD.unpack(head)
        grammar = requests.read(size)
        if len(grammar) < size:
            return
        verdict, said = _found_by_copy(grammar, fuel)
        answers.write(ANSWER_HEAD.pack(verdict, len(said)) + said)
        answers.flush()


def _found_by_copy(grammar: bytes, fuel: int) -> tuple[Verdict, bytes]:
    reader, writer = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(reader)
        os.close(writer)
        return Verdict.UNKNOWN, b""
    if not pid:
        _check(grammar, fuel, writer)
    os.close(writer)
    with open(reader, "rb") as pipe:
        said = pipe.read()
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if ended:
        return (Verdict.UNKNOWN if ended in _MACHINES else Verdict.TOO_MUCH), b""
    return Verdict.SAID, said


def _check(grammar: bytes, fuel: int, writer: int) -> NoReturn:
    """Write what is wrong with a grammar, or nothing, and end. The signals' default is to end the process, too."""
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
        resource.setrlimit(resource.RLIMIT_STACK, (_MAX_STACK, _MAX_STACK))
        signal.setitimer(signal.ITIMER_PROF, CHECK_S)
        signal.setitimer(signal.ITIMER_REAL, _WALL_S)
        limits = LLParserLimits(initial_lexer_fuel=fuel)
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar.decode(errors="surrogatepass"), limits=limits)
        os.write(writer, messages[0].encode()[:_MAX_SAID] if failed else b"")
        code = 0
    finally:
        os._exit(code)


def main() -> None:
    """Run until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the router decides when it ends
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()

"""Checks a grammar, where it has to be in a process of its own, which `python -m router.text.grammar_process` is.

llguidance looks for text that several patterns match at once, and a hundred patterns keep it busy until memory is out. In that
process it ends by itself: after CHECK_S, or when the memory is used up.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys

from llguidance import LLMatcher, LLParserLimits

CHECK_S = 1.2
"""Seconds that the check may take."""
_START_S = 5.0
_MAX_MEMORY = 2**30
_COMMAND = (sys.executable, "-P", "-m", "router.text.grammar_process")


def problem_of(grammar: str, fuel: int) -> str:
    """Return what llguidance says is wrong with a grammar; empty if nothing is. `fuel` is how much work it may have."""
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=LLParserLimits(initial_lexer_fuel=fuel))
    return messages[0] if failed else ""


def problem_found_apart(grammar: str, fuel: int, path: str) -> str:
    """Return what is wrong with a grammar, as found by a process of its own. Blocks: to be called in a thread.

    `path` is where that process finds modules, as in PYTHONPATH.
    """
    try:
        checked = subprocess.run(
            (*_COMMAND, str(fuel)),
            input=grammar.encode(),
            stdout=subprocess.PIPE,
            env={"PYTHONPATH": path},
            timeout=_START_S + CHECK_S,
            check=True,
        )
    except (subprocess.SubprocessError, OSError):
        return "it takes too much time or memory to follow"
    return checked.stdout.decode()


def main() -> None:
    """Check the grammar that is on the standard input."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    grammar = sys.stdin.buffer.read().decode()
    signal.setitimer(signal.ITIMER_REAL, CHECK_S)  # its signal ends the process, also in the middle of foreign code
    sys.stdout.buffer.write(problem_of(grammar, int(sys.argv[1])).encode())


if __name__ == "__main__":
    main()

"""How the command `tandem` ends when something fails: its exit codes, and one line on stderr."""

from __future__ import annotations

import io
import re
import sys

import typer

from protocol.errors import TandemError

MENDABLE = 2
"""Something that the operator can mend."""
UNAVAILABLE = 3
"""Of `tandem serve` alone: the cluster did not come up, or was lost, and the next start may succeed."""
INTERRUPTED = 130

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """A text of others, without the characters that would command a terminal. Line feeds and tabs stay."""
    return _CONTROLS.sub("", text)


def replace_what_has_no_code() -> None:
    """Have standard output print a question mark for each character that its encoding does not have.

    Python has standard error write such a character's number.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # it is None where it was closed
        sys.stdout.reconfigure(errors="replace")


def say(error: TandemError | typer.TyperException) -> None:
    """Print what an error says in one line on stderr."""
    text = error.message if isinstance(error, TandemError) else error.format_message()
    if text := printable(" ".join(text.split())):  # without arguments, the help has been printed and the error says nothing
        print(f"tandem: {text}", file=sys.stderr)  # noqa: T201

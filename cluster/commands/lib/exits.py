"""How the command `tandem` ends when something fails: its exit codes, and one line on stderr."""

from __future__ import annotations

import sys

import typer

from protocol.errors import TandemError

MENDABLE = 2
"""Something that the operator can mend."""
UNAVAILABLE = 3
"""Of `tandem serve` alone: the cluster did not come up, or was lost, and the next start may succeed."""
INTERRUPTED = 130


def say(error: TandemError | typer.TyperException) -> None:
    """Print what an error says in one line on stderr."""
    text = error.message if isinstance(error, TandemError) else error.format_message()
    if text := " ".join(text.split()):  # without arguments, the help has been printed and the error says nothing
        print(f"tandem: {text}", file=sys.stderr)  # noqa: T201

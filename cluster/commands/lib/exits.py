"""How the command `tandem` ends when something fails: its exit codes, and one line on stderr."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress

import typer

from protocol.errors import ConfigError, TandemError, printable

MENDABLE = 2
"""Something that the operator can mend."""
UNAVAILABLE = 3
"""Of `tandem serve` alone: the cluster did not come up, or was lost, and the next start may succeed."""
INTERRUPTED = 130


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
        with suppress(OSError):  # it may be on the full disk that this tells of
            print(f"tandem: {text}", file=sys.stderr)  # noqa: T201


def full_disk(error: OSError) -> TandemError:
    """Return what to say of an error where a disk is full. Raises any other again."""
    if error.errno != errno.ENOSPC:
        raise error
    return ConfigError(f"{error.filename or 'the output, or a file,'} can't be written: {error.strerror}")


def drop_unwritten() -> None:
    """Give up what standard output and error have not taken. Python would try again at its end, and exit with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)

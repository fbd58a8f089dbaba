"""Finds what a client's grammar asks for beside text: temperatures of rules, and tokens by their ids.

The notation is llguidance's dialect of Lark. Strings, patterns and comments of a grammar are passed over.
"""

from __future__ import annotations

import re

_QUOTED = re.compile(r'//[^\n]*|#[^\n]*|"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\\n])+/?')
"""What is not closed counts up to the end of its line, so that a search takes time by the grammar's length."""
_TEMPERATURE = re.compile(r"\[[^\[\]\n]*\btemperature\s*=")
_TOKEN_RANGES = re.compile(r"<\[\^?([0-9,-]+)\]>")


def sets_temperature(grammar: str) -> bool:
    """Return whether a rule has the attribute `temperature`, as in `start[temperature=0.5]: /a+/`."""
    return _TEMPERATURE.search(_unquoted(grammar)) is not None


def largest_token_id(grammar: str) -> int:
    """Return the largest id in ranges of tokens such as `<[5,10-19]>` and `<[^5]>`; -1 if the grammar has none."""
    ranges = _TOKEN_RANGES.findall(_unquoted(grammar))
    return max((int(digits) for ids in ranges for digits in re.findall("[0-9]{1,20}", ids)), default=-1)


def _unquoted(grammar: str) -> str:
    return _QUOTED.sub(" ", grammar)

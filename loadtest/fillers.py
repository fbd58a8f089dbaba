"""Prompts of a given length, for datasets that have none: made of token ids, or of words where ids can't be sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from protocol.errors import InvalidRequestError

Prompt = str | tuple[int, ...]
Unit = str | int
"""A word or a token id."""
Draw = Callable[[np.random.Generator, int], list[Unit]]
"""A function that draws the given number of units at random."""

_WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you were
all her she there would their we him been has when who will no more if out so up said what its about than into them can only
other time new some could these two may first then do any like my now over such our man me even most made after also did
many off before must well back through years much where your way down should because long each just state those people too
world life day here work while last might great old year come since against go came right used take three
"""
COMMON_WORDS = tuple(_WORDS.split())
"""Words that are one token each in the vocabularies of GPT-2's kind and of Llama's, with a space in front."""


@dataclass(frozen=True)
class Filler:
    """What prompts are made of: `units` are drawn with equal probability."""

    units: Sequence[Unit]
    kind: str
    """`tokens` or `words`, which is about the same: the server's own count is in the result."""

    def draw(self, rng: np.random.Generator, num_units: int) -> list[Unit]:
        """Draw this many units at random."""
        picks = rng.integers(0, len(self.units), num_units)
        return [self.units[pick] for pick in picks]

    def prompt(self, units: Iterable[Unit]) -> Prompt:
        """Return the units as a prompt that can be sent."""
        if self.kind == "tokens":
            return tuple(int(unit) for unit in units)
        return " ".join(map(str, units))


def word_filler() -> Filler:
    """Return a filler of words, for chats and for servers that don't tell their token ids."""
    return Filler(COMMON_WORDS, "words")


def token_filler(token_ids: Iterable[int]) -> Filler:
    """Return a filler of the ids of a text, none of which is special. Raises InvalidRequestError if there are none."""
    distinct = sorted(set(token_ids))
    if not distinct:
        raise InvalidRequestError("the server's /tokenize makes nothing of a text", param="dataset_name")
    return Filler(distinct, "tokens")

"""How likely a stream's drafts are to be what is sampled: fading counts of its own drafts. Pure."""

from __future__ import annotations

FIRST_CHANCE = 0.6
"""What the drafts of a stream are expected to be that were looked up."""


class Acceptance:
    """Acceptance of one stream. A draft counts if those before it were right: what follows a wrong one says nothing."""

    def __init__(self, first_chance: float = FIRST_CHANCE, weight: float = 2.0, fading: float = 0.9) -> None:
        """Until something was seen, the chance is `first_chance`, which counts as so many drafts as `weight` says.

        `fading` is the weight of all earlier drafts beside a new one: with 0.9 about the latest ten count.
        """
        self._right = first_chance * weight
        self._looked_at = weight
        self._fading = fading

    @property
    def chance(self) -> float:
        """The chance that a draft is right if those before it are, between 0 and 1."""
        return self._right / self._looked_at

    def note(self, num_right: int, num_drafts: int) -> None:
        """Take note of `num_drafts` drafts in a row, of which the first `num_right` were right."""
        assert 0 <= num_right <= num_drafts, "no more are right than there were"
        looked_at = min(num_right + 1, num_drafts)
        left = self._fading**looked_at
        self._right = left * self._right + num_right
        self._looked_at = left * self._looked_at + looked_at

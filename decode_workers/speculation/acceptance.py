"""How likely a stream's drafts are to be what is sampled: fading counts of its own drafts. Pure."""

from __future__ import annotations

FIRST_CHANCE = 0.6
_FIRST_WEIGHT = 2.0
"""What a new stream's drafts are expected to be, and for how many drafts this counts."""
_FADING = 0.9
"""Weight of all earlier drafts beside a new one: about the latest ten count."""


class Acceptance:
    """Acceptance of one stream. A draft counts if those before it were right: what follows a wrong one says nothing."""

    def __init__(self, first_chance: float = FIRST_CHANCE) -> None:
        """Until something was seen, the chance is `first_chance`."""
        self._right = first_chance * _FIRST_WEIGHT
        self._looked_at = _FIRST_WEIGHT

    @property
    def chance(self) -> float:
        """The chance that a draft is right if those before it are, between 0 and 1."""
        return self._right / self._looked_at

    def note(self, num_right: int, num_drafts: int) -> None:
        """Take note of `num_drafts` drafts in a row, of which the first `num_right` were right."""
        assert 0 <= num_right <= num_drafts, "no more are right than there were"
        looked_at = min(num_right + 1, num_drafts)
        left = _FADING**looked_at
        self._right = left * self._right + num_right
        self._looked_at = left * self._looked_at + looked_at

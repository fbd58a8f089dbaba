"""Drafts of one step: further rows behind the streams' newest tokens, and which of them were right. Pure.

A draft is a token in the place after the newest one. Its row is computed in the same step, as if it had been chosen, and
sampled after: by the same sampler, with the history, counts, grammar and position that it would have then. What a row says
counts if the draft that it stands for is what the row before it says, and so on back to the newest token. So every token is
what it would be without drafts, and a wrong draft costs its row's time. Its KV lies behind what counts as computed, and is
written over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.batch import Chunk, SampledToken


@dataclass(frozen=True)
class DraftedStep:
    """What a step computes, and which of it are drafts."""

    chunks: Sequence[Chunk]
    """Each stream's chunk, its drafts' behind it."""
    counts: Sequence[int]
    """Number of drafts of each stream."""

    @property
    def num_drafts(self) -> int:
        """Number of drafts of all streams together."""
        return sum(self.counts)

    def results(self, outputs: Sequence[SampledToken | None]) -> list[tuple[SampledToken, ...]]:
        """Return the tokens of each stream in order: what its newest token's row says, and those of drafts that were right."""
        found, first = [], 0
        for count in self.counts:
            end = first + 1 + count
            found.append(_agreed(self.chunks[first:end], outputs[first:end]))
            first = end
        return found


def drafted_step(chunks: Sequence[Chunk], drafts: Sequence[Sequence[int]], *, joined: bool) -> DraftedStep:
    """Return the step of these chunks, each with its drafts behind it; most have none.

    `joined`: the rows of a stream may be computed as one chunk of a prompt is, because that changes no bits here.
    """
    computed: list[Chunk] = []
    counts = []
    for chunk, drafted in zip(chunks, drafts, strict=True):
        rows = _rows(chunk, drafted, joined) if drafted else []
        computed += [chunk, *rows]
        counts.append(len(rows))
    return DraftedStep(computed, counts)


def _rows(chunk: Chunk, drafted: Sequence[int], joined: bool) -> list[Chunk]:
    """Fewer than `drafted` where the grammar forbids some."""
    assert chunk.sampling is not None, "drafts follow what is sampled"
    states = [None] * len(drafted) if chunk.constraint is None else chunk.constraint.ahead(drafted)
    return [
        replace(
            chunk,
            token_ids=(drafted[i],),
            start=chunk.end + i,
            num_generated=chunk.num_generated + i + 1,
            tail=drafted[: i + 1],
            constraint=state,
            continues=joined,
        )
        for i, state in enumerate(states)
    ]


def _agreed(chunks: Sequence[Chunk], outputs: Sequence[SampledToken | None]) -> tuple[SampledToken, ...]:
    first = outputs[0]
    if first is None:
        return ()
    tokens = [first]
    for chunk, output in zip(chunks[1:], outputs[1:], strict=True):
        if chunk.token_ids[0] != tokens[-1].token_id or (chunk.constraint is not None and chunk.constraint.failed):
            break
        assert output is not None, "every draft is sampled after"
        tokens.append(output)
    return tuple(tokens)

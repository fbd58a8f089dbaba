"""What follows from measured times. Pure.

A library is chosen for its speed alone, among those that give the same bits. Where the difference is within the noise, or the
noise too large to tell, the order in which the instruction sets are listed decides, as it does without measurements.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from configs.profiles import RowsChoice, StepSizes

TIE = 1.1
"""A library that takes at most so many times as long as the fastest is as good."""
MOST_SPREAD = 0.25
"""Spread of the rounds, relative to their median, above which times say nothing."""
PREFILL_STEP_S = 0.15
"""What a step of a long prompt should take. A cancel, and a prompt that may go first, wait for the end of a step."""
CHUNK_STEP_S = 0.045
"""How long prompt tokens should hold running streams up at a time."""
SATURATED = 0.9
"""Share of the best tokens per second from which on a larger step is not worth the wait of those who share it."""
BATCH_TOKENS = (128, 256, 512, 1024, 2048)
"""Numbers of tokens that may become `prefill.max_batch_tokens`."""
CHUNK_TOKENS = (32, 64, 128, 256, 512)
"""Numbers of tokens that may become `decode.max_chunk_tokens`. Fewer take nearly as long: the weights have to be read."""


def spread(rounds: Sequence[float]) -> float:
    """Return the distance of the quartiles, relative to the median; 0 for a single round."""
    low, middle, high = _quartiles(rounds)
    return (high - low) / middle


def noisy(rounds: Mapping[str, Sequence[float]]) -> bool:
    """Tell whether the rounds vary too much to choose by: those of some library do, and they overlap those of the fastest."""
    quartiles = {name: _quartiles(each) for name, each in rounds.items()}
    fastest = min(quartiles, key=lambda name: quartiles[name][1])
    overlap = any(low <= quartiles[fastest][2] for name, (low, _, _) in quartiles.items() if name != fastest)
    return overlap and any(spread(each) > MOST_SPREAD for each in rounds.values())


def choose(rows: int, rounds: Mapping[str, Sequence[float]]) -> RowsChoice:
    """Return which library multiplies so many rows, by the seconds of each one's rounds; listed in the order of the rule.

    It is the first that is as good as the fastest, and the very first where the rounds are noisy.
    """
    seconds = {name: _quartiles(each)[1] for name, each in rounds.items()}
    unclear = noisy(rounds)
    limit = math.inf if unclear else TIE * min(seconds.values())
    chosen = next(name for name, median in seconds.items() if median <= limit)
    return RowsChoice(rows=rows, library=chosen, seconds=seconds, noisy=unclear)


def step_sizes(prefill_s: Mapping[int, float]) -> StepSizes:
    """Return the numbers of tokens for steps, by the measured seconds of steps of so many tokens at a prompt's beginning."""
    rates = {tokens: tokens / seconds for tokens, seconds in sorted(prefill_s.items())}
    saturated = next(tokens for tokens, rate in rates.items() if rate >= SATURATED * max(rates.values()))
    batch = _nearest(prefill_s, BATCH_TOKENS, PREFILL_STEP_S)
    return StepSizes(
        max_batch_tokens=batch,
        saturation_tokens=min(saturated, batch),
        max_chunk_tokens=_nearest(prefill_s, CHUNK_TOKENS, CHUNK_STEP_S),
    )


def _quartiles(rounds: Sequence[float]) -> tuple[float, float, float]:
    if len(rounds) == 1:
        return rounds[0], rounds[0], rounds[0]
    low, middle, high = statistics.quantiles(rounds, n=4, method="inclusive")
    return low, middle, high


def _nearest(prefill_s: Mapping[int, float], allowed: Sequence[int], wanted_s: float) -> int:
    """The measured one of the allowed numbers whose time is nearest to the wanted one, by ratio; the least if none was."""
    measured = [tokens for tokens in allowed if tokens in prefill_s]
    return min(measured, key=lambda tokens: abs(math.log(prefill_s[tokens] / wanted_s)), default=allowed[0])

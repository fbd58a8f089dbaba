"""How much of the prompts was cached: of all their tokens, of those that could be, and turn by turn. Pure.

What was cached is what the server's usage says. If no answer of a run tells it, there are no such figures. If some tell it, it
is 0 for the others: vLLM leaves it out where nothing was cached.

What could be cached is what an earlier request of the run had in its prompt or its answer, counted in tokens:

- of a further turn, prompt and answer of the turn before it, as the server's usage counted them;
- of a first turn, its system prompt, once a request that began with it had its first token.

Tokens that were cached beyond these, such as those of an earlier run, don't count as cached of what could be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from loadtest.conversations import Conversation
from loadtest.metrics import spread, values_of
from loadtest.records import RequestRecord, TurnRecord

TURN_PERCENTILES = (50.0, 99.0)
"""Percentiles of the time to first token that each turn has."""


def note_reusable(records: Sequence[TurnRecord], conversations: Sequence[Conversation]) -> None:
    """Write into each record how many tokens of its prompt could be cached. The records may come in any order."""
    computed = _system_prompts_computed(records, conversations)
    known = {(record.conversation_id, record.turn_index): record for record in records}
    for record in records:
        system = conversations[record.conversation_id].system
        before = known.get((record.conversation_id, record.turn_index - 1))
        tokens = 0
        if before is not None:
            tokens = before.input_tokens + before.completion_tokens
        elif system is not None and computed.get(system.number, math.inf) <= record.at_sent:
            tokens = system.num_tokens
        record.reusable_tokens = min(tokens, record.input_tokens)


def cache_figures(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return the cached tokens of answered requests, and their share of the prompt tokens; None if the server does not tell."""
    return _cached([record for record in records if record.ok], _is_told(records))


def conversation_figures(records: Sequence[TurnRecord], conversations: Sequence[Conversation]) -> dict[str, Any]:
    """Return how conversations ended, what could be cached and was, and all that turn by turn, with times in ms.

    The names are those of vLLM's `vllm-bench --multi-turn` where they mean the same.
    """
    done = [record for record in records if record.ok]
    told = _is_told(records)
    num_failed = len({record.conversation_id for record in records if not record.ok})
    planned = sum(len(conversation.turns) for conversation in conversations)
    most_turns = max((len(conversation.turns) for conversation in conversations), default=0)
    return {
        "num_conversations": len(conversations),
        "conversations_completed": len(conversations) - num_failed,
        "conversations_failed": num_failed,
        "turns_not_sent": planned - len(records),
        **_reused(done, told),
        "per_turn_metrics": [
            _turn(index, [record for record in records if record.turn_index == index], told) for index in range(most_turns)
        ],
    }


def _system_prompts_computed(records: Sequence[TurnRecord], conversations: Sequence[Conversation]) -> Mapping[int, float]:
    """When each system prompt was computed for the first time, in seconds from the run's start, by its number."""
    computed: dict[int, float] = {}
    for record in records:
        system = conversations[record.conversation_id].system
        if system is not None and record.ttft is not None:
            at = record.at_sent + record.ttft
            computed[system.number] = min(at, computed.get(system.number, at))
    return computed


def _turn(index: int, records: Sequence[TurnRecord], told: bool) -> dict[str, Any]:
    done = [record for record in records if record.ok]
    ttft = spread([1000 * value for value in values_of(records, "ttft")], TURN_PERCENTILES)
    return {
        "turn_index": index,
        "num_samples": len(records),
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": sum(record.input_tokens for record in done),
        "total_output_tokens": sum(record.completion_tokens for record in done),
        **_cached(done, told),
        **_reused(done, told),
        **{f"{name}_ttft_ms": value for name, value in ttft.items()},
    }


def _cached(done: Sequence[RequestRecord], told: bool) -> dict[str, Any]:
    cached = sum(record.cached_tokens or 0 for record in done)
    return {
        "total_cached_tokens": cached if told else None,
        "cached_share": _share(cached, sum(record.input_tokens for record in done)) if told else None,
    }


def _reused(done: Sequence[TurnRecord], told: bool) -> dict[str, Any]:
    reusable = sum(record.reusable_tokens or 0 for record in done)
    reused = sum(min(record.cached_tokens or 0, record.reusable_tokens or 0) for record in done)
    return {"total_reusable_tokens": reusable, "cached_of_reusable": _share(reused, reusable) if told else None}


def _is_told(records: Sequence[RequestRecord]) -> bool:
    return any(record.ok and record.cached_tokens is not None for record in records)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None

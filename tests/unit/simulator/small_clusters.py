"""Small simulated clusters whose times can be reckoned by hand."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from configs.loader import load_config
from configs.profiles import DecodeTime, PrefillTime
from configs.schema import ClusterConfig
from simulator.cluster import Shape
from simulator.profile import Overheads, Profile
from simulator.request import Request

PREFILL_TOKEN_S, STEP_S = 2.0**-10, 2.0**-7
"""Powers of two, so that sums are exact in any order."""
BLOCK = 16
"""Tokens in a block."""
STREAM_S, CONTEXT_TOKEN_S = 2.0**-12, 2.0**-17
OVERHEADS = Overheads(
    request_s=2.0**-8, message_s=2.0**-11, handoff_s=2.0**-9, handoff_token_s=2.0**-19, step_s=0.0, output_s=STREAM_S
)


def profile(overheads: Overheads = OVERHEADS) -> Profile:
    """Prefill is proportional to tokens; a decode step takes a fixed time, and a bit for each stream and token of context."""
    return Profile(
        prefill=(PrefillTime(tokens=512, start=0, seconds=512 * PREFILL_TOKEN_S),),
        decode=tuple(
            DecodeTime(batch=batch, context=context, seconds=STEP_S + CONTEXT_TOKEN_S * batch * context)
            for batch in (1, 64)
            for context in (256, 1024)
        ),
        overheads=overheads,
    )


def config(**overrides: int | str) -> ClusterConfig:
    """Steps of 128 prompt tokens and 4 streams, and pools of 64 blocks; keys have two underscores for a dot."""
    small: dict[str, int | str] = {"disaggregation": "always", "prefill.max_batch_tokens": 128, "decode.max_batch_size": 4}
    small |= {"prefill.kv_cache_tokens": 1024, "decode.kv_cache_tokens": 1024}
    return load_config(None, small | {k.replace("__", "."): v for k, v in overrides.items()})


@st.composite
def request_lists(draw: st.DrawFn) -> list[tuple[float, int, int, bool]]:
    """(gap before it, prompt tokens, answer tokens, begins as the others of its kind do)"""
    one = st.tuples(st.sampled_from([0.0, 0.125, 1.0]), st.integers(1, 400), st.integers(1, 120), st.booleans())
    return draw(st.lists(one, min_size=1, max_size=25))


def made(rows: list[tuple[float, int, int, bool]]) -> list[Request]:
    requests, at = [], 0.0
    for index, (gap, prompt_len, answer_len, shared) in enumerate(rows):
        at += gap
        requests.append(Request(index, at, [0 if shared else 1000 + index] * prompt_len, answer_len))
    return requests


shape_strategy = st.builds(Shape, st.integers(1, 3), st.integers(1, 3))
cluster_strategy = st.one_of(
    st.tuples(st.just("always"), shape_strategy),
    st.tuples(st.just("auto"), shape_strategy),
    st.tuples(st.just("never"), st.builds(Shape, st.just(0), st.integers(1, 3))),
)
"""(disaggregation, shape)"""


def next_turn(former: Request, index: int, arrival: float, question: Sequence[int], output_len: int) -> Request:
    """The prompt is the whole conversation so far, and what is asked now."""
    said = [*former.token_ids, *[former.index] * former.output_len]
    return Request(index, arrival, [*said, *question], output_len)


def blocks_of(num_tokens: int) -> int:
    """Tokens in full blocks."""
    return num_tokens // BLOCK * BLOCK

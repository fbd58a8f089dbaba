"""Why goals are missed, as far as it is known: a sentence for a figure of a result at a commit.

It is shown while the goal is missed and the result is of this commit. What is measured anew needs a reason of its own.
"""

from __future__ import annotations

from collections.abc import Collection

UNKNOWN = "not investigated"
_FEWER = "Fewer were run; `make bench` runs as many as the goal wants."

REASONS: dict[tuple[str, str, str], str] = {
    ("throughput_xeon", "one prefill and one decode worker / vLLM", "e4e14ee"): (
        "Products of four and eight bits did not use AMX at this commit."
    ),
    ("interference_avx512_bf16", "TTFT of the long prompts / vLLM's", "39b44e615007"): (
        "A prefill worker has one of the two cores; vLLM computes a prompt on both."
    ),
    ("kills_avx512_bf16", "decode workers killed", "a9b2d9748a78"): _FEWER,
    ("kills_avx512", "decode workers killed", "056d760440fc"): _FEWER,
    ("kills_avx2", "decode workers killed", "c2340de10055"): _FEWER,
    ("paced_kills", "minutes of faults", "f720062ca32a"): "It was ended early; `make bench` runs it for 20 minutes.",
    ("soak_avx512_bf16", "problems: wrong answers, leaks, processes that grew", "511f91636fd8"): (
        "Ray's head process grew by 18 MiB in the half hour from the second quarter to the last, in which workers and nodes "
        "came and went; it keeps records of those that were. Router and controller were not looked at: their names changed."
    ),
    ("autoscale", "a synthetic day: changes of direction, both roles", "df1c02151be2"): (
        "The mean length of prompts in a quarter of an hour varies by 5 %. Probably that takes sizes over an edge and back."
    ),
    ("scale", "simulated requests with 1,000 workers", "28e4a8a93fe7"): _FEWER,
    ("speculation_avx512_bf16", "random text, times as fast, lowest end of 95 %, 2 threads", "e18df7d08755"): (
        "Two threads are all cores of the machine, and tests ran beside these rounds at idle priority. Not looked into further."
    ),
}
"""By the name of the result, that of the figure, and the commit."""


def reason(result: str, figure: str, commits: Collection[str]) -> str:
    """Return why a result of these commits misses a goal, as far as it is known."""
    found = [REASONS[result, figure, commit] for commit in commits if (result, figure, commit) in REASONS]
    return found[0] if found else UNKNOWN

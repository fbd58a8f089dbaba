"""Why goals are missed, as far as it is known: a sentence for a figure of a result. It is shown while the goal is missed."""

from __future__ import annotations

_MACHINE = "It depends on the machine: on another day's, at a034a1c, it was "
_FEWER = "Fewer were run; `make bench` runs as many as the goal wants."

REASONS: dict[tuple[str, str], str] = {
    ("throughput_xeon", "one prefill and one decode worker / vLLM"): (
        "Products of four and eight bits did not use AMX then. They do now, which was not measured."
    ),
    ("goodput_avx512_bf16", "Azure's conversations, 500 / 30 ms: `auto` / vLLM"): f"{_MACHINE}2.4.",
    ("goodput_avx512_bf16", "Azure's conversations, 500 / 40 ms: `auto` / vLLM"): f"{_MACHINE}1.7.",
    ("goodput_avx512_bf16", "Azure's conversations, 1000 / 60 ms: `auto` / vLLM"): f"{_MACHINE}1.7.",
    ("interference_avx512_bf16", "TTFT of the long prompts / vLLM's"): (
        "A prefill worker has one of the two cores; vLLM computes a prompt on both."
    ),
    ("kills_avx512_bf16", "decode workers killed"): _FEWER,
    ("kills_avx512", "decode workers killed"): _FEWER,
    ("kills_avx2", "decode workers killed"): _FEWER,
    ("paced_kills", "minutes of faults"): "It was ended early; `make bench` runs it for 20 minutes.",
    ("scale", "simulated requests with 1,000 workers"): _FEWER,
    ("autoscale", "Azure's hour: worker-hours / the oracle's"): (
        "What was needed for a peak is held for two minutes and more, which is long in an hour of ten minutes."
    ),
    ("autoscale", "a synthetic day: changes of direction, both roles"): (
        "Demand near the edge of a size makes it swing until the hold has grown."
    ),
    ("speculation_avx512_bf16", "8 streams of random text, times as fast, lower end of 95 %, 1 thread"): (
        "Three rounds are too few: the mean is 1.01."
    ),
}
"""By the name of the result and that of the figure."""

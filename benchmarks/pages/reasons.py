"""Why goals are missed, as far as it is known: a sentence for a figure of a result at a commit.

It is shown while the goal is missed and the result is of this commit. What is measured anew needs a reason of its own.
"""

from __future__ import annotations

from collections.abc import Collection

UNKNOWN = "not investigated"
_ANOTHER_DAY = "vLLM's figure varies with the machine: on another one, at a034a1c, this ratio was {}. The cause is unknown."
_BUSY = "The 32 workers took all of both cores at this pace, so requests waited for a processor. The simulator's do not."
_ATTENTION = (
    "Attention is bound by arithmetic there: with KV in the processor's caches, int8 takes longer than bfloat16. Multiplying "
    "bytes as whole numbers was tried; it gained too little for other bits."
)
_FEWER = "Fewer were run; `make bench` runs as many as the goal wants."

REASONS: dict[tuple[str, str, str], str] = {
    ("engine_amx", "prefill of 256 and 1,024 tokens / vLLM's, lowest", "f7dd191f27cc"): (
        "One round. It is that of 1,024 tokens with one thread, whose products take 1.2 times as long as oneDNN's in bfloat16; "
        "with two threads the ratio is 1.16."
    ),
    ("engine_amx", "decode of 1 at 256 / llama.cpp's, lowest", "f7dd191f27cc"): (
        "One row's products are bound by unpacking: 66 MB of weights in four bits take 8.9 ms, and reading them would take 4.4."
    ),
    ("engine_avx512", "prefill of 256 and 1,024 tokens / llama.cpp's, lowest", "7e243cecd5e8"): (
        "Without AMX this processor's bfloat16 is half as fast as its float32; on the EPYC it is twice as fast. The goal "
        "would be 84 % of the processor's limit, and 65 % were reached."
    ),
    ("engine_avx2", "prefill of 256 and 1,024 tokens / vLLM's, lowest", "3cf5c85d610e"): (
        "Two rounds. It is that of 256 tokens with two threads, which made 487 tokens/s in the first round and 295 in the "
        "second, as few as one thread; the other ratios are 1.14 to 1.27."
    ),
    ("overhead_avx512_bf16", "processor time outside the engine for a token", "0d79c5a366d0"): (
        "The router takes 114 µs of it, the decode worker 62, HAProxy 26, and the prefill worker 16. Rounds gave 202 to 228; "
        "why it was 166 at a1142cf was not investigated."
    ),
    ("overhead_avx512", "processor time outside the engine for a token", "338b9cf4e228"): (
        "The router takes 130 µs of it, the decode worker 114, the prefill worker 33, and HAProxy 26; idle use is subtracted."
    ),
    ("interference_avx512_bf16", "TTFT of the long prompts / vLLM's", "0d79c5a366d0"): (
        "A prefill worker has one of the two cores; vLLM computes a prompt on both."
    ),
    ("cache_tier", "cached tokens / the bound for all pools and the tier", "5aba7bd78daf"): _BUSY,
    ("cache_tier", "gap to one ideal cache closed, TTFT p50", "5aba7bd78daf"): _BUSY,
    ("cache_tier", "gap to one ideal cache closed, TTFT p99", "5aba7bd78daf"): _BUSY,
    ("cache_tier", "the simulator's TTFT is off by at most", "5aba7bd78daf"): _BUSY,
    ("goodput_avx512_bf16", "Azure's conversations, 500 / 30 ms: `auto` / vLLM", "39b44e615007"): _ANOTHER_DAY.format("2.4"),
    ("goodput_avx512_bf16", "Azure's conversations, 500 / 40 ms: `auto` / vLLM", "39b44e615007"): _ANOTHER_DAY.format("1.7"),
    ("goodput_avx512_bf16", "Azure's conversations, 1000 / 60 ms: `auto` / vLLM", "39b44e615007"): _ANOTHER_DAY.format("1.7"),
    ("cache_index", "lookup and choice, p99 of the slowest kind", "0ac26e6d0578"): (
        "Of the median of 155 µs the lookup takes 39; the rest is the choice among 1,000 workers."
    ),
    ("certify_h100", "decode step of 16 at 4,096 / its byte floor", "44872db4d914"): (
        "By torch's profiler, products take 5.6 ms, 0.6 above their floor, attention 3.0, small kernels 0.4, and the time "
        "between kernels 0.6."
    ),
    ("kv_formats_avx2", "decode of 16 at 1,024 with KV in int8, times as fast", "cf46e174d91e"): _ATTENTION,
    ("kv_formats_avx2", "decode of 1 at 7,900 with KV in int8, times as fast", "cf46e174d91e"): _ATTENTION,
    ("kills_avx512_bf16", "decode workers killed", "a9b2d9748a78"): _FEWER,
    ("kills_avx512", "decode workers killed", "056d760440fc"): _FEWER,
    ("kills_avx2", "decode workers killed", "c2340de10055"): _FEWER,
    ("kills_amx", "decode workers killed", "f7dd191f27cc+changes"): _FEWER,
    ("paced_kills", "minutes of faults", "f720062ca32a"): "It was ended early; `make bench` runs it for 20 minutes.",
    ("soak_avx512_bf16", "problems: wrong answers, leaks, processes that grew", "511f91636fd8"): (
        "Ray's head process grew by 18 MiB in the half hour from the second quarter to the last, in which workers and nodes "
        "came and went; it keeps records of those that were. Router and controller were not looked at: their names changed."
    ),
    ("autoscale", "a synthetic day: changes of direction, both roles", "df1c02151be2"): (
        "The mean length of prompts in a quarter of an hour varies by 5 %. Probably that takes sizes over an edge and back."
    ),
    ("scale", "simulated requests with 1,000 workers", "28e4a8a93fe7"): _FEWER,
    ("speculation_avx512_bf16", "random text, times as fast, lowest end of 95 %, 1 thread", "3e909d5bb8f3"): (
        "That is of 64 streams, where runs of one cluster differ by 10 %, so that ten pairs can't tell; the mean is 0.96. Of 1 "
        "and 8 streams it is 0.98 and 0.95."
    ),
    ("speculation_avx512_bf16", "random text, times as fast, lowest end of 95 %, 2 threads", "3e909d5bb8f3"): (
        "Prefill, both threads of decode, router and client take turns on two cores."
    ),
}
"""By the name of the result, that of the figure, and the commit."""


def reason(result: str, figure: str, commits: Collection[str]) -> str:
    """Return why a result of these commits misses a goal, as far as it is known."""
    found = [REASONS[result, figure, commit] for commit in commits if (result, figure, commit) in REASONS]
    return found[0] if found else UNKNOWN

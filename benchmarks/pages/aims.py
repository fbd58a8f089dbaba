"""The goals that the project has set itself, each once, by what they are about: with figures, with tests, or with neither.

A goal with a figure names the result and how the figure's name begins (`benchmarks/pages/figures/`). A goal of another kind is
kept by tests, which are named. Where there is neither, `absent` says why.
"""

from __future__ import annotations

from benchmarks.pages.aim import Aim, figures_of
from benchmarks.pages.gpu_aims import GPU_AIMS

_NO_SCRIPT = "No script measures it."
_GRID = "tests/unit/engine/test_instruction_sets.py"

AIMS: dict[str, tuple[Aim, ...]] = {
    "Speed on processors": (
        Aim("Prefill is as fast as vLLM's", figures_of("engine", "prefill of 256 and 1,024 tokens / vLLM's")),
        Aim("Decode of 1 to 64 at 256 is 1.2 times as fast as vLLM's", figures_of("engine", "decode of 1 to 64 at 256")),
        Aim("Decode of long contexts is 1.2 times as fast as vLLM's", figures_of("engine", "decode of 16 at 1,024")),
        Aim("Decode of 1 at 256 is 1.2 times as fast as llama.cpp's", figures_of("engine", "decode of 1 at 256")),
        Aim(
            "Prefill is 4 times as fast as llama.cpp's, and as fast with AMX",
            figures_of("engine", "prefill of 256 and 1,024 tokens / llama.cpp's"),
        ),
        Aim(
            "With AVX2, decode is 0.8 (one sequence) and 1.1 times (8 and 16) as fast as llama.cpp's",
            figures_of("engine", "AVX2: "),
            kind="avx2",
        ),
        Aim("Full servers with 16 streams make 1.3 times vLLM's tokens/s", figures_of("throughput", "one prefill and")),
        Aim(
            "Goodput of Azure's conversations is 2, 1.5 and 1.3 times vLLM's",
            figures_of("goodput", "Azure's conversations"),
        ),
        Aim(
            "Long prompts cost running streams 1.3 times their p99 gap at most, and wait 1.15 times as long as vLLM's",
            figures_of("interference", "p99 gap of 8 streams, ", "TTFT of the long prompts"),
        ),
        Aim("Outside the engine a token costs 120 µs of a processor at most", figures_of("overhead", "processor time")),
        Aim("Outside the engine a first token costs 5 ms at most", figures_of("overhead", "TTFT above")),
        Aim("Weights in four bits take 0.45 of bfloat16's memory", figures_of("memory", "weights as stored")),
        Aim("A whole cluster takes 2 GiB after 1,000 chats", figures_of("memory", "default cluster")),
        Aim(
            "A second worker starts in a second, imports apart, and adds 10 % of its weights' memory",
            (*figures_of("engine", "start of a worker"), *figures_of("memory", "memory that a second")),
        ),
        Aim("A row's bits do not depend on other rows, cuts, caches or threads", tests=(_GRID,)),
        Aim(
            "200 kills of decode workers in the default format leave every stream as it was",
            figures_of("kills", "streams with the undisturbed tokens", "decode workers killed"),
        ),
        Aim("One arithmetic costs 5 % of throughput at most", figures_of("one_arithmetic", "tokens/s")),
        Aim("A slow kernel is not chosen after `tandem profile`", tests=("tests/unit/engine/test_profiling.py",)),
        Aim("The default of `disaggregation` is the better one", figures_of("conditional", "TTFT of auto")),
    ),
    "One cache": (
        Aim(
            "By cache, 3.5 times as many tokens are cached as by load alone, and 85 % of the bound",
            figures_of("cache_routing", "cached tokens"),
        ),
        Aim("With the memory tier, 95 % of the bound is cached", figures_of("cache_tier", "cached tokens")),
        Aim(
            "TTFT on the paced cluster closes 80 % of the gap between load alone and one ideal cache, both simulated",
            figures_of("cache_tier", "gap to one ideal cache"),
        ),
        Aim("The simulator is within 10 % of the paced cluster", figures_of("cache_tier", "the simulator's TTFT")),
        Aim("Of chats, 90 % of what could be cached is", figures_of("cached_chats", "cached, of what could be, by cache")),
        Aim(
            "TTFT takes 0.3 of computing from another pool and from memory, 0.4 from disk",
            figures_of("cache_sources", "TTFT from"),
        ),
        Aim("A plain request gets no slower: 5 % is excluded", figures_of("unshared", "with caches")),
        Aim(
            "Tokens with every source are those without cache, whatever is damaged or dies",
            tests=("tests/fault/test_fetching.py", "tests/fault/test_tiers.py", "tests/unit/kv_transfer/test_damage.py"),
        ),
        Aim(
            "A choice takes 200 µs at most at 1,000 workers and 10 million blocks, a block 64 bytes",
            figures_of("cache_index", "lookup and choice", "bytes of a block"),
        ),
        Aim(
            "20 minutes of faults among 32 paced workers leave no wrong token and no leak",
            figures_of("paced_kills", "minutes", "wrong answers", "leaks"),
        ),
        Aim("32 paced workers are ready in 30 s and take 4 GiB", figures_of("paced", "32 paced", "memory")),
    ),
    "Operators": (
        Aim(
            "A flip answers in its new role within a second, fails nothing and keeps tokens and caches",
            figures_of("role_changes", "a flip, ", "streams beside a flip"),
            tests=("tests/integration/test_flip.py", "tests/fault/test_flips.py"),
        ),
        Aim(
            "The autoscaler keeps 95 % in time", figures_of("autoscale", "Azure's hour: requests", "a synthetic day: requests")
        ),
        Aim(
            "It takes 1.2 times an oracle's worker-hours",
            figures_of("autoscale", "Azure's hour: worker-hours", "a synthetic day: worker-hours"),
        ),
        Aim("It changes direction 6 times in a synthetic day", figures_of("autoscale", "a synthetic day: changes")),
        Aim(
            "From zero, the first answer comes within a worker's start and a second, with a standby within 2 s",
            figures_of("role_changes", "from zero"),
            tests=("tests/integration/test_autoscale.py",),
        ),
        Aim("A scrape equals what clients counted", tests=("tests/integration/test_cluster_metrics.py",)),
        Aim(
            "A real Prometheus loads the rules, and `/ops` works in a browser",
            tests=("tests/integration/test_prometheus.py", "tests/integration/test_ops.py"),
        ),
        Aim(
            "An hour of faults with everything on leaves nothing wrong, no leak and no process that grew",
            figures_of("soak", "minutes", "wrong ones", "problems"),
        ),
        Aim("`make test` takes 12 minutes at most in a fresh clone", figures_of("fresh_clone", "`make test`")),
        Aim(
            "10 million simulated requests on 1,000 workers lose none",
            figures_of("scale", "simulated requests"),
        ),
    ),
    "GPUs": GPU_AIMS,
    "Deployed and kept running": (
        Aim("`serve deploy` leaves nothing behind", tests=("tests/integration/test_serve_deploy.py",)),
        Aim(
            "Every file of `deploy/` is used by a test, or says what was not tried", tests=("tests/unit/deploy/test_files.py",)
        ),
        Aim("A slower or failing configuration is rolled back by itself", tests=("tests/integration/test_rollout.py",)),
        Aim(
            "Each acknowledged usage event is once in the log, though routers are killed",
            tests=("tests/integration/test_usage.py",),
        ),
        Aim(
            "Nodes that die, are cut off, or lose their head cost no stream its tokens",
            figures_of("node_faults", "streams with the undisturbed tokens"),
        ),
        Aim("A killed node stops a stream for 5 s at most, p99", figures_of("node_faults", "gap p99, a node killed")),
        Aim(
            "A partition stops a stream for the lease and 3 s at most, p99",
            figures_of("node_faults", "gap p99, a node cut off", "gap p99, two nodes"),
        ),
    ),
    "Guesses, small KV, long contexts": (
        Aim(
            "Tokens are the same with and without guesses",
            tests=("tests/fault/test_speculation.py", "tests/integration/test_speculation.py"),
        ),
        Aim("One stream that copies is 1.8 times as fast", figures_of("speculation", "1 stream that copies")),
        Aim(
            "Eight streams that copy gain 0.85 of what is predicted, and 1.3 times where rows are cheap",
            figures_of("speculation", "8 streams that copy"),
            absent="1.3 times is asked where 24 rows cost at most 1.6 times 8 rows, which was on no machine.",
        ),
        Aim("Random text gets 5 % slower at most, of 1 to 64 streams", figures_of("speculation", "random text")),
        Aim("KV in int8 makes decoding 1.2 times as fast", figures_of("kv_formats", "decode of")),
        Aim("KV in int8 is 0.52 of the bytes of a handoff", figures_of("kv_formats", "bytes of a token's KV")),
        Aim(
            "A prompt of 128k tokens is right, and a short one beside it waits for two chunks",
            tests=("tests/integration/test_long_prompts.py", "tests/fault/test_long_prompts.py"),
            absent="On a small random model.",
        ),
        Aim("A draft model: where it pays is measured", figures_of("speculation_draft_model", "1 stream that copies")),
        Aim("Early exit: where it pays is measured", figures_of("early_exit", "predicted gain")),
    ),
    "Closed doors and fair seats": (
        Aim(
            "A body of any shape up to 16 MiB stops a stream for 0.3 s at most",
            tests=("tests/integration/test_hostile_bodies.py",),
        ),
        Aim(
            "A short answer beside 150 long ones takes 3 times what it takes beside 64, 6 times for its own tenant",
            figures_of("seats", "a short answer"),
        ),
        Aim("Seats cost 5 % of throughput at most", absent=f"No result: {_NO_SCRIPT.lower()}"),
    ),
}
"""By what they are about."""

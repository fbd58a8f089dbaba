"""vLLM on a CPU, offline, its engine in this process: `measure_vllm.py MODEL THREADS CORES`.

bfloat16, compiled, prefix caching off, at most 2,048 tokens a step, KV cache of 4 GiB, bound to the given cores (`0,1`).
float32 where oneDNN has no products in bfloat16, without which vLLM takes minutes for a prompt. Token ids in and out: no
tokenizer, no text. A prefill is a request for one token. A decode step is one step of the engine once all sequences have their
first token; vLLM's own scheduling, sampling and output processing are part of it, as they are when it runs.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import time
from functools import partial
from typing import Any

from lines import DECODE_STEPS, Cases, claim_stdout, decode_name, fastest_dtype, median_s, prefill_name, serve

WARM_STEPS = 3
"""Decode steps before those that are timed: vLLM may schedule a step ahead, so the first ones are no whole ones."""


def main() -> None:
    channel = claim_stdout()
    model, threads, cores = sys.argv[1:]
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    import torch  # comes after the settings that it reads
    import vllm  # type: ignore[import-not-found]

    dtype = fastest_dtype()
    llm = vllm.LLM(
        model,
        dtype=dtype,
        max_model_len=8192,
        enable_prefix_caching=False,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )
    assert torch.get_num_threads() == int(threads), f"{torch.get_num_threads()} threads instead of {threads}"
    engine = Engine(llm.llm_engine, vllm.SamplingParams)
    engine.prefill(256)
    serve(channel, f"{vllm.__version__} in {dtype}", engine.measure)


class Engine:
    """vLLM's engine, driven step by step."""

    def __init__(self, engine: Any, sampling: Any) -> None:
        self._engine = engine
        self._sampling = sampling
        self._ids = itertools.count()
        self._random = random.Random(0)

    def measure(self, cases: Cases) -> dict[str, float]:
        measured = {prefill_name(n): n / median_s(partial(self.prefill, n)) for n in cases.prefill}
        return measured | {decode_name(*case): self.decode(*case) for case in cases.decode}

    def prefill(self, length: int) -> None:
        self._add(length, 1)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def decode(self, size: int, context: int) -> float:
        """Tokens per second."""
        lengths = {self._add(context, context): 0 for _ in range(size)}
        while not all(lengths.values()):
            self._step(lengths)
        for _ in range(WARM_STEPS):
            self._step(lengths)
        before = sum(lengths.values())
        began = time.perf_counter()
        for _ in range(DECODE_STEPS):
            self._step(lengths)
        took = time.perf_counter() - began
        made = sum(lengths.values()) - before
        assert made == size * DECODE_STEPS, f"{made} tokens in {DECODE_STEPS} steps of {size}"
        self._engine.abort_request(list(lengths))
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return made / took

    def _add(self, length: int, max_tokens: int) -> str:
        name = str(next(self._ids))
        prompt = {"prompt_token_ids": [self._random.randrange(100, 40_000) for _ in range(length)]}
        sampling = self._sampling(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, prompt, sampling)
        return name

    def _step(self, lengths: dict[str, int]) -> None:
        """One step; the answers' lengths are kept up to date."""
        for output in self._engine.step():
            lengths[output.request_id] = len(output.outputs[0].token_ids)


if __name__ == "__main__":
    main()

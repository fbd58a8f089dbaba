"""transformers, eager: `measure_transformers.py MODEL THREADS`.

bfloat16, or float32 where oneDNN has no products in bfloat16; torch's attention operator, the dynamic cache that `generate`
uses by default; logits of the last position only, greedy.
"""

from __future__ import annotations

import random
import sys
import time
from functools import partial

from lines import DECODE_STEPS, Cases, claim_stdout, decode_name, fastest_dtype, median_s, prefill_name, serve


def main() -> None:
    channel = claim_stdout()
    model_directory, threads = sys.argv[1:]
    import torch
    import transformers

    torch.set_num_threads(int(threads))
    torch.set_grad_enabled(False)
    dtype = fastest_dtype()
    # Comes in evaluation mode.
    model = transformers.AutoModelForCausalLM.from_pretrained(model_directory, dtype=dtype, attn_implementation="sdpa")
    rng = random.Random(0)

    def prompts(size: int, length: int) -> torch.Tensor:
        return torch.tensor([[rng.randrange(100, 40_000) for _ in range(length)] for _ in range(size)])

    def prefill(length: int) -> None:
        model(prompts(1, length), logits_to_keep=1).logits[:, -1].argmax(-1).item()

    def decode(size: int, context: int) -> float:
        output = model(prompts(size, context), use_cache=True, logits_to_keep=1)
        for step in range(DECODE_STEPS + 1):
            if step == 1:
                began = time.perf_counter()
            tokens = output.logits[:, -1].argmax(-1, keepdim=True)
            output = model(tokens, past_key_values=output.past_key_values, use_cache=True)
        return size * DECODE_STEPS / (time.perf_counter() - began)

    def measure(cases: Cases) -> dict[str, float]:
        measured = {prefill_name(n): n / median_s(partial(prefill, n)) for n in cases.prefill}
        return measured | {decode_name(*case): decode(*case) for case in cases.decode}

    serve(channel, f"{transformers.__version__} in {dtype}", measure)


if __name__ == "__main__":
    main()

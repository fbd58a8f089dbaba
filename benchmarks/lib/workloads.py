"""What the systems of `benchmarks.goodput` are asked.

Traces were taken on large machines, so their lengths are divided: by 8, and Mooncake's by 32. By 16 its longest prompts just
fit the model's context, but no system met any of the limits at one request in four seconds. They are no part of this
repository: AzurePublicDataset's LLM inference traces of 2023 (Patel et al., Splitwise, ISCA 2024), and kvcache-ai/Mooncake's
conversation trace (FAST 2025).
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.lib.load import Prompts, RandomPrompts, Trace

TRACES = {
    "azure-conversation": ("azure", "azure_llm_2023_conv.csv", 8.0),
    "azure-code": ("azure", "azure_llm_2023_code.csv", 8.0),
    "mooncake-conversation": ("mooncake", "mooncake_conversation.jsonl", 32.0),
}
"""The workloads from traces by name: dataset, file, and what lengths are divided by."""
RANDOM = {"200-in-200-out": RandomPrompts(200, 200)}
WORKLOADS = (*TRACES, *RANDOM)


def prompts_of(name: str, traces: Path | None) -> Prompts:
    """Return the prompts of a workload. `traces` is the folder of the traces."""
    if name in RANDOM:
        return RANDOM[name]
    assert traces is not None, "checked with the options"
    dataset, file, length_scale = TRACES[name]
    return Trace(dataset, traces / file, length_scale)


def described(name: str) -> str:
    """Describe a workload in words for people."""
    if name in RANDOM:
        return f"Random prompts of {RANDOM[name].input_len} tokens, answers of {RANDOM[name].output_len}"
    _, file, length_scale = TRACES[name]
    return f"The first requests of {file}, lengths of prompts and answers divided by {length_scale:g}"

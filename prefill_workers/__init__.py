"""The prefill phase: whole prompts in, KV out to decode workers, the first token out to the router."""

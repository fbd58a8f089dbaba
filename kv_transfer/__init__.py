"""The handoff: moves KV from prefill's blocks to decode's, layer by layer, and proves that just this arrived."""

"""The decode phase: tickets for KV, continuous batching, token frames to the routers."""

"""KV memory of one rank: the pool, who owns which of its blocks, and which blocks can be shared."""

"""One rank of engine: token ids in, token ids out. Knows nothing of requests, workers or text.

    Chunk ──ForwardBatch.build──► Decoder.forward (kernels, KVPool) ──logits──► sampler ──► SampledToken

`kernels` stands alone (`kv_transfer` uses it); everything else may use `protocol`, `configs` and `telemetry`.
"""

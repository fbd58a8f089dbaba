"""The shapes of models that people serve on GPUs, as their `config.json` on the hub states them. No files, no weights."""

from __future__ import annotations

from configs.facts import Architecture, ModelFacts, WeightFormat


def _qwen3(name: str, *, layers: int, hidden: int, inner: int, heads: int, tied: bool) -> ModelFacts:
    return ModelFacts(
        name=name,
        architecture=Architecture.QWEN3,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151_936,
        max_model_len=40_960,
        rope_theta=1e6,
        rope_scaling=None,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        attention_bias=False,
        qk_norm=True,
        eos_token_ids=(151_645,),
        model_hash=name,
        weight_format=WeightFormat.SAFETENSORS,
        weight_files=(),
    )


KNOWN = {
    facts.name: facts
    for facts in (
        _qwen3("Qwen/Qwen3-0.6B", layers=28, hidden=1024, inner=3072, heads=16, tied=True),
        _qwen3("Qwen/Qwen3-1.7B", layers=28, hidden=2048, inner=6144, heads=16, tied=True),
        _qwen3("Qwen/Qwen3-8B", layers=36, hidden=4096, inner=12_288, heads=32, tied=False),
        _qwen3("Qwen/Qwen3-14B", layers=40, hidden=5120, inner=17_408, heads=40, tied=False),
        _qwen3("Qwen/Qwen3-32B", layers=64, hidden=5120, inner=25_600, heads=64, tied=False),
    )
}

"""The default model as a bfloat16 Hugging Face directory, for peers that read no GGUF: written by `benchmarks.peers.setup`.

The values are what the engine itself reads from the GGUF file. The tokenizer is what transformers makes of that file.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from certify.model_folder import config_of
from configs.facts import Architecture, ModelFacts
from engine.models.gguf_weights import GgufWeights
from engine.models.parameters import layer_parameters, model_parameters
from engine.models.safetensors_weights import SafetensorsWeights


def write(facts: ModelFacts, directory: Path) -> None:
    """Write `config.json`, `model.safetensors` and the tokenizer's files."""
    assert facts.architecture is Architecture.LLAMA, f"{facts.name} is no Llama"
    assert facts.rope_scaling is None, "stretched frequencies would need a key of their own"
    directory.mkdir(parents=True, exist_ok=True)
    source = GgufWeights(facts.weight_files, facts.architecture)
    names = SafetensorsWeights((), tied_head=facts.tie_word_embeddings)
    layers = (layer_parameters(facts, layer) for layer in range(facts.num_layers))
    tensors = {}
    for parameter in [*model_parameters(facts), *(parameter for layer in layers for parameter in layer)]:
        for part in parameter.parts:
            tensor = torch.empty(part.shape, dtype=torch.bfloat16)
            source.read(part.shard(0, 1), tensor)
            tensors[names.stored_name(part.name)] = tensor
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config_of(facts), indent=2) + "\n")
    write_tokenizer(facts, directory)


def write_tokenizer(facts: ModelFacts, directory: Path) -> None:
    """Only the tokenizer's files."""
    from transformers import AutoTokenizer  # takes seconds

    gguf = facts.weight_files[0]
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)

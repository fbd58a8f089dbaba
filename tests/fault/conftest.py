"""A small random model, two workers that serve it, and what they should say."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, RepetitionPenaltyLogitsProcessor

from configs.facts import ModelFacts
from configs.schema import ClusterConfig
from engine.batch import Chunk
from engine.model_runner import ModelRunner
from tests.fault.two_workers import CONFIG, TwoWorkers, run_two_workers
from tests.tiny_models import random_model, saved, tiny_facts


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    """A random two-layer Llama on disk."""
    facts = tiny_facts(
        "small", hidden_size=32, intermediate_size=64, head_dim=8, vocab_size=101, max_model_len=4096, rms_norm_eps=1e-6
    )
    return saved(random_model(facts, seed=7), facts, tmp_path_factory.mktemp("small-model"))


TwoWorkersFactory = Callable[..., AbstractAsyncContextManager[TwoWorkers]]


@pytest.fixture
def two_workers(small_model: ModelFacts) -> TwoWorkersFactory:
    def make(
        config: ClusterConfig = CONFIG, facts: ModelFacts = small_model, prefill_block_size: int | None = None
    ) -> AbstractAsyncContextManager[TwoWorkers]:
        return run_two_workers(facts, config, prefill_block_size)

    return make


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While it is clear, every worker's next step waits."""
    opened, execute = threading.Event(), ModelRunner.execute

    def gated(runner: ModelRunner, chunks: Sequence[Chunk], on_layer: Callable[[int], None] | None = None) -> Any:
        assert opened.wait(60), "the gate stayed closed"
        return execute(runner, chunks, on_layer)

    opened.set()
    monkeypatch.setattr(ModelRunner, "execute", gated)
    yield opened
    opened.set()


@pytest.fixture(scope="session")
def reference(small_model: ModelFacts) -> Callable[..., list[int]]:
    """Greedy tokens by `transformers`, computed and penalized from the whole sequence every time."""
    model = LlamaForCausalLM.from_pretrained(small_model.weight_files[0].parent).float().eval()

    def generate(prompt: list[int], max_tokens: int, repetition: float = 1.0, frequency: float = 0.0) -> list[int]:
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(max_tokens):
                logits = model(torch.tensor([tokens])).logits[:, -1]
                logits = RepetitionPenaltyLogitsProcessor(repetition)(torch.tensor([tokens]), logits)
                answer = torch.tensor(tokens[len(prompt) :], dtype=torch.int64)
                logits -= frequency * torch.bincount(answer, minlength=logits.shape[1])
                tokens.append(int(logits.argmax()))
                if tokens[-1] == 0:
                    break
        return tokens[len(prompt) :]

    return generate

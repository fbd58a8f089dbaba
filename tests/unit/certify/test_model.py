"""The models that are made up have the sizes that they should have, and Tandem reads what is written of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from certify.model_folder import END_ID, write_model
from certify.random_model import random_matrices
from certify.shapes import LLAMA_8B, TINY, fitting, kv_bytes_per_token, matrix_parameters
from certify.step_times import SIZES, measured_steps
from configs.models import resolve
from router.text.tokenizer import Tokenizer

CPU = torch.device("cpu")


def test_sizes_are_those_of_the_shape() -> None:
    assert matrix_parameters(LLAMA_8B) + 2 * LLAMA_8B.vocab_size * LLAMA_8B.hidden_size == 8_029_995_008
    assert kv_bytes_per_token(LLAMA_8B, torch.bfloat16) == 131_072


def test_smaller_gpus_get_fewer_layers() -> None:
    tokens = SIZES["cuda"].pool_tokens
    assert fitting(LLAMA_8B, torch.bfloat16, tokens, int(0.85 * 84e9)).num_layers == 32, "80 GB hold all of it"
    assert fitting(LLAMA_8B, torch.bfloat16, tokens, 20 * 10**9).num_layers == 11
    with pytest.raises(ValueError, match="hold no layer"):
        fitting(LLAMA_8B, torch.bfloat16, tokens, 3 * 10**9)


def test_a_step_needs_at_least_its_weights_and_its_context() -> None:
    steps = list(measured_steps(LLAMA_8B, SIZES["cuda"], torch.bfloat16, 16))
    assert [step.name for step in steps][-1] == "decode 64 at 4,096"
    assert steps[-1].moved_bytes == pytest.approx(2 * 7.505e9 + 64 * 4096 * 131_072, rel=1e-3)
    assert steps[0].flops == pytest.approx(2 * 6.98e9 * 2048, rel=0.05)
    assert all(len(chunk.block_table) * 16 >= chunk.end for step in steps for chunk in step.chunks)


@pytest.mark.parametrize("vocab_size", [300, 4096, 49_152])
def test_a_written_model_is_read(vocab_size: int, tmp_path: Path) -> None:
    facts = replace(TINY, vocab_size=vocab_size, eos_token_ids=(END_ID,))
    write_model(tmp_path / "made", facts, random_matrices(torch.bfloat16, CPU, drawn_on=CPU, seed=0))
    model = resolve(str(tmp_path / "made"))
    assert replace(model.facts, name=facts.name, model_hash=facts.model_hash, weight_files=()) == facts
    tokenizer = Tokenizer.build(model.tokenizer)
    assert tokenizer.vocab_size == vocab_size
    text = "Once upon a time there was a fox, naïve.\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    shown = [tokenizer.token_bytes(token_id) for token_id in range(2, vocab_size)]
    assert all(shown), "every token has a text"
    assert len(set(shown)) == len(shown), "and no two have the same"


def test_the_same_matrices_come_again_for_the_same_seed() -> None:
    first, again, other = (random_matrices(torch.float32, CPU, drawn_on=CPU, seed=seed)(3, 4) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)

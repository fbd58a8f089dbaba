"""The draft model of a configuration: found as the served one is, and refused where its vocabulary is another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.models import check_draft, draft_facts, resolve
from configs.schema import ClusterConfig
from configs.speculation.config import SpeculativeConfig, draft_kv_tokens
from protocol.errors import ConfigError

Files = Callable[..., Path]


def drafted_by(path: Path | str, served: Path | str = "smollm2", **more: Any) -> ClusterConfig:
    speculative = SpeculativeConfig(method="draft_model", model=str(path), num_speculative_tokens=4, **more)
    return ClusterConfig(model=str(served), speculative_config=speculative)


def test_without_a_draft_model_there_are_no_facts_of_one() -> None:
    assert draft_facts(ClusterConfig()) is None
    ngram = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    assert draft_facts(ClusterConfig(speculative_config=ngram)) is None


def test_it_is_asked_up_to_its_own_context_or_less(make_gguf: Files) -> None:
    path = make_gguf()
    found = [draft_facts(drafted_by(path, max_model_len=most)) for most in (None, 100, 1_000)]
    assert [facts.max_model_len for facts in found if facts is not None] == [128, 100, 128]


def test_it_shares_the_vocabulary(make_gguf: Files) -> None:
    served = make_gguf("served.gguf")
    check_draft(drafted_by(make_gguf("same.gguf", llama__block_count=1), served), resolve(str(served)))


@pytest.mark.parametrize(("filler", "kind"), [(["", ""], 1), (["[PAD261]", "[PAD262]"], 5)])
def test_ids_at_the_end_that_stand_for_nothing_may_differ(make_gguf: Files, filler: list[str], kind: int) -> None:
    """Models of one family pad their vocabularies to different sizes."""
    served = make_gguf("served.gguf")
    model = resolve(str(served))
    assert model.tokenizer.byte_level_bpe is not None
    tokens = [*model.tokenizer.byte_level_bpe.tokens, *filler]
    padded = make_gguf(
        "padded.gguf",
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__token_type=[3, 3, *[1] * (len(tokens) - 4), kind, kind],
        tensors={"token_embd.weight": np.zeros((len(tokens), 32), np.float32)},
    )
    assert resolve(str(padded)).facts.vocab_size == model.facts.vocab_size + 2
    check_draft(drafted_by(padded, served), model)
    check_draft(drafted_by(served, padded), resolve(str(padded)))


def test_another_vocabulary_is_refused_in_one_line(make_gguf: Files) -> None:
    """Of another size, or of as many tokens, one of which is another."""
    served = make_gguf("served.gguf")
    model = resolve(str(served))
    assert model.tokenizer.byte_level_bpe is not None
    tokens = list(model.tokenizer.byte_level_bpe.tokens)
    other = make_gguf("other.gguf", tokenizer__ggml__tokens=[*tokens[:-1], "hexx"])
    for draft in (other, "smollm2"):
        with pytest.raises(ConfigError, match=r"vocabulary of .* is not that of served: .* has to share it") as refused:
            check_draft(drafted_by(draft, served), model)
        assert refused.value.param == "speculative_config.model"
        assert "\n" not in refused.value.message


def test_one_that_is_not_there_is_refused_by_the_key() -> None:
    with pytest.raises(ConfigError, match=r"^speculative_config\.model: .*no such file") as refused:
        draft_facts(drafted_by("/nowhere/draft.gguf"))
    assert refused.value.param == "speculative_config.model"


@pytest.mark.parametrize(
    ("pool", "context", "block", "tokens"), [(65_536, 8_192, 16, 16_384), (8_192, 8_192, 16, 8_192), (1_000, 100, 16, 256)]
)
def test_its_pool_is_a_quarter_and_holds_a_context(pool: int, context: int, block: int, tokens: int) -> None:
    assert draft_kv_tokens(pool, context, block) == tokens

"""What a rollout may change of a configuration, and of a model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from cluster.rollout import change
from cluster.rollout.change import CHANGEABLE, changed_config, check_models
from configs.facts import Model
from configs.models import resolve
from configs.schema import ClusterConfig
from protocol.errors import ConfigError, InvalidRequestError


def test_a_key_of_workers_may_change_and_the_rest_stays() -> None:
    current = ClusterConfig.model_validate(
        {"decode": {"workers": 3, "max_batch_size": 16}, "autoscale": {"sizes": "decode=1..4"}}
    )
    config, changes = changed_config(current, {"quantization": "int8", "decode": {"max_batch_size": 32}})
    assert changes == ("decode.max_batch_size: 16 -> 32", "quantization: auto -> int8")
    assert config == current.model_copy(
        update={"quantization": "int8", "decode": current.decode.model_copy(update={"max_batch_size": 32})}
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"block_size": 32}, "block_size can't change"),
        ({"limits": {"lease_s": 3.0}}, "limits.lease_s can't change"),
        ({"prefill": {"resources": {"GPU": 1.0}}}, "prefill.resources.*can't change"),
        ({"http": {"port": 1}, "quantization": "int8"}, "^http.port can't change"),
        ({"max_model_len": 100}, "max_model_len can't change"),
        ({"quantization": "int3"}, "quantization"),
        ({"kv_cache_dtype": "fp8"}, "fp8 is for GPUs"),
        ({"dtype": "float16"}, "float16 is for GPUs"),
        ({"decode": 3}, "decode: should be a mapping"),
        ({"nothing": 1}, "nothing: unknown key"),
        ({}, "the one that the workers have"),
        ({"quantization": "auto"}, "the one that the workers have"),
    ],
)
def test_what_takes_a_restart_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        changed_config(ClusterConfig(), changes)


def test_guesses_may_be_switched_on_and_changed_and_off() -> None:
    guesses = {"method": "ngram", "num_speculative_tokens": 4}
    config, changes = changed_config(ClusterConfig(), {"speculative_config": guesses})
    assert config.speculative_config is not None
    assert "speculative_config.method: none -> ngram" in changes
    more, changes = changed_config(config, {"speculative_config": guesses | {"num_speculative_tokens": 6}})
    assert changes == ("speculative_config.num_speculative_tokens: 4 -> 6",)
    assert changed_config(more, {"speculative_config": None})[0] == ClusterConfig()


def test_another_method_of_guessing_takes_nothing_from_the_former_one() -> None:
    lookup = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 8}
    draft = {"method": "draft_model", "model": "smollm2", "num_speculative_tokens": 4}
    for before, after in ((lookup, draft), (draft, lookup)):
        config = changed_config(ClusterConfig(), {"speculative_config": before})[0]
        changed = changed_config(config, {"speculative_config": after})[0]
        assert changed == changed_config(ClusterConfig(), {"speculative_config": after})[0]


def test_tiers_hold_the_kv_of_one_model() -> None:
    current = ClusterConfig.model_validate({"kv_offloading": {"memory_gib": 1.0}})
    with pytest.raises(InvalidRequestError, match="kv_offloading"):
        changed_config(current, {"quantization": "int8"})
    with pytest.raises(InvalidRequestError, match=r"kv_cache_dtype can't change .*kv_offloading"):
        changed_config(current, {"kv_cache_dtype": "int8"})
    assert changed_config(current, {"decode": {"max_batch_size": 8}})[1] == ("decode.max_batch_size: 64 -> 8",)


def test_every_changeable_key_is_one_of_the_configuration() -> None:
    known = change._flat(ClusterConfig().model_dump())
    assert known.keys() >= CHANGEABLE


def test_a_model_with_other_weights_fits_if_routers_need_not_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = resolve("smollm2")
    models = {"smollm2": real}
    monkeypatch.setattr(change, "resolve_for", lambda config: models[config.model])

    def with_model(**facts: Any) -> ClusterConfig:
        models["other"] = Model(dataclasses.replace(real.facts, model_hash="0" * 64, **facts), real.tokenizer)
        return ClusterConfig(model="other")

    assert set(check_models(ClusterConfig(), with_model()))
    for name, value in {"vocab_size": 7, "eos_token_ids": (9,), "max_model_len": 4096}.items():
        with pytest.raises(ConfigError, match=f"{name}|tokens of context"):
            check_models(ClusterConfig(), with_model(**{name: value}))
    models["other"] = Model(real.facts, dataclasses.replace(real.tokenizer, chat_template="another"))
    with pytest.raises(ConfigError, match="chat template"):
        check_models(ClusterConfig(), ClusterConfig(model="other"))


def test_a_pool_that_cannot_hold_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_tokens"):
        check_models(ClusterConfig(), ClusterConfig.model_validate({"decode": {"kv_cache_tokens": 1024}}))


def test_tokenizer_files_are_compared_by_what_is_in_them(tmp_path: Path) -> None:
    real = resolve("smollm2").tokenizer
    paths = [tmp_path / name for name in ("one", "same", "other")]
    for path, text in zip(paths, ("{}", "{}", "[]"), strict=True):
        path.write_text(text)
    one, same, other = (change._comparable(dataclasses.replace(real, tokenizer_json=path)) for path in paths)
    assert one == same
    assert one != other

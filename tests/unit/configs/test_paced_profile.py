"""Profiles of paced workers, and what a configuration takes from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.loader import load_config, served_context
from configs.models import resolve_for
from configs.paced.profile import BUILT_IN, estimated, load_paced_profile
from protocol.errors import ConfigError


@pytest.mark.parametrize("name", BUILT_IN)
def test_an_estimate_is_what_its_figures_say(name: str) -> None:
    """Each figure has a source, and the step times follow from them."""
    profile = load_paced_profile(name)
    assert "estimate" in profile.name
    assert all(figure.source for figure in profile.figures.values())
    again = estimated(profile.figures)
    for ours, theirs in ((profile.prefill, again.prefill), (profile.decode, again.decode)):
        assert [point.model_copy(update={"seconds": 1.0}) for point in ours] == [
            point.model_copy(update={"seconds": 1.0}) for point in theirs
        ]
        assert [point.seconds for point in ours] == pytest.approx([point.seconds for point in theirs], rel=1e-4)
    of = {key: figure.value for key, figure in profile.figures.items()}
    assert (profile.kv_token_bytes, profile.link_bytes_per_s) == (of["kv_token_bytes"], of["link_bytes_per_s"])
    assert (profile.context_tokens, profile.max_batch_size) == (of["context_tokens"], of["max_batch_size"])
    assert profile.sizes.model_dump() == {size: of[size] for size in profile.sizes.model_dump()}
    used = of["memory_bytes"] * of["memory_share_used"] - of["parameters"] * of["parameter_bytes"] - of["activation_bytes"]
    assert 0 <= used / of["kv_token_bytes"] - profile.kv_cache_tokens < 1024


def test_the_h200_by_hand() -> None:
    """Reading 16.06 GB at 70 % of 4.8 TB/s takes 4.78 ms, a token's arithmetic 32.5 us at half of 989 TFLOP/s, plus 1 ms."""
    profile = load_paced_profile("h200-8b")
    assert profile.decode_s(1, 0) == pytest.approx(0.00578, rel=0.01)
    assert profile.decode_s(16, 4096) == pytest.approx(0.00578 + 16 * 4096 * 131072 / 3.36e12, rel=0.01)
    assert profile.prefill_s([(0, 1024)]) == pytest.approx(0.001 + 1024 * 32.5e-6 + 1024 * 512 * 1.06e-9, rel=0.01)
    once, chunk = profile.decode_s(1, 0), profile.prefill_s([(0, 256)])
    assert profile.step_s([(0, 256)], [1000]) == pytest.approx(chunk + 1000 * 131072 / 3.36e12, rel=0.02)
    assert once < profile.step_s([(0, 1)], [1]) < 1.05 * once


def test_the_profile_gives_what_nobody_has_chosen() -> None:
    profile = load_paced_profile("h200-8b")
    config = load_config(None, {"engine": "paced", "decode.kv_cache_tokens": 200_000, "prefill.workers": 16})
    assert config.prefill.kv_cache_tokens == config.prefill.prefix_cache_tokens == profile.kv_cache_tokens
    assert (config.decode.kv_cache_tokens, config.prefill.workers) == (200_000, 16)
    assert (config.prefill.batch_tokens, config.prefill.shared_tokens) == (8192, 2048)
    assert config.chunk_tokens == profile.sizes.max_chunk_tokens
    model = resolve_for(config)
    assert served_context(config, model.facts) == profile.context_tokens
    assert load_config(None, {}).prefill.kv_cache_tokens == 65_536


def test_a_null_leaves_the_choice_to_the_profile_and_nothing_is_reserved(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("engine: paced\nprefill: {max_batch_tokens: null, resources: {GPU: 1}}\n")
    config = load_config(path, {})
    assert config.prefill.batch_tokens == 8192
    assert config.prefill.resources == {}


def test_a_file_is_a_profile_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    changed = json.loads(load_paced_profile("h200-8b").model_dump_json()) | {"context_tokens": 4096, "kv_cache_tokens": 8192}
    path.write_text(json.dumps(changed))
    config = load_config(None, {"engine": "paced", "paced_profile": str(path)})
    assert config.prefill.kv_cache_tokens == 8192
    assert resolve_for(config).facts.max_model_len == 4096


@pytest.mark.parametrize(
    ("overrides", "param", "said"),
    [
        ({"engine": "paced", "paced_profile": "h300"}, "paced_profile", "h300: can't be read"),
        ({"engine": "paced", "paced_profile": "~nobody-has-this-name/x.json"}, "paced_profile", "can't be read"),
        ({"engine": "paced", "paced_profile": "/nowhere/at/all.json"}, "paced_profile", "can't be read"),
        ({"engine": "paced", "decode.tensor_parallel_size": 3}, "decode.tensor_parallel_size", "one rank"),
        ({"engine": "paced", "device": "cuda"}, "device", "paced workers do not"),
        ({"engine": "fast"}, "engine", "model"),
        ({"paced_profile": "mine.json"}, "paced_profile", "engine: paced"),
    ],
)
def test_what_can_not_be_paced_is_said(overrides: dict[str, object], param: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        load_config(None, overrides)
    assert error.value.param == param


def test_a_step_that_stands_there_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.json"
    values = json.loads(load_paced_profile("h200-8b").model_dump_json())
    values["prefill"].append(values["prefill"][0])
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="twice"):
        load_paced_profile(str(path))


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "[" * 100_000, '{"name": "x"}'], ids=["empty", "list", "cut off", "deep", "other"]
)
def test_a_file_that_is_no_profile_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "no.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="this is no profile"):
        load_paced_profile(str(path))

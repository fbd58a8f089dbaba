from __future__ import annotations

import itertools
import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

import configs
from configs.facts import LinearScaling, ModelFacts
from configs.loader import checked_config, load_config, served_context
from configs.model_files.rope import with_overrides
from configs.models import resolve
from configs.schema import ClusterConfig
from engine.kernels.rope import rope_frequencies
from protocol.errors import ConfigError
from tests.tiny_models import TINY, tiny_facts

SHIPPED = Path(configs.__file__).parent
DRAFTED = {"method": "draft_model", "model": "smollm2", "num_speculative_tokens": 4}


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    return tmp_path / "cluster.yaml"


def refused(path: Path | None, overrides: dict[str, Any] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides or {})
    assert "\n" not in caught.value.message
    return caught.value


def test_without_a_file_everything_has_its_default() -> None:
    assert load_config(None, {}) == ClusterConfig()


def test_local_yaml_states_the_defaults() -> None:
    assert load_config(SHIPPED / "local.yaml", {}) == ClusterConfig()


def test_local_yaml_names_every_key() -> None:
    stated = (SHIPPED / "local.yaml").read_text()
    inner = [type(getattr(ClusterConfig(), name)) for name in ("http", "prefill", "decode", "limits")]
    sections: list[type[BaseModel]] = [ClusterConfig, *inner]
    for section in sections:
        for key in section.model_fields:
            assert f"{key}:" in stated


def test_cluster_yaml_gives_each_role_its_nodes() -> None:
    config = load_config(SHIPPED / "cluster.yaml", {})
    assert config.prefill.resources == {"GPU": 1.0, "tandem_prefill": 1.0}
    assert config.decode.resources == {"GPU": 1.0, "tandem_decode": 1.0}


def test_a_colocated_cluster_has_no_prefill_workers() -> None:
    config = load_config(None, {"disaggregation": "never", "prefill.max_batch_tokens": 128})
    assert (config.prefill.workers, config.prefill.max_batch_tokens, config.decode.workers) == (0, 128, 1)
    assert (config.chunk_tokens, load_config(None, {}).chunk_tokens) == (128, 64)
    assert load_config(None, {"disaggregation": "never", "decode.max_chunk_tokens": 96}).chunk_tokens == 96
    load_config(None, {"disaggregation": "never", "max_model_len": 4096, "prefill.kv_cache_tokens": 16})  # nobody has that pool


@pytest.mark.parametrize(
    ("overrides", "param"),
    [
        ({"disaggregation": "never", "prefill.workers": 1}, "prefill.workers"),
        ({"disaggregation": "auto", "prefill.workers": 0}, "prefill.workers"),
        ({"prefill.workers": 0}, "prefill.workers"),
        ({"disaggregation": "never", "decode.workers": 0}, "decode.workers"),
        ({"disaggregation": "sometimes"}, "disaggregation"),
    ],
)
def test_workers_fit_to_what_is_disaggregated(overrides: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert caught.value.param == param


def test_tiers(yaml_file: Path) -> None:
    yaml_file.write_text("tiers: {standard: {}, gold: {weight: 4, priority: -1}}")
    assert load_config(yaml_file, {}).tiers["gold"].weight == 4
    yaml_file.write_text("tiers: {gold: {wieght: 4}, standard: {}}")
    error = refused(yaml_file)
    assert error.param == "tiers.gold.wieght"
    assert "did you mean tiers.gold.weight?" in error.message
    yaml_file.write_text("tiers: {gold: {}}")
    assert refused(yaml_file).param == "tiers"


@pytest.mark.parametrize(
    ("http", "param"),
    [
        ("{host: 0.0.0.0}", "http.host"),
        ("{host: '::'}", "http.host"),
        ("{host: somewhere}", "http.host"),
        ("{host: 10.0.0.7, allow_anonymous: true}", None),
        ("{host: 10.0.0.7, keys_file: k.json}", None),
        ("{host: '::1'}", None),
        ("{keys_file: k.json, allow_anonymous: true}", "http.allow_anonymous"),
        ("{ssl_certfile: a.crt}", "http.ssl_keyfile"),
        ("{router_replicas: 3, max_router_replicas: 2}", "http.max_router_replicas"),
        ("{max_router_replicas: 65}", "http.max_router_replicas"),
        ("{router_resources: {tandem_entry: 1}}", None),
        ("{router_resources: {tandem_entry: 1}, host: '::', allow_anonymous: true}", None),
        ("{router_resources: {tandem_entry: 1}, host: 10.0.0.7, allow_anonymous: true}", "http.host"),
        ("{router_resources: {tandem_entry: 1, GPU: 1}}", "http.router_resources"),
        ("{router_resources: {tandem_entry: 0}}", "http.router_resources.tandem_entry"),
        ("{router_resources: {tandem_entry: 1}}\nencrypt_kv: true", "http.router_resources"),
        ("{ssl_keyfile: a.key}", "http.ssl_certfile"),
        ("{ssl_certfile: a.crt, ssl_keyfile: a.key}", None),
    ],
)
def test_what_http_needs_together(yaml_file: Path, http: str, param: str | None) -> None:
    yaml_file.write_text(f"http: {http}")
    if param is None:
        load_config(yaml_file, {})
    else:
        assert refused(yaml_file).param == param


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({}, None),
        ({"memory_gib": 4}, None),
        ({"disk_dir": "/tmp/kv", "disk_gib": 0.5}, None),
        ({"disk_dir": "/tmp/kv"}, "kv_offloading.disk_gib"),
        ({"disk_gib": 1}, "kv_offloading.disk_dir"),
        ({"memory_gib": 0}, "kv_offloading.memory_gib"),
        ({"memory_gib": -1}, "kv_offloading.memory_gib"),
        ({"memory_gib": "much"}, "kv_offloading.memory_gib"),
        ({"memory": 1}, "kv_offloading.memory"),
    ],
)
def test_what_tiers_need_together(values: dict[str, Any], param: str | None) -> None:
    overrides = {f"kv_offloading.{name}": value for name, value in values.items()}
    if param is None:
        assert load_config(None, overrides).kv_offloading.wanted == bool(values)
    else:
        with pytest.raises(ConfigError) as refused:
            load_config(None, overrides)
        assert refused.value.param == param


def test_tiers_are_for_workers_of_one_number_of_ranks() -> None:
    tiers = {"kv_offloading.memory_gib": 1}
    with pytest.raises(ConfigError, match="the same number of ranks") as refused:
        load_config(None, tiers | {"decode.tensor_parallel_size": 3})
    assert refused.value.param == "decode.tensor_parallel_size"
    same = {"prefill.tensor_parallel_size": 3, "decode.tensor_parallel_size": 3}
    assert load_config(None, tiers | same).kv_offloading.wanted
    assert load_config(None, tiers | {"disaggregation": "never", "decode.tensor_parallel_size": 3}).kv_offloading.wanted


def test_how_tokens_are_guessed_is_read_from_json_and_from_yaml(yaml_file: Path) -> None:
    assert load_config(None, {}).speculative_config is None
    config = load_config(None, {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 4}'})
    assert config.speculative_config is not None
    yaml_file.write_text("speculative_config: {method: ngram, num_speculative_tokens: 4, prompt_lookup_max: 5}")
    assert load_config(yaml_file, {}) == config
    assert (config.speculative_config.prompt_lookup_min, config.speculative_config.prompt_lookup_max) == (2, 5)


@pytest.mark.parametrize(
    ("value", "param", "says"),
    [
        ("{", "speculative_config", "should be JSON"),
        ("[" * 100_000, "speculative_config", "should be JSON"),
        ("3", "speculative_config", "mapping"),
        ({"method": "ngram"}, "speculative_config.num_speculative_tokens", "required"),
        ({"method": "eagle"}, "speculative_config.method", "eagle is not built; methods are ngram, draft_model"),
        ({"method": "draft_model", "num_speculative_tokens": 4}, "speculative_config", "draft_model needs a model"),
        (DRAFTED | {"model": ""}, "speculative_config.model", "at least 1 character"),
        (DRAFTED | {"quantization": "awq"}, "speculative_config.quantization", "'auto', 'none', 'int8' or 'int4'"),
        (DRAFTED | {"max_model_len": 0}, "speculative_config.max_model_len", "greater"),
        (DRAFTED | {"prompt_lookup_max": 7}, "speculative_config", "prompt_lookup_max is for the method ngram: leave it out"),
        (DRAFTED | {"method": "ngram"}, "speculative_config", "model is for the method draft_model: leave it out"),
        (
            DRAFTED | {"draft_tensor_parallel_size": 2},
            "speculative_config.draft_tensor_parallel_size",
            "unknown key; the keys here are method",
        ),
        ({"num_speculative_tokens": 4}, "speculative_config.method", "required"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "speculative_config.num_speculative_tokens", "greater"),
        ({"method": "ngram", "num_speculative_tokens": 33}, "speculative_config.num_speculative_tokens", "less"),
        ({"method": "ngram", "num_speculative_tokens": "4"}, "speculative_config.num_speculative_tokens", "integer"),
        (
            {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 6},
            "speculative_config",
            r"prompt_lookup_min \(6\) is more than prompt_lookup_max \(5\)",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_mix": 6},
            "speculative_config.prompt_lookup_mix",
            "unknown key; did you mean speculative_config.prompt_lookup_m",
        ),
    ],
)
def test_guesses_that_are_not_built_are_refused_by_name(value: Any, param: str, says: str) -> None:
    error = refused(None, {"speculative_config": value})
    assert error.param == param
    assert re.search(says, error.message), error.message


def test_a_draft_model_is_read_and_checked_again() -> None:
    """As a rollout does, which checks all values anew."""
    config = load_config(None, {"speculative_config": json.dumps(DRAFTED | {"quantization": "none", "max_model_len": 900})})
    assert config.speculative_config is not None
    assert (config.speculative_config.model, config.speculative_config.max_model_len) == ("smollm2", 900)
    assert checked_config(config.model_dump()) == config


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ({"engine": "paced"}, "draft_model computes, and paced workers do not"),
        ({"device": "cuda"}, "draft_model is for processors"),
        ({"decode.resources": {"GPU": 1.0}, "prefill.resources": {"GPU": 1.0}}, "draft_model is for processors"),
    ],
)
def test_workers_that_a_draft_model_is_not_for(others: dict[str, Any], says: str) -> None:
    error = refused(None, {"speculative_config": DRAFTED, **others})
    assert says in error.message
    assert "speculative_config.method" in error.message


def test_guesses_need_a_row_beside_the_stream() -> None:
    guesses = {"method": "ngram", "num_speculative_tokens": 4}
    error = refused(None, {"speculative_config": guesses, "decode.max_batch_size": 1})
    assert error.param == "decode.max_batch_size"
    assert "speculative_config" in error.message
    load_config(None, {"speculative_config": guesses, "decode.max_batch_size": 2})
    load_config(None, {"decode.max_batch_size": 1})


def test_the_path_of_the_keys_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert load_config(None, {"http.keys_file": "k.json"}).http.keys_file == str(tmp_path / "k.json")
    assert load_config(None, {"http.keys_file": "~/k.json"}).http.keys_file == str(tmp_path / "home" / "k.json")


def test_overrides_win_over_the_file(yaml_file: Path) -> None:
    yaml_file.write_text("decode:\n  workers: 2\nhttp:\n")
    config = load_config(yaml_file, {"decode.workers": 3, "http.port": 8001, "model": "other"})
    assert (config.decode.workers, config.http.port, config.model) == (3, 8001, "other")


def test_an_override_is_for_one_of_two_sections_that_are_the_same(yaml_file: Path) -> None:
    yaml_file.write_text("prefill: &pool {threads: 1}\ndecode: *pool\n")
    config = load_config(yaml_file, {"decode.workers": 3, "decode.max_batch_size": 4})
    assert (config.prefill.workers, config.decode.workers) == (1, 3)
    assert (config.prefill.threads, config.decode.threads) == (1, 1)


@pytest.mark.parametrize(
    "decode", ["{<<: *pool, threads: 2}", "{threads: 2, <<: *pool}", "{<<: [*pool, {workers: 3}], threads: 2}"]
)
def test_a_key_goes_before_that_of_a_merged_section(yaml_file: Path, decode: str) -> None:
    yaml_file.write_text(f"prefill: &pool {{threads: 1, kv_cache_tokens: 4096}}\ndecode: {decode}\n")
    config = load_config(yaml_file, {})
    assert (config.prefill.threads, config.decode.threads, config.decode.kv_cache_tokens) == (1, 2, 4096)


@pytest.mark.parametrize("values", [{"device": "cuda"}, {"device": "auto"}, {"device": "cpu", "engine": "paced"}])
def test_float16_is_left_to_those_who_may_be_on_gpus_or_compute_nothing(values: dict[str, Any]) -> None:
    assert load_config(None, {"dtype": "float16", **values}).dtype == "float16"


def test_a_whole_number_will_do_for_seconds(yaml_file: Path) -> None:
    yaml_file.write_text("limits: {queue_s: 5}")
    assert load_config(yaml_file, {}).limits.queue_s == 5.0


@pytest.mark.parametrize(
    ("text", "param", "says"),
    [
        ("foo: 1", "foo", "unknown key; the keys here are model"),
        ("decode: {worker: 3}", "decode.worker", "did you mean decode.workers?"),
        ("decode: {workers: '3'}", "decode.workers", "should be a valid integer, not '3'"),
        ("decode: {workers: true}", "decode.workers", "should be a valid integer, not True"),
        ("decode: {workers: 1.0}", "decode.workers", "should be a valid integer"),
        ("decode: {workers: 0}", "decode.workers", "nobody would answer"),
        ("prefill: {workers: 100000}", "prefill.workers", "less than or equal to 1024"),
        ("decode: 3", "decode", "should be a mapping of keys, not 3"),
        ("decode:", "decode", "should be a mapping of keys, not None"),
        ("http: {port: 0}", "http.port", "greater than or equal to 1"),
        ("http: {port: 65536}", "http.port", "less than or equal to 65535"),
        ("http: {admin_key: ''}", "http.admin_key", "at least 1 character"),
        ("http: {admin_key: käse}", "http.admin_key", "should match pattern"),
        ('http: {metrics_key: "a\\nb"}', "http.metrics_key", "should match pattern"),
        ("{dtype: float16, device: cpu}", "dtype", "float16 is for GPUs, and prefill workers compute on processors"),
        ("{dtype: float16, decode: {resources: {GPU: 1}}}", "dtype", "prefill workers compute on processors"),
        ("limits: {lease_s: .nan}", "limits.lease_s", "finite"),
        ("decode: {resources: {GPU: .inf}}", "decode.resources.GPU", "finite"),
        ("decode: {resources: {GPU: 0}}", "decode.resources.GPU", "greater than 0"),
        ("hf_overrides: 3", "hf_overrides", "should be a mapping with keys of config.json, not 3"),
        ("hf_overrides: '{'", "hf_overrides", "should be a JSON object with keys of config.json, not '{'"),
        ("hf_overrides: {hidden_size: 3}", "hf_overrides", "hidden_size can't be overridden; the keys are rope_parameters,"),
        ("hf_overrides: {rope_scaling: {type: ntk}}", "hf_overrides", "rope_scaling: type should be one of default, linear"),
        ("hf_overrides: {rope_scaling: null}", "hf_overrides", "rope_scaling should be left out, or have the rope_type"),
        ("hf_overrides: {rope_theta: null}", "hf_overrides", "rope_theta should be left out, not null"),
        (
            "hf_overrides: {rope_parameters: {rope_theta: 1e6}}",
            "hf_overrides",
            "rope_parameters should be given with its rope_type",
        ),
        (f"hf_overrides: {{rope_theta: {10**400}}}", "hf_overrides", "rope_theta should be a positive number"),
        (f"hf_overrides: {{max_position_embeddings: {10**400}}}", "hf_overrides", "should be a positive integer"),
        (
            "hf_overrides: {rope_parameters: {rope_type: linear, factor: 1.0e+308}}",
            "hf_overrides",
            "factor should be at least 1, and 1000000 at most",
        ),
        ("hf_overrides: {rope_scaling: {}, rope_parameters: {}}", "hf_overrides", "the former name of rope_parameters"),
        ("hf_overrides: {max_position_embeddings: x}", "hf_overrides", "should be a positive integer"),
        ("{engine: paced, hf_overrides: {rope_theta: 500000}}", "hf_overrides", "paced workers compute no positions"),
        ("block_size: 12", "block_size", "8, 16, 32 or 64"),
        ("dtype: float64", "dtype", "'auto', 'float32', 'bfloat16' or 'float16'"),
        ("1: 2", "1", "should be strings"),
        ("decode: {kv_cache_tokens: 8}", "decode.kv_cache_tokens", "less than one block of 16"),
        ("prefill: {tensor_parallel_size: 0}", "prefill.tensor_parallel_size", "greater than 0"),
        (f"prefill: {{tensor_parallel_size: {10**400}}}", "prefill.tensor_parallel_size", "less than or equal to 1024"),
        ("kv_offloading: {memory_gib: 1.0e+300}", "kv_offloading.memory_gib", "less than or equal to 1048576"),
        ("kv_offloading: {disk_dir: a, disk_gib: 1.0e+300}", "kv_offloading.disk_gib", "less than or equal to 1048576"),
        ('http: {keys_file: "a\\0b"}', "http.keys_file", "a path has no zero bytes, not 'a\\x00b'"),
        ('telemetry: {usage_log: "a\\0b"}', "telemetry.usage_log", "a path has no zero bytes"),
        ("limits: {lease_s: 1}", "limits.heartbeat_s", "more than half of limits.lease_s"),
        ("- a", "config", "should hold a mapping of keys, not a list"),
        ("a: [", "config", "line 1"),
        ("model: a\nmodel: b", "config", "line 2: the key model is there twice"),
        ("a: &a {x: 1}\nb: {<<: *a, y: 1, y: 2}", "config", "line 2: the key y is there twice"),
        ("? [1]\n: 2", "config", "unhashable"),
        ("{? {a: 1} : 2}", "config", "unhashable"),
        ("x: !!python/object:os.system {}", "config", "constructor"),
        ("\x00", "config", "not valid YAML"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(yaml_file: Path, text: str, param: str, says: str) -> None:
    yaml_file.write_text(text)
    error = refused(yaml_file)
    assert error.param == param
    assert says in error.message
    assert str(yaml_file) in error.message


def test_all_mistakes_are_told_at_once(yaml_file: Path) -> None:
    yaml_file.write_text("model: 1\nhttp: {port: x}")
    message = refused(yaml_file).message
    assert "model: " in message
    assert "http.port: " in message


def test_a_bad_override_is_not_blamed_on_the_file(yaml_file: Path) -> None:
    yaml_file.write_text("http: {port: 8000}")
    error = refused(yaml_file, {"http.port": 0})
    assert error.param == "http.port"
    assert str(yaml_file) not in error.message


def test_an_override_inside_a_value_is_refused(yaml_file: Path) -> None:
    yaml_file.write_text("http: 3")
    assert refused(yaml_file, {"http.port": 1}).param == "http"


def test_unreadable_files(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "absent.yaml").message
    assert "directory" in refused(tmp_path).message


@given(st.binary(max_size=60))
def test_arbitrary_bytes_load_or_are_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "arbitrary.yaml"
    path.write_bytes(data)
    with suppress(ConfigError):
        load_config(path, {})


@pytest.fixture
def facts(make_gguf: Any) -> ModelFacts:
    return resolve(str(make_gguf())).facts


def test_served_context_is_the_models_unless_shortened(facts: ModelFacts) -> None:
    assert served_context(ClusterConfig(), facts) == 128
    assert served_context(ClusterConfig(max_model_len=64), facts) == 64


def test_a_context_beyond_the_models_is_refused(facts: ModelFacts) -> None:
    with pytest.raises(ConfigError, match="use at most 128; or stretch its positions") as caught:
        served_context(ClusterConfig(max_model_len=129), facts)
    assert caught.value.param == "max_model_len"
    would_be = caught.value.message.split("--hf-overrides ")[1].strip("'")
    config = load_config(None, {"max_model_len": 129, "hf_overrides": would_be})
    assert served_context(config, with_overrides(facts, config.hf_overrides, config.max_model_len)) == 129


def test_a_pool_holds_what_is_seen_of_one_request() -> None:
    """All of it, but where every layer has a sliding window."""
    facts, values = tiny_facts("long", max_model_len=100_000), {"prefill.kv_cache_tokens": 1_000, "decode.kv_cache_tokens": 700}
    config = load_config(None, {"max_model_len": 70_000, **values})
    for windows in ((), (200, 0)):
        with pytest.raises(ConfigError, match=r"\(62 blocks\) can't hold one request of 70000 tokens") as caught:
            served_context(config, replace(facts, sliding_windows=windows))
        assert caught.value.param == "prefill.kv_cache_tokens"
    assert served_context(config, replace(facts, sliding_windows=(200, 200))) == 70_000
    with pytest.raises(ConfigError, match=r"decode.kv_cache_tokens: 700 \(43 blocks\) can't hold"):
        served_context(config, replace(facts, sliding_windows=(500, 200)))


def test_what_is_stretched_already_or_paced_gets_no_such_advice(facts: ModelFacts) -> None:
    config, stretched = ClusterConfig(max_model_len=999), replace(facts, rope_scaling=LinearScaling(2.0))
    for pair in ((config, stretched), (config.model_copy(update={"engine": "paced"}), facts)):
        with pytest.raises(ConfigError, match=r"use at most 128$"):
            served_context(*pair)


LINEAR = {"rope_scaling": {"type": "linear", "factor": 2.0}}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}


def test_an_override_goes_before_the_files_and_is_named(facts: ModelFacts) -> None:
    assert with_overrides(facts, {}, 64) == facts
    linear = with_overrides(facts, LINEAR, None)
    assert (linear.rope_scaling, linear.max_model_len) == (LinearScaling(2.0), 256)
    assert linear.rope_theta == facts.rope_theta
    assert linear.positions.startswith("rope=linear-2-")
    base = with_overrides(facts, {"rope_theta": 5e5, "max_position_embeddings": 200}, None)
    assert (base.rope_theta, base.rope_scaling, base.max_model_len) == (5e5, None, 200)
    assert len({facts.identity, linear.identity, base.identity}) == 3


def test_the_base_of_dynamic_scaling_is_that_of_the_served_context(facts: ModelFacts) -> None:
    served = [with_overrides(facts, DYNAMIC, tokens) for tokens in (None, 512, 300, 900)]
    assert [each.max_model_len for each in served] == [512, 512, 300, 512]
    assert len({each.positions for each in served}) == len({each.identity for each in served}) == 2
    shorter = [with_overrides(facts, DYNAMIC, tokens) for tokens in (128, 100, 64)]
    assert len({each.positions for each in shorter}) == 1, "up to the first context all have the same base"


@given(first=st.integers(1, 10_000), factor=st.floats(1, 64), kind=st.sampled_from(["yarn", "linear", "dynamic"]))
def test_another_scaling_is_another_model(first: int, factor: float, kind: str) -> None:
    """Workers share KV where their identities are equal, so whatever turns a token otherwise has to be in it."""
    rope = {"rope_type": kind, "factor": factor}
    served = [
        with_overrides(TINY, {"rope_parameters": rope, "max_position_embeddings": length}, None)
        for length in (first, first + 1)
    ]
    assert TINY.identity not in [each.identity for each in served]
    turned = {each.positions: rope_frequencies(each).tolist() for each in served}
    assert len(turned) == len({each.identity for each in served})
    assert served[0] == with_overrides(TINY, {"rope_parameters": rope, "max_position_embeddings": first}, None)
    if rope_frequencies(served[0]).tolist() != rope_frequencies(served[1]).tolist():
        assert len(turned) == 2


def test_a_pool_that_holds_no_whole_request_is_refused(facts: ModelFacts) -> None:
    config = load_config(None, {"decode.kv_cache_tokens": 112})
    with pytest.raises(ConfigError, match="raise it or lower max_model_len") as caught:
        served_context(config, facts)
    assert caught.value.param == "decode.kv_cache_tokens"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_cache_dtype": "fp8", "device": "cpu"}, "fp8 is for GPUs, and prefill workers compute on processors"),
        ({"kv_cache_dtype": "int8", "device": "cuda"}, "int8 is for processors, and prefill workers compute on GPUs"),
        ({"kv_cache_dtype": "int8", "decode.resources": {"GPU": 1.0}}, "int8 is for processors, and decode workers"),
        ({"kv_cache_dtype": "int8", "engine": "paced"}, "paced workers hold no numbers"),
        ({"kv_cache_dtype": "int4"}, "'auto', 'int8' or 'fp8'"),
    ],
)
def test_a_format_of_kv_that_can_not_be_is_refused_by_name(settings: dict[str, Any], said: str) -> None:
    error = refused(None, settings)
    assert error.param == "kv_cache_dtype"
    assert re.search(said, error.message), error.message


@pytest.mark.parametrize(
    "keys", list(itertools.combinations(("http.keys_file", "telemetry.audit_log", "telemetry.usage_log"), 2))
)
def test_no_two_of_the_files_are_one(keys: tuple[str, str], tmp_path: Path) -> None:
    file, link = tmp_path / "lines", tmp_path / "link"
    file.touch()
    link.symlink_to(file)
    for path in (file, link):
        error = refused(None, {keys[0]: str(file), keys[1]: str(path)})
        assert error.param == keys[1]
        assert f"{path} is {keys[0]} already" in error.message
    load_config(None, {keys[0]: str(file), keys[1]: str(tmp_path / "other")})

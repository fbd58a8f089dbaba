"""What `serve deploy` hands over becomes a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from cluster.ray.serve_build import dotted, read
from configs.loader import load_config
from protocol.errors import ConfigError

SHIPPED = Path(__file__).parents[3] / "deploy" / "serve.yaml"


def test_nested_and_dotted_keys_are_the_same() -> None:
    assert dict(dotted({"decode": {"workers": 2}, "http.port": 9})) == {"decode.workers": 2, "http.port": 9}
    assert read({"decode": {"workers": 2}}) == read({"decode.workers": 2})


def test_mappings_of_free_keys_are_left_whole() -> None:
    options = {"security.protocol": "SASL_SSL", "sasl.password": "12345678"}
    settings = {"telemetry": {"usage_kafka_options": options}, "tiers": {"standard": {"weight": 2.0}}}
    assert dict(dotted(settings)) == {"telemetry.usage_kafka_options": options, "tiers": {"standard": {"weight": 2.0}}}


def test_arguments_go_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tandem.yaml"
    path.write_text("decode: {workers: 2}\nprefill: {workers: 2}\n")
    config = read({"config": str(path), "decode": {"workers": 4}})
    assert (config.prefill.workers, config.decode.workers) == (2, 4)


def test_keys_come_from_the_environment_of_the_head_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_ADMIN_KEY", "operators-only-and-long-enough")
    admin_key = read({}).http.admin_key
    assert admin_key is not None
    assert admin_key == read({"http.admin_key": "operators-only-and-long-enough"}).http.admin_key
    assert read({"http.admin_key": "another-one-that-is-long-enough"}).http.admin_key != admin_key


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"config": 3}, "config: should be the path of a file, not 3"),
        ({"config": "/nowhere.yaml"}, "/nowhere.yaml: can't be read"),
        ({"decoder": {"workers": 1}}, "unknown key"),
        ({"decode.workers": "many"}, "decode.workers"),
        ({"decode": {"workerz": 1}}, "decode.workerz: unknown key"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(arguments)


def test_the_shipped_file_is_one_that_serve_takes() -> None:
    shipped = yaml.safe_load(SHIPPED.read_text())
    (application,) = ServeDeploySchema.model_validate(shipped).applications
    assert application.name == "tandem"
    config = read(application.args)
    assert config == load_config(None, {"model": "smollm2", "prefill.workers": 1, "decode.workers": 1, "http.port": 8000})
    assert (config.http.host, config.http.port) == (shipped["http_options"]["host"], shipped["http_options"]["port"])

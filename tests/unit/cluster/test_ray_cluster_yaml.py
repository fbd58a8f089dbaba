"""`ray_cluster.yaml` is one that `ray up` takes, and configs/cluster.yaml fits on its nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.ray.placement import unplaceable
from configs.loader import load_config

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def launched() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "ray_cluster.yaml").read_text())
    return loaded


def test_ray_up_accepts_it(launched: dict[str, Any]) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(launched)
    validate_config(prepared)
    assert prepared["head_node_type"] == "tandem.head"
    assert set(prepared["available_node_types"]) == {"tandem.head", "tandem.prefill", "tandem.decode"}


def test_the_cluster_configuration_fits_on_the_nodes_that_are_always_there(launched: dict[str, Any]) -> None:
    nodes = [
        {"CPU": 8.0, **node_type["resources"]}
        for node_type in launched["available_node_types"].values()
        for _ in range(node_type.get("min_workers", 1))
    ]
    config = load_config(ROOT / "configs" / "cluster.yaml", {})
    assert unplaceable(config, nodes) is None
    assert config.prefill.resources.keys() == {"GPU", "tandem_prefill"}
    assert config.decode.resources.keys() == {"GPU", "tandem_decode"}


def test_each_role_has_instances_of_its_own(launched: dict[str, Any]) -> None:
    types = launched["available_node_types"]
    instances = {types[f"tandem.{role}"]["node_config"]["InstanceType"] for role in ("head", "prefill", "decode")}
    assert len(instances) == 3


def test_nodes_ask_for_the_token_and_keep_to_themselves(launched: dict[str, Any]) -> None:
    setup = "\n".join(launched["setup_commands"])
    for line in ("RAY_AUTH_MODE=token", "RAY_USAGE_STATS_ENABLED=0", "RAY_SERVE_ENABLE_HA_PROXY=1", "tandem-haproxy"):
        assert line in setup
    starts = [
        command for name in ("head", "worker") for command in launched[f"{name}_start_ray_commands"] if "ray start" in command
    ]
    assert len(starts) == 2
    assert all(command.startswith(". ~/.tandem_environment") for command in starts)
    assert "--include-dashboard=false" in starts[0]

"""`ray_cluster.yaml` and its like for machines of one's own: `ray up` takes them, and configurations fit on their nodes."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.ray.placement import unplaceable
from configs.loader import load_config
from tests.unit.deploy.ray_environment import exported, fixed, wanted

ROOT = Path(__file__).parents[3]
ONPREM = ROOT / "deploy" / "ray_cluster.onprem.yaml"


@pytest.fixture(scope="module")
def launched() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "ray_cluster.yaml").read_text())
    return loaded


@pytest.fixture(scope="module")
def onprem() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(ONPREM.read_text())
    return loaded


def accepted(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration as `ray up` goes on with it."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared: dict[str, Any] = prepare_config(config)
    validate_config(prepared)
    return prepared


def test_ray_up_accepts_it(launched: dict[str, Any]) -> None:
    prepared = accepted(launched)
    assert prepared["head_node_type"] == "tandem.head"
    types = {"tandem.head", "tandem.prefill", "tandem.decode", "tandem.prefill8", "tandem.decode8"}
    assert prepared["available_node_types"].keys() == types


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


@pytest.mark.parametrize(("ranks", "fitting"), [(1, 8), (2, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_workers_and_gangs_fill_a_node_of_eight_gpus(launched: dict[str, Any], role: str, ranks: int, fitting: int) -> None:
    node = {"CPU": 96.0, **launched["available_node_types"][f"tandem.{role}8"]["resources"]}
    other = {"CPU": 96.0, "GPU": 8, "tandem_prefill": 8, "tandem_decode": 8}
    del other[f"tandem_{role}"]
    for workers in (fitting, fitting + 1):
        sizes = {f"{role}.workers": workers, f"{role}.tensor_parallel_size": ranks, f"{role}.max_workers": workers}
        config = load_config(ROOT / "configs" / "cluster.yaml", sizes)
        assert (unplaceable(config, [node, other]) is None) == (workers == fitting)


def key_file() -> Path:
    """Where the cluster's configuration has the API keys, in the home of the image's user."""
    named: str = yaml.safe_load((ROOT / "configs" / "cluster.yaml").read_text())["http"]["keys_file"]
    return Path(named.replace("~", "/home/ray"))


def test_api_keys_outlive_the_heads_container(launched: dict[str, Any]) -> None:
    """Ray runs it with `--rm`, and docker makes a folder that is not there for root."""
    options = [*launched["docker"]["run_options"], *launched["docker"].get("head_run_options", ())]
    volumes = dict(re.findall(r"--volume (\S+):(\S+)", "\n".join(options)))
    [folder] = (outside for outside, inside in volumes.items() if key_file().is_relative_to(inside))
    assert f"sudo install -d -m 700 -o 1000 -g 100 {folder}" in launched["initialization_commands"]


def test_machines_of_ones_own_have_the_folder_of_api_keys(onprem: dict[str, Any]) -> None:
    folder = str(key_file().parent).replace("/home/ray", "~")
    made = re.findall(r"^mkdir -p -m 700 (.+)$", "\n".join(onprem["setup_commands"]), re.MULTILINE)
    assert folder in " ".join(made).split()


def test_each_role_has_instances_of_its_own(launched: dict[str, Any]) -> None:
    types = launched["available_node_types"]
    instances = {each["node_config"]["InstanceType"] for each in types.values()}
    assert len(instances) == len(types)


def test_a_node_offers_as_much_of_its_role_as_it_has_gpus(launched: dict[str, Any]) -> None:
    for name, node_type in launched["available_node_types"].items():
        if name != "tandem.head":
            role = re.sub(r"^tandem\.|\d", "", name)
            assert node_type["resources"] == {
                "GPU": node_type["resources"]["GPU"],
                f"tandem_{role}": node_type["resources"]["GPU"],
            }


@pytest.mark.parametrize("path", [ROOT / "ray_cluster.yaml", ONPREM], ids=lambda path: path.name)
def test_nodes_ask_for_the_token_and_keep_to_themselves(path: Path) -> None:
    config = yaml.safe_load(path.read_text())
    setup = "\n".join(config["setup_commands"])
    for line in ("RAY_AUTH_MODE=token", "RAY_USAGE_STATS_ENABLED=0", "RAY_SERVE_ENABLE_HA_PROXY=1", "tandem-haproxy"):
        assert line in setup
    starts = [
        command for name in ("head", "worker") for command in config[f"{name}_start_ray_commands"] if "ray start" in command
    ]
    assert len(starts) == 2
    assert all(command.startswith(". ~/.tandem_environment") for command in starts)
    assert "--include-dashboard=false" in starts[0]


def test_ray_up_accepts_machines_of_ones_own(onprem: dict[str, Any]) -> None:
    prepared = accepted(onprem)
    [node_type] = prepared["available_node_types"].values()
    assert node_type["min_workers"] == node_type["max_workers"] == len(onprem["provider"]["worker_ips"])


def test_machines_of_ones_own_have_the_same_environment() -> None:
    assert exported(ONPREM).keys() == wanted().keys() | {"PATH"}
    assert fixed().items() <= exported(ONPREM).items()


def test_a_cluster_fits_on_machines_that_say_what_they_offer(onprem: dict[str, Any]) -> None:
    """The files that the head of the page tells to write, as the start commands read them."""
    offers = [json.loads(found) for found in re.findall(r"echo '(\{.*?\})' > ~/\.tandem_resources", ONPREM.read_text())]
    assert offers == [{"tandem_prefill": 4}, {"tandem_decode": 8}, {}]
    nodes = [{"CPU": 32.0, "GPU": float(sum(offer.values())), **offer} for offer in offers]
    assert (
        unplaceable(load_config(ROOT / "configs" / "cluster.yaml", {"prefill.workers": 4, "decode.workers": 8}), nodes) is None
    )


@pytest.mark.parametrize("role", ["head", "worker"])
def test_ray_start_reads_what_the_machine_offers(onprem: dict[str, Any], role: str, tmp_path: Path) -> None:
    """The last command, in a shell, with something in Ray's place that prints what it gets."""
    (tmp_path / ".tandem_resources").write_text('{"tandem_decode": 8}\n')
    (tmp_path / ".tandem_environment").write_text("ray() { printf '%s\\n' \"$@\"; }\n")
    command = onprem[f"{role}_start_ray_commands"][-1]
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "RAY_HEAD_IP": "10.0.0.1"}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=30, check=True)
    assert '--resources={"tandem_decode": 8}' in done.stdout.splitlines()

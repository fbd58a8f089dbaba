"""What no schema sees: names in the files for Kubernetes that refer to each other, and figures that have to fit together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import __version__
from cluster.ray.placement import unplaceable
from configs.loader import load_config
from tests.unit.deploy.manifests import KUBERNETES, ROLES, ROOT, documents, groups, main_container, of_kind, pods, ray_clusters
from tests.unit.deploy.ray_environment import fixed, wanted

Json = dict[str, Any]

PODS = dict(pods())
CONFIG = load_config(KUBERNETES / "base" / "cluster.yaml", {})
BY_KUBERAY = {"ray.io/serve": "true"}
"""The label that KubeRay gives to the head's pod of a RayService while HTTP is up there."""
OPERATORS = {
    "Helm chart": {
        "app.kubernetes.io/name": "kuberay-operator",
        "app.kubernetes.io/instance": "kuberay-operator",
        "app.kubernetes.io/component": "kuberay-operator",
    },
    "kustomization": {"app.kubernetes.io/name": "kuberay", "app.kubernetes.io/component": "kuberay-operator"},
}
"""The labels of the pods of KubeRay's operator, by how it was installed."""
CLEARING_UP_S = 15.0


def config_maps() -> dict[str, set[str]]:
    """The keys of every ConfigMap that there will be."""
    found = {each["metadata"]["name"]: set(each["data"]) for each in of_kind("ConfigMap")}
    for kustomization in of_kind("Kustomization"):
        found |= {each["name"]: set(each["files"]) for each in kustomization.get("configMapGenerator", ())}
    return found


def secrets() -> dict[str, set[str]]:
    """The keys of every Secret that an operator is told to make."""
    return {each["metadata"]["name"]: set(each["stringData"]) for each in of_kind("Secret")}


def labels_of(template: Json) -> dict[str, str]:
    return {**template["metadata"]["labels"], **BY_KUBERAY}


def matching(selector: Json) -> set[str]:
    """The pods that these labels choose."""
    return {name for name, template in PODS.items() if selector.items() <= labels_of(template).items()}


def containers(template: Json) -> list[Json]:
    return [*template["spec"]["initContainers"], *template["spec"]["containers"]]


def named_keys(template: Json) -> Iterator[tuple[str, str, str]]:
    """Every key of a ConfigMap or Secret that a pod takes up by name: the kind, the object and the key."""
    for container in containers(template):
        for variable in container.get("env", ()):
            reference = variable["valueFrom"]["secretKeyRef"]
            yield "secret", reference["name"], reference["key"]


def named_objects(template: Json) -> Iterator[tuple[str, str]]:
    """Every ConfigMap and Secret that a pod takes up whole: its kind and name."""
    for container in containers(template):
        for source in container.get("envFrom", ()):
            yield "configMap", source["configMapRef"]["name"]
    for volume in template["spec"]["volumes"]:
        for source in (volume, *volume.get("projected", {}).get("sources", ())):
            if "configMap" in source:
                yield "configMap", source["configMap"]["name"]
            if "secret" in source:
                yield "secret", source["secret"]["name"]


@pytest.mark.parametrize("name", PODS)
def test_config_maps_and_secrets_that_a_pod_names_are_there(name: str) -> None:
    there = {"configMap": config_maps(), "secret": secrets()}
    objects = list(named_objects(PODS[name]))
    assert objects
    assert [each for each in objects if each[1] not in there[each[0]]] == []
    assert [each for each in named_keys(PODS[name]) if each[2] not in there[each[0]].get(each[1], ())] == []


def test_every_secret_is_used() -> None:
    used = {name for template in PODS.values() for kind, name in named_objects(template) if kind == "secret"}
    used |= {name for template in PODS.values() for _, name, _ in named_keys(template)}
    used |= {spec["authOptions"]["secretName"] for spec in ray_clusters().values()}
    assert used == secrets().keys()


def test_the_example_holds_no_secret_and_is_in_no_kustomization() -> None:
    assert {value for each in of_kind("Secret") for value in each["stringData"].values()} == {"EXAMPLE"}
    assert not any("secrets" in name for each in of_kind("Kustomization") for name in each["resources"])


def test_ray_finds_its_token_where_kuberay_looks_for_it() -> None:
    for spec in ray_clusters().values():
        assert spec["authOptions"]["mode"] == "token"
        assert "auth_token" in secrets()[spec["authOptions"]["secretName"]]


def test_every_variable_of_ray_up_is_there() -> None:
    [environment] = of_kind("ConfigMap")
    assert environment["data"].keys() == wanted().keys()
    assert fixed().items() <= environment["data"].items()
    for template in PODS.values():
        assert {"configMapRef": {"name": environment["metadata"]["name"]}} in main_container(template)["envFrom"]


def test_the_configuration_is_that_of_ray_up() -> None:
    other = load_config(ROOT / "configs" / "cluster.yaml", {})
    assert CONFIG.model_copy(update={"http": other.http}) == other
    assert CONFIG.http.model_copy(update={"keys_file": other.http.keys_file}) == other.http


def test_the_configuration_and_the_keys_are_where_they_are_looked_for() -> None:
    for kind in ray_clusters():
        template = PODS[f"{kind} head"]
        [mount] = [each for each in main_container(template)["volumeMounts"] if each["name"] == "config"]
        [volume] = [each for each in template["spec"]["volumes"] if each["name"] == "config"]
        sources = volume["projected"]["sources"]
        keys = {**config_maps(), **secrets()}
        files = {f"{mount['mountPath']}/{key}" for each in sources for name in named(each) for key in keys[name]}
        assert {"/etc/tandem/cluster.yaml", CONFIG.http.keys_file} <= files


def named(source: Json) -> list[str]:
    return [below["name"] for below in source.values()]


def test_workers_fit_on_the_pods_that_are_always_there() -> None:
    for spec in ray_clusters().values():
        nodes = [node for group in spec["workerGroupSpecs"] for node in [offered(group)] * group["minReplicas"]]
        assert unplaceable(CONFIG, nodes) is None
        assert unplaceable(CONFIG, nodes[1:]) is not None


def offered(group: Json) -> dict[str, float]:
    """What KubeRay has a pod of this group offer to Ray."""
    limits = main_container(group["template"])["resources"]["limits"]
    own = {name: float(amount) for name, amount in group["resources"].items()}
    return {"CPU": float(limits["cpu"]), "GPU": float(limits["nvidia.com/gpu"]), **own}


def test_a_group_offers_as_much_of_its_role_as_it_has_gpus() -> None:
    for spec in ray_clusters().values():
        for role in ("prefill", "decode"):
            group = groups(spec)[role]
            assert group["groupName"] == role
            assert offered(group)[f"tandem_{role}"] == offered(group)["GPU"]
            assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_ray_and_tandem_are_of_the_versions_that_are_tested() -> None:
    locked = (ROOT / "requirements.lock").read_text()
    for spec in ray_clusters().values():
        assert f"\nray=={spec['rayVersion']}\n" in locked
    images = {container["image"] for template in PODS.values() for container in containers(template)}
    assert {image.rpartition(":")[2] for image in images} == {__version__, f"{__version__}-cuda"}


@pytest.mark.parametrize("name", PODS)
def test_pods_keep_to_what_their_namespace_enforces(name: str) -> None:
    """The level `restricted`, and a root that can't be written."""
    [namespace] = of_kind("Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    spec = PODS[name]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in containers(PODS[name]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"].keys() >= {"cpu", "memory"}


@pytest.mark.parametrize("name", PODS)
def test_what_is_written_is_on_a_volume(name: str) -> None:
    volumes = {each["name"] for each in PODS[name]["spec"]["volumes"]}
    for container in containers(PODS[name]):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    mounts = {mount["mountPath"]: mount for mount in main_container(PODS[name])["volumeMounts"]}
    assert {"/tmp", "/dev/shm", "/var/cache/tandem"} <= mounts.keys()
    # HAProxy's folder has to be made before, by the same user, closed, in a /tmp that is closed, too.
    [init] = PODS[name]["spec"]["initContainers"]
    [scratch] = init["volumeMounts"]
    assert mounts["/tmp"]["name"] == scratch["name"]
    below = f"{scratch['mountPath']}/{mounts['/tmp']['subPath']}"
    [environment] = of_kind("ConfigMap")
    folder = str(Path(environment["data"]["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"]).parent)
    assert init["command"] == ["/bin/mkdir", "-p", "-m", "700", below, folder.replace("/tmp", below)]


def test_services_lead_to_the_head_alone() -> None:
    found = of_kind("Service")
    assert [each["metadata"] for each in found[1:]] == [found[0]["metadata"]] * (len(found) - 1)
    assert len(found) == len(ray_clusters())
    for service in found:
        assert matching(service["spec"]["selector"]) == {f"{kind} head" for kind in ray_clusters()}
        for port in service["spec"]["ports"]:
            for kind in ray_clusters():
                assert port["targetPort"] in ports_of(PODS[f"{kind} head"])
                assert ports_of(PODS[f"{kind} head"])[port["targetPort"]] == CONFIG.http.port == port["port"]


def test_the_handbook_says_what_tls_of_tandems_own_changes() -> None:
    """KubeRay sets its label by plain HTTP, and Prometheus asks for an address that the certificate does not name."""
    page = (ROOT / "docs" / "handbook" / "deploy.md").read_text()
    [paragraph] = re.findall(r"^- \*\*TLS\*\*.*?(?=^- )", page, re.MULTILINE | re.DOTALL)
    assert {label for label in BY_KUBERAY if f"`{label}`" in paragraph} == {
        label for each in of_kind("Service") for label in each["spec"]["selector"].keys() & BY_KUBERAY.keys()
    }
    [shown] = re.findall(r"`(tlsConfig: .+)`", paragraph)
    assert yaml.safe_load(shown)["tlsConfig"].keys() == {"serverName", "ca"}


def ports_of(template: Json) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in main_container(template).get("ports", ())}


@pytest.mark.parametrize("kind", ray_clusters())
def test_probes_ask_ports_that_there_are(kind: str) -> None:
    agent = 52365
    """Where Ray's agent answers for its node, unless `dashboard-agent-listen-port` says otherwise."""
    for role in ROLES:
        container = main_container(PODS[f"{kind} {role}"])
        probes = {name: probe["httpGet"] for name, probe in container.items() if name.endswith("Probe")}
        assert {"livenessProbe", "readinessProbe"} <= probes.keys()
        for get in probes.values():
            if get["port"] == agent:
                assert get["path"] == "/api/healthz"
                assert "dashboard-agent-listen-port" not in groups(ray_clusters()[kind])[role]["rayStartParams"]
            else:
                assert get["port"] in ports_of(PODS[f"{kind} {role}"])
        # Who fills the port of the clients is not to have the pod ended, and with it the cluster.
        assert probes["livenessProbe"]["port"] == agent
    if kind == "RayCluster":
        head = main_container(PODS["RayCluster head"])
        assert [head[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness")] == ["/live", "/ready"]


def test_nobody_is_killed_before_requests_have_had_their_time() -> None:
    for name, template in PODS.items():
        grace_s = template["spec"]["terminationGracePeriodSeconds"]
        hook = main_container(template).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        if name == "RayCluster head":  # SIGTERM is the notice there
            assert hook is None
            assert "exec tini -- tandem serve" in main_container(template)["args"][0]
            taken_s = CONFIG.limits.shutdown_s
        else:
            assert hook is not None
            assert hook[0] == "tandem"
            taken_s = CONFIG.limits.shutdown_s if hook[1] == "stop" else max(float(hook[-1]), CONFIG.limits.shutdown_s)
        assert grace_s >= taken_s + CLEARING_UP_S, name


def test_a_drain_of_a_kubernetes_node_leaves_each_role_a_pod() -> None:
    budgets = {each["metadata"]["name"].removeprefix("tandem-"): each["spec"] for each in of_kind("PodDisruptionBudget")}
    assert budgets.keys() == set(ROLES)
    for role, budget in budgets.items():
        assert matching(budget["selector"]["matchLabels"]) == {f"{kind} {role}" for kind in ray_clusters()}
        assert isinstance(budget["minAvailable"], int), "KubeRay's resources have no scale that percentages could be of"
        if role != "head":
            assert all(budget["minAvailable"] < groups(spec)[role]["minReplicas"] for spec in ray_clusters().values())


def test_the_network_lets_in_nobody_but_clients_and_the_operator() -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind("NetworkPolicy")}
    everyone = policies["tandem"]
    assert matching(everyone["podSelector"]["matchLabels"]) == PODS.keys()
    assert set(everyone["policyTypes"]) == {"Ingress", "Egress"}
    assert everyone["ingress"] == [{"from": [{"podSelector": everyone["podSelector"]}]}]
    head = policies["tandem-head"]
    assert matching(head["podSelector"]["matchLabels"]) == {f"{kind} head" for kind in ray_clusters()}
    opened = {port["port"] for rule in head["ingress"] for port in rule["ports"]}
    assert opened == {"serve", "dashboard"}
    for rule in head["ingress"]:
        if {"port": "dashboard", "protocol": "TCP"} in rule["ports"]:
            assert all("podSelector" in peer for peer in rule["from"])
    for kind in ray_clusters():
        assert opened <= ports_of(PODS[f"{kind} head"]).keys()


@pytest.mark.parametrize("installed", OPERATORS)
def test_the_network_lets_the_operator_to_the_dashboard(installed: str) -> None:
    [head] = (each["spec"] for each in of_kind("NetworkPolicy") if each["metadata"]["name"] == "tandem-head")
    [rule] = (rule for rule in head["ingress"] if "dashboard" in {port["port"] for port in rule["ports"]})
    assert {"serve", "dashboard"} == {port["port"] for port in rule["ports"]}
    assert all(peer["namespaceSelector"] == {} for peer in rule["from"]), "the operator has a namespace of its own"
    selectors = [peer["podSelector"]["matchLabels"] for peer in rule["from"]]
    assert any(selector.items() <= OPERATORS[installed].items() for selector in selectors)
    assert not any(selector.items() <= labels_of(template).items() for selector in selectors for template in PODS.values())


def test_workers_are_spread_by_their_own_labels() -> None:
    for kind in ray_clusters():
        for role in ("prefill", "decode"):
            [constraint] = PODS[f"{kind} {role}"]["spec"]["topologySpreadConstraints"]
            assert matching(constraint["labelSelector"]["matchLabels"]) == {f"{each} {role}" for each in ray_clusters()}


def test_prometheus_finds_the_cluster_as_its_rules_name_it() -> None:
    [monitor] = (each["spec"] for each in of_kind("ServiceMonitor"))
    for service in of_kind("Service"):
        labels = service["metadata"]["labels"]
        assert monitor["selector"]["matchLabels"].items() <= labels.items()
        prometheus = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
        assert labels[monitor["jobLabel"]] == prometheus["scrape_configs"][0]["job_name"]
        [endpoint] = monitor["endpoints"]
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
        key = endpoint["authorization"]["credentials"]
        assert key["key"] in secrets()[key["name"]]


def test_ray_serve_takes_the_application() -> None:
    from ray.serve.schema import ServeDeploySchema

    [service] = of_kind("RayService")
    schema = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    assert schema.proxy_location == "HeadOnly"
    # The routers listen there, for HAProxy alone, which listens at the configuration's host.
    assert (schema.http_options.host, schema.http_options.port) == ("127.0.0.1", CONFIG.http.port)
    [application] = schema.applications
    assert (application.name, application.route_prefix) == ("tandem", "/")
    assert application.args == {"config": "/etc/tandem/cluster.yaml"}


def test_the_namespace_is_the_same_everywhere() -> None:
    spaces = {
        each["metadata"].get("namespace") for each in documents().values() if each["kind"] not in ("Namespace", "Kustomization")
    }
    assert spaces == {each["metadata"]["name"] for each in of_kind("Namespace")}

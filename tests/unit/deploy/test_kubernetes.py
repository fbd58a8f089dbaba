"""The files for Kubernetes: every field is one that Kubernetes or the operator knows; a misspelled one is found anywhere."""

from __future__ import annotations

import copy
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from deploy.kubernetes.build import TARGET, text
from tests.unit.deploy.kubernetes_kinds import found, problems
from tests.unit.deploy.manifests import KUBERNETES, documents, mappings, ray_clusters

OPEN = {
    "annotations",
    "capacity",
    "data",
    "labels",
    "limits",
    "matchLabels",
    "nodeSelector",
    "rayStartParams",
    "requests",
    "resources",
    "selector",
    "stringData",
}
"""Mappings whose keys are the user's own. Some of these names are also of mappings with fields."""


@pytest.mark.parametrize("name", documents())
def test_every_field_is_known(name: str) -> None:
    assert list(problems(documents()[name])) == []


@pytest.mark.parametrize("name", documents())
def test_a_misspelled_field_is_found_wherever_it_stands(name: str) -> None:
    document = copy.deepcopy(documents()[name])
    places = [(path, mapping) for path, mapping in mappings(document) if not path or path[-1] not in OPEN]
    for _, mapping in places:
        mapping["mispelled"] = "x"
    noticed = {place for place, problem in found(document) if "mispelled" in problem}
    assert [path for path, _ in places if path not in noticed] == []


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("raycluster/raycluster.yaml RayCluster tandem", lambda spec: spec["headGroupSpec"].pop("template")),
        ("raycluster/raycluster.yaml RayCluster tandem", lambda spec: spec["workerGroupSpecs"][0].update(replicas="2")),
        ("raycluster/raycluster.yaml RayCluster tandem", lambda spec: spec["authOptions"].update(mode="none")),
        ("rayservice/rayservice.yaml RayService tandem", lambda spec: spec.update(serveConfigV2={"applications": []})),
        ("monitoring/service-monitor.yaml ServiceMonitor tandem", lambda spec: spec["endpoints"][0].update(interval="15")),
        ("base/budgets.yaml PodDisruptionBudget tandem-head", lambda spec: spec.update(minAvailable=[1])),
    ],
)
def test_a_wrong_type_is_found(kind: str, change: Any) -> None:
    document = copy.deepcopy(documents()[kind])
    change(document["spec"])
    assert list(problems(document))


def test_the_rule_is_what_prometheus_files_say() -> None:
    assert TARGET.read_text() == text(), "write it anew with `make docs`"


def test_both_clusters_have_the_same_nodes() -> None:
    """What differs is how Tandem is started on the head, and how Kubernetes asks after it there."""
    cluster, service = (copy.deepcopy(each) for each in ray_clusters().values())
    assert cluster["workerGroupSpecs"] == service["workerGroupSpecs"]
    assert (cluster["rayVersion"], cluster["authOptions"]) == (service["rayVersion"], service["authOptions"])
    templates = [each["headGroupSpec"]["template"] for each in (cluster, service)]
    for template in templates:
        template["metadata"].pop("annotations", None)
        for name in ("command", "args", "lifecycle", "startupProbe", "livenessProbe", "readinessProbe"):
            template["spec"]["containers"][0].pop(name, None)
    assert templates[0] == templates[1]


@pytest.mark.parametrize("folder", ["base", "raycluster", "rayservice", "monitoring"])
def test_a_kustomization_takes_every_file_of_its_folder(folder: str) -> None:
    taken = yaml.safe_load((KUBERNETES / folder / "kustomization.yaml").read_text())
    generated = [file for each in taken.get("configMapGenerator", ()) for file in each["files"]]
    files = {path.name for path in (KUBERNETES / folder).iterdir()} - {"kustomization.yaml"}
    assert files == {*taken["resources"], *generated} - {"../base"}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("folder", ["raycluster", "rayservice", "monitoring"])
def test_kubectl_makes_one_list_of_them(folder: str) -> None:
    """Its `kustomize` needs no cluster. What is generated keeps its name, which pod templates refer to."""
    command = ["kubectl", "kustomize", str(KUBERNETES / folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    made = {(each["kind"], each["metadata"]["name"]) for each in yaml.safe_load_all(done.stdout)}
    folders = (folder,) if folder == "monitoring" else (folder, "base")
    written = [each for name, each in documents().items() if name.startswith(folders) and each["kind"] != "Kustomization"]
    generated = set() if folder == "monitoring" else {("ConfigMap", "tandem-config")}
    assert made == {(each["kind"], each["metadata"]["name"]) for each in written} | generated

"""The files of `deploy/kubernetes`, read, and what of them the tests ask for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
KUBERNETES = ROOT / "deploy" / "kubernetes"
ROLES = ("head", "prefill", "decode")

Json = dict[str, Any]


@cache
def documents() -> dict[str, Json]:
    """Every document by its file, kind and name: `base/budgets.yaml PodDisruptionBudget tandem-head`.

    base/cluster.yaml is Tandem's configuration, not Kubernetes'.
    """
    found: dict[str, Json] = {}
    for path in sorted(KUBERNETES.rglob("*.yaml")):
        name = str(path.relative_to(KUBERNETES))
        if name != "base/cluster.yaml":
            for document in yaml.safe_load_all(path.read_text()):
                found[" ".join((name, document["kind"], document.get("metadata", {}).get("name", "")))] = document
    return found


def of_kind(kind: str, folder: str = "") -> list[Json]:
    return [each for name, each in documents().items() if each["kind"] == kind and name.startswith(folder)]


def ray_clusters() -> dict[str, Json]:
    """The specifications of both Ray clusters, by the kind of the resource that holds them."""
    [cluster], [service] = of_kind("RayCluster"), of_kind("RayService")
    return {"RayCluster": cluster["spec"], "RayService": service["spec"]["rayClusterConfig"]}


def groups(spec: Json) -> dict[str, Json]:
    """The head group and the worker groups of a Ray cluster, by the role that their pods are labelled with."""
    found = (spec["headGroupSpec"], *spec["workerGroupSpecs"])
    return {each["template"]["metadata"]["labels"]["tandem/role"]: each for each in found}


def pods() -> Iterator[tuple[str, Json]]:
    """The template of every pod, with the kind of its cluster and its role: `RayCluster head`."""
    for kind, spec in ray_clusters().items():
        for role, group in groups(spec).items():
            yield f"{kind} {role}", group["template"]


def main_container(template: Json) -> Json:
    """The container that KubeRay runs Ray in."""
    container: Json = template["spec"]["containers"][0]
    return container


def mappings(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Json]]:
    """Every mapping in a document, with where it is."""
    if isinstance(value, dict):
        yield path, value
        for name, below in value.items():
            yield from mappings(below, (*path, name))
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from mappings(below, (*path, str(index)))

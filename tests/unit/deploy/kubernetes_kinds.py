"""What KubeRay and Prometheus' operator take, as schemas that refuse every field that they do not know.

Kubernetes drops an unknown field of a custom resource without a word, so a misspelled one has to be found here. The fields
are those of

- `ray.io/v1` in KubeRay 1.7.0 (August 2026),
- `monitoring.coreos.com/v1` in prometheus-operator 0.93.0 (August 2026),

both under the Apache License 2.0. They are written down in short: the operators' own descriptions of their resources are
megabytes, since every pod template in them has all of Kubernetes' fields. Those come from the package `kubernetes-validate`.
To renew them, compare with `kubectl explain --recursive raycluster.spec` of the operator that you run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

Schema = dict[str, Any]

KUBERNETES = "1.37"
"""Version of Kubernetes whose own kinds the manifests are checked against."""
_DEFINITIONS = "/api/_definitions.json"
STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
INTEGER: Schema = {"type": "integer"}
STRINGS: Schema = {"type": "object", "additionalProperties": STRING}
DURATION: Schema = {
    "type": "string",
    "pattern": r"^(0|(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?)$",
}


_ACTIONS = ("replace", "keep", "drop", "hashmod", "labelmap", "labeldrop", "labelkeep", "lowercase", "uppercase")
"""What Prometheus can do to the labels of a target."""


def one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def many(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def fields(*required: str, **properties: Schema) -> Schema:
    """An object with these fields and no others."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def core(name: str) -> Schema:
    """One of Kubernetes' own types, such as `core.v1.Service`, which refuses unknown fields."""
    return {"$ref": f"{_DEFINITIONS}#/$defs/io.k8s.api.{name}"}


def _files() -> Path:
    [folder] = (Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema").glob(f"v{KUBERNETES}.*-local-strict")
    return folder


@cache
def _registry() -> Registry[Any]:
    definitions = Resource.from_contents(json.loads((_files() / "_definitions.json").read_text()))
    return Registry[Any]().with_resources([(_DEFINITIONS, definitions), (definitions.id() or "", definitions)])


def resource(version: str, kind: str, spec: Schema) -> Schema:
    metadata = {"$ref": f"{_DEFINITIONS}#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}
    return fields(
        "apiVersion", "kind", "metadata", "spec", apiVersion=one_of(version), kind=one_of(kind), metadata=metadata, spec=spec
    )


def ray_cluster_spec() -> Schema:
    head = fields(
        "template",
        template=core("core.v1.PodTemplateSpec"),
        headService=core("core.v1.Service"),
        enableIngress=BOOLEAN,
        ingressOptions={"type": "object"},
        resources=STRINGS,
        labels=STRINGS,
        rayStartParams=STRINGS,
        serviceType=one_of("ClusterIP", "NodePort", "LoadBalancer"),
    )
    workers = fields(
        "groupName",
        "minReplicas",
        "maxReplicas",
        "template",
        suspend=BOOLEAN,
        groupName=STRING,
        replicas=INTEGER,
        minReplicas=INTEGER,
        maxReplicas=INTEGER,
        idleTimeoutSeconds=INTEGER,
        priority=INTEGER,
        resources=STRINGS,
        labels=STRINGS,
        rayStartParams=STRINGS,
        template=core("core.v1.PodTemplateSpec"),
        scaleStrategy=fields(workersToDelete=many(STRING)),
        numOfHosts=INTEGER,
    )
    credential = fields(value=STRING, valueFrom=core("core.v1.EnvVarSource"))
    return fields(
        "headGroupSpec",
        upgradeStrategy=fields(type=one_of("Recreate", "None")),
        authOptions=fields(enableK8sTokenAuth=BOOLEAN, secretName=STRING, mode=one_of("disabled", "token")),
        suspend=BOOLEAN,
        managedBy=STRING,
        autoscalerOptions={"type": "object"},
        headServiceAnnotations=STRINGS,
        enableInTreeAutoscaling=BOOLEAN,
        gcsFaultToleranceOptions=fields(
            backend=one_of("redis", "rocksdb"),
            redisUsername=credential,
            redisPassword=credential,
            externalStorageNamespace=STRING,
            redisAddress=STRING,
            storage={"type": "object"},
        ),
        historyServerOptions={"type": "object"},
        networkPolicy={"type": "object"},
        tlsOptions=fields(enabled=BOOLEAN),
        headGroupSpec=head,
        rayVersion=STRING,
        workerGroupSpecs=many(workers),
    )


def ray_service_spec() -> Schema:
    upgrade = fields(
        type=one_of("NewCluster", "NewClusterWithIncrementalUpgrade", "None"), clusterUpgradeOptions={"type": "object"}
    )
    return fields(
        "rayClusterConfig",
        rayClusterDeletionDelaySeconds=INTEGER,
        serviceUnhealthySecondThreshold=INTEGER,
        deploymentUnhealthySecondThreshold=INTEGER,
        serveService=core("core.v1.Service"),
        upgradeStrategy=upgrade,
        managedBy=STRING,
        serveConfigV2=STRING,
        rayClusterConfig=ray_cluster_spec(),
        excludeHeadPodFromServeSvc=BOOLEAN,
        suspend=BOOLEAN,
    )


def service_monitor_spec() -> Schema:
    secret_key = fields("key", name=STRING, key=STRING, optional=BOOLEAN)
    relabeling = fields(
        sourceLabels=many(STRING),
        separator=STRING,
        targetLabel=STRING,
        regex=STRING,
        modulus=INTEGER,
        replacement=STRING,
        action=one_of(*_ACTIONS),
    )
    endpoint = fields(
        port=STRING,
        targetPort={"type": ["integer", "string"]},
        path=STRING,
        scheme=one_of("http", "https", "HTTP", "HTTPS"),
        params={"type": "object"},
        interval=DURATION,
        scrapeTimeout=DURATION,
        honorLabels=BOOLEAN,
        honorTimestamps=BOOLEAN,
        metricRelabelings=many(relabeling),
        relabelings=many(relabeling),
        filterRunning=BOOLEAN,
        authorization=fields(type=STRING, credentials=secret_key),
        basicAuth=fields(username=secret_key, password=secret_key),
        tlsConfig={"type": "object"},
        followRedirects=BOOLEAN,
        enableHttp2=BOOLEAN,
    )
    return fields(
        "endpoints",
        "selector",
        jobLabel=STRING,
        targetLabels=many(STRING),
        podTargetLabels=many(STRING),
        endpoints=many(endpoint),
        selector={"$ref": f"{_DEFINITIONS}#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.LabelSelector"},
        namespaceSelector=fields(any=BOOLEAN, matchNames=many(STRING)),
        sampleLimit=INTEGER,
        targetLimit=INTEGER,
        labelLimit=INTEGER,
        scrapeClass=STRING,
    )


def prometheus_rule_spec() -> Schema:
    rule = fields(
        "expr",
        record=STRING,
        alert=STRING,
        expr={"type": ["integer", "string"]},
        annotations=STRINGS,
        labels=STRINGS,
        keep_firing_for=DURATION,
        **{"for": DURATION},
    )
    group = fields(
        "name",
        name={"type": "string", "minLength": 1},
        labels=STRINGS,
        interval=DURATION,
        query_offset=DURATION,
        rules=many(rule),
        partial_response_strategy=STRING,
        limit=INTEGER,
    )
    return fields(groups=many(group))


KUSTOMIZATION: Schema = fields(
    "apiVersion",
    "kind",
    apiVersion=one_of("kustomize.config.k8s.io/v1beta1"),
    kind=one_of("Kustomization"),
    namespace=STRING,
    resources=many(STRING),
    configMapGenerator=many(fields("name", name=STRING, files=many(STRING))),
    generatorOptions=fields(disableNameSuffixHash=BOOLEAN),
)


@cache
def schema_of(kind: str) -> Schema:
    match kind:
        case "RayCluster":
            return resource("ray.io/v1", kind, ray_cluster_spec())
        case "RayService":
            return resource("ray.io/v1", kind, ray_service_spec())
        case "ServiceMonitor":
            return resource("monitoring.coreos.com/v1", kind, service_monitor_spec())
        case "PrometheusRule":
            return resource("monitoring.coreos.com/v1", kind, prometheus_rule_spec())
        case "Kustomization":
            return KUSTOMIZATION
        case _:
            [path] = _files().glob(f"{kind.lower()}-*v1.json")
            loaded: Schema = json.loads(path.read_text())
            return loaded


def found(document: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """What Kubernetes, or the operator in question, would refuse or drop of a document: where it is, and why."""
    for error in Draft202012Validator(schema_of(document["kind"]), registry=_registry()).iter_errors(document):
        yield tuple(map(str, error.absolute_path)), error.message


def problems(document: dict[str, Any]) -> list[str]:
    """The same in words, one line each."""
    return [f"{'.'.join(place)}: {message[:200]}" for place, message in found(document)]

"""The image of `deploy/Dockerfile` is built, and serves as a user that it does not know, where it can write into volumes alone.

It runs in a network of its own. Once as `docker run` does, and once as KubeRay runs the head's pod of
`deploy/kubernetes/raycluster`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.model_files.packaged import SMOLLM2, fetch
from tests.integration.containers import Container, Images, Mount, User, missing_tools, start
from tests.integration.local_processes import TANDEM
from tests.unit.deploy.manifests import main_container, of_kind, ray_clusters

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

ROOT = Path(__file__).parents[2]
TAG = "localhost/tandem:test"
SOMEBODY = 23_456
"""A user that is not in the image's /etc/passwd."""
READY_S = 240.0
END_S = 90.0


def why_not() -> str | None:
    """Why no image can be built here."""
    if os.geteuid() != 0:
        return "this needs root, to make a base image"
    if missing := missing_tools():
        return f"not installed: {', '.join(missing)}"
    allowed = subprocess.run(["unshare", "--mount", "--pid", "--net", "--fork", "true"], capture_output=True, check=False)
    return None if allowed.returncode == 0 else "namespaces are not allowed here"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    """The image, built here. It takes some gigabytes meanwhile, which are gone afterwards."""
    if reason := why_not():
        pytest.skip(reason)
    built = Images(tmp_path_factory.mktemp("images"))
    try:
        built.make_base()
        # pip takes torch from where it does on this machine: PyTorch's own index may be out of reach.
        built.build(ROOT / "deploy" / "Dockerfile", ROOT, TAG, TORCH_INDEX="")
        yield built
    finally:
        built.buildah("rm", "--all")
        built.buildah("rmi", "--all", "--force")
        shutil.rmtree(built.folder)


@pytest.fixture(scope="module")
def root(images: Images) -> Iterator[Path]:
    """The files of the image."""
    with images.mounted(TAG) as mounted:
        yield mounted


@pytest.fixture(scope="module")
def settings(images: Images) -> dict[str, Any]:
    """What the image says of how it is to be run."""
    return images.settings(TAG)


@pytest.fixture
def volumes(tmp_path: Path) -> Path:
    """A folder for volumes: `cache`, with the model, where group 0 may write, and `etc`, for a file of keys."""
    model = tmp_path / "cache" / "models" / f"{SMOLLM2.distribution}-{SMOLLM2.version}"
    model.mkdir(parents=True)
    shutil.copyfile(fetch(SMOLLM2), model / SMOLLM2.path.name)
    subprocess.run(["chmod", "-R", "g=u", tmp_path / "cache"], check=True)
    (tmp_path / "etc").mkdir(mode=0o755)
    return tmp_path


@pytest.fixture
def key(volumes: Path) -> str:
    """An API key of the file `etc/keys.json`."""
    path = volumes / "etc" / "keys.json"
    done = subprocess.run(
        [TANDEM, "keys", "add", "--tenant", "me", "--keys-file", path], capture_output=True, text=True, timeout=60, check=True
    )
    path.chmod(0o644)
    return done.stdout.strip().splitlines()[-1].split()[-1]


def until(container: Container, condition: Callable[[], bool], deadline_s: float) -> None:
    """Wait until the condition holds. Fails at the deadline, or if the container ends, with what it said."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert container.process.poll() is None, f"it ended with {container.process.returncode}:\n{container.said()}"
        assert time.monotonic() < deadline, f"not within {deadline_s} s:\n{container.said()}"
        time.sleep(0.5)


def succeeds(container: Container, *command: str) -> bool:
    return container.run(*command).returncode == 0


def answer(container: Container, key: str) -> str:
    body = json.dumps({"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0})
    headers = (f"--header=Authorization: Bearer {key}", "--header=Content-Type: application/json")
    said = container.run("wget", "-q", "-O-", *headers, f"--post-data={body}", "http://127.0.0.1:8000/v1/completions")
    assert said.returncode == 0, said.stderr + container.said()
    text: str = json.loads(said.stdout)["choices"][0]["text"]
    return text


def written_elsewhere(container: Container) -> list[str]:
    """Places outside of the volumes where a file can be made."""
    places = ("/", "/etc", "/opt/tandem", "/usr/local/bin", "/var/lib/tandem", "/home", "/run")
    return [place for place in places if succeeds(container, "touch", f"{place}/x")]


def test_it_serves_as_docker_runs_it(root: Path, settings: dict[str, Any], volumes: Path, key: str) -> None:
    arguments = [*settings["Entrypoint"], *settings["Cmd"], "--keys-file", "/etc/tandem/keys.json"]
    mounts = [
        Mount("/tmp", options="mode=1777,noexec"),
        Mount("/dev/shm", options="mode=1777,size=1g"),
        Mount("/var/cache/tandem", volumes / "cache"),
        Mount("/etc/tandem", volumes / "etc", "ro"),
    ]
    container = start(root, volumes / "log", User(SOMEBODY), arguments, variables(settings), mounts)
    try:
        kind, *healthy = settings["Healthcheck"]["Test"]
        assert kind == "CMD"
        until(container, lambda: succeeds(container, *healthy), READY_S)
        assert "Paris" in answer(container, key)
        assert written_elsewhere(container) == []
        assert container.run("id", "-u").stdout.strip() == str(SOMEBODY)
        container.signal(signal.SIGTERM)
        assert container.process.wait(timeout=END_S) == 0, container.said()
    finally:
        container.end()


def variables(settings: Mapping[str, Any]) -> dict[str, str]:
    """The image's environment."""
    return dict(line.split("=", 1) for line in settings["Env"])


def kuberay_command(group: Mapping[str, Any]) -> str:
    """What KubeRay puts into KUBERAY_GEN_RAY_START_CMD for this head: its own flags, and the group's."""
    limits = main_container(group["template"])["resources"]["limits"]
    own = {"block": "true", "dashboard-agent-listen-port": "52365", "dashboard-host": "0.0.0.0", "metrics-export-port": "8080"}
    flags = {**own, "num-cpus": limits["cpu"], **group["rayStartParams"]}
    shown = [f" --{name} " if value == "true" else f" --{name}={value} " for name, value in sorted(flags.items())]
    return f"ray start --head {''.join(shown)}"


def in_pod(group: Mapping[str, Any]) -> dict[str, str]:
    """What KubeRay and Kubernetes put into the environment of the head, on top of the image's."""
    [environment] = of_kind("ConfigMap")
    secret = {variable["name"]: "0123456789abcdef" for variable in main_container(group["template"])["env"]}
    own = {"RAY_ADDRESS": "127.0.0.1:6379", "KUBERAY_GEN_RAY_START_CMD": kuberay_command(group)}
    return {**environment["data"], **secret, **own, "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}


def empty_dir(path: Path) -> Path:
    """As Kubernetes makes one: root's, and open to every user."""
    path.mkdir()
    path.chmod(0o777)
    return path


def local_configuration() -> str:
    """That of the manifests, for a node without GPUs and the default model."""
    values = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "base" / "cluster.yaml").read_text())
    pool = {"workers": 1, "kv_cache_tokens": 8192}
    kept = {name: values[name] for name in ("http", "limits")}
    return yaml.safe_dump({**kept, "model": "smollm2", "prefill": pool, "decode": pool})


def test_it_serves_as_kuberay_runs_the_head(root: Path, settings: dict[str, Any], volumes: Path, key: str) -> None:
    group = ray_clusters()["RayCluster"]["headGroupSpec"]
    pod, main = group["template"]["spec"], main_container(group["template"])
    security = pod["securityContext"]
    user = User(security["runAsUser"], security["runAsGroup"], (security["fsGroup"],))
    (volumes / "etc" / "cluster.yaml").write_text(local_configuration())
    scratch, shm = empty_dir(volumes / "scratch"), empty_dir(volumes / "shm")
    [folders] = pod["initContainers"]
    first = start(root, volumes / "init.log", user, folders["command"], variables(settings), [Mount("/scratch", scratch)])
    assert first.process.wait(timeout=END_S) == 0, first.said()

    mounts = [
        Mount("/tmp", scratch / "tmp"),
        Mount("/dev/shm", shm),
        Mount("/var/cache/tandem", volumes / "cache"),
        Mount("/etc/tandem", volumes / "etc", "ro"),
    ]
    command = [*main["command"], *main["args"]]
    container = start(root, volumes / "log", user, command, variables(settings) | in_pod(group), mounts)
    try:
        until(container, lambda: answers(container, main["startupProbe"]["httpGet"]["path"], 8000), READY_S)
        until(container, lambda: answers(container, main["readinessProbe"]["httpGet"]["path"], 8000), READY_S)
        live = main["livenessProbe"]["httpGet"]  # of Ray's agent, here and in pods that have no HTTP of Tandem's
        assert answers(container, live["path"], live["port"])
        assert "Paris" in answer(container, key)
        assert written_elsewhere(container) == []
        container.signal(signal.SIGTERM)
        assert container.process.wait(timeout=pod["terminationGracePeriodSeconds"]) == 0, container.said()
    finally:
        container.end()


def answers(container: Container, path: str, port: int) -> bool:
    return succeeds(container, "wget", "-q", "-O-", "--tries=1", "--timeout=5", f"http://127.0.0.1:{port}{path}")

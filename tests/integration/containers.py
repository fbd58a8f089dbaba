"""Images built with buildah, and run by crun as Kubernetes would: as another user, with a root that can't be written.

No registry is asked. The image that `deploy/Dockerfile` begins with is made with debootstrap, from where apt on this machine
gets its packages, and pip asks the index that it asks on this machine. Everything lies in one folder and goes with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOOLS = ("buildah", "crun", "debootstrap")
BASE = "docker.io/library/debian:bookworm-slim"
"""What the Dockerfile names in its first FROM."""
SUITE = "bookworm"
BUILD_S = 1200.0
GONE_S = 60.0
_OF_APT = ("etc/apt/sources.list", "etc/apt/sources.list.d", "etc/apt/apt.conf.d")
_OF_CERTIFICATES = ("etc/ssl/certs", "usr/share/ca-certificates", "usr/local/share/ca-certificates")
_WHERE_PACKAGES_ARE = ("cert", "default-timeout", "extra-index-url", "find-links", "index-url", "no-index", "trusted-host")


def missing_tools() -> list[str]:
    return [name for name in TOOLS if shutil.which(name) is None]


@dataclass(frozen=True)
class Images:
    """The images in one folder."""

    folder: Path

    def buildah(self, *arguments: str, timeout_s: float = BUILD_S) -> str:
        """What buildah says on stdout. Fails with all that it said."""
        places = ("--root", str(self.folder / "storage"), "--runroot", str(self.folder / "run"), "--storage-driver", "overlay")
        variables = os.environ | {"TMPDIR": str(self.folder), "BUILDAH_ISOLATION": "chroot"}
        return said(["buildah", *places, *arguments], timeout_s, variables)

    def make_base(self) -> None:
        """Make the image that the Dockerfile begins with: Debian's smallest, with where this machine gets packages from."""
        root = self.folder / "base"
        said(["debootstrap", "--variant=minbase", SUITE, str(root), mirror()], BUILD_S)
        (root / "etc" / "apt" / "sources.list").unlink()
        for name in (*_OF_APT, *_OF_CERTIFICATES):
            copy(Path("/") / name, root / name)
        (root / "etc" / "pip.conf").write_text(pip_settings())
        container = self.buildah("from", "scratch").strip()
        self.buildah("add", "--quiet", container, str(root), "/")
        self.buildah("commit", "--quiet", container, BASE)
        self.buildah("rm", container)
        shutil.rmtree(root)

    def build(self, dockerfile: Path, context: Path, tag: str, **arguments: str) -> None:
        """Build an image. Layers are not kept one by one."""
        given = [f"--build-arg={name}={value}" for name, value in arguments.items()]
        given += [f"--volume={path}:{path}:ro" for path in (Path("/etc/resolv.conf"), *local_indexes())]
        where = ("--file", str(dockerfile), "--tag", tag, str(context))
        self.buildah("build", "--format", "docker", "--pull=never", *given, *where)

    def settings(self, tag: str) -> dict[str, Any]:
        """What the image says of how it is to be run, by the names of Docker: `Env`, `User`, `Entrypoint`, `Cmd` and more."""
        found: dict[str, Any] = json.loads(self.buildah("inspect", "--type", "image", tag))["Docker"]["config"]
        return found

    @contextlib.contextmanager
    def mounted(self, tag: str) -> Iterator[Path]:
        """The files of an image, in a container of their own."""
        container = self.buildah("from", "--pull=never", tag).strip()
        try:
            yield Path(self.buildah("mount", container).strip())
        finally:
            self.buildah("rm", container)


def mirror() -> str:
    """Where apt on this machine gets Debian's packages."""
    sites = said(["apt-get", "indextargets", "--format", "$(SITE) $(CODENAME) $(COMPONENT)"], 30).splitlines()
    return next(site for site, codename, component in map(str.split, sites) if (codename, component) == (SUITE, "main"))


def pip_settings() -> str:
    """Where pip on this machine gets packages, as one file: from its files and from the environment."""
    listed = said([sys.executable, "-m", "pip", "config", "list"], 60)
    found = re.findall(r"^(?:global|:env:)\.([a-z-]+)='(.*)'$", listed, re.MULTILINE)
    # What is in the environment comes last, and counts.
    settings = {name: value.encode().decode("unicode_escape") for name, value in found if name in _WHERE_PACKAGES_ARE}
    lines = (f"{name} = {value}".replace("\n", "\n    ") for name, value in settings.items())
    return "\n".join(["[global]", *lines, ""])


def local_indexes() -> list[Path]:
    """Folders of this machine that pip gets packages from."""
    named = re.findall(r"(?:file://|(?<=[\s=]))(/[\w./-]+)", pip_settings())
    return sorted({Path("/", *Path(name).parts[1:3]) for name in named if Path(name).is_dir()})


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    elif source.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def said(command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Container:
    """A container that runs, in a network where it is alone."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    state: Path

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def run(self, *command: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Another command inside."""
        return subprocess.run(
            ["crun", "--root", str(self.state), "exec", self.name, *command],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def signal(self, number: int) -> None:
        said(["crun", "--root", str(self.state), "kill", self.name, str(number)], 30)

    def end(self) -> None:
        """Kill what still runs, and forget it."""
        if self.process.poll() is None:
            with contextlib.suppress(AssertionError):
                self.signal(signal.SIGKILL)
        self.process.wait(timeout=GONE_S)
        subprocess.run(
            ["crun", "--root", str(self.state), "delete", "--force", self.name], check=False, timeout=30, capture_output=True
        )


def start(root: Path, folder: Path, process: Mapping[str, Any], mounts: Sequence[Mapping[str, Any]]) -> Container:
    """Start a process on the files in `root`, which it can't write, without any capability.

    `process` is as in the OCI's specification: `args`, `env`, `user`, `cwd`. `folder` gets what the container needs outside.
    """
    folder.mkdir()
    capabilities: dict[str, list[str]] = {kind: [] for kind in ("bounding", "effective", "inheritable", "permitted", "ambient")}
    limits = [{"type": "RLIMIT_NOFILE", "soft": 65536, "hard": 65536}]
    config = {
        "ociVersion": "1.0.2",
        "root": {"path": str(root), "readonly": True},
        "process": {"terminal": False, "noNewPrivileges": True, "capabilities": capabilities, "rlimits": limits, **process},
        "mounts": [*_of_the_kernel(), *mounts],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts", "network")]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    name, log, state = f"tandem-{os.getpid()}-{folder.name}", folder / "log", folder / "state"
    command = ["crun", "--root", str(state), "--cgroup-manager=disabled", "run", "--bundle", str(folder), name]
    with log.open("wb") as output:
        running = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    return Container(name, running, log, state)


def tmpfs(path: str, *options: str) -> dict[str, Any]:
    return {"destination": path, "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", *options]}


def bind(source: Path, path: str, *options: str) -> dict[str, Any]:
    return {"destination": path, "type": "bind", "source": str(source), "options": ["rbind", *options]}


def _of_the_kernel() -> list[dict[str, Any]]:
    return [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=65536k"]},
        {"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": ["nosuid", "noexec", "newinstance"]},
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]},
        bind(Path("/etc/resolv.conf"), "/etc/resolv.conf", "ro"),
    ]

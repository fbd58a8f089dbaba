"""Images built with buildah, and run as a container is: as another user, in namespaces, with a root that can't be written.

No registry is asked. The image that `deploy/Dockerfile` begins with is made with debootstrap, from where apt on this machine
gets its packages, and pip asks the index that it asks on this machine. Everything lies in one folder and goes with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOOLS = ("buildah", "debootstrap", "ip", "nsenter", "setpriv", "unshare")
BASE = "docker.io/library/debian:bookworm-slim"
"""What the Dockerfile names in its first FROM."""
SUITE = "bookworm"
BUILD_S = 1200.0
GONE_S = 60.0
BEGIN_S = 20.0
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
class User:
    """Whom a container runs as: numbers."""

    uid: int
    gid: int = 0
    groups: tuple[int, ...] = ()

    def flags(self) -> list[str]:
        """Of setpriv: this user, no capability, and no way to one."""
        groups = f"--groups={','.join(map(str, self.groups))}" if self.groups else "--clear-groups"
        none = ("--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all", "--no-new-privs")
        return [f"--reuid={self.uid}", f"--regid={self.gid}", groups, *none]


@dataclass(frozen=True)
class Container:
    """A container that runs, in a network where it is alone."""

    process: subprocess.Popen[bytes]
    pid: int
    """The process that is the first one inside, as this machine numbers it."""
    log: Path
    user: User

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def run(self, *command: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Another command inside, of the same user."""
        spaces = (f"--target={self.pid}", "--mount", "--pid", "--net", "--ipc", "--uts", "--root", "--wd")
        inside = ["nsenter", *spaces, "/usr/bin/setpriv", *self.user.flags(), *command]
        return subprocess.run(inside, capture_output=True, text=True, timeout=timeout_s, check=False)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        """Kill what still runs. With its first process all others inside end."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=GONE_S)


@dataclass(frozen=True)
class Mount:
    """Something writable, or a folder of this machine, inside of a container."""

    target: str
    source: Path | None = None
    """None is an empty place in memory."""
    options: str = ""
    """Of mount, with commas between them."""

    def commands(self, root: Path) -> list[list[str]]:
        target = f"{root}{self.target}"
        made = ["mkdir", "-p", target]
        if self.source is None:
            return [made, ["mount", "-t", "tmpfs", "-o", f"nosuid,nodev,{self.options}", "tmpfs", target]]
        bound = [made, ["mount", "--bind", str(self.source), target]]
        return [*bound, ["mount", "-o", f"remount,bind,{self.options}", target]] if self.options else bound


def start(
    root: Path, log: Path, user: User, arguments: Sequence[str], environment: Mapping[str, str], mounts: Sequence[Mount]
) -> Container:
    """Start a process on the files in `root`, which it can't write, without any capability. What it says goes into `log`."""
    devices = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
    steps = [
        ["mount", "--rbind", str(root), str(root)],
        *Mount("/dev", options="mode=755").commands(root),
        *(step for name in devices for step in (["touch", f"{root}{name}"], ["mount", "--bind", name, f"{root}{name}"])),
        ["ln", "-s", "/proc/self/fd", f"{root}/dev/fd"],
        ["mount", "-t", "proc", "proc", f"{root}/proc"],
        *(step for mount in mounts for step in mount.commands(root)),
        ["mount", "-o", "remount,bind,ro", str(root)],
        ["ip", "link", "set", "lo", "up"],
    ]
    variables = [f"{name}={value}" for name, value in environment.items()]
    inside = ["chroot", str(root), "/usr/bin/setpriv", *user.flags(), "/usr/bin/env", "-i", *variables, *arguments]
    script = "\n".join(["set -e", *(shlex.join(step) for step in steps), f"exec {shlex.join(inside)}"])
    spaces = ("--mount", "--pid", "--net", "--ipc", "--uts", "--propagation=private", "--fork", "--kill-child")
    with log.open("wb") as output:
        running = subprocess.Popen(
            ["unshare", *spaces, "sh", "-c", script], stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
    return Container(running, _first_inside(running), log, user)


def _first_inside(unshare: subprocess.Popen[bytes]) -> int:
    """The process that `unshare` begins its namespaces with."""
    children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children")
    deadline = time.monotonic() + BEGIN_S
    while not (found := children.read_text().split()):
        assert unshare.poll() is None, "unshare has failed"
        assert time.monotonic() < deadline, "unshare has begun nothing"
        time.sleep(0.01)
    return int(found[0])

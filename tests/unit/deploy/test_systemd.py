"""The units for systemd: systemd takes them, they have what a cluster needs, and their commands are there."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.commands import cli
from cluster.commands.lib import foreground
from cluster.commands.lib.interrupts import Interrupts
from configs.loader import load_config
from protocol.cluster_view import ClusterView
from protocol.errors import ConfigError, TandemError, UnavailableError, WorkerLostError
from tests.unit.deploy.ray_environment import ROOT, fixed, wanted

FOLDER = ROOT / "deploy" / "systemd"
UNITS = sorted(path.name for path in FOLDER.glob("*.service"))
ANALYZE = shutil.which("systemd-analyze")
MOST_EXPOSED = 2.5
"""Of ten: what `systemd-analyze security` gives for what a unit may do. GPUs and compiled kernels keep it from less."""

Unit = dict[str, dict[str, list[str]]]


def parsed(text: str) -> Unit:
    """Sections with their settings; one that is there several times has several values."""
    sections: Unit = {}
    for line in text.splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            name, _, value = line.partition("=")
            section.setdefault(name, []).append(value)
    return sections


def read(name: str) -> dict[str, list[str]]:
    return parsed((FOLDER / name).read_text())["Service"]


def environment() -> dict[str, str]:
    lines = (FOLDER / "environment.example").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def installed(folder: Path, name: str) -> Path:
    """A copy whose commands are where this environment has them."""
    path = folder / name
    path.write_text((FOLDER / name).read_text().replace("/opt/tandem/bin", str(Path(sys.executable).parent)))
    return path


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert ANALYZE is not None
    return subprocess.run([ANALYZE, *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    paths = [str(installed(tmp_path, name)) for name in UNITS]
    done = analyze("verify", "--man=no", *paths)
    assert (done.returncode, ours(done.stderr)) == (0, []), done.stderr


def ours(said: str) -> list[str]:
    """What is said of our units, and not of others of this machine."""
    return [line for line in said.splitlines() if "tandem" in line]


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("name", UNITS)
def test_a_misspelled_setting_and_a_missing_command_are_found(tmp_path: Path, name: str) -> None:
    path = installed(tmp_path, name)
    path.write_text(path.read_text().replace("KillMode=", "KilMode="))
    assert any("KilMode" in line for line in ours(analyze("verify", "--man=no", str(path)).stderr))
    path = installed(tmp_path, name)
    path.write_text(re.sub("^ExecStart=/", "ExecStart=/gone/", path.read_text(), flags=re.MULTILINE))
    assert analyze("verify", "--man=no", str(path)).returncode != 0


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("name", UNITS)
def test_a_unit_may_do_little(tmp_path: Path, name: str) -> None:
    done = analyze("security", "--offline=yes", "--no-pager", str(installed(tmp_path, name)))
    exposure = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert exposure is not None, done.stdout + done.stderr
    assert float(exposure[1]) <= MOST_EXPOSED, done.stdout


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_ends_gently_and_keeps_what_a_worker_needs(name: str) -> None:
    unit = read(name)
    assert unit["KillMode"] == ["mixed"], "or all processes get the first signal"
    assert unit["OOMPolicy"] == ["continue"], "or the end of one worker ends them all"
    assert unit["LimitNOFILE"] == ["65536"]
    for setting, value in (("NoNewPrivileges", "yes"), ("ProtectSystem", "strict"), ("User", "tandem")):
        assert unit[setting] == [value]
    # What hides processors, memory and GPUs from Ray and torch.
    assert not {"ProcSubset", "PrivateDevices", "ProtectClock", "MemoryDenyWriteExecute", "PrivateUsers"} & unit.keys()
    [variables] = unit["Environment"]
    folders = dict(each.split("=", 1) for each in variables.split())
    assert folders["HOME"] == f"/var/lib/{unit['StateDirectory'][0]}"
    assert folders["TANDEM_CACHE"] == f"/var/cache/{unit['CacheDirectory'][0]}"
    assert unit["WorkingDirectory"] == [folders["HOME"]]


def test_the_cluster_has_time_to_end() -> None:
    limits = load_config(None, {}).limits
    assert float(read("tandem.service")["TimeoutStopSec"][0]) >= limits.shutdown_s + 15


@pytest.mark.parametrize("serving", [True, False])
@pytest.mark.parametrize(
    ("failure", "starts_again"),
    [
        (UnavailableError("the controller is gone"), True),
        (WorkerLostError("the head node does not answer"), True),
        (ConfigError("decode.workers: more than there is room for"), False),
    ],
)
def test_a_lost_cluster_is_started_again_and_a_mistake_is_not(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failure: TandemError,
    starts_again: bool,
    serving: bool,
) -> None:
    class Cluster:
        config = load_config(None, {})

        def watch(self, known_version: int) -> ClusterView:
            raise failure

    @contextmanager
    def running(*_: object) -> Iterator[Cluster]:
        if not serving:
            raise failure
        yield Cluster()

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(Interrupts, "install", lambda _: None)
    monkeypatch.setattr(foreground, "check_own_http", lambda _: None)
    monkeypatch.setattr(foreground, "measured_profiles", lambda *_: {})
    monkeypatch.setattr(foreground, "running_cluster", running)
    monkeypatch.setattr("sys.argv", ["tandem", "serve"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    unit = read("tandem.service")
    assert capsys.readouterr().err.splitlines()[-1] == f"tandem: {failure.message}"
    assert unit["Restart"] == ["on-failure"]
    assert (str(ended.value.code) not in unit["RestartPreventExitStatus"][0].split()) is starts_again
    assert ended.value.code not in (0, 1), "1 is a bug"


def test_the_handbook_has_api_keys_where_the_unit_reads_them() -> None:
    page = (ROOT / "docs" / "handbook" / "deploy.md").read_text().partition("\n## With systemd\n")[2]
    [file] = re.findall(r"^/opt/tandem/bin/tandem keys add .*--keys-file (\S+)", page, re.MULTILINE)
    assert f"`keys_file: {file}`" in page
    assert f"\nchown {read('tandem.service')['User'][0]}: {file} " in page
    assert file.startswith("/etc/"), "ProtectHome hides /home and /root"


def test_a_node_is_left_before_its_ray_ends() -> None:
    unit = read("tandem-node.service")
    [stop] = unit["ExecStop"]
    command = shlex.split(stop.removeprefix("-"))
    assert command[:2] == ["/opt/tandem/bin/tandem", "leave"]
    assert float(unit["TimeoutStopSec"][0]) >= float(command[command.index("--deadline") + 1]) + 15


def test_a_stopped_node_has_not_failed_and_a_lost_one_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray ends with the same code after SIGTERM as when one of its processes is lost."""
    from ray._private.node import Node

    handlers: list[Callable[[int, None], None]] = []
    monkeypatch.setattr("ray._private.utils.set_sigterm_handler", handlers.append)
    monkeypatch.setattr("atexit.register", lambda _: None)
    node = Node.__new__(Node)
    monkeypatch.setattr(node, "kill_all_processes", lambda **_: None)
    node._register_shutdown_hooks()
    with pytest.raises(SystemExit) as ended:
        handlers[0](signal.SIGTERM, None)
    unit = read("tandem-node.service")
    assert unit["SuccessExitStatus"] == [str(ended.value.code)]
    assert unit["Restart"] == ["always"], "on-failure would take what counts as a success for an end on request"


def test_both_units_see_the_same_files_of_ray() -> None:
    whole = parsed((FOLDER / "tandem.service").read_text())
    assert whole["Unit"]["JoinsNamespaceOf"] == ["tandem-node.service"]
    assert whole["Service"]["PrivateTmp"] == read("tandem-node.service")["PrivateTmp"] == ["yes"]
    [after] = whole["Unit"]["After"]
    assert "tandem-node.service" in after.split()


def test_the_environment_is_that_of_ray_up() -> None:
    assert wanted().keys() <= environment().keys()
    assert fixed().items() <= environment().items()
    [folder] = read("tandem-node.service")["RuntimeDirectory"]
    files = [value for name, value in environment().items() if name.endswith(("FILE_LOC", "_SOCKET_PATH"))]
    assert {value.rpartition("/")[0] for value in files} == {f"/run/{folder}"}


def test_the_unit_uses_every_variable_of_its_own() -> None:
    [start] = read("tandem-node.service")["ExecStart"]
    own = {name for name in environment() if name.startswith("TANDEM_")}
    assert own == set(re.findall(r"\$\{?(TANDEM_\w+)", start))

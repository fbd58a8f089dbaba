"""The HAProxy guard against the configuration that the installed Ray really generates, and against the real HAProxy."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path

import pytest

from cluster.ray.certificate import CertificateFiles
from cluster.ray.haproxy_guard import ROUTERS_BACKEND, FrontSettings, guarded, rewrite, settings_path
from cluster.ray.private_folder import close_folder
from cluster.ray.session import free_port
from cluster.router_replicas import APPLICATION
from tests.unit.cluster.real_haproxy import HAPROXY, haproxy

SETTINGS = FrontSettings("t0ken", 10.0, 60.0, None, "127.0.0.1")
CONFIGURATION = """global
    stats socket {directory}/admin.sock mode 666 level admin expose-fd listeners
defaults
    mode http
    timeout connect 1s
    timeout client 1s
    timeout server 1s
frontend prometheus
    bind :{metrics_port}
    mode http
    no log
frontend http_frontend
    bind 127.0.0.1:{port}
    http-request return status 200 content-type text/plain string "listen stats"
backend http-tandem
    server SERVE_REPLICA--here 127.0.0.1:30000 check
    server SERVE_REPLICA--elsewhere 10.0.0.7:30000 check
    server SERVE_REPLICA--sixth [::1]:30001 check
    server SERVE_PROXY_ACTOR-head 10.0.0.1:8500 check backup
backend http-other
    use-server OTHER if {{ var(txn.to) -m str OTHER }}
    server OTHER 10.0.0.8:30000 check
listen stats
  bind *:{stats_port}
  stats enable
"""


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return sys.platform == "linux"
    except OSError:
        return False


def close_ports(configuration: str) -> str:
    return guarded(configuration, None, Path("unused"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray, on import
def test_rays_own_template_has_the_sections_that_are_removed() -> None:
    from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

    closed = close_ports(HAPROXY_CONFIG_TEMPLATE)
    for port in ("metrics_port", "stats_port"):
        assert port in HAPROXY_CONFIG_TEMPLATE
        assert port not in closed
    assert "frontend http_frontend" in closed
    assert "backend default_backend" in closed
    assert "mode 666" in HAPROXY_CONFIG_TEMPLATE
    assert "mode 666" not in closed
    binds = [line.strip() for line in closed.splitlines() if line.strip().startswith("bind ")]
    assert len(binds) == 2, f"http and grpc only: {binds}"


def test_closing_twice_changes_nothing() -> None:
    closed = close_ports(CONFIGURATION.format(directory="/x", metrics_port=9101, port=8000, stats_port=8404))
    assert close_ports(closed) == closed
    assert closed.startswith("global")
    assert 'string "listen stats"\nbackend' in closed
    assert closed.endswith("check\n")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_settings_find_their_places_in_rays_own_template() -> None:
    from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

    template = HAPROXY_CONFIG_TEMPLATE.replace("{% if config.timeout_client_s is not none %}", "")
    template = template.replace("{{ config.timeout_client_s }}s{% endif %}", "3600s")
    template = template.replace("{{ config.frontend_host }}:{{ config.frontend_port }}", "127.0.0.1:8000")
    tls = FrontSettings("t0ken", 10.0, 60.0, CertificateFiles("a.crt", "a.key"), "192.0.2.7")
    lines = [line.strip() for line in guarded(template, tls, Path("/x/front.pem")).splitlines()]
    assert "timeout client 60000ms # by tandem-haproxy" in lines
    assert "timeout client 3600s" not in lines
    assert [line for line in lines if line.startswith("hard-stop-after")] == ["hard-stop-after 86400s # by tandem-haproxy"]
    at = lines.index("frontend http_frontend")
    assert lines[at + 1].startswith("bind 192.0.2.7:8000 ssl crt /x/front.pem ssl-min-ver TLSv1.2")
    own = [line.removesuffix(" # by tandem-haproxy") for line in lines if line.endswith("# by tandem-haproxy")]
    assert own[-3:] == [
        "http-request set-header x-forwarded-for %[src]",
        "http-request set-header x-forwarded-proto https",
        "http-request set-header x-tandem-front t0ken",
    ]


def test_settings_twice_are_settings_once(tmp_path: Path) -> None:
    once = guarded(CONFIGURATION, SETTINGS, tmp_path)
    other = FrontSettings("other", 5.0, 30.0, CertificateFiles("a.crt", "a.key"), "0.0.0.0")
    assert guarded(once, SETTINGS, tmp_path) == once
    assert guarded(guarded(once, other, tmp_path), SETTINGS, tmp_path) == once
    path = tmp_path / "haproxy.cfg"
    path.write_text(CONFIGURATION)
    other.save(settings_path(path))
    assert rewrite(path) == other
    assert path.read_text() == guarded(CONFIGURATION, other, tmp_path / "front.pem")
    assert stat.S_IMODE(settings_path(path).stat().st_mode) == 0o600


def test_the_file_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "haproxy.cfg"
    path.write_text(CONFIGURATION)
    rewrite(path)
    assert path.read_text() == close_ports(CONFIGURATION)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["haproxy.cfg"]


def test_a_folder_that_others_could_replace_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "shared" / "node"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert close_folder(folder) is None
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.parent.chmod(0o777)  # as somebody may make it in /tmp before us
    assert close_folder(folder) == f"other users may write in {folder.parent}"
    (folder / "haproxy.cfg").write_text(CONFIGURATION)
    command = [*HAPROXY, "-f", str(folder / "haproxy.cfg")]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (refused.returncode, f"[ALERT] tandem-haproxy: other users may write in {folder.parent}" in refused.stderr) == (
        1,
        True,
    )
    folder.parent.chmod(0o1777)
    assert close_folder(folder) is None, "the sticky bit keeps others from renaming it"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("given_away", ["shared", "shared/node"])
def test_a_folder_of_another_user_is_refused(tmp_path: Path, given_away: str) -> None:
    folder = tmp_path / "shared" / "node"
    folder.mkdir(parents=True)
    os.chown(tmp_path / given_away, 65534, -1)
    assert close_folder(folder) == f"{tmp_path / given_away} belongs to another user"


@pytest.mark.skipif(sys.platform != "linux", reason="HAProxy's binary comes for Linux only")
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_the_real_haproxy_accepts_what_is_left(tmp_path: Path, host: str) -> None:
    path = tmp_path / "haproxy.cfg"
    path.write_text(CONFIGURATION.format(directory=tmp_path, metrics_port=9101, port=18080, stats_port=8404))
    replace(SETTINGS, host=host).save(settings_path(path))
    command = [*HAPROXY, "-c", "-f", str(path)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(
    ("host", "binds"),
    [
        ("0.0.0.0", ["bind 0.0.0.0:8000{tls}"]),
        ("::1", ["bind ::1:8000{tls}"]),
        ("::", ["bind 0.0.0.0:8000{tls}", "bind :::8000 v6only{tls} # by tandem-haproxy"]),
    ],
)
def test_where_it_listens(host: str, binds: list[str]) -> None:
    configuration = CONFIGURATION.format(directory="/x", metrics_port=9101, port=8000, stats_port=8404)
    secure = " ssl crt /x/front.pem ssl-min-ver TLSv1.2 alpn http/1.1"
    for files, tls in ((None, ""), (CertificateFiles("a.crt", "a.key"), secure)):
        settings = replace(SETTINGS, host=host, certificate=files)
        once = guarded(configuration, settings, Path("/x/front.pem"))
        assert [line.strip() for line in once.splitlines() if "bind" in line] == [bind.format(tls=tls) for bind in binds]
        assert guarded(once, settings, Path("/x/front.pem")) == once


@pytest.mark.skipif(not has_ipv6(), reason="without IPv6, or without the binary")
def test_clients_of_both_kinds_have_their_own_addresses(tmp_path: Path) -> None:
    path, port = tmp_path / "haproxy.cfg", free_port()
    told = CONFIGURATION.replace('string "listen stats"', 'lf-string "%[src]"')
    path.write_text(told.format(directory=tmp_path, metrics_port=9101, port=port, stats_port=8404))
    replace(SETTINGS, host="::").save(settings_path(path))
    with haproxy(path, port):
        assert [answer(host, port) for host in ("::1", "127.0.0.1")] == ["::1", "127.0.0.1"]


def answer(host: str, port: int) -> str:
    """What is answered at this address."""
    with closing(HTTPConnection(host, port, timeout=10.0)) as connection:
        connection.request("GET", "/")
        return connection.getresponse().read().decode()


def test_routers_of_other_nodes_are_left_to_the_haproxies_there() -> None:
    configuration = CONFIGURATION.format(directory="/x", metrics_port=9101, port=8000, stats_port=8404)
    ours = guarded(configuration, SETTINGS, Path("unused"))
    assert [line.split()[1] for line in ours.splitlines() if line.split()[0] == "server"] == [
        "SERVE_REPLICA--here",
        "SERVE_REPLICA--sixth",
        "OTHER",  # of another application, whose replicas listen where Serve says
    ]
    others = close_ports(configuration)
    assert others.count("    server ") == 5, "of whoever uses Serve without Tandem"
    assert f"backend http-{APPLICATION}" == ROUTERS_BACKEND

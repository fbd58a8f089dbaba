"""This process's connection to Ray: a local instance of its own, or a Ray cluster that exists.

Local: `local_environment` decides what Ray and Serve's processes inherit, so it must be applied before Ray is imported. The
instance listens on 127.0.0.1 only, asks for a token that nobody else knows, and dies with this process, however that ends.
Joined: the cluster's own environment counts (see ray_cluster.yaml); leaving it leaves it running.
"""

from __future__ import annotations

import functools
import os
import random
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import cluster
from cluster.ray.leftovers import RAY_SESSIONS, SCRATCH_PREFIX, TEMPORARY, claim, remove_leftovers
from configs.machine import num_gpus, usable_cores
from protocol.errors import ConfigError, UnavailableError, first_line

_OBJECT_STORE_BYTES = 128 * 1024 * 1024
"""Size of Ray's object store, near its minimum: nothing of ours goes through it."""
_LOG_BYTES = 32 * 1024 * 1024
"""Most bytes of one log file; then it is renamed and another one begun."""
_OLD_LOGS = 2
"""Number of renamed files that are kept of each log."""
LEFT_OUT: dict[str, Any] = {"include_log_monitor": False, "no_monitor": True, "dashboard_agent_listen_port": 0}
"""Parameters of a Ray node, by their names in `RayParams`. A port of 0 is any free one."""
_CONNECT_S = 5.0
_OWN_PORTS = range(20_000, 32_768)


def local_environment(scratch: Path) -> dict[str, str]:
    """Return the environment variables of a local Ray instance.

    `scratch` is a directory of this user only, for HAProxy's files.
    """
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        # A call to Ray after its end must fail instead of starting another instance.
        "RAY_ENABLE_AUTO_CONNECT": "0",
        # The switch that makes Ray keep 127.0.0.1 as this node's address; all its servers then listen there only.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # Which would keep a router's last thousand lines back, and lose them if it is killed.
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        # How long a router that is to go still takes connections. HAProxy knows of it within a second; the default is 30 s.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
        # Serve kills a proxy that is not up in time, by default 5 s, which a busy machine takes.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
        # Or every process's log may grow to 3 GB. Ray reads both names, and so does Serve.
        "RAY_ROTATION_MAX_BYTES": os.environ.get("RAY_ROTATION_MAX_BYTES", str(_LOG_BYTES)),
        "RAY_ROTATION_BACKUP_COUNT": os.environ.get("RAY_ROTATION_BACKUP_COUNT", str(_OLD_LOGS)),
        # Ray lowers the priority of its workers; ours are what this machine is to work on.
        "RAY_worker_niceness": "0",
        # Or the GCS keeps 3.5 KiB of each of the latest 100,000 calls of actors, for a dashboard.
        "RAY_task_events_report_interval_ms": "0",
        # Serve's second entry, on a fixed port by default; two clusters on one machine must not meet there.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        # A raylet that comes before its store does looks again after so many milliseconds, so often; by default after a second.
        "RAY_raylet_client_connect_timeout_milliseconds": "50",
        "RAY_raylet_client_num_connect_attempts": "200",
    }
    # The package that brings HAProxy's binary exists for Linux; elsewhere Serve's own proxy does the work, more slowly.
    if sys.platform == "linux":
        environment |= {
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_HAPROXY_BINARY_PATH": str(haproxy_guard()),
            "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(scratch / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(scratch / "admin.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(scratch),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(scratch / "server-state"),
        }
    return environment


def haproxy_guard() -> Path:
    """Return the path of the installed `tandem-haproxy` (cluster.ray.haproxy_guard).

    It is looked for where `pip install --target` puts it, beside this Python, and on the PATH, in this order.
    Raises ConfigError if Tandem is not installed properly.
    """
    target = Path(cluster.__file__).parents[1]
    places = (str(target / "bin"), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))
    found = shutil.which("tandem-haproxy", path=os.pathsep.join(places))
    if found is None:
        raise ConfigError("the command tandem-haproxy is not installed; install Tandem with pip (make install)")
    return Path(found)


@contextmanager
def local_ray() -> Iterator[None]:
    """Run a Ray instance of this process's own on loopback. All its processes are gone when the block ends.

    Raises UnavailableError if Ray does not start, ConfigError if its folder can't be made.
    """
    remove_leftovers()
    with ExitStack() as session:
        try:
            folder = tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=TEMPORARY, ignore_cleanup_errors=True)
            scratch = session.enter_context(folder)
            session.enter_context(claim(Path(scratch)))
        except OSError as error:
            raise ConfigError(f"{TEMPORARY} can't be written: {error.strerror}") from None
        os.environ.update(local_environment(Path(scratch)))
        import ray

        try:
            context = _start_ray()
            session.enter_context(claim(Path(context.address_info["session_dir"])))
            yield
        finally:
            ray.shutdown()


def _start_ray() -> Any:
    import ray

    try:
        with _own_sigterm(), lean_node():
            return ray.init(
                address="local",
                num_cpus=usable_cores(),
                num_gpus=num_gpus(),
                namespace="tandem",
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                _temp_dir=str(RAY_SESSIONS),  # before RAY_TMPDIR and TMPDIR
            )
    except Exception as error:  # Ray has no narrower one for a process of its own that does not come up in time
        raise UnavailableError(f"Ray did not start on this machine: {first_line(error)}") from error


@contextmanager
def lean_node() -> Iterator[None]:
    """Have `ray.init`, called in this block, start a node without what nothing here needs.

    That is the log monitor, which shows workers' output in the driver, the monitor, which adds nodes, and a dashboard that is
    started even where it is told not to be. The node's agent chooses its port: where another Ray has the usual one, 52365, it
    would try again for three seconds. `ray start` has flags for these, `ray.init` has no arguments.
    """
    from ray._private import parameter, services

    made: Any = parameter
    started: Any = services
    former = made.RayParams, started.start_api_server
    made.RayParams = functools.partial(made.RayParams, **LEFT_OUT)
    started.start_api_server = _no_dashboard
    try:
        yield
    finally:
        made.RayParams, started.start_api_server = former


def _no_dashboard(*_: Any, **__: Any) -> tuple[str, None]:
    """Its address and its process."""
    return "", None


@contextmanager
def joined_ray(address: str) -> Iterator[None]:
    """Connect to the Ray cluster at `address` (host:port, or `auto` on one of its nodes).

    Raises UnavailableError if none answers there, ConfigError if it can't be joined.
    """
    if address != "auto":
        check_reachable(address)
    client_environment()
    import ray
    from ray.exceptions import AuthenticationError

    try:
        with _own_sigterm():
            ray.init(address=address, namespace="tandem", log_to_driver=False, configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError, AuthenticationError) as error:
        problem = f"no Ray cluster to join at {address}: {first_line(error)}"
        kind = UnavailableError if isinstance(error, ConnectionError) else ConfigError
        raise kind(problem, param="address") from None
    try:
        yield
    finally:
        ray.shutdown()


def client_environment() -> None:
    """Set what Ray reads in a process that talks to a Ray cluster of somebody else. Call it before Ray is imported."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # One attempt, and our one line about it; by default Ray tries 20 times for half a minute each, with warnings.
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "error")
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"


def check_reachable(address: str) -> None:
    """Raise ConfigError if `address` is not host:port, UnavailableError if nobody listens there."""
    host, _, port = address.rpartition(":")
    # The resolver itself takes a port past 65535, modulo 65536, and may find somebody there.
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"{address!r} is no address of a Ray cluster; give host:port (its GCS, port 6379) or auto", param="address"
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S):
            return
    except OSError as error:
        raise UnavailableError(f"no Ray cluster to join at {address}: {error}", param="address") from None


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep this process's way of ending on SIGTERM; Ray puts in its own, which prints a stack and skips the clean-up."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def check_port_free(host: str, port: int) -> None:
    """Raise ConfigError if nobody could listen at `host`:`port`: the port is taken, or the address is not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except (OSError, OverflowError, TypeError, UnicodeError) as error:  # the latter two: names that no resolver takes
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ConfigError(
                f"can't listen on {host}:{port}: {reason}; choose another with --port or --host", param="http.port"
            ) from None


def free_port() -> int:
    """Return a port of 127.0.0.1 where nobody listens.

    It stays free until it is used: the kernel gives it to nobody who asks for any port, or connects (32768 and above on
    Linux), and it is none of Ray's workers' (10002 to 19999). Raises ConfigError.
    """
    for port in random.sample(_OWN_PORTS, len(_OWN_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ConfigError(f"no port of {_OWN_PORTS.start} to {_OWN_PORTS.stop - 1} is free on 127.0.0.1")

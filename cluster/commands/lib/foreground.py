"""`tandem serve` in the foreground: progress while the cluster starts, then what happens to its workers, until Ctrl-C."""

from __future__ import annotations

import io
import json
import logging
import os
import shlex
import sys
from contextlib import redirect_stdout, suppress
from typing import TextIO, cast

from rich.console import Console

from cluster.checks import check_autoscale, check_keys, check_model, check_own_http, check_telemetry
from cluster.commands.lib.interrupts import Interrupts, Phase
from cluster.gpu_shares import left_gpus_alone, why_left_alone, with_gpus_here
from cluster.launch import RunningCluster, running_cluster
from cluster.measured import measured_profiles, with_measured_sizes
from cluster.memory import with_fitting_pools
from cluster.ray.placement import crowding
from configs.facts import ModelFacts
from configs.machine import memory_bytes, usable_cores
from configs.schema import ClusterConfig
from protocol.cluster_view import ClusterView, WorkerInfo, WorkerState
from protocol.errors import UnavailableError
from protocol.messages.workers import Role

_ON_PROCESSORS = "workers compute on the processor, not on a GPU"


class _Lossy(io.TextIOBase):
    """A stream that drops what can't be written, since its disk is full, its terminal gone, or its pipe without a reader."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a variable there, but only read
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def progress_console(stream: TextIO | None) -> Console:
    """Return a console for progress. No line that can't be written there ends the cluster it tells of."""
    file = None if stream is None else cast(TextIO, _Lossy(stream))
    return Console(file=file, stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)


def serve_until_interrupted(config: ClusterConfig, address: str | None) -> None:
    """Run a cluster until Ctrl-C or SIGTERM, then take everything down and return. Raises TandemError if it can't run.

    New requests are refused from the first signal on, and those that run have `limits.shutdown_s` to end. The second signal
    ends them at once.
    """
    console = progress_console(sys.stderr)
    logging.getLogger("ray").setLevel(logging.WARNING)
    interrupts = Interrupts()
    interrupts.install()
    with suppress(KeyboardInterrupt):
        check_keys(config)
        check_telemetry(config)
        check_autoscale(config)
        if address is None:
            config = _with_gpus(config, console)
        facts = check_model(config)
        if address is None:
            check_own_http(config)
            _tell_crowding(config, console)
            with console.status("measuring what is fastest on this machine"):
                config = with_measured_sizes(config, measured_profiles(config, facts))
        config = _with_fitting_pools(config, facts, address, console)  # what windows need depends on the sizes of steps
        with (
            open(os.devnull, "w") as nowhere,
            console.status("starting") as progress,
            redirect_stdout(nowhere),
            running_cluster(config, facts, address, lambda step: progress.update(f"starting: {step}")) as cluster,
        ):
            progress.stop()
            # Ray prints a page of advice on stdout whenever a process ends; our own line says which worker it was.
            # (Again, because the progress line has put stdout back.)
            with redirect_stdout(nowhere):
                try:
                    interrupts.phase = Phase.SERVING
                    _tell_gpu_shares(config, cluster.config, console)
                    _tell_processors(cluster.config, address, console)
                    _follow(cluster, config, facts.name, console)
                except KeyboardInterrupt:
                    retire(cluster, config.limits.shutdown_s, console)
                finally:
                    interrupts.phase = Phase.ENDING
    console.print("stopped")


def retire(cluster: RunningCluster, shutdown_s: float, console: Console) -> None:
    """Let the requests that run end, for `shutdown_s` seconds or until Ctrl-C."""
    if shutdown_s:
        console.print(f"stopping: requests that run have {shutdown_s:g} s; Ctrl-C ends them at once")
    try:
        num_cut = cluster.retire(shutdown_s)
    except KeyboardInterrupt:
        return
    except UnavailableError as error:
        console.print(f"stopping at once: {error.message}")
        return
    if num_cut:
        console.print(f"requests that are cut off: {num_cut}")


def _with_gpus(config: ClusterConfig, console: Console) -> ClusterConfig:
    """The configuration with shares of this machine's GPUs, if there are any and nobody has shared them out."""
    sharing = with_gpus_here(config)
    _tell_gpu_shares(config, sharing, console)
    if sharing is config and (reason := why_left_alone(config)) is not None:
        console.print(f"{_ON_PROCESSORS}: {reason}")
    return sharing


def _tell_processors(config: ClusterConfig, address: str | None, console: Console) -> None:
    """Say that workers of a Ray cluster that was joined do without GPUs, if that is not the operator's wish."""
    if address is not None and left_gpus_alone(config):
        console.print(f"{_ON_PROCESSORS}: no node had one that they can use when the cluster began")


def _tell_gpu_shares(before: ClusterConfig, sharing: ClusterConfig, console: Console) -> None:
    """Say what each worker gets of a GPU, if nobody had said that before."""
    share = sharing.decode.resources.get("GPU")
    if share is not None and share != before.decode.resources.get("GPU"):
        console.print(f"each worker gets {share:g} of a GPU")


def _tell_crowding(config: ClusterConfig, console: Console) -> None:
    """Warn if workers are to share cores, whose steps were measured for one that has them to itself."""
    crowd = crowding(config, usable_cores())
    if crowd is not None:
        console.print(f"warning: {crowd}: steps take longer than was measured for one alone, so limits on times may not hold")


def _with_fitting_pools(config: ClusterConfig, facts: ModelFacts, address: str | None, console: Console) -> ClusterConfig:
    """The configuration with KV pools that fit into this machine's memory, as far as nobody chose their sizes."""
    fitting = config if address is not None else with_fitting_pools(config, facts, memory_bytes())
    for role, pool, whole in (("prefill", fitting.prefill, config.prefill), ("decode", fitting.decode, config.decode)):
        if pool.workers and pool.kv_cache_tokens < whole.kv_cache_tokens:
            wanted = f"{role}.kv_cache_tokens is {pool.kv_cache_tokens}, not {whole.kv_cache_tokens}"
            console.print(f"{wanted}: all pools together have to fit into this machine's memory")
    return fitting


def _follow(cluster: RunningCluster, config: ClusterConfig, model_name: str, console: Console) -> None:
    """Print the address, then each change of a worker, until another command has stopped the cluster."""
    view = cluster.watch(0)
    for line in greeting(view, config, model_name):
        console.print(line)
    while True:
        try:
            fresh = cluster.watch(view.version)
        except UnavailableError:
            if view.stopping:
                return
            raise
        for line in changes(view, fresh):
            console.print(line)
        view = fresh


def greeting(view: ClusterView, config: ClusterConfig, model_name: str) -> list[str]:
    """Return two lines: where the cluster answers, and a first request to paste."""
    host = f"[{config.http.host}]" if ":" in config.http.host else config.http.host
    url = f"{config.http.scheme}://{host}:{config.http.port}"
    ready = [info.role for info in view.workers if info.state is WorkerState.READY]  # not on standby
    counts = " + ".join(f"{ready.count(role)} {role.value}" for role in Role)
    question = [{"role": "user", "content": "Name the capital of France."}]
    body = json.dumps({"model": model_name, "messages": question, "temperature": 0})
    key = "" if config.http.keys_file is None else ' -H "Authorization: Bearer $TANDEM_API_KEY"'
    command = f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    return [f"ready: {counts}, {url}", command]


def changes(before: ClusterView, after: ClusterView) -> list[str]:
    """Return a line for each worker that came, went, died, is to leave its node, or changed its state or role; for a wish of
    routers; for the end.
    """
    old = {info.worker_id: info for info in before.workers}
    new = {info.worker_id: info for info in after.workers}
    lines = [line for name, info in new.items() if (line := _change(old.get(name), info)) is not None]
    lines += [f"{name} is gone" for name in old if name not in new]
    if after.stopping and not before.stopping:
        lines.append("stopping: another command asked for it; no new requests are let in")
    return lines if after.routers == before.routers else [*lines, f"{after.routers} routers are wanted"]


def _change(old: WorkerInfo | None, new: WorkerInfo) -> str | None:
    if old is not None and (old.epoch, old.state) == (new.epoch, new.state):
        if old.leaves_at != new.leaves_at:
            return f"{new.worker_id}: {new.last_error}"
        return None if old.duty is new.duty else f"{new.worker_id} is {new.duty.in_words} now"
    match new.state:
        case WorkerState.STARTING if old is not None:
            return f"{new.worker_id} ended ({new.last_error}); starting it again as epoch {new.epoch}"
        case WorkerState.STARTING:
            return f"{new.worker_id} starts"
        case WorkerState.READY:
            return f"{new.worker_id} is ready to {new.role.value}, process {new.pid} on {new.node}"
        case WorkerState.DRAINING:
            return f"{new.worker_id} drains"
        case WorkerState.STANDBY:
            return f"{new.worker_id} is on standby, process {new.pid} on {new.node}"

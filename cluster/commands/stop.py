"""`tandem stop`: ends a cluster that runs on a Ray cluster of somebody else."""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import Annotated

import typer

from cluster.commands.lib.interrupts import Interrupts, Phase
from protocol.errors import ConfigError


def stop(
    address: Annotated[
        str | None,
        typer.Option(
            "--address", envvar="RAY_ADDRESS", help="The Ray cluster that it runs on: host:port, or auto on one of its nodes."
        ),
    ] = None,
    shutdown_s: Annotated[
        float | None,
        typer.Option(
            "--shutdown-timeout",
            min=0.0,
            max=86_400.0,
            help="Seconds that requests have to end. By default the cluster's `limits.shutdown_s`.",
        ),
    ] = None,
) -> None:
    """End the cluster on a Ray cluster (a local `tandem serve` ends with Ctrl-C). Ctrl-C meanwhile ends requests at once."""
    if address is None:
        raise ConfigError("name the Ray cluster with --address or RAY_ADDRESS", param="address")
    from cluster.ray.session import joined_ray

    interrupts = Interrupts()
    interrupts.install()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # ended half-way, it would leave a cluster that refuses every request
    with joined_ray(address):
        from cluster.teardown import remove_cluster, retire_cluster

        interrupts.phase = Phase.RETIRING
        try:
            retire_cluster(shutdown_s)
        except KeyboardInterrupt:
            with suppress(OSError):  # the terminal may be gone
                typer.echo("stopping at once", err=True)
        finally:
            interrupts.phase = Phase.ENDING
        found = remove_cluster()
    typer.echo("stopped" if found else "no Tandem cluster runs there")

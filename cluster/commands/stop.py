"""`tandem stop`: ends a cluster that runs on a Ray cluster of somebody else."""

from __future__ import annotations

import typer

from cluster.commands.lib.options import RayAddress
from protocol.errors import ConfigError


def stop(address: RayAddress = None) -> None:
    """End the cluster on a Ray cluster (a local `tandem serve` ends with Ctrl-C)."""
    if address is None:
        raise ConfigError("name the Ray cluster with --address or RAY_ADDRESS", param="address")
    from cluster.ray.session import joined_ray

    with joined_ray(address):
        from cluster.teardown import remove_cluster

        found = remove_cluster()
    typer.echo("stopped" if found else "no Tandem cluster runs there")

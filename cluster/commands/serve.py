"""`tandem serve`: starts a cluster here, or on a Ray cluster, and shows what happens to its workers until Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.commands.lib.config_flags import ConfigFlags
from cluster.commands.lib.exits import UNAVAILABLE, say
from cluster.commands.lib.flag_groups import expand_flags
from cluster.commands.lib.options import RayAddress
from protocol.errors import UnavailableError


@expand_flags
def serve(
    *,
    config: Annotated[Path | None, typer.Option(help="YAML file; flags go before what it says.")] = None,
    overrides: Annotated[dict[str, Any], ConfigFlags()],
    address: RayAddress = None,
) -> None:
    """Start a cluster and serve it until Ctrl-C."""
    from cluster.commands.lib.foreground import serve_until_interrupted
    from configs.loader import load_config

    try:
        serve_until_interrupted(load_config(config, overrides), address)
    except UnavailableError as error:
        say(error)
        raise typer.Exit(UNAVAILABLE) from None

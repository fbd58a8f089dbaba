"""`tandem keep-gcs`: runs beside `ray start --head`. The work is done in `cluster.ray.gcs_guard`."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.ray.gcs_guard import guard_gcs


def keep_gcs(
    port: Annotated[int, typer.Option(help="The GCS's, as in `ray start --head --port`.")] = 6379,
) -> None:
    """Start the GCS of this Ray head node again whenever it ends; needs Redis (RAY_REDIS_ADDRESS at `ray start --head`)."""
    from telemetry.logging import setup_logging

    setup_logging("gcs-guard")
    guard_gcs(port)

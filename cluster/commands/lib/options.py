"""Options that several commands of `tandem` have: where the cluster answers, its keys, the Ray cluster."""

from __future__ import annotations

from typing import Annotated

import typer

DEFAULT_URL = "http://127.0.0.1:8000"

Url = Annotated[str, typer.Option("--url", envvar="TANDEM_URL", help="Where the cluster answers.")]
AdminKey = Annotated[
    str | None, typer.Option("--admin-key", envvar="TANDEM_ADMIN_KEY", help="Key for /admin.", show_envvar=True)
]
ApiKey = Annotated[str | None, typer.Option("--api-key", envvar="TANDEM_API_KEY", help="Key for /v1.", show_envvar=True)]
LONGEST_S = 7 * 86_400.0
"""Most seconds that a command may be told to wait."""
AsJson = Annotated[bool, typer.Option("--json", help="The API's answer as it is.")]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--address", envvar="RAY_ADDRESS", help="Ray cluster to join (host:port, or auto); otherwise Ray is started here."
    ),
]
